"""Stopping a deployed run in every way there is, on a real server: how it ends, what is published, and that it goes on.

Jobs publish after the last layer only, so that whatever is published before it was published because of the stop.
"""

import os
import signal
import time
from pathlib import Path
from uuid import UUID

import pytest
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.states import Pending, Suspended

from tasks.quantization import RTNConfig
from tests.deployed import (
    LAYERS,
    PrefectServer,
    descendants,
    end,
    engine,
    finish,
    flow_process,
    history,
    layer_states,
    layers_published,
    press_retry,
    read,
    set_state,
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
from tests.tiny_models import write_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("alone")]


def assert_nothing_was_done_twice(server: PrefectServer, run: UUID, published: int) -> None:
    states = layer_states(server, run)
    assert states.count("Completed") == LAYERS, states
    assert states.count("Cached") == published, states


def without_waiting(names: list[str]) -> list[str]:
    """Without what server and worker put in between, some of it only where a worker is slow to come."""
    return [name for name in names if name not in ("Late", "AwaitingConcurrencySlot", "Submitting")]


def assert_every_process_ended_with_0(server: PrefectServer) -> None:
    """The worker tells of any other code."""
    assert "exited with status code" not in server.log("worker")


def test_a_cancelled_run_publishes_the_layer_in_work_and_the_retry_button_finishes_it(
    server: PrefectServer, eight_layers: Path, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    job = slow_job(eight_layers, tmp_path, interval="layer:100", resume="never")
    with worker(server) as running_worker:
        run = start(server, job)
        wait_until_staged(job, 2)
        set_state(server, run, StateType.CANCELLING)
        assert wait_until_final(server, run).name == "Cancelled"
        assert history(server, run)[-3:] == ["Running", "Cancelling", "Cancelled"]
        assert_every_process_ended_with_0(server)
        published = layers_published(job)
        assert 1 <= published < LAYERS
        wait_until(lambda: not descendants(running_worker.pid), lambda: "the flow process lives on")
        press_retry(server, run)
        assert wait_for_state(server, run, "Completed", "Failed", "Crashed").name == "Completed", server.log("worker")
    assert_nothing_was_done_twice(server, run, published)
    assert contents(job.output) == undisturbed


def test_sigterm_to_the_flow_process_is_followed_by_a_fresh_process_unattended(
    server: PrefectServer, eight_layers: Path, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    job = slow_job(eight_layers, tmp_path, interval="layer:100", resume="never")
    with worker(server) as running_worker:
        run = start(server, job)
        wait_until_staged(job, 2)
        stopped = flow_process(running_worker)
        os.kill(stopped, signal.SIGTERM)
        checkpointed = wait_for_state(server, run, "Checkpointed")
        assert "layers published" in str(checkpointed.message)
        published = layers_published(job)
        assert 1 <= published < LAYERS
        assert wait_until_final(server, run).name == "Completed", server.log("worker")
    assert without_waiting(history(server, run)) == [
        "Scheduled", "Pending", "Running", "Checkpointed", "Pending", "Running", "Completed"
    ]  # fmt: skip
    assert_every_process_ended_with_0(server)
    assert_nothing_was_done_twice(server, run, published)
    assert contents(job.output) == undisturbed


def test_a_suspended_run_finishes_its_layer_and_resume_goes_on_in_a_fresh_process(
    server: PrefectServer, eight_layers: Path, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    job = slow_job(eight_layers, tmp_path, interval="layer:100")
    with worker(server) as running_worker:
        run = start(server, job)
        wait_until_staged(job, 2)
        suspended: State = Suspended(timeout_seconds=3600)
        with server.client() as client:
            client.set_flow_run_state(run, suspended, force=True)
        wait_until(lambda: not descendants(running_worker.pid), lambda: "the flow process lives on")
        state = read(server, run).state
        assert state is not None and state.name == "Suspended"
        # Once when it was asked for, and once when the layer was finished: heartbeats came in between.
        assert history(server, run)[-3:] == ["Running", "Suspended", "Suspended"]
        assert (state.state_details.pause_timeout, state.state_details.pause_reschedule) == (
            suspended.state_details.pause_timeout, True,
        )  # fmt: skip
        assert_every_process_ended_with_0(server)
        published = layers_published(job)
        assert f"{published} of {LAYERS} layers published" in str(state.message)
        assert 1 <= published < LAYERS
        assert layer_states(server, run) == ["Completed"] * published, "a layer was cut short"
        with server.client() as client:
            client.resume_flow_run(run)
        assert wait_until_final(server, run).name == "Completed", server.log("worker")
    assert_nothing_was_done_twice(server, run, published)
    assert contents(job.output) == undisturbed


@pytest.mark.parametrize("how", ["suspended", "cancelled"])
def test_layers_that_are_in_work_at_once_are_all_finished_and_published(
    how: str, server: PrefectServer, tmp_path: Path
) -> None:
    # Many layers, so that a machine of any speed is past the first ones and before the last when it is stopped.
    layers = 32
    model = write_tiny_llama(tmp_path / "deep", layers=layers, hidden_size=256, intermediate_size=512)
    rounding = {"quantization": RTNConfig(group_size=32), "calibration": None, "devices": ("cpu", "cpu")}
    job = slow_job(model, tmp_path, interval="layer:100").model_copy(update=rounding)
    with worker(server) as running_worker:
        run = start(server, job)
        wait_until_staged(job, 6)
        if how == "cancelled":
            set_state(server, run, StateType.CANCELLING)
        else:
            with server.client() as client:
                client.set_flow_run_state(run, Suspended(timeout_seconds=3600), force=True)
        wait_until(lambda: not descendants(running_worker.pid), lambda: "the flow process lives on")
        wait_for_state(server, run, how.capitalize())
        published = layers_published(job)
        assert 3 <= published < layers
        finished = ["Completed"] * published
        # The server learns of so many tasks a little later.
        wait_until(lambda: layer_states(server, run) == finished, lambda: f"{published} of {layer_states(server, run)}")
        if how == "cancelled":
            press_retry(server, run)
            assert wait_for_state(server, run, "Completed", "Failed", "Crashed").name == "Completed", server.log(
                "worker"
            )
        else:
            with server.client() as client:
                client.resume_flow_run(run)
            assert wait_until_final(server, run).name == "Completed", server.log("worker")
    expected = sorted(["Cached"] * published + ["Completed"] * layers)
    wait_until(
        lambda: sorted(layer_states(server, run)) == expected, lambda: f"{published}, {layer_states(server, run)}"
    )


def test_a_deadline_stops_at_a_boundary_and_the_run_is_scheduled_for_the_next_window(
    server: PrefectServer, eight_layers: Path, tmp_path: Path
) -> None:
    # Many layers, so that a machine of any speed is past the first one and before the last when the time has come.
    model = write_tiny_llama(tmp_path / "deep", layers=64, hidden_size=256, intermediate_size=512)
    job = slow_job(model, tmp_path, samples=200, interval="layer:100")
    run = start(server, job, state=Pending(), deadline="20s")
    assert finish(engine(server, run)) == 0
    state = read(server, run).state
    assert state is not None and state.name == "Checkpointed", server.log(str(run))
    assert "deadline 20s: stopped with" in str(state.message)
    assert history(server, run) == ["Pending", "Running", "Checkpointed"]
    assert 1 <= layers_published(job) < 64
    scheduled = state.state_details.scheduled_time
    assert scheduled is not None
    assert 23 * 3600 < (scheduled - state.timestamp).total_seconds() < 24 * 3600


def test_a_run_that_its_deadline_stopped_takes_the_place_of_the_one_that_is_scheduled_next(
    server: PrefectServer, eight_layers: Path, tmp_path: Path
) -> None:
    job = slow_job(eight_layers, tmp_path, samples=400)
    parameters = {"job": job.model_dump(mode="json"), "deadline": "3s"}
    with server.client() as client:
        overnight = client.read_deployment_by_name("quantize-model/overnight")
        assert not overnight.schedules[0].active, "without a job there is nothing to do"
        path = f"/deployments/{overnight.id}"
        client._client.patch(path, json={"parameters": parameters}).raise_for_status()
        client._client.patch(f"{path}/schedules/{overnight.schedules[0].id}", json={"active": True}).raise_for_status()

        def planned() -> list[FlowRun]:
            runs = client.read_flow_runs(
                deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[overnight.id])),
                sort=FlowRunSort.NEXT_SCHEDULED_START_TIME_ASC,
            )
            return [run for run in runs if run.auto_scheduled]

        nights = wait_until(planned, lambda: "the schedule plans nothing")
        run = start(server, job, deployment="quantize-model/overnight", state=Pending(), deadline="3s")
        assert finish(engine(server, run)) == 0
        client._client.patch(f"{path}/schedules/{overnight.schedules[0].id}", json={"active": False}).raise_for_status()
    state, tonight = read(server, run).state, read(server, nights[0].id).state
    assert state is not None and state.name == "Checkpointed", server.log(str(run))
    assert state.state_details.scheduled_time == nights[0].expected_start_time
    assert tonight is not None and tonight.name == "Continued" and str(run) in str(tonight.message)


def test_a_signal_before_the_first_layer_publishes_nothing(
    server: PrefectServer, eight_layers: Path, tmp_path: Path
) -> None:
    job = slow_job(eight_layers, tmp_path)
    run = start(server, job, state=Pending(), deadline="8h")
    process = engine(server, run)
    wait_for_log(server, str(run), "deadline 8h: ")
    process.send_signal(signal.SIGTERM)
    assert finish(process) == 0
    state = read(server, run).state
    assert state is not None and state.name == "Checkpointed", server.log(str(run))
    assert "before the first layer" in str(state.message)
    assert history(server, run) == ["Pending", "Running", "Checkpointed"]
    assert layers_published(job) == 0
    assert layer_states(server, run) == []


def test_a_signal_after_the_last_layer_does_not_prevent_the_export(
    server: PrefectServer, eight_layers: Path, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    job = slow_job(eight_layers, tmp_path)
    run = start(server, job, state=Pending())
    process = engine(server, run)
    wait_for_log(server, str(run), f"layer {LAYERS} of {LAYERS}: loss")
    process.send_signal(signal.SIGTERM)
    assert finish(process) == 0
    assert wait_until_final(server, run).name == "Completed", server.log(str(run))
    assert history(server, run) == ["Pending", "Running", "Completed"]
    assert layers_published(job) == LAYERS
    assert contents(job.output) == undisturbed


def test_the_second_signal_tells_how_far_and_the_third_gives_up_with_what_is_published(
    server: PrefectServer, tmp_path: Path
) -> None:
    three_layers = write_tiny_llama(tmp_path / "model", layers=3, hidden_size=256, intermediate_size=512)
    job = slow_job(three_layers, tmp_path, samples=1500)
    run = start(server, job, state=Pending())
    process = engine(server, run)
    wait_until_published(job, 1, server, str(run))
    time.sleep(1)  # the second layer begins at once, and takes many seconds on the fastest machine
    process.send_signal(signal.SIGTERM)
    wait_for_log(server, str(run), "SIGTERM: stopping after layer 2 of 3")
    process.send_signal(signal.SIGTERM)
    wait_for_log(server, str(run), "SIGTERM again: still in layer 2 of 3")
    process.send_signal(signal.SIGTERM)
    assert finish(process) == 0, "the crash is reported to the server, which Prefect takes for handled"
    assert wait_until_final(server, run).name == "Crashed", server.log(str(run))
    assert history(server, run) == ["Pending", "Running", "Crashed"]
    assert layers_published(job) == 1
    with worker(server):
        server.call("flow-run", "retry", str(run))
        assert wait_for_state(server, run, "Completed", "Failed").name == "Completed", server.log("worker")
    assert layer_states(server, run).count("Cached") == 1


def test_sigterm_to_serve_publishes_and_a_retry_on_a_new_serve_goes_on(
    server: PrefectServer, eight_layers: Path, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    job = slow_job(eight_layers, tmp_path, interval="layer:100")
    serving = server.spawn("serve", "serve", module="flows.cli")
    try:
        wait_for_log(server, "serve", "quantize-model/quantize")
        run = start(server, job)
        wait_until_staged(job, 2)
        serving.send_signal(signal.SIGTERM)
        assert finish(serving) == 0, server.log("serve")
    finally:
        if serving.poll() is None:
            end(serving, signal.SIGKILL)
    assert wait_until_final(server, run).name == "Cancelled"
    assert not {"Crashed", "Failed"} & set(history(server, run))
    published = layers_published(job)
    assert 1 <= published < LAYERS
    serving = server.spawn("serve again", "serve", module="flows.cli")
    try:
        server.call("flow-run", "retry", str(run))
        assert wait_for_state(server, run, "Completed", "Failed", "Crashed").name == "Completed", server.log(
            "serve again"
        )
    finally:
        end(serving, signal.SIGKILL)
        server.call("deploy", module="flows.cli")
    assert_nothing_was_done_twice(server, run, published)
    assert contents(job.output) == undisturbed
