"""The GGML block types: sizes, and the bit planes that all of them are made of.

A row of K weights is cut into blocks of 32 or 256; a block is a few half-precision scales and its codes, bytes in a
fixed order. Within a block, codes are not packed one after the other but as planes: `width` neighbouring codes lie in
`width` neighbouring bytes, the next `width` codes in higher bits of the same bytes. One pair of functions serves every
type, because only the code width and the plane width differ.

Shape suffixes: B blocks (of all rows), C codes of a block, P packed bytes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockType:
    """One type of a GGUF tensor: `weights` of a row share a block of `size_bytes`; `ggml_id` is its number in files."""

    name: str
    weights: int
    size_bytes: int
    ggml_id: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.size_bytes / self.weights

    def row_bytes(self, in_features: int) -> int:
        """Bytes of a row; ValueError when the blocks do not fill it."""
        if in_features % self.weights:
            raise ValueError(
                f"rows of {in_features} weights can't be {self.name}: its blocks hold {self.weights} weights; choose a "
                f"type whose block divides {in_features}, or f16"
            )
        return in_features // self.weights * self.size_bytes


BLOCK_TYPES = {
    block.name: block
    for block in (
        BlockType("q4_0", 32, 18, 2),
        BlockType("q4_1", 32, 20, 3),
        BlockType("q5_0", 32, 22, 6),
        BlockType("q5_1", 32, 24, 7),
        BlockType("q8_0", 32, 34, 8),
        BlockType("q2_k", 256, 84, 10),
        BlockType("q3_k", 256, 110, 11),
        BlockType("q4_k", 256, 144, 12),
        BlockType("q5_k", 256, 176, 13),
        BlockType("q6_k", 256, 210, 14),
    )
}


def pack_planes(codes_BC: Tensor, bits: int, width: int) -> Tensor:
    """uint8 [B, C * bits / 8] of codes 0 .. 2^bits - 1 of any dtype, in planes of `width`."""
    planes = 8 // bits
    codes = codes_BC.to(torch.uint8).reshape(len(codes_BC), -1, planes, width)
    packed = codes[:, :, 0].clone()
    for plane in range(1, planes):
        packed |= codes[:, :, plane] << (bits * plane)
    return packed.reshape(len(codes_BC), -1)


def unpack_planes(packed_BP: Tensor, bits: int, width: int) -> Tensor:
    """uint8 [B, P * 8 / bits]: the inverse of `pack_planes`."""
    planes = 8 // bits
    shifts = bits * torch.arange(planes, dtype=torch.uint8, device=packed_BP.device)
    codes = (packed_BP.reshape(len(packed_BP), -1, 1, width) >> shifts[:, None]) & (2**bits - 1)
    return codes.reshape(len(packed_BP), -1)


def half_bytes(values_B: Tensor) -> Tensor:
    """uint8 [B, 2]: values as float16, little-endian as files have them."""
    return values_B.half().reshape(-1, 1).view(torch.uint8)


def halves(packed_BP: Tensor) -> Tensor:
    """float32 [B, P / 2] of float16 bytes."""
    return packed_BP.contiguous().view(torch.float16).float()
