"""The exl3 layout: what exllamav3 and GPTQModel load.

Per linear module `name` with weight [N, K], both multiples of 128:

    name.trellis  int16 [K / 16, N / 16, 16 * bits]   a closed path of 256 symbols per tile of 16 x 16 weights
    name.suh      float16 [K]                         scale and sign of each input channel
    name.svh      float16 [N]                         scale and sign of each output channel
    name.mcg      int32, no dimension                 the multiplier of that codebook; or name.mul1; or neither: 3inst
    name.bias     float16 [N]                         only if the source module has one

The symbols of a tile are one stream of bits, high bits first, in words of 32 bits; two int16 are such a word, the lower
half first. Which element of the tile each position stands for is told in methods/exl3.py.

Widths may differ between modules. `quantization_config` lists every stored tensor, which GPTQModel needs in order to
make its modules; exllamav3 looks at the tensors alone and keeps the same list in a file `quantization_config.json`.

Shape suffixes: N out_features, K in_features, R and C blocks of 16 of them, L positions of a tile, P int16 words.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from tasks.formats.gptq import half_bias
from tasks.methods.exl3 import BLOCK, SIDE, TrellisWeight
from tasks.methods.exl3_trellis import MULTIPLIERS, TILE
from tasks.quantization import EXL3Config

WORD = 32
DESCRIPTION_FILE = "quantization_config.json"


def pack(name: str, rows: TrellisWeight, config: EXL3Config, bias: Tensor | None) -> dict[str, Tensor]:
    """The tensors of one module under their final names, contiguous on the CPU.

    ValueError, naming the module, for sizes that the layout can't hold, scales that are not finite and a bias that
    float16 can't hold.
    """
    shape_problems = problems(name, len(rows.suh_K), len(rows.svh_N), config)
    if shape_problems:
        raise ValueError("; ".join(shape_problems))
    packed = {
        f"{name}.trellis": pack_symbols(rows.symbols_RCL, rows.bits).cpu(),
        f"{name}.suh": rows.suh_K.half().cpu().contiguous(),
        f"{name}.svh": rows.svh_N.half().cpu().contiguous(),
    }
    if not bool(packed[f"{name}.suh"].isfinite().all() and packed[f"{name}.svh"].isfinite().all()):
        raise ValueError(
            f"`{name}`: a channel scale is NaN or infinite in float16; nothing was packed: its source weights are "
            f"damaged or out of range"
        )
    if config.codebook in ("mcg", "mul1"):
        packed[f"{name}.{config.codebook}"] = torch.tensor(_as_signed(MULTIPLIERS[config.codebook]), dtype=torch.int32)
    return packed if bias is None else packed | {f"{name}.bias": half_bias(name, bias)}


def unpack(tensors: Mapping[str, Tensor], name: str, config: EXL3Config) -> TrellisWeight:
    """The inverse of `pack`, for any program's file; the loss is zero, it is not in it.

    Width and codebook are what the tensors say. ValueError for a multiplier that is not the codebook's.
    """
    trellis_RCP = tensors[f"{name}.trellis"]
    bits = trellis_RCP.shape[-1] // SIDE
    codebook = next((mark for mark in ("mcg", "mul1") if f"{name}.{mark}" in tensors), "3inst")
    if codebook != "3inst" and int(tensors[f"{name}.{codebook}"]) & 0xFFFFFFFF != MULTIPLIERS[codebook]:
        raise ValueError(
            f"`{name}.{codebook}` is {int(tensors[f'{name}.{codebook}'])}, not the multiplier of that codebook "
            f"({_as_signed(MULTIPLIERS[codebook])}); no reader knows another"
        )
    return TrellisWeight(
        symbols_RCL=unpack_symbols(trellis_RCP, bits),
        suh_K=tensors[f"{name}.suh"],
        svh_N=tensors[f"{name}.svh"],
        bits=bits,
        codebook=codebook,
        loss=0.0,
    )


def pack_symbols(symbols_RCL: Tensor, bits: int) -> Tensor:
    """int16 [R, C, P]: symbols 0 .. 2^bits - 1, as one stream of bits per tile."""
    assert symbols_RCL.shape[-1] == TILE and int(symbols_RCL.max()) < 1 << bits
    # A row of blocks at a time: every bit of it becomes a number.
    return torch.cat([_pack_some(row_1CL, bits) for row_1CL in symbols_RCL.split(1)])


def unpack_symbols(trellis_RCP: Tensor, bits: int) -> Tensor:
    """uint8 [R, C, L]: the inverse of `pack_symbols`."""
    return torch.cat([_unpack_some(row_1CP, bits) for row_1CP in trellis_RCP.split(1)])


def problems(name: str, in_features: int, out_features: int, config: EXL3Config) -> list[str]:
    """Why this layout can't hold module `name`, one sentence each; empty when it can."""
    return [
        f"`{name}`: {what} {size} is not a multiple of {BLOCK}, the size of the Hadamard blocks of exl3; use another method"
        for what, size in (("in_features", in_features), ("out_features", out_features))
        if size % BLOCK
    ]


