"""GPTAQ and FOEM through whole layers and runs: both models' inputs, token by token, and the same bytes whatever happens."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from checkpoint_store.errors import IdentityMismatch
from flows.quantize_model import quantize_model
from tasks import quantize_layer, quantize_shard
from tasks.hidden_states import SpilledTensor, loaded
from tasks.job import QuantizationJob
from tasks.layer_work import LayerWork
from tasks.methods import gptaq, gptq
from tasks.preflight import check
from tasks.quantization import EoRAConfig, FOEMConfig, GPTAQConfig, GPTQConfig
from tasks.running import Run
from tests.flow_jobs import LAYERS, contents, layers_run, tiny_job
from tests.fp8_models import write_fp8
from tests.layer_runs import assert_equal, finished_layer, open_run, run_shards
from tests.test_resume import stop_in_layer
from tests.tiny_families import write_tiny
from tests.tiny_models import write_tiny_llama

PLAIN = GPTQConfig(group_size=32)
GPTAQ = GPTQConfig(group_size=32, gptaq=GPTAQConfig(alpha=0.5))
BOTH = GPTQConfig(group_size=32, foem=FOEMConfig(alpha=0.25, beta=0.2))
ONE_A_BATCH = {"batch_size": 1}  # no padding, which a plain forward would take for tokens
SPARSE = 2  # a layer with experts, of qwen3_moe


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", layers=LAYERS)


@pytest.fixture(scope="module")
def sparse_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("qwen3_moe", tmp_path_factory.mktemp("model") / "sparse")


def go_through(run: Run, layers: int) -> LayerWork:
    """Quantize the first layers, one after the other; what the last one left."""
    for layer in range(layers):
        work, errors = run_shards(run, layer)
        assert errors == []
        run.hidden = [work.outputs[batch] for batch in range(len(run.hidden))]
    return work


def halves(run: Run) -> tuple[list[Tensor], list[Tensor]]:
    """The hidden states of the quantized model and of the unquantized one."""
    count = len(run.hidden) // 2
    hidden = [loaded(held) for held in run.hidden]
    return hidden[:count], hidden[count:]


def forward(run: Run, number: int, layer: nn.Module, hidden: list[Tensor]) -> tuple[dict[str, list[Tensor]], list[Any]]:
    """What enters each linear, batch by batch, and what leaves the layer, by transformers' own forward."""
    inputs: dict[str, list[Tensor]] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, name=name: inputs.setdefault(name, []).append(args[0].reshape(-1, args[0].shape[-1]))
        )
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    ]
    outputs = []
    for batch, entering in enumerate(hidden):
        mask = run.calibration_batch(batch).attention_mask
        with torch.no_grad():
            leaving = layer(entering.float(), **run.decoder.call_arguments(number, entering.float(), mask))
        outputs.append(leaving[0] if isinstance(leaving, tuple) else leaving)
    for hook in hooks:
        hook.remove()
    return inputs, outputs


def codes(weight_NK: Tensor, seen: list[Tensor], original: list[Tensor], config: GPTQConfig) -> Tensor:
    """What a module becomes by sums in float64 over all tokens at once."""
    x_TK, original_TK = torch.cat(seen).double(), torch.cat(original).double()
    factor = gptq.factor_hessian(2 / len(x_TK) * x_TK.T @ x_TK, config)
    cross_KK = (2 / len(x_TK) * (original_TK - x_TK).T @ x_TK).float()
    return gptq.quantize_rows(weight_NK, gptaq.with_shift(factor, cross_KK, config.asymmetry), config).codes_NK


def test_the_second_hidden_states_are_those_of_the_unquantized_model(model: Path, tmp_path: Path) -> None:
    job = tiny_job(model, tmp_path, quantization=GPTAQ, calibration=ONE_A_BATCH)
    with open_run(job) as run:
        quantized, expected = halves(run)
        assert all(torch.equal(one, other) for one, other in zip(quantized, expected, strict=True))
        for layer in range(LAYERS):
            _, leaving = forward(run, layer, run.decoder.materialise(layer, "cpu"), expected)
            expected = [hidden.bfloat16() for hidden in leaving]
        go_through(run, LAYERS)
        quantized, original = halves(run)
        assert all(torch.equal(one, other) for one, other in zip(original, expected, strict=True))
        assert not any(torch.equal(one, other) for one, other in zip(quantized, original, strict=True))


