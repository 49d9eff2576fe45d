"""The checkpoint store: staged objects become a generation, and a generation is never lost once it is acknowledged.

FORMAT.md beside this file says what is on disk and why each step stands where it does; `test_crash.py` turns red
without any of them.
"""

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from logging import getLogger
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from checkpoint_store.config import KEEP_LAST_MOST
from checkpoint_store.disk import Disk
from checkpoint_store.errors import CheckpointDamaged, CheckpointError, CheckpointMissing, StorageFull
from checkpoint_store.failures import reading, writing
from checkpoint_store.garbage import SweepReport, collect, collect_named
from checkpoint_store.generations import (
    Current,
    Entry,
    Manifest,
    encode_current,
    encode_manifest,
    read_manifest,
)
from checkpoint_store.lock import Attempt, ReadersLock, WriterLock, refuse_network_file_system
from checkpoint_store.objects import (
    ROLE,
    BytesPayload,
    Counters,
    ObjectRef,
    Payload,
    check_size,
    map_verified,
    verify_objects,
    write_object,
)
from checkpoint_store.pages import PAGE, Names, Page, encode_page, full_page, page_key, read_page
from checkpoint_store.published import Generation, Pinned
from checkpoint_store.root import CURRENT, GENERATIONS, OBJECTS, Root

# Left free beside an object: its generation's manifest, CURRENT and the directories' own growth.
SPACE_MARGIN_BYTES = 1 << 20
# Restored while a run goes on; the mappings of finished layers are dropped once they are verified.
_KEPT_MAPPED = frozenset({"continuation", "record"})

logger = getLogger(__name__)


