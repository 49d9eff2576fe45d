"""Our replay of a whole model against transformers' own forward of it, as its own loader makes it."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tasks.models.decoder import Decoder
from tasks.models.replay import check_replay


def assert_replays(decoder: Decoder, path: Path) -> None:
    """Over one layer of each kind as a run checks it, and over all layers, for samples of several lengths in one batch."""
    check_replay(decoder)
    input_ids = torch.randint(0, 300, (3, 30), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(30)[None] < torch.tensor([30, 21, 9])[:, None]
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation=decoder.attn_implementation, experts_implementation="eager"
    )
    seen = []
    for i in range(decoder.layer_count):
        layer = model.get_submodule(decoder.own_layer_name(i))
        layer.register_forward_hook(lambda _, args, output: seen.append((args[0], output)))
    with torch.no_grad():
        model(input_ids, attention_mask=mask, use_cache=False)
        hidden = decoder.embed(input_ids, torch.float32, mask)
        assert len(seen) == decoder.layer_count
        for i, (entering, leaving) in enumerate(seen):
            assert torch.equal(hidden, entering), f"input of layer {i}"
            layer = decoder.materialise(i, "cpu")
            output = layer(hidden, **decoder.call_arguments(i, hidden, mask))
            hidden = output[0] if isinstance(output, tuple) else output
            assert torch.equal(hidden, leaving[0] if isinstance(leaving, tuple) else leaving), f"layer {i}"
