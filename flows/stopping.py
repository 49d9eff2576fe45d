"""Stopping between layers: what a signal, a deadline and a suspension mean to a run, and how a stopped run ends.

A signal only sets a flag. The flow asks at every layer boundary, publishes and ends, so that no signal can cut a write
short. The second signal says how far the layer is; the third gives up at once, and what is published stays. A deadline
and a suspension from the UI are asked for at the same place and end the same way.
"""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from types import FrameType, TracebackType
from typing import Any, Literal, NoReturn

from prefect._internal.concurrency.cancellation import shield
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterNextScheduledStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.context import FlowRunContext
from prefect.exceptions import Abort, Pause
from prefect.states import Cancelled, Scheduled

from checkpoint_store.errors import CheckpointStopped
from flows.deadline import Deadline

SIGNALS = (signal.SIGINT, signal.SIGTERM)
RESCHEDULE_SECONDS = 10
# A process is started for each look at what holds a root or a device.
WAITING_SECONDS = 30


def refuse_off_main_thread() -> None:
    """ValueError unless this is the process's main thread, the only one that can take signals."""
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            f"quantize_model was started on thread `{threading.current_thread().name}`: only the main thread can take "
            f"SIGINT and SIGTERM, without which a stop would lose the layer in work; call it from the main thread, or in a "
            f"process of its own"
        )


class GaveUp(KeyboardInterrupt):
    """The third signal: the run ends where it stands."""


class StopRequest:
    """Counts stop signals while it is entered; the handlers before it are back afterwards, whatever happens."""

    def __init__(
        self,
        logger: logging.Logger | logging.LoggerAdapter[Any],
        how_far: Callable[[], str],
        deadline: Deadline | None = None,
        suspended: Callable[[], State | None] = lambda: None,
    ) -> None:
        self._logger = logger
        self._how_far = how_far
        self._previous: dict[int, Any] = {}
        self._count = 0
        self._suspended = suspended
        self.deadline = deadline
        self.deadline_is_reached = False
        self.signal: int | None = None

    def __enter__(self) -> "StopRequest":
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            # None is a handler that C code installed: Python cannot put it back, the default is the nearest.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    @property
    def suspended(self) -> State | None:
        """The state that an operator's suspension has put the run into."""
        return self._suspended()

    @property
    def requested(self) -> bool:
        return self._count > 0 or self.deadline_is_reached or self.suspended is not None

    @property
    def name(self) -> str:
        if self.signal is not None:
            return signal.Signals(self.signal).name
        if self.suspended is not None:
            return "suspended"
        return f"deadline {self.deadline.text}" if self.deadline is not None else "nothing"

    def look_at_the_clock(self, layer_seconds: float | None) -> None:
        """Ask for a stop when another layer, of about so many seconds, would not end before the deadline."""
        if self.deadline is not None and not self.deadline.fits(layer_seconds):
            self.deadline_is_reached = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        self.signal = self.signal or number
        if self._count >= 3:
            raise GaveUp(
                f"third stop signal ({signal.Signals(number).name}): giving up at once; what is published stays"
            )
        # A handler runs between any two bytecodes, maybe inside a logging lock of this thread: write from another one.
        first = self._count == 1
        threading.Thread(target=self._tell, args=(signal.Signals(number).name, first), daemon=True).start()

    def _tell(self, name: str, first: bool) -> None:
        if first:
            self._logger.warning(
                "%s: stopping after %s; a second signal says how far, a third gives up", name, self._how_far()
            )
        else:
            self._logger.warning("%s again: still in %s; a third signal gives up at once", name, self._how_far())


def is_deployed(flow_run: FlowRun | None) -> bool:
    """Whether a worker or `serve` runs this flow, so that the API can start it again."""
    return flow_run is not None and flow_run.deployment_id is not None


def end(flow_run: FlowRun | None, message: str, stop: StopRequest) -> NoReturn:
    """End a stopped run the way its surroundings understand.

    A deployed run that the API is cancelling aborts, and Prefect makes it Cancelled; a suspended one pauses; one that
    got SIGTERM, or reached its deadline, is scheduled anew, so that a fresh process resumes it unattended. Anything
    else raises `CheckpointStopped`.
    """
    if flow_run is None or not is_deployed(flow_run):
        raise CheckpointStopped(message)
    _obey(flow_run, message)
    if stop.suspended is not None:
        raise Pause(message, state=stop.suspended)
    if stop.deadline is not None and stop.deadline_is_reached:
        reschedule(flow_run, "Checkpointed", message, _next_window(flow_run, stop.deadline))
    reschedule(flow_run, "Checkpointed", message)


def _obey(flow_run: FlowRun, message: str) -> None:
    """Leave a run that was cancelled or suspended meanwhile as it is."""
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(flow_run.id).state
    if state is not None and state.type in (StateType.CANCELLING, StateType.CANCELLED):
        raise Abort(message)
    if state is not None and state.type == StateType.PAUSED:
        suspend_again(flow_run, state, message)


