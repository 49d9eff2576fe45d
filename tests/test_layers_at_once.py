"""Methods without a chain work on several layers at once; what is published is a prefix of the layers at any time."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

from checkpoint_store.errors import CheckpointStopped
from checkpoint_store.session import CheckpointSession
from checkpoint_store.store import CheckpointStore
from flows.deadline import Deadline
from flows.layers_at_once import LayerFailed
from flows.quantize_model import quantize_model
from flows.stopping import GaveUp
from tasks import preflight, quantize_layer, running
from tasks.job import QuantizationJob
from tasks.layer_work import LayerWork
from tasks.quantization import GGUFConfig, GPTQConfig, Quantization, RTNConfig
from tasks.schemes import Scheme
from tests.deployed import wait_until
from tests.flow_jobs import contents, last_flow_run, layer_task_states, layers_run, tiny_job
from tests.layer_runs import open_run
from tests.tiny_families import write_tiny
from tests.tiny_models import write_tiny_llama

pytestmark = pytest.mark.usefixtures("prefect_server")
LAYERS = 5
RTN = RTNConfig(group_size=32)
PATIENCE_SECONDS = 60

AtFirstModule = Callable[[Callable[[int], None]], None]


def job_of(
    model: Path, place: Path, devices: int, quantization: Quantization = RTN, **checkpoint: Any
) -> QuantizationJob:
    job = tiny_job(model, place, quantization=quantization, devices=("cpu",) * devices, **checkpoint)
    return job.model_copy(update={"time_estimate": False})  # whose trial quantizes a few rows too


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", layers=LAYERS)


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> dict[str, str]:
    """Digests of the output of one device, which takes a layer at a time."""
    job = job_of(model, tmp_path_factory.mktemp("alone"), 1)
    quantize_model(job)
    return contents(job.output)


@pytest.fixture
def at_first_module(monkeypatch: pytest.MonkeyPatch) -> AtFirstModule:
    """Have a function called with a layer's number before the first module of each attempt at it is quantized."""

    def arrange(function: Callable[[int], None]) -> None:
        begun: set[LayerWork] = set()
        original = Scheme.quantize

        def quantize(self: Scheme, name: str, *arguments: Any) -> Any:
            work = running.current().works[int(name.split(".")[2])]
            if work not in begun:
                begun.add(work)
                function(work.layer)
            return original(self, name, *arguments)

        monkeypatch.setattr(Scheme, "quantize", quantize)

    return arrange


@pytest.fixture(autouse=True)
def nothing_is_left_at_work() -> Iterator[None]:
    """After a run, however it ended: no thread of a layer or a shard, and no task that Prefect takes for running."""
    before = set(threading.enumerate())
    yield
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not {name for name in left if name.startswith(("ThreadPoolExecutor", "timeout-watcher"))}, left


def task_states(flow_run_id: Any) -> set[str]:
    """Names of the last states of all tasks of a run: layers, shards and the export."""
    layer_task_states(flow_run_id)  # waits until the server has learned them
    with get_client(sync_client=True) as client:
        runs = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id])))
    return {run.state_name for run in runs}


def wait_until_given_up() -> None:
    """Until the flow has learned that it ends, and layers in work are to stop."""
    wait_until(lambda: running.current().is_given_up, lambda: "the flow goes on", PATIENCE_SECONDS)


# Bytes and order ------------------------------------------------------------------------------------------------------


def test_two_devices_work_on_two_layers_at_once_and_the_bytes_are_those_of_one(
    model: Path, tmp_path: Path, at_first_module: AtFirstModule, alone: dict[str, str]
) -> None:
    both = threading.Barrier(2, timeout=PATIENCE_SECONDS)  # broken unless layers 0 and 1, then 2 and 3, meet
    at_first_module(lambda layer: layer < LAYERS - 1 and both.wait())
    job = job_of(model, tmp_path, 2)
    told: list[running.Progress] = []
    with running.listening(told.append):
        report = quantize_model(job)
    assert [receipt.index for receipt in report.layers] == list(range(LAYERS))
    assert contents(job.output) == alone
    assert layer_task_states(last_flow_run().id) == ["Completed"] * LAYERS
    assert {(now.layer, now.module.split(".")[-1]) for now in told} == {
        (layer, f"{name}_proj") for layer in range(LAYERS) for name in ("q", "k", "v", "o", "gate", "up", "down")
    }
    for layer in range(LAYERS):
        finished = [now.finished for now in told if now.layer == layer]
        assert finished == sorted(finished)


