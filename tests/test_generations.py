"""FORMAT, CURRENT and manifests: fixed bytes, strict parsing."""

import hashlib
import json
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_store.canonical import canonical
from checkpoint_store.errors import CheckpointDamaged, CheckpointError, UnknownFormat
from checkpoint_store.generations import (
    CURRENT_LIMIT_BYTES,
    Current,
    Entry,
    Manifest,
    decode_current,
    decode_format,
    decode_manifest,
    encode_current,
    encode_format,
    encode_manifest,
)
from checkpoint_store.objects import ObjectRef
from checkpoint_store.pages import Page

ROOT_ID = "0123456789abcdef" * 2
LAYER = ObjectRef("layer", "model.layers.0", "a" * 64, 7)
MANIFEST = Manifest(3, None, {"source": {"x": 1.5}}, 1, 2, (LAYER,), "run", "2026-01-01T00:00:00Z")


def no_pages(ref: ObjectRef) -> Page:
    raise AssertionError(f"{ref} is read, and the manifest names no page")


def decode_alone(raw: bytes, what: str) -> Manifest:
    return decode_manifest(raw, what, no_pages)


def sealed(line: bytes) -> bytes:
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def resealed(raw: bytes, **changes: object) -> bytes:
    return sealed(canonical({**json.loads(raw.split(b"\n")[0]), **changes}))


def test_the_bytes_of_format_are_fixed():
    assert encode_format(ROOT_ID) == (
        b'{"format":"prefect-quantize checkpoint","root_id":"0123456789abcdef0123456789abcdef","v":1}\n'
        b"ef18b792d6e596862d68920157390b3560d5bc2f6eee9253ab0473275ce8994a\n"
    )


def test_the_bytes_of_a_manifest_are_fixed_and_name_it():
    entry, raw = encode_manifest(MANIFEST)
    assert raw == (
        b'{"created_utc":"2026-01-01T00:00:00Z","cursor":1,"gen":3,"identity":{"source":{"x":1.5}},"layer_count":2,'
        b'"min_reader":1,"objects":[{"key":"model.layers.0","role":"layer","sha256":"' + b"a" * 64 + b'","size":7}],'
        b'"parent":null,"run_id":"run","v":1}'
    )
    sha256 = hashlib.sha256(raw).hexdigest()
    assert entry == Entry(3, f"00000003-{sha256[:16]}.json", sha256, len(raw))


def test_the_bytes_of_current_are_fixed():
    entry, _ = encode_manifest(MANIFEST)
    line = (
        f'{{"generations":[{{"gen":3,"manifest":"{entry.manifest}","sha256":"{entry.sha256}","size":{entry.size}}}],'
        f'"root_id":"{ROOT_ID}","v":1,"writer":"attempt-0"}}'
    )
    assert encode_current(Current(ROOT_ID, "attempt-0", (entry,))) == sealed(line.encode())


