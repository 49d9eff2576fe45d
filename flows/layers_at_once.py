"""The unfinished layers of a run, called as tasks: one after the other, or several at once, given out in their order.

Where each layer needs the one before, or the pool has one device, a layer is called on the main thread as it always was.
Else as many are begun as the run takes at once. None is begun beyond that window before the first of it is given out, so
that what is published is always a prefix of the layers, and little is done that a failure makes anew.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any

from prefect import Task
from prefect.futures import PrefectFuture, wait

from tasks.running import Run


class LayerFailed(RuntimeError):
    """A layer met what preflight cannot see, such as weights that overflow; nothing of it was stored."""


class LayersAtOnce:
    """Gives out the records of the unfinished layers; on exit none of them is at work any more."""

    def __init__(
        self,
        run: Run,
        layer_task: Task[..., Any],
        arguments: Callable[[int], dict[str, Any]],
        is_stop_requested: Callable[[], bool],
    ) -> None:
        self._run = run
        self._layer_task = layer_task
        self._arguments = arguments
        self._is_stop_requested = is_stop_requested
        self._begun: deque[PrefectFuture[Any]] = deque()

    @property
    def in_work(self) -> bool:
        """Whether layers after the one that was given out last are begun."""
        return bool(self._begun)

    def __iter__(self) -> Iterator[Any]:
        """Each record when its layer and all before it are finished; LayerFailed when one met a value that it can't take.

        Once a stop is asked for no other layer is begun, and those in work are finished.
        """
        layers = deque(range(self._run.session.cursor, self._run.decoder.step_count))
        while self._begun or layers:
            try:
                record = self._next(layers)
            except ValueError as error:  # to a caller that would mean a job refused before anything was spent
                raise LayerFailed(str(error)) from error
            yield record

    def _next(self, layers: deque[int]) -> Any:
        if self._run.layers_at_once == 1 and not self._begun:
            return self._layer_task(**self._arguments(layers.popleft()))
        while layers and len(self._begun) < self._run.layers_at_once:
            if self._begun and self._is_stop_requested():
                break
            self._begun.append(self._layer_task.submit(**self._arguments(layers.popleft())))
        self._wait(self._begun[0])
        return self._begun.popleft().result()

    @staticmethod
    def _wait(future: PrefectFuture[Any]) -> None:
        """Until it is done; this thread, which takes the signals, looks for one every second even if its sleep missed it."""
        while not wait([future], timeout=1).done:
            pass

    def __enter__(self) -> "LayersAtOnce":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let layers in work, of a run that ends by an error, go on to their next module only, and wait for them there."""
        self._run.is_given_up = kind is not None
        for future in self._begun:
            with suppress(BaseException):  # a layer's, in a run that ends by another, or one signal more
                self._wait(future)
