"""A checkpoint root copied to another place: verified where it is read, verified again where it was written."""

import secrets
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import Any

from checkpoint_store.disk import Disk
from checkpoint_store.errors import CheckpointDamaged, CheckpointError, CheckpointExists, CheckpointMissing
from checkpoint_store.failures import reading, writing
from checkpoint_store.generations import (
    MANIFEST_LIMIT_BYTES,
    Current,
    Entry,
    encode_current,
    encode_format,
    read_manifest,
    read_small,
)
from checkpoint_store.lock import Attempt, WriterLock, refuse_network_file_system
from checkpoint_store.objects import BytesPayload, Counters, ObjectRef, map_verified, write_object
from checkpoint_store.pages import Page, read_page
from checkpoint_store.published import Generation
from checkpoint_store.root import CURRENT, FORMAT, GENERATIONS, OBJECTS, Root
from checkpoint_store.store import CheckpointStore


@dataclass
class TransferReport:
    """What was copied; `left_out` tells of each generation that was not whole at the source."""

    generations: list[int] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    objects: int = 0
    bytes: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def export_root(root: str | Path, target: str | Path, disk: Disk | None = None) -> TransferReport:
    """Copy the published generations of `root` to the new directory `target`, on any file system.

    `target` is a whole root itself once this returns; before, it has no FORMAT and no store takes it for one. A reader
    share keeps sweeps away meanwhile. Raises CheckpointMissing when nothing is published, CheckpointDamaged when
    nothing published is whole, CheckpointExists when `target` holds anything.
    """
    return _copy_root(root, target, disk or Disk(), allow_network_filesystem=True)


def import_root(
    source: str | Path, root: str | Path, disk: Disk | None = None, allow_network_filesystem: bool = False
) -> TransferReport:
    """As `export_root` the other way: `root` must be able to hold a live checkpoint, so not on a network file system."""
    return _copy_root(source, root, disk or Disk(), allow_network_filesystem)


def _copy_root(source: str | Path, target: str | Path, disk: Disk, allow_network_filesystem: bool) -> TransferReport:
    _refuse_nested(disk, source, target)
    with CheckpointStore.open(source, mode="read", disk=disk) as store, ExitStack() as held:
        generations = store.generations()
        if not generations:
            raise CheckpointMissing(f"nothing is published in `{source}`, so there is nothing to copy")
        copy = _Copy(store, _new_root(disk, target, allow_network_filesystem, held), held)
        for generation in generations:
            copy.add(generation)
        copy.publish()
        return copy.report


def _refuse_nested(disk: Disk, source: str | Path, target: str | Path) -> None:
    one, other = (PurePath(disk.real_path(str(path))) for path in (source, target))
    if one.is_relative_to(other) or other.is_relative_to(one):
        raise CheckpointError(f"`{target}` and `{source}` lie in each other; name a separate directory")


def _new_root(disk: Disk, target: str | Path, allow_network_filesystem: bool, held: ExitStack) -> Root:
    with writing(str(target)):
        disk.make_root(str(target))
    root = Root(disk, str(target))
    held.callback(root.close)
    if root.names():
        raise CheckpointExists(
            f"`{target}` is not empty: name a new directory, or remove what an unfinished copy left there"
        )
    if not allow_network_filesystem:
        with reading(root.path):
            refuse_network_file_system(disk, root.directory, root.path)
    return root


class _Copy:
    """Objects and manifests that have arrived, until `publish` makes a root of them."""

    def __init__(self, source: CheckpointStore, target: Root, held: ExitStack) -> None:
        self.report = TransferReport()
        self._source = source
        self._target = target
        self._disk = target.disk
        self._entries: list[Entry] = []
        self._arrived: set[str] = set()
        lock = WriterLock(self._disk, target.directory, target.path, None)
        held.callback(lock.release)
        with writing(target.path):
            for name in (OBJECTS, GENERATIONS):
                self._disk.make_directory(target.directory, name)
            self._attempt = Attempt(self._disk, target.directory, f"attempt-{secrets.token_hex(8)}")
        target.make_readers_lock()

    def add(self, generation: Generation) -> None:
        """Copy one generation, or note why it is left out: then it was damaged at the source already."""
        root = self._source.root
        try:
            for ref in generation.manifest.needed:
                if ref.sha256 not in self._arrived:
                    self._copy_object(ref, self._source.view(ref))
            what = f"{root.path}/generations/{generation.entry.manifest}"
            raw = read_small(root.disk, root.generations, generation.entry.manifest, MANIFEST_LIMIT_BYTES, what)
        except CheckpointDamaged as error:
            self.report.left_out.append(f"generation {generation.gen}: {error}")
            return
        with writing(self._target.path):
            self._target.replace(self._attempt, raw, self._target.generations, generation.entry.manifest)
        self._entries.append(generation.entry)
        self.report.generations.append(generation.gen)

    def _copy_object(self, ref: ObjectRef, view: memoryview) -> None:
        with writing(f"{self._target.path}/objects/{ref.sha256}"):
            sha256, size = write_object(
                self._disk,
                self._attempt.directory,
                self._attempt.temporary(),
                self._target.objects,
                BytesPayload(view),
                Counters(),
            )
        if sha256 != ref.sha256:
            raise CheckpointError(f"the bytes of {ref.role} {ref.key} changed while they were copied; start again")
        self._arrived.add(sha256)
        self.report.objects += 1
        self.report.bytes += size

    def publish(self) -> None:
        """Read everything back, then write CURRENT and, last, FORMAT."""
        if not self._entries:
            raise CheckpointDamaged(
                f"nothing published in `{self._source.path}` is whole: {'; '.join(self.report.left_out)}"
            )
        target = self._target
        target.sync()

        def page_of(ref: ObjectRef) -> Page:
            return read_page(self._disk, target.objects, ref, target.path)

        for entry in self._entries:
            for ref in read_manifest(self._disk, target.generations, entry, target.path, page_of).needed:
                if ref.sha256 in self._arrived:
                    map_verified(self._disk, target.objects, ref, target.path)
                    self._arrived.remove(ref.sha256)
        current = Current(self._source.root_id, self._attempt.name, tuple(self._entries))
        pointers = ((CURRENT, encode_current(current)), (FORMAT, encode_format(self._source.root_id)))
        with writing(target.path):
            for name, content in pointers:
                target.replace(self._attempt, content, target.directory, name)
                self._disk.sync_directory(target.directory)
            self._attempt.remove()
