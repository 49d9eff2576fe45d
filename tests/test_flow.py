"""The flow as a whole: its report, its names, its progress, and that devices decide nothing."""

import inspect
import itertools
import json
import logging
import os
import re
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import Abort
from prefect.flow_engine import run_flow
from prefect.states import Pending
from safetensors.torch import load_file, save_file

from checkpoint_store import session
from checkpoint_store.errors import CheckpointStopped, StorageFull, StoreLocked
from checkpoint_store.published import Generation
from checkpoint_store.store import CheckpointStore
from flows import stopping
from flows.layers_at_once import LayerFailed
from flows.quantize_model import quantize_model
from tasks import devices, layer_work, quantize_layer, quantize_shard, running, telemetry
from tasks.devices import DeviceBusy, DevicePool
from tasks.job import TelemetryConfig
from tasks.methods import gptq
from tasks.quantization import GPTQConfig, RTNConfig
from tests.flow_jobs import LAYERS, contents, last_flow_run, layer_task_states, layers_run, tiny_job
from tests.tiny_models import write_tiny_llama

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", layers=LAYERS)


def test_the_report_says_what_every_module_cost(model: Path, tmp_path: Path) -> None:
    job = tiny_job(model, tmp_path)
    report = quantize_model(job)
    assert (report.status, report.method, report.model, report.resumed_from) == ("done", "gptq", "tiny", None)
    assert [receipt.name for receipt in report.layers] == [f"model.layers.{layer}" for layer in range(LAYERS)]
    assert report.calibration["samples"] == 6
    for receipt in report.layers:
        assert len(receipt.modules) == 7 and receipt.fallbacks == ()
        assert {module.method for module in receipt.modules} == {"gptq"}
        assert {module.tokens for module in receipt.modules} == {report.calibration["tokens"]}
        assert all(module.loss > 0 and module.damp_percent == 0.05 for module in receipt.modules)
    assert report.loss == pytest.approx(sum(receipt.loss for receipt in report.layers) / LAYERS)


def test_one_cpu_and_two_give_the_same_bytes(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_shard, "UNIT_ROWS", 48)  # several units, that cut through modules
    outputs = []
    for pool in (("cpu",), ("cpu", "cpu")):
        job = tiny_job(model, tmp_path / str(len(pool)), devices=pool)
        quantize_model(job)
        outputs.append(contents(job.output))
    assert outputs[0] == outputs[1]


def test_rtn_needs_no_calibration_and_stores_no_continuation(model: Path, tmp_path: Path) -> None:
    job = tiny_job(model, tmp_path, quantization=RTNConfig(group_size=32), keep_last=4)
    job = job.model_copy(update={"calibration": None})
    report = quantize_model(job)
    assert {module.method for receipt in report.layers for module in receipt.modules} == {"rtn"}
    with CheckpointStore.open(Path(job.checkpoint.path), mode="read") as store:
        roles = {ref.role for generation in store.generations() for ref in generation.objects}
    assert roles == {"layer", "record"}


def test_run_names_say_model_method_and_layer(model: Path, tmp_path: Path) -> None:
    quantize_model(tiny_job(model, tmp_path))
    flow_run = last_flow_run()
    assert flow_run.name == "tiny gptq"
    with get_client(sync_client=True) as client:
        names = {run.name for run in client.read_task_runs() if run.flow_run_id == flow_run.id}
    expected = {f"tiny gptq model.layers.{layer}" for layer in range(LAYERS)} | {"tiny export"}
    assert names == expected | {f"layer {layer} device 0" for layer in range(LAYERS)}


def test_every_layer_is_one_line_with_its_figures(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = quantize_model(tiny_job(model, tmp_path))
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("layer ")]
    assert len(lines) == LAYERS
    for line, receipt in zip(lines, report.layers, strict=True):
        assert line.startswith(f"layer {receipt.index + 1} of {LAYERS}: loss {receipt.loss:.3e}, ")
        assert line.endswith(receipt.sha256[:12])


