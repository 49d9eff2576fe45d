"""A layer's experts as one linear per projection and expert, where transformers keeps them fused in 3-D parameters.

Files hold an expert's projections one by one, quantizers quantize them one by one, and so do the loaders of what we
export. `UnfusedExperts` takes the fused module's place and computes the same: the same tokens per expert in the same
order, the same activation, the experts' outputs added in the same order. One thing may differ: gate and up are two
products of I rows where transformers has one of 2 I, which a GPU may round otherwise in the last bit. On a CPU they are
equal, and the check before layer 0 compares them bit by bit.

Experts may be held transposed, [E, in, out], and have biases, which are then added to the product: `TransposedLinear`.
Whether the rows of gate and up alternate is nothing to it: what is given to the activation is what the fused product gives.

Legend: `T` tokens of all samples in a call, `S` experts per token, `E` experts, `H` hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

BIAS = "_bias"  # at the end of the name of a fused parameter: the biases that belong to it

# Linears, the tensor that they will all get, and which of the call's tokens its rows are.
Arrival = tuple[tuple[nn.Module, ...], Tensor, Tensor]


class TransposedLinear(nn.Linear):
    """A linear that computes as experts do which are held transposed: a product, then the bias.

    Neither is the same to the last bit as what nn.Linear does, and a product of a few rows depends on which way a weight
    lies in memory too. So `weight` [out, in] is a view of what is held as [in, out]; whoever changes it does so in place.
    """

    def forward(self, input: Tensor) -> Tensor:
        output = input @ self.weight.T
        return output if self.bias is None else output + self.bias

    def lay_out(self) -> None:
        """Hold the weight the way that it is used, whichever it was loaded in."""
        if not self.weight.T.is_contiguous():
            self.weight = nn.Parameter(self.weight.T.contiguous().T, requires_grad=self.weight.requires_grad)


class UnfusedExperts(nn.Module):
    """What a fused experts module of transformers computes in its eager implementation, expert by expert.

    Its children are named by the number of the expert, theirs as the source names the projections. Experts are gone
    through in `groups`, contiguous and in order: all inputs of a group are known at once, so that a group is quantized
    at once. The result does not depend on the grouping.
    """

    def __init__(self, fused: nn.Module, projections: Sequence[str]) -> None:
        """`projections`: the source's names of gate, up and down, or of up and down where there is no gate."""
        super().__init__()
        self.num_experts = experts_in(fused)
        self._up_names, self._down_name = tuple(projections[:-1]), projections[-1]
        self.groups: tuple[tuple[int, ...], ...] = tuple((expert,) for expert in range(self.num_experts))
        # Called with what a group's linears are about to get; a staged forward waits in it.
        self.announce: Callable[[list[Arrival]], None] | None = None
        self._is_transposed, self._has_bias = bool(fused.is_transposed), bool(fused.has_bias)
        up, down = fused.get_parameter(_up_parameter(fused)), fused.get_parameter("down_proj")
        for number in range(self.num_experts):
            expert = nn.Module()
            for name in self._up_names:
                expert.add_module(name, self._linear(up, len(self._up_names)))
            expert.add_module(self._down_name, self._linear(down, 1))
            self.add_module(str(number), expert)
        for name in [name for name, _ in fused.named_parameters(recurse=False)]:
            delattr(fused, name)
        self._fused = (fused,)  # its activation and settings; in a tuple: not a submodule

    def forward(self, hidden_TH: Tensor, experts_TS: Tensor, weights_TS: Tensor) -> Tensor:
        if hidden_TH.is_meta:
            return self._traced(hidden_TH)
        out_TH = torch.zeros_like(hidden_TH)
        mask_EST = nn.functional.one_hot(experts_TS, num_classes=self.num_experts + 1).permute(2, 1, 0)
        for group in self.groups:
            places = {expert: torch.where(mask_EST[expert]) for expert in group}
            inputs = {expert: hidden_TH[rows] for expert, (_, rows) in places.items() if len(rows)}
            self._tell([(self._ups(expert), x, places[expert][1]) for expert, x in inputs.items()])
            # In place of its input: what is done with is not kept.
            for expert in inputs:
                inputs[expert] = self._activated(expert, inputs[expert])
            self._tell([((self._down(expert),), x, places[expert][1]) for expert, x in inputs.items()])
            for expert in list(inputs):
                slots, rows = places[expert]
                part = self._down(expert)(inputs.pop(expert)) * weights_TS[rows, slots, None]
                out_TH.index_add_(0, rows, part.to(out_TH.dtype))
        return out_TH

    def fused_tensors(self) -> dict[str, Tensor]:
        """The weights and biases as transformers holds them, by its names."""
        experts = range(self.num_experts)
        linears: dict[str, list[tuple[nn.Module, ...]]] = {
            _up_parameter(self._fused[0]): [self._ups(e) for e in experts],
            "down_proj": [(self._down(e),) for e in experts],
        }
        tensors = {}
        for name, of_experts in linears.items():
            for kind, suffix in (("weight", ""), ("bias", BIAS))[: 1 + self._has_bias]:
                parts: list[Tensor] = [torch.cat([each.get_parameter(kind) for each in them]) for them in of_experts]
                stack = torch.stack(parts)
                tensors[name + suffix] = stack.transpose(1, 2) if self._is_transposed and kind == "weight" else stack
        return tensors

    def lay_out(self) -> None:
        """Hold the weights in the way that their products are rounded alike; after they were loaded."""
        for module in self.modules():
            if isinstance(module, TransposedLinear):
                module.lay_out()

    def _traced(self, hidden_TH: Tensor) -> Tensor:
        """Every expert's linears once, in order; without data there is no telling which are hit."""
        for expert in range(self.num_experts):
            self._down(expert)(self._activated(expert, hidden_TH.clone()))
        return torch.zeros_like(hidden_TH)

    def _activated(self, expert: int, x: Tensor) -> Tensor:
        fused: Any = self._fused[0]
        outputs = [linear(x) for linear in self._ups(expert)]
        if len(outputs) == 1:
            activated: Tensor = fused.act_fn(outputs[0])
        else:
            activated = fused._apply_gate(torch.cat(outputs, dim=-1))
        return activated

    def subsets(self) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """For each expert its projections up, and its projection down, by their names within this module."""
        return [
            (tuple(f"{number}.{name}" for name in self._up_names), (f"{number}.{self._down_name}",))
            for number in range(self.num_experts)
        ]

    def _tell(self, arrivals: list[Arrival]) -> None:
        if self.announce is not None and arrivals:
            self.announce(arrivals)

    def _ups(self, expert: int) -> tuple[nn.Module, ...]:
        return tuple(self.get_submodule(f"{expert}.{name}") for name in self._up_names)

    def _linear(self, stack: Tensor, count: int) -> nn.Linear:
        """One of `count` linears that share the rows of a fused parameter [experts, out, in], or [experts, in, out]."""
        rows, columns = stack.shape[:0:-1] if self._is_transposed else stack.shape[1:]
        kind = TransposedLinear if self._is_transposed else nn.Linear
        return kind(columns, rows // count, bias=self._has_bias, device=stack.device, dtype=stack.dtype)

    def _down(self, expert: int) -> nn.Module:
        return self.get_submodule(f"{expert}.{self._down_name}")


def group_experts(layer: nn.Module, size: int) -> None:
    """Go through the layer's experts in groups of `size`; of a layer without experts nothing."""
    for module in layer.modules():
        if isinstance(module, UnfusedExperts):
            numbers = tuple(range(module.num_experts))
            module.groups = tuple(numbers[start : start + size] for start in range(0, len(numbers), size))


def fused_experts(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules of a layer that hold all experts in 3-D parameters, by their names within the layer."""
    for name, module in layer.named_modules():
        is_convolution = isinstance(module, nn.modules.conv._ConvNd)
        if not is_convolution and any(parameter.ndim == 3 for parameter in module.parameters(recurse=False)):
            yield name, module


def why_not_unfused(fused: nn.Module) -> str | None:
    """Why a fused module can't be taken apart, or None."""
    parameters = {name for name, _ in fused.named_parameters(recurse=False)}
    weights = {_up_parameter(fused), "down_proj"}
    expected = weights | {name + BIAS for name in weights} if getattr(fused, "has_bias", False) else weights
    if not hasattr(fused, "has_gate") or parameters != expected:
        return (
            f"holds {', '.join(f'`{name}`' for name in sorted(parameters))}, which is no layout of experts known here"
        )
    if fused.has_bias and not fused.is_transposed:
        return "has experts with biases that are not transposed"
    return "has norms after its experts" if fused.has_post_expert_norm else None


def is_cut_in_order(fused: nn.Module) -> bool:
    """Whether the projections of a fused parameter follow each other in it; else their rows alternate."""
    return bool(fused.is_concatenated)


def experts_in(fused: nn.Module) -> int:
    return len(fused.get_parameter("down_proj"))


def _up_parameter(fused: nn.Module) -> str:
    return "gate_up_proj" if getattr(fused, "has_gate", True) else "up_proj"
