"""Experts that a source's files hold stacked, one tensor for a projection of all of them, seen one by one.

`gpt_oss` keeps `experts.gate_up_proj` [E, K, N] and `experts.down_proj`, each with a bias [E, N]. Whatever reads the
source sees `experts.3.gate_proj.weight` [N, K], `experts.3.gate_proj.bias` [N] and so on, which are read out of the
stacks as they are asked for.

A stack of several projections is cut into as many runs of rows, whatever the rows mean: in `gate_up_proj` of gpt_oss
gates and ups alternate, so that either half has both. Its own activation wants them alternating and gets the halves put
together again. So GPTQModel 7.7.0 does it (`chunk` of the stack, then `cat` before `_apply_gate`), and under these names
it looks for the halves; rows are quantized independently of each other, and lose nothing by it.

MXFP4, as OpenAI publishes these models: `gate_up_proj_blocks` [E, N, G, 16], two values of four bits (E2M1) a byte, low
bits first, and `gate_up_proj_scales` [E, N, G], for each 32 values an exponent of two (E8M0). `value * 2 ** (scale - 127)`
in float32, rounded once to the model's dtype: what transformers computes when it is told to dequantize.

Shape suffixes: E experts, N out_features, K in_features, G groups of 32 values, B bytes and V values of a group.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from tasks.models.shard_header import TensorInfo

MXFP4 = "mxfp4"
BLOCK_BYTES = 16  # of 32 values
NAN_SCALE = 255
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EXPERTS_TENSOR = re.compile(r"(?P<experts>(?:.+\.)?experts)\.(?P<tensor>[^.]+)(?P<below>\..+)?")

ReadBytes = Callable[[TensorInfo], Tensor]


@dataclass(frozen=True)
class StackedLayout:
    """How the files of a family stack its experts."""

    # By the name of each stack the projections in it, in the order of their rows.
    projections: Mapping[str, tuple[str, ...]]
    is_transposed: bool  # [E, K, N], not [E, N, K]
    has_bias: bool


STACKED_FAMILIES = {
    "gpt_oss": StackedLayout({"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}, True, True),
}


@dataclass(frozen=True)
class Stack:
    """One projection, or several, of all experts, or their biases: as it lies in a file."""

    name: str  # as the model's own code calls it
    values: TensorInfo  # [E, N, K], [E, K, N], [E, N] or blocks [E, N, G, B]
    scales: TensorInfo | None  # [E, N, G]
    dtype: str  # as it is read
    is_transposed: bool  # as the model's own code holds it

    @property
    def rows(self) -> int:
        """N of all projections together."""
        return self.values.shape[2] if self.lies_transposed else self.values.shape[1]

    @property
    def lies_transposed(self) -> bool:
        """Whether the file has [E, K, N]."""
        return self.is_transposed and self.scales is None

    def whole(self, read: ReadBytes, dtype: torch.dtype) -> Tensor:
        """The stack as the model's own code holds it; widened ones in `dtype`."""
        values = read(self.values)
        if self.scales is None:
            return values
        scales_ENG = read(self.scales)
        widened_ENK = torch.stack([dequantize(*expert, dtype) for expert in zip(values, scales_ENG, strict=True)])
        return widened_ENK.transpose(1, 2).contiguous() if self.is_transposed else widened_ENK


@dataclass(frozen=True)
class ExpertPart:
    """One expert's weight [N, K] or bias [N] of one projection: rows `start` to `stop` of its part of a stack."""

    stack: Stack
    number: int
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        values, rows = self.stack.values, self.stop - self.start
        if self.stack.scales is not None:
            return rows, values.shape[2] * BLOCK_BYTES * 2
        return (rows, *(values.shape[1:2] if self.stack.lies_transposed else values.shape[2:]))

    @property
    def stored_bytes(self) -> int:
        """Bytes in the file, with its scales where it has some."""
        parts = [self.stack.values] + ([self.stack.scales] if self.stack.scales is not None else [])
        whole = sum(info.size_bytes for info in parts)
        return whole // self.stack.values.shape[0] * (self.stop - self.start) // self.stack.rows

    def read(self, read: ReadBytes, dtype: torch.dtype) -> Tensor:
        """The tensor, contiguous; a widened one in `dtype`, others in the file's."""
        if self.stack.scales is not None:
            return dequantize(read(self._rows_of(self.stack.values)), read(self.scales), dtype)
        if self.stack.lies_transposed:
            expert_KN = read(_within(self.stack.values, self.number, 0, self.stack.values.shape[1]))
            return expert_KN[:, self.start : self.stop].T.contiguous()
        return read(self._rows_of(self.stack.values))

    @property
    def scales(self) -> TensorInfo:
        """Where its scales lie; only a widened one has some."""
        assert self.stack.scales is not None
        return self._rows_of(self.stack.scales)

    def _rows_of(self, stack: TensorInfo) -> TensorInfo:
        return _within(stack, self.number, self.start, self.stop)


