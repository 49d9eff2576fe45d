"""The histories that are crashed: one long session, one after a kill, one after a power failure, one on a failing disk.

Each takes an `Explorer`, so that the same histories serve for the store as it is and for the store with a bug planted in it.
"""

import errno
import json
from collections.abc import Callable
from contextlib import suppress

from crash_explorer import Explorer, Progress, Session
from crash_states import Machine, State
from recording_disk import Killed, Operation, RecordingDisk
from saved_contents import (
    IDENTITY,
    LAYER_COUNT,
    load,
    open_writer,
    repeatable,
    save,
    save_dissolving,
    small_pages,
    stage,
)

from checkpoint_store.disk import Disk
from checkpoint_store.errors import CheckpointError


def publishing(generations: int, *, with_records: bool = True, step: int = 0) -> Session:
    """A session that opens the root, publishes so many generations more, sweeps, and closes it.

    With a `step`, the second of these dissolves the pages, see `save_dissolving`.
    What it finds counts as acknowledged from then on: a run that finds all layers finished exports them and says that it is done.
    """

    def session(disk: Disk, progress: Progress) -> None:
        store = open_writer(disk)
        cursor, _ = load(store)
        progress.acknowledged = max(progress.acknowledged, cursor)
        store.sweep()
        for following in range(cursor + 1, cursor + generations + 1):
            progress.attempted = max(progress.attempted, following)
            if step and following == cursor + 2:
                save_dissolving(store, following, step)
            else:
                save(store, following, with_records=with_records)
            progress.acknowledged = max(progress.acknowledged, following)
        store.close()

    return session


def publishing_stubbornly(disk: Disk, progress: Progress) -> bool:
    """A session that publishes one generation on a disk that may fail, and on an error asks the same store again.

    False when it ended in a named error. What it finds does not count as acknowledged: after a failed sync of a directory an
    unacknowledged generation may be visible and never become durable.
    """
    try:
        store = open_writer(disk)
    except CheckpointError:
        return False
    try:
        cursor, _ = load(store)
        progress.attempted = max(progress.attempted, cursor + 1)
        staged, kept = stage(store, cursor + 1, with_records=False)
        for _ in range(2):
            with suppress(CheckpointError):
                store.publish(IDENTITY, cursor + 1, LAYER_COUNT, staged, kept=kept)
                progress.acknowledged = max(progress.acknowledged, cursor + 1)
                return True
    except CheckpointError:
        return False
    finally:
        store.close()
    return False


ONE_GENERATION = publishing(1, with_records=False)


def new_root() -> tuple[Machine, Progress]:
    return Machine(), Progress()


def in_use(generations: int = 4) -> tuple[Machine, Progress]:
    """A root that was published so often, all but the last two of them swept, and everything in it durable.

    With pages of two names it has one page, and the next generation writes another.
    """
    machine, progress = new_root()
    disk = RecordingDisk(machine)
    with repeatable(0xFEED):
        publishing(generations, with_records=False)(disk, progress)
    disk.kill()
    return Machine(machine.visible_state()), progress


def in_use_without_pages() -> tuple[Machine, Progress]:
    """As `in_use`, by a program that knows no pages: every manifest is of version 1."""
    with small_pages(1000):
        return in_use()


Root = Callable[[], tuple[Machine, Progress]]


def in_one_session(explorer: Explorer, generations: int) -> tuple[RecordingDisk, Progress]:
    """One session on a new root."""
    machine, progress = new_root()
    disk = explorer.explore(machine, publishing(generations, with_records=explorer.with_records), progress)
    return disk, progress


def after_kills(explorer: Explorer, root: Root) -> int:
    """A session after one that was killed at each of its operations, whose number is returned.

    The killed session leaves names and bytes that the next one sees, though a power failure may still take them.
    """
    number, was_killed = 0, True
    while was_killed:
        machine, progress = root()
        was_killed = _killed_at(number, explorer, machine, progress)
        explorer.explore(machine, publishing(2, with_records=False), progress, name=2)
        number += was_killed
    return number


def _killed_at(number: int, explorer: Explorer, machine: Machine, progress: Progress) -> bool:
    """Run a session until its process is killed before operation `number`; False when it ended before that."""
    disk = explorer.door(machine)

    def kill(operation: Operation) -> None:
        if operation.number == number:
            disk.kill()
            raise Killed

    disk.before = kill
    with repeatable(1), suppress(Killed):
        ONE_GENERATION(disk, progress)
    was_killed = disk.is_killed
    disk.kill()
    return was_killed


