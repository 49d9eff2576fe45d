"""A shard whose device runs out of memory or is lost: that layer alone is repeated, with its memory freed first."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from prefect.client.orchestration import get_client

from flows.quantize_model import quantize_model
from tasks import quantize_shard
from tests.flow_jobs import LAYERS, contents, last_flow_run, layers_run, tiny_job
from tests.tiny_models import write_tiny_llama

pytestmark = pytest.mark.usefixtures("prefect_server")

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
LOST = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", layers=LAYERS)


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> dict[str, str]:
    """Digests of the output of a run on two devices that work."""
    job = tiny_job(model, tmp_path_factory.mktemp("undisturbed"), devices=("cpu", "cpu"))
    quantize_model(job)
    return contents(job.output)


class Failures:
    """Raises in the shards of the second layer of the model, in the slots that are named, so many times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception, *, slots: set[int], times: int = 1) -> None:
        self.left = times
        self.held: list[weakref.ref[torch.Tensor]] = []
        self.alive_at_repeat: list[int] = []
        sum_up, start = quantize_shard.Shard._sum_up, quantize_shard.Shard.go

        def failing(shard: Any, staged: Any, subset: tuple[str, ...], original: Any) -> None:
            if shard.work.layer == 1 and subset == ("self_attn.o_proj",):
                activations = torch.ones(1 << 20)
                self.held.append(weakref.ref(activations))
                if shard.work.slots[shard.number] in slots and self.left:
                    self.left -= 1
                    raise error
            sum_up(shard, staged, subset, original)

        def starting(shard: Any) -> None:
            if shard.work.layer == 1 and shard.number == 0:
                self.alive_at_repeat.append(sum(reference() is not None for reference in self.held))
            start(shard)

        monkeypatch.setattr(quantize_shard.Shard, "_sum_up", failing)
        monkeypatch.setattr(quantize_shard.Shard, "go", starting)


def shards_of(layer: int) -> list[str]:
    """Names of the shard tasks of a layer in all attempts of the last run, in order."""
    with get_client(sync_client=True) as client:
        runs = client.read_task_runs()
    run = last_flow_run().id
    return sorted(task.name for task in runs if task.flow_run_id == run and task.name.startswith(f"layer {layer} "))


@pytest.mark.parametrize("slot", [0, 1])
def test_out_of_memory_in_one_shard_repeats_its_layer_on_the_whole_pool_with_the_memory_freed_first(
    slot: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[str, str]
) -> None:
    gc.disable()  # what is freed is freed on purpose, and not by a collection that happens to come
    try:
        failures = Failures(monkeypatch, OUT_OF_MEMORY, slots={slot})
        job = tiny_job(model, tmp_path, devices=("cpu", "cpu"))
        with layers_run() as ran:
            quantize_model(job)
    finally:
        gc.enable()
    assert ran == [0, 1, 1, 2]
    assert len(failures.held) >= 3 and failures.alive_at_repeat == [0, 0]
    assert shards_of(1) == ["layer 1 device 0"] * 2 + ["layer 1 device 1"] * 2
    assert contents(job.output) == undisturbed


@pytest.mark.parametrize("slot", [0, 1])
def test_a_lost_device_is_left_out_and_the_other_does_its_share_with_the_same_bytes(
    slot: int,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    undisturbed: dict[str, str],
) -> None:
    failures = Failures(monkeypatch, LOST, slots={slot}, times=99)
    job = tiny_job(model, tmp_path, devices=("cpu", "cpu"))
    with layers_run() as ran:
        quantize_model(job)
    assert ran == [0, 1, 1, 2] and failures.left == 98
    assert shards_of(2) == [f"layer 2 device {1 - slot}"], "it stays out"
    assert f"device {slot} of the pool (cpu) is lost and left out: 1 of 2 go on with layer 2" in caplog.text
    assert contents(job.output) == undisturbed


def test_an_only_device_that_was_lost_is_tried_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[str, str]
) -> None:
    Failures(monkeypatch, LOST, slots={0}, times=2)
    job = tiny_job(model, tmp_path)
    with layers_run() as ran:
        quantize_model(job)
    assert ran == [0, 1, 1, 1, 2]
    assert contents(job.output) == undisturbed


def test_a_device_that_stays_lost_fails_the_run_and_the_next_goes_on_from_the_last_layer(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[str, str]
) -> None:
    job = tiny_job(model, tmp_path)
    with monkeypatch.context() as patched, pytest.raises(torch.AcceleratorError, match="ECC"):
        Failures(patched, LOST, slots={0}, times=99)
        quantize_model(job)
    with layers_run() as ran:
        assert quantize_model(job).resumed_from == 1
    assert ran == [1, 2]
    assert contents(job.output) == undisturbed
