"""Hidden states in files: the same bytes everywhere as in memory, less memory, and nothing left behind."""

import errno
import gc
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
import torch

from checkpoint_store.errors import CheckpointStopped, StorageFull
from checkpoint_store.tensors import continuation_payloads
from flows.quantize_model import quantize_model
from tasks import preflight, running
from tasks.hidden_states import SpilledTensor, loaded, payloads
from tasks.job import QuantizationJob
from tasks.quantization import AWQConfig, GPTQConfig
from tasks.quantize_layer import pack
from tasks.running import Progress
from tests.flow_jobs import contents, tiny_job
from tests.layer_runs import open_run, run_shards
from tests.tiny_families import write_tiny
from tests.tiny_models import TEXTS, write_tiny_llama

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("spilled") / "model", layers=3)


def batches(count: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3 + n, 8, generator=generator).bfloat16() for n in range(count)]


# The files -----------------------------------------------------------------------------------------------------------


def test_a_spilled_tensor_is_read_back_as_it_was(tmp_path: Path) -> None:
    for tensor in (*batches(), torch.randn(4, 6).t(), torch.zeros(0, 3)):
        spilled = SpilledTensor(tensor, tmp_path)
        assert torch.equal(spilled.load(), tensor)
        assert (spilled.shape, spilled.dtype, spilled.nbytes) == (tensor.shape, tensor.dtype, tensor.nbytes)


def test_a_file_goes_with_the_last_reference_and_a_publication_is_one(tmp_path: Path) -> None:
    held = [SpilledTensor(batch, tmp_path) for batch in batches()]
    published = payloads(held)
    assert len(list(tmp_path.iterdir())) == len(held)
    held = held[:1]
    gc.collect()
    assert len(list(tmp_path.iterdir())) == len(batches())
    assert b"".join(bytes(view) for payload in published for view in payload.views())
    del published
    gc.collect()
    assert len(list(tmp_path.iterdir())) == 1
    assert torch.equal(held[0].load(), batches()[0])


@pytest.mark.parametrize("chunk_bytes", [1, 150, 1 << 30])
def test_objects_of_a_continuation_have_the_same_bytes_from_files_as_from_memory(
    tmp_path: Path, chunk_bytes: int
) -> None:
    def chunked(tensors: list[torch.Tensor]) -> list:
        return continuation_payloads(tensors, chunk_bytes)

    with mock.patch("tasks.hidden_states.continuation_payloads", chunked):
        from_memory = payloads(batches())
        from_files = payloads([SpilledTensor(batch, tmp_path) for batch in batches()])
    assert [payload.size for payload in from_files] == [payload.size for payload in from_memory]
    for spilled, whole in zip(from_files, from_memory, strict=True):
        assert b"".join(map(bytes, spilled.views())) == b"".join(map(bytes, whole.views()))


def test_a_full_disk_is_told_with_the_ways_out(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        mock.patch("tasks.hidden_states.open", side_effect=full, create=True),
        pytest.raises(StorageFull, match="raise hidden_states_limit"),
    ):
        SpilledTensor(torch.zeros(8), tmp_path)


