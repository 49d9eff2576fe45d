"""The operator's tools: status, scrub, sweep, recovery, copies of a root, and the doctor."""

import errno
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from faulty_disk import FaultyDisk
from test_store import (
    IDENTITY,
    ReadOnlyDisk,
    accept,
    contents,
    expected,
    flip,
    manifest_of,
    object_of,
    publish_layers,
    tree,
)

from checkpoint_store.disk import Disk
from checkpoint_store.doctor import examine
from checkpoint_store.errors import CheckpointDamaged, CheckpointError, CheckpointExists, CheckpointMissing, StoreLocked
from checkpoint_store.maintenance import status, sweep, verify
from checkpoint_store.recovery import candidates, recover
from checkpoint_store.store import CheckpointStore
from checkpoint_store.transfer import export_root, import_root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Generations 2 and 3, of two and three finished layers."""
    path = tmp_path / "root"
    with CheckpointStore.open(path, run_id="the run") as store:
        publish_layers(store, 0, 3)
    return path


# Status


def test_status_tells_what_is_published_and_changes_nothing(root):
    before = tree(root)
    told = status(root, disk=ReadOnlyDisk())
    assert tree(root) == before
    assert json.loads(json.dumps(told)) == told
    assert (told["cursor"], told["layer_count"], told["run_id"], told["identity"]) == (3, 300, "the run", IDENTITY)
    assert [(found["gen"], found["cursor"], found["problem"]) for found in told["generations"]] == [
        (3, 3, None),
        (2, 2, None),
    ]
    assert told["referenced"] == told["stored"] == {"objects": 8, "bytes": 3 * 1008 + 2 * 8}
    assert told["last_writer"]["run_id"] == "the run"


def test_status_works_while_a_writer_holds_the_root_and_never_takes_its_lock(root):
    with CheckpointStore.open(root) as store:
        (store.scratch / "x").write_bytes(b"")
        assert len(status(root)["attempts"]) == 1
    disk = FaultyDisk()
    status(root, disk=disk)
    assert "open_for_lock" not in disk.calls and "map" not in disk.calls


def test_status_needs_no_legible_note_of_the_last_writer(root):
    (root / "writer.lock").unlink()
    os.mkfifo(root / "writer.lock")
    assert status(root)["last_writer"] is None


def test_status_tells_of_damage_that_sizes_show(root):
    object_of(root, 2, "hidden.00000").unlink()
    flip(manifest_of(root, 3))
    told = status(root)
    assert "other bytes" in told["generations"][0]["problem"] and "missing" in told["generations"][1]["problem"]
    assert told["cursor"] == 2
    (root / "CURRENT").unlink()
    assert "missing" in status(root)["spare_pointer_in_use"]


def test_status_of_an_absent_and_of_an_unpublished_root(tmp_path):
    with pytest.raises(CheckpointMissing, match="no such directory"):
        status(tmp_path / "absent")
    CheckpointStore.open(tmp_path / "new").close()
    assert (status(tmp_path / "new")["cursor"], status(tmp_path / "new")["generations"]) == (0, [])


# Scrub


def test_a_scrub_of_a_whole_root_hashes_each_object_once_and_changes_nothing(root):
    before = tree(root)
    report = verify(root, disk=ReadOnlyDisk())
    assert report.is_whole and (report.objects, report.bytes) == (8, 3 * 1008 + 2 * 8)
    assert tree(root) == before
    assert report.as_json()["is_whole"] is True


def test_a_scrub_names_each_damage_and_the_generations_that_it_hits(root):
    flip(object_of(root, 3, "hidden.00000"))
    report = verify(root)
    assert [found["is_whole"] for found in report.generations] == [False, True]
    assert len(report.problems) == 1 and "hidden.00000" in report.problems[0]
    flip(object_of(root, 3, "layers.0"))
    flip(manifest_of(root, 2))
    flip(root / "CURRENT.prev")
    report = verify(root)
    assert [found["is_whole"] for found in report.generations] == [False, False]
    assert len(report.problems) == 4 and not report.is_whole


def test_a_scrub_tells_a_cause_that_many_objects_share_once(root):
    shutil.rmtree(root / "objects")
    report = verify(root)
    assert report.problems == [f"`{root}/objects` is damaged: it is missing"]
    assert [found["is_whole"] for found in report.generations] == [False, False]


def test_a_scrub_tells_of_a_lost_current_even_though_the_spare_stands_in(root):
    (root / "CURRENT").unlink()
    assert "CURRENT` is damaged" in verify(root).problems[0]


def test_a_scrub_keeps_to_its_rate(tmp_path):
    with CheckpointStore.open(tmp_path) as store:
        publish_layers(store, 0, 1, size=100_000)
    started = time.monotonic()
    assert verify(tmp_path, bytes_per_second=200_000).is_whole
    assert 0.4 < time.monotonic() - started < 5
    for rate in (0, -1.0, 1e-300, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="positive rate"):
            verify(tmp_path, bytes_per_second=rate)


def test_quarantine_moves_what_is_damaged_aside_and_deletes_nothing(root):
    hidden, manifest = object_of(root, 3, "hidden.00000"), manifest_of(root, 2)
    flip(hidden)
    flip(manifest)
    damaged = {hidden.read_bytes(), manifest.read_bytes()}
    report = verify(root, quarantine=True)
    assert len(report.quarantined) == 2 and not hidden.exists() and not manifest.exists()
    assert {path.read_bytes() for path in (root / "quarantine").iterdir()} == damaged
    assert status(root)["quarantined"] == sorted(name.split("/")[1] for name in report.quarantined)
    assert not verify(root, quarantine=True).is_whole  # absence is no cure
    with pytest.raises(CheckpointDamaged), CheckpointStore.open(root) as store:
        store.pin(accept)
    sweep(root)
    assert len(list((root / "quarantine").iterdir())) == 2


def test_quarantine_needs_the_writer_lock_and_a_plain_scrub_does_not(root):
    with CheckpointStore.open(root):
        assert verify(root).is_whole
        with pytest.raises(StoreLocked):
            verify(root, quarantine=True)


def test_a_scrub_that_may_not_read_quarantines_nothing(root):
    disk = FaultyDisk()
    disk.fail("map", errno.EACCES)
    with pytest.raises(CheckpointError, match="Permission denied"):
        verify(root, quarantine=True, disk=disk)
    assert verify(root).is_whole and not (root / "quarantine").exists()


# Sweep


def test_sweep_removes_orphans_and_makes_no_root(root, tmp_path):
    (root / "objects" / ("0" * 64)).write_bytes(b"orphan")
    assert sweep(root).as_json() == {"objects": 1, "manifests": 0, "attempts": 0, "bytes": 6, "deferred": None}
    assert verify(root).is_whole
    with pytest.raises(CheckpointMissing):
        sweep(tmp_path / "absent")
    assert not (tmp_path / "absent").exists()


def test_a_sweep_leaves_what_has_a_name_of_ours_and_is_no_file_and_removes_the_rest(root, caplog):
    (root / "objects" / ("0" * 64)).mkdir()
    (root / "objects" / ("1" * 64)).symlink_to(root / "FORMAT")
    (root / "objects" / ("2" * 64)).write_bytes(b"orphan")
    assert sweep(root).objects == 1
    assert caplog.text.count("is no regular file") == 2
    assert (root / "objects" / ("1" * 64)).is_symlink() and verify(root).is_whole


@pytest.mark.parametrize("tool", [verify, sweep, lambda path: verify(path, quarantine=True)])
def test_a_directory_that_is_no_root_is_neither_called_whole_nor_made_one(tmp_path, tool):
    (tmp_path / "model.safetensors").write_bytes(b"somebody's model")
    before = tree(tmp_path)
    with pytest.raises(CheckpointMissing, match="no checkpoint"):
        tool(tmp_path)
    assert tree(tmp_path) == before


def test_a_root_in_which_nothing_is_published_yet_is_whole(tmp_path):
    CheckpointStore.open(tmp_path / "root").close()
    assert verify(tmp_path / "root").is_whole
    assert sweep(tmp_path / "root").objects == 0


# Recovery


def lose_pointers(root: Path, *names: str) -> None:
    for name in names or ("CURRENT", "CURRENT.prev"):
        (root / name).unlink()


@pytest.mark.parametrize(
    "lost", [("CURRENT", "CURRENT.prev"), ("FORMAT",), ("FORMAT", "CURRENT", "CURRENT.prev"), ("FORMAT", "CURRENT")]
)
@pytest.mark.parametrize("chosen", [2, 3])
def test_recover_lists_the_intact_manifests_and_publishes_the_named_one(root, lost, chosen):
    lose_pointers(root, *lost)
    before = tree(root)
    listed = candidates(root, disk=ReadOnlyDisk())
    assert [(found.gen, found.cursor, found.problem) for found in listed] == [(3, 3, None), (2, 2, None)]
    assert tree(root) == before
    [candidate] = [found for found in listed if found.gen == chosen]
    assert recover(root, candidate.manifest) == candidate
    assert contents(root) == expected(chosen)
    assert not any(name.startswith("attempt-") for name in os.listdir(root))
    with CheckpointStore.open(root) as store:
        publish_layers(store, chosen, 5)
    assert contents(root) == expected(5)


def test_recover_keeps_damaged_pointers_aside_and_the_roots_id(root):
    root_id = status(root)["root_id"]
    for name in ("CURRENT", "CURRENT.prev", "FORMAT"):
        flip(root / name)
    damaged = [(root / name).read_bytes() for name in ("CURRENT", "CURRENT.prev", "FORMAT")]
    recover(root, candidates(root)[0].manifest)
    assert sorted(path.read_bytes() for path in (root / "quarantine").iterdir()) == sorted(damaged)
    assert status(root)["root_id"] != root_id  # no file told it any more
    lose_pointers(root, "CURRENT")
    flip(root / "CURRENT.prev")
    root_id = (root / "FORMAT").read_bytes()
    recover(root, candidates(root)[0].manifest)
    assert (root / "FORMAT").read_bytes() == root_id


def test_after_recover_both_pointers_name_the_chosen_generation_and_the_root_is_whole(root):
    lose_pointers(root, "CURRENT")
    flip(root / "CURRENT.prev")
    recover(root, candidates(root)[1].manifest)
    assert (root / "CURRENT.prev").read_bytes() == (root / "CURRENT").read_bytes()
    assert verify(root).is_whole
    lose_pointers(root, "CURRENT")
    assert contents(root) == expected(2), "a power failure that loses CURRENT again costs nothing"


def test_recover_names_a_directory_that_no_pointer_can_replace(root):
    lose_pointers(root)
    (root / "CURRENT").mkdir()
    with pytest.raises(CheckpointDamaged, match="a directory stands in its place"):
        recover(root, candidates(root)[0].manifest)


def test_recover_refuses_a_root_that_needs_none(root):
    with pytest.raises(CheckpointError, match="needs no recovery"):
        recover(root, candidates(root)[1].manifest)
    (root / "CURRENT").unlink()  # the spare stands in
    with pytest.raises(CheckpointError, match="needs no recovery"):
        recover(root, candidates(root)[0].manifest)


def test_recover_refuses_what_is_not_whole_or_not_there(root):
    lose_pointers(root)
    flip(object_of_lost(root, "hidden.00000", 3))
    listed = candidates(root)
    assert listed[0].problem is not None and listed[1].problem is None
    before = tree(root)
    with pytest.raises(CheckpointDamaged, match="cannot be published"):
        recover(root, listed[0].manifest)
    for name in ("../CURRENT", "00000009-0123456789abcdef.json", ""):
        with pytest.raises(CheckpointMissing, match="no legible manifest"):
            recover(root, name)
    after = tree(root)
    for name in (str(root / "writer.lock"),):
        before.pop(name), after.pop(name)
    assert after == before
    with CheckpointStore.open(root.parent / "other"), pytest.raises(CheckpointMissing):
        recover(root.parent / "absent", listed[1].manifest)


def object_of_lost(root: Path, key: str, gen: int) -> Path:
    manifest = json.loads(manifest_of(root, gen).read_bytes())
    [sha256] = [ref["sha256"] for ref in manifest["objects"] if ref["key"] == key]
    return root / "objects" / sha256


def test_recover_helps_when_all_that_current_lists_is_damaged(root):
    older = manifest_of(root, 2), manifest_of(root, 2).read_bytes()
    needed = {ref: ref.read_bytes() for ref in (root / "objects").iterdir()}
    with CheckpointStore.open(root) as store:
        publish_layers(store, 3, 5)
    for path in (manifest_of(root, 5), manifest_of(root, 4)):
        flip(path)
    older[0].write_bytes(older[1])
    for path, data in needed.items():
        path.write_bytes(data)
    [candidate] = candidates(root)
    recover(root, candidate.manifest)
    assert contents(root) == expected(2)


def test_recover_takes_a_flipped_version_for_damage_and_lists_the_others(root):
    broken, *whole = sorted((root / "generations").iterdir(), reverse=True)
    broken.write_bytes(re.sub(rb'"min_reader":.', b'"min_reader":9', broken.read_bytes()))
    for pointer in ("CURRENT", "CURRENT.prev"):
        (root / pointer).unlink()
    assert [candidate.manifest for candidate in candidates(root)] == [path.name for path in whole]
    assert recover(root, whole[0].name).problem is None


def test_recover_needs_the_writer_lock(root):
    with CheckpointStore.open(root), pytest.raises(StoreLocked):
        recover(root, "any")


# Copies


def test_an_exported_root_is_a_whole_root_and_comes_back_by_import(root, tmp_path):
    before = tree(root)
    report = export_root(root, tmp_path / "deep" / "copy")
    assert (report.generations, report.left_out, report.objects, report.bytes) == ([3, 2], [], 8, 3 * 1008 + 2 * 8)
    assert tree(root) == before
    assert verify(tmp_path / "deep" / "copy").is_whole
    import_root(tmp_path / "deep" / "copy", tmp_path / "back")
    for path in (tmp_path / "deep" / "copy", tmp_path / "back"):
        assert contents(path) == expected(3)
        assert not any(name.startswith("attempt-") for name in os.listdir(path))
        with CheckpointStore.open(path) as store:
            publish_layers(store, 3, 4)
        assert contents(path) == expected(4)


def test_a_damaged_generation_is_left_out_of_a_copy_and_told(root, tmp_path):
    flip(object_of(root, 3, "hidden.00000"))
    report = export_root(root, tmp_path / "copy")
    assert report.generations == [2] and "hidden.00000" in report.left_out[0]
    assert contents(tmp_path / "copy") == expected(2)
    flip(object_of(root, 2, "layers.0"))
    with pytest.raises(CheckpointDamaged, match="nothing published"):
        export_root(root, tmp_path / "second")
    assert not (tmp_path / "second" / "FORMAT").exists()


def test_a_copy_goes_to_an_empty_place_of_its_own(root, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_bytes(b"x")
    with pytest.raises(CheckpointExists, match="not empty"):
        export_root(root, tmp_path / "full")
    (tmp_path / "link").symlink_to(root)
    for target in (root, root / "inside", tmp_path, tmp_path / "link"):
        with pytest.raises(CheckpointError, match="separate directory"):
            export_root(root, target)
    CheckpointStore.open(tmp_path / "new").close()
    with pytest.raises(CheckpointMissing, match="nothing to copy"):
        export_root(tmp_path / "new", tmp_path / "copy")


def test_what_a_disk_changed_on_the_way_is_found_before_the_copy_is_published(root, tmp_path):
    class LyingDisk(Disk):
        def rename(self, from_directory: int, name: str, to_directory: int, new_name: str) -> None:
            super().rename(from_directory, name, to_directory, new_name)
            path = tmp_path / "copy" / "objects" / new_name
            if path.exists():
                flip(path)

    with pytest.raises(CheckpointDamaged, match="other bytes"):
        export_root(root, tmp_path / "copy", disk=LyingDisk())
    assert not (tmp_path / "copy" / "FORMAT").exists() and not (tmp_path / "copy" / "CURRENT").exists()


def test_a_network_file_system_may_hold_a_copy_and_no_imported_root(root, tmp_path):
    class NetworkDisk(Disk):
        def file_system_type(self, directory: int) -> int:
            return 0x6969

    export_root(root, tmp_path / "copy", disk=NetworkDisk())
    with pytest.raises(CheckpointError, match="lies on NFS"):
        import_root(tmp_path / "copy", tmp_path / "back", disk=NetworkDisk())


# Doctor


def test_the_doctor_finds_a_local_disk_fit_and_leaves_nothing(tmp_path):
    diagnosis = examine(str(tmp_path))
    assert diagnosis.is_fit and diagnosis.free_bytes > 0
    assert {probe.name for probe in diagnosis.probes if probe.required} == {
        "local",
        "exclusive create",
        "lock",
        "rename",
        "link",
        "sync",
        "map",
    }
    assert os.listdir(tmp_path) == []
    assert json.loads(json.dumps(diagnosis.as_json()))["is_fit"] is True


@pytest.mark.parametrize(
    ("broken", "probe"),
    [
        ({"lock": lambda self, file, *, exclusive: True}, "lock"),
        ({"file_system_type": lambda self, directory: 0x65735546}, "local"),
        (
            {"create": lambda self, directory, name: os.open(name, os.O_RDWR | os.O_CREAT, dir_fd=directory)},
            "exclusive create",
        ),
    ],
)
def test_the_doctor_sees_a_promise_that_is_not_kept(tmp_path, broken, probe):
    diagnosis = examine(str(tmp_path), type("BrokenDisk", (Disk,), broken)())
    assert [found.name for found in diagnosis.probes if found.required and not found.holds] == [probe]
    assert not diagnosis.is_fit and os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("method", "probe"), [("link", "link"), ("sync_directory", "sync"), ("read_in", "map"), ("lock", "lock")]
)
def test_the_doctor_tells_the_systems_own_word_for_what_fails(tmp_path, method, probe):
    disk = FaultyDisk()
    disk.fail(method, errno.EOPNOTSUPP)
    found: dict[str, Any] = {one.name: one for one in examine(str(tmp_path), disk).probes}
    assert not found[probe].holds and found[probe].detail == os.strerror(errno.EOPNOTSUPP)


def test_the_doctor_of_an_absent_directory_says_so(tmp_path):
    with pytest.raises(CheckpointMissing):
        examine(str(tmp_path / "absent"))
