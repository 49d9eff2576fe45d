"""The benchmark of large layers: its model is one that can be quantized, and its figures outlast a resumed run."""

import argparse
import json
import time
from pathlib import Path
from unittest import mock

from benchmarks.large_layers import MemoryWatch, figures_kept, job_on, shards, write_model
from tasks import running
from tasks.preflight import check

SHAPE = argparse.Namespace(
    hidden=256, intermediate=512, heads=4, key_value_heads=2, layers=2, samples=8, sequence_length=32
)


def test_the_model_is_written_a_layer_per_shard_and_passes_the_preflight(tmp_path: Path) -> None:
    write_model(tmp_path / "model", SHAPE)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == len(list(shards(SHAPE))) == 3
    plan = check(job_on(tmp_path, SHAPE))
    assert (plan.layer_count, plan.calibration_tokens) == (2, 8 * 32)
    # What is there is not written again.
    with mock.patch("benchmarks.large_layers.save_file", side_effect=AssertionError):
        write_model(tmp_path / "model", SHAPE)


def test_each_layer_leaves_its_figures(tmp_path: Path) -> None:
    figures = tmp_path / "figures.jsonl"
    with MemoryWatch() as watch:
        while not watch.highest:
            time.sleep(0.01)
        with figures_kept(figures, watch):
            for layer in (1, 1, 2):
                for listener in list(running._listeners):
                    listener(running.Progress(layer, layer, 3, "module", None, None))
    kept = [json.loads(line) for line in figures.read_text().splitlines()]
    assert [line["layer"] for line in kept] == [1, 2]
    assert kept[0]["peak_bytes"] > 50e6  # torch alone takes more
