"""A job's identity: eight areas that must match before a checkpoint may be gone on with.

`source` the model by content, with its tokenizer where the export is made of it; `quantization` method and settings;
`calibration` tokens and how they were prepared; `packed_kernel` the layout that is written; `device_topology` the pool;
`runtime` library versions; `execution_plan` how the work is cut up; `adapter` what is made beside the weights. Each is
plain JSON, so that a mismatch is told leaf by leaf. Places (model path, output, checkpoint root, offload directory),
publishing and telemetry are in none of them.

XXH3-128 finds accidents, not attackers; a shard's is what `xxh128sum` prints.
"""

import json
import math
import mmap
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash

from checkpoint_store.session import peek_identity
from tasks.calibration import CalibrationSet
from tasks.devices import DevicePool
from tasks.execution_plan import (
    ADAPTER_REVISIONS,
    FORWARD_REVISION,
    LANES,
    LAYOUT_REVISIONS,
    METHOD_REVISIONS,
    UNIT_ROWS,
)
from tasks.job import QuantizationJob
from tasks.models.decoder import Decoder
from tasks.models.source import SourceModel
from tasks.schemes import layout_name, pack_dtype, packages, scheme_of

AREAS = (
    "source",
    "quantization",
    "calibration",
    "packed_kernel",
    "device_topology",
    "runtime",
    "execution_plan",
    "adapter",
)
# The first is told by `packed_kernel`; the second lets a job run or not, and changes nothing.
NOT_QUANTIZATION = frozenset({"checkpoint_format", "strict"})
# Not there unless asked for: checkpoints from before the option go on.
ADDED_LATER = frozenset({"gptaq", "foem"})
PHYSICAL = frozenset({"uuid", "serial"})
# Enough to keep several disks of a network file system busy; a hash itself runs at memory speed.
HASHING_THREADS = 8
HASHED_AT_ONCE = 16 << 20
SHORT_TEXT = 100  # of this many characters: told as it is


def build(
    job: QuantizationJob,
    source: SourceModel,
    decoder: Decoder,
    calibration: CalibrationSet | None,
    pool: DevicePool,
    cpu_threads: int,
) -> dict[str, Any]:
    """The identity as JSON values. Reads every byte of the source's shards; `calibration` is None where none is used."""
    on_cpu = pool.devices[0].type == "cpu"
    settings = job.quantization.model_dump(mode="json", exclude=set(NOT_QUANTIZATION))
    areas = {
        "source": {
            "config": source.stored_config,
            "shards": hashed_shards(source),
            **_summed_up(scheme_of(job.quantization, source).written_beside_weights()),
        },
        "quantization": {
            **{name: value for name, value in settings.items() if value is not None or name not in ADDED_LATER},
            "revision": METHOD_REVISIONS[job.quantization.method],
        },
        "calibration": _calibration(job, calibration),
        "packed_kernel": {
            "layout": (layout := layout_name(job.quantization)),
            "checkpoint_format": getattr(job.quantization, "checkpoint_format", None),
            "pack_dtype": pack_dtype(job.quantization),
            "revision": LAYOUT_REVISIONS[layout],
        },
        "device_topology": {"count": len(pool.devices), "devices": pool.topology()},
        "runtime": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "cuda": None if on_cpu else torch.version.cuda,
            **{package: version(package) for package in packages(job.quantization)},
        },
        "execution_plan": {
            "seed": job.seed,
            "layer_count": decoder.layer_count,
            "subsets": [
                {
                    "layers": [i for i, first in enumerate(decoder.kinds) if first == kind],
                    "linears": decoder.linears_by_input(kind),
                }
                for kind in decoder.layers_of_each_kind
            ],
            "lanes": LANES,
            "unit_rows": UNIT_ROWS,
            "attention": decoder.config._attn_implementation,
            "compute_dtype": str(decoder.compute_dtype(pool.devices[0].torch_device)),
            "hidden_dtype": str(decoder.source_dtype),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            # Of a GPU pool the CPU computes nothing whose last bits depend on it.
            "cpu_threads": cpu_threads if on_cpu else None,
            "revision": FORWARD_REVISION,
        },
        "adapter": _adapter(job, decoder),
    }
    assert tuple(areas) == AREAS
    # As it will be read back from a manifest: tuples are lists, nothing else than JSON is in it.
    identity: dict[str, Any] = json.loads(json.dumps(_finite(areas), allow_nan=False))
    return identity


