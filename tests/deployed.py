"""A real Prefect server, real workers and real flow processes, for the tests of what an operator does to them.

Everything runs as separate processes with a Prefect home of their own. A test looks at the API and at the checkpoint, as
an operator would, and never into the processes.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.states import Cancelled, Pending, Scheduled

from checkpoint_store.store import CheckpointStore
from tasks.job import CalibrationConfig, QuantizationJob
from tasks.quantization import GPTQConfig
from tests.flow_jobs import contents
from tests.tiny_models import TEXTS, write_tiny_llama

PROJECT = Path(__file__).resolve().parent.parent
PATIENCE_SECONDS = 600  # never reached where all is well; a busy machine takes its time
QUANTIZE = "quantize-model/quantize"
LAYERS = 8


@dataclass
class PrefectServer:
    """`prefect server start` on a port and a home of its own; it can be killed and started again."""

    home: Path
    port: int
    settings: Mapping[str, str] = field(default_factory=dict)
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to be a client of this server, with the project importable from any directory."""
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")},
            "PREFECT_HOME": str(self.home),
            "PREFECT_API_URL": self.api_url,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_WORKER_PREFETCH_SECONDS": "1",
            "PREFECT_RUNNER_POLL_FREQUENCY": "1",
            "DO_NOT_TRACK": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(PROJECT),
            "PYTHONUNBUFFERED": "1",
            **self.settings,
        }

    def client(self) -> SyncPrefectClient:
        return SyncPrefectClient(self.api_url)

    def start(self) -> None:
        self.process = self.spawn("server", "server", "start", "--port", str(self.port))
        wait_until(self._is_healthy, lambda: f"the server gives no answer; its log: {self.log('server')}")

    def _is_healthy(self) -> bool:
        assert self.process is not None and self.process.poll() is None, self.log("server")
        try:
            return httpx.get(f"{self.api_url}/health", timeout=5, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def kill(self) -> None:
        """As a power failure would, with everything it has started."""
        assert self.process is not None
        end(self.process, signal.SIGKILL)
        self.process = None

    def spawn(self, name: str, *arguments: str, module: str = "prefect") -> "subprocess.Popen[bytes]":
        """A process of its own session that logs to `name` in the home."""
        with (self.home / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=self.home, env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip

    def call(self, *arguments: str, module: str = "prefect") -> str:
        """Run a command to its end; what it said."""
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=self.home, env=self.environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def log(self, name: str) -> str:
        return (self.home / f"{name}.log").read_text(errors="replace")


@contextmanager
def prefect_server(home: Path, **settings: str) -> Iterator[PrefectServer]:
    """A started server with an empty database; whatever it has become is ended with the context."""
    home.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = PrefectServer(home, port, settings)
    server.start()
    try:
        yield server
    finally:
        if server.process is not None:
            server.kill()


@contextmanager
def worker(server: PrefectServer, name: str = "worker") -> Iterator["subprocess.Popen[bytes]"]:
    """A worker of the pool `quantize`, ended with everything it runs."""
    process = server.spawn(name, "worker", "start", "--pool", "quantize", "--name", name)
    try:
        yield process
    finally:
        end(process, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`, children first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        below = children.get(waiting.pop(0), [])
        found += below
        waiting += below
    return found


def end(process: "subprocess.Popen[bytes]", number: int) -> None:
    """Signal a process and all below it, and wait for the process."""
    for pid in [*reversed(descendants(process.pid)), process.pid]:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
    process.wait(PATIENCE_SECONDS)


@contextmanager
def halted(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """The process stands still while the context lasts: silent, and not dead."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def flow_process(under: "subprocess.Popen[bytes]") -> int:
    """The process that runs the flow: the lowest one below a worker or `serve`."""
    below = descendants(under.pid)
    assert below, "no flow process is running"
    return below[-1]


def wait_until(is_so: Callable[[], Any], problem: Callable[[], str], seconds: float = PATIENCE_SECONDS) -> Any:
    """What `is_so` answers as soon as that is true; AssertionError with `problem` when it never is."""
    deadline = time.monotonic() + seconds
    while not (answer := is_so()):
        assert time.monotonic() < deadline, problem()
        time.sleep(0.02)
    return answer


# Fixtures, for every test module (see conftest.py) ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    """A server to which everything was deployed, with the module's DEPLOY_OPTIONS and SERVER_SETTINGS where it has any."""
    settings = getattr(request.module, "SERVER_SETTINGS", {})
    with prefect_server(tmp_path_factory.mktemp("prefect"), **settings) as server:
        server.call("deploy", *getattr(request.module, "DEPLOY_OPTIONS", ()), module="flows.cli")
        yield server


@pytest.fixture
def alone(server: PrefectServer) -> Iterator[None]:
    """What a test leaves scheduled is cancelled after it: the workers of the next one would take it."""
    with nothing_left(server):
        yield


@pytest.fixture(scope="module")
def eight_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of `slow_model`."""
    return slow_model(tmp_path_factory.mktemp("model") / "Tiny_Model")


@pytest.fixture(scope="module")
def undisturbed(server: PrefectServer, eight_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of the output of a run of `slow_job` to which nothing happened."""
    job = slow_job(eight_layers, tmp_path_factory.mktemp("undisturbed"))
    run = start(server, job, state=Pending())
    assert finish(engine(server, run)) == 0, server.log(str(run))
    return contents(job.output)


# Runs ------------------------------------------------------------------------------------------------------------------


def slow_model(path: Path) -> Path:
    """A random llama of eight layers, wide enough that a layer takes a while."""
    return write_tiny_llama(path, layers=LAYERS, hidden_size=256, intermediate_size=512)


def slow_job(model: Path, place: Path, *, samples: int = 96, **checkpoint: Any) -> QuantizationJob:
    """A job whose layers take about half a second, from more samples than a tiny model needs."""
    place.mkdir(parents=True, exist_ok=True)
    calibration = place / "calibration.txt"
    calibration.write_text("\n".join(TEXTS) * samples)
    return QuantizationJob(
        model=str(model),
        output=str(place / "output"),
        quantization=GPTQConfig(bits=4, group_size=32),
        calibration=CalibrationConfig(data=str(calibration), samples=samples, sequence_length=128),
        checkpoint={"path": str(place / "checkpoint"), **checkpoint},
        devices=("cpu",),
    )


def start(
    server: PrefectServer,
    job: QuantizationJob,
    *,
    deployment: str = QUANTIZE,
    state: State | None = None,
    **parameters: Any,
) -> UUID:
    """Ask the server for a run of a deployment: now, by a worker, unless its first `state` says otherwise."""
    parameters |= {"job": job.model_dump(mode="json")}
    with server.client() as client:
        found = client.read_deployment_by_name(deployment)
        run = client.create_flow_run_from_deployment(found.id, parameters=parameters, state=state or Scheduled())
    return run.id


def engine(server: PrefectServer, run: UUID) -> "subprocess.Popen[bytes]":
    """The process that a worker would start for a run, without the worker: its exit code can be seen. Logs to the run."""
    return server.spawn(str(run), str(run), module="prefect.engine")


def finish(process: "subprocess.Popen[bytes]") -> int:
    """The exit code."""
    return process.wait(PATIENCE_SECONDS)


def wait_for_log(server: PrefectServer, name: str, text: str) -> None:
    wait_until(lambda: text in server.log(name), lambda: f"no `{text}` in {server.log(name)}")


def wait_until_staged(job: QuantizationJob, objects: int) -> None:
    """Until that many objects lie in the root, two for each finished layer, published or not."""
    place = Path(job.checkpoint.path) / "objects"
    wait_until(lambda: place.is_dir() and len(list(place.iterdir())) >= objects, lambda: f"nothing comes into {place}")


def read(server: PrefectServer, run: UUID) -> FlowRun:
    with server.client() as client:
        return client.read_flow_run(run)


def history(server: PrefectServer, run: UUID) -> list[str]:
    """Names of the states that the run went through."""
    with server.client() as client:
        states = client.read_flow_run_states(run)
    return [state.name or "" for state in sorted(states, key=lambda state: state.timestamp)]


def wait_for_state(server: PrefectServer, run: UUID, *names: str) -> State:
    """The run's state as soon as its name is one of `names`."""

    def state() -> State | None:
        found = read(server, run).state
        return found if found is not None and found.name in names else None

    return wait_until(state, lambda: f"history {history(server, run)}: {read(server, run).state}")


def wait_until_final(server: PrefectServer, run: UUID) -> State:
    def state() -> State | None:
        found = read(server, run).state
        return found if found is not None and found.is_final() else None

    return wait_until(state, lambda: f"history {history(server, run)}: {read(server, run).state}")


def set_state(
    server: PrefectServer, run: UUID, type_: StateType, name: str | None = None, *, force: bool = False
) -> None:
    """What a button of the UI sends."""
    with server.client() as client:
        client.set_flow_run_state(run, State(type=type_, name=name), force=force)


def press_retry(server: PrefectServer, run: UUID) -> None:
    """What the UI's button sends."""
    state = State(type=StateType.SCHEDULED, name="AwaitingRetry", message="Retry from the UI")
    with server.client() as client:
        answer = client.set_flow_run_state(run, state, force=False)
    assert answer.status.value == "ACCEPT", answer


def events(server: PrefectServer, run: UUID) -> dict[str, dict[str, Any]]:
    """Payloads of this project's events of a run, the last of each name, as the server's events API tells them."""
    body = {"filter": {"event": {"prefix": ["prefect-quantize."]}, "any_resource": {"id": [f"prefect.flow-run.{run}"]}}}
    with server.client() as client:
        found = client._client.post("/events/filter", json=body | {"limit": 50}).json()["events"]
    return {event["event"]: event["payload"] for event in reversed(found)}


def event(server: PrefectServer, run: UUID, name: str) -> dict[str, Any]:
    """The payload of `prefect-quantize.checkpoint.<name>` once the server has it."""
    name = f"prefect-quantize.checkpoint.{name}"
    return wait_until(lambda: events(server, run).get(name), lambda: f"no {name} in {events(server, run)}")


@contextmanager
def nothing_left(server: PrefectServer) -> Iterator[None]:
    yield
    unfinished = FlowRunFilter(
        state=FlowRunFilterState(
            type=FlowRunFilterStateType(
                any_=[StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED]
            )
        )
    )
    with server.client() as client:
        for run in client.read_flow_runs(flow_run_filter=unfinished):
            client.set_flow_run_state(run.id, Cancelled(), force=True)


def layers_published(job: QuantizationJob) -> int:
    """Layers of the newest generation at the job's checkpoint."""
    root = Path(job.checkpoint.path)
    if not (root / "CURRENT").exists():
        return 0
    with CheckpointStore.open(root, mode="read") as store:
        return max((generation.cursor for generation in store.generations()), default=0)


def wait_until_published(job: QuantizationJob, layers: int, server: PrefectServer, log: str = "worker") -> None:
    wait_until(lambda: layers_published(job) >= layers, lambda: f"{layers} layers are not published: {server.log(log)}")


def layer_states(server: PrefectServer, run: UUID) -> list[str]:
    """Final states of the layer tasks of all attempts of a run, by start."""
    with server.client() as client:
        runs = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run])))
    layers = [task for task in runs if task.task_key.startswith("quantize_layer-")]
    return [task.state_name or "" for task in sorted(layers, key=lambda task: task.start_time or task.created)]
