"""The command line as a person and a script meet it: results on stdout, everything else on stderr, exit codes that mean something."""

import errno
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest

from checkpoint_store import errors
from checkpoint_store.store import CheckpointStore
from flows import cli
from tests.flow_jobs import contents
from tests.tiny_models import TEXTS, write_tiny_llama

LAYERS = 3


class Told(NamedTuple):
    code: int
    out: str
    err: str


Tell = Callable[..., Told]


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str], prefect_server: None) -> Tell:
    """Runs a command in this process; what it returned and said."""

    def told(*command: object) -> Told:
        capsys.readouterr()
        try:
            code = cli.main([str(part) for part in command])
        except SystemExit as usage:
            code = int(str(usage.code))
        return Told(code, *capsys.readouterr())

    return told


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("source")
    (place / "calibration.txt").write_text("\n".join(TEXTS * 3))
    return write_tiny_llama(place / "model", layers=LAYERS)


def run_command(model: Path, place: Path, *options: object) -> list[object]:
    data = model.parent / "calibration.txt"
    small = ["--group-size", 32, "--calibration", data, "--samples", 4, "--sequence-length", 24, "--devices", "cpu"]
    return ["run", model, "--output", place / "output", "--checkpoint", place / "root", *small, *options]


@pytest.fixture
def finished(model: Path, tmp_path: Path, tell: Tell) -> Path:
    """A place with the checkpoint and the output of a finished run."""
    assert tell(*run_command(model, tmp_path)).code == 0
    return tmp_path


def test_a_run_prints_its_report_as_json_and_one_line_per_layer_on_stderr(
    model: Path, tmp_path: Path, tell: Tell
) -> None:
    first = tell(*run_command(model, tmp_path, "--json"))
    assert first.code == 0
    report = json.loads(first.out)
    assert report["status"] == "done"
    assert len(report["layers"]) == LAYERS
    assert [f"layer {layer} of {LAYERS}" in first.err for layer in range(1, LAYERS + 1)] == [True] * LAYERS
    assert "Beginning flow run" not in first.err
    again = tell(*run_command(model, tmp_path, "--json"))
    assert (again.code, json.loads(again.out)["status"]) == (0, "verified")


def test_errors_of_the_user_are_told_in_words_without_a_traceback(model: Path, tmp_path: Path, tell: Tell) -> None:
    told = tell(*run_command(model, tmp_path, "--group-size", 48))
    assert (told.code, told.out) == (2, "")
    assert told.err.count("prefect-quantize: ") == 1
    assert "48" in told.err
    assert "Traceback" not in told.err
    assert "Encountered exception" not in told.err
    assert not (tmp_path / "root").exists()
    assert "Traceback" in tell(*run_command(model, tmp_path, "--group-size", 48, "--verbose")).err


def test_a_plan_is_a_table_or_json_or_all_problems_in_one_list(model: Path, tmp_path: Path, tell: Tell) -> None:
    plan = ["plan", *run_command(model, tmp_path)[1:]]
    table = tell(*plan)
    assert table.code == 0
    assert "q_proj" in table.out
    assert json.loads(tell(*plan, "--json").out)["layer_count"] == LAYERS
    problems = tell(*plan, "--group-size", 48, "--calibration", tmp_path / "absent.txt", "--output", model)
    assert problems.code == 2
    assert problems.err.count("\n  - ") >= 3
    assert not (tmp_path / "root").exists()


def test_another_job_on_the_root_is_told_leaf_by_leaf_with_76(model: Path, finished: Path, tell: Tell) -> None:
    other = tell(*run_command(model, finished, "--output", finished / "other", "--bits", 8))
    assert other.code == errors.IdentityMismatch.exit_code == 76
    assert "quantization.bits: checkpoint 4, this run 8" in other.err
    diff = ["diff", finished / "root", *run_command(model, finished)[1:]]
    same = tell(*diff, "--json")
    assert (same.code, json.loads(same.out)["differences"]) == (0, [])
    differing = tell(*diff, "--seed", 5)
    assert differing.code == 76
    assert "execution_plan.seed: checkpoint 0, this run 5" in differing.out


