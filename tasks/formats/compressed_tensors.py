"""The compressed-tensors layout: what vLLM, and transformers with the compressed-tensors package, load.

Integer weights (GPTQ, RTN, AWQ) are `pack-quantized`. Per linear module `name` with weight [N, K] and group count G:

    name.weight_packed      int32 [N, K * bits / 32]   codes, packed along K, low bits first
    name.weight_scale       float16 [N, G]
    name.weight_zero_point  int32 [N * bits / 32, G]   zero points, packed along N; only in asymmetric files
    name.weight_shape       int64 [2]                  N, K
    name.bias               as in the source           only if the source module has one

The layout speaks of signed codes, from -2^(bits-1) on, but packs them with 2^(bits-1) added: those are our codes and
zero points as they are. A symmetric file holds no zero points; they are 2^(bits-1).

FP8 weights are `float-quantized`: `name.weight` float8_e4m3fn [N, K] and `name.weight_scale` float32 [1], [N, 1] or
[N/128, K/128], which multiplies. Its readers round activations to FP8 too, per token (per 128 columns in blocks).

* Only 4 and 8 bits: other widths have no kernel in vLLM, and older compressed-tensors packed 3 bits ten a word.
* No `weight_g_idx`: compressed-tensors removed the order of columns that needs it (`actorder: group`; seen in 0.19.0,
  which refuses the file). GPTQ's act_group_aware, or desc_act with static_groups, keep `g_idx` in its natural order.
* No e5m2: readers cast every float8 weight to e4m3 and compute garbage without an error (transformers 5.24.0).
* Asymmetric files say `dequantize`. transformers 5.24.0 with compressed-tensors 0.19.0 makes room for unpacked zero
  points otherwise, and refuses the file as the packed ones do not fit. With it the weights are widened as they are
  loaded, in the scales' float16; vLLM passes over the key.
* Readers keep scales in the model's dtype. In bfloat16 a float16 scale loses 3 of its 11 bits: nothing at 4 bits, and
  the weight error at 8 bits grows from 0.65 to 0.70 percent (normal weights, groups of 128).

Shape suffixes: N out_features, K in_features, G groups.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from tasks.formats.gptq import pack_rows, unpack_rows
from tasks.methods.fp8 import BLOCK, FP8Rows
from tasks.methods.grid import QuantizedRows, columns_per_group, natural_order
from tasks.quantization import AWQConfig, FP8Config, GPTQConfig, RTNConfig

PackedConfig = GPTQConfig | RTNConfig | AWQConfig
Config = PackedConfig | FP8Config

PACKED_BITS = (4, 8)
# What vLLM's kernels take, beside -1; transformers takes any that divides.
FAST_GROUP_SIZES = (32, 64, 128)
STRATEGIES: dict[Literal["tensor", "row", "block"], str] = {"tensor": "tensor", "row": "channel", "block": "block"}


def pack(name: str, rows: QuantizedRows | FP8Rows, config: Config, bias: Tensor | None) -> dict[str, Tensor]:
    """The tensors of one module under their final names, contiguous on the CPU.

    ValueError, naming the module, for what the layout can't hold and for values that are not finite.
    """
    packed = _tensors(name, rows, config)
    if bias is not None:
        packed["bias"] = bias
    for part, tensor in packed.items():
        if tensor.is_floating_point() and not bool(tensor.float().isfinite().all()):
            raise ValueError(
                f"`{name}.{part}` holds a NaN or an infinity; nothing was packed: its source weights are damaged or out "
                f"of range"
            )
    return {f"{name}.{part}": tensor.detach().cpu().contiguous() for part, tensor in packed.items()}


def unpack(tensors: Mapping[str, Tensor], name: str, config: Config) -> QuantizedRows | FP8Rows:
    """The inverse of `pack`, for any program's file; losses are zero, they are not in it."""
    scales = tensors[f"{name}.weight_scale"]
    if isinstance(config, FP8Config):
        values_NK = tensors[f"{name}.weight"]
        scales_RC = scales.reshape(1, 1) if scales.numel() == 1 else scales
        return FP8Rows(values_NK, scales_RC.float(), torch.zeros(len(values_NK), dtype=torch.float64))
    out_features, in_features = tensors[f"{name}.weight_shape"].tolist()
    codes_NK = unpack_rows(tensors[f"{name}.weight_packed"].t(), config.bits).t()
    zeros_NG = torch.full_like(scales, 2 ** (config.bits - 1))
    if f"{name}.weight_zero_point" in tensors:
        zeros_NG = unpack_rows(tensors[f"{name}.weight_zero_point"], config.bits)
    return QuantizedRows(
        codes_NK=codes_NK.to(torch.uint8).contiguous(),
        scales_NG=scales.to(torch.float16),
        zeros_NG=zeros_NG.to(torch.int32).contiguous(),
        g_idx_K=natural_order(in_features, scales.shape[1]),
        losses_N=torch.zeros(out_features),
    )