def packed_bytes(in_features: int, out_features: int, config: EXL3Config, bias_bytes: int, bits: int) -> int:
    """Bytes of the tensors that `pack` makes of one module of that width; its bias in the source, if any."""
    scales = 2 * (in_features + out_features)
    mark = 0 if config.codebook == "3inst" else 4
    return in_features * out_features * bits // 8 + scales + mark + (2 * out_features if bias_bytes else 0)


def parts(config: EXL3Config) -> tuple[str, ...]:
    """Names of a packed module's tensors, without a bias; the first one marks a module as packed."""
    mark = () if config.codebook == "3inst" else (config.codebook,)
    return ("trellis", "suh", "svh", *mark)


def config_of(described: Mapping[str, Any]) -> EXL3Config:
    """As much of the config as `unpack` needs, from a file's `quantization_config`."""
    return EXL3Config(bits=described["bits"], codebook=described.get("codebook", "3inst"))


def quantization_config(config: EXL3Config, storage: Mapping[str, Any]) -> dict[str, Any]:
    """What `config.json` holds as `quantization_config`; `storage` is `tensor_storage` of every module, by full name."""
    return {
        "quant_method": "exl3",
        "method": "exl3",
        "checkpoint_format": "exl3",
        "format": "exl3",
        "bits": config.bits,
        "head_bits": None,
        "lm_head": False,
        "group_size": -1,
        "codebook": config.codebook,
        "out_scales": config.out_scales,
        "tensor_storage": dict(storage),
    }


def tensor_storage(
    name: str, in_features: int, out_features: int, config: EXL3Config, bits: int, has_bias: bool
) -> dict[str, Any]:
    """What `tensor_storage` says of one module: its width, codebook, and tensors."""
    tensors: dict[str, tuple[list[int], str, int]] = {
        "trellis": ([in_features // SIDE, out_features // SIDE, SIDE * bits], "int16", 2),
        "suh": ([in_features], "float16", 2),
        "svh": ([out_features], "float16", 2),
    }
    if has_bias:
        tensors["bias"] = ([out_features], "float16", 2)
    entry: dict[str, Any] = {"quant_format": "exl3", "bits_per_weight": bits}
    if config.codebook != "3inst":
        tensors[config.codebook] = ([], "int32", 4)
        entry[f"{config.codebook}_multiplier"] = MULTIPLIERS[config.codebook]
    entry["stored_tensors"] = {
        f"{name}.{part}": {"shape": shape, "n_bytes": prod(shape) * size, "torch_dtype": dtype}
        for part, (shape, dtype, size) in tensors.items()
    }
    return entry


def _pack_some(symbols_RCL: Tensor, bits: int) -> Tensor:
    places = torch.arange(bits - 1, -1, -1, device=symbols_RCL.device)
    stream = (symbols_RCL.to(torch.int32)[..., None] >> places & 1).reshape(*symbols_RCL.shape[:-1], -1, WORD)
    weights = 1 << torch.arange(WORD - 1, -1, -1, device=symbols_RCL.device)
    words = (stream.long() * weights).sum(dim=-1)
    return _halves_of(words)


def _unpack_some(trellis_RCP: Tensor, bits: int) -> Tensor:
    halves = (trellis_RCP.long() & 0xFFFF).reshape(*trellis_RCP.shape[:-1], -1, 2)
    words = halves[..., 0] | halves[..., 1] << 16
    places = torch.arange(WORD - 1, -1, -1, device=trellis_RCP.device)
    stream = (words[..., None] >> places & 1).reshape(*trellis_RCP.shape[:-1], TILE, bits)
    weights = 1 << torch.arange(bits - 1, -1, -1, device=trellis_RCP.device)
    return (stream * weights).sum(dim=-1).to(torch.uint8)


def _halves_of(words: Tensor) -> Tensor:
    """int64 words 0 .. 2^32 - 1 [.., P / 2] to int16 of the same bits [.., P], the lower half of each first."""
    halves = torch.stack([words & 0xFFFF, words >> 16], dim=-1).flatten(-2)
    return torch.where(halves > 0x7FFF, halves - 0x10000, halves).to(torch.int16)


def _as_signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
