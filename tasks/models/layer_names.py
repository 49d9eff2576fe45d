"""What the files call the tensors of a model, and layers with one module per tensor of the files.

transformers renames some tensors as it loads them and fuses others (experts). Its own way back, by which it saves, tells
what each was called; so no family's names are written down here.
"""

import re
from collections.abc import Collection, Iterable, Mapping

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key, revert_weight_conversion

from tasks.models.experts import BIAS, UnfusedExperts, experts_in, fused_experts, is_cut_in_order, why_not_unfused
from tasks.models.stacked_experts import StackedLayout

EXPERT_TENSOR = re.compile(r"(?P<experts>.+)\.(?P<number>\d+)\.(?P<projection>[^.]+)\.weight")
# Linears that choose between experts or weigh them: small, sensitive, and left alone by every loader's fused layers.
ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})


# Heads that guess further tokens: transformers builds none, programs that serve models use them.
MULTI_TOKEN_PREDICTION = re.compile(r"(model\.)?mtp[._]")
LAYER_NUMBER = re.compile(r"(?:.+\.)?layers\.(\d+)\.")


class LayoutError(ValueError):
    """The model's tensors lie in its files in a way that is not known here; the message says which and how."""


def names_in_files(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
    """For each of the model's tensors what the files call it, or its parts, in order; `tensors` may be on meta."""
    names = {}
    for name, tensor in tensors.items():
        try:
            names[name] = tuple(revert_weight_conversion(model, {name: tensor}))
        except Exception as error:  # conversions are transformers' own and many; one that we can't follow is told
            raise LayoutError(f"`{name}` is made from the files' tensors in a way not known here: {error}") from error
    return names


def names_as_loaded(model: PreTrainedModel, held: Iterable[str]) -> dict[str, str]:
    """For each tensor that files of these names hold the files' name by the model's own, as transformers' loader renames
    them: wrapped models lie in files under names of several ages. Not of those that are fused.
    """
    renamings = [t for t in get_model_conversion_mapping(model, add_legacy=False) if isinstance(t, WeightRenaming)]
    return {rename_source_key(name, renamings, [])[0]: name for name in held}


def common_layers_name(names: Collection[str], number: int) -> str:
    """The name that all layers have before their number, by the names of the tensors of layer `number`."""
    found = {name.partition(f".{number}.")[0] for name in names}
    if len(found) > 1 or found & set(names):
        raise LayoutError(f"the tensors of layer {number} have no name in common in the files (`{min(names)}`)")
    return found.pop()


def unfuse(
    layer: nn.Module, in_files: Mapping[str, tuple[str, ...]], stacking: StackedLayout | None = None
) -> dict[str, str]:
    """Give `layer` a linear per projection and expert, in place; the files' name of each of its tensors by its own.

    `in_files` are the files' names by the layer's, as it comes from transformers; all names are within the layer. With
    `stacking` the files hold experts stacked, and their names are those under which a SourceModel shows them one by one.
    The layer answers to the files' names of its linears too (`get_submodule`). LayoutError for what can't be unfused.
    """
    names: dict[str, str] = {}
    for path, fused in list(fused_experts(layer)):
        own = [f"{path}.{name}" for name, _ in fused.named_parameters(recurse=False)]
        if (reason := why_not_unfused(fused)) is not None:
            raise LayoutError(f"`{path}` {reason}")
        theirs = [name for full in own for name in in_files[full]]
        if stacking is None:
            if not is_cut_in_order(fused):
                raise LayoutError(f"`{path}` has experts whose gates and ups alternate")
            experts, projections = _projections(path, theirs, experts_in(fused))
        else:
            experts, projections = _stacked_projections(path, theirs, fused, stacking)
        unfused = UnfusedExperts(fused, projections)
        layer.set_submodule(path, unfused)
        names |= {f"{path}.{name}": f"{experts}.{name}" for name in unfused.state_dict()}
    for name in layer.state_dict():
        if name not in names:
            if len(in_files[name]) != 1:
                raise LayoutError(f"`{name}` is made of {len(in_files[name])} tensors of the files and no experts")
            (names[name],) = in_files[name]
    for name, _ in list(layer.named_modules()):
        if isinstance(layer.get_submodule(name), nn.Linear):
            _alias(layer, name, names[f"{name}.weight"].rpartition(".")[0])
    return names


def is_for_further_tokens(name: str, config: PreTrainedConfig) -> bool:
    """Whether a tensor belongs to multi-token prediction: under its own prefix, or in layers after the last."""
    if MULTI_TOKEN_PREDICTION.match(name):
        return True
    layer, extra = LAYER_NUMBER.match(name), getattr(config, "num_nextn_predict_layers", 0)
    return layer is not None and isinstance(extra, int) and 0 <= int(layer[1]) - config.num_hidden_layers < extra


def linears(layer: nn.Module) -> list[tuple[str, nn.Linear]]:
    """The linears of a layer that are quantized, by their own names within it: all but those that rank experts."""
    return [
        (name, module)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear) and ROUTERS.isdisjoint(name.split("."))
    ]


def _projections(path: str, in_files: list[str], count: int) -> tuple[str, tuple[str, ...]]:
    """The files' name of the experts, and of their projections in the order of execution."""
    found = [EXPERT_TENSOR.fullmatch(name) for name in in_files]
    matches = [match for match in found if match is not None]
    projections = tuple(dict.fromkeys(match["projection"] for match in matches))
    prefixes = {match["experts"] for match in matches}
    if len(matches) != len(found) or len(prefixes) != 1 or len(found) != count * len(projections):
        raise LayoutError(
            f"`{path}` is {', '.join(f'`{name}`' for name in in_files[:2])} in the files: experts are read from files "
            f"that hold each projection of each expert by itself"
        )
    return prefixes.pop(), projections


def _stacked_projections(
    path: str, in_files: list[str], fused: nn.Module, stacking: StackedLayout
) -> tuple[str, tuple[str, ...]]:
    """As `_projections`, where the files have the model's own stacks."""
    prefixes = {name.rpartition(".")[0] for name in in_files}
    biases = [name + BIAS for name in stacking.projections] if stacking.has_bias else []
    expected = (fused.is_transposed, {*stacking.projections, *biases})
    if len(prefixes) != 1 or (stacking.is_transposed, {name.rpartition(".")[2] for name in in_files}) != expected:
        raise LayoutError(
            f"`{path}` is {', '.join(f'`{name}`' for name in in_files)} in the files, which is not how this family is known "
            f"to stack its experts"
        )
    return prefixes.pop(), tuple(name for names in stacking.projections.values() for name in names)


def _alias(layer: nn.Module, own: str, in_file: str) -> None:
    """Let `layer` find a module under the files' name of it: as a plain attribute, which is no submodule."""
    if own == in_file:
        return
    here, there = own.split("."), in_file.split(".")
    while here[-1] == there[-1] and _at(layer, there[:-1]) is None:
        here.pop()
        there.pop()
    module, found = layer.get_submodule(".".join(here)), _at(layer, there)
    if found is None:
        parent = layer
        for part in there[:-1]:
            if not hasattr(parent, part):
                parent.__dict__[part] = nn.Module()
            parent = getattr(parent, part)
        parent.__dict__[there[-1]] = module
    elif found is not module:
        raise LayoutError(f"`{in_file}` of the files is `{own}` of the layer, which has another module of that name")


def _at(layer: nn.Module, path: list[str]) -> nn.Module | None:
    try:
        return layer.get_submodule(".".join(path))
    except AttributeError:
        return None