def layout_of(config: Mapping[str, Any]) -> StackedLayout | None:
    """How the family of a config.json stacks its experts; None where its files hold them one by one, or it has none."""
    family = config.get("model_type")
    return STACKED_FAMILIES.get(family) if isinstance(family, str) else None


def is_mxfp4(described: Any) -> bool:
    """Whether a `quantization_config` says that stacks are MXFP4."""
    return isinstance(described, Mapping) and described.get("quant_method") == MXFP4


def seen_one_by_one(
    tensors: Mapping[str, TensorInfo], layout: StackedLayout, widened: str | None, problems: list[str]
) -> tuple[dict[str, TensorInfo], dict[str, ExpertPart]]:
    """The tensors that a reader sees, with each expert's own in the place of stacks; and where these lie.

    `widened` is the dtype that MXFP4 stacks are seen in, None where config.json does not say that there are any.
    `problems` gets a sentence for each stack that is missing beside others, or of another dtype or shape than it must be,
    and for experts one by one: programs differ in what they call so.
    """
    seen, parts = dict(tensors), {}
    groups: dict[str, None] = {}
    for name in tensors:
        match = EXPERTS_TENSOR.fullmatch(name)
        if match is None:
            continue
        if match["tensor"].isdigit():
            problems.append(
                f"`{name}` is of one expert: this family's files hold `{match['experts']}` in one tensor for each of "
                f"{_listed(layout.projections)}, and what other programs mean by the parts differs; name the original model"
            )
            return seen, {}
        groups[match["experts"]] = None
    for experts in groups:
        counts = set()
        for name, projections in layout.projections.items():
            weight = _weights(f"{experts}.{name}", layout, tensors, seen, widened, problems)
            stacks = [("weight", weight)]
            if layout.has_bias and weight is not None:
                stacks.append(("bias", _biases(weight, tensors, seen, problems)))
            for kind, stack in stacks:
                if stack is None:
                    continue
                counts.add(stack.values.shape[0])
                if stack.rows % len(projections):
                    problems.append(f"`{stack.name}` has {stack.rows} rows, which {_listed(projections)} can't share")
                    continue
                rows = stack.rows // len(projections)
                for number in range(stack.values.shape[0]):
                    for place, projection in enumerate(projections):
                        part = ExpertPart(stack, number, place * rows, (place + 1) * rows)
                        parts[f"{experts}.{number}.{projection}.{kind}"] = part
        if len(counts) > 1:
            problems.append(f"the tensors of `{experts}` are of {' and '.join(map(str, sorted(counts)))} experts")
    for name, part in parts.items():
        seen[name] = replace(part.stack.values, dtype=part.stack.dtype, shape=part.shape)
    return seen, parts


def stacked(tensors: Mapping[str, Tensor], layout: StackedLayout) -> dict[str, Tensor]:
    """The tensors with experts one by one stacked, as the model's own code holds them; what else there is, as it is."""
    others, found = {}, {}
    for name, tensor in tensors.items():
        match = EXPERTS_TENSOR.fullmatch(name)
        if match is not None and match["tensor"].isdigit():
            found[name] = tensor
        else:
            others[name] = tensor
    groups = dict.fromkeys(name.rpartition(".experts.")[0] + ".experts" for name in found)
    for experts in groups:
        count = 1 + max(int(name.split(".")[0]) for name in _below(found, experts))
        for name, projections in layout.projections.items():
            for kind, suffix in (("weight", ""), ("bias", "_bias")):
                names = [[f"{experts}.{number}.{part}.{kind}" for part in projections] for number in range(count)]
                if all(part in found for parts in names for part in parts):
                    stack = torch.stack([torch.cat([found.pop(part) for part in parts]) for parts in names])
                    is_turned = layout.is_transposed and kind == "weight"
                    others[f"{experts}.{name}{suffix}"] = stack.transpose(1, 2).contiguous() if is_turned else stack
    return others | found


