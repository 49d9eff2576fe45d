"""An output directory is whole or absent, whatever dies while it is made, and no foreign file is touched."""

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from tasks import output_directory
from tasks.models.source import INDEX_FILE
from tasks.output_directory import MOVED_FILE, Export, OutputTaken
from tasks.report import REPORT_FILE

REPORT = {"identity": "abc", "status": "done"}


@pytest.fixture(autouse=True)
def plain_umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def fill(export: Export) -> None:
    export.add_bytes("config.json", b"{}\n")
    export.add_tensors("model-00001-of-00001.safetensors", {"b": torch.ones(2), "a": torch.zeros(3, 2)})
    export.add_bytes(INDEX_FILE, b'{"weight_map": {}}\n')


def write(output: Path) -> None:
    with Export(output) as export:
        fill(export)
        export.finish(REPORT)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


@pytest.mark.parametrize("exists", [False, True])
def test_a_finished_export_is_whole_and_alone_under_its_name(tmp_path: Path, exists: bool) -> None:
    output = tmp_path / "deep" / "model"
    if exists:
        output.mkdir(parents=True)
    write(output)
    assert sorted(contents(output)) == sorted(
        ["config.json", "model-00001-of-00001.safetensors", INDEX_FILE, REPORT_FILE]
    )
    assert list(output.parent.iterdir()) == [output]
    report = output_directory.read_report(output)
    assert report is not None and report["identity"] == "abc"
    assert output_directory.damage(output, report) == []
    assert torch.equal(load_file(output / "model-00001-of-00001.safetensors")["b"], torch.ones(2))


def test_an_empty_target_keeps_its_inode_and_mode_because_it_may_be_a_mount_point(tmp_path: Path) -> None:
    output = tmp_path / "model"
    output.mkdir(mode=0o710)
    before = output.stat()
    write(output)
    assert (output.stat().st_ino, output.stat().st_mode) == (before.st_ino, before.st_mode)


@pytest.mark.parametrize("taken_by", ["a model", "a model in the directory", "a file"])
def test_an_output_that_another_run_took_meanwhile_is_refused_by_name_and_left_alone(
    tmp_path: Path, taken_by: str
) -> None:
    output = tmp_path / "model"
    if taken_by == "a model in the directory":
        output.mkdir()
    with (
        pytest.raises(OutputTaken, match=r"model has been filled by somebody else meanwhile \(.+\)"),
        Export(output) as e,
    ):
        fill(e)
        if taken_by == "a file":
            output.write_bytes(b"somebody's")
            before: Any = output.read_bytes()
        else:
            write(output)
            before = contents(output)
            del before[REPORT_FILE]
            (output / "config.json").write_bytes(b"the other's")
            before["config.json"] = b"the other's"
        e.finish({**REPORT, "identity": "the loser's"})
    if taken_by == "a file":
        assert output.read_bytes() == before
    else:
        report = output_directory.read_report(output)
        assert report is not None and report["identity"] == "abc"
        assert {name: data for name, data in contents(output).items() if name != REPORT_FILE} == before
    assert list(tmp_path.iterdir()) == [output]


def test_two_exports_of_the_same_content_are_byte_identical(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    write(tmp_path / "one")
    write(tmp_path / "two")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    write(tmp_path / "model")
    assert stat.S_IMODE((tmp_path / "model").stat().st_mode) == 0o750
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "model").iterdir()} == {0o640}


@pytest.mark.parametrize("exists", [False, True])
def test_an_error_leaves_nothing_behind(tmp_path: Path, exists: bool) -> None:
    output = tmp_path / "model"
    if exists:
        output.mkdir()
    with pytest.raises(RuntimeError), Export(output) as export:
        fill(export)
        raise RuntimeError
    assert [path for path in tmp_path.rglob("*") if path != output] == []


def test_a_copy_with_other_bytes_than_promised_is_refused(tmp_path: Path) -> None:
    (tmp_path / "object").write_bytes(b"x" * 100_000)
    with pytest.raises(ValueError, match="other bytes"), Export(tmp_path / "model") as export:
        export.add_file("model-00001-of-00001.safetensors", tmp_path / "object", "0" * 64)


@pytest.mark.parametrize("size", [0, 1, 4095, 5 << 20])
def test_files_are_copied_to_the_last_byte(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "object").write_bytes(data)
    with Export(tmp_path / "model") as export:
        export.add_file("shard", tmp_path / "object")
        export.finish(REPORT)
    assert (tmp_path / "model" / "shard").read_bytes() == data


