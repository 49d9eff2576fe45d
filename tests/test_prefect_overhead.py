"""The benchmark of what Prefect costs compares two ways of one job, which must give the same bytes, and judges growth."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import prefect_overhead as benchmark
from benchmarks.prefect_overhead import Growth, Layer
from tests.flow_jobs import contents, last_flow_run, layer_task_states

LAYERS = 4
PROJECT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("devices", [1, 2])
def test_with_and_without_prefect_a_layer_is_the_same_work(devices: int, tmp_path: Path, prefect_server: None) -> None:
    benchmark.write_model(tmp_path / "model", LAYERS)
    mixed = benchmark.job_on(tmp_path / "model", tmp_path / "mixed", devices)
    through = benchmark.job_on(tmp_path / "model", tmp_path / "through", devices)
    with benchmark.without_prefect(frozenset({0, 3})):
        layers = benchmark.measured(mixed)
    assert layer_task_states(last_flow_run().id) == ["Completed"] * 2, "the others are no tasks here"
    assert len(layers) == LAYERS and all(layer.seconds > 0 and layer.cpu_seconds > 0 for layer in layers)
    benchmark.measured(through)
    assert layer_task_states(last_flow_run().id) == ["Completed"] * LAYERS
    assert contents(mixed.output) == contents(through.output)


def test_both_ways_have_a_block_in_each_part_and_take_turns_to_be_first() -> None:
    blocks = benchmark.blocks_of(200)
    assert [layer for block in blocks for layer in block.layers] == list(range(2 * (200 + benchmark.WARM_UP)))
    parts = [[block for block in blocks if block.part == part] for part in range(benchmark.PARTS)]
    assert [[block.through_prefect for block in part] for part in parts[:2]] == [[True, False], [False, True]]
    assert {len(block.layers) for part in parts for block in part} == {20}


def test_growth_is_told_from_noise_by_its_interval() -> None:
    rising = Growth.of([10 + part for part in range(10)], 10.0)
    assert (rising.percent, rising.low, rising.high) == (pytest.approx(100), pytest.approx(100), pytest.approx(100))
    assert str(rising) == "+100.0 % (+100.0 to +100.0): grows"
    flat = Growth.of([10.1, 9.9, 10.2, 9.8, 10.0, 10.1, 9.9, 10.2, 9.8, 10.0], 10.0)
    assert flat.low < 0 < flat.high and str(flat).endswith("flat within the noise")
    busy = Growth.of([10.0, 10.1, 40.0, 9.9, 10.1, 10.0, 35.0, 9.9, 10.1, 10.0], 10.0)
    assert abs(busy.percent) < 5 and str(busy).endswith("flat within the noise"), "two bursts of load are no growth"


def test_the_interval_misses_the_truth_about_as_often_as_it_says() -> None:
    """An independent check of the ranks: runs with a known trend of 20 % and normal noise of 4 % per part."""
    draw = random.Random(0)
    runs = [Growth.of([10 + 0.2 * part + draw.gauss(0, 0.4) for part in range(10)], 10.0) for _ in range(2000)]
    held = sum(run.low <= 20 <= run.high for run in runs) / len(runs)
    assert 0.94 <= held <= 0.98


def test_the_report_charges_prefect_with_what_its_layers_take_longer() -> None:
    blocks = benchmark.blocks_of(100)
    layers = []
    for block in blocks:
        part = block.part or 0
        for _ in block.layers:
            seconds = (0.020 if block.through_prefect else 0.010 + 0.001 * part) + 0.001 * part
            layers.append(Layer(seconds, seconds / 2, 10**8 + block.through_prefect * len(layers)))
    told = "\n".join(benchmark.report(layers, blocks, 2))
    assert "wall time without Prefect:     19.0 ms a layer" in told
    assert "wall time through Prefect:     24.5 ms a layer; growth over the run in percent of a layer: +40.8 % " in told
    assert "wall time that Prefect takes per layer and shard: 2.8 ms (at most 100)" in told
    assert "CPU  time that Prefect takes per layer and shard: 1.4 ms" in told


def test_calls_are_counted_in_threads_too_and_reported_in_the_place_of_times() -> None:
    program = (
        "from benchmarks.prefect_overhead import count_calls\n"
        "import threading\n"
        "calls = count_calls()\n"
        "def work():\n"
        "    for _ in range(1000): abs(-1)\n"
        "before = calls()\n"
        "thread = threading.Thread(target=work); thread.start(); thread.join()\n"
        "assert 1000 <= calls() - before < 1200, calls() - before\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    blocks = benchmark.blocks_of(100)
    layers = [Layer(1.0, 1.0, 10**8, 30 if block.through_prefect else 20) for block in blocks for _ in block.layers]
    told = list(benchmark.report(layers, blocks, 1))
    assert told[2].startswith("calls Prefect's part:     10.0 calls a layer;") and "flat" in told[2]
    assert not any("time" in line for line in told)
