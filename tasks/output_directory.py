"""A model directory in the making, and what dead runs left of theirs: never half there under the final name.

The directory is built beside the target as `.<name>.partial-<id>`, synced and renamed. A target that exists already,
empty or as a mount point, cannot be renamed over without losing its owner, its mode or the mount: there the directory
is built inside it and its files are moved up one by one, the index last, so that no loader finds a whole model early.
A live run holds a kernel lock on its partial directory; one whose lock can be had is a dead run's and is removed.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tasks.models.source import INDEX_FILE
from tasks.places import partial_name
from tasks.report import REPORT_FILE

GGUF_FILE = "model.gguf"
# What loaders look for first: a directory without is no model yet.
ENTRY_FILES = (INDEX_FILE, GGUF_FILE)
MOVED_FILE = "moved.json"
PARTIAL_ID = re.compile(r"[0-9a-f]{32}")
FICLONE = 0x40049409
COPY_BYTES = 64 << 20
HASH_BYTES = 4 << 20


class OutputTaken(ValueError):
    """Somebody else has put files at the output while the model was made; what was made is untouched elsewhere."""


def json_bytes(value: Any) -> bytes:
    """JSON as people read it, the same bytes every time."""
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


# Finished exports -----------------------------------------------------------------------------------------------------


def read_report(output: Path) -> dict[str, Any] | None:
    """The report of a finished export at `output`, or None where there is none that can be read."""
    try:
        report = json.loads((output / REPORT_FILE).read_bytes())
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, RecursionError):
        return None
    return report if _is_ours(report) and any((output / name).is_file() for name in ENTRY_FILES) else None


def _is_ours(report: Any) -> bool:
    """Whether this JSON, which may be anything, is a report with what `damage` and a comparison of identities need."""
    if not isinstance(report, dict) or not isinstance(report.get("identity"), str):
        return False
    files = report.get("files")
    return isinstance(files, dict) and all(
        _is_inside(name) and isinstance(sha256, str) for name, sha256 in files.items()
    )


def _is_inside(name: str) -> bool:
    """Whether this is a file's plain name, or one in a subdirectory."""
    return all(part not in ("", ".", "..") for part in name.split("/")) and name.count("/") < 2


def damage(output: Path, report: Mapping[str, Any]) -> list[str]:
    """What is wrong with the files that `report` lists: missing, or other bytes than were written."""
    problems = []
    for name, expected in sorted(report["files"].items()):
        path = output / name
        if not path.is_file():
            problems.append(f"`{name}` is missing")
        elif (found := file_sha256(path)) != expected:
            problems.append(f"`{name}` has other bytes: sha256 {found[:12]} instead of {expected[:12]}")
    return problems


def remove_leftovers(output: Path) -> list[str]:
    """Remove what dead runs of this project left beside and inside `output`; the names of what went."""
    removed = []
    for partial, in_place in _partials(output):
        lock = _lock_directory(partial)
        if lock is None:
            continue
        try:
            if in_place:
                removed += _undo_moves(output, partial)
            shutil.rmtree(partial)
            removed.append(partial.name)
        finally:
            os.close(lock)
    return removed


def foreign_names(output: Path) -> list[str]:
    """What lies in the directory `output` and was not left there by a dead run of ours that was moving its files in."""
    if not output.is_dir():
        return []
    ours = {partial.name for partial, in_place in _partials(output) if in_place}
    moved: dict[str, str] = {}
    for name in ours:
        moved |= _moved_out_of(output / name)
    if os.path.ismount(output):
        ours.add("lost+found")
    return [
        entry.name
        for entry in sorted(os.scandir(output), key=lambda entry: entry.name)
        if entry.name not in ours and not _was_moved(output, entry, moved)
    ]


def _was_moved(output: Path, entry: os.DirEntry[str], moved: Mapping[str, str]) -> bool:
    """Whether this is a file of `moved`, as it was, or a directory of nothing but such files."""
    if not entry.is_dir():
        names = [entry.name]
    elif any(name.startswith(f"{entry.name}/") for name in moved):
        names = [f"{entry.name}/{file.name}" for file in os.scandir(entry)]
    else:
        return False
    return all(
        name in moved and (output / name).is_file() and file_sha256(output / name) == moved[name] for name in names
    )


def _partials(output: Path) -> Iterator[tuple[Path, bool]]:
    prefix = partial_name(output, "")
    for directory, in_place in ((output.parent, False), (output, True)):
        if not directory.is_dir():
            continue
        for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
            is_ours = entry.name.startswith(prefix) and PARTIAL_ID.fullmatch(entry.name[len(prefix) :])
            if is_ours and entry.is_dir(follow_symlinks=False):
                yield directory / entry.name, in_place


