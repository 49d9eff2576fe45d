"""MXFP4 copies of tiny gpt_oss models, as OpenAI publishes them: random blocks and scales for the experts' weights."""

import shutil
from pathlib import Path
from tempfile import mkdtemp

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.fp8_models import write_beside

DESCRIBED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
STACKS = ("gate_up_proj", "down_proj")


def write_mxfp4(dense: Path, path: Path, **described: object) -> Path:
    """Write `dense`, plain, with its experts' weights as random MXFP4 to the new directory `path`, and return it."""
    path.mkdir()
    tensors = load_file(dense / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(STACKS)]:
        count, in_features, out_features = tensors.pop(name).shape
        shape = (count, out_features, in_features // 32)
        # Every code, and scales that make weights of about a tenth.
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 125, shape, generator=generator, dtype=torch.uint8)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    write_beside(dense, path, DESCRIBED | described)
    return path


def change(path: Path, **tensors: Tensor | None) -> Path:
    """Replace, add or (None) remove tensors of the first layer's experts in a copy of the model; where the copy is."""
    copy = Path(mkdtemp(dir=path.parent)) / "model"
    shutil.copytree(path, copy)
    held = load_file(copy / "model.safetensors")
    for name, tensor in tensors.items():
        full = f"model.layers.0.mlp.experts.{name}"
        held.pop(full, None)
        if tensor is not None:
            held[full] = tensor
    save_file(held, copy / "model.safetensors", {"format": "pt"})
    return copy
