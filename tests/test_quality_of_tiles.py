"""The benchmark's model of another width computes what SmolLM2 does, so that its figures speak of SmolLM2."""

import torch

from benchmarks import quality_of_tiles
from tasks.evaluate import dense_model
from tests.tiny_models import write_tiny_llama


def test_a_model_that_is_widened_with_zeros_computes_what_its_first_layers_did(tmp_path, monkeypatch):
    for name, value in (("WIDTH", 48), ("HEADS", 12), ("KEY_HEADS", 4)):
        monkeypatch.setattr(quality_of_tiles, name, value)
    options = {"hidden_size": 36, "num_attention_heads": 9, "head_dim": 4, "tied": True, "dtype": torch.float32}
    narrow = write_tiny_llama(tmp_path / "narrow", layers=3, key_value_heads=3, **options)
    quality_of_tiles.widen(narrow, tmp_path / "wide", 2)
    first, wide = dense_model(narrow), dense_model(tmp_path / "wide")
    del first.model.layers[2:]
    input_ids = torch.arange(40)[None]
    expected, actual = first(input_ids).logits, wide(input_ids).logits
    assert wide.model.layers[0].self_attn.q_proj.weight.shape == (48, 48)
    assert torch.allclose(actual, expected, atol=1e-5)
