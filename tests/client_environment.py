"""A virtual environment with another program that loads our exports, made once and reused while its pins stay.

It sees the test environment's packages (torch, transformers, safetensors: a gigabyte) behind its own, through a .pth file:
`--system-site-packages` would show the interpreter's, not those of the virtual environment that runs the tests. Only
what is missing there is installed, which takes half a minute and 100 MB.
"""

import fcntl
import hashlib
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import distributions
from pathlib import Path

from flows.demo_model import cache_directory

INSTALL_SECONDS = 900
REQUIREMENTS = Path(__file__).parent / "clients" / "requirements.txt"


def client_python(requirements: Path = REQUIREMENTS) -> Path:
    """The interpreter of the client environment, made first if there is none for these pins and this test environment.

    RuntimeError with pip's words when it can't be made. Concurrent callers wait for the first.
    """
    root = cache_directory() / "test-clients"
    root.mkdir(parents=True, exist_ok=True)
    directory = root / _key(requirements)
    python = directory / "bin" / "python"
    with open(root / f"{directory.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        finished = directory / "finished"
        if not finished.exists():
            shutil.rmtree(directory, ignore_errors=True)  # what a killed run left
            _make(directory, python, requirements)
            finished.touch()
        # Written each time: the same packages may lie in another place, when the test environment was made anew.
        _see_test_environment(directory)
    return python


def _key(requirements: Path) -> str:
    installed = sorted(f"{package.metadata['Name']}=={package.version}" for package in distributions())
    facts = [requirements.read_text(), sys.version, *installed]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def _make(directory: Path, python: Path, requirements: Path) -> None:
    _run([sys.executable, "-m", "venv", str(directory)])
    _see_test_environment(directory)  # pip then leaves out what is there in the pinned version
    _run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(requirements)])


def _see_test_environment(directory: Path) -> None:
    libraries = directory / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    paths = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    (libraries / "test_environment.pth").write_text("".join(f"{path}\n" for path in paths))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=INSTALL_SECONDS)
    if done.returncode:
        raise RuntimeError(
            f"the client environment could not be made; `{' '.join(command)}` ended with {done.returncode}:\n{done.stdout}"
        )
