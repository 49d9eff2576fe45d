"""Stops a worker without losing a layer: pause its pool, stop its flows and wait for them, then end the worker.

`python -m deployments.stop_worker --pool quantize --worker PID`, as the service file does it. The order matters: a
worker that gets SIGTERM kills its flows without a word to them, and one whose pool is open takes a run that has just
scheduled itself anew straight back.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolUpdate

# A worker hands SIGTERM to itself as SIGINT, and lives on where that is ignored, as shells arrange it for what they
# start in the background. Without flows it has nothing to lose by SIGKILL.
WORKER_SECONDS = 20.0


def main() -> int:
    """0 when the flows and the worker have ended, 1 when flows are still at work after the time that was given."""
    arguments = parser().parse_args()
    if arguments.worker is None:
        print("the worker has ended by itself: there is nothing to stop, and the pool stays as it is", flush=True)
        return 0
    with get_client(sync_client=True) as client:
        client.update_work_pool(arguments.pool, WorkPoolUpdate(is_paused=True))
    print(f"work pool `{arguments.pool}` is paused; `prefect work-pool resume {arguments.pool}` opens it", flush=True)
    flows = children(arguments.worker)
    for pid in flows:
        os.kill(pid, signal.SIGTERM)
    print(f"{len(flows)} flow runs were asked to stop after the layer in work", flush=True)
    if not ends_within(arguments.patience, lambda: not children(arguments.worker)):
        print(f"still at work after {arguments.patience:.0f} s: {children(arguments.worker)}", file=sys.stderr)
        return 1
    end_worker(arguments.worker)
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool", required=True, metavar="NAME", help="the work pool to pause")
    # systemd runs ExecStop= after a worker that ended by itself too, and then has no $MAINPID.
    parser.add_argument(
        "--worker", required=True, nargs="?", type=int, metavar="PID", help="process id; none has ended"
    )
    parser.add_argument("--patience", type=float, default=3500.0, metavar="SECONDS", help="for the layers in work")
    return parser


def end_worker(pid: int) -> None:
    """SIGTERM, and SIGKILL when that does not do."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
        if ends_within(WORKER_SECONDS, lambda: state_of(pid) in ("Z", "")):
            print(f"the worker has ended ({number.name})", flush=True)
            return


def ends_within(seconds: float, has_ended: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not has_ended():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def state_of(pid: int) -> str:
    """The letter that the kernel gives a process' state, `Z` for one that has ended; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def children(parent: int) -> list[int]:
    """The processes that `parent` has started and that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent_of_it = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
                continue
            if int(parent_of_it) == parent and state != "Z":
                found.append(int(entry.name))
    return found


if __name__ == "__main__":
    sys.exit(main())
