"""Rules for modules through the real flow: cut short and resumed, packed as they say, loaded by independent programs."""

from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import CompressedTensorsConfig

from flows.quantize_model import quantize_model
from tasks.evaluate import dense_model
from tasks.formats import gptq as gptq_layout
from tasks.methods import rtn
from tasks.module_rules import ModuleConfigs
from tasks.output_directory import GGUF_FILE
from tasks.preflight import check
from tasks.quantization import AWQConfig, BitsAndBytesConfig, FP8Config, GGUFConfig, GPTQConfig, Quantization, RTNConfig
from tests.flow_jobs import Exports, contents, layers_run, tensors_of, tiny_job
from tests.layer_runs import assert_equal, finished_layer
from tests.loaded_exports import load, logits
from tests.test_clients import HALF_TOLERANCE, TINY_IDS, ask_client, assert_close_logits, assert_no_keys_astray
from tests.test_schemes import PowerCut, power_cut
from tests.tiny_families import write_tiny
from tests.tiny_models import write_tiny_llama

pytestmark = pytest.mark.usefixtures("prefect_server")

LAYERS = 3
SKIPPED = {r"-:.*0\.self_attn\.[qkv]_proj": {}, r"-:.*\.1\.mlp\.down_proj": {}}
WIDER = SKIPPED | {r".*mlp\.(gate|up)_proj": {"bits": 8, "group_size": 64}}
RULES = WIDER | {r".*o_proj": {"sym": False}}
PACKED = {"group_size": 32, "checkpoint_format": "compressed-tensors"}
CONFIGS: dict[str, Quantization] = {
    "gptq": GPTQConfig(group_size=32, dynamic=RULES | {r".*2\.mlp\.down": {"desc_act": True}}),
    "gptq at once": GPTQConfig(group_size=32, true_sequential=False, dynamic=RULES),
    "gptq as compressed-tensors": GPTQConfig(**PACKED, dynamic=WIDER),
    "rtn": RTNConfig(group_size=32, dynamic=RULES),
    "rtn as awq": RTNConfig(group_size=32, checkpoint_format="awq", dynamic=SKIPPED),
    "awq": AWQConfig(group_size=32, dynamic=SKIPPED),
    "awq as compressed-tensors": AWQConfig(**PACKED, sym=True, dynamic=SKIPPED),
    "fp8": FP8Config(dynamic=SKIPPED),
    "fp8 in blocks": FP8Config(granularity="block", checkpoint_format="fp8", dynamic=SKIPPED),
    "nf4": BitsAndBytesConfig(compute_dtype="float32", dynamic=SKIPPED),
    "gguf": GGUFConfig(
        quant_type="q4_0", dynamic=SKIPPED | {".*down_proj": {"quant_type": "q8_0"}, "lm_head": {"quant_type": "q5_0"}}
    ),
}
LEFT = [*(f"model.layers.0.self_attn.{name}_proj" for name in "qkv"), "model.layers.1.mlp.down_proj"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(
        tmp_path_factory.mktemp("model") / "tiny",
        layers=LAYERS, hidden_size=128, intermediate_size=256, key_value_heads=4, dtype=torch.float32,
    )  # fmt: skip


@pytest.fixture(scope="module")
def exports(model: Path, tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> Exports:
    return Exports(lambda name: tiny_job(model, tmp_path_factory.mktemp("whole"), quantization=CONFIGS[name]))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_with_rules_cut_short_and_resumed_ends_with_the_bytes_of_one_that_was_not(
    name: str, model: Path, exports: dict[str, Path], tmp_path: Path
) -> None:
    job = tiny_job(model, tmp_path, quantization=CONFIGS[name], devices=("cpu", "cpu"))
    with power_cut(1, 3), pytest.raises(PowerCut):
        quantize_model(job)
    with layers_run() as ran:
        quantize_model(job)
    assert sorted(ran) == [1, 2]
    assert contents(job.output) == contents(exports[name])


def test_other_rules_are_another_job_and_so_is_another_order_of_them(model: Path, tmp_path: Path) -> None:
    rules = {r".*down_proj": {"bits": 8}, r".*0\.mlp\.": {"bits": 2}}
    job = tiny_job(model, tmp_path, quantization=RTNConfig(group_size=32, dynamic=rules))
    quantize_model(job)
    for other in (dict(reversed(rules.items())), rules | {r"-:.*o_proj": {}}):
        changed = RTNConfig(group_size=32, dynamic=other)
        if other.keys() == rules.keys():
            changed = RTNConfig(group_size=32, dynamic={r".*0\.mlp\.": {"bits": 2}, r".*down_proj": {"bits": 8}})
        with pytest.raises(ValueError, match="another job"):
            quantize_model(job.model_copy(update={"quantization": changed}))


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "gguf"])
def test_what_is_left_as_it_is_has_the_bytes_of_the_source(name: str, model: Path, exports: dict[str, Path]) -> None:
    source, written = load_file(model / "model.safetensors"), tensors_of(exports[name])
    for module in LEFT:
        held = {full: tensor for full, tensor in written.items() if full.startswith(f"{module}.")}
        assert held.keys() == {f"{module}.weight"}
        assert held[f"{module}.weight"].equal(source[f"{module}.weight"])


