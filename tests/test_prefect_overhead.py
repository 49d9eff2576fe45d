"""The benchmark of what Prefect costs compares two ways of one job, which must give the same bytes."""

from pathlib import Path

import pytest

from benchmarks import prefect_overhead as benchmark
from tests.flow_jobs import contents, last_flow_run, layer_task_states

LAYERS = 3


@pytest.mark.parametrize("devices", [1, 2])
def test_with_and_without_prefect_a_layer_is_the_same_work(devices: int, tmp_path: Path, prefect_server: None) -> None:
    benchmark.write_model(tmp_path / "model", LAYERS)
    direct = benchmark.job_on(tmp_path / "model", tmp_path / "direct", devices)
    through = benchmark.job_on(tmp_path / "model", tmp_path / "through", devices)
    with benchmark.without_prefect():
        seconds, resident = benchmark.measured(direct)
    assert layer_task_states(last_flow_run().id) == [], "no layer is a task here"
    assert (len(seconds), len(resident)) == (LAYERS - 1, LAYERS)
    benchmark.measured(through)
    assert layer_task_states(last_flow_run().id) == ["Completed"] * LAYERS
    assert contents(direct.output) == contents(through.output)


def test_growth_is_the_last_quarter_against_the_first_without_its_warm_up(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.report("grows", [9.0] * 5 + [1.0] * 35 + [3.0] * 10, [10**8] * 40 + [2 * 10**8] * 10)
    told = capsys.readouterr().out
    assert "time 3.00, memory 2.000 (+100.0 of 200 MB)" in told
