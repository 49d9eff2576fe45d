"""What an operator asks of a checkpoint root: its status, a scrub, a sweep; only what is named for it writes."""

import math
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from logging import getLogger
from pathlib import Path
from typing import Any

from checkpoint_store.disk import Disk
from checkpoint_store.errors import CheckpointDamaged, CheckpointError, CheckpointMissing
from checkpoint_store.failures import is_missing, reading, writing
from checkpoint_store.garbage import SweepReport
from checkpoint_store.generations import FORMAT_VERSION, read_manifest
from checkpoint_store.lock import ATTEMPT_NAME, WRITER_LOCK, read_holder
from checkpoint_store.objects import OBJECT_NAME, ObjectRef, check_size, map_verified
from checkpoint_store.pages import Page, read_page
from checkpoint_store.published import Generation
from checkpoint_store.root import QUARANTINE, SPARE, Root
from checkpoint_store.store import CheckpointStore

logger = getLogger(__name__)


# Status --------------------------------------------------------------------------------------------------------------


def status(path: str | Path, disk: Disk | None = None) -> dict[str, Any]:
    """What is published and how much room it takes, as JSON; nothing is locked or written.

    Manifests and their pages are read; objects are looked at by size only: `verify` reads them.
    """
    _refuse_absent(path, disk)
    with CheckpointStore.open(path, mode="read", disk=disk) as store:
        generations = [_generation_status(store, generation) for generation in store.generations()]
        newest = next((found for found in store.generations() if _is_readable(found)), None)
        referenced = {
            ref.sha256: ref.size
            for found in store.generations()
            if _is_readable(found)
            for ref in found.manifest.needed
        }
        return {
            "path": str(path),
            "format_version": FORMAT_VERSION,
            "root_id": store.root_id or None,
            "spare_pointer_in_use": store.spare_because,
            "cursor": newest.cursor if newest else 0,
            "layer_count": newest.layer_count if newest else None,
            "run_id": newest.run_id if newest else None,
            "identity": newest.identity if newest else None,
            "generations": generations,
            "referenced": {"objects": len(referenced), "bytes": sum(referenced.values())},
            "stored": _stored(store.root),
            "attempts": [name for name in store.root.names() if ATTEMPT_NAME.fullmatch(name)],
            "quarantined": store.root.names(QUARANTINE),
            "last_writer": _last_writer(store.root),
        }


def _is_readable(generation: Generation) -> bool:
    try:
        return generation.manifest is not None
    except CheckpointDamaged:
        return False


def _generation_status(store: CheckpointStore, generation: Generation) -> dict[str, Any]:
    told: dict[str, Any] = {"gen": generation.gen, "manifest": generation.entry.manifest, "problem": None}
    try:
        manifest = generation.manifest
        told |= {
            "cursor": manifest.cursor,
            "layer_count": manifest.layer_count,
            "run_id": manifest.run_id,
            "created_utc": manifest.created_utc,
            "objects": len(manifest.needed),
            "bytes": sum({ref.sha256: ref.size for ref in manifest.needed}.values()),
        }
        for ref in manifest.needed:
            check_size(store.root.disk, store.root.objects, ref, store.root.path)
    except CheckpointDamaged as error:
        told["problem"] = str(error)
    return told


def _stored(root: Root) -> dict[str, int]:
    sizes = []
    for name in root.names("objects"):
        if OBJECT_NAME.fullmatch(name):
            try:
                with reading(f"{root.path}/objects/{name}"):
                    sizes.append(root.disk.stat(root.objects, name).size)
            except CheckpointDamaged as error:
                if not is_missing(error):  # swept while we look
                    raise
    return {"objects": len(sizes), "bytes": sum(sizes)}


def _last_writer(root: Root) -> dict[str, Any] | None:
    try:
        with reading(f"{root.path}/{WRITER_LOCK}"):
            file = root.disk.open_for_read(root.directory, WRITER_LOCK)
            try:
                return read_holder(root.disk, file)
            finally:
                root.disk.close(file)
    except CheckpointError:  # only diagnostics
        return None


# Scrub and sweep -----------------------------------------------------------------------------------------------------


