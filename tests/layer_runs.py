"""One layer across a pool, without Prefect: what the flow sets up for its tasks, and shards on threads of this process."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint_store.session import CheckpointSession
from tasks import calibration, quantize_layer, quantize_shard, running
from tasks.devices import DevicePool
from tasks.job import QuantizationJob
from tasks.layer_work import LayerWork
from tasks.models.source import SourceModel
from tasks.schemes import decoder_of, needs_activations
from tests.flow_jobs import tiny_job


@contextmanager
def open_run(job: QuantizationJob) -> Iterator[running.Run]:
    """The state that the flow sets up for its tasks, up to the first layer."""
    source = SourceModel.open(job.model)
    decoder = decoder_of(job.quantization, source)
    samples = None
    if needs_activations(job.quantization):
        assert job.calibration is not None
        samples = calibration.prepare(job.calibration, source.path, seed=0)
    root = Path(job.checkpoint.path)
    with CheckpointSession.open(root, job.checkpoint, {}, layer_count=decoder.layer_count) as session:
        run = running.Run(
            job=job, logger=logging.getLogger(__name__), root=root, output=Path(job.output), model_name="tiny",
            source=source, decoder=decoder, pool=DevicePool.resolve(job.devices),
            calibration=samples, identity_digest="abc", cpu_threads=1, session=session, started=0.0,
        )  # fmt: skip
        if samples is not None:
            run.hidden = [decoder.embed(batch.input_ids) for batch in samples.batches] * run.streams
        with running.opened(run):
            yield run


def run_shards(run: running.Run, layer: int) -> tuple[LayerWork, list[BaseException]]:
    """All shards of a layer at once; what they left and every error that came out of one."""
    run.begin_layer(layer)
    run.works[layer] = work = LayerWork(run, layer, run.devices)
    errors: list[BaseException] = []

    def shard(device: int) -> None:
        try:
            quantize_shard.quantize_shard.fn(layer, device)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=shard, args=(device,)) for device in range(work.device_count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "a shard waits for one that is gone"
    return work, errors


def finished_layer(
    model: Path, place: Path, devices: int, layer: int = 0, **options: Any
) -> tuple[LayerWork, dict[str, Tensor]]:
    job = tiny_job(model, place, devices=("cpu",) * devices, root=f"root-{devices}", **options)
    with open_run(job) as run:
        work, errors = run_shards(run, layer)
        assert errors == []
        return work, quantize_layer.pack(run, work)


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]), name
