"""The embedded server: there when a run needs it, deaf to Ctrl+C, gone with the run however that ends."""

import http.server
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import cli
from flows.embedded_server import ServerDidNotStart, embedded_server, refuse_unreachable

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_SECONDS = 120


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first server makes a database, which takes longer than all else."""
    return tmp_path_factory.mktemp("prefect")


def _start(script: str, home: Path) -> subprocess.Popen[str]:
    """Python on `script` in a process group of its own, with nothing of Prefect configured and a database in `home`."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=clean | {"PREFECT_HOME": str(home), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def _is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def _wait_until_gone(process: int) -> None:
    deadline = time.monotonic() + 30
    while _is_alive(process):
        assert time.monotonic() < deadline, f"the server, process {process}, outlives its run"
        time.sleep(0.05)


def test_a_run_gets_a_server_that_knows_its_tasks_and_logs_and_is_gone_afterwards(home: Path) -> None:
    script = """
        import os, sqlite3, threading
        from prefect import flow, get_run_logger, task
        from flows.embedded_server import embedded_server

        @task
        def answer():
            get_run_logger().info("seen in the log")
            return 42

        @flow
        def question():
            logger = get_run_logger()
            thread = threading.Thread(target=lambda: logger.info("seen in the log"))
            thread.start()
            thread.join()
            return answer()

        with embedded_server() as url:
            print(open(f"/proc/self/task/{os.getpid()}/children").read())
            assert question() == 42
            with embedded_server() as inner:
                assert inner == url
        from prefect.settings import PREFECT_HOME
        database = sqlite3.connect(PREFECT_HOME.value() / "prefect.db")
        print(database.execute("select count(*) from log where message = 'seen in the log'").fetchone()[0])
        print(database.execute("select state_type from task_run").fetchone()[0])
    """
    out, error = (run := _start(script, home)).communicate(timeout=PATIENCE_SECONDS)
    assert run.returncode == 0, error
    assert "temporary server" not in error  # how Prefect announces one of its own
    server, logged, state = out.split()
    assert (logged, state) == ("2", "COMPLETED")
    assert not _is_alive(int(server))


def test_ctrl_c_to_the_group_spares_the_server_and_a_killed_run_takes_it_along(home: Path) -> None:
    script = """
        import os, signal, time, urllib.request
        interrupts = []
        signal.signal(signal.SIGINT, lambda *_: interrupts.append(True))
        from flows.embedded_server import embedded_server
        with embedded_server() as url:
            print(open(f"/proc/self/task/{os.getpid()}/children").read(), flush=True)
            while not interrupts:
                time.sleep(0.05)
            time.sleep(1)
            print(urllib.request.urlopen(url + "/health").status, flush=True)
            time.sleep(3600)
    """
    run = _start(script, home)
    assert run.stdout is not None
    server = int(run.stdout.readline())
    os.killpg(run.pid, signal.SIGINT)
    assert run.stdout.readline().strip() == "200"
    assert _is_alive(server)
    run.kill()
    _wait_until_gone(server)
    run.communicate()


def test_a_configured_server_is_used_and_none_is_started() -> None:
    ran = []
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as answering:
        threading.Thread(target=answering.serve_forever, daemon=True).start()
        api_url = f"http://127.0.0.1:{answering.server_port}/api"
        with (
            temporary_settings({PREFECT_API_URL: api_url}),
            embedded_server(while_starting=lambda: ran.append(True)) as url,
        ):
            assert url == api_url, "any answer will do, here a 501"
        answering.shutdown()
    assert ran == [True]


@pytest.mark.parametrize("command", [["deploy"], ["serve"], ["run", "model", "--output", "output"]])
def test_a_configured_server_that_does_not_answer_is_told_with_the_way_to_mend_it(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(refuse_unreachable, "__defaults__", (0.0,))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        api_url = f"http://127.0.0.1:{unused.getsockname()[1]}/api"
        with temporary_settings({PREFECT_API_URL: api_url}):
            assert cli.main(command) == 1
    told = capsys.readouterr().err
    assert f"nothing answers at {api_url}" in told and "ConnectError" in told
    assert "prefect server start" in told and "prefect config unset PREFECT_API_URL" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("status", "remedy"), [(401, "prefect cloud login"), (403, "AUTH_STRING"), (404, "ends in `/api`")]
)
@pytest.mark.parametrize("command", [["deploy"], ["run", "model", "--output", "output"]])
def test_a_server_that_refuses_is_told_with_what_to_do(
    command: list[str], status: int, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Refuses(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST = do_PUT = do_PATCH = answer

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as answering:
        threading.Thread(target=answering.serve_forever, daemon=True).start()
        with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{answering.server_port}/api"}):
            assert cli.main(command) == 1
        answering.shutdown()
    told = capsys.readouterr().err
    assert f"the Prefect server refuses: Client error '{status}" in told and remedy in told
    assert "Traceback" not in told


def test_a_server_that_cannot_start_is_told_with_the_end_of_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", "sqlite+aiosqlite:////dev/null/prefect.db")
    with (
        temporary_settings(restore_defaults={PREFECT_API_URL}),
        pytest.raises(ServerDidNotStart, match=r"ended with code \d+(.|\n)*unable to open database file"),
        embedded_server(),
    ):
        pass


def test_a_server_that_stays_silent_is_given_up_and_ended() -> None:
    started = time.monotonic()
    with (
        temporary_settings(restore_defaults={PREFECT_API_URL}),
        pytest.raises(ServerDidNotStart, match=r"gave no answer in 0 s"),
        embedded_server(timeout_seconds=0.2),
    ):
        pass
    assert time.monotonic() - started < 15
