"""What happens around a run that no code of the run can prevent: hosts die, servers restart, databases are lost."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from prefect.client.schemas.objects import StateType
from prefect.states import Pending, Scheduled

from deployments import host_crash
from tests.deployed import (
    LAYERS,
    PrefectServer,
    end,
    engine,
    finish,
    flow_process,
    halted,
    history,
    layer_states,
    layers_published,
    read,
    slow_job,
    start,
    wait_for_log,
    wait_for_state,
    wait_until,
    wait_until_final,
    wait_until_published,
    wait_until_staged,
    worker,
)
from tests.flow_jobs import contents

SILENCE_SECONDS = 60  # heartbeats come every 30 s
DEPLOY_OPTIONS = ("--silence", str(SILENCE_SECONDS))
pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.slow
def test_a_run_whose_host_died_is_brought_back_by_the_automation_and_finishes_unattended(
    server: PrefectServer, eight_layers: Path, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    job = slow_job(eight_layers, tmp_path, resume="never")
    with worker(server, "dies") as dying:
        run = start(server, job)
        wait_until_published(job, 1, server, "dies")
        end(dying, signal.SIGKILL)
    published = layers_published(job)
    assert published < LAYERS
    with worker(server, "lives"):
        assert wait_until_final(server, run).name == "Completed", server.log("lives")
    assert history(server, run).count("AwaitingRetry") == 1
    assert layer_states(server, run).count("Cached") == published
    assert contents(job.output) == undisturbed


@pytest.mark.slow
def test_a_false_alarm_starts_a_second_process_that_leaves_and_disturbs_nothing(
    server: PrefectServer, eight_layers: Path, tmp_path: Path
) -> None:
    job = slow_job(eight_layers, tmp_path, interval="layer:100")  # so that it is not halted while it sweeps
    run = start(server, job, state=Pending())
    living = engine(server, run)
    wait_until_staged(job, 2)
    with halted(living):
        action = host_crash.automation(SILENCE_SECONDS).actions[0]
        assert isinstance(action, host_crash.ChangeFlowRunState)
        with server.client() as client:
            alarm = Scheduled(name=action.name, message=action.message)
            client.set_flow_run_state(run, alarm, force=action.force)
        second = server.spawn("second", str(run), module="prefect.engine")
        waiting = wait_for_state(server, run, "WaitingForRoot")
        assert job.checkpoint.path in str(waiting.message)
        assert finish(second) == 0
        assert layers_published(job) < LAYERS
    assert finish(living) == 0
    assert wait_until_final(server, run).name == "Completed"
    assert not {"Failed", "Crashed"} & set(history(server, run))
    assert layer_states(server, run) == ["Completed"] * LAYERS
    assert Path(job.output, "quantization_report.json").is_file()


@pytest.mark.slow
def test_a_server_that_is_killed_while_a_layer_runs_and_comes_back_costs_nothing(
    server: PrefectServer, eight_layers: Path, tmp_path: Path
) -> None:
    job = slow_job(eight_layers, tmp_path, samples=400)
    run = start(server, job, state=Pending())
    process = engine(server, run)
    wait_until_published(job, 1, server, str(run))
    server.kill()
    published = layers_published(job)
    wait_until(lambda: layers_published(job) > published, lambda: "no layer is finished without the server")
    server.start()
    assert finish(process) == 0, server.log(str(run))
    assert wait_until_final(server, run).name == "Completed"
    log = server.log(str(run))
    assert [log.count(f"layer {layer + 1} of {LAYERS}: loss") for layer in range(LAYERS)] == [1] * LAYERS


@pytest.mark.slow
@pytest.mark.parametrize("outlives", [True, False])
def test_a_process_outlives_the_slot_that_a_restarted_server_has_forgotten(
    server: PrefectServer, outlives: bool
) -> None:
    """Prefect renews the lease when the run begins and minutes later; here the server never heard of it."""
    program = f"""
import time, uuid
from prefect.concurrency._leases import maintain_concurrency_lease
from flows import stopping
with maintain_concurrency_lease(uuid.uuid4(), 300, raise_on_lease_renewal_failure=True):
    {"stopping.outlive_a_lost_slot()" if outlives else "pass"}
    for _ in range(150):
        time.sleep(0.1)
print("lived to the end")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=server.environment, capture_output=True, text=True, timeout=120
    )
    assert "lease renewal failed" in done.stderr
    if outlives:
        assert (done.returncode, done.stdout) == (0, "lived to the end\n"), done.stderr
    else:
        assert done.returncode != 0 and "CancelledError" in done.stderr, "Prefect no longer needs the shield"


