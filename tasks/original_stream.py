"""The unquantized model's hidden states, which pass through each layer beside the quantized model's.

Methods that aim at what the unquantized model makes (tasks/methods/gptaq.py) look at both inputs of a linear, token by
token. The second layer shares its weights with the first: where one is quantized, the first gets a tensor of its own, and
each side lets go of what all its calls are past. Its batches stand where the first one's do, or pass one at a time as they
do, so there is nothing to keep but hidden states, which are handed on to the next layer after the first one's.
"""

from collections.abc import Iterator, Sequence
from types import TracebackType

from torch import Tensor, nn

from tasks.models.folding import Subset
from tasks.models.staged import Calls, StagedForward


class OriginalStream:
    """One device's batches of the unquantized model, through `layer`, a twin of the one that is quantized."""

    def __init__(
        self,
        layer: nn.Module,
        subsets: Sequence[Subset],
        calls: Calls,
        stages: Sequence[Sequence[Subset]],
        *,
        rewinds: bool,
    ) -> None:
        self.layer = layer
        self.staged = StagedForward(layer, subsets, calls, stages, rewinds=rewinds)
        self._rewinds = rewinds

    def __enter__(self) -> "OriginalStream":
        self.staged.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.staged.__exit__(kind, error, trace)

    def advance_with(self, quantized: StagedForward, subset: Subset) -> Iterator[tuple[int, Tensor]]:
        """What `quantized.advance` yields, each call with its counterpart here at the same subset."""
        if self._rewinds:
            for arrived, _ in zip(quantized.advance(subset), self.staged.advance(subset), strict=True):
                yield arrived
            return
        for _ in self.staged.advance(subset):
            pass
        yield from quantized.advance(subset)
