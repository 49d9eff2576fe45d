"""The crash tests have teeth: a store with any of these bugs in it loses something, and the same checks say so.

Each bug leaves out or moves one step of the write protocol, at the door or in the store. A new step of the protocol brings its own bug
to the list.
"""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import pytest
from crash_explorer import Explorer, LostProgress
from crash_histories import (
    FAULTS,
    after_damage,
    after_failures,
    after_kills,
    in_one_session,
    in_one_session_that_dissolves,
    in_use,
    new_root,
    publishing,
)
from crash_states import SCRATCH_PREFIX, File, Machine
from recording_disk import RecordingDisk
from saved_contents import contents, load, open_reader, repeatable, small_pages

from checkpoint_store import garbage
from checkpoint_store.disk import Disk
from checkpoint_store.errors import CheckpointDamaged
from checkpoint_store.failures import writing
from checkpoint_store.generations import Current, encode_current, read_small
from checkpoint_store.objects import write_object
from checkpoint_store.root import CURRENT, GENERATIONS, OBJECTS, Root

Step = tuple[str, str]
BEGINNINGS = {
    b'{"created_utc"': "manifest",
    b'{"generations"': "CURRENT",
    b'{"format"': "FORMAT",
    b'{"objects"': "page",
}


def what_begins(content: bytes) -> str:
    return next((what for start, what in BEGINNINGS.items() if content.startswith(start)), "object")


class BuggyDisk(RecordingDisk):
    """A door that drops some syncs, or makes them only after a later step; a step is (method, what it is about)."""

    dropped: frozenset[Step] = frozenset()
    deferred: Mapping[Step, Step] = MappingProxyType({})
    retries_syncs = False

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.held: dict[Step, list[Callable[[], None]]] = {}

    def _sync_step(self, descriptor: int) -> Step:
        handle = self._handle(descriptor)
        if not isinstance(handle.inode, File):
            return "sync_directory", handle.path or "root"
        return "sync", what_begins(handle.inode.visible)

    def _sync(self, descriptor: int, sync: Callable[[int], None]) -> None:
        step = self._sync_step(descriptor)
        if step in self.deferred:
            self.held.setdefault(self.deferred[step], []).append(self._handle(descriptor).inode.sync)
        elif step not in self.dropped:
            try:
                sync(descriptor)
            except OSError:
                if not self.retries_syncs:
                    raise
                sync(descriptor)
        self._done(step)

    def _done(self, step: Step) -> None:
        for held in self.held.pop(step, []):
            held()

    def sync(self, file: int) -> None:
        self._sync(file, super().sync)

    def sync_directory(self, directory: int) -> None:
        self._sync(directory, super().sync_directory)

    def rename(self, from_directory: int, name: str, to_directory: int, new_name: str) -> None:
        super().rename(from_directory, name, to_directory, new_name)
        self._done(("rename", self._handle(to_directory).path or new_name))

    def unlink(self, directory: int, name: str) -> None:
        super().unlink(directory, name)
        self._done(("unlink", self._handle(directory).path))


def dropping(method: str, what: str) -> type[BuggyDisk]:
    return type("Dropping", (BuggyDisk,), {"dropped": frozenset({(method, what)})})


def deferring(step: Step, until: Step) -> type[BuggyDisk]:
    return type("Deferring", (BuggyDisk,), {"deferred": {step: until}})


class Retrying(BuggyDisk):
    retries_syncs = True


class SpareNotSynced(BuggyDisk):
    """The spare pointer may turn after CURRENT: the sync between them is left out."""

    def sync_directory(self, directory: int) -> None:
        last = self.operations[-1]
        if not (last.name == "unlink" and last.path.startswith(SCRATCH_PREFIX)):
            super().sync_directory(directory)


class PageAfterTheSync(BuggyDisk):
    """The directory of objects is synced just before a page is renamed into it, and not after."""

    is_synced = False

    def rename(self, from_directory: int, name: str, to_directory: int, new_name: str) -> None:
        renamed = self._entry(from_directory, name)
        if isinstance(renamed, File) and what_begins(renamed.visible) == "page":
            super().sync_directory(to_directory)
            self.is_synced = True
        super().rename(from_directory, name, to_directory, new_name)

    def sync_directory(self, directory: int) -> None:
        if not (self.is_synced and self._handle(directory).path == OBJECTS):
            super().sync_directory(directory)
        self.is_synced = self.is_synced and self._handle(directory).path != OBJECTS


def write_page_unless_present(
    disk: Disk, attempt: int, temporary: str, objects: int, payload: Any, counters: Any
) -> Any:
    data = b"".join(payload.views())
    if what_begins(data) == "page":
        with suppress(FileNotFoundError):
            sha256 = hashlib.sha256(data).hexdigest()
            disk.stat(objects, sha256)
            return sha256, len(data)
    return write_object(disk, attempt, temporary, objects, payload, counters)


