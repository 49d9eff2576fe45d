"""Methods without a chain work on a layer per device, side by side; what is published is always a prefix of the layers."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint_store.errors import CheckpointStopped
from flows.layers_at_once import LayerFailed
from flows.quantize_model import quantize_model
from tasks.job import QuantizationJob, RTNConfig
from tasks.schemes import Scheme
from tests.flow_jobs import contents, layers_run, tiny_job
from tests.tiny_models import write_tiny_llama

pytestmark = pytest.mark.usefixtures("prefect_server")
LAYERS = 5


def rtn_job(model: Path, place: Path, devices: int, **checkpoint: Any) -> QuantizationJob:
    job = tiny_job(model, place, quantization=RTNConfig(group_size=32), devices=("cpu",) * devices, **checkpoint)
    return job.model_copy(update={"time_estimate": False})  # whose trial quantizes a few rows too


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", layers=LAYERS)


@pytest.fixture
def at_first_module(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], None]], None]:
    """Have a function called with a layer's number before the layer's first module is quantized."""

    def arrange(function: Callable[[int], None]) -> None:
        begun: set[int] = set()
        original = Scheme.quantize

        def quantize(self: Scheme, name: str, *arguments: Any) -> Any:
            layer = int(name.split(".")[2])
            if layer not in begun:
                begun.add(layer)
                function(layer)
            return original(self, name, *arguments)

        monkeypatch.setattr(Scheme, "quantize", quantize)

    return arrange


def test_two_devices_work_on_two_layers_at_once_and_the_bytes_are_those_of_one(
    model: Path, tmp_path: Path, at_first_module: Any
) -> None:
    alone = rtn_job(model, tmp_path / "one", 1)
    quantize_model(alone)
    both = threading.Barrier(2, timeout=60)  # broken unless the layers 0 and 1, then 2 and 3, are in work together
    at_first_module(lambda layer: both.wait() if layer < LAYERS - 1 else None)
    job = rtn_job(model, tmp_path / "two", 2)
    report = quantize_model(job)
    assert [receipt.index for receipt in report.layers] == list(range(LAYERS))
    assert contents(job.output) == contents(alone.output)


def test_a_stop_finishes_the_layers_in_work_publishes_them_and_begins_no_other(
    model: Path, tmp_path: Path, at_first_module: Any
) -> None:
    alone = rtn_job(model, tmp_path / "one", 1)
    quantize_model(alone)
    both = threading.Barrier(2, timeout=60)

    def stop(layer: int) -> None:
        if layer < 2 and both.wait() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        if layer < 2:
            both.wait()  # neither layer ends before the signal is sent

    at_first_module(stop)
    job = rtn_job(model, tmp_path / "two", 2, interval="layer:50")
    with layers_run() as ran, pytest.raises(CheckpointStopped, match=f"2 of {LAYERS} layers published"):
        quantize_model(job)
    assert sorted(ran) == [0, 1]
    with layers_run() as ran:
        assert quantize_model(job).resumed_from == 2
    assert sorted(ran) == [2, 3, 4]
    assert contents(job.output) == contents(alone.output)


def test_a_layer_that_fails_keeps_what_is_before_it_and_lets_none_after_it_go_on(
    model: Path, tmp_path: Path, at_first_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def fail(layer: int) -> None:
        if layer == 2:
            failed.set()
            raise ValueError("weights of layer 2 overflow")

    at_first_module(fail)
    job = rtn_job(model, tmp_path / "two", 2)
    with layers_run() as ran, pytest.raises(LayerFailed, match="overflow"):
        quantize_model(job)
    assert failed.is_set() and max(ran) <= 3
    monkeypatch.undo()
    assert quantize_model(job).resumed_from == 2
