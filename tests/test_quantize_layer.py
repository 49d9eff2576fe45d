"""One layer across pools of any size, without Prefect: the shards are called on threads of this process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint_store.objects import ObjectRef
from tasks import quantize_layer, quantize_shard
from tasks.execution_plan import LANES
from tasks.formats import gptq as layout
from tasks.layer_work import SiblingFailed, lane_batches
from tasks.methods import gptq, rtn
from tasks.methods.gptq import HessianError
from tasks.quantization import GPTQConfig, RTNConfig
from tasks.schemes import GPTQScheme
from tests.flow_jobs import tiny_job
from tests.layer_runs import assert_equal, finished_layer, open_run, run_shards
from tests.tiny_models import write_tiny_llama

POOLS = (1, 2, 3, 5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", layers=2, attention_bias=True)


@pytest.fixture(autouse=True)
def many_small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units that cut through modules, so that a tiny layer has several."""
    monkeypatch.setattr(quantize_shard, "UNIT_ROWS", 48)


@given(st.integers(0, 200))
def test_lanes_hold_every_batch_once_in_order_whatever_the_pool(batches: int) -> None:
    lanes = lane_batches(batches)
    assert len(lanes) == LANES
    assert [batch for lane in lanes for batch in lane] == list(range(batches))


@pytest.mark.parametrize("quantization", [GPTQConfig(group_size=32, desc_act=True), RTNConfig(group_size=32)])
def test_every_pool_size_gives_the_same_bytes(quantization: Any, model: Path, tmp_path: Path) -> None:
    results = [finished_layer(model, tmp_path, devices, quantization=quantization) for devices in POOLS]
    (first_work, first), *others = results
    for work, packed in others:
        assert_equal(packed, first)
        assert work.outcomes == first_work.outcomes
        assert work.outputs.keys() == first_work.outputs.keys()
        assert all(torch.equal(work.outputs[batch], first_work.outputs[batch]) for batch in work.outputs)