def dequantize(blocks_NGB: Tensor, scales_NG: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, K] in `dtype`: MXFP4 blocks times two to the power of their scales, in float32, rounded once."""
    values = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)])
    byte = torch.arange(256)
    # A lookup of both values of a byte at once: a third of the time of two. Doubled, so that the largest power is finite.
    pairs = 2 * torch.stack([values[byte & 15], values[byte >> 4]], dim=-1)
    widened_NGV = torch.nn.functional.embedding(blocks_NGB.int(), pairs).flatten(2)
    widened_NGV *= torch.pow(2.0, scales_NG.to(torch.int32)[..., None] - 128)
    return widened_NGV.to(dtype).flatten(1)


def _weights(
    name: str,
    layout: StackedLayout,
    tensors: Mapping[str, TensorInfo],
    seen: dict[str, TensorInfo],
    widened: str | None,
    problems: list[str],
) -> Stack | None:
    """The stack of this name, whose tensors `seen` loses; None where it is not as it must be."""
    blocks, scales = f"{name}_blocks", f"{name}_scales"
    if name in tensors:
        if len(tensors[name].shape) != 3 or not prod(tensors[name].shape):
            problems.append(
                f"`{name}` has the shape {list(tensors[name].shape)}; experts are stacked in three dimensions"
            )
            return None
        return Stack(name, seen.pop(name), None, tensors[name].dtype, layout.is_transposed)
    if blocks not in tensors and scales not in tensors:
        problems.append(f"`{name}` is missing")
        return None
    if widened is None:
        problems.append(
            f"`{blocks if blocks in tensors else scales}` is MXFP4, which config.json does not tell: its "
            f"`quantization_config` must have the quant_method `{MXFP4}`"
        )
        return None
    if absent := [each for each in (blocks, scales) if each not in tensors]:
        problems.append(f"`{absent[0]}` is missing, without which the other of the two means nothing: fetch it again")
        return None
    values, exponents = tensors[blocks], tensors[scales]
    if values.dtype != "U8" or len(values.shape) != 4 or values.shape[3] != BLOCK_BYTES or not prod(values.shape):
        problems.append(
            f"`{blocks}` is {values.dtype} of shape {list(values.shape)}; MXFP4 is U8 of shape [E, N, G, 16]"
        )
        return None
    if exponents.dtype != "U8" or exponents.shape != values.shape[:3]:
        problems.append(
            f"`{scales}` is {exponents.dtype} of shape {list(exponents.shape)}; for `{blocks}` of shape "
            f"{list(values.shape)} it is U8 of shape {list(values.shape[:3])}"
        )
        return None
    return Stack(name, seen.pop(blocks), seen.pop(scales), widened, layout.is_transposed)


def _biases(
    weight: Stack, tensors: Mapping[str, TensorInfo], seen: dict[str, TensorInfo], problems: list[str]
) -> Stack | None:
    name, expected = f"{weight.name}_bias", (weight.values.shape[0], weight.rows)
    if name not in tensors:
        problems.append(f"`{name}` is missing")
        return None
    if tensors[name].shape != expected:
        problems.append(f"`{name}` has the shape {list(tensors[name].shape)}; for its weights it is {list(expected)}")
        return None
    return Stack(name, seen.pop(name), None, tensors[name].dtype, is_transposed=False)


def _within(stack: TensorInfo, number: int, start: int, stop: int) -> TensorInfo:
    """Where rows `start` to `stop` of one expert lie."""
    count, rows = stack.shape[:2]
    row_bytes = (stack.stop - stack.start) // (count * rows)
    first = stack.start + (number * rows + start) * row_bytes
    return replace(stack, shape=(stop - start, *stack.shape[2:]), start=first, stop=first + (stop - start) * row_bytes)


def _below(names: Mapping[str, Any], prefix: str) -> list[str]:
    return [name.removeprefix(f"{prefix}.") for name in names if name.startswith(f"{prefix}.")]


def _listed(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)
