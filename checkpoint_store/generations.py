"""The small files that say what is published: FORMAT, CURRENT and manifests, as bytes and as values.

All of them are canonical JSON. FORMAT and CURRENT carry their own checksum line; a manifest's checksum is in CURRENT.
Wrong types and names that are not ours are damage; a newer version is not.
"""

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any

from checkpoint_store.canonical import canonical, count, matching, parse, typed
from checkpoint_store.disk import Disk
from checkpoint_store.errors import CheckpointDamaged, CheckpointError, UnknownFormat
from checkpoint_store.failures import reading
from checkpoint_store.objects import OBJECT_NAME, ObjectRef
from checkpoint_store.pages import DIGEST_AND_SIZE, PAGE, Names, Page, ReadPage, decode_refs, encode_refs, page_key

FORMAT_NAME = "prefect-quantize checkpoint"
FORMAT_VERSION = 1
PAGED_VERSION = 2  # of a manifest that names pages; one without stays at FORMAT_VERSION
FORMAT_LIMIT_BYTES = 4 << 10
CURRENT_LIMIT_BYTES = 64 << 10
MANIFEST_LIMIT_BYTES = 8 << 20
MANIFEST_NAME = re.compile(r"([0-9]{8})-([0-9a-f]{16})\.json")
_ROOT_ID = re.compile(r"[0-9a-f]{32}")
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
    inline: tuple[ObjectRef, ...]  # what no page names
    run_id: str | None
    created_utc: str
    pages: tuple[Page, ...] = ()

    @cached_property
    def objects(self) -> tuple[ObjectRef, ...]:
        """Every object by name, in order: those of the pages, page by page, then the inline ones."""
        return (*chain.from_iterable(page.objects for page in self.pages), *self.inline)

    @property
    def needed(self) -> tuple[ObjectRef, ...]:
        """Every file in `objects/` that must be whole: the pages and what all of them name."""
        return (*(page.ref for page in self.pages), *self.objects)

    @cached_property
    def own_sizes(self) -> dict[str, int]:
        """The bytes of each inline object and of each page, by digest; what a page names is in its own `sizes`."""
        return dict(map(DIGEST_AND_SIZE, (*map(attrgetter("ref"), self.pages), *self.inline)))

    @cached_property
    def paged_count(self) -> int:
        """The number of objects that pages name."""
        return sum(map(len, map(attrgetter("objects"), self.pages)))

    def size_of(self, sha256: str) -> int | None:
        """The bytes of an object or a page that this generation needs; None for any other."""
        if sha256 in self.own_sizes:
            return self.own_sizes[sha256]
        return next((page.sizes[sha256] for page in self.pages if sha256 in page.sizes), None)

    def first_objects(self, count: int) -> Names:
        """The first `count` objects: whole pages as they are, and the rest inline.

        A page that is not whole any more is dissolved, and those behind it too, so that the order is kept.
        """
        if count >= self.paged_count:
            return self.pages, self.inline[: count - self.paged_count]
        whole = 0
        while count >= len(self.pages[whole].objects):
            count -= len(self.pages[whole].objects)
            whole += 1
        return self.pages[:whole], self.pages[whole].objects[:count]


def encode_format(root_id: str) -> bytes:
    return _sealed({"format": FORMAT_NAME, "v": FORMAT_VERSION, "root_id": root_id})


def decode_format(raw: bytes, what: str) -> str:
    """The root's id."""
    value = _unsealed(raw, what)
    if value.get("format") != FORMAT_NAME:
        raise CheckpointDamaged(f"`{what}` is damaged: it does not name the format `{FORMAT_NAME}`")
    _refuse_newer(value.get("v"), what)
    return matching(value, "root_id", _ROOT_ID, what)


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
    entries = tuple(_decode_entry(item, what) for item in typed(value, "generations", list, what))
    if any(newer.gen <= older.gen for newer, older in pairwise(entries)):
        raise CheckpointDamaged(f"`{what}` is damaged: its generations are not listed newest first")
    return Current(matching(value, "root_id", _ROOT_ID, what), typed(value, "writer", str, what), entries)


