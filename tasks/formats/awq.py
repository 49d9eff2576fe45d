"""The awq layout, version gemm: what GPTQModel, transformers (with GPTQModel) and vLLM load.

Per linear module `name` with weight [N, K], group count G:

    name.qweight  int32 [K, N / 8]    codes of 4 bits, packed along N
    name.qzeros   int32 [G, N / 8]    zero points, packed likewise, as they are
    name.scales   float16 [G, N]
    name.bias     float16 [N]         only if the source module has one

A word holds eight neighbouring output channels, low bits first, in the order 0, 2, 4, 6, 1, 3, 5, 7: that of a kernel
which unpacks two codes at once. Groups are runs of input columns; there is no `g_idx`.

Every file says `zero_point`: readers use the zero points that they find, and a symmetric grid's are all 8. Without the
word, vLLM and GPTQModel look for kernels that read no zero points and find none for this layout.

The scales of channels are in the weights and in what precedes them (norms, v_proj, up_proj): a reader needs to know
nothing of them, and a file of RTN looks the same.

Shape suffixes: N out_features, K in_features, G groups, P packed int32 words, R any rows.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tasks.formats.gptq import DESCRIPTION_FILE as DESCRIPTION_FILE
from tasks.formats.gptq import half_bias, own_version
from tasks.methods.grid import QuantizedRows, columns_per_group, natural_order
from tasks.quantization import AWQConfig, RTNConfig

Config = AWQConfig | RTNConfig

BITS = 4
PER_WORD = 32 // BITS
# Which of a word's eight channels its fields hold, low bits first.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# What GPTQModel's kernels load, beside -1; vLLM's take 32 upwards.
LOADABLE_GROUP_SIZES = (16, 32, 64, 128)


def pack(name: str, rows: QuantizedRows, config: Config, bias: Tensor | None) -> dict[str, Tensor]:
    """The tensors of one module under their final names, contiguous on the CPU.

    ValueError, naming the module, for what the layout can't hold: shapes, columns out of order, scales that are not
    positive and finite, zero points over 15, a bias that float16 can't hold.
    """
    out_features, in_features = rows.codes_NK.shape
    found = problems(name, in_features, out_features, config)
    if found:
        raise ValueError("; ".join(found))
    groups = rows.scales_NG.shape[1]
    if not torch.equal(rows.g_idx_K.cpu(), natural_order(in_features, groups)):
        raise ValueError(f"`{name}`: columns of a group don't lie side by side, which this layout can't say")
    assert int(rows.codes_NK.max()) < 2**BITS, f"`{name}` has codes wider than {BITS} bits"
    lowest, highest = int(rows.zeros_NG.min()), int(rows.zeros_NG.max())
    if lowest < 0 or highest >= 2**BITS:
        raise ValueError(f"`{name}`: zero points {lowest} .. {highest} do not fit 0 .. {2**BITS - 1}")
    scales_GN = rows.scales_NG.t().contiguous().cpu()
    if not bool(((scales_GN > 0) & scales_GN.isfinite()).all()):
        raise ValueError(
            f"`{name}`: a scale is zero, negative, NaN or infinite in float16; nothing was packed: its source weights "
            f"are damaged or out of range"
        )
    packed = {
        f"{name}.qweight": pack_channels(rows.codes_NK.t()).cpu(),
        f"{name}.qzeros": pack_channels(rows.zeros_NG.t()).cpu(),
        f"{name}.scales": scales_GN,
    }
    return packed if bias is None else packed | {f"{name}.bias": half_bias(name, bias)}


def unpack(tensors: Mapping[str, Tensor], name: str, config: Config) -> QuantizedRows:
    """The inverse of `pack`, for any program's file; losses are zero, they are not in it."""
    codes_NK = unpack_channels(tensors[f"{name}.qweight"]).t().contiguous()
    scales_NG = tensors[f"{name}.scales"].t().contiguous()
    return QuantizedRows(
        codes_NK=codes_NK.to(torch.uint8),
        scales_NG=scales_NG,
        zeros_NG=unpack_channels(tensors[f"{name}.qzeros"]).t().contiguous().to(torch.int32),
        g_idx_K=natural_order(codes_NK.shape[1], scales_NG.shape[1]),
        losses_N=torch.zeros(len(codes_NK)),
    )


