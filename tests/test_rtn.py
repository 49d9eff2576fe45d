"""Round to nearest: the nearest code of every weight, and another program's where their grids agree."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tasks.formats import gptq as layout
from tasks.methods import rtn
from tasks.methods.grid import WeightError
from tasks.quantization import GPTQConfig, RTNConfig

GOLDEN = Path(__file__).parent / "golden"
MODULE = "model.layers.0.self_attn.k_proj"


def test_it_is_as_another_program_where_a_positive_weight_is_the_largest_and_nearer_elsewhere():
    tensors = load_file(GOLDEN / "rtn_w4g128_k_proj.safetensors")
    theirs = layout.unpack(tensors, MODULE, RTNConfig())
    weight_NK = tensors[f"{MODULE}.weight"].float()
    ours = rtn.quantize_rows(weight_NK, RTNConfig(bits=4, group_size=128))
    assert torch.equal(ours.zeros_NG, theirs.zeros_NG)
    assert torch.equal(ours.g_idx_K, theirs.g_idx_K)
    grouped_NGC = weight_NK.reshape(128, 2, 128)
    is_positive_NG = grouped_NGC.amax(dim=2) >= -grouped_NGC.amin(dim=2)
    assert torch.equal(ours.scales_NG[is_positive_NG], theirs.scales_NG[is_positive_NG])
    assert bool((ours.scales_NG < theirs.scales_NG)[~is_positive_NG].all())
    # Theirs chooses codes before the scale is rounded to float16.
    same_NGC = (ours.codes_NK == theirs.codes_NK).reshape(128, 2, 128)
    assert same_NGC[is_positive_NG].float().mean() > 0.999
    errors_NGC = [(rows.dequantize() - weight_NK).square().reshape(128, 2, 128) for rows in (ours, theirs)]
    ours_NG, theirs_NG = (error_NGC.sum(dim=2) for error_NGC in errors_NGC)
    assert float(ours_NG[~is_positive_NG].sum()) < 0.95 * float(theirs_NG[~is_positive_NG].sum())


@pytest.mark.parametrize("group_size", [16, 32, -1])
@pytest.mark.parametrize("sym", [True, False])
def test_every_weight_gets_the_nearest_code(sym, group_size):
    torch.manual_seed(0)
    weight_NK = torch.randn(7, 96)
    config = RTNConfig(bits=3, sym=sym, group_size=group_size)
    rows = rtn.quantize_rows(weight_NK, config)
    columns_K = rows.g_idx_K.long()
    every_code = torch.arange(8.0)
    grid_NKC = rows.scales_NG.float()[:, columns_K, None] * (every_code - rows.zeros_NG[:, columns_K, None])
    nearest_NK = (grid_NKC - weight_NK[..., None]).abs().amin(dim=2)
    torch.testing.assert_close((rows.dequantize() - weight_NK).abs(), nearest_NK, rtol=0, atol=1e-6)
    assert rows.g_idx_K.tolist() == [k // (96 if group_size == -1 else group_size) for k in range(96)]


def test_the_loss_is_the_mean_squared_weight_error():
    torch.manual_seed(0)
    weight_NK = torch.randn(7, 96)
    rows = rtn.quantize_rows(weight_NK, RTNConfig(group_size=32))
    assert rows.loss == pytest.approx(float((rows.dequantize() - weight_NK).square().mean()), rel=1e-5)


@pytest.mark.parametrize("mse", [0.0, 2.4])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_groups_of_zeros_come_back_as_exact_zeros(bits, sym, mse):
    torch.manual_seed(0)
    weight_NK = torch.randn(4, 64)
    weight_NK[1, :32] = 0
    weight_NK[2] = 0
    rows = rtn.quantize_rows(weight_NK, RTNConfig(bits=bits, sym=sym, group_size=32, mse=mse))
    dense_NK = rows.dequantize()
    assert not dense_NK[1, :32].any() and not dense_NK[2].any()
    assert bool(dense_NK.isfinite().all())


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("magnitude", [1e-3, 1e-6, 1e-8, 1e-12, 1e-38, 1e-44])
def test_weights_under_the_half_precision_range_stay_finite_and_no_farther_than_a_step(magnitude, sym):
    torch.manual_seed(0)
    weight_NK = (torch.randn(4, 64) * magnitude).clamp(-3 * magnitude, 3 * magnitude)
    rows = rtn.quantize_rows(weight_NK, RTNConfig(group_size=32, sym=sym))
    assert bool((rows.scales_NG > 0).all())
    error = float((rows.dequantize() - weight_NK).abs().max())
    assert error <= max(2 * 3 * magnitude / 15, 2.0**-24) * 1.01


def test_one_huge_weight_is_refused_by_name_and_a_large_one_leaves_its_neighbours_alone():
    torch.manual_seed(0)
    weight_NK = torch.randn(4, 64)
    weight_NK[2, 5] = 4e5
    rows = rtn.quantize_rows(weight_NK, RTNConfig(group_size=32))
    dense_NK = rows.dequantize()
    assert bool(dense_NK.isfinite().all())
    assert float((dense_NK[2, 32:] - weight_NK[2, 32:]).abs().max()) < 0.5
    weight_NK[2, 5] = 6e5
    with pytest.raises(WeightError, match="row 2 "):
        rtn.quantize_rows(weight_NK, RTNConfig(group_size=32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_round_as_their_float32_values(dtype):
    torch.manual_seed(0)
    weight_NK = torch.randn(4, 64).to(dtype)
    rows, expected = (rtn.quantize_rows(w, RTNConfig(group_size=32)) for w in (weight_NK, weight_NK.float()))
    assert torch.equal(rows.codes_NK, expected.codes_NK) and torch.equal(rows.scales_NG, expected.scales_NG)


def test_rows_do_not_depend_on_each_other():
    torch.manual_seed(0)
    weight_NK = torch.randn(50, 96)
    config = RTNConfig(group_size=32, mse=2.4)
    whole = rtn.quantize_rows(weight_NK, config)
    part = rtn.quantize_rows(weight_NK[13:20], config)
    assert torch.equal(part.codes_NK, whole.codes_NK[13:20])
    assert torch.equal(part.scales_NG, whole.scales_NG[13:20])


def test_it_serves_as_the_fallback_of_gptq():
    weight_NK = torch.randn(4, 64)
    as_rtn = rtn.quantize_rows(weight_NK, RTNConfig(group_size=32))
    as_gptq = rtn.quantize_rows(weight_NK, GPTQConfig(group_size=32, desc_act=True))
    assert torch.equal(as_rtn.codes_NK, as_gptq.codes_NK)