def write_unless_present(disk: Disk, attempt: int, temporary: str, objects: int, payload: Any, counters: Any) -> Any:
    sha256 = hashlib.sha256(b"".join(payload.views())).hexdigest()
    with suppress(FileNotFoundError):
        return sha256, disk.stat(objects, sha256).size
    return write_object(disk, attempt, temporary, objects, payload, counters)


def replace_in_place(self: Root, attempt: Any, content: bytes, directory: int, name: str) -> None:
    file = self.disk.open_for_lock(directory, name)
    self.disk.truncate(file, 0)
    self.disk.write(file, content)
    self.disk.sync(file)
    self.disk.close(file)


sound_replace, sound_seal = Root.replace, Root.seal


def unlink_before_replacing(self: Root, attempt: Any, content: bytes, directory: int, name: str) -> None:
    with suppress(FileNotFoundError):
        self.disk.unlink(directory, name)
    sound_replace(self, attempt, content, directory, name)


def format_before_current(self: Root, attempt: Callable[[], Any], root_id: str) -> None:
    for name in (OBJECTS, GENERATIONS):
        with suppress(FileExistsError):
            self.disk.make_directory(self.directory, name)
    self.sync()
    self.seal(attempt(), root_id)
    self.replace(attempt(), encode_current(Current(root_id, attempt().name, ())), self.directory, CURRENT)
    self.disk.sync_directory(self.directory)


def make_with_what_is_there(self: Root, attempt: Callable[[], Any], root_id: str) -> None:
    """In the right order, but a directory that a failed sync may have lost is taken as it is."""
    with writing(self.path):
        for name in (OBJECTS, GENERATIONS):
            with suppress(FileExistsError):
                self.disk.make_directory(self.directory, name)
        self.sync()
        self.replace(attempt(), encode_current(Current(root_id, attempt().name, ())), self.directory, CURRENT)
        self.disk.sync_directory(self.directory)
        self.seal(attempt(), root_id)


def seal_once(self: Root, attempt: Any, root_id: str) -> None:
    with suppress(CheckpointDamaged):
        if self.root_id() is not None:
            return
    sound_seal(self, attempt, root_id)


def collect_all_but_the_newest(root: Root, keep_objects: set[str], keep_manifests: set[str], own: Any) -> Any:
    return garbage.collect(root, keep_objects, set(sorted(keep_manifests)[-1:]), own)


def collect_what_is_listed_too(root: Root, manifests: set[str], objects: set[str]) -> Any:
    return garbage.collect_named(root, manifests | set(sorted(root.names(GENERATIONS))[:-1]), objects)


def collect_pages_of_older_ones_too(root: Root, manifests: set[str], objects: set[str]) -> Any:
    """Kept are the pages that the newest manifest names."""
    newest = read_small(root.disk, root.generations, max(root.names(GENERATIONS)), 1 << 20, "newest")
    pages = {
        name
        for name in root.names(OBJECTS)
        if what_begins(read_small(root.disk, root.objects, name, 1 << 20, name)) == "page"
        and name.encode() not in newest
    }
    return garbage.collect_named(root, manifests, objects | pages)


def in_a_session(door: type[RecordingDisk]) -> None:
    in_one_session(Explorer(with_records=False, door=door), 4)


def after_a_kill(door: type[RecordingDisk]) -> None:
    after_kills(Explorer(with_records=False, door=door), in_use)


def after_a_failure(door: type[RecordingDisk]) -> None:
    after_failures(Explorer(with_records=False, is_faulty=True, door=door), new_root, FAULTS["EIO"])
    after_a_failure_in_use(door)


def after_a_failure_in_use(door: type[RecordingDisk]) -> None:
    after_failures(Explorer(with_records=False, is_faulty=True, door=door), in_use, FAULTS["EIO"])


def after_damage_to_a_page(door: type[RecordingDisk]) -> None:
    after_damage(Explorer(with_records=False, is_damaged=True, door=door), "page")


def where_pages_are_dissolved(door: type[RecordingDisk]) -> None:
    in_one_session_that_dissolves(Explorer(with_records=False, door=door), step=1)


@dataclass(frozen=True)
class Bug:
    """What is wrong, in words; how it is planted, as another door or other functions in the store's place; where it shows."""

    what: str
    door: type[RecordingDisk] = RecordingDisk
    instead: dict[str, Any] = field(default_factory=dict)
    shows: Callable[[type[RecordingDisk]], None] = in_a_session


