"""An alarm about a run that had ended as it was asked to, and what else a run's history says about its start."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import Abort, Pause
from prefect.flow_engine import run_flow
from prefect.states import Pending, Running, Scheduled, Suspended

from deployments import host_crash
from flows import stopping
from flows.quantize_model import quantize_model
from tasks.report import Report
from tests.flow_jobs import layers_run, tiny_job
from tests.tiny_models import write_tiny_llama

pytestmark = pytest.mark.usefixtures("prefect_server")
TOMORROW = datetime.now(UTC) + timedelta(days=1)


def alarm() -> State:
    """What the automation sets."""
    action = host_crash.automation(90).actions[0]
    assert isinstance(action, host_crash.ChangeFlowRunState)
    return Scheduled(name=action.name, message=action.message)


def deployed_run(parameters: dict[str, Any], first: State, *others: State) -> FlowRun:
    """A run of a deployment, with this history."""
    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(client.create_flow(quantize_model), "brought back")
        run = client.create_flow_run_from_deployment(deployment, parameters=parameters, state=first)
        for state in others:
            client.set_flow_run_state(run.id, state, force=True)
        return client.read_flow_run(run.id)


def state_of(run: UUID) -> State:
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(run).state
    assert state is not None
    return state


def assert_is_done(report: object) -> None:
    assert isinstance(report, Report) and report.status == "done"


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "outlive_a_lost_slot", lambda: None)  # it is for a process of its own


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("is_late", [False, True])
def test_a_suspended_run_that_was_taken_for_dead_is_suspended_again(tmp_path: Path, is_late: bool) -> None:
    job = tiny_job(write_tiny_llama(tmp_path / "model"), tmp_path)
    suspended: State = Suspended(timeout_seconds=3600)
    between: list[State] = [Scheduled(name="Late")] if is_late else []
    run = deployed_run({"job": job.model_dump(mode="json")}, Running(), suspended, alarm(), *between, Pending())
    with layers_run() as ran, pytest.raises(Pause):
        run_flow(quantize_model, flow_run=run, parameters={"job": job})
    assert ran == []
    state = state_of(run.id)
    assert (state.type, state.name) == (StateType.PAUSED, "Suspended")
    assert state.state_details.pause_timeout == suspended.state_details.pause_timeout
    with get_client(sync_client=True) as client:
        client.resume_flow_run(run.id)
        resumed = client.read_flow_run(run.id)
    assert_is_done(run_flow(quantize_model, flow_run=resumed, parameters={"job": job}))


@pytest.mark.usefixtures("in_this_process")
def test_a_run_that_waits_for_its_next_window_waits_on_when_it_was_taken_for_dead(tmp_path: Path) -> None:
    job = tiny_job(write_tiny_llama(tmp_path / "model"), tmp_path)
    waiting: State = Scheduled(name="Checkpointed", message="3 of 9 layers", scheduled_time=TOMORROW)
    run = deployed_run({"job": job.model_dump(mode="json")}, Running(), waiting, alarm(), Pending())
    with layers_run() as ran, pytest.raises(Abort):
        run_flow(quantize_model, flow_run=run, parameters={"job": job})
    assert ran == []
    state = state_of(run.id)
    assert (state.name, state.message) == ("Checkpointed", "3 of 9 layers")
    assert state.state_details.scheduled_time == TOMORROW


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    "history",
    [
        pytest.param((Running(), alarm()), id="a host that died"),
        pytest.param((Running(), Suspended(timeout_seconds=60), Scheduled(name="AwaitingRetry")), id="a retry"),
        pytest.param((Scheduled(name="Checkpointed"), alarm()), id="its time has come"),
    ],
)
def test_a_run_goes_on_where_that_is_meant(tmp_path: Path, history: tuple[State, ...]) -> None:
    job = tiny_job(write_tiny_llama(tmp_path / "model"), tmp_path)
    run = deployed_run({"job": job.model_dump(mode="json")}, Pending(), *history, Pending())
    assert_is_done(run_flow(quantize_model, flow_run=run, parameters={"job": job}))


def test_a_deadline_counts_from_the_schedule_whatever_the_run_had_to_wait_for() -> None:
    evening = datetime.now(UTC) - timedelta(hours=9)
    later: list[State] = [
        Scheduled(name=name, scheduled_time=evening + timedelta(hours=hour + 1))
        for hour, name in enumerate(("Late", "AwaitingConcurrencySlot", "WaitingForRoot", "WaitingForDevice"))
    ]
    run = deployed_run({}, Scheduled(scheduled_time=evening), *later, alarm(), Pending())
    assert stopping.scheduled_start(run) == evening
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, Scheduled(name="AwaitingRetry", scheduled_time=TOMORROW), force=True)
    assert stopping.scheduled_start(run) == TOMORROW, "an operator's retry opens a window of its own"


@pytest.mark.parametrize("asked", [State(type=StateType.CANCELLING), Suspended(timeout_seconds=3600)])
def test_a_run_that_would_wait_stays_cancelled_or_suspended_where_that_was_asked_meanwhile(asked: State) -> None:
    run = deployed_run({}, Running(), asked)
    with pytest.raises((Abort, Pause)):
        stopping.wait_for(run, "Root", "process 12 writes to it")
    state = state_of(run.id)
    assert (state.type, state.state_details.pause_timeout) == (asked.type, asked.state_details.pause_timeout)


@pytest.mark.usefixtures("in_this_process")
def test_relative_places_are_refused_where_the_worker_removes_its_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = tiny_job(write_tiny_llama(tmp_path / "model"), tmp_path)
    assert job.calibration is not None
    places: dict[str, Any] = {
        "output": "quantized", "checkpoint": job.checkpoint.model_copy(update={"path": "checkpoint"}),
        "calibration": job.calibration.model_copy(update={"data": "calibration.txt"}),
    }  # fmt: skip
    relative = job.model_copy(update=places)
    run = deployed_run({"job": relative.model_dump(mode="json")}, Pending())
    with layers_run() as ran, pytest.raises(ValueError, match="write absolute paths") as refused:
        run_flow(quantize_model, flow_run=run, parameters={"job": relative})
    assert ran == []
    for text in ("output `quantized`", "checkpoint.path `checkpoint`", "calibration.data `calibration.txt`"):
        assert text in str(refused.value)
    assert state_of(run.id).name == "Failed"
