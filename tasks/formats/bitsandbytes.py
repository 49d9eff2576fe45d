"""bitsandbytes weights under Hugging Face's own names: what transformers with bitsandbytes loads.

Per linear module `name` with weight [N, K], in nf4 or fp4:

    name.weight                                uint8 [ceil(N * K / 2), 1]   two codes a byte, the first one high
    name.weight.absmax                         float32 [B], or uint8 [B] under double quantization
    name.weight.quant_map                      float32 [16]                 what the codes stand for
    name.weight.nested_absmax                  float32 [C]                  under double quantization
    name.weight.nested_quant_map               float32 [256]                under double quantization
    name.weight.quant_state.bitsandbytes__nf4  uint8                        JSON: type, block sizes, dtype, shape, mean

In int8:

    name.weight         int8 [N, K]
    name.SCB            float32 [N]   each row's largest magnitude; weight = code * SCB / 127
    name.weight_format  uint8         0: by rows

`name.bias` is as in the source, and only if the source module has one. The JSON has the library's own order of keys, so
that the bytes are those that `save_pretrained` of transformers writes.

The layout itself holds any size, but its readers don't: with AVX-512 bitsandbytes 0.50.2 takes the block magnitudes of
a row from K / 64 a row, rounded down, and computes garbage without an error where rows end inside a block.

Shape suffixes: N out_features, K in_features, B blocks of 64 weights, C blocks of 256 block magnitudes.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tasks.methods.bitsandbytes import (
    BLOCK_SIZE,
    NESTED_BLOCK_SIZE,
    BitsAndBytesRows,
    FourBitRows,
    Int8Rows,
    Nested,
)
from tasks.quantization import BitsAndBytesConfig

FORMAT_BY_ROWS = 0
# Rows that bitsandbytes' CPU kernels take at once.
CPU_TILE = 32
# About so many characters has the JSON of a module, and so many more under double quantization.
STATE_BYTES = 82
NESTED_STATE_BYTES = 90


def pack(name: str, rows: BitsAndBytesRows, config: BitsAndBytesConfig, bias: Tensor | None) -> dict[str, Tensor]:
    """The tensors of one module under their final names, contiguous on the CPU.

    ValueError, naming the module, for rows of another type than the config's and for values that are not finite.
    """
    found = rows.quant_type if isinstance(rows, FourBitRows) else "int8"
    if found != config.quant_type:
        raise ValueError(f"`{name}`: its codes are {found}, but the config says {config.quant_type}")
    packed = _four_bit_tensors(rows) if isinstance(rows, FourBitRows) else _int8_tensors(rows)
    if bias is not None:
        packed["bias"] = bias
    for part, tensor in packed.items():
        if not bool(tensor.isfinite().all()):
            raise ValueError(
                f"`{name}.{part}` holds a NaN or an infinity; nothing was packed: its source weights are damaged or out "
                f"of range"
            )
    return {f"{name}.{part}": tensor.detach().cpu().contiguous() for part, tensor in packed.items()}


def unpack(tensors: Mapping[str, Tensor], name: str, config: BitsAndBytesConfig) -> BitsAndBytesRows:
    """The inverse of `pack`, for any program's file with blocks of 64; losses are zero, they are not in it."""
    weight = tensors[f"{name}.weight"]
    if config.quant_type == "int8":
        return Int8Rows(weight, tensors[f"{name}.SCB"], torch.zeros(len(weight), dtype=torch.float64))
    state = json.loads(bytes(tensors[f"{name}.weight.quant_state.bitsandbytes__{config.quant_type}"].tolist()))
    nested = None
    if "nested_offset" in state:
        nested = Nested(
            offset=state["nested_offset"],
            absmax_C=tensors[f"{name}.weight.nested_absmax"],
            quant_map=tensors[f"{name}.weight.nested_quant_map"],
        )
    out_features, in_features = state["shape"]
    return FourBitRows(
        packed_P1=weight,
        absmax_B=tensors[f"{name}.weight.absmax"],
        quant_map=tensors[f"{name}.weight.quant_map"],
        nested=nested,
        quant_type=state["quant_type"],
        shape=(out_features, in_features),
        dtype=getattr(torch, state["dtype"]),
        losses_N=torch.zeros(out_features, dtype=torch.float64),
    )


