"""The search behind GGML K-quants: 256 weights a block, cut into sub-blocks whose scales are themselves a few bits wide.

Two families. *Affine* (q2_k, q4_k, q5_k): `weight ≈ d * scale * code - dmin * min`, scale and min unsigned. *Signed*
(q3_k, q6_k): `weight ≈ d * scale * code`, code and scale signed. `d` and `dmin` are float16, one per block.

The format fixes how codes are read, not how they are chosen. We minimise the squared error, each weight's counting by
its input column's importance (all 1 without), in three steps, each over all blocks at once:

1. Per sub-block, many slightly shrunken and stretched grids: round to each, refit scale (and min) by least squares,
   keep the grid with the smallest error.
2. `d` and `dmin` from the largest scale and min, rounded to float16 BEFORE anything is divided by them; then each
   sub-block tries the integer scales beside the nearest one, with codes and min chosen anew for what a reader computes.
3. `d` and `dmin` refitted by least squares for the codes found; kept, with new codes, where the error falls.

Steps 2 and 3 run twice; a block keeps the first rounding where nothing is better. float32 throughout. A block that is all zeros has d = 0 and comes back as zeros; so does one too small for a half-precision d.

Shape suffixes: B blocks, C the 256 weights of a block, S sub-blocks of a block, J weights of a sub-block.
"""

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from tasks.methods.grid import SMALLEST_NORMAL_HALF

ROUNDS = 2
SMALLEST_SPREAD = 1e-5  # of codes, relative to their mean square: below it float32 can't tell
AFFINE_STRETCHES = tuple(-1.0 + 0.1 * step for step in range(21))
SIGNED_STRETCHES = tuple(0.1 * step for step in range(-9, 10))


@dataclass(frozen=True, eq=False)
class AffineBlocks:
    """d_B and dmin_B float32 at float16 precision, scales_BS, mins_BS and codes_BSJ whole numbers in float32."""

    d_B: Tensor
    dmin_B: Tensor
    scales_BS: Tensor
    mins_BS: Tensor
    codes_BSJ: Tensor

    def values(self) -> Tensor:
        """float32 [B, S, J], in the order of operations of the format's readers."""
        step_BS1 = (self.d_B[:, None] * self.scales_BS)[..., None]
        return step_BS1 * self.codes_BSJ - (self.dmin_B[:, None] * self.mins_BS)[..., None]


@dataclass(frozen=True, eq=False)
class SignedBlocks:
    """d_B float32 at float16 precision, scales_BS and codes_BSJ whole numbers, signed, in float32."""

    d_B: Tensor
    scales_BS: Tensor
    codes_BSJ: Tensor

    def values(self) -> Tensor:
        """float32 [B, S, J], in the order of operations of the format's readers."""
        return (self.d_B[:, None] * self.scales_BS)[..., None] * self.codes_BSJ


FoundBlocks = TypeVar("FoundBlocks", AffineBlocks, SignedBlocks)


def fit_affine(x_BSJ: Tensor, importance_BSJ: Tensor, last_code: int, last_scale: int) -> AffineBlocks:
    """The best affine blocks that we find; `last_code` and `last_scale` are the largest code and scale (and min)."""
    blocks, sub_blocks, width = x_BSJ.shape
    scale_R, offset_R = fit_affine_grids(x_BSJ.reshape(-1, width), importance_BSJ.reshape(-1, width), last_code, True)
    scale_BS, min_BS = scale_R.reshape(blocks, sub_blocks), -offset_R.reshape(blocks, sub_blocks)
    d_B = _to_covering_half(scale_BS.amax(dim=1) / last_scale)
    dmin_B = _to_covering_half(min_BS.amax(dim=1) / last_scale)
    scales_BS = (scale_BS * inverse(d_B)[:, None]).round_().clamp_(0, last_scale)
    mins_BS = (min_BS * inverse(dmin_B)[:, None]).round_().clamp_(0, last_scale)
    codes_BSJ = _affine_codes(x_BSJ, d_B, dmin_B, scales_BS, mins_BS, last_code)
    best = AffineBlocks(d_B, dmin_B, scales_BS, mins_BS, codes_BSJ)
    for _ in range(ROUNDS):
        found = _choose_affine(x_BSJ, importance_BSJ, best, last_code, last_scale)
        best = _better(found, best, x_BSJ, importance_BSJ)
        d_B, dmin_B = _refit_affine(x_BSJ, importance_BSJ, best)
        codes_BSJ = _affine_codes(x_BSJ, d_B, dmin_B, best.scales_BS, best.mins_BS, last_code)
        found = AffineBlocks(d_B, dmin_B, best.scales_BS, best.mins_BS, codes_BSJ)
        best = _better(found, best, x_BSJ, importance_BSJ)
    return best