@pytest.mark.slow
def test_the_store_alone_decides_when_the_database_is_yesterdays_and_prefects_results_are_gone(
    server: PrefectServer, eight_layers: Path, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    database = server.home / "prefect.db"
    with sqlite3.connect(database) as live, sqlite3.connect(tmp_path / "yesterday.db") as copy:
        live.backup(copy)
    job = slow_job(eight_layers, tmp_path)
    run = start(server, job, state=Pending())
    process = engine(server, run)
    wait_until_published(job, 2, server, str(run))
    process.send_signal(signal.SIGTERM)
    assert finish(process) == 0
    published = layers_published(job)
    server.kill()
    for part in server.home.glob("prefect.db*"):
        part.unlink()
    shutil.copy(tmp_path / "yesterday.db", database)
    shutil.rmtree(server.home / "storage", ignore_errors=True)
    server.start()
    run = start(server, job, state=Pending())
    assert finish(engine(server, run)) == 0, server.log(str(run))
    assert layer_states(server, run) == ["Cached"] * published + ["Completed"] * (LAYERS - published)
    assert contents(job.output) == undisturbed


@pytest.mark.slow
def test_two_roots_run_side_by_side_and_a_second_run_on_one_root_waits_and_says_for_whom(
    server: PrefectServer, eight_layers: Path, tmp_path: Path
) -> None:
    first, beside = (slow_job(eight_layers, tmp_path / name, interval="layer:100") for name in ("first", "beside"))
    second = first.model_copy(update={"output": str(tmp_path / "second")})
    runs = [start(server, job, state=Pending()) for job in (first, beside, second)]
    holder, other = engine(server, runs[0]), engine(server, runs[1])
    wait_until_staged(first, 2)
    with halted(holder):  # it keeps its root for as long as the others take to start
        assert finish(other) == 0, server.log(str(runs[1]))
        assert finish(engine(server, runs[2])) == 0, server.log(str(runs[2]))
        state = read(server, runs[2]).state
        assert state is not None and state.name == "WaitingForRoot", server.log(str(runs[2]))
        assert first.checkpoint.path in str(state.message) and str(holder.pid) in str(state.message)
        assert layers_published(first) < LAYERS
    assert finish(holder) == 0
    assert finish(engine(server, runs[2])) == 0
    assert wait_until_final(server, runs[2]).name == "Completed"
    assert layer_states(server, runs[2]) == ["Cached"] * LAYERS


@pytest.mark.slow
def test_stopping_a_worker_as_its_service_does_loses_no_layer(
    server: PrefectServer, eight_layers: Path, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    job = slow_job(eight_layers, tmp_path, interval="layer:100")
    with worker(server, "stopped") as stopped:
        run = start(server, job)
        wait_for_log(server, "stopped", f"layer 1 of {LAYERS}: loss")
        flow = flow_process(stopped)
        os.kill(flow, signal.SIGSTOP)  # it must not be done before the command has started
        command = server.spawn(
            "stop", "--pool", "quantize", "--worker", str(stopped.pid), module="deployments.stop_worker"
        )
        wait_for_log(server, "stop", "were asked to stop")
        os.kill(flow, signal.SIGCONT)
        assert finish(command) == 0, server.log("stop")
        assert read(server, run).state_name in ("Checkpointed", "Late")
        published = layers_published(job)
        assert 1 <= published < LAYERS
        finish(stopped)  # the command has ended it
    assert "Crashed" not in history(server, run)
    server.call("work-pool", "resume", "quantize")
    with worker(server, "started"):
        assert wait_until_final(server, run).name == "Completed", server.log("started")
    assert layer_states(server, run).count("Cached") == published
    assert contents(job.output) == undisturbed


def test_the_automation_is_for_runs_of_this_project_that_are_silent(server: PrefectServer) -> None:
    registered = host_crash.automation(SILENCE_SECONDS)
    with server.client() as client:
        found = client.read_automations_by_name(host_crash.NAME)
    assert len(found) == 1 and found[0].enabled
    assert found[0].trigger.within.total_seconds() == SILENCE_SECONDS  # type: ignore[union-attr]
    action = registered.actions[0]
    assert isinstance(action, host_crash.ChangeFlowRunState) and action.state == StateType.SCHEDULED
