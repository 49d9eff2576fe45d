"""Tensors as safetensors objects without a copy in either direction; the store's only file that knows torch.

The bytes are those of the safetensors library: larger element types first, then by name, so that every tensor starts
at a multiple of its element's size. The header is checked here and not by that library, because the store promises a
named error, never a wrong tensor, for whatever bytes it meets.
"""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from checkpoint_store.errors import CheckpointDamaged
from checkpoint_store.objects import Payload

HEADER_LIMIT_BYTES = 16 << 20
CONTINUATION_CHUNK_BYTES = 1 << 30
# The library's own order of types, from which it sorts the data.
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_RANKS = {dtype: rank for rank, dtype in enumerate(_DTYPES.values())}


@dataclass(frozen=True)
class TensorPayload:
    """A safetensors file as its header and the memory of its tensors, which must stay as it is until it is written."""

    header: bytes
    tensors: tuple[Tensor, ...]

    @property
    def size(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)

    def views(self) -> Iterator[memoryview]:
        yield memoryview(self.header)
        for tensor in self.tensors:
            yield tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def safetensors_payload(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> TensorPayload:
    """The bytes that `safetensors.torch.save` makes of `tensors`, in place; metadata is `{"format": "pt"}` by default.

    Tensors must be contiguous and on the CPU. Raises ValueError, naming the tensor, for what the format cannot hold.
    """
    if sys.byteorder != "little":
        raise ValueError("safetensors files are little-endian and this machine is not")
    for name, tensor in tensors.items():
        _check_storable(name, tensor)
    ordered = sorted(tensors.items(), key=lambda item: (-_RANKS[item[1].dtype], item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    start = 0
    for name, tensor in ordered:
        end = start + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT_BYTES:
        raise ValueError(f"a header of {len(text)} bytes is more than {HEADER_LIMIT_BYTES}: store fewer tensors")
    return TensorPayload(len(text).to_bytes(8, "little") + text, tuple(tensor for _, tensor in ordered))


def _check_storable(name: str, tensor: Tensor) -> None:
    if name == "__metadata__":
        raise ValueError("`__metadata__` is no name for a tensor: safetensors keeps it for itself")
    if tensor.dtype not in _NAMES:
        raise ValueError(f"tensor `{name}` has type {tensor.dtype}, which an object cannot hold")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ValueError(f"tensor `{name}` is {tensor.layout} on {tensor.device}: move it to the CPU, dense")
    if not tensor.is_contiguous():
        raise ValueError(f"tensor `{name}` is not contiguous: call .contiguous() on it")


def tensors_from(view: memoryview) -> dict[str, Tensor]:
    """The tensors of a safetensors object, sharing its memory; in the order of their data.

    Raises CheckpointDamaged unless the header is one of ours to the letter: known types, no duplicate name, and data
    that covers the rest of the object exactly, without a gap or an overlap.
    """
    header_size, entries = _parse_header(view)
    if view.readonly:  # only a view that is no mapping; torch has no read-only tensors
        view = memoryview(bytearray(view))
    tensors = {}
    for start, _, name, dtype, shape in entries:
        count, offset = math.prod(shape), 8 + header_size + start
        # frombuffer takes no empty range; an offset that is no multiple of the element's size is fine with it.
        flat = torch.frombuffer(view, dtype=dtype, count=count, offset=offset) if count else torch.empty(0, dtype=dtype)
        tensors[name] = flat.reshape(shape)
    return tensors


def _parse_header(view: memoryview) -> tuple[int, list[tuple[int, int, str, torch.dtype, list[int]]]]:
    size = int.from_bytes(view[:8], "little") if len(view) >= 8 else -1
    if not 0 < size <= min(HEADER_LIMIT_BYTES, len(view) - 8):
        raise CheckpointDamaged(f"safetensors header is damaged: its size is {size} in an object of {len(view)} bytes")
    try:
        header = json.loads(bytes(view[8 : 8 + size]).decode("utf-8"), object_pairs_hook=_without_duplicates)
        if not isinstance(header, dict):
            raise ValueError("it is not a JSON object")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its metadata is not a map of texts")
        entries = sorted((_parse_entry(name, item) for name, item in header.items()), key=lambda entry: entry[:3])
        position = 8 + size
        for start, end, name, _, _ in entries:
            if 8 + size + start != position:
                raise ValueError(f"the data of `{name}` does not start where the data before it ends")
            position = 8 + size + end
        if position != len(view):
            raise ValueError(f"it tells of {position} bytes and the object has {len(view)}")
        return size, entries
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"safetensors header is damaged: {error}") from error


def _parse_entry(name: str, item: Any) -> tuple[int, int, str, torch.dtype, list[int]]:
    if not isinstance(item, dict) or set(item) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"`{name}` is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"`{name}` has an unknown type")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"`{name}` has a shape or offsets that are not sizes")
    if math.prod(size for size in shape if size) >= 2**63:
        raise ValueError(f"`{name}` has a shape that no memory holds")
    start, end = offsets
    if end - start != math.prod(shape) * _DTYPES[dtype].itemsize:
        raise ValueError(f"`{name}` has {end - start} bytes, which its shape and type do not need")
    return start, end, name, _DTYPES[dtype], shape


def _are_sizes(value: Any) -> bool:
    return (
        isinstance(value, list) and len(value) <= 64 and all(type(item) is int and 0 <= item < 2**63 for item in value)
    )


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a name stands twice in it")
    return value


def continuation_payloads(batches: Sequence[Tensor], chunk_bytes: int = CONTINUATION_CHUNK_BYTES) -> list[Payload]:
    """The hidden states of all sample batches as objects of at most `chunk_bytes`, or one batch where that is larger.

    A damaged chunk is local, and chunks are verified side by side.
    """
    chunks: list[dict[str, Tensor]] = []
    room = 0
    for index, batch in enumerate(batches):
        if not chunks or batch.nbytes > room:
            chunks.append({})
            room = chunk_bytes
        chunks[-1][f"{index:08d}"] = batch
        room -= batch.nbytes
    return [safetensors_payload(chunk) for chunk in chunks]


def continuation_batches(views: Iterable[memoryview]) -> list[Tensor]:
    """The batches that `continuation_payloads` stored, in their order, sharing the memory of the views."""
    batches: dict[str, Tensor] = {}
    for view in views:
        batches.update(tensors_from(view))
    if sorted(batches) != [f"{index:08d}" for index in range(len(batches))]:
        raise CheckpointDamaged("the continuation is damaged: its batches are not numbered without a gap")
    return [batches[name] for name in sorted(batches)]
