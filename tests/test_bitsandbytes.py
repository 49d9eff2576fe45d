import json
import math
import sys
from pathlib import Path

import bitsandbytes
import pytest
import torch
from bitsandbytes import functional
from hypothesis import example, given, settings
from hypothesis import strategies as st
from loaded_exports import dense, load, logits, relative_difference, write_export
from safetensors.torch import load_file, save
from tiny_models import write_tiny_llama
from torch import Tensor

from tasks.formats import bitsandbytes as layout
from tasks.methods import bitsandbytes as method
from tasks.methods.grid import WeightError
from tasks.quantization import BitsAndBytesConfig

# compute_dtype float32: the tests compare with a float32 model.
CONFIGS = {
    "nf4": BitsAndBytesConfig(double_quant=False, compute_dtype="float32"),
    "nf4-double": BitsAndBytesConfig(compute_dtype="float32"),
    "fp4": BitsAndBytesConfig(quant_type="fp4", double_quant=False, compute_dtype="float32"),
    "fp4-double": BitsAndBytesConfig(quant_type="fp4", compute_dtype="float32"),
    "int8": BitsAndBytesConfig(quant_type="int8"),
}
FOUR_BIT = {name: config for name, config in CONFIGS.items() if name != "int8"}
# Readers of int8 round each linear's output to float16, which moves some of the next one's rounded inputs by a step.
INT8_TOLERANCE = 2e-2

every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
every_four_bit = pytest.mark.parametrize("config", FOUR_BIT.values(), ids=FOUR_BIT)


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    """Any size, also odd ones; any magnitude; some rows zero, some smaller."""
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    limit = 3 if dtype == torch.float16 else 30
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = draw(st.integers(1, 20)), draw(st.integers(1, 150))
    weight_NK = torch.randn(shape, generator=generator) * 10.0 ** draw(st.integers(-limit, limit))
    weight_NK[draw(st.integers(0, shape[0] - 1))] *= draw(st.sampled_from([0.0, 0.1, 1.0]))
    return weight_NK.to(dtype)


@given(weights(), st.sampled_from(list(FOUR_BIT.values())))
@example(torch.zeros(3, 7), FOUR_BIT["nf4-double"])
@example(torch.ones(4, 64), FOUR_BIT["fp4-double"])
@settings(deadline=None, max_examples=60)
def test_we_read_4_bit_weights_as_the_library_does(weight_NK, config):
    rows = method.quantize_weight(weight_NK, config)
    packed = layout.pack("m", rows, config, None)
    stats = {name.removeprefix("m.weight."): tensor for name, tensor in packed.items() if name != "m.weight"}
    state = functional.QuantState.from_dict(stats, device=torch.device("cpu"))
    assert state.shape == weight_NK.shape
    # As one row: on CPUs with AVX-512 it misreads blocks that run on across rows (see the next test).
    state.shape = (1, 2 * len(packed["m.weight"]))
    theirs = functional.dequantize_4bit(packed["m.weight"], state).flatten()[: weight_NK.numel()]
    assert theirs.dtype == weight_NK.dtype
    assert torch.equal(rows.dequantize().to(theirs.dtype), theirs.reshape(weight_NK.shape))
    assert math.isfinite(rows.loss)


@every_four_bit
def test_sizes_that_have_no_problems_are_read_right_as_they_are(config):
    for out_features, in_features in ((32, 64), (64, 192), (96, 128)):
        assert layout.problems("m", in_features, out_features, config) == []
        rows = method.quantize_weight(torch.randn(out_features, in_features), config)
        packed = layout.pack("m", rows, config, None)
        stats = {name.removeprefix("m.weight."): tensor for name, tensor in packed.items() if name != "m.weight"}
        state = functional.QuantState.from_dict(stats, device=torch.device("cpu"))
        assert torch.equal(rows.dequantize(), functional.dequantize_4bit(packed["m.weight"], state))


