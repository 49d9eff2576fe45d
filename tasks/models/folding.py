"""Which modules of a layer may scale a subset's input: found by trying it on the layer's own code, not by names.

AWQ multiplies the input columns of a subset's weights by scales, and divides the output channels of whatever makes that
input: a norm, or a linear from which the input comes channel by channel (v_proj for o_proj, up_proj for down_proj).
Whether that leaves the layer's function as it was is a property of the code between the linears, so that is what is run:
the layer's linears are replaced by constant outputs, no weight is read, and the outputs of each candidate are doubled. A
candidate is taken when

* the inputs of every linear of one subset are doubled, exactly: powers of two commute with every product and sum;
* nothing else changes: no other linear's input, not what the layer hands on. So an output that something else reads too
  (a residual) is refused.

Doubling the channels whose number has a certain bit, bit after bit, tells from which channel each input column comes:
with grouped queries, the heads of a group share theirs. A norm must multiply by its weight, or by one plus its weight. An
expert that no token of the trial comes to is folded as its siblings are.

The norm before a mixture of experts feeds all of them, and a router that chooses between them. Rounding would move tokens
from one expert to another, so scales there are powers of two, the same for every reader, and the router's columns are
multiplied by them: neither changes a bit of what the router says. Such a `Fold` names the matrices that follow the norm,
found as the rest is: with the norm doubled and their columns halved, only the linears' inputs may change.

Shape suffixes: B samples, T tokens, H hidden size, N channels of a candidate, K in_features.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from tasks.models import layer_names

Subset = tuple[str, ...]
PROBED_TOKENS = 3
UNSCALED = torch.tensor(1.0)


@dataclass(frozen=True, eq=False)
class Fold:
    """A module, by its name within the layer, that can take up the inverse of a subset's scales.

    channels_K int64: the output channel of it from which each of the subset's input columns comes. `offset` is 0 for a
    norm that multiplies by its weight, 1 for one that multiplies by 1 + weight, None for a linear. `followers` are the
    modules, of the layer's own names and in the order of execution, whose weight's columns are to be multiplied by what
    is taken out of a norm: routers. All subsets that the norm feeds then have this fold, and share their scales, which
    must be powers of two.
    """

    module: str
    channels_K: Tensor
    channel_count: int
    offset: int | None
    followers: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Folding:
    """What can be folded in a layer, and why a subset can't; every subset is in one of the two."""

    folds: Mapping[Subset, Fold]
    refusals: Mapping[Subset, str]


def find_folding(
    layer: nn.Module, subsets: Sequence[Subset], hidden_BTH: Tensor, arguments: Mapping[str, Any]
) -> Folding:
    """Try every norm and linear of `layer`, a skeleton whose weights may be on the meta device; it is changed.

    `hidden_BTH` float32 on the CPU, of few tokens and any values, and `arguments` are what the layer is called with.
    """
    generator = torch.Generator().manual_seed(0)
    probe = _Probe(layer, [name for subset in subsets for name in subset], hidden_BTH, arguments, generator)
    folds: dict[Subset, Fold] = {}
    refusals: dict[Subset, str] = {}
    for own, module in layer.named_modules():
        name = probe.linears.get(module, own)
        if not (module in probe.linears or _is_norm(module)):
            continue
        followers = () if module in probe.linears else probe.readers(name)
        reached = probe.doubled_by(name, followers)
        readers = [subset for subset in subsets if reached.intersection(subset)]
        if not readers:
            continue
        whole = reached == {linear for subset in readers for linear in subset} and not folds.keys() & set(readers)
        try:
            if not whole or (len(readers) > 1 and not followers):
                raise _Refused("feeds more than the linears of one subset")
            folds |= dict.fromkeys(readers, probe.fold(name, [subset[0] for subset in readers], followers))
        except _Refused as reason:
            refusals |= {subset: f"`{name}` {reason}" for subset in readers if subset not in folds}
    idle = [subset for subset in subsets if not probe.reached.issuperset(subset)]
    for subset in subsets:
        if subset not in idle:
            refusals.setdefault(subset, "nothing before it scales its input channel by channel, and nothing else")
    for subset in idle:
        for other in (*folds, *refusals):
            if (moved := _moved_to_sibling(layer, other, subset)) is None:
                continue
            if other not in folds:
                refusals.setdefault(subset, refusals[other].replace(f"`{moved[0]}.", f"`{moved[1]}."))
            elif (fold := _fold_of_sibling(layer, folds[other], *moved)) is not None:
                folds[subset] = fold
                break
        refusals.setdefault(subset, "no token of the trial came to it")
    return Folding(folds, {subset: refusals[subset] for subset in subsets if subset not in folds})


