"""AWQ on mixtures of experts: every token goes where it went, whatever is folded, and no byte hangs on groups or pools."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from checkpoint_store.objects import ObjectRef
from tasks import expert_groups, preflight, quantize_layer, quantize_shard, scaled_shard
from tasks.formats import awq as layout
from tasks.layer_work import LayerWork
from tasks.methods import awq, rtn
from tasks.models.decoder import Decoder
from tasks.models.source import SourceModel
from tasks.quantization import AWQConfig, EoRAConfig
from tasks.schemes import scheme_of
from tests.flow_jobs import tiny_job
from tests.layer_runs import assert_equal, finished_layer, open_run, run_shards
from tests.test_experts import CALIBRATION
from tests.tiny_families import write_tiny

SPARSE = 2  # a layer with experts, in all of these
LAYER = f"model.layers.{SPARSE}"
NORM = f"{LAYER}.post_attention_layernorm.weight"
AWQ = AWQConfig(group_size=32, n_grid=6)
# What reads the norm before the experts, beside their own linears.
ROUTERS = {
    "qwen3_moe": ("mlp.gate",),
    "qwen2_moe": ("mlp.gate", "mlp.shared_expert_gate"),
    "mixtral": ("block_sparse_moe.gate",),
    "deepseek_v3": ("mlp.gate",),
}


def write_uneven(family: str, path: Path, **options: Any) -> Path:
    """A model of whose experts' inputs a few channels carry most, as in trained ones."""
    write_tiny(family, path, **options)
    tensors = load_file(path / "model.safetensors")
    size_H = torch.exp(1.5 * torch.randn(64, generator=torch.Generator().manual_seed(1)))
    tensors[NORM] = (tensors[NORM].float() * size_H).to(tensors[NORM].dtype)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    return {family: write_uneven(family, place / family) for family in ROUTERS}


@pytest.fixture(autouse=True)
def many_small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (quantize_shard, scaled_shard):
        monkeypatch.setattr(module, "UNIT_ROWS", 24)