def problems(name: str, in_features: int, out_features: int, config: BitsAndBytesConfig) -> list[str]:
    """Why this layout can't hold module `name`, one sentence each; empty when it can."""
    if config.quant_type == "int8":
        return []
    return [
        f"`{name}`: {what} {size} is not a multiple of {divisor}: bitsandbytes 0.50.2 {consequence}; use int8"
        for what, size, divisor, consequence in (
            ("in_features", in_features, BLOCK_SIZE, "misreads blocks that run across rows on CPUs with AVX-512"),
            ("out_features", out_features, CPU_TILE, "refuses that on CPUs with AVX512-BF16"),
        )
        if size % divisor
    ]


def packed_bytes(in_features: int, out_features: int, config: BitsAndBytesConfig, bias_bytes: int) -> int:
    """Bytes of the tensors that `pack` makes of one module, but for a few of its JSON; its bias in the source, if any."""
    weights = in_features * out_features
    if config.quant_type == "int8":
        return weights + out_features * 4 + 1 + bias_bytes
    blocks = -(-weights // BLOCK_SIZE)
    size = -(-weights // 2) + 16 * 4 + STATE_BYTES + bias_bytes
    if not config.double_quant:
        return size + 4 * blocks
    return size + blocks + 4 * -(-blocks // NESTED_BLOCK_SIZE) + 256 * 4 + NESTED_STATE_BYTES


def parts(config: BitsAndBytesConfig) -> tuple[str, ...]:
    """Names of a packed module's tensors, without a bias; the first one marks a module as packed."""
    if config.quant_type == "int8":
        return ("SCB", "weight", "weight_format")
    nested = ("weight.nested_absmax", "weight.nested_quant_map") if config.double_quant else ()
    state = f"weight.quant_state.bitsandbytes__{config.quant_type}"
    return ("weight.absmax", "weight", "weight.quant_map", state, *nested)


def config_of(described: Mapping[str, Any]) -> BitsAndBytesConfig:
    """As much of the config as `unpack` needs, from a file's `quantization_config`."""
    return BitsAndBytesConfig(
        quant_type="int8" if described["load_in_8bit"] else described["bnb_4bit_quant_type"],
        double_quant=described["bnb_4bit_use_double_quant"],
    )


def quantization_config(config: BitsAndBytesConfig) -> dict[str, Any]:
    """What `config.json` holds as `quantization_config`, with the keys of transformers' BitsAndBytesConfig."""
    is_int8 = config.quant_type == "int8"
    return {
        "quant_method": "bitsandbytes",
        "load_in_8bit": is_int8,
        "load_in_4bit": not is_int8,
        "bnb_4bit_quant_type": "fp4" if is_int8 else config.quant_type,
        "bnb_4bit_use_double_quant": config.double_quant and not is_int8,
        "bnb_4bit_compute_dtype": config.compute_dtype,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_threshold": 6.0,
        "llm_int8_skip_modules": ["lm_head"],
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
    }


def _four_bit_tensors(rows: FourBitRows) -> dict[str, Tensor]:
    dtype = str(rows.dtype).removeprefix("torch.")
    state: dict[str, Any] = {
        "quant_type": rows.quant_type,
        "blocksize": BLOCK_SIZE,
        "dtype": dtype,
        "shape": rows.shape,
    }
    packed = {"weight": rows.packed_P1, "weight.absmax": rows.absmax_B, "weight.quant_map": rows.quant_map}
    if rows.nested is not None:
        state |= {
            "nested_blocksize": NESTED_BLOCK_SIZE,
            "nested_dtype": "float32",
            "nested_offset": rows.nested.offset,
        }
        packed |= {
            "weight.nested_absmax": rows.nested.absmax_C,
            "weight.nested_quant_map": rows.nested.quant_map,
        }
    packed[f"weight.quant_state.bitsandbytes__{rows.quant_type}"] = torch.tensor(
        list(json.dumps(state).encode()), dtype=torch.uint8
    )
    return packed


def _int8_tensors(rows: Int8Rows) -> dict[str, Tensor]:
    return {
        "weight": rows.codes_NK,
        "SCB": rows.absmax_N,
        "weight_format": torch.tensor(FORMAT_BY_ROWS, dtype=torch.uint8),
    }
