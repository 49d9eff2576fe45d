"""Models of the families that gguf export knows, at sizes and with layers in which each is computed as its readers do."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from tasks.formats import gguf as layout
from tasks.formats.gguf_plan import TensorPlan
from tasks.gguf_scheme import GGUFScheme
from tasks.models.source import SourceModel
from tasks.quantization import GGUFConfig
from tests.tiny_families import WINDOW, write_tiny

SMOLLM3_ROPE = [1, 1, 1, 0, 1]
GEMMA3_TYPES = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": None}),
    "mixtral": ("mixtral", {"sliding_window": None}),
    "olmoe": ("olmoe", {"num_experts": 12, "num_key_value_heads": 4}),
    "qwen3_moe": ("qwen3_moe", {"mlp_only_layers": [], "num_experts": 12}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen2 tied": ("qwen2", {"use_sliding_window": False, "tie_word_embeddings": True}),
    "qwen2 linear": (
        "qwen2",
        {"use_sliding_window": False, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "qwen3": ("qwen3", {"head_dim": 128}),
    "phi3": ("phi3", {"sliding_window": None, "vocab_size": 32064}),  # transformers' reader takes its padding for granted
    "olmo2": ("olmo2", {}),
    "smollm3": (
        "smollm3",
        {"num_hidden_layers": 5, "no_rope_layers": SMOLLM3_ROPE, "use_sliding_window": False, "sliding_window": None,
         "layer_types": ["full_attention"] * 5},
    ),
    "granite": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "granite tied": ("granite", {"tie_word_embeddings": True}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "gemma3_text": (
        "gemma3_text",
        {"num_hidden_layers": 7, "layer_types": GEMMA3_TYPES, "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        }},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "stablelm": ("stablelm", {"qk_layernorm": False, "use_parallel_residual": False}),
    "stablelm parallel": ("stablelm", {"qk_layernorm": False, "use_qkv_bias": False}),
}  # fmt: skip
assert WINDOW < 24  # what the tests ask of layers with a window


def write_model(name: str, path: Path) -> Path:
    family, options = MODELS[name]
    return write_tiny(family, path, **options)


def write_gguf(source_path: Path, target: Path, quant_type: Any = "q8_0") -> dict[str, Tensor]:
    """Write `source_path` as `target`; the dense weights by their source names, as we say readers see them."""
    source = SourceModel.open(str(source_path))
    scheme = GGUFScheme(GGUFConfig(quant_type=quant_type), source)
    dense: dict[str, Tensor] = {}

    def load(entry: TensorPlan) -> Tensor:
        if entry.source is None:
            return layout.rope_factors(scheme.model_config)
        weight = source.load([entry.source])[entry.source]
        encoded = layout.encode_all((entry,), {entry.source: weight})[0][entry.name]
        dense[entry.source] = layout.decode(entry, encoded)
        # Readers are compared with what is decoded here, so that must be the source's: rows in order, without offsets.
        assert float((dense[entry.source] - weight.float()).norm() / weight.float().norm()) < 0.1, entry
        return encoded

    file = layout.make_file(scheme.plan, scheme.model_config, scheme.tokenizer())
    with open(target, "wb") as written:
        for piece in file.pieces(load):
            written.write(piece)
    return dense


def dense_of(source_path: Path, dense: dict[str, Tensor]) -> Any:
    """transformers' model with these weights, in float32."""
    config = AutoConfig.from_pretrained(source_path)
    model, told = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None, config=config, state_dict=dense, dtype=torch.float32, output_loading_info=True
    )
    assert not any(told.values()), told
    return model.eval()
