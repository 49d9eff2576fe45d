"""One process that serves the deployments on a single machine, without a work pool or a worker: `prefect-quantize serve`.

The deployments are those of prefect.yaml, read from there, with the parameters and schedules that operators gave them.
"""

import os
from pathlib import Path
from typing import Any

from prefect import Flow, serve
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import ConcurrencyLimitConfig
from prefect.client.schemas.schedules import CronSchedule
from prefect.deployments.runner import EntrypointType, RunnerDeployment
from ruamel.yaml import YAML

from deployments import kept
from flows.maintain_store import maintain_store
from flows.quantize_model import quantize_model

PREFECT_YAML = Path(__file__).with_name("prefect.yaml")
FLOWS: dict[str, Flow[Any, Any]] = {
    "flows.quantize_model.quantize_model": quantize_model,
    "flows.maintain_store.maintain_store": maintain_store,
}


def main() -> None:
    """Serve until a signal ends it; SIGTERM lets a run publish the layer in work first."""
    described = YAML(typ="safe", pure=True).load(PREFECT_YAML)["deployments"]
    for about in described:
        for name, value in about["work_pool"]["job_variables"]["env"].items():
            os.environ.setdefault(name, value)
    with get_client(sync_client=True) as client:
        registered = [(about, kept.read(client, kept.full_name(about))) for about in described]
    serve(*(deployment(about, own) for about, own in registered))


def deployment(about: dict[str, Any], own: kept.Kept | None = None) -> RunnerDeployment:
    """A deployment as prefect.yaml describes it, less the work pool, and with what it has of its `own` on the server."""
    limit = about.get("concurrency_limit")
    schedules = [
        DeploymentScheduleCreate(
            schedule=CronSchedule(cron=schedule["cron"], timezone=schedule["timezone"]), active=schedule["active"]
        )
        for schedule in about.get("schedules", [])
    ]
    return RunnerDeployment.from_flow(
        FLOWS[about["entrypoint"]],
        about["name"],
        description=about["description"],
        tags=about["tags"],
        parameters=about.get("parameters") if own is None else own.parameters_over(about.get("parameters")),
        schedules=(schedules if own is None else own.schedules) or None,
        concurrency_limit=ConcurrencyLimitConfig.model_validate(limit) if limit else None,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )


if __name__ == "__main__":
    main()
