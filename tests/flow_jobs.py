"""Jobs on tiny models, and what became of them, for the tests that run the whole flow."""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from safetensors.torch import load_file
from torch import Tensor

from checkpoint_store.config import CheckpointConfig
from flows.quantize_model import quantize_model
from tasks import quantize_layer
from tasks.job import CalibrationConfig, QuantizationJob
from tasks.quantization import GPTQConfig, Quantization
from tasks.report import REPORT_FILE
from tests.tiny_models import TEXTS

LAYERS = 3


def tiny_job(
    model: Path,
    place: Path,
    *,
    quantization: Quantization | None = None,
    calibration: dict[str, Any] | None = None,
    devices: tuple[str, ...] = ("cpu",),
    output: str = "output",
    root: str = "checkpoint",
    **checkpoint: Any,
) -> QuantizationJob:
    """A job on `model` whose checkpoint and output lie in `place`."""
    options: dict[str, Any] = {"data": TEXTS, "samples": 6, "sequence_length": 24, "batch_size": 2}
    return QuantizationJob(
        model=str(model),
        output=str(place / output),
        quantization=quantization or GPTQConfig(bits=4, group_size=32),
        calibration=CalibrationConfig(**(options | (calibration or {}))),
        checkpoint=CheckpointConfig(path=str(place / root), **checkpoint),
        devices=devices,
    )


def contents(directory: Path | str) -> dict[str, str]:
    """Digest of every file of an export but the report, which holds times."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in Path(directory).iterdir()
        if path.name != REPORT_FILE
    }


class Exports(dict[str, Path]):
    """The outputs of undisturbed runs by name, each made when it is first asked for."""

    def __init__(self, make_job: Callable[[str], QuantizationJob]) -> None:
        super().__init__()
        self._make_job = make_job

    def __missing__(self, name: str) -> Path:
        self[name] = Path(quantize_model(self._make_job(name)).output)
        return self[name]


def tensors_of(output: Path) -> dict[str, Tensor]:
    """Every tensor of an export."""
    return {name: tensor for file in output.glob("*.safetensors") for name, tensor in load_file(file).items()}


@contextmanager
def layers_run() -> Iterator[list[int]]:
    """The numbers of the layers whose task body went past its first line while the context lasts."""
    ran: list[int] = []
    original = quantize_layer.LayerWork

    def counted(run: Any, layer: int, devices: Any) -> Any:
        ran.append(layer)
        return original(run, layer, devices)

    with mock.patch.object(quantize_layer, "LayerWork", counted):
        yield ran


def last_flow_run() -> FlowRun:
    """The flow run that was started last."""
    with get_client(sync_client=True) as client:
        return client.read_flow_runs(sort=FlowRunSort.EXPECTED_START_TIME_DESC, limit=1)[0]


def layer_task_states(flow_run_id: Any) -> list[str]:
    """Names of the states in which the layer tasks of a flow run ended, in order; the server learns them a little later."""
    deadline = time.monotonic() + 60
    before: list[tuple[Any, Any]] = []
    while True:
        with get_client(sync_client=True) as client:
            runs = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id])))
        now = sorted((run.id, run.state_name) for run in runs)
        settled = now == before and all(run.state is not None and run.state.is_final() for run in runs)
        if (settled and runs) or time.monotonic() > deadline:
            layers = [run for run in runs if run.task_key.startswith("quantize_layer-")]
            return [run.state_name for run in sorted(layers, key=lambda run: run.start_time or run.created)]
        before = now
        time.sleep(1)
