"""GPTQ: columns are rounded one by one, and each column's error is spread over the columns that follow.

Frantar et al., "GPTQ", arXiv 2210.17323. For a linear layer with weight W [N, K] and calibration inputs X, rounding
minimises |(W - W') X|^2, whose Hessian in each row of W is H = 2/T * sum x x^T over T tokens. With U the upper Cholesky
factor of H^-1 (H^-1 = U^T U), rounding column i with error e_i = w_i - w'_i costs e_i^2 / U_ii^2 and the best correction
of a later column j is -e_i * U_ij / U_ii.

How it is computed here, and where that differs from the usual program:

* U is the inverse of an upper R with R R^T = H, that is, of the Cholesky factor of H with rows and columns reversed: one
  factorisation and one triangular inverse where the usual way takes two factorisations and one full inverse. float64,
  since H is ill-conditioned (K may exceed the number of tokens) and its factor decides every code.
* Columns look left: a column takes up all earlier errors just before it is rounded, in three strides (its group or
  block, its panel, itself), instead of every error being written to all later columns. Same sums, less memory traffic.
  Weights are kept [K, N], so that a column of all rows is contiguous.
* A group's grid is found when its first column's turn comes, on weights that hold all earlier errors. The usual program
  leaves out those of the running block; both agree when `group_size` is a multiple of `block_size`, or -1.

Numeric traps, each with a test. Dead columns (no input ever differs from 0) are decoupled from all others: they get the
mean live diagonal in H, which changes no code, keep their weight, rounded plainly, and carry no loss. Damping adds
`damp_percent` of the mean diagonal; when the factorisation fails it is raised by `damp_increment`, doubling, while it
is below 1; then `HessianError` says that this module is to be rounded to nearest. NaN or Inf in the inputs is no matter of
damping and has its own error, `ActivationError`, for which there is no fallback.

A row's codes depend on the row and the factor. The last bits of a matrix product may depend on how many rows it has, so
callers cut rows into units of a fixed size.

Agrees with a plain float64 loop over the columns (tests/test_gptq.py). Shape suffixes: N out_features, K in_features,
G groups, T tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tasks.job import GPTQConfig
from tasks.methods.grid import QuantizedRows, check_weight, columns_per_group, find_grid, find_group_grids

# Columns between two products over all rows, inside a block. Wide enough for a product to pay off.
PANEL = 32
# Tokens cast to float32 at a time, and columns of one product of `HessianSum.add`: fixed, since they decide last bits.
TOKENS_AT_ONCE = 8192
COLUMNS_AT_ONCE = 256


class HessianError(ValueError):
    """A Hessian that can't guide rounding; the caller rounds this module to nearest instead, and says so."""


class ActivationError(ValueError):
    """NaN or Inf among a module's calibration inputs: the model itself has gone wrong before it."""


class HessianSum:
    """Sum of x x^T over real tokens, in float32, as a lower triangle of blocks.

    A float32 sum of 262,144 tokens in batches of 64 is within 1e-5 of the exact one (tested); damping is at least
    three orders above that. Callers leave padding out, and merge lanes in a fixed order.
    """

    def __init__(self, in_features: int, device: torch.device | str) -> None:
        self.tokens = 0
        self._sum_KK = torch.zeros(in_features, in_features, dtype=torch.float32, device=device)

    def add(self, x_TK: Tensor) -> None:
        """Add tokens [..., K] of any float dtype."""
        x_TK = x_TK.reshape(-1, x_TK.shape[-1])
        self.tokens += x_TK.shape[0]
        for part_TK in x_TK.split(TOKENS_AT_ONCE):
            part_TK = part_TK.to(device=self._sum_KK.device, dtype=torch.float32)
            for start, stop in _spans(0, len(self._sum_KK), COLUMNS_AT_ONCE):
                # On and below the diagonal block only: the rest is its mirror image.
                self._sum_KK[start:, start:stop].addmm_(part_TK[:, start:].t(), part_TK[:, start:stop])

    def merge(self, other: "HessianSum") -> None:
        """Add another lane's tokens, from any device."""
        self.tokens += other.tokens
        self._sum_KK += other._sum_KK.to(self._sum_KK.device)

    def hessian(self) -> Tensor:
        """2/T * sum x x^T, float32 [K, K], exactly symmetric; HessianError when there was no token."""
        if not self.tokens:
            raise HessianError("no calibration token reached this module: round it to nearest, or add calibration data")
        lower_KK = self._sum_KK.tril() * (2 / self.tokens)
        return lower_KK + lower_KK.tril(-1).t()


