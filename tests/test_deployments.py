"""The deployments, on a real server: registered by one command, loaded by module, run in processes elsewhere."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleUpdate, DeploymentUpdate
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.schedules import CronSchedule
from prefect.deployments.runner import RunnerDeployment
from prefect.settings import PREFECT_API_URL
from prefect.states import Scheduled
from ruamel.yaml import YAML

from checkpoint_store.store import CheckpointStore
from deployments import kept, serve
from flows import cli
from tests.flow_jobs import contents, tiny_job
from tests.tiny_models import write_tiny_llama

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_SECONDS = 180


def environment() -> dict[str, str]:
    """As for an installed package: importable from any directory, with the tests' own server."""
    return {**os.environ, "PREFECT_API_URL": str(PREFECT_API_URL.value()), "PYTHONPATH": str(ROOT), "DO_NOT_TRACK": "1"}


def start_run(deployment: str, parameters: dict[str, object]) -> UUID:
    with get_client(sync_client=True) as client:
        found = client.read_deployment_by_name(deployment)
        assert ":" not in str(found.entrypoint), "not a module: Prefect would look for a file"
        run = client.create_flow_run_from_deployment(found.id, parameters=parameters, state=Scheduled())
        return run.id


def until(is_so: Callable[[FlowRun], bool], run: UUID) -> State:
    deadline = time.monotonic() + PATIENCE_SECONDS
    with get_client(sync_client=True) as client:
        while not is_so(found := client.read_flow_run(run)):
            assert time.monotonic() < deadline, f"the run is still {found.state}"
            time.sleep(0.2)
    assert found.state is not None
    return found.state


def is_final(run: FlowRun) -> bool:
    return run.state is not None and run.state.is_final()


OWN_VARIABLES = {"env": {"CUDA_VISIBLE_DEVICES": "1", "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "45"}}


def set_overnight(
    place: Path, deadline: str = "05:00 Europe/Berlin", job_variables: dict[str, Any] = OWN_VARIABLES
) -> tuple[dict[str, object], list[tuple[str, bool]], dict[str, object]]:
    """Give it a job and an hour, and switch its schedule on, as an operator does in the UI; what it has then."""
    parameters = {"job": {"model": str(place / "m"), "output": str(place / "o")}, "deadline": deadline}
    schedules = [DeploymentScheduleUpdate(schedule=CronSchedule(cron="0 23 * * *", timezone="UTC"), active=True)]
    variables = job_variables
    with get_client(sync_client=True) as client:
        found = client.read_deployment_by_name("quantize-model/overnight")
        changes = DeploymentUpdate(parameters=parameters, schedules=schedules, job_variables=variables)
        client.update_deployment(found.id, changes)
    assert overnight() == (parameters, [("0 23 * * *", True)], variables)
    return overnight()


def overnight() -> tuple[dict[str, object], list[tuple[str, bool]], dict[str, object]]:
    with get_client(sync_client=True) as client:
        found = client.read_deployment_by_name("quantize-model/overnight")
    schedules = [(str(getattr(schedule.schedule, "cron", None)), schedule.active) for schedule in found.schedules]
    return found.parameters, schedules, found.job_variables or {}


def test_deploy_registers_everything_and_a_worker_runs_it_from_any_directory(
    tmp_path: Path, prefect_server: None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert cli.main(["deploy"]) == 0, capfd.readouterr().err
    own = set_overnight(tmp_path)
    capfd.readouterr()
    assert cli.main(["deploy"]) == 0, "a second time is no error"
    assert overnight() == own, "what an operator has set is there after an update"
    said = capfd.readouterr().out
    assert "prefect worker start" in said
    assert said.count("keeps its parameters, schedules and job variables") == 1
    job = tiny_job(write_tiny_llama(tmp_path / "model"), tmp_path)
    with get_client(sync_client=True) as client:
        limit = client.read_deployment_by_name("quantize-model/quantize").concurrency_options
        assert limit is not None
        assert limit.collision_strategy == "ENQUEUE"
    quantized = start_run("quantize-model/quantize", {"job": job.model_dump(mode="json")})
    worker = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "quantize", "--run-once"]
    subprocess.run(worker, cwd=tmp_path, env=environment(), check=True, capture_output=True, timeout=PATIENCE_SECONDS)
    assert until(is_final, quantized).name == "Completed"
    assert "quantization_report.json" in {path.name for path in Path(job.output).iterdir()}
    swept = start_run("maintain-store/store-hygiene", {"root": job.checkpoint.path})
    subprocess.run(worker, cwd=tmp_path, env=environment(), check=True, capture_output=True, timeout=PATIENCE_SECONDS)
    assert until(is_final, swept).name == "Completed"


@pytest.mark.slow
def test_a_worker_runs_it_from_a_git_clone_where_the_package_is_not_installed(
    tmp_path: Path, prefect_server: None
) -> None:
    """As the note in prefect.yaml has it; the repository is made of the files that lie here."""
    repository = tmp_path / "repository"
    for package in ("flows", "tasks", "checkpoint_store", "deployments"):
        shutil.copytree(ROOT / package, repository / package, ignore=shutil.ignore_patterns("__pycache__"))
    git = ["git", "-C", str(repository), "-c", "user.name=test", "-c", "user.email=test@example.com"]
    for arguments in (["init", "--initial-branch=main"], ["add", "."], ["commit", "--message=all of it"]):
        subprocess.run([*git, *arguments], check=True, capture_output=True)
    described = YAML(typ="safe", pure=True).load(ROOT / "deployments" / "prefect.yaml")
    [about] = [about for about in described["deployments"] if about["name"] == "quantize"]
    clone = {"prefect.deployments.steps.git_clone": {"repository": f"file://{repository}", "branch": "main"}}
    about |= {"name": "cloned", "entrypoint": "flows/quantize_model.py:quantize_model", "pull": [clone]}
    YAML().dump({"name": "cloned", "deployments": [about]}, repository / "prefect.yaml")
    assert cli.main(["deploy"]) == 0
    outside = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    deploy = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    subprocess.run(deploy, cwd=repository, env=outside, check=True, capture_output=True, timeout=PATIENCE_SECONDS)
    job = tiny_job(write_tiny_llama(tmp_path / "model"), tmp_path)
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("quantize-model/cloned")
        parameters = {"job": job.model_dump(mode="json")}
        run = client.create_flow_run_from_deployment(deployment.id, parameters=parameters, state=Scheduled()).id
    worker = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "quantize", "--run-once"]
    subprocess.run(worker, cwd=tmp_path, env=outside, check=True, capture_output=True, timeout=PATIENCE_SECONDS)
    assert until(is_final, run).name == "Completed"


def test_serve_runs_what_is_asked_of_the_server_from_any_directory(tmp_path: Path, prefect_server: None) -> None:
    job = tiny_job(write_tiny_llama(tmp_path / "model"), tmp_path)
    command = [sys.executable, "-m", "flows.cli", "serve"]
    with (tmp_path / "log").open("w") as log:
        serving = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while "quantize-model/quantize" not in (tmp_path / "log").read_text():
            assert time.monotonic() < deadline and serving.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.2)
        run = start_run("quantize-model/quantize", {"job": job.model_dump(mode="json")})
        assert until(is_final, run).name == "Completed", (tmp_path / "log").read_text()
    finally:
        serving.send_signal(signal.SIGINT)
        serving.wait(60)
    assert contents(job.output)


