"""Families beside those of test_families.py, each once: replayed, planned, and a layer of it quantized."""

from pathlib import Path

import pytest
import torch

from tasks import preflight
from tasks.models.decoder import Decoder
from tasks.models.replay import check_replay
from tasks.models.source import SourceModel
from tasks.quantization import GPTQConfig
from tests.family_replay import assert_replays
from tests.flow_jobs import tiny_job
from tests.layer_runs import finished_layer
from tests.test_folding import apply
from tests.tiny_families import FURTHER, write_tiny

# What the code of a layer with a state reads without calling it.
UNCALLED = ("A_log", "dt_proj.weight")
EIGHT_BITS = GPTQConfig(bits=8, group_size=32)


@pytest.mark.parametrize("family", sorted(FURTHER))
def test_a_family_is_replayed_bit_for_bit_planned_and_a_layer_of_it_quantized(family: str, tmp_path: Path) -> None:
    model = write_tiny(family, tmp_path / "model")
    source = SourceModel.open(str(model))
    decoder = Decoder.from_source(source)
    assert_replays(decoder, model)
    quantized = {
        f"{decoder.layer_name(i)}.{name}.weight"
        for i in range(decoder.layer_count)
        for name in decoder.linear_shapes(i)
    }
    assert [name for name in large_matrices(decoder) if name not in quantized and not name.endswith(UNCALLED)] == []
    plan = preflight.check(tiny_job(model, tmp_path, quantization=EIGHT_BITS))
    assert plan.family == family
    assert plan.bytes_before == sum(info.size_bytes for info in source.tensors.values())
    work, packed = finished_layer(model, tmp_path, 1, 0, calibration={"samples": 2}, quantization=EIGHT_BITS)
    assert len([name for name in packed if name.endswith(".qweight")]) == len(work.quantized)
    assert all(hidden.isfinite().all() for hidden in work.outputs.values())


@pytest.mark.parametrize("family", ["bamba", "falcon_h1", "jamba", "lfm2", "opt", "qwen3_next"])
def test_scales_that_are_folded_leave_layers_of_every_kind_as_they_were(family: str, tmp_path: Path) -> None:
    decoder = Decoder.from_source(SourceModel.open(str(write_tiny(family, tmp_path / "model"))))
    for number in decoder.layers_of_each_kind:
        folding = decoder.folding(number)
        assert folding.folds
        layer = decoder.materialise(number, "cpu", torch.float64)
        hidden_BTH = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        arguments = decoder.call_arguments(number, hidden_BTH, None)
        with torch.no_grad():
            before = layer(hidden_BTH, **arguments)
            apply(layer, folding)
            after = layer(hidden_BTH, **arguments)
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)  # its norms and tables are float32


@pytest.mark.parametrize("family", ["deepseek_v2", "gemma3_text", "lfm2_moe", "qwen3_next"])
def test_what_transformers_keeps_in_float32_stays_in_it_in_a_model_of_half_precision(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: routers and their biases are float32, buffers of the model's own dtype are bfloat16."""
    monkeypatch.setattr(Decoder, "compute_dtype", lambda self, device: torch.bfloat16)
    check_replay(Decoder.from_source(SourceModel.open(str(write_tiny(family, tmp_path / "model")))))


def test_linears_outside_the_layers_are_told_as_not_quantized(tmp_path: Path) -> None:
    decoder = Decoder.from_source(SourceModel.open(str(write_tiny("opt", tmp_path / "model"))))
    assert decoder.kept_modules == ("model.decoder.project_out", "model.decoder.project_in")


def large_matrices(decoder: Decoder) -> list[str]:
    """Tensors of layers that a linear of some size would have; routers of these models have eight rows."""
    shapes = {
        name: decoder.source.tensors[name].shape
        for i in range(decoder.layer_count)
        for name in decoder.layer_tensor_names(i)
    }
    return [name for name, shape in shapes.items() if len(shape) == 2 and min(shape) > 8]
