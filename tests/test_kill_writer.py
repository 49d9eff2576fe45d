"""A real writer on a real kernel: killed at every system call that matters, cut short, and run out of space.

A killed process loses nothing that it wrote; what these tests prove is that the order of the system calls is the one that
the crash model was shown, and that what a dead writer leaves behind stands in nobody's way.
"""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from saved_contents import contents, load, open_reader, open_writer, save, small_pages

from checkpoint_store.disk import Disk
from checkpoint_store.errors import StorageFull

SYSTEM_CALLS = ("openat", "write", "fsync", "/^rename", "unlinkat", "linkat", "mkdirat", "/^(close|flock|fallocate)$")

needs_strace = pytest.mark.skipif(
    shutil.which("strace") is None, reason="strace is not installed: no kill at a system call"
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="not root: cannot trace every process or mount a small tmpfs")


class Writer:
    """The process of `writer_process.py`."""

    def __init__(self, progress: Path) -> None:
        self.progress = progress
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("writer_process.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def start(self, root: Path, generations: int, file_size_limit: int = 0) -> int:
        """Process id of a writer that waits, stopped, for SIGCONT."""
        self.progress.write_bytes(b"\0\0")
        assert self.process.stdin is not None
        print(root, self.progress, generations, file_size_limit, file=self.process.stdin, flush=True)
        child = int(self._line())
        wait_until(lambda: "State:\tT" in Path(f"/proc/{child}/status").read_text())
        return child

    def end(self) -> str:
        """How the child ended."""
        return self._line().strip()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def told(self) -> tuple[int, int]:
        """The cursor that was being published, and the last one acknowledged."""
        attempted, acknowledged = self.progress.read_bytes()
        return attempted, acknowledged

    def close(self) -> str:
        assert self.process.stdin is not None and self.process.stderr is not None
        self.process.stdin.close()
        self.process.wait(10)
        return self.process.stderr.read()


def wait_until(is_true, seconds: float = 20.0) -> None:
    ends = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < ends, "waited in vain"
        time.sleep(0.002)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    process = Writer(tmp_path / "progress")
    yield process
    assert "Traceback" not in process.close()


def root_with(tmp_path: Path, cursor: int, name: str = "root") -> Path:
    root = tmp_path / name
    with small_pages(2):
        store = open_writer(Disk(), str(root))
        for following in range(1, cursor + 1):
            save(store, following)
        store.close()
    return root


def assert_goes_on(root: Path, acknowledged: int, attempted: int) -> None:
    """What is found is one of the two, whole; a reader sees the same; and the next generation can be published."""
    found: object = (0, {})
    if attempted or root.exists():  # else the writer was killed before it made the root
        reader = open_reader(Disk(), str(root))
        found = load(reader)
        reader.close()
    store = open_writer(Disk(), str(root))
    cursor, held = load(store)
    assert acknowledged <= cursor <= max(acknowledged, attempted)
    assert held == (contents(cursor) if cursor else {})
    assert found == (cursor, held)
    save(store, cursor + 1)
    store.close()
    store = open_writer(Disk(), str(root))
    assert load(store) == (cursor + 1, contents(cursor + 1))
    store.close()
    assert [name for name in os.listdir(root) if name.startswith("attempt-")] == [], "a dead writer's scratch stays"


@needs_strace
@needs_root
@pytest.mark.parametrize("call", SYSTEM_CALLS)
@pytest.mark.parametrize("published", [0, 2])
def test_a_kill_at_any_system_call_costs_at_most_the_generation_in_flight(
    call: str, published: int, writer: Writer, tmp_path: Path
):
    kills, ended = 0, ""
    pristine = root_with(tmp_path, published) if published else tmp_path / "missing"
    while ended != "0":
        root = tmp_path / f"root-{kills}"
        if published:
            shutil.copytree(pristine, root)
        child = writer.start(root, generations=1)
        tracer = subprocess.Popen(
            ["strace", "-f", "-qq", "-o", str(tmp_path / "trace"), "-p", str(child), "-e", f"trace={call}",
             "-e", f"inject={call}:signal=SIGKILL:when={kills + 1}"]
        )  # fmt: skip
        wait_until(lambda child=child: "TracerPid:\t0" not in Path(f"/proc/{child}/status").read_text())
        os.kill(child, signal.SIGCONT)
        ended = writer.end()
        tracer.wait(20)
        assert ended in ("0", "killed 9")
        attempted, acknowledged = writer.told()
        assert_goes_on(root, max(published, acknowledged), attempted)
        shutil.rmtree(root)
        kills += 1
    assert kills > 1, f"`{call}` was never called"
    print(f"{kills - 1} kills at {call}")


@pytest.mark.parametrize("limit", [1, 30, 100, 400, 900, 2000])
def test_a_file_size_limit_is_told_as_a_full_disk_and_costs_nothing_published(
    limit: int, writer: Writer, tmp_path: Path
):
    """RLIMIT_FSIZE makes writes short and then fail, as some full disks do."""
    root = root_with(tmp_path, 2)
    child = writer.start(root, generations=1, file_size_limit=limit)
    os.kill(child, signal.SIGCONT)
    ended = writer.end()
    attempted, acknowledged = writer.told()
    assert ended == ("0" if acknowledged else "3")
    assert_goes_on(root, max(2, acknowledged), attempted)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mounted = tmp_path / "small"
    mounted.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", mounted], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"cannot mount a small tmpfs: {made.stderr.strip()}")
    yield mounted
    subprocess.run(["umount", "--lazy", mounted], check=True)


class Overcommitted(Disk):
    """A disk that others fill after the store looked how much is free."""

    def free_bytes(self, directory: int) -> int:
        return 1 << 40


@needs_root
def test_a_full_disk_costs_nothing_published_and_the_run_goes_on_when_there_is_room(small_disk: Path):
    root, ballast = small_disk / "root", small_disk / "ballast"
    store = open_writer(Overcommitted(), str(root))
    save(store, 1)
    save(store, 2)
    store.close()
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        ballast.write_bytes(bytes(1 << 20))
    cursor, full, taken = 2, 0, ballast.stat().st_size
    while cursor < 4:  # each free page more stops the publish at a later step
        os.truncate(ballast, taken - 4096 * full)
        try:
            store = open_writer(Overcommitted(), str(root))
            assert load(store) == (cursor, contents(cursor))
            save(store, cursor + 1)
            cursor += 1
        except StorageFull as error:
            full += 1
            assert "no space is left" in str(error)
        store.close()
        reader = open_reader(Disk(), str(root))
        assert load(reader) == (cursor, contents(cursor))
        reader.close()
    assert full > 3, "the disk was hardly full"


def test_a_disk_without_room_for_an_object_is_told_before_the_work(tmp_path: Path):
    class Short(Disk):
        def free_bytes(self, directory: int) -> int:
            return 1 << 20

    store = open_writer(Short(), str(tmp_path / "root"))
    with pytest.raises(StorageFull, match="bytes free; what was published stays, make room and run again"):
        save(store, 1)
    store.close()
    assert_goes_on(tmp_path / "root", 0, 0)
