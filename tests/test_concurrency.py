"""Several processes on one root: one writes, the others are told; readers see whole generations at every moment of a publish and a sweep.

Locks between processes are tested with real ones. Interleavings are tested on a disk in memory, which can stop one party at each of
its operations and let the other run.
"""

import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from crash_histories import in_use, publishing
from recording_disk import Operation, RecordingDisk
from saved_contents import contents, load, open_reader, open_writer, save, small_pages

from checkpoint_store import lock
from checkpoint_store.disk import Disk
from checkpoint_store.errors import CheckpointError, StoreLocked


@pytest.fixture(autouse=True)
def pages_of_two_names() -> Iterator[None]:
    """So that the publishes on the disk in memory write some."""
    with small_pages(2):
        yield


HERE = Path(__file__).resolve().parent
PROGRAM = """
    import os, signal, sys
    sys.path[:0] = [{here!r}, {project!r}]
    from saved_contents import load, open_reader, open_writer, save
    from checkpoint_store.disk import Disk
    from checkpoint_store.errors import CheckpointError, StoreLocked
    root = sys.argv[1]
    def tell(word):
        print(word, flush=True)
"""


class Process:
    """A Python process with the store imported that runs `body`, tells words on its output and waits for lines."""

    def __init__(self, body: str, root: Path) -> None:
        program = textwrap.dedent(PROGRAM.format(here=str(HERE), project=str(HERE.parent))) + textwrap.dedent(body)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def hears(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def goes_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def ends(self) -> int:
        return self.process.wait(30)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Process]]:
    started: list[Process] = []

    def start_process(body: str) -> Process:
        started.append(Process(body, tmp_path / "root"))
        return started[-1]

    yield start_process
    for process in started:
        process.process.kill()
        process.process.communicate()


HOLDS = """
    store = open_writer(Disk(), root)
    load(store)
    save(store, 1)
    tell("open")
    sys.stdin.readline()
    store.close()
    tell("closed")
"""


def test_a_second_process_is_refused_with_the_name_of_the_first_until_that_is_done(start, tmp_path: Path):
    first = start(HOLDS)
    assert first.hears() == "open"
    with pytest.raises(StoreLocked, match=f"process {first.process.pid} on host"):
        open_writer(Disk(), str(tmp_path / "root"))
    first.goes_on()
    assert first.hears() == "closed"
    store = open_writer(Disk(), str(tmp_path / "root"))
    assert load(store) == (1, contents(1))
    store.close()


def test_a_killed_process_leaves_no_lock_behind(start, tmp_path: Path):
    first = start(HOLDS)
    assert first.hears() == "open"
    first.process.kill()
    first.ends()
    store = open_writer(Disk(), str(tmp_path / "root"))
    assert load(store) == (1, contents(1))
    store.close()


def test_one_process_cannot_open_a_root_twice_by_whatever_name(tmp_path: Path):
    (tmp_path / "link").symlink_to(tmp_path / "root")
    first = open_writer(Disk(), str(tmp_path / "root"))
    for name in ("root", "link", "root/../root"):
        with pytest.raises(StoreLocked, match="this process has"):
            open_writer(Disk(), str(tmp_path / name))
    save(first, 1)
    first.close()
    second = open_writer(Disk(), str(tmp_path / "link"))
    assert load(second) == (1, contents(1))
    second.close()


def test_processes_that_race_for_a_new_root_publish_one_after_the_other(start, tmp_path: Path):
    racers = [
        start("""
    tell("ready")
    sys.stdin.readline()
    done = 0
    while done < 3:
        try:
            store = open_writer(Disk(), root)
        except StoreLocked:
            continue
        cursor, _ = load(store)
        save(store, cursor + 1)
        store.close()
        done += 1
    tell("done")
""")
        for _ in range(3)
    ]
    assert [racer.hears() for racer in racers] == ["ready"] * 3
    for racer in racers:
        racer.goes_on()
    assert [racer.hears() for racer in racers] == ["done"] * 3
    reader = open_reader(Disk(), str(tmp_path / "root"))
    assert load(reader) == (9, contents(9))
    reader.close()


