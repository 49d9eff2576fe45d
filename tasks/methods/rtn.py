"""Round to nearest: each group's weights go to the nearest point of its own grid, without looking at any input.

The baseline that every calibrated method has to beat, and what GPTQ falls back to for modules that no or too few
calibration tokens reach, or whose Hessian will not factor. It needs no statistics and its rows do not depend on each
other, so any split of the work gives the same codes.

float32 whatever the weights' dtype; see grid.py for the grid and its traps. Agrees with GPTQModel 7.7.0 code for code on
asymmetric grids and where a group's largest weight is positive, but for a few weights that its scale, not yet rounded to
float16, puts on the other side of a rounding boundary; elsewhere the symmetric grid is finer than that program's.

Shape suffixes: N out_features, K in_features, G groups.
"""

import torch
from torch import Tensor

from tasks.methods.grid import (
    GridConfig,
    QuantizedRows,
    check_weight,
    columns_per_group,
    find_group_grids,
    round_to_grid,
)


def quantize_rows(weight_NK: Tensor, config: GridConfig) -> QuantizedRows:
    """The nearest codes of any rows, on the weights' device; the loss is the mean squared weight error.

    WeightError for weights that no grid holds, ValueError for a `group_size` that does not divide K.
    """
    check_weight(weight_NK, config)
    weight_NK = weight_NK.float()
    rows, in_features = weight_NK.shape
    group_size = columns_per_group(in_features, config)
    scales_NG, zeros_NG = find_group_grids(weight_NK, config)
    grouped_NGC = weight_NK.reshape(rows, -1, group_size)
    codes_NGC = round_to_grid(grouped_NGC, scales_NG[..., None], zeros_NG[..., None], config.bits)
    error_NGC = (codes_NGC - zeros_NG[..., None]) * scales_NG[..., None] - grouped_NGC
    return QuantizedRows(
        codes_NK=codes_NGC.reshape(rows, in_features).to(torch.uint8),
        scales_NG=scales_NG.half(),
        zeros_NG=zeros_NG.to(torch.int32),
        g_idx_K=torch.arange(in_features, device=weight_NK.device, dtype=torch.int32) // group_size,
        losses_N=error_NGC.square().mean(dim=(1, 2)),
    )