def _moved_to_sibling(layer: nn.Module, other: Subset, subset: Subset) -> tuple[str, str] | None:
    """The expert that `other` belongs to and that of `subset`, if these are the same linears of two experts of one class."""
    theirs, ours = other[0].split("."), subset[0].split(".")
    if len(theirs) != len(ours):
        return None
    places = [place for place, parts in enumerate(zip(theirs, ours, strict=True)) if parts[0] != parts[1]]
    if len(places) != 1 or not (theirs[places[0]].isdigit() and ours[places[0]].isdigit()):
        return None
    expert, own = (".".join(parts[: places[0] + 1]) for parts in (theirs, ours))
    if type(layer.get_submodule(expert)) is not type(layer.get_submodule(own)):
        return None
    moved = [f"{own}{name.removeprefix(expert)}" for name in other if name.startswith(f"{expert}.")]
    return (expert, own) if tuple(moved) == subset else None


def _fold_of_sibling(layer: nn.Module, fold: Fold, expert: str, own: str) -> Fold | None:
    """The fold of an expert that no token came to, as one of another number has it: they are of one class and size."""
    if fold.followers:
        return fold  # what feeds one expert feeds all
    if not fold.module.startswith(f"{expert}."):
        return None
    module = f"{own}{fold.module.removeprefix(expert)}"
    return replace(fold, module=module) if len(layer.get_parameter(f"{module}.weight")) == fold.channel_count else None


class _Refused(Exception):
    """Why a candidate can't take up scales."""


