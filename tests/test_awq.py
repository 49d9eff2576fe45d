"""AWQ against a float64 evaluation over kept activations, against rounding to nearest, and at the edges of its numbers."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tasks.methods import rtn
from tasks.methods.awq import (
    InputSum,
    Moments,
    best_candidate,
    candidate_scales,
    fold_exactly,
    fold_into_norm,
    fold_into_rows,
    in_powers_of_two,
    quantize_rows,
    scale_losses,
    weight_magnitude,
)
from tasks.methods.grid import WeightError
from tasks.methods.hessian import ActivationError
from tasks.quantization import AWQConfig


def config(**options: Any) -> AWQConfig:
    return AWQConfig(**({"group_size": 32} | options))


def layer(out_features: int = 48, in_features: int = 64, tokens: int = 300, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight and inputs of which a few channels carry most, as in a language model."""
    generator = torch.Generator().manual_seed(seed)
    size_K = torch.exp(1.5 * torch.randn(in_features, generator=generator))
    x_TK = torch.randn(tokens, in_features, generator=generator) * size_K
    return torch.randn(out_features, in_features, generator=generator) * 0.02, x_TK


def moments_of(x_TK: Tensor) -> Moments:
    total = InputSum(x_TK.shape[1])
    total.add(x_TK)
    return total.moments()


def one_to_one(in_features: int) -> Tensor:
    return torch.arange(in_features)


def searched(weight_NK: Tensor, x_TK: Tensor, chosen: AWQConfig) -> Tensor:
    """The best scales [K] of a weight by itself."""
    moments = moments_of(x_TK)
    candidates_SK = candidate_scales(
        moments.magnitude_K, weight_magnitude([weight_NK], chosen), one_to_one(len(moments.magnitude_K)), chosen
    )
    return candidates_SK[best_candidate(scale_losses(weight_NK, moments.second_KK, candidates_SK, chosen))]


def output_error(dense_NK: Tensor, weight_NK: Tensor, x_TK: Tensor) -> float:
    return float(((dense_NK - weight_NK).double() @ x_TK.double().T).square().mean())


# Statistics -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(deadline=None, max_examples=20)
def test_moments_do_not_depend_on_how_tokens_are_batched(cuts, dtype):
    x_TK = layer(tokens=200)[1].to(dtype)
    lanes = [InputSum(64), InputSum(64)]
    start = 0
    for number, count in enumerate([*cuts, 200]):
        lanes[number % 2].add(x_TK[start : start + count])
        start = min(200, start + count)
    lanes[0].merge(lanes[1])
    moments = lanes[0].moments()
    assert lanes[0].tokens == 200
    wide_TK = x_TK.double()
    torch.testing.assert_close(moments.second_KK.double(), wide_TK.T @ wide_TK / 200, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(moments.magnitude_K.double(), wide_TK.abs().mean(dim=0), rtol=1e-5, atol=1e-7)


def test_inputs_that_are_not_finite_are_an_error_of_their_own():
    total = InputSum(4)
    total.add(torch.tensor([[1.0, float("inf"), 0.0, 1.0]]))
    with pytest.raises(ActivationError, match="NaN or Inf"):
        total.moments()


# The search -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"sym": True}, {"group_size": -1}, {"bits": 8, "checkpoint_format": "compressed-tensors"}]
)
def test_the_loss_of_a_candidate_is_that_of_kept_activations_in_float64(options):
    weight_NK, x_TK = layer()
    chosen = config(**options)
    moments = moments_of(x_TK)
    candidates_SK = candidate_scales(moments.magnitude_K, weight_magnitude([weight_NK], chosen), one_to_one(64), chosen)
    losses_S = scale_losses(weight_NK, moments.second_KK, candidates_SK, chosen)
    for scale_K, loss in zip(candidates_SK, losses_S, strict=True):
        dense_NK = rtn.quantize_rows(weight_NK * scale_K, chosen).dequantize() / scale_K
        expected = output_error(dense_NK, weight_NK, x_TK) * len(weight_NK)
        torch.testing.assert_close(float(loss), expected, rtol=1e-3, atol=0.0)  # sums of float32 products


