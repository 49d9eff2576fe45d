"""Peak memory does not grow with the depth of the model: one layer at a time, whatever lies before and behind it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL

from tasks.job import GPTQConfig
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
