"""A Prefect server of our own for runs that were given none: started beside the run, ended with it however the run ends.

Prefect starts such a server by itself, inside the run's process group: Ctrl+C kills it under the flow, which then waits
150 s for an API that is gone, and `kill -9` of the run leaves it behind. This one lives in a session of its own, so that
Ctrl+C reaches the run alone, and ends when the pipe it inherited closes, which the kernel does for a killed run too.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import uvicorn

STARTUP_TIMEOUT_SECONDS = 120.0
SHUTDOWN_TIMEOUT_SECONDS = 15.0
PARENT_CHECK_SECONDS = 1.0
ANSWER_PATIENCE_SECONDS = 10.0  # a server that is being restarted
LOG_TAIL_LINES = 15

# What a run uses of a server: API, UI, task run records, events. The rest serves deployments, which need a lasting server.
SERVER_SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",  # our block registers itself when it is saved
    "PREFECT_SERVER_SERVICES_CANCELLATION_CLEANUP_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_FOREMAN_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_LATE_RUNS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_PAUSE_EXPIRATIONS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_REPOSSESSOR_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false",
}


class ServerDidNotStart(RuntimeError):
    """The embedded server ended or stayed silent before its first answer; the message carries the end of its log."""


class ServerUnreachable(RuntimeError):
    """Nothing answers at the configured address; the message says how to mend it."""


def refuse_unreachable(api_url: str, patience_seconds: float = ANSWER_PATIENCE_SECONDS) -> None:
    """ServerUnreachable when nothing answers at `api_url` for so long; whatever answers there is left to Prefect."""
    import httpx

    deadline = time.monotonic() + patience_seconds
    # Nothing is told to the server here, so that its certificate may be of any kind.
    with httpx.Client(verify=False, timeout=patience_seconds) as client:
        while True:
            try:
                client.get(f"{api_url}/health")
                return
            except httpx.TransportError as error:
                if time.monotonic() > deadline:
                    raise ServerUnreachable(
                        f"nothing answers at {api_url}, the Prefect server that PREFECT_API_URL or a profile names "
                        f"({type(error).__name__}: {error}): start it there (`prefect server start`) or mend the address, "
                        f"`prefect config view` tells where it is set; without one (`prefect config unset "
                        f"PREFECT_API_URL`) a run has a server of its own"
                    ) from error
            time.sleep(0.5)


@contextlib.contextmanager
def embedded_server(
    *, while_starting: Callable[[], object] | None = None, timeout_seconds: float = STARTUP_TIMEOUT_SECONDS
) -> Iterator[str]:
    """The API's address, which Prefect in this process uses inside the block.

    A server that is configured already (PREFECT_API_URL or a Prefect profile) is used, and none is started.
    `while_starting` runs here while the server starts in its own process: slow imports cost nothing there.
    Raises `ServerUnreachable` when the configured one does not answer, `ServerDidNotStart`. On leaving, logs and events are delivered before the server is ended.
    """
    from prefect.settings import PREFECT_API_URL, temporary_settings

    configured = PREFECT_API_URL.value()
    if configured:
        refuse_unreachable(str(configured))
        if while_starting is not None:
            while_starting()
        yield str(configured)
        return
    with _server_process() as server:
        if while_starting is not None:
            while_starting()
        server.wait_until_ready(timeout_seconds)
        with temporary_settings({PREFECT_API_URL: server.api_url}), _for_new_threads():
            try:
                yield server.api_url
            finally:
                _deliver_logs_and_events()


def _for_new_threads() -> contextlib.AbstractContextManager[None]:
    """Settings are a context variable: a thread that starts without a copy of it would start Prefect's own server."""
    from prefect.context import _temporary_global_settings_context, get_settings_context

    return _temporary_global_settings_context(get_settings_context())


