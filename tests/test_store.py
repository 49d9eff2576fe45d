"""The store's promises on a real disk; power failures are in test_crash.py."""

import errno
import os
import shutil
import socket
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from faulty_disk import FaultyDisk, UnsyncedDisk
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from saved_contents import small_pages

from checkpoint_store.disk import Disk
from checkpoint_store.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMissing,
    IdentityMismatch,
    StorageFull,
)
from checkpoint_store.objects import BytesPayload, ObjectRef
from checkpoint_store.published import Pinned
from checkpoint_store.store import CheckpointStore

IDENTITY = {"source": {"digest": "abc"}, "quantization": {"bits": 4}}


def accept(identity: dict[str, Any]) -> None:
    assert identity == IDENTITY


def publish_layers(
    store: CheckpointStore, first: int, last: int, size: int = 1000, pinned: Pinned | None = None
) -> None:
    """One generation for each layer, each with its layer, its record and its own continuation."""
    pinned = pinned or store.pin(accept)
    kept = len([ref for ref in pinned.objects if ref.role != "continuation"]) if pinned else 0
    for layer in range(first, last):
        refs = [
            store.stage("layer", f"layers.{layer}", BytesPayload(bytes([layer]) * size)),
            store.stage("record", f"key{layer}", BytesPayload(b"record %d" % layer)),
            store.stage("continuation", "hidden.00000", BytesPayload(b"hidden %d" % layer)),
        ]
        store.publish(IDENTITY, layer + 1, 300, refs, kept=kept)
        kept += 2


def contents(path: Path) -> dict[str, bytes]:
    """Cursor and bytes of the newest whole generation, as a reader sees them."""
    with CheckpointStore.open(path, mode="read") as store:
        pinned = store.pin(accept)
        if pinned is None:
            return {}
        return {"cursor": b"%d" % pinned.cursor} | {ref.key: bytes(pinned.view(ref)) for ref in pinned.objects}


def expected(cursor: int, size: int = 1000) -> dict[str, bytes]:
    found = {"cursor": b"%d" % cursor, "hidden.00000": b"hidden %d" % (cursor - 1)}
    for layer in range(cursor):
        found |= {f"layers.{layer}": bytes([layer]) * size, f"key{layer}": b"record %d" % layer}
    return found


def object_of(path: Path, gen: int, key: str) -> Path:
    with CheckpointStore.open(path, mode="read") as store:
        [generation] = [found for found in store.generations() if found.gen == gen]
        [ref] = [ref for ref in generation.objects if ref.key == key]
        return store.path_of(ref)


def manifest_of(path: Path, gen: int) -> Path:
    [found] = (path / "generations").glob(f"{gen:08d}-*.json")
    return found


