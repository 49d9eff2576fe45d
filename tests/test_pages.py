"""Pages of names: what goes into them, what they cost, and that a generation needs them as it needs its objects."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_disk import UnsyncedDisk
from saved_contents import small_pages
from test_session import LAYERS, Run, finish, publish
from test_store import IDENTITY, accept, contents, expected, files, flip, manifest_of, publish_layers, retained

from checkpoint_store.errors import CheckpointDamaged, CheckpointError
from checkpoint_store.generations import Manifest, encode_manifest
from checkpoint_store.maintenance import status, sweep, verify
from checkpoint_store.objects import BytesPayload, ObjectRef
from checkpoint_store.pages import PAGE_OBJECTS, Page, encode_page
from checkpoint_store.published import Generation
from checkpoint_store.recovery import candidates, recover
from checkpoint_store.store import CheckpointStore
from checkpoint_store.transfer import export_root

GOLDEN = Path(__file__).with_name("golden") / "checkpoint_v1.json"


@pytest.fixture(autouse=True)
def pages_of_two_names() -> Iterator[None]:
    with small_pages(2):
        yield


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Generations 2 and 3, of two and three finished layers: the older one has a page, the newer one that and another."""
    path = tmp_path / "root"
    with CheckpointStore.open(path) as store:
        publish_layers(store, 0, 3)
    return path


def manifest(root: Path, gen: int) -> dict[str, Any]:
    return dict(json.loads(manifest_of(root, gen).read_bytes()))


def page_of(root: Path, gen: int, index: int) -> Path:
    return root / "objects" / manifest(root, gen)["pages"][index]["sha256"]


def keys_in(page: Path) -> list[str]:
    return [ref["key"] for ref in json.loads(page.read_bytes())["objects"]]


# What is in a page


def test_the_bytes_of_a_page_and_of_a_manifest_that_names_it_are_fixed():
    layer = ObjectRef("layer", "model.layers.0", "a" * 64, 7)
    raw = encode_page((layer,))
    named = b'[{"key":"model.layers.0","role":"layer","sha256":"' + b"a" * 64 + b'","size":7}]'
    assert raw == b'{"objects":' + named + b"}"
    page = Page(ObjectRef("page", "00000", hashlib.sha256(raw).hexdigest(), len(raw)), (layer,))
    _, encoded = encode_manifest(Manifest(3, None, {}, 1, 2, (), None, "2026-01-01T00:00:00Z", (page,)))
    assert encoded == (
        b'{"created_utc":"2026-01-01T00:00:00Z","cursor":1,"gen":3,"identity":{},"layer_count":2,"min_reader":2,'
        b'"objects":[],"pages":[{"sha256":"%s","size":%d}],"parent":null,"run_id":null,"v":2}'
        % (page.ref.sha256.encode(), len(raw))
    )


def test_names_go_into_a_page_one_publish_after_they_came_and_the_continuation_never_does(root):
    assert keys_in(page_of(root, 2, 0)) == ["layers.0", "key0"]
    assert page_of(root, 3, 0) == page_of(root, 2, 0)
    assert keys_in(page_of(root, 3, 1)) == ["layers.1", "key1"]
    assert [ref["key"] for ref in manifest(root, 3)["objects"]] == ["layers.2", "key2", "hidden.00000"]
    assert contents(root) == expected(3)


def test_a_page_is_written_once_and_only_named_again_from_then_on(root):
    inode = page_of(root, 3, 0).stat().st_ino
    with CheckpointStore.open(root) as store:
        publish_layers(store, 3, 6)
    assert page_of(root, 6, 0).stat().st_ino == inode
    assert [keys_in(page_of(root, 6, index))[0] for index in range(5)] == [f"layers.{layer}" for layer in range(5)]
    assert contents(root) == expected(6) and verify(root).is_whole


def test_a_manifest_without_pages_is_one_of_version_1_and_one_with_pages_says_2(root):
    with small_pages(PAGE_OBJECTS), CheckpointStore.open(root.with_name("other")) as store:
        publish_layers(store, 0, 3)
    for path, version in ((root.with_name("other"), 1), (root, 2)):
        newest = manifest(path, 3)
        assert newest["v"] == newest["min_reader"] == version and ("pages" in newest) == (version == 2)


