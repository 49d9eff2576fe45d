"""What a reader sees of a published generation, and of the one that a run goes on from."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

from checkpoint_store.errors import CheckpointError
from checkpoint_store.generations import Entry, Manifest
from checkpoint_store.objects import ObjectRef


class Generation:
    """A published generation; its manifest is read and verified when it is first asked for."""

    def __init__(self, entry: Entry, load: Callable[[Entry], Manifest]) -> None:
        self.entry = entry
        self._load = load

    @property
    def gen(self) -> int:
        return self.entry.gen

    @cached_property
    def manifest(self) -> Manifest:
        return self._load(self.entry)

    @property
    def identity(self) -> dict[str, Any]:
        return self.manifest.identity

    @property
    def cursor(self) -> int:
        return self.manifest.cursor

    @property
    def layer_count(self) -> int:
        return self.manifest.layer_count

    @property
    def objects(self) -> tuple[ObjectRef, ...]:
        return self.manifest.objects

    @property
    def run_id(self) -> str | None:
        return self.manifest.run_id


class Pinned:
    """The generation that a run goes on from: every object was verified."""

    def __init__(
        self,
        generation: Generation,
        views: dict[str, memoryview],
        map_again: Callable[[ObjectRef], memoryview],
        fallen_from: tuple[tuple[Generation, str], ...],
    ) -> None:
        self.generation = generation
        self.identity = generation.identity
        self.cursor = generation.cursor
        self.objects = generation.objects
        self.fallen_from = fallen_from  # newer generations, each with the reason why it is not this one
        self._views = views
        self._map_again = map_again

    def view(self, ref: ObjectRef) -> memoryview:
        """The object's verified bytes: the mapping that was hashed, or a new one that is hashed now."""
        if ref not in self.objects:
            raise CheckpointError(f"{ref.role} {ref.key} is not in generation {self.generation.gen}")
        view = self._views.get(ref.sha256)
        return self._map_again(ref) if view is None else view

    def forget_views(self) -> None:
        """Let go of the mappings; a later `view` maps and verifies anew."""
        self._views.clear()
