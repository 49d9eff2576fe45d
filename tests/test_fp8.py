import json
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from loaded_exports import dense, load, logits, write_export
from pydantic import ValidationError
from safetensors.torch import load_file
from tiny_models import write_tiny_llama
from torch import Tensor, nn
from transformers import CompressedTensorsConfig

from tasks.formats import compressed_tensors, fp8_block
from tasks.methods import fp8
from tasks.methods.grid import WeightError
from tasks.quantization import FP8Config

GRANULARITIES = ("tensor", "row", "block")
CONFIGS = [
    *(FP8Config(granularity=granularity) for granularity in GRANULARITIES),
    FP8Config(granularity="block", checkpoint_format="fp8"),
    *(FP8Config(fp8_format="e5m2", granularity=granularity, checkpoint_format="fp8") for granularity in GRANULARITIES),
]
LAYOUTS = {"compressed-tensors": compressed_tensors, "fp8": fp8_block}
MANTISSA = {"e4m3": 3, "e5m2": 2}


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


def label(config: FP8Config) -> str:
    return f"{config.fp8_format}-{config.granularity}-{config.checkpoint_format}"


every_config = pytest.mark.parametrize("config", CONFIGS, ids=label)


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    """Two blocks by one, of any magnitude, some rows zero, some far larger."""
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    limit = 4 if dtype == torch.float16 else 37
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    weight_NK = torch.randn(256, 128, generator=generator) * 10.0 ** draw(st.integers(-limit, limit - 1))
    weight_NK[draw(st.integers(0, 255))] = 0
    weight_NK[draw(st.integers(0, 255))] *= 10.0 ** draw(st.integers(-3, 0))
    return weight_NK.to(dtype)


@given(weights(), st.sampled_from(CONFIGS))
@example(torch.zeros(128, 128), CONFIGS[1])
@example(torch.full((128, 128), 1e-45), CONFIGS[0])
@settings(deadline=None, max_examples=60)
def test_every_weight_is_within_half_a_step_of_its_float(weight_NK, config):
    rows = fp8.quantize_weight(weight_NK, config)
    scale_NK = fp8.spread(rows.scales_RC, weight_NK.shape).expand(weight_NK.shape)
    error_NK = (rows.dequantize() - weight_NK.float()).abs()
    # Half a step of a normal value is this share of it; below the normal range steps are all alike.
    smallest = torch.finfo(fp8.DTYPES[config.fp8_format]).smallest_normal
    share = 2.0 ** -(MANTISSA[config.fp8_format] + 1)
    step_NK = torch.maximum(weight_NK.float().abs(), scale_NK * smallest) * share
    assert bool((error_NK <= step_NK * (1 + 1e-6) + 2.0**-149).all())
    assert bool((rows.scales_RC >= fp8.SMALLEST_NORMAL).all()) and math.isfinite(rows.loss)


@given(weights(), st.sampled_from(CONFIGS))
@settings(deadline=None, max_examples=30)
def test_unpacking_a_packed_module_gives_its_rows(weight_NK, config):
    rows, layout = fp8.quantize_weight(weight_NK, config), LAYOUTS[config.checkpoint_format]
    again = layout.unpack(layout.pack("m", rows, config, None), "m", config)
    assert torch.equal(again.values_NK.view(torch.uint8), rows.values_NK.view(torch.uint8))
    assert torch.equal(again.scales_RC, rows.scales_RC)
    assert torch.equal(again.dequantize(), rows.dequantize())


@every_config
def test_zeros_come_back_as_exact_zeros(config):
    weight_NK = torch.randn(256, 256)
    weight_NK[7] = 0
    weight_NK[128:, :128] = 0
    dense_NK = fp8.quantize_weight(weight_NK, config).dequantize()
    assert not dense_NK[7].any() and not dense_NK[128:, :128].any()
    assert not fp8.quantize_weight(torch.zeros(128, 128), config).dequantize().any()


