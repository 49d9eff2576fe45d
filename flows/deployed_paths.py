"""Relative paths in a deployed run: a worker gives each process a working directory that is removed at its end."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from tasks.job import QuantizationJob

_TEXT_FILES = (".txt", ".jsonl", ".parquet")


def refuse_paths_into_nowhere(job: QuantizationJob) -> None:
    """ValueError that names each relative path of the job, where the working directory is a temporary one.

    A model that was written there would be gone with the process that has just finished it. A directory that the job
    variable `working_dir` names, or in which `prefect-quantize serve` was started, is as good as any.
    """
    here = Path.cwd()
    if not here.resolve().is_relative_to(Path(tempfile.gettempdir()).resolve()):
        return
    told = [f"{field} `{text}`" for field, text in _paths(job) if not Path(text).expanduser().is_absolute()]
    if told:
        raise ValueError(
            f"{' and '.join(told)} {'are' if len(told) > 1 else 'is'} looked for below `{here}`, which this run's worker "
            f"has made for it and removes at its end; write absolute paths"
        )


def _paths(job: QuantizationJob) -> Iterator[tuple[str, str]]:
    """What names a place; a model or a data set without a sign of one may be an id."""
    if job.model.startswith("."):
        yield "model", job.model
    yield "output", job.output
    if job.checkpoint.path != "auto":
        yield "checkpoint.path", job.checkpoint.path
    if job.offload_directory is not None:
        yield "offload_directory", job.offload_directory
    data = job.calibration.data if job.calibration is not None else None
    if isinstance(data, str) and (data.startswith(".") or data.endswith(_TEXT_FILES)):
        yield "calibration.data", data
