"""The integer grid that GPTQ, RTN and AWQ round to, and the rows that come out of them.

A row of weights is cut into groups of `group_size` input columns; each group has a float16 `scale` and an integer
`zero`, and `weight ≈ scale * (code - zero)` with codes in 0 .. 2^bits - 1.

* Symmetric: zero is 2^(bits-1), so there is one code more below zero than above, and the step is the wider of
  -min(w) / 2^(bits-1), which gives the most negative weight a code of its own, and max(w) / (2^(bits-1) - 1/2), which
  leaves the most positive one half a step beyond the last code. Other programs take 2 * max|w| / (2^bits - 1) on both
  sides. That is the same where the largest weight is positive; where it is negative, their step is wider for nothing, and
  the weight falls on a tie between two codes that the rounding of the scale to float16 decides by chance.
* Asymmetric: the grid spans min(w, 0) .. max(w, 0). Layout v1 stores zero - 1, and its readers disagree on what a
  stored -1 means, so for `checkpoint_format="gptq"` a zero of 0 is never chosen: such a group gets zero 1 and a step
  that is wider by one code. v2 has no such rule.

Scales are rounded to float16, as the file holds them, BEFORE a code is chosen: rounding and error feedback then see
what a reader computes. Numeric traps, each with a test:

* A group of zeros gets the grid of -1 .. 1, so that its codes are exactly zero and nothing is divided by 0.
* A step under the smallest normal half (6.1e-5) is rounded up, never down to 0: the weights stay inside the grid.
* A step above the largest half (65504) can't be written. That is refused (`WeightError`) rather than clipped: one
  clipped group is a silently wrong layer.

Rounding is half to even, as in the programs that read and write this layout. float32 throughout.

Shape suffixes: N out_features, K in_features, G groups, R any rows, C columns of one group.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.quantization import AWQConfig, GPTQConfig, RTNConfig

GridConfig = GPTQConfig | RTNConfig | AWQConfig

LARGEST_HALF = 65504.0
SMALLEST_NORMAL_HALF = 2.0**-14
SMALLEST_HALF = 2.0**-24
# The search over shrunken ranges: 1.00, 0.99, .. 0.21 of the full one, as other quantizers do it.
SHRINK_STEPS = 100
LARGEST_SHRINK = 0.8


class WeightError(ValueError):
    """A weight matrix that no grid can hold: NaN, infinite, or too large for a float16 scale."""


@dataclass(frozen=True, eq=False)
class QuantizedRows:
    """Output channels on the grid: of one module, or of several that share an input, stacked by rows.

    codes_NK uint8, scales_NG float16, zeros_NG int32 (as they are, not minus one), g_idx_K int32 (the group of each
    input column), losses_N float32: per row, the mean squared output error of GPTQ and AWQ or RTN's mean squared weight
    error.
    """

    codes_NK: Tensor
    scales_NG: Tensor
    zeros_NG: Tensor
    g_idx_K: Tensor
    losses_N: Tensor

    @property
    def loss(self) -> float:
        """Mean of the rows' losses."""
        return float(self.losses_N.double().mean())

    def dequantize(self) -> Tensor:
        """float32 [N, K]: what a reader of the exported file computes."""
        columns_K = self.g_idx_K.long()
        steps_NK = self.codes_NK.float() - self.zeros_NG.float()[:, columns_K]
        return self.scales_NG.float()[:, columns_K] * steps_NK

    def rows(self, start: int, stop: int) -> "QuantizedRows":
        """Rows start .. stop - 1, sharing memory with these."""
        return QuantizedRows(
            self.codes_NK[start:stop],
            self.scales_NG[start:stop],
            self.zeros_NG[start:stop],
            self.g_idx_K,
            self.losses_N[start:stop],
        )

    def to(self, device: torch.device | str) -> "QuantizedRows":
        """These rows on `device`."""
        return QuantizedRows(
            self.codes_NK.to(device),
            self.scales_NG.to(device),
            self.zeros_NG.to(device),
            self.g_idx_K.to(device),
            self.losses_N.to(device),
        )

    @staticmethod
    def concatenate(parts: "list[QuantizedRows]") -> "QuantizedRows":
        """All rows of `parts` in order; ValueError unless every part assigns columns to groups alike."""
        first, *rest = parts
        if not rest:
            return first
        if any(not torch.equal(first.g_idx_K, part.g_idx_K) for part in rest):
            raise ValueError(
                "rows with different `g_idx` can't be joined: they were quantized with different Hessians or options; "
                "join only units of one subset"
            )
        return QuantizedRows(
            torch.cat([part.codes_NK for part in parts]),
            torch.cat([part.scales_NG for part in parts]),
            torch.cat([part.zeros_NG for part in parts]),
            first.g_idx_K,
            torch.cat([part.losses_N for part in parts]),
        )


def columns_per_group(in_features: int, config: GridConfig) -> int:
    """Input columns that share a scale; ValueError when `group_size` does not divide `in_features`."""
    if config.group_size == -1:
        return in_features
    if in_features % config.group_size:
        raise ValueError(
            f"in_features {in_features} is not a multiple of group_size {config.group_size}: the last group would be "
            f"cut short; choose a group_size that divides it, or -1"
        )
    return config.group_size


def natural_order(in_features: int, groups: int) -> Tensor:
    """int32 [K]: the group of each input column where the columns of a group lie side by side."""
    return torch.arange(in_features, dtype=torch.int32) // (in_features // groups)


def check_finite(weight_NK: Tensor) -> None:
    """WeightError that names the first row with a NaN or an infinity in it."""
    bad_N = ~weight_NK.isfinite().all(dim=1)
    if bool(bad_N.any()):
        raise WeightError(
            f"row {int(bad_N.nonzero()[0])} (one of {int(bad_N.sum())}) holds NaN or infinite weights: the source file is "
            f"damaged or the model diverged; fetch it again or use another source"
        )


