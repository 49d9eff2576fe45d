"""Runs one job in a process of its own and kills it with SIGKILL at a named moment: `flow_process.py JOB_JSON MOMENT`.

Moments: `inside a layer`, `between object and manifest`, `between manifest and CURRENT`, `during export`, or `never`. The
first three mean those of the second layer. Every layer whose body runs is a line on standard output.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from checkpoint_store.disk import Disk
from flows.quantize_model import quantize_model
from tasks import quantize_layer, quantize_shard
from tasks.job import QuantizationJob
from tasks.output_directory import Export

LAYER = 1


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arrange(moment: str) -> None:
    """Make this process kill itself at `moment`."""
    layers_begun: list[int] = []
    work, rename, collect, add_tensors = (
        quantize_layer.LayerWork,
        Disk.rename,
        quantize_shard.LayerWork.collect,
        Export.add_tensors,
    )

    def begin(run: Any, layer: int) -> Any:
        print(f"layer {layer}", flush=True)
        layers_begun.append(layer)
        return work(run, layer)

    def maybe_die_collecting(self: Any, *args: Any) -> None:
        collect(self, *args)
        if moment == "inside a layer" and layers_begun[-1] == LAYER and len(self.outcomes) == 2:
            die()

    def maybe_die_renaming(self: Disk, from_directory: int, name: str, to_directory: int, new_name: str) -> None:
        is_manifest, is_current = new_name.endswith(".json"), new_name == "CURRENT"
        if layers_begun and layers_begun[-1] == LAYER:
            if is_manifest and moment == "between object and manifest":
                die()
            if is_current and moment == "between manifest and CURRENT":
                die()
        rename(self, from_directory, name, to_directory, new_name)

    def maybe_die_exporting(self: Export, *args: Any) -> None:
        if moment == "during export":
            die()
        add_tensors(self, *args)

    quantize_layer.LayerWork = begin  # type: ignore[assignment, misc]
    quantize_shard.LayerWork.collect = maybe_die_collecting  # type: ignore[method-assign]
    Disk.rename = maybe_die_renaming  # type: ignore[method-assign]
    Export.add_tensors = maybe_die_exporting  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    arrange(sys.argv[2])
    quantize_model(QuantizationJob.model_validate_json(sys.argv[1]))
