"""Which families are tested, and the class that transformers loads a configuration by; what families have of their own is in
transformers' code, and in none of ours.
"""

from collections.abc import Mapping
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

SUPPORTED = frozenset(
    {
        "apertus", "arcee", "cohere", "cohere2", "deepseek_v3", "ernie4_5", "exaone4", "falcon", "gemma", "gemma2",
        "gemma3_text", "glm", "glm4", "glm4_moe", "gpt_neox", "granite", "hunyuan_v1_dense", "llama", "mistral",
        "mixtral", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "persimmon", "phi", "phi3", "phimoe", "qwen2",
        "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma",
    }
)  # fmt: skip
# Models that wrap a text model and what they see by: the text model is quantized, everything else carried through.
WRAPPERS = frozenset({"gemma3", "llava", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_vl"})
# Families of text models that are found in wrappers only.
INNER = frozenset({"qwen2_5_vl_text", "qwen2_vl_text", "qwen3_vl_text"})


def is_supported(model_type: object) -> bool:
    """Whether a config.json with this `model_type`, which may be anything, is of a family that is known here."""
    return isinstance(model_type, str) and (model_type in SUPPORTED or model_type in WRAPPERS)


def refusal(config: Mapping[str, Any]) -> str | None:
    """Why a model of this config.json is not supported, as far as its own `model_type` tells; None where it is."""
    family = config.get("model_type")
    if is_supported(family):
        return None
    wraps = "" if "text_config" not in config else f", with a text model inside {', '.join(sorted(WRAPPERS))}"
    return f"its model_type is {family!r}; supported are: {', '.join(sorted(SUPPORTED))}{wraps}"


def text_model_refusal(config: PreTrainedConfig) -> str | None:
    """Why the text model inside this configuration is not supported; None where it is, or is the model itself."""
    inner = config.get_text_config()
    if inner is config or inner.model_type in SUPPORTED | INNER:
        return None
    return (
        f"it is a {config.model_type!r} that wraps a text model of model_type {inner.model_type!r}; supported inside are: "
        f"{', '.join(sorted(SUPPORTED | INNER))}"
    )


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class with a head for text: for causal language models, else the one that also takes images."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if type(config) in mapping:
            found: type[PreTrainedModel] = mapping[type(config)]
            return found
    raise ValueError(f"transformers has no language model with a head for {config.model_type!r}")