def suspend_again(flow_run: FlowRun, suspended: State, message: str | None = None) -> NoReturn:
    """Leave a suspended run as it is.

    Its state is set once more, now that the last layer is finished: heartbeats came after the first time, and the
    automation for host crashes takes the silence after a heartbeat for a death.
    """
    again = State(type=StateType.PAUSED, name=suspended.name, message=message or suspended.message)
    again.state_details.pause_reschedule = suspended.state_details.pause_reschedule
    again.state_details.pause_timeout = suspended.state_details.pause_timeout
    again.state_details.pause_key = suspended.state_details.pause_key
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run.id, again, force=True)
        state = client.read_flow_run(flow_run.id).state
    raise Pause(message or suspended.message, state=state)


def reschedule(flow_run: FlowRun, name: str, message: str, at: datetime | None = None) -> NoReturn:
    """Have the API start this deployed run again, soon or `at` a time, in a fresh process, and leave this one."""
    at = at or datetime.now(UTC) + timedelta(seconds=RESCHEDULE_SECONDS)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run.id, Scheduled(name=name, message=message, scheduled_time=at), force=True)
    raise Abort(message)


def wait_for(flow_run: FlowRun, what: Literal["Root", "Device"], message: str) -> NoReturn:
    """Leave, and have the API start this run again when whoever holds the root or a device may have finished.

    Not a run that was cancelled or suspended meanwhile: that stays so.
    """
    _obey(flow_run, message)
    reschedule(flow_run, f"WaitingFor{what}", message, datetime.now(UTC) + timedelta(seconds=WAITING_SECONDS))


# How the message of the automation for host crashes begins.
ALARM = "no heartbeat for"
# Put between the start that was asked for and the real one.
_WAITING_STATES = ("Late", "AwaitingConcurrencySlot", "WaitingForRoot", "WaitingForDevice")


def scheduled_start(flow_run: FlowRun) -> datetime:
    """When this run was to start, as its schedule or whoever asked for it had it, not when its turn came."""
    with get_client(sync_client=True) as client:
        states = client.read_flow_run_states(flow_run.id)
    times = [
        (state.timestamp, state.state_details.scheduled_time)
        for state in states
        if state.type == StateType.SCHEDULED
        and state.name not in _WAITING_STATES
        and not (state.message or "").startswith(ALARM)
    ]
    start = max(times)[1] if times else None
    return datetime.fromisoformat(start.isoformat()) if start is not None else datetime.now(UTC)


def _next_window(flow_run: FlowRun, deadline: Deadline) -> datetime:
    """When the deployment's schedule runs next, in place of that run; without a schedule the same time the next day.

    One run carries a job through all its nights: the run that the schedule has made for the next one would only queue
    up behind it, and be one more every night.
    """
    now = datetime.now(UTC)
    with get_client(sync_client=True) as client:
        planned = client.read_flow_runs(
            deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[flow_run.deployment_id])),
            flow_run_filter=FlowRunFilter(
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED])),
                next_scheduled_start_time=FlowRunFilterNextScheduledStartTime(after_=max(now, deadline.at)),
            ),
            sort=FlowRunSort.NEXT_SCHEDULED_START_TIME_ASC,
        )
        for run in planned:
            start = run.next_scheduled_start_time
            if run.auto_scheduled and run.id != flow_run.id and start is not None:
                if run.parameters == flow_run.parameters:
                    told = f"flow run {flow_run.id} (`{flow_run.name}`) goes on in this window"
                    client.set_flow_run_state(run.id, Cancelled(name="Continued", message=told), force=True)
                return datetime.fromisoformat(start.isoformat())
    return deadline.next_start(now)


# Kept for ever: what it holds must not be let go when nobody refers to it any more.
_shielded = ExitStack()


def outlive_a_lost_slot() -> None:
    """Go on when the run's concurrency slot is lost, where Prefect would cancel the run in the middle of a layer.

    The slot's lease is in the server's memory: a server that is restarted has forgotten it, and a run of hours would die
    of a restart of seconds. What a lost slot may let in, the locks of the root and of the devices keep apart. The shield
    is not lowered at the end of a run, or the cancellation that waits behind it would strike the finished run; so this
    is for processes that end with their run.
    """
    _shielded.enter_context(shield())


@contextmanager
def suspension_at_boundaries() -> Iterator[Callable[[], State | None]]:
    """While the context lasts a suspension cuts no layer short; what is yielded tells the state of one that was asked for.

    Prefect raises the pause wherever the flow or a task next looks at it, which is inside a layer as well.
    """
    context = FlowRunContext.get()
    if context is None:
        yield lambda: None
        return
    request = context.flow_run_suspension_request
    with context.model_copy(update={"flow_run_suspension_request": type(request)()}):
        yield request.get_state
