"""The simulated disk itself: it must lose what a real one may lose, keep what a real one keeps, and answer as a real one answers."""

import errno
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
from crash_states import Machine, State
from hypothesis import given, settings
from hypothesis import strategies as st
from recording_disk import Killed, Operation, RecordingDisk

from checkpoint_store.disk import Disk

REPEATABLE = settings(deadline=None, derandomize=True)
OLD, NEW = b"old bytes", b"new bytes!"


def machine_holding(**files: bytes) -> Machine:
    return Machine(tuple((name, number, content) for number, (name, content) in enumerate(sorted(files.items()))))


def survivors(machine: Machine, path: str) -> set[bytes | None]:
    """What may be found under `path` after a power failure; None is nothing."""
    return {{name: content for name, _, content in state}.get(path) for state in machine.legal_states()}


def write_file(disk: Disk, directory: int, name: str, data: bytes, *, sync: bool) -> None:
    file = disk.create(directory, name)
    disk.write(file, data)
    if sync:
        disk.sync(file)
    disk.close(file)


def test_a_writer_that_syncs_nothing_may_lose_tear_or_zero_its_file():
    machine = Machine()
    disk = RecordingDisk(machine)
    write_file(disk, disk.open_root("/"), "file", b"abcdef", sync=False)
    assert survivors(machine, "file") == {
        None, b"", b"abc", b"abc\0\0\0", b"\0\0\0\0\0\0", b"\0\0\0def", b"abcdef",
    }  # fmt: skip


def test_a_rename_without_a_sync_of_the_file_may_publish_an_empty_file():
    machine = machine_holding(CURRENT=OLD)
    disk = RecordingDisk(machine)
    root = disk.open_root("/")
    write_file(disk, root, "temporary", NEW, sync=False)
    disk.rename(root, "temporary", root, "CURRENT")
    disk.sync_directory(root)
    assert {b"", bytes(len(NEW)), NEW} <= survivors(machine, "CURRENT")
    assert OLD not in survivors(machine, "CURRENT")


def test_a_rename_without_a_sync_of_the_directory_may_be_undone_but_never_leaves_a_hole():
    machine = machine_holding(CURRENT=OLD)
    disk = RecordingDisk(machine)
    root = disk.open_root("/")
    write_file(disk, root, "temporary", NEW, sync=True)
    disk.rename(root, "temporary", root, "CURRENT")
    assert survivors(machine, "CURRENT") == {OLD, NEW}
    disk.sync_directory(root)
    assert survivors(machine, "CURRENT") == {NEW}
    assert survivors(machine, "temporary") == {None}


def test_entries_of_one_directory_survive_in_any_combination():
    machine = machine_holding(a=OLD)
    disk = RecordingDisk(machine)
    root = disk.open_root("/")
    write_file(disk, root, "b", NEW, sync=True)
    disk.unlink(root, "a")
    disk.link(root, "b", root, "c")
    found = {tuple(path for path, _, _ in state) for state in machine.legal_states()}
    assert found == {(), ("a",), ("b",), ("c",), ("a", "b"), ("a", "c"), ("b", "c"), ("a", "b", "c")}


def test_a_rename_between_directories_may_survive_on_either_side():
    machine = Machine((("from", -1, None), ("from/file", 0, OLD), ("to", -1, None)))
    disk = RecordingDisk(machine)
    root = disk.open_root("/")
    disk.rename(disk.open_directory(root, "from"), "file", disk.open_directory(root, "to"), "file")
    found = {tuple(path for path, _, content in state if content is not None) for state in machine.legal_states()}
    assert found == {(), ("from/file",), ("to/file",), ("from/file", "to/file")}