@pytest.mark.parametrize("family", ROUTERS)
def test_every_grouping_and_every_pool_gives_the_same_bytes(
    family: str, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for size, devices in ((8, 1), (1, 1), (3, 2)):
        monkeypatch.setattr(scaled_shard, "group_size", lambda run, layer, size=size: size)
        place = tmp_path / f"{size}-{devices}"
        results.append(
            finished_layer(models[family], place, devices, SPARSE, quantization=AWQ, calibration=CALIBRATION)
        )
    (first_work, first), *others = results
    for work, packed in others:
        assert_equal(packed, first)
        assert work.outcomes == first_work.outcomes
        assert all(torch.equal(work.outputs[batch], first_work.outputs[batch]) for batch in first_work.outputs)
    assert {outcome.unscaled for subset, outcome in first_work.outcomes.items() if "expert" in subset[0]} == {None}


def quantized_layer(model: Path, place: Path, config: AWQConfig = AWQ) -> Iterator[tuple[Any, LayerWork]]:
    with open_run(tiny_job(model, place, quantization=config, calibration=CALIBRATION)) as run:
        work, errors = run_shards(run, SPARSE)
        assert errors == []
        yield run, work


def batches(run: Any, dtype: torch.dtype = torch.float32) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    for number, hidden in enumerate(run.hidden):
        hidden = hidden.to(dtype)
        yield hidden, run.decoder.call_arguments(SPARSE, hidden, run.calibration_batch(number).attention_mask)


def heard(layer: nn.Module, routers: tuple[str, ...], run: Any, dtype: torch.dtype) -> list[Tensor]:
    """All that routers and gates of a layer say, and what the layer makes of every batch."""
    said: list[Any] = []
    hooks = [
        layer.get_submodule(name).register_forward_hook(lambda _m, _a, output: said.append(output)) for name in routers
    ]
    with torch.no_grad():
        for hidden, arguments in batches(run, dtype):
            output = layer(hidden, **arguments)
            said.append(output[0] if isinstance(output, tuple) else output)
    for hook in hooks:
        hook.remove()
    return [part for each in said for part in (each if isinstance(each, tuple) else (each,))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ROUTERS)
def test_with_its_norm_folded_a_router_says_what_it_said_to_the_last_bit(
    family: str, dtype: torch.dtype, models: dict[str, Path], tmp_path: Path
) -> None:
    """And the layer, whose experts are multiplied but not rounded, gives what it gave."""
    routers, source = ROUTERS[family], load_file(models[family] / "model.safetensors")
    for run, work in quantized_layer(models[family], tmp_path):
        layer = run.decoder.materialise(SPARSE, "cpu", dtype)
        before = heard(layer, routers, run, dtype)
        scaled = [subset for subset, fold in work.scaling.folding.folds.items() if fold.followers == routers]
        assert len(scaled) == len(run.decoder.experts(SPARSE)) + (family in ("qwen2_moe", "deepseek_v3"))
        (columns_K, *others) = (work.scaling.columns[subset] for subset in scaled)
        assert all(torch.equal(other_K, columns_K) for other_K in others)
        exponents_K = columns_K.log2()
        assert torch.equal(exponents_K, exponents_K.round()) and len(set(exponents_K.tolist())) > 2
        for name in (NORM, *(f"{LAYER}.{router}.weight" for router in routers)):
            assert work.folded[name].dtype == source[name].dtype and not torch.equal(work.folded[name], source[name])
            layer.get_parameter(name.removeprefix(f"{LAYER}.")).data.copy_(work.folded[name])
        for name in (name for subset in scaled for name in subset):
            layer.get_submodule(name).weight.data *= columns_K
        after = heard(layer, routers, run, dtype)
        assert len(after) == len(before) and all(map(torch.equal, after, before))


@pytest.mark.parametrize("family", ROUTERS)
def test_a_layer_with_all_its_scales_and_nothing_rounded_gives_what_it_gave(family: str, tmp_path: Path) -> None:
    model = write_uneven(family, tmp_path / "model", dtype=torch.float32)  # no folded bias is rounded to half precision
    for run, work in quantized_layer(model, tmp_path):
        layer = run.decoder.materialise(SPARSE, "cpu", torch.float64)
        before = heard(layer, (), run, torch.float64)
        for subset in run.decoder.subsets(SPARSE):
            for name in subset:
                weight_NK = layer.get_submodule(name).weight.data
                weight_NK *= work.scaling.columns.get(subset, torch.ones(1))
                weight_NK /= work.scaling.channels.get(name, torch.ones(1))[:, None]
        for name, tensor in work.folded.items():
            layer.get_parameter(name.removeprefix(f"{LAYER}.")).data.copy_(tensor)
        ups_of = {down: ups for ups, down in run.decoder.experts(SPARSE)}
        scaled = {down for down in ups_of if work.outcomes[down].fallback is None}
        assert scaled and {ups_of[down][-1] for down in scaled} <= work.scaling.channels.keys()
        for folded, true in zip(heard(layer, (), run, torch.float64), before, strict=True):
            torch.testing.assert_close(folded, true, rtol=1e-4, atol=1e-4)  # norms and tables compute in float32


@pytest.mark.parametrize("family", ROUTERS)
def test_the_hidden_states_that_go_on_are_those_of_the_exported_layer(
    family: str, models: dict[str, Path], tmp_path: Path
) -> None:
    for run, work in quantized_layer(models[family], tmp_path):
        packed = quantize_layer.pack(run, work)
        layer = run.decoder.materialise(SPARSE, "cpu")
        for name in run.decoder.linear_shapes(SPARSE):
            weight_NK = layout.unpack(packed, f"{LAYER}.{name}", AWQ).dequantize()
            layer.get_submodule(name).weight.data.copy_(weight_NK)
        for name, tensor in packed.items():
            if name.endswith((".weight", ".bias")):
                layer.get_parameter(name.removeprefix(f"{LAYER}.")).data.copy_(tensor)
        for number, output in enumerate(heard(layer, (), run, torch.float32)):
            assert torch.equal(work.outputs[number], output.bfloat16())


def test_scales_of_what_enters_the_experts_bring_the_layer_nearer_to_the_source(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the experts' own outputs, which attention's codes do not enter."""
    errors = {}
    for name in ("scaled", "left"):
        if name == "left":
            monkeypatch.setattr(awq, "in_powers_of_two", lambda scales_SK: torch.ones(1, scales_SK.shape[1]))
        for run, work in quantized_layer(models["qwen3_moe"], tmp_path / name):
            layer = run.decoder.materialise(SPARSE, "cpu")
            true = heard(layer, (), run, torch.float32)
            for full, tensor in work.folded.items():
                if "input_layernorm" not in full:
                    layer.get_parameter(full.removeprefix(f"{LAYER}.")).data.copy_(tensor)
            for module, rows in work.quantized.items():
                if "experts" in module:
                    layer.get_submodule(module).weight.data.copy_(rows.dequantize())
            outputs = heard(layer, (), run, torch.float32)
            errors[name] = sum(float((a - b).square().sum()) for a, b in zip(outputs, true, strict=True))
    assert errors["scaled"] < 0.95 * errors["left"]


def test_a_small_memory_limit_makes_smaller_groups_and_the_same_bytes(models: dict[str, Path], tmp_path: Path) -> None:
    found = []
    for limit in (None, 1_000_000, 400_000):
        job = tiny_job(models["qwen3_moe"], tmp_path / str(limit), quantization=AWQ, calibration=CALIBRATION)
        with open_run(job.model_copy(update={"memory_limit": limit})) as run:
            size = expert_groups.group_size(run, SPARSE)
            work, errors = run_shards(run, SPARSE)
            assert errors == []
            found.append((size, quantize_layer.pack(run, work)))
    (most, whole), *limited = found
    assert most == 8 and 1 < limited[0][0] < 8 and limited[1][0] == 1
    for _, packed in limited:
        assert_equal(packed, whole)


# Edges ----------------------------------------------------------------------------------------------------------------


def test_experts_with_no_and_few_tokens_are_rounded_to_nearest_by_name_and_stay_packed(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens go to experts 0 and 1 but twelve, which go to 3."""
    honest = Decoder.materialise

    class Router(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight, self.tokens = weight, 0

        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            hidden = hidden.reshape(-1, 64)
            chosen = torch.tensor([[0, 1]]).repeat(len(hidden), 1)
            if not self.tokens:
                chosen[10:22, 1] = 3
            self.tokens += len(hidden)
            return hidden @ self.weight.T, torch.full((len(hidden), 2), 0.5), chosen

    def materialise(self: Decoder, *args: Any) -> nn.Module:
        layer = honest(self, *args)
        layer.mlp.gate = Router(layer.mlp.gate.weight)
        return layer

    monkeypatch.setattr(Decoder, "materialise", materialise)
    for run, work in quantized_layer(models["qwen3_moe"], tmp_path):
        packed = quantize_layer.pack(run, work)
        receipt = quantize_layer._receipt(run, work, "key", ObjectRef("layer", "name", "0" * 64, 1), None)
        assert receipt.expert_tokens == (145, 133, 0, 12, 0, 0, 0, 0)
        fallbacks = {module.name: module.fallback for module in receipt.fallbacks}
        assert len(fallbacks) == 6 * 3
        assert fallbacks["mlp.experts.3.down_proj"] == "12 of 145 calibration tokens reached it"
        assert fallbacks["mlp.experts.7.up_proj"] == "0 of 145 calibration tokens reached it"
        assert {module.method for module in receipt.modules if module.fallback is None} == {"awq"}
        # The norm is divided for them too; between their own projections nothing is scaled.
        columns_K = work.scaling.columns[("mlp.experts.7.gate_proj", "mlp.experts.7.up_proj")]
        assert not torch.equal(columns_K, torch.ones(64))
        weights = {name: honest(run.decoder, SPARSE, "cpu").get_submodule(name).weight for name in fallbacks}
        for name in ("mlp.experts.7.up_proj", "mlp.experts.3.gate_proj", "mlp.experts.3.down_proj"):
            nearest = rtn.quantize_rows(weights[name] * (1 if "down" in name else columns_K), AWQ)
            assert torch.equal(work.quantized[name].codes_NK, nearest.codes_NK), name
    keys = [
        sorted((name.partition(f"experts.{n}.")[2], packed[name].shape) for name in packed if f"experts.{n}." in name)
        for n in range(8)
    ]
    assert len(keys[0]) == 9 and all(each == keys[0] for each in keys)


def test_experts_that_rules_leave_keep_their_router_and_their_norm(models: dict[str, Path], tmp_path: Path) -> None:
    source = load_file(models["qwen2_moe"] / "model.safetensors")
    config = AWQConfig(group_size=32, n_grid=6, dynamic=({"pattern": r"-:.*\.experts\."},))  # type: ignore[arg-type]
    for run, work in quantized_layer(models["qwen2_moe"], tmp_path, config):
        packed = quantize_layer.pack(run, work)
        for name in (NORM, f"{LAYER}.mlp.gate.weight", f"{LAYER}.mlp.experts.5.up_proj.weight"):
            assert torch.equal(packed[name], source[name])
        reasons = {subset[0]: outcome.unscaled for subset, outcome in work.outcomes.items() if outcome.unscaled}
    assert reasons.keys() == {"mlp.shared_expert.gate_proj"}


def test_projections_down_that_rules_leave_let_the_others_be_scaled(models: dict[str, Path], tmp_path: Path) -> None:
    config = AWQConfig(group_size=32, n_grid=6, dynamic=({"pattern": r"-:.*\.gate$"}, {"pattern": "-:.*down_proj"}))  # type: ignore[arg-type]
    for run, work in quantized_layer(models["qwen2_moe"], tmp_path, config):
        assert run.decoder.experts(SPARSE) == ()
        assert len(work.scaling.folding.refusals) == 0 and f"{LAYER}.mlp.gate.weight" in work.folded
        assert {outcome.method for outcome in work.outcomes.values()} == {"awq", "rtn"}


def test_a_float16_router_is_let_alone_and_the_plan_says_so_once(tmp_path: Path) -> None:
    model = write_uneven("qwen3_moe", tmp_path / "model", dtype=torch.float16)
    notes = preflight.check(tiny_job(model, tmp_path, quantization=AWQ)).notes
    (note,) = [note for note in notes if "can't be scaled" in note]
    assert note.startswith(
        "layers like 0: mlp.experts.*.gate_proj, mlp.experts.*.up_proj can't be scaled, only clipped: `post"
    )
    assert "float16" in note
    assert any("transformers holds a layer's experts in one tensor" in note for note in notes)
    for _, work in quantized_layer(model, tmp_path / "run"):
        assert not any("gate" in name or "post_attention" in name for name in work.folded)
        up = ("mlp.experts.0.gate_proj", "mlp.experts.0.up_proj")
        assert work.outcomes[up].unscaled is not None and "float16" in work.outcomes[up].unscaled


def test_an_adapter_is_made_for_every_expert_and_changes_no_byte(models: dict[str, Path], tmp_path: Path) -> None:
    _, base = finished_layer(models["qwen3_moe"], tmp_path, 1, SPARSE, quantization=AWQ, calibration=CALIBRATION)
    made = []
    for devices in (1, 2):
        place = tmp_path / str(devices)
        job = tiny_job(
            models["qwen3_moe"], place, quantization=AWQ, calibration=CALIBRATION, devices=("cpu",) * devices
        )
        with open_run(job.model_copy(update={"adapter": EoRAConfig(rank=8)})) as run:
            work, errors = run_shards(run, SPARSE)
            assert errors == []
            assert_equal(quantize_layer.pack(run, work), base)
            assert work.adapter is not None and work.adapter.modules.keys() == work.quantized.keys()
            for name, low_rank in work.adapter.modules.items():
                fallback = next(outcome.fallback for subset, outcome in work.outcomes.items() if name in subset)
                assert fallback or low_rank.loss < work.quantized[name].loss, name
            made.append(work.adapter.tensors(LAYER))
    assert_equal(*made)


# What a plan reckons with ---------------------------------------------------------------------------------------------


def test_moments_in_memory_are_those_of_a_group_and_not_of_all_experts(tmp_path: Path) -> None:
    held = []
    for experts in (8, 16):
        model = write_tiny("qwen3_moe", tmp_path / f"{experts}", num_experts=experts, mlp_only_layers=[])
        held.append(preflight.check(tiny_job(model, tmp_path, quantization=AWQ)).memory.statistics_bytes)
    # q, k and v; o; one expert's two; and the widest three times more.
    assert held == [4 * (64**2 + 64**2 + 64**2 + 32**2 + 3 * 64**2)] * 2


def test_a_group_holds_no_more_sums_than_its_experts(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: set[int] = set()
    peaks: list[int] = []

    class Counted(awq.InputSum):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            alive.add(id(self))
            peaks.append(len(alive))

        def __del__(self) -> None:
            alive.discard(id(self))

    monkeypatch.setattr(awq, "InputSum", Counted)
    most = []
    for size in (1, 2, 8):
        monkeypatch.setattr(scaled_shard, "group_size", lambda run, layer, size=size: size)
        peaks.clear()
        finished_layer(models["qwen3_moe"], tmp_path / str(size), 1, SPARSE, quantization=AWQ, calibration=CALIBRATION)
        most.append(max(peaks))
    assert most == [3, 5, 17]  # two of each expert, and the lane that is being summed


def test_a_sum_takes_what_it_is_said_to(models: dict[str, Path]) -> None:
    scheme: Any = scheme_of(AWQ, SourceModel.open(str(models["mixtral"])))
    total = scheme.statistic(64, torch.device("cpu"))
    held = [total._magnitudes_K, *(value for value in vars(total._products).values() if isinstance(value, Tensor))]
    assert sum(tensor.nbytes for tensor in held) == scheme.sum_bytes(64)