@dataclass(frozen=True, eq=False)
class Factor:
    """What `quantize_rows` needs of a Hessian; all modules that share an input share one.

    feedback_KK float32: row j holds what column j takes of each earlier column's error, U_ij / U_ii; pivots_K float32:
    U_ii. Both in the order in which columns are rounded. order_K int64: the input column rounded i-th, None for 0, 1,
    ... dead_K bool, by input column. damp_percent: what was used, after `raised` failed attempts.
    """

    feedback_KK: Tensor
    pivots_K: Tensor
    order_K: Tensor | None
    dead_K: Tensor
    damp_percent: float
    raised: int

    def to(self, device: torch.device | str) -> "Factor":
        """This factor on `device`."""
        return replace(
            self,
            feedback_KK=self.feedback_KK.to(device),
            pivots_K=self.pivots_K.to(device),
            order_K=None if self.order_K is None else self.order_K.to(device),
            dead_K=self.dead_K.to(device),
        )


def factor_hessian(hessian_KK: Tensor, config: GPTQConfig) -> Factor:
    """The upper Cholesky factor of the inverse of the damped Hessian, in the order of rounding; input unchanged.

    On the Hessian's device, in float64. On a CPU the last bits depend on the number of threads, which the caller fixes.
    ActivationError for NaN or Inf, HessianError when no damping below 1 makes it positive definite.
    """
    if not bool(hessian_KK.isfinite().all()):
        raise ActivationError(
            "the Hessian holds NaN or Inf: calibration inputs of this module overflowed; the source model is damaged, "
            "or needs a wider compute dtype than the one it ran in"
        )
    diagonal_K = hessian_KK.diagonal()
    dead_K = diagonal_K == 0
    order_K = _rounding_order(diagonal_K, config)
    reversed_K = torch.arange(len(hessian_KK) - 1, -1, -1, device=hessian_KK.device)
    if order_K is not None:
        reversed_K = order_K[reversed_K]
    flipped_KK = hessian_KK[reversed_K][:, reversed_K].double()
    # Any positive value does for a dead column: it is coupled to none. The live mean leaves the damping as it would be.
    live_K = diagonal_K[~dead_K].double()
    mean = float(live_K.mean()) if len(live_K) else 1.0
    flipped_KK.diagonal()[dead_K[reversed_K]] = mean
    lower_KK, damp_percent, raised = _damped_cholesky(flipped_KK, mean, config)
    upper_KK = _invert_lower(lower_KK).flip(0, 1)
    pivots_K = upper_KK.diagonal()
    feedback_KK = (upper_KK / pivots_K[:, None]).float().t().contiguous()
    return Factor(feedback_KK, pivots_K.float(), order_K, dead_K, damp_percent, raised)


def quantize_rows(weight_NK: Tensor, factor: Factor, config: GPTQConfig) -> QuantizedRows:
    """Round rows of one module, or of several that share `factor`, on the factor's device; any float dtype.

    The loss is the mean over tokens of a row's squared output error, as the (damped) Hessian tells it. WeightError for
    weights that no grid holds, HessianError when the error feedback diverges.
    """
    check_weight(weight_NK, config)
    weight_KN = weight_NK.to(device=factor.pivots_K.device, dtype=torch.float32).t()
    g_idx_K, group_of = _groups(factor, config)
    if config.static_groups:
        scales_GN, zeros_GN = (grid_NG.t().contiguous() for grid_NG in find_group_grids(weight_KN.t(), config))
    else:
        scales_GN = weight_KN.new_empty(max(group_of) + 1, weight_KN.shape[1])
        zeros_GN = torch.empty_like(scales_GN)
    weight_KN = weight_KN.contiguous() if factor.order_K is None else weight_KN[factor.order_K]
    codes_KN, errors_KN = _round_columns(weight_KN, factor.feedback_KK, scales_GN, zeros_GN, group_of, config)
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
    return QuantizedRows(
        codes_KN.t().contiguous(), scales_GN.t().half(), zeros_GN.t().to(torch.int32), g_idx_K, losses_N
    )


