"""The fine-grained fp8 layout (`quant_method: fp8`): what transformers and vLLM load without another package.

Per linear module `name` with weight [N, K]:

    name.weight            float8 [N, K]
    name.weight_scale_inv  float32 [N/128, K/128]   multiplies the weight, whatever its name says
    name.bias              as in the source         only if the source module has one

e4m3 comes in blocks of 128 x 128, and GPUs compute with it. Sizes must be multiples of 128: transformers derives the
block from the shapes, so that 192 rows with two rows of scales would be read as blocks of 96, without an error.

e5m2 has no kernel anywhere: on a GPU transformers would cast its bytes to e4m3 and compute garbage. So its config says
`dequantize`, and transformers widens the weights as it loads them, on every device. As only shapes count then, its
scales may also be one per row [N, 1] or one per matrix (a scalar). vLLM must not be given e5m2: it knows no such switch.

Shape suffixes: N out_features, K in_features, R and C rows and columns of scales.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from tasks.formats.compressed_tensors import block_problems, scales_bytes
from tasks.methods.fp8 import BLOCK, DTYPES, FP8Rows
from tasks.quantization import FP8Config


def pack(name: str, rows: FP8Rows, config: FP8Config, bias: Tensor | None) -> dict[str, Tensor]:
    """The tensors of one module under their final names, contiguous on the CPU.

    ValueError, naming the module, for what the layout can't hold and for values that are not finite.
    """
    out_features, in_features = rows.values_NK.shape
    found = problems(name, in_features, out_features, config)
    if found:
        raise ValueError("; ".join(found))
    if rows.values_NK.dtype != DTYPES[config.fp8_format]:
        raise ValueError(f"`{name}`: its values are {rows.values_NK.dtype}, but the config says {config.fp8_format}")
    scales = rows.scales_RC
    packed = {
        "weight": rows.values_NK,
        "weight_scale_inv": scales.squeeze() if config.granularity == "tensor" else scales,
    }
    if bias is not None:
        packed["bias"] = bias
    for part, tensor in packed.items():
        if not bool(tensor.float().isfinite().all()):
            raise ValueError(
                f"`{name}.{part}` holds a NaN or an infinity; nothing was packed: its source weights are damaged or out "
                f"of range"
            )
    return {f"{name}.{part}": tensor.detach().cpu().contiguous() for part, tensor in packed.items()}


def unpack(tensors: Mapping[str, Tensor], name: str, config: FP8Config) -> FP8Rows:
    """The inverse of `pack`, for any program's file; losses are zero, they are not in it."""
    values_NK, scales = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"].float()
    scales_RC = scales.reshape(1, 1) if scales.numel() == 1 else scales
    return FP8Rows(values_NK, scales_RC, torch.zeros(len(values_NK), dtype=torch.float64))


def problems(name: str, in_features: int, out_features: int, config: FP8Config) -> list[str]:
    """Why this layout can't hold module `name`, one sentence each with what would fit; empty when it can."""
    return block_problems(name, in_features, out_features) if config.granularity == "block" else []


def packed_bytes(in_features: int, out_features: int, config: FP8Config, bias_bytes: int) -> int:
    """Bytes of the tensors that `pack` makes of one module which this layout can hold; its bias in the source, if any."""
    return in_features * out_features + scales_bytes(in_features, out_features, config) + bias_bytes


def parts(config: FP8Config) -> tuple[str, ...]:
    """Names of a packed module's tensors, without a bias; the first one marks a module as packed."""
    return ("weight_scale_inv", "weight")


def config_of(described: Mapping[str, Any]) -> FP8Config:
    """As much of the config as `unpack` needs, from a file's `quantization_config`."""
    granularity: Literal["row", "block"] = "block" if described["weight_block_size"] else "row"
    return FP8Config(fp8_format=described["fmt"], granularity=granularity, checkpoint_format="fp8")


def quantization_config(config: FP8Config) -> dict[str, Any]:
    """What `config.json` holds as `quantization_config`."""
    described: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": config.fp8_format,
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK] if config.granularity == "block" else None,
        "modules_to_not_convert": ["lm_head"],
    }
    if config.fp8_format == "e5m2":
        described["dequantize"] = True
    return described