def test_resume_policies_end_with_80_and_81(model: Path, finished: Path, tell: Tell) -> None:
    fresh = tell(
        *run_command(
            model, finished, "--checkpoint", finished / "new", "--output", finished / "b", "--resume", "required"
        )
    )
    assert fresh.code == 80
    never = tell(*run_command(model, finished, "--output", finished / "c", "--resume", "never"))
    assert never.code == 81
    assert str(finished / "root") in never.err


def test_a_locked_root_ends_with_77_and_names_the_holder(model: Path, finished: Path, tell: Tell) -> None:
    with CheckpointStore.open(finished / "root"):
        locked = tell(*run_command(model, finished, "--output", finished / "other"))
        assert tell("status", finished / "root").code == 0
    assert locked.code == 77


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.CheckpointStopped("stopped"), 75),
        (errors.StorageFull("full"), 79),
        (errors.UnknownFormat("newer"), 82),
        (errors.CheckpointError("other"), 1),
        (ValueError("wrong"), 2),
        (RuntimeError("broken"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_error_has_its_exit_code(error: Exception, code: int) -> None:
    assert cli._told(error)[0] == code


def test_status_verify_and_sweep_tell_what_a_root_holds(finished: Path, tell: Tell) -> None:
    root = finished / "root"
    status = json.loads(tell("status", root, "--json").out)
    assert (status["cursor"], status["layer_count"]) == (LAYERS, LAYERS)
    told = tell("status", root).out
    assert f"{LAYERS} of {LAYERS} layers finished" in told
    assert f"last writer: process {status['last_writer']['pid']} on host " in told and "flow run " in told
    whole = tell("verify", root, "--json")
    assert (whole.code, json.loads(whole.out)["is_whole"]) == (0, True)
    assert "whole" in tell("verify", root, "--rate", 1000).out
    swept = json.loads(tell("sweep", root, "--json").out)
    assert swept["objects"] == 0
    assert tell("sweep", finished / "absent").code == 80


def test_a_flipped_byte_is_found_with_78_and_set_aside_on_request(finished: Path, tell: Tell) -> None:
    root = finished / "root"
    victim = max((root / "objects").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    found = tell("verify", root)
    assert found.code == 78
    assert victim.name[:12] in found.out
    assert victim.exists()
    assert tell("verify", root, "--quarantine").code == 78
    assert not victim.exists()
    assert any((root / "quarantine").iterdir())


def test_status_and_a_copy_that_leaves_a_damaged_generation_out_end_with_78(finished: Path, tell: Tell) -> None:
    root = finished / "root"
    assert tell("status", root).code == 0
    newest = max((root / "generations").iterdir())
    newest.write_bytes(newest.read_bytes()[:-1])
    looked = tell("status", root)
    assert (looked.code, looked.out.count("DAMAGED")) == (78, 1)
    copied = tell("export-root", root, finished / "copy")
    assert (copied.code, copied.out.count("left out: generation")) == (78, 1)
    assert tell("verify", finished / "copy").code == 0


def test_a_copied_root_is_whole_and_a_lost_current_is_recovered_by_name(
    model: Path, finished: Path, tell: Tell
) -> None:
    root, copy, back = finished / "root", finished / "copy", finished / "back"
    assert tell("export-root", root, copy).code == 0
    assert tell("import-root", copy, back).code == 0
    assert tell("verify", back).code == 0
    for pointer in ("CURRENT", "CURRENT.prev"):
        (back / pointer).unlink(missing_ok=True)
    lost = tell(*run_command(model, finished, "--checkpoint", back, "--output", finished / "other"))
    assert lost.code == 78
    assert f"prefect-quantize recover {back}" in lost.err
    listed = json.loads(tell("recover", back, "--json").out)["candidates"]
    newest = next(found["manifest"] for found in listed if found["cursor"] == LAYERS)
    assert newest in tell("recover", back).out
    assert tell("recover", back, "--manifest", newest).code == 0
    resumed = tell(*run_command(model, finished, "--checkpoint", back, "--output", finished / "other", "--json"))
    assert (resumed.code, json.loads(resumed.out)["resumed_from"]) == (0, LAYERS)
    assert contents(finished / "other") == contents(finished / "output")


def status_of(root: Path, stdout: int | IO[bytes], **environment: str) -> tuple[int, str]:
    with CheckpointStore.open(root):
        pass
    command = [sys.executable, "-m", "flows.cli", "status", str(root)]
    told = subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, env={**os.environ, **environment}, timeout=60, text=True
    )
    return told.returncode, told.stderr


def test_a_result_that_stdout_does_not_take_is_a_failure_in_words(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        code, told = status_of(tmp_path / "root", full, PYTHONUNBUFFERED="")
    assert code == 1
    assert told == (
        "prefect-quantize: cannot write the result to stdout: No space left on device; what was done stands\n"
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_result_that_nobody_reads_to_its_end_ends_the_command_quietly(unbuffered: str, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as pipe:
        assert status_of(tmp_path / "root", pipe, PYTHONUNBUFFERED=unbuffered) == (141, "")


def test_a_pipe_that_breaks_elsewhere_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    def broken(path: str) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    with open(os.devnull, "w") as stdout:
        monkeypatch.setattr(cli.commands_store.maintenance, "status", broken)
        monkeypatch.setattr(sys, "stdout", stdout)
        assert cli.main(["status", "root"]) == 1
    assert "BrokenPipeError" in capsys.readouterr().err


def test_a_path_that_the_terminal_cannot_show_fails_nothing(tmp_path: Path) -> None:
    assert status_of(tmp_path / "\N{SNOWMAN}", subprocess.DEVNULL, PYTHONIOENCODING="latin-1") == (0, "")


def test_doctor_says_whether_a_directory_is_fit(tmp_path: Path, tell: Tell) -> None:
    found = tell("doctor", tmp_path, "--json")
    assert json.loads(found.out)["is_fit"] == (found.code == 0)
    assert "rename" in tell("doctor", tmp_path).out
    assert list(tmp_path.iterdir()) == []


def test_doctor_of_a_missing_directory_says_how_to_make_it(tmp_path: Path, tell: Tell) -> None:
    code, out, err = tell("doctor", tmp_path / "not here")
    assert (code, out) == (2, "")
    assert f"no such directory: `{tmp_path}/not here`" in err and f"`mkdir -p '{tmp_path}/not here'`" in err
    assert "checkpoint" not in err
    assert not (tmp_path / "not here").exists()


def test_deploy_and_serve_ask_for_a_server_that_lasts(capsys: pytest.CaptureFixture[str]) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        assert cli.main(["deploy"]) == 2
        assert cli.main(["serve"]) == 2
    assert "prefect server start" in capsys.readouterr().err


def test_ctrl_c_to_the_group_ends_with_75_and_the_same_command_goes_on(model: Path, tmp_path: Path) -> None:
    slow = write_tiny_llama(tmp_path / "slow" / "model", layers=12, hidden_size=256, intermediate_size=1024)
    shutil.copy(model.parent / "calibration.txt", slow.parent)
    command = [sys.executable, "-m", "flows.cli", *map(str, run_command(slow, tmp_path))]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment = clean | {"PREFECT_HOME": str(tmp_path / "prefect"), "TERM": "xterm", "COLUMNS": "200"}
    terminal, theirs = pty.openpty()
    run = subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=theirs, process_group=0
    )
    os.close(theirs)
    shown = _read_until(terminal, b"layer 2 of 12")
    os.killpg(run.pid, signal.SIGINT)
    shown += _read_until(terminal, None)
    assert run.wait(120) == 75, shown.decode()
    assert b"loss" in shown
    assert b" left" in shown, "no progress bar on a terminal"
    assert b"Traceback" not in shown, shown.decode()
    assert b"Prefect collects" not in shown
    assert b"temporary server" not in shown
    assert b"run the same job again to go on" in shown
    again = subprocess.run(
        [*command, "--verbose"], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert again.returncode == 0, again.stderr
    assert "Beginning flow run" in again.stderr
    assert "Cached" in again.stderr
    assert "layer 1 of 12" not in again.stderr


ROOT = Path(__file__).resolve().parent.parent


def _read_until(terminal: int, wanted: bytes | None) -> bytes:
    """What is written to the terminal until it holds `wanted`, or until its other end is closed."""
    seen = b""
    while wanted is None or wanted not in seen:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # how Linux says that nobody has the other end any more
            part = b""
        if not part:
            assert wanted is None, seen.decode()
            break
        seen += part
    return seen
