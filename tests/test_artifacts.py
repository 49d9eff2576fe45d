"""What an operator sees of a run on a real server: progress, table, report, events, and the form for its parameters."""

import itertools
import json
import logging
import signal
import time
from pathlib import Path
from typing import Any, get_args
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    DeploymentFilter,
    DeploymentFilterId,
)
from prefect.client.schemas.objects import Artifact
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import Pending

from tasks import artifacts as artifacts_module
from tasks.artifacts import TABLE_PAUSE, Artifacts, duration
from tasks.quantization import Quantization
from tasks.report import LayerReceipt
from tests.deployed import (
    LAYERS,
    PROJECT,
    PrefectServer,
    engine,
    event,
    finish,
    layers_published,
    read,
    slow_job,
    start,
    wait_until,
    wait_until_final,
    wait_until_staged,
)


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


@pytest.mark.slow
def test_artifacts_and_events_of_a_run_that_was_stopped_and_went_on(
    server: PrefectServer, eight_layers: Path, tmp_path: Path
) -> None:
    job = slow_job(eight_layers, tmp_path, interval="layer:100")
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
    assert f"{published} of {LAYERS} layers" in event(server, run, "stopped")["message"]
    assert event(server, run, "published")["cursor"] == published

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
    assert event(server, run, "restored")["cursor"] == published
    assert read(server, run).name == "Tiny_Model gptq"
    assert str(again["progress"].key).startswith("tiny-model-gptq-")


@pytest.mark.slow
def test_a_run_that_fell_back_or_was_rejected_says_why_in_an_event_that_an_automation_can_use(
    server: PrefectServer, eight_layers: Path, tmp_path: Path
) -> None:
    server.call(module=documented("automation", server.home))
    job = slow_job(eight_layers, tmp_path, samples=6)
    assert finish(engine(server, start(server, job, state=Pending()))) == 0
    newest = max((Path(job.checkpoint.path) / "generations").iterdir())
    newest.write_bytes(newest.read_bytes().replace(b'"cursor"', b'"CURSOR"'))
    other = job.model_copy(update={"output": str(tmp_path / "second")})
    run = start(server, other, state=Pending())
    assert finish(engine(server, run)) == 0
    fell_back = event(server, run, "fell-back")
    assert (fell_back["from"], fell_back["to"]) == (LAYERS, LAYERS - 1)
    assert newest.name in fell_back["reason"] and "has other bytes" in fell_back["reason"]
    assert len(rows(artifacts(server, run)["table"])) == LAYERS
    hygiene = {"root": job.checkpoint.path, "megabytes_per_second": 200}
    wait_until(lambda: hygiene in hygiene_runs(server), lambda: f"the automation did nothing: {hygiene_runs(server)}")

    third = other.model_copy(update={"output": str(tmp_path / "third"), "seed": 1})
    run = start(server, third, state=Pending())
    finish(engine(server, run))
    assert wait_until_final(server, run).name == "Failed"
    for name in ("rejected", "failed"):
        told = event(server, run, name)
        assert told["reason"] == "IdentityMismatch" and "execution_plan.seed" in told["message"]


def documented(name: str, place: Path) -> str:
    """The program of docs/operating.md that follows the line `<!-- test: NAME -->`, as a module in `place`."""
    text = (PROJECT / "docs" / "operating.md").read_text()
    program = text.partition(f"<!-- test: {name} -->\n```python\n")[2].partition("```")[0]
    assert program
    (place / f"{name}.py").write_text(program)
    return name


def hygiene_runs(server: PrefectServer) -> list[dict[str, Any]]:
    """Parameters of the runs of `store-hygiene`."""
    with server.client() as client:
        deployment = client.read_deployment_by_name("maintain-store/store-hygiene")
        own = DeploymentFilter(id=DeploymentFilterId(any_=[deployment.id]))
        return [run.parameters for run in client.read_flow_runs(deployment_filter=own)]


