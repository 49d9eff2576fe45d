"""A layer's forward over many batches, paused at its linears, so that each linear runs once per calibration token.

Each batch's forward is transformers' own code running in a greenlet. When it reaches the first linear of a subset that
is not yet released, it switches back with that linear's input. Once every batch has arrived, the caller has all inputs
of the subset, quantizes its weights in place, and every batch goes on with the quantized weights.

Memory: all batches are inside the layer at once. What stays alive for each of them, beside what the caller holds, is
what the paused forward still needs. At {q,k,v}: the layer's input [B,T,H], the normed input and its mask and rotary
tables; at {o}: the layer's input and the attention's output; at {gate,up}: the residual and the normed residual; at
{down}: both and [B,T,intermediate], the peak. Masks exist only for padded batches (bool, B x T x T).

Where that is too much, calls are rewound instead: one at a time is inside, from its start to the subset, and given up.

Experts (`UnfusedExperts`) are paused a group at a time: what all linears of a group will get is known before the first
of them runs, so a call waits once, with all these inputs in hand, and the caller takes the group's subsets one by one.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from types import TracebackType
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from tasks.models.experts import Arrival, UnfusedExperts

# By linear: its input [B, T, K] or [rows, K], and which of the call's B x T tokens the rows are, where they are not all.
Waiting = dict[str, tuple[Tensor, Tensor | None]]
# Hidden states of a batch, and the other arguments of the layer.
Calls = Iterable[tuple[Tensor, Mapping[str, Any]]]


class StagedForward:
    """One layer over many calls, subset by subset. Belongs to the thread that entered it, as greenlets do.

    `subsets` are names of linears within the layer, in order of execution; the linears of one subset must share
    their input. Linears in no subset run through unpaused. `calls` are (hidden, keyword arguments) and are taken one
    by one when the forward starts, so a generator keeps only what the forward itself keeps. The layer's linears are
    patched while this is open: one layer serves one StagedForward at a time.

        with StagedForward(layer, subsets, calls) as staged:
            for subset in subsets:
                for index, input_BTK in staged.advance(subset): ...
                ...  # change the weights of the subset in place, or leave them
            outputs = staged.finish()
    """

    def __init__(
        self,
        layer: nn.Module,
        subsets: Sequence[Sequence[str]],
        calls: Calls,
        stages: Sequence[Sequence[Sequence[str]]] = (),
        *,
        rewinds: bool = False,
    ) -> None:
        """`stages` are the subsets again, those together that are taken from one stand of the calls: of a group of
        experts. Left out, each is taken from a stand of its own.

        With `rewinds` no call waits: each is begun anew for every subset, up to it, and given up again once its input is
        looked at. So there is one call inside the layer at a time, for about twice the time; `calls` are then iterated
        over and over.
        """
        self._layer = layer
        self._subsets = tuple(tuple(subset) for subset in subsets)
        self._stage = {subset: number for number, subset in enumerate(self._subsets)}
        self._stage |= {tuple(subset): number for number, stage in enumerate(stages) for subset in stage}
        self._calls: Calls = calls
        self._rewinds = rewinds
        self._linears = {name: layer.get_submodule(name) for subset in self._subsets for name in subset}
        self._released: set[str] = set()
        self._greenlets: dict[int, greenlet] = {}
        self._paused: dict[int, Waiting] = {}  # at these linears, until the call is through
        self._outputs: dict[int, Tensor] = {}
        self._thread: int | None = None

    def __enter__(self) -> "StagedForward":
        self._thread = threading.get_ident()
        for name, linear in self._linears.items():
            linear.forward = self._gated(name, linear.forward)
        for experts in self._experts():
            experts.announce = self._announced
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for linear in self._linears.values():
            linear.__dict__.pop("forward", None)
        for experts in self._experts():
            experts.announce = None
        self._calls = ()
        for index in list(self._greenlets):
            self._give_up(index)
        self._outputs.clear()

    def advance(self, subset: Sequence[str]) -> Iterator[tuple[int, Tensor]]:
        """Bring every call to `subset`, yielding (number of the call, input [B, T, K]) as each arrives.

        Subsets are taken in their order; the weights of the ones before are final from here on, but for those of the
        same group of experts, all of whose inputs are in hand. A call that does not use the subset (an expert without
        tokens) yields nothing; an expert's input is [rows, K]. Iterate to the end before changing weights.
        """
        names = tuple(subset)
        if names not in self._subsets:
            raise ValueError(f"{names} is not one of the subsets {self._subsets}")
        before = {name for other in self._subsets if self._stage[other] < self._stage[names] for name in other}
        if self._released - before:
            raise RuntimeError(f"{names} is already past: subsets are taken in their order")
        self._released |= before
        for index in self._run():
            paused = self._paused.get(index, {})
            name = next((name for name in names if name in paused), None)
            if name is not None:
                yield index, paused[name][0]
            del paused

    def real_tokens(self, index: int, subset: Sequence[str], mask_BT: Tensor) -> Tensor:
        """The rows [tokens, K] of the input that call `index` waits with at `subset`, less padding.

        `mask_BT`, on any device, is True at the call's real tokens.
        """
        return _real(*self._paused[index][subset[0]], mask_BT)

    def same_tokens(self, other: "StagedForward", index: int, subset: Sequence[str], mask_BT: Tensor) -> Tensor:
        """The inputs [tokens, K] that `other`, at the same subset, has for the tokens of `real_tokens`, in their order.

        Routers may send a token to other experts there: where it comes to this expert here only, its input here stands
        for the other.
        """
        input_BTK, rows = self._paused[index][subset[0]]
        there_BTK, rows_there = other._paused.get(index, {}).get(subset[0], (None, None))
        if rows is None:
            assert there_BTK is not None, "what is no expert gets all tokens"
            return _real(there_BTK, None, mask_BT)
        found_TK = input_BTK.clone()
        if there_BTK is not None and rows_there is not None:
            place_T = rows.new_full((mask_BT.numel(),), -1)
            place_T[rows_there] = torch.arange(len(rows_there), device=place_T.device)
            place = place_T[rows]
            found_TK[place >= 0] = there_BTK[place[place >= 0]]
        return _real(found_TK, rows, mask_BT)

    def outputs(self) -> Iterator[Tensor]:
        """Run each call to its end and yield the layer's output [B, T, H], in the order of the calls."""
        self._released |= set(self._linears)
        for index in self._run():
            yield self._outputs.pop(index)

    def finish(self) -> list[Tensor]:
        """All outputs at once."""
        return list(self.outputs())

    def _run(self) -> Iterator[int]:
        """Run each call as far as the released linears let it, and yield its number."""
        if threading.get_ident() != self._thread:
            raise RuntimeError("a StagedForward runs in the thread that entered it, and only while it is open")
        if self._rewinds or not self._greenlets:
            numbers = count()  # not enumerate, which keeps the last call's tensors while it asks for the next
            for hidden_BTH, arguments in self._calls:
                index = next(numbers)
                self._greenlets[index] = greenlet(self._layer)
                self._switch(index, hidden_BTH, **arguments)
                del hidden_BTH, arguments
                yield index
                if self._rewinds:
                    self._give_up(index)
            if not self._rewinds:
                self._calls = ()
            return
        for index in self._greenlets:
            if index in self._paused and self._released.issuperset(self._paused[index]):
                self._switch(index)
            yield index

    def _give_up(self, index: int) -> None:
        """End a call where it stands: its frames, and the tensors in them, go."""
        call = self._greenlets.pop(index)
        self._paused.pop(index, None)
        if not call.dead:
            call.parent = getcurrent()
            call.throw()

    def _switch(self, index: int, *args: Any, **kwargs: Any) -> None:
        self._paused.pop(index, None)
        call = self._greenlets[index]
        call.parent = getcurrent()
        # Grad mode belongs to the thread, not to the greenlet: set around each switch, never across one.
        with torch.no_grad():
            arrived = call.switch(*args, **kwargs)
        if call.dead:
            self._outputs[index] = arrived[0] if isinstance(arrived, tuple) else arrived
        else:
            self._paused[index] = arrived

    def _gated(self, name: str, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def pause_then_forward(input_BTK: Tensor) -> Tensor:
            if name not in self._released:
                caller = getcurrent().parent
                assert caller is not None, "a gated layer runs inside a StagedForward only"
                caller.switch({name: (input_BTK, None)})
            return forward(input_BTK)

        return pause_then_forward

    def _announced(self, arrivals: list[Arrival]) -> None:
        """Wait with what a group of experts is about to get, until all of its linears are released."""
        names = {id(linear): name for name, linear in self._linears.items()}
        waited = {
            names[id(linear)]: (x, rows) for linears, x, rows in arrivals for linear in linears if id(linear) in names
        }
        if not self._released.issuperset(waited):
            caller = getcurrent().parent
            assert caller is not None, "a gated layer runs inside a StagedForward only"
            caller.switch(waited)

    def _experts(self) -> list[UnfusedExperts]:
        return [module for module in self._layer.modules() if isinstance(module, UnfusedExperts)]


def _real(input_BTK: Tensor, rows: Tensor | None, mask_BT: Tensor) -> Tensor:
    """The rows of an input that are real tokens; `rows` are its tokens, where they are not all."""
    input_TK = input_BTK.reshape(-1, input_BTK.shape[-1])
    if bool(mask_BT.all()):
        return input_TK
    mask_T = mask_BT.reshape(-1).to(input_TK.device)
    return input_TK[mask_T if rows is None else mask_T[rows]]
