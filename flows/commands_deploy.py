"""`deploy` and `serve`: handing the flows to a Prefect server that lasts."""

import argparse
import asyncio
import os
import subprocess
import sys
from pathlib import Path

DEPLOYMENTS = Path(__file__).resolve().parent.parent / "deployments"
WORK_POOL = "quantize"


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add these commands to the parser."""
    deploy = commands.add_parser("deploy", help="register work pool and deployments on the Prefect server")
    serve = commands.add_parser("serve", help="serve the deployments from this process, for a single machine")
    for parser, command in ((deploy, _deploy), (serve, _serve)):
        parser.add_argument("--verbose", action="store_true", help="show the traceback of an error")
        parser.set_defaults(command=command)


def _deploy(arguments: argparse.Namespace) -> int:
    server = _server()
    print(f"Prefect server {server}", flush=True)
    made = asyncio.run(_make_work_pool())
    state = "made" if made else "is there"
    print(f"work pool `{WORK_POOL}` {state}; start a worker with: prefect worker start --pool {WORK_POOL}", flush=True)
    file = DEPLOYMENTS / "prefect.yaml"
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(file)]
    return subprocess.run(command, env={**os.environ, "PREFECT_API_URL": server}, check=False).returncode


async def _make_work_pool() -> bool:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists
    from prefect.workers.process import ProcessWorker

    template = ProcessWorker.get_default_base_job_template()
    async with get_client() as client:
        try:
            await client.create_work_pool(WorkPoolCreate(name=WORK_POOL, type="process", base_job_template=template))
        except ObjectAlreadyExists:
            return False
    return True


def _serve(arguments: argparse.Namespace) -> int:
    environment = {**os.environ, "PREFECT_API_URL": _server()}
    # In this process's place, so that a signal or a service manager reaches the one that serves.
    os.execve(sys.executable, [sys.executable, str(DEPLOYMENTS / "serve.py")], environment)


def _server() -> str:
    from prefect.settings import PREFECT_API_URL

    if not PREFECT_API_URL.value():
        raise ValueError(
            "there is no lasting Prefect server to hand the flows to: start `prefect server start`, and name it with "
            "PREFECT_API_URL or `prefect config set PREFECT_API_URL=http://127.0.0.1:4200/api`"
        )
    return str(PREFECT_API_URL.value())
