"""The families that are tested: text models, and models that wrap one. What they have of their own is in transformers' code, and
in none of ours; how the files of some stack their experts is told in `stacked_experts`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

SUPPORTED = frozenset(
    {
        "afmoe", "apertus", "apertus1p5_text", "arcee", "axk1", "bamba", "beam", "biogpt", "bloom", "codegen",
        "cohere", "cohere2", "cohere2_moe", "cwm", "deepseek_v2", "deepseek_v3", "deepseek_v32", "diffllama", "doge",
        "dots1", "ernie4_5", "ernie4_5_moe", "exaone", "exaone4", "exaone_moe", "falcon", "falcon_h1", "falcon_mamba",
        "flex_olmo", "flint", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite",
        "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gpt_oss", "gptj", "granite", "granite_swa",
        "granitemoehybrid", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3",
        "iquestcoder", "jais2", "jamba", "kolibri1", "laguna", "lfm2", "lfm2_moe", "lfm3", "llama", "mamba", "mellum",
        "mimo_v2_flash", "minicpm3", "minimax", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "mpt",
        "nanochat", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3",
        "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next",
        "sarvam_mla", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma", "youtu",
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


def outside(model: PreTrainedModel, front: nn.Module) -> Iterator[str]:
    """Names of the modules beside the text model `front` and the head, each as high up as it can be."""
    kept = {id(front), id(model.get_output_embeddings())}
    around = {id(module) for module in model.modules() if kept & {id(inner) for inner in module.modules()}}
    for name, module in model.named_modules():
        if id(module) in around - kept:
            for child_name, child in module.named_children():
                if id(child) not in around:
                    yield f"{name}.{child_name}" if name else child_name
