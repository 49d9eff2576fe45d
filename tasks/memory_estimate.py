"""What a run holds at once, reckoned from shapes: the widest moment of a layer, stage by stage, and what comes beside it.

A layer's stages are its subsets. At each of them lie in memory: the weights that are still to be multiplied by, the
subset's statistic as it is summed and as it is factored, what the calibration samples wait with, and the codes of the
modules before. Samples that would not fit lie in files and pass through the layer one batch at a time; then all weights
stay until the end. Where the unquantized model's samples pass beside the quantized one's, there are two of each, and the
weights of both: those that are quantized, as they were and as they became. Before the first layer the replay of one layer of
each kind is checked, which holds them twice.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from tasks import adapters
from tasks.devices import DevicePool
from tasks.job import QuantizationJob
from tasks.models.decoder import Decoder
from tasks.plan import Memory
from tasks.schemes import Scheme, streams

FINITE_CHECK_BYTES = 8 << 20  # beside a tensor that is looked at for NaN
# A module is packed by way of int64.
BYTES_PER_PACKED_CODE = 8


@dataclass(frozen=True)
class _Stage:
    """What is alive at one subset of a layer; bytes, but for the width."""

    width: int  # in_features of the subset
    before: int  # weights when its inputs are summed: those of the subset before are still there
    weights: int  # weights from then on
    codes: int  # of the modules before it
    is_experts: bool = False


@dataclass(frozen=True)
class MemoryEstimate:
    """The reckoning for one job; `tokens` and `batch_tokens` are those of all samples and of one batch, at most."""

    job: QuantizationJob
    decoder: Decoder
    scheme: Scheme
    pool: DevicePool
    tokens: int
    batch_tokens: int

    @property
    def is_chain(self) -> bool:
        return self.scheme.needs_activations

    @property
    def streams(self) -> int:
        return streams(self.job.quantization)

    @property
    def itemsize(self) -> int:
        """Bytes of a weight or an activation as it is computed with; as it is stored, where no layer is run."""
        if not self.is_chain:
            return self.decoder.source_dtype.itemsize
        return self.decoder.compute_dtype(self.pool.devices[0].torch_device).itemsize

    @property
    def spills(self) -> bool:
        """Whether the samples' hidden states lie in files: beyond the limit, or else beyond the memory that there is."""
        if not self.is_chain:
            return False
        if self.job.hidden_states_limit is not None:
            return self.samples_bytes > self.job.hidden_states_limit
        held, spilled = self.memory(spills=False), self.memory(spills=True)
        on_host = held.host_peak_bytes > max(held.host_total_bytes, spilled.host_peak_bytes)
        on_device = held.device_peak_bytes > max(held.device_total_bytes, spilled.device_peak_bytes)
        # All weights of the layer stay: what can't be had that way is tried in the other.
        return (on_host or on_device) and spilled.least_bytes <= spilled.device_total_bytes

    @property
    def samples_bytes(self) -> int:
        """What all samples take while they pass through a layer in memory."""
        widest = max((stage.width for stages in self._stages(False) for stage in stages), default=0)
        return self._between_layers(False) + self._waiting(widest, False)

    def memory(self, *, spills: bool) -> Memory:
        """The peaks on the host and on each device, with the samples in memory or in files.

        Where no layer needs the one before, of as many layers at once as there are devices and memory on the host.
        """
        most = 1 if self.is_chain else min(len(self.pool.devices), self.decoder.step_count)
        for at_once in range(most, 1, -1):
            memory = self._memory(spills, at_once)
            if memory.host_peak_bytes <= memory.host_total_bytes:
                return memory
        return self._memory(spills, 1)

    def _memory(self, spills: bool, at_once: int) -> Memory:
        decoder, scheme, slots = self.decoder, self.scheme, len(self.pool.devices)
        on_cpu = self.pool.devices[0].type == "cpu"
        kinds = [self._layer_bytes(i) for i in decoder.layers_of_each_kind]
        layers = list(self._stages(spills))
        widths = [_kept_widths(stages) for stages in layers]
        statistics = max(map(scheme.statistics_bytes, widths))
        if self.job.adapter is not None:
            statistics += adapters.root_bytes(max(map(max, widths)))
        quantizing = self._quantizing()
        # The largest module of each layer at work, then their second largest, and so on.
        others_quantizing = sum(quantizing[i // at_once] for i in range(1, slots) if i // at_once < len(quantizing))
        least = on_device = host = 0
        for stages in layers:
            for stage in stages:
                held = self._statistics_at(stage, stages)
                summed = stage.before + 2 * scheme.sum_bytes(stage.width)
                at_least = max(stage.weights + held + quantizing[0], summed)
                waiting = self._waiting(stage.width, spills)
                least = max(least, at_least)
                on_device = max(on_device, at_least + waiting // slots)
                on_host = at_once * stage.codes
                if on_cpu:
                    others = (slots - 1) * stage.weights + others_quantizing
                    on_host += at_least + others + waiting
                host = max(host, on_host)
        shapes = [shape for i in decoder.layers_of_each_arrangement for shape in decoder.linear_shapes(i).values()]
        packing = 2 * max(stage.codes for stages in layers for stage in stages[-1:])
        packing += BYTES_PER_PACKED_CODE * max((n * k for n, k in shapes), default=0) if scheme.quantizes_units else 0
        host = max(host, at_once * packing) + self._between_layers(spills)
        replayed = 2 * sum(kinds) + max(kinds) * decoder.source_dtype.itemsize // self.itemsize if self.is_chain else 0
        on_device = max(on_device, replayed)
        host = max(host, self._outside_layers(), replayed if on_cpu else replayed // 2)
        limit = self.job.memory_limit or sys.maxsize
        host_total = DevicePool.resolve(("cpu",)).devices[0].memory_bytes
        return Memory(
            layer_bytes=max(kinds),
            statistics_bytes=statistics,
            least_bytes=least,
            device_peak_bytes=on_device,
            device_total_bytes=min(limit, *(slot.memory_bytes for slot in self.pool.devices)),
            host_peak_bytes=host,
            host_total_bytes=min(limit, host_total) if on_cpu else host_total,
            layers_at_once=at_once,
        )

    def _layer_bytes(self, i: int) -> int:
        tensors = self.decoder.source.tensors
        return sum(prod(tensors[name].shape) for name in self.decoder.layer_tensor_names(i)) * self.itemsize

    def _stages(self, spills: bool) -> Iterator[list[_Stage]]:
        """The stages of one layer of each arrangement."""
        decoder = self.decoder
        for i in decoder.layers_of_each_arrangement:
            shapes = decoder.linear_shapes(i)
            experts = {subset for pair in decoder.experts(i) for subset in pair}
            # Some methods run a layer once more, and so do samples that pass one batch at a time.
            keeps = self.scheme.scales_layers or not self.scheme.is_sequential or (spills and not experts)
            weights = self._layer_bytes(i) if self.is_chain else 0
            before, codes, stages = weights, 0, []
            for subset in decoder.subsets(i):
                stages.append(_Stage(shapes[subset[0]][1], before, weights, codes, subset in experts))
                size = sum(prod(shapes[name]) for name in subset)
                doubled = size * self.itemsize * (self.streams - 1)
                before, codes = weights + doubled, codes + size
                if self.is_chain and not keeps and subset not in experts:
                    weights -= size * self.itemsize
                else:
                    weights += doubled
            # When all is quantized, before it is packed.
            stages.append(_Stage(0, 0, 0, codes))
            yield stages

    def _statistics_at(self, stage: _Stage, stages: list[_Stage]) -> int:
        if not stage.width:
            return 0
        root = adapters.root_bytes(stage.width) if self.job.adapter is not None else 0
        if self.scheme.scales_layers:
            return root + self.scheme.statistics_bytes(_kept_widths(stages))
        return root + self.scheme.statistics_bytes([stage.width])

    def _waiting(self, width: int, spills: bool) -> int:
        """The residual, the normed residual and the input of a subset, of all samples; with what a batch's forward makes."""
        hidden = self.decoder.config.hidden_size
        passing = self.batch_tokens * 3 * (hidden + width) * self.itemsize * self.streams
        if spills and not self.decoder.has_experts:
            return passing
        return self.tokens * (2 * hidden + width) * self.itemsize * self.streams + (passing if width else 0)

    def _between_layers(self, spills: bool) -> int:
        """What enters the layer and what has left it."""
        tokens = self.batch_tokens if spills else self.tokens
        return 2 * tokens * self.decoder.config.hidden_size * self.decoder.source_dtype.itemsize * self.streams

    def _quantizing(self) -> list[int]:
        """Whole modules, the largest first: read in the source's dtype, as many at the same time as there are devices."""
        if self.scheme.quantizes_units:
            return [0]
        itemsize = self.decoder.source_dtype.itemsize
        decoder = self.decoder
        shapes = [shape for i in decoder.layers_of_each_arrangement for shape in decoder.linear_shapes(i).values()]
        return sorted((n * k * itemsize + self.scheme.working_bytes(n, k) for n, k in shapes), reverse=True) or [0]

    def _outside_layers(self) -> int:
        """While embedding and head are looked at, exported, or, before the first layer, used."""
        names = self.decoder.outer_tensor_names
        largest = max(self.decoder.source.tensors[name].size_bytes for name in names)
        before = largest + self._between_layers(False) if self.is_chain else 0
        exported = self.scheme.outer_peak_bytes((*names, *self.decoder.carried_tensor_names))
        return max(largest + FINITE_CHECK_BYTES, exported, before)


def _kept_widths(stages: list[_Stage]) -> list[int]:
    """Of the subsets whose statistics a method that scales layers keeps at once: all, but of the experts one's."""
    of_experts = [stage.width for stage in stages if stage.is_experts]
    return [stage.width for stage in stages if not stage.is_experts] + of_experts[:2]
