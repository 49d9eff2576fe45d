"""The qqq layout: what GPTQModel's and vLLM's W4A8 kernels load.

Per linear module `name` with weight [N, K], group count G = K / 128:

    name.B          int32 [K / 16, 2 * N]   codes, tiles of 16 input by 64 output channels
    name.s_channel  float32 [1, N]          scale of the int8 grid of each output channel
    name.s_group    float16 [G, N]          steps of the int8 grid between two codes; empty [0] for one group per row
    name.bias       float16 [N]             only if the source module has one

The weights that a reader multiplies are `s_channel * round(s_group * (code - 8))`, or `s_channel * 16 * (code - 8)` for
one group per row.

Words follow the fragments of the tensor cores. The 128 words of a tile stand in the order [column c: 8][row r: 4]
[part j: 4], and hold the codes of rows 4r .. 4r + 3 of columns 16j + c and 16j + c + 8, in that order 0 .. 7. Nibbles, low
first, take codes 0 2 4 6 1 3 5 7 as they are for groups, and 4 0 5 1 6 2 7 3 as two's complement for one group per row.
Scales stand in the order in which the threads of a warp need them: of each 64 columns of s_group, column 8b + a is number
8a + b; of each 32 columns of s_channel, column 8a + 2b + c is number 8b + 2a + c.

A module whose only group is 128 columns wide can't be told from one with a group per row, and readers take it for that:
refused.

Shape suffixes: N out_features, K in_features, G groups, P packed int32 words, S rows of scales.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tasks.formats.gptq import DESCRIPTION_FILE as DESCRIPTION_FILE
from tasks.formats.gptq import as_signed, half_bias, own_version
from tasks.methods.qqq import QQQRows
from tasks.quantization import QQQConfig

CODES_PER_WORD = 8
NIBBLES_OF_GROUPS = (0, 2, 4, 6, 1, 3, 5, 7)
NIBBLES_OF_ROWS = (4, 0, 5, 1, 6, 2, 7, 3)
# Multiples of K and N that a kernel's thread block takes at a time; one pair must fit. vLLM has the first one only.
TILES = ((128, 64), (64, 128))


def pack(name: str, rows: QQQRows, config: QQQConfig, bias: Tensor | None) -> dict[str, Tensor]:
    """The tensors of one module under their final names, contiguous on the CPU.

    ValueError, naming the module, for shapes that this layout can't hold, scales that are not positive and finite, and a
    bias that float16 can't hold.
    """
    out_features, in_features = rows.codes_NK.shape
    assert int(rows.codes_NK.max()) < 16, f"`{name}` has codes wider than 4 bits"
    if shape_problems := problems(name, in_features, out_features, config):
        raise ValueError("; ".join(shape_problems))
    channel_1N, group_GN = rows.channel_N[None].cpu(), rows.group_NG.t().cpu()
    for scales in (channel_1N, group_GN):
        if not bool(((scales > 0) & scales.isfinite()).all()):
            raise ValueError(
                f"`{name}`: a scale is zero, negative, NaN or infinite; nothing was packed: its source weights are "
                f"damaged or out of range"
            )
    packed = {
        f"{name}.B": pack_codes(rows.codes_NK.cpu(), is_grouped=config.group_size != -1),
        f"{name}.s_channel": _threads_take_pairs(channel_1N),
        f"{name}.s_group": _threads_take_eights(group_GN) if len(group_GN) else torch.empty(0, dtype=torch.float16),
    }
    return packed if bias is None else packed | {f"{name}.bias": half_bias(name, bias)}


def unpack(tensors: Mapping[str, Tensor], name: str, config: QQQConfig) -> QQQRows:
    """The inverse of `pack`, for any program's file; losses are zero, they are not in it."""
    group_GN = tensors[f"{name}.s_group"]
    codes_NK = unpack_codes(tensors[f"{name}.B"], is_grouped=group_GN.numel() > 0)
    channel_N = _columns_from_pairs(tensors[f"{name}.s_channel"])[0]
    group_NG = (
        _columns_from_eights(group_GN).t().contiguous() if group_GN.numel() else group_GN.new_empty(len(codes_NK), 0)
    )
    return QQQRows(codes_NK, channel_N, group_NG, torch.zeros(len(codes_NK)))


