"""How long the layers will take, from a few seconds of trial work on the devices of the run.

Every step of a layer is tried with the method's own functions, on random inputs of the real shapes where these are
small, else of narrower ones; what was tried is scaled by operation counts: sums of x x^T by K^2 and tokens, factors of
Hessians by K^3, rounding with error feedback by K for its loop over columns and by K^2 for its products, whole modules
by their weights. A layer's forward is reckoned from products, attention and memory traffic. No state of the run is
touched, and nothing of the model is read but a few rows, for the speed of the disk.

Shape suffixes: N out_features, K in_features, T tokens.
"""

import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from tasks import schemes
from tasks.devices import DevicePool
from tasks.execution_plan import LANES, UNIT_ROWS
from tasks.expert_groups import experts_per_token
from tasks.methods import awq
from tasks.models.decoder import Decoder
from tasks.plan import TimeEstimate
from tasks.schemes import HessianScheme, Scheme

WIDEST_TRIAL = 1024  # columns; of methods that take whole modules as they come
NARROW_TRIAL = 128  # columns and rows to begin with, for methods that take seconds for so many
TRIAL_TOKENS = 512
FINISHED_ROWS = 256
TRIAL_BYTES = 16 << 20
ENOUGH_SECONDS = 0.05
# Prefect's tasks, the receipt and the publication of a generation.
SECONDS_PER_LAYER = 0.1
# Reads and writes of a tensor the size of the hidden states, and of the MLP's width, in one forward.
HIDDEN_PASSES, WIDE_PASSES = 16, 8


