"""How AWQ is carried out: input moments for every subset of a layer, scales for all of them, then rows in units."""

import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from tasks.methods import awq, rtn
from tasks.methods.grid import QuantizedRows, check_weight
from tasks.models.decoder import Decoder
from tasks.models.source import SourceModel
from tasks.quantization import AWQConfig
from tasks.schemes import FEWEST_TOKENS, Prepared, Scheme, Statistic

EXPERT_NUMBER = re.compile(r"\.\d+\.")


class AWQScheme(Scheme):
    """Channel scales from a layer's own inputs; subsets that too few tokens reach are rounded to nearest, unscaled."""

    quantizes_units = True
    scales_layers = True

    def __init__(self, config: AWQConfig, source: SourceModel) -> None:
        super().__init__(config, source)
        self.awq_config = config

    # Quantizing

    def statistic(self, in_features: int, device: torch.device) -> Statistic:
        return awq.InputSum(in_features, device)

    def sum_bytes(self, in_features: int) -> int:
        return 4 * in_features**2 + 8 * in_features

    def statistic_bytes(self, in_features: int) -> int:
        return self.statistics_bytes([in_features])

    def statistics_bytes(self, in_features: Iterable[int]) -> int:
        """The moments of subsets that are kept at once, and the widest three times more while they are used."""
        squares = [4 * width**2 for width in in_features]
        return sum(squares) + 3 * max(squares)

    def prepare(self, total: awq.InputSum | None, all_tokens: int, name: str) -> Prepared:
        tokens = total.tokens if total is not None else 0
        if total is None or tokens < max(FEWEST_TOKENS, self.awq_config.fallback_tokens * all_tokens):
            return Prepared(None, "rtn", tokens, None, f"{tokens} of {all_tokens} calibration tokens reached it")
        try:
            return Prepared(total.moments(), "awq", tokens)
        except awq.ActivationError as error:
            raise awq.ActivationError(f"`{name}`: {error}") from error

    def check(self, weight_NK: Tensor) -> None:
        check_weight(weight_NK, self.awq_config)

    def quantize_unit(self, weight_NK: Tensor, state: awq.Moments | None) -> QuantizedRows:
        if state is None:
            return rtn.quantize_rows(weight_NK, self.awq_config).to("cpu")
        return awq.quantize_rows(weight_NK, state, self.awq_config).to("cpu")

    # What preflight asks

    def layer_notes(self, decoder: Decoder) -> Iterator[str]:
        """Which subsets keep their scale, for each kind of layer, and why."""
        yield from super().layer_notes(decoder)
        told: dict[str, list[str]] = {}
        for layer in decoder.layers_of_each_arrangement:
            of_experts = {subset for pair in decoder.experts(layer) for subset in pair}
            notes = []
            for subset, reason in decoder.folding(layer).refusals.items():
                note = f"{', '.join(subset)} can't be scaled, only clipped: {reason}"
                notes.append(EXPERT_NUMBER.sub(".*.", note) if subset in of_experts else note)
            for note in dict.fromkeys(notes):
                told.setdefault(note, []).append(str(layer))
        for note, layers in told.items():
            yield f"layers like {', '.join(layers)}: {note}"
