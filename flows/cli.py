"""The console script `prefect-quantize`: which commands there are, and what each error means to the shell.

Exit codes: 0 done, 1 failed, 2 usage or refused by preflight, 75 stopped after a checkpoint (run again), 76 identity
mismatch, 77 store locked, 78 damaged, 79 storage full, 80 no checkpoint where one is required, 81 a checkpoint where none
may be, 82 written by a newer format, 130 interrupted at once (what is published stays), 141 nobody read the result to its
end (as in `prefect-quantize status ROOT | head -1`).
"""

import argparse
import io
import os
import select
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from checkpoint_store.errors import CheckpointError
from flows import commands_deploy, commands_run, commands_store, console
from flows.embedded_server import ServerDidNotStart, ServerUnreachable

EXIT_FAILED, EXIT_REFUSED, EXIT_STOPPED, EXIT_INTERRUPTED, EXIT_UNREAD = 1, 2, 75, 130, 141
_LOG_IN = (
    "log in: `prefect cloud login` for Prefect Cloud, PREFECT_API_AUTH_STRING for a server with a password; `prefect "
    "config view` tells where the address is set"
)
# What to do when the configured Prefect server answers with such a status.
_REMEDIES = {
    401: _LOG_IN,
    403: _LOG_IN,
    404: "is PREFECT_API_URL the address of an API? That of `prefect server start` ends in `/api`",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names and return its exit code; only this function reads the command line."""
    arguments = _parser().parse_args(argv)
    os.environ.setdefault("DO_NOT_TRACK", "1")  # Prefect's usage data; a run here talks to no one
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a path that the terminal can't show is no reason to fail
    return _flushed(_outcome(arguments))


def _outcome(arguments: argparse.Namespace) -> int:
    try:
        return int(arguments.command(arguments))
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, BrokenPipeError) and _is_unread():
            return EXIT_UNREAD
        code, text = _told(error)
        if getattr(arguments, "verbose", False):
            traceback.print_exception(error)
        console.message(f"prefect-quantize: {text}")
        return code


def _flushed(code: int) -> int:
    """`code`, or failure when stdout did not take the result: the interpreter would only say so with a code of its own."""
    if sys.stdout is None:  # closed by the shell
        return code
    try:
        sys.stdout.flush()
    except OSError as error:
        is_unread = isinstance(error, BrokenPipeError) and _is_unread()
        with open(os.devnull, "wb") as nowhere:  # where the interpreter flushes the rest as it ends
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        if is_unread:
            return code or EXIT_UNREAD
        console.message(f"prefect-quantize: cannot write the result to stdout: {error.strerror}; what was done stands")
        return code or EXIT_FAILED
    return code


def _is_unread() -> bool:
    """Whether the pipe that stdout is has lost its reader: a command may meet a broken one elsewhere too."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _told(error: Exception | KeyboardInterrupt) -> tuple[int, str]:
    """Exit code and message for an exception that left a command."""
    if isinstance(error, CheckpointError):
        return error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED, str(
            error
        ) or "interrupted; what was published stays, the same command goes on from there"
    if type(error).__module__ == "prefect.exceptions" and type(error).__name__ == "Abort":
        return (
            EXIT_STOPPED,
            f"{error or 'the flow run was cancelled'}; the same command goes on from the last checkpoint",
        )
    if isinstance(error, ValueError):
        return EXIT_REFUSED, str(error)
    if isinstance(error, ServerDidNotStart | ServerUnreachable):
        return EXIT_FAILED, str(error)
    if (refusal := _refusal(error)) is not None:
        return EXIT_FAILED, refusal
    return (
        EXIT_FAILED,
        f"{type(error).__name__}: {error} (--verbose shows where; what was published stays)",
    )


def _refusal(error: BaseException | None) -> str | None:
    """What the configured Prefect server has against us, where that is what the error or its cause is about."""
    while error is not None:
        if type(error).__name__ == "PrefectHTTPStatusError":
            remedy = _REMEDIES.get(error.response.status_code)  # type: ignore[attr-defined]
            if remedy is not None:
                return f"the Prefect server refuses: {str(error).splitlines()[0]}; {remedy}"
        error = error.__cause__ or error.__context__
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prefect-quantize",
        description="Quantize large language models layer by layer, as Prefect flows that survive being killed.",
        epilog="Exit codes: 0 done, 1 failed, 2 refused, 75 stopped after a checkpoint (run again), 76 other job's checkpoint, "
        "77 locked, 78 damaged, 79 storage full, 80 no checkpoint, 81 a checkpoint where none may be, 82 newer format.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (commands_run, commands_store, commands_deploy):
        module.add_to(commands)
    return parser


def _version() -> str:
    try:
        return version("prefect-quantize")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
