"""The small files that say what is published: FORMAT, CURRENT and manifests, as bytes and as values.

All of them are canonical JSON. FORMAT and CURRENT carry their own checksum line; a manifest's checksum is in CURRENT.
Wrong types and names that are not ours are damage; a newer version is not.
"""

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from typing import Any

from checkpoint_store.canonical import canonical, parse
from checkpoint_store.disk import Disk
from checkpoint_store.errors import CheckpointDamaged, CheckpointError, UnknownFormat
from checkpoint_store.failures import reading
from checkpoint_store.objects import OBJECT_NAME, ObjectRef

FORMAT_NAME = "prefect-quantize checkpoint"
FORMAT_VERSION = 1
FORMAT_LIMIT_BYTES = 4 << 10
CURRENT_LIMIT_BYTES = 64 << 10
MANIFEST_LIMIT_BYTES = 8 << 20
MANIFEST_NAME = re.compile(r"([0-9]{8})-([0-9a-f]{16})\.json")
DIGEST_AND_SIZE = attrgetter("sha256", "size")
_ROOT_ID = re.compile(r"[0-9a-f]{32}")
_ROLE = re.compile(r"[a-z][a-z_]{0,31}")
_GENERATIONS_MOST = 10**8 - 1


@dataclass(frozen=True)
class Entry:
    """A published generation as CURRENT lists it."""

    gen: int
    manifest: str
    sha256: str
    size: int


