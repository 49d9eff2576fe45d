"""The gptq layout: what GPTQModel, transformers and vLLM load.

Per linear module `name` with weight [N, K], group count G:

    name.qweight  int32 [K * bits / 32, N]   codes, packed along K
    name.qzeros   int32 [G, N * bits / 32]   zero points, packed along N; minus one in v1
    name.scales   float16 [G, N]
    name.g_idx    int32 [K]                  the group of each input column
    name.bias     float16 [N]                only if the source module has one

Codes form one stream of bits, low bits first: code j of a run takes bits j * bits .. (j + 1) * bits - 1 of its words. At
2, 4 and 8 bits whole codes fill a word; at 3 bits 32 codes fill 3 words and two of them straddle a boundary, so the row
count is K * 3 / 32 and never 32 // 3 codes a word.

`checkpoint_format` "gptq" (v1) stores zero - 1, "gptq_v2" stores zero. In v1 a zero of 0 would be stored as -1: some
readers borrow it from the neighbouring field, some wrap it, some read 2^bits. So this module refuses to write one (the
grid never chooses it for v1) and reads a field of all ones as 0.

Shape suffixes: N out_features, K in_features, G groups, P packed int32 words, R rows to pack, C any columns.
"""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from math import gcd
from typing import Any

import torch
from torch import Tensor

from tasks.methods.grid import QuantizedRows, columns_per_group
from tasks.quantization import GPTQConfig, RTNConfig

Config = GPTQConfig | RTNConfig

FORMATS = ("gptq", "gptq_v2")
# GPTQModel, and programs before it, read `quantization_config` from this file.
DESCRIPTION_FILE = "quantize_config.json"
# What GPTQModel's kernels load, beside -1 and a group of all input columns; vLLM's take fewer.
LOADABLE_GROUP_SIZES = (16, 32, 64, 128, 256, 512, 1024)
# GPTQModel loads an asymmetric v1 file only from writers that name a GPTQModel since 0.9.0, which mended its zero
# points. Ours are never 0, so what the mark stands for holds.
ASYMMETRIC_V1_MARK = "gptqmodel:0.9.0"
_OTHER_LAYOUT = "checkpoint_format `{}` is another layout than gptq; use `gptq` or `gptq_v2`"


def pack(name: str, rows: QuantizedRows, config: Config, bias: Tensor | None) -> dict[str, Tensor]:
    """The tensors of one module under their final names, contiguous on the CPU.

    ValueError, naming the module, for shapes that do not fill whole words, non-finite or non-positive scales, a bias that
    float16 can't hold, and a zero point that the layout can't.
    """
    bits, checkpoint_format = config.bits, config.checkpoint_format
    if checkpoint_format not in FORMATS:
        raise ValueError(f"`{name}`: {_OTHER_LAYOUT.format(checkpoint_format)}")
    out_features, in_features = rows.codes_NK.shape
    assert int(rows.codes_NK.max()) < 2**bits, f"`{name}` has codes wider than {bits} bits"
    shape_problems = _shape_problems(name, in_features, out_features, bits)
    if shape_problems:
        raise ValueError("; ".join(shape_problems))
    scales_GN = rows.scales_NG.t().contiguous().cpu()
    if not bool(((scales_GN > 0) & scales_GN.isfinite()).all()):
        raise ValueError(
            f"`{name}`: a scale is zero, negative, NaN or infinite in float16; nothing was packed: its source weights "
            f"are damaged or out of range"
        )
    zeros_NG = rows.zeros_NG.cpu().long()
    lowest = 1 if checkpoint_format == "gptq" else 0
    if int(zeros_NG.min()) < lowest or int(zeros_NG.max()) >= 2**bits:
        raise ValueError(
            f"`{name}`: zero points {int(zeros_NG.min())} .. {int(zeros_NG.max())} do not fit `{checkpoint_format}` at "
            f"{bits} bits, which holds {lowest} .. {2**bits - 1}; quantize for the format that is exported"
        )
    packed = {
        f"{name}.qweight": pack_rows(rows.codes_NK.t(), bits).cpu(),
        f"{name}.qzeros": pack_rows(zeros_NG - lowest, bits).t().contiguous(),
        f"{name}.scales": scales_GN,
        f"{name}.g_idx": rows.g_idx_K.to(torch.int32).contiguous().cpu(),
    }
    return packed if bias is None else packed | {f"{name}.bias": half_bias(name, bias)}


