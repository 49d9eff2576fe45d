"""One run's dealings with its checkpoint: what it may go on from, what it has staged, and when that is published.

Reached through `current()`, never by importing the session itself: a flow that is pickled by value would get a copy.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from itertools import takewhile
from logging import getLogger
from pathlib import Path
from threading import Lock
from typing import Any, Literal

from checkpoint_store.config import CheckpointConfig
from checkpoint_store.differences import differences
from checkpoint_store.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointExists,
    CheckpointMissing,
    IdentityMismatch,
)
from checkpoint_store.objects import BytesPayload, ObjectRef, Payload
from checkpoint_store.published import Generation, Pinned
from checkpoint_store.store import CheckpointStore

LAYER, ADAPTER, RECORD, CONTINUATION = "layer", "adapter", "record", "continuation"

logger = getLogger(__name__)

EventKind = Literal["preparation", "validation", "capture", "commit", "restoration", "failure", "fell_back"]
Ignore = Callable[[tuple[str, ...]], bool]
Objects = dict[tuple[str, str], ObjectRef]  # by role and key


@dataclass(frozen=True)
class CheckpointEvent:
    """Something that a checkpoint did; `detail` is plain JSON without contents of tensors."""

    kind: EventKind
    detail: dict[str, Any] = field(default_factory=dict)


_current: "CheckpointSession | None" = None


def current() -> "CheckpointSession":
    """The open session of this process."""
    if _current is None:
        raise RuntimeError("no checkpoint session is open in this process; layers run inside the flow `quantize_model`")
    return _current


class CheckpointSession:
    """Opened once per run by `CheckpointSession.open`, closed at its end; holds the root's writer lock in between."""

    def __init__(
        self,
        store: CheckpointStore,
        config: CheckpointConfig,
        identity: dict[str, Any],
        layer_count: int,
        layer_roles: Sequence[str],
        on_event: Callable[[CheckpointEvent], None],
    ) -> None:
        self.root = store.path
        self._store = store
        self._config = config
        self._identity = identity
        self._layer_count = layer_count
        self._layer_roles = tuple(layer_roles)
        self._on_event = on_event
        self._pinned: Pinned | None = None
        self._generation: Generation | None = None  # what was pinned or published last
        self._published: Objects = {}  # all but the continuation, in the generation's order
        self._staged: Objects = {}  # what is not published yet
        self._staging = Lock()  # layers are staged from several threads while the publisher takes what it has published
        self._named: tuple[list[str], list[str]] | None = None  # layers and records in this session's last publish
        self._publisher: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    @classmethod
    def open(
        cls,
        root: Path,
        config: CheckpointConfig,
        identity: dict[str, Any],
        *,
        layer_count: int,
        layer_roles: Sequence[str] = (LAYER,),
        run_id: str | None = None,
        is_retry: bool = False,
        ignore: Ignore | None = None,
        on_event: Callable[[CheckpointEvent], None] = lambda event: None,
    ) -> "CheckpointSession":
        """Lock the root, choose by `config.resume` whether to start or to go on, and verify what is gone on from.

        `layer_roles` are the objects that every finished layer has.

        A retry means `auto`, except that a run that asked for `never` goes on only from its own progress. Raises
        StoreLocked, CheckpointMissing, CheckpointExists, IdentityMismatch (every differing leaf with both values;
        `ignore` lets differences pass), CheckpointDamaged, StorageFull or UnknownFormat; then nothing is open.
        """
        global _current
        if _current is not None:
            raise RuntimeError(f"a checkpoint session on `{_current.root}` is open in this process already")
        on_event(CheckpointEvent("preparation", {"root": str(root), "resume": config.resume, "is_retry": is_retry}))
        try:
            if config.resume == "required" and not is_retry:
                _refuse_missing(root)  # before a root is made
            store = CheckpointStore.open(
                root,
                keep_last=config.keep_last,
                run_id=run_id,
                allow_network_filesystem=config.allow_network_filesystem,
            )
            try:
                if config.resume == "never":
                    _refuse_progress(store, run_id if is_retry else None)
                session = cls(store, config, identity, layer_count, layer_roles, on_event)
                session._restore(ignore)
            except BaseException:
                store.close()
                raise
        except CheckpointError as error:
            on_event(_failure(error))
            raise
        _current = session
        return session

    def _restore(self, ignore: Ignore | None) -> None:
        if self._store.spare_because is not None:
            self._on_event(CheckpointEvent("fell_back", {"to": "CURRENT.prev", "reason": self._store.spare_because}))

        def check_identity(published: dict[str, Any]) -> None:
            lines = differences(published, self._identity, ignore)
            if lines:
                raise IdentityMismatch(mismatch_message(self.root, lines))

        self._pinned = self._store.pin(check_identity)
        if self._pinned is None:
            return
        self._generation = self._pinned.generation
        for generation, reason in self._pinned.fallen_from:
            self._on_event(
                CheckpointEvent(
                    "fell_back", {"from": generation.gen, "to": self._pinned.generation.gen, "reason": reason}
                )
            )
        if self._pinned.generation.layer_count != self._layer_count:
            line = f"layer_count: checkpoint {self._pinned.generation.layer_count}, this run {self._layer_count}"
            raise IdentityMismatch(mismatch_message(self.root, [line]))
        self._published = {(ref.role, ref.key): ref for ref in self._pinned.objects if ref.role != CONTINUATION}
        detail = {
            "generation": self._pinned.generation.gen,
            "cursor": self.cursor,
            "layer_count": self._layer_count,
            "objects": len(self._pinned.objects),
        }
        verified = self._store.counters.bytes_verified
        self._on_event(CheckpointEvent("validation", {**detail, "bytes_verified": verified}))
        self._on_event(CheckpointEvent("restoration", detail))

    # What was found --------------------------------------------------------------------------------------------------

    @property
    def cursor(self) -> int:
        """Layers that were finished in the generation this run goes on from; 0 for a fresh run."""
        return self._pinned.cursor if self._pinned else 0

    @property
    def published_identity(self) -> dict[str, Any] | None:
        return self._pinned.identity if self._pinned else None

    @property
    def scratch(self) -> Path:
        """A directory of this run alone, on the checkpoint's file system; it goes when the session is closed."""
        return self._store.scratch

    @property
    def bytes_written(self) -> int:
        """Bytes of objects that this run has written."""
        return self._store.counters.bytes_written

    def continuation(self) -> list[memoryview]:
        """The verified chunks of the hidden states that enter the next layer, in order; empty for a fresh run.

        A chunk stays mapped as long as the caller holds it.
        """
        if self._pinned is None:
            return []
        refs = sorted((ref for ref in self._pinned.objects if ref.role == CONTINUATION), key=lambda ref: ref.key)
        views = [self._pinned.view(ref) for ref in refs]
        self._pinned.forget_views()
        return views

    def record(self, key: str) -> bytes | None:
        """The result record that is staged or published under `key`."""
        ref = self._staged.get((RECORD, key)) or self._published.get((RECORD, key))
        return None if ref is None else bytes(self._store.view(ref))

    def refuse_if_pinned(self, key: str) -> None:
        """Raise CheckpointDamaged when `key` is published: its task must not run again."""
        if (ref := self._published.get((RECORD, key))) is not None:
            raise CheckpointDamaged(
                f"the record `{key}` is published in `{self.root}` and yet its layer was asked to run again: "
                f"`{self.path_of(ref)}` could not be read or understood; look at the log above and run "
                f"`prefect-quantize verify {self.root}`. Running the layer again would hide the damage"
            )

    def layer_objects(self, role: str = LAYER) -> list[ObjectRef]:
        """The objects of all published layers, in the order of their layers."""
        return [ref for ref in list(self._published.values()) if ref.role == role]  # a publish may be under way

    def path_of(self, ref: ObjectRef) -> Path:
        return self._store.path_of(ref)

    def view(self, ref: ObjectRef) -> memoryview:
        """The verified bytes of a staged or published object."""
        return self._store.view(ref)

    # What is added ---------------------------------------------------------------------------------------------------

    def stage_layer(self, layer_name: str, payload: Payload, role: str = LAYER) -> ObjectRef:
        """Write a finished layer's object; a later `publish` makes it part of a generation."""
        return self._stage(role, layer_name, payload)

    def stage_record(self, key: str, data: bytes) -> ObjectRef:
        return self._stage(RECORD, key, BytesPayload(data))

    def _stage(self, role: str, key: str, payload: Payload) -> ObjectRef:
        with self._telling_failures():
            ref = self._store.stage(role, key, payload)
        with self._staging:
            self._staged[role, key] = ref
        self._on_event(CheckpointEvent("capture", {"role": role, "key": key, "sha256": ref.sha256, "bytes": ref.size}))
        return ref

    def is_due(self, finished: int) -> bool:
        """Whether a generation is to be published after so many finished layers."""
        return finished % self._config.interval_layers == 0 or finished == self._layer_count

    def publish(
        self,
        finished: int,
        layer_names: Sequence[str],
        record_keys: Sequence[str],
        continuation: Sequence[Payload],
    ) -> None:
        """Publish all `finished` layers: their objects and records by name, and the next layer's inputs.

        Names are those of every finished layer, not only of the new ones. Raises CheckpointError, naming them, when
        some are neither staged nor published: a write was lost on the way here.

        The writing overlaps what the caller does next, which must leave the memory of `continuation` alone. One publish
        at a time is under way; its error is raised by the next `publish`, `drain` or `close`. What was published is
        durable when `drain` returns.
        """
        self.drain()
        if len(set(layer_names)) < finished:
            raise CheckpointError(
                f"{finished} layers are finished and only {len(set(layer_names))} are to be published"
            )
        named = (list(layer_names), list(record_keys))
        kept, new = self._expected(*named)
        if self._publisher is None:
            self._publisher = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-publish")
        # In the caller's context: what listens to events may ask which run they belong to.
        self._pending = self._publisher.submit(
            copy_context().run, self._publish, finished, named, kept, new, continuation
        )

    def _expected(self, layer_names: list[str], record_keys: list[str]) -> tuple[Objects, Objects]:
        """The objects of these names: those with which the generation before begins, and those that follow them.

        Where the names go on from those of the last publish, only the ones that are new are looked at.
        """
        layers, records = map(len, self._named or ([], []))
        goes_on = self._named == (layer_names[:layers], record_keys[:records])
        if not goes_on or any(name in self._published for name in list(self._staged)):
            goes_on, layers, records = False, 0, 0
        names = [(role, name) for role in self._layer_roles for name in layer_names[layers:]]
        names += [(RECORD, key) for key in record_keys[records:]]
        found = {name: self._staged.get(name) or self._published.get(name) for name in names}
        missing = [f"{role} `{key}`" for (role, key), ref in found.items() if ref is None]
        if missing:
            raise CheckpointError(
                f"cannot publish to `{self.root}`: {', '.join(missing)} finished but never reached the store; its "
                f"write failed, see the log above. What was published before stays; run again"
            )
        new = {name: ref for name, ref in found.items() if ref is not None}
        if goes_on:
            return self._published, new
        kept: Objects = {}
        before = self._generation.objects if self._generation else ()
        for ref in takewhile(lambda ref: new.get((ref.role, ref.key)) == ref, before):
            kept[ref.role, ref.key] = new.pop((ref.role, ref.key))
        return kept, new

    def _publish(
        self,
        finished: int,
        named: tuple[list[str], list[str]],
        kept: Objects,
        new: Objects,
        continuation: Sequence[Payload],
    ) -> None:
        with self._telling_failures():
            chunks = [
                self._store.stage(CONTINUATION, f"hidden.{index:05d}", payload)
                for index, payload in enumerate(continuation)
            ]
            generation = self._store.publish(
                self._identity, finished, self._layer_count, [*new.values(), *chunks], kept=len(kept)
            )
        kept.update(new)
        self._published, self._named, self._generation = kept, named, generation
        with self._staging:
            self._staged = {name: ref for name, ref in self._staged.items() if kept.get(name) != ref}
        detail = {"generation": generation.gen, "cursor": finished, "layer_count": self._layer_count}
        self._on_event(CheckpointEvent("commit", {**detail, "bytes_written": self._store.counters.bytes_written}))

    def drain(self) -> None:
        """Wait for a publish that is under way; raise its error."""
        pending, self._pending = self._pending, None
        # A forked child has no thread that would ever finish it.
        if pending is not None and self._store.is_ours:
            pending.result()

    @contextmanager
    def _telling_failures(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            self._on_event(_failure(error))
            raise

    def close(self) -> None:
        """Drain, let go of the lock and forget the session; staged objects that were not published are garbage."""
        global _current
        try:
            self.drain()
        finally:
            if self._publisher is not None and self._store.is_ours:
                self._publisher.shutdown()
            if _current is self:
                _current = None
            self._store.close()

    def __enter__(self) -> "CheckpointSession":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _failure(error: CheckpointError) -> CheckpointEvent:
    return CheckpointEvent("failure", {"error": type(error).__name__, "message": str(error)})


def _refuse_missing(root: Path) -> None:
    with CheckpointStore.open(root, mode="read") as store:
        if not store.generations():
            raise CheckpointMissing(
                f"resume=required and nothing is published in `{root}`; name the checkpoint's directory, or use "
                f"resume=auto to start"
            )


def _refuse_progress(store: CheckpointStore, own_run_id: str | None) -> None:
    if not store.generations():
        return
    if own_run_id is not None and _newest_run_id(store) == own_run_id:
        return
    raise CheckpointExists(
        f"resume=never and `{store.path}` holds a published checkpoint; use a new path, or resume=auto to go on from it"
    )


def _newest_run_id(store: CheckpointStore) -> str | None:
    for generation in store.generations():
        with suppress(CheckpointDamaged):  # told, and fallen back from, when the generation is pinned
            return generation.run_id
    return None


def mismatch_message(root: Path, lines: Sequence[str]) -> str:
    return (
        f"the checkpoint at `{root}` belongs to another job; these values differ:\n"
        + "".join(f"  {line}\n" for line in lines)
        + "Restore them to go on, or use a new checkpoint path to start anew; the checkpoint is untouched"
    )


def peek_identity(root: Path) -> dict[str, Any] | None:
    """The identity of the newest generation whose manifest is whole, without the writer lock; None when none is published."""
    try:
        store = CheckpointStore.open(root, mode="read")
    except CheckpointMissing:
        return None
    with store:
        reasons = []
        for generation in store.generations():
            try:
                return generation.identity
            except CheckpointDamaged as error:
                reasons.append(str(error))
        if reasons:
            raise CheckpointDamaged("; ".join(reasons))
        return None
