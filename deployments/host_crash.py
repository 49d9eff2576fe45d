"""The automation that brings a run back when its host died: no heartbeat for a while, and it is scheduled again.

A false alarm, when the run lives and only its heartbeats were late, starts a second process. That one finds the
checkpoint locked, schedules itself for later and leaves; the first one goes on undisturbed.
"""

from datetime import timedelta

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from flows.stopping import ALARM

NAME = "prefect-quantize: bring runs back after a host crash"


def automation(silence_seconds: float) -> AutomationCore:
    """What is registered: a run of ours that beat once and then neither beat nor changed its state for so long."""
    return AutomationCore(
        name=NAME,
        description="Schedules a run again whose process and worker are gone. See docs/operating.md.",
        trigger=EventTrigger(
            posture=Posture.Proactive,
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.*"},
            match=ResourceSpecification.model_validate({"prefect.resource.id": "prefect.flow-run.*"}),
            match_related=ResourceSpecification.model_validate(
                {"prefect.resource.role": "flow", "prefect.resource.name": "quantize-model"}
            ),
            for_each={"prefect.resource.id"},
            threshold=1,
            within=timedelta(seconds=silence_seconds),
        ),
        actions=[
            ChangeFlowRunState(
                name="AwaitingRetry",
                state=StateType.SCHEDULED,
                message=f"{ALARM} {silence_seconds:.0f} s: the host is taken for dead, any worker may go on",
                force=True,
            )
        ],
    )


async def register(client: PrefectClient, silence_seconds: float) -> bool:
    """Make the automation, or bring the one that is there up to date; whether it was made."""
    wanted = automation(silence_seconds)
    found = await client.read_automations_by_name(NAME)
    if found:
        await client.update_automation(found[0].id, wanted)
        return False
    await client.create_automation(wanted)
    return True