def problems(name: str, in_features: int, out_features: int, config: Config) -> list[str]:
    """Why this layout can't hold module `name`, one sentence each with what would fit; empty when it can."""
    if isinstance(config, FP8Config):
        return block_problems(name, in_features, out_features) if config.granularity == "block" else []
    found = []
    if config.bits not in PACKED_BITS:
        found.append(
            f"`{name}`: the compressed-tensors layout holds 4 and 8 bits, not {config.bits}: vLLM has no kernel for it "
            f"and versions of compressed-tensors pack it differently; use checkpoint_format `gptq`"
        )
    else:
        found += _word_problems(name, in_features, out_features, config)
    if config.group_size != -1 and in_features % config.group_size:
        fitting = [size for size in FAST_GROUP_SIZES if in_features % size == 0]
        found.append(
            f"`{name}`: in_features {in_features} is not a multiple of group_size {config.group_size}; "
            f"{', '.join(map(str, [*fitting, -1]))} would fit"
        )
    if isinstance(config, GPTQConfig) and config.desc_act and not config.static_groups:
        found.append(
            f"`{name}`: desc_act leaves columns in groups out of order, which compressed-tensors no longer reads; use "
            f"act_group_aware, or desc_act with static_groups, or checkpoint_format `gptq`"
        )
    return found


def packed_bytes(in_features: int, out_features: int, config: Config, bias_bytes: int) -> int:
    """Bytes of the tensors that `pack` makes of one module which this layout can hold; its bias in the source, if any."""
    if isinstance(config, FP8Config):
        return in_features * out_features + scales_bytes(in_features, out_features, config) + bias_bytes
    groups = in_features // columns_per_group(in_features, config)
    codes = in_features * out_features * config.bits // 8
    zeros = 0 if config.sym else groups * out_features * config.bits // 8
    return codes + groups * out_features * 2 + zeros + 2 * 8 + bias_bytes


def scales_bytes(in_features: int, out_features: int, config: FP8Config) -> int:
    """Bytes of the float32 scales of one FP8 module."""
    blocks = out_features // BLOCK * (in_features // BLOCK)
    return 4 * {"tensor": 1, "row": out_features, "block": blocks}[config.granularity]


def parts(config: Config) -> tuple[str, ...]:
    """Names of a packed module's tensors, without a bias; the first one marks a module as packed."""
    if isinstance(config, FP8Config):
        return ("weight_scale", "weight")
    zeros = () if config.sym else ("weight_zero_point",)
    return ("weight_packed", "weight_scale", "weight_shape", *zeros)


def config_of(described: Mapping[str, Any]) -> Config:
    """As much of the config as `unpack` needs, from a file's `quantization_config`."""
    group = next(iter(described["config_groups"].values()))  # of one module, or the first
    weights = group["weights"]
    if weights["type"] == "float":
        return FP8Config(granularity={strategy: name for name, strategy in STRATEGIES.items()}[weights["strategy"]])
    return RTNConfig(bits=weights["num_bits"], sym=weights["symmetric"], checkpoint_format="compressed-tensors")


def quantization_config(config: Config) -> dict[str, Any]:
    """What `config.json` holds as `quantization_config`."""
    if isinstance(config, FP8Config):
        kind, weights, inputs = "float-quantized", *_float_arguments(config)
    else:
        kind, weights, inputs = "pack-quantized", _integer_arguments(config), None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    described: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
    if not weights["symmetric"]:
        described["dequantize"] = True
    return described


