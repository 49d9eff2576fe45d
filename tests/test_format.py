"""The format document against the code: a reader written from FORMAT.md alone, with the standard library."""

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from saved_contents import small_pages
from test_store import IDENTITY, expected, publish_layers, tree

from checkpoint_store import generations, pages, tensors
from checkpoint_store.objects import BytesPayload
from checkpoint_store.store import CheckpointStore

DOCUMENT = (Path(generations.__file__).parent / "FORMAT.md").read_text()


def digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def sealed_json(path: Path) -> dict:
    line, checksum, end = path.read_bytes().split(b"\n")
    assert (checksum.decode(), end) == (digest(line), b"")
    value = json.loads(line)
    assert json.dumps(value, sort_keys=True, separators=(",", ":")).encode() == line
    return value


def whole(root: Path, ref: dict) -> bytes:
    data = (root / "objects" / ref["sha256"]).read_bytes()
    assert (len(data), digest(data)) == (ref["size"], ref["sha256"])
    return data


def read_by_the_document(root: Path) -> list[dict[str, bytes]]:
    """All generations, newest first, as cursor and bytes by key."""
    told = sealed_json(root / "FORMAT")
    assert (told["format"], told["v"]) == ("prefect-quantize checkpoint", 1)
    current = sealed_json(root / "CURRENT")
    assert (current["v"], current["root_id"]) == (1, told["root_id"])
    found = []
    for entry in current["generations"]:
        assert entry["manifest"] == f"{entry['gen']:08d}-{entry['sha256'][:16]}.json"
        raw = (root / "generations" / entry["manifest"]).read_bytes()
        assert (len(raw), digest(raw)) == (entry["size"], entry["sha256"])
        manifest = json.loads(raw)
        assert {*manifest, "pages"} == set(re.findall(r"`(\w+)`", " ".join(manifest_rows())))
        assert manifest["v"] == manifest["min_reader"] == (2 if "pages" in manifest else 1)
        assert (manifest["gen"], manifest["identity"]) == (entry["gen"], IDENTITY)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", manifest["created_utc"])
        contents = {"cursor": b"%d" % manifest["cursor"]}
        named = [name for page in manifest.get("pages", []) for name in json.loads(whole(root, page))["objects"]]
        named += manifest["objects"]
        assert len({(ref["role"], ref["key"]) for ref in named}) == len(named)
        for role in ("layer", "record"):
            numbers = [int(re.sub(r"\D", "", ref["key"])) for ref in named if ref["role"] == role]
            assert numbers == list(range(manifest["cursor"]))
        contents |= {ref["key"]: whole(root, ref) for ref in named}
        found.append(contents)
    return found


def manifest_rows() -> list[str]:
    """The first column of the document's table of manifest keys."""
    table = DOCUMENT.split("**A manifest**")[1].split("\n\n")[1]
    return [line.split("|")[1] for line in table.splitlines()[2:]]


@pytest.mark.parametrize("page_objects", [2, 3, 64])
def test_a_reader_written_from_the_document_reads_what_the_store_published(tmp_path, page_objects):
    with small_pages(page_objects), CheckpointStore.open(tmp_path, keep_last=3) as store:
        publish_layers(store, 0, 4)
    assert read_by_the_document(tmp_path) == [expected(4), expected(3), expected(2)]


def test_the_tree_is_the_documented_one(tmp_path):
    with CheckpointStore.open(tmp_path) as store:
        publish_layers(store, 0, 3)
        (store.scratch / "spilled").write_bytes(b"")
        names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    patterns = [
        "FORMAT",
        r"CURRENT(\.prev)?",
        r"(writer|readers)\.lock",
        "objects/[0-9a-f]{64}",
        r"generations/[0-9]{8}-[0-9a-f]{16}\.json",
        "attempt-[0-9a-f]{16}/.*",
    ]
    assert [name for name in names if not any(re.fullmatch(pattern, name) for pattern in patterns)] == []
    assert all(any(re.fullmatch(pattern, name) for name in names) for pattern in patterns)


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (generations.FORMAT_LIMIT_BYTES, "at most 4 KiB"),
        (generations.CURRENT_LIMIT_BYTES, "at most 64 KiB"),
        (generations.MANIFEST_LIMIT_BYTES, "at most 8 MiB"),
        (pages.PAGE_LIMIT_BYTES, "at most 1 MiB"),
        (tensors.HEADER_LIMIT_BYTES, "at most 16 MiB"),
        (tensors.CONTINUATION_CHUNK_BYTES, "at most 1 GiB"),
    ],
)
def test_the_limits_are_the_documented_ones(limit, words):
    number, unit = words.split()[2:]
    assert limit == int(number) << {"KiB": 10, "MiB": 20, "GiB": 30}[unit]
    assert words in DOCUMENT


def test_the_number_of_names_in_a_page_is_the_documented_one():
    text = " ".join(DOCUMENT.split())
    assert f"of 1 to {pages.PAGE_OBJECTS_MOST} names; a writer puts {pages.PAGE_OBJECTS} into one" in text


def test_a_layer_object_is_a_shard_that_other_programs_read(tmp_path):
    weights = {"model.layers.0.mlp.up_proj.qweight": torch.arange(6, dtype=torch.int32).reshape(2, 3)}
    with CheckpointStore.open(tmp_path) as store:
        ref = store.stage("layer", "model.layers.0", tensors.safetensors_payload(weights))
        store.stage("record", "k", BytesPayload(b"{}"))
        assert torch.equal(load_file(store.path_of(ref))["model.layers.0.mlp.up_proj.qweight"], *weights.values())
    assert not any(name.endswith((".pt", ".pkl", ".bin")) for name in tree(tmp_path))