class _Probe:
    """A layer whose linears give constant outputs, so that only the code between them counts."""

    def __init__(
        self,
        layer: nn.Module,
        linears: Sequence[str],
        hidden_BTH: Tensor,
        arguments: Mapping[str, Any],
        generator: torch.Generator,
    ) -> None:
        self.layer, self.hidden_BTH, self.arguments = layer, hidden_BTH, arguments
        # By module: a linear may have another name in the layer than in the files, whose names are given.
        self.linears = {layer.get_submodule(name): name for name in linears}
        self._inputs: dict[str, list[Tensor]] = {}
        # Matrices that no method quantizes, in the order in which the layer calls them, and what they get.
        self._read: dict[str, list[Tensor]] = {}
        never_quantized = (
            set(layer.modules()) - {linear for _, linear in layer_names.linears(layer)} - self.linears.keys()
        )
        for own, module in layer.named_modules():
            weight = getattr(module, "weight", None)
            if module in never_quantized and isinstance(weight, Tensor) and weight.dim() == 2:
                module.register_forward_pre_hook(
                    lambda _, args, own=own: self._read.setdefault(own, []).append(args[0])
                )
        for module in layer.modules():
            if module in self.linears:
                linear: Any = module
                linear.forward = self._constant(self.linears[module], linear.out_features, generator)
                continue
            for own, parameter in module.named_parameters(recurse=False):
                value = torch.randn(parameter.shape, generator=generator)
                # A norm's must not be lost in the offset that it may add; a router's scores must not be so far apart that
                # nothing shows behind a softmax.
                value = 1 + 0.1 * value if parameter.dim() == 1 else value / parameter.shape[-1] ** 0.5
                setattr(module, own, nn.Parameter(value, requires_grad=False))
        self._base, self._base_output = self._run()
        self.reached = frozenset(self._base)

    def _constant(self, name: str, out_features: int, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        seed = int(torch.randint(1 << 31, (), generator=generator))

        def forward(input_BTK: Tensor) -> Tensor:
            calls = self._inputs.setdefault(name, [])
            calls.append(input_BTK.clone())
            own = torch.Generator().manual_seed(seed + len(calls))
            return torch.randn(*input_BTK.shape[:-1], out_features, generator=own)

        return forward

    def _run(
        self, name: str | None = None, factor_N: Tensor = UNSCALED, followers: Sequence[str] = ()
    ) -> tuple[dict[str, list[Tensor]], Tensor]:
        """The inputs of all linears and the layer's output, with the output of module `name` times `factor_N`.

        And with the columns of `followers` divided by it.
        """
        self._inputs, self._read = {}, {}
        hooks = []
        if name is not None:
            module = self.layer.get_submodule(name)
            hooks.append(module.register_forward_hook(lambda _module, _args, output: output * factor_N))
        own_weights = {follower: self.layer.get_parameter(f"{follower}.weight") for follower in followers}
        whole = {follower: weight.data for follower, weight in own_weights.items()}
        try:
            with torch.no_grad():
                for weight in own_weights.values():
                    weight.data = weight.data / factor_N
                output = self.layer(self.hidden_BTH.clone(), **self.arguments)
        finally:
            for follower, weight in own_weights.items():
                weight.data = whole[follower]
            for hook in hooks:
                hook.remove()
        return self._inputs, output[0] if isinstance(output, tuple) else output

    def readers(self, name: str) -> tuple[str, ...]:
        """The matrices that no method quantizes and that get the output of `name`, or what doubles with it."""
        self._run()
        base = self._read
        self._run(name, torch.tensor(2.0))
        return tuple(
            own
            for own, calls in self._read.items()
            if own in base
            and len(calls) == len(base[own])
            and all(
                call.shape == was.shape and torch.equal(call, 2 * was)
                for call, was in zip(calls, base[own], strict=True)
            )
        )

    def doubled_by(self, name: str, followers: Sequence[str] = ()) -> set[str]:
        """The linears whose inputs are doubled when the output of `name` is; empty when anything else changes too."""
        inputs, output_BTH = self._run(name, torch.tensor(2.0), followers)
        if not torch.equal(output_BTH, self._base_output) or inputs.keys() != self._base.keys():
            return set()
        doubled = set()
        for linear, calls in inputs.items():
            base = self._base[linear]
            if len(calls) != len(base) or any(call.shape != was.shape for call, was in zip(calls, base, strict=True)):
                return set()
            if all(torch.equal(call, was) for call, was in zip(calls, base, strict=True)):
                continue
            if not all(torch.equal(call, 2 * was) for call, was in zip(calls, base, strict=True)):
                return set()
            doubled.add(linear)
        return doubled

    def fold(self, name: str, readers: Sequence[str], followers: tuple[str, ...]) -> Fold:
        """How `name` scales the inputs of `readers`, which double with it; _Refused when not channel by channel."""
        module: Any = self.layer.get_submodule(name)
        if isinstance(module, nn.Linear):
            count, offset = module.out_features, None
        else:
            count, offset = len(module.weight), _offset(module)
        if followers and offset != 0:
            raise _Refused("adds 1 to its weight, which can't be halved exactly, and feeds a router too")
        numbers_N = torch.arange(count)
        for reader in readers:
            base_TK = torch.cat([call.reshape(-1, call.shape[-1]) for call in self._base[reader]])
            if bool((base_TK == 0).all(dim=0).any()):  # twice nothing is nothing: no telling whose channel it is
                raise _Refused("gives channels that are zero in the trial")
        channels = [torch.zeros(self._base[reader][0].shape[-1], dtype=torch.int64) for reader in readers]
        for bit in range((count - 1).bit_length()):
            inputs, output_BTH = self._run(name, 1.0 + ((numbers_N >> bit) & 1), followers)
            if followers and not torch.equal(output_BTH, self._base_output):
                raise _Refused("does not feed the router channel by channel")
            for reader, channels_K in zip(readers, channels, strict=True):
                channels_K += self._doubled_columns(self._base[reader], inputs[reader]).long() << bit
        if any(not torch.equal(channels_K, channels[0]) for channels_K in channels):
            raise _Refused("feeds its readers different channels")
        return Fold(name, channels[0], count, offset, followers)

    @staticmethod
    def _doubled_columns(base: list[Tensor], tried: list[Tensor]) -> Tensor:
        base_TK, tried_TK = (torch.cat([call.reshape(-1, call.shape[-1]) for call in calls]) for calls in (base, tried))
        is_doubled_K = (tried_TK == 2 * base_TK).all(dim=0)
        if not bool((is_doubled_K | (tried_TK == base_TK).all(dim=0)).all()):
            raise _Refused("mixes its channels on the way")
        return is_doubled_K


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 1 and not list(module.children())


def _offset(module: nn.Module) -> int:
    """What a norm adds to its weight before it multiplies by it; _Refused unless that is 0 or 1."""
    if len(list(module.parameters())) > 1:
        raise _Refused("adds a bias, which scales can't be folded into exactly")
    further = list(signature(module.forward).parameters.values())[1:]
    if any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in further):
        raise _Refused("takes more than its input")
    norm: Any = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(1)
    x_TN = torch.randn(PROBED_TOKENS, len(norm.weight), generator=generator)
    drawn_N = torch.rand(len(norm.weight), generator=generator)
    outputs = {}
    for label, weight_N in (("zero", torch.zeros_like(drawn_N)), ("one", torch.ones_like(drawn_N)), ("drawn", drawn_N)):
        norm.weight.data.copy_(weight_N)
        with torch.no_grad():
            outputs[label] = norm(x_TN)
    for offset, unit_TN in ((0, outputs["one"]), (1, outputs["zero"])):
        if torch.allclose(outputs["drawn"], (offset + drawn_N) * unit_TN, rtol=1e-5, atol=1e-6):
            return offset
    raise _Refused("does not multiply by its weight, nor by 1 + its weight")
