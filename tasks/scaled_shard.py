"""One device's share of a layer whose channels are scaled: observed whole, then scaled, quantized, and run again.

A scale that is taken out of v_proj or up_proj changes what is quantized first by what enters o_proj or down_proj last. So
the layer is run unquantized as far as its last linears, for the moments of every subset's input; then the scales of all
subsets are chosen, each over its stacked rows in the units of quantize_shard.py, losses summed in the order of units;
then everything is quantized; and the layer is run once more, with the weights and norms that its readers will have, for
the next layer's hidden states. Which modules can take up scales is found by the layer's own code (tasks/models/folding.py).
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from tasks.execution_plan import UNIT_ROWS
from tasks.layer_work import rows_of, shares, weight_of
from tasks.methods import awq
from tasks.methods.grid import QuantizedRows
from tasks.models.folding import Fold, Folding, Subset
from tasks.models.staged import StagedForward
from tasks.quantization import AWQConfig
from tasks.quantize_shard import Shard
from tasks.schemes import Prepared


@dataclass
class LayerScaling:
    """What the shards of one layer share until it is quantized, beside its `LayerWork`; on the CPU, but for moments."""

    folding: Folding
    prepared: dict[Subset, Prepared] = field(default_factory=dict)
    candidates_SK: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    losses: dict[int, Tensor] = field(default_factory=dict)
    # What each subset's input columns are multiplied by, and what a module's output channels are divided by.
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
        self._observe(module)
        for subset in self.subsets:
            self._choose(module, subset)
        work.meet()
        for subset in self.subsets:
            self._quantize_scaled(module, subset)
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

    def _observe(self, module: nn.Module) -> None:
        """The moments of every subset's input, from the layer as the source has it."""
        with StagedForward(module, self.subsets, self._calls(), rewinds=self._rewinds) as staged:
            for subset in self.subsets:
                self._sum_up(staged, subset)
                self.work.meet()
                if self.number == 0:
                    self._scaling.prepared[subset] = self._prepared(subset)
                self.work.meet()

    def _choose(self, module: nn.Module, subset: Subset) -> None:
        """Find the scales of a subset's input columns, and take them out of what comes before."""
        work, scaling, config = self.work, self._scaling, self._config
        prepared, fold = scaling.prepared[subset], scaling.folding.folds.get(subset)
        weights = [weight_of(module, name) for name in subset]
        if fold is None or prepared.state is None:
            if self.number == 0:
                scaling.columns[subset] = torch.ones(weights[0].shape[1])
                reason = None if prepared.state is None else scaling.folding.refusals[subset]
                work.outcomes[subset] = replace(prepared, state=None, unscaled=reason)
            return
        moments = prepared.state.to(self.device)
        if self.number == 0:
            magnitude_K = awq.weight_magnitude(weights, config)
            scaling.candidates_SK = awq.candidate_scales(moments.magnitude_K, magnitude_K, fold.channels_K, config)
        work.meet()
        for unit in range(self.number, -(-sum(map(len, weights)) // UNIT_ROWS), work.device_count):
            work.check()
            weight_RK = rows_of(weights, unit * UNIT_ROWS, (unit + 1) * UNIT_ROWS)
            scaling.losses[unit] = awq.scale_losses(weight_RK, moments.second_KK, scaling.candidates_SK, config)
        work.meet()
        if self.number == 0:
            losses_S = torch.stack([scaling.losses[unit] for unit in sorted(scaling.losses)]).sum(dim=0)
            scaling.losses.clear()
            scale_K = scaling.candidates_SK[awq.best_candidate(losses_S)]
            scaling.columns[subset] = self._take_out(module, fold, scale_K)
            work.outcomes[subset] = replace(prepared, state=None)
        work.meet()

    def _take_out(self, module: nn.Module, fold: Fold, scale_K: Tensor) -> Tensor:
        """Divide the channels of what comes before by these scales; float32 [K], the scales that it could take up."""
        source, folded = self.run.source, self.work.folded
        scale_N = torch.ones(fold.channel_count)
        scale_N[fold.channels_K] = scale_K
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
        columns_K = scaling.columns[subset].to(self.device)
        channels = [scaling.channels.get(name, torch.ones(len(weight))) for name, weight in weights.items()]
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
            channels_of = dict(zip(subset, channels, strict=True))
            for name in shares(costs, work.device_count)[self.number]:
                channels_N = channels_of[name].to(self.device)
                scaled_NK = weights[name].float() / channels_N[:, None] * columns_K
                work.adapter.compensate(name, scaled_NK, self._rows_of(name).dequantize(), channels_N)
            work.meet()
        for name, weight in weights.items():
            weight.data.copy_(self._rows_of(name).dequantize())

    def _rows_of(self, name: str) -> QuantizedRows:
        rows = self.work.quantized[name]
        assert isinstance(rows, QuantizedRows)
        return rows

    def _restore_losses(self, name: str) -> None:
        """Give a module whose channels were divided the losses of its own outputs, to be held beside others."""
        rows = self._rows_of(name)
        if name in self._scaling.channels:
            self.work.quantized[name] = replace(rows, losses_N=rows.losses_N * self._scaling.channels[name].square())