def test_names_too_long_for_a_page_stay_in_the_manifest(tmp_path):
    with CheckpointStore.open(tmp_path) as store:
        refs = [store.stage("record", letter * (1 << 20), BytesPayload(b"x")) for letter in "ab"]
        store.publish(IDENTITY, 0, 9, refs)
        store.publish(IDENTITY, 0, 9, [], kept=2)
        assert store.generations()[0].objects == tuple(refs)
    assert "pages" not in manifest(tmp_path, 2)


# What a generation keeps


def test_a_page_of_which_a_name_is_gone_is_dissolved_and_those_behind_it_too(root):
    with CheckpointStore.open(root) as store:
        publish_layers(store, 3, 4)
        objects = store.generations()[0].objects
        old = {page_of(root, 4, index).name for index in (1, 2)}
        first = page_of(root, 4, 0).name
        store.publish(IDENTITY, 4, 300, objects[3:], kept=2)  # without layers.1, the first name of the second page
        assert store.generations()[0].objects == (*objects[:2], *objects[3:])
        assert [page["sha256"] for page in manifest(root, 5)["pages"]] == [first]
        store.publish(IDENTITY, 4, 300, [], kept=len(objects) - 1)
        assert store.generations()[0].objects == (*objects[:2], *objects[3:])
        assert old.isdisjoint(files(root)) and first in files(root), "what no listed generation names is swept"
        assert files(root) == retained(root)
    assert verify(root).is_whole


@pytest.mark.parametrize("kept", [1, 3])
def test_what_is_kept_may_end_within_a_page(root, kept):
    with CheckpointStore.open(root) as store:
        pinned = store.pin(accept)
        assert pinned is not None
        store.publish(IDENTITY, 3, 300, pinned.objects[kept:], kept=kept)
        assert store.generations()[0].objects == pinned.objects
    assert contents(root) == expected(3)


@pytest.mark.parametrize("kept", [-1, 8])
def test_no_more_can_be_kept_than_there_is(root, kept):
    with CheckpointStore.open(root) as store:
        store.pin(accept)
        with pytest.raises(CheckpointError, match=rf"cannot keep {kept} objects .* that has 7"):
            store.publish(IDENTITY, 3, 300, [], kept=kept)
        publish_layers(store, 3, 4)  # a refusal poisons nothing
    assert contents(root) == expected(4)


@pytest.mark.parametrize("key", ["layers.0", "layers.2", "twice"])
def test_a_name_that_is_taken_is_refused_since_no_reader_would_take_the_generation(root, key):
    with CheckpointStore.open(root) as store:
        store.pin(accept)
        again = [store.stage("layer", key, BytesPayload(data)) for data in (b"one", b"two")]
        with pytest.raises(CheckpointError, match=f"two objects under one name: layer {key}(, layer {key})?$"):
            other = store.stage("layer", "another", BytesPayload(b"other"))
            store.publish(IDENTITY, 3, 300, [*again[: 1 + (key == "twice")], other], kept=6)
    assert contents(root) == expected(3)


def test_pages_are_swept_with_the_last_generation_that_names_them(root):
    with CheckpointStore.open(root) as store:
        publish_layers(store, 3, 5)
        for _ in range(2):
            store.publish(IDENTITY, 5, 300, [store.stage("record", "all anew", BytesPayload(b"x"))])
        assert files(root) == retained(root) and len(files(root)) == 3
    with CheckpointStore.open(root) as store:
        publish_layers(store, 0, 5)
    assert sweep(root).objects == 0 and files(root) == retained(root)


# What it costs


def test_the_metadata_of_a_publish_is_bounded_at_layer_1_and_at_layer_1000(tmp_path):
    """Less than a page of names, a page now and then, and 90 bytes for each page there is."""
    written: list[int] = []
    with small_pages(PAGE_OBJECTS), CheckpointStore.open(tmp_path, disk=UnsyncedDisk()) as store:
        for layer in range(1000):
            before = store.counters.metadata_bytes_written
            refs = [
                store.stage(role, f"{role}.{layer:04d}", BytesPayload(b"%s %04d" % (role.encode(), layer)))
                for role in ("layer", "record")
            ]
            store.publish(IDENTITY, layer + 1, 1000, refs, kept=2 * layer)
            written.append(store.counters.metadata_bytes_written - before)
        assert store.counters.bytes_written == 1000 * (len("layer 0000") + len("record 0000"))
    name = len(refs[1].encoded) + 1
    most, fewest = (PAGE_OBJECTS + 2) * name + 1000, 2 * name
    cycle = PAGE_OBJECTS // 2
    for first in (0, 200, 1000 - cycle):
        of_pages = 100 * (first + cycle) * 2 // PAGE_OBJECTS
        pages = sorted(written[first : first + cycle])
        assert fewest < pages[0] and pages[-2] < most + of_pages, "a manifest and CURRENT"
        assert pages[-1] < most + of_pages + PAGE_OBJECTS * name, "and a page"
    mean = [sum(written[first : first + cycle]) / cycle for first in (32, 192, 960)]
    assert mean[1] - mean[0] < 100 * 5 and mean[2] - mean[0] < 100 * 29, "some 90 bytes for each page more"


