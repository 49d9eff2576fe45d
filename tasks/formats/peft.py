"""A LoRA adapter as the peft package, GPTQModel and vLLM load it, in a directory of its own beside the model's files.

    adapter/adapter_config.json          which modules, rank and scale
    adapter/adapter_model.safetensors    base_model.model.<module>.lora_A.weight [R, K], ....lora_B.weight [N, R]

Outputs get `lora_alpha / r * x A^T B^T` added; the two are equal here. It lies in a subdirectory, since transformers takes
a directory with an `adapter_config.json` for an adapter without a model.

Shape suffixes: N out_features, K in_features, R rank.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

DIRECTORY = "adapter"
CONFIG_FILE = f"{DIRECTORY}/adapter_config.json"
TENSORS_FILE = f"{DIRECTORY}/adapter_model.safetensors"
PREFIX = "base_model.model."


def pack(name: str, a_RK: Tensor, b_NR: Tensor) -> dict[str, Tensor]:
    """The tensors of one module, by its full name, under their final names."""
    return {f"{PREFIX}{name}.lora_A.weight": a_RK, f"{PREFIX}{name}.lora_B.weight": b_NR}


def packed_bytes(in_features: int, out_features: int, rank: int, itemsize: int) -> int:
    """Bytes of the tensors that `pack` makes of one module."""
    return rank * (in_features + out_features) * itemsize


def adapter_config(rank: int, tensors: Iterable[str], has_towers: bool = False) -> dict[str, Any]:
    """What adapter_config.json holds, for these names of tensors; the base model is named by whoever loads it.

    With towers beside the text model, where modules of the same names are, these are told in full.
    """
    modules = {name.removeprefix(PREFIX).rsplit(".", 2)[0] for name in tensors}
    return {
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted(modules if has_towers else {name.rpartition(".")[2] for name in modules}),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
