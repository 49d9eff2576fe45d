"""What a publish costs, as ratios measured in one run.

    python benchmarks/store.py [--mib 352] [--rounds 5] [--only-depth] [DIRECTORY]

Each round measures every way once, in turn, so that what else the machine does hits all of them; the figures are the
medians over the rounds. Files are removed as they go; DIRECTORY must lie on the disk that is to be measured.
"""

import argparse
import hashlib
import io
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random

import safetensors.torch
import torch
from torch import Tensor

from checkpoint_store.objects import ObjectRef, Payload
from checkpoint_store.pages import PAGE_OBJECTS
from checkpoint_store.store import CheckpointStore
from checkpoint_store.tensors import continuation_batches, safetensors_payload

IDENTITY = {"source": {"digest": "benchmark"}}
DEPTHS = (1, 50, 200)
LAYER_BYTES = 1 << 20
ROOTS = 3
MOST_LAYERS = 1000
RESAMPLINGS = 1000


def layer_tensors(mib: int) -> dict[str, Tensor]:
    """A layer like a packed one: large integer tensors and some smaller ones."""
    generator = torch.Generator().manual_seed(0)
    words = mib * (1 << 20) // 4 // 8
    large = {
        f"layer.{index}.qweight": torch.randint(-(2**31), 2**31 - 1, (words,), dtype=torch.int32, generator=generator)
        for index in range(8)
    }
    return {**large, "layer.scales": torch.ones(64, 64, dtype=torch.float16)}


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def synced(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_plainly(path: Path, tensors: dict[str, Tensor]) -> None:
    with path.open("wb", buffering=0) as file:
        for view in safetensors_payload(tensors).views():
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def hash_memory(_: Path, tensors: dict[str, Tensor]) -> None:
    hasher = hashlib.sha256()
    for view in safetensors_payload(tensors).views():
        hasher.update(view)


def save_with_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    safetensors.torch.save_file(tensors, path)
    synced(path)
    sha256_of(path)


def save_with_torch(path: Path, tensors: dict[str, Tensor]) -> None:
    torch.save(tensors, path)
    synced(path)
    sha256_of(path)


def save_by_bytes(path: Path, tensors: dict[str, Tensor]) -> None:
    buffer = io.BytesIO(safetensors.torch.save(tensors))
    hashlib.sha256(buffer.getbuffer()).hexdigest()
    path.write_bytes(buffer.getbuffer())
    synced(path)


def save_with_us(path: Path, tensors: dict[str, Tensor]) -> None:
    """One layer's part in a run: the store was opened when the run began."""
    store = stores[path]
    ref = store.stage("layer", "layers.0", safetensors_payload(tensors))
    store.publish(IDENTITY, 1, 1, [ref])


stores: dict[Path, CheckpointStore] = {}


WAYS: dict[str, Callable[[Path, dict[str, Tensor]], None]] = {
    "plain write + fsync": write_plainly,
    "SHA-256 of the memory, nothing written": hash_memory,
    "our save (write, hash, publish)": save_with_us,
    "safetensors save_file + fsync + re-hash": save_with_safetensors,
    "torch.save + fsync + re-hash": save_with_torch,
    "bytes, hash, write + fsync": save_by_bytes,
}


def measure_saving(directory: Path, mib: int, rounds: int) -> None:
    tensors = layer_tensors(mib)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(rounds):
        # The order turns, so that no way always follows the same one's writeback.
        names = list(WAYS)[number % len(WAYS) :] + list(WAYS)[: number % len(WAYS)]
        for name in names:
            path = directory / "save"
            if WAYS[name] is save_with_us:
                stores[path] = CheckpointStore.open(path)
            os.sync()
            seconds[name].append(timed(lambda way=WAYS[name], to=path: way(to, tensors)))  # type: ignore[misc]
            if WAYS[name] is save_with_us:
                stores.pop(path).close()
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
    plain = statistics.median(seconds["plain write + fsync"])
    print(f"saving {mib} MiB, median of {rounds} rounds; rate relative to plain write + fsync")
    for name, found in seconds.items():
        median = statistics.median(found)
        print(f"  {name:42} {median:7.3f} s  {mib / median:6.0f} MiB/s  {plain / median:5.2f}")
    bound = max(statistics.median(seconds[name]) for name in list(WAYS)[:2])
    ours = statistics.median(seconds["our save (write, hash, publish)"])
    print(f"  the bound is the slower of writing and hashing; our save reaches {bound / ours:.2f} of it")


class Grown:
    """A root of a given depth, to which layers are committed; `go_back` takes them away again."""

    def __init__(self, store: CheckpointStore, depth: int) -> None:
        self.store = store
        self.first = self.finished = depth - 1
        refs = [ref for layer in range(self.first) for ref in stage_layer(store, layer, layer_payloads(layer, 1000))]
        store.publish(IDENTITY, self.first, MOST_LAYERS, refs)
        self.go_back()

    def commit(self) -> tuple[float, float]:
        """Seconds of the clock and of the processor for one more layer, as in a run."""
        payloads = layer_payloads(self.finished, LAYER_BYTES)
        wall, cpu = time.perf_counter(), time.process_time()
        refs = stage_layer(self.store, self.finished, payloads)
        self.store.publish(IDENTITY, self.finished + 1, MOST_LAYERS, refs, kept=2 * self.finished)
        self.finished += 1
        return time.perf_counter() - wall, time.process_time() - cpu

    def go_back(self) -> None:
        self.finished = self.first
        for _ in range(2):  # the second one takes the last generation with the layers off the list
            self.store.publish(IDENTITY, self.first, MOST_LAYERS, [], kept=2 * self.first)


def measure_depth(directory: Path, rounds: int) -> None:
    """Commit time of one more layer at several depths.

    The commits of all depths alternate, in an order drawn anew for each step, so that the disk's mood and what else the machine
    does hit all of them; each depth has several roots, since where on the disk a directory lies makes a difference. A
    round commits as many layers as fill a page, then takes them away: every depth meets every fill of the manifest equally often.
    """
    random = Random(0)
    steps: list[dict[int, list[tuple[float, float]]]] = []
    with ExitStack() as opened:
        roots = [
            (depth, Grown(opened.enter_context(CheckpointStore.open(directory / f"depth-{depth}-{copy}")), depth))
            for copy in range(ROOTS)
            for depth in DEPTHS
        ]
        for _ in range(rounds):
            for _ in range(PAGE_OBJECTS // 2):
                step: dict[int, list[tuple[float, float]]] = {depth: [] for depth in DEPTHS}
                for depth, root in random.sample(roots, len(roots)):
                    step[depth].append(root.commit())
                steps.append(step)
            for _, root in roots:
                root.go_back()
    count = len(steps) * ROOTS
    print(f"committing one more layer of {LAYER_BYTES >> 20} MiB, median of {count} commits at each depth; by layer 1,")
    print("with 95 % intervals (bootstrap over steps)")
    for depth in DEPTHS:
        told = f"  layer {depth:3}"
        for kind, name in enumerate(("", " of processor time")):
            told += f"  {median_of(steps, depth, kind) * 1e3:6.2f} ms{name}"
            low, high = ratio_interval(steps, depth, kind, random)
            told += (
                f" {median_of(steps, depth, kind) / median_of(steps, DEPTHS[0], kind):.3f} ({low:.3f} to {high:.3f})"
            )
        print(told)


def median_of(steps: list[dict[int, list[tuple[float, float]]]], depth: int, kind: int) -> float:
    return statistics.median(commit[kind] for step in steps for commit in step[depth])


def ratio_interval(
    steps: list[dict[int, list[tuple[float, float]]]], depth: int, kind: int, random: Random
) -> tuple[float, float]:
    """The 2.5th and the 97.5th percentile of the ratio of medians, depth to layer 1, over resampled steps."""
    ratios = []
    for _ in range(RESAMPLINGS):
        drawn = random.choices(steps, k=len(steps))
        ratios.append(median_of(drawn, depth, kind) / median_of(drawn, DEPTHS[0], kind))
    ratios.sort()
    return ratios[RESAMPLINGS // 40], ratios[-1 - RESAMPLINGS // 40]


def layer_payloads(layer: int, size: int) -> tuple[Payload, Payload]:
    data = {"w": torch.full((size,), layer % 256, dtype=torch.uint8), "layer": torch.tensor([layer])}
    return safetensors_payload(data), safetensors_payload({"record": torch.tensor([layer])})


def stage_layer(store: CheckpointStore, layer: int, payloads: tuple[Payload, Payload]) -> list[ObjectRef]:
    return [
        store.stage("layer", f"layers.{layer}", payloads[0]),
        store.stage("record", f"key.{layer}", payloads[1]),
    ]


def measure_loading(directory: Path, mib: int, rounds: int) -> None:
    path = directory / "load"
    batches = {f"{index:08d}": tensor for index, tensor in enumerate(layer_tensors(mib).values())}
    with CheckpointStore.open(path) as store:
        ref = store.stage("continuation", "hidden.00000", safetensors_payload(batches))
        store.publish(IDENTITY, 1, 1, [ref])
    hashing, loading = [], []

    def load() -> None:
        with CheckpointStore.open(path, mode="read") as store:
            pinned = store.pin(lambda identity: None)
            assert pinned is not None
            continuation_batches([pinned.view(pinned.objects[0])])

    for _ in range(rounds):
        hashing.append(timed(lambda: sha256_of(store.path_of(ref))))
        loading.append(timed(load))
    shutil.rmtree(path)
    one_pass, ours = statistics.median(hashing), statistics.median(loading)
    print(f"loading {mib} MiB, median of {rounds} rounds, file in the page cache")
    print(f"  one SHA-256 pass over the file             {one_pass:7.3f} s")
    print(f"  our load (open, verify, tensors in place)  {ours:7.3f} s  {ours / one_pass:5.2f} of one pass")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", default=".", help="where to write; default: here")
    parser.add_argument("--mib", type=int, default=352, help="size of the saved object")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only-depth", action="store_true", help="measure only how commit time depends on depth")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="store-benchmark-", dir=options.directory))
    try:
        if not options.only_depth:
            measure_saving(directory, options.mib, options.rounds)
            measure_loading(directory, options.mib, options.rounds)
        measure_depth(directory, options.rounds)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
