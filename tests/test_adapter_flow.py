"""Adapters through the real flow: resumed byte for byte, loaded by peft, and nearer to the source than the base alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from flows.quantize_model import quantize_model
from tasks import adapters
from tasks.evaluate import dense_model
from tasks.formats import peft
from tasks.job import QuantizationJob
from tasks.output_directory import damage, read_report
from tasks.preflight import PreflightError, check
from tasks.quantization import AWQConfig, EoRAConfig, GPTQConfig, QQQConfig, Quantization, RTNConfig
from tests.flow_jobs import layers_run, tiny_job
from tests.loaded_exports import logits, relative_difference
from tests.test_schemes import PowerCut, power_cut
from tests.tiny_families import write_tiny
from tests.tiny_models import write_tiny_llama

pytestmark = pytest.mark.usefixtures("prefect_server")

RANK = 32
CONFIGS: dict[str, Quantization] = {
    "gptq": GPTQConfig(bits=3, group_size=32),
    "qqq": QQQConfig(group_size=-1, damp_percent=0.05),
    "awq": AWQConfig(group_size=32),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(
        tmp_path_factory.mktemp("model") / "tiny", hidden_size=128, intermediate_size=256, key_value_heads=4
    )


def job_of(model: Path, place: Path, name: str, rank: int | None = RANK, **options: Any) -> QuantizationJob:
    job = tiny_job(model, place, quantization=CONFIGS[name], **options)
    return job.model_copy(update={"adapter": EoRAConfig(rank=rank) if rank is not None else None})


def contents(output: str | Path) -> dict[str, bytes]:
    """Every file of an export and of its adapter but the report."""
    files = [path for path in Path(output).rglob("*") if path.is_file() and path.name != "quantization_report.json"]
    return {path.relative_to(output).as_posix(): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> dict[str, QuantizationJob]:
    """Jobs that nothing disturbed."""
    jobs = {name: job_of(model, tmp_path_factory.mktemp(name), name) for name in CONFIGS}
    for job in jobs.values():
        quantize_model(job)
    return jobs


@pytest.mark.parametrize(("layer", "modules"), [(0, 3), (1, 0), (1, 6)])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_cut_short_and_resumed_ends_with_the_bytes_of_one_that_was_not(
    name: str, layer: int, modules: int, model: Path, whole: dict[str, QuantizationJob], tmp_path: Path
) -> None:
    job = job_of(model, tmp_path, name, devices=("cpu", "cpu"))
    with power_cut(layer, modules), pytest.raises(PowerCut):
        quantize_model(job)
    with layers_run() as ran:
        quantize_model(job)
    assert ran == list(range(layer, 2))
    assert contents(job.output) == contents(whole[name].output)


def test_the_quantized_model_is_that_of_a_job_without_an_adapter(
    model: Path, whole: dict[str, QuantizationJob], tmp_path: Path
) -> None:
    job = job_of(model, tmp_path, "gptq", rank=None)
    quantize_model(job)
    with_adapter = contents(whole["gptq"].output)
    assert set(with_adapter) - set(contents(job.output)) == {peft.CONFIG_FILE, peft.TENSORS_FILE}
    assert contents(job.output).items() <= with_adapter.items()


@pytest.mark.parametrize("name", CONFIGS)
def test_peft_loads_it_and_it_brings_the_base_nearer_to_the_source(
    name: str, model: Path, whole: dict[str, QuantizationJob]
) -> None:
    output = Path(whole[name].output)
    base = dense_model(output)
    base_logits = logits(base)
    adapted = PeftModel.from_pretrained(base, output / peft.DIRECTORY)
    # Every linear of the layers is wrapped, with exactly the file's matrices.
    held = load_file(output / peft.TENSORS_FILE)
    loaded = {key.replace(".default.", "."): tensor for key, tensor in adapted.state_dict().items() if "lora_" in key}
    assert loaded.keys() == held.keys() and len(held) == 2 * 2 * 7
    assert all(torch.equal(loaded[key].to(tensor.dtype), tensor) for key, tensor in held.items())
    adapted_logits = logits(adapted.eval())
    # As we compute it ourselves.
    ours = dense_model(output)
    for module_name, module in ours.named_modules():
        if module_name.endswith("_proj"):
            prefix = f"{peft.PREFIX}{module_name}"
            module.weight.data += held[f"{prefix}.lora_B.weight"].float() @ held[f"{prefix}.lora_A.weight"].float()
    assert float((adapted_logits - logits(ours)).abs().max()) < 1e-4
    source_logits = logits(dense_model(model))
    assert relative_difference(adapted_logits, source_logits) < 0.9 * relative_difference(base_logits, source_logits)


def test_the_report_tells_each_modules_output_error_before_and_after(whole: dict[str, QuantizationJob]) -> None:
    for name in CONFIGS:
        report = read_report(Path(whole[name].output))
        assert report is not None
        modules = [module for layer in report["layers"] for module in layer["modules"]]
        assert all(0 < module["adapter_loss"] < module["loss"] for module in modules)
        assert {peft.CONFIG_FILE, peft.TENSORS_FILE} < set(report["files"])


def test_a_finished_export_is_verified_with_its_adapter(model: Path, tmp_path: Path) -> None:
    job = job_of(model, tmp_path, "gptq")
    quantize_model(job)
    assert quantize_model(job).status == "verified"
    path = Path(job.output) / peft.TENSORS_FILE
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    report = read_report(Path(job.output))
    assert report is not None and peft.TENSORS_FILE in damage(Path(job.output), report)[0]


def test_an_output_that_exists_empty_is_filled(model: Path, whole: dict[str, QuantizationJob], tmp_path: Path) -> None:
    job = job_of(model, tmp_path, "gptq")
    Path(job.output).mkdir()
    quantize_model(job)
    assert contents(job.output) == contents(whole["gptq"].output)


def test_a_plan_foretells_the_adapters_bytes(model: Path, whole: dict[str, QuantizationJob], tmp_path: Path) -> None:
    plan = check(job_of(model, tmp_path, "gptq"))
    held = load_file(Path(whole["gptq"].output) / peft.TENSORS_FILE)
    assert plan.adapter_bytes == sum(tensor.nbytes for tensor in held.values())
    assert "adapter" in plan.table()
    without = check(job_of(model, tmp_path, "gptq", rank=None))
    assert plan.bytes_after == without.bytes_after + plan.adapter_bytes


def test_what_no_adapter_can_be_made_for_is_refused_before_anything_is_spent(model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        PreflightError, match="adapter rank 200 is more than their smaller side; the largest that fits is 128"
    ):
        check(job_of(model, tmp_path, "gptq", rank=200))
    job = tiny_job(model, tmp_path, quantization=RTNConfig(group_size=32)).model_copy(update={"adapter": EoRAConfig()})
    with pytest.raises(PreflightError, match="method `rtn` does not look at; use one of gptq, awq, qqq"):
        check(job)


def test_the_adapters_config_names_no_place(whole: dict[str, QuantizationJob]) -> None:
    described = json.loads((Path(whole["gptq"].output) / peft.CONFIG_FILE).read_text())
    assert described["base_model_name_or_path"] is None
    assert described["r"] == described["lora_alpha"] == RANK
    assert described["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )


def test_a_reader_that_leaves_out_the_experts_part_is_told_of() -> None:
    dense = {"self_attn.q_proj": (64, 64), "mlp.gate_proj": (128, 64)}
    assert list(adapters.notes(dense)) == []
    (note,) = adapters.notes(dense | {"mlp.experts.0.gate_proj": (128, 64)})
    assert "peft finds no experts" in note


def test_experts_get_matrices_of_their_own_and_the_base_stays_as_without(tmp_path: Path) -> None:
    model = write_tiny("qwen3_moe", tmp_path / "model")
    outputs = []
    for rank in (None, 8):
        job = job_of(model, tmp_path / str(rank), "gptq", rank)
        quantize_model(job)
        outputs.append(contents(job.output))
    base, adapted = outputs
    assert base == {name: data for name, data in adapted.items() if not name.startswith("adapter/")}
    names = load_file(tmp_path / "8" / "output" / peft.TENSORS_FILE)
    experts = [name for name in names if ".experts." in name]
    assert len(experts) >= 2 * 3 * 4 and all(names[name].isfinite().all() for name in experts)
