"""What a run does with the progress that it finds: the three policies, another job's checkpoint, and damage."""

import json
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.flow_engine import run_flow
from prefect.states import AwaitingRetry
from safetensors.torch import load_file, save_file

from checkpoint_store.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointExists,
    CheckpointMissing,
    CheckpointStopped,
    IdentityMismatch,
)
from checkpoint_store.session import CheckpointSession
from checkpoint_store.store import CheckpointStore
from flows import quantize_model as module
from flows.quantize_model import quantize_model
from tasks import running
from tasks.devices import DevicePool
from tasks.job import QuantizationJob
from tasks.models.decoder import Decoder
from tasks.quantization import GPTQConfig
from tests.flow_jobs import LAYERS, contents, last_flow_run, layer_task_states, layers_run, tiny_job
from tests.tiny_models import TEXTS, write_tiny_llama

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", layers=LAYERS)


def stop_after_layer(job: QuantizationJob, layer: int) -> None:
    """Leave a checkpoint with `layer` + 1 finished layers."""

    def on_progress(progress: running.Progress) -> None:
        if progress.layer == layer and progress.module.startswith("self_attn.q_proj"):
            os.kill(os.getpid(), signal.SIGTERM)

    with running.listening(on_progress), pytest.raises(CheckpointStopped):
        quantize_model(job)


def digests(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / "objects").iterdir()}


# Policies -------------------------------------------------------------------------------------------------------------


def test_required_refuses_to_start_and_makes_no_root(model: Path, tmp_path: Path) -> None:
    job = tiny_job(model, tmp_path, resume="required")
    with layers_run() as ran, pytest.raises(CheckpointMissing, match=str(tmp_path / "checkpoint")):
        quantize_model(job)
    assert ran == [] and not (tmp_path / "checkpoint").exists()


def test_required_resumes_what_is_there(model: Path, tmp_path: Path) -> None:
    stop_after_layer(tiny_job(model, tmp_path), 0)
    assert quantize_model(tiny_job(model, tmp_path, resume="required")).resumed_from == 1


def test_never_starts_once_and_then_names_the_path(model: Path, tmp_path: Path) -> None:
    job = tiny_job(model, tmp_path, resume="never")
    stop_after_layer(job, 0)
    before = digests(tmp_path / "checkpoint")
    with layers_run() as ran, pytest.raises(CheckpointExists, match=str(tmp_path / "checkpoint")):
        quantize_model(job)
    assert ran == [] and digests(tmp_path / "checkpoint") == before


def retry(flow_run_id: Any, job: QuantizationJob) -> Any:
    """What a worker does after the retry button: the same flow run, begun again."""
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run_id, AwaitingRetry(), force=True)
        flow_run = client.read_flow_run(flow_run_id)
    return run_flow(quantize_model, flow_run=flow_run, parameters={"job": job})


def test_a_retry_of_a_run_that_was_started_with_never_goes_on_from_its_own_progress(
    model: Path, tmp_path: Path
) -> None:
    job = tiny_job(model, tmp_path, resume="never")
    stop_after_layer(job, 1)
    flow_run = last_flow_run()
    with layers_run() as ran:
        report = retry(flow_run.id, job)
    assert (report.resumed_from, ran) == (2, [2])
    assert layer_task_states(flow_run.id)[-LAYERS:] == ["Cached", "Cached", "Completed"]


def test_a_retry_of_a_run_that_was_started_with_never_does_not_go_on_from_anothers(model: Path, tmp_path: Path) -> None:
    other = tiny_job(model, tmp_path, resume="never", root="elsewhere")
    stop_after_layer(other, 0)
    flow_run = last_flow_run()
    stop_after_layer(tiny_job(model, tmp_path), 0)
    with pytest.raises(CheckpointExists):
        retry(flow_run.id, tiny_job(model, tmp_path, resume="never"))


def test_a_retry_of_a_required_run_may_start(model: Path, tmp_path: Path) -> None:
    job = tiny_job(model, tmp_path, resume="required")
    with pytest.raises(CheckpointMissing):
        quantize_model(job)
    assert retry(last_flow_run().id, job).resumed_from is None


# Another job's checkpoint ---------------------------------------------------------------------------------------------


def changed_weight(model: Path, place: Path) -> Path:
    other = write_tiny_llama(place / "other", layers=LAYERS)
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    return other