@given(weights())
@settings(deadline=None, max_examples=30)
def test_we_read_int8_weights_as_the_library_does(weight_NK):
    weight_NK = weight_NK.clamp(-6e4, 6e4)
    rows = method.quantize_weight(weight_NK, CONFIGS["int8"])
    theirs_NK = functional.int8_vectorwise_dequant(rows.codes_NK, rows.absmax_N)
    torch.testing.assert_close(rows.dequantize(), theirs_NK, rtol=1e-6, atol=0)  # they multiply by a rounded 1/127
    step_N1 = rows.absmax_N[:, None] / 127
    assert bool(((rows.dequantize() - weight_NK.half().float()).abs() <= step_N1 * 0.501).all())


@given(weights(), st.sampled_from(list(CONFIGS.values())))
@settings(deadline=None, max_examples=30)
def test_unpacking_a_packed_module_gives_its_rows(weight_NK, config):
    if config.quant_type == "int8":
        weight_NK = weight_NK.clamp(-6e4, 6e4)
    rows = method.quantize_weight(weight_NK, config)
    packed = layout.pack("m", rows, config, None)
    again = layout.unpack(packed, "m", config)
    assert torch.equal(again.dequantize(), rows.dequantize())
    assert save(layout.pack("m", again, config, None)) == save(packed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_names_and_bytes_are_those_of_the_librarys_own_layer(quant_type, dtype):
    weight_NK = torch.randn(8, 96).to(dtype)
    config = BitsAndBytesConfig(quant_type=quant_type, double_quant=False)
    ours = layout.pack("m", method.quantize_weight(weight_NK, config), config, None)
    layer = bitsandbytes.nn.Linear4bit(96, 8, bias=False, quant_type=quant_type, compress_statistics=False)
    layer.weight = bitsandbytes.nn.Params4bit(weight_NK, quant_type=quant_type, compress_statistics=False)
    theirs = layer.to("cpu").state_dict(prefix="m.")
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_double_quantization_differs_from_the_librarys_by_how_its_mean_is_summed(quant_type):
    weight_NK = torch.randn(64, 1024)
    config = BitsAndBytesConfig(quant_type=quant_type)
    ours = layout.pack("m", method.quantize_weight(weight_NK, config), config, None)
    layer = bitsandbytes.nn.Linear4bit(1024, 64, bias=False, quant_type=quant_type)
    layer.weight = bitsandbytes.nn.Params4bit(weight_NK, quant_type=quant_type)
    theirs = layer.to("cpu").state_dict(prefix="m.")
    assert {name: (tensor.dtype, tensor.ndim) for name, tensor in ours.items()} == {
        name: (tensor.dtype, tensor.ndim) for name, tensor in theirs.items()
    }
    state = f"m.weight.quant_state.bitsandbytes__{quant_type}"
    our_state, their_state = (json.loads(bytes(tensors[state].tolist())) for tensors in (ours, theirs))
    assert list(our_state) == list(their_state)
    assert our_state.pop("nested_offset") == pytest.approx(their_state.pop("nested_offset"), rel=1e-6)
    assert our_state == their_state
    assert torch.equal(ours["m.weight"], theirs["m.weight"])
    torch.testing.assert_close(ours["m.weight.nested_absmax"], theirs["m.weight.nested_absmax"], rtol=1e-5, atol=0)
    assert (ours["m.weight.absmax"] != theirs["m.weight.absmax"]).float().mean() < 0.01


def test_int8_names_and_bytes_are_those_of_the_librarys_own_layer():
    weight_NK = torch.randn(8, 96).bfloat16()
    ours = layout.pack("m", method.quantize_weight(weight_NK, CONFIGS["int8"]), CONFIGS["int8"], None)
    layer = bitsandbytes.nn.Linear8bitLt(96, 8, bias=False, has_fp16_weights=False)
    layer.weight = bitsandbytes.nn.Int8Params(weight_NK, requires_grad=False)
    theirs = layer.to("cpu").state_dict(prefix="m.")
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name


@every_config
def test_bytes_do_not_depend_on_threads(config):
    """Large enough for torch to split the library's own mean."""
    weight_NK = torch.randn(1024, 4096)
    threads, files = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            rows = method.quantize_weight(weight_NK, config)
            files.append(save(layout.pack("m", rows, config, None)))
    finally:
        torch.set_num_threads(threads)
    assert files[0] == files[1] == files[2]


@every_config
def test_zeros_come_back_as_exact_zeros(config):
    weight_NK = torch.randn(8, 128)
    weight_NK[1] = 0
    weight_NK[2, :64] = 0
    dense_NK = method.quantize_weight(weight_NK, config).dequantize()
    assert not dense_NK[1].any() and not dense_NK[2, :64].any()
    assert not method.quantize_weight(torch.zeros(5, 9), config).dequantize().any()


@every_four_bit
@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
def test_mostly_zero_matrices_are_not_refused(config, share):
    """Pruned channels: blocks of zeros are no small magnitudes that double quantization would lose."""
    weight_NK = torch.randn(40, 128)
    weight_NK[: int(40 * share)] = 0
    rows = method.quantize_weight(weight_NK, config)
    assert not rows.dequantize()[: int(40 * share)].any()
    assert float(rows.losses_N.max()) <= 0.04  # fp4 is the coarser one


@every_config
@pytest.mark.parametrize("magnitude", [1e-4, 1e-8, 1e-20, 1e-38, 1e-44])
def test_tiny_weights_stay_finite_and_no_farther_than_a_step(config, magnitude):
    weight_NK = torch.rand(8, 128) * magnitude
    rows = method.quantize_weight(weight_NK, config)
    error = float((rows.dequantize() - weight_NK).abs().max())
    assert error <= max(magnitude * 0.17, 2.0**-24 if config.quant_type == "int8" else 1e-38)
    layout.pack("m", rows, config, None)


@pytest.mark.parametrize("config", [FOUR_BIT["nf4"], FOUR_BIT["fp4"]])
def test_one_huge_weight_costs_its_own_block_only(config):
    weight_NK = torch.randn(8, 128)
    expected_NK = method.quantize_weight(weight_NK, config).dequantize()
    weight_NK[3, 70] = 1e37
    rows = method.quantize_weight(weight_NK, config)
    found_NK = rows.dequantize()
    assert found_NK[3, 70] == pytest.approx(1e37) and math.isfinite(rows.loss)
    found_NK[3, 64:] = expected_NK[3, 64:]
    assert torch.equal(found_NK, expected_NK)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_one_huge_weight_is_refused_where_double_quantization_would_spread_it(quant_type):
    weight_NK = torch.randn(8, 128)
    weight_NK[3, 70] = 1e37
    with pytest.raises(WeightError, match="set double_quant to false"):
        method.quantize_weight(weight_NK, BitsAndBytesConfig(quant_type=quant_type))


@pytest.mark.parametrize("factor", [1.0, 30.0, 1000.0])
def test_outliers_of_real_models_are_not_refused(factor):
    weight_NK = torch.randn(256, 1024)
    weight_NK[3, 70] *= factor
    weight_NK[9] *= 1e-6
    method.quantize_weight(weight_NK, BitsAndBytesConfig())


def test_int8_weights_beyond_float16_are_refused():
    weight_NK = torch.randn(8, 128)
    weight_NK[3, 70] = 7e4
    with pytest.raises(WeightError, match=r"row 3 holds a weight of magnitude 7e\+04"):
        method.quantize_weight(weight_NK, CONFIGS["int8"])


def test_a_weight_that_would_come_back_as_infinity_is_refused():
    magnitudes = torch.full((256,), 65504.0)
    magnitudes[:80] = 30000  # the 8-bit code of the larger ones stands for slightly more than they are
    weight_NK = magnitudes.repeat_interleave(64).reshape(4, -1).half()
    with pytest.raises(WeightError, match=r"torch\.float16 can't hold"):
        method.quantize_weight(weight_NK, BitsAndBytesConfig())


@every_config
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_with_their_row(config, bad):
    weight_NK = torch.randn(8, 128)
    weight_NK[3, 5] = bad
    with pytest.raises(WeightError, match=r"row 3 \(one of 1\) holds NaN or infinite"):
        method.quantize_weight(weight_NK, config)


def test_a_dtype_that_the_library_does_not_know_is_refused():
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        method.quantize_weight(torch.randn(8, 128).double(), CONFIGS["nf4"])


@every_config
def test_the_loss_is_the_mean_squared_weight_error(config):
    weight_NK = torch.randn(8, 128)
    rows = method.quantize_weight(weight_NK, config)
    assert rows.loss == pytest.approx(float((rows.dequantize() - weight_NK).square().mean()), rel=1e-5)


def test_a_missing_library_is_told_with_the_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ImportError, match=r"pip install 'prefect-quantize\[bitsandbytes\]'"):
        method.quantize_weight(torch.randn(8, 128), CONFIGS["nf4"])