def test_a_start_of_serve_and_a_registration_anew_keep_what_was_set_on_the_server(
    tmp_path: Path, prefect_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[RunnerDeployment] = []
    monkeypatch.setenv("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "30")  # which `serve` would set for good
    monkeypatch.setattr(serve, "serve", lambda *deployments: served.extend(deployments))
    serve.main()
    for deployment in served:
        deployment.apply()
    own = set_overnight(tmp_path, job_variables={})
    served.clear()
    serve.main()
    for deployment in served:
        deployment.apply()
    assert overnight() == own
    assert [deployment.name for deployment in served] == ["quantize", "overnight", "store-hygiene"]

    [about] = [about for about in described() if about["name"] == "overnight"]
    with get_client(sync_client=True) as client:
        kept_before = kept.read(client, "quantize-model/overnight")
        assert kept_before is not None and kept.read(client, "quantize-model/no-such") is None
        own = set_overnight(tmp_path, deadline="07:00", job_variables={})
        assert kept.give_back(client, about, kept_before)
        assert not kept.give_back(client, about, kept_before), "nothing was left to give"
    parameters, schedules, variables = overnight()
    assert (parameters, schedules) == (kept_before.parameters, own[1])
    assert variables == about["work_pool"]["job_variables"], "what is new in a later version comes along"


def described() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = YAML(typ="safe", pure=True).load(ROOT / "deployments" / "prefect.yaml")["deployments"]
    return found


def test_maintenance_fails_loudly_on_a_damaged_root(tmp_path: Path, prefect_server: None) -> None:
    from checkpoint_store.errors import CheckpointDamaged
    from flows.maintain_store import maintain_store
    from flows.quantize_model import quantize_model

    job = tiny_job(write_tiny_llama(tmp_path / "model"), tmp_path)
    quantize_model(job)
    assert maintain_store(job.checkpoint.path)["verified"]["is_whole"]
    with CheckpointStore.open(Path(job.checkpoint.path)):  # as a run has it open
        assert "nothing was swept" in maintain_store(job.checkpoint.path)["swept"]["deferred"]
    victim = next((Path(job.checkpoint.path) / "objects").iterdir())
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(CheckpointDamaged, match=victim.name[:12]):
        maintain_store(job.checkpoint.path)
