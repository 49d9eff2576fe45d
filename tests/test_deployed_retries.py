"""A run that ended badly is retried as an operator does it: the same flow run, a fresh process, nothing done twice."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.client.schemas.objects import State, StateType
from prefect.states import Pending

from tests.deployed import (
    LAYERS,
    PrefectServer,
    engine,
    finish,
    flow_process,
    history,
    layer_states,
    layers_published,
    nothing_left,
    prefect_server,
    read,
    slow_job,
    slow_model,
    start,
    wait_for_log,
    wait_for_state,
    wait_until_final,
    wait_until_published,
    worker,
)
from tests.flow_jobs import contents

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    with prefect_server(tmp_path_factory.mktemp("prefect")) as server:
        server.call("deploy", module="flows.cli")
        yield server


@pytest.fixture(autouse=True)
def alone(server: PrefectServer) -> Iterator[None]:
    with nothing_left(server):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return slow_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def undisturbed(server: PrefectServer, model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of the output of a run that never failed."""
    job = slow_job(model, tmp_path_factory.mktemp("undisturbed"))
    run = start(server, job, state=Pending())
    assert finish(engine(server, run)) == 0, server.log(str(run))
    return contents(job.output)


def press_retry(server: PrefectServer, run: object) -> None:
    """What the UI's button sends."""
    state = State(type=StateType.SCHEDULED, name="AwaitingRetry", message="Retry from the UI")
    with server.client() as client:
        answer = client.set_flow_run_state(run, state, force=False)  # type: ignore[arg-type]
    assert answer.status.value == "ACCEPT", answer


def test_the_retry_button_goes_on_after_a_crash_and_after_a_failure_in_the_middle(
    server: PrefectServer, model: Path, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    """First the flow process is killed, then a shard of the source cannot be read; the job may not find a checkpoint."""
    job = slow_job(model, tmp_path, resume="never")
    with worker(server) as running_worker:
        run = start(server, job)
        wait_until_published(job, 1, server)
        os.kill(flow_process(running_worker), signal.SIGKILL)
        assert wait_for_state(server, run, "Crashed", "Completed").name == "Crashed"
        # Until the worker too has seen the process go, it would make a retry Crashed once more.
        wait_for_log(server, "worker", "prefect.flow_runs.worker - Check whether the flow run exceeded")
        after_crash = layers_published(job)
        press_retry(server, run)
        wait_until_published(job, after_crash + 1, server)
        shard = model / "model.safetensors"
        shard.rename(model / "away")
        try:
            assert wait_for_state(server, run, "Failed", "Completed").name == "Failed", server.log("worker")
        finally:
            (model / "away").rename(shard)
        after_failure = layers_published(job)
        assert 1 <= after_crash < after_failure < LAYERS
        press_retry(server, run)
        assert wait_for_state(server, run, "Completed", "Crashed").name == "Completed", server.log("worker")
    states = layer_states(server, run)
    assert states.count("Cached") == after_crash + after_failure
    assert states.count("Completed") == LAYERS
    assert contents(job.output) == undisturbed


def test_a_retry_of_another_run_does_not_get_past_never(server: PrefectServer, model: Path, tmp_path: Path) -> None:
    job = slow_job(model, tmp_path, samples=6)
    assert finish(engine(server, start(server, job, state=Pending()))) == 0
    other = slow_job(model, tmp_path, samples=6, resume="never").model_copy(update={"output": str(tmp_path / "other")})
    run = start(server, other, state=Pending())
    finish(engine(server, run))
    assert wait_until_final(server, run).name == "Failed"
    press_retry(server, run)
    finish(engine(server, run))
    state = read(server, run).state
    assert state is not None and state.name == "Failed" and "CheckpointExists" in str(state.message)
    assert history(server, run).count("Failed") == 2
