"""FP8 copies of saved models, as DeepSeek and Qwen publish them, and what their weights are in bfloat16."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
LARGEST = 448.0


def write_fp8(
    dense: Path,
    path: Path,
    *,
    block: tuple[int, int] | None = (128, 128),
    scale_dtype: torch.dtype = torch.float32,
    also: tuple[str, ...] = (),
    **described: Any,
) -> dict[str, Tensor]:
    """Write `dense` with its projections (and the modules in `also`) in FP8 to the new directory `path`; all weights, wide.

    Values lie in the first shard, all scales in the second. Without a block each row has a scale. `described` goes to
    its `quantization_config`. What comes back is computed from the scales spread out by numpy's rule, kron.
    """
    path.mkdir()
    tensors = load_file(dense / "model.safetensors")
    wide, scales = dict(tensors), {}
    for name, weight_NK in tensors.items():
        if weight_NK.dim() == 2 and (name.endswith("_proj.weight") or name.removesuffix(".weight") in also):
            values_NK, scales_RC, spread_NK = scaled(weight_NK.float(), block, scale_dtype)
            tensors[name], scales[f"{name}_scale_inv"] = values_NK, scales_RC
            wide[name] = (values_NK.float() * spread_NK).to(torch.bfloat16)
    write_shards(path, tensors, scales)
    layout = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block and list(block)}
    write_beside(dense, path, {**layout, "modules_to_not_convert": ["lm_head"], **described})
    return wide


def scaled(weight_NK: Tensor, block: tuple[int, int] | None, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """float8 values, scales that are no powers of two, and these spread over the matrix in float32."""
    rows, columns = weight_NK.shape
    height, width = block or (1, columns)
    down, across = -(-rows // height), -(-columns // width)
    generator = torch.Generator().manual_seed(rows)
    scales_RC = torch.empty(down, across)
    for r in range(down):
        for c in range(across):
            part = weight_NK[r * height : (r + 1) * height, c * width : (c + 1) * width]
            scales_RC[r, c] = part.abs().max() / LARGEST * (1 + torch.rand(1, generator=generator))
    scales_RC = scales_RC.to(scale_dtype)
    spread_NK = torch.kron(scales_RC.float(), torch.ones(height, width))[:rows, :columns]
    values_NK = (weight_NK / spread_NK).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return values_NK, scales_RC, spread_NK


def write_wide(dense: Path, path: Path, wide: dict[str, Tensor]) -> Path:
    """The model of these weights, plain, in the new directory `path`."""
    path.mkdir()
    save_file(wide, path / "model.safetensors", {"format": "pt"})
    write_beside(dense, path, None)
    return path


def write_shards(path: Path, *shards: dict[str, Tensor]) -> None:
    """Two shards and their index."""
    places = {}
    for file, tensors in zip(SHARDS, shards, strict=True):
        save_file(tensors, path / file, {"format": "pt"})
        places |= dict.fromkeys(tensors, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def write_beside(dense: Path, path: Path, described: dict[str, Any] | None) -> None:
    """The files of `dense` but its weights, with this `quantization_config`."""
    for file in dense.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, path / file.name)
    config = json.loads((dense / "config.json").read_text())
    if described is not None:
        config["quantization_config"] = described
    (path / "config.json").write_text(json.dumps(config))


def change_shard(path: Path, number: int, **changes: Tensor | None) -> None:
    """Replace, add or (None) remove tensors of one shard, and name them in the index accordingly."""
    shards = [load_file(path / file) for file in SHARDS]
    for name, tensor in changes.items():
        shards[number].pop(name, None)
        if tensor is not None:
            shards[number][name] = tensor
    write_shards(path, *shards)
