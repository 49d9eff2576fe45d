"""What happens to a checkpoint, told: as log lines of placement, shape and dtype, and as Prefect events for automations.

Contents never leave here. None of it may fail a run, but an event that cannot be sent is a warning, not a secret.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prefect.events import emit_event

from checkpoint_store.session import CheckpointEvent
from tasks.hidden_states import Held

EVENT_PREFIX = "prefect-quantize.checkpoint"
# What the store calls it -> what an automation listens for; the rest is for the log only.
EVENT_NAMES = {"commit": "published", "restoration": "restored", "fell_back": "fell-back"}

Logger = logging.Logger | logging.LoggerAdapter[Any]


def emit(logger: Logger, root: Path, name: str, detail: dict[str, Any]) -> None:
    """Send `prefect-quantize.checkpoint.<name>` about the checkpoint root to Prefect."""
    try:
        emit_event(
            event=f"{EVENT_PREFIX}.{name}",
            resource={
                "prefect.resource.id": f"{EVENT_PREFIX}.{root}",
                "prefect.resource.name": root.name,
                "prefect-quantize.root": str(root),
            },
            payload=detail,
        )
    except Exception as error:
        logger.warning("event %s.%s was not sent: %s", EVENT_PREFIX, name, error)


def listener(logger: Logger, root: Path, *, device: bool) -> Callable[[CheckpointEvent], None]:
    """What the session calls with each event: a Prefect event where there is one, a log line when `device` is on."""

    def on_event(event: CheckpointEvent) -> None:
        if event.kind == "fell_back":
            # The store has logged it too; what the flow logs is what an operator sees in the UI.
            logger.error(
                "the checkpoint at %s fell back: %s", root, json.dumps(event.detail, sort_keys=True, default=str)
            )
        if event.kind in EVENT_NAMES:
            emit(logger, root, EVENT_NAMES[event.kind], event.detail)
        if device and event.kind != "failure":  # it ends the run: `failed` tells of it, as of any other error
            logger.info("telemetry %s %s", event.kind, json.dumps(event.detail, sort_keys=True, default=str))

    return on_event


def failed(logger: Logger, root: Path, error: BaseException, *, device: bool) -> None:
    """Tell that the run ends in an error, whichever it is: once, when it leaves the flow."""
    detail = {"reason": type(error).__name__, "message": str(error)}
    emit(logger, root, "failed", detail)
    if device:
        logger.info("telemetry failure %s", json.dumps(detail, sort_keys=True))


def tensors(logger: Logger, kind: str, held: Sequence[Held], *, device: bool) -> None:
    """Log where tensors are and of what shape and dtype, when `device` is on."""
    if device:
        placed = Counter((str(tensor.device), str(tensor.dtype), tuple(tensor.shape)) for tensor in held)
        shapes = [
            {"device": where, "dtype": dtype, "shape": shape, "count": n} for (where, dtype, shape), n in placed.items()
        ]
        logger.info("telemetry %s %s", kind, json.dumps({"hidden": shapes}, sort_keys=True))
