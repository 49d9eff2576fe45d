"""The time that the layers will take, told beforehand by a trial: near what they take, quick, and no part of the result."""

import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from flows.quantize_model import quantize_model
from tasks import preflight
from tasks.devices import DevicePool
from tasks.job import QuantizationJob
from tasks.models.decoder import Decoder
from tasks.models.source import SourceModel
from tasks.plan import TimeEstimate, duration
from tasks.quantization import (
    AWQConfig,
    BitsAndBytesConfig,
    EXL3Config,
    FP8Config,
    GGUFConfig,
    GPTQConfig,
    ParoQuantConfig,
    QQQConfig,
    RTNConfig,
)
from tasks.schemes import scheme_of
from tasks.time_estimate import Trial
from tests.flow_jobs import tiny_job
from tests.tiny_families import write_tiny
from tests.tiny_models import TEXTS, write_tiny_llama

METHODS: list[Any] = [
    GPTQConfig(group_size=32), QQQConfig(group_size=128), AWQConfig(group_size=32), RTNConfig(group_size=32), FP8Config(),
    BitsAndBytesConfig(), GGUFConfig(), GGUFConfig(imatrix=True), EXL3Config(), ParoQuantConfig(group_size=64),
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tried") / "model", hidden_size=256, intermediate_size=512)


def trial_of(job: QuantizationJob, **options: Any) -> Trial:
    source = SourceModel.open(job.model)
    settings = {"tokens": 4096, "batch_tokens": 256, "length": 128, "rewinds": False, "layer_bytes_after": 1 << 20}
    return Trial(
        Decoder.from_source(source), scheme_of(job.quantization, source), DevicePool.resolve(("cpu",)),
        **(settings | options),
    )  # fmt: skip


@pytest.mark.parametrize("config", METHODS, ids=lambda config: config.method)
def test_every_method_can_be_tried(model: Path, tmp_path: Path, config: Any) -> None:
    plan = preflight.check(tiny_job(model, tmp_path, quantization=config), trial=True)
    assert plan.time is not None and len(plan.time.layer_seconds) == plan.layer_count
    assert all(0.1 < seconds < 600 for seconds in plan.time.layer_seconds)
    assert plan.time.told() in plan.table() and plan.as_json()["time"]["layer_seconds"]


def test_a_mixture_of_experts_can_be_tried(tmp_path: Path) -> None:
    job = tiny_job(write_tiny("qwen3_moe", tmp_path / "model"), tmp_path)
    assert all(seconds > 0.1 for seconds in trial_of(job).estimate().layer_seconds)


@pytest.mark.parametrize(
    "dynamic", [{"+:.*down_proj": {"bits": 8, "group_size": 128}}, {"-:.*mlp.*": {}}, {r"-:model\.layers\.0\..*": {}}]
)
def test_modules_under_rules_are_tried_as_they_are_quantized(model: Path, tmp_path: Path, dynamic: Any) -> None:
    config = GPTQConfig(group_size=32, dynamic=dynamic, true_sequential=False)
    plan = preflight.check(tiny_job(model, tmp_path, quantization=config), trial=True)
    assert plan.time is not None and len(plan.time.layer_seconds) == plan.layer_count == 2


def test_a_quantized_head_is_a_step_of_its_own(model: Path, tmp_path: Path) -> None:
    config = GPTQConfig(group_size=32, lm_head=True)
    plan = preflight.check(tiny_job(model, tmp_path, quantization=config), trial=True)
    assert plan.time is not None and len(plan.time.layer_seconds) == plan.layer_count + 1


def test_what_the_first_use_alone_takes_is_no_time_of_a_layer(model: Path, tmp_path: Path) -> None:
    job = tiny_job(model, tmp_path, quantization=EXL3Config(bits=8))
    uses: list[str] = []

    def compiled_at_first(trial: Trial, name: str, weight_NK: Any, state: Any) -> None:
        if not uses:
            time.sleep(3)
        uses.append(name)

    with mock.patch.object(Trial, "_whole_module", compiled_at_first):
        estimate = trial_of(job).estimate(threads=1)
    # Three seconds for 128 x 128 weights would be a minute for a layer of this model.
    assert all(seconds < 10 for seconds in estimate.layer_seconds)


def test_a_trial_that_fails_is_told_and_costs_nothing(model: Path, tmp_path: Path, monkeypatch) -> None:
    def fail(trial: Trial, threads: int | None = None) -> TimeEstimate:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(Trial, "estimate", fail)
    plan = preflight.check(tiny_job(model, tmp_path), trial=True)
    assert plan.time is None and "the trial failed: no such kernel (RuntimeError)" in plan.table()


def test_no_trial_is_made_of_who_wants_none(model: Path, tmp_path: Path) -> None:
    job = tiny_job(model, tmp_path).model_copy(update={"time_estimate": False})
    assert preflight.check(job, trial=True).time is None
    assert preflight.check(tiny_job(model, tmp_path)).time is None


def test_more_tokens_and_rewinding_take_longer_and_threads_are_as_before(model: Path, tmp_path: Path) -> None:
    trial, before = trial_of(tiny_job(model, tmp_path)), torch.get_num_threads()
    plain = sum(trial.estimate(threads=1).layer_seconds)
    assert torch.get_num_threads() == before
    # With the same measurements, so that the machine's mood does not matter.
    trial.tokens *= 100
    more = sum(trial.estimate(threads=1).layer_seconds)
    trial.rewinds = True
    assert plain < more < sum(trial.estimate(threads=1).layer_seconds)


def test_a_layer_of_the_largest_models_is_tried_in_seconds(model: Path, tmp_path: Path, monkeypatch) -> None:
    trial = trial_of(tiny_job(model, tmp_path, quantization=GPTQConfig()))
    shapes = {"self_attn.q_proj": (8192, 8192), "mlp.down_proj": (8192, 28672)}
    monkeypatch.setattr(trial.decoder, "linear_shapes", lambda i: shapes)
    monkeypatch.setattr(trial.decoder, "subsets", lambda i: tuple((name,) for name in shapes))
    began = time.process_time()
    estimate = trial.estimate(threads=1)
    assert time.process_time() - began < 15
    # A factor of 28672 columns takes 1.6e13 operations in float64; no processor's core does 200 GFLOP/s of them.
    assert estimate.layer_seconds[0] > 80


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.2, "1 s"), (40, "40 s"), (99, "99 s"), (100, "2 min"), (3540, "59 min"), (11400, "3 h 10 min"), (10800, "3 h"), (212_000, "59 h")],
)  # fmt: skip
def test_times_are_told_as_people_say_them(seconds: float, told: str) -> None:
    assert duration(seconds) == told


