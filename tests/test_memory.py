"""Peak memory does not grow with the depth of the model: one layer at a time, whatever lies before and behind it."""

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL

from tasks.job import GPTQConfig
from tests.flow_jobs import tiny_job
from tests.tiny_models import write_tiny_llama

LAYERS, HIDDEN, INTERMEDIATE = 24, 512, 2048
# Prints the peak of each layer: when the first module of the next one is told of, it is read and set back.
MEASURE = """
import re, sys
from pathlib import Path
from flows.quantize_model import quantize_model
from tasks import running
from tasks.job import QuantizationJob

seen = -1

def read_peak(told):
    global seen
    if told.layer != seen:
        peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
        Path("/proc/self/clear_refs").write_text("5")
        if seen >= 0:
            print("peak", int(peak[1]) * 1024)
        seen = told.layer

with running.listening(read_peak):
    quantize_model(QuantizationJob.model_validate_json(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_the_last_layers_of_a_deep_model_peak_no_higher_than_the_first_ones(tmp_path: Path) -> None:
    model = write_tiny_llama(
        tmp_path / "model", layers=LAYERS, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, tied=True
    )
    job = tiny_job(model, tmp_path, quantization=GPTQConfig(group_size=64))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, job.model_dump_json()],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "PREFECT_API_URL": str(PREFECT_API_URL.value())},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    peaks = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("peak ")]
    assert len(peaks) == LAYERS - 1
    # Medians: what the allocator keeps differs from layer to layer.
    first, last = statistics.median(peaks[:8]), statistics.median(peaks[-8:])
    one_layer = 4 * (3 * HIDDEN * INTERMEDIATE + 2 * HIDDEN * HIDDEN)  # float32, without k and v
    print(
        f"peak of the first layers {first / 1e6:.1f} MB, of the last {last / 1e6:.1f}, one layer {one_layer / 1e6:.1f}"
    )
    assert last - first < one_layer