def test_the_form_offers_methods_as_a_choice_and_explains_every_field(server: PrefectServer) -> None:
    with server.client() as client:
        deployment = client.read_deployment_by_name("quantize-model/quantize")
    schema = deployment.parameter_openapi_schema
    assert schema is not None
    definitions = schema["definitions"]
    method = definitions["QuantizationJob"]["properties"]["quantization"]
    # The UI offers `anyOf` as a choice; for `oneOf` it has a field for raw JSON.
    choices = [definitions[choice["$ref"].rpartition("/")[2]] for choice in method["anyOf"]]
    assert {"RTN", "GPTQ", "FP8"} < {choice["title"] for choice in choices}
    assert len(choices) == len(get_args(get_args(Quantization)[0]))
    assert method["default"]["method"] == "gptq" and method["default"]["desc_act"] is False
    for earlier, later in itertools.combinations(choices, 2):
        # It shows a value as the first one that has all of its fields.
        assert not set(later["properties"]) <= set(earlier["properties"]), f"put {later['title']} first"
    assert all(
        choice["properties"]["method"]["const"] == choice["properties"]["method"]["default"] for choice in choices
    )
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
        ("quantization", {"method": "no-such-method"}),
        ("quantization", {"method": "gptq", "bits": 5}),
        ("quantization", {"method": "rtn", "desc_act": True}),
        ("quantization", {"method": "gptq", "group_size": 0}),
        ("quantization", {"method": "awq", "group_size": 0}),
        ("calibration", {"data": "text.txt", "samples": 0}),
        ("checkpoint", {"interval": "layer:0"}),
        ("checkpoint", {"keep_last": 1}),
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


@pytest.mark.parametrize("wrong", ["25:99", "tomorrow", "", "8 h", "06:00 "])
def test_the_server_refuses_a_wrong_deadline_before_there_is_a_run(wrong: str, server: PrefectServer) -> None:
    with server.client() as client:
        deployment = client.read_deployment_by_name("quantize-model/quantize")
        parameters = {"job": {"model": "model", "output": "output"}, "deadline": wrong}
        with pytest.raises(PrefectHTTPStatusError, match=r"409|422"):
            client.create_flow_run_from_deployment(deployment.id, parameters=parameters, state=Pending())


@pytest.mark.parametrize(("seconds", "text"), [(3.4, "3 s"), (89, "89 s"), (720, "12 min"), (12600, "3.5 h")])
def test_durations_are_told_in_the_unit_that_fits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


class _SlowTable:
    """A client of an API that takes as long for a table as that is large."""

    def __init__(self) -> None:
        self.sent: dict[str, list[Any]] = {"progress": [], "table": []}
        self.table_seconds: list[float] = []

    def __enter__(self) -> "_SlowTable":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read_artifacts(self, **_: Any) -> list[Artifact]:
        return []

    def create_artifact(self, made: ArtifactCreate) -> Artifact:
        self._take(str(made.type), made.data)
        return Artifact(id=uuid4(), key=made.key, type=made.type)

    def update_artifact(self, _: UUID, changed: ArtifactUpdate) -> None:
        self._take("table" if isinstance(changed.data, str) else "progress", changed.data)

    def _take(self, kind: str, data: Any) -> None:
        if kind == "table":
            rows = json.loads(data)
            self.table_seconds.append(len(rows) * 5e-5)
            time.sleep(self.table_seconds[-1])
            data = len(rows)
        self.sent[kind].append(data)


def test_all_versions_of_the_table_cost_a_share_of_the_run_however_many_layers_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = _SlowTable()
    monkeypatch.setattr(artifacts_module, "get_client", lambda **_: client)
    monkeypatch.setattr(artifacts_module, "SECONDS_BETWEEN_UPDATES", 0.0)
    layer_count = 400
    receipts = [
        LayerReceipt(
            index=i, name=f"layers.{i}", key="", sha256="", size=1, loss=0.0, tokens=1, seconds=1.0, modules=()
        )
        for i in range(layer_count - 1)
    ]
    began = time.monotonic()
    with Artifacts(logging.getLogger(), uuid4(), "model", "gptq", "0" * 64) as shown:
        for finished in range(1, layer_count):
            shown.show(receipts[:finished], layer_count, None)
            while client.sent["progress"][-1:] != [100.0 * finished / layer_count]:
                time.sleep(1e-4)
    seconds = time.monotonic() - began
    assert client.sent["table"][-1] == layer_count - 1, "the last version is whole though the run ends early"
    assert len(client.sent["progress"]) >= layer_count - 1
    # The one at the end is sent at once, and the pause after the last but one may reach beyond it.
    *early, _, _ = client.table_seconds
    assert sum(early) < seconds / TABLE_PAUSE