def test_losses_of_units_add_up_to_those_of_all_rows():
    weight_NK, x_TK = layer()
    moments = moments_of(x_TK)
    candidates_SK = candidate_scales(
        moments.magnitude_K, weight_magnitude([weight_NK], config()), one_to_one(64), config()
    )
    whole_S = scale_losses(weight_NK, moments.second_KK, candidates_SK, config())
    parts_S = sum(scale_losses(rows, moments.second_KK, candidates_SK, config()) for rows in weight_NK.split(16))
    torch.testing.assert_close(whole_S, parts_S, rtol=1e-5, atol=0.0)
    magnitudes = [weight_magnitude(list(weight_NK.split(size)), config()) for size in (16, 48)]
    torch.testing.assert_close(*magnitudes, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("apply_clip", [True, False])
def test_the_output_error_is_well_under_that_of_rounding_to_nearest(sym, apply_clip):
    weight_NK, x_TK = layer()
    chosen = config(sym=sym, apply_clip=apply_clip)
    scale_K = searched(weight_NK, x_TK, chosen)
    rows = quantize_rows(weight_NK * scale_K, moments_of(x_TK).divided(scale_K), chosen)
    ours = output_error(rows.dequantize() / scale_K, weight_NK, x_TK)
    nearest = output_error(rtn.quantize_rows(weight_NK, chosen).dequantize(), weight_NK, x_TK)
    assert ours < 0.6 * nearest
    torch.testing.assert_close(rows.loss, ours, rtol=1e-3, atol=0.0)


def test_clipping_costs_the_output_least_group_by_group():
    weight_NK, x_TK = layer()
    errors = {}
    for apply_clip in (True, False):
        rows = quantize_rows(weight_NK, moments_of(x_TK), config(apply_clip=apply_clip))
        error_NGC = (rows.dequantize() - weight_NK).reshape(len(weight_NK), 2, 32)
        errors[apply_clip] = torch.stack(
            [(error_NGC[:, g] @ x_TK[:, 32 * g : 32 * (g + 1)].T).square().mean(dim=1) for g in range(2)]
        )
    assert bool((errors[True] <= errors[False] * 1.0001).all())
    assert float(errors[True].sum()) < 0.95 * float(errors[False].sum())


def test_the_first_candidate_is_no_scaling_and_the_others_are_normalised():
    _, x_TK = layer()
    for duo_scaling, count in ((True, 40), (False, 20)):
        chosen = config(duo_scaling=duo_scaling)
        scales_SK = candidate_scales(moments_of(x_TK).magnitude_K, torch.rand(64) + 0.1, one_to_one(64), chosen)
        assert scales_SK.shape == (count, 64)
        assert torch.equal(scales_SK[0], torch.ones(64))
        torch.testing.assert_close(scales_SK.amax(dim=1) * scales_SK.amin(dim=1), torch.ones(count))


def test_columns_from_one_channel_share_a_scale():
    _, x_TK = layer()
    channels_K = torch.arange(64) % 16
    scales_SK = candidate_scales(moments_of(x_TK).magnitude_K, torch.rand(64) + 0.1, channels_K, config())
    assert torch.equal(scales_SK, scales_SK[:, :16].repeat(1, 4))
    means_N = moments_of(x_TK).magnitude_K.reshape(4, 16).mean(dim=0)
    expected_N = means_N**0.5 / (means_N.max() * means_N.min()).pow(0.25)
    torch.testing.assert_close(scales_SK[10, :16], expected_N)


# Edges ----------------------------------------------------------------------------------------------------------------


def test_channels_without_inputs_keep_their_scale_and_are_rounded_plainly():
    weight_NK, x_TK = layer()
    x_TK[:, 5] = 0
    x_TK[:, 32:] = 0
    scale_K = searched(weight_NK, x_TK, config())
    assert bool((scale_K[x_TK.abs().sum(dim=0) == 0] == 1).all())
    rows = quantize_rows(weight_NK * scale_K, moments_of(x_TK).divided(scale_K), config())
    nearest = rtn.quantize_rows(weight_NK, config())
    assert torch.equal(rows.codes_NK[:, 32:], nearest.codes_NK[:, 32:])


def test_without_any_input_nothing_is_scaled_and_all_is_rounded_plainly():
    weight_NK, x_TK = layer()
    assert torch.equal(searched(weight_NK, 0 * x_TK, config()), torch.ones(64))
    rows = quantize_rows(weight_NK, moments_of(0 * x_TK), config())
    assert torch.equal(rows.dequantize(), rtn.quantize_rows(weight_NK, config()).dequantize())
    assert rows.loss == 0


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-8, 1e4, 4e5])
def test_weights_of_any_size_give_finite_tensors(size, sym):
    weight_NK, x_TK = layer()
    weight_NK = weight_NK / weight_NK.abs().max() * size
    weight_NK[3] = 0
    weight_NK[4, :32] = 0
    chosen = config(sym=sym)
    scale_K = searched(weight_NK, x_TK, chosen)
    rows = quantize_rows(weight_NK * scale_K, moments_of(x_TK).divided(scale_K), chosen)
    assert bool((rows.scales_NG > 0).all()) and bool(rows.scales_NG.isfinite().all())
    dense_NK = rows.dequantize() / scale_K
    assert bool((dense_NK[3] == 0).all()) and bool((dense_NK[4, :32] == 0).all())
    assert rows.loss < float("inf")
    if size >= 1e4:
        assert output_error(dense_NK, weight_NK, x_TK) < 0.05 * output_error(0 * dense_NK, weight_NK, x_TK)


def test_a_weight_that_no_grid_holds_is_refused_and_scales_that_would_make_one_are_passed_over():
    weight_NK, x_TK = layer()
    weight_NK[7, 9] = 6e5
    with pytest.raises(WeightError, match="row 7"):
        quantize_rows(weight_NK, moments_of(x_TK), config())
    weight_NK[7, 9] = 2e5
    scales_SK = torch.stack([torch.ones(64), torch.full((64,), 2.0)])
    losses_S = scale_losses(weight_NK, moments_of(x_TK).second_KK, scales_SK, config())
    assert losses_S.isfinite().tolist() == [True, False]