@dataclass
class VerifyReport:
    """What a scrub read and what it found; `problems` is empty when every published byte is right."""

    generations: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)
    objects: int = 0
    bytes: int = 0
    seconds: float = 0.0

    @property
    def is_whole(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_whole": self.is_whole}


def verify(
    path: str | Path,
    *,
    bytes_per_second: float | None = None,
    quarantine: bool = False,
    allow_network_filesystem: bool = False,
    disk: Disk | None = None,
) -> VerifyReport:
    """Hash everything that the retained generations reach, at most at the given rate.

    With `quarantine` it takes the writer lock and moves damaged files to `quarantine/`; it deletes nothing. Raises
    CheckpointDamaged when not even the root pointers can be read, CheckpointMissing where no root was ever made.
    """
    if bytes_per_second is not None and not 1 <= bytes_per_second < math.inf:
        raise ValueError(f"a scrub at {bytes_per_second} bytes per second never ends; give a positive rate, 1 at least")
    started = time.monotonic()
    report = VerifyReport()
    _refuse_absent(path, disk)
    with CheckpointStore.open(
        path,
        mode="write" if quarantine else "read",
        allow_network_filesystem=allow_network_filesystem,
        disk=disk,
    ) as store:
        _verify_pointers(store, report)

        def keep_the_rate(count: int) -> None:
            report.bytes += count
            if bytes_per_second is not None:
                time.sleep(max(0.0, started + report.bytes / bytes_per_second - time.monotonic()))

        problems: dict[ObjectRef, str | None] = {}
        pages: dict[ObjectRef, Page] = {}
        for generation in store.generations():
            found = _verify_generation(store, generation, problems, pages, report, keep_the_rate, quarantine)
            report.generations.append({"gen": generation.gen, "is_whole": not found, "problems": found})
            report.problems += [problem for problem in found if problem not in report.problems]
        report.objects = len(problems)
    report.seconds = time.monotonic() - started
    return report


def _verify_pointers(store: CheckpointStore, report: VerifyReport) -> None:
    if store.spare_because is not None:
        report.problems.append(store.spare_because)
    elif SPARE in store.root.names():
        try:
            store.root.decode_pointer(SPARE, store.root_id)
        except CheckpointDamaged as error:
            report.problems.append(str(error))


def _verify_generation(
    store: CheckpointStore,
    generation: Generation,
    problems: dict[ObjectRef, str | None],
    pages: dict[ObjectRef, Page],
    report: VerifyReport,
    on_hashed: Any,
    quarantine: bool,
) -> list[str]:
    root = store.root

    @contextmanager
    def looking_at(ref: ObjectRef) -> Iterator[None]:
        try:
            yield
            problems[ref] = None
        except CheckpointDamaged as error:
            logger.error("%s", error)
            problems[ref] = str(error)
            if quarantine:
                _quarantine(root, "objects", ref.sha256, report)

    def page_of(ref: ObjectRef) -> Page:
        """The page; an empty one where it is damaged, so that what else the generation needs is still looked at."""
        if ref not in pages:
            pages[ref] = Page(ref, ())
            with looking_at(ref):
                pages[ref] = read_page(root.disk, root.objects, ref, root.path, on_hashed)
        return pages[ref]

    try:
        manifest = read_manifest(root.disk, root.generations, generation.entry, root.path, page_of)
    except CheckpointDamaged as error:
        if quarantine:
            _quarantine(root, "generations", generation.entry.manifest, report)
        return [str(error)]
    for ref in manifest.needed:
        if ref not in problems:
            with looking_at(ref):
                map_verified(root.disk, root.objects, ref, root.path, on_hashed)
    found = (problems[ref] for ref in manifest.needed)
    return list(dict.fromkeys(problem for problem in found if problem is not None))  # one cause may hit many objects


def _quarantine(root: Root, directory: str, name: str, report: VerifyReport) -> None:
    if name not in root.names(directory):
        return
    with writing(f"{root.path}/{QUARANTINE}/{name}"):
        aside = root.quarantine()
        new_name = f"{name}.{secrets.token_hex(4)}"
        root.disk.rename(root.below(directory), name, aside, new_name)
        root.disk.sync_directory(aside)
        root.disk.sync_directory(root.below(directory))
    report.quarantined.append(f"{QUARANTINE}/{new_name}")


def sweep(path: str | Path, *, allow_network_filesystem: bool = False, disk: Disk | None = None) -> SweepReport:
    """Remove what no retained generation needs, with the writer lock; it is deferred on any doubt."""
    _refuse_absent(path, disk)
    with CheckpointStore.open(path, allow_network_filesystem=allow_network_filesystem, disk=disk) as store:
        return store.sweep()


def _refuse_absent(path: str | Path, disk: Disk | None) -> None:
    """CheckpointMissing unless a root was made at `path`: opening one to write would make it, in whatever lies there."""
    with CheckpointStore.open(path, mode="read", disk=disk) as store:
        if not store.root_id:
            raise CheckpointMissing(f"`{path}` holds no checkpoint; name the directory that `--checkpoint` named")