@pytest.mark.parametrize("in_order", [True, False])
def test_modules_are_quantized_by_what_enters_them_in_both_models(model: Path, tmp_path: Path, in_order: bool) -> None:
    config = GPTAQ.model_copy(update={"true_sequential": in_order})
    job = tiny_job(model, tmp_path, quantization=config, calibration=ONE_A_BATCH)
    with open_run(job) as run:
        go_through(run, 1)
        quantized, original = halves(run)
        work, errors = run_shards(run, 1)
        assert errors == []
        original_inputs, _ = forward(run, 1, run.decoder.materialise(1, "cpu"), original)
        layer = run.decoder.materialise(1, "cpu")
        weights = {name: layer.get_submodule(name).weight.clone() for name in original_inputs}
        if in_order:  # the last linear sees all others quantized, and so on from the first
            for name in original_inputs:
                layer.get_submodule(name).weight.data.copy_(work.quantized[name].dequantize())
        inputs, _ = forward(run, 1, layer, quantized)
        plain = {}
        for name, weight_NK in weights.items():
            expected_NK = codes(weight_NK, inputs[name], original_inputs[name], config)
            assert (work.quantized[name].codes_NK == expected_NK).float().mean() > 0.99, name
            plain[name] = codes(weight_NK, inputs[name], inputs[name], config)
        assert all((work.quantized[name].codes_NK == plain[name]).float().mean() < 0.99 for name in plain)


