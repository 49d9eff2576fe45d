"""What an `OSError` means: damage that an older generation may cure, a full disk, or neither.

Only damage leads to a fallback. A missing permission, too many open files or too little memory say nothing about the
bytes on disk, and a fallback on them would throw progress away.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from checkpoint_store.errors import CheckpointDamaged, CheckpointError, StorageFull

_DAMAGE = {
    errno.ENOENT: "it is missing",
    errno.EIO: "the device could not read it",
    errno.ELOOP: "a symbolic link stands in its place",
    errno.ENOTDIR: "something that is no directory stands in its place",
    errno.EISDIR: "a directory stands in its place",
    errno.ENXIO: "a special file stands in its place",
    errno.EINVAL: "it is not a regular file",
    errno.EUCLEAN: "the file system reports its own structure as damaged",
    errno.EBADMSG: "the file system's own checksum does not match",
}
_FULL = {
    errno.ENOSPC: "no space is left",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "the file size limit is reached",
}


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn an `OSError` of the calls inside into `CheckpointDamaged` when it tells of damage, else `CheckpointError`."""
    try:
        yield
    except OSError as error:
        if error.errno in _DAMAGE:
            raise CheckpointDamaged(f"`{what}` is damaged: {_DAMAGE[error.errno]}") from error
        raise CheckpointError(
            f"cannot read `{what}`: {error.strerror}; nothing is known to be damaged, mend this and run again"
        ) from error


def is_missing(error: CheckpointDamaged) -> bool:
    """Whether the damage is that nothing has the name."""
    return isinstance(error.__cause__, FileNotFoundError)


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Turn an `OSError` of the calls inside into `StorageFull` when space is short, else `CheckpointError`."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFull(
                f"cannot write `{what}`: {_FULL[error.errno]}; what was published stays, make room and run again"
            ) from error
        raise CheckpointError(
            f"cannot write `{what}`: {error.strerror}; what was published stays, mend the disk and run again"
        ) from error
