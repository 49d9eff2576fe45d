"""ParoQuant through the real flow: cut short and resumed, its learning told, read by an independent program."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flows.quantize_model import quantize_model
from tasks import running
from tasks.adapters import root_bytes
from tasks.evaluate import dense_model
from tasks.formats import peft
from tasks.job import QuantizationJob
from tasks.output_directory import read_report
from tasks.preflight import PreflightError, check
from tasks.quantization import EoRAConfig, ParoQuantConfig, RTNConfig
from tests.flow_jobs import layers_run, tiny_job
from tests.loaded_exports import TOKENS_BT, logits, relative_difference
from tests.test_adapter_flow import contents
from tests.test_clients import ask_client
from tests.test_schemes import PowerCut, power_cut
from tests.tiny_models import write_tiny_llama

pytestmark = pytest.mark.usefixtures("prefect_server")

QUICK = ParoQuantConfig(
    group_size=64, rotation_epochs=2, finetune_epochs=1, train_samples=96, validation_samples=24, train_batch_size=16
)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(scope="module", params=DTYPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources in both half precisions, with biases."""
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", attention_bias=True, dtype=DTYPES[request.param])


def job_of(model: Path, place: Path, **options: object) -> QuantizationJob:
    job = tiny_job(model, place, quantization=QUICK, **options)  # type: ignore[arg-type]
    return job.model_copy(update={"adapter": EoRAConfig(rank=8)})


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> QuantizationJob:
    """A job with an adapter that nothing disturbed."""
    job = job_of(model, tmp_path_factory.mktemp("whole"))
    quantize_model(job)
    return job


@pytest.mark.parametrize(("layer", "modules"), [(0, 3), (1, 0), (1, 5)])
def test_a_run_cut_short_and_resumed_ends_with_the_bytes_of_one_that_was_not(
    layer: int, modules: int, model: Path, whole: QuantizationJob, tmp_path: Path
) -> None:
    job = job_of(model, tmp_path, devices=("cpu", "cpu"))
    with power_cut(layer, modules), pytest.raises(PowerCut):
        quantize_model(job)
    with layers_run() as ran:
        quantize_model(job)
    assert ran == list(range(layer, 2))
    assert contents(job.output) == contents(whole.output)


def test_it_is_nearer_to_the_source_than_rounding_to_nearest_and_nearer_still_with_its_adapter(
    model: Path, whole: QuantizationJob, tmp_path: Path
) -> None:
    rtn = tiny_job(
        model, tmp_path, quantization=RTNConfig(group_size=64, sym=False, checkpoint_format="gptq_v2"), output="rtn"
    )
    quantize_model(rtn)
    source = logits(dense_model(model))
    errors = {
        name: relative_difference(logits(dense_model(Path(output))), source)
        for name, output in (("rtn", rtn.output), ("paroquant", whole.output))
    }
    assert errors["paroquant"] < errors["rtn"]
    report = read_report(Path(whole.output))
    assert report is not None and report["fallbacks"] == 0
    modules = [module for layer in report["layers"] for module in layer["modules"]]
    assert all(0 < module["adapter_loss"] < module["loss"] for module in modules)
    assert (Path(whole.output) / peft.TENSORS_FILE).is_file()


def test_learning_is_told_while_it_goes_on(model: Path, tmp_path: Path) -> None:
    told: list[running.Progress] = []
    with running.listening(told.append):
        quantize_model(tiny_job(model, tmp_path, quantization=QUICK))
    of_one = [now.module for now in told if now.layer == 1 and "mlp.up_proj" in now.module]
    assert of_one == [
        "model.layers.1.mlp.up_proj: rotations, epoch 1 of 2",
        "model.layers.1.mlp.up_proj: rotations, epoch 2 of 2",
        "model.layers.1.mlp.up_proj: weights, epoch 1 of 1",
        "mlp.up_proj",
    ]


def test_a_plan_foretells_the_bytes_and_bad_shapes_are_refused(
    model: Path, whole: QuantizationJob, tmp_path: Path
) -> None:
    plan = check(job_of(model, tmp_path))
    held = [load_file(path) for path in sorted(Path(whole.output).glob("*.safetensors"))]
    packed = sum(tensor.nbytes for shard in held for name, tensor in shard.items() if "_proj." in name)
    assert sum(kind.bytes_after for kind in plan.modules) == packed
    # A vocabulary of embeddings learns nothing, and counts for nothing.
    assert plan.memory.statistics_bytes < 4 * 12 * 128 * 64 + 4 * 4 * 120 * 128 + root_bytes(128) + 1
    bad = tiny_job(model, tmp_path, quantization=ParoQuantConfig(group_size=128))
    with pytest.raises(PreflightError, match="in_features 64 is not a multiple of group_size 128; 64 would fit"):
        check(bad)


@pytest.mark.slow
def test_gptqmodel_loads_the_export_and_computes_what_it_says(whole: QuantizationJob, tmp_path: Path) -> None:
    loaded = ask_client("gptqmodel", {"paroquant": Path(whole.output)}, TOKENS_BT.tolist(), tmp_path)["paroquant"]
    assert set(loaded.answer["classes"].values()) == {"gptqmodel.nn_modules.qlinear.paroquant.ParoLinear"}
    # It turns the inputs in float16, and rounds after each of the eight sets.
    assert relative_difference(loaded.logits["loaded"], loaded.expected) < 1e-2