def test_an_experts_tokens_are_the_same_in_both_models_and_count_as_they_are_where_only_one_sends_them(
    sparse_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against routers that are asked here, token by token."""
    taken: dict[str, list[tuple[Tensor, Tensor]]] = {}
    sums: dict[int, list[tuple[Tensor, Tensor]]] = {}
    add, offer = gptaq.AsymmetricSum.add, LayerWork.offer

    def noted(self: Any, x_TK: Tensor, original_TK: Tensor | None = None) -> None:
        assert original_TK is not None
        sums.setdefault(id(self), []).append((x_TK.clone(), original_TK.clone()))
        add(self, x_TK, original_TK)

    def offered(self: Any, subset: tuple[str, ...], lane: int, statistic: Any) -> None:
        taken.setdefault(subset[0], []).extend(sums.pop(id(statistic), []))
        offer(self, subset, lane, statistic)

    job = tiny_job(sparse_model, tmp_path, quantization=GPTAQ, calibration=ONE_A_BATCH)
    with open_run(job) as run:
        go_through(run, SPARSE)
        monkeypatch.setattr(gptaq.AsymmetricSum, "add", noted)
        monkeypatch.setattr(LayerWork, "offer", offered)
        quantized, original = halves(run)
        work, errors = run_shards(run, SPARSE)
        assert errors == []
        routed = []
        for is_quantized, hidden in ((True, quantized), (False, original)):
            layer = run.decoder.materialise(SPARSE, "cpu")
            if is_quantized:
                for name in (name for name in work.quantized if name.startswith("self_attn")):
                    layer.get_submodule(name).weight.data.copy_(work.quantized[name].dequantize())
            seen: list[Any] = []
            layer.mlp.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
            layer.mlp.gate.register_forward_hook(lambda _, args, output, seen=seen: seen.append(output[2]))
            forward(run, SPARSE, layer, hidden)
            tokens_TH = torch.cat([x.flatten(0, 1) for x in seen[::2]])
            routed.append((tokens_TH, torch.cat(seen[1::2])))
    (tokens_TH, chosen_TS), (original_TH, chosen_there_TS) = routed
    with_both = with_one = 0
    for expert in range(8):
        expected = {}
        for token in torch.where((chosen_TS == expert).any(dim=1))[0].tolist():
            is_there = bool((chosen_there_TS[token] == expert).any())
            with_both, with_one = with_both + is_there, with_one + (not is_there)
            expected[tuple(tokens_TH[token].tolist())] = (original_TH if is_there else tokens_TH)[token]
        pairs = taken.get(f"mlp.experts.{expert}.gate_proj", [])
        found = {tuple(x_H.tolist()): other_H for x, other in pairs for x_H, other_H in zip(x, other, strict=True)}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert with_both > 100 and with_one > 5


@pytest.mark.parametrize("quantization", [GPTAQ, BOTH, GPTAQ.model_copy(update={"true_sequential": False})])
def test_every_pool_size_gives_the_same_bytes(quantization: GPTQConfig, sparse_model: Path, tmp_path: Path) -> None:
    outcomes = []
    for devices in (1, 3):
        job = tiny_job(
            sparse_model, tmp_path, quantization=quantization, devices=("cpu",) * devices, root=f"root-{devices}"
        )
        with open_run(job) as run:
            work = go_through(run, SPARSE + 1)
            outcomes.append((quantize_layer.pack(run, work), {f"{batch:02d}": h for batch, h in work.outputs.items()}))
    for one, other in zip(*outcomes, strict=True):
        assert_equal(one, other)


def test_every_grouping_of_experts_gives_the_same_bytes(
    sparse_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = []
    for size in (1, 3, 8):
        with monkeypatch.context() as patched:
            patched.setattr(
                quantize_shard, "group_size", lambda run, layer, size=size: size if run.decoder.experts(layer) else 0
            )
            with open_run(tiny_job(sparse_model, tmp_path, quantization=GPTAQ, root=f"{size}")) as run:
                packed.append(quantize_layer.pack(run, go_through(run, SPARSE + 1)))
    for other in packed[1:]:
        assert_equal(packed[0], other)


@pytest.mark.parametrize("in_order", [True, False])
def test_hidden_states_in_files_give_the_same_bytes(model: Path, tmp_path: Path, in_order: bool) -> None:
    config, outcomes = GPTAQ.model_copy(update={"true_sequential": in_order}), []
    for spills in (False, True):
        with open_run(tiny_job(model, tmp_path, quantization=config, root=f"{spills}")) as run:
            run.spills = spills
            run.hidden = [run.held(loaded(hidden)) for hidden in run.hidden]
            work = go_through(run, 2)
            assert all(isinstance(held, SpilledTensor) == spills for held in work.outputs.values())
            outputs = {f"{batch:02d}": loaded(held) for batch, held in work.outputs.items()}
            outcomes.append((quantize_layer.pack(run, work), outputs))
    for one, other in zip(*outcomes, strict=True):
        assert_equal(one, other)


def test_foem_alone_needs_no_second_hidden_states(model: Path, tmp_path: Path) -> None:
    config = GPTQConfig(group_size=32, foem=FOEMConfig())
    work, packed = finished_layer(model, tmp_path, 1, quantization=config)
    _, plain = finished_layer(model, tmp_path / "plain", 1, quantization=PLAIN)
    assert len(work.outputs) == len(work.run.hidden) == 3
    assert any(not torch.equal(packed[name], plain[name]) for name in packed)


@pytest.mark.parametrize("options", [{"gptaq": GPTAQConfig(alpha=0)}, {"foem": FOEMConfig(alpha=0, beta=0)}])
def test_without_a_share_the_layer_is_that_of_gptq(options: dict[str, Any], model: Path, tmp_path: Path) -> None:
    _, packed = finished_layer(model, tmp_path, 1, quantization=PLAIN.model_copy(update=options))
    _, plain = finished_layer(model, tmp_path / "plain", 1, quantization=PLAIN)
    assert_equal(packed, plain)


def test_an_adapter_is_measured_from_the_sources_weights_on_the_quantized_models_inputs(
    model: Path, tmp_path: Path
) -> None:
    job = tiny_job(model, tmp_path, quantization=GPTAQ, calibration=ONE_A_BATCH)
    job = job.model_copy(update={"adapter": EoRAConfig(rank=16)})
    with open_run(job) as run:
        go_through(run, 2)
        quantized, _ = halves(run)
        work, errors = run_shards(run, 2)
        assert errors == [] and work.adapter is not None
        name = "self_attn.q_proj"
        layer = run.decoder.materialise(2, "cpu")
        inputs, _ = forward(run, 2, layer, quantized)
        weight_NK, made = layer.get_submodule(name).weight, work.adapter.modules[name]
    x_TK, lost_NK = torch.cat(inputs[name]), weight_NK - work.quantized[name].dequantize()
    left_NK = lost_NK - made.b_NR.float() @ made.a_RK.float()
    assert made.loss == pytest.approx(float((x_TK @ left_NK.T).double().square().mean()), rel=0.01)
    assert made.loss < 0.9 * float((x_TK @ lost_NK.T).double().square().mean())
    assert work.adapter.modules.keys() == work.quantized.keys()


def test_rules_leave_modules_or_give_them_settings_in_both_models(model: Path, tmp_path: Path) -> None:
    rules = {"-:.*o_proj": {}, ".*down_proj": {"bits": 8}}
    config = GPTQConfig(group_size=32, gptaq=GPTAQConfig(alpha=0.5), dynamic=rules)
    with open_run(tiny_job(model, tmp_path, quantization=config)) as run:
        work = go_through(run, 2)
    assert "self_attn.o_proj" not in work.quantized
    assert int(work.quantized["mlp.down_proj"].codes_NK.max()) > 15
    assert work.outcomes[("mlp.down_proj",)].method == "gptq"


def test_the_head_is_quantized_by_what_enters_it_in_both_models(model: Path, tmp_path: Path) -> None:
    config = GPTAQ.model_copy(update={"lm_head": True})
    job = tiny_job(model, tmp_path, quantization=config, calibration=ONE_A_BATCH)
    with open_run(job) as run:
        go_through(run, LAYERS)
        quantized, original = halves(run)
        work, errors = run_shards(run, LAYERS)
        assert errors == []
        layer = run.decoder.materialise(LAYERS, "cpu")
        inputs, _ = forward(run, LAYERS, layer, quantized)
        original_inputs, _ = forward(run, LAYERS, layer, original)
        weight_NK = layer.get_submodule("lm_head").weight
    expected_NK = codes(weight_NK, inputs["lm_head"], original_inputs["lm_head"], config)
    assert (work.quantized["lm_head"].codes_NK == expected_NK).float().mean() > 0.99
    assert not torch.equal(expected_NK, codes(weight_NK, inputs["lm_head"], inputs["lm_head"], config))


def test_an_fp8_source_gives_the_bytes_of_its_widened_copy(model: Path, tmp_path: Path) -> None:
    wide = write_fp8(model, tmp_path / "fp8", block=(32, 32))
    shutil.copytree(model, tmp_path / "wide")
    save_file(wide, tmp_path / "wide" / "model.safetensors", metadata={"format": "pt"})
    packed = []
    for name in ("fp8", "wide"):
        with open_run(tiny_job(tmp_path / name, tmp_path, quantization=GPTAQ, root=f"root-{name}")) as run:
            packed.append(quantize_layer.pack(run, go_through(run, 2)))
    assert_equal(*packed)


@pytest.mark.parametrize("family", ["deepseek_v3", "gemma3_text", "gpt_neox", "mixtral", "phi3", "starcoder2"])
def test_a_twin_of_every_kind_of_layer_shares_its_weights_and_computes_the_same(family: str, tmp_path: Path) -> None:
    with open_run(tiny_job(write_tiny(family, tmp_path / "model"), tmp_path, quantization=GPTAQ)) as run:
        quantized, original = halves(run)
        for number in run.decoder.layers_of_each_kind:
            layer = run.decoder.materialise(number, "cpu")
            twin = run.decoder.twin(layer)
            pairs = list(zip(layer.parameters(), twin.parameters(), strict=True))
            assert all(one is not other and one.data_ptr() == other.data_ptr() for one, other in pairs)
            _, leaving = forward(run, number, twin, original)
            for parameter in layer.parameters():
                parameter.data = torch.zeros_like(parameter)
            _, leaving_still = forward(run, number, twin, original)
            assert all(torch.equal(one, other) for one, other in zip(leaving, leaving_still, strict=True))
            _, expected = forward(run, number, run.decoder.materialise(number, "cpu"), quantized)
            assert all(torch.equal(one, other) for one, other in zip(leaving, expected, strict=True))
        go_through(run, 1)


# Whole runs -----------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Takes the place of a kill: nothing of the program handles it."""


@pytest.fixture
def cut_short(monkeypatch: pytest.MonkeyPatch) -> Callable[[QuantizationJob, int, int], None]:
    """Run a job up to the module of this number in a layer, and end it there."""

    def cut(job: QuantizationJob, layer: int, module: int) -> None:
        keep, kept = LayerWork.keep, []

        def ending(self: LayerWork, name: str, rows: Any) -> None:
            keep(self, name, rows)
            if self.layer == layer:
                kept.append(name)
                if len(kept) == module:
                    raise Killed

        with monkeypatch.context() as patched, pytest.raises(Killed):
            patched.setattr(LayerWork, "keep", ending)
            quantize_model(job)

    return cut


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("quantization", [GPTAQ, BOTH])
def test_a_run_ended_in_and_after_every_layer_ends_with_the_bytes_of_one_that_was_not(
    quantization: GPTQConfig, model: Path, tmp_path: Path, cut_short: Any
) -> None:
    whole = tiny_job(model, tmp_path / "whole", quantization=quantization)
    quantize_model(whole)
    job = tiny_job(model, tmp_path / "stopped", quantization=quantization)
    for layer in range(LAYERS - 1):
        cut_short(job, layer, 5)
        with layers_run() as ran:
            assert f"{layer + 1} of {LAYERS} layers published" in str(stop_in_layer(job, layer))
        assert ran == [layer]
    with layers_run() as ran:
        quantize_model(job)
    assert ran == [LAYERS - 1]
    assert contents(job.output) == contents(whole.output)
    plain = tiny_job(model, tmp_path / "plain", quantization=PLAIN)
    quantize_model(plain)
    unlike = contents(plain.output).items() ^ contents(whole.output).items()
    assert {name for name, _ in unlike if name.endswith(".safetensors")}


@pytest.mark.usefixtures("prefect_server")
def test_a_mixture_of_experts_with_an_adapter_and_states_in_files_goes_on_with_the_same_bytes(
    sparse_model: Path, tmp_path: Path, cut_short: Any
) -> None:
    def job_at(place: str) -> QuantizationJob:
        job = tiny_job(sparse_model, tmp_path / place, quantization=GPTAQ)
        return job.model_copy(update={"adapter": EoRAConfig(rank=4), "hidden_states_limit": 0})

    whole, job = job_at("whole"), job_at("stopped")
    quantize_model(whole)
    stop_in_layer(job, 1)
    cut_short(job, SPARSE, 9)
    quantize_model(job)
    files = [sorted(path.relative_to(j.output) for path in Path(j.output).rglob("*.safetensors")) for j in (job, whole)]
    assert files[0] == files[1] and len(files[0]) >= 2
    for path in files[0]:
        assert (Path(job.output) / path).read_bytes() == (Path(whole.output) / path).read_bytes(), path


@pytest.mark.usefixtures("prefect_server")
def test_a_checkpoint_is_not_gone_on_with_under_another_share(model: Path, tmp_path: Path) -> None:
    job = tiny_job(model, tmp_path, quantization=GPTAQ)
    stop_in_layer(job, 0)
    for quantization, told in (
        (GPTQConfig(group_size=32, gptaq=GPTAQConfig(alpha=0.25)), "quantization.gptaq.alpha: checkpoint 0.5, this run 0.25"),
        (PLAIN, "quantization.gptaq"),
        (BOTH, "quantization.foem"),
    ):  # fmt: skip
        with pytest.raises(IdentityMismatch) as mismatch:
            quantize_model(job.model_copy(update={"quantization": quantization}))
        assert told in str(mismatch.value)


def test_the_plan_counts_both_models_hidden_states(model: Path, tmp_path: Path) -> None:
    plain, twice = (check(tiny_job(model, tmp_path, quantization=config)) for config in (PLAIN, GPTAQ))
    assert twice.continuation_bytes == 2 * plain.continuation_bytes > 0
    assert twice.samples_bytes == pytest.approx(2 * plain.samples_bytes, rel=0.05)
    assert twice.memory.device_peak_bytes > plain.memory.device_peak_bytes
    assert twice.memory.least_bytes > plain.memory.least_bytes
    assert "GPTAQ with alpha 0.5" in twice.summary
    in_checkpoint = [plan.spaces[0].needed_bytes for plan in (plain, twice)]
    assert in_checkpoint[1] - in_checkpoint[0] == 3 * plain.continuation_bytes
