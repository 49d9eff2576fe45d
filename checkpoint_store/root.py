"""The root directory: opening it, making it so that death at any step leaves it usable, and its pointer files.

FORMAT is written last when a root is made. So a root without FORMAT either was being made, and then holds nothing, or
is damaged; and a root with FORMAT must have a CURRENT.
"""

import errno
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from logging import getLogger

from checkpoint_store.disk import Disk
from checkpoint_store.errors import CheckpointDamaged, CheckpointError, CheckpointMissing
from checkpoint_store.failures import is_missing, reading, writing
from checkpoint_store.generations import (
    CURRENT_LIMIT_BYTES,
    FORMAT_LIMIT_BYTES,
    MANIFEST_NAME,
    Current,
    decode_current,
    decode_format,
    encode_current,
    encode_format,
    read_small,
)
from checkpoint_store.lock import READERS_LOCK, Attempt
from checkpoint_store.objects import OBJECT_NAME

FORMAT, CURRENT, SPARE = "FORMAT", "CURRENT", "CURRENT.prev"
OBJECTS, GENERATIONS, QUARANTINE = "objects", "generations", "quarantine"

logger = getLogger(__name__)


@dataclass(frozen=True)
class Pointer:
    """What the root publishes: the content of CURRENT, or of the spare with the reason why."""

    current: Current
    spare_because: str | None
    raw_current: bytes | None  # the bytes of CURRENT as they are on disk, also when they are damaged


