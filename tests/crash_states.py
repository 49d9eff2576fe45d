"""A disk in memory that knows what a power failure may leave of it, for the crash tests.

`Machine` is the computer: inodes, what of them is visible to processes and what is durable. `RecordingDisk` is the store's door
to it, as one process sees it. `legal_states` lists everything a machine may hold after its power failed now:

- a file that was not synced holds any prefix of the unsynced writes; the write in progress may be torn, may have extended the
  file with zeros where its data should be, and may have kept its second half only (pages are written in any order);
- a directory that was not synced holds, for each name by itself, the durable entry or any entry the name had since; so a rename
  between directories may survive on either side, on both, or on neither. A name that is replaced always has one of its entries;
- what a failed sync was asked to keep stays undecided for good: later syncs report success and decide nothing.

Two things are not branched on, because nothing reads them: names and bytes inside a scratch directory (only "all that may be there"
and "nothing" are listed, and opening a file there for reading fails the test), and the bytes of lock files. With
`branches_on_scratch` scratch is treated as everything else, to show that this changes nothing.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

SCRATCH_PREFIX = "attempt-"
LOCK_NAMES = frozenset({"writer.lock", "readers.lock", "owner.lock"})

# (path, number, content): equal numbers are links to one file; content None is a directory.
State = tuple[tuple[str, int, bytes | None], ...]


def _options_after(base: bytes, changes: list[tuple[str, int, bytes]]) -> list[bytes]:
    """What a file may hold when its durable bytes are `base` and `changes` were not synced."""
    options, content = [base], base
    for kind, at, data in changes:
        complete = _changed(content, kind, at, data)
        if kind == "write" and data:
            half = len(data) // 2
            zeros = bytes(len(data) - half)
            extended = _changed(content, "extend", at + len(data), b"")
            options += [
                _changed(content, "write", at, data[:half]),
                extended,
                _changed(content, "write", at, data[:half] + zeros),
                _changed(extended, "write", at + half, data[half:]),
            ]
        options.append(complete)
        content = complete
    return list(dict.fromkeys(options))


def _replayed(base: bytes, changes: list[tuple[str, int, bytes]]) -> bytes:
    return functools.reduce(lambda content, change: _changed(content, *change), changes, base)


def _changed(content: bytes, kind: str, at: int, data: bytes) -> bytes:
    if kind == "truncate":
        return content[:at] + bytes(max(0, at - len(content)))
    if kind == "extend":
        return content + bytes(max(0, at - len(content)))
    return content[:at] + bytes(max(0, at - len(content))) + data + content[at + len(data) :]


@dataclass(eq=False)
class File:
    """A file's visible bytes and the alternatives of what is durable; `changes` since are (kind, offset, data)."""

    number: int
    visible: bytes = b""
    durable: tuple[bytes, ...] = (b"",)
    changes: list[tuple[str, int, bytes]] = field(default_factory=list)
    locks: dict["Handle", bool] = field(default_factory=dict)

    def change(self, kind: str, at: int, data: bytes = b"") -> None:
        self.changes.append((kind, at, data))
        self.visible = _changed(self.visible, kind, at, data)

    def options(self) -> list[bytes]:
        return list(dict.fromkeys(option for base in self.durable for option in _options_after(base, self.changes)))

    def sync(self) -> None:
        self.durable = tuple(dict.fromkeys(_replayed(base, self.changes) for base in self.durable))
        self.changes = []

    def lose(self) -> None:
        """A sync failed: the pages count as clean now, and whichever of them were written stay so."""
        self.durable, self.changes = tuple(self.options()), []


@dataclass(eq=False)
class Directory:
    """A directory's visible entries and, for each name, the alternatives of what is durable (None: no such name)."""

    number: int
    visible: dict[str, "File | Directory"] = field(default_factory=dict)
    durable: dict[str, tuple["File | Directory | None", ...]] = field(default_factory=dict)
    changes: dict[str, list["File | Directory | None"]] = field(default_factory=dict)
    is_removed: bool = False

    def change(self, name: str, entry: "File | Directory | None") -> None:
        self.changes.setdefault(name, []).append(entry)
        if entry is None:
            del self.visible[name]
        else:
            self.visible[name] = entry

    def options(self, name: str) -> list["File | Directory | None"]:
        return list(dict.fromkeys([*self.durable.get(name, (None,)), *self.changes.get(name, [])]))

    def names(self) -> list[str]:
        return sorted({*self.durable, *self.changes})

    def sync(self) -> None:
        for name, entries in self.changes.items():
            self.durable[name] = (entries[-1],)
        self.changes = {}

    def lose(self) -> None:
        self.durable |= {name: tuple(self.options(name)) for name in self.changes}
        self.changes = {}