def pack_channels(codes_RN: Tensor) -> Tensor:
    """int32 [R, N / 8]: codes 0 .. 15 of any integer dtype, packed along output channels.

    ValueError when the channels do not fill whole words.
    """
    rows, channels = codes_RN.shape
    if channels % PER_WORD:
        raise ValueError(
            f"can't pack {channels} channels at {BITS} bits: {PER_WORD} codes fill an int32 word; the number of output "
            f"channels must be a multiple of {PER_WORD}"
        )
    codes_RP8 = codes_RN.reshape(rows, -1, PER_WORD).to(torch.int32)
    packed_RP = torch.zeros(codes_RP8.shape[:2], dtype=torch.int32, device=codes_RN.device)
    for field, channel in enumerate(ORDER):
        packed_RP |= codes_RP8[..., channel] << (BITS * field)
    return packed_RP


def unpack_channels(packed_RP: Tensor) -> Tensor:
    """int32 [R, P * 8]: the inverse of `pack_channels`."""
    codes_RP8 = packed_RP.new_empty(*packed_RP.shape, PER_WORD)
    for field, channel in enumerate(ORDER):
        codes_RP8[..., channel] = (packed_RP >> (BITS * field)) & (2**BITS - 1)
    return codes_RP8.reshape(len(packed_RP), -1)


def problems(name: str, in_features: int, out_features: int, config: Config) -> list[str]:
    """Why this layout can't hold module `name`, one sentence each with what would fit; empty when it can."""
    found = []
    if config.bits != BITS:
        found.append(
            f"`{name}`: the awq layout holds {BITS} bits, not {config.bits}; use another checkpoint_format, or {BITS} bits"
        )
    if out_features % PER_WORD:
        found.append(
            f"`{name}`: out_features {out_features} is not a multiple of {PER_WORD}, the codes that fill an int32 word"
        )
    if config.group_size != -1 and in_features % config.group_size:
        fitting = [size for size in LOADABLE_GROUP_SIZES if in_features % size == 0]
        found.append(
            f"`{name}`: in_features {in_features} is not a multiple of group_size {config.group_size}; "
            f"{', '.join(map(str, [*fitting, -1]))} would fit"
        )
    elif config.group_size not in (-1, *LOADABLE_GROUP_SIZES):
        found.append(
            f"`{name}`: no loader of this layout takes group_size {config.group_size}; they take "
            f"{', '.join(map(str, LOADABLE_GROUP_SIZES))} or -1"
        )
    return found


def packed_bytes(in_features: int, out_features: int, config: Config, bias_bytes: int) -> int:
    """Bytes of the tensors that `pack` makes of one module which this layout can hold; its bias in the source, if any."""
    groups = in_features // columns_per_group(in_features, config)
    words = (in_features + groups) * out_features // PER_WORD
    return 4 * words + 2 * groups * out_features + (2 * out_features if bias_bytes else 0)


def parts(config: Config) -> tuple[str, ...]:
    """Names of a packed module's tensors, without a bias; the first one marks a module as packed."""
    return ("qweight", "qzeros", "scales")


def config_of(described: Mapping[str, Any]) -> Config:
    """As much of the config as `unpack` needs, from a file's `quantization_config`; ValueError for another version."""
    if (version := described.get("version", "gemm")) != "gemm":
        raise ValueError(f"it is an awq file of version `{version}`; only `gemm` can be read")
    return RTNConfig(bits=described["bits"], checkpoint_format="awq")


def quantization_config(config: Config) -> dict[str, Any]:
    """What `config.json` holds as `quantization_config` and `quantize_config.json` holds as a whole."""
    meta: dict[str, Any] = {
        "quantizer": [f"prefect-quantize:{own_version()}"],
        "method": config.method,
        "sym": config.sym,
    }
    if isinstance(config, AWQConfig):
        meta |= {"n_grid": config.n_grid, "duo_scaling": config.duo_scaling, "apply_clip": config.apply_clip}
    return {
        "bits": config.bits,
        "group_size": config.group_size,
        "desc_act": False,
        "sym": False,
        "zero_point": True,
        "version": "gemm",
        "lm_head": False,
        "modules_to_not_convert": None,
        "quant_method": "awq",
        "method": "awq",
        "checkpoint_format": "gemm",
        "format": "gemm",
        "pack_dtype": "int32",
        "meta": meta,
    }
