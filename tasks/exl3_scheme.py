"""How a model becomes an EXL3 export: the Hessian of each subset's inputs, whole modules, a width for each of them.

Widths. The mean may lie between two whole ones: then siblings (the linears of one input, which kernels fuse) get the
higher one together, in the order of the ends of the model first, where errors cost most, as long as the mean allows. It
follows from names and shapes alone, and the export says of each module what it got.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from shutil import which
from typing import Any

import torch
from torch import Tensor

from tasks.formats import exl3 as layout
from tasks.methods import exl3
from tasks.methods.exl3_trellis import TILE, TILES_AT_ONCE, WORD_BITS
from tasks.methods.hessian import ActivationError, HessianError, HessianSum
from tasks.models.decoder import Decoder
from tasks.models.source import SourceModel
from tasks.quantization import EXL3Config
from tasks.schemes import BYTES_PER_HESSIAN_ENTRY, Prepared, Scheme, Statistic


@dataclass(frozen=True)
class Siblings:
    """Linears that share an input: the layer they are in, and how many weights each has, by full name."""

    layer: int
    weights: Mapping[str, int]


class EXL3Scheme(Scheme):
    """Whole modules by LDLQ and a trellis; modules whose Hessian is of no use are coded without one."""

    replaces_weights = True

    def __init__(self, config: EXL3Config, source: SourceModel, seed: int) -> None:
        super().__init__(config, source, seed)
        self.exl3_config = config

    @cached_property
    def _decoder(self) -> Decoder:
        return Decoder.from_source(self.source)

    @cached_property
    def siblings(self) -> tuple[Siblings, ...]:
        """All subsets of all layers, in the order of execution."""
        decoder, found = self._decoder, []
        for layer in range(decoder.layer_count):
            shapes, prefix = decoder.linear_shapes(layer), decoder.layer_name(layer)
            for subset in decoder.subsets(layer):
                found.append(
                    Siblings(layer, {f"{prefix}.{name}": shapes[name][0] * shapes[name][1] for name in subset})
                )
        return tuple(found)

    @cached_property
    def widths(self) -> dict[str, int]:
        """Bits of each module, by its full name."""
        return module_widths(self.siblings, self.exl3_config.bits)

    # Quantizing

    def statistic(self, in_features: int, device: torch.device) -> Statistic:
        return HessianSum(in_features, device)

    def statistic_bytes(self, in_features: int) -> int:
        nodes = 1 << (WORD_BITS - int(self.exl3_config.bits))
        tiles = TILES_AT_ONCE["cuda" if torch.cuda.is_available() else "cpu"]
        return in_features**2 * BYTES_PER_HESSIAN_ENTRY + tiles * (TILE + 1) * nodes * 4

    def sum_bytes(self, in_features: int) -> int:
        return 4 * in_features**2

    def prepare(self, total: Any, all_tokens: int, name: str) -> Prepared:
        tokens = total.tokens if total is not None else 0
        if not tokens:
            return Prepared(None, "exl3", 0, None, f"0 of {all_tokens} calibration tokens reached it")
        hessian_KK = total.hessian()
        if not bool(hessian_KK.isfinite().all()):
            raise ActivationError(
                f"`{name}`: its inputs hold NaN or Inf: the source's weights are damaged, or overflow"
            )
        return Prepared(hessian_KK, "exl3", tokens, self.exl3_config.sigma_reg)

    def quantize(self, name: str, weight_NK: Tensor, state: Any) -> exl3.TrellisWeight:
        config, bits = self.exl3_config, self.widths[name]
        try:
            rows = exl3.quantize_weight(weight_NK, state, config, bits, name, self.seed)
        except HessianError as error:
            rows = exl3.quantize_weight(weight_NK, None, config, bits, name, self.seed).because(str(error))
        return rows.to("cpu")

    # Naming and packing

    def quantization_config(self) -> dict[str, Any]:
        storage = {}
        for name in self.widths:
            out_features, in_features = self.source.tensors[f"{name}.weight"].shape
            own = self._decoder.own_name(name)
            storage[own] = layout.tensor_storage(
                own, in_features, out_features, self.exl3_config, self.widths[name],
                f"{name}.bias" in self.source.tensors,
            )  # fmt: skip
        return layout.quantization_config(self.exl3_config, storage)

    # What preflight asks

    def problems(self, shapes: Mapping[str, tuple[int, int]]) -> Iterator[str]:
        yield from super().problems(shapes)
        compiler = os.environ.get("CXX", "g++")
        if self.exl3_config.compiled and which(compiler) is None:
            yield (
                f"compiled asks torch.compile for code and there is no C++ compiler `{compiler}`; install one, or leave "
                f"out compiled: the result is the same"
            )

    def notes(self) -> Iterator[str]:
        if self.exl3_config.bits % 1:
            weights = {name: count for siblings in self.siblings for name, count in siblings.weights.items()}
            mean = sum(self.widths[name] * count for name, count in weights.items()) / sum(weights.values())
            low = int(self.exl3_config.bits)
            higher = sum(width > low for width in self.widths.values())
            yield f"{higher} of {len(weights)} modules get {low + 1} bits, the others {low}: {mean:.3f} bits on average"
        yield "transformers and vLLM do not load exl3; exllamav3 (on a GPU) and GPTQModel do"

    def module_bytes(self, name: str) -> int:
        out_features, in_features = self.source.tensors[f"{name}.weight"].shape
        bias = self.source.tensors.get(f"{name}.bias")
        return layout.packed_bytes(
            in_features, out_features, self.exl3_config, bias.size_bytes if bias else 0, self.widths[name]
        )


def module_widths(siblings: tuple[Siblings, ...], bits: float) -> dict[str, int]:
    """The width of each module: whole, their mean over all weights as near below `bits` as the order allows.

    Siblings get the higher width in the order of their distance from the nearer end of the model, those before the
    middle first, as long as the mean stays; a group too large for what is left is passed over.
    """
    low = int(bits)
    widths = {name: low for group in siblings for name in group.weights}
    last = max(group.layer for group in siblings)
    # Fractions such as 3.1 are no binary ones: a millionth of a bit may not cost a group.
    left = (bits - low) * sum(sum(group.weights.values()) for group in siblings) * (1 + 1e-9)
    for group in sorted(siblings, key=lambda group: (min(group.layer, last - group.layer), group.layer)):
        cost = sum(group.weights.values())
        if cost <= left:
            left -= cost
            widths |= dict.fromkeys(group.weights, low + 1)
    return widths
