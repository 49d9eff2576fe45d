"""What the crash tests save, and the check that every state after a crash must pass.

A history publishes one generation for each finished layer. Its objects are chosen to be awkward: layers 0 and 2 hold the same bytes,
so that one object has two names in a manifest and is published again over itself; the continuation goes through three
contents in turn, so that an object is swept and later comes back under the same name. `small_pages` makes pages so small that a
few generations fill some.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from checkpoint_store.disk import Disk
from checkpoint_store.objects import ObjectRef
from checkpoint_store.store import CheckpointStore

ROOT = "/root"
KEEP_LAST = 2
LAYER_COUNT = 9
IDENTITY: dict[str, Any] = {"source": {"digest": "5a5a"}, "quantization": {"bits": 4, "group_size": 64}}

Contents = dict[tuple[str, str], bytes]


@contextmanager
def repeatable(name: int) -> Iterator[None]:
    """No chance and no clock inside: what is drawn at random is `name`, so that equal histories leave equal disks."""
    with (
        patch("secrets.token_hex", lambda size: f"{name:0{2 * size}x}"),
        patch("time.strftime", lambda *_: "2026-01-01T00:00:00Z"),
    ):
        yield


class Pieces:
    """A payload of several views, as a safetensors object is one."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.size = len(data)

    def views(self) -> Iterator[memoryview]:
        third = max(1, len(self.data) // 3)
        for start in range(0, len(self.data), third):
            yield memoryview(self.data)[start : start + third]


def contents(cursor: int, *, with_records: bool = True) -> Contents:
    """Everything that the generation after `cursor` finished layers must hold, byte for byte."""
    held: Contents = {}
    for layer in range(cursor):
        held["layer", f"layers.{layer}"] = f"weights of layer {layer % 2} in pieces".encode()
        if with_records:
            held["record", f"key-{layer}"] = f'{{"layer": {layer}}}'.encode()
    held["continuation", "hidden.00000"] = f"hidden states, content {cursor % 3}".encode()
    return held


@contextmanager
def small_pages(objects: int) -> Iterator[None]:
    """Pages that are full with so many names, instead of a layer count that no test of every crash could afford."""
    with patch("checkpoint_store.pages.PAGE_OBJECTS", objects):
        yield


def stage(store: CheckpointStore, cursor: int, *, with_records: bool = True) -> tuple[list[ObjectRef], int]:
    """What the generation after `cursor` layers names: objects staged anew, and how many of those before stay in front."""
    pinned = store.pin(accept)
    kept = [ref for ref in pinned.objects if ref.role != "continuation"] if pinned is not None else []
    assert pinned is None or tuple(kept) == pinned.objects[: len(kept)]
    named = {(ref.role, ref.key) for ref in kept}
    return [
        store.stage(role, key, Pieces(data))
        for (role, key), data in contents(cursor, with_records=with_records).items()
        if (role, key) not in named
    ], len(kept)


def save(store: CheckpointStore, cursor: int, *, with_records: bool = True) -> None:
    """Publish the generation after `cursor` layers on top of what `store` has pinned or published before."""
    objects, kept = stage(store, cursor, with_records=with_records)
    store.publish(IDENTITY, cursor, LAYER_COUNT, objects, kept=kept)


def save_dissolving(store: CheckpointStore, cursor: int, step: int) -> None:
    """As `save`, and all is named inline again, in the same order (`step` 1) or the other way round (-1)."""
    objects, kept = stage(store, cursor, with_records=False)
    pinned = store.pin(accept)
    before = pinned.objects[:kept] if pinned is not None else ()
    store.publish(IDENTITY, cursor, LAYER_COUNT, [*before[::step], *objects])


def accept(identity: dict[str, Any]) -> None:
    assert identity == IDENTITY, f"the identity changed on disk: {identity}"


def load(store: CheckpointStore) -> tuple[int, Contents]:
    """Cursor and bytes of the newest whole generation; 0 and nothing when none was ever published."""
    pinned = store.pin(accept)
    if pinned is None:
        return 0, {}
    return pinned.cursor, {(ref.role, ref.key): bytes(pinned.view(ref)) for ref in pinned.objects}


def open_writer(disk: Disk, path: str = ROOT) -> CheckpointStore:
    return CheckpointStore.open(path, mode="write", keep_last=KEEP_LAST, disk=disk)


def open_reader(disk: Disk, path: str = ROOT) -> CheckpointStore:
    return CheckpointStore.open(path, mode="read", keep_last=KEEP_LAST, disk=disk)