@dataclass(frozen=True)
class Current:
    """The content of CURRENT; `writer` names the attempt that wrote it."""

    root_id: str
    writer: str
    generations: tuple[Entry, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything that one generation needs; `cursor` is the number of finished layers."""

    gen: int
    parent: str | None
    identity: dict[str, Any]
    cursor: int
    layer_count: int
    objects: tuple[ObjectRef, ...]
    run_id: str | None
    created_utc: str

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The bytes of each object, by digest."""
        return dict(map(DIGEST_AND_SIZE, self.objects))


def encode_format(root_id: str) -> bytes:
    return _sealed({"format": FORMAT_NAME, "v": FORMAT_VERSION, "root_id": root_id})


def decode_format(raw: bytes, what: str) -> str:
    """The root's id."""
    value = _unsealed(raw, what)
    if value.get("format") != FORMAT_NAME:
        raise CheckpointDamaged(f"`{what}` is damaged: it does not name the format `{FORMAT_NAME}`")
    _refuse_newer(value.get("v"), what)
    return _matching(value, "root_id", _ROOT_ID, what)


def encode_current(current: Current) -> bytes:
    entries = [vars(entry) for entry in current.generations]
    raw = _sealed(
        {"v": FORMAT_VERSION, "root_id": current.root_id, "writer": current.writer, "generations": entries},
    )
    if len(raw) > CURRENT_LIMIT_BYTES:
        raise CheckpointError(f"CURRENT would have {len(raw)} bytes, more than {CURRENT_LIMIT_BYTES}: lower keep_last")
    return raw


def decode_current(raw: bytes, what: str) -> Current:
    value = _unsealed(raw, what)
    _refuse_newer(value.get("v"), what)
    entries = tuple(_decode_entry(item, what) for item in _typed(value, "generations", list, what))
    if any(newer.gen <= older.gen for newer, older in pairwise(entries)):
        raise CheckpointDamaged(f"`{what}` is damaged: its generations are not listed newest first")
    return Current(_matching(value, "root_id", _ROOT_ID, what), _typed(value, "writer", str, what), entries)


def _decode_entry(item: Any, what: str) -> Entry:
    entry = Entry(
        _count(item, "gen", what),
        _matching(item, "manifest", MANIFEST_NAME, what),
        _matching(item, "sha256", OBJECT_NAME, what),
        _count(item, "size", what),
    )
    if entry.manifest != manifest_name(entry.gen, entry.sha256):
        raise CheckpointDamaged(f"`{what}` is damaged: `{entry.manifest}` is not the name of generation {entry.gen}")
    return entry


def manifest_name(gen: int, sha256: str) -> str:
    return f"{gen:08d}-{sha256[:16]}.json"


def encode_manifest(manifest: Manifest) -> tuple[Entry, bytes]:
    """The manifest's bytes, and the entry under which CURRENT lists them."""
    if manifest.gen > _GENERATIONS_MOST:
        raise CheckpointError(f"generation {manifest.gen} does not fit the format; go on in a new root")
    before = {
        "created_utc": manifest.created_utc,
        "cursor": manifest.cursor,
        "gen": manifest.gen,
        "identity": manifest.identity,
        "layer_count": manifest.layer_count,
        "min_reader": FORMAT_VERSION,
    }
    after = {"parent": manifest.parent, "run_id": manifest.run_id, "v": FORMAT_VERSION}
    # Joined by hand: most refs are those of the generation before, and stay encoded.
    objects = b",".join(map(attrgetter("encoded"), manifest.objects))
    raw = b'%s,"objects":[%s],%s' % (canonical(before)[:-1], objects, canonical(after)[1:])
    if len(raw) > MANIFEST_LIMIT_BYTES:
        raise CheckpointError(
            f"a manifest of {len(manifest.objects)} objects has {len(raw)} bytes, more than {MANIFEST_LIMIT_BYTES}"
        )
    sha256 = hashlib.sha256(raw).hexdigest()
    return Entry(manifest.gen, manifest_name(manifest.gen, sha256), sha256, len(raw)), raw


def decode_manifest(raw: bytes, what: str) -> Manifest:
    value = parse(raw, what)
    _refuse_newer(value.get("min_reader"), what)
    objects = tuple(_decode_ref(item, what) for item in _typed(value, "objects", list, what))
    if len({(ref.role, ref.key) for ref in objects}) != len(objects):
        raise CheckpointDamaged(f"`{what}` is damaged: it names one object twice")
    if len({(ref.sha256, ref.size) for ref in objects}) != len({ref.sha256 for ref in objects}):
        raise CheckpointDamaged(f"`{what}` is damaged: it gives one object two sizes")
    manifest = Manifest(
        gen=_count(value, "gen", what),
        parent=_typed(value, "parent", (str, type(None)), what),
        identity=_typed(value, "identity", dict, what),
        cursor=_count(value, "cursor", what),
        layer_count=_count(value, "layer_count", what),
        objects=objects,
        run_id=_typed(value, "run_id", (str, type(None)), what),
        created_utc=_typed(value, "created_utc", str, what),
    )
    if manifest.cursor > manifest.layer_count:
        raise CheckpointDamaged(f"`{what}` is damaged: {manifest.cursor} of {manifest.layer_count} layers are finished")
    return manifest


def _decode_ref(item: Any, what: str) -> ObjectRef:
    return ObjectRef(
        _matching(item, "role", _ROLE, what),
        _typed(item, "key", str, what),
        _matching(item, "sha256", OBJECT_NAME, what),
        _count(item, "size", what),
    )


def read_manifest(disk: Disk, generations: int, entry: Entry, where: str) -> Manifest:
    """The manifest that `entry` names, after its size and its hash were found right."""
    what = f"{where}/generations/{entry.manifest}"
    if entry.size > MANIFEST_LIMIT_BYTES:
        raise CheckpointDamaged(f"`{what}` is said to have {entry.size} bytes, more than {MANIFEST_LIMIT_BYTES}")
    raw = read_small(disk, generations, entry.manifest, MANIFEST_LIMIT_BYTES, what)
    if len(raw) != entry.size:
        raise CheckpointDamaged(f"`{what}` has {len(raw)} bytes instead of {entry.size}")
    if (found := hashlib.sha256(raw).hexdigest()) != entry.sha256:
        raise CheckpointDamaged(f"`{what}` has other bytes: their SHA-256 is {found}")
    manifest = decode_manifest(raw, what)
    if manifest.gen != entry.gen:
        raise CheckpointDamaged(f"`{what}` is damaged: it says that it is generation {manifest.gen}")
    return manifest


def read_small(disk: Disk, directory: int, name: str, limit: int, what: str) -> bytes:
    """A whole small file; a missing or an oversized one is damage."""
    with reading(what):
        file = disk.open_for_read(directory, name)
        try:
            size = disk.size(file)
            if size > limit:
                raise CheckpointDamaged(f"`{what}` is damaged: it has {size} bytes, more than {limit}")
            return disk.read(file, limit)
        finally:
            disk.close(file)


def _sealed(value: dict[str, Any]) -> bytes:
    line = canonical(value)
    return b"%s\n%s\n" % (line, hashlib.sha256(line).hexdigest().encode("ascii"))


def _unsealed(raw: bytes, what: str) -> dict[str, Any]:
    line, _, rest = raw.partition(b"\n")
    if rest != hashlib.sha256(line).hexdigest().encode("ascii") + b"\n":
        raise CheckpointDamaged(f"`{what}` is damaged: its checksum line does not match")
    return parse(line, what)


def _refuse_newer(version: Any, what: str) -> None:
    if type(version) is not int or version < 1:
        raise CheckpointDamaged(f"`{what}` is damaged: it has no format version")
    if version > FORMAT_VERSION:
        raise UnknownFormat(
            f"`{what}` has format version {version} and this program knows {FORMAT_VERSION}: update prefect-quantize"
        )


def _typed(value: Any, key: str, kind: type | tuple[type, ...], what: str) -> Any:
    if not isinstance(value, dict) or not isinstance(found := value.get(key, _typed), kind):
        raise CheckpointDamaged(f"`{what}` is damaged: `{key}` is absent or of the wrong type")
    return found


def _count(value: Any, key: str, what: str) -> int:
    found = _typed(value, key, int, what)
    if isinstance(found, bool) or not 0 <= found < 2**63:
        raise CheckpointDamaged(f"`{what}` is damaged: `{key}` is not a size or a number of things")
    return int(found)


def _matching(value: Any, key: str, pattern: re.Pattern[str], what: str) -> str:
    found = _typed(value, key, str, what)
    if not pattern.fullmatch(found):
        raise CheckpointDamaged(f"`{what}` is damaged: `{key}` is not a name of this format")
    return str(found)
