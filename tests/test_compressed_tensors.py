import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import pack_to_int32
from compressed_tensors.quantization import QuantizationConfig
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded_exports import dense, load, logits, relative_difference, write_export
from pydantic import ValidationError
from tiny_models import write_tiny_llama
from torch import Tensor, nn

from tasks.formats import compressed_tensors as layout
from tasks.formats import gptq as gptq_layout
from tasks.formats.compressed_tensors import pack, problems, quantization_config, unpack
from tasks.methods import fp8, gptq, rtn
from tasks.methods.grid import QuantizedRows
from tasks.methods.hessian import HessianSum, factor_hessian
from tasks.quantization import FP8Config, GPTQConfig, RTNConfig

FORMAT = "compressed-tensors"
BITS = (4, 8)


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


def config_of(**options) -> RTNConfig:
    return RTNConfig(**({"group_size": 32, "checkpoint_format": FORMAT} | options))


def packable(**options) -> tuple[QuantizedRows, RTNConfig]:
    config = config_of(**options)
    return rtn.quantize_rows(torch.randn(32, 64), config), config


@st.composite
def row_sets(draw: st.DrawFn) -> tuple[RTNConfig, QuantizedRows]:
    bits, sym = draw(st.sampled_from(BITS)), draw(st.booleans())
    groups, size = draw(st.integers(1, 4)), 8 * draw(st.integers(1, 4))
    out_features = 8 * draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    zeros_NG = torch.full((out_features, groups), 2 ** (bits - 1))
    if not sym:
        zeros_NG = torch.randint(0, 2**bits, (out_features, groups), generator=generator)
    return config_of(bits=bits, sym=sym, group_size=size), QuantizedRows(
        torch.randint(0, 2**bits, (out_features, groups * size), generator=generator).to(torch.uint8),
        (torch.rand(out_features, groups, generator=generator) + 0.01).half(),
        zeros_NG.to(torch.int32),
        torch.arange(groups, dtype=torch.int32).repeat_interleave(size),
        torch.zeros(out_features),
    )


@given(row_sets())
@settings(deadline=None)
def test_unpacking_a_packed_module_gives_its_rows(case):
    config, rows = case
    again = unpack(pack("m", rows, config, None), "m", config)
    for field in ("codes_NK", "scales_NG", "zeros_NG", "g_idx_K"):
        assert torch.equal(getattr(again, field), getattr(rows, field))
        assert getattr(again, field).dtype == getattr(rows, field).dtype
    assert torch.equal(again.dequantize(), rows.dequantize())


@given(row_sets())
@settings(deadline=None)
def test_packing_gives_the_bytes_of_the_compressed_tensors_package(case):
    config, rows = case
    packed = pack("m", rows, config, None)
    middle = 2 ** (config.bits - 1)
    signed_NK = (rows.codes_NK.int() - middle).to(torch.int8)
    assert torch.equal(packed["m.weight_packed"], pack_to_int32(signed_NK, config.bits))
    assert packed["m.weight_shape"].tolist() == list(rows.codes_NK.shape)
    assert packed["m.weight_shape"].dtype == torch.int64
    assert ("m.weight_zero_point" in packed) is not config.sym
    if not config.sym:
        signed_NG = (rows.zeros_NG - middle).to(torch.int8)
        assert torch.equal(packed["m.weight_zero_point"], pack_to_int32(signed_NG, config.bits, packed_dim=0))


def test_low_bits_hold_the_first_code():
    rows, config = packable()
    rows.codes_NK[0, :8] = torch.arange(1, 9)
    assert pack("m", rows, config, None)["m.weight_packed"][0, 0].item() & 0xFFFFFFFF == 0x87654321


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_what_a_method_chose_can_always_be_packed(bits, sym):
    weight_NK = torch.randn(32, 64)
    weight_NK[0] = weight_NK[0].abs()
    weight_NK[1] = -weight_NK[1].abs()
    weight_NK[2] = 0
    config = config_of(bits=bits, sym=sym)
    rows = rtn.quantize_rows(weight_NK, config)
    again = unpack(pack("m", rows, config, None), "m", config)
    assert torch.equal(again.dequantize(), rows.dequantize())
    assert not again.dequantize()[2].any()


