"""Families of models as readers of .gguf files compute them: the architecture's name, and where it differs from llama.

Names of tensors are the `gguf` package's table for the architecture. What no file can say is built into llama.cpp: which
layers have a sliding window or no rotary embedding, how attention is scaled, which activation is computed. A model that
would be computed otherwise is refused with the reason; every family here is held to llama.cpp's own logits by the tests.

* llama, mistral, smollm3 and granite have rows of query and key rearranged within heads; the others rotate halves too.
* gemma multiplies by 1 + its norms' weights; files hold the sum.
* Only gemma2 and gemma3 have sliding windows there. For others the context that a file gives ends with the window, up to
  which both compute the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

ROPE_TYPES = frozenset({"default", "linear", "llama3"})
# Layers of those models whose attention readers scale by another width than a head's: they are told by their depth.
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
NO_ROPE_STEP = 4
# Architectures that transformers 5.24.0 computes from a .gguf file as llama.cpp does, with plain rotary embeddings.
READ_BY_TRANSFORMERS = frozenset({"llama", "phi3", "qwen2", "qwen3", "stablelm", "starcoder2"})
# What it does not look for in the file.
QWEN3_HEAD, PHI3_PADDING = 128, 32000


@dataclass(frozen=True)
class Family:
    """What a .gguf file's architecture has in common with llama, and what not."""

    architecture: str
    rearranges_heads: bool = False
    norm_offset: float = 0.0
    activations: tuple[str, ...] = ("silu",)
    rope_types: frozenset[str] = frozenset({"default", "linear"})
    norm_eps: str = "rms_norm_eps"
    # The file's names, within a layer or without, of modules that may have a bias: of others readers would not see it.
    biases: frozenset[str] = frozenset()
    # Whether the head may be the embedding, and whether it may be another tensor: readers want it so.
    can_tie: bool = True
    can_untie: bool = True
    # Whether every layer is a mixture of experts, and whether the weights of those that a token goes to are divided by
    # their sum; None where config.json has no word for it.
    has_experts: bool = False
    normalizes_experts: bool | None = None
    # Of how many layers in a row all but the last have a sliding window; 0 where no layer has one.
    window_pattern: int = 0


QKV = frozenset({"attn_q", "attn_k", "attn_v"})
FEED_FORWARD = frozenset({"ffn_gate", "ffn_up", "ffn_down"})
OF_LLAMA = QKV | FEED_FORWARD | {"attn_output"}
NORMS = frozenset({"attn_norm", "ffn_norm", "output_norm"})
GELU = ("gelu_pytorch_tanh",)
FAMILIES = {
    "llama": Family("llama", rearranges_heads=True, rope_types=ROPE_TYPES, biases=OF_LLAMA),
    "mistral": Family("llama", rearranges_heads=True),
    "mixtral": Family("llama", rearranges_heads=True, has_experts=True),
    "olmoe": Family("olmoe", has_experts=True, normalizes_experts=False, can_tie=False),
    "qwen3_moe": Family("qwen3moe", has_experts=True, normalizes_experts=True),
    "qwen2": Family("qwen2", biases=QKV),
    "qwen3": Family("qwen3"),
    "phi3": Family("phi3"),
    "olmo2": Family("olmo2", can_tie=False),
    "smollm3": Family("smollm3", rearranges_heads=True),
    "granite": Family("granite", rearranges_heads=True, biases=OF_LLAMA),
    "gemma": Family("gemma", norm_offset=1.0, activations=GELU, can_untie=False),
    "gemma2": Family("gemma2", norm_offset=1.0, activations=GELU, can_untie=False, window_pattern=2),
    "gemma3_text": Family("gemma3", norm_offset=1.0, activations=GELU, can_untie=False, window_pattern=6),
    "starcoder2": Family("starcoder2", activations=GELU, norm_eps="norm_epsilon", biases=OF_LLAMA | NORMS),
    "stablelm": Family("stablelm", norm_eps="layer_norm_eps", biases=QKV | NORMS, can_tie=False),
}


def family_of(model_config: Mapping[str, Any]) -> Family:
    """The family of a `config.json`; ValueError, naming those that are known, for another."""
    family = FAMILIES.get(str(model_config.get("model_type")))
    if family is None:
        raise ValueError(f"gguf export knows {', '.join(sorted(FAMILIES))}, not {model_config.get('model_type')!r}")
    return family


