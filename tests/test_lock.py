"""One writer at a time, by the kernel's own lock."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from faulty_disk import FaultyDisk

from checkpoint_store.errors import CheckpointError, StoreLocked
from checkpoint_store.lock import ATTEMPT_NAME
from checkpoint_store.objects import BytesPayload
from checkpoint_store.store import CheckpointStore

PROJECT = Path(__file__).resolve().parent.parent
HOLD = """
import sys
from checkpoint_store.store import CheckpointStore
store = CheckpointStore.open(sys.argv[1], run_id="the other run")
store.scratch
print("held", flush=True)
sys.stdin.read()
"""


def holder(root: Path) -> subprocess.Popen[str]:
    """Another process that has the root open until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(root)], cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def attempts(root: Path) -> list[str]:
    return [name for name in os.listdir(root) if ATTEMPT_NAME.fullmatch(name)]


def test_a_second_process_is_refused_and_told_who_holds_the_root(tmp_path):
    process = holder(tmp_path / "root")
    try:
        with pytest.raises(StoreLocked) as caught:
            CheckpointStore.open(tmp_path / "root")
        assert f"process {process.pid}" in str(caught.value) and "the other run" in str(caught.value)
    finally:
        process.kill()
        process.communicate()


def test_the_lock_of_a_killed_process_is_free_and_its_attempt_is_swept(tmp_path):
    root = tmp_path / "root"
    process = holder(root)
    left = attempts(root)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (root / left[0] / "activations").mkdir()
    (root / left[0] / "activations" / "spilled").write_bytes(b"x")
    (root / left[0] / "link").symlink_to(tmp_path)
    with CheckpointStore.open(root) as store:
        assert store.sweep().attempts == 1
    assert len(left) == 1 and attempts(root) == []
    assert tmp_path.is_dir()


def test_a_stopped_process_keeps_the_lock_for_as_long_as_it_lives(tmp_path):
    process = holder(tmp_path / "root")
    try:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(StoreLocked):
            CheckpointStore.open(tmp_path / "root")
    finally:
        process.kill()
        process.communicate()


def test_a_root_is_not_opened_twice_in_one_process(tmp_path):
    with CheckpointStore.open(tmp_path), pytest.raises(StoreLocked, match="this process has"):
        CheckpointStore.open(tmp_path)
    CheckpointStore.open(tmp_path).close()


@pytest.mark.parametrize("content", [b"", b"not json", b"[1]", b"\xff\xfe", b'{"pid": 1}', b"[" * 4000])
def test_whatever_a_dead_holder_left_in_the_lock_file_blocks_nobody(tmp_path, content):
    CheckpointStore.open(tmp_path).close()
    (tmp_path / "writer.lock").write_bytes(content)
    with CheckpointStore.open(tmp_path, run_id="mine"):
        assert json.loads((tmp_path / "writer.lock").read_bytes())["run_id"] == "mine"
        (tmp_path / "writer.lock").write_bytes(content)
        with pytest.raises(StoreLocked):
            CheckpointStore.open(tmp_path)


def test_a_forked_child_neither_keeps_the_lock_nor_uses_the_store(tmp_path):
    store = CheckpointStore.open(tmp_path / "root")
    from_parent, to_child = os.pipe()
    from_child, to_parent = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            store.stage("record", "k", BytesPayload(b"from the child"))
            os.write(to_parent, b"the child wrote")
        except CheckpointError as error:
            os.write(to_parent, str(error).encode())
        store.close()
        os.close(to_child)
        os.read(from_parent, 1)  # lives on until the parent lets go
        os._exit(0)
    os.close(from_parent)
    assert b"a forked child may not use it" in os.read(from_child, 1000)
    with pytest.raises(StoreLocked):  # the child's close did not unlock the parent's
        CheckpointStore.open(tmp_path / "root")
    store.close()
    CheckpointStore.open(tmp_path / "root").close()  # and the child that lives on does not keep it locked
    os.close(to_child)
    os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("magic", "name"), [(0x6969, "NFS"), (0xFE534D42, "SMB2"), (0x65735546, "FUSE"), (0x0BD00BD0, "Lustre")]
)
def test_a_network_file_system_is_refused_unless_allowed_and_the_loss_is_told(tmp_path, magic, name):
    class NetworkDisk(FaultyDisk):
        def file_system_type(self, directory: int) -> int:
            return magic

    with pytest.raises(CheckpointError, match=f"lies on {name}.*progress could be lost"):
        CheckpointStore.open(tmp_path, disk=NetworkDisk())
    assert os.listdir(tmp_path) == []
    CheckpointStore.open(tmp_path, disk=NetworkDisk(), allow_network_filesystem=True).close()
    CheckpointStore.open(tmp_path, disk=NetworkDisk(), mode="read").close()


def test_a_full_disk_does_not_keep_the_operator_from_opening_the_root_to_sweep_it(tmp_path):
    CheckpointStore.open(tmp_path).close()
    disk = FaultyDisk()
    disk.fail("write", errno.ENOSPC)
    with CheckpointStore.open(tmp_path, disk=disk) as store:
        assert store.sweep().deferred is None


def test_the_attempt_directory_goes_with_its_run(tmp_path):
    with CheckpointStore.open(tmp_path) as store:
        scratch = store.scratch
        (scratch / "spilled").write_bytes(b"x")
        store.stage("record", "k", BytesPayload(b"x"))
        assert store.sweep().attempts == 0
        assert (scratch / "spilled").exists()
    assert attempts(tmp_path) == []
