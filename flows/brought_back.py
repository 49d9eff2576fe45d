"""A run that the automation for host crashes took for dead though it had ended as it was asked to: it is left as it was.

Heartbeats come while a suspended run finishes its layer, after the event of its suspension, and one may come between the
state that a stopped run leaves and the end of its process. The silence that follows looks like that of a dead host. What
the run was before is in its history: an operator's suspension holds, and so does the next window of a deadline.
"""

from datetime import UTC, datetime, timedelta
from itertools import pairwise

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State, StateType

from flows import stopping

# States that the server puts in between by itself.
_WAITING = ("Late", "AwaitingConcurrencySlot")


def leave_if_it_was_no_crash(flow_run: FlowRun) -> None:
    """End this process where the alarm that started it was a mistake, with the run suspended or scheduled as before."""
    with get_client(sync_client=True) as client:
        before = state_before_alarm(client.read_flow_run_states(flow_run.id))
    if before is None:
        return
    if before.type == StateType.PAUSED:
        stopping.suspend_again(flow_run, before)
    planned = before.state_details.scheduled_time
    if before.type == StateType.SCHEDULED and planned is not None:
        at = datetime.fromisoformat(planned.isoformat())
        if at > datetime.now(UTC) + timedelta(seconds=stopping.RESCHEDULE_SECONDS):
            stopping.reschedule(flow_run, before.name or "Scheduled", before.message or "", at)


def state_before_alarm(states: list[State]) -> State | None:
    """What a run was when the alarm that led to this attempt came; None when something else led to it."""
    told = sorted((state for state in states if state.name not in _WAITING), key=lambda state: state.timestamp)
    before = None
    for earlier, later in pairwise(told):
        if later.type == StateType.SCHEDULED:
            before = earlier if (later.message or "").startswith(stopping.ALARM) else None
    return before
