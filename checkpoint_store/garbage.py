"""Deleting what no retained generation needs: only our own names, never under a reader, never on a doubt."""

from dataclasses import dataclass
from typing import Any

from checkpoint_store.failures import reading, writing
from checkpoint_store.generations import MANIFEST_NAME
from checkpoint_store.lock import ATTEMPT_NAME, READERS_LOCK, remove_dead_attempt
from checkpoint_store.objects import OBJECT_NAME
from checkpoint_store.root import Root


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
    """Remove every object, manifest and dead attempt not to be kept, unless a reader is at work.

    The caller holds the writer lock, and its `keep` sets come from a CURRENT that is durable. Manifests go first: one
    that is still there then has its objects.
    """
    disk, report = root.disk, SweepReport()
    with writing(f"{root.path}/{READERS_LOCK}"):
        lock = disk.open_for_lock(root.directory, READERS_LOCK)
    try:
        if not disk.lock(lock, exclusive=True):
            report.deferred = "a reader is at work"
            return report
        for name in _listed(root, root.generations, "generations"):
            if MANIFEST_NAME.fullmatch(name) and name not in keep_manifests:
                report.bytes += _remove(root, root.generations, name)
                report.manifests += 1
        for name in _listed(root, root.objects, "objects"):
            if OBJECT_NAME.fullmatch(name) and name not in keep_objects:
                report.bytes += _remove(root, root.objects, name)
                report.objects += 1
        for name in _listed(root, root.directory, ""):
            if ATTEMPT_NAME.fullmatch(name) and name != own_attempt:
                with writing(f"{root.path}/{name}"):
                    report.attempts += remove_dead_attempt(disk, root.directory, name)
    finally:
        disk.close(lock)
    return report


def _listed(root: Root, directory: int, name: str) -> list[str]:
    with reading(f"{root.path}/{name}"):
        return root.disk.list_directory(directory)


def _remove(root: Root, directory: int, name: str) -> int:
    with writing(f"{root.path}: removing {name}"):
        size = root.disk.stat(directory, name).size
        root.disk.unlink(directory, name)
    return size
