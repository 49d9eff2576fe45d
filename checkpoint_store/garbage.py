"""Deleting what no retained generation needs: only our own names, never under a reader, never on a doubt."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from logging import getLogger
from typing import Any

from checkpoint_store.failures import reading, writing
from checkpoint_store.generations import MANIFEST_NAME
from checkpoint_store.lock import ATTEMPT_NAME, READERS_LOCK, remove_dead_attempt
from checkpoint_store.objects import OBJECT_NAME
from checkpoint_store.root import Root

logger = getLogger(__name__)


@dataclass
class SweepReport:
    """What a sweep removed, or why it removed nothing."""

    objects: int = 0
    manifests: int = 0
    attempts: int = 0
    bytes: int = 0
    deferred: str | None = None

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


def collect(root: Root, keep_objects: set[str], keep_manifests: set[str], own_attempt: str | None) -> SweepReport:
    """Look through the root, and remove every object, manifest and dead attempt not to be kept, unless a reader is at work.

    The caller holds the writer lock, and its `keep` sets come from a CURRENT that is durable.
    """
    with _no_reader(root) as report:
        if not report.deferred:
            manifests = [
                name for name in _listed(root, root.generations, "generations") if MANIFEST_NAME.fullmatch(name)
            ]
            objects = [name for name in _listed(root, root.objects, "objects") if OBJECT_NAME.fullmatch(name)]
            _remove_files(root, report, set(manifests) - keep_manifests, set(objects) - keep_objects)
            for name in _listed(root, root.directory, ""):
                if ATTEMPT_NAME.fullmatch(name) and name != own_attempt:
                    with writing(f"{root.path}/{name}"):
                        report.attempts += remove_dead_attempt(root.disk, root.directory, name)
    return report


def collect_named(root: Root, manifests: set[str], objects: set[str]) -> SweepReport:
    """Remove these and look for nothing else, unless a reader is at work; the caller knows what `collect` asks for."""
    with _no_reader(root) as report:
        if not report.deferred:
            _remove_files(root, report, manifests, objects)
    return report


@contextmanager
def _no_reader(root: Root) -> Iterator[SweepReport]:
    """The report of a sweep, which is deferred when a reader is at work; else none begins before the block ends."""
    disk, report = root.disk, SweepReport()
    with writing(f"{root.path}/{READERS_LOCK}"):
        lock = disk.open_for_lock(root.directory, READERS_LOCK)
    try:
        if not disk.lock(lock, exclusive=True):
            report.deferred = "a reader is at work"
        yield report
    finally:
        disk.close(lock)


def _remove_files(root: Root, report: SweepReport, manifests: set[str], objects: set[str]) -> None:
    """Manifests first: one that is still there then has its objects."""
    for name in sorted(manifests):
        report.manifests += _remove(root, root.generations, name, report)
    for name in sorted(objects):
        report.objects += _remove(root, root.objects, name, report)


def _listed(root: Root, directory: int, name: str) -> list[str]:
    with reading(f"{root.path}/{name}"):
        return root.disk.list_directory(directory)


def _remove(root: Root, directory: int, name: str, report: SweepReport) -> bool:
    with writing(f"{root.path}: removing {name}"):
        found = root.disk.stat(directory, name)
        if not found.is_file:
            logger.warning("`%s` in `%s` is no regular file, so nothing of this store: it stays", name, root.path)
            return False
        root.disk.unlink(directory, name)
    report.bytes += found.size
    return True
