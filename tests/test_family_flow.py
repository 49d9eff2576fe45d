"""Families through the whole flow: stopped, gone on with, exported, and loaded by transformers as a dense model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_store.objects import ObjectRef
from flows.quantize_model import quantize_model
from tasks import preflight
from tasks.evaluate import dense_model
from tasks.formats import gptq as gptq_layout
from tasks.job import QuantizationJob
from tasks.models.decoder import Decoder
from tasks.models.source import SourceModel
from tasks.quantization import AWQConfig, BitsAndBytesConfig, FP8Config, GGUFConfig, GPTQConfig, Quantization, RTNConfig
from tasks.schemes import scheme_of
from tests.flow_jobs import contents, layers_run, tiny_job
from tests.layer_runs import finished_layer
from tests.test_resume import stop_in_layer
from tests.tiny_families import FAMILIES, write_tiny

EIGHT_BITS = GPTQConfig(bits=8, group_size=32)
# 8-bit codes in groups of 32 lose about a percent of a weight. Random routers are near ties: a few tokens go to other
# experts than in the source, which shows in the logits far more than the codes themselves.
WEIGHT_TOLERANCE = 0.02
LOGITS_TOLERANCE = 0.15
IDS = torch.arange(2 * 30).reshape(2, 30) * 37 % 311
FURTHER = {f"model.layers.3.{name}.weight": torch.randn(8, 8) for name in ("eh_proj", "enorm", "mlp.gate")}


def difference(output: Path | str, source: Path) -> float:
    """Of the export's logits, as transformers computes them from dense weights, from the source's."""
    with torch.no_grad():
        expected, found = dense_model(source)(IDS).logits, dense_model(output)(IDS).logits
    return float((found - expected).norm() / expected.norm())


def stopped_and_whole(model: Path, place: Path, quantization: Quantization) -> QuantizationJob:
    """A job stopped in its second layer and gone on with; its export is that of one that was not stopped."""
    whole = tiny_job(model, place / "whole", quantization=quantization)
    quantize_model(whole)
    job = tiny_job(model, place / "stopped", quantization=quantization)
    stop_in_layer(job, 1)
    with layers_run() as ran:
        assert quantize_model(job).resumed_from == 2
    assert ran == [2]
    assert contents(job.output) == contents(whole.output)
    return job


def exported(job: QuantizationJob) -> dict[str, Any]:
    return {name: tensor for file in Path(job.output).glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize(
    "family",
    [
        "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3", "olmo2", "smollm3", "granite",
        "starcoder2", "stablelm", "deepseek_v3", "gpt_oss", "qwen3_5_text", "lfm2",
    ],
)  # fmt: skip
def test_a_family_is_stopped_gone_on_with_exported_and_loaded(family: str, tmp_path: Path) -> None:
    options = {"num_nextn_predict_layers": 1} if family == "deepseek_v3" else {}
    model = write_tiny(family, tmp_path / "model", **options)
    if options:
        save_file(load_file(model / "model.safetensors") | FURTHER, model / "model.safetensors", {"format": "pt"})
    job = stopped_and_whole(model, tmp_path, EIGHT_BITS)
    assert difference(job.output, model) < LOGITS_TOLERANCE
    tensors, source = exported(job), SourceModel.open(str(model))
    decoder = Decoder.from_source(source)
    linears = {
        f"{decoder.layer_name(i)}.{name}" for i in range(decoder.layer_count) for name in decoder.linear_shapes(i)
    }
    assert {name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")} == linears
    for name in linears:
        dense = gptq_layout.unpack(tensors, name, EIGHT_BITS).dequantize()
        weight = source.load([f"{name}.weight"])[f"{name}.weight"].float()
        assert (dense - weight).norm() < WEIGHT_TOLERANCE * weight.norm(), name
    kept = {name for name in source.tensors if name.rpartition(".")[0] not in linears}
    assert all(tensors[name].equal(source.load([name])[name]) for name in kept)
    assert (set(FURTHER) <= kept) == bool(options)


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("quantization", [RTNConfig(bits=8, group_size=32), FP8Config()])
def test_experts_are_quantized_without_calibration_too(quantization: Quantization, tmp_path: Path) -> None:
    model = write_tiny("qwen3_moe", tmp_path / "model")
    job = stopped_and_whole(model, tmp_path, quantization)
    assert difference(job.output, model) < LOGITS_TOLERANCE


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("family, checkpoint_format", [("qwen2_moe", "awq"), ("mixtral", "compressed-tensors")])
def test_awq_on_a_mixture_is_stopped_gone_on_with_exported_and_read(
    family: str, checkpoint_format: str, tmp_path: Path
) -> None:
    """In four bits, where the routers of random models send many tokens elsewhere, and in eight."""
    bits = {"awq": 4, "compressed-tensors": 8}[checkpoint_format]
    config = AWQConfig(bits=bits, group_size=32, n_grid=6, checkpoint_format=checkpoint_format)  # type: ignore[arg-type]
    model = write_tiny(family, tmp_path / "model")
    job = stopped_and_whole(model, tmp_path, config)
    assert difference(job.output, model) < {4: 0.6, 8: LOGITS_TOLERANCE}[bits]
    suffix = {"awq": "qweight", "compressed-tensors": "weight_packed"}[checkpoint_format]
    experts = {"qwen2_moe": "mlp.experts.7.down_proj", "mixtral": "block_sparse_moe.experts.3.w2"}[family]
    assert f"model.layers.2.{experts}.{suffix}" in exported(job)


@pytest.mark.parametrize(
    "quantization, key",
    [
        (RTNConfig(group_size=32, checkpoint_format="compressed-tensors"), "ignore"),
        (FP8Config(granularity="block", checkpoint_format="fp8"), "modules_to_not_convert"),
        (BitsAndBytesConfig(), "llm_int8_skip_modules"),
    ],
)
def test_readers_are_told_of_routers_and_carried_matrices(quantization: Quantization, key: str, tmp_path: Path) -> None:
    model = write_tiny("qwen2_moe", tmp_path / "model")
    source = SourceModel.open(str(model))
    decoder, scheme = Decoder.from_source(source), scheme_of(quantization, source)
    described = scheme.leave_out(scheme.quantization_config(), decoder.kept_modules)
    routers = [f"model.layers.{i}.mlp.{name}" for i in (0, 2) for name in ("gate", "shared_expert_gate")]
    assert sorted(described[key]) == sorted(["lm_head", *routers])
    assert scheme.quantization_config()[key] == ["lm_head"]


def test_readers_of_awq_are_told_of_routers_where_there_are_any(tmp_path: Path) -> None:
    quantization = RTNConfig(group_size=32, checkpoint_format="awq")
    told = {}
    for family in ("qwen2_moe", "llama"):
        source = SourceModel.open(str(write_tiny(family, tmp_path / family)))
        decoder, scheme = Decoder.from_source(source), scheme_of(quantization, source)
        told[family] = scheme.leave_out(scheme.quantization_config(), decoder.kept_modules)["modules_to_not_convert"]
    assert "model.layers.0.mlp.shared_expert_gate" in told["qwen2_moe"] and "lm_head" not in told["qwen2_moe"]
    assert told["llama"] is None


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_layer_of_every_family_is_quantized_and_packed(family: str, tmp_path: Path) -> None:
    model = write_tiny(family, tmp_path / "model")
    work, packed = finished_layer(model, tmp_path, 1, 2, calibration={"samples": 2}, quantization=EIGHT_BITS)
    assert len([name for name in packed if name.endswith(".qweight")]) == len(work.quantized)
    assert all(hidden.isfinite().all() for hidden in work.outputs.values())


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_preflight_plans_every_family_and_its_sizes_add_up(family: str, tmp_path: Path) -> None:
    model = write_tiny(family, tmp_path / "model")
    plan = preflight.check(tiny_job(model, tmp_path))
    assert plan.family == family
    assert plan.bytes_before == sum(info.size_bytes for info in SourceModel.open(str(model)).tensors.values())


def test_the_plan_has_one_line_for_all_experts_of_a_projection(tmp_path: Path) -> None:
    plan = preflight.check(tiny_job(write_tiny("qwen3_moe", tmp_path / "model"), tmp_path))
    counts = {kind.name: (kind.count, kind.out_features, kind.in_features) for kind in plan.modules}
    assert counts["mlp.experts.*.gate_proj"] == (16, 32, 64)
    assert counts["mlp.experts.*.down_proj"] == (16, 64, 32)
    assert counts["mlp.gate_proj"] == (1, 128, 64)
    assert len(counts) == 10
    assert "mlp.experts.*.up_proj" in plan.table()


@pytest.mark.parametrize(
    "quantization, reason",
    [
        (GGUFConfig(), "this model has dense layers"),
        (GPTQConfig(group_size=64), "`mlp.experts.*.down_proj` of every layer: in_features 32"),
    ],
)
def test_what_a_mixture_can_not_be_made_into_is_refused_by_name(
    quantization: Quantization, reason: str, tmp_path: Path
) -> None:
    model = write_tiny("qwen3_moe", tmp_path / "model")
    with pytest.raises(preflight.PreflightError) as refused:
        preflight.check(tiny_job(model, tmp_path, quantization=quantization))
    assert any(reason in problem for problem in refused.value.problems), refused.value.problems


def test_a_memory_limit_below_the_largest_layer_is_refused(tmp_path: Path) -> None:
    job = tiny_job(write_tiny("qwen3_moe", tmp_path / "model"), tmp_path).model_copy(update={"memory_limit": 1000})
    with pytest.raises(preflight.PreflightError, match="memory"):
        preflight.check(job)


def test_the_report_tells_how_many_tokens_reached_each_expert(tmp_path: Path) -> None:
    from tasks.quantize_layer import _receipt
    from tests.layer_runs import open_run, run_shards

    with open_run(tiny_job(write_tiny("qwen3_moe", tmp_path / "model"), tmp_path)) as run:
        receipts = [
            _receipt(run, run_shards(run, layer)[0], "key", ObjectRef("layer", "name", "0" * 64, 1), None)
            for layer in (0, 1)
        ]
        assert sum(receipts[0].expert_tokens) == 2 * run.calibration_tokens
    assert receipts[1].expert_tokens == ()
    assert json.loads(receipts[0].model_dump_json())["expert_tokens"] == list(receipts[0].expert_tokens)