def test_rows_of_another_type_and_broken_values_are_refused_with_the_modules_name():
    rows = method.quantize_weight(torch.randn(8, 128), CONFIGS["nf4"])
    with pytest.raises(ValueError, match=r"`layers\.7\.up`: its codes are nf4, but the config says fp4"):
        layout.pack("layers.7.up", rows, CONFIGS["fp4"], None)
    rows.absmax_B[3] = float("nan")
    with pytest.raises(ValueError, match=r"`layers.7.up.weight.absmax` holds a NaN"):
        layout.pack("layers.7.up", rows, CONFIGS["nf4"], None)


def test_problems_name_the_module_the_size_and_the_client():
    (problem,) = layout.problems("layers.0.q", 96, 64, CONFIGS["nf4"])
    assert (
        problem.startswith("`layers.0.q`: in_features 96 is not a multiple of 64") and "bitsandbytes 0.50.2" in problem
    )
    (problem,) = layout.problems("layers.0.q", 64, 48, CONFIGS["fp4"])
    assert (
        problem.startswith("`layers.0.q`: out_features 48 is not a multiple of 32") and "bitsandbytes 0.50.2" in problem
    )
    assert layout.problems("layers.0.q", 65, 63, CONFIGS["int8"]) == []
    assert layout.problems("layers.0.q", 576, 192, CONFIGS["nf4"]) == []


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("source") / "model"
    # transformers leaves what is not quantized in the dtype of the file here, whatever dtype is asked for.
    return write_tiny_llama(path, intermediate_size=192, attention_bias=True, mlp_bias=True, dtype=torch.float32)