def unpack(tensors: Mapping[str, Tensor], name: str, config: Config) -> QuantizedRows:
    """The inverse of `pack`, for any program's file; losses are zero, they are not in it."""
    bits = config.bits
    zeros_NG = unpack_rows(tensors[f"{name}.qzeros"].t(), bits)
    if config.checkpoint_format == "gptq":
        zeros_NG = (zeros_NG + 1) & (2**bits - 1)
    codes_NK = unpack_rows(tensors[f"{name}.qweight"], bits).t().contiguous()
    return QuantizedRows(
        codes_NK=codes_NK.to(torch.uint8),
        scales_NG=tensors[f"{name}.scales"].t().contiguous(),
        zeros_NG=zeros_NG.to(torch.int32).contiguous(),
        g_idx_K=tensors[f"{name}.g_idx"],
        losses_N=torch.zeros(len(codes_NK)),
    )


def pack_rows(codes_RC: Tensor, bits: int) -> Tensor:
    """int32 [R * bits / 32, C]: codes 0 .. 2^bits - 1 of any integer dtype, packed along rows, low bits first.

    ValueError when the rows do not fill whole words.
    """
    rows, columns = codes_RC.shape
    run, words = _run_and_words(bits)
    if rows % run:
        raise ValueError(
            f"can't pack {rows} rows at {bits} bits: {run} codes fill {words} int32 word(s); "
            f"the number of rows must be a multiple of {run}"
        )
    # int64, so that the upper part of a code that straddles two words is at hand.
    codes_RC = codes_RC.reshape(rows // run, run, columns).to(torch.int64)
    packed_PC = torch.zeros(rows // run, words, columns, dtype=torch.int64, device=codes_RC.device)
    for j in range(run):
        word, shift = divmod(j * bits, 32)
        packed_PC[:, word] |= (codes_RC[:, j] << shift) & 0xFFFFFFFF
        if shift + bits > 32:
            packed_PC[:, word + 1] |= codes_RC[:, j] >> (32 - shift)
    return as_signed(packed_PC).reshape(-1, columns)


def unpack_rows(packed_PC: Tensor, bits: int) -> Tensor:
    """int64 [P * 32 / bits, C]: the inverse of `pack_rows`."""
    rows, columns = packed_PC.shape
    run, words = _run_and_words(bits)
    if rows % words:
        raise ValueError(f"can't unpack {rows} words at {bits} bits: codes come in runs of {words} words")
    packed_PC = packed_PC.reshape(rows // words, words, columns).to(torch.int64) & 0xFFFFFFFF
    codes_RC = torch.empty(rows // words, run, columns, dtype=torch.int64, device=packed_PC.device)
    for j in range(run):
        word, shift = divmod(j * bits, 32)
        code = packed_PC[:, word] >> shift
        if shift + bits > 32:
            code |= packed_PC[:, word + 1] << (32 - shift)
        codes_RC[:, j] = code & (2**bits - 1)
    return codes_RC.reshape(-1, columns)


def problems(name: str, in_features: int, out_features: int, config: Config) -> list[str]:
    """Why this layout can't hold module `name`, one sentence each with what would fit; empty when it can."""
    if config.checkpoint_format not in FORMATS:
        return [f"`{name}`: {_OTHER_LAYOUT.format(config.checkpoint_format)}"]
    found = _shape_problems(name, in_features, out_features, config.bits)
    if config.group_size != -1 and in_features % config.group_size:
        fitting = [size for size in LOADABLE_GROUP_SIZES if in_features % size == 0]
        found.append(
            f"`{name}`: in_features {in_features} is not a multiple of group_size {config.group_size}; "
            f"{', '.join(map(str, [*fitting, -1]))} would fit"
        )
    elif config.group_size not in (-1, in_features, *LOADABLE_GROUP_SIZES):
        found.append(
            f"`{name}`: no loader of this layout takes group_size {config.group_size}; they take "
            f"{', '.join(map(str, LOADABLE_GROUP_SIZES))} or -1"
        )
    return found


def packed_bytes(in_features: int, out_features: int, config: Config, bias_bytes: int) -> int:
    """Bytes of the tensors that `pack` makes of one module which this layout can hold; its bias in the source, if any."""
    groups = in_features // columns_per_group(in_features, config)
    qweight = in_features * out_features * config.bits // 8
    qzeros = groups * out_features * config.bits // 8
    scales = groups * out_features * 2
    return qweight + qzeros + scales + in_features * 4 + (out_features * 2 if bias_bytes else 0)


def parts(config: Config) -> tuple[str, ...]:
    """Names of a packed module's tensors, without a bias; the first one marks a module as packed."""
    return ("qweight", "qzeros", "scales", "g_idx")


def config_of(described: Mapping[str, Any]) -> Config:
    """As much of the config as `unpack` needs, from a file's `quantization_config`."""
    return RTNConfig(bits=described["bits"], checkpoint_format=described["checkpoint_format"])


def quantization_config(config: Config) -> dict[str, Any]:
    """What `config.json` holds as `quantization_config` and `quantize_config.json` holds as a whole.

    `desc_act` says what a reader must do, not how we quantized: group-aware order and static groups leave `g_idx` in
    its natural order, so they load as fast as no order at all. ValueError for another layout's config.
    """
    if config.checkpoint_format not in FORMATS:
        raise ValueError(_OTHER_LAYOUT.format(config.checkpoint_format))
    quantizers = [f"prefect-quantize:{own_version()}"]
    if config.checkpoint_format == "gptq" and not config.sym:
        quantizers.append(ASYMMETRIC_V1_MARK)
    meta: dict[str, Any] = {
        "quantizer": quantizers,
        "method": config.method,
        "mse": config.mse,
        "act_group_aware": False,
        "static_groups": False,
        "true_sequential": True,
    }
    desc_act = False
    if isinstance(config, GPTQConfig):
        desc_act = config.desc_act and not config.static_groups
        meta |= {
            "act_group_aware": config.act_group_aware,
            "static_groups": config.static_groups,
            "true_sequential": config.true_sequential,
            "damp_percent": config.damp_percent,
            "damp_auto_increment": config.damp_increment,
        }
        asked = {"gptaq": config.gptaq, "foem": config.foem}
        meta |= {name: option.model_dump() for name, option in asked.items() if option is not None}
    return {
        "bits": config.bits,
        "group_size": config.group_size,
        "desc_act": desc_act,
        "sym": config.sym,
        "lm_head": config.lm_head,
        "quant_method": "gptq",
        "method": "gptq",
        "checkpoint_format": config.checkpoint_format,
        "format": config.checkpoint_format,
        "pack_dtype": "int32",
        "meta": meta,
    }


def _shape_problems(name: str, in_features: int, out_features: int, bits: int) -> list[str]:
    run, words = _run_and_words(bits)
    return [
        f"`{name}`: {what} {size} is not a multiple of {run}, the codes that fill {words} int32 word(s) at {bits} bits"
        for what, size in (("in_features", in_features), ("out_features", out_features))
        if size % run
    ]


def _run_and_words(bits: int) -> tuple[int, int]:
    """The shortest run of codes that fills whole words, and those words."""
    shared = gcd(bits, 32)
    return 32 // shared, bits // shared


def as_signed(words: Tensor) -> Tensor:
    """int64 words 0 .. 2^32 - 1 to the int32 of the same bits."""
    return torch.where(words > 0x7FFFFFFF, words - 0x100000000, words).to(torch.int32)


def half_bias(name: str, bias: Tensor) -> Tensor:
    """The bias of module `name` in float16, contiguous on the CPU; ValueError for values that it can't hold."""
    half = bias.to(torch.float16).contiguous().cpu()
    if not bool(half.isfinite().all()):
        raise ValueError(f"`{name}`: the bias holds values that float16, its dtype in this layout, can't hold")
    return half


def own_version() -> str:
    """The version of this program, where it is installed."""
    try:
        return version("prefect-quantize")
    except PackageNotFoundError:
        return "0"
