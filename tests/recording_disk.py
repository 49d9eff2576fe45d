"""The store's door to a machine in memory: every call is numbered, can be made to fail, and can be the process's last.

`crash_states.Machine` keeps the files; a `RecordingDisk` is one process on it, with descriptors and locks of its own.
"""

import errno
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from crash_states import SCRATCH_PREFIX, Directory, File, Handle, Machine

from checkpoint_store.disk import Disk, FileStat

EXT4_MAGIC = 0xEF53


class Killed(BaseException):
    """The process got SIGKILL; no handler of the code under test may survive it."""


@dataclass(frozen=True)
class Operation:
    """One call at the door; `path` is where it happens, for a rename or a link the new name."""

    number: int
    name: str
    path: str

    def __str__(self) -> str:
        return f"{self.number}: {self.name} {self.path}"


def _error(number: int, path: str = "") -> OSError:
    return OSError(number, os.strerror(number), path)


def _door(method: Callable[..., Any]) -> Callable[..., Any]:
    """Number the call, let the test's hooks see it before and after, and give a failure its usual side effects."""

    @functools.wraps(method)
    def call(self: "RecordingDisk", *arguments: Any, **options: Any) -> Any:
        if self.is_killed:
            raise Killed
        operation = Operation(len(self.operations), method.__name__, self._where(arguments))
        self.operations.append(operation)
        if self.before is not None:
            try:
                self.before(operation)
            except OSError:
                self._fail(operation.name, arguments)
                raise
        result = method(self, *arguments, **options)
        if self.after is not None:
            self.after(operation)
        return result

    return call


