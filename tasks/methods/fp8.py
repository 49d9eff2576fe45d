"""FP8: each weight becomes an eight-bit float, with one float32 scale per matrix, row or block of 128 x 128.

`weight ≈ value * scale` (the scale is a multiplier, never its inverse), scale = max|w| / largest, where largest is 448
for e4m3 (4 bits of exponent, 3 of mantissa) and 57344 for e5m2. No input is looked at, so nothing depends on batches,
layers or devices. Numeric traps, each with a test:

* Saturation comes BEFORE the cast. Out of range, a cast to e4m3 gives 448 or NaN and one to e5m2 infinity, depending
  on the version and the device; a NaN byte poisons every token. The result is scanned all the same.
* A scale is rounded UP to 8 significant bits. Readers keep it in the model's dtype: rounding it there would scale whole
  rows wrongly, by up to 0.4 percent in bfloat16. With 8 bits it is exact in bfloat16 and float32, and in float16 down
  to 2^-17; upwards, so that max|w| / scale stays in range. An eight-bit float is as fine at any scale, so this costs
  nothing.
* The scale has a floor: zeros and tiny weights never make it 0 or subnormal, and there is no 0/0. Weights below
  2^-17 * 448 (0.0034) lose range instead of exactness where the source is float16.
* The largest float32 values can come back as infinity; they are refused (`WeightError`).

Rounding is half to even. float32 throughout, whatever the weights' dtype.

Shape suffixes: N out_features, K in_features, R and C rows and columns of scales: 1 x 1, N x 1 or N/128 x K/128.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.methods.grid import WeightError, check_finite, row_losses
from tasks.quantization import FP8Config

BLOCK = 128
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
# The smallest scale whose 8 significant bits the dtype holds exactly: in float16 well inside the subnormals.
SCALE_FLOORS = {torch.float16: 2.0**-17}
SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True, eq=False)
class FP8Rows:
    """One module's weights: values_NK float8, scales_RC float32, losses_N float64 (each row's mean squared error)."""

    values_NK: Tensor
    scales_RC: Tensor
    losses_N: Tensor

    @property
    def loss(self) -> float:
        """Mean of the rows' losses."""
        return float(self.losses_N.mean())

    def dequantize(self) -> Tensor:
        """float32 [N, K]: what a reader of the exported file computes."""
        return self.values_NK.float() * spread(self.scales_RC, self.values_NK.shape)


def quantize_weight(weight_NK: Tensor, config: FP8Config) -> FP8Rows:
    """One whole module, on the weights' device; the loss is the mean squared weight error.

    WeightError for NaN, infinities, and magnitudes that float32 can't hold after rounding; ValueError for sizes that
    are no multiples of the block.
    """
    check_finite(weight_NK)
    floor = SCALE_FLOORS.get(weight_NK.dtype, SMALLEST_NORMAL)
    weight_NK = weight_NK.float()
    dtype = DTYPES[config.fp8_format]
    largest = torch.finfo(dtype).max
    scales_RC = _scales(_absmax(weight_NK, config.granularity), largest, floor)
    values_NK = (weight_NK / spread(scales_RC, weight_NK.shape)).clamp_(-largest, largest).to(dtype)
    error_NK = values_NK.float().mul_(spread(scales_RC, weight_NK.shape)).sub_(weight_NK)
    bad_N = ~error_NK.isfinite().all(dim=1)
    if bool(bad_N.any()):
        row = int(bad_N.nonzero()[0])
        raise WeightError(
            f"row {row} (one of {int(bad_N.sum())}) holds a weight of magnitude "
            f"{float(weight_NK[row].abs().max()):.4g}, which float32 can't hold once it is rounded to "
            f"{config.fp8_format}; the source file is damaged or the model diverged"
        )
    return FP8Rows(values_NK, scales_RC, row_losses(error_NK))


def spread(scales_RC: Tensor, shape: torch.Size) -> Tensor:
    """The scales, shaped to multiply a weight of `shape`: a view, or one scale per weight where they come in blocks."""
    rows, columns = scales_RC.shape
    if columns == 1 and rows in (1, shape[0]):
        return scales_RC
    return scales_RC.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


def _absmax(weight_NK: Tensor, granularity: str) -> Tensor:
    if granularity == "tensor":
        return weight_NK.abs().max().reshape(1, 1)
    if granularity == "row":
        return weight_NK.abs().amax(dim=1, keepdim=True)
    rows, columns = weight_NK.shape
    if rows % BLOCK or columns % BLOCK:
        raise ValueError(
            f"a weight of {rows} x {columns} can't be cut into blocks of {BLOCK} x {BLOCK}: both sizes must be multiples "
            f"of {BLOCK}; use granularity `row` or `tensor`"
        )
    return weight_NK.abs().reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK).amax(dim=(1, 3))


def _scales(absmax_RC: Tensor, largest: float, floor: float) -> Tensor:
    """max|w| / largest, rounded up to 8 significant bits and not below `floor`."""
    # Dropping the low 16 bits of a positive float32 rounds down to 8 significant bits; carrying into them first, up.
    bits_RC = (absmax_RC / largest).view(torch.int32)
    return ((bits_RC + 0xFFFF) & ~0xFFFF).view(torch.float32).clamp(min=floor)
