"""A decoder as transformers defines it, one layer at a time: no family has code of its own here.

The whole model exists only on the meta device. A layer is a copy of its skeleton with real weights; what a layer is
called with (mask, rotary tables, whatever its family passes) comes from the model's own forward: see `frame`. Legend: `B` samples, `T` tokens, `H` hidden size, `N` out_features,
`K` in_features.
"""

import copy
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from tasks.models import fp8_weights
from tasks.models.calls import HEAD, Form, are_equal, form_of, on_meta
from tasks.models.experts import UnfusedExperts
from tasks.models.families import model_class, outside, refusal, text_model_refusal
from tasks.models.folding import PROBED_TOKENS, Folding, Subset, find_folding
from tasks.models.frame import SKELETON_DTYPE, Frame
from tasks.models.layer_names import (
    LayoutError,
    common_layers_name,
    is_for_further_tokens,
    linears,
    names_as_loaded,
    names_in_files,
    unfuse,
)
from tasks.models.source import TORCH_DTYPE, SourceError, SourceModel
from tasks.models.stacked_experts import STACKED_FAMILIES
from tasks.models.tensor_check import tensor_problems

# Of transformers' implementations of experts the one that goes through them one after the other.
EXPERTS = "eager"
# Attributes by which the modules of a layer know its place, which makes it no other kind.
LAYER_NUMBERS = frozenset({"layer_idx", "layer_id", "layer_number"})

# What a linear, by its full name, is quantized by: those with one answer may be quantized together. None: not at all.
Grouping = Callable[[str], Hashable | None]


@dataclass(frozen=True)
class _Skeleton:
    layer: nn.Module
    names: dict[str, str]  # the files' name of each tensor by its own, within the layer

    def in_file(self, linear: str) -> str:
        """The files' name of a linear by its own."""
        return self.names[f"{linear}.weight"].removesuffix(".weight")


@dataclass(frozen=True)
class LinearKind:
    """The linears of one name and one shape in all layers, together; of all experts too."""

    # Within a layer, `*` for the number of an expert; with shape or layers where others have another, or another grouping.
    name: str
    out_features: int
    in_features: int
    modules: tuple[str, ...]  # full names