class RecordingDisk(Disk):
    """One process's door to a `Machine`; `before` and `after` are called around each operation and may raise.

    An `OSError` from `before` is the failure of the operation, which then has not happened, but for what failures leave behind:
    a failed sync loses the data for good, a failed write has written half, a failed close has closed. An `OSError` from `after`
    is an operation that happened and was reported as failed.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.operations: list[Operation] = []
        self.before: Callable[[Operation], None] | None = None
        self.after: Callable[[Operation], None] | None = None
        self.is_killed = False
        self._handles: dict[int, Handle] = {}

    def kill(self) -> None:
        """What SIGKILL does: descriptors are closed, locks are free, and no further call gets through."""
        self.is_killed = True
        for descriptor in list(self._handles):
            self._release(descriptor)

    # What is behind a descriptor -------------------------------------------------------------------------------------

    def open_descriptors(self) -> list[str]:
        return [handle.path for handle in self._handles.values()]

    def _open(self, inode: File | Directory, path: str) -> int:
        descriptor = self.machine.next_descriptor()
        self._handles[descriptor] = Handle(inode, path)
        return descriptor

    def _release(self, descriptor: int) -> None:
        handle = self._handles.pop(descriptor)
        if isinstance(handle.inode, File):
            handle.inode.locks.pop(handle, None)

    def _handle(self, descriptor: int) -> Handle:
        if descriptor not in self._handles:
            raise _error(errno.EBADF)
        return self._handles[descriptor]

    def _file(self, descriptor: int) -> File:
        inode = self._handle(descriptor).inode
        if not isinstance(inode, File):
            raise _error(errno.EISDIR)
        return inode

    def _directory(self, descriptor: int) -> Directory:
        inode = self._handle(descriptor).inode
        if not isinstance(inode, Directory):
            raise _error(errno.ENOTDIR)
        return inode

    def _entry(self, directory: int, name: str) -> File | Directory:
        found = self._directory(directory).visible.get(name)
        if found is None:
            raise _error(errno.ENOENT, self._path(directory, name))
        return found

    def _path(self, directory: int, name: str) -> str:
        assert name not in ("", ".", "..") and "/" not in name, f"`{name}` is not a plain name"
        return f"{self._handle(directory).path}/{name}".lstrip("/")

    def _where(self, arguments: tuple[Any, ...]) -> str:
        directory, name = arguments[-2:] if len(arguments) == 4 else (arguments[0], arguments[-1])
        if not isinstance(directory, int) or directory not in self._handles:
            return ""
        return self._path(directory, name) if isinstance(name, str) else self._handles[directory].path

    def _fail(self, name: str, arguments: tuple[Any, ...]) -> None:
        """What an operation that reports an error has done all the same."""
        if name in ("sync", "sync_directory"):
            self._handle(arguments[0]).inode.lose()
        elif name == "close":
            self._release(arguments[0])
        elif name == "write":
            view = bytes(arguments[1])
            self._append(arguments[0], view[: len(view) // 2])
        elif name == "allocate":
            self._file(arguments[0]).change("extend", arguments[1] // 2)

    def _append(self, file: int, data: bytes) -> None:
        handle = self._handle(file)
        self._file(file).change("write", handle.offset, data)
        handle.offset += len(data)

    # Process ---------------------------------------------------------------------------------------------------------

    def process_id(self) -> int:
        return 4321

    def host(self) -> str:
        return "machine"

    def boot_id(self) -> str:
        return "11111111-2222-3333-4444-555555555555"

    def real_path(self, path: str) -> str:
        return path

    # Directories -----------------------------------------------------------------------------------------------------

    @_door
    def make_root(self, path: str) -> None:
        """The root of the machine is always there."""

    @_door
    def open_root(self, path: str) -> int:
        return self._open(self.machine.root, "")

    @_door
    def open_directory(self, directory: int, name: str) -> int:
        entry = self._entry(directory, name)
        if not isinstance(entry, Directory):
            raise _error(errno.ENOTDIR, name)
        return self._open(entry, self._path(directory, name))

    @_door
    def make_directory(self, directory: int, name: str) -> None:
        self._make_entry(directory, name, Directory(self.machine.next_number()))

    @_door
    def remove_directory(self, directory: int, name: str) -> None:
        entry = self._entry(directory, name)
        if not isinstance(entry, Directory):
            raise _error(errno.ENOTDIR, name)
        if entry.visible:
            raise _error(errno.ENOTEMPTY, name)
        entry.is_removed = True
        self._directory(directory).change(name, None)

    @_door
    def list_directory(self, directory: int) -> list[str]:
        return sorted(self._directory(directory).visible)

    @_door
    def sync_directory(self, directory: int) -> None:
        self._directory(directory).sync()

    # Files -----------------------------------------------------------------------------------------------------------

    def _make_entry(self, directory: int, name: str, entry: File | Directory) -> None:
        parent = self._directory(directory)
        if parent.is_removed:
            raise _error(errno.ENOENT, name)
        if name in parent.visible:
            raise _error(errno.EEXIST, name)
        parent.change(name, entry)

    @_door
    def create(self, directory: int, name: str) -> int:
        file = File(self.machine.next_number())
        self._make_entry(directory, name, file)
        return self._open(file, self._path(directory, name))

    @_door
    def open_for_read(self, directory: int, name: str) -> int:
        path = self._path(directory, name)
        assert not path.startswith(SCRATCH_PREFIX), f"`{path}` is read: scratch may hold anything after a crash"
        return self._open(self._entry(directory, name), path)

    @_door
    def open_for_lock(self, directory: int, name: str) -> int:
        if name not in self._directory(directory).visible:
            self._make_entry(directory, name, File(self.machine.next_number()))
        return self._open(self._entry(directory, name), self._path(directory, name))

    @_door
    def open_for_shared_lock(self, directory: int, name: str) -> int:
        return self._open(self._entry(directory, name), self._path(directory, name))

    @_door
    def allocate(self, file: int, size: int) -> None:
        self._file(file).change("extend", size)

    @_door
    def write(self, file: int, view: memoryview | bytes) -> None:
        self._append(file, bytes(view))

    @_door
    def truncate(self, file: int, size: int) -> None:
        self._file(file).change("truncate", size)

    @_door
    def sync(self, file: int) -> None:
        self._file(file).sync()

    @_door
    def close(self, file: int) -> None:
        self._handle(file)
        self._release(file)

    @_door
    def size(self, file: int) -> int:
        inode = self._handle(file).inode
        if not isinstance(inode, File):
            raise OSError(errno.EINVAL, "not a regular file")
        return len(inode.visible)

    @_door
    def read(self, file: int, limit: int) -> bytes:
        return self._file(file).visible[:limit]

    @_door
    def map(self, file: int, size: int) -> memoryview:
        content = self._file(file).visible
        if size > len(content):
            raise ValueError("mmap length is greater than file size")
        return memoryview(bytearray(content[:size]))

    @_door
    def read_in(self, view: memoryview, start: int, size: int) -> None:
        """A place where reading may fail."""

    @_door
    def clone(self, source: int, target: int) -> bool:
        return False

    # Names -----------------------------------------------------------------------------------------------------------

    @_door
    def stat(self, directory: int, name: str) -> FileStat:
        entry = self._entry(directory, name)
        size = len(entry.visible) if isinstance(entry, File) else 0
        return FileStat(size, isinstance(entry, File), isinstance(entry, Directory), entry.number)

    @_door
    def rename(self, from_directory: int, name: str, to_directory: int, new_name: str) -> None:
        entry = self._entry(from_directory, name)
        assert isinstance(entry, File), f"`{name}` is a directory: the model renames files only"
        replaced = self._directory(to_directory).visible.get(new_name)
        if isinstance(replaced, Directory):
            raise _error(errno.EISDIR, new_name)
        if replaced is entry:
            return  # POSIX: two names of one file, renaming one onto the other leaves both
        self._directory(to_directory).change(new_name, entry)
        self._directory(from_directory).change(name, None)

    @_door
    def link(self, from_directory: int, name: str, to_directory: int, new_name: str) -> None:
        entry = self._entry(from_directory, name)
        if isinstance(entry, Directory):
            raise _error(errno.EPERM, name)
        self._make_entry(to_directory, new_name, entry)

    @_door
    def unlink(self, directory: int, name: str) -> None:
        if isinstance(self._entry(directory, name), Directory):
            raise _error(errno.EISDIR, name)
        self._directory(directory).change(name, None)

    # Locks and space -------------------------------------------------------------------------------------------------

    @_door
    def lock(self, file: int, *, exclusive: bool) -> bool:
        handle, locks = self._handle(file), self._file(file).locks
        if any(other is not handle and (exclusive or is_exclusive) for other, is_exclusive in locks.items()):
            return False
        locks[handle] = exclusive
        return True

    @_door
    def free_bytes(self, directory: int) -> int:
        return self.machine.free_bytes

    @_door
    def file_system_type(self, directory: int) -> int:
        return EXT4_MAGIC
