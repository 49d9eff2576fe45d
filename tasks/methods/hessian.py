"""The Hessian of a linear layer's output error, and what rounding needs of it.

For inputs x [K] of T tokens, H = 2/T * sum x x^T; modules with one input share it and its factor. Used by every method
that spreads rounding errors by second-order information (GPTQ: arXiv 2210.17323).

With U the upper Cholesky factor of H^-1 (H^-1 = U^T U), U is the inverse of an upper R with R R^T = H, that is, of the
Cholesky factor of H with rows and columns reversed. So one factorisation and one triangular inverse do, where the usual
way takes two factorisations and one full inverse. float64, since H is ill-conditioned (K may exceed the number of
tokens) and its factor decides every code.

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

from tasks.job import GPTQConfig
from tasks.methods.grid import columns_per_group

# Tokens cast to float32 at a time, and columns of one product: fixed, since they decide last bits.
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
            for start, stop in spans(0, len(self._sum_KK), COLUMNS_AT_ONCE):
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


def spans(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """start .. stop cut into pieces of at most `size`: first and one past last of each."""
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
    for start, stop in spans(0, len(lower_KK), COLUMNS_AT_ONCE):
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
