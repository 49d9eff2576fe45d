"""A model around its layers: what enters the first of them, what each is called with, what follows the last.

All of it is what the model's own forward does, run over stand-ins that only hand the hidden states on; see `calls`.
Legend: `B` samples, `T` tokens, `H` hidden size.
"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tasks.models.calls import Arguments, Call, Form, Handed, HeadStep, calls_of_stand_ins, in_place_of_embedded
from tasks.models.source import SourceModel

# What skeletons are built in: what a module holds in it is of the dtype of its model, unlike what it holds in float32.
SKELETON_DTYPE = torch.bfloat16
# The attribute by which transformers knows a parameter that is loaded and not to be drawn.
KEEPS_ITS_VALUE = "_is_hf_initialized"


class Frame:
    """The text model of `model`, which holds no layers, on the meta device; weights are read when they are asked for.

    `layers` are what its list `layers_attribute` held, `form` tells how one returns its hidden states, and `in_files` are
    the files' names of the tensors outside the layers by the model's own.
    """

    def __init__(
        self,
        source: SourceModel,
        model: PreTrainedModel,
        layers: Sequence[nn.Module],
        layers_attribute: str,
        in_files: Mapping[str, str],
        form: Callable[[int], Form],
    ) -> None:
        self._source = source
        self._front = model.get_decoder()
        self._head: Any = model.get_output_embeddings()
        self._layers, self._layers_attribute = layers, layers_attribute
        self._in_files, self._form = in_files, form
        name = next(name for name, module in model.named_modules() if module is self._front)
        self._prefix = f"{name}." if name else ""
        embedding: Any = model.get_input_embeddings()
        own_name = next(name for name, module in model.named_modules() if module is embedding)
        self._embedding_name = in_files[f"{own_name}.weight"]
        self._embedding_size: int = embedding.embedding_dim
        self._embedding: PreTrainedModel | None = None  # the front with all its weights
        self._last_calls: dict[torch.device, Call] = {}

    # What enters the layers

    def embed(
        self,
        input_ids: Tensor,
        stored_dtype: torch.dtype,
        dtype: torch.dtype | None = None,
        attention_mask_BT: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [B, T, H] entering layer 0, on the CPU: see `Decoder.embed`."""
        if dtype is not None:
            front = self._copied_front("cpu", dtype)
            self._load_front(front, "cpu", dtype, vocabulary_rows=int(input_ids.max()) + 1)
            return self._embedded(front, input_ids, attention_mask_BT)
        if self._embedding is None:
            front = self._copied_front("cpu", stored_dtype)
            self._load_front(front, "cpu", None)
            self._embedding = front
        return self._embedded(self._embedding, input_ids, attention_mask_BT).to(stored_dtype)

    def _embedded(self, front: PreTrainedModel, input_ids: Tensor, attention_mask_BT: Tensor | None) -> Tensor:
        shared = {id(parameter): parameter for parameter in front.parameters()}
        front = copy.deepcopy(front, {id(self._front.config): self._front.config, **shared})
        args, kwargs = self._calls(front, 1, input_ids=input_ids.cpu(), attention_mask=attention_mask_BT)[0]
        hidden_BTH: Tensor = args[0] if args else kwargs["hidden_states"]
        return hidden_BTH

    def release(self) -> None:
        """Drop the embedding and the last masks."""
        self._embedding = None
        self._last_calls.clear()

    # What they are called with

    def arguments(self, i: int, hidden_BTH: Tensor, attention_mask_BT: Tensor | None) -> dict[str, Any]:
        """Keyword arguments of layer `i`, the last ones once more for a batch like the last: see `Decoder.call_arguments`."""
        device = hidden_BTH.device
        if attention_mask_BT is not None:
            attention_mask_BT = attention_mask_BT.to(device)
        last = self._last_calls.get(device)
        call = Call(i, hidden_BTH.shape, hidden_BTH.dtype, attention_mask_BT, {})
        if last is None or not last.is_like(call):
            found = self.arguments_of_first(i + 1, hidden_BTH, attention_mask_BT)[i]
            last = self._last_calls[device] = replace(call, arguments=found)
        return dict(last.arguments)

    def arguments_of_first(
        self, count: int, hidden_BTH: Tensor, attention_mask_BT: Tensor | None
    ) -> list[dict[str, Any]]:
        """Keyword arguments of the first `count` layers for hidden states of this shape, dtype and device.

        Zeros stand for what a model adds to tokens.
        """
        front = self._copied_front(hidden_BTH.device, hidden_BTH.dtype)
        for name, parameter in list(front.named_parameters()):
            _set_parameter(front, name, hidden_BTH.new_zeros(()).expand(parameter.shape))
        embedded_BTH = in_place_of_embedded(hidden_BTH, self._embedding_size)
        calls = self._calls(front, count, inputs_embeds=embedded_BTH, attention_mask=attention_mask_BT)
        return [self._by_keyword(i, call) for i, call in enumerate(calls)]

    def _calls(self, front: PreTrainedModel, count: int, **inputs: Any) -> list[Arguments]:
        """What the model's own forward calls its first `count` layers with."""
        forms = [self._form(i) for i in range(count - 1)]
        return calls_of_stand_ins(front, self._layers_attribute, self._layers[:count], forms, **inputs)

    def _by_keyword(self, i: int, call: Arguments) -> dict[str, Any]:
        """The arguments of a call of layer `i` by name, without the hidden states."""
        args, kwargs = call
        named = {**kwargs, **dict(zip(inspect.signature(self._layers[i].forward).parameters, args, strict=False))}
        named.pop("hidden_states", None)
        return named

    # What follows them

    def head_step(self, head_name: str, device: str | torch.device, dtype: torch.dtype) -> nn.Module:
        """The head, by its name in the files, and before it what the model's own forward does after its last layer."""
        front = self._copied_front(device, dtype)
        last = Handed(self._layers[-1], self._form(len(self._layers) - 1))
        setattr(front, self._layers_attribute, nn.ModuleList([last]))
        head = copy.deepcopy(self._head)
        self._load_front(front, device, dtype, vocabulary_rows=0)
        self._load(head, {f"{head_name}.{name}": name for name, _ in head.named_parameters()}, device, dtype)
        return HeadStep(front, last, head, self._embedding_size)

    # Weights and buffers

    def fill_layers_buffers(self, layer: nn.Module, device: str | torch.device, dtype: torch.dtype) -> None:
        """Give the computed buffers of a layer, which no file holds, their values, as in a model of `dtype` on `device`."""
        if _fill_buffers(self._front, layer, device, dtype):
            # Some families fill those of all layers from the model.
            front = copy.deepcopy(self._front, {id(self._front.config): self._front.config})
            setattr(front, self._layers_attribute, nn.ModuleList([layer]))
            front._init_weights(front)

    def _copied_front(self, device: str | torch.device, dtype: torch.dtype) -> PreTrainedModel:
        """The model without its layers: weights on meta, and rotary tables, which some families change while they run, and
        what else it computes for itself, as in a model of `dtype` on `device`.
        """
        front = copy.deepcopy(self._front, {id(self._front.config): self._front.config})
        _fill_buffers(self._front, front, device, dtype)
        return front

    def _load_front(
        self,
        front: nn.Module,
        device: str | torch.device,
        dtype: torch.dtype | None,
        vocabulary_rows: int | None = None,
    ) -> None:
        """Give a copy of the front its weights; of the embedding all rows, or so many, or with 0 none at all."""
        names = {self._in_files[f"{self._prefix}{name}"]: name for name, _ in front.named_parameters()}
        if vocabulary_rows is not None:
            own_name = names.pop(self._embedding_name)
            if vocabulary_rows:
                rows = self._source.load_rows(self._embedding_name, vocabulary_rows, dtype)
                _set_parameter(front, own_name, rows.to(device))
        self._load(front, names, device, dtype)

    def _load(
        self, module: nn.Module, names: Mapping[str, str], device: str | torch.device, dtype: torch.dtype | None
    ) -> None:
        """Give a module outside the layers its weights; `names` are its own by the files'."""
        for in_file, name in names.items():
            (tensor,) = self._source.load([in_file], device, dtype).values()
            _set_parameter(module, name, tensor)


def _set_parameter(module: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, own = name.rpartition(".")
    module.get_submodule(owner).register_parameter(own, nn.Parameter(tensor, requires_grad=False))


def _fill_buffers(front: PreTrainedModel, part: nn.Module, device: str | torch.device, dtype: torch.dtype) -> bool:
    """Give the computed buffers of a part of the model, which no file holds, their values, as transformers does on loading
    a model in `dtype`; whether there were any.
    """
    filled = False
    for module in part.modules():
        empty = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
        for name, buffer in empty.items():
            own_dtype = dtype if buffer.dtype == SKELETON_DTYPE else buffer.dtype
            setattr(module, name, torch.zeros_like(buffer, device=device, dtype=own_dtype))
        if empty:
            for parameter in module.parameters(recurse=False):
                setattr(parameter, KEEPS_ITS_VALUE, True)
            front._init_weights(module)
            filled = True
    return filled
