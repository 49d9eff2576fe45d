"""The Hessian of a linear layer's output error, and what rounding needs of it.

For inputs x [K] of T tokens, H = 2/T * sum x x^T; modules with one input share it and its factor. Used by every method
that spreads rounding errors by second-order information (GPTQ: arXiv 2210.17323).

With U the upper Cholesky factor of H^-1 (H^-1 = U^T U), U is the inverse of an upper R with R R^T = H, that is, of the
Cholesky factor of H with rows and columns reversed. So one factorisation and one triangular inverse do, where the usual
way takes two factorisations and one full inverse. float64, since H is ill-conditioned (K may exceed the number of
tokens) and its factor decides every code.

Memory: what is largest of a run, so every step works in place, by panels. In order: the float32 sum; the sum and a
float64 copy of it (12 bytes an entry, the peak); that copy alone, whose lower triangle becomes the factor and then the
factor's inverse, while the upper one keeps the Hessian for another try; the copy and the float32 result.

Numeric traps, each with a test. Dead columns (no input ever differs from 0) are decoupled from all others: they get the
mean live diagonal, which changes no code, where the usual 1 would swamp the damping of small activations. Damping adds
`damp_percent` of the mean diagonal; when the factorisation fails it is raised by `damp_increment`, doubling, while it
is below 1; then `HessianError` says that this module is to be rounded to nearest. NaN or Inf in the inputs is no matter
of damping and has its own error, `ActivationError`, for which there is no fallback.

Agrees with numpy's inverse and Cholesky in float64. Shape suffixes: K in_features, T tokens, G groups, C columns.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tasks.methods.grid import columns_per_group
from tasks.quantization import GPTQConfig

# Tokens cast to float32 at a time, columns of one product, and of one panel: fixed, since they decide last bits.
TOKENS_AT_ONCE = 8192
COLUMNS_AT_ONCE = 256
PANEL_COLUMNS = 512


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
            for start, stop in spans(0, len(self._sum_KK), COLUMNS_AT_ONCE):
                # On and below the diagonal block only: the rest is its mirror image.
                self._sum_KK[start:, start:stop].addmm_(part_TK[:, start:].t(), part_TK[:, start:stop])

    def merge(self, other: "HessianSum") -> None:
        """Add another lane's tokens, from any device."""
        self.tokens += other.tokens
        self._sum_KK += other._sum_KK.to(self._sum_KK.device)

    def hessian(self) -> Tensor:
        """2/T * sum x x^T, float32 [K, K], exactly symmetric; HessianError when there was no token.

        The sum is handed over, not copied: it may be asked for once.
        """
        if not self.tokens:
            raise HessianError("no calibration token reached this module: round it to nearest, or add calibration data")
        hessian_KK = self._sum_KK
        del self._sum_KK
        hessian_KK *= 2 / self.tokens
        for start, stop in spans(0, len(hessian_KK), COLUMNS_AT_ONCE):
            _mirror(hessian_KK[start:stop, start:stop])
            hessian_KK[start:stop, stop:] = hessian_KK[stop:, start:stop].t()
        return hessian_KK


@dataclass(frozen=True, eq=False)
class Factor:
    """What `quantize_rows` needs of a Hessian; all modules that share an input share one.

    feedback_KK float32: row j holds what column j takes of each earlier column's error, U_ij / U_ii; pivots_K float32:
    U_ii. Both in the order in which columns are rounded. order_K int64: the input column rounded i-th, None for 0, 1,
    ... dead_K bool, by input column. damp_percent: what was used, after `raised` failed attempts. shift_KK float32, by
    input column: what is added of each column of the weights to others before they are rounded (gptaq.py), if anything.
    """

    feedback_KK: Tensor
    pivots_K: Tensor
    order_K: Tensor | None
    dead_K: Tensor
    damp_percent: float
    raised: int
    shift_KK: Tensor | None = None

    def aim(self, weight_NK: Tensor) -> Tensor:
        """The weights that rounded ones are to be like, float32 on this factor's device; `weight_NK` may be among them."""
        weight_NK = weight_NK.to(device=self.pivots_K.device, dtype=torch.float32)
        return weight_NK if self.shift_KK is None else torch.addmm(weight_NK, weight_NK, self.shift_KK)

    def to(self, device: torch.device | str) -> "Factor":
        """This factor on `device`."""
        return replace(
            self,
            feedback_KK=self.feedback_KK.to(device),
            pivots_K=self.pivots_K.to(device),
            order_K=None if self.order_K is None else self.order_K.to(device),
            dead_K=self.dead_K.to(device),
            shift_KK=None if self.shift_KK is None else self.shift_KK.to(device),
        )


