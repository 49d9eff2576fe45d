"""Tests of the identity: every field of the job is classified, every area changes alone, content counts and places don't."""

import json
import mmap
import os
import shutil
import typing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import xxhash
from pydantic import BaseModel

import tasks.identity
from checkpoint_store.differences import differences
from tasks import calibration
from tasks.devices import Device, DevicePool
from tasks.execution_plan import LAYOUT_REVISIONS, METHOD_REVISIONS
from tasks.identity import (
    AREAS,
    PHYSICAL,
    adopted_cpu_threads,
    build,
    cpu_threads,
    digest,
    hashed_shards,
    is_physical,
    portable,
)
from tasks.job import QuantizationJob
from tasks.models.decoder import Decoder
from tasks.models.source import SourceModel
from tasks.schemes import needs_activations
from tests.tiny_models import write_tiny_llama

TEXTS = ["one two three four five six seven", "bread needs flour and water", "the sea carries them back"]
SETTINGS = {"data": TEXTS, "sequence_length": 64, "min_length": 2, "samples": 3}

# Every field of the job, another value for it, and the one area that tells the two apart. A method's fields are below
# its name.
MATTERS: dict[str, tuple[Any, str]] = {
    "quantization.method": ("rtn", "quantization"),
    **{
        f"quantization.{method}.{name}": (value, area)
        for method in ("gptq", "rtn")
        for name, value, area in (
            ("bits", 8, "quantization"),
            ("group_size", 64, "quantization"),
            ("sym", False, "quantization"),
            ("mse", 2.4, "quantization"),
            ("checkpoint_format", "gptq_v2", "packed_kernel"),
        )
    },
    **{
        f"quantization.{method}.dynamic": ({"-:.*down_proj": {}}, "quantization")
        for method in ("gptq", "rtn", "awq", "fp8", "bitsandbytes", "gguf")
    },
    "quantization.gptq.lm_head": (True, "quantization"),
    "quantization.rtn.lm_head": (True, "quantization"),
    "quantization.gptq.true_sequential": (False, "quantization"),
    "quantization.awq.bits": (8, "quantization"),
    "quantization.awq.group_size": (64, "quantization"),
    "quantization.awq.sym": (True, "quantization"),
    "quantization.awq.n_grid": (10, "quantization"),
    "quantization.awq.duo_scaling": (False, "quantization"),
    "quantization.awq.apply_clip": (False, "quantization"),
    "quantization.awq.fallback_tokens": (0.01, "quantization"),
    "quantization.awq.checkpoint_format": ("compressed-tensors", "packed_kernel"),
    "quantization.fp8.fp8_format": ("e5m2", "quantization"),
    "quantization.fp8.granularity": ("tensor", "quantization"),
    "quantization.fp8.checkpoint_format": ("fp8", "packed_kernel"),
    "quantization.bitsandbytes.quant_type": ("int8", "quantization"),
    "quantization.bitsandbytes.double_quant": (False, "quantization"),
    "quantization.bitsandbytes.compute_dtype": ("float16", "quantization"),
    "quantization.exl3.bits": (4.5, "quantization"),
    "quantization.exl3.codebook": ("mul1", "quantization"),
    "quantization.exl3.out_scales": ("never", "quantization"),
    "quantization.exl3.compiled": (True, "quantization"),
    "quantization.exl3.sigma_reg": (0.05, "quantization"),
    "quantization.gguf.quant_type": ("q8_0", "quantization"),
    "quantization.gguf.imatrix": (True, "quantization"),
    "quantization.qqq.group_size": (-1, "quantization"),
    "quantization.qqq.mse": (2.4, "quantization"),
    "quantization.qqq.act_group_aware": (False, "quantization"),
    "quantization.qqq.block_size": (64, "quantization"),
    "quantization.qqq.damp_percent": (0.01, "quantization"),
    "quantization.qqq.damp_increment": (0.02, "quantization"),
    "quantization.qqq.fallback_tokens": (0.01, "quantization"),
    "quantization.paroquant.group_size": (64, "quantization"),
    "quantization.paroquant.rotation_epochs": (3, "quantization"),
    "quantization.paroquant.finetune_epochs": (3, "quantization"),
    "quantization.paroquant.rotation_lr": (0.02, "quantization"),
    "quantization.paroquant.weight_lr": (1e-4, "quantization"),
    "quantization.paroquant.quantizer_lr": (1e-5, "quantization"),
    "quantization.paroquant.train_samples": (128, "quantization"),
    "quantization.paroquant.validation_samples": (16, "quantization"),
    "quantization.paroquant.train_batch_size": (16, "quantization"),
    "quantization.gptq.desc_act": (True, "quantization"),
    "quantization.gptq.act_group_aware": (False, "quantization"),
    "quantization.gptq.static_groups": (True, "quantization"),
    "quantization.gptq.block_size": (64, "quantization"),
    "quantization.gptq.damp_percent": (0.01, "quantization"),
    "quantization.gptq.damp_increment": (0.02, "quantization"),
    "quantization.gptq.fallback_tokens": (0.01, "quantization"),
    "quantization.gptq.gptaq.alpha": (0.5, "quantization"),
    "quantization.gptq.foem.alpha": (0.5, "quantization"),
    "quantization.gptq.foem.beta": (0.1, "quantization"),
    "adapter.rank": (16, "adapter"),
    "calibration.data": (TEXTS[:2], "calibration"),
    "calibration.split": ("test", "calibration"),
    "calibration.name": ("small", "calibration"),
    "calibration.column": ("body", "calibration"),
    "calibration.samples": (2, "calibration"),
    "calibration.sequence_length": (8, "calibration"),
    "calibration.min_length": (3, "calibration"),
    "calibration.batch_size": (2, "calibration"),
    "calibration.concat_size": (16, "calibration"),
    "calibration.concat_separator": ("\n", "calibration"),
    "calibration.sort": ("asc", "calibration"),
    "devices": (("cpu", "cpu"), "device_topology"),
    "seed": (1, "execution_plan"),
}
DOES_NOT_MATTER: dict[str, Any] = {
    "quantization.gguf.strict": True,
    "model": None,  # another place with the same content; filled in by the test
    "output": "elsewhere",
    "checkpoint.path": "elsewhere",
    "checkpoint.resume": "required",
    "checkpoint.interval": "layer:3",
    "checkpoint.keep_last": 5,
    "checkpoint.strict_device_check": False,
    "checkpoint.allow_network_filesystem": True,
    "offload_directory": "elsewhere",
    "memory_limit": "24GB",
    "hidden_states_limit": "1GB",
    "time_estimate": False,
    "telemetry.device": True,
}


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every field of a pydantic model and of the models in it, by its path."""
    for name, field in model.model_fields.items():
        options = typing.get_args(field.annotation) or (field.annotation,)
        if typing.get_origin(field.annotation) is Literal and len(options) == 1:
            continue  # it can't be anything else
        if typing.get_origin(field.annotation) is tuple:  # a list of rules
            yield f"{prefix}{name}"
            continue
        inner = [option for option in options if isinstance(option, type) and issubclass(option, BaseModel)]
        if len(inner) > 1:
            yield f"{prefix}{name}.method"
            for option in inner:
                method = option.model_fields["method"].default
                yield from (
                    leaf for leaf in leaves(option, f"{prefix}{name}.{method}.") if not leaf.endswith(".method")
                )
        elif inner:
            yield from leaves(inner[0], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def written(path: Path, **fields: Any) -> dict[str, Any]:
    """A job as its user writes it, with `fields` (paths as `leaves` gives them) set."""
    job: dict[str, Any] = {"model": str(path), "output": "out", "calibration": dict(SETTINGS), "devices": ["cpu"]}
    for leaf, value in fields.items():
        *parents, name = leaf.split(".")
        place = job
        for parent in parents:
            if parent in METHOD_REVISIONS:
                place["method"] = parent
            else:
                place = place.setdefault(parent, {})
        place[name] = value
    return job


def identify(fields: dict[str, Any], threads: int = 2, attention: str = "sdpa") -> dict[str, Any]:
    """The identity of a job as a run makes it."""
    job = QuantizationJob.model_validate(fields)
    source = SourceModel.open(job.model)
    samples = None
    if needs_activations(job.quantization) and job.calibration is not None:
        samples = calibration.prepare(job.calibration, source.path, seed=job.seed)
    decoder = Decoder.from_source(source, attention)
    return build(job, source, decoder, samples, DevicePool.resolve(job.devices), threads)


def changed_areas(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    assert tuple(one) == tuple(other) == AREAS
    return {area for area in AREAS if one[area] != other[area]}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", shards=2)


@pytest.fixture
def own_model(model, tmp_path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(model, tmp_path / "own"))


def gpu(index: int, **changes: Any) -> Device:
    fields = {"index": index, "type": "cuda", "name": "GPU X", "capability": "9.0", "memory_bytes": 1 << 30}
    return Device(**{**fields, "uuid": f"GPU-{index}", "serial": f"S{index}", **changes})


def test_every_field_of_the_job_is_classified_and_no_other():
    assert sorted(leaves(QuantizationJob)) == sorted([*MATTERS, *DOES_NOT_MATTER])


@pytest.mark.parametrize("leaf", MATTERS)
def test_a_field_that_matters_changes_its_area_and_the_digest(model, leaf):
    value, area = MATTERS[leaf]
    # What the field needs beside it, in both jobs.
    beside: dict[str, Any] = {}
    if leaf.count(".") == 2:
        beside["quantization.method"] = leaf.split(".")[1]
    if leaf == "calibration.concat_separator":
        beside["calibration.concat_size"] = 16
    if leaf == "quantization.awq.bits":
        beside["quantization.awq.checkpoint_format"] = "compressed-tensors"
    if leaf == "quantization.fp8.fp8_format":
        beside["quantization.fp8.checkpoint_format"] = "fp8"
    if leaf.startswith("quantization.fp8.") and not leaf.endswith("granularity"):
        beside["quantization.fp8.granularity"] = "block"
    one, other = identify(written(model, **beside)), identify(written(model, **{**beside, leaf: value}))
    # With the importance matrix comes the calibration.
    also = {"quantization.method": "calibration", "quantization.gguf.imatrix": "calibration"}.get(leaf, area)
    expected = {area, also}
    assert changed_areas(one, other) == expected
    assert digest(portable(one)) != digest(portable(other))


@pytest.mark.parametrize("leaf", DOES_NOT_MATTER)
def test_a_field_that_does_not_matter_changes_nothing(model, own_model, leaf):
    value = str(own_model) if leaf == "model" else DOES_NOT_MATTER[leaf]
    beside = {"quantization.method": leaf.split(".")[1]} if leaf.startswith("quantization.") else {}
    assert identify(written(model, **beside)) == identify(written(model, **beside, **{leaf: value}))


def test_options_that_are_not_asked_for_are_no_part_of_it_so_that_older_checkpoints_go_on(model):
    assert {"gptaq", "foem"}.isdisjoint(identify(written(model))["quantization"])


def test_calibration_is_no_part_of_a_job_that_does_not_use_it(model):
    rtn = {"quantization.rtn.bits": 4}
    one, other = (identify(written(model, **rtn, **{"calibration.data": data})) for data in (TEXTS, TEXTS[:1]))
    assert one["calibration"] is None
    assert one == other


def test_the_identity_is_the_same_after_it_was_written_as_json(model):
    identity = identify(written(model))
    assert json.loads(json.dumps(identity)) == identity
    assert differences(identity, json.loads(json.dumps(identity))) == []


@pytest.mark.parametrize("area", AREAS)
def test_the_digest_covers_every_area(model, area):
    identity = identify(written(model))
    assert digest(portable({**identity, area: {**(identity[area] or {}), "another": 1}})) != digest(portable(identity))


# Source ---------------------------------------------------------------------------------------------------------------


def test_one_byte_of_one_shard_changes_the_source_alone(model, own_model):
    shard = sorted(own_model.glob("*.safetensors"))[-1]
    content = bytearray(shard.read_bytes())
    content[-2] ^= 1
    shard.write_bytes(content)
    one, other = identify(written(model)), identify(written(own_model))
    assert changed_areas(one, other) == {"source"}
    (line,) = differences(one, other)
    assert line.startswith(f"source.shards.{shard.name}.xxh3_128: checkpoint ")


def test_a_setting_of_the_model_changes_the_source_alone(model, own_model):
    config = json.loads((own_model / "config.json").read_text())
    (own_model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    one, other = identify(written(model)), identify(written(own_model))
    assert changed_areas(one, other) == {"source"}
    assert differences(one, other) == ["source.config.rms_norm_eps: checkpoint 1e-06, this run 1e-05"]


def test_the_tokenizer_belongs_to_a_gguf_job_leaf_by_leaf_and_to_no_other(model, own_model):
    gguf = {"quantization.method": "gguf", "quantization.gguf.quant_type": "q8_0"}
    file = own_model / "tokenizer.json"
    parsed = json.loads(file.read_text())
    file.write_text(json.dumps(parsed, indent=7))  # the same tokenizer, written otherwise
    assert identify(written(own_model, **gguf)) == identify(written(model, **gguf))
    parsed["model"]["merges"] = parsed["model"]["merges"][:-1]
    file.write_text(json.dumps(parsed))
    (own_model / "chat_template.jinja").write_text("{{ messages }}")
    one, other = identify(written(model, **gguf)), identify(written(own_model, **gguf))
    assert changed_areas(one, other) == {"source"}
    template, digest_line, length_line = differences(one, other)
    assert template == "source.tokenizer.chat_template: checkpoint null, this run {{ messages }}"
    assert digest_line.startswith("source.tokenizer.merges.") and length_line.startswith("source.tokenizer.merges.")
    assert identify(written(own_model)) == identify(written(model)), "other exports copy the files as they are"


def test_a_hub_cache_of_links_is_the_same_source(model, tmp_path):
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    shutil.copytree(model, blobs)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(os.listdir(blobs))):
        (blobs / file).rename(blobs / str(number))
        (snapshot / file).symlink_to(blobs / str(number))
    assert identify(written(snapshot)) == identify(written(model))


def test_times_and_modes_of_files_are_no_content(model, own_model):
    for file in own_model.iterdir():
        os.utime(file, (1, 1))
        file.chmod(0o600)
    assert identify(written(own_model)) == identify(written(model))


def test_a_shard_hash_is_what_xxh128_gives_for_the_whole_file(model, monkeypatch):
    monkeypatch.setattr("tasks.identity.HASHED_AT_ONCE", mmap.PAGESIZE)
    source = SourceModel.open(str(model))
    assert len(source.shards) > 1
    for shard, found in hashed_shards(source).items():
        content = (model / shard).read_bytes()
        assert found == {"size": len(content), "xxh3_128": xxhash.xxh3_128(content).hexdigest()}


# Devices --------------------------------------------------------------------------------------------------------------


def with_pool(model: Path, *devices: Device) -> dict[str, Any]:
    job = QuantizationJob.model_validate(written(model))
    source = SourceModel.open(job.model)
    return build(job, source, Decoder.from_source(source), None, DevicePool(devices), 2)


@pytest.mark.parametrize("physical", sorted(PHYSICAL))
def test_another_physical_gpu_is_told_unless_only_its_model_counts(model, physical):
    one = with_pool(model, gpu(0), gpu(1))
    other = with_pool(model, gpu(0), gpu(1, **{physical: "other"}))
    assert changed_areas(one, other) == {"device_topology"}
    before = getattr(gpu(1), physical)
    assert differences(one, other) == [f"device_topology.devices.1.{physical}: checkpoint {before}, this run other"]
    assert differences(one, other, is_physical) == []
    assert digest(one) != digest(other)
    assert digest(portable(one)) == digest(portable(other))


@pytest.mark.parametrize(
    "devices",
    [
        (gpu(0),),
        (gpu(0), gpu(1), gpu(2)),
        (gpu(1), gpu(0)),
        (gpu(0), gpu(2)),
        (gpu(0), gpu(1, name="GPU Y")),
        (gpu(0), gpu(1, capability="8.0")),
    ],
    ids=["fewer", "more", "another order", "another index", "another model", "another capability"],
)
def test_no_other_change_of_the_pool_is_ever_ignored(model, devices):
    one, other = with_pool(model, gpu(0), gpu(1)), with_pool(model, *devices)
    assert changed_areas(one, other) == {"device_topology"}
    assert differences(one, other, is_physical)
    assert digest(portable(one)) != digest(portable(other))


def test_one_cpu_slot_and_two_are_different_pools(model):
    lines = differences(identify(written(model)), identify(written(model, devices=["cpu", "cpu"])), is_physical)
    assert "device_topology.count: checkpoint 1, this run 2" in lines


def test_memory_of_a_device_is_no_part_of_it(model):
    assert with_pool(model, gpu(0)) == with_pool(model, replace(gpu(0), memory_bytes=1))


# Runtime and plan -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_another_version_of_a_library_changes_the_runtime_alone(model, monkeypatch, name):
    # By the module that is tested: transformers may put another object of itself into sys.modules while it's imported.
    library = getattr(tasks.identity, name)
    one = identify(written(model))
    version = library.__version__
    monkeypatch.setattr(library, "__version__", "1.2.3")
    other = identify(written(model))
    assert changed_areas(one, other) == {"runtime"}
    assert differences(one, other) == [f"runtime.{name}: checkpoint {version}, this run 1.2.3"]


def test_threads_count_on_the_cpu_only(model):
    one, other = identify(written(model), threads=1), identify(written(model), threads=2)
    assert differences(one, other) == ["execution_plan.cpu_threads: checkpoint 1, this run 2"]
    assert with_pool(model, gpu(0))["execution_plan"]["cpu_threads"] is None


def test_another_attention_implementation_changes_the_plan_alone(model):
    assert changed_areas(identify(written(model)), identify(written(model), attention="eager")) == {"execution_plan"}


def test_another_matmul_precision_changes_the_plan_alone(model):
    one = identify(written(model))
    torch.set_float32_matmul_precision("high")
    try:
        other = identify(written(model))
    finally:
        torch.set_float32_matmul_precision("highest")
    assert changed_areas(one, other) == {"execution_plan"}


@pytest.mark.parametrize("constant", ["LANES", "UNIT_ROWS", "FORWARD_REVISION"])
def test_how_the_work_is_cut_up_is_in_the_plan(model, monkeypatch, constant):
    one = identify(written(model))
    monkeypatch.setattr(f"tasks.identity.{constant}", 99)
    assert changed_areas(one, identify(written(model))) == {"execution_plan"}


def test_revisions_of_a_method_and_of_the_layout_have_their_areas(model, monkeypatch):
    one = identify(written(model))
    monkeypatch.setitem(METHOD_REVISIONS, "gptq", 99)
    assert changed_areas(one, identify(written(model))) == {"quantization"}
    monkeypatch.setitem(LAYOUT_REVISIONS, "gptq", 99)
    assert changed_areas(one, identify(written(model))) == {"quantization", "packed_kernel"}


# Adopted threads ------------------------------------------------------------------------------------------------------


def test_the_recorded_thread_count_is_adopted():
    assert adopted_cpu_threads({"execution_plan": {"cpu_threads": 7}}) == 7
    assert adopted_cpu_threads(None, {"cpu_threads": 5}) == 5
    assert adopted_cpu_threads({"execution_plan": {"cpu_threads": 7}}, {"cpu_threads": 5}) == 7


@pytest.mark.parametrize("useless", [None, {}, {"execution_plan": None}, {"execution_plan": {"cpu_threads": None}}])
def test_without_a_record_the_count_is_that_of_torch(useless):
    assert adopted_cpu_threads(useless) == torch.get_num_threads()


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "2", 10**9])
def test_a_count_that_is_none_is_passed_over(count):
    assert adopted_cpu_threads({"execution_plan": {"cpu_threads": count}}) == torch.get_num_threads()


def test_a_root_that_holds_nothing_gives_the_count_of_torch(tmp_path):
    assert cpu_threads(tmp_path / "absent") == torch.get_num_threads()
