"""Experts one by one: the same bytes from every grouping and pool, statistics of real tokens only, fallbacks by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint_store.objects import ObjectRef
from tasks import expert_groups, quantize_layer, quantize_shard
from tasks.formats import gptq as layout
from tasks.methods import gptq, rtn
from tasks.methods.hessian import HessianError, HessianSum, factor_hessian
from tasks.models.decoder import Decoder
from tasks.models.experts import group_experts
from tasks.models.source import SourceModel
from tasks.models.staged import StagedForward
from tasks.quantization import EXL3Config, GGUFConfig, GPTQConfig, ParoQuantConfig, QQQConfig, Quantization, RTNConfig
from tasks.report import LayerReceipt, ModuleReport
from tasks.schemes import scheme_of
from tests.flow_jobs import tiny_job
from tests.layer_runs import assert_equal, finished_layer, open_run, run_shards
from tests.tiny_families import write_tiny

SPARSE = 2  # a layer with experts
IDS = tuple(tuple(range(2 + 7 * number, 2 + 7 * number + length)) for number, length in enumerate((40, 31, 22, 40, 12)))
CALIBRATION = {"data": IDS, "batch_size": 2, "sequence_length": 40}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("qwen3_moe", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(autouse=True)
def many_small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_shard, "UNIT_ROWS", 24)


def grouped(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(quantize_shard, "group_size", lambda run, layer: size if run.decoder.experts(layer) else 0)


@pytest.mark.parametrize("quantization", [GPTQConfig(group_size=32), RTNConfig(group_size=32)])
def test_every_grouping_and_every_pool_gives_the_same_bytes(
    quantization: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for size, devices in ((1, 1), (8, 1), (3, 1), (1, 2), (8, 3), (3, 2)):
        grouped(monkeypatch, size)
        place = tmp_path / f"{size}-{devices}"
        results.append(
            finished_layer(model, place, devices, SPARSE, quantization=quantization, calibration=CALIBRATION)
        )
    (first_work, first), *others = results
    for work, packed in others:
        assert_equal(packed, first)
        assert work.outcomes == first_work.outcomes
        assert work.outputs.keys() == first_work.outputs.keys()
        assert all(torch.equal(work.outputs[batch], first_work.outputs[batch]) for batch in work.outputs)


def inputs_of_experts(run: Any, layer: torch.nn.Module) -> dict[int, Tensor]:
    """What enters each expert of an unquantized layer, by a computation of its own: the router's choice, token by token."""
    entering: dict[int, list[Tensor]] = {number: [] for number in range(8)}
    for batch, hidden in enumerate(run.hidden):
        mask = run.calibration_batch(batch).attention_mask
        seen: list[Any] = []
        hooks = [
            layer.mlp.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0])),
            layer.mlp.gate.register_forward_hook(lambda _, args, output, seen=seen: seen.append(output)),
        ]
        layer(hidden.float(), **run.decoder.call_arguments(SPARSE, hidden.float(), mask))
        for hook in hooks:
            hook.remove()
        tokens, (_, _, chosen) = seen
        for token, experts, is_real in zip(tokens.flatten(0, 1), chosen, mask.flatten(), strict=True):
            for number in experts.tolist() if is_real else ():
                entering[number].append(token)
    return {number: torch.stack(tokens) if tokens else torch.empty(0, 64) for number, tokens in entering.items()}


def test_an_expert_is_quantized_by_the_tokens_that_reach_it_and_no_padding(model: Path, tmp_path: Path) -> None:
    """The codes of gate and up, from the inputs that a token by token evaluation of the router gives."""
    config = GPTQConfig(group_size=32)
    with open_run(tiny_job(model, tmp_path, quantization=config, calibration=CALIBRATION)) as run:
        work, errors = run_shards(run, SPARSE)
        assert errors == []
        # Attention is quantized before the experts see anything: with these weights they were calibrated.
        layer = run.decoder.materialise(SPARSE, "cpu")
        for name, rows in work.quantized.items():
            if name.startswith("self_attn"):
                layer.get_submodule(name).weight.data.copy_(rows.dequantize())
        with torch.no_grad():
            entering = inputs_of_experts(run, layer)
        total = 0
        for number, x_TK in entering.items():
            up = (f"mlp.experts.{number}.gate_proj", f"mlp.experts.{number}.up_proj")
            outcome = work.outcomes[up]
            assert outcome.tokens == len(x_TK) == work.outcomes[(f"mlp.experts.{number}.down_proj",)].tokens
            total += len(x_TK)
            if len(x_TK) < 16:
                assert outcome.method == "rtn" and f"{len(x_TK)} of 145 calibration tokens" in outcome.fallback
                continue
            hessian = HessianSum(64, "cpu")
            hessian.add(x_TK)
            factor = factor_hessian(hessian.hessian(), config)
            for name in up:
                expected = gptq.quantize_rows(layer.get_submodule(name).weight, factor, config)
                # Not bit by bit: the sums are of other batches, and a code may flip.
                agree = (expected.codes_NK == work.quantized[name].codes_NK).float().mean()
                assert agree > 0.99, (name, agree)
        assert total == 2 * 145


