"""Runs jobs, each in a process and session of its own that kills itself with SIGKILL at a named moment.

It imports the flow once, which takes longer than a tiny run, and then forks a process for each line `[job, moment, file]`
of JSON on its input. It writes the process id at once, and the exit code, negative for a signal, when that has ended. What
the process says goes to the file.

Moments: `inside a layer`, `between object and manifest`, `between manifest and CURRENT`, `during export`, or `never`. The
first three mean those of the second layer and its generation. `module 9` is when so many modules of all layers are
quantized. Every layer whose body runs is a line on standard output.
"""

import itertools
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from checkpoint_store import session
from checkpoint_store.disk import Disk
from flows.quantize_model import quantize_model
from tasks import layer_work, quantize_layer
from tasks.job import QuantizationJob
from tasks.output_directory import Export

LAYER = 1
PIECES = 9  # of a file that is written piece by piece, before the one within which it ends


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arrange(moment: str) -> None:
    """Make this process kill itself at `moment`."""
    kept = itertools.count(1)
    manifests: list[str] = []  # of the second layer's generation
    work, rename, keep = quantize_layer.LayerWork, Disk.rename, layer_work.LayerWork.keep
    add_tensors, add_pieces = Export.add_tensors, Export.add_pieces

    def begin(run: Any, layer: int, devices: Any) -> Any:
        print(f"layer {layer}", flush=True)
        return work(run, layer, devices)

    def maybe_die_keeping(self: Any, *args: Any) -> None:
        keep(self, *args)
        if moment == f"module {next(kept)}":
            die()
        if moment == "inside a layer" and self.layer == LAYER and len(self.quantized) == 4:
            session.current().drain()  # the generation before this layer is written while it is computed
            die()

    def maybe_die_renaming(self: Disk, from_directory: int, name: str, to_directory: int, new_name: str) -> None:
        is_manifest = new_name.startswith(f"{LAYER + 1:08d}-") and new_name.endswith(".json")
        if is_manifest and moment == "between object and manifest":
            die()
        if new_name == "CURRENT" and manifests and moment == "between manifest and CURRENT":
            die()
        if is_manifest:
            manifests.append(new_name)
        rename(self, from_directory, name, to_directory, new_name)

    def maybe_die_exporting(self: Export, *args: Any) -> None:
        if moment == "during export":
            die()
        add_tensors(self, *args)

    def maybe_die_within_a_file(self: Export, name: str, pieces: Iterable[memoryview]) -> None:
        def half() -> Iterator[memoryview]:
            for number, piece in enumerate(pieces):
                yield piece[: len(piece) // 2] if number == PIECES else piece
                if number == PIECES:
                    print(f"died within {name}", flush=True)
                    die()

        add_pieces(self, name, half() if moment == "during export" else pieces)

    quantize_layer.LayerWork = begin  # type: ignore[assignment, misc]
    layer_work.LayerWork.keep = maybe_die_keeping  # type: ignore[method-assign]
    Disk.rename = maybe_die_renaming  # type: ignore[method-assign]
    Export.add_tensors = maybe_die_exporting  # type: ignore[method-assign, assignment]
    Export.add_pieces = maybe_die_within_a_file  # type: ignore[method-assign]


def main() -> None:
    for line in sys.stdin:
        job, moment, file = json.loads(line)
        process = os.fork()
        if process == 0:
            os.setsid()
            with Path(file).open("wb") as told:
                os.dup2(told.fileno(), 1)
                os.dup2(told.fileno(), 2)
            arrange(moment)
            quantize_model(QuantizationJob.model_validate_json(job))
            return  # and ends as every interpreter does
        print(process, flush=True)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
