"""What a run shows in Prefect's UI: a progress bar and a table of its layers while it works, a report at its end.

Each is kept under a key made from the job's identity. Another attempt of a flow run updates what the one before left;
another flow run of the job adds a version that begins with the layers that are finished. Sending happens on a thread of
its own, newest first, and at most every few seconds: an API that is slow or gone costs a warning and no layer. The table
has a row for each finished layer and is sent whole: the more it costs, the longer the pause after it, so that all its
versions together cost a fixed share of the run's time, however many layers there are.
"""

import contextvars
import json
import logging
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey
from prefect.utilities.urls import url_for

from tasks.report import TOLD_ONE_BY_ONE, LayerReceipt, Report

SECONDS_BETWEEN_UPDATES = 2.0
TABLE_PAUSE = 50.0  # times what sending the table took
SECONDS_TO_DELIVER_THE_LAST = 10.0


@dataclass(frozen=True)
class _Board:
    """Where the run stands; what is shown is made from it."""

    receipts: tuple[LayerReceipt, ...]
    layer_count: int
    seconds_left: float | None
    report: Report | None = None


class Artifacts:
    """The artifacts of one run, kept up to date while it is entered."""

    def __init__(
        self,
        logger: logging.Logger | logging.LoggerAdapter[Any],
        flow_run_id: UUID,
        model: str,
        method: str,
        identity_digest: str,
    ) -> None:
        self._logger = logger
        self._flow_run_id = flow_run_id
        self._title = f"{model} {method}"
        self.key = f"{re.sub('[^a-z0-9]+', '-', self._title.lower()).strip('-')}-{identity_digest[:8]}"
        self._ids: dict[str, UUID] = {}
        self._newest: _Board | None = None
        self._without_table: _Board | None = None  # shown as progress; its table waits for its time
        self._table_due = 0.0  # on the monotonic clock
        self._wake = threading.Condition()
        self._is_closing = False
        self._has_warned = False
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._deliver,), name="artifacts", daemon=True)

    def __enter__(self) -> "Artifacts":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._wake:
            self._is_closing = True
            self._wake.notify_all()
        self._thread.join(SECONDS_TO_DELIVER_THE_LAST)

    def show(
        self,
        receipts: Sequence[LayerReceipt],
        layer_count: int,
        seconds_left: float | None,
        report: Report | None = None,
    ) -> None:
        """Show that the layers of `receipts` are finished, and the `report` when the whole run is."""
        with self._wake:
            self._newest = _Board(tuple(receipts), layer_count, seconds_left, report)
            self._wake.notify_all()

    # On the thread ----------------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        with get_client(sync_client=True) as client:
            while (board := self._next()) is not None:
                try:
                    self._send(client, board)
                except Exception as error:
                    self._warn(error)
                with self._wake:
                    self._wake.wait_for(lambda: self._is_closing, SECONDS_BETWEEN_UPDATES)

    def _next(self) -> _Board | None:
        """The newest state once there is one that was not sent, or not whole; None when there will be none."""
        until_table = None if self._without_table is None else max(0.0, self._table_due - time.monotonic())
        with self._wake:
            self._wake.wait_for(lambda: self._newest is not None or self._is_closing, until_table)
            board = self._newest or self._without_table
            self._newest = self._without_table = None
            return board

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._logger.warning("the progress was not shown: %s: %s; the run goes on", type(error).__name__, error)

    def _send(self, client: SyncPrefectClient, board: _Board) -> None:
        finished = len(board.receipts)
        self._put(client, "progress", "progress", 100.0 * finished / board.layer_count, self._how_far(board))
        began = time.monotonic()
        if began >= self._table_due or self._is_closing or finished == board.layer_count:
            self._put(client, "layers", "table", json.dumps(table(board.receipts)), f"Layers of {self._title}")
            now = time.monotonic()
            self._table_due = now + TABLE_PAUSE * (now - began)
        else:
            self._without_table = board
        if board.report is not None:
            text = markdown(board.report, self._title, self._flow_run_id, self.key)
            self._put(client, "report", "markdown", text, f"Report of {self._title}")

    def _how_far(self, board: _Board) -> str:
        how_far = f"{self._title}: {len(board.receipts)} of {board.layer_count} layers"
        if len(board.receipts) == board.layer_count or board.seconds_left is None:
            return how_far
        return f"{how_far}, about {duration(board.seconds_left)} left"

    def _put(self, client: SyncPrefectClient, name: str, kind: str, data: Any, description: str) -> None:
        """Make the artifact, or update the one that this flow run has already, from whichever attempt."""
        key = f"{self.key}-{name}"
        if key not in self._ids:
            own = ArtifactFilter(
                key=ArtifactFilterKey(any_=[key]), flow_run_id=ArtifactFilterFlowRunId(any_=[self._flow_run_id])
            )
            for artifact in client.read_artifacts(artifact_filter=own, limit=1):
                self._ids[key] = artifact.id
        if key in self._ids:
            client.update_artifact(self._ids[key], ArtifactUpdate(data=data, description=description))
        else:
            made = client.create_artifact(
                ArtifactCreate(
                    key=key, type=kind, data=data, description=description, flow_run_id=self._flow_run_id
                )
            )  # fmt: skip
            self._ids[key] = made.id


