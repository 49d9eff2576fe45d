"""What Prefect costs per layer and device shard, and whether that, or a layer itself, grows with the layers before it.

    python benchmarks/prefect_overhead.py [--layers 200] [--devices 1] [--calls] [DIRECTORY]

A random llama with many tiny layers is quantized in one run, on Prefect's server as it is configured or on one of its
own. Its layers go in turn, a block each, through Prefect and without it (the same functions called directly), twice
`--layers` in all. So both ways meet the same machine, and whatever the run has piled up until then. Both stage,
publish and export.

After a warm-up the run has ten parts, each with a block of either way; the first layers of a block still feel the one
before and are left out. A part's figure is a block's median, so that bursts of load do not weigh. Growth is the slope of
Theil and Sen through the ten figures, from the beginning of the run to its end, with Sen's interval of 95 %
(J. Am. Stat. Assoc. 63, 1968): where 0 lies in it, the run is flat within its noise, and the interval says how much growth
it could have seen. CPU time is this process's, all threads; unlike wall time it tells something on a busy machine too.
Prefect's server is another process.

`--calls` counts the calls of functions, Python's and C's, in all threads of this process instead of the time: other
programs do not disturb them, so that growth shows on any machine, but for what grows inside a single call.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
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
PARTS = 10
WARM_UP = 10  # layers of either way
SETTLING = 3  # layers at the beginning of a block


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


# Two ways --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Layers in a row that go the same way; `part` is None for the warm-up."""

    part: int | None
    through_prefect: bool
    layers: range