def test_a_bias_is_kept_as_it_is_if_and_only_if_there_is_one():
    rows, config = packable()
    assert "m.bias" not in pack("m", rows, config, None)
    bias_N = torch.randn(32).bfloat16()
    written_N = pack("m", rows, config, bias_N)["m.bias"]
    assert written_N.dtype == torch.bfloat16 and torch.equal(written_N, bias_N)


def test_tensors_are_contiguous_on_the_cpu():
    rows, config = packable(sym=False)
    for tensor in pack("m", rows, config, torch.zeros(64)[::2]).values():
        assert tensor.is_contiguous() and tensor.device.type == "cpu"


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_would_break_a_reader_is_refused_with_the_modules_name(bad):
    rows, config = packable()
    rows.scales_NG[3, 1] = bad
    with pytest.raises(ValueError, match=r"`layers.7.up"):
        pack("layers.7.up", rows, config, None)


def test_a_bias_that_is_not_finite_is_refused_with_the_modules_name():
    rows, config = packable()
    with pytest.raises(ValueError, match=r"`layers.7.up.bias` holds"):
        pack("layers.7.up", rows, config, torch.full((32,), float("inf")))


def test_zero_points_that_the_layout_can_not_say_are_refused():
    rows, config = packable()
    rows.zeros_NG[0, 0] = 3
    with pytest.raises(ValueError, match="one of them is not 8"):
        pack("m", rows, config, None)
    rows, config = packable(sym=False)
    rows.zeros_NG[0, 0] = 16
    with pytest.raises(ValueError, match=r".. 16 don't fit 4 bits"):
        pack("m", rows, config, None)


def test_columns_out_of_order_are_refused():
    rows, config = packable()
    rows.g_idx_K[:] = rows.g_idx_K.flip(0)
    with pytest.raises(ValueError, match="don't lie side by side"):
        pack("m", rows, config, None)


def test_rows_of_another_method_are_refused():
    rows, config = packable()
    with pytest.raises(ValueError, match="QuantizedRows are not what method `fp8` makes"):
        pack("m", rows, FP8Config(), None)
    with pytest.raises(ValueError, match="FP8Rows are not what method `rtn` makes"):
        pack("m", fp8.quantize_weight(torch.randn(32, 64), FP8Config()), config, None)


@pytest.mark.parametrize(
    "sizes, config, told",
    [
        ((576, 576), config_of(group_size=128), ["not a multiple of group_size 128; 32, 64, -1 would fit"]),
        ((64, 64), config_of(bits=3), ["holds 4 and 8 bits, not 3"]),
        ((68, 64), config_of(group_size=-1), ["in_features 68 is not a multiple of 8"]),
        ((64, 68), config_of(sym=False), ["out_features 68 is not a multiple of 8"]),
        ((64, 68), config_of(), []),
        ((64, 64), GPTQConfig(group_size=32, checkpoint_format=FORMAT, desc_act=True), ["desc_act leaves columns"]),
        ((64, 64), GPTQConfig(group_size=32, checkpoint_format=FORMAT, desc_act=True, static_groups=True), []),
        ((64, 64), GPTQConfig(group_size=32, checkpoint_format=FORMAT, act_group_aware=True), []),
    ],
)
def test_problems_name_the_module_the_size_and_what_would_fit(sizes, config, told):
    found = problems("layers.0.q", *sizes, config)
    assert len(found) == len(told)
    for problem, part in zip(found, told, strict=True):
        assert problem.startswith("`layers.0.q`: ") and part in problem


def test_the_gptq_layout_refuses_this_format():
    rows, config = packable()
    with pytest.raises(ValueError, match="another layout"):
        gptq_layout.pack("m", rows, config, None)
    assert "another layout" in gptq_layout.problems("m", 64, 32, config)[0]
    with pytest.raises(ValueError, match="another layout"):
        gptq_layout.quantization_config(config)


@pytest.mark.parametrize(
    "config, strategy",
    [
        (config_of(), "group"),
        (config_of(group_size=-1, bits=8, sym=False), "channel"),
        (FP8Config(), "channel"),
        (FP8Config(granularity="tensor"), "tensor"),
        (FP8Config(granularity="block"), "block"),
    ],
)
def test_the_package_reads_our_config_without_loss(config, strategy):
    written = quantization_config(config)
    assert json.loads(json.dumps(written)) == written
    read = QuantizationConfig.model_validate(written)
    scheme = read.config_groups["group_0"]
    assert scheme.weights.strategy == strategy and not scheme.weights.dynamic
    assert read.format == ("float-quantized" if isinstance(config, FP8Config) else "pack-quantized")
    if isinstance(config, RTNConfig):
        assert (scheme.weights.num_bits, scheme.weights.symmetric) == (config.bits, config.sym)
        assert scheme.input_activations is None


