"""What several test modules share: one Prefect server for the whole session, for the tests that ask for it."""

from collections.abc import Iterator

import pytest
from prefect.testing.utilities import prefect_test_harness


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """Prefect with a fresh database; the start-up takes half a minute on a busy machine."""
    with prefect_test_harness(server_startup_timeout=120):
        yield