def test_a_synced_file_in_a_directory_whose_own_entry_was_not_synced_may_vanish():
    machine = Machine()
    disk = RecordingDisk(machine)
    root = disk.open_root("/")
    disk.make_directory(root, "objects")
    objects = disk.open_directory(root, "objects")
    write_file(disk, objects, "file", NEW, sync=True)
    disk.sync_directory(objects)
    assert survivors(machine, "objects/file") == {None, NEW}
    disk.sync_directory(root)
    assert survivors(machine, "objects/file") == {NEW}


def test_after_a_failed_sync_a_later_one_succeeds_and_keeps_nothing():
    machine = Machine()
    disk = RecordingDisk(machine)
    root = disk.open_root("/")
    file = disk.create(root, "file")
    disk.sync_directory(root)
    disk.write(file, NEW)
    disk.before = failing_once("sync", errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        disk.sync(file)
    disk.sync(file)
    assert {b"", NEW} <= survivors(machine, "file")
    disk.write(file, b"more")
    disk.sync(file)
    assert {bytes(len(NEW)) + b"more", NEW + b"more"} <= survivors(machine, "file")


def test_after_a_failed_sync_of_a_directory_its_entries_stay_undecided():
    machine = Machine()
    disk = RecordingDisk(machine)
    root = disk.open_root("/")
    write_file(disk, root, "file", NEW, sync=True)
    disk.before = failing_once("sync_directory", errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        disk.sync_directory(root)
    disk.sync_directory(root)
    assert survivors(machine, "file") == {None, NEW}


def test_a_failed_write_has_written_a_part_and_a_failed_close_has_closed():
    machine = Machine()
    disk = RecordingDisk(machine)
    root = disk.open_root("/")
    file = disk.create(root, "file")
    disk.before = failing_once("write", errno.ENOSPC)
    with pytest.raises(OSError, match="No space"):
        disk.write(file, b"abcdef")
    assert disk.size(file) == 3
    disk.before = failing_once("close", errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        disk.close(file)
    with pytest.raises(OSError, match="Bad file descriptor"):
        disk.size(file)


def test_a_killed_process_frees_its_locks_and_does_nothing_more():
    machine = Machine()
    disk, other = RecordingDisk(machine), RecordingDisk(machine)
    assert disk.lock(disk.open_for_lock(disk.open_root("/"), "writer.lock"), exclusive=True)
    second = other.open_for_lock(other.open_root("/"), "writer.lock")
    assert not other.lock(second, exclusive=True)
    disk.kill()
    with pytest.raises(Killed):
        disk.open_root("/")
    assert other.lock(second, exclusive=True)


def test_a_kill_without_a_power_failure_leaves_what_is_visible_and_what_is_not_durable_apart():
    machine = Machine()
    disk = RecordingDisk(machine)
    root = disk.open_root("/")
    write_file(disk, root, "file", NEW, sync=False)
    disk.kill()
    assert machine.visible_state() == (("file", 0, NEW),)
    assert None in survivors(machine, "file")
    next_process = RecordingDisk(machine)
    next_process.sync_directory(next_process.open_root("/"))
    assert None not in survivors(machine, "file") and b"" in survivors(machine, "file")


def test_scratch_is_there_in_full_or_not_at_all_and_cannot_be_read():
    machine = Machine()
    disk = RecordingDisk(machine)
    root = disk.open_root("/")
    disk.make_directory(root, "attempt-1")
    scratch = disk.open_directory(root, "attempt-1")
    for name in ("a", "b", "c"):
        write_file(disk, scratch, name, NEW, sync=False)
    found = {tuple(path for path, _, _ in state) for state in machine.legal_states()}
    assert found == {(), ("attempt-1",), ("attempt-1", "attempt-1/a", "attempt-1/b", "attempt-1/c")}
    with pytest.raises(AssertionError, match="scratch"):
        disk.open_for_read(scratch, "a")


def test_links_to_one_file_are_restored_as_one_file():
    machine = machine_holding(a=OLD)
    disk = RecordingDisk(machine)
    root = disk.open_root("/")
    disk.link(root, "a", root, "b")
    (both,) = [state for state in machine.legal_states() if len(state) == 2]
    restored = RecordingDisk(Machine(both))
    root = restored.open_root("/")
    assert restored.stat(root, "a").inode == restored.stat(root, "b").inode
    restored.rename(root, "a", root, "b")
    assert restored.list_directory(root) == ["a", "b"]


def test_the_recording_disk_has_every_method_of_the_real_one():
    inherited = [
        name
        for name, method in inspect.getmembers(Disk, inspect.isfunction)
        if not name.startswith("_") and getattr(RecordingDisk, name) is method
    ]
    assert inherited == [], "these would reach the real file system from a crash test"


def failing_once(name: str, number: int) -> Callable[[Operation], None]:
    failures = [OSError(number, "Input/output error" if number == errno.EIO else "No space left on device")]

    def fail(operation: Operation) -> None:
        if operation.name == name and failures:
            raise failures.pop()

    return fail


NAMES = st.sampled_from(["a", "b", "c"])
FOLDERS = st.sampled_from(["", "x", "y"])
CALLS = st.one_of(
    st.tuples(st.just("make"), FOLDERS, NAMES, st.binary(max_size=6)),
    st.tuples(st.just("rename"), FOLDERS, NAMES, FOLDERS, NAMES),
    st.tuples(st.just("link"), FOLDERS, NAMES, FOLDERS, st.sampled_from(["a", "b", "c", "x"])),
    st.tuples(st.just("unlink"), FOLDERS, NAMES),
    st.tuples(st.just("unlink"), st.just(""), st.sampled_from(["x", "y"])),
    st.tuples(st.just("make_directory"), st.just(""), st.sampled_from(["x", "y"])),
    st.tuples(st.just("remove_directory"), st.just(""), st.sampled_from(["a", "x", "y"])),
    st.tuples(st.just("read"), FOLDERS, st.sampled_from(["a", "b", "c", "x"])),
)


def answers(disk: Disk, path: str, calls: list[tuple]) -> list[object]:
    """What a process sees that makes `calls`: results, and the error numbers of failures."""
    root, seen = disk.open_root(path), []

    def folder(name: str) -> int:
        return disk.open_directory(root, name) if name else root

    def answer(call: tuple) -> object:
        match call:
            case ("make", where, name, data):
                file = disk.create(folder(where), name)
                disk.allocate(file, len(data) // 2)
                disk.write(file, data[:2])
                disk.write(file, data[2:])
                disk.truncate(file, max(0, len(data) - 1))
                disk.sync(file)
                return disk.close(file)
            case ("rename" | "link" as name, where, old, to, new):
                return getattr(disk, name)(folder(where), old, folder(to), new)
            case ("read", where, name):
                file = disk.open_for_read(folder(where), name)
                found = disk.stat(folder(where), name)
                return disk.size(file), disk.read(file, 4), bytes(disk.map(file, disk.size(file))), found.is_file
            case (name, where, *arguments):
                return getattr(disk, name)(folder(where), *arguments)
        raise AssertionError(call)

    for call in [("make_directory", "", "x"), *calls]:
        try:
            seen.append(answer(call))
        except OSError as error:
            seen.append(error.errno)
        seen.append([(name, disk.stat(root, name).is_directory) for name in disk.list_directory(root)])
    return seen


@REPEATABLE
@given(st.lists(CALLS, max_size=12))
def test_a_process_cannot_tell_the_recording_disk_from_the_real_one(tmp_path_factory: pytest.TempPathFactory, calls):
    real: Path = tmp_path_factory.mktemp("real")
    assert answers(RecordingDisk(Machine()), "/", calls) == answers(Disk(), str(real), calls)


@REPEATABLE
@given(st.lists(CALLS, max_size=6))
def test_what_is_visible_is_always_among_the_legal_states(calls):
    machine = Machine()
    answers(RecordingDisk(machine), "/", calls)
    states: set[State] = set(machine.legal_states())
    assert machine.visible_state() in states
