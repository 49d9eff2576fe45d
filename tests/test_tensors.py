"""Tensors to objects and back: the library's bytes, our own checks, no copies."""

import json
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_store.disk import Disk
from checkpoint_store.errors import CheckpointDamaged
from checkpoint_store.objects import Payload
from checkpoint_store.tensors import (
    _DTYPES,
    continuation_batches,
    continuation_payloads,
    safetensors_payload,
    tensors_from,
)


def joined(payload: Payload) -> bytes:
    return b"".join(bytes(view) for view in payload.views())


def raw_object(header: object, data: bytes = b"") -> memoryview:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return memoryview(len(text).to_bytes(8, "little") + text + data)


def entry(dtype: str = "U8", shape: object = (2,), offsets: object = (0, 2)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def one_of_each_type() -> dict[str, torch.Tensor]:
    tensors = {
        f"ä.{index % 3}.{dtype}": torch.arange(index + 1).reshape(1, -1).to(dtype)
        for index, dtype in enumerate(_DTYPES.values())
    }
    return {**tensors, "scalar": torch.tensor(3.5, dtype=torch.bfloat16), "empty": torch.empty(0, 5)}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.to(torch.float64), other.to(torch.float64))
    )


def test_the_bytes_are_those_of_the_safetensors_library():
    tensors = one_of_each_type()
    payload = safetensors_payload(tensors)
    raw = joined(payload)
    assert raw == safetensors.torch.save(tensors, metadata={"format": "pt"})
    assert len(raw) == payload.size


def test_the_library_loads_what_we_write_and_we_load_what_it_writes(tmp_path: Path):
    tensors = one_of_each_type()
    (tmp_path / "ours").write_bytes(joined(safetensors_payload(tensors, {"format": "pt", "more": "x"})))
    safetensors.torch.save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    with safetensors.safe_open(tmp_path / "ours", "pt") as opened:
        assert opened.metadata() == {"format": "pt", "more": "x"}
    theirs = safetensors.torch.load_file(tmp_path / "ours")
    ours = tensors_from(memoryview((tmp_path / "theirs").read_bytes()))
    assert set(theirs) == set(ours) == set(tensors)
    assert all(same(theirs[name], tensors[name]) and same(ours[name], tensors[name]) for name in tensors)


names = st.text(max_size=10).filter(
    lambda name: name != "__metadata__" and not any(0xD800 <= ord(c) < 0xE000 for c in name)
)
shapes = st.lists(st.integers(0, 4), max_size=3)


@given(st.dictionaries(names, st.tuples(st.sampled_from(list(_DTYPES.values())), shapes), max_size=6))
def test_reading_inverts_writing(kinds):
    tensors = {name: torch.randint(0, 2, shape).to(dtype) for name, (dtype, shape) in kinds.items()}
    raw = joined(safetensors_payload(tensors))
    found = tensors_from(memoryview(bytearray(raw)))
    assert set(found) == set(tensors)
    assert all(same(found[name], tensors[name]) for name in tensors)
    assert raw == safetensors.torch.save(tensors, metadata={"format": "pt"})


def test_no_tensor_is_copied_in_either_direction(tmp_path):
    weight = torch.randn(100, 7).to(torch.bfloat16)
    views = list(safetensors_payload({"w": weight}).views())
    weight[0, 0] = 42
    assert torch.frombuffer(views[1], dtype=torch.bfloat16)[0] == 42

    raw = joined(safetensors_payload({"w": weight}))
    mapping = memoryview(bytearray(raw))
    tensors = tensors_from(mapping)
    mapping[-2:] = b"\0\0"
    assert tensors["w"][-1, -1] == 0


def test_tensors_of_a_mapping_outlive_every_other_reference_to_it_and_may_be_written(tmp_path, recwarn):
    (tmp_path / "object").write_bytes(joined(safetensors_payload({"w": torch.ones(1000)})))
    disk = Disk()
    directory = disk.open_root(str(tmp_path))
    file = disk.open_for_read(directory, "object")
    tensors = tensors_from(disk.map(file, disk.size(file)))
    disk.close(file)
    disk.close(directory)
    tensors["w"].add_(1)
    assert tensors["w"].sum() == 2000
    assert not recwarn.list


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.ones(4, 4).t(), "not contiguous"),
        (torch.ones(4, device="meta"), "move it to the CPU"),
        (torch.ones(2, 2).to_sparse(), "dense"),
        (torch.ones(2, dtype=torch.complex64), "cannot hold"),
    ],
)
def test_what_an_object_cannot_hold_is_refused_by_name(tensor, why):
    with pytest.raises(ValueError, match=why) as caught:
        safetensors_payload({"layers.0.weight": tensor})
    assert "layers.0.weight" in str(caught.value)