@pytest.mark.parametrize(
    ("role", "cursor", "message"),
    [("page", 3, "reserved"), ("Layer", 3, "no role"), ("layer", 301, "301 finished layers of 300")],
)
def test_what_no_reader_would_take_is_not_published(root, role, cursor, message):
    with CheckpointStore.open(root) as store:
        store.pin(accept)
        object_ = store.stage(role, "new", BytesPayload(b"new"))
        with pytest.raises(CheckpointError, match=message):
            store.publish(IDENTITY, cursor, 300, [object_], kept=6)
    assert contents(root) == expected(3)


def test_a_session_looks_only_at_the_names_that_are_new(tmp_path, monkeypatch):
    run = Run(tmp_path / "root")
    with run.open() as session:
        for layer in range(3):
            finish(session, layer)
            publish(session, layer + 1)
            # All names of a generation, one by one: never needed while a run goes on.
            monkeypatch.setattr(Generation, "objects", property(lambda generation: pytest.fail("looked at all names")))
        monkeypatch.undo()
        assert list(session._staged) == []
        assert [ref.key for ref in session.layer_objects()] == ["layers.0", "layers.1", "layers.2"]
    newest = manifest(run.root, 3)
    assert len(newest["pages"]) == 2 and len(newest["objects"]) == 2 + 2


def test_a_resumed_session_keeps_the_pages_and_one_that_stages_a_layer_anew_dissolves_them(tmp_path):
    run = Run(tmp_path / "root")
    with run.open() as session:
        for layer in range(2):
            finish(session, layer)
            publish(session, layer + 1)
    with run.open() as session:
        finish(session, 2)
        publish(session, 3)
        assert manifest(run.root, 3)["pages"][0] == manifest(run.root, 2)["pages"][0]
        session.stage_layer("layers.0", BytesPayload(b"packed anew"))
        publish(session, 3)
        assert [bytes(session.view(ref)) for ref in session.layer_objects()] == [
            b"packed anew",
            b"packed 1",
            b"packed 2",
        ]
        assert "pages" not in manifest(run.root, 4)
        finish(session, 3)
        publish(session, 4)
    with run.open() as session:
        assert session.cursor == 4 and bytes(session.view(session.layer_objects()[0])) == b"packed anew"
        assert [session.record(f"key{layer}") for layer in range(4)] == [b"record %d" % layer for layer in range(4)]
    assert verify(run.root).is_whole


def test_a_session_that_fell_back_goes_on_from_the_pages_of_the_older_generation(tmp_path):
    run = Run(tmp_path / "root")
    with run.open() as session:
        for layer in range(3):
            finish(session, layer)
            publish(session, layer + 1)
    page_of(run.root, 3, 1).unlink()
    first = manifest(run.root, 2)["pages"][0]
    with run.open() as session:
        assert session.cursor == 2
        for layer in (2, 3):
            finish(session, layer)
            publish(session, layer + 1)
        assert manifest(run.root, 5)["pages"][0] == first
    with run.open() as session:
        assert session.cursor == 4
        assert [session.record(f"key{layer}") for layer in range(4)] == [b"record %d" % layer for layer in range(4)]
    assert verify(run.root).is_whole


# Damage


DAMAGE = [flip, Path.unlink, lambda page: page.write_bytes(b"")]


@pytest.mark.parametrize("damage", DAMAGE, ids=["flipped", "missing", "empty"])
def test_a_damaged_page_is_damage_of_its_generation_and_is_written_anew_by_the_next(root, caplog, damage):
    page = page_of(root, 3, 1)
    damage(page)
    assert contents(root) == expected(2)
    assert f"generation 3 is damaged: `{page}`" in caplog.text
    with CheckpointStore.open(root) as store:
        publish_layers(store, 2, 3)
        assert page_of(root, 4, 1) == page
    assert contents(root) == expected(3)