@dataclass(eq=False)
class Handle:
    """An open file description."""

    inode: File | Directory
    path: str
    offset: int = 0


class Machine:
    """The computer: what is visible to all of its processes, and what its disk would hold after a power failure."""

    def __init__(self, state: State = (), *, branches_on_scratch: bool = False) -> None:
        self.branches_on_scratch = branches_on_scratch
        self._numbers = itertools.count(1)
        self._descriptors = itertools.count(1000)
        self.root = Directory(0)
        self.free_bytes = 1 << 40
        linked: dict[int, File] = {}
        for path, number, content in state:
            directory, name = self._parent(path)
            entry: File | Directory
            if content is None:
                entry = Directory(self.next_number())
            else:
                entry = linked.setdefault(number, File(self.next_number(), content, (content,)))
            directory.visible[name] = entry
            directory.durable[name] = (entry,)

    def next_number(self) -> int:
        return next(self._numbers)

    def next_descriptor(self) -> int:
        return next(self._descriptors)

    def _parent(self, path: str) -> tuple[Directory, str]:
        directory = self.root
        *parents, name = path.split("/")
        for parent in parents:
            found = directory.visible[parent]
            assert isinstance(found, Directory)
            directory = found
        return directory, name

    def visible_state(self) -> State:
        """What processes see now: the state after a kill without a power failure."""
        return _numbered(_visible_paths(self.root, ""))

    def legal_states(self) -> Iterator[State]:
        """Every state, without doubles, that a power failure at this moment may leave."""
        seen: set[State] = set()
        for paths in _trees(self.root, "", self.branches_on_scratch):
            read = (file for path, file in paths if file is not None and self._is_read(path))
            files = list(dict.fromkeys(read))
            for contents in itertools.product(*(file.options() for file in files)):
                state = _numbered(paths, dict(zip(files, contents, strict=True)))
                if state not in seen:
                    seen.add(state)
                    yield state

    def _is_read(self, path: str) -> bool:
        is_scratch = path.startswith(SCRATCH_PREFIX) and not self.branches_on_scratch
        return not is_scratch and path.rsplit("/", 1)[-1] not in LOCK_NAMES


Paths = list[tuple[str, File | None]]


def _visible_paths(directory: Directory, prefix: str) -> Paths:
    paths: Paths = []
    for name, entry in sorted(directory.visible.items()):
        if isinstance(entry, File):
            paths.append((prefix + name, entry))
        else:
            paths += [(prefix + name, None), *_visible_paths(entry, f"{prefix}{name}/")]
    return paths


def _trees(directory: Directory, prefix: str, branches_on_scratch: bool) -> list[Paths]:
    """The trees below `directory` that its entries may form; a file is kept as such, its bytes are chosen later."""
    choices = []
    for name in directory.names():
        options: list[Paths] = []
        for entry in directory.options(name):
            if entry is None:
                options.append([])
            elif isinstance(entry, File):
                options.append([(prefix + name, entry)])
            elif name.startswith(SCRATCH_PREFIX) and not branches_on_scratch:
                may_exist = [
                    (f"{prefix}{name}/{inner}", File(-1)) for inner in entry.names() if any(entry.options(inner))
                ]
                options += [[(prefix + name, None), *may_exist], [(prefix + name, None)]]
            else:
                options += [
                    [(prefix + name, None), *tree] for tree in _trees(entry, f"{prefix}{name}/", branches_on_scratch)
                ]
        choices.append(options)
    return [list(itertools.chain.from_iterable(chosen)) for chosen in itertools.product(*choices)]


def _numbered(paths: Paths, contents: dict[File, bytes] | None = None) -> State:
    """`paths` in order, files numbered by first appearance, so that equal disks are equal states."""
    numbers: dict[File, int] = {}
    state = []
    for path, file in paths:
        if file is None:
            state.append((path, -1, None))
            continue
        content = file.visible if contents is None else contents.get(file, b"")
        state.append((path, numbers.setdefault(file, len(numbers)), content))
    return tuple(state)
