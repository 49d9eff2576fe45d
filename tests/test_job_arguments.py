"""The job's options on the command line: every field has one, and what can't be is refused by the option's name."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from checkpoint_store.config import CheckpointConfig
from flows.job_arguments import METHODS, SECTIONS, SWITCHES, UsageError, add_job_arguments, job_from
from tasks.job import CalibrationConfig, QuantizationJob, TelemetryConfig
from tasks.quantization import (
    AWQConfig,
    BitsAndBytesConfig,
    EXL3Config,
    FOEMConfig,
    FP8Config,
    GGUFConfig,
    GPTAQConfig,
    GPTQConfig,
    Quantization,
    RTNConfig,
)


def job_of(command: str) -> QuantizationJob:
    parser = argparse.ArgumentParser()
    add_job_arguments(parser)
    return job_from(parser.parse_args(command.split()))


def test_every_option_reaches_its_field() -> None:
    job = job_of(
        "MODEL --output OUT --method gptq --bits 3 --group-size 64 --asym --mse 2.4 --format gptq_v2 --desc-act "
        "--static-groups --no-true-sequential --block-size 64 --damp-percent 0.1 --damp-increment 0.02 --fallback-tokens 0.01 "
        "--calibration data.jsonl --split test --dataset-name en --column body --samples 32 --sequence-length 512 "
        "--min-length 5 --batch-size 2 --concat-size 256 --concat-separator | --sort desc --checkpoint ROOT "
        "--resume required --interval layer:3 --keep-last 4 --no-strict-device-check --allow-network-filesystem "
        "--telemetry --devices cpu,cpu --offload-directory SCRATCH --seed 7"
    )
    assert job == QuantizationJob(
        model="MODEL",
        output="OUT",
        quantization=GPTQConfig(
            bits=3,
            group_size=64,
            sym=False,
            mse=2.4,
            checkpoint_format="gptq_v2",
            desc_act=True,
            static_groups=True,
            true_sequential=False,
            block_size=64,
            damp_percent=0.1,
            damp_increment=0.02,
            fallback_tokens=0.01,
        ),
        calibration=CalibrationConfig(
            data="data.jsonl",
            split="test",
            name="en",
            column="body",
            samples=32,
            sequence_length=512,
            min_length=5,
            batch_size=2,
            concat_size=256,
            concat_separator="|",
            sort="desc",
        ),
        checkpoint=CheckpointConfig(
            path="ROOT",
            resume="required",
            interval="layer:3",
            keep_last=4,
            strict_device_check=False,
            allow_network_filesystem=True,
        ),
        telemetry=TelemetryConfig(device=True),
        devices=("cpu", "cpu"),
        offload_directory="SCRATCH",
        seed=7,
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("rtn --bits 8 --format compressed-tensors", RTNConfig(bits=8, checkpoint_format="compressed-tensors")),
        ("rtn --format awq --asym", RTNConfig(sym=False, checkpoint_format="awq")),
        ("gptq --gptaq", GPTQConfig(gptaq=GPTAQConfig())),
        ("gptq --gptaq-alpha 0.5", GPTQConfig(gptaq=GPTAQConfig(alpha=0.5))),
        ("gptq --gptaq --gptaq-alpha 0.5", GPTQConfig(gptaq=GPTAQConfig(alpha=0.5))),
        ("gptq --foem", GPTQConfig(foem=FOEMConfig())),
        ("gptq --foem --foem-alpha 0.25 --foem-beta 0.1", GPTQConfig(foem=FOEMConfig(alpha=0.25, beta=0.1))),
        ("awq", AWQConfig()),
        (
            "awq --bits 8 --sym --n-grid 10 --no-duo-scaling --no-apply-clip --fallback-tokens 0.1 --format "
            "compressed-tensors",
            AWQConfig(
                bits=8,
                sym=True,
                n_grid=10,
                duo_scaling=False,
                apply_clip=False,
                fallback_tokens=0.1,
                checkpoint_format="compressed-tensors",
            ),
        ),
        (
            "fp8 --fp8-format e5m2 --granularity row --format fp8",
            FP8Config(fp8_format="e5m2", granularity="row", checkpoint_format="fp8"),
        ),
        ("bitsandbytes", BitsAndBytesConfig()),
        ("gguf --quant-type q6_k --strict --imatrix", GGUFConfig(quant_type="q6_k", strict=True, imatrix=True)),
        ("exl3 --bits 4", EXL3Config(bits=4)),
        (
            "exl3 --bits 2.5 --codebook mul1 --out-scales never --sigma-reg 0.05 --compiled",
            EXL3Config(bits=2.5, codebook="mul1", out_scales="never", sigma_reg=0.05, compiled=True),
        ),
        (
            "bitsandbytes --quant-type fp4 --no-double-quant --compute-dtype float32",
            BitsAndBytesConfig(quant_type="fp4", double_quant=False, compute_dtype="float32"),
        ),
    ],
)
def test_each_method_has_options_of_its_own(options: str, expected: Quantization) -> None:
    assert job_of(f"MODEL --output OUT --method {options}").quantization == expected


def test_numbers_may_be_written_as_people_write_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert job_of("MODEL --output OUT --damp-percent 1e-2").quantization == GPTQConfig(damp_percent=0.01)
    with pytest.raises(SystemExit):
        job_of("MODEL --output OUT --damp-percent much")
    assert "--damp-percent: invalid number value: 'much'" in capsys.readouterr().err


def test_rules_come_as_json_or_in_a_file_of_it(tmp_path: Path) -> None:
    rules = {r"-:.*\.0\.": {}, ".*down_proj": {"bits": 8, "group_size": 32}}
    (tmp_path / "rules.json").write_text(json.dumps(rules, indent=1))
    for text in (json.dumps(rules, separators=(",", ":")), f"{tmp_path}/rules.json"):
        assert job_of(f"MODEL --output OUT --lm-head --dynamic {text}").quantization == GPTQConfig(
            lm_head=True, dynamic=rules
        )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rules.json", "neither JSON nor a file"),
        ('{"a":{}', "can't be read"),
        ('{"a":{},"a":{"bits":8}}', "`a` is there twice"),
    ],
)
def test_rules_that_can_not_be_read_are_told(text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        job_of(f"MODEL --output OUT --dynamic {text}")
    assert words in capsys.readouterr().err


def test_no_field_of_the_job_lacks_an_option() -> None:
    parser = argparse.ArgumentParser()
    add_job_arguments(parser)
    reachable = {action.dest for action in parser._actions}
    methods = {f"quantization.{name}" for model in METHODS.values() for name in model.model_fields if name != "method"}
    others = {f"{section}.{name}" for section, model in SECTIONS.items() for name in model.model_fields}
    whole = {
        "model",
        "output",
        ".devices",
        ".memory_limit",
        ".hidden_states_limit",
        ".time_estimate",
        ".offload_directory",
        ".seed",
    }
    switches = {f"quantization.{name}.{part}" for name, model in SWITCHES.items() for part in model.model_fields}
    assert methods | others | whole | switches <= reachable
    assert set(QuantizationJob.model_fields) == {name.lstrip(".") for name in whole} | set(SECTIONS) | {"quantization"}


def test_options_that_are_not_given_leave_the_defaults() -> None:
    assert job_of("MODEL --output OUT") == QuantizationJob(model="MODEL", output="OUT")
    assert job_of("MODEL --output OUT --method rtn").quantization == RTNConfig()
    assert job_of("MODEL --output OUT --sym --no-act-group-aware").quantization == GPTQConfig(act_group_aware=False)
    assert job_of("MODEL --output OUT --desc-act").quantization == GPTQConfig(desc_act=True, act_group_aware=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ('--dynamic {"a":{"bits":5}}', "--dynamic 0.bits 5"),
        ('--method fp8 --dynamic {"a":{}}', "only rules with `-:`"),
        ('--method qqq --dynamic {"-:a":{}}', "not supported by method `qqq`: `dynamic`"),
        ("--method qqq --gptaq", "not supported by method `qqq`: `gptaq`"),
        ("--method awq --foem-beta 0.1", "not supported by method `awq`: `foem`"),
        ("--gptaq --foem", "leave out gptaq, and give foem its alpha"),
        ("--gptaq-alpha 2", "--gptaq-alpha 2"),
        ("--foem-beta -1", "--foem-beta -1"),
        ("--method awq --lm-head", "not supported by method `awq`: `lm_head`"),
        ("--method rtn --desc-act", "--desc-act does not apply to method `rtn`"),
        ("--method fp8 --bits 8", "--bits does not apply to method `fp8`"),
        ("--method gptq --bits 5", "--bits 5"),
        ("--method gptq --bits 2.5", "--bits 2.5"),
        ("--method exl3 --bits 1.5", "--bits 1.5"),
        ("--method gptq --format fp8", "--format fp8"),
        ("--method gptq --format awq", "--format awq"),
        ("--method awq --bits 8", "checkpoint_format `awq` holds 4 bits, not 8"),
        ("--method awq --bits 3", "--bits 3"),
        ("--method awq --group-size 0", "group_size 0 is not a size"),
        ("--method gguf --quant-type nf4", "--quant-type nf4"),
        ("--keep-last 1", "--keep-last 1"),
        ("--keep-last 257", "--keep-last 257"),
        ("--interval hourly", "--interval: interval `hourly` is not understood"),
        ("--group-size 0", "group_size 0 is not a size"),
        ("--desc-act --act-group-aware", "two orders of one thing"),
        ("--damp-percent 1.5", "--damp-percent 1.5"),
        ("--calibration x --samples 0", "--samples 0"),
        ("--samples 4", "--samples says how to read calibration data, and none is given"),
        ("--seed -1", "--seed -1"),
        ("--devices cpu,", "--devices: devices is empty"),
    ],
)
def test_what_can_not_be_is_refused_by_its_option(options: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        job_of(f"MODEL --output OUT {options}")
    assert words in str(refused.value)


def test_an_unknown_method_is_told_with_the_supported_ones(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        job_of("MODEL --output OUT --method awq-next")
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert all(method in told for method in METHODS)


def test_numbers_may_be_written_with_an_exponent_and_what_is_none_is_told_plainly(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = job_of("MODEL --output OUT --calibration data.jsonl --damp-percent 1e-2")
    assert isinstance(job.quantization, GPTQConfig)
    assert job.quantization.damp_percent == 0.01
    with pytest.raises(SystemExit):
        job_of("MODEL --output OUT --bits many")
    assert "argument --bits: invalid number value: 'many'" in capsys.readouterr().err
