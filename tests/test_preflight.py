"""Tests of preflight: all problems in one list, each told how to mend it; figures that agree with what is written."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tasks.gguf_scheme import GGUFScheme
from tasks.job import QuantizationJob
from tasks.models.decoder import Decoder
from tasks.models.folding import Folding
from tasks.models.source import SourceModel
from tasks.plan import Plan, size
from tasks.preflight import RECORD_BYTES_PER_MODULE, PreflightError, check
from tasks.quantization import BitsAndBytesConfig, FP8Config, GGUFConfig, Quantization, RTNConfig
from tasks.schemes import BYTES_PER_HESSIAN_ENTRY, scheme_of
from tests.tiny_models import write_tiny_llama

TEXTS = ["one two three four five six seven"] * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", attention_bias=True, shards=2)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory) -> Path:
    """Sizes that fill the blocks of every layout."""
    path = tmp_path_factory.mktemp("models") / "wide"
    return write_tiny_llama(
        path, attention_bias=True, shards=2, hidden_size=128, intermediate_size=256, key_value_heads=4
    )


@pytest.fixture
def own_model(model, tmp_path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(model, tmp_path / "own"))


def plan_of(model: Path, tmp_path: Path, **changes: Any) -> Plan:
    job = {
        "model": str(model),
        "output": str(tmp_path / "output"),
        "checkpoint": {"path": str(tmp_path / "root")},
        "quantization": {"method": "gptq", "group_size": 32},
        "calibration": {"data": TEXTS, "sequence_length": 64},
        "devices": "cpu",
    }
    return check(QuantizationJob.model_validate({**job, **changes}))


def problems_of(model: Path, tmp_path: Path, **changes: Any) -> tuple[str, ...]:
    with pytest.raises(PreflightError) as error:
        plan_of(model, tmp_path, **changes)
    assert all(f"- {problem}" in str(error.value) for problem in error.value.problems)
    return error.value.problems


def problem_of(model: Path, tmp_path: Path, **changes: Any) -> str:
    (problem,) = problems_of(model, tmp_path, **changes)
    return problem


# Source ---------------------------------------------------------------------------------------------------------------


def test_all_problems_come_in_one_list(own_model, tmp_path):
    (own_model / "model.safetensors.index.json").unlink()
    (own_model / "config.json").write_text(json.dumps({"model_type": "rwkv"}))
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "notes.txt").touch()
    problems = problems_of(
        own_model,
        tmp_path,
        calibration={"data": str(tmp_path / "absent.txt")},
        devices="cuda:99",
        checkpoint={"path": "auto"},
    )
    for part in (
        "model.safetensors.index.json",
        "'rwkv'; supported are: afmoe, ",
        "calibration file",
        "cuda:99",
        "emptied at a restart",
        "not empty (`notes.txt`)",
    ):
        assert sum(part in problem for problem in problems) == 1, part
    assert len(problems) == 6


def test_an_unsupported_family_is_named_with_the_supported_ones(own_model, tmp_path):
    config = json.loads((own_model / "config.json").read_text())
    (own_model / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    assert "'gpt2'; supported are: afmoe, " in problem_of(own_model, tmp_path)


def test_a_source_without_safetensors_is_told(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "source" / "pytorch_model.bin").touch()
    assert "no safetensors files, only `pytorch_model.bin`" in problem_of(tmp_path / "source", tmp_path)


def test_a_model_that_is_nowhere_is_told(tmp_path):
    assert "no such directory" in problem_of(tmp_path / "absent", tmp_path)


def test_missing_and_extra_tensors_are_listed_beside_what_the_layout_refuses(own_model, tmp_path):
    shard = sorted(own_model.glob("*.safetensors"))[0]
    tensors = load_file(shard)
    name = next(name for name in tensors if name.endswith("k_proj.weight"))
    tensors["model.layers.0.self_attn.x_proj.weight"] = tensors.pop(name)
    save_file(tensors, shard, metadata={"format": "pt"})
    index = json.loads((own_model / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.0.self_attn.x_proj.weight"] = index["weight_map"].pop(name)
    (own_model / "model.safetensors.index.json").write_text(json.dumps(index))
    problems = problems_of(own_model, tmp_path, quantization={"group_size": 128})
    assert any(f"`{name}` is missing" in problem for problem in problems)
    assert any("x_proj.weight` is unexpected" in problem for problem in problems)
    assert any("64 is not a multiple of group_size 128" in problem for problem in problems)


def test_a_truncated_shard_is_told(own_model, tmp_path):
    shard = sorted(own_model.glob("*.safetensors"))[0]
    os.truncate(shard, shard.stat().st_size - 1)
    assert f"`{shard.name}` is truncated" in problem_of(own_model, tmp_path)


# Shapes ---------------------------------------------------------------------------------------------------------------


def test_a_group_size_that_does_not_divide_names_modules_and_what_fits(tmp_path):
    source = write_tiny_llama(tmp_path / "source", hidden_size=192, intermediate_size=256, head_dim=48)
    problem = problem_of(source, tmp_path, quantization={"group_size": 128})
    assert "`self_attn.q_proj`, " in problem
    assert "`mlp.up_proj` of every layer: in_features 192 is not a multiple of group_size 128" in problem
    assert "16, 32, 64, -1 would fit" in problem
    assert "down_proj" not in problem


def test_group_sizes_that_fit_all_modules_are_said_when_several_do_not(tmp_path):
    source = write_tiny_llama(tmp_path / "source", hidden_size=64, intermediate_size=96)
    problems = problems_of(source, tmp_path, quantization={"group_size": 128})
    assert len(problems) == 3
    assert problems[-1] == "group sizes that fit all modules: 16, 32, -1"


def test_a_size_that_does_not_fill_whole_words_is_told(tmp_path):
    source = write_tiny_llama(tmp_path / "source", intermediate_size=100)
    problems = problems_of(source, tmp_path, quantization={"group_size": -1, "method": "rtn"})
    assert any("out_features 100 is not a multiple of 8" in problem for problem in problems)


# Calibration and devices ----------------------------------------------------------------------------------------------


def test_a_method_that_needs_calibration_says_so(model, tmp_path):
    problem = problem_of(model, tmp_path, calibration=None)
    assert "name a text, jsonl or parquet file" in problem
    assert "imatrix" not in problem  # of another method
    assert plan_of(model, tmp_path, calibration=None, quantization={"method": "rtn", "group_size": 32}).notes == ()


def test_a_missing_calibration_file_is_no_problem_of_a_method_that_reads_none(model, tmp_path):
    absent = {"data": str(tmp_path / "absent.jsonl")}
    assert "does not exist" in problem_of(model, tmp_path, calibration=absent)
    (note,) = plan_of(model, tmp_path, calibration=absent, quantization={"method": "rtn", "group_size": 32}).notes
    assert "uses no calibration data" in note


def test_texts_for_a_source_without_a_tokenizer_are_refused(own_model, tmp_path):
    for file in own_model.glob("tokenizer*"):
        file.unlink()
    (tmp_path / "data.txt").write_text(TEXTS[0])
    for data in (TEXTS, str(tmp_path / "data.txt")):
        problem = problem_of(own_model, tmp_path, calibration={"data": data})
        assert "holds no tokenizer" in problem
    plan_of(own_model, tmp_path, calibration={"data": [[1, 2, 3]], "sequence_length": 64})


def test_a_device_that_is_not_there_is_told(model, tmp_path):
    assert "cuda:99" in problem_of(model, tmp_path, devices="cuda:99")


# Places ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "root", "part"),
    [
        ("own", "root", "source and output are one place"),
        ("own/inside", "root", "output `.*` lies inside source"),
        (".", "root", "lies inside output"),
        ("output", "own", "source and checkpoint are one place"),
        ("output", "own/inside", "checkpoint `.*` lies inside source"),
        ("output", "output", "checkpoint and output are one place"),
        ("output", "output/inside", "checkpoint `.*` lies inside output"),
        ("root/inside", "root", "output `.*` lies inside checkpoint"),
        ("link", "root", "source and output are one place"),
        ("output", "link/inside", "checkpoint `.*` lies inside source"),
    ],
)
def test_source_checkpoint_and_output_are_three_separate_places(own_model, tmp_path, output, root, part):
    (tmp_path / "link").symlink_to(own_model)
    with pytest.raises(PreflightError, match=part):
        plan_of(own_model, tmp_path, output=str(tmp_path / output), checkpoint={"path": str(tmp_path / root)})


def test_neighbours_with_a_common_beginning_of_their_names_are_separate(own_model, tmp_path):
    assert plan_of(own_model, tmp_path, output=f"{own_model}-4bit", checkpoint={"path": f"{own_model}-4bit.checkpoint"})


def test_an_output_that_holds_something_else_is_refused(model, tmp_path):
    (tmp_path / "output").mkdir()
    assert plan_of(model, tmp_path)
    for name in "dcba":
        (tmp_path / "output" / name).touch()
    assert "not empty (`a`, `b`, `c` and 1 more)" in problem_of(model, tmp_path)


def test_an_output_with_a_report_is_left_to_the_run_and_needs_no_space(model, tmp_path):
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "quantization_report.json").write_text("{}")
    (space,) = [space for space in plan_of(model, tmp_path).spaces if space.purpose == "output"]
    assert space.needed_bytes == 0


def test_an_output_that_a_dead_run_was_filling_is_left_to_the_export(model, tmp_path):
    (tmp_path / "output" / f".output.partial-{'0' * 32}").mkdir(parents=True)
    (tmp_path / "output" / "config.json").touch()
    assert plan_of(model, tmp_path)


def test_links_that_lead_nowhere_or_in_a_circle_are_refused(model, tmp_path):
    (tmp_path / "output").symlink_to(tmp_path / "absent")
    (tmp_path / "root").symlink_to(tmp_path / "root")
    first, second = problems_of(model, tmp_path)
    assert "checkpoint" in first
    assert "output" in second


@pytest.mark.parametrize("name", ["output", "root"])
def test_a_place_that_is_a_file_or_below_one_is_refused(model, tmp_path, name):
    (tmp_path / "file").touch()
    changes = {"output": {"output": str(tmp_path / "file" / "x")}, "root": {"checkpoint": {"path": f"{tmp_path}/file"}}}
    assert "is there and is none; name another place" in problem_of(model, tmp_path, **changes[name])


def test_a_name_that_only_the_directory_in_the_making_makes_too_long_is_refused(model, tmp_path):
    assert "shorten it" in problem_of(model, tmp_path, output=str(tmp_path / ("y" * 250)))
    assert "shorten it" in problem_of(model, tmp_path, output=str(tmp_path / ("\u00e4" * 110)))


def test_a_place_where_this_user_may_not_write_is_refused(model, tmp_path, monkeypatch):
    # Root may write everywhere, so the kernel's answer is given here.
    monkeypatch.setattr(os, "access", lambda path, mode, real=os.access: not mode & os.W_OK and real(path, mode))
    problems = problems_of(model, tmp_path)
    assert ["checkpoint" in problems[0], "output" in problems[1]] == [True, True]
    assert all("may not list and write" in problem for problem in problems)


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("data.jsonl", b'{"text": "a fox"}\n{"text": \n', "line 2 of `{path}` is not JSON"),
        ("data.jsonl", b'{"content": "a fox"}\n', "has no column `text`; its columns: `content`"),
        ("data.jsonl", b'{"text": 7}\n', "is of type `int`"),
        (
            "data.jsonl",
            b'{"text": "a fox"}\n{"text": [1, 2]}\n',
            "is a list of token ids where the first item is a text",
        ),
        ("data.jsonl", b'{"text": " "}\n\n{"text": ""}\n', "holds nothing but blank texts"),
        ("data.txt", b" \n\t\n", "holds nothing but blank texts"),
        ("data.txt", b"caf\xe9 latin", "is not UTF-8 text"),
        ("data.parquet", b"PAR1 and no table", "cannot be loaded"),
    ],
)
def test_what_is_wrong_inside_a_calibration_file_is_told_by_the_plan(model, tmp_path, name, content, part):
    path = tmp_path / name
    path.write_bytes(content)
    problem = problem_of(model, tmp_path, calibration={"data": str(path), "sequence_length": 64})
    assert part.format(path=path) in problem


def test_only_as_many_items_are_looked_at_as_there_are_samples(model, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a fox"}\n' * 3 + "no JSON\n")
    calibration = {"data": str(path), "sequence_length": 64}
    assert plan_of(model, tmp_path, calibration=calibration | {"samples": 3})
    assert "line 4" in problem_of(model, tmp_path, calibration=calibration | {"samples": 4})


def test_a_memory_limit_that_is_too_small_is_to_be_raised_and_one_that_nobody_gave_is_not(model, tmp_path, monkeypatch):
    needed = plan_of(model, tmp_path).memory.least_bytes
    assert problem_of(model, tmp_path, memory_limit=needed - 1).endswith(
        f"memory_limit leaves {size(needed - 1)}; raise it"
    )
    monkeypatch.setattr("tasks.devices._host_memory_bytes", lambda: needed - 1)
    assert problem_of(model, tmp_path).endswith("use a device with more memory")


# Space and memory -----------------------------------------------------------------------------------------------------

FileSystem = namedtuple("FileSystem", "f_bavail f_bfree f_frsize")


def with_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: FileSystem(free, 1 << 50, 1))


def test_space_is_told_for_each_place_and_for_both_on_one_disk(model, tmp_path, monkeypatch):
    checkpoint, output = plan_of(model, tmp_path).spaces
    larger, smaller = (
        max(checkpoint.needed_bytes, output.needed_bytes),
        min(checkpoint.needed_bytes, output.needed_bytes),
    )
    with_free(monkeypatch, smaller - 1)
    problems = problems_of(model, tmp_path)
    assert [part in problem for part, problem in zip(("checkpoint", "output"), problems, strict=True)] == [True, True]
    with_free(monkeypatch, larger)
    assert "checkpoint and output on one file system" in problem_of(model, tmp_path)
    with_free(monkeypatch, larger + smaller)
    assert plan_of(model, tmp_path)


def test_what_an_earlier_run_has_written_need_not_be_free_again(model, tmp_path, monkeypatch):
    checkpoint, output = plan_of(model, tmp_path).spaces
    (tmp_path / "root" / "objects").mkdir(parents=True)
    (tmp_path / "root" / "objects" / "0").write_bytes(bytes(checkpoint.needed_bytes - 100))
    with_free(monkeypatch, output.needed_bytes + 100)
    assert plan_of(model, tmp_path).spaces[0].missing_bytes == 100
    with_free(monkeypatch, output.needed_bytes + 99)
    assert "one file system" in problem_of(model, tmp_path)


def test_the_checkpoint_holds_all_layers_and_a_continuation_more_than_are_kept(model, tmp_path):
    plan = plan_of(model, tmp_path, checkpoint={"path": str(tmp_path / "root"), "keep_last": 4})
    assert plan.continuation_bytes == 4 * 64 * 64 * 2  # samples, tokens, hidden size, bfloat16
    records = 7 * 2 * RECORD_BYTES_PER_MODULE
    assert plan.spaces[0].needed_bytes == plan.layers_after + 5 * plan.continuation_bytes + records


def test_a_method_without_calibration_needs_no_continuation(model, tmp_path):
    plan = plan_of(model, tmp_path, quantization={"method": "rtn", "group_size": 32})
    assert plan.continuation_bytes == plan.calibration_tokens == 0
    assert plan.spaces[0].needed_bytes == plan.layers_after + 7 * 2 * RECORD_BYTES_PER_MODULE


def test_the_bound_on_tokens_covers_what_is_prepared(model, tmp_path):
    from tasks.calibration import prepare

    text = tmp_path / "book.txt"
    text.write_text("The quick brown fox. " * 30)
    table = tmp_path / "data.jsonl"
    table.write_text("".join(json.dumps({"text": "a fox " * n}) + "\n" for n in range(1, 30)))
    for data in (str(text), str(table), TEXTS):
        for batch_size in (1, 4):
            settings = {"data": data, "sequence_length": 32, "min_length": 1, "samples": 50, "batch_size": batch_size}
            plan = plan_of(model, tmp_path, calibration=settings)
            found = prepare(QuantizationJob(model="m", output="o", calibration=settings).calibration, model, seed=0)
            assert found.summary["tokens"] + found.summary["padding"] <= plan.calibration_tokens
            assert found.summary["samples"] <= plan.calibration_samples


def test_a_layer_that_no_device_can_hold_is_refused(model, tmp_path, monkeypatch):
    floor = plan_of(model, tmp_path).memory.least_bytes
    monkeypatch.setattr("tasks.devices._host_memory_bytes", lambda: floor)
    assert plan_of(model, tmp_path)
    monkeypatch.setattr("tasks.devices._host_memory_bytes", lambda: floor - 1)
    assert f"cpu has {size(floor - 1)}" in problem_of(model, tmp_path)


SIZED: list[Quantization] = [
    RTNConfig(bits=bits, group_size=group_size, sym=sym, checkpoint_format=checkpoint_format)
    for checkpoint_format in ("gptq", "compressed-tensors")
    for bits in (2, 3, 4, 8)
    for group_size in (32, -1)
    for sym in (True, False)
    if checkpoint_format == "gptq" or bits in (4, 8)
]
SIZED += [RTNConfig(group_size=size, sym=False, checkpoint_format="awq") for size in (32, -1)]
SIZED += [FP8Config(granularity=granularity) for granularity in ("tensor", "row", "block")]
SIZED += [FP8Config(granularity="block", checkpoint_format="fp8"), BitsAndBytesConfig(quant_type="int8")]
# Some of their bytes are JSON with a number of any length in it.
ABOUT_SIZED = [BitsAndBytesConfig(quant_type="fp4", double_quant=double_quant) for double_quant in (True, False)]


@pytest.mark.parametrize("config", [*SIZED, *ABOUT_SIZED], ids=str)
def test_sizes_are_those_of_the_packed_tensors(wide_model, tmp_path, config):
    plan = plan_of(wide_model, tmp_path, quantization=config.model_dump())
    scheme = scheme_of(config, SourceModel.open(str(wide_model)))
    tensors = {name: tensor for shard in wide_model.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    assert plan.bytes_before == sum(tensor.nbytes for tensor in tensors.values())
    written = dict(tensors)
    for kind in plan.modules:
        after = 0
        for layer in range(plan.layer_count):
            name = f"model.layers.{layer}.{kind.name}"
            weight_NK, bias = written.pop(f"{name}.weight"), written.pop(f"{name}.bias", None)
            packed = scheme.pack(name, scheme.quantize(name, weight_NK, None), bias)
            after += sum(tensor.nbytes for tensor in packed.values())
        assert abs(kind.bytes_after - after) <= (0 if config in SIZED else 24 * plan.layer_count)
        assert kind.count == plan.layer_count
    assert plan.bytes_after == sum(k.bytes_after for k in plan.modules) + sum(t.nbytes for t in written.values())


def test_a_gguf_plan_has_the_exact_sizes_and_a_line_for_every_tensor(wide_model, tmp_path):
    config = GGUFConfig()
    plan = plan_of(wide_model, tmp_path, quantization=config.model_dump(), calibration=None)
    scheme = GGUFScheme(config, SourceModel.open(str(wide_model)))
    assert plan.bytes_after == scheme.plan.size_bytes
    table = plan.table()
    for entry in scheme.plan.tensors:
        (line,) = [line for line in table.splitlines() if line.startswith(f"{entry.name} ")]
        assert line.split()[2:4] == [entry.intended, entry.actual]
    assert any("--strict refuses that" in note for note in plan.notes)


def test_gguf_problems_are_told_beforehand(model, own_model, tmp_path, monkeypatch):
    strict = {"method": "gguf", "strict": True}
    assert "in_features 64 is not a multiple of 256" in problem_of(model, tmp_path, quantization=strict)
    assert "no calibration data" in problem_of(
        model, tmp_path, quantization={"method": "gguf", "imatrix": True}, calibration=None
    )
    (own_model / "tokenizer.json").unlink()
    assert "no tokenizer.json" in problem_of(own_model, tmp_path, quantization={"method": "gguf"})
    monkeypatch.setattr("tasks.formats.gguf.find_spec", lambda name: None)
    assert "pip install 'prefect-quantize[gguf]'" in problem_of(model, tmp_path, quantization={"method": "gguf"})


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["[]", "{", '"text"'])
def test_a_damaged_file_of_the_tokenizer_is_named_where_a_gguf_file_takes_it_up(own_model, tmp_path, name, text):
    (own_model / name).write_text(text)
    problem = problem_of(own_model, tmp_path, quantization={"method": "gguf"})
    assert problem.startswith(f"`{own_model / name}` is not ")


def test_values_of_a_wrong_kind_are_told_to_who_wants_a_gguf_file(own_model, tmp_path):
    described = json.loads((own_model / "config.json").read_text())
    (own_model / "config.json").write_text(json.dumps(described | {"num_hidden_layers": "2"}))
    problems = problems_of(own_model, tmp_path, quantization={"method": "gguf"})
    assert any("can't build it from `config.json`" in problem for problem in problems)
    assert any("a value of the wrong kind" in problem for problem in problems)


@pytest.mark.parametrize("package", ["bitsandbytes", "gguf"])
def test_a_missing_extra_is_told_with_the_line_that_installs_it(model, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)  # neither found nor imported
    problem = problem_of(model, tmp_path, quantization={"method": package})
    assert problem.endswith(f"not installed; run `pip install 'prefect-quantize[{package}]'`")


def test_what_the_chosen_layout_can_not_hold_is_told_whatever_the_method(model, tmp_path):
    for quantization, part in (
        (
            {"method": "rtn", "bits": 3, "group_size": 32, "checkpoint_format": "compressed-tensors"},
            "holds 4 and 8 bits",
        ),
        ({"method": "fp8", "granularity": "block"}, "is not a multiple of 128, the side of a block"),
        ({"desc_act": True, "group_size": 32, "checkpoint_format": "compressed-tensors"}, "out of order"),
    ):
        assert any(part in problem for problem in problems_of(model, tmp_path, quantization=quantization)), part


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"method": "fp8"}, "fp8, e4m3, one scale per row, layout compressed-tensors"),
        (
            {"method": "rtn", "group_size": 32, "sym": False, "checkpoint_format": "awq"},
            "rtn, 4 bit, groups of 32, asymmetric, layout awq",
        ),
        ({"method": "bitsandbytes"}, "bitsandbytes, nf4, double quantization, layout bitsandbytes"),
        ({"method": "bitsandbytes", "quant_type": "int8"}, "bitsandbytes, int8, layout bitsandbytes"),
    ],
)
def test_the_plan_needs_no_calibration_of_a_weight_only_method(model, tmp_path, quantization, words):
    plan = plan_of(model, tmp_path, quantization=quantization, calibration=None)
    assert plan.table().splitlines()[0].endswith(words)
    assert plan.continuation_bytes == plan.memory.statistics_bytes == 0


AWQ = {"method": "awq", "group_size": 32}


def test_awq_holds_the_moments_of_all_subsets_of_a_layer(model, tmp_path):
    assert plan_of(model, tmp_path, quantization=AWQ).memory.statistics_bytes == 4 * (3 * 64**2 + 4 * 128**2)
    gptq = plan_of(model, tmp_path).memory.statistics_bytes
    assert gptq == BYTES_PER_HESSIAN_ENTRY * 128**2


def test_awq_needs_calibration_and_sizes_that_its_layout_holds(model, tmp_path):
    assert "looks at activations" in problem_of(model, tmp_path, quantization=AWQ, calibration=None)
    problems = problems_of(model, tmp_path, quantization={"method": "awq"})
    assert any("in_features 64 is not a multiple of group_size 128" in problem for problem in problems)
    (problem,) = problems_of(
        model, tmp_path, quantization={"method": "rtn", "bits": 8, "group_size": 32, "checkpoint_format": "awq"}
    )
    assert "the awq layout holds 4 bits, not 8" in problem


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"group_size": 16}, ["vLLM has no kernel for compressed-tensors files with groups of 16, only of 32, 64, 128 or -1"]),
        ({"group_size": 32, "bits": 8, "sym": False}, ["vLLM computes 8-bit asymmetric compressed-tensors files on Hopper"]),
        ({"group_size": 32, "bits": 8}, []),
        ({"group_size": -1, "sym": False}, []),
    ],
)  # fmt: skip
def test_what_vllm_does_not_compute_of_compressed_tensors_is_told(model, tmp_path, settings, told):
    for method in ("rtn", "gptq", "awq"):
        quantization = {"method": method, "sym": True, "checkpoint_format": "compressed-tensors"} | settings
        notes = [n for n in plan_of(model, tmp_path, quantization=quantization).notes if "vLLM" in n]
        assert len(notes) == len(told) and all(map(str.startswith, notes, told)), notes


def test_what_awq_can_not_scale_and_who_reads_it_is_told(model, tmp_path, monkeypatch):
    (note,) = plan_of(model, tmp_path, quantization=AWQ).notes
    assert "with the gptqmodel package only" in note
    monkeypatch.setattr(Decoder, "folding", lambda self, i: Folding({}, {("mlp.down_proj",): "an odd activation"}))
    notes = plan_of(model, tmp_path, quantization=AWQ).notes
    assert "layers like 0: mlp.down_proj can't be scaled, only clipped: an odd activation" in notes
    as_tensors = AWQ | {"checkpoint_format": "compressed-tensors"}
    assert not any("gptqmodel" in note for note in plan_of(model, tmp_path, quantization=as_tensors).notes)


# The plan -------------------------------------------------------------------------------------------------------------


def test_the_table_shows_modules_totals_and_needs(model, tmp_path):
    plan = plan_of(model, tmp_path, quantization={"bits": 3, "group_size": 32}, devices="cpu,cpu")
    table = plan.table()
    assert table.splitlines()[0].endswith("llama, 2 layers -> gptq, 3 bit, groups of 32, symmetric, layout gptq")
    for part in (
        *(kind.name for kind in plan.modules),
        "bits/weight",
        "embeddings and head, kept",
        f"at most 4 samples, {4 * 64} tokens",
        str(tmp_path / "root"),
        str(tmp_path / "output"),
        "on the host",
        "cpu, cpu",
        "note: vLLM loads only 4-bit and 8-bit symmetric gptq files, not this 3-bit",
    ):
        assert part in table
    total = next(line for line in table.splitlines() if line.startswith("total"))
    assert total.split()[1:] == f"{size(plan.bytes_before)} {size(plan.bytes_after)}".split()
    assert not any(line != line.rstrip() for line in table.splitlines())


def test_the_plan_as_json_is_json_with_totals(model, tmp_path):
    plan = plan_of(model, tmp_path)
    read = json.loads(json.dumps(plan.as_json()))
    assert read == plan.as_json()
    assert read["bytes_before"] == plan.bytes_before
    assert [module["name"] for module in read["modules"]] == [kind.name for kind in plan.modules]
    assert {space["purpose"] for space in read["spaces"]} == {"checkpoint", "output"}


def test_samples_longer_than_the_context_are_a_note(model, tmp_path):
    (note,) = plan_of(model, tmp_path, calibration={"data": TEXTS, "sequence_length": 257}).notes
    assert "257 is longer than the model's context of 256" in note


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_950, "1.0 MB"), (2_500_000_000, "2.5 GB")]
)
def test_sizes_are_written_in_decimal_units(count, text):
    assert size(count) == text


def test_preflight_writes_nothing_reads_no_weights_and_is_quick(tmp_path):
    source = write_tiny_llama(tmp_path / "source", hidden_size=512, intermediate_size=4096, layers=2)
    weights = sum(shard.stat().st_size for shard in source.glob("*.safetensors"))
    plan_of(source, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    read, started = bytes_read(), time.process_time()
    plan_of(source, tmp_path)
    assert time.process_time() - started < 2
    assert weights > 20_000_000
    assert bytes_read() - read < weights / 10
    assert sorted(tmp_path.rglob("*")) == before


def bytes_read() -> int:
    """Bytes that this process has asked the kernel to read, as the kernel counts them."""
    counters = Path("/proc/self/io").read_text()
    return int(counters.split("rchar:")[1].split()[0])


def test_preflight_needs_neither_the_flow_nor_prefect():
    program = "import sys, tasks.preflight; print([m for m in sys.modules if m.split('.')[0] in ('flows', 'prefect')])"
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


def test_two_cpu_slots_hold_the_weights_of_two_layers_at_once(model, tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.memory_estimate.FINITE_CHECK_BYTES", 0)  # more than all of this model's weights
    # Enough samples for the last stage of a layer to be the peak: there all weights but down_proj's and the norms' are gone.
    calibration = {"data": TEXTS, "sequence_length": 256}
    one, two = (
        plan_of(model, tmp_path, devices=devices, calibration=calibration).memory for devices in ("cpu", "cpu,cpu")
    )
    assert two.host_peak_bytes - one.host_peak_bytes == 4 * (
        64 * 128 + 2 * 64 + (64 + 32 + 32 + 64)
    )  # weight, norms, biases