def problems(model_config: Mapping[str, Any]) -> Iterator[str]:
    """Why readers would compute another model than this one, one sentence each."""
    try:
        family = family_of(model_config)
    except ValueError as error:
        yield str(error)
        return
    rope = rope_parameters(model_config)
    if rope["rope_type"] not in family.rope_types:
        yield f"gguf export knows rotary types {', '.join(sorted(family.rope_types))}, not {rope['rope_type']!r}"
    activation = model_config.get("hidden_activation" if family.window_pattern else "hidden_act", "silu")
    if activation not in family.activations:
        yield (
            f"readers of {family.architecture} .gguf files compute {family.activations[0]} whatever the file says; this "
            f"model uses {activation!r}"
        )
    is_tied = bool(model_config.get("tie_word_embeddings"))
    if not (family.can_tie if is_tied else family.can_untie):
        readers = f"readers of {family.architecture} .gguf files"
        if is_tied:
            yield f"{readers} want a head beside the embedding, and this model's is tied to it (tie_word_embeddings)"
        else:
            yield f"{readers} take the embedding for the head, and this model has another (tie_word_embeddings)"
    yield from _attention_problems(family, model_config)
    if family.has_experts:
        yield from _expert_problems(family, model_config)


def _expert_problems(family: Family, config: Mapping[str, Any]) -> Iterator[str]:
    readers = f"readers of {family.architecture} .gguf files"
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        yield f"{readers} want experts in every layer; this model has dense layers (mlp_only_layers, decoder_sparse_step)"
    wanted = family.normalizes_experts
    if wanted is not None and bool(config.get("norm_topk_prob")) != wanted:
        yield f"{readers} take norm_topk_prob for {str(wanted).lower()}, whatever the file says; this model has it otherwise"
    heads = config["num_attention_heads"]
    if family.architecture == "olmoe" and (config.get("num_key_value_heads") or heads) != heads:
        yield f"{readers} want as many key-value heads as heads; this model has {config['num_key_value_heads']} for {heads}"
    if config.get("clip_qkv") is not None:
        yield f"{readers} clip no values of attention; this model does (clip_qkv)"


def _attention_problems(family: Family, config: Mapping[str, Any]) -> Iterator[str]:
    readers = f"readers of {family.architecture} .gguf files"
    layers = config["num_hidden_layers"]
    if family.window_pattern:
        pattern = family.window_pattern
        expected = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)]
        if config.get("layer_types", expected) != expected:
            yield f"{readers} give every layer a sliding window but each {_ordinal(pattern)}; `layer_types` differ"
        is_27b = layers == LAYERS_OF_27B[family.architecture]
        scalar = config["hidden_size"] / config["num_attention_heads"] if is_27b else head_size(config)
        if config.get("query_pre_attn_scalar", scalar) != scalar:
            yield (
                f"{readers} scale attention by {scalar:g}, whatever the file says; this model has query_pre_attn_scalar "
                f"{config['query_pre_attn_scalar']}"
            )
    if family.architecture == "gemma2" and not all(
        config.get(f"{name}_logit_softcapping") for name in ("attn", "final")
    ):
        yield f"{readers} cap the logits of attention and head; this model does not cap both"
    if family.architecture == "gemma3":
        local = rope_parameters(config, "sliding_attention")
        if (local["rope_type"], local["rope_theta"]) != ("default", 10000.0):
            yield f"{readers} rotate layers with a window by 10000, unscaled; this model by {local}"
        if config.get("final_logit_softcapping") or config.get("attn_logit_softcapping"):
            yield f"{readers} cap no logits; this model does"
        if config.get("use_bidirectional_attention"):
            yield f"{readers} look back only; this model looks both ways"
    if family.architecture == "smollm3":
        expected_rope = [int((i + 1) % NO_ROPE_STEP != 0) for i in range(layers)]
        if config.get("no_rope_layers", expected_rope) != expected_rope:
            yield f"{readers} rotate every layer but each {_ordinal(NO_ROPE_STEP)}; `no_rope_layers` differ"
    if family.architecture == "stablelm" and config.get("qk_layernorm"):
        yield "gguf export knows stablelm without qk_layernorm only"
    if family.architecture == "starcoder2" and not config.get("use_bias", True):
        yield f"{readers} want biases everywhere; this model has none"


