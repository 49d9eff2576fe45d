"""A source on disk: read to the bit, and everything that is wrong with it told in one list."""

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_llama

from tasks.models.shard_header import HEADER_LIMIT, HeaderError, read_header
from tasks.models.source import SourceError, SourceModel

ROWS = {"a": torch.arange(12, dtype=torch.float32).reshape(3, 4), "b": torch.tensor([1, -2], dtype=torch.int64)}


def write_shard(path: Path, header: dict | bytes, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def problems_of(path: Path) -> tuple[str, ...]:
    with pytest.raises(SourceError) as caught:
        SourceModel.open(str(path))
    for problem in caught.value.problems:
        assert problem in str(caught.value)
    return caught.value.problems


def sharded(tmp_path: Path) -> tuple[Path, dict]:
    """A model directory with two shards and its index."""
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": ROWS["a"]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": ROWS["b"]}, tmp_path / "model-00002-of-00002.safetensors")
    places = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    write_index(tmp_path, places)
    return tmp_path, places


def write_index(path: Path, places: object) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_reads_as_the_safetensors_library_reads_it(tmp_path, shards):
    path = write_tiny_llama(tmp_path / "model", shards=shards)
    source = SourceModel.open(str(path))
    expected = {name: tensor for file in source.shards for name, tensor in load_file(path / file).items()}
    assert source.config["model_type"] == "llama"
    assert (len(source.shards) > 1) == (shards > 1)
    loaded = source.load(source.tensors)
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn]
)
def test_dtypes_empty_tensors_and_scalars_survive(tmp_path, dtype):
    tensors = {"m": torch.ones(3, 5).to(dtype), "none": torch.zeros(0, 5).to(dtype), "one": torch.ones(()).to(dtype)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    loaded = SourceModel.open(str(tmp_path)).load(tensors)
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert loaded[name].float().equal(tensor.float())


def test_loading_casts_floats_only(tmp_path):
    save_file(ROWS, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    source = SourceModel.open(str(tmp_path))
    loaded = source.load(["a", "b"], dtype=torch.float64)
    assert (loaded["a"].dtype, loaded["b"].dtype) == (torch.float64, torch.int64)
    assert source.load_rows("a", 2).equal(ROWS["a"][:2])
    with pytest.raises(SourceError, match="there is no tensor `c`"):
        source.load(["a", "c"])


def test_only_the_bytes_of_the_named_tensors_are_read(tmp_path):
    path, _ = sharded(tmp_path)
    source = SourceModel.open(str(path))
    (path / "model-00002-of-00002.safetensors").unlink()
    assert source.load(["a"])["a"].equal(ROWS["a"])


def test_tensors_are_equal_when_dtype_shape_and_every_byte_are(tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.models.source.PIECE_BYTES", 7)  # several pieces, the last one short
    base = torch.arange(12, dtype=torch.float32)
    last, first = base.clone(), base.clone()
    last[-1], first[0] = 99, 99
    tensors = {"base": base, "same": base.clone(), "last": last, "first": first}
    tensors |= {"shape": base.reshape(3, 4).clone(), "dtype": base.view(torch.int32).clone()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    source = SourceModel.open(str(tmp_path))
    assert [name for name in tensors if source.are_equal("base", name)] == ["base", "same"]


def test_a_shard_cut_after_opening_is_an_error_and_not_short_data(tmp_path):
    path, _ = sharded(tmp_path)
    source = SourceModel.open(str(path))
    shard = path / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(SourceError, match=r"`model-00001-of-00002.safetensors` became shorter .* `a` is cut"):
        source.load(["a"])


def test_hub_cache_symlinks_are_followed(tmp_path, monkeypatch):
    """The layout of the hub's cache: a snapshot of links to blobs, found by id without a network."""
    from huggingface_hub import constants

    real = write_tiny_llama(tmp_path / "real")
    repository = tmp_path / "cache" / "models--someone--tiny"
    snapshot = repository / "snapshots" / ("0" * 40)
    (repository / "blobs").mkdir(parents=True)
    (repository / "refs").mkdir()
    snapshot.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    for number, file in enumerate(sorted(real.iterdir())):
        file.rename(repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    by_id = SourceModel.open("someone/tiny")
    assert by_id.path == snapshot
    assert by_id.tensors == SourceModel.open(str(snapshot)).tensors
    assert by_id.load(["model.norm.weight"])["model.norm.weight"].shape == (64,)


def test_a_hub_id_without_network_gets_a_clear_word(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(SourceError, match=r"`someone/tiny` can't be used:\n.*the hub can't be reached"):
        SourceModel.open("someone/tiny")


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a/b/c", "..", "with space"])
def test_a_name_that_is_neither_directory_nor_hub_id_is_told_apart(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match=r"no such directory, and it is not a hub id|`config.json` is missing"):
        SourceModel.open(name)


def test_a_file_instead_of_a_directory_is_told(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(ROWS, file)
    assert problems_of(file) == ("it is a file; name the directory that holds config.json and the safetensors files",)


def test_pickles_are_named_and_never_read(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    (problem,) = problems_of(tmp_path)
    assert "no safetensors files, only `pytorch_model.bin`" in problem


def test_an_empty_directory_lacks_two_things(tmp_path):
    assert [problem.split(":")[0] for problem in problems_of(tmp_path)] == [
        "`config.json` is missing",
        "it has no weights",
    ]


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff", "[" * 100_000])
def test_a_config_that_is_no_json_object_is_told(tmp_path, text):
    save_file(ROWS, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    (problem,) = problems_of(tmp_path)
    assert problem.startswith("`config.json` is not ")


def test_shards_without_an_index_are_refused(tmp_path):
    path, _ = sharded(tmp_path)
    (path / "model.safetensors.index.json").unlink()
    (problem,) = problems_of(path)
    assert "neither `model.safetensors` nor `model.safetensors.index.json`" in problem


def test_an_index_that_names_an_absent_shard_is_refused(tmp_path):
    path, _ = sharded(tmp_path)
    (path / "model-00002-of-00002.safetensors").unlink()
    assert problems_of(path) == (
        "`model.safetensors.index.json` names `model-00002-of-00002.safetensors`, which is not there",
    )


def test_an_index_that_names_a_file_elsewhere_is_refused(tmp_path):
    (tmp_path / "x").mkdir()
    path, places = sharded(tmp_path / "x")
    save_file({"c": ROWS["a"]}, tmp_path / "model.safetensors")
    write_index(path, places | {"c": "../model.safetensors"})
    assert problems_of(path) == ("`model.safetensors.index.json` names `../model.safetensors`, which is not there",)


def test_an_index_that_puts_tensors_wrongly_is_refused(tmp_path):
    path, places = sharded(tmp_path)
    write_index(path, {"a": places["b"], "b": places["b"], "ghost": places["a"]})
    assert problems_of(path) == (
        "`model.safetensors.index.json` puts `a` into `model-00002-of-00002.safetensors`; "
        "it is in `model-00001-of-00002.safetensors`",
        "`model.safetensors.index.json` puts `ghost` into `model-00001-of-00002.safetensors`, which does not hold it",
    )


def test_a_tensor_in_no_index_is_refused(tmp_path):
    path, places = sharded(tmp_path)
    save_file({"a": ROWS["a"], "stray": ROWS["b"]}, path / places["a"])
    assert problems_of(path) == ("`stray` of `model-00001-of-00002.safetensors` is in no index",)


def test_a_single_file_beside_an_index_that_does_not_name_it_is_refused(tmp_path):
    path, _ = sharded(tmp_path)
    save_file(ROWS, path / "model.safetensors")
    assert problems_of(path) == (
        "`model.safetensors` stands beside `model.safetensors.index.json`, which does not name it; remove one",
    )


def test_an_index_may_name_the_single_file_it_stands_beside(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file(ROWS, tmp_path / "model.safetensors")
    write_index(tmp_path, dict.fromkeys(ROWS, "model.safetensors"))
    assert SourceModel.open(str(tmp_path)).tensors.keys() == ROWS.keys()


def test_weights_of_other_programs_beside_the_model_are_left_alone(tmp_path):
    path, places = sharded(tmp_path)
    save_file(ROWS, path / "consolidated.safetensors")
    assert SourceModel.open(str(path)).shards == tuple(sorted(places.values()))


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    path, places = sharded(tmp_path)
    save_file(ROWS, path / places["b"])
    assert problems_of(path) == (
        "`a` is in `model-00001-of-00002.safetensors` and again in `model-00002-of-00002.safetensors`",
    )


@pytest.mark.parametrize("places", [{}, [], None, {"a": 1}])
def test_an_index_without_a_map_is_refused(tmp_path, places):
    path, _ = sharded(tmp_path)
    write_index(path, places)
    (problem,) = problems_of(path)
    assert "no `weight_map`" in problem


def test_everything_wrong_is_told_at_once(tmp_path):
    path, places = sharded(tmp_path)
    (path / "config.json").write_text("{")
    shard = path / places["a"]
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-5])
    write_index(path, places | {"c": "model-00003-of-00003.safetensors"})
    config, absent, truncated = problems_of(path)
    assert config.startswith("`config.json` is not JSON")
    assert "names `model-00003-of-00003.safetensors`" in absent
    assert truncated == (
        f"`{places['a']}` is truncated: it has {size - 5} bytes, its header describes {size}; fetch it again"
    )


def test_a_shard_cut_at_any_byte_is_refused(tmp_path):
    whole = tmp_path / "whole.safetensors"
    save_file(ROWS, whole)
    data = whole.read_bytes()
    for size in range(len(data)):
        (tmp_path / "cut").write_bytes(data[:size])
        with pytest.raises(HeaderError, match=rf"`cut` is truncated: it has {size} bytes"):
            read_header(tmp_path / "cut", "cut")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_header_with_any_byte_changed_is_read_or_refused_and_never_overruns(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("flip") / "model.safetensors"
    save_file(ROWS, path)
    content = bytearray(path.read_bytes())
    header_end = 8 + int.from_bytes(content[:8], "little")
    content[data.draw(st.integers(0, header_end - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        tensors = read_header(path, "model.safetensors")
    except HeaderError:
        return
    assert all(info.stop <= len(content) for info in tensors.values())


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"a": entry(dtype="F99")}, "unknown dtype 'F99'"),
        ({"a": entry(dtype=None)}, "unknown dtype None"),
        ({"a": entry(shape=[-2])}, r"shape \[-2\]"),
        ({"a": entry(shape=[True, 2])}, r"shape \[True, 2\]"),
        ({"a": entry(shape=[3])}, r"has 8 bytes; F32 of shape \[3\] needs 12"),
        ({"a": entry(offsets=[8, 0])}, r"offsets \[8, 0\]"),
        ({"a": entry(offsets=[0])}, r"offsets \[0\]"),
        ({"a": 7}, "not described by an object"),
        ({"a": entry(), "b": entry()}, "`b` starts at byte"),
        ({"a": entry(shape=[1], offsets=[4, 8])}, "`a` starts at byte"),
        (b"[]", "not a JSON object"),
        (b"\xff\xfe", "damaged header"),
        (b'{"a": 1, "a": 2}', "`a` is there twice"),
        ({"a": entry(shape=[1], offsets=[0, 4])}, "4 more than its header describes"),
        ({"a": entry(shape=[4], offsets=[0, 16])}, "is truncated"),
    ],
)
def test_a_header_that_does_not_add_up_is_refused(tmp_path, header, reason):
    path = write_shard(tmp_path / "s", header, bytes(8))
    with pytest.raises(HeaderError, match=rf"`s` .*{reason}"):
        read_header(path, "s")


def test_a_header_length_beyond_reason_allocates_nothing(tmp_path):
    path = tmp_path / "s"
    path.write_bytes(struct.pack("<Q", HEADER_LIMIT + 1) + bytes(100))
    with pytest.raises(HeaderError, match="not a safetensors file"):
        read_header(path, "s")


def test_a_git_lfs_pointer_is_recognised(tmp_path):
    (tmp_path / "s").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(HeaderError, match="git lfs pull"):
        read_header(tmp_path / "s", "s")


@pytest.mark.parametrize("value", ["Infinity", "NaN", "1e999", '"\\ud800"'])
def test_a_config_that_could_not_be_written_again_is_refused_on_opening(tmp_path, value):
    path = write_tiny_llama(tmp_path / "model")
    config = (path / "config.json").read_text().strip()
    (path / "config.json").write_text(f'{config[:-1]}, "note": {value}}}')
    with pytest.raises(SourceError, match=r"`config.json` is not JSON"):
        SourceModel.open(str(path))
