"""The gptq layout: packed words are another program's bytes, and what it cannot hold is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from tasks.formats.gptq import pack, pack_rows, problems, quantization_config, unpack, unpack_rows
from tasks.methods import rtn
from tasks.methods.grid import QuantizedRows
from tasks.quantization import GPTQConfig, RTNConfig

GOLDEN = Path(__file__).parent / "golden"
MODULE = "model.layers.0.self_attn.k_proj"
RUN = {2: 16, 3: 32, 4: 8, 8: 4}  # codes that fill whole words
BITS = list(RUN)


def as_config(bits: Any, checkpoint_format: Any) -> RTNConfig:
    return RTNConfig(bits=bits, checkpoint_format=checkpoint_format)


@st.composite
def code_matrices(draw: st.DrawFn) -> tuple[int, Tensor]:
    bits = draw(st.sampled_from(BITS))
    shape = (RUN[bits] * draw(st.integers(1, 5)), draw(st.integers(1, 7)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return bits, torch.randint(0, 2**bits, shape, generator=generator)


@given(code_matrices())
@example((3, torch.full((32, 1), 7)))
@example((3, torch.arange(96)[:, None] % 8))
@example((8, torch.full((4, 3), 255)))
@settings(deadline=None)
def test_unpack_inverts_pack(case):
    bits, codes_RC = case
    packed_PC = pack_rows(codes_RC, bits)
    assert packed_PC.dtype == torch.int32
    assert packed_PC.shape == (codes_RC.shape[0] * bits // 32, codes_RC.shape[1])
    assert torch.equal(unpack_rows(packed_PC, bits), codes_RC)


def test_low_bits_hold_the_first_row():
    assert pack_rows(torch.arange(1, 9)[:, None], 4).item() & 0xFFFFFFFF == 0x87654321


def test_three_bit_codes_straddle_words():
    for row, word, value in (
        (9, 0, 7 << 27),
        (10, 0, 3 << 30),
        (10, 1, 1),
        (21, 1, 1 << 31),
        (21, 2, 3),
        (31, 2, 7 << 29),
    ):
        codes_R1 = torch.zeros(32, 1, dtype=torch.int64)
        codes_R1[row] = 7
        assert pack_rows(codes_R1, 3)[word].item() & 0xFFFFFFFF == value


@pytest.mark.parametrize("bits", BITS)
def test_rows_that_do_not_fill_words_are_refused(bits):
    with pytest.raises(ValueError, match=f"must be a multiple of {RUN[bits]}"):
        pack_rows(torch.zeros(RUN[bits] + 1, 2, dtype=torch.int64), bits)


@pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", BITS)
def test_packing_gives_another_programs_bytes(bits, checkpoint_format):
    tensors = load_file(GOLDEN / "gptqmodel_packed.safetensors")
    rows = QuantizedRows(
        tensors[f"b{bits}.codes"],
        tensors[f"b{bits}.scales"].T,
        tensors[f"b{bits}.zeros"].int(),
        tensors[f"b{bits}.g_idx"],
        torch.zeros(32),
    )
    packed = pack("m", rows, as_config(bits, checkpoint_format), None)
    assert torch.equal(packed["m.qweight"], tensors[f"b{bits}.qweight"])
    assert torch.equal(packed["m.qzeros"], tensors[f"b{bits}.{checkpoint_format}.qzeros"])
    assert torch.equal(packed["m.scales"], tensors[f"b{bits}.scales"])
    assert torch.equal(packed["m.g_idx"], tensors[f"b{bits}.g_idx"])


@pytest.mark.parametrize("name", ["rtn_w4g128_k_proj", "gptq_w4g128_k_proj"])
def test_unpacking_another_programs_export_and_repacking_gives_its_bytes(name):
    tensors = load_file(GOLDEN / f"{name}.safetensors")
    packed = pack(MODULE, unpack(tensors, MODULE, as_config(4, "gptq")), as_config(4, "gptq"), None)
    assert set(packed) == {f"{MODULE}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")}
    for key, tensor in packed.items():
        assert tensor.dtype == tensors[key].dtype and torch.equal(tensor, tensors[key])


@st.composite
def row_sets(draw: st.DrawFn) -> tuple[int, str, QuantizedRows]:
    bits, checkpoint_format = draw(st.sampled_from(BITS)), draw(st.sampled_from(["gptq", "gptq_v2"]))
    run = RUN[bits]
    rows, groups, size = run * draw(st.integers(1, 3)), draw(st.integers(1, 3)), run * draw(st.integers(1, 2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    lowest = 1 if checkpoint_format == "gptq" else 0
    g_idx_K = torch.arange(groups, dtype=torch.int32).repeat_interleave(size)
    return (
        bits,
        checkpoint_format,
        QuantizedRows(
            torch.randint(0, 2**bits, (rows, groups * size), generator=generator).to(torch.uint8),
            (torch.rand(rows, groups, generator=generator) + 0.01).half(),
            torch.randint(lowest, 2**bits, (rows, groups), generator=generator).to(torch.int32),
            g_idx_K[torch.randperm(groups * size, generator=generator)],
            torch.zeros(rows),
        ),
    )


@given(row_sets())
@settings(deadline=None)
def test_unpacking_a_packed_module_gives_its_rows(case):
    bits, checkpoint_format, rows = case
    packed = pack("m", rows, as_config(bits, checkpoint_format), None)
    again = unpack(packed, "m", as_config(bits, checkpoint_format))
    for field in ("codes_NK", "scales_NG", "zeros_NG", "g_idx_K"):
        assert torch.equal(getattr(again, field), getattr(rows, field))
        assert getattr(again, field).dtype == getattr(rows, field).dtype
    assert torch.equal(again.dequantize(), rows.dequantize())


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", BITS)
def test_what_a_method_chose_can_always_be_packed(bits, checkpoint_format, sym):
    torch.manual_seed(0)
    weight_NK = torch.randn(32, 64)
    weight_NK[0] = weight_NK[0].abs()
    weight_NK[1] = -weight_NK[1].abs()
    weight_NK[2] = 0
    config = RTNConfig(bits=bits, group_size=32, sym=sym, checkpoint_format=checkpoint_format)
    rows = rtn.quantize_rows(weight_NK, config)
    again = unpack(pack("m", rows, as_config(bits, checkpoint_format), None), "m", as_config(bits, checkpoint_format))
    assert torch.equal(again.dequantize(), rows.dequantize())


def packable() -> QuantizedRows:
    return rtn.quantize_rows(torch.randn(32, 64), RTNConfig(group_size=32))


def test_a_bias_is_written_if_and_only_if_there_is_one():
    assert "m.bias" not in pack("m", packable(), as_config(4, "gptq"), None)
    bias_N = torch.randn(32).bfloat16()
    written_N = pack("m", packable(), as_config(4, "gptq"), bias_N)["m.bias"]
    assert written_N.dtype == torch.float16
    torch.testing.assert_close(written_N.float(), bias_N.float(), rtol=2**-11, atol=2**-24)  # a half's rounding


def test_tensors_are_contiguous_on_the_cpu():
    for tensor in pack("m", packable(), as_config(4, "gptq"), torch.zeros(64)[::2]).values():
        assert tensor.is_contiguous() and tensor.device.type == "cpu"


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_would_break_a_reader_is_refused_with_the_modules_name(bad):
    rows = packable()
    rows.scales_NG[3, 1] = bad
    with pytest.raises(ValueError, match=r"`layers.7.up`: a scale is"):
        pack("layers.7.up", rows, as_config(4, "gptq"), None)


def test_a_bias_beyond_float16_is_refused_with_the_modules_name():
    with pytest.raises(ValueError, match=r"`layers.7.up`: the bias"):
        pack("layers.7.up", packable(), as_config(4, "gptq"), torch.full((32,), 1e5))


def test_v1_refuses_a_zero_point_of_0_which_its_readers_disagree_on():
    rows = packable()
    rows.zeros_NG[0, 0] = 0
    with pytest.raises(ValueError, match=r"`m`: zero points 0 .. 8 do not fit `gptq`"):
        pack("m", rows, as_config(4, "gptq"), None)
    assert torch.equal(
        unpack(pack("m", rows, as_config(4, "gptq_v2"), None), "m", as_config(4, "gptq_v2")).zeros_NG, rows.zeros_NG
    )


def test_problems_name_the_module_the_size_and_what_would_fit():
    (problem,) = problems("layers.0.q", 576, 576, GPTQConfig(group_size=128))
    assert "`layers.0.q`: in_features 576 is not a multiple of group_size 128; 16, 32, 64, -1 would fit" in problem
    (problem,) = problems("layers.0.q", 576, 576, GPTQConfig(group_size=48))
    assert "no loader of this layout takes group_size 48" in problem
    (problem,) = problems("layers.0.q", 64, 100, GPTQConfig(bits=3, group_size=64))
    assert "out_features 100 is not a multiple of 32" in problem
    assert len(problems("layers.0.q", 60, 60, RTNConfig(bits=3, group_size=64))) == 3


@pytest.mark.parametrize("group_size", [16, 32, 64, 576, -1])
@pytest.mark.parametrize("bits", BITS)
def test_sizes_that_fit_have_no_problems(bits, group_size):
    assert problems("layers.0.q", 576, 1536, GPTQConfig(bits=bits, group_size=group_size)) == []


@pytest.mark.parametrize("bits", BITS)
def test_problems_are_reported_exactly_where_packing_fails(bits):
    for out_features in range(4, 68, 4):
        config = RTNConfig(bits=bits, group_size=-1)
        rows = rtn.quantize_rows(torch.randn(out_features, 32), config)
        if problems("m", 32, out_features, config):
            with pytest.raises(ValueError, match="`m`: out_features"):
                pack("m", rows, as_config(bits, "gptq"), None)
        else:
            pack("m", rows, as_config(bits, "gptq"), None)


def test_the_config_has_every_key_that_loaders_read():
    written = quantization_config(GPTQConfig(group_size=64))
    assert json.loads(json.dumps(written)) == written
    meta = written.pop("meta")
    assert written == {
        "bits": 4,
        "group_size": 64,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "quant_method": "gptq",
        "method": "gptq",
        "checkpoint_format": "gptq",
        "format": "gptq",
        "pack_dtype": "int32",
    }
    assert meta["damp_percent"] == 0.05 and meta["true_sequential"] is True
    assert [entry.split(":")[0] for entry in meta["quantizer"]] == ["prefect-quantize"]


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, False),
        ({"desc_act": True}, True),
        ({"act_group_aware": True}, False),
        ({"desc_act": True, "static_groups": True}, False),
    ],
)
def test_desc_act_is_said_only_where_g_idx_is_out_of_order(options, expected):
    assert quantization_config(GPTQConfig(**options))["desc_act"] is expected


def test_only_asymmetric_v1_carries_the_mark_that_its_loader_asks_for():
    for config, expected in (
        (GPTQConfig(sym=False), True),
        (RTNConfig(sym=False), True),
        (GPTQConfig(sym=False, checkpoint_format="gptq_v2"), False),
        (RTNConfig(), False),
    ):
        assert ("gptqmodel:0.9.0" in quantization_config(config)["meta"]["quantizer"]) is expected