def test_the_outputs_are_a_plain_forward_with_the_weights_that_a_reader_sees(model: Path, tmp_path: Path) -> None:
    with open_run(tiny_job(model, tmp_path, calibration=CALIBRATION)) as run:
        work, errors = run_shards(run, SPARSE)
        assert errors == []
        packed = quantize_layer.pack(run, work)
        layer = run.decoder.materialise(SPARSE, "cpu")
        for name in run.decoder.linear_shapes(SPARSE):
            full = f"model.layers.{SPARSE}.{name}"
            layer.get_submodule(name).weight.data.copy_(layout.unpack(packed, full, GPTQConfig()).dequantize())
        for batch, hidden in enumerate(run.hidden):
            arguments = run.decoder.call_arguments(SPARSE, hidden.float(), run.calibration_batch(batch).attention_mask)
            with torch.no_grad():
                leaving = layer(hidden.float(), **arguments)
            assert torch.equal(work.outputs[batch], leaving.bfloat16())


def test_experts_with_none_one_and_few_tokens_fall_back_by_name_and_stay_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router whose bias lets all tokens go to experts 0 and 1, one batch's first token to 2, twelve to 3."""
    path = write_tiny("qwen3_moe", tmp_path / "model")
    taken = {"tokens": 0}

    class Router(torch.nn.Module):
        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            hidden = hidden.reshape(-1, 64)
            chosen = torch.tensor([[0, 1]]).repeat(len(hidden), 1)
            if not taken["tokens"]:  # of the first batch, whose rows hold 40 and 31 tokens
                chosen[0, 1] = 2
                chosen[10:22, 1] = 3
            taken["tokens"] += len(hidden)
            return hidden @ torch.zeros(64, 8), torch.full((len(hidden), 2), 0.5), chosen

    honest = Decoder.materialise

    def materialise(self: Decoder, *args: Any) -> torch.nn.Module:
        layer = honest(self, *args)
        layer.mlp.gate = Router()
        return layer

    monkeypatch.setattr(Decoder, "materialise", materialise)
    with open_run(tiny_job(path, tmp_path, calibration=CALIBRATION)) as run:
        work, errors = run_shards(run, SPARSE)
        assert errors == []
        packed = quantize_layer.pack(run, work)
        receipt = quantize_layer._receipt(run, work, "key", ObjectRef("layer", "name", "0" * 64, 1), None)
        assert receipt.expert_tokens == (145, 132, 1, 12, 0, 0, 0, 0)
        fallbacks = {module.name: module.fallback for module in receipt.fallbacks}
        assert len(fallbacks) == 6 * 3
        assert fallbacks["mlp.experts.2.down_proj"] == "1 of 145 calibration tokens reached it"
        assert fallbacks["mlp.experts.3.gate_proj"] == "12 of 145 calibration tokens reached it"
        assert fallbacks["mlp.experts.7.up_proj"] == "0 of 145 calibration tokens reached it"
        assert [module.name for module in receipt.modules] == list(run.decoder.linear_shapes(SPARSE))
        nearest = rtn.quantize_rows(
            honest(run.decoder, SPARSE, "cpu").mlp.experts.get_submodule("7.up_proj").weight, run.job.quantization
        )
        assert torch.equal(work.quantized["mlp.experts.7.up_proj"].codes_NK, nearest.codes_NK)
    keys = [
        sorted(name.partition(f"experts.{number}.")[2] for name in packed if f"experts.{number}." in name)
        for number in range(8)
    ]
    assert len(keys[0]) == 12 and all(each == keys[0] for each in keys)
    shapes = [packed[f"model.layers.2.mlp.experts.{number}.up_proj.qweight"].shape for number in range(8)]
    assert len(set(shapes)) == 1
    assert packed["model.layers.2.mlp.gate.weight"].dtype == torch.bfloat16


