"""The low-rank adapter of the layer in work: what its subsets' inputs look like, and the matrices of each module.

Covariances are taken where the weights are quantized: from the inputs that the quantized layers before give, without
their adapters. So the quantized model's bytes are those of a job without an adapter, and no second stream of hidden
states runs beside the first. One that goes through base and adapter brought nothing: KL divergence 0.0344 instead of 0.0326
with the adapter, 0.0515 instead of 0.0509 without (six layers of SmolLM2-135M, GPTQ 4 bit in groups of 64, rank 32).

What is taken back is measured from the source's weights, with GPTAQ too, although that aims at others: where each layer
has its adapter, inputs are nearly the unquantized model's, and what GPTAQ made up for is too much. The whole of SmolLM2-135M,
as above: perplexity 21.125 and KL divergence 0.0778; measured from what GPTAQ aims at 21.897 and 0.0971.
"""

import copy
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tasks.formats import peft
from tasks.methods import eora
from tasks.methods.hessian import HessianSum
from tasks.quantization import EoRAConfig, Quantization
from tasks.schemes import COMPENSATED


class _Both:
    """A method's statistic and the covariance of the same inputs."""

    def __init__(self, statistic: Any, covariance: HessianSum) -> None:
        self.statistic, self.covariance = statistic, covariance

    @property
    def tokens(self) -> int:
        return self.covariance.tokens

    def add(self, x_TK: Tensor) -> None:
        self.statistic.add(x_TK)
        self.covariance.add(x_TK)

    def merge(self, other: "_Both") -> None:
        self.statistic.merge(other.statistic)
        self.covariance.merge(other.covariance)


class LayerAdapter:
    """Shared by the shards of one layer; matrices are on the CPU."""

    def __init__(self, config: EoRAConfig, dtype: torch.dtype) -> None:
        self._config = config
        self._dtype = dtype
        self._root_KK: Tensor | None = None
        self._lock = threading.Lock()
        self.modules: dict[str, eora.LowRank] = {}

    def observing(self, statistic: Any, in_features: int, device: torch.device) -> Any:
        """The method's statistic, with the covariance beside it where it is none itself."""
        return statistic if isinstance(statistic, HessianSum) else _Both(statistic, HessianSum(in_features, device))

    def prepare(self, total: Any, name: str) -> Any:
        """Take in the inputs of the subset that is quantized next, of which `name` is a module; the method's statistic."""
        inputs: HessianSum | None = total.covariance if isinstance(total, _Both) else total
        self._root_KK = None
        if inputs is not None and inputs.tokens:
            try:
                # A copy: the method takes the sum itself.
                self._root_KK = eora.root_of(copy.deepcopy(inputs).hessian())
            except ValueError as error:
                raise ValueError(f"`{name}`: {error}") from error
        return total.statistic if isinstance(total, _Both) else total

    def prepare_moments(self, second_KK: Tensor | None) -> None:
        """The same from the mean of x x^T, or None where no token came."""
        self._root_KK = self.root_of_moments(second_KK)

    @staticmethod
    def root_of_moments(second_KK: Tensor | None) -> Tensor | None:
        """The root of what that mean says of a subset's inputs, for `compensate_by`."""
        return None if second_KK is None else eora.root_of(2 * second_KK)

    def compensate(self, name: str, weight_NK: Tensor, quantized_NK: Tensor, channels_N: Tensor | None = None) -> None:
        """Make the matrices of a module of the subset that was prepared."""
        self.compensate_by(self._root_KK, name, weight_NK, quantized_NK, channels_N)

    def compensate_by(
        self, root_KK: Tensor | None, name: str, weight_NK: Tensor, quantized_NK: Tensor, channels_N: Tensor | None
    ) -> None:
        """Make the matrices of a module, by its name within the layer, for inputs whose covariance has this root.

        channels_N: what its outputs are multiplied by later, where they were divided; errors count as they will be then.
        """
        lost_NK = weight_NK.float() - quantized_NK.to(weight_NK.device)
        if channels_N is not None:
            lost_NK = lost_NK * channels_N.to(lost_NK.device)[:, None]
        made = eora.compensate(lost_NK, root_KK, self._config.rank, self._dtype)
        if channels_N is not None:
            made = made._replace(b_NR=(made.b_NR.float() / channels_N.cpu()[:, None]).to(self._dtype))
        with self._lock:
            self.modules[name] = made

    def tensors(self, layer_name: str) -> dict[str, Tensor]:
        """All matrices under their final names."""
        packed: dict[str, Tensor] = {}
        for name in sorted(self.modules):
            made = self.modules[name]
            packed |= peft.pack(f"{layer_name}.{name}", made.a_RK, made.b_NR)
        return packed


def problems(config: EoRAConfig, quantization: Quantization, shapes: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    """Why this adapter can't be made, one sentence each."""
    if quantization.method not in COMPENSATED:
        yield (
            f"adapter `{config.method}` is made from what flows through the layers while they are quantized, which method "
            f"`{quantization.method}` does not look at; use one of {', '.join(COMPENSATED)}, or leave out the adapter"
        )
    narrow = [f"`{name}`" for name, shape in shapes.items() if min(shape) < config.rank]
    if narrow:
        smallest = min(min(shape) for shape in shapes.values())
        yield (
            f"{', '.join(narrow)} of every layer: adapter rank {config.rank} is more than their smaller side; the largest "
            f"that fits is {smallest}"
        )


def notes(shapes: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    """What a reader of the adapter should know beforehand."""
    if any(".experts." in f".{name}" for name in shapes):
        yield (
            "peft finds no experts in transformers' models, which hold them in one tensor, and leaves their part of the "
            "adapter out; GPTQModel reads it"
        )


def root_bytes(in_features: int) -> int:
    """Most bytes that the root of a subset's covariance takes while it is made: the sum, and float64 twice."""
    return in_features**2 * (4 + 2 * 8)