@pytest.mark.parametrize("quantization", [RTN, GGUFConfig(quant_type="q8_0")], ids=["rtn", "gguf"])
def test_experts_on_three_devices_have_the_bytes_of_one(quantization: Quantization, tmp_path: Path) -> None:
    model = write_tiny("qwen3_moe", tmp_path / "model", mlp_only_layers=[])  # which no .gguf file may hold
    jobs = [job_of(model, tmp_path / str(devices), devices, quantization) for devices in (1, 3)]
    for job in jobs:
        quantize_model(job)
    assert contents(jobs[0].output) == contents(jobs[1].output)


def test_a_layer_that_is_finished_early_is_published_after_those_before_it(
    model: Path, tmp_path: Path, at_first_module: AtFirstModule, monkeypatch: pytest.MonkeyPatch, alone: dict[str, str]
) -> None:
    staged: list[str] = []
    second_is_staged = threading.Event()
    stage, publish = CheckpointSession.stage_layer, CheckpointStore.publish
    published: list[list[str]] = []

    def staging(self: CheckpointSession, name: str, *arguments: Any) -> Any:
        ref = stage(self, name, *arguments)
        staged.append(name)
        if name == "model.layers.1":
            second_is_staged.set()
        return ref

    def publishing(self: CheckpointStore, *arguments: Any, **options: Any) -> Any:
        generation = publish(self, *arguments, **options)
        published.append([ref.key for ref in generation.objects if ref.role == "layer"])
        return generation

    monkeypatch.setattr(CheckpointSession, "stage_layer", staging)
    monkeypatch.setattr(CheckpointStore, "publish", publishing)
    at_first_module(lambda layer: layer == 0 and second_is_staged.wait(PATIENCE_SECONDS))
    job = job_of(model, tmp_path, 2)
    quantize_model(job)
    assert staged[:2] == ["model.layers.1", "model.layers.0"], "this is what the test is about"
    names = [f"model.layers.{layer}" for layer in range(LAYERS)]
    assert published == [names[: count + 1] for count in range(LAYERS)]
    assert contents(job.output) == alone


# Ends -----------------------------------------------------------------------------------------------------------------


def test_a_stop_finishes_the_layers_in_work_publishes_them_and_begins_no_other(
    model: Path, tmp_path: Path, at_first_module: AtFirstModule, caplog: pytest.LogCaptureFixture, alone: dict[str, str]
) -> None:
    both = threading.Barrier(2, timeout=PATIENCE_SECONDS)

    def stop(layer: int) -> None:
        if both.wait() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        # Neither layer ends before the run has told of the signal.
        wait_until(lambda: "SIGTERM: stopping" in caplog.text, lambda: caplog.text, PATIENCE_SECONDS)

    at_first_module(stop)
    job = job_of(model, tmp_path, 2, interval="layer:50")
    with layers_run() as ran, pytest.raises(CheckpointStopped, match=f"2 of {LAYERS} layers published"):
        quantize_model(job)
    assert sorted(ran) == [0, 1]
    assert "SIGTERM: stopping after layers 1 to 2 of 5" in caplog.text
    assert task_states(last_flow_run().id) == {"Completed"}


