"""A real process is killed with SIGKILL at every kind of moment; the run after it must not show that anything happened."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL

from checkpoint_store.errors import CheckpointStopped
from flows.demo_model import demo_model, shortened
from flows.quantize_model import quantize_model
from tasks.job import QuantizationJob
from tasks.output_directory import GGUF_FILE
from tasks.quantization import GGUFConfig, Quantization, RTNConfig
from tests.deployed import wait_until
from tests.flow_jobs import LAYERS, contents, last_flow_run, layer_task_states, layers_run, tiny_job
from tests.tiny_models import write_tiny_llama

pytestmark = pytest.mark.usefixtures("prefect_server")
PROCESS = Path(__file__).with_name("flow_process.py")
LIMIT_SECONDS = 240


@pytest.fixture(scope="module", params=["tiny", pytest.param("smollm2", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model, and the first layers of SmolLM2-135M."""
    if request.param == "smollm2":
        return shortened(demo_model(print), LAYERS)
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", layers=LAYERS)


@pytest.fixture(scope="module")
def uninterrupted(model: Path, tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> dict[str, str]:
    """Digests of the output of a run that nothing disturbed."""
    job = tiny_job(model, tmp_path_factory.mktemp("uninterrupted"))
    quantize_model(job)
    return contents(job.output)


@pytest.fixture(scope="module")
def processes(prefect_server: None) -> Iterator["subprocess.Popen[bytes]"]:
    """Makes a process for each job; see flow_process.py."""
    environment = {**os.environ, "PREFECT_API_URL": str(PREFECT_API_URL.value()), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, str(PROCESS)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as made:
        yield made


@dataclass(frozen=True)
class Run:
    """A process that works on a job, or has died of it."""

    made_by: "subprocess.Popen[bytes]"
    pid: int
    told: Path

    @classmethod
    def of(cls, processes: "subprocess.Popen[bytes]", job: QuantizationJob, moment: str) -> "Run":
        assert processes.stdin is not None and processes.stdout is not None
        told = Path(job.output).with_name("told")
        processes.stdin.write(json.dumps([job.model_dump_json(), moment, str(told)]).encode() + b"\n")
        return cls(processes, int(processes.stdout.readline()), told)

    def output(self) -> str:
        return self.told.read_text() if self.told.exists() else ""

    def wait(self) -> int:
        """The exit code; a process that does not end is killed."""
        assert self.made_by.stdout is not None
        if not select.select([self.made_by.stdout], [], [], LIMIT_SECONDS)[0]:
            os.kill(self.pid, signal.SIGKILL)
        return int(self.made_by.stdout.readline())


@pytest.mark.parametrize(
    ("moment", "published"),
    [
        ("inside a layer", 1),
        ("between object and manifest", 1),
        ("between manifest and CURRENT", 1),
        ("during export", LAYERS),
    ],
)
def test_a_run_after_a_kill_gives_the_bytes_of_an_uninterrupted_one(
    moment: str,
    published: int,
    model: Path,
    tmp_path: Path,
    uninterrupted: dict[str, str],
    processes: "subprocess.Popen[bytes]",
) -> None:
    job = tiny_job(model, tmp_path)
    killed = Run.of(processes, job, moment)
    assert killed.wait() == -signal.SIGKILL, killed.output()
    assert not Path(job.output).exists()

    with layers_run() as ran:
        report = quantize_model(job)

    assert report.resumed_from == published
    assert ran == list(range(published, LAYERS)), "a published layer ran twice, or an unpublished one did not"
    states = layer_task_states(last_flow_run().id)
    assert states == ["Cached"] * published + ["Completed"] * (LAYERS - published)
    assert contents(job.output) == uninterrupted
    assert list(Path(job.output).parent.glob(".output.partial-*")) == []


@pytest.mark.parametrize(
    ("quantization", "moment", "published", "told"),
    [
        (RTNConfig(group_size=32), "inside a layer", 1, "layer 1"),
        (GGUFConfig(quant_type="q8_0"), "during export", LAYERS, f"died within {GGUF_FILE}"),
    ],
    ids=["rtn inside a layer", "gguf within the file"],
)
def test_methods_without_a_chain_survive_a_kill_too(
    quantization: Quantization,
    moment: str,
    published: int,
    told: str,
    tmp_path: Path,
    processes: "subprocess.Popen[bytes]",
) -> None:
    model = write_tiny_llama(tmp_path / "tiny", layers=LAYERS)
    undisturbed = tiny_job(model, tmp_path / "undisturbed", quantization=quantization)
    quantize_model(undisturbed)
    job = tiny_job(model, tmp_path, quantization=quantization)
    killed = Run.of(processes, job, moment)
    assert killed.wait() == -signal.SIGKILL and told in killed.output(), killed.output()
    assert not Path(job.output).exists()

    with layers_run() as ran:
        report = quantize_model(job)

    assert report.resumed_from == published
    assert ran == list(range(published, LAYERS))
    assert contents(job.output) == contents(undisturbed.output)
    assert list(Path(job.output).parent.glob(".output.partial-*")) == []


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> tuple[Path, dict[str, str]]:
    """A model, and digests of what one device makes of it, a layer at a time, by a method without a chain."""
    place = tmp_path_factory.mktemp("rounded")
    model = write_tiny_llama(place / "tiny", layers=LAYERS)
    job = tiny_job(model, place, quantization=RTNConfig(group_size=32))
    quantize_model(job)
    return model, contents(job.output)


MODULES = 7 * LAYERS
OF_TWO_LAYERS = [
    ("between object and manifest", 1),
    ("between manifest and CURRENT", 1),
    ("module 4", 1),
    ("module 10", 1),
    ("module 16", 3),
]
MORE_MODULES = [(f"module {number}", 1) for number in range(1, MODULES + 1, 4)]


@pytest.mark.parametrize(
    ("moment", "interval"),
    [*OF_TWO_LAYERS, *(pytest.param(*which, marks=pytest.mark.slow) for which in MORE_MODULES)],
)
def test_a_kill_while_two_layers_are_in_work_leaves_the_first_layers_and_nothing_else(
    moment: str,
    interval: int,
    rounded: tuple[Path, dict[str, str]],
    tmp_path: Path,
    processes: "subprocess.Popen[bytes]",
) -> None:
    model, undisturbed = rounded
    job = tiny_job(
        model, tmp_path, quantization=RTNConfig(group_size=32), devices=("cpu", "cpu"), interval=f"layer:{interval}"
    )
    killed = Run.of(processes, job, moment)
    assert killed.wait() == -signal.SIGKILL, killed.output()
    assert not Path(job.output).exists()

    with layers_run() as ran:
        published = quantize_model(job).resumed_from or 0

    if moment.startswith("module"):
        assert published <= int(moment.split()[1]) // 7 and published % interval == 0
    else:
        assert published == 1
    assert sorted(ran) == list(range(published, LAYERS))
    assert layer_task_states(last_flow_run().id) == ["Cached"] * published + ["Completed"] * (LAYERS - published)
    assert contents(job.output) == undisturbed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_process_group_publishes_the_layer_in_work_and_raises_checkpoint_stopped(
    number: int, model: Path, tmp_path: Path, uninterrupted: dict[str, str], processes: "subprocess.Popen[bytes]"
) -> None:
    job = tiny_job(model, tmp_path, interval="layer:100")
    process = Run.of(processes, job, "never")
    try:
        wait_until(lambda: "layer 0\n" in process.output(), process.output, LIMIT_SECONDS)
        os.killpg(process.pid, number)
    finally:
        code = process.wait()
    told = process.output()
    assert code == 1 and CheckpointStopped.__name__ in told, told
    assert "1 of 3 layers published" in told, told

    with layers_run() as ran:
        report = quantize_model(job)
    assert (report.resumed_from, ran) == (1, [1, 2])
    assert contents(job.output) == uninterrupted