class Root:
    """Descriptors of an open root and of the two directories that generations live in."""

    def __init__(self, disk: Disk, path: str) -> None:
        self.disk = disk
        self.path = path
        self._open: dict[str, int] = {}
        try:
            with reading(path):
                self.directory = disk.open_root(path)
        except CheckpointDamaged as error:
            if is_missing(error):
                raise CheckpointMissing(f"there is no checkpoint at `{path}`: no such directory") from error
            if isinstance(error.__cause__, NotADirectoryError):
                raise CheckpointError(f"`{path}` is not a directory; name a directory for the checkpoint") from error
            raise

    def close(self) -> None:
        with ExitStack() as rest:  # each is closed even if another fails
            for descriptor in (self.directory, *self._open.values()):
                rest.callback(self.disk.close, descriptor)
            self._open.clear()

    @property
    def objects(self) -> int:
        return self.below(OBJECTS)

    @property
    def generations(self) -> int:
        return self.below(GENERATIONS)

    def below(self, name: str) -> int:
        """Descriptor of one of the root's own directories, opened once."""
        if name not in self._open:
            with reading(f"{self.path}/{name}"):
                self._open[name] = self.disk.open_directory(self.directory, name)
        return self._open[name]

    def sync(self) -> None:
        """Make every name durable that a killed predecessor may have left visible only."""
        with writing(self.path):
            self.disk.sync_directory(self.objects)
            self.disk.sync_directory(self.generations)
            self.disk.sync_directory(self.directory)

    def quarantine(self) -> int:
        """Descriptor of the directory for damaged files, made when it is first needed."""
        with suppress(FileExistsError):
            self.disk.make_directory(self.directory, QUARANTINE)
            self.disk.sync_directory(self.directory)
        return self.below(QUARANTINE)

    def root_id(self) -> str | None:
        """The id in FORMAT; None when the root is still being made. `CheckpointDamaged` when FORMAT is lost."""
        what = f"{self.path}/{FORMAT}"
        try:
            return decode_format(read_small(self.disk, self.directory, FORMAT, FORMAT_LIMIT_BYTES, what), what)
        except CheckpointDamaged as error:
            if is_missing(error) and self._holds_nothing():
                return None
            raise CheckpointDamaged(
                f"{error}; nothing is deleted: `prefect-quantize recover {self.path}` lists what is intact"
            ) from error

    def _holds_nothing(self) -> bool:
        if self._exists(SPARE):
            return False
        if self._exists(CURRENT):
            what = f"{self.path}/{CURRENT}"
            raw = read_small(self.disk, self.directory, CURRENT, CURRENT_LIMIT_BYTES, what)
            if decode_current(raw, what).generations:
                return False
        return not any(OBJECT_NAME.fullmatch(name) for name in self.names(OBJECTS)) and not any(
            MANIFEST_NAME.fullmatch(name) for name in self.names(GENERATIONS)
        )

    def _exists(self, name: str) -> bool:
        try:
            with reading(f"{self.path}/{name}"):
                self.disk.stat(self.directory, name)
        except CheckpointDamaged as error:
            if is_missing(error):
                return False
            raise
        return True

    def names(self, below: str | None = None) -> list[str]:
        """What lies in the root, or in one of its own directories; nothing when that was not made."""
        try:
            with reading(self.path if below is None else f"{self.path}/{below}"):
                return self.disk.list_directory(self.directory if below is None else self.below(below))
        except CheckpointDamaged as error:
            if is_missing(error):
                return []
            raise

    def make(self, attempt: Callable[[], Attempt], root_id: str) -> None:
        """Make what a root consists of, or go on where a predecessor died; FORMAT comes last."""
        with writing(self.path):
            for name in (OBJECTS, GENERATIONS):
                self._make_anew(name)
            self.sync()
            writer = attempt()
            self.replace(writer, encode_current(Current(root_id, writer.name, ())), self.directory, CURRENT)
            self.disk.sync_directory(self.directory)
        self.seal(writer, root_id)

    def _make_anew(self, name: str) -> None:
        """Make an empty directory, also where one stands: a failed sync loses its name for good, and later ones tell nothing."""
        if name in self._open:
            self.disk.close(self._open.pop(name))
        try:
            self.disk.remove_directory(self.directory, name)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            return  # somebody else's file is in it
        self.disk.make_directory(self.directory, name)

    def seal(self, attempt: Attempt, root_id: str) -> None:
        """Write FORMAT, after which the root counts as made; again in a made root that is still empty (see `_make_anew`)."""
        with writing(self.path):
            self.replace(attempt, encode_format(root_id), self.directory, FORMAT)
            self.disk.sync_directory(self.directory)

    def make_readers_lock(self) -> None:
        with writing(f"{self.path}/{READERS_LOCK}"):
            self.disk.close(self.disk.open_for_lock(self.directory, READERS_LOCK))

    def replace(self, attempt: Attempt, content: bytes, directory: int, name: str) -> None:
        """Make `name` hold exactly `content`; the bytes are durable, the name is once `directory` is synced."""
        temporary = attempt.temporary()
        file = self.disk.create(attempt.directory, temporary)
        try:
            self.disk.write(file, content)
            self.disk.sync(file)
        except OSError:
            with suppress(OSError):  # the first error is the one to tell
                self.disk.close(file)
                self.disk.unlink(attempt.directory, temporary)
            raise
        self.disk.close(file)
        self.disk.rename(attempt.directory, temporary, directory, name)

    def pointer(self, root_id: str) -> Pointer:
        """CURRENT, or loudly the spare when CURRENT is damaged and the spare lists a generation."""
        raw = self.raw_current()
        try:
            current = self.decode_pointer(CURRENT, root_id, raw)
            if current.generations or not self._spare_lists_generations(root_id):
                return Pointer(current, None, raw)
            if self.raw_current() != raw:  # a writer published twice between the two looks
                return self.pointer(root_id)
            reason = (
                f"`{self.path}/{CURRENT}` is damaged: it lists no generation and its spare does; an old copy was put in "
                f"its place, or the disk has lost a write"
            )
        except CheckpointDamaged as error:
            reason = str(error)
        try:
            spare = self.decode_pointer(SPARE, root_id)
        except CheckpointDamaged as error:
            raise self._both_lost(f"{reason}; {error}") from error
        if not spare.generations:
            raise self._both_lost(f"{reason}; `{self.path}/{SPARE}` lists no generation, which proves nothing")
        logger.error("%s; going on with the spare root pointer `%s/%s`", reason, self.path, SPARE)
        return Pointer(spare, reason, raw)

    def _spare_lists_generations(self, root_id: str) -> bool:
        try:
            return bool(self.decode_pointer(SPARE, root_id).generations)
        except CheckpointDamaged:  # missing before the first publish; where it is damaged it tells nothing
            return False

    def refuse_obstacles(self) -> None:
        """CheckpointDamaged where a directory stands in a pointer's place: hours later no rename could replace it."""
        for name in (CURRENT, SPARE):
            path = f"{self.path}/{name}"
            try:
                with reading(path):
                    is_directory = self.disk.stat(self.directory, name).is_directory
            except CheckpointDamaged as error:
                if is_missing(error):
                    continue
                raise
            if is_directory:
                raise CheckpointDamaged(
                    f"`{path}` is damaged: a directory stands in its place, and nothing could be published over it; move "
                    f"it away and run again, the other one of `{CURRENT}` and `{SPARE}` then tells what is published"
                )

    def raw_current(self) -> bytes | None:
        """The bytes of CURRENT; None when it is missing, oversized or unreadable."""
        try:
            return read_small(self.disk, self.directory, CURRENT, CURRENT_LIMIT_BYTES, f"{self.path}/{CURRENT}")
        except CheckpointDamaged:
            return None

    def decode_pointer(self, name: str, root_id: str | None, raw: bytes | None = None) -> Current:
        """The content of CURRENT or of its spare, which must belong to `root_id` unless that is not known."""
        what = f"{self.path}/{name}"
        if raw is None:
            raw = read_small(self.disk, self.directory, name, CURRENT_LIMIT_BYTES, what)
        current = decode_current(raw, what)
        if root_id is not None and current.root_id != root_id:
            raise CheckpointDamaged(f"`{what}` is damaged: it belongs to another root ({current.root_id})")
        return current

    def _both_lost(self, reason: str) -> CheckpointDamaged:
        return CheckpointDamaged(
            f"{reason}; what is published is no longer known, and nothing is deleted: "
            f"`prefect-quantize recover {self.path}` lists the intact generations and publishes the one that you name"
        )

    def turn_spare(self, attempt: Attempt) -> None:
        """Make the spare pointer name what CURRENT names now."""
        temporary = attempt.temporary()
        self.disk.link(self.directory, CURRENT, attempt.directory, temporary)
        self.disk.rename(attempt.directory, temporary, self.directory, SPARE)
        # Renaming a link onto another link to the same file does nothing and leaves it.
        with suppress(FileNotFoundError):
            self.disk.unlink(attempt.directory, temporary)