def duration(seconds: float) -> str:
    """`40 s`, `12 min`, `3.5 h`: as long as it is, no more exact than an estimate is."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def table(receipts: Sequence[LayerReceipt]) -> list[dict[str, Any]]:
    """One row per finished layer."""
    return [
        {
            "layer": receipt.name,
            "loss": f"{receipt.loss:.3e}",
            "tokens": receipt.tokens,
            "seconds": receipt.seconds,
            "bytes": receipt.size,
            "fallbacks": ", ".join(module.name for module in receipt.fallbacks)
            if len(receipt.fallbacks) <= TOLD_ONE_BY_ONE
            else f"{len(receipt.fallbacks)} modules",
            "sha256": receipt.sha256[:12],
        }
        for receipt in receipts
    ]


def markdown(report: Report, title: str, flow_run_id: UUID, key: str) -> str:
    """The report for people: what was made, where it lies, how good it is, what to look at."""
    rows: list[tuple[str, str]] = [
        ("Model", f"`{report.output}`"),
        ("Checkpoint", f"`{report.checkpoint}`"),
        (
            "Layers",
            f"{len(report.layers)}" + (f", {report.resumed_from} by earlier runs" if report.resumed_from else ""),
        ),
        ("Mean loss", f"{report.loss:.4g}"),
        ("Fallbacks", f"{report.fallbacks} modules"),
        ("Size", f"{report.size / 1e6:.1f} MB"),
        ("This run", duration(report.seconds)),
        ("All layers", duration(sum(receipt.seconds for receipt in report.layers))),
        ("Identity", f"`{report.identity}`"),
    ]
    head, *rest = (f"| {name} | {text} |" for name, text in rows)
    lines = [f"# {title}", "", head, "|---|---|", *rest]
    lines += ["", "The checkpoint may be removed once the model is where it belongs."]
    worst = sorted(report.layers, key=lambda receipt: receipt.loss, reverse=True)[:3]
    lines += ["", "Highest losses: " + ", ".join(f"`{receipt.name}` {receipt.loss:.3e}" for receipt in worst)]
    fallbacks = [line for receipt in report.layers for line in receipt.fallback_lines()]
    if fallbacks:
        lines += ["", "## Quantized without their inputs", ""]
        lines += [f"- {line}" for line in fallbacks]
    links = [("Flow run", url_for("flow-run", flow_run_id)), ("All layers", _artifact_url(f"{key}-layers"))]
    shown = [f"[{name}]({url})" for name, url in links if url]
    return "\n".join([*lines, "", " · ".join(shown)] if shown else lines)


def _artifact_url(key: str) -> str | None:
    """Where the UI shows an artifact by its key, beside where it shows a flow run."""
    run = url_for("flow-run", UUID(int=0))
    return f"{run.partition('/runs/')[0]}/artifacts/key/{key}" if run and "/runs/" in run else None
