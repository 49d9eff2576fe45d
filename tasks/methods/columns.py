"""Columns of a weight matrix rounded one by one, each error spread over the columns that follow.

The loop of Frantar et al., "GPTQ", arXiv 2210.17323, for any grid: a method says how a column is rounded (`Rounder`),
this module which columns take up which errors. For a linear layer with weight W [N, K] and calibration inputs X,
rounding minimises |(W - W') X|^2, whose Hessian in each row of W is H. With U the upper Cholesky factor of H^-1, rounding
column i with error e_i = w_i - w'_i costs e_i^2 / U_ii^2, and the best correction of a later column j is
-e_i * U_ij / U_ii.

Columns look left: a column takes up all earlier errors just before it is rounded, in three strides (its group or block,
its panel, itself), instead of every error being written to all later columns. Same sums, less memory traffic. Weights
are kept [K, N], so that a column of all rows is contiguous. float32, on the factor's device.

Shape suffixes: N out_features, K in_features, C columns of a panel or a group.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tasks.methods.hessian import Factor, HessianError, spans

# Columns between two products over all rows, inside a block. Wide enough for a product to pay off.
PANEL = 32


class Rounder(Protocol):
    """A grid per group of columns; steps are whole numbers of the grid, zero for a weight of zero."""

    def choose(self, weight_NK: Tensor, groups: list[int], /) -> None:
        """Choose the grids of these groups from their columns, which lie side by side in this order."""

    def round(self, group: int, weight_N: Tensor, step_N: Tensor, error_N: Tensor, /) -> None:
        """Write the nearest steps of one column of this group, and what is left of its weights."""

    def codes(self, groups: list[int], step_CN: Tensor, /) -> Tensor:
        """The codes 0 .. 255 of columns of these groups."""


def round_with_feedback(
    weight_NK: Tensor,
    factor: Factor,
    rounder: Rounder,
    group_of: list[int],
    span: int | None,
    block_size: int,
    first_order: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Codes uint8 [N, K] of rows that share `factor`, and each row's loss, float32 [N]; the weights stay as they are.

    group_of: the group of the column rounded i-th; each has `span` columns, or None where all grids are chosen already.
    Grids of all groups that start in a block are found at the block's start, on weights that hold the errors of all
    earlier blocks. first_order: the share of a column's way from the source that is taken back (gptaq.py). The loss is the
    mean over tokens of a row's squared output error, as the (damped) Hessian tells it, measured from what the weights aim
    at; dead columns carry none. HessianError when the error feedback diverges.
    """
    weight_KN = _in_order(factor.aim(weight_NK), factor)
    pull = _Pull(_in_order(weight_NK.to(weight_KN), factor), weight_KN.clone(), first_order) if first_order else None
    codes_KN, errors_KN = _round_columns(weight_KN, factor.feedback_KK, rounder, group_of, span, block_size, pull)
    if pull is not None:
        errors_KN = pull.output_errors(weight_KN, errors_KN, factor.feedback_KK)
    is_live_K = ~factor.dead_K
    if factor.order_K is not None:
        is_live_K = is_live_K[factor.order_K]
        codes_KN = torch.empty_like(codes_KN).index_copy_(0, factor.order_K, codes_KN)
    # H is twice the mean of x x^T.
    losses_N = (is_live_K / (2 * factor.pivots_K.square())) @ errors_KN.square_()
    if not bool(losses_N.isfinite().all()):
        raise HessianError(
            "error feedback diverged: corrections left the range of float32; the Hessian is too ill-conditioned at "
            f"damp_percent={factor.damp_percent:.3g}; round this module to nearest, or raise damp_percent"
        )
    return codes_KN.t().contiguous(), losses_N


def _in_order(weight_NK: Tensor, factor: Factor) -> Tensor:
    """A copy [K, N], its columns in the order of rounding."""
    if factor.order_K is None:
        return weight_NK.t().clone(memory_format=torch.contiguous_format)
    return weight_NK.t().index_select(0, factor.order_K)


@dataclass(frozen=True)
class _Pull:
    """A share `beta` of each column's way from the source, `source_KN`, is taken back; `aim_KN` is what errors count from."""

    source_KN: Tensor
    aim_KN: Tensor
    beta: float

    def output_errors(self, weight_KN: Tensor, errors_KN: Tensor, feedback_KK: Tensor) -> Tensor:
        """The errors whose squares over those of the pivots make up the loss, from what became of weights and errors.

        Without a pull they are the rounding errors, as every error is handed on in full. Here the difference that is left
        is taken apart anew: by H = (U^T U)^-1, and a row of the difference is a sum of rows of U.
        """
        rounded_KN = torch.lerp(weight_KN, self.source_KN, self.beta).sub_(errors_KN)
        return torch.linalg.solve_triangular(feedback_KK, self.aim_KN - rounded_KN, upper=False, unitriangular=True)


def _round_columns(
    weight_KN: Tensor,
    feedback_KK: Tensor,
    rounder: Rounder,
    group_of: list[int],
    span: int | None,
    block_size: int,
    pull: _Pull | None,
) -> tuple[Tensor, Tensor]:
    """Round all columns in order: codes uint8 and errors, [K, N]; makes `weight_KN` what was rounded.

    For few rows, and on a GPU, the time is that of the torch calls in the loop over columns: five a column.
    """
    in_features = len(weight_KN)
    errors_KN = torch.empty_like(weight_KN)
    codes_KN = torch.empty_like(weight_KN, dtype=torch.uint8)
    panel_CN = weight_KN.new_empty(PANEL, weight_KN.shape[1])  # steps from zero; reused, it stays in the cache
    weights, steps, errors = weight_KN.unbind(), panel_CN.unbind(), errors_KN.unbind()
    stride = span or block_size
    open_until, open_since = 0, 0  # columns before `open_until` have taken up the errors of those before `open_since`

    def take_up(start: int, stop: int, since: int, until: int) -> None:
        """Correct columns start .. stop - 1 by the errors of columns since .. until - 1."""
        if start < stop and since < until:
            weight_KN[start:stop].addmm_(feedback_KK[start:stop, since:until], errors_KN[since:until], alpha=-1)

    for block_start, block_stop in spans(0, in_features, block_size):
        take_up(block_start, min(block_stop, open_until), open_since, block_start)
        if open_until < block_stop:
            last = min(-(-block_stop // stride) * stride, in_features)
            take_up(open_until, last, 0, block_start)
            if span is not None:
                rounder.choose(weight_KN[open_until:last].t(), group_of[open_until:last:span])
            open_until, open_since = last, block_start
        for panel_start, panel_stop in spans(block_start, block_stop, PANEL):
            take_up(panel_start, panel_stop, block_start, panel_start)
            for i in range(panel_start, panel_stop):
                weight_N = weights[i]
                if i > panel_start:
                    weight_N.addmv_(errors_KN[panel_start:i].t(), feedback_KK[i, panel_start:i], alpha=-1)
                if pull is not None:
                    weight_N.lerp_(pull.source_KN[i], pull.beta)
                rounder.round(group_of[i], weight_N, steps[i - panel_start], errors[i])
                if pull is not None:
                    errors[i].sub_(weight_N - pull.source_KN[i], alpha=pull.beta)
            codes_KN[panel_start:panel_stop] = rounder.codes(
                group_of[panel_start:panel_stop], panel_CN[: panel_stop - panel_start]
            )
    return codes_KN, errors_KN