def with_topology(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    topology = DevicePool.topology
    monkeypatch.setattr(DevicePool, "topology", lambda pool: [{**device, **change} for device in topology(pool)])


def with_area(monkeypatch: pytest.MonkeyPatch, area: str, change: dict[str, Any]) -> None:
    build = module.identity.build

    def changed(*args: Any) -> dict[str, Any]:
        described = build(*args)
        return {**described, area: {**(described[area] or {}), **change}}

    monkeypatch.setattr(module.identity, "build", changed)


Change = Callable[[Path, Path, pytest.MonkeyPatch], QuantizationJob]
AREAS: dict[str, tuple[Change, str]] = {
    "source": (
        lambda model, place, patch: tiny_job(changed_weight(model, place), place),
        r"source\.shards\.model\.safetensors\.xxh3_128: checkpoint [0-9a-f]{32}, this run [0-9a-f]{32}",
    ),
    "quantization": (
        lambda model, place, patch: tiny_job(model, place, quantization=GPTQConfig(bits=4, group_size=64)),
        r"quantization\.group_size: checkpoint 32, this run 64",
    ),
    "calibration": (
        lambda model, place, patch: tiny_job(model, place, calibration={"data": tuple(reversed(TEXTS))}),
        r"calibration\.digest: checkpoint [0-9a-f]{32}, this run [0-9a-f]{32}",
    ),
    "packed_kernel": (
        lambda model, place, patch: tiny_job(
            model, place, quantization=GPTQConfig(bits=4, group_size=32, checkpoint_format="gptq_v2")
        ),
        r"packed_kernel\.checkpoint_format: checkpoint gptq, this run gptq_v2",
    ),
    "device_topology": (
        lambda model, place, patch: tiny_job(model, place, devices=("cpu", "cpu")),
        r"device_topology\.count: checkpoint 1, this run 2",
    ),
    "runtime": (
        lambda model, place, patch: (
            patch.setattr(module.identity.torch, "__version__", "2.99.0"),  # type: ignore[func-returns-value]
            tiny_job(model, place),
        )[1],
        r"runtime\.torch: checkpoint [0-9.+a-z]+, this run 2\.99\.0",
    ),
    "execution_plan": (
        lambda model, place, patch: tiny_job(model, place).model_copy(update={"seed": 7}),
        r"execution_plan\.seed: checkpoint 0, this run 7",
    ),
    "adapter": (
        lambda model, place, patch: (with_area(patch, "adapter", {"rank": 32}), tiny_job(model, place))[1],  # type: ignore[func-returns-value]
        r"adapter: checkpoint null, this run \{\"rank\": 32\}",
    ),
}


@pytest.fixture(scope="module")
def stopped(model: Path, tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> Path:
    """A place with a checkpoint of one finished layer, which nothing here may change."""
    place = tmp_path_factory.mktemp("stopped")
    stop_after_layer(tiny_job(model, place), 0)
    return place


@pytest.mark.parametrize("area", AREAS)
def test_a_change_in_one_area_is_told_leaf_by_leaf_before_calibration_runs_through_anything(
    area: str, model: Path, stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, message = AREAS[area]
    monkeypatch.setattr(Decoder, "embed", lambda *_: pytest.fail("calibration ran before the identity was checked"))
    before = digests(stopped / "checkpoint")
    job = change(model, tmp_path, monkeypatch)
    job = job.model_copy(update={"checkpoint": tiny_job(model, stopped).checkpoint})
    with layers_run() as ran, pytest.raises(IdentityMismatch, match=message) as mismatch:
        quantize_model(job)
    areas = {line.split(":")[0].strip().split(".")[0] for line in str(mismatch.value).splitlines()[1:-1]}
    assert areas == {area}
    assert ran == [] and digests(stopped / "checkpoint") == before


def test_other_devices_of_the_same_kind_pass_only_without_the_strict_check(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as first:
        with_topology(first, {"uuid": "GPU-1", "serial": "1"})
        stop_after_layer(tiny_job(model, tmp_path), 0)
    with_topology(monkeypatch, {"uuid": "GPU-2", "serial": "2"})
    with pytest.raises(IdentityMismatch, match=r"device_topology\.devices\.0\.uuid: checkpoint GPU-1, this run GPU-2"):
        quantize_model(tiny_job(model, tmp_path))
    with layers_run() as ran:
        assert quantize_model(tiny_job(model, tmp_path, strict_device_check=False)).resumed_from == 1
    assert ran == [1, 2]
    assert layer_task_states(last_flow_run().id) == ["Cached", "Completed", "Completed"]


def test_without_the_strict_check_another_kind_of_device_is_still_refused(
    model: Path, stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for change in ({"name": "another processor"}, {"capability": "9.0"}, {"index": 1}, {"type": "cuda"}):
        with monkeypatch.context() as patched:
            with_topology(patched, change)
            with pytest.raises(IdentityMismatch, match=rf"device_topology\.devices\.0\.{next(iter(change))}"):
                quantize_model(tiny_job(model, stopped, strict_device_check=False))


def test_what_does_not_change_the_result_may_change_between_runs(model: Path, tmp_path: Path) -> None:
    stop_after_layer(tiny_job(model, tmp_path), 0)
    other = tiny_job(model, tmp_path, interval="layer:7", keep_last=5, output="elsewhere")
    other = other.model_copy(update={"telemetry": other.telemetry.model_copy(update={"device": True})})
    assert quantize_model(other).resumed_from == 1


# Damage ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def whole(model: Path, tmp_path: Path) -> tuple[QuantizationJob, dict[str, str], Path]:
    """A finished job whose output has been put aside; its checkpoint retains the generations of two and three layers."""
    job = tiny_job(model, tmp_path)
    quantize_model(job)
    expected = contents(job.output)
    Path(job.output).rename(tmp_path / "first-output")
    return job, expected, tmp_path / "checkpoint"


def damage(root: Path, layer: int) -> Path:
    """Flip a bit in the object of a layer."""
    with CheckpointStore.open(root, mode="read") as store:
        (ref,) = (ref for ref in store.generations()[0].objects if ref.key == f"model.layers.{layer}")
    path = root / "objects" / ref.sha256
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return path


def test_a_damaged_newest_generation_is_passed_over_loudly_for_an_older_one(
    whole: tuple[QuantizationJob, dict[str, str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    job, expected, root = whole
    damage(root, LAYERS - 1)
    caplog.clear()
    with layers_run() as ran:
        report = quantize_model(job)
    assert (report.resumed_from, ran) == (LAYERS - 1, [LAYERS - 1])
    assert contents(job.output) == expected
    assert any(record.levelno >= logging.ERROR and "objects" in record.getMessage() for record in caplog.records)


def test_when_no_generation_is_whole_the_run_fails_and_deletes_nothing(
    whole: tuple[QuantizationJob, dict[str, str], Path],
) -> None:
    job, _, root = whole
    damage(root, 0)
    before = digests(root)
    with layers_run() as ran, pytest.raises(CheckpointDamaged):
        quantize_model(job)
    assert ran == [] and digests(root) == before


def test_a_lost_current_is_replaced_by_the_spare_pointer_loudly(
    whole: tuple[QuantizationJob, dict[str, str], Path],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, expected, root = whole
    before = digests(root)
    (root / "CURRENT").unlink()
    at_the_first_layer: list[dict[str, bytes]] = []
    check = module.check_replay
    monkeypatch.setattr(module, "check_replay", lambda *args: (at_the_first_layer.append(digests(root)), check(*args)))
    caplog.clear()
    with layers_run() as ran:
        quantize_model(job)
    assert ran == [LAYERS - 1], "the spare pointer is one generation behind"
    assert at_the_first_layer == [before], "nothing may be deleted while CURRENT is lost"
    assert before.keys() <= digests(root).keys(), (
        "nor by the run that goes on: the lost CURRENT may have named any of them"
    )
    assert contents(job.output) == expected
    assert any(record.levelno >= logging.ERROR and "CURRENT" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("layers", [1, 3])
def test_when_both_pointers_are_gone_the_run_fails_and_says_how_to_go_on(
    layers: int, model: Path, tmp_path: Path
) -> None:
    job = tiny_job(model, tmp_path)
    stop_after_layer(job, 0) if layers == 1 else quantize_model(job)
    if Path(job.output).exists():
        Path(job.output).rename(tmp_path / "first-output")
    root = tmp_path / "checkpoint"
    for name in ("CURRENT", "CURRENT.prev"):
        (root / name).unlink(missing_ok=True)
    before = digests(root)
    with layers_run() as ran, pytest.raises(CheckpointDamaged, match="prefect-quantize recover"):
        quantize_model(job)
    assert ran == [] and digests(root) == before


def test_a_record_that_was_lost_on_its_way_to_the_store_stops_the_publish(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: CheckpointSession, key: str, data: bytes) -> Any:
        raise OSError("the disk is full")

    monkeypatch.setattr(CheckpointSession, "stage_record", failing)
    with pytest.raises(
        CheckpointError, match=r"record `layer-00000-[0-9a-f]{32}` finished but never reached the store"
    ):
        quantize_model(tiny_job(model, tmp_path))
    monkeypatch.undo()
    assert json.loads((tmp_path / "checkpoint" / "CURRENT").read_bytes().splitlines()[0])["generations"] == []
