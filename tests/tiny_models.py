"""Tiny random llama models as transformers saves them, with a real tokenizer, for every test that needs a source."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXTS = (
    "The quick brown fox jumps over the lazy dog while the patient cat watches from the garden wall.",
    "Rivers carry sand and stones from the mountains to the sea, and the sea carries them back as clouds.",
    "A clock that has stopped is right twice a day; a clock that runs slowly is hardly ever right.",
    "She opened the old book, found a letter between its pages, and read it aloud to the empty room.",
    "Bread needs flour, water, salt and time, and the greatest of these is time.",
    "Every number from one to ten was written on the board: one two three four five six seven eight nine ten.",
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def write_tiny_llama(
    path: Path,
    *,
    layers: int = 2,
    tied: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    key_value_heads: int = 2,
    llama3_rope: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    shards: int = 1,
    seed: int = 0,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    **config: Any,
) -> Path:
    """Write a random llama to the new directory `path` and return it: config, safetensors, tokenizer, generation file.

    Four heads of 16; `key_value_heads` 4 is plain attention, 1 or 2 is grouped. `shards` above 1 writes an index and
    about so many shards. Weights depend on the options and `seed` only. `config` goes to LlamaConfig as it is.
    """
    tokenizer = tiny_tokenizer()
    options: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": key_value_heads,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "attention_bias": attention_bias,
        "mlp_bias": mlp_bias,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if llama3_rope:
        options["rope_parameters"] = dict(LLAMA3_ROPE)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**(options | config)))
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers starts biases at zero, where a lost one would not show
                torch.nn.init.normal_(parameter, std=0.1)
            elif "norm" in name:
                torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
            else:
                torch.nn.init.normal_(parameter, std=0.08)  # larger than usual: attention must not be uniform
    model = model.to(dtype)
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    model.save_pretrained(path, max_shard_size=total if shards == 1 else total // shards + 1)
    tokenizer.save_pretrained(path)
    return path


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with at most 320 tokens, trained on TEXTS, with <s> and </s> and no padding token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
