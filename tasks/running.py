"""The run that this process is doing: what its tasks share and must not travel through Prefect parameters.

Prefect stores and ships parameters, so tasks take small numbers and names only and find the rest here. There is one run
per process, because a run needs the main thread; reach it as `running.current()`, never by importing the object: a flow
that is pickled by value would take a copy along.
"""

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from checkpoint_store.session import CheckpointSession
from tasks import schemes
from tasks.calibration import Batch, CalibrationSet
from tasks.devices import Device, DevicePool
from tasks.hidden_states import Held, SpilledTensor
from tasks.job import QuantizationJob
from tasks.models.decoder import Decoder
from tasks.models.source import SourceModel
from tasks.report import LayerReceipt


@dataclass(frozen=True)
class Progress:
    """How far the run is: `layer` is being worked on (from 0); `module` of it is finished, or says what it has done."""

    layer: int
    finished: int  # layers, which may be others than those before `layer` where several are in work
    layer_count: int
    module: str
    loss: float | None
    seconds_left: float | None


@dataclass
class Run:
    """Everything the tasks of one run share."""

    job: QuantizationJob
    logger: logging.Logger | logging.LoggerAdapter[Any]
    root: Path
    output: Path
    model_name: str
    source: SourceModel
    decoder: Decoder
    pool: DevicePool
    calibration: CalibrationSet | None
    identity_digest: str
    cpu_threads: int
    session: CheckpointSession
    started: float
    resumed_from: int | None = None
    receipts: list[LayerReceipt] = field(default_factory=list)
    # Hidden states entering the next layer, one per calibration batch, on the CPU in the source's dtype; where they are
    # compared with those of the unquantized model, these follow, in the same order.
    hidden: Sequence[Held] = field(default_factory=list)
    # Whether they lie in files, because they would not fit into memory.
    spills: bool = False
    # Restored hidden states are compared byte for byte after they reached their device, once.
    hidden_is_restored: bool = False
    # How many layers may be in work at the same time: more than one only where none needs the one before.
    most_layers_at_once: int = 1
    # Slots of the pool whose device was lost; the bytes do not depend on how many are left.
    lost_slots: set[int] = field(default_factory=set)
    # What the shards of each layer in work share (`tasks.layer_work.LayerWork`), by layer.
    works: dict[int, Any] = field(default_factory=dict)
    # Set when the run ends while layers are in work: they go no further than to their next module.
    is_given_up: bool = False
    _finished: int = 0  # layers, by this run
    _finished_seconds: float = 0.0
    _began: dict[int, float] = field(default_factory=dict)  # when each layer in work began, on the monotonic clock
    _taken: dict[int, list[int]] = field(default_factory=dict)  # slots of each layer in work
    _guard: threading.Condition = field(default_factory=threading.Condition)  # of all that tells what is in work

    @property
    def calibration_summary(self) -> dict[str, Any]:
        return dict(self.calibration.summary) if self.calibration is not None else {}

    @property
    def calibration_tokens(self) -> int:
        """Real tokens of the whole calibration set; padding is none."""
        return self.calibration.summary["tokens"] if self.calibration is not None else 0

    @property
    def devices(self) -> dict[int, Device]:
        """The devices that compute, by their slot in the pool."""
        return {slot: device for slot, device in enumerate(self.pool.devices) if slot not in self.lost_slots}

    @property
    def layers_at_once(self) -> int:
        """How many layers are worked on at the same time; no more than there are devices left."""
        return min(self.most_layers_at_once, len(self.devices))

    @contextmanager
    def share_of_pool(self, layer: int) -> Iterator[dict[int, Device]]:
        """The devices that work on this layer while the context lasts, by slot; waits until one is free."""
        with self._guard:
            self._guard.wait_for(self._free_slots)
            free = self._free_slots()
            # That share what is free: this one, and those after it that are yet to be begun, as many as may be.
            following = self.decoder.step_count - 1 - layer - sum(other > layer for other in self._taken)
            layers = max(1, min(self.layers_at_once - len(self._taken), 1 + following))
            self._taken[layer] = free[: -(-len(free) // layers)]
        try:
            yield {slot: self.pool.devices[slot] for slot in self._taken[layer]}
        finally:
            with self._guard:
                del self._taken[layer]
                self._guard.notify_all()

    def _free_slots(self) -> list[int]:
        taken = {slot for slots in self._taken.values() for slot in slots}
        return [slot for slot in self.devices if slot not in taken]

    def leave_out(self, slot: int) -> bool:
        """Compute without the device of this slot from the next attempt on; False when it is the only one."""
        with self._guard:
            if set(self.devices) == {slot}:
                return False
            self.lost_slots.add(slot)
            return True

    @property
    def needs_activations(self) -> bool:
        return self.scheme.needs_activations

    @property
    def streams(self) -> int:
        """How many hidden states there are of each batch: the quantized model's, and the unquantized one's where needed."""
        return schemes.streams(self.job.quantization)

    @property
    def memory_limit(self) -> int | None:
        """Bytes that a device, or the host where it computes, may use; None for all that it has."""
        return self.job.memory_limit

    @cached_property
    def scheme(self) -> schemes.Scheme:
        """How the job's method is carried out on its source."""
        scheme = schemes.scheme_of(self.job.quantization, self.source, self.job.seed)
        scheme.tell = self.tell
        return scheme

    def calibration_batch(self, number: int) -> Batch:
        assert self.calibration is not None
        return self.calibration.batches[number]

    def held(self, hidden: Tensor) -> Held:
        """A batch's hidden states as this run keeps them: as they are, or written to its scratch directory."""
        return SpilledTensor(hidden, self.session.scratch) if self.spills else hidden

    def replace_hidden(self, hidden: Sequence[Held]) -> None:
        """Go on to the next layer's inputs; only now may the last layer's go, a retry of it needs them."""
        self.hidden, self.hidden_is_restored = hidden, False

    @property
    def layers_in_work(self) -> list[int]:
        """In order; the next one when none is."""
        with self._guard:
            following = min(self.session.cursor + self._finished, self.decoder.step_count - 1)
            return sorted(self._began) or [following]

    def begin_layer(self, index: int) -> None:
        with self._guard:
            self._began[index] = time.monotonic()

    def end_layer(self, index: int) -> float:
        """Seconds that the layer took."""
        with self._guard:
            seconds = time.monotonic() - self._began.pop(index)
            self._finished, self._finished_seconds = self._finished + 1, self._finished_seconds + seconds
        return seconds

    def seconds_left(self) -> float | None:
        """Estimate until the last layer is done; None until this run has finished one."""
        with self._guard:
            if not self._finished:
                return None
            each, now = self._finished_seconds / self._finished, time.monotonic()
            left = self.decoder.step_count - self.session.cursor - self._finished
            done = sum(min(now - began, each) for began in self._began.values())
        return max(0.0, each * left - done) / self.layers_at_once

    def tell(self, module: str, loss: float | None, layer: int | None = None) -> None:
        """Tell whoever listens that a module of the layer is finished; None is the layer in work, when it is the only one."""
        layer = self.layers_in_work[0] if layer is None else layer
        with self._guard:
            finished = self.session.cursor + self._finished
        told = Progress(layer, finished, self.decoder.step_count, module, loss, self.seconds_left())
        for listener in list(_listeners):
            listener(told)


_current: Run | None = None
_listeners: list[Callable[[Progress], None]] = []


def current() -> Run:
    """The run of this process; RuntimeError when there is none."""
    if _current is None:
        raise RuntimeError("no run is open in this process: the tasks of a run work only inside `quantize_model`")
    return _current


@contextmanager
def opened(run: Run) -> Iterator[Run]:
    """Make `run` the current one while the context lasts."""
    global _current
    if _current is not None:
        raise RuntimeError("a run is open in this process already: start one after the other, or use two processes")
    _current = run
    try:
        yield run
    finally:
        _current = None


@contextmanager
def listening(callback: Callable[[Progress], None]) -> Iterator[None]:
    """Call `callback` with each piece of progress while the context lasts; it must be quick and thread-safe."""
    _listeners.append(callback)
    try:
        yield
    finally:
        _listeners.remove(callback)


def return_freed_memory() -> None:
    """Give what a layer has freed back to the system, where the C library can.

    glibc keeps freed blocks of up to 32 MiB and cuts them up for the next layer's, so that the process grows with the
    number of layers although no layer holds anything of another.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
