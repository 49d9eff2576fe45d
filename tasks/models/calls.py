"""What a model's own forward calls its layers with: found by running it over stand-ins that only hand hidden states on.

Legend: `B` samples, `T` tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class _LayerReached(Exception):
    """Carries what the model's own forward called a layer with."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.call_args, self.call_kwargs = args, kwargs


class StandIn(nn.Module):
    """Takes a layer's place in the model's forward: hands the hidden states on, or ends the forward with its call."""

    def __init__(self, layer: nn.Module, is_last: bool) -> None:
        super().__init__()
        self._read_attributes_from = (layer,)  # in a tuple: not a submodule
        self._is_last = is_last

    def __getattr__(self, name: str) -> Any:  # a forward may ask its layers for their type
        return getattr(self.__dict__["_read_attributes_from"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._is_last:
            raise _LayerReached(args, kwargs)
        return args[0] if args else kwargs["hidden_states"]


@dataclass(frozen=True)
class Call:
    """What a layer was last called with on one device, and for which batch."""

    layer: int
    shape: torch.Size
    dtype: torch.dtype
    attention_mask: Tensor | None  # [B, T]
    arguments: dict[str, Any]

    def is_like(self, other: "Call") -> bool:
        if (self.layer, self.shape, self.dtype) != (other.layer, other.shape, other.dtype):
            return False
        if self.attention_mask is None or other.attention_mask is None:
            return self.attention_mask is other.attention_mask
        return torch.equal(self.attention_mask, other.attention_mask)


def call_of_last(front: PreTrainedModel, **inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    try:
        with torch.no_grad():
            front(use_cache=False, **inputs)
    except _LayerReached as reached:
        return reached.call_args, reached.call_kwargs
    raise AssertionError(f"{type(front).__name__} ran without calling its layers")


def on_meta(value: Any) -> Any:
    return map_tensors(value, lambda tensor: tensor.to("meta"))


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """`value` with every tensor in its tuples, lists and dicts replaced by `function` of it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, function) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, function) for item in value)
    return value
