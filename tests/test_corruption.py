"""Damage on disk gives the right bytes, an older generation or a named error: never wrong bytes, never a traceback, never a fresh start.

Most of it runs on a disk in memory, whose whole content is one value that can be spoiled in every place; links and special files need a
real one.
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from crash_states import Machine, State
from hypothesis import given, settings
from hypothesis import strategies as st
from recording_disk import RecordingDisk
from saved_contents import contents, load, open_reader, open_writer, repeatable, save, small_pages

from checkpoint_store.disk import Disk
from checkpoint_store.errors import CheckpointDamaged, CheckpointError, UnknownFormat
from checkpoint_store.tensors import safetensors_payload, tensors_from

GENERATIONS = 3
REPEATABLE = settings(deadline=None, derandomize=True)


def saved() -> State:
    machine = Machine()
    disk = RecordingDisk(machine)
    with repeatable(1), small_pages(2):
        store = open_writer(disk)
        for cursor in range(1, GENERATIONS + 1):
            save(store, cursor)
        store.close()
    return machine.visible_state()


SAVED = saved()
FILES = {path: content for path, _, content in SAVED if content is not None and not path.endswith(".lock")}
NEWEST, SPARE = (json.loads(FILES[name].splitlines()[0])["generations"] for name in ("CURRENT", "CURRENT.prev"))
MANIFESTS = {cursor: f"generations/{NEWEST[GENERATIONS - cursor]['manifest']}" for cursor in (2, 3)}
PAGES = {
    cursor: [f"objects/{page['sha256']}" for page in json.loads(FILES[path])["pages"]]
    for cursor, path in MANIFESTS.items()
}
assert len(PAGES[2]) == 1 and len(PAGES[3]) == 2
CONTINUATIONS = {
    cursor: f"objects/{hashlib.sha256(contents(cursor)['continuation', 'hidden.00000']).hexdigest()}"
    for cursor in (2, 3)
}


def with_file(path: str, content: bytes | None, state: State = SAVED) -> State:
    """`state` with other bytes in `path`, or without it."""
    others = [entry for entry in state if entry[0] != path]
    number = 1 + max(number for _, number, _ in state)
    return tuple(sorted(others if content is None else [*others, (path, number, content)], key=lambda entry: entry[0]))


def found(state: State) -> tuple[int | type, int | type]:
    """What a reader and a writer find: the cursor, after its bytes were compared, or the class of a named error."""
    return _found(open_reader, state), _found(open_writer, state)


def _found(opening: Callable[[Disk], Any], state: State) -> int | type:
    machine = Machine(state)
    kept = {path for path, _, content in state if content is not None and path.startswith(("objects/", "generations/"))}
    try:
        store = opening(RecordingDisk(machine))
        cursor, held = load(store)
        store.close()
    except CheckpointError as error:
        assert str(error), "an error without a word"
        cursor, held = type(error), {}
    assert kept <= {path for path, _, _ in machine.visible_state()}, "something was deleted"
    if isinstance(cursor, int):
        assert cursor, "damage was taken for absence: the run would start over"
        assert held == contents(cursor), "wrong bytes"
    return cursor


ALL_GOOD, OLDER, LOST = (3, 3), (2, 2), (CheckpointDamaged, CheckpointDamaged)


def expected(path: str) -> tuple[int | type, int | type]:
    """What must come of any damage to one file."""
    if path in (MANIFESTS[3], CONTINUATIONS[3], PAGES[3][1]):
        return OLDER
    if path in ("CURRENT.prev", MANIFESTS[2], CONTINUATIONS[2]):
        return ALL_GOOD
    if path == "CURRENT":
        return OLDER  # by the spare pointer
    if path == "FORMAT":
        return LOST
    needed_by_older = {f"objects/{hashlib.sha256(data).hexdigest()}" for data in contents(2).values()} | {*PAGES[2]}
    return LOST if path in needed_by_older else OLDER


@pytest.mark.parametrize("path", FILES)
def test_a_file_cut_at_any_length_is_seen(path: str):
    for size in range(len(FILES[path])):
        assert found(with_file(path, FILES[path][:size])) == expected(path), f"cut to {size} bytes"


@pytest.mark.parametrize("path", FILES)
def test_a_file_with_any_byte_changed_is_seen(path: str):
    content = FILES[path]
    for position in range(len(content)):
        changed = content[:position] + bytes([content[position] ^ (1 << position % 8)]) + content[position + 1 :]
        assert found(with_file(path, changed)) == expected(path), f"byte {position}"


@pytest.mark.parametrize("path", FILES)
def test_a_file_that_is_missing_longer_zeroed_or_a_directory_is_seen(path: str):
    content = FILES[path]
    for damaged in (None, content + b"\0", content + b"\n", content * 2, bytes(len(content))):
        assert found(with_file(path, damaged)) == expected(path), damaged
    as_directory = tuple((name, -1, None) if name == path else (name, number, held) for name, number, held in SAVED)
    reader, writer = expected(path)
    # A writer is told of what it could not replace by a rename, before it computes anything.
    assert found(as_directory) == (reader, CheckpointDamaged if path in ("CURRENT", "CURRENT.prev") else writer)


@REPEATABLE
@given(st.sampled_from(sorted(FILES)), st.binary(max_size=200), st.integers(0, 600), st.integers(0, 600))
def test_a_file_with_any_piece_replaced_is_seen(path: str, piece: bytes, start: int, length: int):
    changed = FILES[path][:start] + piece + FILES[path][start + length :]
    if changed != FILES[path]:
        assert found(with_file(path, changed)) == expected(path)


@REPEATABLE
@given(st.dictionaries(st.sampled_from(sorted(FILES)), st.binary(max_size=30) | st.none(), min_size=2, max_size=6))
def test_several_damaged_files_never_give_wrong_bytes_or_a_fresh_start(damages: dict[str, bytes | None]):
    state = SAVED
    for path, content in damages.items():
        state = with_file(path, content, state)
    reader, writer = found(state)
    assert reader == writer


def test_both_pointers_lost_is_damage_that_names_the_way_out_also_after_the_first_publish():
    machine = Machine()
    with repeatable(1):
        store = open_writer(RecordingDisk(machine))
        save(store, 1)
        store.close()
    for state in (SAVED, machine.visible_state()):
        lost = with_file("CURRENT", None, with_file("CURRENT.prev", None, state))
        for opening in (open_reader, open_writer):
            with pytest.raises(CheckpointDamaged, match="prefect-quantize recover"):
                opening(RecordingDisk(Machine(lost)))
        assert found(lost) == LOST
    after_one = with_file("CURRENT", None, machine.visible_state())
    assert found(after_one) == LOST, "an empty spare is no evidence that nothing was published"


def sealed(value: Any) -> bytes:
    line = value if isinstance(value, bytes) else canonical(value)
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def with_manifest(raw: bytes) -> State:
    """The newest generation with `raw` as its manifest, named and hashed as if a writer had published it."""
    sha256 = hashlib.sha256(raw).hexdigest()
    entry = {"gen": 3, "manifest": f"00000003-{sha256[:16]}.json", "sha256": sha256, "size": len(raw)}
    current = json.loads(FILES["CURRENT"].splitlines()[0])
    current["generations"] = [entry, *NEWEST[1:]]
    return with_file("CURRENT", sealed(current), with_file(f"generations/{entry['manifest']}", raw))


def changed(document: bytes, path: tuple[Any, ...], value: Any) -> Any:
    """The JSON of `document` with the leaf at `path` replaced; `...` removes it."""
    top = place = json.loads(document)
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return top


TRICKS = ["../../etc/passwd", "/etc/passwd", "", ".", "..", "a\0b", "x" * 5000, "CURRENT", 5, None, True, [], {}, 1e308]
SIZES = [-1, 2**63, 2**64, 10**400, 1.5, "7", True, None, [], {}]


@pytest.mark.parametrize("value", [..., *TRICKS], ids=repr)
@pytest.mark.parametrize("key", ["manifest", "sha256"])
def test_a_pointer_that_is_sealed_but_names_something_else_is_refused(key: str, value: Any):
    current = changed(FILES["CURRENT"].splitlines()[0], ("generations", 0, key), value)
    assert found(with_file("CURRENT", sealed(current))) == OLDER


@pytest.mark.parametrize("value", [..., *SIZES, 2**62, 0, 1], ids=repr)
@pytest.mark.parametrize("key", ["gen", "size"])
def test_a_pointer_with_absurd_numbers_is_refused(key: str, value: Any):
    current = changed(FILES["CURRENT"].splitlines()[0], ("generations", 0, key), value)
    assert found(with_file("CURRENT", sealed(current))) == OLDER


@pytest.mark.parametrize("value", [..., *TRICKS, "A" * 64, "0" * 64], ids=repr)
def test_a_manifest_that_names_something_else_than_an_object_is_refused(value: Any):
    assert found(with_manifest(canonical(changed(FILES[MANIFESTS[3]], ("objects", 0, "sha256"), value)))) == OLDER


@pytest.mark.parametrize("value", [..., *SIZES, 2**62, 0, 1], ids=repr)
@pytest.mark.parametrize("path", [("objects", 0, "size"), ("cursor",), ("layer_count",), ("gen",)], ids=repr)
def test_a_manifest_with_absurd_numbers_is_refused(path: tuple[Any, ...], value: Any):
    if (path, value) in [(("cursor",), 0), (("cursor",), 1), (("layer_count",), 2**62)]:
        return  # nothing in the manifest contradicts these; only its hash vouches for them
    assert found(with_manifest(canonical(changed(FILES[MANIFESTS[3]], path, value)))) == OLDER


@pytest.mark.parametrize(
    "path", [("objects",), ("objects", 0), ("identity",), ("v",), ("created_utc",), ("objects", 0, "role")]
)
@pytest.mark.parametrize("value", [..., 5, "x/../y", None, [1], {"a": 1}], ids=repr)
def test_a_manifest_of_another_shape_is_refused(path: tuple[Any, ...], value: Any):
    if (path, value) in [(("created_utc",), "x/../y")]:
        return  # any text may stand there
    outcome = []
    for opening in (open_reader, open_writer):
        try:
            store = opening(RecordingDisk(Machine(with_manifest(canonical(changed(FILES[MANIFESTS[3]], path, value))))))
            pinned = store.pin(lambda identity: None)
            outcome.append(pinned.cursor if pinned else 0)
        except CheckpointError as error:
            outcome.append(type(error))
    assert set(outcome) <= {2, 3, CheckpointDamaged} and outcome[0] == outcome[1]


@pytest.mark.parametrize(
    "text",
    [
        b'{"v":1,"v":1}',
        b'{"generations":[],"generations":[]}',
        b"[" * 100_000,
        b'{"v":' + b"9" * 5000 + b"}",
        b'{"v":NaN}',
        b'{"v":1e999}',
        b"\xff\xfe",
        b"null",
        b"[]",
        b"7",
        b"",
    ],
    ids=lambda text: repr(text[:20]),
)
def test_json_that_is_not_ours_to_the_letter_is_refused(text: bytes):
    assert found(with_file("CURRENT", sealed(text))) == OLDER
    assert found(with_manifest(text)) == OLDER
    assert found(with_file("FORMAT", sealed(text))) == LOST


def test_a_duplicate_key_deep_in_a_manifest_is_refused():
    doubled = FILES[MANIFESTS[3]].replace(b'"bits":4', b'"bits":4,"bits":4')
    assert doubled != FILES[MANIFESTS[3]] and found(with_manifest(doubled)) == OLDER


def test_a_newer_format_is_told_as_such_and_nothing_older_is_taken_for_it():
    newer = [
        with_file("FORMAT", sealed(changed(FILES["FORMAT"].splitlines()[0], ("v",), 2))),
        with_file("CURRENT", sealed(changed(FILES["CURRENT"].splitlines()[0], ("v",), 2))),
        with_manifest(canonical(changed(FILES[MANIFESTS[3]], ("min_reader",), 3))),
    ]
    for state in newer:
        assert found(state) == (UnknownFormat, UnknownFormat)


def test_an_oversized_pointer_or_manifest_is_not_read():
    assert found(with_file("CURRENT", FILES["CURRENT"] + b" " * (1 << 16))) == OLDER
    huge = canonical(changed(FILES[MANIFESTS[3]], ("identity", "x"), "y" * (9 << 20)))
    assert found(with_manifest(huge)) == OLDER


def test_a_pointer_of_another_root_is_refused():
    current = changed(FILES["CURRENT"].splitlines()[0], ("root_id",), "f" * 32)
    assert found(with_file("CURRENT", sealed(current))) == OLDER


def with_page(raw: bytes, index: int = 1) -> State:
    """The newest generation with `raw` as one of its pages, named and hashed as if a writer had published it."""
    sha256 = hashlib.sha256(raw).hexdigest()
    manifest = changed(FILES[MANIFESTS[3]], ("pages", index), {"sha256": sha256, "size": len(raw)})
    return with_file(f"objects/{sha256}", raw, with_manifest(canonical(manifest)))


def test_a_page_put_in_the_place_of_itself_changes_nothing():
    assert found(with_page(FILES[PAGES[3][1]])) == ALL_GOOD


@pytest.mark.parametrize("value", [..., *TRICKS, "A" * 64, "0" * 64], ids=repr)
def test_a_page_that_is_named_by_something_else_or_names_something_else_than_an_object_is_refused(value: Any):
    assert found(with_manifest(canonical(changed(FILES[MANIFESTS[3]], ("pages", 0, "sha256"), value)))) == OLDER
    assert found(with_page(canonical(changed(FILES[PAGES[3][1]], ("objects", 0, "sha256"), value)))) == OLDER


@pytest.mark.parametrize("value", [..., *SIZES, 2**62, 0, 1], ids=repr)
def test_absurd_sizes_of_a_page_or_in_one_are_refused(value: Any):
    assert found(with_manifest(canonical(changed(FILES[MANIFESTS[3]], ("pages", 0, "size"), value)))) == OLDER
    assert found(with_page(canonical(changed(FILES[PAGES[3][1]], ("objects", 0, "size"), value)))) == OLDER


NAMES = json.loads(FILES[PAGES[3][1]])["objects"]
PAGE_AS_OBJECT = {"role": "page", "key": "00000", "sha256": PAGES[3][0][8:], "size": len(FILES[PAGES[3][0]])}
REFUSED_PAGES = {
    "names a page": canonical({"objects": [NAMES[0], PAGE_AS_OBJECT]}),
    "names one object twice": canonical({"objects": [NAMES[0], NAMES[0]]}),
    "names what the page before names": FILES[PAGES[3][0]].replace(b'{"objects"', b'{"more":1,"objects"'),
    "names an object of the manifest": canonical({"objects": json.loads(FILES[MANIFESTS[3]])["objects"]}),
    "gives one object two sizes": canonical(
        {"objects": [NAMES[0], {**NAMES[1], **NAMES[0], "key": "other", "size": 1}]}
    ),
    "gives its fellow another size": canonical(
        {"objects": [NAMES[0], {**NAMES[1], "sha256": PAGES[3][0][8:], "size": 1}]}
    ),
    "names nothing": canonical({"objects": []}),
    "names too many": canonical({"objects": [{**NAMES[0], "key": str(number)} for number in range(1025)]}),
    "is too large": canonical({"objects": [{**NAMES[0], "key": "x" * (1 << 20)}]}),
    "has a duplicate key": FILES[PAGES[3][1]].replace(b'"role":', b'"role":"layer","role":', 1),
    "is no object": canonical(NAMES),
    "is no JSON": b"{",
    "is empty": b"",
    "is nested for ever": b"[" * 100_000,
    "holds a list of another kind": canonical({"objects": {"0": NAMES[0]}}),
}


@pytest.mark.parametrize("raw", REFUSED_PAGES.values(), ids=REFUSED_PAGES)
def test_a_page_with_a_right_hash_and_a_wrong_content_is_damage_of_its_generation(raw: bytes):
    assert found(with_page(raw)) == OLDER


@pytest.mark.parametrize(
    "pages",
    [5, {}, "x", None, [5], [None], [{}], [{"sha256": PAGES[3][0][8:], "size": len(FILES[PAGES[3][0]])}] * 2],
    ids=repr,
)
def test_a_list_of_pages_of_another_shape_or_with_one_twice_is_refused(pages: Any):
    assert found(with_manifest(canonical(changed(FILES[MANIFESTS[3]], ("pages",), pages)))) == OLDER


def test_pages_that_the_manifests_own_version_does_not_know_are_refused():
    """A program of version 1 would not see them, and take the generation for one of fewer layers."""
    assert found(with_manifest(canonical(changed(FILES[MANIFESTS[3]], ("min_reader",), 1)))) == OLDER


@REPEATABLE
@given(st.data())
def test_any_value_anywhere_in_a_page_gives_a_result_or_a_named_error(data: st.DataObject):
    path = ("objects",)
    if data.draw(st.booleans()):
        path += (data.draw(st.integers(0, 1)), data.draw(st.sampled_from(["role", "key", "sha256", "size"])))  # type: ignore[assignment]
    state = with_page(canonical(changed(FILES[PAGES[3][1]], path, data.draw(st.just(...) | JSON_VALUES))))
    outcome = []
    for opening in (open_reader, open_writer):
        store = opening(RecordingDisk(Machine(state)))
        pinned = store.pin(lambda identity: None)
        assert pinned is not None
        outcome.append(pinned.cursor)
        for ref in pinned.objects:
            assert hashlib.sha256(pinned.view(ref)).hexdigest() == ref.sha256
    assert outcome[0] == outcome[1] in (2, 3)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@REPEATABLE
@given(st.data())
def test_any_value_anywhere_in_a_sealed_pointer_or_manifest_gives_a_result_or_a_named_error(data: st.DataObject):
    """No checksum protects against these, so a generation may change its meaning; it may not crash or reach outside."""
    name = data.draw(st.sampled_from(["CURRENT", "FORMAT", MANIFESTS[3]]))
    document = FILES[name].splitlines()[0]
    path, place = [], json.loads(document)
    while isinstance(place, (dict, list)) and place and (not path or data.draw(st.booleans())):
        key = (
            data.draw(st.sampled_from(sorted(place)))
            if isinstance(place, dict)
            else data.draw(st.integers(0, len(place) - 1))
        )
        path.append(key)
        place = place[key]
    value = changed(document, tuple(path), data.draw(st.just(...) | JSON_VALUES))
    raw = json.dumps(value).encode()
    state = with_manifest(raw) if name == MANIFESTS[3] else with_file(name, sealed(raw))
    for opening in (open_reader, open_writer):
        try:
            store = opening(RecordingDisk(Machine(state)))
            pinned = store.pin(lambda identity: None)
        except CheckpointError:
            continue
        assert pinned is not None or name == "CURRENT"
        for ref in pinned.objects if pinned else ():
            assert hashlib.sha256(pinned.view(ref)).hexdigest() == ref.sha256


@pytest.fixture
def root(tmp_path: Path) -> Path:
    store = open_writer(Disk(), str(tmp_path / "root"))
    for cursor in range(1, GENERATIONS + 1):
        save(store, cursor)
    store.close()
    return tmp_path / "root"


def found_on_disk(root: Path) -> list[int | type]:
    outcome: list[int | type] = []
    for opening in (open_reader, open_writer):
        try:
            store = opening(Disk(), str(root))
            try:
                cursor, held = load(store)
            finally:
                store.close()
            assert held == contents(cursor)
            outcome.append(cursor)
        except CheckpointError as error:
            outcome.append(type(error))
    return outcome


def newest(root: Path) -> dict[str, Path]:
    manifest = (
        root / "generations" / json.loads((root / "CURRENT").read_bytes().splitlines()[0])["generations"][0]["manifest"]
    )
    continuation = next(ref for ref in json.loads(manifest.read_bytes())["objects"] if ref["role"] == "continuation")
    return {"CURRENT": root / "CURRENT", "manifest": manifest, "object": root / "objects" / continuation["sha256"]}


@pytest.mark.parametrize("what", ["CURRENT", "manifest", "object"])
@pytest.mark.parametrize("kind", ["link to the same bytes", "link to nothing", "fifo", "directory"])
def test_something_else_than_a_file_inside_the_root_is_not_followed(what: str, kind: str, root: Path, tmp_path: Path):
    path = newest(root)[what]
    kept = path.rename(tmp_path / "kept")
    match kind:
        case "link to the same bytes":
            path.symlink_to(kept)
        case "link to nothing":
            path.symlink_to(tmp_path / "nowhere")
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
    # No rename replaces a directory: a writer is told at once, and not when its first layer is to be published.
    writer = CheckpointDamaged if (what, kind) == ("CURRENT", "directory") else 2
    assert found_on_disk(root) == [2, writer]


@pytest.mark.parametrize("name", ["CURRENT", "CURRENT.prev"])
def test_a_directory_in_a_pointers_place_is_told_at_once_and_moving_it_away_mends_it(name: str, root: Path):
    (root / name).unlink()
    (root / name).mkdir()
    with pytest.raises(CheckpointDamaged, match=rf"{name}` is damaged: a directory stands in its place.*move it away"):
        open_writer(Disk(), str(root))
    (root / name).rmdir()
    store = open_writer(Disk(), str(root))
    try:
        cursor, held = load(store)
    finally:
        store.close()
    assert held == contents(cursor)


@pytest.mark.parametrize("name", ["objects", "generations", "FORMAT", "writer.lock"])
def test_a_link_in_the_place_of_the_roots_own_parts_is_refused(name: str, root: Path, tmp_path: Path):
    (root / name).rename(tmp_path / "kept")
    (root / name).symlink_to(tmp_path / "kept")
    reader, writer = found_on_disk(root)
    assert writer in (CheckpointDamaged, CheckpointError)
    assert reader == (GENERATIONS if name == "writer.lock" else CheckpointDamaged)


def test_a_sweep_follows_no_link_and_removes_nothing_that_is_not_ours(root: Path, tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / ("0" * 64)).write_bytes(b"not ours")
    strangers = [root / "objects" / "notes.txt", root / "attempt-1", root / "readme", root / "generations" / "x.json"]
    for path in strangers:
        path.write_bytes(b"a stranger's")
    (root / "attempt-0123456789abcdef").symlink_to(outside)
    store = open_writer(Disk(), str(root))
    load(store)
    try:
        store.sweep()
    except CheckpointError as error:
        assert "attempt-0123456789abcdef" in str(error)
    save(store, GENERATIONS + 1)
    store.close()
    assert all(path.read_bytes() == b"a stranger's" for path in strangers)
    assert (outside / ("0" * 64)).read_bytes() == b"not ours"


TENSORS = {"b": torch.arange(6, dtype=torch.int32).reshape(2, 3), "a": torch.ones(3, dtype=torch.bfloat16)}
OBJECT = b"".join(bytes(view) for view in safetensors_payload(TENSORS).views())


def tensors_or_damage(data: bytes) -> dict[str, torch.Tensor] | None:
    try:
        return tensors_from(memoryview(data))
    except CheckpointDamaged:
        return None


def assert_as_the_library_reads(data: bytes) -> None:
    """What we take for tensors, the safetensors library takes for the same tensors."""
    ours = tensors_or_damage(data)
    if ours is not None:
        theirs = safetensors.torch.load(data)
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert tensor.dtype == theirs[name].dtype and tensor.shape == theirs[name].shape
            assert tensor.reshape(-1).view(torch.uint8).tolist() == theirs[name].reshape(-1).view(torch.uint8).tolist()


def test_a_tensor_object_cut_at_any_length_is_refused():
    assert tensors_or_damage(OBJECT) is not None
    assert all(tensors_or_damage(OBJECT[:size]) is None for size in range(len(OBJECT)))


@REPEATABLE
@given(st.integers(0, len(OBJECT) - 1), st.binary(min_size=1, max_size=40), st.integers(0, 40))
def test_a_tensor_header_with_any_piece_replaced_is_refused_or_read_as_the_library_does(start, piece, length):
    assert_as_the_library_reads(OBJECT[:start] + piece + OBJECT[start + length :])


@REPEATABLE
@given(st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F32", "U8", "BF16", "X", 5]), "shape": st.lists(st.integers(-1, 3) | st.just(2**62), max_size=3),
     "data_offsets": st.lists(st.integers(-1, 24) | st.just(2**63), min_size=1, max_size=3)}) | JSON_VALUES, max_size=3),
    st.integers(0, 24))  # fmt: skip
def test_any_tensor_header_is_refused_or_read_as_the_library_does(header: dict[str, Any], data_size: int):
    text = json.dumps(header).encode()
    assert_as_the_library_reads(len(text).to_bytes(8, "little") + text + bytes(data_size))
