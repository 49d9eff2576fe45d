"""What operators have set on the server, kept when the deployments are registered again: parameters, schedules, job variables.

Prefect replaces a deployment as a whole. With every update of this package, and every start of `serve`, the job of
`overnight` would be forgotten and its schedule switched off, without a word.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentScheduleUpdate, DeploymentUpdate
from prefect.exceptions import ObjectNotFound


@dataclass(frozen=True)
class Kept:
    """What a registered deployment has of its own."""

    parameters: dict[str, Any]
    schedules: list[DeploymentScheduleCreate]
    job_variables: dict[str, Any]

    def parameters_over(self, described: Mapping[str, Any] | None) -> dict[str, Any]:
        """The described defaults, less those that are set otherwise on the server."""
        return {**(described or {}), **self.parameters}


def full_name(about: Mapping[str, Any]) -> str:
    """`quantize-model/quantize`, of a deployment as prefect.yaml describes it: flows have the names of their functions."""
    return f"{about['entrypoint'].rpartition('.')[2].replace('_', '-')}/{about['name']}"


def read(client: SyncPrefectClient, name: str) -> Kept | None:
    """What is registered by that name; None when nothing is."""
    try:
        found = client.read_deployment_by_name(name)
    except ObjectNotFound:
        return None
    schedules = [
        DeploymentScheduleCreate(
            schedule=schedule.schedule,
            active=schedule.active,
            max_scheduled_runs=schedule.max_scheduled_runs,
            parameters=schedule.parameters,
            slug=schedule.slug,
        )
        for schedule in found.schedules
    ]
    return Kept(found.parameters, schedules, found.job_variables or {})


def give_back(client: SyncPrefectClient, about: Mapping[str, Any], kept: Kept) -> bool:
    """Set the deployment, registered again as `about` has it, to what it had; whether that was something else."""
    described = about["work_pool"]["job_variables"]
    variables = {**described, **kept.job_variables}
    variables["env"] = {**described["env"], **kept.job_variables.get("env", {})}
    wanted = Kept(kept.parameters_over(about.get("parameters")), kept.schedules, variables)
    name = full_name(about)
    if read(client, name) == wanted:
        return False
    schedules = [DeploymentScheduleUpdate.model_validate(schedule.model_dump()) for schedule in wanted.schedules]
    changes = DeploymentUpdate(parameters=wanted.parameters, schedules=schedules, job_variables=wanted.job_variables)
    client.update_deployment(client.read_deployment_by_name(name).id, changes)
    return True
