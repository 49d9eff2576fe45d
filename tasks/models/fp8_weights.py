"""FP8 weights of a source, widened as they are read: each is a float8 matrix and scales that multiply it.

Two layouts are known, by the `quantization_config` of config.json. `fp8` is that of DeepSeek-V3, of Qwen3-FP8 and of
transformers' FineGrainedFP8Config: `name.weight` with `name.weight_scale_inv`, one scale per block of 128 x 128 or
whatever `weight_block_size` says; without blocks, one per row or one in all. `compressed-tensors` is what vLLM's
quantizer writes: `name.weight` with `name.weight_scale`, per block, row or matrix.

`weight = value * scale`, in float32, then rounded once to the model's dtype: what transformers computes when it is told
to dequantize, and compressed-tensors when it decompresses. Blocks at an edge are cut off by it. transformers derives a
block's size from the shapes instead and refuses most such matrices; DeepSeek's own code, and vLLM, read them as here.

Scales of activations belong to a kernel that multiplies in FP8: they change no weight and are passed over.

Shape suffixes: N out_features, K in_features, R and C rows and columns of scales.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor

from tasks.models.shard_header import TensorInfo

VALUE_DTYPES = ("F8_E4M3", "F8_E5M2")
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
PLAIN = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
DEFAULT_BLOCK = (128, 128)
ACTIVATION_SCALES = (".activation_scale", ".input_scale", ".output_scale")
CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale")
FORMATS = frozenset({"float-quantized", "naive-quantized"})
PIECE_WEIGHTS = 1 << 22  # multiplied at once
# Both are keys under which a config.json describes how its weights are quantized.
DESCRIPTIONS = ("quantization_config", "compression_config")


@dataclass(frozen=True)
class FP8Layout:
    """How a source's FP8 weights are scaled: by tensors with this suffix, in blocks of N x K where it has a block."""

    method: str
    suffix: str
    block: tuple[int, int] | None
    has_rows: bool  # one scale per row, or one in all, is meant where a shape says so

    def scale_of(self, weight: str) -> str:
        """The name of the scales of the weight of this name."""
        return weight.removesuffix(".weight") + self.suffix

    def is_scale(self, name: str) -> bool:
        """Whether a tensor holds scales of weights, activations or a cache, which no model of plain weights has."""
        return name.endswith((self.suffix, *ACTIVATION_SCALES, *CACHE_SCALES))

    def block_of(self, weight: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int] | None:
        """The block of weights that shares a scale, by both shapes; None for scales that don't fit the matrix."""
        rows, columns = weight
        fitting = []
        if self.block is not None:
            fitting.append((self.block, (-(-rows // self.block[0]), -(-columns // self.block[1]))))
        if self.has_rows:
            fitting += [((rows, columns), (1, 1)), ((1, columns), (rows, 1))]
        for block, grid in fitting:
            if scales == grid or (scales == () and grid == (1, 1)) or (scales == grid[:1] and block[1] == columns):
                return block
        return None

    def fitting(self, weight: tuple[int, ...]) -> str:
        """The shapes that scales of a matrix may have, in words."""
        rows, columns = weight
        grids = [[-(-rows // self.block[0]), -(-columns // self.block[1])]] if self.block is not None else []
        return " or ".join(map(str, grids + [[rows, 1], [1]] * self.has_rows))


@dataclass(frozen=True)
class ScaledWeight:
    """Where one FP8 weight and its scales lie, and the block of weights [N, K] that shares a scale."""

    values: TensorInfo
    scales: TensorInfo
    block: tuple[int, int]

    @property
    def size_bytes(self) -> int:
        """Bytes of both in the source's files."""
        return self.values.size_bytes + self.scales.size_bytes


def described(config: Mapping[str, Any]) -> Any:
    """What a config.json says of how its weights are quantized, which may be anything; None where it says nothing."""
    return next((config[key] for key in DESCRIPTIONS if config.get(key) is not None), None)


def layout_of(described: Any) -> FP8Layout | None:
    """The layout that a `quantization_config` describes; None where it is none of those that can be read."""
    if not isinstance(described, Mapping):
        return None
    if described.get("quant_method") == "fp8" and described.get("expert_dtype", "fp8") == "fp8":
        block = described.get("weight_block_size", DEFAULT_BLOCK)
        if block is None:
            return FP8Layout("fp8", ".weight_scale_inv", None, has_rows=True)
        if _is_block(block):
            return FP8Layout("fp8", ".weight_scale_inv", (block[0], block[1]), has_rows=False)
    if described.get("quant_method") == "compressed-tensors":
        return _compressed(described)
    return None


def _compressed(described: Mapping[str, Any]) -> FP8Layout | None:
    """Of compressed-tensors what holds eight-bit floats, symmetric, scaled by matrix, row or block."""
    groups, sparsity = described.get("config_groups"), described.get("sparsity_config") or {}
    if not isinstance(groups, Mapping) or not groups or sparsity.get("format", "dense") != "dense":
        return None
    blocks: set[tuple[int, int]] = set()
    has_rows = False
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping) or (group.get("format") or described.get("format")) not in FORMATS:
            return None
        if (weights.get("type"), weights.get("num_bits")) != ("float", 8) or not weights.get("symmetric", True):
            return None
        block = weights.get("block_structure")
        if weights.get("strategy") == "block" and _is_block(block):
            blocks.add((block[0], block[1]))
        elif weights.get("strategy") in ("tensor", "channel"):
            has_rows = True
        else:
            return None
    if len(blocks) > 1:
        return None
    return FP8Layout("compressed-tensors", ".weight_scale", next(iter(blocks), None), has_rows)


def _is_block(block: Any) -> TypeGuard[Sequence[int]]:
    return isinstance(block, list | tuple) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)


def widened_dtype(config: Mapping[str, Any]) -> str:
    """The dtype that weights are widened to, as safetensors spells it: the config's, or bfloat16 where it names none."""
    return PLAIN.get(str(config.get("dtype") or config.get("torch_dtype")), "BF16")


def without_description(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the model that a reader sees: of its widened weights."""
    plain = {key: value for key, value in config.items() if key not in DESCRIPTIONS}
    dtype = next(name for name, spelled in PLAIN.items() if spelled == widened_dtype(config))
    return plain | dict.fromkeys([key for key in ("dtype", "torch_dtype") if key in plain] or ["dtype"], dtype)


def widened(
    tensors: Mapping[str, TensorInfo], layout: FP8Layout, dtype: str, problems: list[str]
) -> tuple[dict[str, TensorInfo], dict[str, ScaledWeight]]:
    """The tensors that a reader sees, FP8 weights as `dtype` and without scales; and where these weights lie.

    `problems` gets a sentence for each weight or scale without the other, and each scale of another dtype or shape.
    """
    seen = {name: info for name, info in tensors.items() if not layout.is_scale(name)}
    scaled: dict[str, ScaledWeight] = {}
    for name, info in seen.items():
        if info.dtype not in VALUE_DTYPES or not name.endswith(".weight"):
            continue
        seen[name] = replace(info, dtype=dtype)
        scale = layout.scale_of(name)
        if scale not in tensors:
            problems.append(
                f"`{name}` is {info.dtype} and `{scale}` is missing, without which it means nothing: fetch all files of "
                f"the model again"
            )
        elif (block := _block(name, info, scale, tensors[scale], layout, problems)) is not None:
            scaled[name] = ScaledWeight(info, tensors[scale], block)
    for scale in tensors:
        weight = scale.removesuffix(layout.suffix) + ".weight"
        if scale.endswith(layout.suffix) and (weight not in tensors or tensors[weight].dtype not in VALUE_DTYPES):
            what = f"is {tensors[weight].dtype}" if weight in tensors else "is missing"
            problems.append(f"`{scale}` scales an FP8 weight, but `{weight}` {what}")
    return seen, scaled


def _block(
    name: str, values: TensorInfo, scale: str, scales: TensorInfo, layout: FP8Layout, problems: list[str]
) -> tuple[int, int] | None:
    if scales.dtype not in SCALE_DTYPES:
        problems.append(f"`{scale}` is {scales.dtype}; scales are {', '.join(SCALE_DTYPES)}")
    if len(values.shape) != 2:
        problems.append(f"`{name}` is {values.dtype} of shape {list(values.shape)}; FP8 weights are matrices")
        return None
    block = layout.block_of(values.shape, scales.shape)
    if block is None:
        problems.append(
            f"`{scale}` has the shape {list(scales.shape)}; for `{name}` of shape {list(values.shape)} config.json makes "
            f"it {layout.fitting(values.shape)}"
        )
    return block


def dequantize(values_NK: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """[N, K] in `dtype`, on the CPU: the product in float32, rounded once. A few rows of a matrix are scaled alike.

    `scales` of one dimension or none are one per row, or one in all.
    """
    rows, columns = values_NK.shape
    scales_RC = scales.float().reshape(len(scales) if scales.dim() else 1, -1)
    widened_NK = torch.empty(rows, columns, dtype=dtype)
    for start, stop in _pieces(rows, columns):
        row_blocks = torch.arange(start, stop) // block[0]
        # A column of scales at a time would be a product per block; a row of a piece takes its scales spread out.
        spread = scales_RC[row_blocks].repeat_interleave(min(block[1], columns), dim=1)[:, :columns]
        widened_NK[start:stop] = values_NK[start:stop].float().mul_(spread).to(dtype)
    return widened_NK


def _pieces(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    step = max(1, PIECE_WEIGHTS // max(1, columns))
    return ((start, min(rows, start + step)) for start in range(0, rows, step))
