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
RECURRENT_TYPES = ["linear_attention", "full_attention", "linear_attention"]
CONVOLVED_TYPES = ["conv", "full_attention", "conv"]
SPARSE_TYPES = ["dense", "sparse", "sparse"]
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 24,
    "v_head_dim": 16,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA_NET = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "head_dim": 16, "layer_types": RECURRENT_TYPES,
}  # fmt: skip
MAMBA2 = {
    "mamba_d_state": 16, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2, "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}  # fmt: skip
INDEXER = {"index_head_dim": 16, "index_n_heads": 4, "index_topk": 8}
GRANITE = {"embedding_multiplier": 3.3, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0}
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
# The same of families whose shared tests are the replay, the plan and the quantizing of a layer.
FURTHER: dict[str, dict[str, Any]] = {
    "afmoe": {
        **EXPERTS, "num_dense_layers": 1, "head_dim": 16, "sliding_window": WINDOW, "layer_types": MIXED_TYPES,
        "mup_enabled": True,
    },
    "apertus1p5_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "axk1": {**ROUTED, **LATENT, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "mlp_layer_types": SPARSE_TYPES},
    "bamba": {**MAMBA2, "attn_layer_indices": [1]},
    "beam": {
        **EXPERTS, "head_dim": 16, "n_group": 2, "topk_group": 1, "sliding_window": WINDOW, "layer_types": MIXED_TYPES,
        "mlp_layer_types": SPARSE_TYPES,
    },
    "biogpt": {"pad_token_id": 1},
    "bloom": {},
    "codegen": {"rotary_dim": 8},
    "cohere2_moe": {"num_experts": 8, "num_experts_per_tok": 2, "sliding_window": WINDOW, "layer_types": MIXED_TYPES},
    "cwm": {"head_dim": 16, "sliding_window": WINDOW, "layer_types": MIXED_TYPES},
    "deepseek_v2": {
        **ROUTED, **LATENT, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "topk_method": "group_limited_greedy",
    },
    "deepseek_v32": {
        **ROUTED, **LATENT, **INDEXER, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
        "mlp_layer_types": SPARSE_TYPES,
    },
    "diffllama": {},
    "doge": {"num_key_value_heads": 4},
    "dots1": {
        **ROUTED, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "head_dim": 16, "sliding_window": WINDOW,
        "layer_types": MIXED_TYPES,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "exaone": {},
    "exaone_moe": {
        **EXPERTS, "n_group": 1, "topk_group": 1, "head_dim": 16, "sliding_window": WINDOW, "layer_types": MIXED_TYPES,
        "mlp_layer_types": SPARSE_TYPES,
    },
    "falcon_h1": {
        **MAMBA2, "mamba_d_ssm": 128, "embedding_multiplier": 3.3, "ssm_multipliers": [0.5, 2.0, 0.7, 1.5, 0.3],
        "mlp_multipliers": [0.5, 2.0], "key_multiplier": 0.5, "ssm_in_multiplier": 0.7,
    },
    "falcon_mamba": {"state_size": 16},
    "flex_olmo": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32},
    "flint": {
        **EXPERTS, "shared_expert_intermediate_size": 64, "head_dim": 16, "sliding_window": WINDOW,
        "layer_types": MIXED_TYPES, "mlp_only_layers": [1],
    },
    "glm4_moe_lite": {
        **ROUTED, **LATENT, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "mlp_layer_types": SPARSE_TYPES,
    },
    "gpt_bigcode": {},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]], "window_size": WINDOW},
    "gpt_neox_japanese": {},
    "gptj": {"rotary_dim": 8},
    "granite_swa": {
        **GRANITE, "sliding_window": WINDOW, "layer_types": MIXED_TYPES, "layer_rope_theta": [100.0, 0.0, 10000.0],
    },
    "granitemoehybrid": {
        **MAMBA2, **GRANITE, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0,
        "shared_intermediate_size": 128,
    },
    "helium": {"head_dim": 16},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2, "head_dim": 16, "intermediate_size": 32},
    "hy_v3": {**EXPERTS, "head_dim": 16, "mlp_layer_types": SPARSE_TYPES},
    "hyperclovax": {},
    "internlm3": {},
    "iquestcoder": {},
    "jais2": {"head_dim": 16},
    "jamba": {
        "num_experts": 8, "attn_layer_period": 3, "attn_layer_offset": 2, "expert_layer_period": 2,
        "expert_layer_offset": 1, "mamba_d_state": 16, "mamba_dt_rank": 4, "intermediate_size": 32,
    },
    "kolibri1": {
        "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16,
        "shared_expert_intermediate_size": 64, "sliding_window": WINDOW, "layer_types": MIXED_TYPES,
    },
    "laguna": {
        **EXPERTS, "shared_expert_intermediate_size": 64, "head_dim": 16, "sliding_window": WINDOW,
        "layer_types": MIXED_TYPES, "num_attention_heads_per_layer": [4, 8, 4], "mlp_layer_types": SPARSE_TYPES,
    },
    "lfm2": {"layer_types": CONVOLVED_TYPES, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**EXPERTS, "layer_types": CONVOLVED_TYPES, "num_dense_layers": 1},
    "lfm3": {
        "head_dim": 16, "sliding_window": WINDOW, "layer_types": ["conv", "full_attention", "sliding_attention"],
    },
    "mamba": {"state_size": 16},
    "mellum": {
        "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16,
        "sliding_window": WINDOW, "layer_types": MIXED_TYPES, "mlp_layer_types": ["sparse"] * 3,
    },
    "mimo_v2_flash": {
        **ROUTED, "n_group": 1, "topk_group": 1, "head_dim": 16, "v_head_dim": 8, "sliding_window": WINDOW,
        "layer_types": MIXED_TYPES, "mlp_layer_types": SPARSE_TYPES,
    },
    "minicpm3": {**LATENT, "scale_emb": 12, "dim_model_base": 32},
    "minimax": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "head_dim": 16,
        "layer_types": RECURRENT_TYPES,
    },
    "minimax_m2": {
        "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64, "head_dim": 16, "rotary_dim": 8,
    },
    "ministral": {"head_dim": 16, "sliding_window": WINDOW, "layer_types": MIXED_TYPES},
    "ministral3": {"head_dim": 16},
    "mpt": {"max_seq_len": 256},
    "nanochat": {},
    "nemotron_h": {
        **ROUTED, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "mamba_num_heads": 8,
        "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 16, "head_dim": 16,
        "moe_shared_expert_intermediate_size": 64, "num_hidden_layers": 4,
    },
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 32},
    "qwen3_5_moe_text": {**DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_5_text": DELTA_NET,
    "qwen3_next": {**DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 64, "mlp_only_layers": [1]},
    "sarvam_mla": {**ROUTED, **LATENT, "n_group": 2, "topk_group": 1, "n_shared_experts": 1},
    "solar_open": {**ROUTED, "n_group": 1, "topk_group": 1, "head_dim": 16},
    "youtu": LATENT,
}  # fmt: skip


def write_tiny(family: str, path: Path, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **config: Any) -> Path:
    """Write a random model of `family` to the new directory `path` and return it: config, safetensors, tokenizer.

    Weights depend on the options and `seed` only; no tensor is zero or one throughout, where a lost one would not show.
    `config` goes to the family's configuration as it is.
    """
    tokenizer = tiny_tokenizer()
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    described = AutoConfig.for_model(family, **(COMMON | special | (FAMILIES | FURTHER)[family] | config))
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
