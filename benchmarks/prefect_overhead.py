"""What Prefect costs per layer and device shard, and that it grows neither in time nor in memory with the layers.

    python benchmarks/prefect_overhead.py [--layers 200] [--devices 1] [DIRECTORY]

A random llama with many tiny layers is quantized twice in this process, on Prefect's server as it is configured or on one
of its own: through Prefect, and with the same functions called directly. Both stage, publish and export. What Prefect
costs is the difference of the medians per layer; growth is the last quarter of the layers against the second.
"""

import argparse
import gc
import itertools
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from checkpoint_store import session
from checkpoint_store.config import CheckpointConfig
from flows import quantize_model as flow_module
from flows.embedded_server import embedded_server
from flows.quantize_model import quantize_model
from tasks import quantize_layer as layer_module
from tasks.job import CalibrationConfig, QuantizationJob
from tasks.quantize_shard import quantize_shard

BUDGET_SECONDS = 0.1


def write_model(path: Path, layers: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)


def job_on(model: Path, place: Path, devices: int) -> QuantizationJob:
    ids = tuple(tuple((sample * 7 + position) % 64 for position in range(16)) for sample in range(8))
    return QuantizationJob(
        model=str(model),
        output=str(place / "output"),
        quantization={"method": "gptq", "group_size": 32},
        calibration=CalibrationConfig(data=ids, samples=8, sequence_length=16),
        checkpoint=CheckpointConfig(path=str(place / "checkpoint"), interval="layer:100000"),
        devices=("cpu",) * devices,
    )


class _DirectShards:
    """`quantize_shard.map` on plain threads."""

    def map(self, layer: Any, devices: list[int]) -> Any:
        with ThreadPoolExecutor(len(devices)) as threads:
            list(threads.map(lambda device: quantize_shard.fn(layer.value, device), devices))


class _DirectLayer:
    """The layer's function without its task: what Prefect would have staged is staged here."""

    def with_options(self, **_: Any) -> "_DirectLayer":
        return self

    def __call__(self, **parameters: Any) -> dict[str, Any]:
        receipt = layer_module.quantize_layer.fn(**parameters)
        session.current().stage_record(parameters["key"], json.dumps(receipt).encode())
        return receipt


@contextmanager
def without_prefect() -> Iterator[None]:
    with (
        mock.patch.object(layer_module, "quantize_shard", _DirectShards()),
        mock.patch.object(layer_module, "_gather", lambda work, shards: None),
        mock.patch.object(flow_module, "quantize_layer", _DirectLayer()),
    ):
        yield


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measured(job: QuantizationJob) -> tuple[list[float], list[int]]:
    """Seconds between the ends of consecutive layers, and the resident bytes at each."""
    ends, resident = [], []
    log = flow_module._Quantization._log

    def at_end(self: Any, receipt: Any, layer_count: int) -> None:
        ends.append(time.perf_counter())
        resident.append(resident_bytes())
        log(self, receipt, layer_count)

    with mock.patch.object(flow_module._Quantization, "_log", at_end):
        quantize_model(job)
    gc.collect()
    return [after - before for before, after in itertools.pairwise(ends)], resident


def report(title: str, seconds: list[float], resident: list[int]) -> None:
    quarter = len(seconds) // 4
    early, late = statistics.median(seconds[quarter : 2 * quarter]), statistics.median(seconds[-quarter:])
    grown = (resident[-1] - resident[len(resident) // 4]) / 1e6
    print(
        f"{title:<16} median {statistics.median(seconds) * 1000:6.1f} ms a layer; last quarter / second quarter "
        f"{late / early:.2f}; memory {resident[-1] / 1e6:.0f} MB, {grown:+.1f} MB since the first quarter"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("directory", nargs="?", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as scratch, embedded_server():
        model = Path(scratch) / "model"
        write_model(model, arguments.layers)
        with without_prefect():
            direct = measured(job_on(model, Path(scratch) / "direct", arguments.devices))
        through = measured(job_on(model, Path(scratch) / "through", arguments.devices))
    report("without Prefect", *direct)
    report("through Prefect", *through)
    cost = statistics.median(through[0]) - statistics.median(direct[0])
    print(
        f"Prefect costs {cost * 1000:.1f} ms for a layer with {arguments.devices} shards, "
        f"{cost / arguments.devices * 1000:.1f} ms per layer and shard (at most {BUDGET_SECONDS * 1000:.0f}); "
        f"{threading.active_count()} threads left"
    )


if __name__ == "__main__":
    main()
