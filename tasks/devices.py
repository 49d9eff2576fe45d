"""The devices of a run, in order: resolved by name, told apart for the identity, held against other runs.

A pool is one kind of device: GPUs and the CPU round differently, and a layer's parts must not depend on where they ran.
"""

import fcntl
import json
import os
import platform
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pynvml
import torch

# The same for every user and session of the host first: a lock that another run can't see holds nothing.
LOCK_DIRECTORIES = ("/var/lock", os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp")
NOTE_LIMIT_BYTES = 4 << 10


class DeviceBusy(RuntimeError):
    """Another run on this host holds a GPU of the pool."""


@dataclass(frozen=True)
class Device:
    """One slot of a pool. `index` is torch's logical index of a GPU, or the number of a CPU slot."""

    index: int
    type: Literal["cuda", "cpu"]
    name: str
    capability: str  # compute capability of a GPU, widest vector instructions of a CPU
    uuid: str | None
    serial: str | None
    memory_bytes: int

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", self.index) if self.type == "cuda" else torch.device("cpu")

    def __str__(self) -> str:
        return str(self.torch_device)


@dataclass(frozen=True)
class DevicePool:
    """The devices a run computes on; their order is part of what a resume must find again."""

    devices: tuple[Device, ...]

    def __len__(self) -> int:
        return len(self.devices)

    @classmethod
    def resolve(cls, devices: Literal["auto"] | tuple[str, ...]) -> "DevicePool":
        """The pool for `auto` (every visible GPU, else one CPU) or names such as ("cuda:0", "cuda:1") or ("cpu", "cpu").

        Raises ValueError, with the visible devices, for names that are unknown, absent, given twice, or mixed.
        """
        gpu_count = torch.cuda.device_count()
        if devices == "auto":
            devices = tuple(f"cuda:{index}" for index in range(gpu_count)) or ("cpu",)
        problems = _problems(devices, gpu_count)
        if problems:
            visible = [*(f"cuda:{index} ({torch.cuda.get_device_name(index)})" for index in range(gpu_count)), "cpu"]
            raise ValueError(
                f"devices {','.join(devices) or '(none)'} can't be used: {'; '.join(problems)}; "
                f"visible are {', '.join(visible)}"
            )
        if devices[0] == "cpu":
            return cls(tuple(_cpu(slot) for slot in range(len(devices))))
        return cls(tuple(_gpu(int(name.removeprefix("cuda:"))) for name in devices))

    @contextmanager
    def lock(self, run: str = "a run") -> Iterator[None]:
        """Hold every GPU of the pool against other runs of this host, or none; the kernel lets go when we die.

        `run` is what others are told of the holder. CPU slots are not locked. Raises DeviceBusy, naming the GPU, who
        holds it and the lock.
        """
        with ExitStack() as held:
            for device in self.devices:
                if device.uuid is not None:
                    held.enter_context(_locked(device, _lock_directory() / f"prefect-quantize-{device.uuid}.lock", run))
            yield

    def topology(self) -> list[dict[str, Any]]:
        """The pool as JSON for the identity; `uuid` and `serial` are the physical leaves."""
        return [
            {
                "type": device.type,
                "index": device.index,
                "name": device.name,
                "capability": device.capability,
                "uuid": device.uuid,
                "serial": device.serial,
            }
            for device in self.devices
        ]


def _problems(names: tuple[str, ...], gpu_count: int) -> list[str]:
    problems = ["no device is named"] if not names else []
    for name in dict.fromkeys(names):
        if name == "cpu":
            continue
        if not re.fullmatch(r"cuda:(0|[1-9]\d*)", name):
            problems.append(f"`{name}` is not a device name (cpu, cuda:0, cuda:1, ...)")
        elif int(name.removeprefix("cuda:")) >= gpu_count:
            problems.append(f"`{name}` is not there")
        elif names.count(name) > 1:
            problems.append(f"`{name}` is given {names.count(name)} times: a GPU is one slot")
    if "cpu" in names and set(names) != {"cpu"}:
        problems.append("the CPU can't be mixed with GPUs: they round differently")
    return problems


def _cpu(slot: int) -> Device:
    capability = torch.backends.cpu.get_cpu_capability()
    return Device(slot, "cpu", _processor_name(), capability, None, None, _host_memory_bytes())


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(errors="replace"), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def _host_memory_bytes() -> int:
    """Memory this process may use: the machine's, or less where a container is limited."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if limit.exists() and (text := limit.read_text().strip()).isdigit():
            memory = min(memory, int(text))
    return memory


def _gpu(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    uuid = str(properties.uuid)
    return Device(
        index,
        "cuda",
        properties.name,
        f"{properties.major}.{properties.minor}",
        uuid,
        _serial(uuid),
        properties.total_memory,
    )


def _serial(uuid: str) -> str | None:
    """The board's serial number as NVML tells it; None for boards without one and for parts of a board (MIG)."""
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        serial = pynvml.nvmlDeviceGetSerial(handle)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
        return None
    finally:
        pynvml.nvmlShutdown()
    return serial.decode() if isinstance(serial, bytes) else str(serial)


def _lock_directory() -> Path:
    for directory in LOCK_DIRECTORIES:
        if directory and os.path.isdir(directory) and os.access(directory, os.W_OK | os.X_OK):
            return Path(directory)
    raise RuntimeError(f"no place for GPU locks: none of {', '.join(filter(None, LOCK_DIRECTORIES))} is writable")


@contextmanager
def _locked(device: Device, path: Path, run: str) -> Iterator[None]:
    descriptor = _open_lock(path)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DeviceBusy(
                f"{device} ({device.name}, {device.uuid}) is held by {_holder(descriptor)} on this host (lock `{path}`); "
                f"wait for it, or name other devices"
            ) from error
        _note_holder(descriptor, run)
        yield
    finally:
        os.close(descriptor)


def _open_lock(path: Path) -> int:
    """Descriptor of the lock file, to write where that is allowed: in it a holder says who it is."""
    # Created only when absent: in a sticky directory Linux refuses O_CREAT on another user's file.
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_RDWR)
    except FileNotFoundError:
        return os.open(path, flags | os.O_RDWR | os.O_CREAT, 0o644)
    except PermissionError:
        return os.open(path, flags | os.O_RDONLY)


def _note_holder(descriptor: int, run: str) -> None:
    # The lock holds without the note: another user's file, or a full disk, costs the name only.
    with suppress(OSError):
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "run": run}).encode(), 0)


def _holder(descriptor: int) -> str:
    """Who holds the lock: the process as the kernel tells it, and its note where that is of the same process."""
    pids = _lock_owners(os.fstat(descriptor).st_ino)
    try:
        note = json.loads(os.pread(descriptor, NOTE_LIMIT_BYTES, 0))
        if note["pid"] in pids:
            return f"{note['run']} (process {note['pid']})"
    except (ValueError, KeyError, TypeError):
        pass  # no note, or not of ours: what the kernel says is left
    return f"process {pids[0]}" if len(pids) == 1 else "another run"


def _lock_owners(inode: int) -> list[int]:
    """Processes with an flock on a file of this inode number; none where /proc does not show them."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return []
    # 1: FLOCK  ADVISORY  WRITE 4711 fd:01:131085 0 EOF
    fields = [line.split() for line in lines]
    return [int(line[4]) for line in fields if line[1] == "FLOCK" and line[5].rpartition(":")[2] == str(inode)]
