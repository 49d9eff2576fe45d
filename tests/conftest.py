"""What several test modules share: one Prefect server for each process of tests that asks for one, and what keeps several
processes (`pytest -n 2`) out of each other's way.
"""

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch and Prefect are imported, which read these once
    # Together the workers compute with as many threads as there are cores, and so do the processes that they start.
    threads = max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="prefect-home-")
    atexit.register(shutil.rmtree, os.environ["PREFECT_HOME"], ignore_errors=True)

from hypothesis import settings
from prefect.testing.utilities import prefect_test_harness

pytest_plugins = ["tests.deployed"]

# Neither the tests nor the servers that they start send usage data.
os.environ |= {"DO_NOT_TRACK": "1", "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}

# A job that a shell put into the background ignores SIGINT, and so would every process that the tests start and stop.
signal.signal(signal.SIGINT, signal.default_int_handler)

# `ci` tries the same examples every time and takes as long as the machine does; `deep` looks for new ones.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("deep", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of `pytest -n 2`: a module's tests stay together, since they share servers and runs; modules in the order below."""
    from xdist.scheduler import LoadFileScheduling

    if config.option.dist != "load":  # another way was asked for
        return None
    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules with slow tests come first: one of minutes that began last would leave the other workers idle."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """Prefect with a fresh database; the start-up takes ten seconds, and minutes on a busy machine."""
    with prefect_test_harness(server_startup_timeout=300):
        yield
