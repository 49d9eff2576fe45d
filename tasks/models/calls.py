"""What a model's own forward calls its layers with: found by running it over stand-ins that only hand hidden states on.

Legend: `B` samples, `T` tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class _LastReached(Exception):
    """Ends the model's own forward: it has called the last layer that is asked for."""


# What a layer was called with.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


# How many values a layer returns in a tuple, hidden states first; None for hidden states alone.
Form = int | None


def in_form(hidden_BTH: Tensor | None, form: Form) -> Any:
    """Hidden states as a layer of this form returns them, with nothing for its other values."""
    return hidden_BTH if form is None else (hidden_BTH, *(None,) * (form - 1))


def form_of(output: Any) -> Form:
    """The form of what a layer returned."""
    return len(output) if isinstance(output, tuple) else None


class StandIn(nn.Module):
    """Takes a layer's place in the model's forward: notes its call, and hands the hidden states on or ends the forward."""

    def __init__(self, layer: nn.Module, calls: list[Arguments], form: Form, is_last: bool) -> None:
        super().__init__()
        self._read_attributes_from = (layer,)  # in a tuple: not a submodule
        self._calls = calls
        self._form = form
        self._is_last = is_last

    def __getattr__(self, name: str) -> Any:  # a forward may ask its layers for their type
        return getattr(self.__dict__["_read_attributes_from"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._calls.append((args, kwargs))
        if self._is_last:
            raise _LastReached
        return in_form(args[0] if args else kwargs["hidden_states"], self._form)


class Handed(nn.Module):
    """Takes all layers' place in the model's forward: hands on what it was given beforehand, as the last layer's output."""

    def __init__(self, layer: nn.Module, form: Form) -> None:
        super().__init__()
        self._read_attributes_from = (layer,)
        self._form = form
        self.hidden_BTH: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_read_attributes_from"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return in_form(self.hidden_BTH, self._form)


# The head's name within its step.
HEAD = "lm_head"


class HeadStep(nn.Module):
    """What a model does after its last layer, as far as its logits: the final norm, by its own forward, and the head."""

    def __init__(self, front: nn.Module, last: Handed, head: nn.Module, embedding_size: int) -> None:
        super().__init__()
        self._front = (front, last)  # in a tuple: only the head is quantized
        self._embedding_size = embedding_size
        self.add_module(HEAD, head)

    def forward(self, hidden_BTH: Tensor) -> Tensor:
        front, last = self._front
        last.hidden_BTH = hidden_BTH
        embedded_BTH = in_place_of_embedded(hidden_BTH, self._embedding_size)
        normed_BTH = front(inputs_embeds=embedded_BTH, use_cache=False).last_hidden_state
        last.hidden_BTH = None
        logits_BTV: Tensor = self.get_submodule(HEAD)(normed_BTH)
        return logits_BTV


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


def in_place_of_embedded(hidden_BTH: Tensor, embedding_size: int) -> Tensor:
    """What a model takes for embedded tokens where only their number, dtype and device matter."""
    if hidden_BTH.shape[-1] == embedding_size:
        return hidden_BTH
    return hidden_BTH.new_zeros(*hidden_BTH.shape[:-1], embedding_size)


def calls_of_stand_ins(
    front: PreTrainedModel, attribute: str, layers: Sequence[nn.Module], forms: Sequence[Form], **inputs: Any
) -> list[Arguments]:
    """What the model's own forward calls each of its first layers with; `front`'s list of layers is replaced.

    `forms` of all these layers but the last, which is only called.
    """
    calls: list[Arguments] = []
    *before, last = layers
    stand_ins = [StandIn(layer, calls, form, False) for layer, form in zip(before, forms, strict=True)]
    setattr(front, attribute, nn.ModuleList([*stand_ins, StandIn(last, calls, None, True)]))
    try:
        with torch.no_grad():
            front(use_cache=False, **inputs)
    except _LastReached:
        return calls
    raise AssertionError(f"{type(front).__name__} ran without calling its layers")


def on_meta(value: Any) -> Any:
    return map_tensors(value, lambda tensor: tensor.to("meta"))


def are_equal(value: Any, other: Any) -> bool:
    """Whether two values are the same, down to the bits of the tensors in their tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return isinstance(other, Tensor) and value.dtype == other.dtype and torch.equal(value, other)
    if isinstance(value, dict):
        return (
            isinstance(other, dict)
            and value.keys() == other.keys()
            and all(are_equal(value[k], other[k]) for k in value)
        )
    if isinstance(value, (list, tuple)):
        return isinstance(other, (list, tuple)) and len(value) == len(other) and all(map(are_equal, value, other))
    return bool(value == other)


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """`value` with every tensor in its tuples, lists and dicts replaced by `function` of it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, function) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, function) for item in value)
    return value