def tree(path: Path) -> dict[str, bytes | None]:
    return {str(found): found.read_bytes() if found.is_file() else None for found in sorted(path.rglob("*"))}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Generations 2 and 3, of two and three finished layers."""
    path = tmp_path / "root"
    with CheckpointStore.open(path) as store:
        publish_layers(store, 0, 3)
    return path


# Publishing and reading


def test_a_new_root_holds_nothing_and_is_made_below_missing_directories(tmp_path):
    path = tmp_path / "a" / "b" / "root"
    with CheckpointStore.open(path) as store:
        assert store.generations() == [] and store.pin(accept) is None
    assert contents(path) == {}


def test_what_was_published_is_read_back_by_another_process_of_the_store(root):
    assert contents(root) == expected(3)
    with CheckpointStore.open(root, mode="read") as store:
        assert [generation.gen for generation in store.generations()] == [3, 2]
        assert [generation.cursor for generation in store.generations()] == [3, 2]
    with CheckpointStore.open(root) as store:
        publish_layers(store, 3, 5)
    assert contents(root) == expected(5)


def test_keep_last_decides_how_many_generations_and_objects_stay(tmp_path):
    for keep_last in (2, 3):
        path = tmp_path / str(keep_last)
        with CheckpointStore.open(path, keep_last=keep_last) as store:
            publish_layers(store, 0, 6)
            assert [generation.gen for generation in store.generations()] == list(range(6, 6 - keep_last, -1))
        assert len(os.listdir(path / "generations")) == keep_last
        assert len(os.listdir(path / "objects")) == 12 + keep_last
    with CheckpointStore.open(path, keep_last=2) as store:
        publish_layers(store, 6, 7)
        assert [generation.gen for generation in store.generations()] == [7, 6]
    with pytest.raises(ValueError, match="keep_last is 1"):
        CheckpointStore.open(path, keep_last=1)


@pytest.mark.parametrize("keep_last", [2, 3, 5])
def test_writers_that_live_for_one_layer_each_keep_no_more_generations_than_others(tmp_path, keep_last):
    path = tmp_path / "root"
    for layer in range(8):
        with CheckpointStore.open(path, keep_last=keep_last) as store:
            publish_layers(store, layer, layer + 1)
            assert [found.gen for found in store.generations()] == list(range(layer + 1, 0, -1))[:keep_last]
        assert files(path) == retained(path)
    assert contents(path) == expected(8)


@pytest.mark.parametrize("damage", ["flipped", "cut", "manifest"])
def test_a_generation_seen_to_be_damaged_is_none_of_those_to_be_kept(tmp_path, damage):
    path = tmp_path / "root"
    with CheckpointStore.open(path, keep_last=4) as store:
        publish_layers(store, 0, 4)
    victim = manifest_of(path, 4) if damage == "manifest" else object_of(path, 4, "hidden.00000")
    victim.write_bytes(b"x" * (victim.stat().st_size - (damage == "cut")))
    with CheckpointStore.open(path, keep_last=3) as store:
        pinned = store.pin(accept)
        assert pinned is not None and pinned.cursor == 3
        ref = store.stage("record", "other", BytesPayload(b"other"))
        store.publish(IDENTITY, 3, 300, [*pinned.objects, ref])
        assert [found.gen for found in store.generations()] == [5, 4, 3, 2]


def test_an_older_generation_that_lacks_an_object_is_none_of_those_to_be_kept_and_leaves_the_list_in_its_turn(tmp_path):
    path = tmp_path / "root"
    with CheckpointStore.open(path, keep_last=4) as store:
        publish_layers(store, 0, 4)
    object_of(path, 3, "hidden.00000").unlink()
    listed = []
    for layer in range(4, 7):
        with CheckpointStore.open(path, keep_last=3) as store:
            publish_layers(store, layer, layer + 1)
            listed.append([found.gen for found in store.generations()])
    assert listed == [[5, 4, 3, 2], [6, 5, 4], [7, 6, 5]]
    assert files(path) == retained(path)


def test_a_file_that_is_no_directory_is_refused_as_a_root(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    for mode in ("read", "write"):
        with pytest.raises(CheckpointError, match="not a directory"):
            CheckpointStore.open(tmp_path / "file", mode=mode)
    with pytest.raises(CheckpointMissing, match="no such directory"):
        CheckpointStore.open(tmp_path / "absent", mode="read")
    assert os.listdir(tmp_path) == ["file"]


def test_only_staged_objects_and_those_of_the_previous_generation_can_be_published(root):
    stranger = ObjectRef("layer", "never staged", "a" * 64, 1)
    with CheckpointStore.open(root) as store:
        with pytest.raises(CheckpointError, match="pin one before"):
            store.publish(IDENTITY, 4, 300, [])
        store.pin(accept)
        with pytest.raises(CheckpointError, match="layer never staged"):
            store.publish(IDENTITY, 4, 300, [stranger])
        publish_layers(store, 3, 4)  # a refusal poisons nothing
    assert contents(root) == expected(4)


def test_the_bytes_written_and_hashed_by_a_publish_are_the_new_ones_at_layer_1_and_at_layer_200(tmp_path):
    moved = {}
    with CheckpointStore.open(tmp_path / "root", disk=UnsyncedDisk()) as store:
        for layer in range(200):
            before = vars(store.counters).copy()
            ref = store.stage("layer", f"layers.{layer}", BytesPayload(b"%4d" % layer * 25_000))
            hidden = store.stage("continuation", "hidden.00000", BytesPayload(b"%4d" % layer * 5_000))
            store.publish(IDENTITY, layer + 1, 300, [ref, hidden], kept=layer)
            moved[layer + 1] = {name: count - before[name] for name, count in vars(store.counters).items()}
        assert len(store.generations()[0].objects) == 201
    metadata = {layer: found.pop("metadata_bytes_written") for layer, found in moved.items()}
    assert moved[1] == moved[200] == {"bytes_written": 120_000, "bytes_hashed": 120_000, "bytes_verified": 0}
    # 7 names of layers, 3 pages and a second generation in CURRENT: it was 26000 when a manifest named every object.
    assert metadata[200] < metadata[1] + 7 * 180 + 3 * 100 + 300


# Damage


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def link_away(path: Path) -> None:
    aside = path.with_name("aside")
    path.rename(aside)
    path.symlink_to(aside)


DAMAGE = [flip, cut, Path.unlink, link_away]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("find", [lambda root: object_of(root, 3, "hidden.00000"), lambda root: manifest_of(root, 3)])
def test_a_damaged_newest_generation_falls_back_loudly_and_the_last_good_one_is_kept(root, caplog, damage, find):
    damage(find(root))
    assert contents(root) == expected(2)
    assert "generation 3 is damaged" in caplog.text
    with CheckpointStore.open(root) as store:
        pinned = store.pin(accept)
        assert pinned is not None and [found.gen for found, _ in pinned.fallen_from] == [3]
        publish_layers(store, 2, 3)
        # The damaged one does not count, so that the good one stays.
        assert [generation.gen for generation in store.generations()] == [4, 3, 2]
        publish_layers(store, 3, 4)
        assert [generation.gen for generation in store.generations()] == [5, 4]
    assert contents(root) == expected(4)


@pytest.mark.parametrize("damage", DAMAGE)
def test_when_no_generation_is_whole_recovery_fails_and_nothing_is_deleted(root, damage):
    damage(object_of(root, 2, "layers.0"))  # both generations need it
    before = tree(root)
    with CheckpointStore.open(root) as store:
        with pytest.raises(CheckpointDamaged) as caught:
            store.pin(accept)
        assert "generation 3" in str(caught.value) and "generation 2" in str(caught.value)
        with pytest.raises(CheckpointError, match="pin one before"):
            store.publish(IDENTITY, 1, 300, [])
    after = tree(root)
    assert {name for name in before if name not in after} == set()


def test_another_jobs_identity_ends_the_search_at_once(root):
    flip(object_of(root, 2, "hidden.00000"))

    def refuse(identity: dict[str, Any]) -> None:
        raise IdentityMismatch("another job")

    with CheckpointStore.open(root) as store, pytest.raises(IdentityMismatch):
        store.pin(refuse)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.ENOMEM])
@pytest.mark.parametrize("method", ["stat", "open_for_read", "map", "open_directory"])
def test_a_shortage_or_a_missing_permission_is_told_and_never_falls_back(root, number, method):
    disk = FaultyDisk()
    with CheckpointStore.open(root, mode="read", disk=disk) as store:
        disk.fail(method, number)
        with pytest.raises(CheckpointError) as caught:
            store.pin(accept)
    assert type(caught.value) is CheckpointError and os.strerror(number) in str(caught.value)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_lost_current_is_replaced_by_the_spare_loudly_and_the_spare_survives_the_next_publish(root, caplog, damage):
    damage(root / "CURRENT")
    assert contents(root) == expected(2)
    assert "going on with the spare root pointer" in caplog.text
    before = tree(root)
    with CheckpointStore.open(root) as store:
        assert store.spare_because is not None
        deferred = store.sweep().deferred
        assert deferred is not None and "CURRENT is lost" in deferred
        assert {name for name in before if name not in tree(root)} == set()
        spare = (root / "CURRENT.prev").read_bytes()
        publish_layers(store, 2, 3)
        assert (root / "CURRENT.prev").read_bytes() == spare
        publish_layers(store, 3, 4)
        assert kept_files(before) <= kept_files(tree(root)), "the lost CURRENT may have named any of them"
    assert contents(root) == expected(4)
    with CheckpointStore.open(root) as store:
        assert store.sweep().objects > 0, "a later writer knows what is published, and sweeps again"


def test_an_empty_current_put_back_over_a_later_one_starts_nothing_over_and_deletes_nothing(tmp_path, caplog):
    with CheckpointStore.open(tmp_path) as store:
        empty = (tmp_path / "CURRENT").read_bytes()
        publish_layers(store, 0, 3)
    (tmp_path / "CURRENT").write_bytes(empty)
    before = tree(tmp_path)
    assert contents(tmp_path) == expected(2)
    assert "lists no generation and its spare does" in caplog.text
    with CheckpointStore.open(tmp_path) as store:
        assert store.sweep().deferred is not None
        assert kept_files(before) == kept_files(tree(tmp_path))
        publish_layers(store, 2, 4)
    assert contents(tmp_path) == expected(4)


def test_two_publishes_between_a_readers_looks_at_both_pointers_are_no_damage(tmp_path):
    with CheckpointStore.open(tmp_path) as store:

        class Overtaken(Disk):
            def open_for_read(self, directory, name):
                if name == "CURRENT.prev" and not store.generations():
                    publish_layers(store, 0, 2)
                return super().open_for_read(directory, name)

        with CheckpointStore.open(tmp_path, mode="read", disk=Overtaken()) as reader:
            assert reader.spare_because is None
            assert [generation.cursor for generation in reader.generations()] == [2, 1]


def kept_files(names):
    return {name for name in names if name.startswith(("objects/", "generations/"))}


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("damage", [flip, Path.unlink])
def test_when_both_pointers_are_gone_nothing_starts_over_and_nothing_is_deleted(tmp_path, layers, damage):
    root = tmp_path / "root"
    with CheckpointStore.open(root) as store:
        publish_layers(store, 0, layers)
    damage(root / "CURRENT")
    if layers > 1:  # after the first publish the spare lists nothing, which proves nothing
        damage(root / "CURRENT.prev")
    before = tree(root)
    for mode in ("read", "write"):
        with pytest.raises(CheckpointDamaged, match=f"prefect-quantize recover {root}"):
            CheckpointStore.open(root, mode=mode)
    before.pop(str(root / "writer.lock")), (after := tree(root)).pop(str(root / "writer.lock"))
    assert after == before


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_lost_format_is_damage_when_anything_was_written(root, damage):
    damage(root / "FORMAT")
    for mode in ("read", "write"):
        with pytest.raises(CheckpointDamaged, match="prefect-quantize recover"):
            CheckpointStore.open(root, mode=mode)


def test_a_lost_format_is_damage_even_when_only_a_staged_object_or_a_manifest_is_there(root, tmp_path):
    for kept in ("objects", "generations", "CURRENT.prev", "CURRENT"):
        copy = tmp_path / kept
        shutil.copytree(root, copy)
        for name in {"FORMAT", "CURRENT", "CURRENT.prev", "objects", "generations"} - {kept}:
            shutil.rmtree(copy / name) if (copy / name).is_dir() else (copy / name).unlink()
        with pytest.raises(CheckpointDamaged):
            CheckpointStore.open(copy)


@pytest.mark.parametrize("steps", [["objects"], ["objects", "generations"], ["objects", "generations", "CURRENT"]])
def test_a_root_whose_making_was_cut_short_is_made_to_its_end(tmp_path, steps):
    whole, cut_short = tmp_path / "whole", tmp_path / "cut"
    CheckpointStore.open(whole).close()
    shutil.copytree(whole, cut_short)
    for name in {"FORMAT", "CURRENT", "objects", "generations"} - set(steps):
        shutil.rmtree(cut_short / name) if (cut_short / name).is_dir() else (cut_short / name).unlink()
    assert contents(cut_short) == {}
    with CheckpointStore.open(cut_short) as store:
        publish_layers(store, 0, 1)
    assert contents(cut_short) == expected(1)


@pytest.mark.parametrize("name", ["objects", "generations"])
def test_a_linked_or_missing_directory_inside_the_root_is_damage(root, tmp_path, name):
    (root / name).rename(tmp_path / "aside")
    for make in (lambda: None, lambda: (root / name).symlink_to(tmp_path / "aside")):
        make()
        for mode in ("read", "write"):
            with pytest.raises(CheckpointDamaged), CheckpointStore.open(root, mode=mode) as store:
                store.pin(accept)


# Failures while writing


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, StorageFull),
        (errno.EDQUOT, StorageFull),
        (errno.EFBIG, StorageFull),
        (errno.EIO, CheckpointError),
        (errno.EACCES, CheckpointError),
        (errno.EROFS, CheckpointError),
    ],
)
@pytest.mark.parametrize("method", ["create", "allocate", "write", "sync", "close", "rename", "sync_directory", "link"])
def test_a_failed_write_is_told_poisons_the_store_and_loses_nothing(root, number, kind, method):
    disk = FaultyDisk()
    store = CheckpointStore.open(root, disk=disk)
    pinned = store.pin(accept)
    disk.fail(method, number)
    with pytest.raises(kind, match=os.strerror(number) if kind is CheckpointError else "make room") as caught:
        publish_layers(store, 3, 4, pinned=pinned)
    assert isinstance(caught.value, CheckpointError)
    disk.faults.clear()
    syncs = disk.calls.count("sync")
    for again in (
        lambda: store.stage("record", "k", BytesPayload(b"")),
        lambda: store.publish(IDENTITY, 3, 300, []),
        store.sweep,
    ):
        with pytest.raises(kind, match="takes no more writes"):
            again()
    assert disk.calls.count("sync") == syncs
    store.close()
    assert contents(root) in (expected(3), expected(4))
    with CheckpointStore.open(root) as store:
        pinned = store.pin(accept)
        assert pinned is not None
        publish_layers(store, pinned.cursor, 5)
    assert contents(root) == expected(5)


def test_a_publish_whose_last_sync_fails_deletes_nothing(root):
    disk = FaultyDisk()
    store = CheckpointStore.open(root, disk=disk)
    pinned = store.pin(accept)
    assert pinned is not None
    before = set(os.listdir(root / "objects")) | set(os.listdir(root / "generations"))
    disk.fail("sync_directory", errno.EIO, after=2)  # objects and generations pass, the root does not
    with pytest.raises(CheckpointError):
        store.publish(IDENTITY, 4, 300, pinned.objects)
    store.close()
    assert before <= set(os.listdir(root / "objects")) | set(os.listdir(root / "generations"))


def test_too_little_room_is_told_before_a_byte_is_written(root):
    class FullDisk(FaultyDisk):
        def free_bytes(self, directory: int) -> int:
            return 2 << 20

    disk = FullDisk()
    with CheckpointStore.open(root, disk=disk) as store:
        with pytest.raises(StorageFull, match=r"needs 4194304 bytes.*2097152 bytes free"):
            store.stage("layer", "layers.9", BytesPayload(bytes(4 << 20)))
        assert "allocate" not in disk.calls
        publish_layers(store, 3, 4)  # what fits is still taken
    assert contents(root) == expected(4)


def test_a_current_that_another_program_changed_is_not_written_over(root):
    with CheckpointStore.open(root) as store:
        store.pin(accept)
        shutil.copy(root / "CURRENT.prev", root / "CURRENT")
        foreign = (root / "CURRENT").read_bytes()
        with pytest.raises(CheckpointError, match="changed by another program"):
            publish_layers(store, 3, 4)
    assert (root / "CURRENT").read_bytes() == foreign


def test_a_failed_sweep_is_a_warning_and_the_generation_stands(root, caplog):
    disk = FaultyDisk()
    with CheckpointStore.open(root, disk=disk) as store:
        disk.fail("list_directory", errno.EIO)
        publish_layers(store, 3, 4)
    assert "its sweep failed" in caplog.text
    assert contents(root) == expected(4)


# Garbage


def test_a_sweep_keeps_what_is_staged_and_removes_what_a_dead_run_left(root):
    (root / "objects" / ("0" * 64)).write_bytes(b"orphan")
    (root / "generations" / "00000009-0123456789abcdef.json").write_bytes(b"orphan")
    foreign = [
        root / "objects" / "notes.txt",
        root / "objects" / ("0" * 63),
        root / "generations" / "1.json",
        root / "my file",
    ]
    for path in foreign:
        path.write_bytes(b"not ours")
    with CheckpointStore.open(root) as store:
        ref = store.stage("layer", "layers.3", BytesPayload(b"staged"))
        report = store.sweep()
        assert (report.objects, report.manifests, report.bytes) == (1, 1, 12)
        assert store.path_of(ref).read_bytes() == b"staged"
        assert all(path.exists() for path in foreign)
    with CheckpointStore.open(root) as store:
        assert store.sweep().objects == 1  # nobody published it
    assert contents(root) == expected(3)


def files(root: Path) -> set[str]:
    return {path.name for below in ("objects", "generations") for path in (root / below).iterdir()}


def retained(root: Path) -> set[str]:
    with CheckpointStore.open(root, mode="read") as store:
        listed = store.generations()
        return {found.entry.manifest for found in listed} | {
            ref.sha256 for found in listed for ref in found.manifest.needed
        }


def test_only_the_first_sweep_of_a_writer_looks_through_the_root_and_later_ones_remove_what_fell_off_the_list(root):
    disk = FaultyDisk()
    with CheckpointStore.open(root, disk=disk) as store:
        publish_layers(store, 3, 4)
        assert "list_directory" in disk.calls
        disk.calls.clear()
        publish_layers(store, 4, 9)
        assert "list_directory" not in disk.calls
        assert files(root) == retained(root)


def test_what_fell_off_the_list_stays_while_it_is_staged_anew(root):
    with CheckpointStore.open(root) as store:
        publish_layers(store, 3, 4)
        again = store.stage(
            "continuation", "hidden.00000", BytesPayload(b"hidden 2")
        )  # that of the generation to be dropped
        publish_layers(store, 4, 5)
        assert store.path_of(again).exists()
        pinned = store.pin(accept)
        assert pinned is not None
        store.publish(IDENTITY, 5, 300, [again])
        assert bytes(store.view(again)) == b"hidden 2"


def test_after_a_sweep_that_failed_or_met_a_reader_the_next_one_looks_through_the_root_again(root, caplog):
    with CheckpointStore.open(root) as store:
        publish_layers(store, 3, 4)
        with CheckpointStore.open(root, mode="read"):
            publish_layers(store, 4, 6)
            assert files(root) > retained(root)
        publish_layers(store, 6, 7)
        assert files(root) == retained(root)
        object_of(root, 6, "hidden.00000").unlink()  # somebody else's doing
        publish_layers(store, 7, 9)
        assert "its sweep failed" in caplog.text
        publish_layers(store, 9, 10)
        assert files(root) == retained(root)


def test_a_sweep_waits_for_readers(root):
    with CheckpointStore.open(root, mode="read") as reader, CheckpointStore.open(root) as store:
        publish_layers(store, 3, 6)
        assert store.sweep().deferred == "a reader is at work"
        pinned = reader.pin(accept)
        assert pinned is not None and pinned.cursor == 3
        assert bytes(pinned.view(pinned.objects[0])) == bytes(1000)
        reader.close()
        assert store.sweep().manifests == 3


def test_nothing_is_swept_while_a_retained_manifest_cannot_be_verified(root):
    flip(manifest_of(root, 2))
    (root / "objects" / ("0" * 64)).write_bytes(b"orphan")
    with CheckpointStore.open(root) as store:
        deferred = store.sweep().deferred
        assert deferred is not None and "cannot be verified" in deferred
        assert (root / "objects" / ("0" * 64)).exists()
        publish_layers(store, 3, 4)
        assert not (root / "objects" / ("0" * 64)).exists()


def test_a_reader_without_a_lock_that_a_sweep_overtook_looks_again(root):
    (root / "readers.lock").unlink()
    with CheckpointStore.open(root, mode="read") as reader:
        with CheckpointStore.open(root) as store:
            publish_layers(store, 3, 6)
        pinned = reader.pin(accept)
        assert pinned is not None and pinned.cursor == 6 and pinned.fallen_from == ()


# Readers


class ReadOnlyDisk(FaultyDisk):
    """What a read-only mount answers."""

    def __init__(self) -> None:
        super().__init__()
        for method in (
            "make_root",
            "make_directory",
            "create",
            "open_for_lock",
            "truncate",
            "rename",
            "link",
            "unlink",
        ):
            self.fail(method, errno.EROFS)


def test_a_reader_works_on_a_read_only_mount_and_changes_nothing(root):
    before = tree(root)
    with CheckpointStore.open(root, mode="read", disk=ReadOnlyDisk()) as store:
        pinned = store.pin(accept)
        assert pinned is not None and pinned.cursor == 3
        for write in (
            lambda: store.stage("record", "k", BytesPayload(b"")),
            lambda: store.publish(IDENTITY, 1, 1, []),
            store.sweep,
            lambda: store.scratch,
        ):
            with pytest.raises(CheckpointError, match="reading only"):
                write()
    assert tree(root) == before


@pytest.mark.parametrize("kind", ["link to nothing", "socket"])
def test_a_reader_needs_no_readers_lock_that_is_one(root, kind):
    (root / "readers.lock").unlink()
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as unbound:
            directory = os.open(root, os.O_RDONLY)
            unbound.bind(f"/proc/self/fd/{directory}/readers.lock")
            os.close(directory)
    else:
        (root / "readers.lock").symlink_to("nowhere")
    assert contents(root) == expected(3)
    with pytest.raises(CheckpointError, match=r"cannot write .*readers.lock"):
        CheckpointStore.open(root)


def test_too_many_open_files_at_the_readers_lock_are_told_as_such(root):
    class Exhausted(Disk):
        def open_for_shared_lock(self, directory, name):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with pytest.raises(CheckpointError, match=r"cannot read .*readers.lock`: Too many open files"):
        CheckpointStore.open(root, mode="read", disk=Exhausted())


def test_a_reader_needs_no_lock_while_a_writer_is_at_work(root):
    with CheckpointStore.open(root) as store:
        assert contents(root) == expected(3)
        publish_layers(store, 3, 4)
        assert contents(root) == expected(4)


def test_a_closed_store_says_so(root):
    store = CheckpointStore.open(root)
    store.close()
    store.close()
    uses: list[Callable[[], object]] = [
        lambda: store.pin(accept),
        lambda: store.stage("record", "k", BytesPayload(b"")),
        store.sweep,
    ]
    for use in uses:
        with pytest.raises(CheckpointError, match="is closed"):
            use()


def test_no_descriptor_stays_open_after_any_outcome(root):
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    with CheckpointStore.open(root) as store:
        publish_layers(store, 3, 5)
    contents(root)
    flip(root / "CURRENT")
    flip(root / "CURRENT.prev")
    for mode in ("read", "write"):
        with pytest.raises(CheckpointDamaged):
            CheckpointStore.open(root, mode=mode)
    assert descriptors() == before


# Against a model


class StoreMachine(RuleBasedStateMachine):
    """The store against a dict: staging, publishing, reopening and damage in any order."""

    @initialize(keep_last=st.integers(2, 4))
    def start(self, keep_last: int) -> None:
        self.path = Path(os.environ["STORE_MACHINE"]) / os.urandom(8).hex()
        self.keep_last = keep_last
        self.published: list[dict[str, bytes]] = []
        self.staged: dict[str, tuple[ObjectRef, bytes]] = {}
        self.open()

    def open(self) -> None:
        self.store = CheckpointStore.open(self.path, keep_last=self.keep_last, disk=UnsyncedDisk())
        self.pinned = self.store.pin(accept)
        self.refs = {ref.key: ref for ref in self.pinned.objects} if self.pinned else {}

    @rule(key=st.sampled_from("abcd"), data=st.binary(max_size=50))
    def stage(self, key: str, data: bytes) -> None:
        self.staged[key] = (self.store.stage("record", key, BytesPayload(data)), data)

    @rule()
    def publish(self) -> None:
        contents = dict(self.published[-1] if self.published else {})
        before = list(self.refs.items())
        for key, (ref, data) in self.staged.items():
            self.refs[key], contents[key] = ref, data
        objects = list(self.refs.items())
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, objects, strict=False)))
        self.store.publish(IDENTITY, len(contents), 4, [ref for _, ref in objects[kept:]], kept=kept)
        self.published.append(contents)
        self.staged.clear()

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.staged.clear()
        self.open()

    @rule()
    def sweep(self) -> None:
        # After a lost CURRENT the spare lists a generation that was swept already; until it leaves the list, no sweep.
        deferred = self.store.sweep().deferred
        assert deferred is None or "cannot be verified" in deferred

    @rule()
    def lose_current(self) -> None:
        if len(self.published) < 2:
            return
        self.store.close()
        (self.path / "CURRENT").unlink()
        self.staged.clear()
        self.published.pop()
        self.open()
        self.publish()

    @invariant()
    def a_reader_sees_the_last_published(self) -> None:
        with CheckpointStore.open(self.path, mode="read") as reader:
            pinned = reader.pin(accept)
            found = {ref.key: bytes(pinned.view(ref)) for ref in pinned.objects} if pinned else {}
        assert found == (self.published[-1] if self.published else {})

    def teardown(self) -> None:
        self.store.close()


def test_the_store_agrees_with_a_dict(tmp_path, monkeypatch):
    monkeypatch.setenv("STORE_MACHINE", str(tmp_path))
    with small_pages(2):  # of four names, so that pages are written, kept, dissolved and swept
        run_state_machine_as_test(
            StoreMachine,
            settings=settings(max_examples=25, stateful_step_count=20, deadline=None),
        )
