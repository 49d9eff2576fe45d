"""The awq layout: packed words are another program's bytes, and what it cannot hold is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from tasks.formats.awq import (
    config_of,
    pack,
    pack_channels,
    packed_bytes,
    problems,
    quantization_config,
    unpack,
    unpack_channels,
)
from tasks.methods import rtn
from tasks.methods.grid import QuantizedRows
from tasks.quantization import AWQConfig, RTNConfig

GOLDEN = Path(__file__).parent / "golden"
MODULE = "model.layers.0.self_attn.k_proj"
NORM = "model.layers.0.input_layernorm.weight"


def config(**options: Any) -> RTNConfig:
    return RTNConfig(**({"group_size": 32, "sym": False, "checkpoint_format": "awq"} | options))


def decoded(tensors: dict[str, Tensor], name: str) -> Tensor:
    """float64 [N, K] of a packed module, word by word and field by field, as the layout's documents describe it."""
    qweight, qzeros = tensors[f"{name}.qweight"].tolist(), tensors[f"{name}.qzeros"].tolist()
    scales = tensors[f"{name}.scales"].double().tolist()
    size = len(qweight) // len(scales)
    # Field 0 holds channel 0, field 1 channel 2, field 2 channel 4, ...
    field_of = {0: 0, 1: 4, 2: 1, 3: 5, 4: 2, 5: 6, 6: 3, 7: 7}
    rows = []
    for channel in range(8 * len(qweight[0])):
        word, shift = channel // 8, 4 * field_of[channel % 8]
        rows.append(
            [
                scales[k // size][channel] * (((words[word] >> shift) & 15) - ((qzeros[k // size][word] >> shift) & 15))
                for k, words in enumerate(qweight)
            ]
        )
    return torch.tensor(rows, dtype=torch.float64)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**31))
@settings(deadline=None)
def test_unpack_inverts_pack(words, rows, seed):
    codes_RN = torch.randint(0, 16, (rows, 8 * words), generator=torch.Generator().manual_seed(seed))
    packed_RP = pack_channels(codes_RN)
    assert packed_RP.dtype == torch.int32 and packed_RP.shape == (rows, words)
    assert torch.equal(unpack_channels(packed_RP), codes_RN)


def test_the_fields_of_a_word_hold_the_even_channels_and_then_the_odd_ones():
    assert pack_channels(torch.arange(8)[None]).item() & 0xFFFFFFFF == 0x75316420


def test_channels_that_do_not_fill_words_are_refused():
    with pytest.raises(ValueError, match="must be a multiple of 8"):
        pack_channels(torch.zeros(2, 12, dtype=torch.int64))


def golden_rows() -> tuple[QuantizedRows, dict[str, Tensor]]:
    tensors = load_file(GOLDEN / "gptqmodel_awq.safetensors")
    g_idx_K = torch.arange(64, dtype=torch.int32) // 32
    rows = QuantizedRows(
        tensors["codes"], tensors["scales"].T.contiguous(), tensors["zeros"].int(), g_idx_K, torch.zeros(24)
    )
    return rows, tensors


def test_packing_gives_another_programs_bytes():
    rows, tensors = golden_rows()
    packed = pack("m", rows, config(), tensors["source_bias"])
    for part in ("qweight", "qzeros", "scales"):
        assert torch.equal(packed[f"m.{part}"], tensors[part])
    assert torch.equal(packed["m.bias"].float(), tensors["source_bias"])
    assert torch.equal(decoded(packed, "m").float(), rows.dequantize())


def test_another_programs_kernel_computes_with_the_weights_that_are_read_here():
    rows, tensors = golden_rows()
    y_TN = tensors["x"].double() @ rows.dequantize().double().T + tensors["source_bias"].double()
    assert float((tensors["y"].double() - y_TN).norm() / y_TN.norm()) < 1e-3  # it computes in float16


def test_unpacking_another_programs_export_and_repacking_gives_its_bytes():
    tensors = load_file(GOLDEN / "awq_w4g128_k_proj.safetensors")
    rows = unpack(tensors, MODULE, config(group_size=128))
    packed = pack(MODULE, rows, config(group_size=128), None)
    assert set(packed) == {f"{MODULE}.{part}" for part in ("qweight", "qzeros", "scales")}
    for part in ("qweight", "qzeros"):
        assert torch.equal(packed[f"{MODULE}.{part}"], tensors[f"{MODULE}.{part}"])
    torch.testing.assert_close(rows.dequantize().double(), decoded(tensors, MODULE))
    # With the norm that was folded, they are the source's weights to within the 4 bits.
    folded_NK = rows.dequantize() * tensors[NORM].float()
    source_NK = (tensors[f"source.{MODULE}.weight"] * tensors[f"source.{NORM}"]).float()
    assert float((folded_NK - source_NK).norm() / source_NK.norm()) < 0.12


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("group_size", [16, 32, 64, -1])
def test_what_a_method_chose_can_always_be_packed(group_size, sym):
    torch.manual_seed(0)
    weight_NK = torch.randn(32, 64)
    weight_NK[0] = weight_NK[0].abs()
    weight_NK[1] = -weight_NK[1].abs()
    weight_NK[2] = 0
    chosen = config(group_size=group_size, sym=sym)
    rows = rtn.quantize_rows(weight_NK, chosen)
    packed = pack("m", rows, chosen, None)
    assert torch.equal(decoded(packed, "m").float(), rows.dequantize())
    assert sum(tensor.nbytes for tensor in packed.values()) == packed_bytes(64, 32, chosen, 0)
    again = unpack(packed, "m", config_of(quantization_config(chosen)))
    for field in ("codes_NK", "scales_NG", "zeros_NG", "g_idx_K"):
        assert torch.equal(getattr(again, field), getattr(rows, field))
        assert getattr(again, field).dtype == getattr(rows, field).dtype


