"""What Prefect costs per layer and device shard, and that it grows neither in time nor in memory with the layers.

    python benchmarks/prefect_overhead.py [--layers 200] [--devices 1] [DIRECTORY]

A random llama with many tiny layers is quantized twice in this process, on Prefect's server as it is configured or on one
of its own: through Prefect, and with the same functions called directly. Both stage, publish and export. What Prefect
costs is the difference of the medians per layer; growth is the last quarter of the layers against the first, of which
the first layers are left out: they load code and fill caches.
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
WARM_UP = 5  # layers


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


def run_shards_directly(work: Any, layer: int) -> None:
    """The shards of a layer on plain threads."""
    with ThreadPoolExecutor(work.device_count) as threads:
        list(threads.map(lambda slot: quantize_shard.fn(layer, slot), work.slots))


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
        mock.patch.object(layer_module, "_run_shards", run_shards_directly),
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
    time_ratio = statistics.median(seconds[-quarter:]) / statistics.median(seconds[WARM_UP:quarter])
    early, late = statistics.median(resident[WARM_UP:quarter]), statistics.median(resident[-quarter:])
    print(
        f"{title:<16} median {statistics.median(seconds) * 1000:6.1f} ms a layer; last quarter / first quarter: "
        f"time {time_ratio:.2f}, memory {late / early:.3f} ({(late - early) / 1e6:+.1f} of {late / 1e6:.0f} MB)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=200, help="at least 40")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("directory", nargs="?", type=Path)
    arguments = parser.parse_args()
    if arguments.layers < 40:
        parser.error(f"--layers {arguments.layers}: a quarter of them is to be longer than the warm-up")
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
