"""The exported directory: what is in it, what a finished one means to the next run, and that nothing private leaks."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from checkpoint_store.errors import StorageFull
from flows.quantize_model import quantize_model
from tasks import export, output_directory
from tasks.formats import gptq as layout
from tasks.job import QuantizationJob
from tasks.models.source import INDEX_FILE
from tasks.quantization import GPTQConfig, RTNConfig
from tasks.report import REPORT_FILE
from tests.flow_jobs import LAYERS, contents, layers_run, tiny_job
from tests.tiny_models import write_tiny_llama

LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "private-name", layers=LAYERS, shards=2)


def rtn(model: Path, place: Path, **options: Any) -> QuantizationJob:
    return tiny_job(model, place, quantization=RTNConfig(group_size=32), **options)


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> QuantizationJob:
    """A finished job whose files nothing here may change."""
    job = rtn(model, tmp_path_factory.mktemp("finished"))
    quantize_model(job)
    return job


def copied(job: QuantizationJob, place: Path) -> QuantizationJob:
    """The same job with its output at another place, to be damaged."""
    shutil.copytree(job.output, place / "output")
    return job.model_copy(update={"output": str(place / "output")})


# Pure parts -----------------------------------------------------------------------------------------------------------


def test_the_index_maps_every_tensor_in_order_and_refuses_one_in_two_shards() -> None:
    index = json.loads(export.index_of({"one": ["b", "c"], "two": ["a"]}, 12))
    assert index == {"metadata": {"total_size": 12}, "weight_map": {"a": "two", "b": "one", "c": "one"}}
    with pytest.raises(ValueError, match="tensor `a` is in two shards, `one` and `two`"):
        export.index_of({"one": ["a"], "two": ["a"]}, 1)


@pytest.mark.parametrize("source", [{"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}])
def test_both_dtype_keys_are_written_equal_and_private_keys_are_not(source: dict[str, Any]) -> None:
    source = {
        **source,
        "_name_or_path": "/home/somebody/models/x",
        "quantization_config": {"old": 1},
        "hidden_size": 64,
    }
    config = json.loads(export.config_of(source, {"bits": 4}))
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert config["quantization_config"] == {"bits": 4}
    assert config["hidden_size"] == 64 and "_name_or_path" not in config


# The directory --------------------------------------------------------------------------------------------------------


def test_the_directory_holds_each_layer_as_a_shard_and_everything_else_in_one_more(
    model: Path, finished: QuantizationJob
) -> None:
    output = Path(finished.output)
    shards = [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
    assert {path.name for path in output.iterdir()} == {
        *shards, INDEX_FILE, REPORT_FILE, "config.json", "quantize_config.json", "generation_config.json",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    index = json.loads((output / INDEX_FILE).read_text())["weight_map"]
    for number, shard in enumerate(shards):
        with safe_open(output / shard, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert all(index[name] == shard for name in opened.keys())  # noqa: SIM118  it is not a dict
            if number < LAYERS:
                assert all(name.startswith(f"model.layers.{number}.") for name in opened.keys())  # noqa: SIM118
    assert {index[name] for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")} == {
        shards[-1]
    }
    tensors = {name: tensor for shard in shards for name, tensor in load_file(output / shard).items()}
    assert tensors.keys() == index.keys()
    total = json.loads((output / INDEX_FILE).read_text())["metadata"]["total_size"]
    assert total == sum(tensor.nbytes for tensor in tensors.values())


def test_the_weights_in_the_files_are_near_the_source_and_everything_else_is_the_source(
    model: Path, finished: QuantizationJob
) -> None:
    source = {name: tensor for file in model.glob("*.safetensors") for name, tensor in load_file(file).items()}
    written = {
        name: tensor for file in Path(finished.output).glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    for layer in range(LAYERS):
        for linear in (*LINEARS, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
            name = f"model.layers.{layer}.{linear}"
            rows = layout.unpack(written, name, GPTQConfig())
            error_NK = (rows.dequantize() - source.pop(f"{name}.weight").float()).abs()
            # Half a step is the most that rounding to nearest may cost, and 7.5 steps are off by a float16's rounding.
            assert bool((error_NK <= (0.5 + 7.5 * 2**-11) * rows.scales_NG.float()[:, rows.g_idx_K.long()]).all())
    assert all(torch.equal(written[name], tensor) for name, tensor in source.items())


def test_no_file_names_a_place_of_this_machine(model: Path, finished: QuantizationJob) -> None:
    for path in Path(finished.output).iterdir():
        text = path.read_bytes()
        for private in (str(model.parent), finished.checkpoint.path, finished.output):
            assert private.encode() not in text, (path.name, private)


def test_tied_models_never_get_a_head(tmp_path: Path, prefect_server: None) -> None:
    model = write_tiny_llama(tmp_path / "model", layers=1, tied=True)
    job = rtn(model, tmp_path)
    quantize_model(job)
    index = json.loads((Path(job.output) / INDEX_FILE).read_text())["weight_map"]
    config = json.loads((Path(job.output) / "config.json").read_text())
    assert "lm_head.weight" not in index and config["tie_word_embeddings"] is True


def test_files_are_copied_verbatim_even_when_a_strict_saver_would_reject_them(
    tmp_path: Path, prefect_server: None
) -> None:
    model = write_tiny_llama(tmp_path / "model", layers=1)
    (model / "generation_config.json").write_text('{"temperature": 0.1, "do_sample": false}')
    (model / "notes.txt").write_text("mine")
    job = rtn(model, tmp_path)
    quantize_model(job)
    assert (Path(job.output) / "generation_config.json").read_text() == '{"temperature": 0.1, "do_sample": false}'
    assert not (Path(job.output) / "notes.txt").exists()


# The next run ---------------------------------------------------------------------------------------------------------


def test_a_finished_export_is_verified_and_the_run_ends_as_done_also_without_its_checkpoint(
    finished: QuantizationJob, tmp_path: Path
) -> None:
    job = copied(finished, tmp_path)
    elsewhere = finished.checkpoint.model_copy(update={"path": str(tmp_path / "gone")})
    before = contents(job.output)
    for again in (job, job.model_copy(update={"checkpoint": elsewhere})):
        with layers_run() as ran:
            report = quantize_model(again)
        assert (report.status, ran, len(report.layers)) == ("verified", [], LAYERS)
    assert contents(job.output) == before
    assert not (tmp_path / "gone").exists()


def test_a_changed_export_is_refused_by_the_name_of_the_file(finished: QuantizationJob, tmp_path: Path) -> None:
    job = copied(finished, tmp_path)
    (Path(job.output) / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"`config.json` has other bytes.*move the directory away"):
        quantize_model(job)


def test_another_jobs_export_is_refused(finished: QuantizationJob, model: Path, tmp_path: Path) -> None:
    job = copied(finished, tmp_path).model_copy(update={"quantization": GPTQConfig(bits=8, group_size=32)})
    with layers_run() as ran, pytest.raises(ValueError, match="finished export of another job"):
        quantize_model(job)
    assert ran == []


def test_the_output_is_the_place_that_preflight_looked_at_also_behind_a_link(
    model: Path, tmp_path: Path, prefect_server: None
) -> None:
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "deep")
    report = quantize_model(rtn(model, tmp_path, output="link/../output"))
    assert report.output == str(tmp_path / "output")
    assert (tmp_path / "output" / INDEX_FILE).exists()
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["deep"]


def test_files_that_came_into_the_output_while_layers_were_quantized_are_not_overwritten(
    model: Path, tmp_path: Path, prefect_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, clear = rtn(model, tmp_path), export.remove_leftovers

    def somebody_writes(output: Path) -> list[str]:
        output.mkdir()
        (output / "config.json").write_text("somebody's")
        return clear(output)

    monkeypatch.setattr(export, "remove_leftovers", somebody_writes)
    with pytest.raises(ValueError, match=r"config\.json"):
        quantize_model(job)
    assert {path.name: path.read_text() for path in Path(job.output).iterdir()} == {"config.json": "somebody's"}


def test_an_output_with_foreign_files_is_refused_before_any_layer(
    model: Path, tmp_path: Path, prefect_server: None
) -> None:
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "thesis.tex").write_text("the only copy")
    with layers_run() as ran, pytest.raises(ValueError, match=r"not empty \(`thesis.tex`\)"):
        quantize_model(rtn(model, tmp_path))
    assert ran == [] and (tmp_path / "output" / "thesis.tex").exists()


def test_an_empty_directory_is_filled_with_the_same_bytes(
    finished: QuantizationJob, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "output").mkdir()
    inode = (tmp_path / "output").stat().st_ino
    job = rtn(model, tmp_path)
    quantize_model(job)
    assert contents(job.output) == contents(finished.output)
    assert (tmp_path / "output").stat().st_ino == inode


def test_a_full_disk_while_exporting_is_told_as_what_it_is_and_costs_only_the_export(
    finished: QuantizationJob, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = rtn(model, tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(output_directory.Export, "add_tensors", full)
        with pytest.raises(StorageFull, match="only the export is repeated"):
            quantize_model(job)
    assert not Path(job.output).exists() and list(tmp_path.glob(".output.partial-*")) == []
    with layers_run() as ran:
        quantize_model(job)
    assert ran == [] and contents(job.output) == contents(finished.output)
