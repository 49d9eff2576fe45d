"""One writer at a time, by `flock`: the kernel frees it when its process dies, so nothing is stale and nothing is forced."""

import json
import re
import time
from contextlib import ExitStack, suppress
from logging import getLogger
from typing import Any

from checkpoint_store.disk import Disk
from checkpoint_store.errors import CheckpointDamaged, CheckpointError, StoreLocked
from checkpoint_store.failures import reading, writing

WRITER_LOCK = "writer.lock"
READERS_LOCK = "readers.lock"
OWNER_LOCK = "owner.lock"
ATTEMPT_NAME = re.compile(r"attempt-[0-9a-f]{16}")
_HOLDER_LIMIT_BYTES = 4 << 10
# A sweep only unlinks names; a reader that waited so long goes on without the lock and looks at CURRENT again.
_READER_PATIENCE_SECONDS = 2.0
_NETWORK_FILE_SYSTEMS = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB2",
    0x0BD00BD0: "Lustre",
    0x65735546: "FUSE",
    0x00C36400: "Ceph",
    0x01021997: "9P",
    0x5346414F: "AFS",
    0x73757245: "Coda",
    0x47504653: "GPFS",
    0x786F4256: "VirtualBox shared folder",
}

logger = getLogger(__name__)


def network_file_system(disk: Disk, directory: int) -> str | None:
    """The name of the network or user-space file system that `directory` lies on, or None for a local one."""
    return _NETWORK_FILE_SYSTEMS.get(disk.file_system_type(directory))


def refuse_network_file_system(disk: Disk, directory: int, path: str) -> None:
    name = network_file_system(disk, directory)
    if name is not None:
        raise CheckpointError(
            f"`{path}` lies on {name}: its locks may not exclude a second writer and its syncs may return before the "
            f"data is safe, so progress could be lost; use a local disk, or accept that with "
            f"allow_network_filesystem=True"
        )


class WriterLock:
    """The root's writer lock, held until `release` or the end of the process; never kept by a forked child."""

    def __init__(self, disk: Disk, root: int, path: str, run_id: str | None) -> None:
        self._disk = disk
        with writing(f"{path}/{WRITER_LOCK}"):
            self._file = disk.open_for_lock(root, WRITER_LOCK)
            try:
                is_ours = disk.lock(self._file, exclusive=True)
                holder = None if is_ours else read_holder(disk, self._file)
            except OSError:
                disk.close(self._file)
                raise
            if not is_ours:
                disk.close(self._file)
        if not is_ours:
            raise StoreLocked(_locked_message(disk, path, holder))
        self._tell_holder(path, run_id)

    def _tell_holder(self, path: str, run_id: str | None) -> None:
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        holder = {
            "pid": self._disk.process_id(),
            "host": self._disk.host(),
            "boot_id": self._disk.boot_id(),
            "started_utc": started,
            "run_id": run_id,
        }
        try:
            self._disk.truncate(self._file, 0)
            self._disk.write(self._file, json.dumps(holder, sort_keys=True).encode() + b"\n")
        except OSError as error:
            # Only diagnostics: on a full disk the operator must still be able to open the store and sweep it.
            logger.warning("could not note the holder in `%s/%s`: %s", path, WRITER_LOCK, error.strerror)

    def release(self) -> None:
        self._disk.close(self._file)


def read_holder(disk: Disk, file: int) -> dict[str, Any] | None:
    """What the last writer noted about itself; None when that is not legible."""
    try:
        holder = json.loads(disk.read(file, _HOLDER_LIMIT_BYTES))
    except (ValueError, RecursionError):
        return None
    return holder if isinstance(holder, dict) else None


def _locked_message(disk: Disk, path: str, holder: dict[str, Any] | None) -> str:
    if holder is None:
        return f"another writer holds `{path}`; wait for it to end, or use another checkpoint path"
    is_this_machine = (holder.get("host"), holder.get("boot_id")) == (disk.host(), disk.boot_id())
    if is_this_machine and holder.get("pid") == disk.process_id():
        return f"this process has `{path}` open already: close that store before opening it again"
    return (
        f"another writer holds `{path}`: process {holder.get('pid')} on host {holder.get('host')}, started "
        f"{holder.get('started_utc')}, run {holder.get('run_id')}; wait for it or stop it, or use another checkpoint path"
    )


class ReadersLock:
    """A reader's share in the readers' lock, to which sweeps defer; on a root without one, `is_held` is False."""

    def __init__(self, disk: Disk, root: int, path: str) -> None:
        self._disk = disk
        self._file: int | None = None
        try:
            with reading(f"{path}/{READERS_LOCK}"):
                file = disk.open_for_shared_lock(root, READERS_LOCK)
        except CheckpointError as error:
            # Missing, not ours to open, or something else in its place: the reader looks at CURRENT again instead.
            if isinstance(error, CheckpointDamaged) or isinstance(error.__cause__, PermissionError):
                return
            raise
        deadline = time.monotonic() + _READER_PATIENCE_SECONDS
        try:
            while not disk.lock(file, exclusive=False):
                if time.monotonic() > deadline:
                    disk.close(file)
                    return
                time.sleep(0.02)
        except OSError:  # a file system without locks has no sweeping writer either
            disk.close(file)
            return
        self._file = file

    @property
    def is_held(self) -> bool:
        return self._file is not None

    def release(self) -> None:
        if self._file is not None:
            self._disk.close(self._file)
            self._file = None


class Attempt:
    """Private scratch of one run: a directory that says by its own flock that its process lives."""

    def __init__(self, disk: Disk, root: int, name: str) -> None:
        self.name = name
        self._disk = disk
        self._root = root
        self._temporaries = 0
        disk.make_directory(root, name)
        with ExitStack() as descriptors:
            self.directory = disk.open_directory(root, name)
            descriptors.callback(disk.close, self.directory)
            owner = disk.open_for_lock(self.directory, OWNER_LOCK)
            descriptors.callback(disk.close, owner)
            if not disk.lock(owner, exclusive=True):
                raise CheckpointError(f"`{name}` is owned by another process, though its name was drawn at random")
            self._descriptors = descriptors.pop_all()

    def temporary(self) -> str:
        """A name that nothing in the attempt has."""
        self._temporaries += 1
        return f"temporary-{self._temporaries:08d}"

    def close(self) -> None:
        self._descriptors.close()

    def remove(self) -> None:
        """Remove the directory with all that is in it, and let go of it, also when it cannot be removed."""
        try:
            _remove_content(self._disk, self.directory)
        finally:
            self.close()
        self._disk.remove_directory(self._root, self.name)


def remove_dead_attempt(disk: Disk, root: int, name: str) -> bool:
    """Remove an attempt directory unless its process lives; False when it does."""
    directory = disk.open_directory(root, name)
    try:
        owner = None
        with suppress(FileNotFoundError):  # death came before the owner's file, or a removal was cut short
            owner = disk.open_for_shared_lock(directory, OWNER_LOCK)
        try:
            if owner is not None and not disk.lock(owner, exclusive=True):
                return False
            _remove_content(disk, directory)
        finally:
            if owner is not None:
                disk.close(owner)
    finally:
        disk.close(directory)
    disk.remove_directory(root, name)
    return True


def _remove_content(disk: Disk, directory: int) -> None:
    for name in disk.list_directory(directory):
        if disk.stat(directory, name).is_directory:
            below = disk.open_directory(directory, name)
            try:
                _remove_content(disk, below)
            finally:
                disk.close(below)
            disk.remove_directory(directory, name)
        else:
            disk.unlink(directory, name)
