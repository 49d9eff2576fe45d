"""How a model becomes a ParoQuant export: a sample of each subset's inputs, whole modules that learn from it in turn."""

import re
from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from tasks.methods import paroquant
from tasks.methods.hessian import ActivationError
from tasks.models.source import SourceModel
from tasks.quantization import ParoQuantConfig
from tasks.schemes import Prepared, Scheme, Statistic

IN_A_LAYER = re.compile(r"\.\d+\.")
# Of a module while it learns: weights, their gradient, two moments, the turned, the rounded and what leads back to them.
FLOATS_PER_WEIGHT = 12


class ParoQuantScheme(Scheme):
    """Whole modules, turned; those without tokens are rounded as they are."""

    replaces_weights = True

    def __init__(self, config: ParoQuantConfig, source: SourceModel, seed: int) -> None:
        super().__init__(config, source, seed)
        self.paroquant_config = config

    # Quantizing

    def statistic(self, in_features: int, device: torch.device) -> Statistic:
        config = self.paroquant_config
        return paroquant.InputSample(in_features, device, config.train_samples + config.validation_samples)

    def statistic_bytes(self, in_features: int) -> int:
        config = self.paroquant_config
        rows = config.train_samples + config.validation_samples
        in_layers = [info.shape for name, info in self.source.tensors.items() if IN_A_LAYER.search(name)]
        widest = max((prod(shape) for shape in in_layers if shape[1:] == (in_features,)), default=0)
        return 4 * (4 * rows * in_features + FLOATS_PER_WEIGHT * widest)

    def sum_bytes(self, in_features: int) -> int:
        return 4 * (self.paroquant_config.train_samples + self.paroquant_config.validation_samples) * in_features

    def prepare(self, total: Any, all_tokens: int, name: str) -> Prepared:
        tokens = total.tokens if total is not None else 0
        sample_TK = total.sample() if tokens else None
        if sample_TK is None or len(sample_TK) < 2:
            return Prepared(None, "paroquant", tokens, None, f"{tokens} of {all_tokens} calibration tokens reached it")
        if not bool(sample_TK.isfinite().all()):
            raise ActivationError(
                f"`{name}`: its inputs hold NaN or Inf: the source's weights are damaged, or overflow"
            )
        return Prepared(sample_TK, "paroquant", tokens)

    def quantize(self, name: str, weight_NK: Tensor, state: Any) -> paroquant.ParoRows:
        def tell(what: str, error: float) -> None:
            self.tell(f"{name}: {what}", error)

        return paroquant.quantize_weight(weight_NK, state, self.paroquant_config, name, self.seed, tell)

    # What preflight asks

    def notes(self) -> Iterator[str]:
        yield (
            "readers turn a linear's inputs in half precision: vLLM and transformers with the paroquant package, on CUDA; "
            "GPTQModel on CPUs too"
        )