def _adapter(job: QuantizationJob, decoder: Decoder) -> dict[str, Any] | None:
    if job.adapter is None:
        return None
    made = {"dtype": str(decoder.source_dtype), "revision": ADAPTER_REVISIONS[job.adapter.method]}
    return {**job.adapter.model_dump(mode="json"), **made}


def _summed_up(value: Any) -> Any:
    """Plain JSON in which lists and long texts are their length and digest, for a tokenizer has 100,000 tokens."""
    if isinstance(value, Mapping):
        return {str(name): _summed_up(item) for name, item in value.items()}
    if isinstance(value, list | tuple) or (isinstance(value, str) and len(value) > SHORT_TEXT):
        return {"length": len(value), "xxh3_128": xxhash.xxh3_128_hexdigest(_canonical(value))}
    return value


def _calibration(job: QuantizationJob, calibration: CalibrationSet | None) -> dict[str, Any] | None:
    if calibration is None or job.calibration is None:
        return None
    return {
        # The data by its tokens, not by its name: a file may move, and may change in place.
        **job.calibration.model_dump(mode="json", exclude={"data"}),
        "prepared_samples": calibration.summary["samples"],
        "prepared_tokens": calibration.summary["tokens"],
        "digest": calibration.digest,
    }


def digest(identity: Mapping[str, Any]) -> str:
    """XXH3-128 of the canonical JSON, as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(_canonical(identity))


def portable(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The identity without physical uuids and serials: what cache keys and a finished export are known by."""
    topology = identity["device_topology"]
    devices = [{name: device[name] for name in device if name not in PHYSICAL} for device in topology["devices"]]
    return {**identity, "device_topology": {**topology, "devices": devices}}


def is_physical(path: tuple[str, ...]) -> bool:
    """Whether a leaf, by its path, tells one device from another of its kind: what `strict_device_check=False` ignores."""
    return path[0] == "device_topology" and path[-1] in PHYSICAL


def cpu_threads(root: Path, finished: Mapping[str, Any] | None = None) -> int:
    """The thread count that every CPU slot computes with: as the checkpoint at `root` records it, else torch's own.

    The last bits of a factorisation depend on it; adopting the recorded count lets a job resume under another
    OMP_NUM_THREADS. `finished` is the report of a finished export, for when the checkpoint is gone already.
    """
    return adopted_cpu_threads(peek_identity(root), finished)


def adopted_cpu_threads(published: Mapping[str, Any] | None, finished: Mapping[str, Any] | None = None) -> int:
    """`cpu_threads`, with the published identity in hand; a record without a usable count is passed over."""
    plan = (published or {}).get("execution_plan")
    recorded = [plan.get("cpu_threads") if isinstance(plan, Mapping) else None, (finished or {}).get("cpu_threads")]
    for count in recorded:
        if type(count) is int and 1 <= count <= 4096:
            return count
    return torch.get_num_threads()


def hashed_shards(source: SourceModel) -> dict[str, dict[str, Any]]:
    """Size and XXH3-128 of every shard's content, by file name; links are followed, shards are read side by side."""
    with ThreadPoolExecutor(min(HASHING_THREADS, len(source.shards)), thread_name_prefix="hash") as threads:
        results = threads.map(lambda shard: _hashed(source.path / shard), source.shards)
        return dict(zip(source.shards, results, strict=True))


def _hashed(path: Path) -> dict[str, Any]:
    hasher = xxhash.xxh3_128()
    # Mapped, not read: twice as fast where the file is in the page cache, and no copy of it is made.
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        mapped.madvise(mmap.MADV_SEQUENTIAL)
        with memoryview(mapped) as view:
            for start in range(0, len(view), HASHED_AT_ONCE):
                with view[start : start + HASHED_AT_ONCE] as part:
                    hasher.update(part)
                    # Out of this process, not out of the page cache: a shard must not count as memory in use.
                    mapped.madvise(mmap.MADV_DONTNEED, start, len(part))
            return {"size": len(view), "xxh3_128": hasher.hexdigest()}


def _canonical(value: Any) -> bytes:
    return json.dumps(_finite(value), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _finite(value: Any) -> Any:
    """`value` with infinities, which some models' configurations hold and JSON does not know, as words."""
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
