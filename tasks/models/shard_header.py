"""The header of a safetensors file, checked against the file itself before any tensor is believed.

A shard is an 8-byte little-endian length, so many bytes of JSON, then the tensors back to back. A shard whose download
broke off still has a good header: only its size tells, so the last offset must be exactly the end of the file.
"""

import json
import os
from dataclasses import dataclass
from math import prod
from typing import Any, TypeGuard

HEADER_LIMIT = (
    16 * 1024 * 1024
)  # bytes; a header of a million tensors is smaller, random bytes read as a length are not

BITS_OF_DTYPE = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as its reader sees it, and where it lies: `file` below the model directory, bytes `start` to `stop`."""

    file: str
    dtype: str  # as safetensors spells it: BF16, F32, ...
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        """Bytes in this dtype and shape; what lies in the file may be narrower, and is widened as it is read."""
        return prod(self.shape) * BITS_OF_DTYPE[self.dtype] // 8


class HeaderError(ValueError):
    """A shard that is not what its header says; the message names the file."""


def read_header(path: str | os.PathLike[str], file: str) -> dict[str, TensorInfo]:
    """Tensors of the safetensors file at `path`, called `file` in the result and in messages.

    Only the header is read. Raises HeaderError unless every tensor's bytes fit its dtype and shape, the tensors lie
    back to back without gap or overlap, and they end where the file ends.
    """
    try:
        with open(path, "rb") as shard:
            size = os.fstat(shard.fileno()).st_size
            start = shard.read(8)
            length = int.from_bytes(start, "little")
            if len(start) == 8 and length <= min(HEADER_LIMIT, size - 8):
                return _parsed(shard.read(length), file, size)
    except OSError as error:
        raise HeaderError(f"`{file}` can't be read: {error.strerror}") from error
    if start == b"version " and size < 1024:
        raise HeaderError(f"`{file}` is a git-lfs pointer, not the weights: run `git lfs pull` in the model directory")
    if len(start) == 8 and length > HEADER_LIMIT:
        raise HeaderError(f"`{file}` is not a safetensors file: its first 8 bytes give a header of {length} bytes")
    raise HeaderError(
        f"`{file}` is truncated: it has {size} bytes, its header alone ends at {8 + length}; fetch it again"
    )


def _parsed(data: bytes, file: str, size: int) -> dict[str, TensorInfo]:
    try:
        header = json.loads(data.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, a name given twice, absurd nesting
        raise HeaderError(f"`{file}` has a damaged header: {error}") from error
    if not isinstance(header, dict):
        raise HeaderError(f"`{file}` has a damaged header: it is not a JSON object")
    header.pop("__metadata__", None)
    offset_of_data = 8 + len(data)
    tensors = {name: _tensor(name, entry, file, offset_of_data) for name, entry in header.items()}
    end = offset_of_data
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if info.start != end:
            raise HeaderError(
                f"`{file}` has a damaged header: `{name}` starts at byte {info.start}, the one before ends at {end}"
            )
        end = info.stop
    if end > size:
        raise HeaderError(f"`{file}` is truncated: it has {size} bytes, its header describes {end}; fetch it again")
    if end < size:
        raise HeaderError(f"`{file}` has {size} bytes, {size - end} more than its header describes; fetch it again")
    return tensors


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"{', '.join(f'`{name}`' for name in twice)} is there twice")
    return result


def _tensor(name: str, entry: Any, file: str, offset_of_data: int) -> TensorInfo:
    damaged = f"`{file}` has a damaged header: `{name}`"
    if not isinstance(entry, dict):
        raise HeaderError(f"{damaged} is not described by an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS_OF_DTYPE:
        raise HeaderError(f"{damaged} has the unknown dtype {dtype!r}")
    if not _are_sizes(shape):
        raise HeaderError(f"{damaged} has the shape {shape!r}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise HeaderError(f"{damaged} has the offsets {offsets!r}")
    bits = prod(shape) * BITS_OF_DTYPE[dtype]
    if bits != 8 * (offsets[1] - offsets[0]):
        raise HeaderError(
            f"{damaged} has {offsets[1] - offsets[0]} bytes; {dtype} of shape {shape} needs {(bits + 7) // 8}"
        )
    return TensorInfo(file, dtype, tuple(shape), offset_of_data + offsets[0], offset_of_data + offsets[1])


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)