def _lock_directory(path: Path) -> int | None:
    """Descriptor that holds the kernel's lock on a directory, or None when a living process has it."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(directory)
        return None
    return directory


def _moved_out_of(partial: Path) -> dict[str, str]:
    """Names and digests of the files that a run moved out of `partial`, or was about to."""
    try:
        moved = json.loads((partial / MOVED_FILE).read_bytes())
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
        return {}  # it died before the list was durable, hence before the first move
    return {name: sha256 for name, sha256 in moved.items() if _is_inside(name)}


def _undo_moves(output: Path, partial: Path) -> list[str]:
    """Remove the files that a dead run moved out of `partial`, if they are byte for byte what it moved."""
    removed = []
    for name, sha256 in _moved_out_of(partial).items():
        path = output / name
        if path.is_file() and file_sha256(path) == sha256:
            path.unlink()
            removed.append(name)
            if path.parent != output:
                with contextlib.suppress(OSError):  # somebody else's file is in it, which stays
                    path.parent.rmdir()
    return removed


# Writing --------------------------------------------------------------------------------------------------------------


class Export:
    """A directory in the making. Use as a context manager: what is not finished when it is left is removed."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.files: dict[str, str] = {}
        self._in_place = output.is_dir()
        parent = output if self._in_place else output.parent
        parent.mkdir(parents=True, exist_ok=True)
        self.directory = parent / partial_name(output, uuid.uuid4().hex)

    def __enter__(self) -> "Export":
        self.directory.mkdir()
        lock = _lock_directory(self.directory)
        if lock is None:
            raise BlockingIOError(
                errno.EAGAIN, f"another process holds `{self.directory}`, which was made this instant"
            )
        self._lock = lock
        return self

    def __exit__(self, *_: object) -> None:
        # Before the rename it is ours to remove; after it the name is gone and nothing happens.
        shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._lock)

    def add_bytes(self, name: str, data: bytes) -> None:
        with self._create(name) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self.files[name] = hashlib.sha256(data).hexdigest()

    def add_pieces(self, name: str, pieces: Iterable[memoryview]) -> None:
        """A file of pieces that need not be in memory together."""
        digest = hashlib.sha256()
        with self._create(name) as file:
            for piece in pieces:
                file.write(piece)
                digest.update(piece)
            file.flush()
            os.fsync(file.fileno())
        self.files[name] = digest.hexdigest()

    def add_file(self, name: str, source: Path, sha256: str | None = None) -> None:
        """Copy a file, following links; ValueError when its bytes are not those of `sha256`."""
        with source.open("rb") as origin, self._create(name) as file:
            _copy(origin.fileno(), file.fileno())
            os.fsync(file.fileno())
        found = file_sha256(self.directory / name)
        if sha256 is not None and found != sha256:
            raise ValueError(
                f"`{name}` was copied from `{source}` with other bytes: sha256 {found} instead of {sha256}; the disk or "
                f"memory is failing, or the checkpoint was edited: run `prefect-quantize verify`"
            )
        self.files[name] = found

    def add_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """One more shard, of tensors that were not quantized."""
        path = self._path(name)
        try:
            save_file({key: tensors[key].contiguous() for key in sorted(tensors)}, path, metadata={"format": "pt"})
        except SafetensorError as error:  # its only word of a full disk or a lost one
            if found := re.search(r"\(os error (\d+)\)", str(error)):
                raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
            raise
        path.chmod(0o666 & ~_umask())
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self.files[name] = file_sha256(path)

    def finish(self, report: Mapping[str, Any]) -> None:
        """Write the report and give the directory its final name, durably; OutputTaken when another has it by now."""
        listed = dict(sorted(self.files.items()))
        self.add_bytes(REPORT_FILE, json_bytes({**report, "files": listed}))
        for name in self._subdirectories():
            _sync_directory(self.directory / name)
        if self._in_place:
            self._move_up()
            return
        os.fsync(self._lock)
        try:
            os.rename(self.directory, self.output)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            names = foreign_names(self.output) or ["a file of that name"]
            raise OutputTaken(f"{self.output} has been filled by somebody else meanwhile ({_some(names)})") from error
        _sync_directory(self.output.parent)

    def _move_up(self) -> None:
        directory = os.open(self.output, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)  # two runs that finish together: the second sees the whole first
            if names := foreign_names(self.output):
                raise OutputTaken(f"{self.output} has been filled by somebody else meanwhile ({_some(names)})")
            self._move_up_alone()
        finally:
            os.close(directory)

    def _move_up_alone(self) -> None:
        moved = dict(self.files)
        self.add_bytes(MOVED_FILE, json_bytes(moved))
        os.fsync(self._lock)
        _sync_directory(self.output)
        entries = {name.partition("/")[0] for name in moved}
        for name in sorted(entries, key=lambda name: (name in ENTRY_FILES, name)):
            if name in ENTRY_FILES:
                _sync_directory(self.output)
            os.rename(self.directory / name, self.output / name)
        _sync_directory(self.output)
        shutil.rmtree(self.directory)
        _sync_directory(self.output)

    def _subdirectories(self) -> set[str]:
        return {name.partition("/")[0] for name in self.files if "/" in name}

    def _path(self, name: str) -> Path:
        path = self.directory / name
        path.parent.mkdir(exist_ok=True)
        return path

    def _create(self, name: str) -> BinaryIO:
        # Mode 0666 less the umask, as any program's files: an export is meant to be shared, objects are private.
        return open(self._path(name), "xb")


def _copy(origin: int, target: int) -> None:
    """Share the blocks where the file system can, else copy inside the kernel, else by reading and writing."""
    with contextlib.suppress(OSError):  # no reflink here: the copies below need nothing from it
        fcntl.ioctl(target, FICLONE, origin)
        return
    size = os.fstat(origin).st_size
    done = 0
    while done < size:
        try:
            count = os.copy_file_range(origin, target, min(COPY_BYTES, size - done))
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
                raise
            count = 0
        if count == 0:
            break
        done += count
    os.lseek(origin, done, os.SEEK_SET)
    os.lseek(target, done, os.SEEK_SET)
    while block := os.read(origin, HASH_BYTES):
        rest = memoryview(block)
        while rest:
            rest = rest[os.write(target, rest) :]


def _some(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current