def test_each_module_is_packed_by_the_first_rule_that_matches(model: Path, exports: dict[str, Path]) -> None:
    source, written = load_file(model / "model.safetensors"), tensors_of(exports["rtn"])
    configs, quantized = ModuleConfigs(CONFIGS["rtn"]), 0
    for name, weight in source.items():
        module = name.removesuffix(".weight")
        config = configs.of(module)
        if config is None or not module.endswith("_proj"):
            continue
        expected = rtn.quantize_rows(weight, config)
        unpacked = gptq_layout.unpack(written, module, config)
        assert unpacked.codes_NK.equal(expected.codes_NK) and unpacked.scales_NG.equal(expected.scales_NG), module
        quantized += 1
    assert quantized == 7 * LAYERS - len(LEFT)


def test_modules_with_one_input_and_several_rules_get_what_each_would_get_alone(model: Path, tmp_path: Path) -> None:
    """Settings that loaders do not see may differ among q, k and v, before which nothing in the first layer is quantized."""
    alone = {
        mse: finished_layer(model, tmp_path / str(mse), 1, quantization=GPTQConfig(group_size=32, mse=mse))[0].quantized
        for mse in (0.0, 2.4)
    }
    config = GPTQConfig(group_size=32, dynamic={".*k_proj": {"mse": 2.4}})
    (one, packed), (_, on_two) = (
        finished_layer(model, tmp_path / "mixed", devices, quantization=config) for devices in (1, 2)
    )
    assert_equal(packed, on_two)
    assert list(one.outcomes)[:2] == [("self_attn.q_proj", "self_attn.v_proj"), ("self_attn.k_proj",)]
    for name, mse in (("q", 0.0), ("k", 2.4), ("v", 0.0)):
        full = f"self_attn.{name}_proj"
        assert torch.equal(one.quantized[full].codes_NK, alone[mse][full].codes_NK), name
        assert not torch.equal(one.quantized[full].codes_NK, alone[2.4 - mse][full].codes_NK), name


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_true_sequential_makes_no_difference_where_nothing_is_quantized_before(family: str, tmp_path: Path) -> None:
    model = write_tiny(family, tmp_path / "model")
    rules = {"+:" + r".*self_attn\.[qkv]_proj": {}, "-:.*": {}}
    one, other = (
        finished_layer(
            model, tmp_path, 1, quantization=GPTQConfig(group_size=32, true_sequential=in_order, dynamic=rules)
        )
        for in_order in (True, False)
    )
    assert len(one[0].quantized) == 3 and one[1].keys() == other[1].keys()
    assert all(one[1][name].equal(other[1][name]) for name in one[1])
    assert all(torch.equal(one[0].outputs[batch], other[0].outputs[batch]) for batch in one[0].outputs)


def test_a_layer_that_is_left_whole_hands_on_what_the_source_computes(model: Path, tmp_path: Path) -> None:
    job = tiny_job(model, tmp_path, quantization=GPTQConfig(group_size=32, dynamic={r"-:model\.layers\.0\.": {}}))
    report = quantize_model(job)
    assert [len(layer.modules) for layer in report.layers] == [0, 7, 7]
    assert report.layers[0].loss == 0.0
    written, source = tensors_of(Path(job.output)), load_file(model / "model.safetensors")
    assert all(written[name].equal(source[name]) for name in source if name.startswith("model.layers.0."))


# What other programs make of the exports ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")  # only how to load is passed
@pytest.mark.parametrize(
    "name", ["gptq as compressed-tensors", "awq as compressed-tensors", "fp8", "fp8 in blocks", "nf4"]
)
def test_transformers_reads_what_is_quantized_and_what_is_not(
    name: str, exports: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: False)
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if name == "fp8" else {}
    loaded = load(exports[name], **options)
    assert torch.equal(loaded.logits, logits(dense_model(exports[name])))
    if name == "nf4":
        plain = {module for module, kind in loaded.classes.items() if kind is nn.Linear}
        assert plain == set(LEFT)


