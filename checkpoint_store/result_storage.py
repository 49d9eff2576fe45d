"""Prefect's view of a checkpoint: result records are answered from the pinned generation and written by staging only.

Prefect reads a record to learn whether a task is finished, and swallows every error of a write. So nothing here
decides anything: a read answers what the open session holds, a write only stages, and the flow publishes after it has
checked that everything it expects is there.

The session is reached through its module at every call and never kept: a flow that is pickled by value would take a
copy of it along. Prefect calls the plain methods with `_sync=True` and drops the result of a method that lacks the
parameter, so it stands here although nothing uses it.
"""

from typing import Any

from prefect.filesystems import WritableFileSystem
from pydantic import Field, HttpUrl

from checkpoint_store import session


class GenerationStorage(WritableFileSystem):
    """Result storage that answers from the checkpoint generation which the running flow has pinned.

    Example:
        Load the block that a run saved for its checkpoint root:
        ```python
        from checkpoint_store.result_storage import GenerationStorage

        storage = GenerationStorage.load("BLOCK_NAME")
        print(storage.root)
        ```
    """

    _block_type_name = "Generation Storage"
    _block_type_slug = "generation-storage"
    _logo_url = HttpUrl(
        "https://raw.githubusercontent.com/PrefectHQ/prefect/420d0d6a78bb6df1fc18bcf188fdad43c1d22ea9/assets/block-logos/filesystem.png"
    )
    _documentation_url = HttpUrl("https://docs.prefect.io/v3/advanced/results")

    root: str = Field(description="Checkpoint root whose published generation answers reads.")

    # The superclass declares coroutines; Prefect looks for `aread_path` first and takes plain methods for plain.
    def read_path(self, path: str, _sync: bool = True) -> bytes:  # type: ignore[override]
        """The record under the key `path`, as pinned or staged by the open session; ValueError when it has none."""
        record = session.current().record(path)
        if record is None:
            raise ValueError(f"no result record `{path}` in the pinned generation of {self.root}")
        return record

    def write_path(self, path: str, content: bytes, _sync: bool = True) -> None:  # type: ignore[override]
        """Stage the record under the key `path`; it becomes durable progress only when the flow publishes it."""
        session.current().stage_record(path, content)

    async def aread_path(self, path: str, **_: Any) -> bytes:
        return self.read_path(path)

    async def awrite_path(self, path: str, content: bytes, **_: Any) -> None:
        self.write_path(path, content)
