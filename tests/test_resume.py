"""Stopping, going on, and finding the same bytes at the end."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from checkpoint_store.errors import CheckpointStopped
from flows.quantize_model import quantize_model
from tasks import running
from tasks.job import QuantizationJob
from tasks.quantization import GPTQConfig, RTNConfig
from tasks.running import Progress
from tests.flow_jobs import LAYERS, contents, last_flow_run, layer_task_states, layers_run, tiny_job
from tests.tiny_models import write_tiny_llama

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", layers=LAYERS)


@contextmanager
def signal_in_layer(layer: int, *numbers: int) -> Iterator[None]:
    """Send signals to this process when the first module of `layer` is finished."""
    sent = threading.Event()

    def on_progress(progress: Progress) -> None:
        if progress.layer == layer and not sent.is_set():
            sent.set()
            for number in numbers:
                os.kill(os.getpid(), number)
                time.sleep(0.05)

    with running.listening(on_progress):
        yield
    assert sent.is_set()


def stop_in_layer(job: QuantizationJob, layer: int, number: int = signal.SIGTERM) -> CheckpointStopped:
    with signal_in_layer(layer, number), pytest.raises(CheckpointStopped) as stopped:
        quantize_model(job)
    return stopped.value


@pytest.mark.parametrize("quantization", [GPTQConfig(group_size=32), RTNConfig(group_size=32)])
def test_a_job_stopped_in_every_layer_ends_with_the_bytes_of_one_that_was_not(
    quantization: Any, model: Path, tmp_path: Path
) -> None:
    whole = tiny_job(model, tmp_path / "whole", quantization=quantization)
    quantize_model(whole)
    job = tiny_job(model, tmp_path / "stopped", quantization=quantization)
    for layer in range(LAYERS - 1):
        with layers_run() as ran:
            message = str(stop_in_layer(job, layer))
        assert f"{layer + 1} of {LAYERS} layers published" in message
        assert ran == [layer]
        assert not Path(job.output).exists()
    with layers_run() as ran:
        report = quantize_model(job)
    assert ran == [LAYERS - 1]
    assert [receipt.index for receipt in report.layers] == list(range(LAYERS))
    assert layer_task_states(last_flow_run().id) == ["Cached"] * (LAYERS - 1) + ["Completed"]
    assert contents(job.output) == contents(whole.output)


def test_a_stop_publishes_whatever_the_interval(model: Path, tmp_path: Path) -> None:
    job = tiny_job(model, tmp_path, interval="layer:50")
    stop_in_layer(job, 1, signal.SIGINT)
    with layers_run() as ran:
        assert quantize_model(job).resumed_from == 2
    assert ran == [2]


def test_a_signal_after_the_interval_was_looked_at_publishes_all_the_same(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows import quantize_model as module

    stop_if_asked = module._Quantization._stop_if_asked

    def signalled(self: Any, run: running.Run | None) -> None:
        if run is not None and run.receipts:
            os.kill(os.getpid(), signal.SIGTERM)
        stop_if_asked(self, run)

    job = tiny_job(model, tmp_path, interval="layer:50")
    monkeypatch.setattr(module._Quantization, "_stop_if_asked", signalled)
    with pytest.raises(CheckpointStopped, match="1 of 3 layers published"):
        quantize_model(job)
    monkeypatch.undo()
    with layers_run() as ran:
        assert quantize_model(job).resumed_from == 1
    assert ran == [1, 2]


def test_the_interval_publishes_every_so_many_layers_and_the_last(model: Path, tmp_path: Path) -> None:
    from checkpoint_store.store import CheckpointStore

    job = tiny_job(model, tmp_path, interval="layer:2", keep_last=5)
    quantize_model(job)
    with CheckpointStore.open(Path(job.checkpoint.path), mode="read") as store:
        assert [generation.cursor for generation in store.generations()] == [3, 2]


def test_a_signal_before_the_first_layer_stops_there_and_publishes_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows import quantize_model as module

    check = module.check_replay

    def signalled(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        check(*args)

    monkeypatch.setattr(module.preflight, "check", lambda job: os.kill(os.getpid(), signal.SIGTERM))
    job = tiny_job(model, tmp_path)
    with (
        layers_run() as ran,
        pytest.raises(CheckpointStopped, match="before the first layer; this run published nothing"),
    ):
        quantize_model(job)
    monkeypatch.undo()
    monkeypatch.setattr(module, "check_replay", signalled)
    with layers_run() as also_ran, pytest.raises(CheckpointStopped, match="before the first layer"):
        quantize_model(job)
    assert ran + also_ran == []
    monkeypatch.undo()
    assert quantize_model(job).resumed_from is None


def test_a_signal_in_the_last_layer_does_not_prevent_the_export(model: Path, tmp_path: Path) -> None:
    job = tiny_job(model, tmp_path)
    with signal_in_layer(LAYERS - 1, signal.SIGTERM):
        assert quantize_model(job).status == "done"


def test_a_third_signal_gives_up_and_what_was_published_stays(model: Path, tmp_path: Path) -> None:
    job = tiny_job(model, tmp_path)
    with signal_in_layer(1, *[signal.SIGINT] * 3), pytest.raises(KeyboardInterrupt):
        quantize_model(job)
    with layers_run() as ran:
        assert quantize_model(job).resumed_from == 1
    assert ran == [1, 2]


def test_handlers_are_restored_after_a_run_and_after_a_refusal(model: Path, tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    quantize_model(tiny_job(model, tmp_path))
    with pytest.raises(ValueError):
        quantize_model(tiny_job(model / "absent", tmp_path / "other"))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_an_ordinary_error_publishes_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks import quantize_layer

    pack = quantize_layer.pack

    def failing(run: Any, work: Any) -> Any:
        if work.layer == 1:
            raise OSError("the source's disk went away")
        return pack(run, work)

    monkeypatch.setattr(quantize_layer, "pack", failing)
    job = tiny_job(model, tmp_path, interval="layer:3")
    with pytest.raises(OSError, match="went away"):
        quantize_model(job)
    monkeypatch.undo()
    with layers_run() as ran:
        assert quantize_model(job).resumed_from is None
    assert ran == [0, 1, 2]


def test_a_second_thread_is_refused_before_anything_is_touched(model: Path, tmp_path: Path) -> None:
    job = tiny_job(model, tmp_path)
    errors: list[BaseException] = []

    def start() -> None:
        try:
            quantize_model(job)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=start, name="another-thread")
    thread.start()
    thread.join()
    assert isinstance(errors[0], ValueError) and "`another-thread`" in str(errors[0])
    assert list(tmp_path.iterdir()) == []
