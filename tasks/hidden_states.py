"""Hidden states between layers: in memory, or in files of the run's scratch directory where they do not fit.

A spilled batch is a file of its own that goes with the last reference to it, as the tensor in its place would: the next
layer's inputs replace the last one's, a layer that is repeated finds its own again, and a publication that is still
being written holds what it writes. The scratch directory goes with the run, or is swept by the next one after a kill.
"""

import errno
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_store.errors import StorageFull
from checkpoint_store.objects import Payload
from checkpoint_store.tensors import TensorPayload, continuation_payloads

_numbers = count()


class SpilledTensor:
    """A tensor in a file, with what can be known of it without reading."""

    def __init__(self, tensor: Tensor, directory: Path) -> None:
        """Write `tensor`, on the CPU, below `directory`; StorageFull, naming the way out, when there is no room."""
        self.shape, self.dtype, self.nbytes, self.device = tensor.shape, tensor.dtype, tensor.nbytes, tensor.device
        self._path = directory / f"hidden-{os.getpid()}-{next(_numbers):08d}"
        weakref.finalize(self, _remove, self._path, os.getpid()).atexit = False  # the session removes them all
        try:
            with open(self._path, "xb", buffering=0) as file:
                rest = _bytes_of(tensor.contiguous())
                while rest:
                    rest = rest[file.write(rest) :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise StorageFull(
                f"no space left for hidden states at {self._path}: {error}; free space there, or raise "
                f"hidden_states_limit so that they stay in memory, and run again: what is published stays"
            ) from error

    def load(self) -> Tensor:
        """The tensor, in memory of its own."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        rest = _bytes_of(tensor)
        with open(self._path, "rb", buffering=0) as file:
            while rest:
                read = file.readinto(rest)
                if not read:
                    raise OSError(errno.EIO, "hidden states became shorter than they were written", str(self._path))
                rest = rest[read:]
        return tensor


Held = Tensor | SpilledTensor


def loaded(held: Held) -> Tensor:
    """The tensor itself where it is in memory, else read anew."""
    return held.load() if isinstance(held, SpilledTensor) else held


@dataclass(frozen=True)
class SpilledPayload:
    """What `continuation_payloads` makes of tensors in memory, byte for byte, with one of them in memory at a time."""

    header: bytes
    batches: tuple[Held, ...]

    @property
    def size(self) -> int:
        return len(self.header) + sum(batch.nbytes for batch in self.batches)

    def views(self) -> Iterator[memoryview]:
        yield memoryview(self.header)
        for batch in self.batches:
            yield _bytes_of(loaded(batch))


def payloads(batches: Sequence[Held]) -> list[Payload]:
    """All batches as the objects of a continuation; the same bytes wherever the batches are."""
    in_memory = [batch for batch in batches if isinstance(batch, Tensor)]
    if len(in_memory) == len(batches):
        return continuation_payloads(in_memory)
    # Never written to, so that they take addresses and no memory: the headers need shapes and types only.
    stand_ins = [torch.empty(batch.shape, dtype=batch.dtype) for batch in batches]
    spilled: list[Payload] = []
    start = 0
    for chunk in continuation_payloads(stand_ins):
        assert isinstance(chunk, TensorPayload)
        stop = start + len(chunk.tensors)
        spilled.append(SpilledPayload(chunk.header, tuple(batches[start:stop])))
        start = stop
    return spilled


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _remove(path: Path, process: int) -> None:
    if os.getpid() == process:  # a forked child's copy of the object is not the last
        with suppress(FileNotFoundError):
            path.unlink()
