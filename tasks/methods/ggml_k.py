"""The bytes of GGML K-quants: what ggml_search.py finds for blocks of 256 weights, packed and read back.

| type | sub-blocks | bytes of a block, in order |
|---|---|---|
| q2_k | 16 of 16 | 16 scale and min nibbles, 64 codes, d, dmin |
| q3_k | 16 of 16 | 32 third bits, 64 low bits, 12 scales of 6 bits plus 32, d |
| q4_k | 8 of 32 | d, dmin, 12 scales and mins of 6 bits, 128 codes |
| q5_k | 8 of 32 | d, dmin, 12 scales and mins of 6 bits, 32 fifth bits, 128 low nibbles |
| q6_k | 16 of 16 | 128 low nibbles, 64 high bits, 16 signed scales, d |

Shape suffixes: B blocks, C the 256 weights of a block, S sub-blocks, P bytes.
"""

import torch
from torch import Tensor

from tasks.methods.ggml_blocks import half_bytes, halves, pack_planes, unpack_planes
from tasks.methods.ggml_search import AffineBlocks, SignedBlocks, fit_affine, fit_signed


def encode_q2_k(x_BC: Tensor, importance_BC: Tensor | None) -> Tensor:
    """uint8 [B, 84]."""
    found = _fit_affine(x_BC, importance_BC, sub_blocks=16, last_code=3, last_scale=15)
    scales_and_mins_BS = found.scales_BS.to(torch.uint8) | (found.mins_BS.to(torch.uint8) << 4)
    codes_BP = pack_planes(found.codes_BSJ.flatten(1), 2, 32)
    return torch.cat([scales_and_mins_BS, codes_BP, half_bytes(found.d_B), half_bytes(found.dmin_B)], dim=1)


def decode_q2_k(blocks_BP: Tensor) -> Tensor:
    """float32 [B, 256]."""
    scales_BS, mins_BS = blocks_BP[:, :16] & 15, blocks_BP[:, :16] >> 4
    return _affine_values(blocks_BP[:, 80:84], scales_BS, mins_BS, unpack_planes(blocks_BP[:, 16:80], 2, 32))


def encode_q3_k(x_BC: Tensor, importance_BC: Tensor | None) -> Tensor:
    """uint8 [B, 110]."""
    found = _fit_signed(x_BC, importance_BC, zero=4, scale_zero=32)
    codes_BC = (found.codes_BSJ + 4).to(torch.uint8).flatten(1)
    scales_BS = (found.scales_BS + 32).to(torch.uint8)
    return torch.cat(
        [
            pack_planes(codes_BC >> 2, 1, 32),
            pack_planes(codes_BC & 3, 2, 32),
            pack_planes(scales_BS & 15, 4, 8),
            pack_planes(scales_BS >> 4, 2, 4),
            half_bytes(found.d_B),
        ],
        dim=1,
    )


def decode_q3_k(blocks_BP: Tensor) -> Tensor:
    """float32 [B, 256]."""
    codes_BC = unpack_planes(blocks_BP[:, 32:96], 2, 32) | (unpack_planes(blocks_BP[:, :32], 1, 32) << 2)
    scales_BS = unpack_planes(blocks_BP[:, 96:104], 4, 8) | (unpack_planes(blocks_BP[:, 104:108], 2, 4) << 4)
    return _signed_values(blocks_BP[:, 108:110], scales_BS.float() - 32, codes_BC.float() - 4)


def encode_q4_k(x_BC: Tensor, importance_BC: Tensor | None) -> Tensor:
    """uint8 [B, 144]."""
    found = _fit_affine(x_BC, importance_BC, sub_blocks=8, last_code=15, last_scale=63)
    return torch.cat([*_affine_head(found), pack_planes(found.codes_BSJ.flatten(1), 4, 32)], dim=1)


def decode_q4_k(blocks_BP: Tensor) -> Tensor:
    """float32 [B, 256]."""
    return _affine_values(blocks_BP[:, :4], *_unpack_six(blocks_BP[:, 4:16]), unpack_planes(blocks_BP[:, 16:], 4, 32))


def encode_q5_k(x_BC: Tensor, importance_BC: Tensor | None) -> Tensor:
    """uint8 [B, 176]."""
    found = _fit_affine(x_BC, importance_BC, sub_blocks=8, last_code=31, last_scale=63)
    codes_BC = found.codes_BSJ.to(torch.uint8).flatten(1)
    codes = [pack_planes(codes_BC >> 4, 1, 32), pack_planes(codes_BC & 15, 4, 32)]
    return torch.cat([*_affine_head(found), *codes], dim=1)