class _Server:
    def __init__(self, process: subprocess.Popen[bytes], port: int, log: IO[bytes]) -> None:
        self.process, self.port, self.log = process, port, log

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    def wait_until_ready(self, timeout_seconds: float) -> None:
        """Return on the first healthy answer. The port listens already: a request waits in its queue until it is served."""
        import httpx

        started = time.monotonic()
        problem = ""
        with httpx.Client(trust_env=False) as client:
            while (left := started + timeout_seconds - time.monotonic()) > 0 and self.process.poll() is None:
                try:
                    if client.get(f"{self.api_url}/health", timeout=min(left, 5.0)).status_code == 200:
                        return
                except httpx.HTTPError as error:
                    problem = f" (last answer: {type(error).__name__})"
                    time.sleep(0.05)
        code = self.process.poll()
        what = f"ended with code {code}" if code is not None else f"gave no answer in {timeout_seconds:.0f} s{problem}"
        raise ServerDidNotStart(
            f"Prefect's embedded server {what}. Its database is in `{_prefect_home()}`: check that the disk has space and "
            f"that no other Prefect version wrote there (PREFECT_HOME names another place), or start `prefect server "
            f"start` yourself and set PREFECT_API_URL. The end of its log:\n{self.log_tail()}"
        )

    def log_tail(self) -> str:
        self.log.seek(0)
        lines = self.log.read().decode("utf-8", "replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-LOG_TAIL_LINES:]) or "    (empty)"


@contextlib.contextmanager
def _server_process() -> Iterator[_Server]:
    with tempfile.TemporaryFile() as log, socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))  # the socket itself is handed over: no one can take the port in between
        listener.listen(128)
        port = listener.getsockname()[1]
        life_read, life_write = os.pipe()
        environment = {
            **os.environ,
            **SERVER_SETTINGS,
            "PREFECT_SERVER_API_HOST": "127.0.0.1",
            "PREFECT_SERVER_API_PORT": str(port),
        }
        try:
            process = subprocess.Popen(
                # -P: by path and without this directory on sys.path, so that the working directory stays the user's,
                # where Prefect looks for prefect.toml.
                [sys.executable, "-P", __file__, str(listener.fileno()), str(life_read)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=(listener.fileno(), life_read),
                start_new_session=True,
            )
        except OSError:
            os.close(life_write)
            raise
        finally:
            os.close(life_read)
        listener.close()  # a server that dies now refuses connections instead of letting them wait
        try:
            yield _Server(process, port, log)
        finally:
            os.close(life_write)
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a server whose pipe is closed; one that hangs is killed, its database survives that."""
    try:
        process.wait(SHUTDOWN_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _deliver_logs_and_events() -> None:
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    APILogWorker.drain_all()
    EventsWorker.drain_all()


def _prefect_home() -> str:
    from prefect.settings import PREFECT_HOME

    return str(PREFECT_HOME.value())


# In the server's process -------------------------------------------------------------------------------------------------


class _EndsWithParent:
    """Watches the pipe from the parent; `server` is set once there is one to stop in good order."""

    def __init__(self, life_read: int) -> None:
        self.server: uvicorn.Server | None = None
        self._life_read, self._parent = life_read, os.getppid()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        # The parent's number is looked at too: a child that it forked may hold the pipe open after its death.
        while not select.select([self._life_read], [], [], PARENT_CHECK_SECONDS)[0] and os.getppid() == self._parent:
            pass
        if self.server is not None:
            self.server.should_exit = True
            time.sleep(SHUTDOWN_TIMEOUT_SECONDS - 5)  # then a shutdown that hangs must not outlive the run
        os.kill(os.getpid(), signal.SIGKILL)


def _serve(listener: socket.socket, life_read: int) -> None:
    watch = _EndsWithParent(life_read)
    import uvicorn
    from prefect.server.api.server import create_app

    config = uvicorn.Config(
        create_app(final=True),
        log_level="error",
        lifespan="on",
        timeout_keep_alive=60,
        timeout_graceful_shutdown=2,
    )
    watch.server = uvicorn.Server(config)
    watch.server.run(sockets=[listener])


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
