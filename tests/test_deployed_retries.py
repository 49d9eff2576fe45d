"""A run that ended badly is retried as an operator does it: the same flow run, a fresh process, nothing done twice."""

import os
import signal
from pathlib import Path

import pytest
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
    press_retry,
    read,
    slow_job,
    start,
    wait_for_log,
    wait_for_state,
    wait_until_final,
    wait_until_published,
    worker,
)
from tests.flow_jobs import contents

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("alone")]


def test_the_retry_button_goes_on_after_a_crash_and_after_a_failure_in_the_middle(
    server: PrefectServer, eight_layers: Path, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    """First the flow process is killed, then a shard of the source cannot be read; the job may not find a checkpoint."""
    job = slow_job(eight_layers, tmp_path, resume="never")
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
        shard = eight_layers / "model.safetensors"
        shard.rename(eight_layers / "away")
        try:
            assert wait_for_state(server, run, "Failed", "Completed").name == "Failed", server.log("worker")
        finally:
            (eight_layers / "away").rename(shard)
        after_failure = layers_published(job)
        assert 1 <= after_crash < after_failure < LAYERS
        press_retry(server, run)
        assert wait_for_state(server, run, "Completed", "Crashed").name == "Completed", server.log("worker")
    states = layer_states(server, run)
    assert states.count("Cached") == after_crash + after_failure
    assert states.count("Completed") == LAYERS
    assert contents(job.output) == undisturbed


def test_a_retry_of_another_run_does_not_get_past_never(
    server: PrefectServer, eight_layers: Path, tmp_path: Path
) -> None:
    job = slow_job(eight_layers, tmp_path, samples=6)
    assert finish(engine(server, start(server, job, state=Pending()))) == 0
    other = slow_job(eight_layers, tmp_path, samples=6, resume="never").model_copy(
        update={"output": str(tmp_path / "other")}
    )
    run = start(server, other, state=Pending())
    finish(engine(server, run))
    assert wait_until_final(server, run).name == "Failed"
    press_retry(server, run)
    finish(engine(server, run))
    state = read(server, run).state
    assert state is not None and state.name == "Failed" and "CheckpointExists" in str(state.message)
    assert history(server, run).count("Failed") == 2
