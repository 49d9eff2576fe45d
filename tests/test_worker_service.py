"""The systemd unit of a worker: what systemd makes of it, and what its stop does when the worker is gone already."""

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

from deployments import stop_worker

UNIT = Path(stop_worker.__file__).with_name("prefect-quantize-worker.service")


def service() -> configparser.SectionProxy:
    parsed = configparser.RawConfigParser(strict=True, comment_prefixes=("#",), delimiters=("=",))
    parsed.optionxform = str  # type: ignore[assignment, method-assign]
    # `Environment=` stands twice, which systemd adds up and a parser of ini files refuses.
    lines = [line for line in UNIT.read_text().splitlines() if not line.startswith("Environment=")]
    parsed.read_string("\n".join(lines))
    return parsed["Service"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    """With programs that are here in the place of those under /opt, for it looks whether they can be run."""
    text = UNIT.read_text()
    for name in ("prefect", "python"):
        text = text.replace(f"/opt/prefect-quantize/bin/{name}", "/bin/true")
    assert "/opt" not in text
    unit = tmp_path / UNIT.name
    unit.write_text(text)
    verify = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(verify, capture_output=True, text=True, timeout=120, check=False)
    about_it = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert (done.returncode, about_it) == (0, [])
    unit.write_text(text.replace("TimeoutStopSec=1h", "TimeoutStopSec=soon"))
    done = subprocess.run(verify, capture_output=True, text=True, timeout=120, check=False)
    assert f"{UNIT.name}:" in done.stderr and "soon" in done.stderr, "it would find what is wrong"


def test_the_unit_gives_the_flows_longer_than_the_stop_waits_for_them() -> None:
    unit = service()
    assert unit["TimeoutStopSec"] == "1h"
    assert stop_worker.parser().parse_args(["--pool", "quantize", "--worker"]).patience < 3600
    assert unit["ExecStop"].endswith("-m deployments.stop_worker --pool quantize --worker $MAINPID")
    assert "--pool quantize" in unit["ExecStart"] and unit["ExecStartPre"].endswith("work-pool resume quantize")
    # Only what is left after ExecStop is killed, and never the flows before they were asked.
    assert unit["KillMode"] == "mixed"


def test_a_worker_that_ended_by_itself_leaves_nothing_to_stop(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["stop_worker", "--pool", "quantize", "--worker"])
    assert stop_worker.main() == 0
    assert "has ended by itself" in capsys.readouterr().out


def test_flows_that_go_on_too_long_are_named_and_the_worker_lives_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell stands in for the worker, and what it has started for a flow that does not end."""

    class Client:
        def __enter__(self) -> "Client":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update_work_pool(self, name: str, update: object) -> None:
            assert name == "quantize" and update.is_paused  # type: ignore[attr-defined]

    monkeypatch.setattr(stop_worker, "get_client", lambda sync_client: Client())
    flow = "trap 'echo asked' TERM; echo up; while true; do sleep 0.1; done"
    worker = subprocess.Popen(["sh", "-c", f'sh -c "{flow}"; true'], stdout=subprocess.PIPE, text=True)
    with worker:
        assert worker.stdout is not None and worker.stdout.readline() == "up\n"
        arguments = ["stop_worker", "--pool", "quantize", "--worker", str(worker.pid), "--patience", "1"]
        monkeypatch.setattr("sys.argv", arguments)
        assert stop_worker.main() == 1
        assert worker.stdout.readline() == "asked\n"
        assert worker.poll() is None
        [flow_process] = stop_worker.children(worker.pid)
        assert f"still at work after 1 s: [{flow_process}]" in capsys.readouterr().err
        subprocess.run(["kill", "-9", str(flow_process)], check=True)