@every_four_bit
def test_transformers_reads_our_4_bit_weights_exactly(config, source, tmp_path, monkeypatch):
    """With the client's plain CPU kernels: where a CPU has AVX512-BF16 it computes in bfloat16, as the next test sees."""
    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: False)
    output = write_export(source, tmp_path / "export", layout, config, method.quantize_weight)
    loaded = load(output)
    assert set(loaded.classes.values()) == {bitsandbytes.nn.Linear4bit}
    for name in loaded.classes:
        assert loaded.tensors[f"{name}.weight"].dtype == torch.uint8
    assert torch.equal(loaded.logits, logits(dense(output, layout, config)))


@pytest.mark.parametrize("tied", [True, False])
def test_a_bfloat16_reader_is_off_by_its_own_rounding_only(tied, tmp_path):
    source = write_tiny_llama(tmp_path / "source", tied=tied)
    config = BitsAndBytesConfig()
    output = write_export(source, tmp_path / "export", layout, config, method.quantize_weight)
    expected = logits(dense(output, layout, config))
    rounded = logits(dense(output, layout, config, torch.bfloat16))
    read = load(output, torch.bfloat16).logits
    assert relative_difference(read, expected) < 2 * relative_difference(rounded, expected)


def test_transformers_computes_with_our_int8_weights(source, tmp_path):
    config = CONFIGS["int8"]
    output = write_export(source, tmp_path / "export", layout, config, method.quantize_weight)
    loaded = load(output)
    assert set(loaded.classes.values()) == {bitsandbytes.nn.Linear8bitLt}
    tensors = load_file(output / "model.safetensors")
    for name in loaded.classes:
        assert torch.equal(loaded.tensors[f"{name}.weight"], tensors[f"{name}.weight"])
    expected = dense(output, layout, config)
    for name, module in expected.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(lambda _, inputs: (rounded_to_int8(inputs[0]),))
    assert relative_difference(loaded.logits, logits(expected)) < INT8_TOLERANCE


def rounded_to_int8(x_BTK: Tensor) -> Tensor:
    """Activations as readers round them, per token; the tiny model has none beyond the threshold that spares outliers."""
    x_BTK = x_BTK.half()
    absmax = x_BTK.abs().amax(dim=-1, keepdim=True).float()
    return (x_BTK * (127 / absmax)).round() * absmax / 127