def test_the_librarys_own_name_is_refused():
    with pytest.raises(ValueError, match="__metadata__"):
        safetensors_payload({"__metadata__": torch.ones(1)})


@pytest.mark.parametrize(
    "damaged",
    [
        memoryview(b""),
        memoryview(b"\0" * 7),
        memoryview(b"\0" * 8),
        memoryview((2**63).to_bytes(8, "little") + b"{}"),
        memoryview((3).to_bytes(8, "little") + b"{}"),
        raw_object(b"[]"),
        raw_object(b"not json"),
        raw_object(b"\xff\xfe"),
        raw_object(b"[" * 100_000),
        raw_object(
            b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
        ),
        raw_object({"a": []}),
        raw_object({"a": {**entry(), "more": 1}}, b"ab"),
        raw_object({"a": entry("U9")}, b"ab"),
        raw_object({"a": entry(["U8"])}, b"ab"),  # type: ignore[arg-type]
        raw_object({"a": entry(shape=[-2])}, b"ab"),
        raw_object({"a": entry(shape=[True, 2])}, b"ab"),
        raw_object({"a": entry(shape=2)}, b"ab"),
        raw_object({"a": entry(shape=[1] * 65 + [2])}, b"ab"),
        raw_object({"a": entry(offsets=[0, 3])}, b"abc"),
        raw_object({"a": entry(offsets=[2, 0])}, b"ab"),
        raw_object({"a": entry(offsets=[0])}, b"ab"),
        raw_object({"a": entry(offsets=[1, 3])}, b"abc"),
        raw_object({"a": entry()}, b"abc"),
        raw_object({"a": entry()}, b"a"),
        raw_object({"a": entry(), "b": entry()}, b"ab"),
        raw_object({"a": entry(), "b": entry(offsets=[3, 5])}, b"abcde"),
        raw_object({"__metadata__": {"format": 1}, "a": entry()}, b"ab"),
        raw_object({"__metadata__": "pt", "a": entry()}, b"ab"),
        raw_object({"a": entry(shape=[2**62, 2**62], offsets=[0, 2])}, b"ab"),
        raw_object({"a": entry(shape=[0, 2**62, 2**62], offsets=[0, 0])}),
    ],
)
def test_a_header_that_is_not_strictly_right_is_damage(damaged):
    with pytest.raises(CheckpointDamaged, match="header is damaged"):
        tensors_from(damaged)


@settings(max_examples=300)
@given(st.data())
def test_a_changed_header_gives_the_same_shape_of_data_or_a_named_error(data):
    raw = bytearray(joined(safetensors_payload({"a": torch.arange(5), "b": torch.ones(3, dtype=torch.float16)})))
    end = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    try:
        tensors = tensors_from(memoryview(raw))
    except CheckpointDamaged:
        return
    assert sum(tensor.nbytes for tensor in tensors.values()) == len(raw) - 8 - int.from_bytes(raw[:8], "little")


def test_data_that_starts_at_an_odd_place_is_read_all_the_same():
    data = b"\1\2\3" + torch.tensor([1.5, 2.5]).numpy().tobytes()
    tensors = tensors_from(raw_object({"a": entry(shape=[3], offsets=[0, 3]), "b": entry("F32", [2], [3, 11])}, data))
    assert tensors["b"].tolist() == [1.5, 2.5]


def test_a_continuation_is_cut_into_chunks_and_put_together_in_order():
    batches = [torch.full((2, 8, 4), index, dtype=torch.bfloat16) for index in range(25)]
    payloads = continuation_payloads(batches, chunk_bytes=3 * batches[0].nbytes + 1)
    assert len(payloads) == 9
    found = continuation_batches(memoryview(bytearray(joined(payload))) for payload in payloads)
    assert len(found) == 25 and all(same(one, other) for one, other in zip(batches, found, strict=True))
    assert len(continuation_payloads(batches, chunk_bytes=1)) == 25
    assert continuation_payloads([]) == [] and continuation_batches([]) == []
    with pytest.raises(CheckpointDamaged, match="without a gap"):
        continuation_batches([memoryview(bytearray(joined(payloads[1])))])
