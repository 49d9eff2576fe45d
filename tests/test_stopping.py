"""Stop signals, one by one, and how a stopped run ends in each of its surroundings."""

import logging
import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.exceptions import Abort

from checkpoint_store.errors import CheckpointStopped
from flows import stopping
from flows.stopping import GaveUp, StopRequest

LOGGER = logging.getLogger("test_stopping")
STOP = StopRequest(LOGGER, lambda: "")


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # the interpreter runs the handler between two instructions


def wait_for(caplog: pytest.LogCaptureFixture, text: str) -> None:
    until = time.monotonic() + 5
    while text not in caplog.text and time.monotonic() < until:
        time.sleep(0.01)
    assert text in caplog.text


@pytest.mark.parametrize("number", stopping.SIGNALS)
def test_first_signal_only_sets_a_flag(number: int, caplog: pytest.LogCaptureFixture) -> None:
    with StopRequest(LOGGER, lambda: "layer 3 of 30") as stop:
        assert not stop.requested
        send(number)
        assert stop.requested
        assert stop.name == signal.Signals(number).name
        wait_for(caplog, "stopping after layer 3 of 30")


def test_second_signal_tells_how_far_the_layer_is(caplog: pytest.LogCaptureFixture) -> None:
    with StopRequest(LOGGER, lambda: "layer 3 of 30") as stop:
        send(signal.SIGTERM)
        send(signal.SIGINT)
        wait_for(caplog, "SIGINT again: still in layer 3 of 30")
        assert stop.name == "SIGTERM"


def test_third_signal_gives_up_at_once() -> None:
    with pytest.raises(GaveUp, match="what is published stays"), StopRequest(LOGGER, lambda: "layer 1"):
        for _ in range(3):
            send(signal.SIGINT)


@pytest.mark.parametrize("error", [None, ValueError])
def test_handlers_are_back_however_the_block_is_left(error: type[Exception] | None) -> None:
    def mine(number: int, frame: Any) -> None: ...

    before = [signal.signal(number, mine) for number in stopping.SIGNALS]
    try:
        try:
            with StopRequest(LOGGER, lambda: ""):
                assert signal.getsignal(signal.SIGTERM) is not mine
                if error is not None:
                    raise error
        except ValueError:
            assert error is ValueError
        assert [signal.getsignal(number) for number in stopping.SIGNALS] == [mine, mine]
    finally:
        for number, handler in zip(stopping.SIGNALS, before, strict=True):
            signal.signal(number, handler)


def test_a_thread_that_is_not_the_main_one_is_refused_by_name() -> None:
    errors: list[Exception] = []

    def start() -> None:
        try:
            stopping.refuse_off_main_thread()
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=start, name="a-worker-thread")
    thread.start()
    thread.join()
    assert "`a-worker-thread`" in str(errors[0])
    stopping.refuse_off_main_thread()


@pytest.mark.parametrize("flow_run", [None, SimpleNamespace(deployment_id=None)])
def test_a_run_that_nobody_can_restart_ends_in_checkpoint_stopped(flow_run: Any) -> None:
    with pytest.raises(CheckpointStopped, match="3 of 30"):
        stopping.end(flow_run, "3 of 30 layers published", STOP)


class FakeApi:
    """The two calls that a stop makes of the API; a deployed run with a real server is tested with the deployments."""

    def __init__(self, state_type: Any) -> None:
        self.state_type, self.set_states = state_type, []

    def __enter__(self) -> "FakeApi":
        return self

    def __exit__(self, *_: object) -> None: ...

    def read_flow_run(self, flow_run_id: str) -> Any:
        return SimpleNamespace(state=SimpleNamespace(type=self.state_type))

    def set_flow_run_state(self, flow_run_id: str, state: Any, force: bool) -> None:
        self.set_states.append(state)


@pytest.mark.parametrize("state", [stopping.StateType.CANCELLING, stopping.StateType.RUNNING])
def test_a_deployed_run_aborts_and_is_scheduled_anew_unless_it_is_cancelled(
    state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = FakeApi(state)
    monkeypatch.setattr(stopping, "get_client", lambda sync_client: api)
    with pytest.raises(Abort):
        stopping.end(SimpleNamespace(id="run", deployment_id="deployment"), "stopped", STOP)  # type: ignore[arg-type]
    assert [set_state.name for set_state in api.set_states] == ([] if state.value == "CANCELLING" else ["Checkpointed"])
