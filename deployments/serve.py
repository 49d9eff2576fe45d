"""One process that serves the deployments on a single machine, without a work pool or a worker: `prefect-quantize serve`."""

from prefect import serve
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.deployments.runner import EntrypointType, RunnerDeployment

from flows.maintain_store import maintain_store
from flows.quantize_model import quantize_model


def main() -> None:
    """Serve until a signal ends it; SIGTERM lets a run publish the layer in work first."""
    serve(
        RunnerDeployment.from_flow(
            quantize_model,
            "quantize",
            description="Quantize one model, on demand; a run that was stopped or killed goes on when it is retried.",
            tags=["quantize"],
            concurrency_limit=ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.ENQUEUE),
            entrypoint_type=EntrypointType.MODULE_PATH,
        ),
        RunnerDeployment.from_flow(
            maintain_store,
            "store-hygiene",
            description="Verify and sweep a checkpoint root; give the root as a parameter and add a schedule for it.",
            tags=["maintenance"],
            entrypoint_type=EntrypointType.MODULE_PATH,
        ),
    )


if __name__ == "__main__":
    main()