def test_the_package_refuses_the_order_that_we_refuse():
    """The day it does not, desc_act can be exported with `weight_g_idx` again."""
    written = quantization_config(config_of())
    written["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    with pytest.raises(ValidationError, match="has been removed"):
        QuantizationConfig.model_validate(written)


def quantize(weight_NK: Tensor, config: GPTQConfig | RTNConfig) -> QuantizedRows:
    """GPTQ gets random inputs: good enough for a layout, whose readers know nothing of them."""
    if isinstance(config, RTNConfig):
        return rtn.quantize_rows(weight_NK, config)
    in_features = weight_NK.shape[1]
    generator = torch.Generator().manual_seed(in_features)
    sums = HessianSum(in_features, "cpu")
    mixing_KK = torch.randn(in_features, in_features, generator=generator)
    sums.add(torch.randn(2 * in_features, in_features, generator=generator) @ mixing_KK)
    return gptq.quantize_rows(weight_NK, factor_hessian(sums.hessian(), config), config)


EXPORTS = {
    f"rtn-{bits}-{'sym' if sym else 'asym'}-{group_size}": config_of(bits=bits, sym=sym, group_size=group_size)
    for bits in BITS
    for sym in (True, False)
    for group_size in (32, -1)
} | {
    f"gptq-{name}": GPTQConfig(group_size=32, checkpoint_format=FORMAT, **options)
    for name, options in {
        "4": {},
        "8-asym": {"bits": 8, "sym": False},
        "act_group_aware": {"act_group_aware": True},
        "static_groups": {"desc_act": True, "static_groups": True},
    }.items()
}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("source") / "model", attention_bias=True, mlp_bias=True)


symmetric = {name: config for name, config in EXPORTS.items() if config.sym}
asymmetric = {name: config for name, config in EXPORTS.items() if not config.sym}


@pytest.mark.parametrize("config", symmetric.values(), ids=symmetric)
def test_transformers_reads_our_symmetric_weights_exactly(config, source, tmp_path):
    output = write_export(source, tmp_path / "export", layout, config, quantize)
    loaded = load(output)
    assert set(loaded.classes.values()) == {nn.Linear}  # the class stays, its tensors are the packed ones
    for name in loaded.classes:
        assert f"{name}.weight" not in loaded.tensors
        assert loaded.tensors[f"{name}.weight_packed"].dtype == torch.int32
    assert torch.equal(loaded.logits, logits(dense(output, layout, config)))


@pytest.mark.parametrize("config", asymmetric.values(), ids=asymmetric)
def test_transformers_reads_our_asymmetric_weights_exactly_in_the_dtype_of_their_scales(config, source, tmp_path):
    output = write_export(source, tmp_path / "export", layout, config, quantize)
    loaded = load(output)
    assert set(loaded.classes.values()) == {nn.Linear}
    assert {tensor.dtype for tensor in loaded.tensors.values()} == {torch.float32}  # widened as they were loaded
    assert torch.equal(loaded.logits, logits(dense(output, layout, config, reader_dtype=torch.float16)))
    assert relative_difference(loaded.logits, logits(dense(output, layout, config))) < 2e-3  # float16's rounding


def test_asymmetric_files_would_not_load_without_their_switch(source, tmp_path):
    """The day they do, the switch can go: it costs transformers' users the memory of wide weights."""
    output = write_export(source, tmp_path / "export", layout, config_of(sym=False), quantize)
    described = json.loads((output / "config.json").read_text())
    del described["quantization_config"]["dequantize"]
    (output / "config.json").write_text(json.dumps(described))
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load(output)


@pytest.mark.parametrize("tied", [True, False])
def test_a_bfloat16_reader_is_off_by_its_own_rounding_only(tied, tmp_path):
    source = write_tiny_llama(tmp_path / "source", tied=tied, key_value_heads=1)
    config = config_of(bits=8)
    output = write_export(source, tmp_path / "export", layout, config, quantize)
    expected = logits(dense(output, layout, config))
    rounded = logits(dense(output, layout, config, torch.bfloat16))
    read = load(output, torch.bfloat16).logits
    assert relative_difference(read, expected) < 2 * relative_difference(rounded, expected)
