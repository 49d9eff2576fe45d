"""bitsandbytes' codes: nf4 and fp4 in blocks of 64 weights, int8 per output channel (QLoRA, arXiv 2305.14314;
LLM.int8(), arXiv 2208.07339).

* nf4, fp4: a block's weights are divided by its largest magnitude and rounded to the nearest of 16 values; two codes
  share a byte, and blocks run on across the ends of rows. With double quantization the float32 magnitudes become 8-bit
  codes themselves, in blocks of 256, around their mean over the module.
* int8: a row is divided by its largest magnitude over 127 and rounded.

The codes come from the bitsandbytes library (extra `bitsandbytes`), always on the CPU and always for a whole module,
so that the bytes are the same whatever the pool. We differ from it in three places, each with a test:

* The mean under double quantization is summed exactly. The library sums in float32, in an order that depends on the
  number of threads, and the mean is part of the file.
* Rows of zeros get int8 codes of zero; the library casts 0/0 to an integer, which is undefined.
* What the codes can't hold is refused (`WeightError`) rather than written: int8 weights beyond float16, in which the
  library reads them, and block magnitudes so far apart that double quantization would lose the smaller ones. That is
  judged by the median block: an error of more than a quarter of its magnitude is as large as what 4 bits cost.

A block of zeros comes back as exact zeros also under double quantization, as its codes stand for zero at any scale.
Readers multiply codes and magnitudes in float32 and round to the dtype that they compute in; `dequantize` leaves that
last rounding to them. The file names the source's dtype, for readers that widen it whole.

Shape suffixes: N out_features, K in_features, B blocks, P bytes of two codes each, C blocks of 256 block magnitudes.
"""

import math
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from tasks.methods.grid import LARGEST_HALF, WeightError, check_finite, row_losses
from tasks.quantization import BitsAndBytesConfig

BLOCK_SIZE = 64
NESTED_BLOCK_SIZE = 256
INSTALL = "pip install 'prefect-quantize[bitsandbytes]'"


@dataclass(frozen=True, eq=False)
class Nested:
    """The 8-bit form of block magnitudes: their mean, the blocks' own magnitudes, and the 256 values of the codes."""

    offset: float
    absmax_C: Tensor
    quant_map: Tensor


@dataclass(frozen=True, eq=False)
class FourBitRows:
    """One module in nf4 or fp4: packed_P1 uint8 [ceil(N * K / 2), 1], first code high; absmax_B float32, or uint8 when
    `nested`; quant_map float32 [16]; dtype of the source; losses_N float64 (each row's mean squared error).
    """

    packed_P1: Tensor
    absmax_B: Tensor
    quant_map: Tensor
    nested: Nested | None
    quant_type: str
    shape: tuple[int, int]
    dtype: torch.dtype
    losses_N: Tensor

    @property
    def loss(self) -> float:
        """Mean of the rows' losses."""
        return float(self.losses_N.mean())

    def magnitudes(self) -> Tensor:
        """float32 [B]: the block magnitudes that a reader computes with."""
        if self.nested is None:
            return self.absmax_B
        own_B = self.nested.absmax_C.repeat_interleave(NESTED_BLOCK_SIZE)[: len(self.absmax_B)]
        return self.nested.quant_map[self.absmax_B.long()] * own_B + self.nested.offset

    def dequantize(self) -> Tensor:
        """float32 [N, K]: what a reader of the exported file computes, before it rounds to its own dtype."""
        packed_P = self.packed_P1.flatten()
        codes = torch.stack([packed_P >> 4, packed_P & 15], dim=1).flatten()[: math.prod(self.shape)]
        dense = self.quant_map[codes.int()]
        dense *= self.magnitudes().repeat_interleave(BLOCK_SIZE)[: len(codes)]
        return dense.reshape(self.shape)


@dataclass(frozen=True, eq=False)
class Int8Rows:
    """One module in int8: codes_NK int8, absmax_N float32 (the row's largest magnitude), losses_N float64."""

    codes_NK: Tensor
    absmax_N: Tensor
    losses_N: Tensor

    @property
    def loss(self) -> float:
        """Mean of the rows' losses."""
        return float(self.losses_N.mean())

    def dequantize(self) -> Tensor:
        """float32 [N, K]: what a reader of the exported file computes, apart from its own rounding of activations."""
        return self.codes_NK.float().mul_(self.absmax_N[:, None]).mul_(1 / 127)


BitsAndBytesRows = FourBitRows | Int8Rows


