"""What several test modules share: one Prefect server for the whole session, for the tests that ask for it."""

import os
from collections.abc import Iterator

import pytest
from prefect.testing.utilities import prefect_test_harness

# Neither the tests nor the servers that they start send usage data.
os.environ |= {"DO_NOT_TRACK": "1", "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """Prefect with a fresh database; the start-up takes half a minute on a busy machine."""
    with prefect_test_harness(server_startup_timeout=120):
        yield