def test_a_damaged_page_of_every_generation_is_told_and_nothing_is_deleted(root):
    flip(page_of(root, 2, 0))
    before = files(root)
    with CheckpointStore.open(root) as store:
        with pytest.raises(CheckpointDamaged, match=r"generation 3: .*\(page 00000\) has other bytes.*generation 2: "):
            store.pin(accept)
        deferred = store.sweep().deferred
        assert deferred is not None and "page 00000" in deferred
    assert files(root) == before


def test_status_counts_pages_and_tells_of_a_damaged_one(root):
    told = status(root)
    assert [found["objects"] for found in told["generations"]] == [9, 6]
    assert told["referenced"] == told["stored"] and told["referenced"]["objects"] == len(files(root)) - 2
    page_of(root, 3, 1).unlink()
    told = status(root)
    assert "missing" in told["generations"][0]["problem"] and told["generations"][1]["problem"] is None
    assert told["cursor"] == 2


def test_a_scrub_reads_each_page_once_and_goes_on_behind_a_damaged_one_and_sets_it_aside(root):
    report = verify(root)
    stored = status(root)["stored"]
    assert report.is_whole and (report.objects, report.bytes) == (stored["objects"], stored["bytes"])
    page = page_of(root, 3, 1)
    flip(page)
    flip(root / "objects" / manifest(root, 3)["objects"][2]["sha256"])
    report = verify(root, quarantine=True)
    assert [found["is_whole"] for found in report.generations] == [False, True]
    assert len(report.problems) == 2 and "page 00001" in report.problems[0] and "hidden.00000" in report.problems[1]
    assert any(path.startswith(f"quarantine/{page.name}.") for path in report.quarantined) and not page.exists()
    assert manifest_of(root, 3).exists()
    assert contents(root) == expected(2)


def test_an_exported_root_has_its_pages_and_leaves_out_a_generation_without(root, tmp_path):
    export_root(root, tmp_path / "copy")
    assert files(tmp_path / "copy") == files(root) and contents(tmp_path / "copy") == expected(3)
    assert verify(tmp_path / "copy").is_whole
    flip(page_of(root, 3, 1))
    report = export_root(root, tmp_path / "older")
    assert report.generations == [2] and "page 00001" in report.left_out[0]
    assert contents(tmp_path / "older") == expected(2)


def test_recovery_lists_a_generation_without_its_page_and_publishes_only_a_whole_one(root):
    page = page_of(root, 3, 1)
    flip(page)
    for name in ("CURRENT", "CURRENT.prev"):
        (root / name).unlink()
    newest, older = candidates(root)
    assert (newest.cursor, older.cursor) == (3, 2)
    assert newest.problem is not None and "page 00001" in newest.problem and older.problem is None
    with pytest.raises(CheckpointDamaged, match=f"cannot be published: .*{page.name}"):
        recover(root, newest.manifest)
    recover(root, older.manifest)
    assert contents(root) == expected(2)


# Roots of version 1


@pytest.fixture
def old_root(tmp_path: Path) -> Path:
    """Three of four layers, published by the program that knew no pages."""
    root = tmp_path / "old"
    for name, text in json.loads(GOLDEN.read_text()).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_root_of_version_1_is_read_verified_and_copied_as_it_is(old_root, tmp_path):
    assert [manifest(old_root, gen)["v"] for gen in (2, 3)] == [1, 1]
    assert verify(old_root).is_whole
    assert [found["cursor"] for found in status(old_root)["generations"]] == [3, 2]
    assert export_root(old_root, tmp_path / "copy").generations == [3, 2]
    assert {path.name: path.read_bytes() for path in (tmp_path / "copy" / "generations").iterdir()} == {
        path.name: path.read_bytes() for path in (old_root / "generations").iterdir()
    }


def test_a_root_of_version_1_is_finished_with_pages(old_root):
    run = Run(old_root)
    with run.open() as session:
        assert session.cursor == 3
        finish(session, 3)
        publish(session, LAYERS)
        assert [ref.key for ref in session.layer_objects()] == [f"layers.{layer}" for layer in range(4)]
    assert len(manifest(old_root, 4)["pages"]) == 3
    with run.open() as session:
        assert session.cursor == 4
        assert [bytes(session.view(ref)) for ref in session.layer_objects()] == [b"packed %d" % n for n in range(4)]
    assert verify(old_root).is_whole
