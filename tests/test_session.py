"""A run's dealings with its checkpoint: policies, identity, what must be there before a publish, and overlap."""

import errno
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoint_store import session as sessions
from checkpoint_store.config import CheckpointConfig
from checkpoint_store.differences import differences
from checkpoint_store.disk import Disk
from checkpoint_store.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointExists,
    CheckpointMissing,
    IdentityMismatch,
    StorageFull,
    StoreLocked,
)
from checkpoint_store.objects import BytesPayload
from checkpoint_store.session import CheckpointEvent, CheckpointSession, peek_identity
from checkpoint_store.store import CheckpointStore

IDENTITY = {"source": {"digest": "abc"}, "device_topology": {"devices": [{"uuid": "GPU-1", "name": "H200"}]}}
LAYERS = 4


class Run:
    """One run of the flow as far as the checkpoint sees it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.events: list[CheckpointEvent] = []

    def open(
        self, resume: str = "auto", identity: dict[str, Any] | None = None, interval: str = "layer:1", **options: Any
    ) -> CheckpointSession:
        config = CheckpointConfig(path=str(self.root), resume=resume, interval=interval)
        return CheckpointSession.open(
            self.root,
            config,
            identity or IDENTITY,
            layer_count=LAYERS,
            ignore=options.pop("ignore", None),
            on_event=self.events.append,
            **options,
        )

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


def finish(session: CheckpointSession, layer: int) -> None:
    session.stage_layer(f"layers.{layer}", BytesPayload(b"packed %d" % layer))
    session.stage_record(f"key{layer}", b"record %d" % layer)


def publish(session: CheckpointSession, finished: int, wait: bool = True) -> None:
    names, keys = [f"layers.{layer}" for layer in range(finished)], [f"key{layer}" for layer in range(finished)]
    hidden = (
        [BytesPayload(b"hidden %d chunk %d" % (finished, chunk)) for chunk in range(2)] if finished < LAYERS else []
    )
    session.publish(finished, names, keys, hidden)
    if wait:
        session.drain()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    yield Run(tmp_path / "root")
    if sessions._current is not None:
        sessions._current.close()


@pytest.fixture
def stopped(run: Run) -> Run:
    """A run that stopped after two layers."""
    with run.open(run_id="first") as session:
        for layer in range(2):
            finish(session, layer)
            publish(session, layer + 1)
    run.events.clear()
    return run


def newest_object(root: Path, key: str) -> Path:
    with CheckpointStore.open(root, mode="read") as store:
        [ref] = [ref for ref in store.generations()[0].objects if ref.key == key]
        return store.path_of(ref)


# Resuming


def test_a_fresh_run_starts_at_layer_0_and_finds_nothing(run):
    session = run.open()
    assert (session.cursor, session.published_identity, session.continuation(), session.record("key0")) == (
        0,
        None,
        [],
        None,
    )
    assert session.layer_objects() == []
    session.refuse_if_pinned("key0")


def test_a_resumed_run_finds_its_layers_records_and_hidden_states(stopped):
    session = stopped.open()
    assert session.cursor == 2 and session.published_identity == IDENTITY
    assert [bytes(view) for view in session.continuation()] == [b"hidden 2 chunk 0", b"hidden 2 chunk 1"]
    assert [bytes(view) for view in session.continuation()] == [b"hidden 2 chunk 0", b"hidden 2 chunk 1"]
    assert session.record("key1") == b"record 1" and session.record("key2") is None
    assert [ref.key for ref in session.layer_objects()] == ["layers.0", "layers.1"]
    assert [session.path_of(ref).read_bytes() for ref in session.layer_objects()] == [b"packed 0", b"packed 1"]
    assert bytes(session.view(session.layer_objects()[1])) == b"packed 1"
    for layer in (2, 3):
        finish(session, layer)
        publish(session, layer + 1)
    assert [ref.key for ref in session.layer_objects()] == [f"layers.{layer}" for layer in range(4)]
    assert session.bytes_written < 200


@pytest.mark.parametrize(
    ("resume", "is_retry", "run_id", "outcome"),
    [
        ("auto", False, "other", None),
        ("required", False, "other", None),
        ("never", False, "first", CheckpointExists),
        ("auto", True, "other", None),
        ("required", True, "other", None),
        ("never", True, "first", None),
        ("never", True, "other", CheckpointExists),
        ("never", True, None, CheckpointExists),
    ],
)
def test_the_policy_when_a_compatible_checkpoint_is_published(stopped, resume, is_retry, run_id, outcome):
    if outcome is None:
        assert stopped.open(resume, is_retry=is_retry, run_id=run_id).cursor == 2
        return
    with pytest.raises(outcome, match=str(stopped.root)):
        stopped.open(resume, is_retry=is_retry, run_id=run_id)
    stopped.open("auto").close()  # the refusal holds no lock


@pytest.mark.parametrize(
    ("resume", "is_retry", "outcome"),
    [
        ("auto", False, None),
        ("required", False, CheckpointMissing),
        ("never", False, None),
        ("auto", True, None),
        ("required", True, None),
        ("never", True, None),
    ],
)
@pytest.mark.parametrize("is_made", [True, False])
def test_the_policy_when_nothing_is_published(run, resume, is_retry, outcome, is_made):
    if is_made:
        run.open().close()
    if outcome is None:
        assert run.open(resume, is_retry=is_retry, run_id="r").cursor == 0
        return
    with pytest.raises(outcome):
        run.open(resume, is_retry=is_retry)
    assert run.root.exists() == is_made


def test_a_retry_of_a_fresh_run_goes_on_from_its_own_progress_past_a_damaged_manifest(stopped):
    [newest] = (stopped.root / "generations").glob("00000002-*")
    newest.unlink()
    with stopped.open("never", is_retry=True, run_id="first") as session:
        assert session.cursor == 1


@pytest.mark.parametrize("resume", ["auto", "required", "never"])
def test_no_policy_starts_over_from_a_damaged_or_another_jobs_checkpoint(stopped, resume):
    kind = CheckpointExists if resume == "never" else IdentityMismatch
    with pytest.raises(kind):
        stopped.open(resume, identity={"source": {"digest": "other"}})
    newest_object(stopped.root, "layers.0").unlink()
    with pytest.raises(CheckpointExists if resume == "never" else CheckpointDamaged):
        stopped.open(resume)
    (stopped.root / "CURRENT").unlink()
    (stopped.root / "CURRENT.prev").unlink()
    with pytest.raises(CheckpointDamaged, match="prefect-quantize recover"):
        stopped.open(resume)


def test_a_second_session_is_refused_in_this_process_and_current_is_the_open_one(run, tmp_path):
    with pytest.raises(RuntimeError, match="no checkpoint session is open"):
        sessions.current()
    session = run.open()
    assert sessions.current() is session
    with pytest.raises(RuntimeError, match="open in this process already"):
        Run(tmp_path / "other").open()
    session.close()
    with pytest.raises(RuntimeError):
        sessions.current()
    with CheckpointStore.open(run.root), pytest.raises(StoreLocked):
        run.open()
    with pytest.raises(RuntimeError):
        sessions.current()


def test_the_scratch_directory_lasts_as_long_as_the_session(run):
    session = run.open()
    scratch = session.scratch
    (scratch / "spilled").write_bytes(b"x")
    finish(session, 0)
    publish(session, 1)
    assert (scratch / "spilled").exists() and scratch.parent == run.root
    session.close()
    assert not scratch.exists()


# Identity


def test_every_differing_leaf_is_told_with_both_values(stopped):
    other = {
        "source": {"digest": "xyz", "more": None},
        "device_topology": {"devices": [{"uuid": "GPU-2", "name": "H200"}]},
    }
    with pytest.raises(IdentityMismatch) as caught:
        stopped.open(identity=other)
    for line in (
        "source.digest: checkpoint abc, this run xyz",
        "source.more: checkpoint has none, this run null",
        "device_topology.devices.0.uuid: checkpoint GPU-1, this run GPU-2",
    ):
        assert line in str(caught.value)
    assert "name" not in str(caught.value)
    assert stopped.kinds() == ["preparation", "failure"]


def test_ignored_leaves_may_differ_and_no_other(stopped):
    def is_physical(path: tuple[str, ...]) -> bool:
        return path[0] == "device_topology" and path[-1] == "uuid"

    moved = {**IDENTITY, "device_topology": {"devices": [{"uuid": "GPU-2", "name": "H200"}]}}
    with stopped.open(identity=moved, ignore=is_physical) as session:
        assert session.cursor == 2
    smaller = {**IDENTITY, "device_topology": {"devices": [{"uuid": "GPU-2", "name": "A100"}]}}
    with pytest.raises(IdentityMismatch, match="checkpoint H200, this run A100"):
        stopped.open(identity=smaller, ignore=is_physical)
    fewer = {**IDENTITY, "device_topology": {"devices": []}}
    with pytest.raises(IdentityMismatch, match=r"device_topology\.devices: checkpoint"):
        stopped.open(identity=fewer, ignore=is_physical)


def test_another_number_of_layers_is_another_job(stopped):
    config = CheckpointConfig(path=str(stopped.root))
    with pytest.raises(IdentityMismatch, match="layer_count: checkpoint 4, this run 5"):
        CheckpointSession.open(stopped.root, config, IDENTITY, layer_count=5)


@pytest.mark.parametrize(
    ("one", "other", "lines"),
    [
        ({"a": (1, 2)}, {"a": [1, 2]}, []),
        ({"a": 1}, {"a": 1.0}, ["a: checkpoint 1, this run 1.0"]),
        ({"a": 1}, {"a": True}, ["a: checkpoint 1, this run true"]),
        ({"a": {}}, {"a": []}, ["a: checkpoint {}, this run []"]),
        ({"a": None}, {}, ["a: checkpoint null, this run has none"]),
        (
            {"a": {"b": 1, "c": 2}},
            {"a": {"b": 2, "c": 3}},
            ["a.b: checkpoint 1, this run 2", "a.c: checkpoint 2, this run 3"],
        ),
        ({"a": [1, 2]}, {"a": [1]}, ["a: checkpoint [1, 2], this run [1]"]),
        ({"a": "x" * 500}, {"a": "y"}, [f"a: checkpoint {'x' * 200}... (500 characters), this run y"]),
    ],
)
def test_differences_are_those_of_json_leaves(one, other, lines):
    assert differences(one, other) == lines
    assert differences(one, one) == []


def test_the_published_identity_is_seen_without_the_writer_lock(run, tmp_path):
    assert peek_identity(run.root) is None and not run.root.exists()
    session = run.open()
    assert peek_identity(run.root) is None
    finish(session, 0)
    publish(session, 1)
    assert peek_identity(run.root) == IDENTITY
    finish(session, 1)
    publish(session, 2)
    for manifest in (run.root / "generations").iterdir():
        assert peek_identity(run.root) == IDENTITY
        manifest.unlink()
    with pytest.raises(CheckpointDamaged):
        peek_identity(run.root)


# Damage


def test_a_damaged_newest_generation_is_left_for_the_older_one_and_told_as_an_event(stopped):
    newest_object(stopped.root, "hidden.00001").write_bytes(b"damaged")
    with stopped.open() as session:
        assert session.cursor == 1
    [event] = [event for event in stopped.events if event.kind == "fell_back"]
    assert (event.detail["from"], event.detail["to"]) == (2, 1)
    assert stopped.kinds() == ["preparation", "fell_back", "validation", "restoration"]


def test_the_use_of_the_spare_pointer_is_told_as_an_event(stopped):
    (stopped.root / "CURRENT").unlink()
    with stopped.open() as session:
        assert session.cursor == 1
    [event] = [event for event in stopped.events if event.kind == "fell_back"]
    assert event.detail["to"] == "CURRENT.prev" and "missing" in event.detail["reason"]


def test_a_published_layer_is_refused_to_run_again(stopped):
    session = stopped.open()
    with pytest.raises(CheckpointDamaged, match=r"key1.*prefect-quantize verify"):
        session.refuse_if_pinned("key1")
    session.refuse_if_pinned("key2")


# Publishing


def test_an_expected_layer_or_record_that_never_arrived_is_named_and_nothing_is_published(stopped):
    session = stopped.open()
    session.stage_layer("layers.2", BytesPayload(b"packed 2"))
    with pytest.raises(CheckpointError, match="record `key2` finished but never reached the store"):
        publish(session, 3)
    with pytest.raises(CheckpointError, match=r"layer `layers\.3`, record `key2`, record `key3`"):
        publish(session, 4)
    with pytest.raises(CheckpointError, match="3 layers are finished and only 1"):
        session.publish(3, ["layers.2"], [], [])
    finish(session, 2)
    publish(session, 3)
    assert session.layer_objects()[2].key == "layers.2"


def test_every_finished_layer_must_have_each_of_its_objects(run):
    session = run.open(layer_roles=(sessions.LAYER, sessions.ADAPTER))
    finish(session, 0)
    with pytest.raises(CheckpointError, match=r"adapter `layers\.0` finished but never reached the store"):
        publish(session, 1)
    session.stage_layer("layers.0", BytesPayload(b"matrices"), sessions.ADAPTER)
    publish(session, 1)
    (ref,) = session.layer_objects(sessions.ADAPTER)
    assert bytes(session.view(ref)) == b"matrices"
    assert [ref.role for ref in session.layer_objects()] == [sessions.LAYER]


def test_the_interval_and_the_last_layer_decide_when_to_publish(run):
    with run.open(interval="layer:3") as session:
        assert [finished for finished in range(1, LAYERS + 1) if session.is_due(finished)] == [3, 4]
    with run.open() as session:
        assert all(session.is_due(finished) for finished in range(1, LAYERS + 1))


def test_layers_staged_before_a_due_publish_are_all_in_it(run):
    with run.open(interval="layer:3") as session:
        for layer in range(3):
            finish(session, layer)
            assert session.record(f"key{layer}") == b"record %d" % layer
        publish(session, 3)
    with run.open() as session:
        assert session.cursor == 3 and session.record("key0") == b"record 0"


def test_events_follow_the_run_and_hold_no_contents(run):
    with run.open() as session:
        finish(session, 0)
        publish(session, 1)
    assert run.kinds() == ["preparation", "capture", "capture", "commit"]
    assert run.events[1].detail == {
        "role": "layer",
        "key": "layers.0",
        "sha256": session.layer_objects()[0].sha256,
        "bytes": 8,
    }
    assert run.events[3].detail["cursor"] == 1
    assert b"packed" not in repr(run.events).encode()


# Publishing while the next layer is computed


class GatedDisk(Disk):
    """Syncs of directories, so publishes, wait at a gate; `error` is what they then meet."""

    def __init__(self) -> None:
        self.is_gated = False
        self.gate = threading.Event()
        self.reached = threading.Event()
        self.error: int | None = None

    def sync_directory(self, directory: int) -> None:
        if self.is_gated:
            self.reached.set()
            assert self.gate.wait(30)
            if self.error is not None:
                raise OSError(self.error, os.strerror(self.error))
        super().sync_directory(directory)


@pytest.fixture
def gated(run: Run, monkeypatch: pytest.MonkeyPatch) -> tuple[Run, GatedDisk]:
    disk = GatedDisk()
    monkeypatch.setattr("checkpoint_store.store.Disk", lambda: disk)
    return run, disk


def published_cursor(root: Path) -> int:
    with CheckpointStore.open(root, mode="read", disk=Disk()) as store:
        return max((generation.cursor for generation in store.generations()), default=0)


def test_a_publish_may_be_under_way_while_the_caller_goes_on(gated):
    run, disk = gated
    session = run.open()
    disk.is_gated = True
    finish(session, 0)
    publish(session, 1, wait=False)
    assert disk.reached.wait(30)
    assert published_cursor(run.root) == 0
    assert session.scratch.exists()
    disk.gate.set()
    session.drain()
    assert published_cursor(run.root) == 1
    for layer in (1, 2, 3):
        finish(session, layer)
        publish(session, layer + 1, wait=False)
    session.close()  # drains
    assert published_cursor(run.root) == 4
    assert [event.detail["cursor"] for event in run.events if event.kind == "commit"] == [1, 2, 3, 4]


@pytest.mark.parametrize("boundary", ["publish", "drain", "close", "stage"])
def test_the_error_of_a_publish_under_way_surfaces_at_the_next_boundary(gated, boundary):
    run, disk = gated
    session = run.open()
    finish(session, 0)
    finish(session, 1)
    disk.is_gated, disk.error = True, errno.ENOSPC
    publish(session, 1, wait=False)
    disk.gate.set()
    if boundary == "stage":
        session._publisher.shutdown()
    steps = {
        "publish": lambda: publish(session, 2),
        "drain": session.drain,
        "close": session.close,
        "stage": lambda: finish(session, 2),
    }
    with pytest.raises(StorageFull):
        steps[boundary]()
    disk.is_gated = False
    if boundary == "stage":
        with pytest.raises(StorageFull):
            session.close()
    session.close()
    with run.open() as session:
        assert session.cursor == 0
    assert "failure" in run.kinds()


def test_a_forked_child_does_not_wait_for_a_publish_of_its_parent(gated):
    run, disk = gated
    session = run.open()
    finish(session, 0)
    disk.is_gated = True
    publish(session, 1, wait=False)
    assert disk.reached.wait(30)
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # ends a child that waits
        session.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    disk.gate.set()
    session.close()
    assert published_cursor(run.root) == 1


def test_only_one_publish_is_under_way_at_a_time(gated):
    run, disk = gated
    session = run.open()
    for layer in range(2):
        finish(session, layer)
    disk.is_gated = True
    publish(session, 1, wait=False)
    second = threading.Thread(target=publish, args=(session, 2, False))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    disk.gate.set()
    second.join(30)
    session.close()
    assert published_cursor(run.root) == 2