def test_a_kill_leaves_files_that_the_next_run_sweeps(model: Path, tmp_path: Path) -> None:
    program = """
import os, sys, torch
from pathlib import Path
from checkpoint_store.config import CheckpointConfig
from checkpoint_store.session import CheckpointSession
from tasks.hidden_states import SpilledTensor
session = CheckpointSession.open(Path(sys.argv[1]), CheckpointConfig(), {}, layer_count=3)
spilled = SpilledTensor(torch.zeros(8), session.scratch)
os.kill(os.getpid(), 9)
"""
    root = tmp_path / "checkpoint"
    done = subprocess.run([sys.executable, "-c", program, str(root)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    assert len(list(root.glob("attempt-*/hidden-*"))) == 1
    with open_run(tiny_job(model, tmp_path)) as run:
        run.session.publish(0, [], [], [])
        run.session.drain()
        assert list(root.glob("attempt-*/hidden-*")) == []


# A layer and a run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [("cpu",), ("cpu", "cpu")])
@pytest.mark.parametrize(
    "config",
    [GPTQConfig(group_size=32), GPTQConfig(group_size=32, true_sequential=False), AWQConfig(group_size=32)],
    ids=["gptq", "gptq at once", "awq"],
)
def test_a_layer_has_the_same_bytes_and_outputs_from_files(model: Path, tmp_path: Path, config, devices) -> None:
    results = []
    for spills in (False, True):
        with open_run(tiny_job(model, tmp_path, quantization=config, devices=devices, root=f"root-{spills}")) as run:
            run.spills = spills
            run.hidden = [run.held(loaded(hidden)) for hidden in run.hidden]
            work, errors = run_shards(run, 0)
            assert errors == []
            outputs = [loaded(work.outputs[batch]) for batch in range(len(run.hidden))]
            assert all(isinstance(output, SpilledTensor) == spills for output in work.outputs.values())
            results.append((pack(run, work), outputs))
    (memory, outputs), (files, spilled) = results
    assert memory.keys() == files.keys() and all(torch.equal(memory[name], files[name]) for name in memory)
    assert all(torch.equal(one, other) for one, other in zip(outputs, spilled, strict=True))


def test_a_mixture_of_experts_has_the_same_bytes_from_files(tmp_path: Path) -> None:
    source = write_tiny("qwen3_moe", tmp_path / "model")
    packed = []
    for spills in (False, True):
        with open_run(tiny_job(source, tmp_path, root=f"root-{spills}")) as run:
            run.spills = spills
            run.hidden = [run.held(loaded(hidden)) for hidden in run.hidden]
            work, errors = run_shards(run, 0)
            assert errors == []
            packed.append(pack(run, work))
    assert all(torch.equal(packed[0][name], packed[1][name]) for name in packed[0])


@pytest.mark.usefixtures("prefect_server")
def test_a_run_may_go_on_with_and_without_files_and_ends_in_the_same_bytes(model: Path, tmp_path: Path) -> None:
    whole = tiny_job(model, tmp_path / "whole")
    quantize_model(whole)
    job = tiny_job(model, tmp_path / "changed")
    held: list[type] = []

    def stop(told: Progress) -> None:
        held.append(type(running.current().hidden[0]))
        if told.layer < 2 and told.module == "mlp.down_proj":
            os.kill(os.getpid(), signal.SIGTERM)

    for limit in (0, None, 0):  # each but the last is stopped after a layer
        spilling = job.model_copy(update={"hidden_states_limit": limit})
        with running.listening(stop), suppress(CheckpointStopped):
            quantize_model(spilling)
        assert list(Path(job.checkpoint.path).glob("attempt-*")) == []
    assert [held[0], held[4], held[8]] == [SpilledTensor, torch.Tensor, SpilledTensor] and len(held) == 12
    assert contents(job.output) == contents(whole.output)


# Memory --------------------------------------------------------------------------------------------------------------


def wide_job(place: Path) -> QuantizationJob:
    source = write_tiny_llama(place / "model", layers=1, hidden_size=128, intermediate_size=512)
    text = place / "text.txt"
    text.write_text(" ".join(TEXTS) * 400)
    return tiny_job(
        source, place, calibration={"data": str(text), "samples": 96, "sequence_length": 256, "batch_size": 1}
    )


def test_a_layer_takes_less_memory_from_files(tmp_path: Path) -> None:
    job = wide_job(tmp_path)
    peaks = {}
    for spills in (False, True):
        with open_run(job) as run:
            run.spills = spills
            run.hidden = [run.held(loaded(hidden)) for hidden in run.hidden]
            tokens = sum(batch.input_ids.numel() for batch in run.calibration.batches)
            running.return_freed_memory()
            Path("/proc/self/clear_refs").write_text("5")
            before = resident("VmRSS")
            _, errors = run_shards(run, 0)
            assert errors == []
            peaks[spills] = resident("VmHWM") - before
    # The residual and the input of down_proj of all tokens, float32, against those of a sample.
    assert tokens > 20_000
    assert peaks[False] - peaks[True] > 0.7 * tokens * (128 + 512) * 4


def resident(name: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def test_the_plan_spills_beyond_the_limit_or_beyond_the_memory_and_needs_room_for_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tiny_job(model, tmp_path)
    plain = preflight.check(job)
    assert not plain.spills
    at_limit = preflight.check(job.model_copy(update={"hidden_states_limit": plain.samples_bytes}))
    beyond = preflight.check(job.model_copy(update={"hidden_states_limit": plain.samples_bytes - 1}))
    assert (at_limit.spills, beyond.spills) == (False, True)
    assert "in files in the checkpoint's directory" in beyond.table() and "in memory" in plain.table()
    assert beyond.spaces[0].needed_bytes - plain.spaces[0].needed_bytes == 2 * plain.continuation_bytes
    (tmp_path / "wide").mkdir()
    wide = wide_job(tmp_path / "wide")
    needed = preflight.check(wide).memory.host_peak_bytes
    monkeypatch.setattr("tasks.devices._host_memory_bytes", lambda: needed - 1)
    automatic = preflight.check(wide)
    assert automatic.spills and automatic.memory.host_peak_bytes < needed - 1
