"""A tiny random model of every wrapper that is said to be supported: a text model, and what it sees by, under names of any age."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tasks.models.families import model_class
from tests.tiny_families import COMMON, FAMILIES, WINDOW
from tests.tiny_models import tiny_tokenizer

IMAGE_TOKEN = 318
TEXT = COMMON | {"head_dim": 16}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
SIGHT = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, "image_size": 32}
QWEN_SIGHT = {"depth": 2, "num_heads": 2, "in_channels": 3, "patch_size": 8, "spatial_merge_size": 2}
QWEN_TOKENS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 317,
    "vision_start_token_id": 316,
    "vision_end_token_id": 315,
}
# Sizes of heads and hidden states that are no powers of two: what is scaled by their roots shows its rounding.
WRAPPED: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": TEXT | FAMILIES["gemma3_text"] | {"hidden_size": 96, "model_type": "gemma3_text"},
        "vision_config": SIGHT | {"patch_size": 8, "vision_use_head": False, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4, "image_token_index": IMAGE_TOKEN, "boi_token_index": 317, "eoi_token_index": 316,
    },
    "llava": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": SIGHT | {"patch_size": 8, "projection_dim": 32, "model_type": "clip_vision_model"},
        "image_token_index": IMAGE_TOKEN, "image_seq_length": 16, "vision_feature_layer": -2,
    },
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
        "vision_config": SIGHT | {"patch_size": 8, "head_dim": 16, "model_type": "pixtral"},
        "image_token_index": IMAGE_TOKEN, "tie_word_embeddings": False,
    },
    "qwen2_5_vl": {
        "text_config": COMMON | {
            "rope_parameters": MROPE, "model_type": "qwen2_5_vl_text", "use_sliding_window": True,
            "sliding_window": WINDOW, "max_window_layers": 1, "layer_types": ["full_attention", *["sliding_attention"] * 2],
        },
        "vision_config": QWEN_SIGHT | {
            "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "window_size": 32,
            "fullatt_block_indexes": [1],
        },
    } | QWEN_TOKENS,
    "qwen2_vl": {
        "text_config": COMMON | {"rope_parameters": MROPE, "model_type": "qwen2_vl_text"},
        "vision_config": QWEN_SIGHT | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
    } | QWEN_TOKENS,
    "qwen3_vl": {
        "text_config": TEXT | {"rope_parameters": MROPE, "model_type": "qwen3_vl_text"},
        "vision_config": QWEN_SIGHT | {
            "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
    } | QWEN_TOKENS,
}  # fmt: skip
OF_SAVED = {
    "gemma3": ("vision_tower.", "vision_tower.vision_model."),
    "llava": ("vision_tower.", "vision_tower.vision_model."),
}


def write_wrapped(
    family: str, path: Path, *, names: str = "saved", dtype: torch.dtype = torch.bfloat16, seed: int = 0, **text: Any
) -> Path:
    """Write a random model of the wrapper `family` to the new directory `path` and return it.

    `names` are those of the tensors: `saved`, as transformers writes them today; `hub`, as the models were published; or
    `own`, those of transformers' own modules, as newer files have them. `text` goes to the text model's configuration.
    """
    tokenizer = tiny_tokenizer()
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    options = WRAPPED[family]
    config = AutoConfig.for_model(family, **options | {"text_config": options["text_config"] | special | text})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)._from_config(config)
        for name, tensor in model.state_dict().items():
            is_norm = "norm" in name and name.endswith("weight")
            torch.nn.init.normal_(tensor, mean=1.0 if is_norm else 0.0, std=0.1)
    model.tie_weights()
    model.to(dtype).save_pretrained(path)
    tokenizer.save_pretrained(path)
    for file in ("preprocessor_config.json", "processor_config.json"):
        (path / file).write_text(json.dumps({"made_for": family}))
    if names == "own":
        tensors = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
        for name in model.all_tied_weights_keys:
            del tensors[name]
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
    elif names == "hub" and family in OF_SAVED:
        now, then = OF_SAVED[family]
        tensors = load_file(path / "model.safetensors")
        save_file(
            {then + name.removeprefix(now) if name.startswith(now) else name: t for name, t in tensors.items()},
            path / "model.safetensors",
            {"format": "pt"},
        )
    return path
