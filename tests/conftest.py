"""What several test modules share: one Prefect server for the whole session, for the tests that ask for it."""

import os
import signal
from collections.abc import Iterator

import pytest
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


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """Prefect with a fresh database; the start-up takes half a minute on a busy machine."""
    with prefect_test_harness(server_startup_timeout=120):
        yield
