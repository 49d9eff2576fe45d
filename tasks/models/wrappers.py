"""Models that wrap a text model and what they see by: the text model is quantized, everything else carried through.

What they have of their own is in transformers' code, and in none of ours.
"""

from collections.abc import Collection, Iterator

from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

# Those that are tested.
WRAPPERS = frozenset({"gemma3", "llava", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_vl"})
# Families of text models that are found in wrappers only.
INNER = frozenset({"qwen2_5_vl_text", "qwen2_vl_text", "qwen3_vl_text"})


def text_model_refusal(config: PreTrainedConfig, supported: Collection[str]) -> str | None:
    """Why the text model inside this configuration is not supported; None where it is, or is the model itself.

    `supported` are the families of text models that are known by themselves.
    """
    inner, known = config.get_text_config(), {*supported, *INNER}
    if inner is config or inner.model_type in known:
        return None
    return (
        f"it is a {config.model_type!r} that wraps a text model of model_type {inner.model_type!r}; supported inside are: "
        f"{', '.join(sorted(known))}"
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
