"""Whether a directory's file system keeps the promises that a checkpoint root stands on, as far as one can try them.

What cannot be tried is whether a device keeps what it says it has synced; only a power cut shows that.
"""

import errno
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from checkpoint_store.disk import Disk
from checkpoint_store.failures import writing
from checkpoint_store.lock import network_file_system
from checkpoint_store.root import Root

_PROBE_BYTES = 1 << 20


@dataclass(frozen=True)
class Probe:
    """One thing that was tried; a root needs those that are `required`, the others only save time or room."""

    name: str
    holds: bool
    required: bool
    promise: str
    detail: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """What is known about a directory as a place for a checkpoint."""

    path: str
    file_system_type: str
    free_bytes: int
    probes: tuple[Probe, ...]

    @property
    def is_fit(self) -> bool:
        return all(probe.holds for probe in self.probes if probe.required)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_fit": self.is_fit}


def examine(path: str, disk: Disk | None = None) -> Diagnosis:
    """Try a checkpoint root's operations in a private directory below `path`, which is removed again."""
    disk = disk or Disk()
    root = Root(disk, path)
    try:
        with writing(path):
            name = f"doctor-{secrets.token_hex(8)}"
            disk.make_directory(root.directory, name)
            scratch = disk.open_directory(root.directory, name)
            try:
                probes = _probe(disk, scratch)
            finally:
                for left in disk.list_directory(scratch):
                    disk.unlink(scratch, left)
                disk.close(scratch)
                disk.remove_directory(root.directory, name)
            network = network_file_system(disk, root.directory)
            local = Probe(
                "local",
                network is None,
                True,
                "locks and syncs mean what they say",
                network or "not a network file system",
            )
            kind = f"{disk.file_system_type(root.directory):#x}"
            return Diagnosis(path, kind, disk.free_bytes(root.directory), (local, *probes))
    finally:
        root.close()


def _probe(disk: Disk, scratch: int) -> list[Probe]:
    tries: list[tuple[str, bool, str, Callable[[Disk, int], bool]]] = [
        ("exclusive create", True, "a new file never replaces or follows what has its name", _creates_exclusively),
        ("lock", True, "one writer at a time; a dead one's lock is free", _locks),
        ("rename", True, "a file is replaced as a whole", _renames),
        ("link", True, "CURRENT.prev: a spare root pointer", _links),
        ("sync", True, "what is acknowledged survives a power cut", _syncs),
        ("map", True, "bytes are verified and used from one mapping", _maps),
        ("allocate", False, "a full disk is told before an object is written, not after", _allocates),
        ("reflink", False, "the export takes no room beside the checkpoint", _clones),
    ]
    return [_tried(disk, scratch, *one) for one in tries]


def _tried(
    disk: Disk, scratch: int, name: str, required: bool, promise: str, attempt: Callable[[Disk, int], bool]
) -> Probe:
    try:
        holds, detail = attempt(disk, scratch), ""
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        holds, detail = False, error.strerror or str(error)
    return Probe(name, holds, required, promise, detail)


def _file(disk: Disk, scratch: int, name: str, content: bytes) -> None:
    with suppress(FileNotFoundError):
        disk.unlink(scratch, name)
    file = disk.create(scratch, name)
    try:
        disk.write(file, content)
        disk.sync(file)
    finally:
        disk.close(file)


def _content(disk: Disk, scratch: int, name: str) -> bytes:
    file = disk.open_for_read(scratch, name)
    try:
        return disk.read(file, _PROBE_BYTES)
    finally:
        disk.close(file)


def _creates_exclusively(disk: Disk, scratch: int) -> bool:
    _file(disk, scratch, "exclusive", b"first")
    try:
        disk.close(disk.create(scratch, "exclusive"))
    except FileExistsError:
        return True
    return False


def _locks(disk: Disk, scratch: int) -> bool:
    one, other = disk.open_for_lock(scratch, "lock"), disk.open_for_lock(scratch, "lock")
    try:
        excludes = disk.lock(one, exclusive=True) and not disk.lock(other, exclusive=True)
    finally:
        disk.close(one)
    try:
        return excludes and disk.lock(other, exclusive=True)
    finally:
        disk.close(other)


def _renames(disk: Disk, scratch: int) -> bool:
    _file(disk, scratch, "target", b"old")
    _file(disk, scratch, "source", b"new")
    disk.rename(scratch, "source", scratch, "target")
    return _content(disk, scratch, "target") == b"new" and "source" not in disk.list_directory(scratch)


def _links(disk: Disk, scratch: int) -> bool:
    _file(disk, scratch, "original", b"linked")
    disk.link(scratch, "original", scratch, "second name")
    return disk.stat(scratch, "original").inode == disk.stat(scratch, "second name").inode


def _syncs(disk: Disk, scratch: int) -> bool:
    _file(disk, scratch, "synced", b"bytes")
    disk.sync_directory(scratch)
    return True


def _maps(disk: Disk, scratch: int) -> bool:
    content = secrets.token_bytes(10_000)
    _file(disk, scratch, "mapped", content)
    file = disk.open_for_read(scratch, "mapped")
    try:
        view = disk.map(file, len(content))
    finally:
        disk.close(file)
    disk.read_in(view, 0, len(content))
    return view == content


def _allocates(disk: Disk, scratch: int) -> bool:
    file = disk.create(scratch, "allocated")
    try:
        disk.allocate(file, _PROBE_BYTES)
        return disk.size(file) == _PROBE_BYTES
    finally:
        disk.close(file)


def _clones(disk: Disk, scratch: int) -> bool:
    _file(disk, scratch, "cloned", bytes(_PROBE_BYTES))
    source, target = disk.open_for_read(scratch, "cloned"), disk.create(scratch, "clone")
    try:
        return disk.clone(source, target)
    finally:
        disk.close(source)
        disk.close(target)
