"""Pools of devices: which are taken, what tells them apart, and the locks that keep other runs away."""

import errno
import os
import subprocess
import sys

import pytest
import torch

import tasks.devices
from tasks.devices import Device, DeviceBusy, DevicePool

GPU = Device(0, "cuda", "Some GPU", "9.0", "11111111-2222-3333-4444-555555555555", "1320000000000", 80 * 2**30)
OTHER = Device(1, "cuda", "Some GPU", "9.0", "66666666-7777-8888-9999-000000000000", None, 80 * 2**30)


@pytest.fixture
def lock_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks.devices, "LOCK_DIRECTORIES", ("", "/nowhere", str(tmp_path)))
    return tmp_path


def test_auto_takes_every_gpu_or_else_one_cpu():
    pool = DevicePool.resolve("auto")
    gpus = torch.cuda.device_count()
    assert [str(device) for device in pool.devices] == [f"cuda:{i}" for i in range(gpus)] or ["cpu"]


def test_the_cpu_is_one_slot_for_each_time_it_is_named():
    pool = DevicePool.resolve(("cpu", "cpu"))
    assert len(pool) == 2
    assert [device.index for device in pool.devices] == [0, 1]
    assert {device.torch_device for device in pool.devices} == {torch.device("cpu")}
    for device in pool.devices:
        assert device.name and device.capability == torch.backends.cpu.get_cpu_capability()
        assert device.uuid is None and device.serial is None
        assert 2**28 < device.memory_bytes < 2**48


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ((), "no device is named"),
        (("cuda:99",), "`cuda:99` is not there"),
        (("gpu0",), "`gpu0` is not a device name"),
        (("cuda",), "`cuda` is not a device name"),
        (("cpu:0",), "`cpu:0` is not a device name"),
        (("cuda:01",), "`cuda:01` is not a device name"),
        (("cpu", "cuda:99"), "`cuda:99` is not there; the CPU can't be mixed with GPUs"),
    ],
)
def test_a_device_that_can_not_be_used_is_told_with_those_that_can(names, reason):
    with pytest.raises(ValueError, match=rf"can't be used: {reason}.*; visible are .*cpu$"):
        DevicePool.resolve(names)


def test_a_gpu_is_one_slot(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    with pytest.raises(ValueError, match=r"`cuda:1` is given 2 times.*visible are cuda:0 \(GPU 0\), cuda:1 \(GPU 1\)"):
        DevicePool.resolve(("cuda:1", "cuda:0", "cuda:1"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_told_by_uuid_model_and_capability():
    device = DevicePool.resolve(("cuda:0",)).devices[0]
    assert device.torch_device == torch.device("cuda:0")
    assert device.uuid and device.name == torch.cuda.get_device_name(0)
    assert device.capability == ".".join(map(str, torch.cuda.get_device_capability(0)))


def test_the_topology_names_what_a_resume_must_find_again_in_order():
    assert DevicePool((OTHER, GPU)).topology() == [
        {
            "type": "cuda",
            "index": 1,
            "name": "Some GPU",
            "capability": "9.0",
            "uuid": "66666666-7777-8888-9999-000000000000",
            "serial": None,
        },
        {
            "type": "cuda",
            "index": 0,
            "name": "Some GPU",
            "capability": "9.0",
            "uuid": "11111111-2222-3333-4444-555555555555",
            "serial": "1320000000000",
        },
    ]


def test_a_locked_gpu_is_refused_to_another_pool_and_free_afterwards(lock_directory):
    with DevicePool((GPU,)).lock("flow run 12 (`big gptq`)"):
        by = rf"by flow run 12 \(`big gptq`\) \(process {os.getpid()}\) on this host"
        with pytest.raises(DeviceBusy, match=rf"cuda:0 \(Some GPU, 1111.*\) is held {by}"):
            DevicePool((GPU,)).lock().__enter__()
        with DevicePool((OTHER,)).lock():
            pass
    with DevicePool((GPU,)).lock():
        pass


def test_a_pool_holds_all_of_its_gpus_or_none(lock_directory):
    with DevicePool((GPU,)).lock():
        with pytest.raises(DeviceBusy):
            DevicePool((OTHER, GPU)).lock().__enter__()
        with DevicePool((OTHER,)).lock():
            pass


def test_the_lock_of_a_killed_process_is_free(lock_directory):
    script = (
        "import sys, fcntl, os; descriptor = os.open(sys.argv[1], os.O_RDONLY | os.O_CREAT); "
        "fcntl.flock(descriptor, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    )
    path = lock_directory / f"prefect-quantize-{GPU.uuid}.lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", script, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        holder.stdout.readline()
        path.write_text('{"pid": 1, "run": "a run of last week"}')
        with pytest.raises(DeviceBusy, match=f"is held by process {holder.pid} on this host"):
            DevicePool((GPU,)).lock().__enter__()
        holder.kill()
        holder.wait()
        with DevicePool((GPU,)).lock():
            pass


@pytest.mark.parametrize("note", ["", "[]", "{", '{"pid": 1}'])
def test_a_note_that_says_nothing_leaves_the_kernels_word(lock_directory, note):
    with DevicePool((GPU,)).lock():
        (lock_directory / f"prefect-quantize-{GPU.uuid}.lock").write_text(note)
        with pytest.raises(DeviceBusy, match=f"is held by process {os.getpid()} on this host"):
            DevicePool((GPU,)).lock().__enter__()


def test_another_users_lock_file_is_locked_all_the_same_without_a_note(lock_directory, monkeypatch):
    path = lock_directory / f"prefect-quantize-{GPU.uuid}.lock"
    path.write_text("another user's")
    opened = os.open

    def refusing(path, flags, mode=0o777):
        if flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    with DevicePool((GPU,)).lock("mine"), pytest.raises(DeviceBusy, match=f"is held by process {os.getpid()} on"):
        DevicePool((GPU,)).lock().__enter__()
    monkeypatch.undo()
    assert path.read_text() == "another user's"


def test_the_cpu_is_shared(lock_directory):
    pool = DevicePool.resolve(("cpu", "cpu"))
    with pool.lock(), pool.lock():
        assert not list(lock_directory.iterdir())


def test_no_place_for_locks_is_told(monkeypatch):
    monkeypatch.setattr(tasks.devices, "LOCK_DIRECTORIES", ("", "/nowhere"))
    with pytest.raises(RuntimeError, match="no place for GPU locks: none of /nowhere is writable"):
        DevicePool((GPU,)).lock().__enter__()
