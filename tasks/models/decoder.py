"""A decoder as transformers defines it, one layer at a time: no family has code of its own here.

The whole model exists only on the meta device. A layer is a copy of its skeleton with real weights; what a layer is
called with (mask, rotary tables, whatever its family passes) comes from the model's own forward, run up to that layer
over stand-ins that only hand the hidden states on. Legend: `B` samples, `T` tokens, `H` hidden size, `N` out_features,
`K` in_features.
"""

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tasks.models.folding import PROBED_TOKENS, Folding, find_folding
from tasks.models.source import TORCH_DTYPE, SourceError, SourceModel
from tasks.models.tensor_check import tensor_problems

SUPPORTED = frozenset({"llama"})


def is_supported(model_type: object) -> bool:
    """Whether a config.json with this `model_type`, which may be anything, is of a family that is known here."""
    return isinstance(model_type, str) and model_type in SUPPORTED


class _LayerReached(Exception):
    """Carries what the model's own forward called a layer with."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.call_args, self.call_kwargs = args, kwargs


class _StandIn(nn.Module):
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
class _Call:
    """What a layer was last called with on one device, and for which batch."""

    layer: int
    shape: torch.Size
    dtype: torch.dtype
    attention_mask: Tensor | None  # [B, T]
    arguments: dict[str, Any]

    def is_like(self, other: "_Call") -> bool:
        if (self.layer, self.shape, self.dtype) != (other.layer, other.shape, other.dtype):
            return False
        if self.attention_mask is None or other.attention_mask is None:
            return self.attention_mask is other.attention_mask
        return torch.equal(self.attention_mask, other.attention_mask)


class Decoder:
    """The model of a source: names, shapes and subsets at once, weights a layer at a time. Safe for several threads."""

    def __init__(self, source: SourceModel, model: PreTrainedModel) -> None:
        self.source = source
        self.config: PreTrainedConfig = model.config
        self.attn_implementation: str = model.config._attn_implementation
        self.model_class = type(model)
        self._model = model
        self._front = model.get_decoder()  # everything but the layers, the head and their weights
        self._layers_attribute, layers = _layer_list(self._front, self.config.num_hidden_layers)
        self._layers: tuple[nn.Module, ...] = tuple(layers)
        front_name = next(name for name, module in model.named_modules() if module is self._front)
        self._layers_name = ".".join(part for part in (front_name, self._layers_attribute) if part)
        setattr(self._front, self._layers_attribute, nn.ModuleList())
        for module in self._front.modules():
            _fill_buffers(model, module, "cpu")
        embedding = model.get_input_embeddings()
        self._embedding_name = next(name for name, module in model.named_modules() if module is embedding)
        self._embedding: nn.Module | None = None
        self._last_calls: dict[torch.device, _Call] = {}
        self.layer_count = len(self._layers)
        # Tensors that are another one under a second name, by that other's name.
        self._tied: dict[str, str] = dict(model.all_tied_weights_keys)
        untied_heads = model._tied_weights_keys or ()
        problems = tensor_problems(source, self._expected_shapes(), self._tied, untied_heads)
        if problems:
            raise SourceError(source.path, problems)

    @classmethod
    def from_source(cls, source: SourceModel, attn_implementation: str = "sdpa") -> "Decoder":
        """Build the skeleton and compare it with the source's tensors; no tensor is read, but for a doubled head.

        Raises SourceError when the family is not supported, the source is quantized already, or tensors are missing,
        unexpected or of another shape; all in one list.
        """
        family = source.config.get("model_type")
        if not is_supported(family):
            raise SourceError(
                source.path, [f"its model_type is {family!r}; supported are: {', '.join(sorted(SUPPORTED))}"]
            )
        if (described := source.config.get("quantization_config")) is not None:
            method = described.get("quant_method") if isinstance(described, dict) else None
            method = method or "unknown method"
            raise SourceError(source.path, [f"it is quantized already ({method}); name the original model"])
        try:
            config = AutoConfig.from_pretrained(source.path)
            with init_empty_weights(include_buffers=True):
                model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)
        except Exception as error:  # config.json is the user's: whatever it makes transformers raise is told as such
            raise SourceError(source.path, [f"transformers can't build it from `config.json`: {error}"]) from error
        if config.num_hidden_layers < 1:
            raise SourceError(source.path, [f"config.json gives it {config.num_hidden_layers} layers"])
        return cls(source, model.eval().requires_grad_(False))

    # Names

    def layer_name(self, i: int) -> str:
        """Full name of layer `i`: the prefix of its tensors, such as `model.layers.3`."""
        return f"{self._layers_name}.{i}"

    def layer_tensor_names(self, i: int) -> tuple[str, ...]:
        """Full names of all tensors of layer `i`, as the source has them."""
        return tuple(f"{self.layer_name(i)}.{name}" for name in self._layers[i].state_dict())

    @cached_property
    def outer_tensor_names(self) -> tuple[str, ...]:
        """Full names of the tensors outside the layers (embedding, norm, head), without a tied head."""
        return tuple(name for name in self._model.state_dict() if name not in self._tied)

    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        outer = self._model.state_dict()
        shapes = {name: tuple(outer[name].shape) for name in self.outer_tensor_names}
        for i, layer in enumerate(self._layers):
            shapes |= {f"{self.layer_name(i)}.{name}": tuple(t.shape) for name, t in layer.state_dict().items()}
        return shapes

    @cached_property
    def layers_of_each_kind(self) -> tuple[int, ...]:
        """The first layer of each kind; layers are of one kind when class, type and tensors' shapes agree."""
        types = getattr(self.config, "layer_types", None) or [None] * self.layer_count
        first: dict[Any, int] = {}
        for i, layer in enumerate(self._layers):
            shapes = tuple((name, tuple(tensor.shape)) for name, tensor in layer.state_dict().items())
            first.setdefault((type(layer), types[i], shapes), i)
        return tuple(first.values())

    @cached_property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """(N, K) of every linear of a layer, by its name within the layer, in the order of execution."""
        linears = dict(_linears(self._layers[0]))
        return {
            name: (linears[name].out_features, linears[name].in_features) for subset in self.subsets for name in subset
        }

    @cached_property
    def subsets(self) -> tuple[tuple[str, ...], ...]:
        """A layer's linears in order of execution, grouped where successive ones get the very same input."""
        layer = copy.deepcopy(self._layers[0])
        seen: list[tuple[str, Tensor]] = []  # inputs stay alive, so that identity means identity
        for name, linear in _linears(layer):
            linear.register_forward_pre_hook(lambda _, args, name=name: seen.append((name, args[0])))
        hidden_BTH = torch.zeros(1, 2, self.config.hidden_size)
        arguments = _on_meta(self.call_arguments(0, hidden_BTH, None))
        layer(hidden_BTH.to("meta"), **arguments)
        subsets: list[list[str]] = []
        previous = None
        for name, input_BTK in seen:
            if input_BTK is previous:
                subsets[-1].append(name)
            else:
                subsets.append([name])
            previous = input_BTK
        return tuple(tuple(subset) for subset in subsets)

    def folding(self, i: int) -> Folding:
        """Which modules of layer `i` may take up scales of its linears' inputs; no weight is read."""
        layer = copy.deepcopy(self._layers[i], {id(self.config): self.config})
        for module in layer.modules():
            _fill_buffers(self._model, module, "cpu")
        generator = torch.Generator().manual_seed(0)
        hidden_BTH = torch.randn(1, PROBED_TOKENS, self.config.hidden_size, generator=generator)
        return find_folding(layer, self.subsets, hidden_BTH, self.call_arguments(i, hidden_BTH, None))

    # Dtypes

    @cached_property
    def source_dtype(self) -> torch.dtype:
        """What the layers' weights are stored in, by bytes; hidden states are rounded to it at layer boundaries."""
        held: Counter[torch.dtype] = Counter()
        for name in self.layer_tensor_names(0):
            info = self.source.tensors[name]
            held[TORCH_DTYPE[info.dtype]] += info.size_bytes
        return held.most_common(1)[0][0]

    def compute_dtype(self, device: str | torch.device) -> torch.dtype:
        """float32 on a CPU, where half precision is slow or emulated; the source's own elsewhere."""
        return torch.float32 if torch.device(device).type == "cpu" else self.source_dtype

    # Weights and calls

    def materialise(self, i: int, device: str | torch.device, dtype: torch.dtype | None = None) -> nn.Module:
        """Layer `i` with its weights, on `device`, in eval mode; `dtype` defaults to `compute_dtype(device)`.

        Every call gives a layer of its own, to be changed at will. On top of it one tensor is held in the source's
        dtype while it is converted.
        """
        dtype = dtype or self.compute_dtype(device)
        layer = copy.deepcopy(self._layers[i], {id(self.config): self.config})
        prefix = f"{self.layer_name(i)}."
        tensors = self.source.load(self.layer_tensor_names(i), device, dtype)
        layer.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in tensors.items()}, assign=True)
        for module in layer.modules():
            _fill_buffers(self._model, module, device)
        return layer.requires_grad_(False)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Hidden states [B, T, H] entering layer 0 for token ids [B, T], on the CPU in the source's dtype.

        The embedding is loaded at the first call and stays until `release`.
        """
        if self._embedding is None:
            name = f"{self._embedding_name}.weight"
            embedding = copy.deepcopy(self._model.get_input_embeddings())
            embedding.load_state_dict({"weight": self.source.load([name])[name]}, assign=True)
            self._embedding = embedding.requires_grad_(False)
        front = self._front_up_to(0)
        front.set_input_embeddings(self._embedding)
        args, kwargs = _call_of_last(front, input_ids=input_ids.cpu())
        hidden_BTH: Tensor = args[0] if args else kwargs["hidden_states"]
        return hidden_BTH.to(self.source_dtype)

    def release(self) -> None:
        """Drop the embedding and the last masks."""
        self._embedding = None
        self._last_calls.clear()

    def call_arguments(self, i: int, hidden_BTH: Tensor, attention_mask_BT: Tensor | None) -> dict[str, Any]:
        """Keyword arguments of layer `i` beside its hidden states: masks, rotary tables, as its own model passes them.

        Of `hidden_BTH` only shape, dtype and device matter: give it in the dtype the layer computes in.
        `attention_mask_BT` is True at real tokens. A padded batch gets a bool mask of B x T x T: ask again for each
        use rather than keep it. Batches of one shape and padding in a row share their tensors: read them only.
        Every answer comes from fresh tables, so it depends on this batch alone.
        """
        device = hidden_BTH.device
        if attention_mask_BT is not None:
            attention_mask_BT = attention_mask_BT.to(device)
        last = self._last_calls.get(device)
        call = _Call(i, hidden_BTH.shape, hidden_BTH.dtype, attention_mask_BT, {})
        if last is None or not last.is_like(call):
            args, kwargs = _call_of_last(
                self._front_up_to(i), inputs_embeds=hidden_BTH, attention_mask=attention_mask_BT
            )
            kwargs.update(zip(inspect.signature(self._layers[i].forward).parameters, args, strict=False))
            kwargs.pop("hidden_states", None)
            last = self._last_calls[device] = replace(call, arguments=kwargs)
        return dict(last.arguments)

    def _front_up_to(self, i: int) -> PreTrainedModel:
        """The model's own forward, its layers replaced by stand-ins of which the last, number `i`, ends it."""
        # The copy holds meta tensors and rotary tables, which some families change while they run.
        front = copy.deepcopy(self._front, {id(self.config): self.config})
        setattr(front, self._layers_attribute, nn.ModuleList(_StandIn(self._layers[j], j == i) for j in range(i + 1)))
        return front


def _layer_list(front: nn.Module, layer_count: int) -> tuple[str, nn.ModuleList]:
    for name, module in front.named_children():
        if isinstance(module, nn.ModuleList) and len(module) == layer_count:
            return name, module
    raise AssertionError(f"{type(front).__name__} has no list of {layer_count} layers")


def _linears(layer: nn.Module) -> Iterable[tuple[str, nn.Linear]]:
    return [(name, module) for name, module in layer.named_modules() if isinstance(module, nn.Linear)]


def _fill_buffers(model: PreTrainedModel, module: nn.Module, device: str | torch.device) -> None:
    """Give a module's own computed buffers, which no file holds, their values: as transformers does on loading."""
    empty = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
    for name in empty:
        setattr(module, name, torch.empty_like(getattr(module, name), device=device))
    if empty:
        model._init_weights(module)


def _call_of_last(front: PreTrainedModel, **inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    try:
        with torch.no_grad():
            front(use_cache=False, **inputs)
    except _LayerReached as reached:
        return reached.call_args, reached.call_kwargs
    raise AssertionError(f"{type(front).__name__} ran without calling its layers")


def _on_meta(value: Any) -> Any:
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
