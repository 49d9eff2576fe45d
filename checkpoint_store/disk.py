"""The one door to the file system: every system call of this package is a method of `Disk`, and nothing else opens a file.

Files are named relative to an open directory, so that a path is resolved once and no symbolic link is followed below
the root. The crash tests replace this class with one that remembers what was synced; a method added here must be added there.
"""

import errno
import fcntl
import mmap
import os
import stat
from dataclasses import dataclass

WRITE_VIEW_BYTES = 4 << 20
FILE_MODE = 0o600
DIRECTORY_MODE = 0o700


@dataclass(frozen=True)
class FileStat:
    """What a name in a directory refers to, without following it."""

    size: int
    is_file: bool
    is_directory: bool
    inode: int
    modified: float


class Disk:
    """POSIX system calls; an `OSError` passes through unchanged for the caller to name the thing it happened to."""

    # Directories -----------------------------------------------------------------------------------------------------

    def open_root(self, path: str) -> int:
        """Descriptor of the directory `path`; the only call that takes a path, and the only one that follows links."""
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

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
        """Descriptor to read, write and flock; the file is made when missing."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, FILE_MODE, dir_fd=directory)

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
        """The file's first `size` bytes, read-only, mapped; stays valid after the descriptor is closed."""
        if size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))

    # Names -----------------------------------------------------------------------------------------------------------

    def stat(self, directory: int, name: str) -> FileStat:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        return FileStat(
            found.st_size, stat.S_ISREG(found.st_mode), stat.S_ISDIR(found.st_mode), found.st_ino, found.st_mtime
        )

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
