"""FP8 sources through the whole flow: stopped, gone on with, exported as their bfloat16 twins are, and loaded."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flows.quantize_model import quantize_model
from tasks.evaluate import dense_model
from tasks.job import QuantizationJob
from tasks.models.source import SourceModel
from tasks.quantization import FP8Config, GPTQConfig
from tests.flow_jobs import contents, tiny_job
from tests.fp8_models import write_fp8, write_wide
from tests.layer_runs import assert_equal
from tests.test_family_flow import FURTHER, difference, exported, stopped_and_whole
from tests.tiny_families import write_tiny
from tests.tiny_models import write_tiny_llama

pytestmark = pytest.mark.usefixtures("prefect_server")

EIGHT_BITS = GPTQConfig(bits=8, group_size=32)
IDS = torch.arange(60).reshape(2, 30) * 37 % 311


def quantized(model: Path, place: Path, **options: Any) -> QuantizationJob:
    job = tiny_job(model, place, **options)
    quantize_model(job)
    return job


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_an_fp8_source_is_stopped_gone_on_with_and_exported_as_its_twin(family: str, tmp_path: Path) -> None:
    options = {"num_nextn_predict_layers": 1} if family == "deepseek_v3" else {}
    sizes = {"hidden_size": 160, "intermediate_size": 192} if family == "llama" else {}
    dense = write_tiny(family, tmp_path / "dense", **options, **sizes)
    also: tuple[str, ...] = ("lm_head",)
    if options:  # a layer for further tokens, which is carried through
        save_file(load_file(dense / "model.safetensors") | FURTHER, dense / "model.safetensors", {"format": "pt"})
        also += ("model.layers.3.eh_proj", "model.layers.3.mlp.gate")
    wide = write_fp8(dense, tmp_path / "fp8", also=also)
    job = stopped_and_whole(tmp_path / "fp8", tmp_path, EIGHT_BITS)
    twin = quantized(write_wide(dense, tmp_path / "wide", wide), tmp_path / "twin", quantization=EIGHT_BITS)
    assert contents(job.output) == contents(twin.output)
    tensors = exported(job)
    assert not any(name.endswith("weight_scale_inv") or t.dtype == torch.float8_e4m3fn for name, t in tensors.items())
    for name in ("model.norm", *also):
        assert tensors[f"{name}.weight"].equal(wide[f"{name}.weight"])
    config = json.loads((Path(job.output) / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "gptq" and config["dtype"] == "bfloat16"
    assert difference(job.output, tmp_path / "wide") < 0.15


@pytest.mark.parametrize("layout", ["fp8", "compressed-tensors"])
def test_our_own_fp8_export_is_a_source_of_another_run(layout: Any, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model", hidden_size=128, intermediate_size=256, key_value_heads=4)
    granularity = "block" if layout == "fp8" else "row"
    fp8 = quantized(model, tmp_path / "8", quantization=FP8Config(granularity=granularity, checkpoint_format=layout))
    job = quantized(Path(fp8.output), tmp_path / "4", quantization=GPTQConfig(group_size=32))
    wide, source = dense_model(fp8.output, torch.bfloat16).state_dict(), SourceModel.open(fp8.output)
    assert_equal(source.load(source.tensors), wide)
    twin = write_wide(model, tmp_path / "wide", source.load(source.tensors))
    assert_equal(exported(job), exported(quantized(twin, tmp_path / "twin", quantization=GPTQConfig(group_size=32))))
    with torch.no_grad():
        logits = [dense_model(path)(IDS).logits for path in (job.output, model)]
    assert float((logits[0] - logits[1]).norm() / logits[1].norm()) < 0.5
