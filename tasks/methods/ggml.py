"""GGML blocks, as .gguf files hold them: rows of weights in, bytes out, and back.

The types of 32 weights (q4_0, q4_1, q5_0, q5_1, q8_0) follow the format's reference quantization: without importance
their bytes are those of the `gguf` package and of llama.cpp. With importance the scale (and offset) is searched for by
weighted least squares instead, except in q8_0, where nothing is to be gained. The K-quants have no reference in the
package; the search is in ggml_search.py and its squared error is below llama.cpp's own.

Importance is one number per input column, the mean square of what enters there: the squared error of the outputs is, as
far as columns are uncorrelated, the squared error of the weights times it. It is scaled to mean 1; a column that nothing
ever enters keeps a millionth, so that its weights are still rounded rather than lost.

Numeric traps, each with a test:

* Weights of zero come back as exact zeros; so do weights too small for a half-precision scale.
* A magnitude above 65504, the largest half, is refused (`WeightError`), in every type: some could hold it, their
  fallback types could not, and a model that has one is broken.
* Where 1 / scale leaves float32's range the reference computes 0 * inf; here those weights are zeros.
* Rounding is that of the reference per type: half up in q4 and q5, half away from zero in q8_0; K-quants have no rule.

float32 whatever the weights' dtype. Rows do not depend on each other.

Shape suffixes: N out_features, K in_features, B blocks, C weights of a block, P bytes of a row or a block.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.methods import ggml_k
from tasks.methods.ggml_blocks import BLOCK_TYPES, half_bytes, halves, pack_planes, unpack_planes
from tasks.methods.ggml_search import fit_affine_grids, fit_signed_grids, inverse
from tasks.methods.grid import LARGEST_HALF, WeightError

# About a megabyte of float32: the search reads its blocks many times over, so they should stay in the cache.
CHUNK_WEIGHTS = 2**18
SMALLEST_IMPORTANCE = 1e-6


@dataclass(frozen=True, eq=False)
class EncodedRows:
    """Rows in blocks of one type: blocks_NP uint8, losses_N float32 (each row's mean squared weight error)."""

    blocks_NP: Tensor
    block_type: str
    losses_N: Tensor

    @property
    def loss(self) -> float:
        """Mean of the rows' losses."""
        return float(self.losses_N.mean())

    def dequantize(self) -> Tensor:
        """float32 [N, K]: what a reader of the file computes."""
        return decode(self.blocks_NP, self.block_type)


def quantize_rows(weight_NK: Tensor, block_type: str, importance_K: Tensor | None = None) -> EncodedRows:
    """Rows as blocks of `block_type` (a name of BLOCK_TYPES), on the weights' device.

    WeightError for NaN, infinite and huge weights, ValueError for a K that the blocks do not fill, for an importance of
    another length, negative or not finite.
    """
    block = BLOCK_TYPES[block_type]
    rows, in_features = weight_NK.shape
    row_bytes = block.row_bytes(in_features)
    _check_weight(weight_NK)
    weights_K = None if importance_K is None else _relative(importance_K, in_features).to(weight_NK.device)
    blocks_NP = torch.empty(rows, row_bytes, dtype=torch.uint8, device=weight_NK.device)
    losses_N = torch.empty(rows, device=weight_NK.device)
    rows_per_chunk = max(1, CHUNK_WEIGHTS // in_features)
    for start in range(0, rows, rows_per_chunk):
        part_NK = weight_NK[start : start + rows_per_chunk].float()
        x_BC = part_NK.reshape(-1, block.weights)
        importance_BC = None if weights_K is None else weights_K.expand_as(part_NK).reshape(x_BC.shape)
        encoded_NP = _CODECS[block_type][0](x_BC, importance_BC).reshape(len(part_NK), row_bytes)
        blocks_NP[start : start + rows_per_chunk] = encoded_NP
        losses_N[start : start + rows_per_chunk] = (decode(encoded_NP, block_type) - part_NK).square().mean(dim=1)
    return EncodedRows(blocks_NP, block_type, losses_N)


def decode(blocks_NP: Tensor, block_type: str) -> Tensor:
    """float32 [N, K] of rows of blocks; bit for bit what the `gguf` package computes."""
    block = BLOCK_TYPES[block_type]
    rows, row_bytes = blocks_NP.shape
    if row_bytes % block.size_bytes:
        raise ValueError(f"rows of {row_bytes} bytes are not {block_type}: its blocks are {block.size_bytes} bytes")
    return _CODECS[block_type][1](blocks_NP.reshape(-1, block.size_bytes)).reshape(rows, -1)


def _check_weight(weight_NK: Tensor) -> None:
    largest_N = weight_NK.abs().amax(dim=1).float()
    bad_N = ~(largest_N <= LARGEST_HALF)  # NaN compares false
    if bool(bad_N.any()):
        row = int(bad_N.nonzero()[0])
        raise WeightError(
            f"row {row} (one of {int(bad_N.sum())}) holds a weight that is NaN, infinite or of magnitude above "
            f"{LARGEST_HALF:.0f} (its largest: {float(largest_N[row]):.4g}), which half-precision scales can't hold; "
            f"the source file is damaged or the model diverged"
        )


def _relative(importance_K: Tensor, in_features: int) -> Tensor:
    """Importance with mean 1 and a floor, float32; all 1 when nothing is important."""
    if importance_K.shape != (in_features,):
        raise ValueError(f"importance has shape {list(importance_K.shape)}; {in_features} input columns need one each")
    importance_K = importance_K.double()
    if not bool((importance_K.isfinite() & (importance_K >= 0)).all()):
        raise ValueError("importance holds negative or non-finite values; it is the mean square of each input column")
    mean = importance_K.mean()
    if not bool(mean > 0):
        return torch.ones(in_features, device=importance_K.device)
    return (importance_K / mean).clamp(min=SMALLEST_IMPORTANCE).float()


def _signed_scale(x_BC: Tensor, importance_BC: Tensor | None, zero: int) -> Tensor:
    """Scales [B]: the weight farthest from 0 becomes code 0 of 2 * zero; searched for where importance is given."""
    if importance_BC is not None:
        # Rounded first: the codes then suit what a reader computes.
        return fit_signed_grids(x_BC, importance_BC, zero).half().float()
    return x_BC.gather(1, x_BC.abs().argmax(dim=1, keepdim=True))[:, 0] / -zero


def _affine_scale(x_BC: Tensor, importance_BC: Tensor | None, last_code: int) -> tuple[Tensor, Tensor]:
    """Scales and offsets [B] that span each block; searched for where importance is given."""
    if importance_BC is not None:
        scale_B, low_B = fit_affine_grids(x_BC, importance_BC, last_code, is_lowered=False)
        return scale_B.half().float(), low_B.half().float()
    low_B, high_B = torch.aminmax(x_BC, dim=1)
    return (high_B - low_B) / last_code, low_B


def _codes(shifted_BC: Tensor, scale_B: Tensor, middle: float, last_code: int) -> Tensor:
    # Truncation after adding a half, in this order, is the reference's rounding.
    return (shifted_BC * inverse(scale_B)[:, None] + (middle + 0.5)).trunc_().clamp_(0, last_code)


def encode_q4_0(x_BC: Tensor, importance_BC: Tensor | None) -> Tensor:
    """uint8 [B, 18]: d, then 16 bytes of nibbles."""
    scale_B = _signed_scale(x_BC, importance_BC, 8)
    return torch.cat([half_bytes(scale_B), pack_planes(_codes(x_BC, scale_B, 8, 15), 4, 16)], dim=1)


def decode_q4_0(blocks_BP: Tensor) -> Tensor:
    """float32 [B, 32]."""
    return halves(blocks_BP[:, :2]) * (unpack_planes(blocks_BP[:, 2:], 4, 16).float() - 8)


def encode_q4_1(x_BC: Tensor, importance_BC: Tensor | None) -> Tensor:
    """uint8 [B, 20]: d, offset, then 16 bytes of nibbles."""
    scale_B, low_B = _affine_scale(x_BC, importance_BC, 15)
    codes_BC = _codes(x_BC - low_B[:, None], scale_B, 0, 15)
    return torch.cat([half_bytes(scale_B), half_bytes(low_B), pack_planes(codes_BC, 4, 16)], dim=1)


def decode_q4_1(blocks_BP: Tensor) -> Tensor:
    """float32 [B, 32]."""
    return halves(blocks_BP[:, :2]) * unpack_planes(blocks_BP[:, 4:], 4, 16).float() + halves(blocks_BP[:, 2:4])


def _pack_five(codes_BC: Tensor) -> list[Tensor]:
    """The fifth bits, 4 bytes, then the low nibbles, 16 bytes."""
    codes_BC = codes_BC.to(torch.uint8)
    return [pack_planes(codes_BC >> 4, 1, 1), pack_planes(codes_BC & 15, 4, 16)]


def _unpack_five(packed_BP: Tensor) -> Tensor:
    return (unpack_planes(packed_BP[:, 4:], 4, 16) | (unpack_planes(packed_BP[:, :4], 1, 1) << 4)).float()


def encode_q5_0(x_BC: Tensor, importance_BC: Tensor | None) -> Tensor:
    """uint8 [B, 22]: d, then 20 bytes of codes."""
    scale_B = _signed_scale(x_BC, importance_BC, 16)
    return torch.cat([half_bytes(scale_B), *_pack_five(_codes(x_BC, scale_B, 16, 31))], dim=1)


def decode_q5_0(blocks_BP: Tensor) -> Tensor:
    """float32 [B, 32]."""
    return halves(blocks_BP[:, :2]) * (_unpack_five(blocks_BP[:, 2:]) - 16)


def encode_q5_1(x_BC: Tensor, importance_BC: Tensor | None) -> Tensor:
    """uint8 [B, 24]: d, offset, then 20 bytes of codes."""
    scale_B, low_B = _affine_scale(x_BC, importance_BC, 31)
    codes_BC = _codes(x_BC - low_B[:, None], scale_B, 0, 31)
    return torch.cat([half_bytes(scale_B), half_bytes(low_B), *_pack_five(codes_BC)], dim=1)


def decode_q5_1(blocks_BP: Tensor) -> Tensor:
    """float32 [B, 32]."""
    return halves(blocks_BP[:, :2]) * _unpack_five(blocks_BP[:, 4:]) + halves(blocks_BP[:, 2:4])


def encode_q8_0(x_BC: Tensor, importance_BC: Tensor | None) -> Tensor:
    """uint8 [B, 34]: d, then 32 signed bytes; importance changes nothing."""
    scale_B = x_BC.abs().amax(dim=1) / 127
    scaled_BC = x_BC * inverse(scale_B)[:, None]
    # Half away from zero, as the reference has it.
    magnitude_BC = scaled_BC.abs()
    floor_BC = magnitude_BC.floor()
    codes_BC = scaled_BC.sign() * (floor_BC + (2 * (magnitude_BC - floor_BC)).floor())
    return torch.cat([half_bytes(scale_B), codes_BC.to(torch.int8).view(torch.uint8)], dim=1)


def decode_q8_0(blocks_BP: Tensor) -> Tensor:
    """float32 [B, 32]."""
    return blocks_BP[:, 2:].contiguous().view(torch.int8).float() * halves(blocks_BP[:, :2])


_CODECS: dict[str, tuple[Callable[[Tensor, Tensor | None], Tensor], Callable[[Tensor], Tensor]]] = {
    "q4_0": (encode_q4_0, decode_q4_0),
    "q4_1": (encode_q4_1, decode_q4_1),
    "q5_0": (encode_q5_0, decode_q5_0),
    "q5_1": (encode_q5_1, decode_q5_1),
    "q8_0": (encode_q8_0, decode_q8_0),
    "q2_k": (ggml_k.encode_q2_k, ggml_k.decode_q2_k),
    "q3_k": (ggml_k.encode_q3_k, ggml_k.decode_q3_k),
    "q4_k": (ggml_k.encode_q4_k, ggml_k.decode_q4_k),
    "q5_k": (ggml_k.encode_q5_k, ggml_k.decode_q5_k),
    "q6_k": (ggml_k.encode_q6_k, ggml_k.decode_q6_k),
}
