"""Peak memory does not grow with the depth of the model, and is about what the plan says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL

from tasks.job import BitsAndBytesConfig, FP8Config, GGUFConfig, GPTQConfig, Quantization, RTNConfig
from tests.flow_jobs import tiny_job
from tests.tiny_models import write_tiny_llama

HIDDEN, INTERMEDIATE = 512, 2048
MEASURE = """
import re, sys
from flows.quantize_model import quantize_model
from tasks.job import QuantizationJob
report = quantize_model(QuantizationJob.model_validate_json(sys.argv[1]))
# Not ru_maxrss, which begins with what the parent had when it started this process.
peak = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())
print("layers", len(report.layers), "peak", int(peak[1]) * 1024)
"""

# Anonymous memory, by looking often: what is mapped from files is not the run's, and there is no high-water mark of it.
COMPARE = """
import re, sys, threading, time
from pathlib import Path
from flows.quantize_model import quantize_model
from tasks import preflight, quantize_layer, running
from tasks.job import QuantizationJob

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

peak = [0]
def look():
    while True:
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.0005)

threading.Thread(target=look, daemon=True).start()
begin, beginnings = quantize_layer.LayerWork, []
def begun(run, layer):
    running.return_freed_memory()
    if not beginnings:
        peak[0] = 0
    beginnings.append(anonymous())
    return begin(run, layer)

quantize_layer.LayerWork = begun
for line in Path(sys.argv[1]).read_text().splitlines():
    job = QuantizationJob.model_validate_json(line)
    plan = preflight.check(job)
    beginnings.clear()
    quantize_model(job)
    written = [sum(file.stat().st_size for file in space.path.rglob("*") if file.is_file()) for space in plan.spaces]
    print("figures", plan.memory.host_peak_bytes, peak[0] - beginnings[0],
          *(figure for space, size in zip(plan.spaces, written) for figure in (space.needed_bytes, size)))
"""
METHODS: tuple[Quantization, ...] = (
    RTNConfig(),
    RTNConfig(bits=8, group_size=-1, checkpoint_format="compressed-tensors"),
    FP8Config(),
    FP8Config(granularity="block", checkpoint_format="fp8"),
    BitsAndBytesConfig(),
    BitsAndBytesConfig(quant_type="int8"),
    GGUFConfig(quant_type="q8_0"),
    GGUFConfig(),
)


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_the_plan_of_a_method_without_a_chain_says_what_its_run_takes(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model", layers=2, hidden_size=1024, intermediate_size=4096)
    jobs = tmp_path / "jobs"
    jobs.write_text(
        "\n".join(
            tiny_job(model, tmp_path / str(number), quantization=method).model_dump_json()
            for number, method in enumerate(METHODS)
        )
    )
    environment = {**os.environ, "PREFECT_API_URL": str(PREFECT_API_URL.value()), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COMPARE, str(jobs)],
        cwd=Path(__file__).parent.parent, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("figures")]
    assert len(lines) == len(METHODS)
    for method, figures in zip(METHODS, lines, strict=True):
        memory, used, *spaces = map(int, figures)
        print(f"{method.method}: memory {memory / 1e6:.0f} MB planned, {used / 1e6:.0f} used; space {spaces}")
        assert used / 1.5 < memory < 1.5 * used, method
        for planned, written in (spaces[:2], spaces[2:]):
            assert written / 1.02 < planned < 1.02 * written, method


def peak_bytes(place: Path, layers: int) -> int:
    model = write_tiny_llama(
        place / "model", layers=layers, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, tied=True
    )
    job = tiny_job(model, place, quantization=GPTQConfig(group_size=64))
    environment = {**os.environ, "PREFECT_API_URL": str(PREFECT_API_URL.value())}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, job.model_dump_json()],
        cwd=Path(__file__).parent.parent, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    words = done.stdout.split()
    assert words[:2] == ["layers", str(layers)]
    return int(words[3])


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_a_model_four_times_as_deep_peaks_within_one_layer_of_the_shallow_one(tmp_path: Path) -> None:
    shallow, deep = (peak_bytes(tmp_path / str(layers), layers) for layers in (6, 24))
    one_layer = 4 * (3 * HIDDEN * INTERMEDIATE + 2 * HIDDEN * HIDDEN)  # float32, without k and v
    print(
        f"peak of 6 layers {shallow / 1e6:.1f} MB, of 24 layers {deep / 1e6:.1f} MB, one layer {one_layer / 1e6:.1f} MB"
    )
    assert deep - shallow < one_layer
