"""Small exports, packed straight by the methods and the format: a layer a shard, as a run's export lays them out."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tasks.methods import gptq, rtn
from tasks.methods.grid import QuantizedRows
from tasks.models.source import SourceModel
from tasks.quantization import GPTQConfig, RTNConfig
from tasks.schemes import LAYOUTS, layout_name


def write_packed(source: Path, output: Path, config: GPTQConfig | RTNConfig) -> dict[str, QuantizedRows]:
    """Quantize every linear of the model in `source` into the new directory `output`; what was packed, by name.

    GPTQ gets Hessians of random inputs: good enough for a layout, whose readers know nothing of them.
    """
    layout: Any = LAYOUTS[layout_name(config)]
    opened = SourceModel.open(str(source))
    weights = opened.load(opened.tensors)
    packed: dict[str, QuantizedRows] = {}
    shards: dict[str, dict[str, Tensor]] = {}
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        module = name.removesuffix(".weight")
        packed[module] = _quantized(weights.pop(name), config)
        shard = shards.setdefault(module.split(".")[2], {})
        bias = weights.pop(f"{module}.bias", None)
        shard |= layout.pack(module, packed[module], config, bias)
    for name in [name for name in weights if name.startswith("model.layers.")]:
        shards[name.split(".")[2]][name] = weights.pop(name)
    _write(source, output, [*shards.values(), weights], layout.quantization_config(config))
    return packed


def _quantized(weight_NK: Tensor, config: GPTQConfig | RTNConfig) -> QuantizedRows:
    if isinstance(config, RTNConfig):
        return rtn.quantize_rows(weight_NK, config)
    in_features = weight_NK.shape[1]
    generator = torch.Generator().manual_seed(in_features)
    mixing_KK = torch.randn(in_features, in_features, generator=generator)
    sums = gptq.HessianSum(in_features, "cpu")
    sums.add(torch.randn(2 * in_features, in_features, generator=generator) @ mixing_KK)
    return gptq.quantize_rows(weight_NK, gptq.factor_hessian(sums.hessian(), config), config)


def _write(source: Path, output: Path, shards: list[dict[str, Tensor]], described: dict[str, Any]) -> None:
    output.mkdir()
    weight_map = {}
    for number, tensors in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, output / file, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (output / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (output / "quantize_config.json").write_text(json.dumps(described))
    model_config = json.loads((source / "config.json").read_text()) | {"quantization_config": described}
    model_config |= {"torch_dtype": model_config["dtype"]}
    (output / "config.json").write_text(json.dumps(model_config))
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / file, output / file)