def pack_codes(codes_NK: Tensor, *, is_grouped: bool) -> Tensor:
    """int32 [K / 16, 2 * N] of codes 0 .. 15, any integer dtype; N must fill tiles of 64, K of 16."""
    out_features, in_features = codes_NK.shape
    codes_NK = codes_NK.long()
    if not is_grouped:
        codes_NK = codes_NK ^ 8  # two's complement of code - 8
    tiles = codes_NK.reshape(out_features // 64, 4, 2, 8, in_features // 16, 4, 4)  # 64s, j, half, c | 16s, r, row
    words = tiles.permute(4, 0, 3, 5, 1, 2, 6).reshape(in_features // 16, 2 * out_features, CODES_PER_WORD)
    packed_PP = torch.zeros(words.shape[:2], dtype=torch.int64, device=codes_NK.device)
    for nibble, code in enumerate(NIBBLES_OF_GROUPS if is_grouped else NIBBLES_OF_ROWS):
        packed_PP |= words[..., code] << (4 * nibble)
    return as_signed(packed_PP)


def unpack_codes(packed_PP: Tensor, *, is_grouped: bool) -> Tensor:
    """uint8 [N, K]: the inverse of `pack_codes`."""
    tile_rows, words_per_row = packed_PP.shape
    words = torch.empty(tile_rows, words_per_row, CODES_PER_WORD, dtype=torch.uint8, device=packed_PP.device)
    for nibble, code in enumerate(NIBBLES_OF_GROUPS if is_grouped else NIBBLES_OF_ROWS):
        words[..., code] = (packed_PP >> (4 * nibble)) & 15
    tiles = words.reshape(tile_rows, words_per_row // 128, 8, 4, 4, 2, 4)  # 16s, 64s, c, r, j, half, row
    codes_NK = tiles.permute(1, 4, 5, 2, 0, 3, 6).reshape(words_per_row // 2, tile_rows * 16)
    return codes_NK if is_grouped else codes_NK ^ 8


def problems(name: str, in_features: int, out_features: int, config: QQQConfig) -> list[str]:
    """Why this layout can't hold module `name`, one sentence each with what would fit; empty when it can."""
    found = []
    if not any(in_features % tile_k == 0 and out_features % tile_n == 0 for tile_k, tile_n in TILES):
        found.append(
            f"`{name}`: in_features {in_features} and out_features {out_features} fill no tile of the qqq kernels, which "
            f"take multiples of 128 by 64, or of 64 by 128; use another method for this model"
        )
    if config.group_size == 128 and in_features % 128:
        found.append(
            f"`{name}`: in_features {in_features} is not a multiple of group_size 128; one scale per output channel "
            f"(group_size -1) would fit"
        )
    if config.group_size == in_features:
        found.append(
            f"`{name}`: in_features {in_features} is a single group of 128, which readers take for one scale per output "
            f"channel; use group_size -1"
        )
    return found


def packed_bytes(in_features: int, out_features: int, config: QQQConfig, bias_bytes: int) -> int:
    """Bytes of the tensors that `pack` makes of one module which this layout can hold; its bias in the source, if any."""
    groups = in_features // 128 if config.group_size != -1 else 0
    return out_features * (in_features // 2 + 4 + 2 * groups + (2 if bias_bytes else 0))


def parts(config: QQQConfig) -> tuple[str, ...]:
    """Names of a packed module's tensors, without a bias; the first one marks a module as packed."""
    return ("B", "s_channel", "s_group")


def config_of(described: Mapping[str, Any]) -> QQQConfig:
    """As much of the config as `unpack` needs, from a file's `quantization_config`."""
    return QQQConfig(group_size=described["group_size"])


def quantization_config(config: QQQConfig) -> dict[str, Any]:
    """What `config.json` holds as `quantization_config` and `quantize_config.json` holds as a whole.

    `wbits` is what vLLM reads, `bits` what GPTQModel does. No reader has to reorder columns.
    """
    return {
        "bits": 4,
        "wbits": 4,
        "group_size": config.group_size,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "quant_method": "qqq",
        "method": "qqq",
        "checkpoint_format": "qqq",
        "format": "qqq",
        "pack_dtype": "int32",
        "meta": {
            "quantizer": [f"prefect-quantize:{own_version()}"],
            "mse": config.mse,
            "act_group_aware": config.act_group_aware,
            "static_groups": False,
            "damp_percent": config.damp_percent,
            "damp_auto_increment": config.damp_increment,
            "true_sequential": True,
        },
    }


def _threads_take_eights(scales_SN: Tensor) -> Tensor:
    return scales_SN.reshape(len(scales_SN), -1, 8, 8).transpose(2, 3).reshape(scales_SN.shape).contiguous()


_columns_from_eights = _threads_take_eights  # a transposition undoes itself


def _threads_take_pairs(scales_SN: Tensor) -> Tensor:
    return scales_SN.reshape(len(scales_SN), -1, 4, 4, 2).transpose(2, 3).reshape(scales_SN.shape).contiguous()


_columns_from_pairs = _threads_take_pairs