def block_problems(name: str, in_features: int, out_features: int) -> list[str]:
    """Sizes that are no whole number of 128 x 128 blocks, which every reader of block scales wants."""
    return [
        f"`{name}`: {what} {size} is not a multiple of {BLOCK}, the side of a block; use granularity `row` or `tensor`"
        for what, size in (("in_features", in_features), ("out_features", out_features))
        if size % BLOCK
    ]


def _tensors(name: str, rows: QuantizedRows | FP8Rows, config: Config) -> dict[str, Tensor]:
    if isinstance(config, FP8Config) and isinstance(rows, FP8Rows):
        return _float_tensors(name, rows, config)
    if not isinstance(config, FP8Config) and isinstance(rows, QuantizedRows):
        return _packed_tensors(name, rows, config)
    raise ValueError(f"`{name}`: {type(rows).__name__} are not what method `{config.method}` makes")


def _packed_tensors(name: str, rows: QuantizedRows, config: PackedConfig) -> dict[str, Tensor]:
    out_features, in_features = rows.codes_NK.shape
    found = problems(name, in_features, out_features, config)
    if found:
        raise ValueError("; ".join(found))
    if not torch.equal(rows.g_idx_K.cpu(), natural_order(in_features, rows.scales_NG.shape[1])):
        raise ValueError(f"`{name}`: columns of a group don't lie side by side, which this layout can't say")
    if not bool((rows.scales_NG > 0).all()):
        raise ValueError(
            f"`{name}`: a scale is zero, negative or NaN; nothing was packed: its source weights are damaged"
        )
    packed = {
        "weight_packed": pack_rows(rows.codes_NK.t(), config.bits).t(),
        "weight_scale": rows.scales_NG,
        "weight_shape": torch.tensor([out_features, in_features], dtype=torch.int64),
    }
    zeros_NG = rows.zeros_NG.long()
    middle = 2 ** (config.bits - 1)
    if config.sym and not bool((zeros_NG == middle).all()):
        raise ValueError(f"`{name}`: a symmetric file has no zero points, but one of them is not {middle}")
    if not config.sym:
        if int(zeros_NG.min()) < 0 or int(zeros_NG.max()) >= 2**config.bits:
            raise ValueError(
                f"`{name}`: zero points {int(zeros_NG.min())} .. {int(zeros_NG.max())} don't fit {config.bits} bits"
            )
        packed["weight_zero_point"] = pack_rows(zeros_NG, config.bits)
    return packed


def _float_tensors(name: str, rows: FP8Rows, config: FP8Config) -> dict[str, Tensor]:
    if rows.values_NK.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"`{name}`: readers of this layout take every float8 weight for e4m3, not {rows.values_NK.dtype}"
        )
    # A matrix's only scale has one dimension, but that of a matrix of one block, or one row, has two.
    scales = rows.scales_RC.flatten() if config.granularity == "tensor" else rows.scales_RC
    return {"weight": rows.values_NK, "weight_scale": scales}


def _word_problems(name: str, in_features: int, out_features: int, config: PackedConfig) -> list[str]:
    per_word = 32 // config.bits
    sizes = (
        [("in_features", in_features)] if config.sym else [("in_features", in_features), ("out_features", out_features)]
    )
    return [
        f"`{name}`: {what} {size} is not a multiple of {per_word}, the codes that fill an int32 word at {config.bits} bits"
        for what, size in sizes
        if size % per_word
    ]


def _integer_arguments(config: PackedConfig) -> dict[str, Any]:
    strategy = (
        {"strategy": "channel"} if config.group_size == -1 else {"strategy": "group", "group_size": config.group_size}
    )
    return {"num_bits": config.bits, "type": "int", "symmetric": config.sym, "dynamic": False, **strategy}


def _float_arguments(config: FP8Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """How weights are stored, and how readers round activations."""
    shared = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**shared, "dynamic": False, "strategy": STRATEGIES[config.granularity]}
    if config.granularity != "block":
        return weights, {**shared, "dynamic": True, "strategy": "token"}
    weights["block_structure"] = [BLOCK, BLOCK]
    return weights, {**shared, "dynamic": True, "strategy": "group", "group_size": BLOCK}