ROOT, STORE = "checkpoint_store.root.Root", "checkpoint_store.store"
BUGS = [
    Bug("objects are not synced", dropping("sync", "object")),
    Bug("manifests are not synced", dropping("sync", "manifest")),
    Bug("CURRENT is not synced", dropping("sync", "CURRENT")),
    Bug("FORMAT is not synced", dropping("sync", "FORMAT")),
    Bug("the directory of objects is not synced", dropping("sync_directory", "objects")),
    Bug("the directory of manifests is not synced", dropping("sync_directory", "generations")),
    Bug("the root directory is not synced", dropping("sync_directory", "root")),
    Bug("nothing is synced when a root is opened", instead={f"{ROOT}.sync": lambda self: None}, shows=after_a_kill),
    Bug("objects are renamed before they are synced", deferring(("sync", "object"), ("rename", "objects"))),
    Bug("manifests are synced after CURRENT is renamed", deferring(("sync", "manifest"), ("rename", "CURRENT"))),
    Bug("CURRENT is renamed before it is synced", deferring(("sync", "CURRENT"), ("rename", "CURRENT"))),
    Bug("FORMAT is renamed before it is synced", deferring(("sync", "FORMAT"), ("rename", "FORMAT"))),
    Bug(
        "the names of objects are durable after CURRENT",
        deferring(("sync_directory", "objects"), ("rename", "CURRENT")),
    ),
    Bug(
        "the names of manifests are durable after CURRENT",
        deferring(("sync_directory", "generations"), ("rename", "CURRENT")),
    ),
    Bug(
        "a sweep precedes the sync that makes CURRENT durable",
        deferring(("sync_directory", "root"), ("unlink", "objects")),
    ),
    Bug("FORMAT is written before CURRENT", instead={f"{ROOT}.make": format_before_current}),
    Bug("FORMAT is written once, though its sync failed", instead={f"{ROOT}.seal": seal_once}, shows=after_a_failure),
    Bug(
        "a directory whose sync failed is taken for durable",
        instead={f"{ROOT}.make": make_with_what_is_there},
        shows=after_a_failure,
    ),
    Bug("a failed sync is retried", Retrying, shows=after_a_failure),
    Bug(
        "an object that is there is trusted",
        instead={f"{STORE}.write_object": write_unless_present},
        shows=after_a_failure,
    ),
    Bug(
        "a store goes on after an error",
        instead={f"{STORE}.CheckpointStore._check_writable": lambda self: None},
        shows=after_a_failure,
    ),
    Bug("files are overwritten in place", instead={f"{ROOT}.replace": replace_in_place}),
    Bug("files are unlinked before they are replaced", instead={f"{ROOT}.replace": unlink_before_replacing}),
    Bug("the spare pointer is durable only with CURRENT", SpareNotSynced),
    Bug("the spare pointer stays behind", instead={f"{ROOT}.turn_spare": lambda self, attempt: None}),
    Bug(
        "a sweep keeps the newest generation only",
        instead={f"{STORE}.collect": collect_all_but_the_newest},
        shows=after_a_kill,
    ),
    Bug(
        "a listed generation goes with one that fell off the list",
        instead={f"{STORE}.collect_named": collect_what_is_listed_too},
    ),
    Bug("pages are not synced", dropping("sync", "page")),
    Bug(
        "pages are renamed before they are synced",
        deferring(("sync", "page"), ("rename", "objects")),
        shows=where_pages_are_dissolved,
    ),
    Bug("a page is named before its own name is durable", PageAfterTheSync),
    Bug(
        "a page that is there is trusted, though its sync failed",
        instead={f"{STORE}.write_object": write_page_unless_present},
        shows=after_a_failure_in_use,
    ),
    Bug(
        "a page of a damaged generation is named again unread",
        instead={f"{STORE}.write_object": write_page_unless_present},
        shows=after_damage_to_a_page,
    ),
    Bug(
        "a sweep keeps the pages of the newest generation only",
        instead={f"{STORE}.collect_named": collect_pages_of_older_ones_too},
        shows=where_pages_are_dissolved,
    ),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what)
def test_a_planted_bug_is_caught(bug: Bug):
    with ExitStack() as planted:
        planted.enter_context(small_pages(2))
        for name, function in bug.instead.items():
            planted.enter_context(patch(name, function))
        assert_only_a_crash_shows_it(bug.door)
        with pytest.raises(LostProgress) as caught:
            bug.shows(bug.door)
    print(str(caught.value).partition("\n")[0])


def assert_only_a_crash_shows_it(door: type[RecordingDisk]) -> None:
    """Two sessions that nothing happens to: a bug that broke these would be caught for the wrong reason."""
    machine, progress = new_root()
    for name in (1, 2):
        disk = door(machine)
        with repeatable(name):
            publishing(3, with_records=False)(disk, progress)
        disk.kill()
    reader = open_reader(RecordingDisk(machine))
    assert load(reader) == (6, contents(6, with_records=False))
    reader.close()


def test_the_list_of_bugs_names_each_only_once():
    assert len({bug.what for bug in BUGS}) == len(BUGS) >= 12
