"""A tiny random model of every family that is said to be supported, as transformers saves it, with a real tokenizer."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny_models import tiny_tokenizer

WINDOW = 8  # shorter than any sequence in the tests
COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}
MIXED_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
# What makes each family what it is, at this size: layers of several types wherever it can have them.
FAMILIES: dict[str, dict[str, Any]] = {
    "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "arcee": {},
    "cohere": {},
    "cohere2": {"sliding_window": WINDOW, "layer_types": MIXED_TYPES},
    "deepseek_v3": {
        **ROUTED, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "num_key_value_heads": 4, "kv_lora_rank": 32,
        "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 24, "v_head_dim": 16,
    },
    "ernie4_5": {},
    "exaone4": {"sliding_window": WINDOW, "layer_types": MIXED_TYPES},
    "falcon": {},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    "gemma3_text": {
        "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16, "layer_types": MIXED_TYPES,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
        },
    },
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "glm4_moe": {**ROUTED, "n_group": 1, "topk_group": 1, "head_dim": 16, "use_qk_norm": True},
    "gpt_neox": {},
    "gpt_oss": {
        "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": 16,
        "sliding_window": WINDOW, "layer_types": MIXED_TYPES,
    },
    "granite": {
        "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0,
    },
    "hunyuan_v1_dense": {"head_dim": 16},
    "llama": {},
    "mistral": {"sliding_window": WINDOW, "head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": WINDOW, "layer_types": MIXED_TYPES},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen2_moe": {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1],
        "shared_expert_intermediate_size": 64,
    },
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "seed_oss": {"head_dim": 16},
    "smollm3": {
        "no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": WINDOW, "layer_types": MIXED_TYPES,
    },
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True},
    "starcoder2": {"sliding_window": WINDOW, "use_bias": True},
    "vaultgemma": {"head_dim": 16, "sliding_window": WINDOW, "layer_types": MIXED_TYPES, "query_pre_attn_scalar": 16},
}  # fmt: skip


def write_tiny(family: str, path: Path, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **config: Any) -> Path:
    """Write a random model of `family` to the new directory `path` and return it: config, safetensors, tokenizer.

    Weights depend on the options and `seed` only; no tensor is zero or one throughout, where a lost one would not show.
    `config` goes to the family's configuration as it is.
    """
    tokenizer = tiny_tokenizer()
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    described = AutoConfig.for_model(family, **(COMMON | special | FAMILIES[family] | config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(described)
        for name, tensor in model.state_dict().items():
            # Weights larger than usual: neither attention nor routing must be uniform.
            is_norm = "norm" in name and name.endswith("weight")
            torch.nn.init.normal_(tensor, mean=1.0 if is_norm else 0.0, std=0.1)
    model.to(dtype).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