def packable() -> QuantizedRows:
    return rtn.quantize_rows(torch.randn(32, 64), config())


def test_a_zero_point_of_0_is_used_and_written_as_it_is():
    rows = rtn.quantize_rows(torch.rand(8, 32), config())
    assert bool((rows.zeros_NG == 0).all())
    assert torch.equal(pack("m", rows, config(), None)["m.qzeros"], torch.zeros(1, 1, dtype=torch.int32))


def test_tensors_are_contiguous_on_the_cpu():
    for tensor in pack("m", packable(), config(), torch.zeros(64)[::2]).values():
        assert tensor.is_contiguous() and tensor.device.type == "cpu"


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_would_break_a_reader_is_refused_with_the_modules_name(bad):
    rows = packable()
    rows.scales_NG[3, 1] = bad
    with pytest.raises(ValueError, match=r"`layers.7.up`: a scale is"):
        pack("layers.7.up", rows, config(), None)


def test_what_the_layout_can_not_say_is_refused_with_the_modules_name():
    with pytest.raises(ValueError, match=r"`m`: the bias"):
        pack("m", packable(), config(), torch.full((32,), 1e5))
    rows = packable()
    rows.zeros_NG[0, 0] = 16
    with pytest.raises(ValueError, match=r"`m`: zero points .* 16 do not fit"):
        pack("m", rows, config(), None)
    rows = packable()
    rows.g_idx_K.copy_(rows.g_idx_K.flip(0))
    with pytest.raises(ValueError, match=r"`m`: columns of a group don't lie side by side"):
        pack("m", rows, config(), None)


def test_problems_name_the_module_the_size_and_what_would_fit():
    (problem,) = problems("layers.0.q", 576, 576, AWQConfig())
    assert "`layers.0.q`: in_features 576 is not a multiple of group_size 128; 16, 32, 64, -1 would fit" in problem
    (problem,) = problems("layers.0.q", 576, 576, AWQConfig(group_size=48))
    assert "no loader of this layout takes group_size 48" in problem
    (problem,) = problems("layers.0.q", 64, 100, AWQConfig(group_size=64))
    assert "out_features 100 is not a multiple of 8" in problem
    (problem,) = problems("layers.0.q", 64, 64, config(bits=8))
    assert "holds 4 bits, not 8" in problem
    for group_size in (16, 32, 64, -1):
        assert problems("layers.0.q", 576, 1536, AWQConfig(group_size=group_size)) == []


@pytest.mark.parametrize("out_features", [8, 12, 16, 20])
def test_problems_are_reported_exactly_where_packing_fails(out_features):
    rows = rtn.quantize_rows(torch.randn(out_features, 32), config())
    if problems("m", 32, out_features, config()):
        with pytest.raises(ValueError, match="`m`: out_features"):
            pack("m", rows, config(), None)
    else:
        pack("m", rows, config(), None)


@pytest.mark.parametrize("sym", [True, False])
def test_the_config_has_every_key_that_loaders_read(sym):
    written = quantization_config(AWQConfig(group_size=64, sym=sym))
    assert json.loads(json.dumps(written)) == written
    meta = written.pop("meta")
    assert written == {
        "bits": 4,
        "group_size": 64,
        "desc_act": False,
        "sym": False,
        "zero_point": True,  # they are in the file, also where all are 8
        "version": "gemm",
        "lm_head": False,
        "modules_to_not_convert": None,
        "quant_method": "awq",
        "method": "awq",
        "checkpoint_format": "gemm",
        "format": "gemm",
        "pack_dtype": "int32",
    }
    assert meta["sym"] is sym and meta["method"] == "awq"
    assert [entry.split(":")[0] for entry in meta["quantizer"]] == ["prefect-quantize"]


def test_a_file_of_another_version_is_not_read():
    with pytest.raises(ValueError, match="version `gemv`"):
        config_of({"bits": 4, "version": "gemv"})