def quantize_weight(weight_NK: Tensor, config: BitsAndBytesConfig) -> BitsAndBytesRows:
    """One whole module, on the CPU wherever the weights are; the loss is the mean squared weight error.

    ImportError with the install line when bitsandbytes is missing; WeightError for what the codes can't hold; ValueError
    for weights that are not float32, float16 or bfloat16.
    """
    if weight_NK.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"bitsandbytes quantizes float32, float16 and bfloat16, not {weight_NK.dtype}")
    check_finite(weight_NK)
    weight_NK = weight_NK.detach().cpu().contiguous()
    if config.quant_type == "int8":
        return _quantize_int8(weight_NK)
    return _quantize_4bit(weight_NK, config)


def library() -> ModuleType:
    """bitsandbytes' functions; ImportError with the install line when they are missing."""
    try:
        from bitsandbytes import functional
    except ImportError as error:
        raise ImportError(f"method `bitsandbytes` needs the bitsandbytes library ({error}); {INSTALL}") from error
    return functional


def _quantize_int8(weight_NK: Tensor) -> Int8Rows:
    largest_N = weight_NK.abs().amax(dim=1)
    if bool((largest_N > LARGEST_HALF).any()):
        row = int(largest_N.argmax())
        raise WeightError(
            f"row {row} holds a weight of magnitude {float(largest_N[row]):.4g}; int8 weights are read in float16, which "
            f"ends at {LARGEST_HALF:.0f}; use nf4, fp4 or another method"
        )
    codes_NK, absmax_N, _ = library().int8_vectorwise_quant(weight_NK.half())
    codes_NK = codes_NK.masked_fill(absmax_N[:, None] == 0, 0)
    rows = Int8Rows(codes_NK, absmax_N, torch.zeros(len(codes_NK)))
    return Int8Rows(codes_NK, absmax_N, row_losses(rows.dequantize().sub_(weight_NK)))


def _quantize_4bit(weight_NK: Tensor, config: BitsAndBytesConfig) -> FourBitRows:
    packed_P1, state = library().quantize_4bit(
        weight_NK, blocksize=BLOCK_SIZE, quant_type=config.quant_type, compress_statistics=False
    )
    absmax_B, nested = state.absmax, None
    if config.double_quant:
        absmax_B, nested = _quantize_magnitudes(absmax_B)
    out_features, in_features = weight_NK.shape
    rows = FourBitRows(
        packed_P1=packed_P1,
        absmax_B=absmax_B,
        quant_map=state.code,
        nested=nested,
        quant_type=config.quant_type,
        shape=(out_features, in_features),
        dtype=weight_NK.dtype,
        losses_N=torch.zeros(out_features),
    )
    if nested is not None:
        _check_magnitudes(_block_maxima(weight_NK), rows.magnitudes())
    dense_NK = rows.dequantize()
    bad_N = ~dense_NK.to(weight_NK.dtype).isfinite().all(dim=1)
    if bool(bad_N.any()):
        raise WeightError(
            f"row {int(bad_N.nonzero()[0])} (one of {int(bad_N.sum())}) holds a weight that {weight_NK.dtype} can't hold "
            f"once it is rounded to {config.quant_type}; the source file is damaged or the model diverged"
        )
    return FourBitRows(**{**vars(rows), "losses_N": row_losses(dense_NK.sub_(weight_NK))})


def _quantize_magnitudes(absmax_B: Tensor) -> tuple[Tensor, Nested]:
    offset = torch.tensor(math.fsum(absmax_B.tolist()) / len(absmax_B), dtype=torch.float32)
    codes_B, state = library().quantize_blockwise(absmax_B - offset, blocksize=NESTED_BLOCK_SIZE)
    return codes_B, Nested(offset.item(), state.absmax, state.code)


def _block_maxima(weight_NK: Tensor) -> Tensor:
    """float32 [B]: 0 for a block of zeros, for which the library's own magnitude is 1e-38."""
    flat = weight_NK.float().abs().flatten()
    return torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK_SIZE)).reshape(-1, BLOCK_SIZE).amax(dim=1)


def _check_magnitudes(absmax_B: Tensor, read_B: Tensor) -> None:
    is_used_B = absmax_B > 0
    if not bool(is_used_B.any()):
        return
    median = float(absmax_B[is_used_B].median())
    error = float((read_B - absmax_B)[is_used_B].abs().max())
    if not error <= median / 4:
        raise WeightError(
            f"block magnitudes reach from {float(absmax_B[is_used_B].min()):.4g} to {float(absmax_B.max()):.4g} around a "
            f"median of {median:.4g}; double quantization would be off by {error:.4g} for some of them; set "
            f"double_quant to false"
        )