@dataclass
class Trial:
    """The trial of one job's layers; `tokens` are those of all samples, `batch_tokens` and `length` of one batch."""

    decoder: Decoder
    scheme: Scheme
    pool: DevicePool
    tokens: int
    batch_tokens: int
    length: int
    rewinds: bool
    layer_bytes_after: int
    _measured: dict[Any, float] = field(default_factory=dict)

    def estimate(self, threads: int | None = None) -> TimeEstimate:
        """Seconds of all layers, each kind tried; `threads` are those that the run computes with."""
        began, count = time.perf_counter(), threads or torch.get_num_threads()
        # In a thread of its own beside one that has computed, as shards do: OpenMP's threads then wait asleep and not
        # in a loop, which is many times slower for small pieces of work where cores are shared.
        torch.ones(1 << 20).add_(1)
        with ThreadPoolExecutor(1) as other:
            seconds = other.submit(self._layers, count).result()
        return TimeEstimate(seconds, time.perf_counter() - began)

    def _layers(self, threads: int) -> tuple[float, ...]:
        torch.set_num_threads(threads)  # of this thread
        decoder = self.decoder
        kinds = (*decoder.kinds, *range(decoder.layer_count, decoder.step_count))  # the head is a step of its own kind
        with torch.no_grad():
            alike = {(kinds[i], decoder.subsets(i)): self._layer(i) for i in decoder.layers_of_each_arrangement}
        return tuple(alike[kind, decoder.subsets(i)] for i, kind in enumerate(kinds))

    # A layer

    def _layer(self, i: int) -> float:
        decoder, scheme = self.decoder, self.scheme
        shapes, experts = decoder.linear_shapes(i), {s: pair for pair in decoder.experts(i) for s in pair}
        tensors = [decoder.source.tensors[name] for name in decoder.layer_tensor_names(i)]
        weights = sum(prod(info.shape) for info in tensors)
        seconds = SECONDS_PER_LAYER + sum(info.size_bytes for info in tensors) * self._reading
        # Into the dtype that is computed in, and looked at for values that no grid holds.
        seconds += weights * 4 * self.dtype.itemsize * self._traffic
        seconds += self.layer_bytes_after * 2 * self._hashing
        share, streams = 1.0, schemes.streams(scheme.config)
        if experts:
            count = len(decoder.experts(i))
            share = experts_per_token(decoder.config, count) / count
        product = self._product(self.dtype, min(max(self.batch_tokens, 16), TRIAL_TOKENS))
        passing = passed = alone = 0.0
        for subset in decoder.subsets(i):
            rows, width = sum(shapes[name][0] for name in subset), shapes[subset[0]][1]
            tokens = self.tokens * (share if subset in experts else 1.0)
            if scheme.needs_activations:
                seconds += self._summing(width, tokens)
                alone += self._preparing(width, decoder.full_name(i, subset[0]))
                if self.rewinds and not experts:
                    passing += passed
                passed += 2 * tokens * streams * rows * width * product
            seconds += self._quantizing(width, rows, decoder.full_name(i, subset[0]))
        if scheme.needs_activations:
            widest = max((width for _, width in shapes.values()), default=0)
            hidden = decoder.config.hidden_size
            traffic = streams * self.tokens * (HIDDEN_PASSES * hidden + WIDE_PASSES * widest) * self.dtype.itemsize
            # Twice the products of a causal layer's scores, which are made in half as large pieces.
            passed += traffic * self._traffic + 4 * streams * self.tokens * self.length * hidden * product
            seconds += passing + passed * (2 if scheme.scales_layers or not scheme.is_sequential else 1)
        slots = 1 if self.pool.devices[0].type == "cpu" else len(self.pool.devices)  # CPU slots share their cores
        return seconds / slots + alone

    def _summing(self, width: int, tokens: float) -> float:
        """The statistic of a subset's inputs: every token once, and the lanes joined."""
        narrow = self._trial_width(width)
        sample = min(max(int(tokens), 64), TRIAL_TOKENS)

        def add() -> Callable[[], object]:
            statistic, x_TK = self.scheme.statistic(narrow, self.device), self._random(sample, narrow)
            return lambda: statistic.add(x_TK)

        def merge() -> Callable[[], object]:
            one, other = (self.scheme.statistic(narrow, self.device) for _ in range(2))
            other.add(self._random(8, narrow))
            one.add(self._random(8, narrow))
            return lambda: one.merge(other)

        larger = (width / narrow) ** 2
        per_token = self._once(("add", narrow, sample), add) / sample
        lanes = min(LANES, -(-self.tokens // max(self.batch_tokens, 1)))
        return larger * (tokens * per_token + lanes * self._once(("merge", narrow), merge))

    def _preparing(self, width: int, name: str) -> float:
        """Making the statistic into what the subset of the module `name` is quantized with."""
        narrow, scheme = self._trial_width(width), self.scheme.of(name)

        def prepare() -> Callable[[], object]:
            statistic = self._filled(narrow)
            return lambda: scheme.prepare(statistic, statistic.tokens, name)

        seconds, products = self._once(("prepare", narrow, scheme.config), prepare, again=False), 0.0
        if isinstance(scheme, HessianScheme):
            # A Cholesky factor and its inverse, in float64, by panels; the rest are copies and small pieces.
            products = 2 / 3 * self._product(torch.float64, WIDEST_TRIAL)
        copies = max(seconds - products * narrow**3, seconds / 4)
        return copies * (width / narrow) ** 2 + (seconds - copies) * (width / narrow) ** 3

    def _quantizing(self, width: int, rows: int, name: str) -> float:
        """All rows of the subset of the module `name` rounded, put back into the layer and packed."""
        if not self.scheme.quantizes_units:
            return rows * width * self._per_weight(width, rows, name)
        narrow, unit, scheme = self._trial_width(width), min(rows, UNIT_ROWS), self.scheme.of(name)
        state = scheme.prepare(filled := self._filled(narrow), filled.tokens, name).state
        weight_NK = self._random(unit, narrow) * 0.02

        def rounding() -> Callable[[], object]:
            return lambda: scheme.quantize_unit(weight_NK, state)

        def finishing() -> Callable[[], object]:
            quantized = scheme.quantize_unit(weight_NK[:FINISHED_ROWS], state)
            return lambda: (quantized.dequantize(), self.scheme.of(name).pack(name, quantized, None))

        seconds = self._once(("round", unit, narrow, scheme.config), rounding)
        if isinstance(scheme, HessianScheme):
            # Half of the products of a square: errors are carried to the columns that follow.
            products = unit * self._product(self.dtype, WIDEST_TRIAL)
            loop = max(seconds - products * narrow**2, seconds / 4)
            seconds = loop * width / narrow + (seconds - loop) * (width / narrow) ** 2
        else:
            seconds *= width / narrow
        finished = self._once(("finish", unit, narrow, scheme.config), finishing) / min(unit, FINISHED_ROWS)
        seconds += width / narrow * unit * finished
        if self.scheme.scales_layers:
            seconds += (width / narrow) ** 2 * self._scaling(unit, narrow, weight_NK, state)
        return seconds * rows / unit

    def _scaling(self, unit: int, narrow: int, weight_NK: Tensor, state: Any) -> float:
        """The search for a subset's scales, over the rows of a unit; a candidate of it is tried."""
        config: Any = self.scheme.config  # whose rules choose bits and groups, not the search

        def search() -> Callable[[], object]:
            ones_SK = torch.ones(1, narrow)
            return lambda: awq.scale_losses(weight_NK, state.second_KK, ones_SK, config)

        candidates = config.n_grid * (2 if config.duo_scaling else 1)
        return candidates * self._once(("scale", unit, narrow), search)

    def _per_weight(self, width: int, rows: int, name: str) -> float:
        """Of a method that takes whole modules: as many rows as take long enough to be timed."""
        narrow = self._trial_width(width)
        state = None
        if self.scheme.needs_activations:
            state = self.scheme.of(name).prepare(filled := self._filled(narrow), filled.tokens, name).state
        some = min(rows, NARROW_TRIAL)
        while True:
            key = ("module", some, narrow, self.scheme.of(name).config)
            weight_NK = (self._random(some, narrow) * 0.02).to(self.decoder.source_dtype)

            def module(weight_NK: Tensor = weight_NK) -> Callable[[], object]:
                return lambda: self._whole_module(name, weight_NK, state)

            seconds = self._once(key, module, again=False)
            if seconds > ENOUGH_SECONDS or some * 2 > min(rows, UNIT_ROWS):
                return seconds / (some * narrow)
            some *= 2

    def _whole_module(self, name: str, weight_NK: Tensor, state: Any) -> None:
        quantized: Any = self.scheme.of(name).quantize(name, weight_NK, state)
        if self.scheme.replaces_weights:
            quantized.dequantize()
        self.scheme.of(name).pack(name, quantized, None)

    # What is tried

    @property
    def device(self) -> torch.device:
        return self.pool.devices[0].torch_device

    @property
    def dtype(self) -> torch.dtype:
        if not self.scheme.needs_activations:
            return self.decoder.source_dtype
        return self.decoder.compute_dtype(self.device)

    def _trial_width(self, width: int) -> int:
        """The width itself, or a smaller one that takes little time and holds whole groups."""
        if not self.scheme.needs_activations or self.scheme.is_one_file:
            return width  # linear in it, and its blocks are particular
        most = WIDEST_TRIAL if self.scheme.quantizes_units else NARROW_TRIAL
        group = max(getattr(self.scheme.config, "group_size", 0), 1)
        return most if width > most and most % group == 0 else width

    def _filled(self, width: int) -> Any:
        statistic = self.scheme.statistic(width, self.device)
        statistic.add(self._random(TRIAL_TOKENS, width))
        return statistic

    def _random(self, rows: int, columns: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(rows, columns, generator=generator).to(self.device, self.dtype)

    def _product(self, dtype: torch.dtype, rows: int) -> float:
        """Seconds for a floating-point operation of a product of so many rows with a square matrix."""

        def product() -> Callable[[], object]:
            x_TK, weight_NK = (self._random(count, WIDEST_TRIAL).to(dtype) for count in (rows, WIDEST_TRIAL))
            return lambda: x_TK @ weight_NK.t()

        return self._once(("product", dtype, rows), product) / (2 * rows * WIDEST_TRIAL**2)

    @cached_property
    def _traffic(self) -> float:
        """Seconds for a byte that is read or written by what goes element by element."""
        one = torch.zeros(TRIAL_BYTES // 4, device=self.device)
        other = torch.zeros_like(one)
        return self._once(("traffic",), lambda: lambda: other.copy_(one)) / (2 * TRIAL_BYTES)

    @cached_property
    def _hashing(self) -> float:
        """Seconds for a byte that is hashed; writing takes as long again."""
        data = bytes(TRIAL_BYTES // 4)
        return self._once(("hash",), lambda: lambda: hashlib.sha256(data).digest()) / len(data)

    @cached_property
    def _reading(self) -> float:
        """Seconds for a byte of the source."""
        tensors = self.decoder.source.tensors
        name = max(self.decoder.layer_tensor_names(0), key=lambda name: tensors[name].size_bytes)
        info = tensors[name]
        rows = max(1, min(info.shape[0], info.shape[0] * TRIAL_BYTES // info.size_bytes))
        seconds = self._once(("read",), lambda: lambda: self.decoder.source.load_rows(name, rows), again=False)
        return seconds / (info.size_bytes * rows // info.shape[0])

    def _once(self, key: Any, prepared: Callable[[], Callable[[], object]], *, again: bool = True) -> float:
        """Mean seconds of what `prepared` gives; the first time does not count, unless work that can be repeated is long."""
        if key not in self._measured:
            self._measured[key] = self._timed(prepared, again)
        return self._measured[key]

    def _timed(self, prepared: Callable[[], Callable[[], object]], again: bool) -> float:
        work = prepared()
        first = self._clocked(work)
        if not again:  # uses up what it is given; what is compiled at its first use took that once
            return self._clocked(prepared())
        if first > 10 * ENOUGH_SECONDS:
            return first
        total, count = 0.0, 0
        while total < ENOUGH_SECONDS:
            total += self._clocked(work)
            count += 1
        return total / count

    def _clocked(self, work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - began
