"""`deploy` and `serve`: handing the flows to a Prefect server that lasts."""

import argparse
import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

from flows.embedded_server import refuse_unreachable

DEPLOYMENTS = Path(__file__).resolve().parent.parent / "deployments"
WORK_POOL = "quantize"
HEARTBEAT_SECONDS = 30  # as prefect.yaml sets it; read here without importing Prefect


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add these commands to the parser."""
    deploy = commands.add_parser(
        "deploy", help="register work pool, automation, block and deployments on the Prefect server; again updates them"
    )
    deploy.add_argument(
        "--silence",
        type=float,
        default=90.0,
        metavar="SECONDS",
        help="without a heartbeat for so long a run's host is taken for dead (default 90, three heartbeats)",
    )
    serve = commands.add_parser("serve", help="serve the deployments from this process, for a single machine")
    for parser, command in ((deploy, _deploy), (serve, _serve)):
        parser.add_argument("--verbose", action="store_true", help="show the traceback of an error")
        parser.set_defaults(command=command)


def _deploy(arguments: argparse.Namespace) -> int:
    if arguments.silence <= HEARTBEAT_SECONDS:
        raise ValueError(
            f"--silence {arguments.silence:g} takes every run for dead: heartbeats come every {HEARTBEAT_SECONDS} s"
        )
    server = _server()
    print(f"Prefect server {server}", flush=True)
    asyncio.run(_register(arguments.silence))
    if code := _register_deployments(server):
        return code
    print(f"Start a worker on each machine with devices: prefect worker start --pool {WORK_POOL}", flush=True)
    return 0


def _register_deployments(server: str) -> int:
    """Those of prefect.yaml, with what operators have set on the server; the exit code of `prefect deploy`."""
    from prefect.client.orchestration import get_client
    from ruamel.yaml import YAML

    from deployments import kept

    file = DEPLOYMENTS / "prefect.yaml"
    described = YAML(typ="safe", pure=True).load(file)["deployments"]
    with get_client(sync_client=True) as client:
        before = [(about, kept.read(client, kept.full_name(about))) for about in described]
        command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(file)]
        done = subprocess.run(
            command, env={**os.environ, "PREFECT_API_URL": server}, check=False, stdout=subprocess.PIPE, text=True
        )
        for about, own in before:  # after a failure too: some may have been registered
            if own is not None and kept.give_back(client, about, own):
                print(f"deployment `{kept.full_name(about)}` keeps its parameters, schedules and job variables")
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        return done.returncode
    for name in re.findall(r"Deployment '([^']+)' successfully created", " ".join(done.stdout.split())):
        print(f"deployment `{name}` registered")
    return 0


async def _register(silence_seconds: float) -> None:
    """Work pool, block type and automation; says what was made and what was there."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists
    from prefect.workers.process import ProcessWorker

    from checkpoint_store.result_storage import GenerationStorage
    from deployments import host_crash

    template = ProcessWorker.get_default_base_job_template()
    async with get_client() as client:
        try:
            await client.create_work_pool(WorkPoolCreate(name=WORK_POOL, type="process", base_job_template=template))
            print(f"work pool `{WORK_POOL}` made")
        except ObjectAlreadyExists:
            print(f"work pool `{WORK_POOL}` is there, left as it is")
        made = await host_crash.register(client, silence_seconds)
        print(f"automation `{host_crash.NAME}` {'made' if made else 'updated'}: {silence_seconds:g} s of silence")
        await GenerationStorage.aregister_type_and_schema(client=client)
        print("block type `Generation Storage` registered", flush=True)


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
    server = str(PREFECT_API_URL.value())
    refuse_unreachable(server)
    return server
