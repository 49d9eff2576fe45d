"""Which GGML type each tensor of a model gets: intended by the chosen mix, and actual where rows do not fill its blocks.

The mixes are llama.cpp's, so that a `q4_k_m` of ours is what its users know by that name: most tensors get the base
type; `attn_v` and `ffn_down` of some layers (the first and the last eighth, and every third between), the output head,
and the embeddings where they are the head, get more bits. K-quants need rows of a multiple of 256. Where a row is none,
llama.cpp takes the next larger type with blocks of 32, and half precision where those do not fit either; so do we, and
the plan says so beforehand. One-dimensional tensors and routers stay float32.

A file holds a projection of all experts of a layer as one tensor [E, N, K]. It is planned and encoded an expert at a time:
the file has the parts one after the other.

No tensor is needed: a plan is made from `config.json`, shapes, and the `gguf` package's table of names.

Shape suffixes: E experts, N out_features, K in_features.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import prod
from typing import Any

from tasks.formats.gguf_families import Family, experts_of, family_of, head_size, rope_parameters
from tasks.methods.ggml_blocks import BLOCK_TYPES
from tasks.module_rules import first, without_effect
from tasks.quantization import GGUFConfig

# quant_type: (type of most tensors, the number that files have for the mix)
MIXES = {
    "q4_0": ("q4_0", 2),
    "q8_0": ("q8_0", 7),
    "q5_0": ("q5_0", 8),
    "q2_k": ("q2_k", 10),
    "q3_k_s": ("q3_k", 11),
    "q3_k_m": ("q3_k", 12),
    "q3_k_l": ("q3_k", 13),
    "q4_k_s": ("q4_k", 14),
    "q4_k_m": ("q4_k", 15),
    "q5_k_s": ("q5_k", 16),
    "q5_k_m": ("q5_k", 17),
    "q6_k": ("q6_k", 18),
}
FALLBACKS = {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
FLOAT_BYTES = {"f16": 2, "f32": 4}

ROPE_FACTORS = "rope_freqs.weight"
LAYERS_OF_70B = 80

ROUTER = "ffn_gate_inp"
# Layers' matrices get more bits where there are so many experts: few of the model's bytes are theirs.
EXPERTS_OF_8X7B = 8

_LAYER = re.compile(r"blk\.(\d+)\.")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)(\..+)")


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of the file. `source` is its name in the source model; None for one that is computed.

    `heads` above 0 means that rows are rearranged within so many heads, see `gguf.arrange`. `layer` is None outside
    the layers. `offset` is added to the source's values, see `Family.norm_offset`. Of an expert `stack` is the name of the
    file's tensor that it is a part of, and `expert` its number there.
    """

    source: str | None
    name: str
    layer: int | None
    shape: tuple[int, ...]
    intended: str
    actual: str
    heads: int = 0
    offset: float = 0.0
    stack: str | None = None
    expert: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes in the file, without alignment."""
        *rows, in_features = self.shape
        row_bytes = (
            FLOAT_BYTES[self.actual] * in_features
            if self.actual in FLOAT_BYTES
            else BLOCK_TYPES[self.actual].row_bytes(in_features)
        )
        return row_bytes * prod(rows)

    @property
    def is_fallback(self) -> bool:
        """Whether rows do not fill the blocks of the intended type."""
        return self.actual != self.intended


@dataclass(frozen=True)
class GGUFPlan:
    """All tensors of the file in its order, experts one by one: embeddings first, then the layers, then norm and head."""

    quant_type: str
    file_type: int
    tensors: tuple[TensorPlan, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors, without metadata and alignment."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    @cached_property
    def stored(self) -> tuple[tuple[TensorPlan, tuple[TensorPlan, ...]], ...]:
        """Each tensor as the file has it, with its parts: all experts of a projection, or itself."""
        whole = []
        for stack, group in groupby(self.tensors, key=lambda tensor: tensor.stack or tensor.name):
            parts = tuple(group)
            first = parts[0]
            shape = first.shape if first.stack is None else (len(parts), *first.shape)
            whole.append((replace(first, name=stack, shape=shape), parts))
        return tuple(whole)

    @property
    def fallbacks(self) -> tuple[TensorPlan, ...]:
        """The file's tensors that do not get their intended type."""
        return tuple(tensor for tensor, _ in self.stored if tensor.is_fallback)

    def table(self) -> str:
        """The dry run as text: one line per tensor, intended and actual type and bytes, totals last."""
        rows = [("tensor", "shape", "intended", "actual", "bytes")]
        for tensor, _ in self.stored:
            shape = "x".join(map(str, tensor.shape))
            rows.append((tensor.name, shape, tensor.intended, tensor.actual, f"{tensor.size_bytes:,}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        note = f"{len(self.fallbacks)} of them in a larger type than intended" if self.fallbacks else "all as intended"
        return "\n".join([*lines, f"{len(self.stored)} tensors, {self.size_bytes:,} bytes; {note}"])


def make_plan(config: GGUFConfig, model_config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> GGUFPlan:
    """The plan for a model with this `config.json` and these tensors (a tied head left out).

    A rule of `config.dynamic` decides about the type of a matrix before the mix does. ValueError with every problem:
    tensors that the format has no name for, rules that match none and, where `config.strict`, rows that do not fill the
    intended blocks.
    """
    family = family_of(model_config)
    names = _names(family, model_config["num_hidden_layers"], shapes)
    unknown = [name for name in shapes if name not in names]
    if unknown:
        raise ValueError(
            f"{len(unknown)} tensors have no name in a {family.architecture} .gguf file: {', '.join(unknown[:10])}; "
            f"readers of the file would not find them, so this model can't be exported as gguf"
        )
    is_tied = "lm_head.weight" not in shapes
    matrices = {
        source: source.removesuffix(".weight")
        for source, shape in shapes.items()
        if len(shape) == 2 and ROUTER not in names[source]
    }
    if problems := list(without_effect(config.dynamic, matrices.values(), "matrix")):
        raise ValueError("; ".join(problems))
    tensors = []
    for source, shape in shapes.items():
        name = names[source]
        layer = int(match[1]) if (match := _LAYER.match(name)) else None
        intended = _intended(config, name, layer, shape, model_config, is_tied)
        rule = first(config.dynamic, matrices[source]) if source in matrices else None
        if rule is not None and rule.type is not None:
            intended = rule.type
        heads = _heads(name, model_config) if family.rearranges_heads else 0
        offset = family.norm_offset if name.endswith("norm.weight") else 0.0
        actual = _actual(intended, shape)
        stack, expert = None, 0
        if match := _EXPERT.fullmatch(source):
            stack, expert = name, int(match[2])
            name = f"{name.removesuffix('.weight')}.{expert}.weight"
        tensors.append(TensorPlan(source, name, layer, tuple(shape), intended, actual, heads, offset, stack, expert))
    if rope_parameters(model_config).get("rope_type") == "llama3":
        shape = (head_size(model_config) // 2,)
        tensors.append(TensorPlan(None, ROPE_FACTORS, None, shape, "f32", "f32"))
    tensors.sort(key=_file_order)
    plan = GGUFPlan(config.quant_type, MIXES[config.quant_type][1], tuple(tensors))
    for whole, parts in plan.stored:
        if types := sorted({part.intended for part in parts} - {whole.intended}):
            raise ValueError(
                f"rules give `{parts[0].source}` and other experts of that layer the types {whole.intended} and "
                f"{', '.join(types)}; a .gguf file has all of them in one tensor of one type, `{whole.name}`"
            )
    if config.strict and plan.fallbacks:
        raise ValueError("; ".join(_strict_problem(tensor) for tensor in plan.fallbacks))
    return plan


def _names(family: Family, layers: int, sources: Iterable[str]) -> dict[str, str]:
    """The file's names by the source's, of the tensors that have one."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    (architecture,) = (arch for arch, name in MODEL_ARCH_NAMES.items() if name == family.architecture)
    table = get_tensor_name_map(architecture, layers)
    # Its names are those of all experts together.
    found = {source: table.get_name(_EXPERT.sub(r"\1\3", source), (".weight", ".bias")) for source in sources}
    return {
        source: name
        for source, name in found.items()
        if name is not None and (name.endswith(".weight") or name.split(".")[-2] in family.biases)
    }


def _heads(name: str, model_config: Mapping[str, Any]) -> int:
    heads: int = model_config["num_attention_heads"]
    if ".attn_q." in name:
        return heads
    return (model_config.get("num_key_value_heads") or heads) if ".attn_k." in name else 0


def _intended(
    config: GGUFConfig,
    name: str,
    layer: int | None,
    shape: tuple[int, ...],
    model_config: Mapping[str, Any],
    is_tied: bool,
) -> str:
    """llama.cpp's choice: by what the tensor does, which layer it is in, and the mix."""
    if len(shape) < 2 or ROUTER in name:
        return "f32"
    mix, base = config.quant_type, MIXES[config.quant_type][0]
    if layer is None:
        is_head = name == "output.weight" or is_tied
        return "q6_k" if is_head and base != "q8_0" else base
    layers: int = model_config["num_hidden_layers"]
    heads: int = model_config["num_attention_heads"]
    group = heads // (model_config.get("num_key_value_heads") or heads)
    has_more_bits = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    has_eight_experts = experts_of(model_config) == EXPERTS_OF_8X7B
    raised: str | None = None
    if has_eight_experts and (".attn_v." in name or ".attn_k." in name):
        raised = "q8_0"
    elif ".attn_v." in name:
        raised = {
            "q2_k": "q4_k" if group >= 4 else "q3_k",
            "q3_k_m": "q5_k" if layer < 2 else "q4_k",
            "q3_k_l": "q5_k",
            "q4_k_s": "q5_k" if layer < 4 else None,
            "q4_k_m": "q6_k" if has_more_bits else None,
            "q5_k_m": "q6_k" if has_more_bits else None,
        }.get(mix)
        if layers == LAYERS_OF_70B and (raised or base) in ("q3_k", "q4_k"):
            raised = "q5_k"  # eight heads share it there: small, and worth its bits
    elif ".ffn_down" in name:
        is_early = layer < layers // 8
        raised = {
            "q2_k": "q3_k",
            "q3_k_m": "q5_k" if layer < layers // 16 else "q4_k",
            "q3_k_l": "q5_k",
            "q4_k_s": "q5_k" if is_early else None,
            "q4_k_m": "q6_k" if has_more_bits else None,
            "q5_k_m": "q6_k" if has_more_bits else None,
            "q4_0": "q4_1" if config.imatrix and is_early else None,
            "q5_0": "q5_1" if config.imatrix and is_early else None,
        }.get(mix)
    elif ".attn_qkv." in name:
        raised = {"q3_k_m": "q4_k", "q3_k_l": "q4_k", "q4_k_m": "q5_k", "q5_k_m": "q6_k"}.get(mix)
    elif ".attn_output." in name and has_eight_experts:
        raised = "q5_k" if mix in ("q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m") else None
    elif ".attn_output." in name:
        raised = {"q2_k": "q3_k", "q3_k_m": "q4_k", "q3_k_l": "q5_k"}.get(mix)
    return raised or base


def _actual(intended: str, shape: tuple[int, ...]) -> str:
    for candidate in (intended, FALLBACKS.get(intended)):
        if candidate in FLOAT_BYTES or (candidate and shape[-1] % BLOCK_TYPES[candidate].weights == 0):
            return candidate
    return "f16"


def _strict_problem(tensor: TensorPlan) -> str:
    source, in_features = tensor.source, tensor.shape[-1]
    fitting = [name for name, block in BLOCK_TYPES.items() if in_features % block.weights == 0]
    return (
        f"`{source}`: in_features {in_features} is not a multiple of {BLOCK_TYPES[tensor.intended].weights}, the block "
        f"of {tensor.intended}; {', '.join([*fitting, 'f16'])} would fit; without `strict` it becomes {tensor.actual}"
    )


def _file_order(tensor: TensorPlan) -> tuple[int, int, str, int]:
    section = 1 if tensor.layer is not None else 0 if tensor.name in ("token_embd.weight", ROPE_FACTORS) else 2
    return section, tensor.layer or 0, tensor.stack or "", tensor.expert
