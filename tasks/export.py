"""Finished layers -> a model directory that other programs load.

A layer's object is a shard already. It becomes a file by reflink where the file system can, else by one copy in the
kernel; a hard link would share the inode and lend the checkpoint's bytes to whoever edits the model. Embeddings, norms
and head follow as one more shard. Nothing in the files but the report depends on when or where they were written.
"""

import errno
import time
from collections.abc import Mapping, Sequence
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from torch import Tensor

from checkpoint_store.errors import StorageFull
from checkpoint_store.session import ADAPTER
from checkpoint_store.tensors import tensors_from
from tasks import ruled_modules, running
from tasks.export_gguf import add_gguf
from tasks.formats import peft
from tasks.models.source import INDEX_FILE
from tasks.output_directory import Export, OutputTaken, foreign_names, json_bytes, remove_leftovers
from tasks.places import copied_files
from tasks.report import Report

# Keys of a config.json that say where the model lay on somebody's machine, or that another quantizer left behind.
PLACES = ("_name_or_path", "name_or_path")
DROPPED_KEYS = (*PLACES, "quantization_config")


def shard_names(count: int) -> list[str]:
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def index_of(shards: Mapping[str, Sequence[str]], total_size: int) -> bytes:
    """`model.safetensors.index.json` for shard file names -> the tensors in each; ValueError for a tensor in two."""
    weight_map: dict[str, str] = {}
    for file, names in shards.items():
        for name in names:
            if name in weight_map:
                raise ValueError(f"tensor `{name}` is in two shards, `{weight_map[name]}` and `{file}`")
            weight_map[name] = file
    return json_bytes({"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))})


def config_of(source_config: Mapping[str, Any], quantization_config: Mapping[str, Any]) -> bytes:
    """The source's config.json with `quantization_config`, `dtype` and `torch_dtype` equal, and no private path."""
    config = {key: _without_places(value) for key, value in source_config.items() if key not in DROPPED_KEYS}
    text_config = source_config.get("text_config") or {}
    said = (part.get(key) for part in (source_config, text_config) for key in ("dtype", "torch_dtype"))
    dtype = next(filter(None, said), "float32")
    config |= {"dtype": dtype, "torch_dtype": dtype, "quantization_config": dict(quantization_config)}
    return json_bytes(dict(sorted(config.items())))


def _without_places(value: Any) -> Any:
    """A part of a config.json, such as `text_config`, without the place where that model lay."""
    return {key: item for key, item in value.items() if key not in PLACES} if isinstance(value, dict) else value


@task(name="export-model", task_run_name="{model} export", persist_result=False, cache_policy=NO_CACHE)
def export_model(model: str) -> Report:
    """Write the finished model to its output directory, durably and all at once; the report of the run."""
    run = running.current()
    try:
        for name in remove_leftovers(run.output):
            run.logger.warning("removed `%s`, which a run that died had left at the output", name)
        if names := foreign_names(run.output):  # again: hours have passed since the start of the run
            raise OutputTaken(f"{run.output} has been filled by somebody else meanwhile ({', '.join(names[:3])})")
        with Export(run.output) as export:
            size = add_gguf(run, export) if run.scheme.is_one_file else _add_model(run, export)
            _add_copies(run, export)
            report = Report.of(
                run.receipts, status="done", model=model, method=run.job.quantization.method,
                output=str(run.output), checkpoint=str(run.root), identity=run.identity_digest, size=size,
                seconds=round(time.monotonic() - run.started, 3), resumed_from=run.resumed_from,
                calibration=run.calibration_summary,
            )  # fmt: skip
            export.finish({**report.published(), "cpu_threads": run.cpu_threads})
    except OutputTaken as error:
        raise OutputTaken(
            f"output {error}; all layers are published at {run.root}: move these files away or name another output, and "
            f"run again, only the export is repeated"
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(
                f"no space left while the finished model was written to {run.output}: {error}; all layers are published "
                f"at {run.root}: free space there and run again, only the export is repeated"
            ) from error
        raise
    return report


def _add_model(run: running.Run, export: Export) -> int:
    """All shards, their index and the configuration; the bytes of all tensors."""
    refs = run.session.layer_objects()
    files = shard_names(len(refs) + 1)
    held: dict[str, list[str]] = {}
    size = 0
    for file, ref in zip(files, refs, strict=False):
        found = tensors_from(run.session.view(ref))
        held[file] = sorted(found)
        size += sum(tensor.nbytes for tensor in found.values())
        export.add_file(file, run.session.path_of(ref), ref.sha256)
    outer = run.scheme.written(run.decoder, run.source.load(outer_names(run)))
    held[files[-1]] = sorted(outer)
    size += sum(tensor.nbytes for tensor in outer.values())
    export.add_tensors(files[-1], outer)
    export.add_bytes(INDEX_FILE, index_of(held, size))
    _add_descriptions(run, export)
    if run.job.adapter is not None:
        _add_adapter(run, run.job.adapter.rank, export)
    return size


def _add_adapter(run: running.Run, rank: int, export: Export) -> None:
    tensors: dict[str, Tensor] = {}
    for ref in run.session.layer_objects(ADAPTER):
        tensors |= tensors_from(run.session.view(ref))
    export.add_tensors(peft.TENSORS_FILE, tensors)
    export.add_bytes(
        peft.CONFIG_FILE, json_bytes(peft.adapter_config(rank, tensors, has_towers=bool(run.decoder.towers)))
    )


def outer_names(run: running.Run) -> list[str]:
    """Tensors that no step makes and the output holds, heads for further tokens too; never a tied head."""
    head = run.decoder.layer_tensor_names(run.decoder.layer_count) if run.decoder.quantizes_head else ()
    outer = [name for name in run.decoder.outer_tensor_names if name not in head]
    return [*outer, *run.decoder.carried_tensor_names]


def _add_descriptions(run: running.Run, export: Export) -> None:
    described = ruled_modules.tell(run.scheme.quantization_config(), run.job.quantization, run.decoder)
    described = run.scheme.leave_out(described, run.decoder.kept_modules)
    export.add_bytes("config.json", config_of(run.source.config, described))
    if (file := run.scheme.description_file) is not None:
        export.add_bytes(file, json_bytes(described))


def _add_copies(run: running.Run, export: Export) -> None:
    for path in copied_files(run.source.path, run.scheme.is_one_file):
        export.add_file(path.name, path)
