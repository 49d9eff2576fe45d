"""The one door to the file system: every system call of this package is a method of `Disk`, and nothing else opens a file.

Files are named relative to an open directory, so that a path is resolved once and no symbolic link is followed below
the root. The crash tests replace this class with one that remembers what was synced; a method added here must be added there.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import stat
from dataclasses import dataclass
from pathlib import Path

WRITE_VIEW_BYTES = 4 << 20
FILE_MODE = 0o600
DIRECTORY_MODE = 0o700

_FICLONE = 0x40049409  # linux/fs.h; share the extents of another file
_MADV_POPULATE_READ = 22  # Linux 5.14; unlike touching the pages, a read error comes back as an errno, not as SIGBUS
_EHWPOISON = 133  # memory went bad under the page; Python's errno has no name for it

# Descriptors that hold a flock: a forked child must not keep the lock of a parent that died. Closing is enough and
# right; unlocking in the child would unlock the parent, since both share one open file description.
_lock_descriptors: set[int] = set()


def _close_locks_in_forked_child() -> None:
    while _lock_descriptors:
        os.close(_lock_descriptors.pop())


os.register_at_fork(after_in_child=_close_locks_in_forked_child)


@dataclass(frozen=True)
class FileStat:
    """What a name in a directory refers to, without following it."""

    size: int
    is_file: bool
    is_directory: bool
    inode: int


class Disk:
    """POSIX system calls; an `OSError` passes through unchanged for the caller to name the thing it happened to."""

    # Process ---------------------------------------------------------------------------------------------------------

    def process_id(self) -> int:
        return os.getpid()

    def host(self) -> str:
        return platform.node()

    def boot_id(self) -> str:
        """What tells this start of the machine from the one before; empty where the kernel does not say."""
        try:
            return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        except OSError:
            return ""

    def real_path(self, path: str) -> str:
        """The absolute path with every symbolic link resolved; parts that do not exist stay as they are."""
        return os.path.realpath(path)

    # Directories -----------------------------------------------------------------------------------------------------

    def open_root(self, path: str) -> int:
        """Descriptor of the directory `path`; the only call that takes a path, and the only one that follows links."""
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def make_root(self, path: str) -> None:
        """Make the directory `path` and what is missing above it, durably.

        Every directory above, up to the mount point, is synced even when it was there: a killed predecessor may have
        made it and left an entry that is visible but not durable.
        """
        root = Path(os.path.realpath(path))
        root.parent.mkdir(parents=True, exist_ok=True)
        root.mkdir(DIRECTORY_MODE, exist_ok=True)
        device = root.stat().st_dev
        for above in root.parents:
            if above.stat().st_dev != device:
                break
            try:
                directory = os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except PermissionError:  # not readable, so not ours: it was there before any process of this user
                continue
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def open_directory(self, directory: int, name: str) -> int:
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)

    def make_directory(self, directory: int, name: str) -> None:
        os.mkdir(name, DIRECTORY_MODE, dir_fd=directory)

    def remove_directory(self, directory: int, name: str) -> None:
        os.rmdir(name, dir_fd=directory)

    def list_directory(self, directory: int) -> list[str]:
        return sorted(os.listdir(directory))

    def sync_directory(self, directory: int) -> None:
        os.fsync(directory)

    # Files -----------------------------------------------------------------------------------------------------------

    def create(self, directory: int, name: str) -> int:
        """Descriptor of a new, empty, private file; `FileExistsError` when the name is taken, by a link too."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, FILE_MODE, dir_fd=directory)

    def open_for_read(self, directory: int, name: str) -> int:
        # O_NONBLOCK: a fifo under a file's name must not hang the reader.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        return os.open(name, flags, dir_fd=directory)

    def open_for_lock(self, directory: int, name: str) -> int:
        """Descriptor to read, write and flock, closed in forked children; the file is made when missing."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(name, flags, FILE_MODE, dir_fd=directory)
        _lock_descriptors.add(file)
        return file

    def open_for_shared_lock(self, directory: int, name: str) -> int:
        """As `open_for_lock`, but read-only and never made: what a reader may do on a read-only mount."""
        file = self.open_for_read(directory, name)
        _lock_descriptors.add(file)
        return file

    def allocate(self, file: int, size: int) -> None:
        """Reserve `size` bytes, so that a full disk is told before the work; a file system without it reserves nothing."""
        if size == 0:
            return
        try:
            os.posix_fallocate(file, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise

    def write(self, file: int, view: memoryview | bytes) -> None:
        """Append all of `view`; a short write goes on where it ended."""
        rest = memoryview(view).cast("B")
        while rest:
            rest = rest[os.write(file, rest[:WRITE_VIEW_BYTES]) :]

    def truncate(self, file: int, size: int) -> None:
        os.ftruncate(file, size)

    def sync(self, file: int) -> None:
        os.fsync(file)

    def close(self, file: int) -> None:
        _lock_descriptors.discard(file)
        os.close(file)

    def size(self, file: int) -> int:
        """Size of an open regular file; `OSError` for anything else."""
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return found.st_size

    def read(self, file: int, limit: int) -> bytes:
        """The whole file from its start, at most `limit` bytes of it."""
        parts, offset = [], 0
        while offset < limit and (part := os.pread(file, limit - offset, offset)):
            parts.append(part)
            offset += len(part)
        return b"".join(parts)

    def map(self, file: int, size: int) -> memoryview:
        """The file's first `size` bytes, mapped copy-on-write; stays valid after the descriptor is closed.

        Copy-on-write, because a write through a tensor of a read-only mapping would kill the process; the file never
        sees such a write.
        """
        if size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file, size, access=mmap.ACCESS_COPY))

    def read_in(self, view: memoryview, start: int, size: int) -> None:
        """Bring a page-aligned piece of a mapping into memory, so that a read error is an `OSError` (EIO) here.

        Kernels before 5.14 cannot: there a read error in a mapping ends the process with SIGBUS.
        """
        mapping = view.obj
        if not isinstance(mapping, mmap.mmap):
            return
        try:
            mapping.madvise(_MADV_POPULATE_READ, start, size)
        except OSError as error:
            if error.errno in (errno.EFAULT, _EHWPOISON):
                raise OSError(errno.EIO, os.strerror(errno.EIO)) from error
            if error.errno != errno.EINVAL:
                raise

    def clone(self, source: int, target: int) -> bool:
        """Make `target` share all extents of `source` (reflink); False where the file system cannot."""
        try:
            fcntl.ioctl(target, _FICLONE, source)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS):
                return False
            raise
        return True

    # Names -----------------------------------------------------------------------------------------------------------

    def stat(self, directory: int, name: str) -> FileStat:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        return FileStat(found.st_size, stat.S_ISREG(found.st_mode), stat.S_ISDIR(found.st_mode), found.st_ino)

    def rename(self, from_directory: int, name: str, to_directory: int, new_name: str) -> None:
        os.rename(name, new_name, src_dir_fd=from_directory, dst_dir_fd=to_directory)

    def link(self, from_directory: int, name: str, to_directory: int, new_name: str) -> None:
        os.link(name, new_name, src_dir_fd=from_directory, dst_dir_fd=to_directory, follow_symlinks=False)

    def unlink(self, directory: int, name: str) -> None:
        os.unlink(name, dir_fd=directory)

    # Locks and space -------------------------------------------------------------------------------------------------

    def lock(self, file: int, *, exclusive: bool) -> bool:
        """Take the kernel's lock on an open file, or say at once that another process holds it."""
        try:
            fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def free_bytes(self, directory: int) -> int:
        """What an ordinary user may still write (f_bavail, not f_bfree)."""
        found = os.fstatvfs(directory)
        return found.f_bavail * found.f_frsize

    def file_system_type(self, directory: int) -> int:
        """The kernel's magic number of the file system (statfs f_type); 0 where the platform does not tell."""
        if platform.system() != "Linux":
            return 0
        buffer = (ctypes.c_long * 64)()  # larger than any struct statfs; f_type is its first word
        if ctypes.CDLL(None, use_errno=True).fstatfs(directory, ctypes.byref(buffer)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return int(buffer[0]) & 0xFFFFFFFF