def test_inputs_too_large_for_any_loss_leave_the_weights_unscaled():
    weight_NK, x_TK = layer()
    moments = moments_of(x_TK / x_TK.abs().max() * 1e18)
    scales_SK = candidate_scales(moments.magnitude_K, torch.ones(64), one_to_one(64), config())
    huge_NK = weight_NK * 1e6
    losses_S = scale_losses(huge_NK, moments.second_KK, scales_SK, config())
    assert not bool(losses_S.isnan().any())
    assert best_candidate(torch.full((40,), float("inf"))) == 0
    rows = quantize_rows(huge_NK, moments, config())
    assert bool(rows.scales_NG.isfinite().all())


# Folding --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("offset", [0, 1])
def test_a_folded_norm_and_the_scales_that_it_took_up_give_the_old_norm(offset, dtype):
    generator = torch.Generator().manual_seed(0)
    weight_N = (torch.randn(500, generator=generator) * 0.3 + (1 - offset)).to(dtype)
    weight_N[7] = -offset  # a channel that the norm switches off
    scale_N = torch.exp(torch.randn(500, generator=generator))
    folded_N, taken_N = fold_into_norm(weight_N, offset, scale_N)
    assert folded_N.dtype == dtype and bool(folded_N.isfinite().all())
    old_N, new_N = offset + weight_N.double(), offset + folded_N.double()
    torch.testing.assert_close(new_N * taken_N.double(), old_N, rtol=1e-6, atol=0.0)
    assert taken_N[7] == 1 and folded_N[7] == weight_N[7]
    away_N = (taken_N / scale_N - 1).abs()
    assert float(away_N.median()) < {torch.bfloat16: 0.01, torch.float16: 0.002, torch.float32: 1e-5}[dtype]


def test_a_norm_that_can_not_be_divided_in_its_dtype_stays_as_it_is():
    weight_N = torch.tensor([6e4, 1e-7, 1.0], dtype=torch.float16)
    folded_N, taken_N = fold_into_norm(weight_N, 0, torch.tensor([0.1, 1e4, 2.0]))
    assert torch.equal(folded_N[:2], weight_N[:2]) and taken_N[:2].tolist() == [1.0, 1.0]
    assert folded_N[2] == 0.5 and taken_N[2] == 2


def test_rows_that_division_would_put_out_of_reach_stay_as_they_are():
    weight_NK = torch.ones(3, 8)
    weight_NK[1] = 1e5
    taken_N = fold_into_rows(weight_NK, torch.tensor([0.1, 0.1, 3.0]), config())
    torch.testing.assert_close(taken_N, torch.tensor([0.1, 1.0, 3.0]))


def test_scales_in_powers_of_two_are_the_nearest_by_ratio_and_each_is_tried_once():
    scales_SK = torch.tensor([[1.0, 1.0], [1.4, 0.72], [1.5, 0.7], [1e4, 1e-4]])
    assert in_powers_of_two(scales_SK).tolist() == [[1.0, 1.0], [2.0, 0.5], [8192.0, 2.0**-13]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_folded_exactly_gives_the_same_products_to_the_last_bit(dtype):
    generator = torch.Generator().manual_seed(0)
    weight_N, matrix_MN = ((0.1 * torch.randn(*shape, 64, generator=generator)).to(dtype) for shape in ((), (8,)))
    scale_N = torch.exp2(torch.randint(-8, 9, (64,), generator=generator).float())
    norm_N, (router_MN,), taken_N = fold_exactly(weight_N, [matrix_MN], scale_N)
    assert norm_N.dtype == router_MN.dtype == dtype and torch.equal(taken_N, scale_N)
    x_TN = torch.randn(50, 64, generator=generator).to(dtype)
    assert torch.equal((x_TN * norm_N) @ router_MN.T, (x_TN * weight_N) @ matrix_MN.T)


def test_a_channel_that_leaves_the_range_of_its_dtype_is_not_folded():
    """A norm that would be subnormal, a router that would be, and one that would overflow; zeros stay zeros."""
    tiny, huge = torch.finfo(torch.bfloat16).tiny, torch.finfo(torch.bfloat16).max
    weight_N = torch.tensor([tiny, 1.0, 1.0, 0.0, 1.0], dtype=torch.bfloat16)
    matrix_MN = torch.tensor([[1.0, tiny, huge, 1.0, 1.0]], dtype=torch.bfloat16)
    norm_N, (router_MN,), taken_N = fold_exactly(weight_N, [matrix_MN], torch.tensor([2.0, 0.5, 2.0, 2.0, 2.0]))
    assert taken_N.tolist() == [1.0, 1.0, 1.0, 2.0, 2.0]
    assert norm_N.tolist() == [tiny, 1.0, 1.0, 0.0, 0.5] and router_MN.tolist() == [[1.0, tiny, huge, 2.0, 2.0]]