def lost_in_transformers(
    architecture: str, *, has_experts: bool, head_columns: int, rotated: int, scales_rotary: bool, vocabulary: int
) -> str | None:
    """What of a .gguf file, as one says of it, transformers 5.24.0 leaves out or takes otherwise; None for nothing."""
    if architecture not in READ_BY_TRANSFORMERS:
        return f"is of the architecture {architecture}"
    if has_experts:
        return "is a mixture of experts"
    if scales_rotary:
        return "scales its rotary embeddings"
    if architecture == "qwen3" and head_columns != QWEN3_HEAD:
        return f"has heads of {head_columns} columns, where {QWEN3_HEAD} are taken for granted"
    if architecture == "phi3" and vocabulary <= PHI3_PADDING:
        return f"has {vocabulary} tokens, none of them number {PHI3_PADDING}, the padding that is taken for granted"
    if rotated != (head_columns // 4 if architecture == "stablelm" else head_columns):
        return f"rotates {rotated} columns of each head"
    return None


def _ordinal(number: int) -> str:
    return {2: "second", 4: "fourth", 6: "sixth"}[number]


def experts_of(model_config: Mapping[str, Any]) -> int:
    """How many experts a layer has; 0 for a dense model."""
    names = ("num_local_experts", "num_experts")
    return next((model_config[name] for name in names if isinstance(model_config.get(name), int)), 0)


def window_of(model_config: Mapping[str, Any]) -> int | None:
    """The tokens that a layer with a sliding window sees, where the model has any; None without."""
    window = model_config.get("sliding_window")
    types = model_config.get("layer_types")
    is_off = model_config.get("use_sliding_window") is False or (types and "sliding_attention" not in types)
    return None if is_off or not isinstance(window, int) or window < 1 else window


def context_length(model_config: Mapping[str, Any]) -> int:
    """The tokens up to which readers compute this model: its context, or its window where they know none."""
    length: int = model_config.get("max_position_embeddings", 2048)
    window = window_of(model_config)
    return length if window is None or family_of(model_config).window_pattern else min(length, window)


def head_size(model_config: Mapping[str, Any]) -> int:
    """Columns of one attention head."""
    return model_config.get("head_dim") or model_config["hidden_size"] // model_config["num_attention_heads"]


def rope_parameters(model_config: Mapping[str, Any], layer_type: str = "full_attention") -> dict[str, Any]:
    """Rotary parameters from either spelling of config.json, with `rope_type` and `rope_theta` always in them.

    Where the model rotates layers of several types differently, those of `layer_type`.
    """
    found = dict(model_config.get("rope_parameters") or model_config.get("rope_scaling") or {})
    if isinstance(found.get(layer_type), Mapping):
        found = dict(found[layer_type])
    elif layer_type == "sliding_attention" and "rope_local_base_freq" in model_config:
        found = {"rope_theta": model_config["rope_local_base_freq"]}
    found.setdefault("rope_type", found.get("type", "default"))
    found.setdefault("rope_theta", model_config.get("rope_theta") or 10000.0)
    return found


def rotated_columns(model_config: Mapping[str, Any]) -> int:
    """Columns of a head that are rotated."""
    rope = rope_parameters(model_config)
    share = rope.get("partial_rotary_factor") or model_config.get("partial_rotary_factor") or 1.0
    return int(head_size(model_config) * share)


def add_metadata(writer: Any, model_config: Mapping[str, Any], vocab_size: int) -> None:
    """What readers need to compute the model, in the order of the file."""
    family = family_of(model_config)
    heads, size = model_config["num_attention_heads"], head_size(model_config)
    writer.add_vocab_size(vocab_size)
    writer.add_context_length(context_length(model_config))
    writer.add_embedding_length(model_config["hidden_size"])
    writer.add_block_count(model_config["num_hidden_layers"])
    writer.add_feed_forward_length(model_config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(model_config.get("num_key_value_heads") or heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    if family.norm_eps == "rms_norm_eps":
        writer.add_layer_norm_rms_eps(model_config.get("rms_norm_eps", 1e-6))
    else:
        writer.add_layer_norm_eps(model_config[family.norm_eps])
    rope = rope_parameters(model_config)
    writer.add_rope_dimension_count(rotated_columns(model_config))
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        from gguf import RopeScalingType

        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    _add_own(writer, family, model_config)


def _add_own(writer: Any, family: Family, config: Mapping[str, Any]) -> None:
    if family.has_experts:
        writer.add_expert_count(experts_of(config))
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if family.architecture == "qwen3moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if family.window_pattern and (window := window_of(config)) is not None:
        writer.add_sliding_window(window)
    if family.architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if family.architecture == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if family.architecture == "stablelm":
        writer.add_parallel_residual(bool(config["use_parallel_residual"]))
    if family.architecture == "phi3":
        # Readers scale long contexts by it where a file has factors for them, and want it in any case.
        writer.add_rope_scaling_orig_ctx_len(
            config.get("original_max_position_embeddings", config["max_position_embeddings"])
        )
        writer.add_sliding_window(0)
