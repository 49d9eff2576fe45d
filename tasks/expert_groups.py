"""A layer's experts, a group at a time: as many as memory holds, each expert on one device, spread by cost.

What enters a group's linears is known before any of them runs, so that the statistics of a whole group are summed in one
stand of the forward, and its experts are quantized side by side. An expert's statistic is its own, its lanes are summed
and merged in the same order whatever the group, and its rows are cut into the same units: the result depends neither on
the size of the groups nor on the pool.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from torch import Tensor

from tasks import running
from tasks.adapters import root_bytes
from tasks.execution_plan import LANES
from tasks.layer_work import rows_of
from tasks.methods.hessian import HessianError
from tasks.models.folding import Subset
from tasks.schemes import Prepared, Scheme, UnitRows

# Of what is free: the allocator, and what no reckoning knows of.
USABLE = 0.8
# How many more tokens than the mean an expert of a group may get.
SKEW = 2


def group_size(run: running.Run, layer: int) -> int:
    """How many of a layer's experts have their statistics and inputs in memory at once; 0 for a layer without experts."""
    experts = run.decoder.experts(layer)
    if not experts:
        return 0
    shapes, device, slots = run.decoder.linear_shapes(layer), run.pool.devices[0], len(run.pool.devices)
    itemsize = run.decoder.compute_dtype(device.torch_device).itemsize
    tensors, hidden_size = run.source.tensors, run.decoder.config.hidden_size
    weights = sum(prod(tensors[name].shape) for name in run.decoder.layer_tensor_names(layer)) * itemsize
    weights *= run.streams
    # Beside its inputs the layer holds for each token the residual, the normed residual and the experts' sum.
    tokens = sum(batch.input_ids.numel() for batch in run.calibration.batches) if run.calibration is not None else 0
    tokens *= run.streams
    widest = max(shapes[subset[0]][1] for pair in experts for subset in pair)
    passing = (
        tokens
        * experts_per_token(run.decoder.config, len(experts))
        // len(experts)
        * max(hidden_size, widest)
        * itemsize
    )
    if device.type == "cpu":
        host = 0 if run.spills else 2 * tokens * hidden_size * run.decoder.source_dtype.itemsize
        taken = slots * weights + 3 * tokens * hidden_size * itemsize + host
    else:
        taken = weights + 3 * tokens * hidden_size * itemsize // slots
        passing //= slots
    # Lanes that wait for those before them, and what turns sums into what rows are quantized with: each shard one at a
    # time, where the sum lies, which is the device of its first lane.
    taken += LANES * run.scheme.sum_bytes(widest) + slots * run.scheme.statistic_bytes(widest)
    summed = run.scheme.sum_bytes(widest)
    if run.scheme.scales_layers:
        # Both of an expert's wait for each other, and those of all that is no expert's for the end of the layer.
        of_experts = {subset for pair in experts for subset in pair}
        summed = sum(run.scheme.sum_bytes(shapes[subset[0]][1]) for subset in experts[0])
        taken += sum(run.scheme.sum_bytes(shapes[s[0]][1]) for s in run.decoder.subsets(layer) if s not in of_experts)
        taken += slots * root_bytes(widest) if run.job.adapter is not None else 0
    free = min([slot.memory_bytes for slot in run.pool.devices] + [run.memory_limit or sys.maxsize]) - taken
    return max(1, min(len(experts), int(USABLE * free) // (summed + SKEW * passing + 1)))


def experts_per_token(config: Any, count: int) -> int:
    """How many of `count` experts a router sends each token to, as a model's configuration tells; else all."""
    for name in ("num_experts_per_tok", "moe_k", "moe_topk"):
        if isinstance(value := getattr(config, name, None), int):
            return value
    return count


def cost(subset: Subset, shapes: dict[str, tuple[int, int]]) -> int:
    """What a subset takes to quantize, in products: its factor, and its rows."""
    in_features = shapes[subset[0]][1]
    return (in_features + sum(shapes[name][0] for name in subset)) * in_features**2


def quantize_subset(
    scheme: Scheme, weights: Sequence[Tensor], prepared: Prepared, unit_rows: int
) -> tuple[list[UnitRows], Prepared]:
    """All modules of a subset on one device: the same units, and the same fallback, as when they are spread."""

    def units(state: Any) -> UnitRows:
        starts = range(0, sum(map(len, weights)), unit_rows)
        done = [scheme.quantize_unit(rows_of(list(weights), start, start + unit_rows), state) for start in starts]
        return type(done[0]).concatenate(done)

    try:
        stacked = units(prepared.state)
    except HessianError as error:
        prepared = replace(prepared, state=None, method="rtn", fallback=str(error))
        stacked = units(None)
    modules, start = [], 0
    for weight in weights:
        modules.append(stacked.rows(start, start + len(weight)))
        start += len(weight)
    return modules, replace(prepared, state=None)
