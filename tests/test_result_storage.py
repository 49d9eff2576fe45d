"""The result storage block: Prefect's own standard tests, and what Prefect learns through it."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect import flow, task
from prefect.blocks.core import Block
from prefect.context import TaskRunContext
from prefect.testing.standard_test_suites import BlockStandardTestSuite

from checkpoint_store import session
from checkpoint_store.config import CheckpointConfig
from checkpoint_store.errors import CheckpointDamaged
from checkpoint_store.objects import BytesPayload
from checkpoint_store.result_storage import GenerationStorage
from checkpoint_store.session import CheckpointSession

IDENTITY = {"source": {"config": 1}}
KEY = "layer-00000-abc"


class TestGenerationStorage(BlockStandardTestSuite):
    """Prefect's own checks of a block."""

    @pytest.fixture
    def block(self) -> type[Block]:
        return GenerationStorage


def open_session(root: Path) -> CheckpointSession:
    return CheckpointSession.open(root, CheckpointConfig(path=str(root)), IDENTITY, layer_count=2)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[CheckpointSession]:
    with open_session(tmp_path / "root") as held:
        yield held


def test_a_write_is_read_back_by_both_kinds_of_methods(opened: CheckpointSession) -> None:
    block = GenerationStorage(root=str(opened.root))
    block.write_path("one", b"1", _sync=True)
    asyncio.run(block.awrite_path("two", b"2"))
    assert block.read_path("one", _sync=True) == b"1"
    assert asyncio.run(block.aread_path("two")) == b"2"


def test_a_record_that_is_not_there_is_an_error_and_not_empty(opened: CheckpointSession) -> None:
    with pytest.raises(ValueError, match="no result record `gone`"):
        GenerationStorage(root=str(opened.root)).read_path("gone")


def test_without_an_open_session_nothing_is_read_or_written(tmp_path: Path) -> None:
    block = GenerationStorage(root=str(tmp_path))
    with pytest.raises(RuntimeError, match="no checkpoint session is open"):
        block.read_path("one")
    with pytest.raises(RuntimeError, match="no checkpoint session is open"):
        block.write_path("one", b"1")


bodies_run: list[int] = []


@task(
    cache_key_fn=lambda context, parameters: KEY,
    persist_result=True,
    result_serializer="json",
    cache_result_in_memory=False,
)
def recorded(layer: int) -> dict[str, int]:
    session.current().refuse_if_pinned(KEY)
    bodies_run.append(layer)
    assert TaskRunContext.get() is not None
    return {"layer": layer}


@flow
def record_flow(root: str, publish: bool) -> str:
    storage = GenerationStorage(root=root)
    storage.save("checkpoint-of-a-test", overwrite=True)
    state = recorded.with_options(result_storage=storage)(0, return_state=True)
    if publish:
        session.current().stage_layer("layer.0", BytesPayload(b"weights"))
        session.current().publish(1, ["layer.0"], [KEY], [])
    assert state.result() == {"layer": 0}
    return state.name


@pytest.mark.usefixtures("prefect_server")
def test_a_published_record_makes_its_task_cached_in_a_later_process_and_an_unpublished_one_does_not(
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    bodies_run.clear()
    for publish, name, bodies in ((False, "Completed", 1), (True, "Completed", 2), (False, "Cached", 2)):
        with open_session(root):
            assert record_flow(str(root), publish) == name
        assert len(bodies_run) == bodies


@pytest.mark.usefixtures("prefect_server")
def test_a_published_record_that_prefect_cannot_understand_is_damage_and_not_a_miss(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with open_session(root) as opened:
        opened.stage_record(KEY, b"not what Prefect writes")
        opened.stage_layer("layer.0", BytesPayload(b"weights"))
        opened.publish(1, ["layer.0"], [KEY], [])
    bodies_run.clear()
    with open_session(root), pytest.raises(CheckpointDamaged, match=KEY):
        record_flow(str(root), False)
    assert bodies_run == []
