"""One device's share of a layer whose channels are scaled: observed whole, then scaled, quantized, and run again.

A scale that is taken out of v_proj or up_proj changes what is quantized first by what enters o_proj or down_proj last. So
the layer is run unquantized as far as its last linears, for the moments of every subset's input; then the scales of all
subsets are chosen, each over its stacked rows in the units of quantize_shard.py, losses summed in the order of units;
then everything is quantized; and the layer is run once more, with the weights and norms that its readers will have, for
the next layer's hidden states. Which modules can take up scales is found by the layer's own code (tasks/models/folding.py).

The moments of all experts would not fit. What enters them is scaled for all alike, and that is chosen where the router is
reached, by what it gets: every token, of which an expert sees its share. Then the experts' projections are quantized a
group at a time, each expert on one device, as soon as both of its inputs are known; their weights are put in place when
all have been run as the source has them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from tasks.execution_plan import UNIT_ROWS
from tasks.expert_groups import cost, experts_per_token, group_size, quantize_subset
from tasks.layer_work import rows_of, shares, weight_of
from tasks.methods import awq
from tasks.methods.grid import QuantizedRows
from tasks.models.experts import group_experts
from tasks.models.folding import Fold, Folding, Subset
from tasks.models.staged import StagedForward
from tasks.quantization import AWQConfig
from tasks.quantize_shard import Shard
from tasks.schemes import Prepared, Scheme


@dataclass
class LayerScaling:
    """What the shards of one layer share until it is quantized, beside its `LayerWork`; on the CPU, but for moments."""

    folding: Folding
    prepared: dict[Subset, Prepared] = field(default_factory=dict)
    candidates_SK: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    losses: dict[int, Tensor] = field(default_factory=dict)
    # What each subset's input columns are multiplied by, and what a module's output channels are divided by; else 1.
    columns: dict[Subset, Tensor] = field(default_factory=dict)
    channels: dict[str, Tensor] = field(default_factory=dict)


class ScaledShard(Shard):
    """The share of one device, for a scheme that scales layers."""

    def go(self) -> None:
        work, decoder = self.work, self.run.decoder
        module = decoder.materialise(work.layer, self.device, self.dtype)
        if self.number == 0:
            self._check_weights(module)
            work.scaling = LayerScaling(decoder.folding(work.layer))
        work.meet()
        experts = decoder.experts(work.layer)
        self._observe(module, {down: ups for ups, down in experts})
        of_experts = {subset for pair in experts for subset in pair}
        others = [subset for subset in self.subsets if subset not in of_experts]
        for subset in others:
            self._scale(module, subset)
        work.meet()
        for subset in others:
            self._quantize_scaled(module, subset)
        for subset in of_experts:
            self._put_quantized(module, subset)
        for full, tensor in work.folded.items():
            module.get_parameter(full.removeprefix(self._full(""))).data.copy_(tensor)
        with StagedForward(module, (), self._calls()) as staged:
            self._hand_on(staged)

    @property
    def _config(self) -> AWQConfig:
        config = self.run.job.quantization
        assert isinstance(config, AWQConfig)
        return config

    @property
    def _scaling(self) -> LayerScaling:
        assert isinstance(self.work.scaling, LayerScaling)
        return self.work.scaling

    def _scheme_of(self, subset: Subset) -> Scheme:
        """One for all: rules leave modules as they are, no more; and a router, which they may name, is looked at too."""
        return self.run.scheme

    def _observe(self, module: nn.Module, ups_of: Mapping[Subset, Subset]) -> None:
        """The moments of every subset's input, from the layer as the source has it; experts are quantized by theirs.

        `ups_of`: what is quantized together before the activation, by what comes after it.
        """
        decoder, scaling, layer = self.run.decoder, self._scaling, self.work.layer
        size = group_size(self.run, layer)
        group_experts(module, size or 1)
        stages = list(decoder.stages(layer, size))
        shared = next((fold for fold in scaling.folding.folds.values() if fold.followers), None)
        router = () if shared is None else shared.followers[:1]
        if router:
            first = self.subsets[decoder.before_experts(layer)]
            stages.insert(next(n for n, stage in enumerate(stages) if first in stage), (router,))
        in_order = [subset for stage in stages for subset in stage]
        with StagedForward(module, in_order, self._calls(), stages, rewinds=self._rewinds) as staged:
            for stage in stages:
                for subset in stage:
                    self._sum_up(staged, subset)
                    self.work.meet()
                if stage[0] in ups_of:
                    self._quantize_experts(module, [(ups_of[down], down) for down in stage])
                elif stage[0] not in ups_of.values():  # which wait for what enters the projections down
                    if self.number == 0:
                        scaling.prepared[stage[0]] = self._prepared(stage[0])
                    self.work.meet()
                if shared is not None and stage == (router,):
                    self._scale_for_all(module, shared, scaling.prepared[router])

    def _scale_for_all(self, module: nn.Module, fold: Fold, prepared: Prepared) -> None:
        """Find the scales of what enters a layer's experts, and whatever else reads the norm before them."""
        assert prepared.tokens == self.run.calibration_tokens, "every token comes to a router"
        if prepared.state is None:
            return
        pairs = self.run.decoder.experts(self.work.layer)
        of_experts = {ups for ups, _ in pairs}
        # Of all tokens, as far as anybody knows before they are sent.
        share = experts_per_token(self.run.decoder.config, len(pairs)) / max(len(pairs), 1)
        readers = [subset for subset, other in self._scaling.folding.folds.items() if other.module == fold.module]
        self._choose(
            module, fold, {subset: share if subset in of_experts else 1.0 for subset in readers}, prepared.state
        )
        if self.number == 0:
            del self._scaling.prepared[fold.followers[:1]]

    def _scale(self, module: nn.Module, subset: Subset) -> None:
        """Find the scales of a subset's input columns, if it has no others, and take them out of what comes before."""
        prepared, fold = self._scaling.prepared[subset], self._scaling.folding.folds.get(subset)
        if self.number == 0:
            self.work.outcomes[subset] = self._outcome(subset, prepared)
        if fold is not None and not fold.followers and prepared.state is not None:
            self._choose(module, fold, {subset: 1.0}, prepared.state)

    def _outcome(self, subset: Subset, prepared: Prepared) -> Prepared:
        reason = None if prepared.state is None else self._scaling.folding.refusals.get(subset)
        return replace(prepared, state=None, unscaled=reason)

    def _choose(self, module: nn.Module, fold: Fold, readers: Mapping[Subset, float], moments: awq.Moments) -> None:
        """Find the scales of the input columns of `readers`, and take them out of what comes before.

        A reader's losses count as often as it is said to get a token.
        """
        work, scaling, config = self.work, self._scaling, self._config
        moments = moments.to(self.device)
        weights = {subset: [weight_of(module, name) for name in subset] for subset in readers}
        if self.number == 0:
            scaling.candidates_SK = self._candidates([w for part in weights.values() for w in part], moments, fold)
        work.meet()
        units = [(s, start) for s, part in weights.items() for start in range(0, sum(map(len, part)), UNIT_ROWS)]
        for unit in range(self.number, len(units), work.device_count):
            work.check()
            subset, start = units[unit]
            weight_RK = rows_of(weights[subset], start, start + UNIT_ROWS)
            if fold.followers:
                losses_S = awq.clipped_losses(weight_RK, moments, scaling.candidates_SK, config)
            else:
                losses_S = awq.scale_losses(weight_RK, moments.second_KK, scaling.candidates_SK, config)
            scaling.losses[unit] = readers[subset] * losses_S
        work.meet()
        if self.number == 0:
            losses_S = torch.stack([scaling.losses[unit] for unit in sorted(scaling.losses)]).sum(dim=0)
            scaling.losses.clear()
            taken_K = self._take_out(module, fold, scaling.candidates_SK[awq.best_candidate(losses_S)])
            scaling.columns |= dict.fromkeys(readers, taken_K)
        work.meet()

    def _candidates(self, weights: list[Tensor], moments: awq.Moments, fold: Fold) -> Tensor:
        magnitude_K = awq.weight_magnitude(weights, self._config)
        scales_SK = awq.candidate_scales(moments.magnitude_K, magnitude_K, fold.channels_K, self._config)
        return awq.in_powers_of_two(scales_SK) if fold.followers else scales_SK

    def _take_out(self, module: nn.Module, fold: Fold, scale_K: Tensor) -> Tensor:
        """Divide the channels of what comes before by these scales; float32 [K], the scales that it could take up."""
        source, folded = self.run.source, self.work.folded
        scale_N = torch.ones(fold.channel_count)
        scale_N[fold.channels_K] = scale_K
        if fold.followers:
            names = [f"{self._full(name)}.weight" for name in (fold.module, *fold.followers)]
            weights = source.load(names)
            norm_N, *matrices = (weights[name] for name in names)
            norm_N, matrices, taken_N = awq.fold_exactly(norm_N, matrices, scale_N)
            folded |= dict(zip(names, (norm_N, *matrices), strict=True))
            return taken_N[fold.channels_K]
        if fold.offset is not None:
            name = f"{self._full(fold.module)}.weight"
            folded[name], taken_N = awq.fold_into_norm(source.load([name])[name], fold.offset, scale_N)
            return taken_N[fold.channels_K]
        taken_N = awq.fold_into_rows(weight_of(module, fold.module), scale_N, self._config)
        self._scaling.channels[fold.module] = taken_N
        name = f"{self._full(fold.module)}.bias"
        if name in source.tensors:
            bias_N = source.load([name])[name]
            folded[name] = (bias_N.float() / taken_N).to(bias_N.dtype)
        return taken_N[fold.channels_K]

    def _quantize_scaled(self, module: nn.Module, subset: Subset) -> None:
        """Quantize this device's units of the subset, then put what a loader will see into this device's module."""
        work, scaling = self.work, self._scaling
        weights = {name: weight_of(module, name) for name in subset}
        columns_K = self._columns(subset)
        channels = [self._channels(name) for name in subset]
        state = scaling.prepared[subset].state
        if state is not None:
            state = state.to(self.device).divided(columns_K)
        for unit in range(self.number, -(-sum(map(len, channels)) // UNIT_ROWS), work.device_count):
            work.check()
            start, stop = unit * UNIT_ROWS, (unit + 1) * UNIT_ROWS
            weight_RK = rows_of(list(weights.values()), start, stop).float()
            weight_RK = weight_RK / rows_of(channels, start, stop).to(self.device)[:, None] * columns_K
            work.units[unit] = self.run.scheme.quantize_unit(weight_RK, state)
        work.meet()
        if self.number == 0:
            work.collect(subset, [len(weight) for weight in weights.values()])
            scaling.prepared[subset] = replace(scaling.prepared[subset], state=None)  # for the forward that follows
            for name in subset:
                self._restore_losses(name)
            self.run.tell(", ".join(subset), sum(work.quantized[name].loss for name in subset) / len(subset))
            if work.adapter is not None:
                work.adapter.prepare_moments(None if state is None else state.second_KK)
        work.meet()
        if work.adapter is not None:
            costs = {name: weight.numel() for name, weight in weights.items()}
            for name in shares(costs, work.device_count)[self.number]:
                work.adapter.compensate(
                    name, self._scaled(module, subset, name), self._rows_of(name).dequantize(), self._channels(name)
                )
            work.meet()
        for name, weight in weights.items():
            weight.data.copy_(self._rows_of(name).dequantize())

    def _quantize_experts(self, module: nn.Module, experts: Sequence[tuple[Subset, Subset]]) -> None:
        """Quantize this device's share of a group of experts, by the inputs of what is before and after the activation."""
        costs = {pair: sum(cost(subset, self.shapes) for subset in pair) for pair in experts}
        for ups, down in shares(costs, self.work.device_count)[self.number]:
            self.work.check()
            before, after = self._prepared(ups), self._prepared(down)
            fold = self._scaling.folding.folds.get(down)
            if fold is not None and after.state is not None:
                self._scaling.columns[down] = self._take_out(module, fold, self._best_alone(module, fold, down, after))
            self._quantize_alone(module, ups, before)
            self._quantize_alone(module, down, after)
        self.work.meet()

    def _best_alone(self, module: nn.Module, fold: Fold, subset: Subset, prepared: Prepared) -> Tensor:
        """The scales of a subset's input columns, which no other device looks for."""
        weights, moments = [weight_of(module, name) for name in subset], prepared.state.to(self.device)
        scales_SK = self._candidates(weights, moments, fold)
        losses = [
            awq.scale_losses(rows_of(weights, start, start + UNIT_ROWS), moments.second_KK, scales_SK, self._config)
            for start in range(0, sum(map(len, weights)), UNIT_ROWS)
        ]
        return scales_SK[awq.best_candidate(torch.stack(losses).sum(dim=0))]

    def _quantize_alone(self, module: nn.Module, subset: Subset, prepared: Prepared) -> None:
        """Quantize a subset which no other device quantizes, and make its adapter; the module stays as it is."""
        work, adapter = self.work, self.work.adapter
        state = None if prepared.state is None else prepared.state.to(self.device).divided(self._columns(subset))
        weights = [self._scaled(module, subset, name) for name in subset]
        scaled = replace(prepared, state=state)
        modules, _ = quantize_subset(self._scheme_of(subset), weights, scaled, UNIT_ROWS)
        root_KK = None if adapter is None or state is None else adapter.root_of_moments(state.second_KK)
        for name, weight_NK, rows in zip(subset, weights, modules, strict=True):
            work.keep(name, rows)
            self._restore_losses(name)
            if adapter is not None:
                adapter.compensate_by(root_KK, name, weight_NK, rows.dequantize(), self._channels(name))
        work.settle(subset, self._outcome(subset, prepared))
        self.run.tell(", ".join(subset), sum(work.quantized[name].loss for name in subset) / len(subset))

    def _columns(self, subset: Subset) -> Tensor:
        """What the subset's input columns are multiplied by, on this device."""
        ones_K = torch.ones(self.shapes[subset[0]][1])
        return self._scaling.columns.get(subset, ones_K).to(self.device)

    def _channels(self, name: str) -> Tensor:
        """What a module's output channels are divided by, on the CPU."""
        return self._scaling.channels.get(name, torch.ones(self.shapes[name][0]))

    def _scaled(self, module: nn.Module, subset: Subset, name: str) -> Tensor:
        """float32 [N, K]: the weight that is quantized in place of a module's."""
        return weight_of(module, name).float() / self._channels(name).to(self.device)[:, None] * self._columns(subset)

    def _rows_of(self, name: str) -> QuantizedRows:
        rows = self.work.quantized[name]
        assert isinstance(rows, QuantizedRows)
        return rows

    def _restore_losses(self, name: str) -> None:
        """Give a module whose channels were divided the losses of its own outputs, to be held beside others."""
        rows = self._rows_of(name)
        if name in self._scaling.channels:
            self.work.quantized[name] = replace(rows, losses_N=rows.losses_N * self._scaling.channels[name].square())