def decode_q5_k(blocks_BP: Tensor) -> Tensor:
    """float32 [B, 256]."""
    codes_BC = unpack_planes(blocks_BP[:, 48:], 4, 32) | (unpack_planes(blocks_BP[:, 16:48], 1, 32) << 4)
    return _affine_values(blocks_BP[:, :4], *_unpack_six(blocks_BP[:, 4:16]), codes_BC)


def encode_q6_k(x_BC: Tensor, importance_BC: Tensor | None) -> Tensor:
    """uint8 [B, 210]."""
    found = _fit_signed(x_BC, importance_BC, zero=32, scale_zero=128)
    codes_BC = (found.codes_BSJ + 32).to(torch.uint8).flatten(1)
    return torch.cat(
        [
            pack_planes(codes_BC & 15, 4, 64),
            pack_planes(codes_BC >> 4, 2, 32),
            found.scales_BS.to(torch.int8).view(torch.uint8),
            half_bytes(found.d_B),
        ],
        dim=1,
    )


def decode_q6_k(blocks_BP: Tensor) -> Tensor:
    """float32 [B, 256]."""
    codes_BC = unpack_planes(blocks_BP[:, :128], 4, 64) | (unpack_planes(blocks_BP[:, 128:192], 2, 32) << 4)
    scales_BS = blocks_BP[:, 192:208].contiguous().view(torch.int8).float()
    return _signed_values(blocks_BP[:, 208:210], scales_BS, codes_BC.float() - 32)


def _fit_affine(
    x_BC: Tensor, importance_BC: Tensor | None, sub_blocks: int, last_code: int, last_scale: int
) -> AffineBlocks:
    importance_BC = torch.ones_like(x_BC) if importance_BC is None else importance_BC
    x_BSJ, importance_BSJ = (t.reshape(len(x_BC), sub_blocks, -1) for t in (x_BC, importance_BC))
    return fit_affine(x_BSJ, importance_BSJ, last_code, last_scale)


def _fit_signed(x_BC: Tensor, importance_BC: Tensor | None, zero: int, scale_zero: int) -> SignedBlocks:
    importance_BC = torch.ones_like(x_BC) if importance_BC is None else importance_BC
    x_BSJ, importance_BSJ = (t.reshape(len(x_BC), 16, 16) for t in (x_BC, importance_BC))
    return fit_signed(x_BSJ, importance_BSJ, zero, scale_zero)


def _affine_head(found: AffineBlocks) -> list[Tensor]:
    """d, dmin and the 12 bytes of scales and mins."""
    scales_BS, mins_BS = found.scales_BS.to(torch.uint8), found.mins_BS.to(torch.uint8)
    # The upper four of each lend their two high bits to the bytes of the lower four.
    packed = [
        scales_BS[:, :4] | (scales_BS[:, 4:] >> 4 << 6),
        mins_BS[:, :4] | (mins_BS[:, 4:] >> 4 << 6),
        (scales_BS[:, 4:] & 15) | (mins_BS[:, 4:] << 4),
    ]
    return [half_bytes(found.d_B), half_bytes(found.dmin_B), *packed]


def _unpack_six(packed_BP: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and mins, uint8 [B, 8], of the 12 bytes that `_affine_head` packs."""
    scales, mins, lows = packed_BP[:, :4], packed_BP[:, 4:8], packed_BP[:, 8:]
    return (
        torch.cat([scales & 63, (lows & 15) | (scales >> 6 << 4)], dim=1),
        torch.cat([mins & 63, (lows >> 4) | (mins >> 6 << 4)], dim=1),
    )


def _affine_values(d_and_dmin_BP: Tensor, scales_BS: Tensor, mins_BS: Tensor, codes_BC: Tensor) -> Tensor:
    d_B, dmin_B = halves(d_and_dmin_BP).unbind(dim=1)
    codes_BSJ = codes_BC.float().reshape(*scales_BS.shape, -1)
    return AffineBlocks(d_B, dmin_B, scales_BS.float(), mins_BS.float(), codes_BSJ).values().flatten(1)


def _signed_values(d_BP: Tensor, scales_BS: Tensor, codes_BC: Tensor) -> Tensor:
    return SignedBlocks(halves(d_BP)[:, 0], scales_BS, codes_BC.reshape(*scales_BS.shape, -1)).values().flatten(1)