def fit_affine_grids(x_RJ: Tensor, w_RJ: Tensor, last_code: int, is_lowered: bool) -> tuple[Tensor, Tensor]:
    """Scale and offset [R] of groups of weights, `weight ≈ scale * code + offset`, each group on its own.

    `is_lowered` keeps every offset at or below 0, as an unsigned min that is subtracted needs it. A group of one value
    gets scale 0.
    """
    low_R, high_R = torch.aminmax(x_RJ, dim=1)
    if is_lowered:
        low_R = low_R.clamp(max=0)
    span_R = high_R - low_R
    inverse_span_R = inverse(span_R)
    shifted_RJ = x_RJ - low_R[:, None]  # near 0 whatever the offset: the sums below don't cancel
    wx_RJ = w_RJ * shifted_RJ
    sum_w, sum_x, sum_xx = w_RJ.sum(dim=1), wx_RJ.sum(dim=1), (wx_RJ * shifted_RJ).sum(dim=1)
    best_error, best_scale, best_offset = torch.full_like(low_R, torch.inf), torch.zeros_like(low_R), low_R
    for stretch in AFFINE_STRETCHES:
        codes_RJ = (shifted_RJ * ((last_code + stretch) * inverse_span_R)[:, None]).round_().clamp_(0, last_code)
        sum_lx = (wx_RJ * codes_RJ).sum(dim=1)
        wl_RJ = w_RJ * codes_RJ
        sum_l, sum_ll = wl_RJ.sum(dim=1), wl_RJ.mul_(codes_RJ).sum(dim=1)
        determinant = sum_w * sum_ll - sum_l * sum_l
        inverse_determinant = inverse(determinant)
        scale = (sum_w * sum_lx - sum_x * sum_l) * inverse_determinant
        shift = (sum_ll * sum_x - sum_l * sum_lx) * inverse_determinant
        if is_lowered:
            is_above = shift + low_R > 0
            shift = torch.where(is_above, -low_R, shift)
            scale = torch.where(is_above, (sum_lx - shift * sum_l) * inverse(sum_ll), scale)
        # All that is important has one code: least squares says nothing, so the grid stays as it was laid.
        is_singular = determinant <= SMALLEST_SPREAD * sum_w * sum_ll
        scale = torch.where(is_singular, span_R / (last_code + stretch), scale)
        shift = shift.masked_fill(is_singular, 0.0)
        error = sum_xx + scale * (scale * sum_ll + 2 * (shift * sum_l - sum_lx)) + shift * (shift * sum_w - 2 * sum_x)
        is_better = (error < best_error) & (scale > 0)
        best_error = torch.where(is_better, error, best_error)
        best_scale = torch.where(is_better, scale, best_scale)
        best_offset = torch.where(is_better, low_R + shift, best_offset)
    return best_scale, best_offset


def _choose_affine(x_BSJ: Tensor, w_BSJ: Tensor, blocks: AffineBlocks, last_code: int, last_scale: int) -> AffineBlocks:
    """For the d and dmin of `blocks`, the best integer scales around its own, each with its own min and codes."""
    d_B, dmin_B, scales_BS, mins_BS = blocks.d_B, blocks.dmin_B, blocks.scales_BS, blocks.mins_BS
    best_error_BS = torch.full_like(scales_BS, torch.inf)
    best_scales_BS, best_mins_BS = scales_BS, mins_BS
    best_codes_BSJ = torch.zeros_like(x_BSJ)
    inverse_dmin_B1 = inverse(dmin_B)[:, None]
    sum_w_BS = w_BSJ.sum(dim=2)
    wx_BS = (w_BSJ * x_BSJ).sum(dim=2)
    for beside in (0, -1, 1):
        tried_BS = (scales_BS + beside).clamp_(0, last_scale)
        step_BS = d_B[:, None] * tried_BS
        tried_mins_BS = mins_BS
        for _ in range(2):
            codes_BSJ = _affine_codes(x_BSJ, d_B, dmin_B, tried_BS, tried_mins_BS, last_code)
            error_BSJ = step_BS[..., None] * codes_BSJ - (dmin_B[:, None] * tried_mins_BS)[..., None] - x_BSJ
            error_BS = (error_BSJ.square_() * w_BSJ).sum(dim=2)
            is_better_BS = error_BS < best_error_BS
            best_error_BS = torch.where(is_better_BS, error_BS, best_error_BS)
            best_scales_BS = torch.where(is_better_BS, tried_BS, best_scales_BS)
            best_mins_BS = torch.where(is_better_BS, tried_mins_BS, best_mins_BS)
            best_codes_BSJ = torch.where(is_better_BS[..., None], codes_BSJ, best_codes_BSJ)
            min_BS = (step_BS * (w_BSJ * codes_BSJ).sum(dim=2) - wx_BS) / sum_w_BS
            tried_mins_BS = (min_BS * inverse_dmin_B1).round_().clamp_(0, last_scale)
    return AffineBlocks(d_B, dmin_B, best_scales_BS, best_mins_BS, best_codes_BSJ)


