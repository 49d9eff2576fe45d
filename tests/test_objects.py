"""Objects: named by their hash, written once, believed only after the hash was made again."""

import errno
import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_disk import FaultyDisk

from checkpoint_store.disk import WRITE_VIEW_BYTES, Disk
from checkpoint_store.errors import CheckpointDamaged, CheckpointError
from checkpoint_store.objects import BytesPayload, Counters, ObjectRef, map_verified, verify_objects, write_object

BIG = os.urandom(1 << 20) * 9 + b"rest"


@pytest.fixture
def places(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Descriptors of an attempt directory and an object directory."""
    descriptors = []
    for name in ("attempt", "objects"):
        (tmp_path / name).mkdir()
        descriptors.append(os.open(tmp_path / name, os.O_RDONLY))
    yield descriptors[0], descriptors[1]
    for descriptor in descriptors:
        os.close(descriptor)


def written(
    places: tuple[int, int], data: bytes, disk: Disk | None = None, counters: Counters | None = None
) -> ObjectRef:
    disk, counters = disk or Disk(), counters or Counters()
    sha256, size = write_object(disk, places[0], "temporary", places[1], BytesPayload(data), counters)
    return ObjectRef("layer", "model.layers.0", sha256, size)


class Pieces:
    def __init__(self, pieces: list[bytes], size: int) -> None:
        self.pieces = pieces
        self.size = size

    def views(self) -> Iterator[memoryview]:
        yield from map(memoryview, self.pieces)


@pytest.mark.parametrize("data", [b"", b"x", BIG[:WRITE_VIEW_BYTES], BIG[: WRITE_VIEW_BYTES + 1], BIG])
def test_an_object_is_named_by_the_sha256_of_its_bytes_and_read_back_equal(places, tmp_path, data):
    counters = Counters()
    ref = written(places, data, counters=counters)
    assert ref.sha256 == hashlib.sha256(data).hexdigest()
    assert (tmp_path / "objects" / ref.sha256).read_bytes() == data
    assert map_verified(Disk(), places[1], ref, "root") == data
    assert (counters.bytes_written, counters.bytes_hashed) == (len(data), len(data))
    assert os.listdir(tmp_path / "attempt") == []


def test_pieces_are_written_and_hashed_in_order(places):
    payload = Pieces([b"first", b"", BIG, b"last"], 9 + len(BIG))
    sha256, size = write_object(Disk(), places[0], "temporary", places[1], payload, Counters())
    assert sha256 == hashlib.sha256(b"first" + BIG + b"last").hexdigest()
    assert size == payload.size


def test_a_large_object_is_hashed_in_a_second_thread_while_it_is_written(places):
    seen: set[str] = set()

    class WatchedDisk(Disk):
        def write(self, file: int, view: memoryview | bytes) -> None:
            seen.update(thread.name for thread in threading.enumerate())
            super().write(file, view)

    written(places, BIG, WatchedDisk())
    assert any(name.startswith("checkpoint-hash") for name in seen)


@pytest.mark.parametrize("promised", [3, 5])
def test_a_payload_of_another_size_than_promised_is_refused_and_leaves_nothing(places, tmp_path, promised):
    with pytest.raises(CheckpointError, match="changed while it was written"):
        write_object(Disk(), places[0], "temporary", places[1], Pieces([b"four"], promised), Counters())
    assert os.listdir(tmp_path / "attempt") == os.listdir(tmp_path / "objects") == []


def test_a_torn_file_under_the_right_name_is_written_over(places, tmp_path):
    torn = tmp_path / "objects" / hashlib.sha256(BIG).hexdigest()
    torn.write_bytes(BIG[:100])
    assert map_verified(Disk(), places[1], written(places, BIG), "root") == BIG


def test_a_new_object_is_private_to_its_owner(places, tmp_path):
    ref = written(places, b"private")
    assert (tmp_path / "objects" / ref.sha256).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("method", ["allocate", "write", "sync", "close", "rename"])
def test_a_failed_write_leaves_no_temporary_and_no_object(places, tmp_path, method):
    disk = FaultyDisk()
    disk.fail(method, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        written(places, BIG, disk)
    assert os.listdir(tmp_path / "attempt") == os.listdir(tmp_path / "objects") == []
    assert disk.calls.count("sync") <= 1


def test_damage_is_told_apart_with_the_file_and_what_it_belongs_to(places, tmp_path):
    ref = written(places, BIG)
    path = tmp_path / "objects" / ref.sha256

    def told() -> str:
        with pytest.raises(CheckpointDamaged) as caught:
            map_verified(Disk(), places[1], ref, "root")
        with pytest.raises(CheckpointDamaged):
            verify_objects(Disk(), places[1], [ref], "root", frozenset())
        assert f"root/objects/{ref.sha256}" in str(caught.value)
        return str(caught.value)

    path.write_bytes(BIG[:-1] + b"X")
    assert "model.layers.0" in told() and "other bytes" in told()
    path.write_bytes(BIG[:-1])
    assert f"{len(BIG) - 1} bytes instead of {len(BIG)}" in told()
    path.unlink()
    assert "missing" in told()
    path.mkdir()
    assert "not a regular file" in told()
    path.rmdir()
    os.mkfifo(path)
    assert "not a regular file" in told()
    path.unlink()
    (tmp_path / "elsewhere").write_bytes(BIG)
    path.symlink_to(tmp_path / "elsewhere")
    assert "symbolic link" in told()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.ENFILE, errno.ENOMEM])
@pytest.mark.parametrize("method", ["open_for_read", "map"])
def test_what_tells_nothing_about_the_bytes_is_no_damage(places, number, method):
    ref, disk = written(places, b"whole"), FaultyDisk()
    disk.fail(method, number)
    with pytest.raises(CheckpointError) as caught:
        map_verified(disk, places[1], ref, "root")
    assert not isinstance(caught.value, CheckpointDamaged)
    assert os.strerror(number) in str(caught.value)


def test_a_read_error_in_a_mapping_is_damage_and_not_the_end_of_the_process(places, tmp_path):
    ref = written(places, BIG)

    class ShrinkingDisk(Disk):
        """Pages behind the end of a file give the error that a bad sector gives."""

        def map(self, file: int, size: int) -> memoryview:
            view = super().map(file, size)
            os.truncate(tmp_path / "objects" / ref.sha256, 4096)
            return view

    if tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2]) < (5, 14):
        pytest.skip("kernels before 5.14 have no MADV_POPULATE_READ")
    with pytest.raises(CheckpointDamaged, match="could not read it"):
        map_verified(ShrinkingDisk(), places[1], ref, "root")


def test_writing_through_a_view_changes_neither_the_file_nor_the_process(places, tmp_path):
    ref = written(places, b"as it was")
    view = map_verified(Disk(), places[1], ref, "root")
    view[0:2] = b"XX"
    assert (tmp_path / "objects" / ref.sha256).read_bytes() == b"as it was"
    assert map_verified(Disk(), places[1], ref, "root") == b"as it was"


def test_many_large_objects_are_verified_side_by_side_and_only_the_asked_ones_stay_mapped(places, tmp_path):
    refs = [written(places, bytes([index]) + BIG) for index in range(8)]
    kept = ObjectRef("continuation", "hidden.00000", refs[0].sha256, refs[0].size)
    views = verify_objects(Disk(), places[1], [*refs, kept], "root", frozenset({"continuation"}))
    assert list(views) == [kept.sha256]
    path = tmp_path / "objects" / refs[5].sha256
    path.write_bytes(b"\xff" + path.read_bytes()[1:])
    with pytest.raises(CheckpointDamaged, match=refs[5].sha256):
        verify_objects(Disk(), places[1], refs, "root", frozenset())