def test_transformers_refuses_several_schemes_with_zero_points_as_preflight_says(model: Path, tmp_path: Path) -> None:
    job = tiny_job(model, tmp_path, quantization=RTNConfig(**PACKED, dynamic=RULES))
    assert any("several schemes with zero points" in note for note in check(job).notes)
    output = Path(quantize_model(job).output)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load(output)
    assert logits(dense_model(output)).isfinite().all()


def test_a_gguf_file_has_the_types_of_the_rules(exports: dict[str, Path]) -> None:
    held = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(exports["gguf"] / GGUF_FILE).tensors}
    assert held["output.weight"] == "Q5_0" and held["token_embd.weight"] == "Q4_0"
    assert [held[f"blk.{i}.ffn_down.weight"] for i in range(LAYERS)] == ["Q8_0", "F16", "Q8_0"]
    assert [held[f"blk.{i}.attn_q.weight"] for i in range(LAYERS)] == ["F16", "Q4_0", "Q4_0"]


def test_exports_with_rules_are_close_to_their_source(model: Path, exports: dict[str, Path]) -> None:
    expected: Any = logits(dense_model(model))
    for name in CONFIGS:
        found = logits(dense_model(exports[name]))
        assert float((found - expected).norm() / expected.norm()) < 0.5, name


@pytest.mark.parametrize("quant_type", ["nf4", "int8"])
def test_experts_that_transformers_does_not_load_are_told_and_left_by_a_rule(
    quant_type: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: False)
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "head_dim": 32, "num_hidden_layers": 1}
    model = write_tiny("qwen3_moe", tmp_path / "model", mlp_only_layers=[], dtype=torch.float32, **sizes)
    ids = torch.arange(60).reshape(2, 30) * 37 % 311
    for place, dynamic in (("whole", {}), ("left", {"-:.*experts": {}})):
        quantization = BitsAndBytesConfig(quant_type=quant_type, compute_dtype="float32", dynamic=dynamic)
        job = tiny_job(model, tmp_path / place, quantization=quantization).model_copy(update={"calibration": None})
        told = any("rule `-:.*experts`" in note for note in check(job).notes)
        assert told == (place == "whole")
        quantize_model(job)
        try:
            loaded, info = AutoModelForCausalLM.from_pretrained(
                job.output, dtype=torch.float32, output_loading_info=True
            )
        except RuntimeError as error:
            assert told and "ignore_mismatched_sizes" in str(error)
            continue
        assert bool(info["unexpected_keys"]) == told
        if not told:
            with torch.no_grad():
                found, expected = loaded.eval()(ids).logits, dense_model(job.output)(ids).logits
            assert float((found - expected).norm() / expected.norm()) < (1e-6 if quant_type == "nf4" else 0.3)


CLIENT_RULES: dict[str, tuple[str, Quantization]] = {
    "gptqmodel-widths": ("gptqmodel", CONFIGS["gptq"]),
    "gptqmodel-left": ("gptqmodel", RTNConfig(group_size=32, dynamic=SKIPPED)),
    "transformers-left": ("transformers", RTNConfig(group_size=32, dynamic=SKIPPED)),
    "awq-left": ("transformers", RTNConfig(group_size=64, checkpoint_format="awq", dynamic=SKIPPED)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIENT_RULES)
def test_gptqmodel_and_transformers_read_the_rules(name: str, tmp_path: Path) -> None:
    """Of a source in bfloat16, which GPTQModel takes for float16 without a loss."""
    loader, quantization = CLIENT_RULES[name]
    model = write_tiny_llama(tmp_path / "model", layers=LAYERS, hidden_size=128, intermediate_size=256)
    output = Path(quantize_model(tiny_job(model, tmp_path, quantization=quantization)).output)
    loaded = ask_client(loader, {name: output}, TINY_IDS, tmp_path)[name]
    kinds = {module: kind.rpartition(".")[2] for module, kind in loaded.answer["classes"].items()}
    assert {module for module, kind in kinds.items() if kind == "Linear"} == set(LEFT)
    assert_close_logits(loaded, name, HALF_TOLERANCE)
    if loader == "transformers":
        assert_no_keys_astray(loaded)