def test_a_forked_child_does_not_keep_the_lock_of_its_dead_parent(start, tmp_path: Path):
    parent = start("""
    store = open_writer(Disk(), root)
    save(store, 1)
    if os.fork() == 0:
        tell(str(os.getpid()))  # by itself: what a fork must do first is done
        signal.pause()
    sys.stdin.readline()
""")
    child = int(parent.hears())
    with pytest.raises(StoreLocked):
        open_writer(Disk(), str(tmp_path / "root"))
    parent.process.kill()
    parent.ends()
    os.kill(child, 0)  # it lives, with everything it inherited
    try:
        store = open_writer(Disk(), str(tmp_path / "root"))
        assert load(store) == (1, contents(1))
        store.close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_cannot_write_and_its_end_frees_nothing_of_its_parent(start, tmp_path: Path):
    parent = start("""
    store = open_writer(Disk(), root)
    save(store, 1)
    child = os.fork()
    if child == 0:
        try:
            save(store, 2)
        except CheckpointError as error:
            refused = "forked" in str(error)
        store.close()
        os._exit(0 if refused else 1)
    tell(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
    sys.stdin.readline()
    save(store, 2)
    store.close()
    tell("saved")
""")
    assert parent.hears() == "0"
    with pytest.raises(StoreLocked):
        open_writer(Disk(), str(tmp_path / "root"))
    parent.goes_on()
    assert parent.hears() == "saved"
    reader = open_reader(Disk(), str(tmp_path / "root"))
    assert load(reader) == (2, contents(2))
    reader.close()


def test_a_stopped_writer_keeps_its_lock_blocks_no_reader_and_finishes_when_it_is_continued(start, tmp_path: Path):
    """Locks that are judged by age would be broken here; there is no age at which a lock of a living process is stale."""
    writer = start("""
    class Stopping(Disk):
        def sync_directory(self, directory):
            super().sync_directory(directory)
            global syncs
            syncs += 1
            if syncs == 2:
                tell("stops")
                os.kill(os.getpid(), signal.SIGSTOP)
    syncs = -100
    store = open_writer(Stopping(), root)
    save(store, 1)
    syncs = 0
    save(store, 2)
    store.close()
    tell("saved")
""")
    assert writer.hears() == "stops"
    for _ in range(5):
        time.sleep(0.1)
        with pytest.raises(StoreLocked):
            open_writer(Disk(), str(tmp_path / "root"))
        reader = open_reader(Disk(), str(tmp_path / "root"))
        assert load(reader) == (1, contents(1))
        reader.close()
    writer.process.send_signal(signal.SIGCONT)
    assert writer.hears() == "saved"
    reader = open_reader(Disk(), str(tmp_path / "root"))
    assert load(reader) == (2, contents(2))
    reader.close()


# Interleavings -------------------------------------------------------------------------------------------------------


class ReaderWithoutLock(RecordingDisk):
    """A reader on a read-only mount, or of another user: it cannot open the readers' lock."""

    def open_for_shared_lock(self, directory: int, name: str) -> int:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))


