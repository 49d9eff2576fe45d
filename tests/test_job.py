"""Tests of the job: what a user may write, and what each mistake is told."""

import os
from pathlib import Path

import numpy
import pytest
import torch
from datasets import Dataset
from pydantic import ValidationError

from tasks.job import CalibrationConfig, QuantizationJob, absolute_path, checkpoint_root
from tasks.quantization import UNSUPPORTED_OPTIONS, GPTQConfig, RTNConfig


def job(**changes: object) -> QuantizationJob:
    return QuantizationJob.model_validate({"model": "source", "output": "result", **changes})


def message(error: pytest.ExceptionInfo[ValidationError]) -> str:
    (only,) = error.value.errors()
    return only["msg"]


def test_defaults_are_those_of_the_method_tables():
    gptq = GPTQConfig()
    assert (gptq.bits, gptq.group_size, gptq.sym, gptq.desc_act, gptq.damp_percent) == (4, 128, True, False, 0.05)
    assert (RTNConfig().bits, RTNConfig().group_size) == (4, 128)


@pytest.mark.parametrize("field", ["memory_limit", "hidden_states_limit"])
def test_a_size_may_be_text_for_the_schema_that_forms_and_servers_read_too(field):
    assert getattr(job(**{field: "1.5GB"}), field) == 1_500_000_000
    kinds = [choice["type"] for choice in QuantizationJob.model_json_schema()["properties"][field]["anyOf"]]
    assert kinds == ["integer", "string", "null"]
    with pytest.raises(ValidationError, match="write `24GB`"):
        job(**{field: "much"})


def test_a_job_survives_json_unchanged():
    written = job(calibration={"data": [[1, 2], [3]], "min_length": 1}, quantization={"method": "rtn", "bits": 8})
    assert QuantizationJob.model_validate_json(written.model_dump_json()) == written


UNSUPPORTED = [
    (place, name)
    for place, fields in (("job", {}), ("gptq", GPTQConfig.model_fields), ("rtn", RTNConfig.model_fields))
    for name in UNSUPPORTED_OPTIONS
    if name not in fields
]


@pytest.mark.parametrize(("place", "name"), UNSUPPORTED)
def test_an_unsupported_option_is_refused_by_its_own_name(place, name):
    neutral = UNSUPPORTED_OPTIONS[name][0]
    value = next(value for value in (True, False, {"x": 1}) if value not in neutral)
    with pytest.raises(ValidationError) as error:
        job(**{name: value}) if place == "job" else job(quantization={"method": place, name: value})
    assert f"`{name}`" in message(error)
    for harmless in neutral:
        job(**{name: harmless}) if place == "job" else job(quantization={"method": place, name: harmless})


def test_all_unsupported_options_are_named_at_once():
    with pytest.raises(ValidationError) as error:
        GPTQConfig.model_validate({"embeddings": True, "rotation": "hadamard"})
    assert "`embeddings`" in message(error)
    assert "`rotation`" in message(error)


@pytest.mark.parametrize(
    ("quantization", "part"),
    [
        ({"method": "hqq"}, "'rtn', 'qqq', 'gptq'"),
        ({"method": "gptq", "bits": 5}, "2, 3, 4 or 8"),
        ({"method": "gptq", "group_size": 0}, "group_size 0"),
        ({"method": "gptq", "checkpoint_format": "marlin"}, "'gptq', 'gptq_v2' or 'compressed-tensors'"),
        ({"method": "gptq", "mse": float("inf")}, "finite"),
        ({"method": "gptq", "mse": float("nan")}, "finite"),
        ({"method": "gptq", "desc_act": True, "act_group_aware": True}, "choose one"),
        ({"method": "rtn", "damp_percent": 0.1}, "not permitted"),
        ({"method": "gptq", "gptaq": True, "foem": {"alpha": 0.25}}, "leave out gptaq, and give foem its alpha"),
        ({"method": "gptq", "gptaq": {"alpha": 1.5}}, "less than or equal to 1"),
        ({"method": "gptq", "foem": {"beta": -0.1}}, "greater than or equal to 0"),
        ({"method": "gptq", "dynamic": {".*": {"gptaq": {"alpha": 0.5}}}}, "rule `.*` has gptaq"),
        ({"method": "qqq", "gptaq": True}, "`gptaq` (GPTAQ, which is an option of gptq)"),
        ({"method": "awq", "foem": {"beta": 0.1}}, "`foem` (FOEM, which is an option of gptq)"),
    ],
)
def test_a_quantization_that_does_not_exist_is_refused(quantization, part):
    with pytest.raises(ValidationError) as error:
        job(quantization=quantization)
    assert part in message(error)