def _affine_codes(
    x_BSJ: Tensor, d_B: Tensor, dmin_B: Tensor, scales_BS: Tensor, mins_BS: Tensor, last_code: int
) -> Tensor:
    inverse_BS = inverse(d_B[:, None] * scales_BS)
    shifted_BSJ = x_BSJ + (dmin_B[:, None] * mins_BS)[..., None]
    return shifted_BSJ.mul_(inverse_BS[..., None]).round_().clamp_(0, last_code)


def _refit_affine(x_BSJ: Tensor, w_BSJ: Tensor, blocks: AffineBlocks) -> tuple[Tensor, Tensor]:
    """d and dmin [B] with the least squared error for the scales, mins and codes of `blocks`."""
    steps_BSJ = blocks.scales_BS[..., None] * blocks.codes_BSJ
    w_steps_BSJ = w_BSJ * steps_BSJ
    sum_ss = (w_steps_BSJ * steps_BSJ).sum(dim=(1, 2))
    sum_sx = (w_steps_BSJ * x_BSJ).sum(dim=(1, 2))
    sum_sm = (w_steps_BSJ.sum(dim=2) * blocks.mins_BS).sum(dim=1)
    sum_mm = (w_BSJ.sum(dim=2) * blocks.mins_BS.square()).sum(dim=1)
    sum_mx = ((w_BSJ * x_BSJ).sum(dim=2) * blocks.mins_BS).sum(dim=1)
    inverse_B = inverse(sum_ss * sum_mm - sum_sm * sum_sm)
    d_B = (sum_sx * sum_mm - sum_mx * sum_sm) * inverse_B
    dmin_B = (sum_sx * sum_sm - sum_mx * sum_ss) * inverse_B
    is_usable_B = (d_B > 0) & (dmin_B > 0)
    return (
        torch.where(is_usable_B, _to_half(d_B), blocks.d_B),
        torch.where(is_usable_B, _to_half(dmin_B), blocks.dmin_B),
    )


def fit_signed_grids(x_RJ: Tensor, w_RJ: Tensor, zero: int) -> Tensor:
    """Signed scales [R] of groups of weights for codes -zero .. zero - 1, each group on its own."""
    largest_R = x_RJ.gather(1, x_RJ.abs().argmax(dim=1, keepdim=True))[:, 0]
    inverse_R = inverse(largest_R)
    wx_RJ = w_RJ * x_RJ
    best_gain_R = torch.zeros_like(largest_R)
    best_scale_R = torch.zeros_like(largest_R)
    for stretch in SIGNED_STRETCHES:
        # The code farthest out is -zero, so the largest weight goes there; or to the other end, one code shorter.
        for sign in (-1.0, 1.0):
            codes_RJ = (x_RJ * (sign * (zero + stretch) * inverse_R)[:, None]).round_().clamp_(-zero, zero - 1)
            sum_lx_R = (wx_RJ * codes_RJ).sum(dim=1)
            scale_R = sum_lx_R * inverse((w_RJ * codes_RJ).mul_(codes_RJ).sum(dim=1))
            gain_R = scale_R * sum_lx_R
            is_better_R = gain_R > best_gain_R
            best_gain_R = torch.where(is_better_R, gain_R, best_gain_R)
            best_scale_R = torch.where(is_better_R, scale_R, best_scale_R)
    return best_scale_R