READERS = pytest.mark.parametrize("door", [RecordingDisk, ReaderWithoutLock], ids=["reader", "reader without a lock"])


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that meets a sweep waits for it; here the sweep waits for the reader, so it goes on without the lock at once."""
    monkeypatch.setattr(lock, "_READER_PATIENCE_SECONDS", 0.0)


@READERS
def test_a_reader_at_any_moment_of_publishes_and_sweeps_finds_a_whole_generation(door: type[RecordingDisk]):
    machine, progress = in_use()
    disk = RecordingDisk(machine)

    def read(operation: Operation) -> None:
        before = machine.visible_state()
        reader = open_reader(door(machine))
        cursor, held = load(reader)
        reader.close()
        assert progress.acknowledged <= cursor <= progress.attempted, f"at {operation}"
        assert held == contents(cursor, with_records=False), f"at {operation}"
        assert machine.visible_state() == before, f"a reader changed something at {operation}"

    disk.after = read
    publishing(3, with_records=False)(disk, progress)
    assert progress.acknowledged == 7 and len(disk.operations) > 200


@READERS
def test_a_reader_that_stays_open_keeps_what_it_pinned_through_publishes_and_sweeps(door: type[RecordingDisk]):
    """Opened at each operation of a publish and read after two more; without the lock it must pin again, not fail."""
    number, is_over = 0, False
    while not is_over:
        machine, progress = in_use()
        disk, readers = RecordingDisk(machine), []

        def begin(operation: Operation, machine=machine, readers=readers, number=number) -> None:
            if operation.number == number:
                readers.append(open_reader(door(machine)))

        disk.after = begin
        publishing(1, with_records=False)(disk, progress)
        is_over = not readers
        publishing(2, with_records=False)(RecordingDisk(machine), progress)
        for reader in readers:
            cursor, held = load(reader)
            assert held == contents(cursor, with_records=False) and cursor >= 3
            reader.close()
        number += 1


@READERS
def test_publishes_and_sweeps_at_any_moment_of_a_reader_leave_it_a_whole_generation(door: type[RecordingDisk]):
    number, is_over = 0, False
    while not is_over:
        machine, progress = in_use()
        disk, published = door(machine), []

        def publish(
            operation: Operation, machine=machine, progress=progress, published=published, number=number
        ) -> None:
            if operation.number == number:
                published.append(number)
                publishing(3, with_records=False)(RecordingDisk(machine), progress)

        disk.before = publish
        reader = open_reader(disk)
        cursor, held = load(reader)
        reader.close()
        assert held == contents(cursor, with_records=False) and 4 <= cursor <= 7, f"published at operation {number}"
        is_over = not published
        number += 1
    assert number > 20


def test_a_sweep_waits_for_readers_and_catches_up_when_they_are_gone():
    machine, progress = in_use()
    reader = open_reader(RecordingDisk(machine))
    publishing(3, with_records=False)(RecordingDisk(machine), progress)
    kept = len([path for path, _, _ in machine.visible_state() if path.startswith("generations/")])
    assert load(reader) == (4, contents(4, with_records=False))
    reader.close()
    store = open_writer(RecordingDisk(machine))
    store.sweep()
    left = len([path for path, _, _ in machine.visible_state() if path.startswith("generations/")])
    assert (kept, left) == (5, 2)
    store.close()


def test_a_second_writer_at_any_moment_of_the_first_is_refused_and_changes_nothing():
    machine, progress = in_use()
    disk = RecordingDisk(machine)
    refused = []

    def intrude(operation: Operation) -> None:
        if operation.path != "" and any(
            is_exclusive for is_exclusive in machine.root.visible["writer.lock"].locks.values()
        ):
            before = machine.visible_state()
            with pytest.raises(StoreLocked):
                open_writer(RecordingDisk(machine))
            assert machine.visible_state() == before
            refused.append(operation)

    disk.after = intrude
    publishing(1, with_records=False)(disk, progress)
    assert progress.acknowledged == 5 and len(refused) > 80


def test_a_root_changed_by_another_program_under_the_lock_is_told_and_nothing_is_published_over_it():
    machine, _ = in_use()
    store = open_writer(RecordingDisk(machine))
    load(store)
    file = machine.root.visible["CURRENT"]
    file.change("write", 0, b"X")
    with pytest.raises(CheckpointError, match="changed by another program"):
        save(store, 5, with_records=False)
    store.close()
    reader = open_reader(RecordingDisk(machine))
    assert load(reader)[0] == 3, "CURRENT is damaged and the spare pointer leads on"
    reader.close()
