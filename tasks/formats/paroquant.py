"""The paroquant layout: what the authors' loader for transformers and vLLM, and GPTQModel, load.

Per linear module `name` with weight [N, K], group count G:

    name.qweight, name.qzeros, name.scales    as in layout awq, version gemm, of the turned weights
    name.pairs           int16 [8, K]         channels within their group, two by two
    name.theta           float16 [8, K / 2]   the angle of each pair, in radians
    name.channel_scales  float16 [1, K]       what the inputs are multiplied by before they are turned
    name.bias            float16 [N]          only if the source module has one

A reader multiplies the inputs by `channel_scales`, then by each row's rotations in turn: of a pair (i, j) with angle t,
x_i becomes x_i cos t + x_j sin t and x_j becomes x_j cos t - x_i sin t. `method` and `checkpoint_format` are what GPTQModel
asks for; the authors' loader knows a quantized module by its `qweight`.

Shape suffixes: N out_features, K in_features, G groups, R rotations, P pairs.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tasks.formats import awq
from tasks.formats.gptq import DESCRIPTION_FILE as DESCRIPTION_FILE
from tasks.formats.gptq import own_version
from tasks.methods.paroquant import ROTATIONS, ParoRows, Rotation
from tasks.quantization import ParoQuantConfig, RTNConfig

ROTATION_PARTS = ("pairs", "theta", "channel_scales")


def pack(name: str, rows: ParoRows, config: ParoQuantConfig, bias: Tensor | None) -> dict[str, Tensor]:
    """The tensors of one module under their final names, contiguous on the CPU.

    ValueError, naming the module, for what the layout can't hold; see `tasks.formats.awq`. NaN or infinite angles and
    channel scales too.
    """
    rotation = rows.rotation
    for part in (rotation.theta_RP, rotation.channel_scales_K):
        if not bool(part.isfinite().all()):
            raise ValueError(f"`{name}`: an angle or a channel scale is NaN or infinite; nothing was packed")
    return {
        **awq.pack(name, rows.turned, _as_awq(config), bias),
        f"{name}.pairs": rotation.pairs_RK.to(torch.int16).contiguous().cpu(),
        f"{name}.theta": rotation.theta_RP.half().contiguous().cpu(),
        f"{name}.channel_scales": rotation.channel_scales_K.half()[None].contiguous().cpu(),
    }


def unpack(tensors: Mapping[str, Tensor], name: str, config: ParoQuantConfig) -> ParoRows:
    """The inverse of `pack`, for any program's file; losses are zero, they are not in it."""
    pairs_RK, theta_RP, channel_scales_1K = (tensors[f"{name}.{part}"] for part in ROTATION_PARTS)
    rotation = Rotation(pairs_RK, theta_RP, channel_scales_1K[0], config.group_size)
    return ParoRows(awq.unpack(tensors, name, _as_awq(config)), rotation)


def problems(name: str, in_features: int, out_features: int, config: ParoQuantConfig) -> list[str]:
    """Why this layout can't hold module `name`, one sentence each with what would fit; empty when it can."""
    found = []
    if in_features % config.group_size:
        fitting = " 64 would fit" if in_features % 64 == 0 else " no size that readers take would fit"
        found.append(
            f"`{name}`: in_features {in_features} is not a multiple of group_size {config.group_size};{fitting}"
        )
    if out_features % awq.PER_WORD:
        found.append(
            f"`{name}`: out_features {out_features} is not a multiple of {awq.PER_WORD}, the codes that fill an int32 word"
        )
    return found


def packed_bytes(in_features: int, out_features: int, config: ParoQuantConfig, bias_bytes: int) -> int:
    """Bytes of the tensors that `pack` makes of one module which this layout can hold; its bias in the source, if any."""
    packed = awq.packed_bytes(in_features, out_features, _as_awq(config), bias_bytes)
    return packed + in_features * (2 * ROTATIONS + ROTATIONS + 2)


def parts(config: ParoQuantConfig) -> tuple[str, ...]:
    """Names of a packed module's tensors, without a bias; the first one marks a module as packed."""
    return ("qweight", "qzeros", "scales", *ROTATION_PARTS)


def config_of(described: Mapping[str, Any]) -> ParoQuantConfig:
    """As much of the config as `unpack` needs, from a file's `quantization_config`."""
    return ParoQuantConfig(group_size=described["group_size"])


def quantization_config(config: ParoQuantConfig) -> dict[str, Any]:
    """What `config.json` holds as `quantization_config` and `quantize_config.json` holds as a whole."""
    learnt = config.model_dump(mode="json", exclude={"method", "bits", "group_size"})
    return {
        "bits": config.bits,
        "group_size": config.group_size,
        "krot": ROTATIONS,
        "desc_act": False,
        "sym": True,  # the only word that GPTQModel takes; zero points are read from the file all the same
        "lm_head": False,
        "quant_method": "paroquant",
        "method": "paroquant",
        "checkpoint_format": "paroquant",
        "format": "paroquant",
        "pack_dtype": "int32",
        "meta": {"quantizer": [f"prefect-quantize:{own_version()}"], **learnt},
    }


def _as_awq(config: ParoQuantConfig) -> RTNConfig:
    return RTNConfig(bits=4, group_size=config.group_size, sym=False, checkpoint_format="awq")
