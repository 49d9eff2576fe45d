"""The real disk, except that chosen calls fail with a chosen errno; every call is noted."""

import os
from collections.abc import Callable
from typing import Any

from checkpoint_store.disk import Disk


class FaultyDisk(Disk):
    """`fail("sync", ENOSPC, after=2)` lets two syncs pass and fails every later one."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.faults: dict[str, tuple[int, int]] = {}

    def fail(self, method: str, number: int, after: int = 0) -> None:
        self.faults[method] = (number, after)

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("_") or name not in vars(Disk):
            return found
        return self._guarded(name, found)

    def _guarded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append(name)
            if name in self.faults:
                number, passing = self.faults[name]
                if passing == 0:
                    if name == "close":  # Linux frees the descriptor whatever close reports
                        method(*arguments)
                    raise OSError(number, os.strerror(number))
                self.faults[name] = (number, passing - 1)
            return method(*arguments, **options)

        return call


class UnsyncedDisk(Disk):
    """For tests of what is written rather than when: a sync costs milliseconds and does nothing."""

    def sync(self, file: int) -> None:
        pass

    def sync_directory(self, directory: int) -> None:
        pass
