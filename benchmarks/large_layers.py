"""What layers as large as those of a 70B model take: wall time and memory, beside what the preflight had estimated.

    python benchmarks/large_layers.py DIRECTORY [--hidden 2048 --intermediate 7168 --heads 16]

A random llama with a small vocabulary is written shard by shard, a layer each, and quantized with GPTQ by the command
that a user runs. Below DIRECTORY lie the model, the checkpoint, the result and the figures; the same command again goes
on where it was stopped. The defaults are the layers of Llama 3 70B and need 7 GB of disk for the model, 4 for the rest.

Memory is the resident memory of this process and all below it, Prefect's server among them, looked at ten times a
second; a layer's peak is that from its first module to the first of the next layer.
"""

import argparse
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoint_store.config import CheckpointConfig
from flows.commands_run import quantize, summary
from tasks import running
from tasks.job import CalibrationConfig, QuantizationJob
from tasks.preflight import check
from tasks.quantization import GPTQConfig

VOCABULARY = 512
SECONDS_BETWEEN_LOOKS = 0.1


def described(shape: argparse.Namespace) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "dtype": "bfloat16",
        "hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.key_value_heads, "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "attention_bias": False, "mlp_bias": False, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip


def shards(shape: argparse.Namespace) -> Iterator[dict[str, tuple[int, ...]]]:
    """The tensors of each shard: one per layer, and what lies outside the layers."""
    hidden, inner, narrow = shape.hidden, shape.intermediate, shape.hidden // shape.heads * shape.key_value_heads
    for layer in range(shape.layers):
        linears = {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (narrow, hidden),
            "self_attn.v_proj": (narrow, hidden), "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }  # fmt: skip
        yield {f"model.layers.{layer}.{name}.weight": size for name, size in linears.items()}
    outer = {"model.embed_tokens": (VOCABULARY, hidden), "model.norm": (hidden,), "lm_head": (VOCABULARY, hidden)}
    yield {f"{name}.weight": size for name, size in outer.items()}


def random_tensor(name: str, size: tuple[int, ...]) -> Tensor:
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(sum(name.encode()))
    # Row blocks: in float32 the whole would be twice as large as what is kept.
    rows = [torch.randn(len(part), size[1], generator=generator) for part in torch.empty(size[0]).split(1024)]
    return torch.cat([(part * 0.02).bfloat16() for part in rows])


def write_model(path: Path, shape: argparse.Namespace) -> None:
    """Write what is missing of the model, a shard at a time."""
    path.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    contents = list(shards(shape))
    for number, content in enumerate(contents, start=1):
        shard = path / f"model-{number:05d}-of-{len(contents):05d}.safetensors"
        places |= dict.fromkeys(content, shard.name)
        if not shard.exists():
            print(f"writing {shard.name}", flush=True)
            partial = shard.with_suffix(".partial")
            save_file({name: random_tensor(name, size) for name, size in content.items()}, partial, {"format": "pt"})
            partial.rename(shard)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (path / "config.json").write_text(json.dumps(described(shape), indent=2))


def job_on(directory: Path, shape: argparse.Namespace) -> QuantizationJob:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, VOCABULARY, (shape.samples, shape.sequence_length), generator=generator).tolist()
    return QuantizationJob(
        model=str(directory / "model"),
        output=str(directory / "quantized"),
        quantization=GPTQConfig(bits=4, group_size=128),
        calibration=CalibrationConfig(
            data=tuple(map(tuple, ids)), samples=shape.samples, sequence_length=shape.sequence_length
        ),
        checkpoint=CheckpointConfig(path=str(directory / "checkpoint")),
        devices=("cpu",),
    )


class MemoryWatch:
    """The largest resident memory of this process and its descendants, of the run and since it was last asked for."""

    def __init__(self) -> None:
        self.highest = self._since = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def take(self) -> int:
        """Bytes at the highest since the last call."""
        highest, self._since = self._since, 0
        return highest

    def _look(self) -> None:
        while not self._ended.wait(SECONDS_BETWEEN_LOOKS):
            now = sum(map(resident, descendants(os.getpid())))
            self.highest, self._since = max(self.highest, now), max(self._since, now)


def descendants(process: int) -> Iterator[int]:
    yield process
    for thread in Path(f"/proc/{process}/task").glob("*"):
        try:
            below = (thread / "children").read_text().split()
        except OSError:  # the thread has ended
            continue
        for child in map(int, below):
            yield from descendants(child)


def resident(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # it has ended
        return 0


@contextmanager
def figures_kept(file: Path, watch: MemoryWatch) -> Iterator[None]:
    """Append each layer's peak and its seconds to `file`, so that a resumed run shows those of the ones before."""
    began: tuple[int, float] | None = None

    def keep(layer: int) -> None:
        nonlocal began
        now = time.monotonic()
        if began is not None:
            line = {"layer": began[0], "peak_bytes": watch.take(), "seconds": round(now - began[1], 1)}
            with file.open("a") as out:
                out.write(json.dumps(line) + "\n")
        began = (layer, now)

    def listen(told: running.Progress) -> None:
        if began is None or told.layer != began[0]:
            keep(told.layer)

    with running.listening(listen):
        yield
    keep(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, metavar="DIRECTORY")
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--intermediate", type=int, default=28672)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--key-value-heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=128)
    shape = parser.parse_args()
    write_model(shape.directory / "model", shape)
    job = job_on(shape.directory, shape)
    plan = check(job, trial=True)
    print(plan.table(), flush=True)
    figures = shape.directory / "figures.jsonl"
    with MemoryWatch() as watch, figures_kept(figures, watch):
        report = quantize(job, verbose=False)
    print(summary(report))
    peaks = {line["layer"]: line for line in map(json.loads, figures.read_text().splitlines())}
    for receipt in report.layers:
        seen = peaks.get(receipt.index)
        peak = f"peak {seen['peak_bytes'] / 1e9:.2f} GB" if seen is not None else "peak not seen"
        print(f"layer {receipt.index + 1}: {receipt.seconds:.0f} s, {peak}, {receipt.size / 1e6:.1f} MB")
    print(f"peak of this run {watch.highest / 1e9:.2f} GB; estimated {plan.memory.host_peak_bytes / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
