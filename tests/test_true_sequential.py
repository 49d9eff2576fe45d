"""`true_sequential=False`: every module of a layer sees what the layer's own weights make, the next layer the quantized ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flows.quantize_model import quantize_model
from tasks.methods import gptq
from tasks.quantization import EoRAConfig, GPTQConfig
from tasks.running import Run
from tests.flow_jobs import LAYERS, contents, layers_run, tiny_job
from tests.layer_runs import assert_equal, finished_layer, open_run, run_shards
from tests.test_resume import stop_in_layer
from tests.tiny_families import write_tiny
from tests.tiny_models import write_tiny_llama

AT_ONCE = GPTQConfig(group_size=32, true_sequential=False)
IN_ORDER = GPTQConfig(group_size=32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", layers=LAYERS)


def plain_forward(run: Run, layer: Any) -> tuple[dict[str, list[Tensor]], list[Tensor]]:
    """What enters each linear of the layer, batch by batch, and what leaves the layer, by transformers' own forward."""
    inputs: dict[str, list[Tensor]] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, name=name: inputs.setdefault(name, []).append(args[0].reshape(-1, args[0].shape[-1]))
        )
        for name, module in layer.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    outputs = []
    for batch, hidden in enumerate(run.hidden):
        mask = run.calibration_batch(batch).attention_mask
        with torch.no_grad():
            leaving = layer(hidden.float(), **run.decoder.call_arguments(0, hidden.float(), mask))
        outputs.append(leaving[0] if isinstance(leaving, tuple) else leaving)
    for hook in hooks:
        hook.remove()
    return inputs, outputs


def test_modules_are_quantized_by_what_enters_them_in_the_unquantized_layer(model: Path, tmp_path: Path) -> None:
    """One sample a batch: no padding, which a plain forward would take for tokens."""
    calibration = {"batch_size": 1}
    with open_run(tiny_job(model, tmp_path, quantization=AT_ONCE, calibration=calibration)) as run:
        work, errors = run_shards(run, 0)
        assert errors == []
        layer = run.decoder.materialise(0, "cpu")
        inputs, _ = plain_forward(run, layer)
        expected = {}
        for name, seen in inputs.items():
            x_TK = torch.cat(seen).double()
            factor = gptq.factor_hessian(2 / len(x_TK) * x_TK.t() @ x_TK, AT_ONCE)
            expected[name] = gptq.quantize_rows(layer.get_submodule(name).weight, factor, AT_ONCE).codes_NK
            layer.get_submodule(name).weight.data.copy_(work.quantized[name].dequantize())
        _, outputs = plain_forward(run, layer)
        for batch, leaving in enumerate(outputs):
            assert torch.equal(work.outputs[batch], leaving.bfloat16()), "the next layer sees quantized weights"
    in_order, _ = finished_layer(model, tmp_path / "in-order", 1, quantization=IN_ORDER, calibration=calibration)
    for name, codes_NK in expected.items():
        assert (work.quantized[name].codes_NK == codes_NK).float().mean() > 0.999, name
    same = {
        name: bool((in_order.quantized[name].codes_NK == codes).float().mean() > 0.999)
        for name, codes in expected.items()
    }
    assert [name for name, is_same in same.items() if is_same] == [
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    ], "which come first in either order"  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_every_pool_size_gives_the_same_bytes(family: str, tmp_path: Path) -> None:
    model = write_tiny(family, tmp_path / "model")
    (one, packed), (other, packed_too) = (
        finished_layer(model, tmp_path, devices, quantization=AT_ONCE) for devices in (1, 3)
    )
    assert_equal(packed, packed_too)
    assert all(torch.equal(one.outputs[batch], other.outputs[batch]) for batch in one.outputs)


def test_an_adapter_is_made_from_the_inputs_of_the_unquantized_layer(model: Path, tmp_path: Path) -> None:
    job = tiny_job(model, tmp_path, quantization=AT_ONCE).model_copy(update={"adapter": EoRAConfig(rank=8)})
    with open_run(job) as run:
        work, errors = run_shards(run, 0)
    assert errors == [] and work.adapter is not None
    assert work.adapter.modules.keys() == work.quantized.keys()
    for name, made in work.adapter.modules.items():
        assert made.loss < work.quantized[name].loss, name


@pytest.mark.usefixtures("prefect_server")
def test_a_run_stopped_and_gone_on_with_ends_with_the_bytes_of_one_that_was_not(model: Path, tmp_path: Path) -> None:
    whole = tiny_job(model, tmp_path / "whole", quantization=AT_ONCE)
    quantize_model(whole)
    job = tiny_job(model, tmp_path / "stopped", quantization=AT_ONCE)
    stop_in_layer(job, 0)
    with layers_run() as ran:
        quantize_model(job)
    assert ran == [1, 2]
    assert contents(job.output) == contents(whole.output)
    with pytest.raises(ValueError, match="another job"):
        quantize_model(job.model_copy(update={"quantization": IN_ORDER}))
