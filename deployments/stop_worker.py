"""Stops a worker without losing a layer: pause its pool, stop its flows, wait for them; the worker itself is left to end.

`python -m deployments.stop_worker --pool quantize --worker PID`, as the service file does it. The order matters: a
worker that gets SIGTERM kills its flows without a word to them, and one whose pool is open takes a run that has just
scheduled itself anew straight back.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolUpdate


def main() -> int:
    """0 when the flows have ended, 1 when some are still at work after the time that was given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool", required=True, metavar="NAME", help="the work pool to pause")
    parser.add_argument("--worker", required=True, type=int, metavar="PID", help="process id of the worker")
    parser.add_argument("--patience", type=float, default=3600.0, metavar="SECONDS", help="for the layers in work")
    arguments = parser.parse_args()
    with get_client(sync_client=True) as client:
        client.update_work_pool(arguments.pool, WorkPoolUpdate(is_paused=True))
    print(f"work pool `{arguments.pool}` is paused; `prefect work-pool resume {arguments.pool}` opens it", flush=True)
    flows = children(arguments.worker)
    for pid in flows:
        os.kill(pid, signal.SIGTERM)
    print(f"{len(flows)} flow runs were asked to stop after the layer in work", flush=True)
    deadline = time.monotonic() + arguments.patience
    while left := children(arguments.worker):
        if time.monotonic() > deadline:
            print(f"still at work after {arguments.patience:.0f} s: {left}", file=sys.stderr)
            return 1
        time.sleep(0.2)
    return 0


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
