"""What a person at the command line sees of a run: its own log lines, a progress bar on a terminal, one clear error.

Prefect logs every state of every task and a traceback for each exception that leaves a flow. Both stay in the UI; here
they are shown with `--verbose` only. Everything goes to stderr: stdout is for results.
"""

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

_OUR_CODE = tuple(
    f"{Path(__file__).resolve().parent.parent / package}/" for package in ("flows", "tasks", "checkpoint_store")
)
# Said by Prefect about an exception that the command line reports itself.
_TOLD_BY_THE_COMMAND = (
    "Encountered exception",
    "Finished in state Failed",
    "Finished in state Crashed",
    "Crash detected",
)


def message(text: str) -> None:
    """One message for the person, on stderr."""
    print(text, file=sys.stderr)


@contextlib.contextmanager
def run_shown(*, verbose: bool) -> Iterator[None]:
    """Log lines of the run on stderr, under them a progress bar when that is a terminal; Prefect's own with `verbose`."""
    from prefect.logging.configuration import setup_logging

    setup_logging()
    console = Console(stderr=True)
    root = logging.getLogger()
    before = list(root.handlers)
    if not verbose:
        for handler in before:
            root.removeHandler(handler)
        root.addHandler(_LineHandler(console))
    try:
        with _bar(console) if console.is_terminal else contextlib.nullcontext():
            yield
    finally:
        root.handlers[:] = before


class _LineHandler(logging.Handler):
    """`12:00:00 message`, with the level where it is a warning or worse."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console

    def filter(self, record: logging.LogRecord) -> bool:
        if record.pathname.startswith(_OUR_CODE):
            return True
        text = record.getMessage()
        if text.startswith(("Finished in state Cached", "View at")):
            return True
        return record.levelno >= logging.WARNING and not record.exc_info and not text.startswith(_TOLD_BY_THE_COMMAND)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if not record.pathname.startswith(_OUR_CODE) and (run := getattr(record, "task_run_name", None)):
            text = f"{run}: {text}"
        level = f"{record.levelname} " if record.levelno >= logging.WARNING else ""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        self._console.print(f"{clock} {level}{text}", markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _bar(console: Console) -> Iterator[None]:
    from tasks import running  # loads torch

    columns = (BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", visible=False)

        def show(now: running.Progress) -> None:
            told = [f"layer {now.layer + 1} of {now.layer_count}", now.module]
            told += [] if now.loss is None else [f"loss {now.loss:.2e}"]
            told += [] if now.seconds_left is None else [f"{_clock(now.seconds_left)} left"]
            bar.update(task, visible=True, total=now.layer_count, completed=now.finished, description="  ".join(told))

        with running.listening(show):
            yield


def _clock(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
