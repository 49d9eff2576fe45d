"""Exports packed straight by methods and layouts, and what transformers makes of them on the CPU.

"It loaded" proves nothing: wrong layouts load too, and give garbage. So a test asks for the keys that were missing or
unexpected, for the linears that were replaced, and for the logits beside those of a dense model whose weights are our
own reading of the same file.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

TOKENS_BT = (torch.arange(3 * 40) * 37 % 311).reshape(3, 40)


class Rows(Protocol):
    def dequantize(self) -> Tensor: ...


class Loaded(NamedTuple):
    """What transformers made of an export: the class of each decoder linear, its tensors before the first forward (some
    clients widen them then), and the logits.
    """

    classes: dict[str, type[nn.Module]]
    tensors: dict[str, Tensor]
    logits: Tensor


def write_export(source: Path, output: Path, layout: Any, config: Any, quantize: Callable[[Tensor, Any], Rows]) -> Path:
    """Quantize every linear of the decoder layers in `source` into the new directory `output`."""
    shutil.copytree(source, output)
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        module = name.removesuffix(".weight")
        rows = quantize(tensors.pop(name), config)
        tensors |= layout.pack(module, rows, config, tensors.pop(f"{module}.bias", None))
    save_file(tensors, output / "model.safetensors", {"format": "pt"})
    described = json.loads((source / "config.json").read_text())
    described |= {"quantization_config": layout.quantization_config(config), "torch_dtype": described["dtype"]}
    (output / "config.json").write_text(json.dumps(described))
    return output


def load(output: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Loaded:
    """What transformers makes of `output`; AssertionError for missing, unexpected or mismatched keys."""
    model, info = AutoModelForCausalLM.from_pretrained(output, dtype=dtype, output_loading_info=True, **options)
    assert not any(info.values()), info
    classes = {name: type(module) for name, module in model.named_modules() if name.endswith("_proj")}
    assert len(classes) == 7 * model.config.num_hidden_layers
    tensors = {
        name: tensor.detach().clone()
        for name, tensor in model.named_parameters()
        if any(name.startswith(f"{module}.") for module in classes)
    }
    return Loaded(classes, tensors, logits(model.eval()))


def dense(
    output: Path,
    layout: Any,
    config: Any,
    dtype: torch.dtype = torch.float32,
    reader_dtype: torch.dtype = torch.float32,
) -> LlamaForCausalLM:
    """The model of `output` with plain linears, their weights what `unpack` reads in the file, rounded to
    `reader_dtype` where a client multiplies codes and scales in that.
    """
    model_config = LlamaConfig.from_pretrained(output)
    del model_config.quantization_config
    model = LlamaForCausalLM(model_config).to(dtype).eval()
    tensors = load_file(output / "model.safetensors")
    state = {}
    for name in model.state_dict():
        module = name.removesuffix(".weight")
        if module.endswith("_proj"):
            state[name] = layout.unpack(tensors, module, config).dequantize().to(reader_dtype)
        elif name in tensors:
            state[name] = tensors[name].float()
    model.load_state_dict(state, strict="lm_head.weight" in tensors)
    model.tie_weights()
    return model


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(TOKENS_BT).logits.float()


def relative_difference(logits_BTV: Tensor, expected_BTV: Tensor) -> float:
    """Norm of the difference over the norm of what was expected."""
    return float((logits_BTV - expected_BTV).norm() / expected_BTV.norm())