def test_damage_names_what_is_missing_and_what_has_changed(tmp_path: Path) -> None:
    write(tmp_path / "model")
    report = output_directory.read_report(tmp_path / "model")
    assert report is not None
    (tmp_path / "model" / "config.json").unlink()
    shard = tmp_path / "model" / "model-00001-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    missing, changed = output_directory.damage(tmp_path / "model", report)
    assert missing == "`config.json` is missing"
    assert changed.startswith("`model-00001-of-00001.safetensors` has other bytes")


@pytest.mark.parametrize(
    "broken",
    [
        "no report",
        "no index",
        "not json",
        "not ours",
        "a directory",
        "[" * 100_000,
        '{"files": {}, "identity": 5}',
        '{"files": {"config.json": 7}, "identity": "abc"}',
        '{"files": {"../secret": "0"}, "identity": "abc"}',
    ],
)
def test_what_is_not_a_finished_export_is_not_taken_for_one(tmp_path: Path, broken: str) -> None:
    write(tmp_path / "model")
    report = tmp_path / "model" / REPORT_FILE
    match broken:
        case "no report":
            report.unlink()
        case "no index":
            (tmp_path / "model" / INDEX_FILE).unlink()
        case "not json":
            report.write_text("{")
        case "not ours":
            report.write_text('{"files": []}')
        case "a directory":
            report.unlink()
            report.mkdir()
        case _:
            report.write_text(broken)
    assert output_directory.read_report(tmp_path / "model") is None


def test_leftovers_of_the_dead_go_and_a_living_run_and_foreign_files_stay(tmp_path: Path) -> None:
    output = tmp_path / "model"
    dead = tmp_path / f".model.partial-{uuid.uuid4().hex}"
    dead.mkdir()
    (dead / "model-00001-of-00002.safetensors").write_bytes(b"half")
    for foreign in (".model.partial-mine", f".other.partial-{uuid.uuid4().hex}", "model2"):
        (tmp_path / foreign).mkdir()
    with Export(output) as living:
        assert output_directory.remove_leftovers(output) == [dead.name]
        assert living.directory.is_dir() and not dead.exists()
    assert len(list(tmp_path.iterdir())) == 3


KILLED_WHILE_MOVING = """
import os, signal, sys
from pathlib import Path
from tasks import output_directory
from tasks.models.source import INDEX_FILE
output, kill_at = Path(sys.argv[1]), int(sys.argv[2])
moves, rename = 0, os.rename
def killing(*names):
    global moves
    moves += 1
    if moves == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(*names)
os.rename = killing
with output_directory.Export(output) as export:
    export.add_bytes("config.json", b"{}")
    export.add_bytes("a", b"a")
    export.add_bytes("sub/b", b"b")
    export.add_bytes("sub/c", b"c")
    export.add_bytes(INDEX_FILE, b"{}")
    export.finish({"identity": "abc"})
"""


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("kill_at", range(1, 6))
def test_a_run_killed_at_any_rename_never_looks_finished_and_is_cleared_away(
    tmp_path: Path, kill_at: int, exists: bool
) -> None:
    output = tmp_path / "model"
    if exists:
        output.mkdir()
    command = [sys.executable, "-c", KILLED_WHILE_MOVING, str(output), str(kill_at)]
    died = subprocess.run(command, cwd=Path(__file__).parent.parent, check=False).returncode
    if not exists and kill_at > 1:  # there is one rename only
        assert died == 0
        return
    assert died == -signal.SIGKILL
    assert output_directory.read_report(output) is None
    assert output_directory.foreign_names(output) == []
    assert output_directory.remove_leftovers(output)
    assert [path for path in tmp_path.rglob("*") if path != output] == []


def test_a_foreign_file_beside_moved_ones_is_neither_removed_nor_taken_for_ours(tmp_path: Path) -> None:
    output = tmp_path / "model"
    partial = output / f".model.partial-{uuid.uuid4().hex}"
    partial.mkdir(parents=True)
    (partial / MOVED_FILE).write_text(json.dumps({"config.json": "0" * 64}))
    (output / "config.json").write_text("{}")
    assert output_directory.foreign_names(output) == ["config.json"]
    assert output_directory.remove_leftovers(output) == [partial.name]
    assert contents(output) == {"config.json": b"{}"}


def test_a_full_disk_under_a_shard_is_the_same_error_as_under_any_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(output_directory, "save_file", full)
    with pytest.raises(OSError) as caught, Export(tmp_path / "model") as export:
        export.add_tensors("model-00001-of-00001.safetensors", {"a": torch.ones(2)})
    assert caught.value.errno == errno.ENOSPC
