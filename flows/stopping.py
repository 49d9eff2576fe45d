"""Stopping between layers: what SIGINT and SIGTERM mean while a model is quantized, and how a stopped run ends.

A signal only sets a flag. The flow asks at every layer boundary, publishes and ends, so that no signal can cut a write
short. The second signal says how far the layer is; the third gives up at once, and what is published stays.
"""

import logging
import signal
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import FrameType, TracebackType
from typing import Any, NoReturn

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import Abort
from prefect.states import Scheduled

from checkpoint_store.errors import CheckpointStopped

SIGNALS = (signal.SIGINT, signal.SIGTERM)
RESCHEDULE_SECONDS = 10


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

    def __init__(self, logger: logging.Logger | logging.LoggerAdapter[Any], how_far: Callable[[], str]) -> None:
        self._logger = logger
        self._how_far = how_far
        self._previous: dict[int, Any] = {}
        self._count = 0
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
    def requested(self) -> bool:
        return self._count > 0

    @property
    def name(self) -> str:
        return signal.Signals(self.signal).name if self.signal is not None else "nothing"

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


def end(flow_run: FlowRun | None, message: str) -> NoReturn:
    """End a stopped run the way its surroundings understand.

    A deployed run that the API is cancelling aborts, and Prefect makes it Cancelled; one that got SIGTERM is scheduled
    anew, so that a fresh process resumes it unattended. Anything else raises `CheckpointStopped`.
    """
    if flow_run is None or not is_deployed(flow_run):
        raise CheckpointStopped(message)
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(flow_run.id).state
    if state is not None and state.type in (StateType.CANCELLING, StateType.CANCELLED):
        raise Abort(message)
    reschedule(flow_run, "Checkpointed", message)


def reschedule(flow_run: FlowRun, name: str, message: str) -> NoReturn:
    """Have the API start this deployed run again soon, in a fresh process, and leave this one."""
    soon = datetime.now(UTC) + timedelta(seconds=RESCHEDULE_SECONDS)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run.id, Scheduled(name=name, message=message, scheduled_time=soon), force=True)
    raise Abort(message)