def test_what_is_told_is_of_the_layers_to_come() -> None:
    estimate = TimeEstimate((60.0, 600.0, 600.0), 1.0)
    assert estimate.told(1) == "about 20 min for 2 layers"


@pytest.fixture
def threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server", "threads_restored")
@pytest.mark.parametrize(
    ("config", "sizes"),
    [(GPTQConfig(group_size=64), (768, 2048)), (RTNConfig(group_size=64), (2048, 4096))],  # layers of a second or two
    ids=["gptq", "rtn"],
)
def test_the_estimate_of_a_run_is_within_a_factor_of_what_its_layers_take(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: Any, sizes: tuple[int, int]
) -> None:
    # Threads that share their cores with others wait for each other, the longer the smaller their pieces are.
    torch.set_num_threads(1)
    source = write_tiny_llama(tmp_path / "model", layers=4, hidden_size=sizes[0], intermediate_size=sizes[1])
    text = tmp_path / "text.txt"
    text.write_text(" ".join(TEXTS) * 200)
    calibration = {"data": str(text), "samples": 16, "sequence_length": 128, "batch_size": 1}
    job = tiny_job(source, tmp_path, quantization=config, calibration=calibration)
    ratios = []
    for attempt in range(3):  # a machine that others use may be slow for one of the two and not for the other
        place = tmp_path / str(attempt)
        told: list[float] = []
        original = Trial.estimate

        def seen(trial: Trial, threads: int | None = None, told: list[float] = told, original: Any = original) -> Any:
            estimate = original(trial, threads)
            told.append(sum(estimate.layer_seconds))
            return estimate

        with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.INFO):
            patch.setattr(Trial, "estimate", seen)
            report = quantize_model(
                job.model_copy(
                    update={
                        "output": str(place / "output"),
                        "checkpoint": job.checkpoint.model_copy(update={"path": str(place / "root")}),
                    }
                )
            )
        assert re.search(r"about .+ for 4 layers, by a trial of", caplog.text)
        took = sum(layer.seconds for layer in report.layers)
        ratios.append(told[0] / took)
        print(f"estimated {told[0]:.1f} s, took {took:.1f} s")
        if 1 / 1.5 < ratios[-1] < 1.5:
            return
    pytest.fail(f"the estimate was {ratios} times what the layers took")
