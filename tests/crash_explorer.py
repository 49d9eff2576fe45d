"""Crashes a session at every operation, in every way, and checks what is left; knows each distinct state only once."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from crash_states import Machine, State
from recording_disk import Operation, RecordingDisk
from saved_contents import (
    KEEP_LAST,
    contents,
    load,
    open_reader,
    open_writer,
    repeatable,
    save,
)

from checkpoint_store.disk import Disk
from checkpoint_store.store import CheckpointStore

MOST_STATES_AT_ONE_POINT = 50_000
EMPTY_CURRENT = "lists no generation and its spare does"


@dataclass
class Progress:
    """What the sessions so far have acknowledged, and what they may have published besides: the highest cursors."""

    acknowledged: int = 0
    attempted: int = 0


Session = Callable[[Disk, Progress], object]


class LostProgress(AssertionError):
    """An invariant of the store does not hold in a state that a crash may leave."""


@dataclass
class Explorer:
    """Runs sessions and checks every legal state after each of their operations.

    `door` is the disk that sessions run on, for planted bugs; states are always checked on a sound one. `is_faulty` is for
    histories in which the disk itself fails: then only the newest listed generation must be whole, not each. With
    `is_damaged`, for histories that begin with damage, the one that is found need not be the newest listed.
    """

    with_records: bool = True
    is_faulty: bool = False
    is_damaged: bool = False
    door: Callable[[Machine], RecordingDisk] = RecordingDisk
    points: int = 0
    left_open: list[str] = field(default_factory=list)
    sampled_points: int = 0
    found: dict[State, int] = field(default_factory=dict)

    def explore(self, machine: Machine, session: Session, progress: Progress, *, name: int = 1) -> RecordingDisk:
        """Run `session` to its end on `machine`, crashing in every way before it and after each of its operations.

        `name` stands for what the session draws at random; sessions after one another have different ones.
        """
        disk = self.door(machine)
        disk.after = lambda operation: self.crash(machine, progress, disk.operations)
        self.crash(machine, progress, disk.operations)
        with repeatable(name):
            session(disk, progress)
        self.crash(machine, progress, disk.operations)
        self.left_open = disk.open_descriptors()
        disk.kill()
        return disk

    def crash(self, machine: Machine, progress: Progress, operations: list[Operation]) -> None:
        """Check each state that a power failure may leave now, and the one that a kill leaves."""
        self.points += 1
        states = itertools.islice(machine.legal_states(), MOST_STATES_AT_ONE_POINT + 1)
        for count, state in enumerate(itertools.chain([machine.visible_state()], states)):
            if count > MOST_STATES_AT_ONE_POINT:
                self.sampled_points += 1
                break
            try:
                cursor = self.recovered(state)
                if not progress.acknowledged <= cursor <= progress.attempted:
                    raise LostProgress(f"found generation {cursor}, {progress} ")
            except Exception as error:
                raise LostProgress(_story(operations, state, error)) from error

    def recovered(self, state: State) -> int:
        """The cursor found in `state` by a reader and a writer, after it was shown that a run can go on from there."""
        if state not in self.found:
            with repeatable(0xC4EC):
                self.found[state] = self._recover(state)
        return self.found[state]

    def _recover(self, state: State) -> int:
        machine = Machine(state)
        reader = open_reader(RecordingDisk(machine))
        seen = load(reader)
        reader.close()
        assert machine.visible_state() == Machine(state).visible_state(), "a reader changed something"

        store = open_writer(RecordingDisk(machine))
        cursor, held = load(store)
        assert held == self.expected(cursor), f"wrong bytes in generation {cursor}"
        assert seen == (cursor, held), f"a reader found generation {seen[0]}, a writer {cursor}"
        if not self.is_damaged:
            self._check_listed(store, cursor)
            if cursor > 1 and not self.is_faulty:
                self._check_spare(state, cursor)
        save(store, cursor + 1, with_records=self.with_records)
        store.close()

        store = open_reader(RecordingDisk(machine))
        assert load(store) == (cursor + 1, self.expected(cursor + 1)), "what was saved after the crash is not found"
        store.close()
        return cursor

    def _check_listed(self, store: CheckpointStore, cursor: int) -> None:
        # A failed sync may have lost CURRENT's first turn for good, and a later one made the spare of it durable.
        may_be_empty = self.is_faulty and store.spare_because is not None and EMPTY_CURRENT in store.spare_because
        assert store.spare_because is None or may_be_empty, f"CURRENT is lost: {store.spare_because}"
        listed = store.generations()
        assert len(listed) >= min(KEEP_LAST, cursor), f"only {len(listed)} generations are listed"
        for generation in listed[:1] if self.is_faulty else listed:
            found = {(ref.role, ref.key): bytes(store.view(ref)) for ref in generation.objects}
            assert found == self.expected(generation.cursor), f"generation {generation.gen} is listed and not whole"

    def _check_spare(self, state: State, cursor: int) -> None:
        """Where CURRENT is lost, the spare pointer leads to the same generation or to the one before."""
        store = open_reader(RecordingDisk(Machine(tuple(entry for entry in state if entry[0] != "CURRENT"))))
        found, held = load(store)
        store.close()
        assert cursor - 1 <= found <= cursor and held == self.expected(found), f"the spare leads to generation {found}"

    def expected(self, cursor: int) -> dict[tuple[str, str], bytes]:
        return contents(cursor, with_records=self.with_records) if cursor else {}


def _story(operations: list[Operation], state: State, error: Exception) -> str:
    last = "\n  ".join(str(operation) for operation in operations[-12:])
    left = "\n  ".join(f"{path}: {'directory' if content is None else content[:60]}" for path, _, content in state)
    return f"{type(error).__name__}: {error}\nafter\n  {last}\nwith this left on disk\n  {left}"
