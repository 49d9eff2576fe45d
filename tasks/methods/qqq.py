"""QQQ: 4-bit weights whose values are whole numbers of an 8-bit grid, so that a kernel multiplies int8 by int8.

Zhang et al., "QQQ", arXiv 2406.09904 (W4A8: a reader also rounds each token's activations to int8 as it runs; nothing of
that is in the file). Columns are rounded one by one with GPTQ's error feedback (columns.py), to one of two grids:

* One group per row: `weight = 16 * s_channel * step`, steps -8 .. 7; 16 * step is the int8 number.
* Groups of 128 columns: `weight = s_channel * round(s_group * step)`. The channel's scale is that of an int8 grid, the
  group's float16 scale stretches 4-bit steps over it. Readers multiply in half precision and round half to even, then
  keep the low 8 bits: s_group * -8 below -128 would wrap round, so s_group is at most 16 (and at least 1: a smaller one
  gives no level that 1 does not).

Where this differs from the usual program: it rounds to real-valued group scales and rounds the values to int8 when it
packs; here the error feedback sees the integers that a reader multiplies. The channel's scale is fixed before the first
column, from the widest group of the source's weights; HEADROOM leaves room for what the feedback adds to them.

Symmetric grid as in grid.py: one step more below zero than above. float32; a row of zeros gives zeros, and no scale is 0.

Agrees with GPTQModel 7.7.0's torch layer on what the tensors mean, and beats the tensors that it makes itself from the
same inputs; see the tests.

Shape suffixes: N out_features, K in_features, G groups, C columns.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.methods.columns import round_with_feedback
from tasks.methods.gptq import groups_of
from tasks.methods.grid import LARGEST_SHRINK, SHRINK_STEPS, check_finite, columns_per_group
from tasks.methods.hessian import Factor
from tasks.quantization import GPTQConfig, QQQConfig

LOWEST, HIGHEST = -8, 7
# The lowest step of the widest group is the lowest int8 number: -8 * 16 = -128.
LARGEST_GROUP_SCALE = 16.0
# The widest group takes 16 / HEADROOM. More wastes levels of all groups, less clips weights that grew; between 1 and 1.2 the
# output error is the same within 4% (random correlated inputs, 384 and 1024 columns).
HEADROOM = 1.0625
# Keeps scales, and what is divided by them, inside the normal numbers of float32.
SMALLEST_CHANNEL_SCALE = 2.0**-100


@dataclass(frozen=True, eq=False)
class QQQRows:
    """Output channels of one module, or of several that share an input, stacked by rows.

    codes_NK uint8, 8 for zero; channel_N float32; group_NG float16 with no columns where each row is one group; losses_N
    float32: per row, the mean squared output error, or the mean squared weight error where no input was looked at.
    """

    codes_NK: Tensor
    channel_N: Tensor
    group_NG: Tensor
    losses_N: Tensor

    @property
    def loss(self) -> float:
        """Mean of the rows' losses."""
        return float(self.losses_N.double().mean())

    def integers(self) -> Tensor:
        """float32 [N, K], whole numbers -128 .. 127: what a kernel multiplies the activations by."""
        steps_NK = self.codes_NK.float() - 8
        groups = self.group_NG.shape[1]
        if not groups:
            return steps_NK * LARGEST_GROUP_SCALE
        scales_NK = self.group_NG.float().repeat_interleave(steps_NK.shape[1] // groups, dim=1)
        return steps_NK.mul_(scales_NK).round_().clamp_(-128, 127)

    def dequantize(self) -> Tensor:
        """float32 [N, K]: the weights that a reader multiplies by, but for its rounding of the activations."""
        return self.integers() * self.channel_N[:, None]

    def rows(self, start: int, stop: int) -> "QQQRows":
        """Rows start .. stop - 1, sharing memory with these."""
        return QQQRows(
            self.codes_NK[start:stop], self.channel_N[start:stop], self.group_NG[start:stop], self.losses_N[start:stop]
        )

    def to(self, device: torch.device | str) -> "QQQRows":
        """These rows on `device`."""
        return QQQRows(
            self.codes_NK.to(device), self.channel_N.to(device), self.group_NG.to(device), self.losses_N.to(device)
        )

    @staticmethod
    def concatenate(parts: "list[QQQRows]") -> "QQQRows":
        """All rows of `parts` in order."""
        return QQQRows(
            torch.cat([part.codes_NK for part in parts]),
            torch.cat([part.channel_N for part in parts]),
            torch.cat([part.group_NG for part in parts]),
            torch.cat([part.losses_N for part in parts]),
        )


def as_gptq(config: QQQConfig) -> GPTQConfig:
    """The settings of the Hessian's factor and of the order of columns, which are GPTQ's."""
    return GPTQConfig(
        group_size=config.group_size,
        act_group_aware=config.act_group_aware,
        block_size=config.block_size,
        damp_percent=config.damp_percent,
        damp_increment=config.damp_increment,
    )


def quantize_rows(weight_NK: Tensor, factor: Factor, config: QQQConfig) -> QQQRows:
    """Round rows that share `factor`, made with `as_gptq(config)`, on its device; any float dtype.

    The loss is the mean over tokens of a row's squared output error, as the (damped) Hessian tells it. WeightError for
    NaN and infinities, HessianError when the error feedback diverges.
    """
    check_finite(weight_NK)
    weight_NK = weight_NK.to(device=factor.pivots_K.device, dtype=torch.float32)
    _, group_of = groups_of(factor, as_gptq(config))
    grids = _Grids(weight_NK, config)
    codes_NK, losses_N = round_with_feedback(weight_NK, factor, grids, group_of, grids.size, config.block_size)
    return QQQRows(codes_NK, grids.channel_N, grids.group_scales(), losses_N)


def round_to_nearest(weight_NK: Tensor, config: QQQConfig) -> QQQRows:
    """The nearest codes without looking at any input, on the weights' device; the loss is the mean squared weight error.

    What modules fall back to that no or too few calibration tokens reach. WeightError for NaN and infinities.
    """
    check_finite(weight_NK)
    weight_NK = weight_NK.float()
    grids = _Grids(weight_NK, config)
    groups = list(range(weight_NK.shape[1] // grids.size))
    grids.choose(weight_NK, groups)
    step_GCN = torch.empty_like(weight_NK.t().reshape(len(groups), grids.size, -1))
    error_GCN = torch.empty_like(step_GCN)
    for group, weight_CN in enumerate(weight_NK.t().split(grids.size)):
        grids.round(group, weight_CN, step_GCN[group], error_GCN[group])
    codes_NK = (step_GCN - LOWEST).reshape(-1, len(weight_NK)).t().to(torch.uint8).contiguous()
    return QQQRows(codes_NK, grids.channel_N, grids.group_scales(), error_GCN.square().mean(dim=(0, 1)))


class _Grids:
    """The grid of each group, chosen as groups begin: `channel_N` and group scales [G, N], all float32."""

    def __init__(self, weight_NK: Tensor, config: QQQConfig) -> None:
        self.config = config
        self.size = columns_per_group(weight_NK.shape[1], as_gptq(config))
        self.is_grouped = config.group_size != -1
        headroom = HEADROOM if self.is_grouped else 1.0
        widest_N = _step(weight_NK.reshape(len(weight_NK), -1, self.size)).amax(dim=1)
        self.channel_N = _not_zero(widest_N * (headroom / LARGEST_GROUP_SCALE))
        self.scales_GN = weight_NK.new_full((weight_NK.shape[1] // self.size, len(weight_NK)), LARGEST_GROUP_SCALE)
        self._group = -1  # whose scale is at hand
        self._scale_N = self._step_N = self.channel_N

    def group_scales(self) -> Tensor:
        """float16 [N, G], G = 0 where each row is one group."""
        return (self.scales_GN if self.is_grouped else self.scales_GN[:0]).t().half().contiguous()

    def choose(self, weight_NK: Tensor, groups: list[int]) -> None:
        weight_NGC = weight_NK.reshape(len(weight_NK), -1, self.size)
        step_NG = _step(weight_NGC)
        if self.is_grouped:
            # Rounded as the file holds them before a code is chosen.
            scales_NG = (step_NG / self.channel_N[:, None]).clamp_(1.0, LARGEST_GROUP_SCALE).half().float()
            if self.config.mse:
                scales_NG = self._searched(weight_NGC, scales_NG)
            self.scales_GN[groups] = scales_NG.t()
        elif self.config.mse:
            scales_NG = self._searched(weight_NGC, self.scales_GN.t())
            self.channel_N = _not_zero(self.channel_N * scales_NG[:, 0] / LARGEST_GROUP_SCALE)
        self._group = -1

    def round(self, group: int, weight: Tensor, step: Tensor, error: Tensor) -> None:
        """Rows are the last dimension."""
        if group != self._group:
            self._group = group
            self._scale_N = self.scales_GN[group]
            self._step_N = self.channel_N * self._scale_N
        torch.div(weight, self._step_N, out=step).round_().clamp_(LOWEST, HIGHEST)
        if self.is_grouped:
            torch.mul(step, self._scale_N, out=error).round_().clamp_(-128, 127)
            torch.addcmul(weight, error, self.channel_N, value=-1, out=error)
        else:
            torch.addcmul(weight, step, self._step_N, value=-1, out=error)

    def codes(self, groups: list[int], step_CN: Tensor) -> Tensor:
        return step_CN - LOWEST

    def _searched(self, weight_NGC: Tensor, widest_NG: Tensor) -> Tensor:
        """Of 80 shrunken scales those with the least sum of |error|^mse."""
        best_NG = torch.full_like(widest_NG, torch.inf)
        found_NG = widest_NG.clone()
        channel_N11 = self.channel_N[:, None, None]
        for shrink in range(int(LARGEST_SHRINK * SHRINK_STEPS)):
            tried_NG = widest_NG * (1 - shrink / SHRINK_STEPS)
            if self.is_grouped:
                tried_NG = tried_NG.clamp_(min=1.0).half().float()
            error_NGC = torch.div(weight_NGC, tried_NG[..., None] * channel_N11).round_().clamp_(LOWEST, HIGHEST)
            error_NGC.mul_(tried_NG[..., None])
            if self.is_grouped:
                error_NGC.round_().clamp_(-128, 127)
            error_NG = error_NGC.mul_(channel_N11).sub_(weight_NGC).abs_().pow_(self.config.mse).sum(dim=2)
            is_better_NG = error_NG < best_NG
            best_NG = torch.where(is_better_NG, error_NG, best_NG)
            found_NG = torch.where(is_better_NG, tried_NG, found_NG)
        return found_NG


def _step(weight_NGC: Tensor) -> Tensor:
    """[N, G]: the finest step whose grid holds the lowest weight, and the highest up to half a step beyond its last code."""
    low_NG, high_NG = torch.aminmax(weight_NGC, dim=2)
    return torch.maximum(low_NG / LOWEST, high_NG / (HIGHEST + 0.5)).clamp_(min=0)


def _not_zero(scale_N: Tensor) -> Tensor:
    return torch.where(scale_N > 0, scale_N.clamp(min=SMALLEST_CHANNEL_SCALE), 1.0)