@every_config
def test_the_largest_weight_of_a_scale_is_reached(config):
    weight_NK = torch.randn(256, 256)
    rows = fp8.quantize_weight(weight_NK, config)
    largest = torch.finfo(fp8.DTYPES[config.fp8_format]).max
    # The scale is rounded up by less than 2^-7, so the largest value lies in the last binade.
    assert largest * (1 - 2**-6) <= float(rows.values_NK.float().abs().max()) <= largest


@every_config
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_reader_in_half_precision_holds_every_scale_exactly(config, dtype):
    scales_RC = fp8.quantize_weight(torch.randn(256, 256).to(dtype), config).scales_RC
    assert torch.equal(scales_RC.bfloat16().float(), scales_RC)


@every_config
@pytest.mark.parametrize("magnitude", [3e-7, 1e-5, 1.0, 6e4])
def test_a_float16_reader_holds_every_scale_of_a_float16_source_exactly(config, magnitude):
    weight_NK = (torch.rand(256, 256) * magnitude).half()
    scales_RC = fp8.quantize_weight(weight_NK, config).scales_RC
    assert torch.equal(scales_RC.half().float(), scales_RC)


@pytest.mark.parametrize("fp8_format", ["e4m3", "e5m2"])
def test_weights_are_saturated_before_the_cast(fp8_format, monkeypatch):
    """With scales that are far too small every value is the largest one, and none is infinite or NaN."""
    config = FP8Config(fp8_format=fp8_format, granularity="block", checkpoint_format="fp8")
    monkeypatch.setattr(fp8, "_scales", lambda absmax_RC, largest, floor: torch.full_like(absmax_RC, 1e-6))
    values_NK = fp8.quantize_weight(torch.full((128, 128), 3.0), config).values_NK
    assert bool((values_NK.float() == torch.finfo(fp8.DTYPES[fp8_format]).max).all())


@every_config
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_with_their_row(config, bad):
    weight_NK = torch.randn(128, 128)
    weight_NK[3, 5] = bad
    with pytest.raises(WeightError, match=r"row 3 \(one of 1\) holds NaN or infinite"):
        fp8.quantize_weight(weight_NK, config)


def test_a_weight_that_would_come_back_as_infinity_is_refused():
    weight_NK = torch.randn(128, 128)
    weight_NK[3, 5] = torch.finfo(torch.float32).max
    with pytest.raises(WeightError, match=r"row 3 \(one of 1\) holds a weight of magnitude 3.403e\+38"):
        fp8.quantize_weight(weight_NK, FP8Config())


@every_config
def test_the_loss_is_the_mean_squared_weight_error(config):
    weight_NK = torch.randn(128, 256)
    rows = fp8.quantize_weight(weight_NK, config)
    assert rows.loss == pytest.approx(float((rows.dequantize() - weight_NK).square().mean()), rel=1e-5)


def test_the_loss_of_huge_weights_is_a_number():
    assert 1e70 < fp8.quantize_weight(torch.randn(4, 8) * 1e37, FP8Config()).loss < 1e75


@every_config
def test_a_nan_byte_is_refused_with_the_modules_name(config):
    rows = fp8.quantize_weight(torch.randn(128, 128), config)
    rows.values_NK.view(torch.uint8)[3, 5] = 0x7F
    with pytest.raises(ValueError, match=r"`layers.7.up.weight` holds a NaN"):
        LAYOUTS[config.checkpoint_format].pack("layers.7.up", rows, config, None)


@every_config
def test_problems_are_reported_exactly_where_the_method_fails(config):
    layout = LAYOUTS[config.checkpoint_format]
    for out_features, in_features in ((128, 128), (256, 128), (192, 128), (128, 192), (7, 5)):
        weight_NK = torch.randn(out_features, in_features)
        found = layout.problems("m", in_features, out_features, config)
        assert bool(found) is (config.granularity == "block" and bool(out_features % 128 or in_features % 128))
        if found:
            assert all(problem.startswith("`m`: ") and "multiple of 128" in problem for problem in found)
            with pytest.raises(ValueError, match="must be multiples of 128"):
                fp8.quantize_weight(weight_NK, config)
        else:
            layout.pack("m", fp8.quantize_weight(weight_NK, config), config, None)