def blocks_of(layers: int) -> list[Block]:
    """The run, `layers` of either way after the warm-up; which way comes first changes from part to part."""
    order: list[tuple[int | None, bool, int]] = [(None, False, WARM_UP), (None, True, WARM_UP)]
    for part in range(PARTS):
        order += [(part, way, layers // PARTS) for way in ((False, True) if part % 2 else (True, False))]
    ends = list(itertools.accumulate(count for _, _, count in order))
    return [Block(part, way, range(end - count, end)) for (part, way, count), end in zip(order, ends, strict=True)]


def run_shards_directly(work: Any, layer: int) -> None:
    """The shards of a layer on plain threads."""
    with ThreadPoolExecutor(work.device_count) as threads:
        list(threads.map(lambda slot: quantize_shard.fn(layer, slot), work.slots))


class _TwoWays:
    """The layer's task, and its function without the task: what Prefect would have staged is staged here."""

    def __init__(self, task: Any, direct: frozenset[int]) -> None:
        self.task, self.direct = task, direct

    def with_options(self, **options: Any) -> "_TwoWays":
        return _TwoWays(self.task.with_options(**options), self.direct)

    def __call__(self, **parameters: Any) -> dict[str, Any]:
        if parameters["layer"] not in self.direct:
            receipt: dict[str, Any] = self.task(**parameters)
            return receipt
        receipt = self.task.fn(**parameters)
        session.current().stage_record(parameters["key"], json.dumps(receipt).encode())
        return receipt


@contextmanager
def without_prefect(direct: frozenset[int]) -> Iterator[None]:
    """Let these layers of the runs inside go without Prefect."""
    through_prefect = layer_module._run_shards

    def run_shards(work: Any, layer: int) -> None:
        (run_shards_directly if layer in direct else through_prefect)(work, layer)

    with (
        mock.patch.object(layer_module, "_run_shards", run_shards),
        mock.patch.object(flow_module, "quantize_layer", _TwoWays(flow_module.quantize_layer, direct)),
    ):
        yield


# Figures ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """What it took from the end of one layer to the end of the next, and what was resident then."""

    seconds: float
    cpu_seconds: float
    resident_bytes: int
    calls: int = 0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def count_calls() -> Callable[[], int]:
    """Count calls in this thread and in all that are started from now on, to the end of the process; how many so far."""
    counts: dict[int, int] = {}

    def on_event(_frame: Any, event: str, _argument: Any) -> None:
        if event in ("call", "c_call"):
            thread = threading.get_ident()
            counts[thread] = counts.get(thread, 0) + 1

    threading.setprofile(on_event)
    sys.setprofile(on_event)
    return lambda: sum(list(counts.values()))


def measured(job: QuantizationJob, calls: Callable[[], int] = lambda: 0) -> list[Layer]:
    """The layers of a run in order; the first, which has none before it, counts from the flow's call."""

    def now() -> tuple[float, float, int, int]:
        return time.perf_counter(), time.process_time(), resident_bytes(), calls()

    ends = [now()]
    log = flow_module._Quantization._log

    def at_end(self: Any, receipt: Any, layer_count: int) -> None:
        ends.append(now())
        log(self, receipt, layer_count)

    with mock.patch.object(flow_module._Quantization, "_log", at_end):
        quantize_model(job)
    return [
        Layer(after[0] - before[0], after[1] - before[1], after[2], after[3] - before[3])
        for before, after in itertools.pairwise(ends)
    ]


@dataclass(frozen=True)
class Growth:
    """From the first part to the end of the last, in percent of `base`, and the interval of 95 % around it."""

    percent: float
    low: float
    high: float

    @classmethod
    def of(cls, figures: Sequence[float], base: float) -> "Growth":
        """Of one figure per part, at least six."""
        count = len(figures)
        pairs = itertools.combinations(enumerate(figures), 2)
        slopes = sorted((there - here) / (j - i) for (i, here), (j, there) in pairs)
        # Sen's interval: Kendall's S of figures without a trend is normal with this variance, near enough from six on.
        reach = 1.96 * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
        outside = max(0, math.floor((len(slopes) - reach) / 2) - 1)
        scale = 100 * count / base
        return cls(
            statistics.median(slopes) * scale, slopes[outside] * scale, slopes[len(slopes) - 1 - outside] * scale
        )

    def __str__(self) -> str:
        verdict = "flat within the noise" if self.low <= 0 <= self.high else "grows" if self.low > 0 else "shrinks"
        return f"{self.percent:+.1f} % ({self.low:+.1f} to {self.high:+.1f}): {verdict}"


def part_figures(layers: Sequence[Layer], blocks: Sequence[Block], what: str, through_prefect: bool) -> list[float]:
    """For each part the median, over the block of this way, of the `Layer`'s field `what`."""
    return [
        statistics.median(getattr(layers[number], what) for number in block.layers[SETTLING:])
        for block in blocks
        if block.part is not None and block.through_prefect is through_prefect
    ]


def report(layers: Sequence[Layer], blocks: Sequence[Block], devices: int) -> Iterator[str]:
    """What the run says, line by line."""
    times = (("CPU  time", "cpu_seconds", 1e3, "ms"), ("wall time", "seconds", 1e3, "ms"))
    counted = any(layer.calls for layer in layers)
    for title, what, scale, unit in (("calls", "calls", 1.0, "calls"),) if counted else times:
        direct, through = (part_figures(layers, blocks, what, way) for way in (False, True))
        costs = [after - before for before, after in zip(direct, through, strict=True)]
        layer, cost = statistics.median(through), statistics.median(costs)
        for name, figures in (("without Prefect", direct), ("through Prefect", through), ("Prefect's part", costs)):
            yield (
                f"{title} {name}: {statistics.median(figures) * scale:8.1f} {unit} a layer; growth over the run in "
                f"percent of a layer: {Growth.of(figures, layer)}"
            )
        if not counted:
            yield (
                f"{title} that Prefect takes per layer and shard: {cost / devices * 1000:.1f} ms "
                f"(at most {BUDGET_SECONDS * 1000:.0f})"
            )
    for name, way in (("without Prefect", False), ("through Prefect", True)):
        numbers = [
            number
            for block in blocks
            if block.part is not None and block.through_prefect is way
            for number in block.layers
        ]
        gained = sum(layers[number].resident_bytes - layers[number - 1].resident_bytes for number in numbers)
        yield (
            f"memory {name}: {gained / 1e6:+.1f} MB in {len(numbers)} layers, "
            f"{100 * gained / layers[-1].resident_bytes:+.2f} % of {layers[-1].resident_bytes / 1e6:.0f} MB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=200, help=f"of either way; {PARTS * (SETTLING + 3)} or more")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--calls", action="store_true", help="count calls in the place of time")
    parser.add_argument("directory", nargs="?", type=Path)
    arguments = parser.parse_args()
    if arguments.layers < PARTS * (SETTLING + 3):
        parser.error(f"--layers {arguments.layers}: each of {PARTS} parts needs {SETTLING + 3} of either way")
    blocks = blocks_of(arguments.layers)
    direct = frozenset(layer for block in blocks if not block.through_prefect for layer in block.layers)
    calls = count_calls() if arguments.calls else lambda: 0
    with tempfile.TemporaryDirectory(dir=arguments.directory) as scratch, embedded_server():
        model = Path(scratch) / "model"
        write_model(model, blocks[-1].layers.stop)
        with without_prefect(direct):
            layers = measured(job_on(model, Path(scratch), arguments.devices), calls)
    for line in report(layers, blocks, arguments.devices):
        print(line)
    print(f"{len(layers)} layers, {arguments.devices} shards each; {threading.active_count()} threads left")


if __name__ == "__main__":
    main()
