"""What an operator sees of a run on a real server: progress, table, report, events, and the form for its parameters."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args
from uuid import UUID

import pytest
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.client.schemas.objects import Artifact
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import Pending

from tasks.artifacts import duration
from tasks.job import Quantization
from tests.deployed import (
    LAYERS,
    PrefectServer,
    engine,
    finish,
    layers_published,
    prefect_server,
    read,
    slow_job,
    slow_model,
    start,
    wait_until,
    wait_until_final,
    wait_until_staged,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    with prefect_server(tmp_path_factory.mktemp("prefect")) as server:
        server.call("deploy", module="flows.cli")
        yield server


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return slow_model(tmp_path_factory.mktemp("model") / "Tiny_Model")


def artifacts(server: PrefectServer, run: UUID) -> dict[str, Artifact]:
    """By type; AssertionError when there are two of one."""
    with server.client() as client:
        own = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run]))
        found = client.read_artifacts(artifact_filter=own)
    types = [str(artifact.type) for artifact in found]
    assert len(types) == len(set(types)), types
    return {str(artifact.type): artifact for artifact in found}


def rows(artifact: Artifact) -> list[dict[str, Any]]:
    return json.loads(str(artifact.data))


def events(server: PrefectServer, run: UUID) -> dict[str, dict[str, Any]]:
    """Payloads of this project's events of a run, the last of each name."""
    body = {"filter": {"event": {"prefix": ["prefect-quantize."]}, "any_resource": {"id": [f"prefect.flow-run.{run}"]}}}
    with server.client() as client:
        found = client._client.post("/events/filter", json=body | {"limit": 50}).json()["events"]
    return {event["event"]: event["payload"] for event in reversed(found)}


@pytest.mark.slow
def test_artifacts_and_events_of_a_run_that_was_stopped_and_went_on(
    server: PrefectServer, model: Path, tmp_path: Path
) -> None:
    job = slow_job(model, tmp_path, interval="layer:100")
    run = start(server, job, state=Pending())
    process = engine(server, run)
    wait_until_staged(job, 2)
    process.send_signal(signal.SIGTERM)
    assert finish(process) == 0
    published = layers_published(job)
    assert 1 <= published < LAYERS
    shown = artifacts(server, run)
    assert set(shown) == {"progress", "table"}
    assert shown["progress"].data == 100 * published / LAYERS
    assert f"{published} of {LAYERS} layers, about " in str(shown["progress"].description)
    assert [row["layer"] for row in rows(shown["table"])] == [f"model.layers.{layer}" for layer in range(published)]
    wait_until(lambda: "prefect-quantize.checkpoint.stopped" in events(server, run), lambda: "no event of the stop")
    before = events(server, run)
    assert before["prefect-quantize.checkpoint.published"]["cursor"] == published
    assert f"{published} of {LAYERS} layers" in before["prefect-quantize.checkpoint.stopped"]["message"]

    assert finish(engine(server, run)) == 0, server.log(str(run))
    again = artifacts(server, run)
    assert {again[kind].id for kind in ("progress", "table")} == {artifact.id for artifact in shown.values()}
    assert again["progress"].data == 100
    assert rows(again["table"])[:published] == rows(shown["table"]), "finished layers keep their figures"
    assert len(rows(again["table"])) == LAYERS
    assert set(rows(again["table"])[0]) >= {"loss", "tokens", "seconds", "bytes", "fallbacks"}
    report = str(again["markdown"].data)
    assert job.output in report and f"{LAYERS}, {published} by earlier runs" in report
    assert f"/runs/flow-run/{run})" in report and f"/artifacts/key/{again['table'].key})" in report
    wait_until(lambda: "prefect-quantize.checkpoint.restored" in events(server, run), lambda: "no event of the resume")
    assert events(server, run)["prefect-quantize.checkpoint.restored"]["cursor"] == published
    assert read(server, run).name == "Tiny_Model gptq"
    assert str(again["progress"].key).startswith("tiny-model-gptq-")


@pytest.mark.slow
def test_a_rejected_run_says_why_in_an_event_and_another_run_shows_the_layers_from_the_checkpoint(
    server: PrefectServer, model: Path, tmp_path: Path
) -> None:
    job = slow_job(model, tmp_path, samples=6)
    assert finish(engine(server, start(server, job, state=Pending()))) == 0
    other = job.model_copy(update={"output": str(tmp_path / "second")})
    run = start(server, other, state=Pending())
    assert finish(engine(server, run)) == 0
    assert len(rows(artifacts(server, run)["table"])) == LAYERS
    third = other.model_copy(update={"output": str(tmp_path / "third"), "seed": 1})
    run = start(server, third, state=Pending())
    finish(engine(server, run))
    assert wait_until_final(server, run).name == "Failed"
    wait_until(lambda: "prefect-quantize.checkpoint.rejected" in events(server, run), lambda: "no event")
    rejected = events(server, run)["prefect-quantize.checkpoint.rejected"]
    assert rejected["reason"] == "IdentityMismatch" and "execution_plan.seed" in rejected["message"]


def test_the_form_offers_methods_as_a_choice_and_explains_every_field(server: PrefectServer) -> None:
    with server.client() as client:
        deployment = client.read_deployment_by_name("quantize-model/quantize")
    schema = deployment.parameter_openapi_schema
    assert schema is not None
    definitions = schema["definitions"]
    method = definitions["QuantizationJob"]["properties"]["quantization"]
    assert method["discriminator"]["propertyName"] == "method"
    methods = get_args(get_args(Quantization)[0])
    assert [choice["$ref"].rpartition("/")[2] for choice in method["oneOf"]] == [config.__name__ for config in methods]
    assert "desc_act" in definitions["GPTQConfig"]["properties"]
    assert "desc_act" not in definitions["RTNConfig"]["properties"]
    unexplained = [
        f"{name}.{field}"
        for name, definition in definitions.items()
        for field, about in definition["properties"].items()
        if not about.get("description")
    ]
    assert unexplained == []
    assert schema["properties"]["deadline"]["description"]


@pytest.mark.parametrize(
    ("section", "wrong"),
    [
        ("quantization", {"method": "nearest"}),
        ("quantization", {"method": "gptq", "bits": 5}),
        ("quantization", {"method": "rtn", "desc_act": True}),
        ("calibration", {"data": "text.txt", "samples": 0}),
    ],
)
def test_the_server_refuses_wrong_values_before_there_is_a_run(
    section: str, wrong: dict[str, Any], server: PrefectServer
) -> None:
    with server.client() as client:
        deployment = client.read_deployment_by_name("quantize-model/quantize")
        job = {"model": "model", "output": "output", section: wrong}
        with pytest.raises(PrefectHTTPStatusError, match=r"409|422"):
            client.create_flow_run_from_deployment(deployment.id, parameters={"job": job}, state=Pending())


@pytest.mark.parametrize(("seconds", "text"), [(3.4, "3 s"), (89, "89 s"), (720, "12 min"), (12600, "3.5 h")])
def test_durations_are_told_in_the_unit_that_fits(seconds: float, text: str) -> None:
    assert duration(seconds) == text