def test_a_stopped_run_goes_on_with_the_layers_after_those_it_published(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: dict[str, str]
) -> None:
    """By a deadline, which is looked at whenever a layer has ended, while the other device is at the next."""
    monkeypatch.setattr(Deadline, "fits", lambda self, layer_seconds: layer_seconds is None)
    job = job_of(model, tmp_path, 2, interval="layer:3")
    with layers_run() as ran, pytest.raises(CheckpointStopped, match=f"2 of {LAYERS} layers published"):
        quantize_model(job, deadline="8h")
    assert sorted(ran) == [0, 1]
    with layers_run() as ran:
        assert quantize_model(job).resumed_from == 2
    assert sorted(ran) == [2, 3, 4]
    assert layer_task_states(last_flow_run().id) == ["Cached"] * 2 + ["Completed"] * 3
    assert contents(job.output) == alone


def test_a_stop_publishes_each_layer_as_it_ends_though_another_is_still_at_work(
    model: Path, tmp_path: Path, at_first_module: AtFirstModule
) -> None:
    root = tmp_path / "checkpoint"

    def cursor() -> int:
        with CheckpointStore.open(root, mode="read") as store:
            return max((generation.cursor for generation in store.generations()), default=0)

    def fail_late(layer: int) -> None:
        if layer == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: cursor() == 1, lambda: "layer 0 is not published", PATIENCE_SECONDS)
            raise ValueError("weights of layer 1 overflow")

    at_first_module(fail_late)
    with pytest.raises(LayerFailed, match="weights of layer 1 overflow"):
        quantize_model(job_of(model, tmp_path, 2, interval="layer:50"))
    assert cursor() == 1


def test_the_third_signal_lets_no_layer_in_work_go_on_past_its_module(
    model: Path, tmp_path: Path, at_first_module: AtFirstModule, caplog: pytest.LogCaptureFixture
) -> None:
    both = threading.Barrier(2, timeout=PATIENCE_SECONDS)

    def give_up(layer: int) -> None:
        if both.wait() == 0:
            for answer in ("SIGTERM: stopping", "SIGTERM again", ""):  # each is taken before the next: else two are one
                os.kill(os.getpid(), signal.SIGTERM)
                wait_until(lambda answer=answer: answer in caplog.text, lambda: caplog.text, PATIENCE_SECONDS)
        wait_until_given_up()

    at_first_module(give_up)
    job = job_of(model, tmp_path, 2)
    kept: list[str] = []
    with running.listening(lambda now: kept.append(now.module)), layers_run() as ran, pytest.raises(GaveUp):
        quantize_model(job)
    assert sorted(ran) == [0, 1] and len(kept) == 2
    assert task_states(last_flow_run().id) == {"Failed"}


def test_a_layer_that_fails_keeps_what_is_before_it_and_gives_up_the_one_after_it(
    model: Path, tmp_path: Path, at_first_module: AtFirstModule, monkeypatch: pytest.MonkeyPatch, alone: dict[str, str]
) -> None:
    both = threading.Barrier(2, timeout=PATIENCE_SECONDS)

    def fail(layer: int) -> None:
        if layer in (2, 3):
            both.wait()
        if layer == 2:
            raise ValueError("weights of layer 2 overflow")
        if layer == 3:
            wait_until_given_up()

    at_first_module(fail)
    job = job_of(model, tmp_path, 2)
    kept: list[int] = []
    with (
        running.listening(lambda now: kept.append(now.layer)),
        layers_run() as ran,
        pytest.raises(LayerFailed, match="weights of layer 2 overflow"),
    ):
        quantize_model(job)
    assert sorted(ran) == [0, 1, 2, 3] and kept.count(3) == 1
    assert task_states(last_flow_run().id) == {"Completed", "Failed"}
    monkeypatch.undo()
    assert quantize_model(job).resumed_from == 2
    assert contents(job.output) == alone


# Devices --------------------------------------------------------------------------------------------------------------