def after_power_failures(explorer: Explorer, root: Root) -> int:
    """A session after each state that a power failure in one before it may leave; returns how many those are."""
    first = Explorer(with_records=False, door=explorer.door)
    machine, progress = root()
    first.explore(machine, ONE_GENERATION, progress)
    for state, cursor in first.found.items():
        explorer.explore(Machine(state), ONE_GENERATION, Progress(cursor, cursor), name=2)
    return len(first.found)


def in_one_session_that_dissolves(explorer: Explorer, step: int) -> RecordingDisk:
    """One session on a root in use, in whose second generation the pages go and in whose third they are written again.

    With `step` 1 these are the same, over the ones that an older generation still needs; with -1 they are others.
    """
    machine, progress = in_use()
    return explorer.explore(machine, publishing(4, with_records=False, step=step), progress)


def after_damage(explorer: Explorer, path: str) -> None:
    """Two sessions on a root in which one file is spoiled: the newest page, or the last one whose name begins with `path`."""
    machine, progress = in_use(5 if path == "page" else 4)  # the page that the last generation wrote
    state = machine.visible_state()
    if path == "page":
        spoiled = newest_page(state)
    else:
        spoiled = max(name for name, _, content in state if name.startswith(path) and content is not None)
    machine = Machine(
        tuple((name, number, b"x" * len(held or b"") if name == spoiled else held) for name, number, held in state)
    )
    progress.acknowledged -= 1
    for name in (1, 2):
        explorer.explore(machine, publishing(2, with_records=False), progress, name=name)


def newest_page(state: State) -> str:
    """The last page of the newest manifest, which no older manifest names."""
    files = {name: held for name, _, held in state if held is not None}
    newest, *older = (files[name] for name in sorted(files, reverse=True) if name.startswith("generations/"))
    sha256: str = json.loads(newest)["pages"][-1]["sha256"]
    assert not any(sha256.encode() in manifest for manifest in older)
    return f"objects/{sha256}"


def in_one_session_with_scratch(explorer: Explorer) -> Progress:
    """One more generation on a root in use, where every name and every byte of the scratch directory may be lost, too."""
    machine, progress = in_use()
    machine = Machine(machine.visible_state(), branches_on_scratch=True)
    explorer.explore(machine, ONE_GENERATION, progress)
    return progress


Fault = Callable[[RecordingDisk, int], None]


def _fails(number: int) -> Fault:
    def arm(disk: RecordingDisk, at: int) -> None:
        def fail(operation: Operation) -> None:
            if operation.number == at:
                raise OSError(number, errno.errorcode[number])

        disk.before = fail

    return arm


def _happens_and_fails(disk: RecordingDisk, at: int) -> None:
    explore = disk.after

    def fail(operation: Operation) -> None:
        if explore is not None:
            explore(operation)
        if operation.number == at:
            raise OSError(errno.EIO, "EIO")

    disk.after = fail


# Each operation fails, but for what failures leave behind; or it happens and is told as failed.
FAULTS: dict[str, Fault] = {"EIO": _fails(errno.EIO), "ENOSPC": _fails(errno.ENOSPC), "late EIO": _happens_and_fails}


def after_failures(explorer: Explorer, root: Root, fault: Fault) -> tuple[int, int]:
    """A session in which each operation fails once, then one that resumes; both crash everywhere.

    Returns the number of operations that failed, and of sessions that ended in a named error.
    """
    at, named = 0, 0
    while True:
        sound: list[bool] = []

        def session(disk: Disk, progress: Progress, at: int = at, sound: list[bool] = sound) -> None:
            assert isinstance(disk, RecordingDisk)
            fault(disk, at)
            sound.append(publishing_stubbornly(disk, progress))

        machine, progress = root()
        failing = explorer.explore(machine, session, progress)
        # What an open that was told as failed opened nobody can close.
        assert not explorer.left_open or fault is FAULTS["late EIO"], f"left open: {explorer.left_open}"
        explorer.explore(machine, publishing_stubbornly, progress, name=2)
        if at >= len(failing.operations):
            return at, named
        named += not sound[0]
        at += 1