@pytest.mark.parametrize(
    "options, told",
    [
        ({"fp8_format": "e5m2"}, "e5m2 can't be written as compressed-tensors"),
        ({"checkpoint_format": "fp8"}, "e4m3 in blocks of 128 x 128 only, not per row"),
        ({"checkpoint_format": "fp8", "granularity": "tensor"}, "not per tensor"),
        ({"bits": 8}, "bits"),
    ],
)
def test_settings_that_no_reader_understands_are_refused(options, told):
    with pytest.raises(ValidationError, match=told):
        FP8Config(**options)


@every_config
def test_the_config_is_plain_json(config):
    written = LAYOUTS[config.checkpoint_format].quantization_config(config)
    assert json.loads(json.dumps(written)) == written


@every_config
def test_only_e5m2_asks_to_be_widened_as_it_is_loaded(config):
    """On a GPU transformers would take its bytes for e4m3; on a CPU, where these tests run, it always widens."""
    written = LAYOUTS[config.checkpoint_format].quantization_config(config)
    assert written.get("dequantize", False) is (config.fp8_format == "e5m2")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Every size a multiple of 128; biases, so that a lost one shows."""
    path = tmp_path_factory.mktemp("source") / "model"
    return write_tiny_llama(
        path, hidden_size=128, intermediate_size=256, key_value_heads=4, attention_bias=True, mlp_bias=True
    )


@pytest.fixture(params=CONFIGS, ids=label)
def export(request, source, tmp_path):
    config = request.param
    layout = LAYOUTS[config.checkpoint_format]
    return write_export(source, tmp_path / "export", layout, config, fp8.quantize_weight), layout, config


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")  # only how to load is passed
def test_transformers_reads_our_weights_exactly(export):
    """Dequantized as it loads them: asked for in compressed-tensors, all a CPU can do in the fine-grained layout."""
    output, layout, config = export
    options = {}
    if config.checkpoint_format == "compressed-tensors":
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    loaded = load(output, **options)
    assert set(loaded.classes.values()) == {nn.Linear}
    assert {tensor.dtype for tensor in loaded.tensors.values()} == {torch.float32}
    assert torch.equal(loaded.logits, logits(dense(output, layout, config)))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_transformers_computes_with_fp8_weights_and_activations(source, tmp_path, granularity):
    config = FP8Config(granularity=granularity)
    output = write_export(source, tmp_path / "export", compressed_tensors, config, fp8.quantize_weight)
    loaded = load(output)
    for name in loaded.classes:
        assert loaded.tensors[f"{name}.weight"].dtype == torch.float8_e4m3fn
        assert loaded.tensors[f"{name}.weight_scale"].dtype == torch.float32
    expected = dense(output, compressed_tensors, config)
    for name, module in expected.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(lambda _, inputs: (rounded_to_e4m3(inputs[0], granularity),))
    assert torch.equal(loaded.logits, logits(expected))


def rounded_to_e4m3(x_BTK: Tensor, granularity: str) -> Tensor:
    """Activations as readers round them: per token, or per 128 columns of a token."""
    grouped = x_BTK.unflatten(-1, (-1, 128)) if granularity == "block" else x_BTK
    scale = grouped.abs().amax(dim=-1, keepdim=True) / 448
    rounded = (grouped / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return rounded.reshape(x_BTK.shape)


@pytest.mark.parametrize("tied", [True, False])
def test_a_bfloat16_reader_computes_with_the_scales_of_the_file(tied, tmp_path):
    source = write_tiny_llama(tmp_path / "source", tied=tied, key_value_heads=1)
    output = write_export(source, tmp_path / "export", compressed_tensors, FP8Config(), fp8.quantize_weight)
    tensors = load_file(output / "model.safetensors")
    assert ("lm_head.weight" in tensors) is not tied
    loaded = load(output, torch.bfloat16)
    for name in loaded.classes:
        read = loaded.tensors[f"{name}.weight_scale"]
        assert read.dtype == torch.bfloat16 and torch.equal(read.float(), tensors[f"{name}.weight_scale"])
