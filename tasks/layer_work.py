"""What the devices of a pool share while they work on one layer: who does what, sums in the making, what is finished.

Whatever is shared is cut up by fixed sizes and merged in a fixed order (`tasks.quantize_shard` says why). Its tensors are
on the CPU, but for sums.
"""

import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tasks import running
from tasks.adapters import LayerAdapter
from tasks.devices import Device
from tasks.execution_plan import LANES
from tasks.hidden_states import Held
from tasks.schemes import Prepared, Rows, Statistic, UnitRows

T = TypeVar("T")


def lane_batches(batch_count: int) -> list[range]:
    """Which batches each lane sums: contiguous, fixed by the number of batches alone."""
    return [range(batch_count * lane // LANES, batch_count * (lane + 1) // LANES) for lane in range(LANES)]


def shares(costs: Mapping[T, int], device_count: int) -> list[list[T]]:
    """Which modules, or subsets, each device quantizes: the costliest first, each to the device with the least to do."""
    assigned: list[list[T]] = [[] for _ in range(device_count)]
    loads = [0] * device_count
    for name in sorted(costs, key=lambda name: -costs[name]):
        device = loads.index(min(loads))
        assigned[device].append(name)
        loads[device] += costs[name]
    return assigned


class LaneSum:
    """The sum of a subset's lanes, merged in their order whoever hands them in first."""

    def __init__(self) -> None:
        self.total: Statistic | None = None
        self._waiting: dict[int, Statistic | None] = {}
        self._next_lane = 0

    def offer(self, lane: int, statistic: Statistic | None) -> None:
        self._waiting[lane] = statistic
        while self._next_lane in self._waiting:
            ready = self._waiting.pop(self._next_lane)
            self._next_lane += 1
            if self.total is None:
                self.total = ready
            elif ready is not None:
                self.total.merge(ready)


class SiblingFailed(RuntimeError):
    """Another shard of this layer failed, or the run was given up: that error is the one to read."""


class LayerWork:
    """What the shards of one layer share; as long as they are at work, `running.current().works` has it."""

    def __init__(self, run: running.Run, layer: int, devices: Mapping[int, Device]) -> None:
        """`devices` of the pool, by slot, are those that work on the layer."""
        self.run = run
        self.layer = layer
        self.devices = devices
        self.slots = list(self.devices)
        self.device_count = len(self.slots)
        self.error: BaseException | None = None
        self.failed_slot: int | None = None
        self.outcomes: dict[tuple[str, ...], Prepared] = {}
        self.quantized: dict[str, Rows] = {}
        self.outputs: dict[int, Held] = {}
        # Norms and biases that differ from the source's, under their full names.
        self.folded: dict[str, Tensor] = {}
        # What the shards share while they look for scales (`tasks.scaled_shard.LayerScaling`).
        self.scaling: Any = None
        self.prepared: Prepared | None = None
        self.adapter: LayerAdapter | None = None
        if run.job.adapter is not None:
            self.adapter = LayerAdapter(run.job.adapter, run.decoder.source_dtype)
        self.units: dict[int, UnitRows] = {}
        # Why error feedback diverged, by unit.
        self.diverged: dict[int, str] = {}
        self._barrier = threading.Barrier(self.device_count)
        self._lock = threading.Lock()
        self._sums: dict[tuple[str, ...], LaneSum] = {}

    @contextmanager
    def guarded(self, slot: int) -> Iterator[None]:
        """Break the barrier when a shard fails, and keep the first error that is not a sibling's, and whose it is."""
        try:
            yield
        except threading.BrokenBarrierError as error:
            # Whoever keeps the error, such as a log record, must not keep what lies on the device: a repeat needs the room.
            traceback.clear_frames(error.__traceback__)
            if self.run.is_given_up:
                told = f"layer {self.layer} was given up, because the run ends; the next one makes it again"
            else:
                told = f"another shard of layer {self.layer} failed; its error is the one to read"
            raise SiblingFailed(told) from error
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            with self._lock:
                if self.error is None:
                    self.error, self.failed_slot = error, slot
            self.abort()
            raise

    def meet(self) -> None:
        """Wait until every shard of the layer is here."""
        self._barrier.wait()

    def abort(self) -> None:
        """Let no shard go on past its next batch or barrier."""
        self._barrier.abort()

    def check(self) -> None:
        """BrokenBarrierError when another shard has failed or the run was given up."""
        if self._barrier.broken or self.run.is_given_up:
            raise threading.BrokenBarrierError

    def offer(self, subset: tuple[str, ...], lane: int, statistic: Statistic | None) -> None:
        """Hand in a lane's sum (None for a lane no token of which reaches the subset); lanes are merged in order."""
        with self._lock:
            self._sums.setdefault(subset, LaneSum()).offer(lane, statistic)

    def collect(self, subset: tuple[str, ...], rows: list[int]) -> None:
        """Cut the finished units into the modules of the subset; say so when error feedback had diverged."""
        if self.diverged:
            reason = self.diverged[min(self.diverged)]
            self.outcomes[subset] = replace(self.outcomes[subset], method="rtn", fallback=reason)
            self.diverged.clear()
        parts = [self.units[unit] for unit in sorted(self.units)]
        stacked = parts[0].concatenate(parts)
        start = 0
        for name, count in zip(subset, rows, strict=True):
            self.keep(name, stacked.rows(start, start + count))
            start += count
        self.units.clear()

    def keep(self, name: str, rows: Rows) -> None:
        """Take in a finished module."""
        with self._lock:
            self.quantized[name] = rows

    def settle(self, subset: tuple[str, ...], outcome: Prepared) -> None:
        """Take in what became of a subset, without the state that its modules were quantized with."""
        with self._lock:
            self.outcomes[subset] = replace(outcome, state=None)

    def take_total(self, subset: tuple[str, ...]) -> Statistic | None:
        """The statistic of all lanes; None when no token reached the subset."""
        with self._lock:
            return self._sums.pop(subset).total


def weight_of(module: nn.Module, name: str) -> Tensor:
    """The weight [N, K] of a linear of the layer, by its name within it."""
    linear = module.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    return linear.weight


def rows_of(weights: list[Tensor], start: int, stop: int) -> Tensor:
    """Rows `start` to `stop` of the weights stacked on each other, without stacking them all."""
    pieces, offset = [], 0
    for weight in weights:
        piece = weight[max(0, start - offset) : max(0, stop - offset)]
        if len(piece):
            pieces.append(piece)
        offset += len(weight)
    return torch.cat(pieces)