def test_an_option_with_settings_is_switched_on_and_off_by_true_and_false():
    plain = GPTQConfig()
    assert GPTQConfig.model_validate({"gptaq": False, "foem": False}) == plain
    assert (plain.asymmetry, plain.first_order) == (0, 0)
    gptaq, foem = (GPTQConfig.model_validate({name: True}) for name in ("gptaq", "foem"))
    assert (gptaq.asymmetry, gptaq.first_order) == (0.25, 0)
    assert (foem.asymmetry, foem.first_order) == (0, 0.2)
    assert GPTQConfig.model_validate({"foem": {"alpha": 0.25}}).asymmetry == 0.25


@pytest.mark.parametrize(
    ("data", "part"),
    [
        ([], "empty list"),
        ("  ", "blank string"),
        (["a", "b", 3.5], "item 2 of 3 is of type `float`"),
        (["a", [1]], "item 1 of 2 is of type `list`"),
        ([[1], "a"], "item 1 of 2 is of type `str`"),
        ([7], "item 0 of 1 is of type `int`"),
        ([[1], [2, -3]], "item 1: token 1 is -3"),
        ([[1], [True]], "item 1: token 0 is True"),
        ([[1.0]], "item 0: token 0 is 1.0"),
        (b"bytes", "type `bytes`"),
        (5, "type `int`"),
        ({"text": "a"}, "type `dict`"),
    ],
)
def test_calibration_data_of_a_wrong_type_is_named_by_index(data, part):
    with pytest.raises(ValidationError) as error:
        CalibrationConfig(data=data)
    assert part in message(error)


def test_columns_arrays_and_paths_are_taken_as_what_they_hold():
    column = Dataset.from_dict({"text": ["a", "b"]})["text"]
    assert CalibrationConfig(data=column).data == ("a", "b")
    assert CalibrationConfig(data=[numpy.array([1, 2]), torch.tensor([3])]).data == ((1, 2), (3,))
    assert CalibrationConfig(data=Path("a.txt")).data == "a.txt"


@pytest.mark.parametrize(
    ("lengths", "part"),
    [
        ({"min_length": 20, "sequence_length": 16}, "min_length 20"),
        ({"concat_size": 4096}, "concat_size 4096"),
        ({"concat_size": 8}, "min_length 10"),
        ({"concat_separator": "\n"}, "concat_separator"),
    ],
)
def test_lengths_that_contradict_each_other_are_refused(lengths, part):
    with pytest.raises(ValidationError) as error:
        CalibrationConfig(data="x.txt", **lengths)
    assert part in message(error)


def test_devices_may_be_written_as_on_the_command_line():
    assert job(devices="cpu,cpu").devices == ("cpu", "cpu")
    assert job(devices="auto").devices == "auto"
    for empty in ("", "cpu,", (), []):
        with pytest.raises(ValidationError, match="devices is empty"):
            job(devices=empty)


def test_paths_may_be_path_objects():
    written = job(model=Path("a"), output=Path("b"), checkpoint={"path": Path("c")}, offload_directory=Path("d"))
    assert (written.model, written.output, written.checkpoint.path, written.offload_directory) == ("a", "b", "c", "d")


@pytest.mark.parametrize("changes", [{"model": ""}, {"output": ""}, {"offload_directory": ""}])
def test_an_empty_path_is_refused(changes):
    with pytest.raises(ValidationError, match="at least 1 character"):
        job(**changes)


def test_paths_lose_their_dots_and_keep_their_links(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "link").symlink_to(tmp_path)
    assert absolute_path("~/link/x/..") == tmp_path / "link"


def test_an_explicit_checkpoint_path_is_used_wherever_it_is():
    assert checkpoint_root(job(checkpoint={"path": "/tmp/root"})) == Path("/tmp/root")


def test_auto_takes_the_offload_directory_or_a_sibling_of_the_output():
    assert checkpoint_root(job(output="/srv/out/model/")) == Path("/srv/out/model.checkpoint")
    assert checkpoint_root(job(offload_directory="/srv/offload")) == Path("/srv/offload")


def test_auto_with_a_relative_output_is_absolute_whatever_dots_it_has(monkeypatch):
    monkeypatch.chdir("/")
    assert checkpoint_root(job(output="srv/x/..")) == Path("/srv.checkpoint")


@pytest.mark.parametrize("volatile", ["/tmp", "/dev/shm", "/run"])
@pytest.mark.parametrize("place", ["output", "offload_directory"])
def test_auto_is_refused_where_a_restart_empties_the_directory(volatile, place):
    with pytest.raises(ValueError, match="emptied at a restart"):
        checkpoint_root(job(**{place: os.path.join(volatile, "x")}))


def test_auto_is_refused_below_the_temporary_directory_of_this_process(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/srv/scratch")
    with pytest.raises(ValueError, match="`/srv/scratch`"):
        checkpoint_root(job(output="/srv/scratch/model"))
