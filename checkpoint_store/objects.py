"""Immutable bytes named by their SHA-256: hashed while they are written, and read back only after the same hash."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from checkpoint_store.canonical import canonical
from checkpoint_store.disk import WRITE_VIEW_BYTES, Disk
from checkpoint_store.errors import CheckpointDamaged, CheckpointError
from checkpoint_store.failures import reading

OBJECT_NAME = re.compile(r"[0-9a-f]{64}")
ROLE = re.compile(r"[a-z][a-z_]{0,31}")
_VERIFY_WINDOW_BYTES = 16 << 20
_PARALLEL_FROM_BYTES = 64 << 20


@dataclass(frozen=True)
class ObjectRef:
    """One object of a generation: what it is for, whose it is, and the bytes it must have."""

    role: str
    key: str
    sha256: str
    size: int

    @cached_property
    def encoded(self) -> bytes:
        """The ref as a manifest holds it; made once, since every later manifest holds it again."""
        return canonical({"key": self.key, "role": self.role, "sha256": self.sha256, "size": self.size})


class Payload(Protocol):
    """Bytes to store, as contiguous pieces of memory that are there already and stay until they are written."""

    @property
    def size(self) -> int: ...

    def views(self) -> Iterator[memoryview]: ...


@dataclass(frozen=True)
class BytesPayload:
    """A payload of bytes in hand."""

    data: bytes | memoryview

    @property
    def size(self) -> int:
        return memoryview(self.data).nbytes

    def views(self) -> Iterator[memoryview]:
        yield memoryview(self.data)


@dataclass
class Counters:
    """What a store has moved since it was opened, in bytes; objects and metadata are told apart."""

    bytes_written: int = 0
    bytes_hashed: int = 0
    bytes_verified: int = 0
    metadata_bytes_written: int = 0


def write_object(
    disk: Disk, attempt: int, temporary: str, objects: int, payload: Payload, counters: Counters
) -> tuple[str, int]:
    """SHA-256 and size of what was written; its bytes are durable, its name is once `objects` is synced.

    The object is always renamed onto its name, also when the name is taken: what stands there may be torn.
    """
    file = disk.create(attempt, temporary)
    try:
        try:
            disk.allocate(file, payload.size)
            sha256, written = _write_and_hash(disk, file, payload)
        except Exception:
            with suppress(OSError):  # the first error is the one to tell
                disk.close(file)
            raise
        disk.close(file)
        counters.bytes_written += written
        counters.bytes_hashed += written
        disk.rename(attempt, temporary, objects, sha256)
    except Exception:
        with suppress(OSError):  # as above; the sweep removes what is left
            disk.unlink(attempt, temporary)
        raise
    return sha256, written


def _write_and_hash(disk: Disk, file: int, payload: Payload) -> tuple[str, int]:
    """Write and sync all of `payload`, and hash the same memory meanwhile in a second thread, which waits for nothing.

    Both release the GIL. The sync starts as soon as the last piece is written, however far the hash is: on a fast disk
    the whole then takes as long as the hash, on a slow one as long as the disk.
    """
    hasher, written = hashlib.sha256(), 0
    second = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-hash") if payload.size > WRITE_VIEW_BYTES else None
    hashed: list[Future[None]] = []
    try:
        for piece in _pieces(payload):
            if second is None:
                hasher.update(piece)
            else:
                hashed.append(second.submit(hasher.update, piece))
            disk.write(file, piece)
            written += len(piece)
        if not written == payload.size == disk.size(file):
            raise CheckpointError(
                f"a payload promised {payload.size} bytes and gave {written}: it changed while it was written"
            )
        disk.sync(file)
        for piece_hashed in hashed:
            piece_hashed.result()
    finally:
        if second is not None:
            second.shutdown(cancel_futures=True)
    return hasher.hexdigest(), written


def _pieces(payload: Payload) -> Iterator[memoryview]:
    for view in payload.views():
        if view.nbytes == 0:
            continue
        flat = view.cast("B")
        for start in range(0, len(flat), WRITE_VIEW_BYTES):
            yield flat[start : start + WRITE_VIEW_BYTES]


def map_verified(
    disk: Disk, objects: int, ref: ObjectRef, where: str, on_hashed: Callable[[int], None] | None = None
) -> memoryview:
    """The object's bytes as a mapping that was hashed; `CheckpointDamaged` when they are not what `ref` says.

    `on_hashed` is told the bytes of each piece, and may wait.
    """
    what = f"{where}/objects/{ref.sha256}"
    with reading(what):
        file = disk.open_for_read(objects, ref.sha256)
        try:
            size = disk.size(file)
            if size != ref.size:
                raise CheckpointDamaged(f"`{what}` ({ref.role} {ref.key}) has {size} bytes instead of {ref.size}")
            view = disk.map(file, size)
        finally:
            disk.close(file)
        found = _hash_mapping(disk, view, on_hashed)
    if found != ref.sha256:
        raise CheckpointDamaged(f"`{what}` ({ref.role} {ref.key}) has other bytes: their SHA-256 is {found}")
    return view


def _hash_mapping(disk: Disk, view: memoryview, on_hashed: Callable[[int], None] | None) -> str:
    hasher = hashlib.sha256()
    for start in range(0, len(view), _VERIFY_WINDOW_BYTES):
        piece = view[start : start + _VERIFY_WINDOW_BYTES]
        disk.read_in(view, start, len(piece))
        hasher.update(piece)
        if on_hashed is not None:
            on_hashed(len(piece))
    return hasher.hexdigest()


def verify_objects(
    disk: Disk, objects: int, refs: Iterable[ObjectRef], where: str, keep_roles: frozenset[str]
) -> dict[str, memoryview]:
    """Verify every object; return the mappings of those in `keep_roles`, by digest.

    Sizes are looked at first: a missing file is told at once, not after gigabytes were hashed. The other mappings are
    dropped, so that resuming a deep model does not hold all its layers in the address space.
    """
    distinct = {ref.sha256: ref for ref in refs}
    kept_digests = {ref.sha256 for ref in refs if ref.role in keep_roles}
    for ref in distinct.values():
        check_size(disk, objects, ref, where)

    def verified(ref: ObjectRef) -> memoryview | None:
        view = map_verified(disk, objects, ref, where)
        return view if ref.sha256 in kept_digests else None

    if sum(ref.size for ref in distinct.values()) < _PARALLEL_FROM_BYTES:
        views = [verified(ref) for ref in distinct.values()]
    else:
        with ThreadPoolExecutor(thread_name_prefix="checkpoint-verify") as pool:
            views = list(pool.map(verified, distinct.values()))
    return {sha256: view for sha256, view in zip(distinct, views, strict=True) if view is not None}


def check_size(disk: Disk, objects: int, ref: ObjectRef, where: str) -> None:
    what = f"{where}/objects/{ref.sha256}"
    with reading(what):
        found = disk.stat(objects, ref.sha256)
    if not found.is_file:
        raise CheckpointDamaged(f"`{what}` ({ref.role} {ref.key}) is damaged: it is not a regular file")
    if found.size != ref.size:
        raise CheckpointDamaged(f"`{what}` ({ref.role} {ref.key}) has {found.size} bytes instead of {ref.size}")