class Decoder:
    """The model of a source: names, shapes and subsets at once, weights a layer at a time. Safe for several threads."""

    def __init__(
        self,
        source: SourceModel,
        model: PreTrainedModel,
        grouping: Grouping | None = None,
        quantizes_head: bool = False,
    ) -> None:
        self.source = source
        self._grouping = grouping
        self.quantizes_head = quantizes_head
        self.model_class = type(model)
        self.model_config: PreTrainedConfig = model.config
        self._model = model
        self._front = model.get_decoder()  # everything but the layers, the head and their weights, and towers beside it
        self.config: PreTrainedConfig = self._front.config  # of the text model, where another one wraps it
        self.attn_implementation: str = self.config._attn_implementation
        self._layers_attribute, layers = layer_list(self._front, self.config.num_hidden_layers)
        self._layers: tuple[nn.Module, ...] = tuple(layers)
        self.layer_count = len(self._layers)
        front_name = next(name for name, module in model.named_modules() if module is self._front)
        self._front_name = front_name
        self._own_layers_name = ".".join(part for part in (front_name, self._layers_attribute) if part)
        try:
            self._layers_name, self._in_files = self._names_in_files()
            self._outer_in_files = self._outer_names_in_files()
        except LayoutError as error:
            raise SourceError(source.path, [str(error)]) from error
        setattr(self._front, self._layers_attribute, nn.ModuleList())
        self._frame = Frame(source, model, self._layers, self._layers_attribute, self._outer_in_files, self.form)
        self._skeletons: dict[int, _Skeleton] = {}
        self._traced: dict[int, tuple[Subset, ...]] = {}
        self._forms: dict[int, Form] = {}
        self._subsets: dict[int, tuple[Subset, ...]] = {}
        # Tensors that are another one under a second name, by that other's name.
        in_files = self._outer_in_files
        self._tied = {
            in_files.get(name, name): in_files.get(other, other) for name, other in model.all_tied_weights_keys.items()
        }
        untied_heads = [in_files.get(name, name) for name in model._tied_weights_keys or ()]
        try:
            expected = self._expected_shapes()
        except LayoutError as error:
            raise SourceError(source.path, [str(error)]) from error
        problems = tensor_problems(source, expected, self._tied, untied_heads, self.carried_tensor_names)
        if problems:
            raise SourceError(source.path, problems)

    @classmethod
    def from_source(
        cls,
        source: SourceModel,
        attn_implementation: str = "sdpa",
        grouping: Grouping | None = None,
        quantizes_head: bool = False,
    ) -> "Decoder":
        """Build the skeleton and compare it with the source's tensors; no tensor is read, but for a doubled head.

        Without `grouping` all linears are quantized, and by one method; with `quantizes_head` the head is too, as one more
        step after the layers: methods that take a layer's number take that of the step, `layer_count`.
        Families that have no sdpa attention get transformers' eager one.
        Raises SourceError when the family is not supported, the source is quantized in a way that can't be read, or tensors are missing,
        unexpected or of another shape; all in one list.
        """
        if (reason := refusal(source.config)) is not None:
            raise SourceError(source.path, [reason])
        if (described := fp8_weights.described(source.config)) is not None:
            method = described.get("quant_method") if isinstance(described, dict) else None
            problem = (
                f"it is quantized already ({method or 'unknown method'}), which can't be read: of quantized sources only FP8 "
                f"with scales per block, row or matrix can, as `fp8` or as `compressed-tensors`, and `mxfp4` of "
                f"{', '.join(STACKED_FAMILIES)}; name the original model, "
                f"or load this one with transformers, dequantize it and save that"
            )
            raise SourceError(source.path, [problem])
        try:
            config = AutoConfig.from_pretrained(source.path)
            if hasattr(config, "quantization_config"):
                del config.quantization_config
            reason = text_model_refusal(config)
            if reason is None:
                with init_empty_weights(include_buffers=True):
                    model = _built(config, attn_implementation)
        except Exception as error:  # config.json is the user's: whatever it makes transformers raise is told as such
            raise SourceError(source.path, [f"transformers can't build it from `config.json`: {error}"]) from error
        if reason is not None:
            raise SourceError(source.path, [reason])
        if (count := config.get_text_config().num_hidden_layers) < 1:
            raise SourceError(source.path, [f"config.json gives it {count} layers"])
        return cls(source, model.eval().requires_grad_(False), grouping, quantizes_head)

    # Names

    def layer_name(self, i: int) -> str:
        """Full name of layer `i`: the prefix of its tensors, such as `model.layers.3`; of the head's step that of the head."""
        if self.is_head(i):
            return self.head_name
        return f"{self._layers_name}.{i}"

    def own_layer_name(self, i: int) -> str:
        """What transformers' own code calls layer `i`, which in wrapped models may be another name than the files'."""
        return f"{self._own_layers_name}.{i}"

    def own_name(self, name: str) -> str:
        """What transformers' own code calls a tensor or module of the files, in a model that wraps a text model."""
        if not self.towers:
            return name
        prefixes = {
            f"{self._layers_name}.": f"{self._own_layers_name}.",
            f"{self.head_name}.": f"{self._own_head_name}.",
        }
        for in_file, own in prefixes.items():
            if f"{name}.".startswith(in_file):
                return f"{own}{f'{name}.'.removeprefix(in_file)}".removesuffix(".")
        return self._own_outer_names.get(name, name)

    @cached_property
    def _own_outer_names(self) -> dict[str, str]:
        return {in_file: own for own, in_file in self._outer_in_files.items() if in_file not in self._tied}

    @property
    def step_count(self) -> int:
        """The layers, and the head where it is quantized."""
        return self.layer_count + self.quantizes_head

    def is_head(self, i: int) -> bool:
        """Whether step `i` is no layer, but the head."""
        return i == self.layer_count and self.quantizes_head

    @cached_property
    def head_name(self) -> str:
        """Full name of the output head, such as `lm_head`."""
        return self._outer_in_files[f"{self._own_head_name}.weight"].removesuffix(".weight")

    @cached_property
    def _own_head_name(self) -> str:
        head = self._model.get_output_embeddings()
        return next(name for name, module in self._model.named_modules() if module is head)

    @cached_property
    def towers(self) -> tuple[str, ...]:
        """What a wrapper has beside its text model and head, by transformers' names of these modules; nothing is quantized."""
        return tuple(outside(self._model, self._front))

    @property
    def has_tied_head(self) -> bool:
        """Whether the head is the embedding under a second name."""
        return f"{self.head_name}.weight" in self._tied

    def full_name(self, i: int, linear: str) -> str:
        """Full name of a linear of layer `i`, by its name within it."""
        return self.head_name if self.is_head(i) else f"{self.layer_name(i)}.{linear}"

    def layer_tensor_names(self, i: int) -> tuple[str, ...]:
        """Full names of all tensors of layer `i`, as the source has them."""
        if self.is_head(i):
            return tuple(name for name in self.outer_tensor_names if name.rpartition(".")[0] == self.head_name)
        return tuple(f"{self.layer_name(i)}.{name}" for name in self._skeleton(i).names.values())

    @cached_property
    def outer_tensor_names(self) -> tuple[str, ...]:
        """Full names of the text model's tensors outside the layers (embedding, norm, head), without a tied head."""
        of_towers = set(self._tower_tensor_names)
        return tuple(name for name in self._outer_in_files.values() if name not in self._tied and name not in of_towers)

    @cached_property
    def carried_tensor_names(self) -> tuple[str, ...]:
        """Full names of the source's tensors that no text needs and an export keeps: towers, multi-token prediction."""
        names = set(self._outer_in_files.values())
        further = (
            name for name in self.source.tensors if name not in names and is_for_further_tokens(name, self.config)
        )
        return (*self._tower_tensor_names, *further)

    @cached_property
    def _tower_tensor_names(self) -> tuple[str, ...]:
        prefixes = tuple(f"{tower}." for tower in self.towers)
        return tuple(
            in_file for name, in_file in self._outer_in_files.items() if prefixes and name.startswith(prefixes)
        )

    @cached_property
    def kept_modules(self) -> tuple[str, ...]:
        """The matrices that are not quantized, but for the embedding and the head: routers, what rules leave, what is carried,
        linears of towers and outside the layers.

        By the names that transformers' own code has for them, by which loaders look for them; what it does not build, by
        the files'.
        """
        of_towers = set(self._tower_tensor_names)
        names = [name for name in self.carried_tensor_names if name not in of_towers and self._is_matrix(name)]
        for i in range(self.layer_count):
            quantized = self.linear_shapes(i)
            for name in self.layer_tensor_names(i):
                within = name.removeprefix(f"{self.layer_name(i)}.")
                if within.removesuffix(".weight") not in quantized and self._is_matrix(name):
                    names.append(f"{self.own_layer_name(i)}.{within}")
        front = f"{self._front_name}." if self._front_name else ""
        names += [
            f"{front}{name}.weight" for name, module in self._front.named_modules() if isinstance(module, nn.Linear)
        ]
        for tower in self.towers:
            inside = self._model.get_submodule(tower).named_modules(prefix=tower)
            names += [name for name, module in inside if isinstance(module, nn.Linear)]
        return tuple(name.removesuffix(".weight") for name in names)

    def _is_matrix(self, name: str) -> bool:
        return name.endswith(".weight") and len(self.source.tensors[name].shape) == 2

    def _names_in_files(self) -> tuple[str, dict[int, dict[str, tuple[str, ...]]]]:
        """The files' name of all layers, and for each kind of layer their names of its tensors by its own, within the layer."""
        found, layers_names = {}, set()
        for kind in self.layers_of_each_kind:
            own_prefix = f"{self.own_layer_name(kind)}."
            tensors = {own_prefix + name: tensor for name, tensor in self._layers[kind].state_dict().items()}
            names = self._names_of(tensors)
            in_files = [part for parts in names.values() for part in parts]
            layers_name = common_layers_name(
                [part for part in in_files if part in self.source.tensors] or in_files, kind
            )
            layers_names.add(layers_name)
            prefix = f"{layers_name}.{kind}."
            found[kind] = {
                name.removeprefix(own_prefix): tuple(
                    part.removeprefix(prefix) if part.startswith(prefix) else name.removeprefix(own_prefix)
                    for part in parts
                )
                for name, parts in names.items()
            }
        if len(layers_names) > 1:
            raise LayoutError(f"layers lie under several names in the files: {', '.join(sorted(layers_names))}")
        return layers_names.pop(), found

    def _names_of(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
        """The files' names of the model's tensors: as it is saved today, or what these files have instead."""
        names = names_in_files(self._model, tensors)
        absent = [name for name, parts in names.items() if not self.source.tensors.keys() >= set(parts)]
        return names | {name: (self._as_loaded[name],) for name in absent if name in self._as_loaded}

    @cached_property
    def _as_loaded(self) -> dict[str, str]:
        return names_as_loaded(self._model, self.source.tensors)

    def _outer_names_in_files(self) -> dict[str, str]:
        """The files' names of the tensors outside the layers by the model's own."""
        outer = {
            name: t for name, t in self._model.state_dict().items() if not name.startswith(f"{self._own_layers_name}.")
        }
        names = {}
        for name, in_files in self._names_of(outer).items():
            if len(in_files) != 1:
                raise LayoutError(f"`{name}` is made of {len(in_files)} tensors of the files")
            (names[name],) = in_files
        return names

    def _skeleton(self, i: int) -> _Skeleton:
        """The layer that stands for the kind of layer `i`, unfused, on the meta device; not to be changed."""
        kind = self.kinds[i]
        if kind not in self._skeletons:
            layer = copy.deepcopy(self._layers[kind], {id(self.config): self.config})
            self._skeletons[kind] = _Skeleton(layer, unfuse(layer, self._in_files[kind], self.source.stacking))
        return self._skeletons[kind]

    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        outer = self._model.state_dict()
        shapes = {
            in_file: tuple(outer[name].shape)
            for name, in_file in self._outer_in_files.items()
            if in_file not in self._tied
        }
        for i in range(self.layer_count):
            skeleton, prefix = self._skeleton(i), self.layer_name(i)
            shapes |= {
                f"{prefix}.{skeleton.names[name]}": tuple(tensor.shape)
                for name, tensor in skeleton.layer.state_dict().items()
            }
        return shapes

    # Kinds of layers

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """Of each layer the first of its kind: class, type, tensors' shapes and settings of its modules are the same, and
        what config.json says of it in lists of one value per layer.
        """
        lists = [getattr(self.config, "layer_types", None), *vars(self.config).values()]
        told = [each for each in lists if isinstance(each, list | tuple) and len(each) == self.layer_count]
        first: dict[Any, int] = {}
        return tuple(
            first.setdefault((*(repr(each[i]) for each in told), *_kind(layer)), i)
            for i, layer in enumerate(self._layers)
        )

    @property
    def layers_of_each_kind(self) -> tuple[int, ...]:
        """The first layer of each kind."""
        return tuple(dict.fromkeys(self.kinds))

    @cached_property
    def layers_of_each_arrangement(self) -> tuple[int, ...]:
        """The first layer of each kind and each choice of linears that are quantized, and the head's step."""
        first: dict[Any, int] = {}
        found = dict.fromkeys(first.setdefault((kind, self.subsets(i)), i) for i, kind in enumerate(self.kinds))
        return (*found, *range(self.layer_count, self.step_count))

    def linear_shapes(self, i: int) -> dict[str, tuple[int, int]]:
        """(N, K) of every linear of layer `i` that is quantized, by its name within the layer, in order of execution."""
        if self.is_head(i):
            head: Any = self._model.get_output_embeddings()
            return {name: (head.out_features, head.in_features) for (name,) in self.subsets(i)}
        layer = self._skeleton(i).layer
        return {
            name: (linear.out_features, linear.in_features)
            for subset in self.subsets(i)
            for name in subset
            if isinstance(linear := layer.get_submodule(name), nn.Linear)
        }

    def linears_by_input(self, i: int) -> tuple[Subset, ...]:
        """The linears of layer `i` in order of execution, grouped where successive ones get the very same input."""
        kind = self.kinds[i]
        if kind not in self._traced:
            self._traced[kind] = self._traced_subsets(kind)
        return self._traced[kind]

    def subsets(self, i: int) -> tuple[Subset, ...]:
        """What is quantized together in layer `i`, in order of execution: linears with one input, and of one grouping."""
        if self.is_head(i):
            is_left = self._grouping is not None and self._grouping(self.head_name) is None
            return () if is_left else ((HEAD,),)
        if self._grouping is None:
            return self.linears_by_input(i)
        if i not in self._subsets:
            prefix, arranged = self.layer_name(i), []
            for linears_of_input in self.linears_by_input(i):
                groups: dict[Hashable, list[str]] = {}
                for name in linears_of_input:
                    if (group := self._grouping(f"{prefix}.{name}")) is not None:
                        groups.setdefault(group, []).append(name)
                arranged += [tuple(names) for names in groups.values()]
            self._subsets[i] = tuple(arranged)
        return self._subsets[i]

    def experts(self, i: int) -> tuple[tuple[Subset, Subset], ...]:
        """For each expert of layer `i` that is quantized its subset before and its subset after the activation."""
        if self.is_head(i):
            return ()
        quantized = set(self.subsets(i))
        return tuple(pair for pair in self._all_experts(i) if quantized.issuperset(pair))

    def _all_experts(self, i: int) -> tuple[tuple[Subset, Subset], ...]:
        skeleton = self._skeleton(i)
        return tuple(
            (
                tuple(skeleton.in_file(f"{path}.{name}") for name in ups),
                tuple(skeleton.in_file(f"{path}.{name}") for name in down),
            )
            for path, module in skeleton.layer.named_modules()
            if isinstance(module, UnfusedExperts)
            for ups, down in module.subsets()
        )

    @property
    def has_experts(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return any(self._all_experts(i) for i in self.layers_of_each_kind)

    def stages(self, i: int, group_size: int) -> tuple[tuple[Subset, ...], ...]:
        """The subsets of layer `i` in order, those together that are independent: of a group of experts."""
        experts = self.experts(i)
        of_experts = {subset for pair in experts for subset in pair}
        stages: list[tuple[Subset, ...]] = []
        for subset in self.subsets(i):
            if subset not in of_experts:
                stages.append((subset,))
            elif subset == experts[0][0]:
                for start in range(0, len(experts), group_size):
                    group = experts[start : start + group_size]
                    stages += [tuple(ups for ups, _ in group), tuple(down for _, down in group)]
        return tuple(stages)

    @cached_property
    def linear_kinds(self) -> tuple[LinearKind, ...]:
        """All linears that are quantized by name, shape and grouping, in the order of execution."""
        modules: dict[tuple[str, int, int, Hashable], list[str]] = {}
        layers: dict[tuple[str, int, int, Hashable], list[int]] = {}
        for i in range(self.step_count):
            of_experts = {name for pair in self.experts(i) for subset in pair for name in subset}
            for name, shape in self.linear_shapes(i).items():
                full = self.full_name(i, name)
                label = full if self.is_head(i) else name
                if name in of_experts:
                    experts, _, projection = name.rsplit(".", 2)
                    label = f"{experts}.*.{projection}"
                key = (label, *shape, self._grouping(full) if self._grouping is not None else None)
                modules.setdefault(key, []).append(full)
                if i not in layers.setdefault(key, []):
                    layers[key].append(i)
        shapes_of = Counter(name for name, _, _ in {key[:3] for key in modules})
        groupings_of = Counter(key[:3] for key in modules)
        kinds = []
        for key, full_names in modules.items():
            name, n, k, _ = key
            told = [f"{n} x {k}"] * (shapes_of[name] > 1) + [_numbers(layers[key])] * (groupings_of[key[:3]] > 1)
            kinds.append(LinearKind(f"{name} ({', '.join(told)})" if told else name, n, k, tuple(full_names)))
        return tuple(kinds)

    def _traced_subsets(self, i: int) -> tuple[tuple[str, ...], ...]:
        skeleton = self._skeleton(i)
        layer = copy.deepcopy(skeleton.layer, {id(self.config): self.config})
        seen: list[tuple[str, Tensor]] = []  # inputs stay alive, so that identity means identity
        for own, linear in linears(layer):
            name = skeleton.in_file(own)
            linear.register_forward_pre_hook(lambda _, args, name=name: seen.append((name, args[0])))
        self._forms[i] = form_of(self._traced_output(i, layer))
        subsets: list[list[str]] = []
        previous = None
        for name, input_BTK in seen:
            if input_BTK is previous:
                subsets[-1].append(name)
            else:
                subsets.append([name])
            previous = input_BTK
        return tuple(tuple(subset) for subset in subsets)

    def form(self, i: int) -> Form:
        """How layer `i` returns its hidden states."""
        self.linears_by_input(i)
        return self._forms[self.kinds[i]]

    def _traced_output(self, i: int, layer: nn.Module) -> Any:
        """What a layer, a copy of the skeleton, returns for some tokens, on the meta device."""
        hidden_BTH = torch.zeros(1, 2, self.config.hidden_size, dtype=SKELETON_DTYPE)
        arguments = on_meta(self.call_arguments(i, hidden_BTH, None))
        return layer(hidden_BTH.to("meta"), **arguments)

    def folding(self, i: int) -> Folding:
        """Which modules of layer `i` may take up scales of its linears' inputs; no weight is read."""
        skeleton = self._skeleton(i)
        layer = copy.deepcopy(skeleton.layer, {id(self.config): self.config})
        self._frame.fill_layers_buffers(layer, "cpu", torch.float32)
        generator = torch.Generator().manual_seed(0)
        hidden_BTH = torch.randn(1, PROBED_TOKENS, self.config.hidden_size, generator=generator)
        found = find_folding(layer, self.subsets(i), hidden_BTH, self.call_arguments(i, hidden_BTH, None))
        folds = {
            subset: replace(fold, followers=tuple(map(skeleton.in_file, fold.followers)))
            for subset, fold in found.folds.items()
        }
        refusals = dict(found.refusals)
        reason = None
        if self.source_dtype == torch.float16:  # whose small numbers lose bits when they are halved
            reason = "feeds a router too, and float16 can't keep what that gets exact"
        elif self.before_experts(i) == len(self.subsets(i)):
            reason = "feeds a gate too, which is no router's"
        for subset, fold in list(folds.items()):
            if fold.followers and reason is not None:
                refusals[subset] = f"`{folds.pop(subset).module}` {reason}"
        return Folding(folds, refusals)

    def before_experts(self, i: int) -> int:
        """How many subsets of layer `i` run before its experts do."""
        of_experts = {name for pair in self._all_experts(i) for subset in pair for name in subset}
        subsets = self.subsets(i)
        return next((n for n, subset in enumerate(subsets) if of_experts.intersection(subset)), len(subsets))

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
        if self.is_head(i):
            return self._frame.head_step(self.head_name, device, dtype)
        layer, names = copy.deepcopy(self._layers[i], {id(self.config): self.config}), self._in_files[self.kinds[i]]
        prefix = f"{self.layer_name(i)}."
        unfused = unfuse(layer, names, self.source.stacking)
        own_names = {f"{prefix}{in_file}": own for own, in_file in unfused.items()}
        by_dtype: dict[torch.dtype, list[str]] = {}
        held = layer.state_dict()
        for name, own in own_names.items():
            kept = self._kept_dtype(f"{self.own_layer_name(i)}.{own}", held[own].dtype, dtype)
            by_dtype.setdefault(kept, []).append(name)
        for kept, names_of_dtype in by_dtype.items():
            for name, tensor in self.source.load(names_of_dtype, device, kept).items():
                held[own_names[name]] = tensor
        layer.load_state_dict(held, assign=True)
        self._frame.fill_layers_buffers(layer, device, dtype)
        for module in layer.modules():
            if isinstance(module, UnfusedExperts):
                module.lay_out()
        return layer.requires_grad_(False)

    def _kept_dtype(self, own_name: str, built_in: torch.dtype, dtype: torch.dtype) -> torch.dtype:
        """What transformers holds a tensor in when it loads the model in `dtype`: routers and their biases, say, in float32."""
        if dtype not in (torch.float16, torch.bfloat16):
            return dtype
        plan = self._model._get_dtype_plan(dtype)
        if plan and build_glob_alternation(list(plan))[0].search(own_name):
            return torch.float32
        return dtype if built_in == SKELETON_DTYPE else built_in

    def twin(self, layer: nn.Module) -> nn.Module:
        """A second one of a materialised layer, with the same tensors until either's are replaced."""
        shared = {id(p): nn.Parameter(p.data, requires_grad=False) for p in layer.parameters()}
        return copy.deepcopy(layer, {id(self.config): self.config, **shared})

    def embed(
        self, input_ids: Tensor, dtype: torch.dtype | None = None, attention_mask_BT: Tensor | None = None
    ) -> Tensor:
        """Hidden states [B, T, H] entering layer 0 for token ids [B, T], on the CPU in the source's dtype.

        Computed in the dtype of what is stored, as the model does; what it takes is loaded at the first call and stays until
        `release`. Unless `dtype` names another one to compute in and to return: then only the rows of the vocabulary up to
        the largest id are read, and nothing stays. `attention_mask_BT` is True at real tokens, which some families count
        for their places; without it all are.
        """
        return self._frame.embed(input_ids, self.source_dtype, dtype, attention_mask_BT)

    def release(self) -> None:
        """Drop the embedding and the last masks."""
        self._frame.release()

    def call_arguments(self, i: int, hidden_BTH: Tensor, attention_mask_BT: Tensor | None) -> dict[str, Any]:
        """Keyword arguments of layer `i` beside its hidden states: masks, rotary tables, as its own model passes them.

        Of `hidden_BTH` only shape, dtype and device matter: give it in the dtype the layer computes in.
        `attention_mask_BT` is True at real tokens. A padded batch gets a bool mask of B x T x T: ask again for each
        use rather than keep it. Batches of one shape and padding in a row share their tensors: read them only.
        Every answer comes from fresh tables, so it depends on this batch alone.
        """
        if self.is_head(i):
            return {}
        # All layers of a kind are called alike (`unlike_calls`), so that the last one costs no more than the first.
        return self._frame.arguments(self.kinds[i], hidden_BTH, attention_mask_BT)

    def unlike_calls(self, hidden_BTH: Tensor, attention_mask_BT: Tensor) -> list[tuple[int, int]]:
        """Layers that the model calls with other arguments than the first of their kind, each with that one: none."""
        arguments = self._frame.arguments_of_first(self.layer_count, hidden_BTH, attention_mask_BT)
        return [(i, kind) for i, kind in enumerate(self.kinds) if not are_equal(arguments[i], arguments[kind])]


def _built(config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    """The model with this attention where its family has it, and with experts one after the other."""
    whole = model_class(config)
    if attention == "sdpa" and not whole._supports_sdpa:
        attention = "eager"
    model: PreTrainedModel = whole._from_config(
        config, dtype=SKELETON_DTYPE, attn_implementation=attention, experts_implementation=EXPERTS
    )
    return model


def _numbers(layers: list[int]) -> str:
    """`layers 0-3, 5` for 0, 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for number in layers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    told = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"layer{'s' * (len(layers) > 1)} {', '.join(told)}"


def layer_list(front: nn.Module, layer_count: int) -> tuple[str, nn.ModuleList]:
    for name, module in front.named_children():
        if isinstance(module, nn.ModuleList) and len(module) == layer_count:
            return name, module
    raise AssertionError(f"{type(front).__name__} has no list of {layer_count} layers")


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """What two layers of one kind have in common; all that may differ is their number."""
    shapes = tuple((name, tuple(tensor.shape)) for name, tensor in layer.state_dict().items())
    settings = tuple(
        (name, attribute, value)
        for name, module in layer.named_modules()
        for attribute, value in sorted(vars(module).items())
        if isinstance(value, bool | int | float | str | None) and attribute not in LAYER_NUMBERS
    )
    return type(layer), shapes, settings
