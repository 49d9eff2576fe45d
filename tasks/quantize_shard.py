"""One device's share of one layer: its calibration lanes through the layer, its units of rows through the method.

A method that looks at no inputs gets whole modules instead, spread by their size over the layer's share of the pool.

How the result stays the same for every number of devices: calibration batches are split into a fixed number of lanes,
a lane is summed in order on one device, and lane sums are merged in lane order. The linears of a subset share one input
and hence one Hessian and one factor, their rows are independent given the factor, so the stacked rows are cut into
units of a fixed size that any device may take. Lane l and unit u belong to device l % D and u % D.

The shards of a layer run side by side, one thread each for the whole layer (a paused forward belongs to its thread), and
meet at barriers. One that fails breaks the barrier, so that no sibling waits for ever; the first real error is the one told.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from prefect import task
from prefect.cache_policies import NO_CACHE
from torch import Tensor, nn

from tasks import running
from tasks.adapters import LayerAdapter
from tasks.execution_plan import LANES, UNIT_ROWS
from tasks.expert_groups import cost, group_size, quantize_subset
from tasks.hidden_states import loaded
from tasks.layer_work import LayerWork, lane_batches, rows_of, shares, weight_of
from tasks.methods.gptaq import AsymmetricSum
from tasks.methods.gptq import HessianError
from tasks.methods.grid import WeightError
from tasks.methods.hessian import spans
from tasks.models.experts import group_experts
from tasks.models.folding import Subset
from tasks.models.staged import Calls, StagedForward
from tasks.original_stream import OriginalStream
from tasks.schemes import Prepared, Scheme, Statistic


@task(name="quantize-shard", task_run_name="layer {layer} device {device}", persist_result=False, cache_policy=NO_CACHE)
def quantize_shard(layer: int, device: int) -> int:
    """Do the share of the device in this slot of a layer in work; the number of modules that the layer has finished."""
    from tasks.scaled_shard import ScaledShard  # which is built on what is here

    run = running.current()
    work = run.works[layer]
    with work.guarded(device), torch.no_grad():
        # Thread by thread: OpenMP keeps the number of the thread that asks.
        torch.set_num_threads(run.cpu_threads)
        (ScaledShard if run.scheme.scales_layers else Shard)(work, work.slots.index(device)).go()
    return len(work.quantized)


class Shard:
    """The share of one device: its module, its batches, its rows."""

    def __init__(self, work: LayerWork, number: int) -> None:
        self.work = work
        self.run = work.run
        self.number = number
        self.device = work.devices[work.slots[number]].torch_device
        self.dtype = self.run.decoder.compute_dtype(self.device)
        self.batch_count = len(self.run.hidden) // self.run.streams
        self.lanes = lane_batches(self.batch_count)
        self.subsets = self.run.decoder.subsets(work.layer)
        self.shapes = self.run.decoder.linear_shapes(work.layer)
        self.batches = [(lane, batch) for lane in range(number, LANES, work.device_count) for batch in self.lanes[lane]]

    def go(self) -> None:
        decoder, scheme = self.run.decoder, self.run.scheme
        if not scheme.needs_activations:
            self._quantize_modules(self.subsets)
            return
        module = decoder.materialise(self.work.layer, self.device, self.dtype)
        if self.number == 0:
            self._check_weights(module)
        # An adapter is made subset by subset.
        size = group_size(self.run, self.work.layer) if self.work.adapter is None else 1
        group_experts(module, size or 1)  # experts that are left as they are run one by one
        stages = decoder.stages(self.work.layer, size)
        in_order = [subset for stage in stages for subset in stage]
        past: list[tuple[str, ...]] = []
        rewinds = self._rewinds
        with (
            self._beside(module, in_order, stages) as original,  # first: a copy of what is not patched yet
            StagedForward(module, in_order, self._calls(), stages, rewinds=rewinds) as staged,
        ):
            for stage in stages:
                for subset in stage:
                    self._sum_up(staged, subset, original)
                    # Subset by subset: no more lanes than one subset's wait for others.
                    self.work.meet()
                if scheme.is_sequential and not rewinds:  # else the layer is run again
                    if original is not None:
                        self._let_go(original.layer, past, stage[0])
                    past = self._let_go(module, past, stage[0])
                    past += stage
                if len(stage) > 1:
                    self._quantize_group(module, stage)
                    continue
                (subset,) = stage
                if self.number == 0:
                    self._prepare(subset)
                self.work.meet()
                if scheme.quantizes_units:
                    self._quantize_stacked(module, subset)
                else:
                    self._quantize_modules((subset,))
                    if scheme.replaces_weights:
                        self._replace_weights(module, subset)
                # Every device has taken it: what is largest must not lie under the next subset's sums.
                self.work.prepared = None
            if decoder.is_head(self.work.layer):
                return  # nothing comes after it, and its outputs are as many as the vocabulary
            if original is not None:
                self._hand_on(original.staged, self.batch_count)
            if scheme.is_sequential:
                self._hand_on(staged)
                return
        # Nothing in the layer has seen a quantized weight; the next layer must.
        for subset in self.subsets:
            self._put_quantized(module, subset)
        with StagedForward(module, (), self._calls()) as staged:
            self._hand_on(staged)

    def _let_go(self, module: nn.Module, past: list[tuple[str, ...]], subset: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Drop the weights that all calls are past, who wait at `subset`: the last statistic is the largest, and needs the
        room. Those of the same input are yet to be run; they are returned.
        """
        if not past:
            return []
        by_input = self.run.decoder.linears_by_input(self.work.layer)
        same_input = next((names for names in by_input if subset[0] in names), ())
        kept = [other for other in past if other[0] in same_input]
        for name in (name for other in past if other not in kept for name in other):
            weight = weight_of(module, name)
            weight.data = weight.new_empty(0)
        return kept

    def _calls(self, first: int = 0) -> Calls:
        """One by one: a batch's mask and rotary tables live no longer than its forward needs them."""
        return _Calls(self, first)

    def _beside(
        self, module: nn.Module, in_order: Sequence[Subset], stages: Sequence[Sequence[Subset]]
    ) -> AbstractContextManager[OriginalStream | None]:
        """The unquantized model's batches, where the method looks at them."""
        if self.run.streams == 1:
            return nullcontext()
        twin = self.run.decoder.twin(module)
        return OriginalStream(twin, in_order, self._calls(self.batch_count), stages, rewinds=self._rewinds)

    @property
    def _rewinds(self) -> bool:
        """Whether batches pass through the layer one at a time, where all together would not fit.

        Not through experts: each has a statistic of its own, and would ask for a pass of its own.
        """
        return self.run.spills and not self.run.decoder.experts(self.work.layer)

    def _hand_on(self, staged: StagedForward, first: int = 0) -> None:
        """Run this device's batches to their end, for the next layer, whose hidden states are kept from number `first` on."""
        for (_, batch), hidden in zip(self.batches, staged.outputs(), strict=True):
            self.work.outputs[first + batch] = self.run.held(self._rounded(hidden))

    def _call(self, batch: int, first: int) -> tuple[Tensor, dict[str, object]]:
        """A batch's hidden states on this device, kept from number `first` on, and the other arguments of the layer."""
        source = loaded(self.run.hidden[first + batch])
        hidden = source.to(self.device)
        if self.run.hidden_is_restored and not torch.equal(_bits(hidden.cpu()), _bits(source)):
            raise RuntimeError(
                f"hidden states of batch {batch} changed on their way to {self.device}: the device or its memory is failing"
            )
        # A copy in any case: what a restored batch lies in is mapped read-only, and a retry needs it as it was.
        hidden = hidden.to(self.dtype, copy=hidden is source)
        mask = self.run.calibration_batch(batch).attention_mask.to(self.device)
        return hidden, self.run.decoder.call_arguments(self.work.layer, hidden, mask)

    def _rounded(self, hidden: Tensor) -> Tensor:
        """Rounded to the source's dtype at every boundary, so that a run that resumes sees what one that goes on sees."""
        rounded = hidden.to(self.run.decoder.source_dtype).cpu()
        if not bool(torch.isfinite(rounded).all()):
            raise ValueError(
                f"the hidden states after `{self.run.decoder.layer_name(self.work.layer)}` are not finite: the source's "
                f"weights overflow in {self.run.decoder.source_dtype}; nothing of this layer was stored"
            )
        return rounded

    def _sum_up(self, staged: StagedForward, subset: tuple[str, ...], original: OriginalStream | None = None) -> None:
        lanes = list(range(self.number, LANES, self.work.device_count))
        statistic: Statistic | None = None
        arrivals = staged.advance(subset) if original is None else original.advance_with(staged, subset)
        for call, _ in arrivals:
            self.work.check()
            lane, batch = self.batches[call]
            while lanes[0] != lane:
                self.work.offer(subset, lanes.pop(0), statistic)
                statistic = None
            mask_BT = self.run.calibration_batch(batch).attention_mask
            real_TK = staged.real_tokens(call, subset, mask_BT)
            if len(real_TK):
                statistic = statistic or self._statistic(real_TK.shape[-1])
                if original is None:
                    statistic.add(real_TK)
                else:
                    assert isinstance(statistic, AsymmetricSum)
                    statistic.add(real_TK, staged.same_tokens(original.staged, call, subset, mask_BT))
        while lanes:
            self.work.offer(subset, lanes.pop(0), statistic)
            statistic = None

    def _statistic(self, features: int) -> Statistic:
        statistic, adapter = self.run.scheme.statistic(features, self.device), self._observing_adapter
        return statistic if adapter is None else adapter.observing(statistic, features, self.device)

    @property
    def _observing_adapter(self) -> LayerAdapter | None:
        """An adapter that looks at inputs itself; that of scaled layers is made from the method's own moments."""
        return None if self.run.scheme.scales_layers else self.work.adapter

    def _prepare(self, subset: tuple[str, ...]) -> None:
        """Make the merged statistic into what the subset is quantized with, on the first device."""
        self.work.prepared = self._prepared(subset)
        # Without its state, which is the largest thing of all.
        self.work.outcomes[subset] = replace(self.work.prepared, state=None)

    def _prepared(self, subset: tuple[str, ...]) -> Prepared:
        total = self.work.take_total(subset)
        # The peak of a layer: what the forward has freed must not lie under it.
        running.return_freed_memory()
        if (adapter := self._observing_adapter) is not None:
            total = adapter.prepare(total, self._full(subset[0]))
        return self._scheme_of(subset).prepare(total, self.run.calibration_tokens, self._full(subset[0]))

    def _scheme_of(self, subset: tuple[str, ...]) -> Scheme:
        return self.run.scheme.of(self._full(subset[0]))

    def _state_here(self) -> Any:
        prepared = self.work.prepared
        return prepared.state.to(self.device) if prepared is not None and prepared.state is not None else None

    def _quantize_stacked(self, module: nn.Module, subset: tuple[str, ...]) -> None:
        """Quantize this device's units of the subset, then put what a loader will see into this device's module."""
        work = self.work
        weights = {name: weight_of(module, name) for name in subset}
        self._quantize_units(subset, list(weights.values()), self._state_here())
        work.meet()
        if work.diverged:
            # All or none: siblings that a loader fuses keep one layout, and no result depends on who came first.
            self._quantize_units(subset, list(weights.values()), None)
            work.meet()
        if self.number == 0:
            work.collect(subset, [len(weight) for weight in weights.values()])
            self.run.tell(", ".join(subset), sum(work.quantized[name].loss for name in subset) / len(subset))
        work.meet()
        self._replace_weights(module, subset)

    def _quantize_group(self, module: nn.Module, stage: tuple[tuple[str, ...], ...]) -> None:
        """Quantize this device's share of a group of experts, then put what a loader will see into this device's module."""
        work, scheme = self.work, self.run.scheme
        costs = {subset: cost(subset, self.shapes) for subset in stage}
        for subset in shares(costs, work.device_count)[self.number]:
            work.check()
            prepared = self._prepared(subset)
            if prepared.state is not None:
                prepared = replace(prepared, state=prepared.state.to(self.device))
            if scheme.quantizes_units:
                weights = [weight_of(module, name) for name in subset]
                modules, prepared = quantize_subset(self._scheme_of(subset), weights, prepared, UNIT_ROWS)
                for name, rows in zip(subset, modules, strict=True):
                    work.keep(name, rows)
            else:
                for name in subset:
                    self._quantize_module(name, prepared.state)
            work.settle(subset, prepared)
            self.run.tell(", ".join(subset), sum(work.quantized[name].loss for name in subset) / len(subset))
        work.meet()
        if scheme.quantizes_units or scheme.replaces_weights:
            for subset in stage:
                self._replace_weights(module, subset)

    def _quantize_units(self, subset: tuple[str, ...], weights: list[Tensor], state: Any) -> None:
        scheme = self._scheme_of(subset)
        for unit in range(self.number, -(-sum(map(len, weights)) // UNIT_ROWS), self.work.device_count):
            weight_NK = rows_of(weights, unit * UNIT_ROWS, (unit + 1) * UNIT_ROWS)
            try:
                self.work.units[unit] = scheme.quantize_unit(weight_NK, state)
            except HessianError as error:
                self.work.diverged[unit] = str(error)

    def _quantize_modules(self, subsets: tuple[tuple[str, ...], ...]) -> None:
        """Quantize this device's share of whole modules, each from the source's own weights."""
        work, state = self.work, self._state_here()
        costs = {name: self.shapes[name][0] * self.shapes[name][1] for subset in subsets for name in subset}
        for name in shares(costs, work.device_count)[self.number]:
            work.check()
            self.run.tell(name, self._quantize_module(name, state), work.layer)
        work.meet()
        if self.number == 0:
            for subset in subsets:
                work.outcomes.setdefault(subset, self._scheme_of(subset).prepare(None, 0, self._full(subset[0])))
        work.meet()

    def _quantize_module(self, name: str, state: Any) -> float:
        """Quantize one module from the source's own weights; its loss."""
        full = self._full(name)
        weight_NK = self.run.source.load([f"{full}.weight"], self.device)[f"{full}.weight"]
        try:
            rows = self.run.scheme.of(full).quantize(full, weight_NK, state)
        except WeightError as error:
            raise WeightError(f"`{full}`: {error}") from error
        self.work.keep(name, rows)
        del weight_NK
        running.return_freed_memory()  # or the next module's peak would lie on top of what this one has freed
        return rows.loss

    def _replace_weights(self, module: nn.Module, subset: tuple[str, ...]) -> None:
        """Make this device's share of the adapter, then put what a loader will see into its module, unless that waits."""
        work = self.work
        if work.adapter is not None:
            quantized: dict[str, Any] = {name: work.quantized[name] for name in subset}
            costs = {name: self.shapes[name][0] * self.shapes[name][1] for name in subset}
            for name in shares(costs, work.device_count)[self.number]:
                work.adapter.compensate(name, weight_of(module, name), quantized[name].dequantize())
        if self.run.scheme.is_sequential:
            self._put_quantized(module, subset)

    def _put_quantized(self, module: nn.Module, subset: tuple[str, ...]) -> None:
        quantized: dict[str, Any] = self.work.quantized
        for name in subset:
            weight_NK, rows = weight_of(module, name).data, quantized[name]
            if not self.run.scheme.quantizes_units:
                weight_NK.copy_(rows.dequantize())
                continue
            if self.run.streams > 1:  # the unquantized layer keeps what is there
                weight_of(module, name).data = weight_NK = torch.empty_like(weight_NK)
            # The whole in float32 would be several times the weight.
            for start, stop in spans(0, len(weight_NK), UNIT_ROWS):
                weight_NK[start:stop] = rows.rows(start, stop).dequantize()

    def _check_weights(self, module: nn.Module) -> None:
        """Told before anything is spent on the layer, and by name: units know rows only."""
        for name in self.shapes:
            try:
                self.run.scheme.of(self._full(name)).check(weight_of(module, name))
            except WeightError as error:
                raise WeightError(f"`{self._full(name)}`: {error}") from error

    def _full(self, name: str) -> str:
        return self.run.decoder.full_name(self.work.layer, name)


@dataclass
class _Calls:
    """The batches of a shard, each made ready as it is asked for; may be gone through again."""

    shard: Shard
    first: int

    def __iter__(self) -> Iterator[tuple[Tensor, dict[str, object]]]:
        return (self.shard._call(batch, self.first) for _, batch in self.shard.batches)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