def fit_signed(x_BSJ: Tensor, importance_BSJ: Tensor, zero: int, scale_zero: int) -> SignedBlocks:
    """The best signed blocks that we find: codes -zero .. zero - 1, scales -scale_zero .. scale_zero - 1."""
    blocks, sub_blocks, width = x_BSJ.shape
    scale_BS = fit_signed_grids(x_BSJ.reshape(-1, width), importance_BSJ.reshape(-1, width), zero)
    scale_BS = scale_BS.reshape(blocks, sub_blocks)
    largest_B = scale_BS.gather(1, scale_BS.abs().argmax(dim=1, keepdim=True))[:, 0]
    d_B = _to_covering_half(largest_B / -scale_zero)
    scales_BS = (scale_BS * inverse(d_B)[:, None]).round_().clamp_(-scale_zero, scale_zero - 1)
    best = SignedBlocks(d_B, scales_BS, _signed_codes(x_BSJ, d_B, scales_BS, zero))
    for _ in range(ROUNDS):
        best = _better(_choose_signed(x_BSJ, importance_BSJ, best, zero, scale_zero), best, x_BSJ, importance_BSJ)
        steps_BSJ = best.scales_BS[..., None] * best.codes_BSJ
        w_steps_BSJ = importance_BSJ * steps_BSJ
        inverse_B = inverse((w_steps_BSJ * steps_BSJ).sum(dim=(1, 2)))
        d_B = _to_half((w_steps_BSJ * x_BSJ).sum(dim=(1, 2)) * inverse_B)
        found = SignedBlocks(d_B, best.scales_BS, _signed_codes(x_BSJ, d_B, best.scales_BS, zero))
        best = _better(found, best, x_BSJ, importance_BSJ)
    return best


def _choose_signed(x_BSJ: Tensor, w_BSJ: Tensor, blocks: SignedBlocks, zero: int, scale_zero: int) -> SignedBlocks:
    """For the d of `blocks`, the best integer scales around its own, each with its own codes."""
    d_B, scales_BS = blocks.d_B, blocks.scales_BS
    best_error_BS = torch.full_like(scales_BS, torch.inf)
    best_scales_BS, best_codes_BSJ = scales_BS, torch.zeros_like(x_BSJ)
    for beside in (0, -1, 1):
        tried_BS = (scales_BS + beside).clamp_(-scale_zero, scale_zero - 1)
        codes_BSJ = _signed_codes(x_BSJ, d_B, tried_BS, zero)
        error_BSJ = (d_B[:, None] * tried_BS)[..., None] * codes_BSJ - x_BSJ
        error_BS = (error_BSJ.square_() * w_BSJ).sum(dim=2)
        is_better_BS = error_BS < best_error_BS
        best_error_BS = torch.where(is_better_BS, error_BS, best_error_BS)
        best_scales_BS = torch.where(is_better_BS, tried_BS, best_scales_BS)
        best_codes_BSJ = torch.where(is_better_BS[..., None], codes_BSJ, best_codes_BSJ)
    return SignedBlocks(d_B, best_scales_BS, best_codes_BSJ)


def _signed_codes(x_BSJ: Tensor, d_B: Tensor, scales_BS: Tensor, zero: int) -> Tensor:
    return (x_BSJ * inverse(d_B[:, None] * scales_BS)[..., None]).round_().clamp_(-zero, zero - 1)


def _better(found: FoundBlocks, best: FoundBlocks, x_BSJ: Tensor, w_BSJ: Tensor) -> FoundBlocks:
    """Per block whichever of the two has the smaller error; `best` on a tie."""
    found_error_B, best_error_B = (
        ((blocks.values() - x_BSJ).square_() * w_BSJ).sum(dim=(1, 2)) for blocks in (found, best)
    )
    is_better_B = found_error_B < best_error_B
    chosen = {
        name: torch.where(is_better_B.reshape(-1, *[1] * (value.ndim - 1)), value, getattr(best, name))
        for name, value in vars(found).items()
    }
    return type(best)(**chosen)


def inverse(values: Tensor) -> Tensor:
    """1 / values, and 0 where that is not finite."""
    result = values.reciprocal()
    return result.masked_fill_(~result.isfinite(), 0.0)


def _to_half(values: Tensor) -> Tensor:
    return values.half().float()


def _to_covering_half(values: Tensor) -> Tensor:
    """At float16 precision, away from 0 where that is coarse: integer scales then still reach the largest weight."""
    half = values.half()
    is_short = (half.float().abs() < values.abs()) & (half.abs() < SMALLEST_NORMAL_HALF)
    # Neighbouring halves of one sign are neighbouring integers.
    return (half.view(torch.int16) + is_short).view(torch.half).float()