def factor_hessian(hessian_KK: Tensor, config: GPTQConfig) -> Factor:
    """The upper Cholesky factor of the inverse of the damped Hessian, in the order of rounding; input unchanged.

    On the Hessian's device, in float64. On a CPU the last bits depend on the number of threads, which the caller fixes.
    ActivationError for NaN or Inf, HessianError when no damping below 1 makes it positive definite.
    """
    diagonal_K = hessian_KK.diagonal().clone()
    dead_K = diagonal_K == 0
    order_K = _rounding_order(diagonal_K, config)
    size = len(diagonal_K)
    reversed_K = torch.arange(size - 1, -1, -1, device=hessian_KK.device)
    if order_K is not None:
        reversed_K = order_K[reversed_K]
    flipped_KK = hessian_KK.new_empty(size, size, dtype=torch.float64)
    for start, stop in spans(0, size, PANEL_COLUMNS):
        flipped_KK[start:stop] = hessian_KK[reversed_K[start:stop]][:, reversed_K]
        if not bool(flipped_KK[start:stop].isfinite().all()):
            raise ActivationError(
                "the Hessian holds NaN or Inf: calibration inputs of this module overflowed; the source model is "
                "damaged, or needs a wider compute dtype than the one it ran in"
            )
    del hessian_KK
    # Any positive value does for a dead column: it is coupled to none. The live mean leaves the damping as it would be.
    live_K = diagonal_K[~dead_K].double()
    mean = float(live_K.mean()) if len(live_K) else 1.0
    flipped_KK.diagonal()[dead_K[reversed_K]] = mean
    damp_percent, raised = _damped_cholesky(flipped_KK, mean, config)
    _invert_lower(flipped_KK)
    pivots_K = flipped_KK.diagonal().flip(0)
    feedback_KK = flipped_KK.new_empty(size, size, dtype=torch.float32)
    for start, stop in spans(0, size, PANEL_COLUMNS):
        # Reversed once more: rows of the lower inverse, from the last on, are those of the upper factor.
        rows_CK = flipped_KK[start:stop].tril(start) / flipped_KK.diagonal()[start:stop, None]
        feedback_KK[:, size - stop : size - start] = rows_CK.flip(0, 1).t()
    return Factor(feedback_KK, pivots_K.float(), order_K, dead_K, damp_percent, raised)


def spans(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """start .. stop cut into pieces of at most `size`: first and one past last of each."""
    for first in range(start, stop, size):
        yield first, min(first + size, stop)


def _damped_cholesky(hessian_KK: Tensor, mean: float, config: GPTQConfig) -> tuple[float, int]:
    """Make the lower triangle of `hessian_KK` its factor; the damping that took, and the failed attempts."""
    diagonal_K = hessian_KK.diagonal().clone()
    for raised, damp_percent in enumerate(_damping_steps(config)):
        if raised:
            _restore_lower(hessian_KK)
        hessian_KK.diagonal().copy_(diagonal_K + damp_percent * mean)
        failed_at = _factor_lower(hessian_KK)
        if not failed_at:
            return damp_percent, raised
    raise HessianError(
        f"the Hessian is not positive definite (leading minor {failed_at} of {len(hessian_KK)}) even at "
        f"damp_percent={damp_percent:.3g}: too few distinct calibration tokens, or sums that lost their precision; "
        f"round this module to nearest, or add calibration data"
    )


def _factor_lower(matrix_KK: Tensor) -> int:
    """Cholesky factor of a symmetric matrix in place of its lower triangle and diagonal; the strict upper one stays.

    Returns 0, or the order of the leading minor that is not positive definite.
    """
    for start, stop in spans(0, len(matrix_KK), PANEL_COLUMNS):
        panel_KC = matrix_KK[start:, start:stop]
        square_CC = panel_KC[: stop - start]
        above_CC = square_CC.triu(1)
        panel_KC -= matrix_KK[start:, :start] @ matrix_KK[start:stop, :start].t()
        lower_CC, failed_at = torch.linalg.cholesky_ex(square_CC)
        if int(failed_at):
            square_CC.copy_(square_CC.tril() + above_CC)
            return start + int(failed_at)
        square_CC.copy_(lower_CC + above_CC)
        below_KC = panel_KC[stop - start :]
        below_KC.copy_(torch.linalg.solve_triangular(lower_CC.t(), below_KC.contiguous(), upper=True, left=False))
    return 0


def _restore_lower(matrix_KK: Tensor) -> None:
    """Mirror the strict upper triangle onto the lower one."""
    for start, stop in spans(0, len(matrix_KK), PANEL_COLUMNS):
        _mirror(matrix_KK[start:stop, start:stop].t())
        matrix_KK[stop:, start:stop] = matrix_KK[start:stop, stop:].t()


def _mirror(square_CC: Tensor) -> None:
    """Mirror the strict lower triangle of a small matrix onto its upper one."""
    square_CC.copy_(square_CC.tril() + square_CC.tril(-1).t())


def _invert_lower(matrix_KK: Tensor) -> None:
    """Inverse of the lower triangle in its place, by panels from the last on; what is above it is used up."""
    size = len(matrix_KK)
    for start, stop in reversed(list(spans(0, size, PANEL_COLUMNS))):
        square_CC = matrix_KK[start:stop, start:stop]
        unit_CC = torch.eye(stop - start, dtype=matrix_KK.dtype, device=matrix_KK.device)
        inverse_CC = torch.linalg.solve_triangular(square_CC.tril(), unit_CC, upper=False)
        square_CC.copy_(inverse_CC)
        # inverse of [[A, 0], [B, D]] is [[A', 0], [-D' B A', D']], and D' is in its place already.
        right_KC = matrix_KK[stop:, start:stop] @ -inverse_CC
        for first, last in spans(stop, size, PANEL_COLUMNS):
            matrix_KK[first:last, start:stop] = matrix_KK[first:last, stop:last] @ right_KC[: last - stop]


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