def check_weight(weight_NK: Tensor, config: GridConfig) -> None:
    """WeightError for NaN, infinities, and weights whose scale would not fit float16 (over 491,000 at 4 bits)."""
    check_finite(weight_NK)
    largest_N = weight_NK.abs().amax(dim=1).float()
    limit = LARGEST_HALF * (2**config.bits - 1) / 2
    bad_N = largest_N > limit
    if bool(bad_N.any()):
        row = int(bad_N.nonzero()[0])
        raise WeightError(
            f"row {row} (one of {int(bad_N.sum())}) holds a weight of magnitude {float(largest_N[row]):.4g}; at "
            f"{config.bits} bits the largest that a float16 scale can reach is {limit:.4g}; use more bits, or a method "
            f"whose scales are wider"
        )


def row_losses(error_NK: Tensor) -> Tensor:
    """float64 [N]: mean squared error of each row, also where a square would leave the float32 range."""
    largest_N = error_NK.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    return (error_NK / largest_N[:, None]).square_().mean(dim=1).double() * largest_N.double().square()


def find_grid(weight_RC: Tensor, config: GridConfig) -> tuple[Tensor, Tensor]:
    """Scale and zero of each row of one group's columns, both float32: scales are exact float16 values, zeros integers.

    With `mse` > 0 the range is the one, of 80 shrunken ones, with the least sum of |error|^mse; an asymmetric grid tries
    both integers beside the ideal zero, which takes 2% off the squared error at 2 bits and under 1% above.
    """
    low_R, high_R = full_range(weight_RC, config)
    if not config.mse:
        return scale_and_zero(low_R, high_R, config)
    best_R = torch.full_like(low_R, torch.inf)
    scale_R, zero_R = torch.ones_like(low_R), torch.zeros_like(low_R)
    for step in range(int(LARGEST_SHRINK * SHRINK_STEPS)):
        shrink = 1 - step / SHRINK_STEPS
        for round_zero in (torch.round,) if config.sym else (torch.floor, torch.ceil):
            tried_scale_R, tried_zero_R = scale_and_zero(shrink * low_R, shrink * high_R, config, round_zero)
            error_RC = round_to_grid(weight_RC, tried_scale_R[:, None], tried_zero_R[:, None], config.bits)
            error_RC.sub_(tried_zero_R[:, None]).mul_(tried_scale_R[:, None]).sub_(weight_RC)
            error_R = error_RC.abs_().pow_(config.mse).sum(dim=1)
            is_better_R = error_R < best_R
            best_R = torch.where(is_better_R, error_R, best_R)
            scale_R = torch.where(is_better_R, tried_scale_R, scale_R)
            zero_R = torch.where(is_better_R, tried_zero_R, zero_R)
    return scale_R, zero_R


def find_group_grids(weight_NK: Tensor, config: GridConfig) -> tuple[Tensor, Tensor]:
    """`find_grid` for every group of every row at once: scales and zeros [N, G]."""
    rows, in_features = weight_NK.shape
    scale_R, zero_R = find_grid(weight_NK.reshape(-1, columns_per_group(in_features, config)), config)
    return scale_R.reshape(rows, -1), zero_R.reshape(rows, -1)


def round_to_grid(weight: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """The nearest codes, as float32; `scale` and `zero` broadcast against `weight`."""
    return torch.div(weight, scale).round_().add_(zero).clamp_(0, 2**bits - 1)


def full_range(weight_RC: Tensor, config: GridConfig) -> tuple[Tensor, Tensor]:
    """The lowest and the highest point that a grid over all of each row's weights must reach; never equal."""
    low_R, high_R = torch.aminmax(weight_RC, dim=1)
    low_R, high_R = low_R.clamp(max=0), high_R.clamp(min=0)
    if config.sym:
        middle = 2 ** (config.bits - 1)
        step_R = torch.maximum(torch.div(-low_R, middle), torch.div(high_R, middle - 0.5))
        low_R, high_R = -middle * step_R, (middle - 1) * step_R
    is_zero_R = low_R == high_R
    return low_R.masked_fill(is_zero_R, -1.0), high_R.masked_fill(is_zero_R, 1.0)


def scale_and_zero(
    low_R: Tensor, high_R: Tensor, config: GridConfig, round_zero: Callable[[Tensor], Tensor] = torch.round
) -> tuple[Tensor, Tensor]:
    """The grid that spans a range: scales that are exact float16 values, zeros integers, both float32."""
    last_code = 2**config.bits - 1
    scale_R = _as_half(torch.div(high_R - low_R, last_code))
    if config.sym:
        return scale_R, torch.full_like(scale_R, 2 ** (config.bits - 1))
    zero_R = round_zero(torch.div(-low_R, scale_R)).clamp_(0, last_code)
    if config.checkpoint_format == "gptq":
        has_none_R = zero_R < 1
        scale_R = torch.where(has_none_R, _as_half(torch.div(high_R, last_code - 1)), scale_R)
        zero_R = zero_R.clamp_(min=1)
    return scale_R, zero_R


def _as_half(scale_R: Tensor) -> Tensor:
    """Positive scales at float16 precision, in float32; below the normal range rounded up, so that none becomes 0."""
    half_R = scale_R.clamp(min=SMALLEST_HALF).half()
    is_short_R = (half_R < scale_R) & (half_R < SMALLEST_NORMAL_HALF)
    # Neighbouring halves are neighbouring integers.
    return (half_R.view(torch.int16) + is_short_R).view(torch.half).float()