def test_error_feedback_that_diverges_makes_that_experts_subset_alone_fall_back(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = gptq.quantize_rows
    spoiled = {}

    def quantize_rows(weight_NK: Tensor, factor: Any, config: GPTQConfig) -> Any:
        if weight_NK.shape[1] == 32 and spoiled.setdefault("factor", factor) is factor:
            raise HessianError("error feedback diverged")
        return honest(weight_NK, factor, config)

    monkeypatch.setattr(gptq, "quantize_rows", quantize_rows)
    grouped(monkeypatch, 4)
    work, _ = finished_layer(model, tmp_path, 1, SPARSE, calibration=CALIBRATION)
    diverged = [subset for subset, outcome in work.outcomes.items() if outcome.fallback == "error feedback diverged"]
    assert len(diverged) == 1 and diverged[0][0].endswith("down_proj")


def test_groups_are_as_large_as_the_memory_limit_lets_them_be(model: Path, tmp_path: Path) -> None:
    sizes = []
    with open_run(tiny_job(model, tmp_path, calibration=CALIBRATION)) as run:
        assert expert_groups.group_size(run, 1) == 0  # a dense layer
        for limit in (None, 500_000, 850_000, 950_000, 10_000_000):
            run.job = run.job.model_copy(update={"memory_limit": limit})
            sizes.append(expert_groups.group_size(run, SPARSE))
    assert sizes[0] == sizes[-1] == 8
    assert sizes[1] == 1
    assert sorted(sizes[1:]) == sizes[1:] and 1 < sizes[2] < 8


@pytest.mark.parametrize(
    "quantization", [GPTQConfig(), QQQConfig(), EXL3Config(), ParoQuantConfig(), GGUFConfig(imatrix=True)]
)
def test_every_method_tells_what_an_experts_inputs_take_until_they_are_used(
    quantization: Quantization, model: Path
) -> None:
    scheme = scheme_of(quantization, SourceModel.open(str(model)))
    statistic = scheme.statistic(64, torch.device("cpu"))
    statistic.add(torch.randn(3000, 64))  # more than a sample keeps
    values = [part for value in vars(statistic).values() for part in (value if isinstance(value, list) else [value])]
    held = sum(value.nbytes for value in values if isinstance(value, Tensor))
    assert held <= scheme.sum_bytes(64) <= 2 * held


def test_a_group_holds_no_more_statistics_than_its_experts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive, most = 0, []

    class Counted(HessianSum):
        def __init__(self, *args: Any) -> None:
            nonlocal alive
            super().__init__(*args)
            alive += 1
            most.append(alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    monkeypatch.setattr(gptq, "HessianSum", Counted)
    peaks = []
    for size in (1, 2, 8):
        grouped(monkeypatch, size)
        most.clear()
        finished_layer(model, tmp_path / str(size), 1, SPARSE, calibration=CALIBRATION)
        peaks.append(max(most))
    assert peaks == [2, 3, 9]  # the totals, and the lane that is being summed


def test_a_staged_group_waits_once_with_the_inputs_of_all_its_experts(model: Path) -> None:
    decoder = Decoder.from_source(SourceModel.open(str(model)))
    layer = decoder.materialise(SPARSE, "cpu")
    hidden = torch.randn(2, 20, 64, generator=torch.Generator().manual_seed(0))
    arguments = decoder.call_arguments(SPARSE, hidden, None)
    with torch.no_grad():
        expected = layer(hidden, **arguments)
    group_experts(layer, 4)
    stages = decoder.stages(SPARSE, 4)
    assert [len(stage) for stage in stages] == [1, 1, 4, 4, 4, 4]
    subsets = [subset for stage in stages for subset in stage]
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, 9:] = False
    tokens = {}
    with StagedForward(layer, subsets, [(hidden, arguments)], stages) as staged:
        for subset in subsets:
            for index, _ in staged.advance(subset):
                tokens[subset] = staged.real_tokens(index, subset, mask)
        (output,) = staged.finish()
    assert torch.equal(output, expected)
    ups = [tokens[ups] for ups, _ in decoder.experts(SPARSE) if ups in tokens]
    assert sum(map(len, ups)) == 2 * 29


def test_hundreds_of_fallbacks_are_one_line() -> None:
    reasons = ["0 of 9 calibration tokens reached it"] * 40 + ["the Hessian is not positive definite"]
    modules = tuple(
        ModuleReport(name=f"mlp.experts.{n}.up_proj", method="rtn", loss=0.0, fallback=reason)
        for n, reason in enumerate(reasons)
    )
    receipt = LayerReceipt(
        index=0, name="model.layers.0", key="k", sha256="", size=1, loss=0.0, tokens=1, seconds=1.0, modules=modules
    )
    assert receipt.fallback_lines() == [
        "`model.layers.0.mlp.experts.0.up_proj` and 39 more modules of the layer were quantized without their inputs: 0 of 9 "
        "calibration tokens reached it",
        "`model.layers.0.mlp.experts.40.up_proj` was quantized without its inputs: the Hessian is not positive definite",
    ]