def _decode_entry(item: Any, what: str) -> Entry:
    entry = Entry(
        count(item, "gen", what),
        matching(item, "manifest", MANIFEST_NAME, what),
        matching(item, "sha256", OBJECT_NAME, what),
        count(item, "size", what),
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
    version = PAGED_VERSION if manifest.pages else FORMAT_VERSION
    before = {
        "created_utc": manifest.created_utc,
        "cursor": manifest.cursor,
        "gen": manifest.gen,
        "identity": manifest.identity,
        "layer_count": manifest.layer_count,
        "min_reader": version,
    }
    after = {"parent": manifest.parent, "run_id": manifest.run_id, "v": version}
    pages = b'"pages":[%s],' % b",".join(map(attrgetter("encoded"), manifest.pages)) if manifest.pages else b""
    names = encode_refs(manifest.inline)
    raw = b'%s,"objects":%s,%s%s' % (canonical(before)[:-1], names, pages, canonical(after)[1:])
    if len(raw) > MANIFEST_LIMIT_BYTES:
        raise CheckpointError(
            f"a manifest of {len(manifest.inline)} objects and {len(manifest.pages)} pages has {len(raw)} bytes, more "
            f"than {MANIFEST_LIMIT_BYTES}"
        )
    sha256 = hashlib.sha256(raw).hexdigest()
    return Entry(manifest.gen, manifest_name(manifest.gen, sha256), sha256, len(raw)), raw


def decode_manifest(raw: bytes, what: str, read_page: ReadPage) -> Manifest:
    """The manifest with the names in its pages, which `read_page` finds."""
    value = parse(raw, what)
    _refuse_newer(value.get("min_reader"), what, PAGED_VERSION)
    manifest = Manifest(
        gen=count(value, "gen", what),
        parent=typed(value, "parent", (str, type(None)), what),
        identity=typed(value, "identity", dict, what),
        cursor=count(value, "cursor", what),
        layer_count=count(value, "layer_count", what),
        inline=decode_refs(value, what),
        run_id=typed(value, "run_id", (str, type(None)), what),
        created_utc=typed(value, "created_utc", str, what),
        pages=_decode_pages(value, what, read_page) if "pages" in value else (),
    )
    if len({(ref.role, ref.key) for ref in manifest.objects}) != len(manifest.objects):
        raise CheckpointDamaged(f"`{what}` is damaged: it names one object twice")
    if len(set(map(DIGEST_AND_SIZE, manifest.needed))) != len({ref.sha256 for ref in manifest.needed}):
        raise CheckpointDamaged(f"`{what}` is damaged: it gives one object two sizes")
    if manifest.cursor > manifest.layer_count:
        raise CheckpointDamaged(f"`{what}` is damaged: {manifest.cursor} of {manifest.layer_count} layers are finished")
    return manifest


def _decode_pages(value: dict[str, Any], what: str, read_page: ReadPage) -> tuple[Page, ...]:
    if value["min_reader"] < PAGED_VERSION:
        raise CheckpointDamaged(f"`{what}` is damaged: it has pages, which its version does not know")
    refs = [
        ObjectRef(PAGE, page_key(index), matching(item, "sha256", OBJECT_NAME, what), count(item, "size", what))
        for index, item in enumerate(typed(value, "pages", list, what))
    ]
    if len({ref.sha256 for ref in refs}) != len(refs):
        raise CheckpointDamaged(f"`{what}` is damaged: it names one page twice")
    return tuple(map(read_page, refs))


def read_manifest(disk: Disk, generations: int, entry: Entry, where: str, read_page: ReadPage) -> Manifest:
    """The manifest that `entry` names, after its size and its hash were found right, with the names in its pages."""
    what = f"{where}/generations/{entry.manifest}"
    if entry.size > MANIFEST_LIMIT_BYTES:
        raise CheckpointDamaged(f"`{what}` is said to have {entry.size} bytes, more than {MANIFEST_LIMIT_BYTES}")
    raw = read_small(disk, generations, entry.manifest, MANIFEST_LIMIT_BYTES, what)
    if len(raw) != entry.size:
        raise CheckpointDamaged(f"`{what}` has {len(raw)} bytes instead of {entry.size}")
    if (found := hashlib.sha256(raw).hexdigest()) != entry.sha256:
        raise CheckpointDamaged(f"`{what}` has other bytes: their SHA-256 is {found}")
    manifest = decode_manifest(raw, what, read_page)
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


def _refuse_newer(version: Any, what: str, known: int = FORMAT_VERSION) -> None:
    if type(version) is not int or version < 1:
        raise CheckpointDamaged(f"`{what}` is damaged: it has no format version")
    if version > known:
        raise UnknownFormat(
            f"`{what}` has format version {version} and this program knows {known}: update prefect-quantize"
        )