keys = st.text(max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | keys,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


@given(
    identity=st.dictionaries(keys, values, max_size=3),
    names=st.lists(keys, unique=True, max_size=5),
    run_id=st.none() | keys,
)
def test_what_is_encoded_is_decoded_equal(identity, names, run_id):
    refs = tuple(
        ObjectRef("record", name, hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest(), 1)
        for name in names
    )
    manifest = Manifest(1, None, identity, 0, 5, refs, run_id, "now")
    entry, raw = encode_manifest(manifest)
    assert decode_manifest(raw, "m", no_pages) == manifest
    current = Current(ROOT_ID, "writer", (entry,))
    assert decode_current(encode_current(current), "CURRENT") == current
    assert decode_format(encode_format(ROOT_ID), "FORMAT") == ROOT_ID


@settings(max_examples=300)
@given(data=st.data())
def test_every_change_of_a_sealed_file_is_damage(data):
    entry, _ = encode_manifest(MANIFEST)
    raw = encode_current(Current(ROOT_ID, "w", (entry,)))
    position = data.draw(st.integers(0, len(raw) - 1))
    change = data.draw(st.sampled_from(["flip", "cut", "insert", "zero"]))
    changed = {
        "flip": raw[:position] + bytes([raw[position] ^ data.draw(st.integers(1, 255))]) + raw[position + 1 :],
        "cut": raw[:position],
        "insert": raw[:position] + b"0" + raw[position:],
        "zero": raw[:position] + bytes(len(raw) - position),
    }[change]
    if changed != raw:
        with pytest.raises(CheckpointDamaged):
            decode_current(changed, "CURRENT")


@given(raw=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_no_bytes_make_the_parsers_fail_with_anything_but_a_named_error(raw):
    for decode in (decode_alone, decode_current, decode_format):
        for given_bytes in (raw, sealed(raw)):
            with pytest.raises((CheckpointDamaged, UnknownFormat)):
                decode(given_bytes, "file")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"objects": [{**asdict(LAYER), "sha256": "../" + "a" * 61}]}, "not a name of this format"),
        ({"objects": [{**asdict(LAYER), "sha256": "A" * 64}]}, "not a name of this format"),
        ({"objects": [{**asdict(LAYER), "sha256": "a" * 64 + "\n"}]}, "not a name of this format"),
        ({"objects": [{**asdict(LAYER), "role": "Layer/.."}]}, "not a name of this format"),
        ({"objects": [{**asdict(LAYER), "size": -1}]}, "not a size"),
        ({"objects": [{**asdict(LAYER), "size": 2**80}]}, "not a size"),
        ({"objects": [{**asdict(LAYER), "size": True}]}, "not a size"),
        ({"objects": [asdict(LAYER), asdict(LAYER)]}, "names one object twice"),
        ({"objects": {}}, "wrong type"),
        ({"objects": [3]}, "wrong type"),
        ({"cursor": 3}, "3 of 2 layers"),
        ({"cursor": "1"}, "wrong type"),
        ({"identity": []}, "wrong type"),
        ({"min_reader": True}, "no format version"),
    ],
)
def test_a_manifest_with_a_right_hash_and_a_wrong_content_is_damage(changes, why):
    _, raw = encode_manifest(MANIFEST)
    with pytest.raises(CheckpointDamaged, match=why):
        decode_manifest(canonical({**json.loads(raw), **changes}), "m", no_pages)


@pytest.mark.parametrize(
    "text",
    ['{"a":1,"a":2}', '{"a":NaN}', '{"a":1e999}', "[" * 100_000, "1" * 5000, '"text"', "\ufeff{}", '{"a":Infinity}'],
)
def test_what_is_not_strict_json_is_damage(text):
    with pytest.raises(CheckpointDamaged):
        decode_manifest(text.encode(), "m", no_pages)


def test_a_path_in_current_is_damage():
    entry, _ = encode_manifest(MANIFEST)
    raw = encode_current(Current(ROOT_ID, "w", (entry,)))
    for name in ("../../etc/passwd", f"{entry.manifest}/..", "00000004" + entry.manifest[8:]):
        with pytest.raises(CheckpointDamaged):
            decode_current(resealed(raw, generations=[{**asdict(entry), "manifest": name}]), "CURRENT")


def test_generations_that_are_not_listed_newest_first_are_damage():
    entry, _ = encode_manifest(MANIFEST)
    raw = encode_current(Current(ROOT_ID, "w", (entry,)))
    with pytest.raises(CheckpointDamaged, match="newest first"):
        decode_current(resealed(raw, generations=[vars(entry), vars(entry)]), "CURRENT")


def test_a_newer_version_is_told_as_such_and_not_as_damage():
    entry, raw_manifest = encode_manifest(MANIFEST)
    for decode, raw in (
        (decode_current, resealed(encode_current(Current(ROOT_ID, "w", (entry,))), v=2)),
        (decode_format, resealed(encode_format(ROOT_ID), v=2)),
        (decode_alone, canonical({**json.loads(raw_manifest), "v": 3, "min_reader": 3})),
    ):
        with pytest.raises(UnknownFormat, match="update prefect-quantize"):
            decode(raw, "file")
    # A later writer may say that this reader still understands it.
    assert decode_manifest(canonical({**json.loads(raw_manifest), "v": 3, "more": 1}), "m", no_pages) == MANIFEST


def test_a_file_that_would_be_too_large_to_read_is_not_written():
    entry, _ = encode_manifest(MANIFEST)
    with pytest.raises(CheckpointError, match="keep_last"):
        encode_current(Current(ROOT_ID, "w", (entry,) * (CURRENT_LIMIT_BYTES // 100)))
    with pytest.raises(CheckpointError, match="more than"):
        encode_manifest(Manifest(1, None, {"x": "y" * (9 << 20)}, 0, 1, (), None, "now"))