def test_a_lost_device_leaves_its_layer_and_those_after_it_to_the_other(
    model: Path, tmp_path: Path, at_first_module: AtFirstModule, alone: dict[str, str]
) -> None:
    lost = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")

    taken: list[list[int]] = []

    def lose(layer: int) -> None:
        taken.append(running.current().works[layer].slots)
        if taken[-1] == [0]:
            raise lost

    at_first_module(lose)
    job = job_of(model, tmp_path, 2)
    with layers_run() as ran:
        quantize_model(job)
    assert set(ran) == set(range(LAYERS)) and len(ran) == LAYERS + 1, "one is made again"
    assert sorted(taken) == [[0]] + [[1]] * LAYERS, "it stays out"
    assert contents(job.output) == alone


def test_devices_that_are_all_lost_at_once_fail_the_run(
    model: Path, tmp_path: Path, at_first_module: AtFirstModule
) -> None:
    both = threading.Barrier(2, timeout=PATIENCE_SECONDS)
    first = set()

    def lose(layer: int) -> None:
        if len(first) < 2:
            first.add(layer)
            both.wait()
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    at_first_module(lose)
    with pytest.raises(torch.AcceleratorError):
        quantize_model(job_of(model, tmp_path, 2))
    assert task_states(last_flow_run().id) == {"Failed"}


@pytest.mark.parametrize(("devices", "quantization"), [(1, RTN), (2, GPTQConfig(group_size=32))], ids=["rtn", "gptq"])
def test_one_device_and_methods_with_a_chain_call_their_layers_on_the_main_thread(
    devices: int, quantization: Quantization, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[threading.Thread] = set()
    shares: list[list[int]] = []
    original = quantize_layer.LayerWork

    def noting(run: running.Run, layer: int, share: Any) -> Any:
        threads.add(threading.current_thread())
        shares.append(list(share))
        return original(run, layer, share)

    monkeypatch.setattr(quantize_layer, "LayerWork", noting)
    quantize_model(job_of(model, tmp_path, devices, quantization))
    assert threads == {threading.main_thread()}
    assert shares == [list(range(devices))] * LAYERS


def test_layers_share_the_pool_evenly_and_wait_for_a_device(model: Path, tmp_path: Path) -> None:
    with open_run(job_of(model, tmp_path, 5)) as run:
        run.most_layers_at_once = 2
        with run.share_of_pool(0) as first, run.share_of_pool(1) as second:
            assert (list(first), list(second)) == ([0, 1, 2], [3, 4])
            waited: list[list[int]] = []

            def wait() -> None:
                with run.share_of_pool(2) as third:
                    waited.append(list(third))

            waiting = threading.Thread(target=wait)
            waiting.start()
            waiting.join(0.2)
            assert waiting.is_alive() and run.leave_out(4)
        waiting.join(PATIENCE_SECONDS)
        assert waited in ([[3]], [[0, 1]]), "of what was let go first, or of all that is left"
        for slot in range(3):
            assert run.leave_out(slot)
        assert not run.leave_out(3) and run.layers_at_once == 1


# Memory ---------------------------------------------------------------------------------------------------------------


def test_as_many_layers_are_in_work_as_the_memory_limit_admits_and_one_is_never_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.memory_estimate.FINITE_CHECK_BYTES", 0)  # more than all of this model's weights
    model = write_tiny_llama(tmp_path / "model", layers=LAYERS, hidden_size=128, intermediate_size=512)
    job = job_of(model, tmp_path, 4)

    def limited(limit: int | None) -> Any:
        return preflight.check(job.model_copy(update={"memory_limit": limit})).memory

    free = limited(None)
    assert free.layers_at_once == 4
    layers_at_once = []
    limit = free.host_peak_bytes
    while True:
        memory = limited(limit)
        layers_at_once.append(memory.layers_at_once)
        if memory.host_peak_bytes > limit:  # what one layer at a time takes, which was never refused
            assert memory.layers_at_once == 1
            break
        limit = memory.host_peak_bytes - 1
    assert layers_at_once[0] == 4 and layers_at_once[-1] == 1
    assert layers_at_once == sorted(layers_at_once, reverse=True) and len(set(layers_at_once)) > 2

    with layers_run() as ran:
        quantize_model(job.model_copy(update={"memory_limit": limit}))
    assert ran == list(range(LAYERS))