class CheckpointStore:
    """An open root. With mode `write` it holds the writer lock; with `read` it creates nothing and locks nobody out."""

    def __init__(
        self,
        path: Path,
        mode: Literal["write", "read"],
        keep_last: int,
        run_id: str | None,
        allow_network_filesystem: bool,
        disk: Disk,
    ) -> None:
        if not 2 <= keep_last <= KEEP_LAST_MOST:
            raise ValueError(f"keep_last is {keep_last}; it must be from 2 to {KEEP_LAST_MOST}")
        self.path = path
        self.counters = Counters()
        self.keep_last = keep_last
        self.run_id = run_id
        self._disk = disk
        self._mode = mode
        self._process = disk.process_id()
        self._guard = threading.RLock()
        self._closed = False
        self._poison: BaseException | None = None
        self._attempt: Attempt | None = None
        self._writer_lock: WriterLock | None = None
        self._readers_lock: ReadersLock | None = None
        self._manifests: dict[Entry, Manifest] = {}
        self._staged: dict[str, int] = {}
        self._latest: Generation | None = None  # pinned or published by this store: its objects may be named again
        self._whole: dict[Entry, bool] = {}  # generations that were looked at, and whether they are whole
        self._root_id = ""
        self._entries: tuple[Entry, ...] = ()
        self._raw_current: bytes | None = None
        self.spare_because: str | None = None
        # What lay here when this store went on from the spare: the lost CURRENT may have named it.
        self._found_with_spare: frozenset[str] = frozenset()
        # Whether the last sweep looked through the root and left nothing: later garbage is what falls off the list.
        self._is_swept = False
        self._root = self._open_root(allow_network_filesystem)
        try:
            if mode == "write":
                self._open_for_write()
            else:
                self._readers_lock = ReadersLock(disk, self._root.directory, self._root.path)
                self._read_pointer(self._root.root_id())
        except BaseException:
            with suppress(OSError):  # the first error is the one to tell
                self._release()
            raise

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        mode: Literal["write", "read"] = "write",
        keep_last: int = 2,
        run_id: str | None = None,
        allow_network_filesystem: bool = False,
        disk: Disk | None = None,
    ) -> "CheckpointStore":
        """Open the root at `path`; mode `write` makes it when it is missing.

        Raises StoreLocked, CheckpointDamaged, UnknownFormat, StorageFull; CheckpointMissing in mode `read` when there
        is no such directory.
        """
        return cls(Path(path), mode, keep_last, run_id, allow_network_filesystem, disk or Disk())

    # Opening and closing ---------------------------------------------------------------------------------------------

    def _open_root(self, allow_network_filesystem: bool) -> Root:
        path = str(self.path)
        try:
            root = Root(self._disk, path)
        except CheckpointMissing:
            if self._mode == "read":
                raise
            with writing(path):
                self._disk.make_root(path)
            root = Root(self._disk, path)
        if self._mode == "write" and not allow_network_filesystem:
            try:
                with reading(path):
                    refuse_network_file_system(self._disk, root.directory, path)
            except CheckpointError:
                root.close()
                raise
        return root

    def _open_for_write(self) -> None:
        root = self._root
        self._writer_lock = WriterLock(self._disk, root.directory, root.path, self.run_id)
        root_id = root.root_id()
        if root_id is None:
            with writing(root.path):
                self._disk.make_root(root.path)  # again: a predecessor may have died before it synced what is above
            root_id = secrets.token_hex(16)
            root.make(self._own_attempt, root_id)
        root.make_readers_lock()
        root.sync()
        self._read_pointer(root_id)
        root.refuse_obstacles()
        if self.spare_because is not None:
            self._found_with_spare = frozenset(root.names(OBJECTS) + root.names(GENERATIONS))

    def _read_pointer(self, root_id: str | None) -> None:
        if root_id is None:
            return
        self._root_id = root_id
        pointer = self._root.pointer(root_id)
        self._entries = pointer.current.generations
        self._raw_current = pointer.raw_current
        self.spare_because = pointer.spare_because

    @property
    def root(self) -> Root:
        """The open root directory, for the operator's tools."""
        self._check_open()
        return self._root

    @property
    def root_id(self) -> str:
        """The id in FORMAT; empty while the root is still being made."""
        return self._root_id

    def _own_attempt(self) -> Attempt:
        if self._attempt is None:
            self._attempt = Attempt(self._disk, self._root.directory, f"attempt-{secrets.token_hex(8)}")
            if self._root_id and not self._entries:  # before the first write into a root that this store did not make
                self._root.seal(self._attempt, self._root_id)
        return self._attempt

    @property
    def scratch(self) -> Path:
        """This store's private directory, which goes when the store is closed."""
        self._check_writable()
        if self._attempt is None:  # else there is no need to wait for a publish that is under way
            with self._guard, self._critical("making the attempt directory"):
                self._own_attempt()
        return self.path / self._own_attempt().name

    def close(self) -> None:
        """Let go of the lock; the attempt directory goes with it. Staged objects that were not published are garbage."""
        if not self.is_ours:  # before the guard, which a thread of the parent may hold for ever
            self._closed = True
            return
        with self._guard:
            if self._closed:
                return
            self._closed = True
            try:
                self._release()
            except (
                OSError
            ) as error:  # what was published does not hang on it, and the descriptors are closed all the same
                logger.warning("while closing the store at `%s`: %s", self.path, error.strerror)

    def _release(self) -> None:
        with ExitStack() as rest:  # each is let go of even if another fails; the writer lock last
            if self._writer_lock is not None:
                rest.callback(self._writer_lock.release)
            if self._readers_lock is not None:
                rest.callback(self._readers_lock.release)
            rest.callback(self._root.close)
            if self._attempt is not None:
                try:
                    self._attempt.remove()
                except OSError as error:
                    logger.warning("could not remove `%s/%s`: %s", self.path, self._attempt.name, error.strerror)

    def __enter__(self) -> "CheckpointStore":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_ours(self) -> bool:
        """Whether this process opened the store; False in a forked child, which may not use it."""
        return self._disk.process_id() == self._process

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError(f"the store at `{self.path}` is closed; open it again")
        if not self.is_ours:
            raise CheckpointError(
                f"the store at `{self.path}` was opened by another process; a forked child may not use it"
            )

    def _check_writable(self) -> None:
        self._check_open()
        if self._mode != "write":
            raise CheckpointError(f"the store at `{self.path}` is open for reading only")
        if self._poison is not None:
            kind = type(self._poison) if isinstance(self._poison, CheckpointError) else CheckpointError
            raise kind(
                f"the store at `{self.path}` takes no more writes after this error: {self._poison}; "
                f"open it again, it then goes on from what is on disk"
            ) from self._poison

    @contextmanager
    def _critical(self, doing: str) -> Iterator[None]:
        """Steps after whose failure only the disk knows where the root stands: the store is closed to writes."""
        try:
            with writing(f"{self.path}: {doing}"):
                yield
        except BaseException as error:
            self._poison = error
            raise

    # Reading ---------------------------------------------------------------------------------------------------------

    def generations(self) -> list[Generation]:
        """What CURRENT lists, newest first."""
        return [Generation(entry, self._load) for entry in self._entries]

    def _load(self, entry: Entry) -> Manifest:
        self._check_open()
        if entry not in self._manifests:
            root = self._root
            self._manifests[entry] = read_manifest(
                self._disk,
                root.generations,
                entry,
                root.path,
                lambda ref: read_page(self._disk, root.objects, ref, root.path),
            )
        return self._manifests[entry]

    def pin(self, check_identity: Callable[[dict[str, Any]], None]) -> Pinned | None:
        """The newest generation that is whole; None when nothing was ever published.

        `check_identity` raises on a mismatch, which ends the search: another job's progress is no damage. Raises
        CheckpointDamaged, with every reason, when no listed generation is whole.
        """
        self._check_open()
        fallen: list[tuple[Generation, str]] = []
        for generation in self.generations():
            try:
                manifest = generation.manifest
                check_identity(manifest.identity)
                views = verify_objects(self._disk, self._root.objects, manifest.needed, self._root.path, _KEPT_MAPPED)
            except CheckpointDamaged as error:
                if self._was_overtaken():
                    return self.pin(check_identity)
                logger.error("generation %d is damaged: %s", generation.gen, error)
                fallen.append((generation, str(error)))
                self._whole[generation.entry] = False
                continue
            self.counters.bytes_verified += sum({ref.sha256: ref.size for ref in manifest.needed}.values())
            self._latest = generation
            self._whole[generation.entry] = True
            return Pinned(generation, views, self.view, tuple(fallen))
        if not fallen:
            return None
        raise CheckpointDamaged(
            f"no published generation of `{self.path}` is whole, and a run never starts over by itself: "
            + "; ".join(f"generation {generation.gen}: {reason}" for generation, reason in fallen)
            + f". Restore the directory from a backup, see `prefect-quantize recover {self.path}`, or use a new path"
        )

    def _was_overtaken(self) -> bool:
        """Whether a writer published, and may have swept, since this reader without a lock looked at CURRENT."""
        if self._readers_lock is None or self._readers_lock.is_held:
            return False
        if self._root.raw_current() == self._raw_current:
            return False
        self._read_pointer(self._root.root_id())
        return True

    def view(self, ref: ObjectRef) -> memoryview:
        """The verified bytes of a staged or published object."""
        self._check_open()
        return map_verified(self._disk, self._root.objects, ref, self._root.path)

    def path_of(self, ref: ObjectRef) -> Path:
        """Where the object lies, for programs that link or copy whole files."""
        return self.path / "objects" / ref.sha256

    # Writing ---------------------------------------------------------------------------------------------------------

    def stage(self, role: str, key: str, payload: Payload) -> ObjectRef:
        """Write an object that a later `publish` may name; until then no sweep of this store removes it."""
        self._check_writable()
        with self._guard:
            sha256, size = self._write(role, key, payload, self.counters)
            return ObjectRef(role, key, sha256, size)

    def _write(self, role: str, key: str, payload: Payload, counters: Counters) -> tuple[str, int]:
        self._check_space(role, key, payload.size)
        with self._critical(f"writing {role} {key}"):
            attempt = self._own_attempt()
            sha256, size = write_object(
                self._disk, attempt.directory, attempt.temporary(), self._root.objects, payload, counters
            )
        self._staged[sha256] = size
        return sha256, size

    def _check_space(self, role: str, key: str, size: int) -> None:
        with reading(str(self.path)):
            free = self._disk.free_bytes(self._root.directory)
        if free < size + SPACE_MARGIN_BYTES:
            raise StorageFull(
                f"{role} {key} needs {size} bytes and {SPACE_MARGIN_BYTES} beside it, and `{self.path}` has {free} "
                f"bytes free; what was published stays, make room and run again"
            )

    def publish(
        self, identity: dict[str, Any], cursor: int, layer_count: int, objects: Sequence[ObjectRef], *, kept: int = 0
    ) -> Generation:
        """Make a generation the newest one; when this returns it survives a power failure.

        It consists of the first `kept` objects of the generation that was pinned or published before, and of `objects`
        after them, each of which was staged by this store or is in that generation. What is kept costs next to nothing.
        """
        self._check_writable()
        with self._guard:
            if not 0 <= cursor <= layer_count:
                raise CheckpointError(f"cannot publish {cursor} finished layers of {layer_count}")
            pages, inline = self._first_names(kept)
            self._check_nameable(pages, inline, objects)
            pages, inline = self._with_full_pages(pages, inline)
            manifest = Manifest(
                gen=1 + max((entry.gen for entry in self._entries), default=0),
                parent=self._latest.entry.manifest if self._latest else None,
                identity=identity,
                cursor=cursor,
                layer_count=layer_count,
                inline=(*inline, *objects),
                run_id=self.run_id,
                created_utc=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                pages=pages,
            )
            entry, raw_manifest = encode_manifest(manifest)
            entries = self._retained_with(entry)
            with self._critical(f"publishing generation {entry.gen}"):
                attempt = self._own_attempt()
                raw_current = encode_current(Current(self._root_id, attempt.name, entries))
                self._make_current(attempt, entry, raw_manifest, raw_current)
            self.counters.metadata_bytes_written += len(raw_manifest) + len(raw_current)
            dropped = {old: self._manifests.get(old) for old in self._entries if old not in entries}
            self._entries, self._raw_current, self.spare_because = entries, raw_current, None
            self._manifests = {old: found for old, found in self._manifests.items() if old in entries}
            self._manifests[entry] = manifest
            self._whole[entry] = True
            self._latest = Generation(entry, self._load)
            self._staged = {sha256: size for sha256, size in self._staged.items() if manifest.size_of(sha256) is None}
            self._sweep_after_publish(dropped)
            return self._latest

    def _make_current(self, attempt: Attempt, entry: Entry, raw_manifest: bytes, raw_current: bytes) -> None:
        root, disk = self._root, self._disk
        disk.sync_directory(root.objects)
        root.replace(attempt, raw_manifest, root.generations, entry.manifest)
        disk.sync_directory(root.generations)
        if root.raw_current() != self._raw_current:
            raise CheckpointError(
                f"`{self.path}/{CURRENT}` was changed by another program while this one held the lock"
            )
        # A damaged CURRENT must not push out the spare that this store was opened from.
        if self.spare_because is None:
            root.turn_spare(attempt)
            # Before CURRENT turns: else a crash could keep the new CURRENT with a spare whose generations get swept.
            disk.sync_directory(root.directory)
        root.replace(attempt, raw_current, root.directory, CURRENT)
        disk.sync_directory(root.directory)

    def _first_names(self, count: int) -> Names:
        if self._entries and self._latest is None:
            raise CheckpointError(f"`{self.path}` has published generations: pin one before publishing another")
        manifest = self._latest.manifest if self._latest else None
        held = manifest.paged_count + len(manifest.inline) if manifest else 0
        if not 0 <= count <= held:
            raise CheckpointError(f"cannot keep {count} objects of a generation of `{self.path}` that has {held}")
        return manifest.first_objects(count) if manifest else ((), ())

    def _check_nameable(
        self, pages: tuple[Page, ...], inline: tuple[ObjectRef, ...], objects: Sequence[ObjectRef]
    ) -> None:
        """Refuse what is neither staged nor in the previous generation, and names that no reader would take."""
        strangers = [ref for ref in objects if self._staged.get(ref.sha256) != ref.size and not self._is_published(ref)]
        if strangers:
            raise CheckpointError(
                f"cannot publish objects that are neither staged nor in the previous generation: {_listed(strangers)}"
            )
        if wrong := [ref for ref in objects if ref.role == PAGE or not ROLE.fullmatch(ref.role)]:
            raise CheckpointError(f"cannot publish objects of a role that is reserved or no role: {_listed(wrong)}")
        names = Counter((ref.role, ref.key) for ref in objects)
        taken = ({(ref.role, ref.key) for ref in inline}, *map(attrgetter("names"), pages))
        if len(names) < len(objects) or not all(map(names.keys().isdisjoint, taken)):
            twice = [ref for ref in objects if names[name := (ref.role, ref.key)] > 1 or any(name in t for t in taken)]
            raise CheckpointError(f"cannot publish two objects under one name: {_listed(twice)}")

    def _is_published(self, ref: ObjectRef) -> bool:
        return self._latest is not None and self._latest.manifest.size_of(ref.sha256) == ref.size

    def _with_full_pages(self, pages: tuple[Page, ...], inline: tuple[ObjectRef, ...]) -> Names:
        """Write pages of kept names as far as they fill some; what is new may be replaced at once, and waits."""
        while names := full_page(inline):
            key, payload, spent = page_key(len(pages)), BytesPayload(encode_page(names)), Counters()
            sha256, size = self._write(PAGE, key, payload, spent)
            self.counters.metadata_bytes_written += spent.bytes_written
            pages, inline = (*pages, Page(ObjectRef(PAGE, key, sha256, size), names)), inline[len(names) :]
        return pages, inline

    def _retained_with(self, newest: Entry) -> tuple[Entry, ...]:
        """The new list: `keep_last` generations taken to be whole, and what is listed between them."""
        entries, whole = [newest], 1
        for entry in self._entries:
            if whole == self.keep_last:
                break
            entries.append(entry)
            whole += self._counts_as_whole(entry)
        return tuple(entries)

    def _counts_as_whole(self, entry: Entry) -> bool:
        """As it was found when it was verified or written; else, looked at once, by its manifest and its objects' sizes.

        Those not verified are older than the one that this writer went on from: they never push that out, and if they did
        not count, writers that live for a few layers each would drop nothing.
        """
        if entry not in self._whole:
            try:
                for ref in self._load(entry).needed:
                    check_size(self._disk, self._root.objects, ref, self._root.path)
                self._whole[entry] = True
            except CheckpointError as error:
                logger.warning("generation %d does not count as one of those to be kept: %s", entry.gen, error)
                self._whole[entry] = False
        return self._whole[entry]

    # Garbage ---------------------------------------------------------------------------------------------------------

    def _sweep_after_publish(self, dropped: dict[Entry, Manifest | None]) -> None:
        """Remove what the `dropped` generations alone named; look through the root only where that may not be all."""
        try:
            manifests = [manifest for manifest in dropped.values() if manifest is not None]
            if self._is_swept and len(manifests) == len(dropped):
                report = self._sweep_dropped({entry.manifest for entry in dropped}, manifests)
            else:
                report = self.sweep()
        except Exception as error:  # of any kind: the caller must learn that the generation stands
            logger.warning("the generation is published, but its sweep failed: %r", error)
            return
        if report.deferred:
            logger.info("sweep of `%s` deferred: %s", self.path, report.deferred)

    def _sweep_dropped(self, names: set[str], manifests: Sequence[Manifest]) -> SweepReport:
        self._is_swept = False
        listed = [self._load(entry) for entry in self._entries]
        kept_pages = {page.ref.sha256: page for manifest in listed for page in manifest.pages}
        gone_pages = [page for manifest in manifests for page in manifest.pages if page.ref.sha256 not in kept_pages]
        garbage = set[str]().union(
            *(manifest.own_sizes for manifest in manifests), *(page.sizes for page in gone_pages)
        )
        own = (manifest.own_sizes for manifest in listed)
        for kept in (*own, self._staged, self._found_with_spare, *map(attrgetter("sizes"), kept_pages.values())):
            garbage = garbage.difference(kept)  # takes as long as `garbage` is, not as what is kept
            if not garbage:
                break
        report = collect_named(self._root, names - self._found_with_spare, garbage)
        self._is_swept = report.deferred is None
        return report

    def sweep(self) -> SweepReport:
        """Remove what no retained generation needs; a report that says `deferred` removed nothing."""
        self._check_writable()
        with self._guard:
            self._is_swept = False
            if self.spare_because is not None:
                return SweepReport(deferred=f"CURRENT is lost until the next publish ({self.spare_because})")
            keep_objects = set(self._staged) | self._found_with_spare
            for entry in self._entries:
                try:
                    keep_objects.update(ref.sha256 for ref in self._load(entry).needed)
                except CheckpointDamaged as error:
                    return SweepReport(deferred=f"a retained generation cannot be verified ({error})")
            own = self._attempt.name if self._attempt else None
            keep_manifests = {entry.manifest for entry in self._entries} | self._found_with_spare
            report = collect(self._root, keep_objects, keep_manifests, own)
            self._is_swept = report.deferred is None
            return report


def _listed(refs: Sequence[ObjectRef]) -> str:
    return ", ".join(f"{ref.role} {ref.key}" for ref in refs)