def test_progress_tells_every_module_in_order_and_the_time_left(model: Path, tmp_path: Path) -> None:
    told: list[running.Progress] = []
    with running.listening(told.append):
        quantize_model(tiny_job(model, tmp_path))
    assert [progress.layer for progress in told] == sorted(progress.layer for progress in told)
    assert [progress.module for progress in told[:4]] == [
        "self_attn.q_proj, self_attn.k_proj, self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj, mlp.up_proj",
        "mlp.down_proj",
    ]
    assert told[0].seconds_left is None and told[-1].seconds_left is not None
    assert all(progress.layer_count == LAYERS and progress.loss is not None for progress in told)


def test_prefect_parameters_are_small_numbers_and_names() -> None:
    for task in (quantize_layer.quantize_layer, quantize_shard.quantize_shard):
        annotations = {parameter.annotation for parameter in inspect.signature(task.fn).parameters.values()}
        assert annotations <= {int, str}


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), ValueError("broken weights")])
def test_only_a_device_error_repeats_a_layer_and_the_bytes_stay_the_same(
    error: Exception, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tiny_job(model, tmp_path / "whole")
    quantize_model(whole)
    pack, failures = quantize_layer.pack, [error]

    def failing(run: Any, work: Any) -> Any:
        if work.layer == 1 and failures:
            raise failures.pop()
        return pack(run, work)

    monkeypatch.setattr(quantize_layer, "pack", failing)
    job = tiny_job(model, tmp_path / "failing")
    with layers_run() as ran:
        if isinstance(error, ValueError):
            with pytest.raises(LayerFailed, match="broken weights"):
                quantize_model(job)
            assert ran == [0, 1]
            return
        quantize_model(job)
    assert ran == [0, 1, 1, 2]
    assert contents(job.output) == contents(whole.output)


def test_fallbacks_are_named_in_the_report_and_the_log(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(hessian: Any, config: Any) -> Any:
        raise gptq.HessianError("too few distinct tokens")

    monkeypatch.setattr(gptq, "factor_hessian", failing)
    report = quantize_model(tiny_job(model, tmp_path))
    assert report.fallbacks == 7 * LAYERS
    assert report.layers[0].fallbacks[0].fallback == "too few distinct tokens"
    assert "`model.layers.0.self_attn.q_proj` was quantized without its inputs: too few distinct tokens" in caplog.text


def test_telemetry_tells_placement_and_no_contents_and_changes_no_byte(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quiet = tiny_job(model, tmp_path / "quiet")
    quantize_model(quiet)
    assert "telemetry" not in caplog.text
    job = tiny_job(model, tmp_path / "told").model_copy(update={"telemetry": TelemetryConfig(device=True)})
    quantize_model(job)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("telemetry ")]
    assert {line.split()[1] for line in lines} >= {"preparation", "capture", "commit"}
    assert '{"hidden": [{"count": 3, "device": "cpu", "dtype": "torch.bfloat16", "shape": [2, 24, 64]}]}' in caplog.text
    assert max(len(line) for line in lines) < 500
    assert contents(job.output) == contents(quiet.output)


def test_an_event_that_cannot_be_sent_is_a_warning_and_the_run_goes_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(**_: Any) -> None:
        raise ConnectionError("no events today")

    monkeypatch.setattr(telemetry, "emit_event", failing)
    assert quantize_model(tiny_job(model, tmp_path)).status == "done"
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("prefect-quantize.checkpoint.published was not sent: no events today" in line for line in warnings)


def test_a_generation_is_written_while_the_next_layer_is_computed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were it written first, the publish of the first layer would wait here for ever."""
    publish, begin_layer = CheckpointStore.publish, running.Run.begin_layer
    second_layer_began = threading.Event()

    def waiting_publish(*args: Any, **options: Any) -> Generation:
        assert second_layer_began.wait(60)
        return publish(*args, **options)

    def telling_begin(self: running.Run, index: int) -> None:
        begin_layer(self, index)
        if index == 1:
            second_layer_began.set()

    monkeypatch.setattr(CheckpointStore, "publish", waiting_publish)
    monkeypatch.setattr(running.Run, "begin_layer", telling_begin)
    events: list[tuple[str, Any]] = []
    monkeypatch.setattr(telemetry, "emit_event", lambda event, **_: events.append((event, FlowRunContext.get())))
    assert quantize_model(tiny_job(model, tmp_path)).status == "done"
    assert len(events) == LAYERS and all(run is not None for _, run in events), "an event lost the run it belongs to"


def test_a_publish_that_fails_while_a_layer_is_computed_ends_the_run_with_its_error(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = CheckpointStore.publish
    published: list[int] = []

    def failing_publish(self: CheckpointStore, identity: Any, cursor: int, *rest: Any, **options: Any) -> Generation:
        if cursor == 2:
            raise StorageFull("no space for the second layer")
        published.append(cursor)
        return publish(self, identity, cursor, *rest, **options)

    job = tiny_job(model, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(CheckpointStore, "publish", failing_publish)
        with pytest.raises(StorageFull, match="second layer"):
            quantize_model(job)
    assert published == [1] and not Path(job.output).exists()
    assert quantize_model(job).resumed_from == 1


def test_events_name_what_happened_to_the_checkpoint(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    monkeypatch.setattr(telemetry, "emit_event", lambda event, **_: names.append(event.rpartition(".")[2]))
    job = tiny_job(model, tmp_path)
    quantize_model(job)
    assert names == ["published"] * LAYERS
    names.clear()
    quantize_model(tiny_job(model, tmp_path, output="again"))
    assert names == ["restored"]
    names.clear()
    with pytest.raises(Exception, match="belongs to another job"):
        quantize_model(tiny_job(model, tmp_path, output="third", quantization=GPTQConfig(group_size=64)))
    assert names == ["rejected", "failed"]


@pytest.mark.parametrize(
    "error",
    [
        ValueError("broken weights"),
        OSError("the disk went away"),
        StorageFull("no space"),
        KeyboardInterrupt("third signal"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_any_error_that_ends_a_run_is_one_event_and_one_line(
    error: BaseException, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(run: Any, work: Any) -> Any:
        raise error

    events: list[tuple[str, Any]] = []
    monkeypatch.setattr(telemetry, "emit_event", lambda event, payload, **_: events.append((event, payload)))
    job = tiny_job(model, tmp_path).model_copy(update={"telemetry": TelemetryConfig(device=True)})
    with monkeypatch.context() as patched, pytest.raises(BaseException, match=re.escape(str(error))) as raised:
        patched.setattr(quantize_layer, "pack", failing)
        quantize_model(job)
    told = {"reason": type(raised.value).__name__, "message": str(error)}
    assert events == [("prefect-quantize.checkpoint.failed", told)]
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if line.startswith("telemetry failure")] == [
        f"telemetry failure {json.dumps(told, sort_keys=True)}"
    ]


def test_a_stop_is_no_failure_and_a_refusal_by_preflight_is_one(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    monkeypatch.setattr(telemetry, "emit_event", lambda event, **_: names.append(event.rpartition(".")[2]))

    def stop(progress: running.Progress) -> None:
        if progress.module.startswith("mlp.down_proj"):
            os.kill(os.getpid(), signal.SIGTERM)

    with running.listening(stop), pytest.raises(CheckpointStopped):
        quantize_model(tiny_job(model, tmp_path))
    assert names == ["published", "stopped"]
    names.clear()
    with pytest.raises(ValueError, match="nowhere"):
        quantize_model(tiny_job(tmp_path / "nowhere", tmp_path))
    assert names == ["failed"]


def test_a_root_that_another_writer_holds_is_refused_before_any_layer(model: Path, tmp_path: Path) -> None:
    job = tiny_job(model, tmp_path)
    with layers_run() as ran, CheckpointStore.open(Path(job.checkpoint.path)), pytest.raises(StoreLocked, match="open"):
        quantize_model(job)
    assert ran == []


def test_a_second_run_on_a_gpu_waits_and_its_state_says_for_whom(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU with a GPU's identity stands in for one, as far as the lock is concerned."""
    gpu = replace(DevicePool.resolve(("cpu",)).devices[0], uuid="11111111-2222-3333-4444-555555555555")
    monkeypatch.setattr(DevicePool, "resolve", lambda devices: DevicePool((gpu,)))
    monkeypatch.setattr(devices, "LOCK_DIRECTORIES", (str(tmp_path),))
    monkeypatch.setattr(stopping, "outlive_a_lost_slot", lambda: None)  # it is for a process of its own
    monkeypatch.setattr(stopping, "WAITING_SECONDS", 1)
    job = tiny_job(model, tmp_path)
    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(client.create_flow(quantize_model), "on a GPU")
        parameters = {"job": job.model_dump(mode="json")}
        flow_run = client.create_flow_run_from_deployment(deployment, parameters=parameters, state=Pending())
        with DevicePool((gpu,)).lock("flow run 12 (`big gptq`)"), pytest.raises(Abort):
            run_flow(quantize_model, flow_run=flow_run, parameters={"job": job})
        state = client.read_flow_run(flow_run.id).state
        assert state is not None and state.name == "WaitingForDevice" and state.is_scheduled()
        assert f"is held by flow run 12 (`big gptq`) (process {os.getpid()})" in str(state.message)
        report = run_flow(quantize_model, flow_run=client.read_flow_run(flow_run.id), parameters={"job": job})
    assert report.status == "done"


def test_a_caller_that_nobody_can_start_again_is_refused_the_gpu_of_another_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = replace(DevicePool.resolve(("cpu",)).devices[0], uuid="11111111-2222-3333-4444-555555555555")
    monkeypatch.setattr(DevicePool, "resolve", lambda devices: DevicePool((gpu,)))
    monkeypatch.setattr(devices, "LOCK_DIRECTORIES", (str(tmp_path),))
    told: list[tuple[str, Any]] = []
    monkeypatch.setattr(telemetry, "emit_event", lambda event, payload, **_: told.append((event, payload["reason"])))
    with DevicePool((gpu,)).lock(), layers_run() as ran, pytest.raises(DeviceBusy, match="is held by a run"):
        quantize_model(tiny_job(model, tmp_path))
    assert ran == []
    assert told == [(f"prefect-quantize.checkpoint.{name}", "DeviceBusy") for name in ("rejected", "failed")]


def test_nothing_of_a_run_is_left_in_the_process(model: Path, tmp_path: Path) -> None:
    quantize_model(tiny_job(model, tmp_path))
    for current in (running.current, session.current):
        with pytest.raises(RuntimeError):
            current()
    assert layer_task_states(last_flow_run().id) == ["Completed"] * LAYERS


@pytest.mark.parametrize("method", [GPTQConfig(group_size=32), RTNConfig(group_size=32)])
def test_values_outside_the_layers_that_are_not_finite_are_refused_before_the_first_layer(
    tmp_path: Path, method: GPTQConfig | RTNConfig
) -> None:
    broken = write_tiny_llama(tmp_path / "model", layers=1)
    tensors = load_file(broken / "model.safetensors")
    tensors["lm_head.weight"][5, 3] = float("nan")
    tensors["model.norm.weight"][0] = float("inf")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    job = tiny_job(broken, tmp_path, quantization=method)
    with (
        layers_run() as ran,
        pytest.raises(ValueError, match=r"(?s)`model.norm.weight` holds 1 .*`lm_head.weight` holds 1 "),
    ):
        quantize_model(job)
    assert ran == [] and not Path(job.output).exists()


def test_a_shard_that_fails_before_it_can_tell_its_siblings_is_the_error_to_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded, arrived = layer_work.LayerWork.guarded, itertools.count()

    def refused(work: layer_work.LayerWork, slot: int) -> Any:
        if next(arrived) == 1:
            raise OSError("no thread can be had")
        return guarded(work, slot)

    monkeypatch.setattr(layer_work.LayerWork, "guarded", refused)
    with pytest.raises(OSError, match="no thread can be had"):
        quantize_model(tiny_job(model, tmp_path, devices=("cpu", "cpu")))


def test_shards_that_started_before_the_run_is_given_up_do_not_wait_for_those_that_did_not(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_by_one = quantize_layer.quantize_shard.submit

    def only_the_first(layers: Any, devices: list[int]) -> None:
        one_by_one(layers.value, devices[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(quantize_layer.quantize_shard, "map", only_the_first)
    with pytest.raises(KeyboardInterrupt):
        quantize_model(tiny_job(model, tmp_path, devices=("cpu", "cpu")))