@pytest.mark.parametrize("devices", [1, 3])
def test_a_subsets_factor_is_gone_before_the_next_ones_inputs_are_summed(
    devices: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = []
    prepare = GPTQScheme.prepare

    def looking(*args: Any) -> Any:
        held.append(run.works[0].prepared)
        return prepare(*args)

    monkeypatch.setattr(GPTQScheme, "prepare", looking)
    with open_run(tiny_job(model, tmp_path, devices=("cpu",) * devices)) as run:
        work, errors = run_shards(run, 0)
    assert errors == [] and held == [None] * 4
    assert work.prepared is None, "nor does it wait for the next layer"


def test_the_outputs_are_a_plain_forward_of_the_layer_with_the_weights_that_a_reader_sees(
    model: Path, tmp_path: Path
) -> None:
    with open_run(tiny_job(model, tmp_path)) as run:
        work, errors = run_shards(run, 0)
        assert errors == []
        layer = run.decoder.materialise(0, "cpu")
        packed = quantize_layer.pack(run, work)
        for name, rows in work.quantized.items():
            full = f"model.layers.0.{name}"
            layer.get_submodule(name).weight.data.copy_(layout.unpack(packed, full, GPTQConfig()).dequantize())
            assert torch.equal(layout.unpack(packed, full, GPTQConfig()).codes_NK, rows.codes_NK)
        for batch, hidden in enumerate(run.hidden):
            entering = hidden.float()
            mask = run.calibration_batch(batch).attention_mask
            with torch.no_grad():
                leaving = layer(entering, **run.decoder.call_arguments(0, entering, mask))
            leaving = leaving[0] if isinstance(leaving, tuple) else leaving
            assert torch.equal(work.outputs[batch], leaving.bfloat16())


def test_gptq_beats_rounding_to_nearest_on_the_outputs_of_the_layer(model: Path, tmp_path: Path) -> None:
    with open_run(tiny_job(model, tmp_path, quantization=GPTQConfig(bits=3, group_size=32))) as run:
        work, errors = run_shards(run, 0)
        assert errors == []
        exact, by_gptq, by_rtn = (run.decoder.materialise(0, "cpu") for _ in range(3))
        for name, rows in work.quantized.items():
            by_gptq.get_submodule(name).weight.data.copy_(rows.dequantize())
            nearest = rtn.quantize_rows(exact.get_submodule(name).weight, run.job.quantization)
            by_rtn.get_submodule(name).weight.data.copy_(nearest.dequantize())
        gptq_error = rtn_error = 0.0
        for batch, hidden in enumerate(run.hidden):
            entering = hidden.float()
            arguments = run.decoder.call_arguments(0, entering, run.calibration_batch(batch).attention_mask)
            with torch.no_grad():
                wanted = exact(entering, **arguments)[0]
                gptq_error += float((by_gptq(entering, **arguments)[0] - wanted).square().sum())
                rtn_error += float((by_rtn(entering, **arguments)[0] - wanted).square().sum())
    assert gptq_error < 0.8 * rtn_error


def test_padding_is_in_no_statistic(model: Path, tmp_path: Path) -> None:
    ids = tuple(tuple(range(2, 2 + length)) for length in (12, 20, 31))
    one, _ = finished_layer(
        model, tmp_path / "one", 1, calibration={"data": ids, "batch_size": 1, "sequence_length": 40}
    )
    all_at_once, _ = finished_layer(
        model, tmp_path / "all", 1, calibration={"data": ids, "batch_size": 3, "sequence_length": 40}
    )
    for subset, outcome in one.outcomes.items():
        assert outcome.tokens == all_at_once.outcomes[subset].tokens == 63
    for name, rows in one.quantized.items():
        # Not bit by bit: products of 63 rows differ in the last bit from those of 12 + 20 + 31, and a code may flip.
        agree = (rows.codes_NK == all_at_once.quantized[name].codes_NK).float().mean()
        assert agree > 0.99, (name, agree)


def test_a_hessian_that_will_not_factor_rounds_its_subset_to_nearest_and_says_why(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factor, calls = gptq.factor_hessian, []

    def failing_for_o(hessian: Tensor, config: Any) -> Any:
        calls.append(hessian)
        if len(calls) == 2:
            raise HessianError("leading minor 7 is not positive definite")
        return factor(hessian, config)

    monkeypatch.setattr(gptq, "factor_hessian", failing_for_o)
    with open_run(tiny_job(model, tmp_path)) as run:
        work, errors = run_shards(run, 0)
        assert errors == []
        expected = rtn.quantize_rows(run.decoder.materialise(0, "cpu").self_attn.o_proj.weight, run.job.quantization)
        assert torch.equal(work.quantized["self_attn.o_proj"].codes_NK, expected.codes_NK)
        receipt = quantize_layer._receipt(run, work, "key", ObjectRef("layer", "name", "0" * 64, 1), None)
    (fallen,) = receipt.fallbacks
    assert (fallen.name, fallen.method) == ("self_attn.o_proj", "rtn")
    assert fallen.fallback == "leading minor 7 is not positive definite"
    assert {module.method for module in receipt.modules if module != fallen} == {"gptq"}


@pytest.mark.parametrize("devices", POOLS)
def test_feedback_that_diverges_in_one_unit_rounds_the_whole_subset_to_nearest_on_every_device(
    devices: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize = gptq.quantize_rows
    with open_run(tiny_job(model, tmp_path, devices=("cpu",) * devices)) as run:
        layer = run.decoder.materialise(0, "cpu")
        second_unit = torch.cat([layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight])[48:96]

        def diverging(weight_NK: Tensor, *args: Any) -> Any:
            if torch.equal(weight_NK, second_unit):
                raise HessianError("error feedback diverged")
            return quantize(weight_NK, *args)

        monkeypatch.setattr(gptq, "quantize_rows", diverging)
        work, errors = run_shards(run, 0)
        assert errors == []
        for name in ("q_proj", "k_proj", "v_proj"):
            weight_NK = layer.get_submodule(f"self_attn.{name}").weight
            expected = rtn.quantize_rows(weight_NK, run.job.quantization)
            assert torch.equal(work.quantized[f"self_attn.{name}"].codes_NK, expected.codes_NK)
        outcomes = {subset[0]: outcome for subset, outcome in work.outcomes.items()}
        assert outcomes["self_attn.q_proj"].fallback == "error feedback diverged"
        assert outcomes["self_attn.o_proj"].method == "gptq"


def test_an_error_in_one_shard_ends_its_siblings_and_is_the_one_told(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_run(tiny_job(model, tmp_path, devices=("cpu",) * 3)) as run:
        call = quantize_shard.Shard._call

        def failing(self: Any, batch: int, first: int) -> Any:
            if self.number == 1:
                raise OSError("the source's disk went away")
            return call(self, batch, first)

        monkeypatch.setattr(quantize_shard.Shard, "_call", failing)
        work, errors = run_shards(run, 0)
    assert str(work.error) == "the source's disk went away"
    assert sorted(type(error).__name__ for error in errors) == ["OSError", "SiblingFailed", "SiblingFailed"]
    assert issubclass(SiblingFailed, RuntimeError)


@pytest.mark.parametrize("tensor", ["mlp.up_proj.weight", "input_layernorm.weight", "self_attn.q_proj.bias"])
def test_a_source_with_a_value_that_is_not_finite_is_named_and_nothing_is_staged(tensor: str, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model", layers=1, attention_bias=True)
    tensors = load_file(model / "model.safetensors")
    tensors[f"model.layers.0.{tensor}"].view(-1)[5] = torch.inf
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with open_run(tiny_job(model, tmp_path, quantization=RTNConfig(group_size=32))) as run:
        work, errors = run_shards(run, 0)
        with pytest.raises(ValueError, match=f"model.layers.0.{tensor.removesuffix('.weight').removesuffix('.bias')}"):
            if errors:
                raise errors[0]
            quantize_layer.scan(quantize_layer.pack(run, work), "model.layers.0")
    assert list((tmp_path / "checkpoint" / "objects").iterdir()) == []


def test_hidden_states_that_overflow_are_told_with_the_layer(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model", layers=1, dtype=torch.float16)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"].mul_(60000)
    tensors["model.layers.0.mlp.up_proj.weight"].mul_(1000)
    save_file(
        {name: t.nan_to_num() for name, t in tensors.items()}, model / "model.safetensors", metadata={"format": "pt"}
    )
    with open_run(tiny_job(model, tmp_path)) as run:
        _, errors = run_shards(run, 0)
    assert "hidden states after `model.layers.0` are not finite" in str(errors[0])