def _round_columns(
    weight_KN: Tensor,
    feedback_KK: Tensor,
    scales_GN: Tensor,
    zeros_GN: Tensor,
    group_of: list[int],
    config: GPTQConfig,
) -> tuple[Tensor, Tensor]:
    """Round all columns in order: codes uint8 and errors, [K, N]; overwrites `weight_KN`, and the grids unless static.

    For few rows, and on a GPU, the time is that of the torch calls in the loop over columns: five a column.
    """
    in_features = len(weight_KN)
    errors_KN = torch.empty_like(weight_KN)
    codes_KN = torch.empty_like(weight_KN, dtype=torch.uint8)
    panel_CN = weight_KN.new_empty(PANEL, weight_KN.shape[1])  # steps from zero; reused, it stays in the cache
    weights, steps, errors = weight_KN.unbind(), panel_CN.unbind(), errors_KN.unbind()
    lowest: Any = -(2 ** (config.bits - 1))
    highest: Any = 2 ** (config.bits - 1) - 1
    span = in_features if config.static_groups else columns_per_group(in_features, config)

    def take_up(start: int, stop: int, since: int, until: int) -> None:
        """Correct columns start .. stop - 1 by the errors of columns since .. until - 1."""
        if since < until:
            weight_KN[start:stop].addmm_(feedback_KK[start:stop, since:until], errors_KN[since:until], alpha=-1)

    for group_start, group_stop in _spans(0, in_features, span):
        take_up(group_start, group_stop, 0, group_start)
        if not config.static_groups:
            group = group_of[group_start]
            scales_GN[group], zeros_GN[group] = find_grid(weight_KN[group_start:group_stop].t(), config)
        for block_start, block_stop in _spans(group_start, group_stop, config.block_size):
            take_up(block_start, block_stop, group_start, block_start)
            for panel_start, panel_stop in _spans(block_start, block_stop, PANEL):
                take_up(panel_start, panel_stop, block_start, panel_start)
                group = -1
                for i in range(panel_start, panel_stop):
                    weight_N, step_N = weights[i], steps[i - panel_start]
                    if group_of[i] != group:
                        group = group_of[i]
                        scale_N = scales_GN[group]
                        if not config.sym:
                            lowest = -zeros_GN[group]
                            highest = lowest + (2**config.bits - 1)
                    if i > panel_start:
                        weight_N.addmv_(errors_KN[panel_start:i].t(), feedback_KK[i, panel_start:i], alpha=-1)
                    torch.div(weight_N, scale_N, out=step_N).round_().clamp_(lowest, highest)
                    torch.addcmul(weight_N, step_N, scale_N, value=-1, out=errors[i])
                zeros = 2 ** (config.bits - 1) if config.sym else zeros_GN[group_of[panel_start:panel_stop]]
                codes_KN[panel_start:panel_stop] = panel_CN[: panel_stop - panel_start] + zeros
    return codes_KN, errors_KN


def _spans(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    for first in range(start, stop, size):
        yield first, min(first + size, stop)


def _damped_cholesky(hessian_KK: Tensor, mean: float, config: GPTQConfig) -> tuple[Tensor, float, int]:
    """Lower factor, the damping it took and the failed attempts; `hessian_KK` is overwritten."""
    diagonal_K = hessian_KK.diagonal().clone()
    for raised, damp_percent in enumerate(_damping_steps(config)):
        hessian_KK.diagonal().copy_(diagonal_K + damp_percent * mean)
        lower_KK, failed_at = torch.linalg.cholesky_ex(hessian_KK)
        if not int(failed_at):
            return lower_KK, damp_percent, raised
    raise HessianError(
        f"the Hessian is not positive definite (leading minor {int(failed_at)} of {len(hessian_KK)}) even at "
        f"damp_percent={damp_percent:.3g}: too few distinct calibration tokens, or sums that lost their precision; "
        f"round this module to nearest, or add calibration data"
    )


def _invert_lower(lower_KK: Tensor) -> Tensor:
    """Inverse of a lower triangle; by blocks of columns, since a column of it is zero above the diagonal."""
    inverse_KK = torch.zeros_like(lower_KK)
    for start, stop in _spans(0, len(lower_KK), COLUMNS_AT_ONCE):
        unit_KC = lower_KK.new_zeros(len(lower_KK) - start, stop - start)
        unit_KC.fill_diagonal_(1.0)
        inverse_KK[start:, start:stop] = torch.linalg.solve_triangular(lower_KK[start:, start:], unit_KC, upper=False)
    return inverse_KK


def _damping_steps(config: GPTQConfig) -> Iterator[float]:
    damp_percent, increment = config.damp_percent, config.damp_increment
    while damp_percent < 1:
        yield damp_percent
        damp_percent += increment
        increment *= 2


def _rounding_order(diagonal_K: Tensor, config: GPTQConfig) -> Tensor | None:
    """The input column to round i-th, for every i; None for their natural order. Ties keep it."""
    if config.desc_act:
        return torch.argsort(diagonal_K, descending=True, stable=True)
    if not config.act_group_aware:
        return None
    size = columns_per_group(len(diagonal_K), config)
    diagonal_GC = diagonal_K.reshape(-1, size)
    inside_GC = torch.argsort(diagonal_GC, dim=1, descending=True, stable=True)
    groups_G = torch.argsort(diagonal_GC.amax(dim=1), descending=True, stable=True)
    first_G1 = torch.arange(0, len(diagonal_K), size, device=diagonal_K.device)[:, None]
    return (inside_GC + first_G1)[groups_G].reshape(-1)


def _groups(factor: Factor, config: GPTQConfig) -> tuple[Tensor, list[int]]:
    """`g_idx` by input column, and the group of the column rounded i-th.

    Groups are runs of input columns, but for `desc_act` without static groups: there they are runs in rounding order.
    """
    in_features = len(factor.pivots_K)
    size = columns_per_group(in_features, config)
    runs_K = torch.arange(in_features, device=factor.pivots_K.device, dtype=torch.int32) // size
    if factor.order_K is None:
        return runs_K, runs_K.tolist()
    if config.desc_act and not config.static_groups:
        return torch.empty_like(runs_K).index_copy_(0, factor.order_K, runs_K), runs_K.tolist()
    return runs_K, runs_K[factor.order_K].tolist()
