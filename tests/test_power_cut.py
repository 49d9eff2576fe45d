"""A real file system after a power cut: what its block device holds at every step of a writer, mounted again.

The root lies on ext4 on a loop device. After each system call of the writer the backing file is copied: everything that
the kernel has handed to the device is in the copy, everything that is still in its caches is not. Each copy is mounted,
which replays the journal, and must hold what was acknowledged by then. The mount options are the ones that keep the
fewest promises beyond POSIX: no data ordering, no rescue of a file that is renamed before it was synced. What a device may
reorder between two flushes is for the crash model in test_crash.py.
"""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from saved_contents import contents, load, open_reader, open_writer, save, small_pages

from checkpoint_store.disk import Disk

CHANGES = {"make_root", "make_directory", "create", "allocate", "write", "truncate", "sync", "sync_directory"}
CHANGES |= {"close", "rename", "link", "unlink", "remove_directory", "lock"}
GENERATIONS = 4
OPTIONS = "data=writeback,noauto_da_alloc,commit=600,errors=remount-ro"

Tell = Callable[[], None]


@pytest.fixture(autouse=True)
def pages_of_two_names() -> Iterator[None]:
    """So that the third and the fourth generation write one each."""
    with small_pages(2):
        yield


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


@contextmanager
def mounted(image: Path, at: Path) -> Iterator[Path]:
    at.mkdir(exist_ok=True)
    run("mount", "-o", f"loop,{OPTIONS}", image, at)
    try:
        yield at
    finally:
        run("umount", at)


@pytest.fixture(scope="module")
def empty_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    image = tmp_path_factory.mktemp("device") / "ext4.img"
    image.touch()
    os.truncate(image, 6 << 20)
    options = ("-b", "1024", "-E", "lazy_itable_init=0,lazy_journal_init=0", "-J", "size=1", "-m", "0")
    try:
        run("mkfs.ext4", "-q", *options, image)
        with mounted(image, image.with_suffix(".mount")):
            pass
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting ext4 on a loop device takes root, loop devices and e2fsprogs ({error})")
    return image


class ToldDisk(Disk):
    """The real disk; `after` is called after each call that may change something. Calls named in `without` do nothing."""

    def __init__(self, after: Tell, without: tuple[str, ...] = ()) -> None:
        self._after, self._without = after, without

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if name not in CHANGES:
            return method

        def call(*arguments: Any, **options: Any) -> Any:
            result = None if name in self._without else method(*arguments, **options)
            self._after()
            return result

        return call


class Power:
    """The states in which a power cut would have left the device so far, each with the cursors it must lie between."""

    def __init__(self, image: Path, kept: Path) -> None:
        self.image, self.kept = image, kept
        self.acknowledged = self.attempted = 0
        self.states: dict[str, tuple[Path, int, int]] = {}

    def cut(self) -> None:
        copy = self.kept / "copy"
        shutil.copyfile(self.image, copy)
        with copy.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        _, _, attempted = self.states.get(digest, (None, 0, 0))
        # One state may stand for many moments: it must hold what was acknowledged at the last of them.
        path = copy.rename(self.kept / f"{digest[:16]}.img")
        self.states[digest] = (path, self.acknowledged, max(attempted, self.attempted))


def published(power: Power, root: Path, without: tuple[str, ...] = ()) -> None:
    """Two writers, one after the other, publish the generations of a history."""
    for first in (1, GENERATIONS // 2 + 1):
        with open_writer(ToldDisk(power.cut, without), str(root)) as store:
            load(store)
            for cursor in range(first, first + GENERATIONS // 2):
                power.attempted = cursor
                save(store, cursor)
                power.acknowledged = cursor
                power.cut()


def history(empty_image: Path, tmp_path: Path, without: tuple[str, ...] = ()) -> Power:
    image, kept = tmp_path / "device.img", tmp_path / "kept"
    shutil.copyfile(empty_image, image)
    kept.mkdir()
    power = Power(image, kept)
    with mounted(image, tmp_path / "live") as live:
        published(power, live / "root", without)
    return power


def test_what_was_acknowledged_survives_a_power_cut_at_every_step(empty_image: Path, tmp_path: Path) -> None:
    power = history(empty_image, tmp_path)
    assert len(power.states) > 8 * GENERATIONS, "the device hardly changed: nothing was tried"
    for path, acknowledged, attempted in power.states.values():
        with mounted(path, tmp_path / "after") as after:
            root = after / "root"
            cursor = 0
            if root.exists():
                with open_writer(Disk(), str(root)) as store:
                    cursor, found = load(store)
                    assert found == (contents(cursor) if cursor else {})
                    save(store, cursor + 1)
                with open_reader(Disk(), str(root)) as store:
                    assert load(store) == (cursor + 1, contents(cursor + 1))
            assert acknowledged <= cursor <= attempted
        path.unlink()


@pytest.mark.parametrize("without", [("sync",), ("sync_directory",), ("sync", "sync_directory")])
def test_a_writer_that_leaves_out_a_sync_is_caught(empty_image: Path, tmp_path: Path, without: tuple[str, ...]) -> None:
    power = history(empty_image, tmp_path, without)
    lost = 0
    for path, acknowledged, _ in power.states.values():
        with mounted(path, tmp_path / "after") as after:
            try:
                with open_reader(Disk(), str(after / "root")) as store:
                    lost += load(store)[0] < acknowledged
            except Exception:
                lost += acknowledged > 0
        path.unlink()
    assert lost
