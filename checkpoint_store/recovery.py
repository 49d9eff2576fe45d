"""A root whose pointers are lost: list the manifests that are intact, publish the one that the operator names.

It never chooses: which generation is the right one is not on the disk any more.
"""

import hashlib
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass
from logging import getLogger
from pathlib import Path
from typing import Any

from checkpoint_store.disk import Disk
from checkpoint_store.errors import CheckpointDamaged, CheckpointError, CheckpointMissing
from checkpoint_store.failures import writing
from checkpoint_store.generations import (
    MANIFEST_LIMIT_BYTES,
    MANIFEST_NAME,
    Current,
    Entry,
    Manifest,
    decode_manifest,
    encode_current,
    encode_format,
    manifest_name,
    read_small,
)
from checkpoint_store.lock import Attempt, WriterLock, refuse_network_file_system
from checkpoint_store.objects import ObjectRef, verify_objects
from checkpoint_store.pages import Page, read_page
from checkpoint_store.root import CURRENT, FORMAT, SPARE, Root

logger = getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """A manifest that lies in the root, and whether all that it needs is whole."""

    manifest: str
    gen: int
    cursor: int
    layer_count: int
    run_id: str | None
    created_utc: str
    identity: dict[str, Any]
    problem: str | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def candidates(path: str | Path, disk: Disk | None = None) -> list[Candidate]:
    """Every legible manifest in the root, newest first, with its objects verified; nothing is written or chosen.

    Manifests that are not legible are told in the log.
    """
    root = Root(disk or Disk(), str(path))
    try:
        return [_candidate(root, *legible) for legible in _legible_manifests(root)]
    finally:
        root.close()


def _legible_manifests(root: Root) -> list[tuple[Entry, Manifest, list[str]]]:
    """With each the damage to its pages; the names in a damaged one are missing."""
    found = []
    for name in reversed(root.names("generations")):
        if (matched := MANIFEST_NAME.fullmatch(name)) is None:
            continue
        what = f"{root.path}/generations/{name}"
        problems: list[str] = []

        def page_of(ref: ObjectRef, problems: list[str] = problems) -> Page:
            try:
                return read_page(root.disk, root.objects, ref, root.path)
            except CheckpointDamaged as error:
                problems.append(str(error))
                return Page(ref, ())

        try:
            raw = read_small(root.disk, root.generations, name, MANIFEST_LIMIT_BYTES, what)
            sha256 = hashlib.sha256(raw).hexdigest()
            if sha256[:16] != matched[2]:  # before anything in it is believed, its version and its pages above all
                raise CheckpointDamaged(f"`{what}` has other bytes than its name says")
            manifest = decode_manifest(raw, what, page_of)
            if manifest_name(manifest.gen, sha256) != name:
                raise CheckpointDamaged(f"`{what}` is damaged: it says that it is generation {manifest.gen}")
        except CheckpointDamaged as error:
            logger.error("%s", error)
            continue
        found.append((Entry(manifest.gen, name, sha256, len(raw)), manifest, problems))
    return found


def _candidate(root: Root, entry: Entry, manifest: Manifest, problems: list[str]) -> Candidate:
    problem = problems[0] if problems else None
    if problem is None:
        try:
            verify_objects(root.disk, root.objects, manifest.needed, root.path, frozenset())
        except CheckpointDamaged as error:
            problem = str(error)
    return Candidate(
        entry.manifest,
        manifest.gen,
        manifest.cursor,
        manifest.layer_count,
        manifest.run_id,
        manifest.created_utc,
        manifest.identity,
        problem,
    )


def recover(
    path: str | Path, manifest: str, disk: Disk | None = None, allow_network_filesystem: bool = False
) -> Candidate:
    """Publish the generation of `manifest`, which the operator chose from `candidates`, as the only one.

    For a root whose pointers are lost or list nothing whole. Raises CheckpointError where a published generation is
    whole, CheckpointMissing where there is no such manifest, CheckpointDamaged where it is not whole. Damaged pointer
    files are kept in `quarantine/`, and both are written anew; the next publish sweeps what this generation does not
    need.
    """
    disk = disk or Disk()
    root = Root(disk, str(path))
    lock = None
    try:
        if not allow_network_filesystem:
            refuse_network_file_system(disk, root.directory, root.path)
        lock = WriterLock(disk, root.directory, root.path, None)
        root.sync()
        root.refuse_obstacles()
        _refuse_whole(root)
        chosen = next((pair for pair in _legible_manifests(root) if pair[0].manifest == manifest), None)
        if chosen is None:
            raise CheckpointMissing(
                f"`{path}` has no legible manifest `{manifest}`; run recover without a name for a list"
            )
        candidate = _candidate(root, *chosen)
        if candidate.problem is not None:
            raise CheckpointDamaged(f"`{manifest}` cannot be published: {candidate.problem}")
        with writing(root.path):
            _write_pointers(root, chosen[0])
        return candidate
    finally:
        root.close()
        if lock is not None:
            lock.release()


def _refuse_whole(root: Root) -> None:
    try:
        root_id = root.root_id()
        entries = root.pointer(root_id).current.generations if root_id is not None else ()
    except CheckpointDamaged:
        return
    published = {entry.manifest for entry in entries}
    for entry, manifest, problems in _legible_manifests(root):
        if entry.manifest in published and _candidate(root, entry, manifest, problems).problem is None:
            raise CheckpointError(
                f"`{root.path}` needs no recovery: generation {entry.gen} is published and whole; run the job again"
            )


def _write_pointers(root: Root, entry: Entry) -> None:
    root_id, is_format_whole = _surviving_root_id(root)
    aside = root.quarantine()
    for name in (CURRENT, SPARE, FORMAT):
        if name in root.names() and not (name == FORMAT and is_format_whole):
            root.disk.link(root.directory, name, aside, f"{name}.{secrets.token_hex(4)}")
    root.disk.sync_directory(aside)
    attempt = Attempt(root.disk, root.directory, f"attempt-{secrets.token_hex(8)}")
    root.replace(attempt, encode_current(Current(root_id, attempt.name, (entry,))), root.directory, CURRENT)
    root.disk.sync_directory(root.directory)
    if not is_format_whole:
        root.replace(attempt, encode_format(root_id), root.directory, FORMAT)
        root.disk.sync_directory(root.directory)
    # Last: until CURRENT and FORMAT are durable, what the old spare holds may be all that there is.
    root.turn_spare(attempt)
    root.disk.sync_directory(root.directory)
    attempt.remove()


def _surviving_root_id(root: Root) -> tuple[str, bool]:
    """The root's id, and whether it is FORMAT that tells it; a new one when no file does."""
    with suppress(CheckpointDamaged):
        if (root_id := root.root_id()) is not None:
            return root_id, True
    for name in (CURRENT, SPARE):
        with suppress(CheckpointDamaged):
            return root.decode_pointer(name, None).root_id, False
    return secrets.token_hex(16), False
