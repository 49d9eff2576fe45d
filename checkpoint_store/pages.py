"""The names of a generation's objects: each as JSON, and full pages of them as objects of their own.

A page is written once and then named by every later manifest, so that a publish writes few names however many layers came
before.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

from checkpoint_store.canonical import canonical, count, matching, parse, typed
from checkpoint_store.disk import Disk
from checkpoint_store.errors import CheckpointDamaged
from checkpoint_store.objects import OBJECT_NAME, ROLE, ObjectRef, map_verified

PAGE = "page"  # the role of a page itself; no page and no list of names holds it
PAGE_OBJECTS = 64  # a writer fills a page with so many
PAGE_OBJECTS_MOST = 1024
PAGE_LIMIT_BYTES = 1 << 20
DIGEST_AND_SIZE = attrgetter("sha256", "size")


@dataclass(frozen=True)
class Page:
    """A page that was read and verified, or written; the manifests that one writer publishes share it."""

    ref: ObjectRef
    objects: tuple[ObjectRef, ...]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The bytes of each object that it names, by digest."""
        return dict(map(DIGEST_AND_SIZE, self.objects))

    @cached_property
    def names(self) -> frozenset[tuple[str, str]]:
        return frozenset((ref.role, ref.key) for ref in self.objects)

    @cached_property
    def encoded(self) -> bytes:
        """The page as a manifest names it."""
        return canonical({"sha256": self.ref.sha256, "size": self.ref.size})


ReadPage = Callable[[ObjectRef], Page]
Names = tuple[tuple[Page, ...], tuple[ObjectRef, ...]]  # of a generation or its beginning: pages, then the inline rest


def page_key(index: int) -> str:
    """What a manifest's page is called in messages: its place in the manifest."""
    return f"{index:05d}"


def full_page(inline: tuple[ObjectRef, ...]) -> tuple[ObjectRef, ...]:
    """The first names, as many as fill a page; none when there are fewer, or ones too long for a page."""
    names = inline[:PAGE_OBJECTS]
    return names if len(names) == PAGE_OBJECTS and len(encode_page(names)) <= PAGE_LIMIT_BYTES else ()


def encode_refs(refs: tuple[ObjectRef, ...]) -> bytes:
    """A JSON list, joined by hand: most refs were encoded for the generation before."""
    return b"[%s]" % b",".join(map(attrgetter("encoded"), refs))


def encode_page(refs: tuple[ObjectRef, ...]) -> bytes:
    return b'{"objects":%s}' % encode_refs(refs)


def decode_refs(value: Any, what: str) -> tuple[ObjectRef, ...]:
    """The list under the key `objects`."""
    return tuple(_decode_ref(item, what) for item in typed(value, "objects", list, what))


def _decode_ref(item: Any, what: str) -> ObjectRef:
    ref = ObjectRef(
        matching(item, "role", ROLE, what),
        typed(item, "key", str, what),
        matching(item, "sha256", OBJECT_NAME, what),
        count(item, "size", what),
    )
    if ref.role == PAGE:
        raise CheckpointDamaged(f"`{what}` is damaged: it names a page where only objects may stand")
    return ref


def read_page(
    disk: Disk, objects: int, ref: ObjectRef, where: str, on_hashed: Callable[[int], None] | None = None
) -> Page:
    """The page that `ref` names, after its size and its hash were found right."""
    what = f"{where}/objects/{ref.sha256}"
    if ref.size > PAGE_LIMIT_BYTES:
        raise CheckpointDamaged(
            f"`{what}` ({PAGE} {ref.key}) is said to have {ref.size} bytes, more than {PAGE_LIMIT_BYTES}"
        )
    names = decode_refs(parse(bytes(map_verified(disk, objects, ref, where, on_hashed)), what), what)
    if not 0 < len(names) <= PAGE_OBJECTS_MOST:
        raise CheckpointDamaged(
            f"`{what}` ({PAGE} {ref.key}) is damaged: it names {len(names)} objects, a page has 1 to {PAGE_OBJECTS_MOST}"
        )
    return Page(ref, names)
