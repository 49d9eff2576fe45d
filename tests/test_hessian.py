"""The Hessian and its factor against numpy, whatever the batches, and its damping."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tasks.methods import hessian
from tasks.methods.hessian import ActivationError, HessianError, HessianSum, factor_hessian
from tasks.quantization import GPTQConfig


def hessian_of(x_TK: Tensor) -> Tensor:
    total = HessianSum(x_TK.shape[1], "cpu")
    total.add(x_TK)
    return total.hessian()


@given(st.sampled_from([("desc_act", 32), ("act_group_aware", 8), ("act_group_aware", -1)]), st.integers(0, 2**31))
@settings(deadline=None)
def test_every_order_is_a_permutation_that_its_inverse_undoes(case, seed):
    option, group_size = case
    config = GPTQConfig(group_size=group_size, **{option: True})
    generator = torch.Generator().manual_seed(seed)
    # Few distinct values, so that there are ties, and dead columns.
    diagonal_K = torch.randint(0, 5, (32,), generator=generator).float()
    factor = factor_hessian(torch.diag(diagonal_K), config)
    assert torch.equal(factor.order_K.argsort()[factor.order_K], torch.arange(32))
    ordered_K = diagonal_K[factor.order_K]
    if option == "desc_act" or group_size == -1:
        assert bool((ordered_K.diff() <= 0).all())
    else:
        assert bool((ordered_K.reshape(-1, 8).diff(dim=1) <= 0).all())
        assert bool((ordered_K.reshape(-1, 8)[:, 0].diff() <= 0).all())
        assert bool((factor.order_K.reshape(-1, 8) // 8 == factor.order_K.reshape(-1, 8)[:, :1] // 8).all())


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 2**31))
@settings(deadline=None)
def test_the_hessian_does_not_depend_on_how_tokens_are_batched_or_laned(sizes, seed):
    x_TK = torch.randn(sum(sizes), 24, generator=torch.Generator().manual_seed(seed))
    lanes = [HessianSum(24, "cpu"), HessianSum(24, "cpu")]
    for i, part_TK in enumerate(x_TK.split(sizes)):
        lanes[i % 2].add(part_TK[None])
    lanes[0].merge(lanes[1])
    assert lanes[0].tokens == len(x_TK)
    exact_KK = 2 / len(x_TK) * x_TK.double().T @ x_TK.double()
    # float32 sums in another order
    torch.testing.assert_close(lanes[0].hessian().double(), exact_KK, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("in_features", [1, 255, 256, 257, 600])
def test_the_hessian_is_exactly_symmetric_and_whole_for_every_width(in_features):
    x_TK = torch.randn(50, in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
    hessian_KK = hessian_of(x_TK)
    assert torch.equal(hessian_KK, hessian_KK.T)
    exact_KK = 2 / 50 * x_TK.double().T @ x_TK.double()
    torch.testing.assert_close(hessian_KK.double(), exact_KK, rtol=1e-5, atol=1e-6)


def test_262144_tokens_in_small_batches_lose_no_precision():
    generator = torch.Generator().manual_seed(0)
    total, exact_KK = HessianSum(16, "cpu"), torch.zeros(16, 16, dtype=torch.float64)
    for _ in range(4096):
        x_TK = torch.randn(64, 16, generator=generator) + 3  # the mean makes every term positive: the worst case
        total.add(x_TK)
        exact_KK += x_TK.double().T @ x_TK.double()
    assert total.tokens == 262_144
    torch.testing.assert_close(total.hessian().double(), 2 / 262_144 * exact_KK, rtol=1e-5, atol=0)


def test_no_token_at_all_is_an_error_with_a_way_out():
    with pytest.raises(HessianError, match="no calibration token reached this module"):
        HessianSum(8, "cpu").hessian()


def test_duplicated_channels_still_factor():
    x_TK = torch.randn(400, 96, generator=torch.Generator().manual_seed(0))
    factor = factor_hessian(
        hessian_of(torch.cat([x_TK, x_TK], dim=1)), GPTQConfig(act_group_aware=False, damp_percent=1e-6)
    )
    assert bool(factor.feedback_KK.isfinite().all() and (factor.pivots_K > 0).all())


@pytest.mark.parametrize("in_features", [1, 5, 256, 300])
@pytest.mark.parametrize("desc_act", [True, False])
def test_the_factor_is_the_upper_cholesky_factor_of_the_damped_inverse(desc_act, in_features):
    generator = torch.Generator().manual_seed(0)
    x_TK = torch.randn(200, in_features, generator=generator) * torch.rand(in_features, generator=generator)
    hessian_KK = hessian_of(x_TK)
    factor = factor_hessian(hessian_KK, GPTQConfig(desc_act=desc_act, act_group_aware=False, damp_percent=0.02))
    damped = hessian_KK.double().numpy()
    damped += 0.02 * np.diag(damped).mean() * np.eye(in_features)
    if factor.order_K is not None:
        order = factor.order_K.numpy()
        damped = damped[np.ix_(order, order)]
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T
    # float32 at the end
    np.testing.assert_allclose(factor.pivots_K, np.diag(upper), rtol=1e-5)
    np.testing.assert_allclose(factor.feedback_KK.T, upper / np.diag(upper)[:, None], rtol=1e-5, atol=1e-7)
    assert (factor.damp_percent, factor.raised) == (0.02, 0)


@pytest.mark.parametrize("panel", [1, 7, 64, 100])
def test_panels_give_the_factor_of_the_whole_and_another_try_starts_from_the_hessian(panel, monkeypatch):
    x_TK = torch.randn(300, 100, generator=torch.Generator().manual_seed(0))
    hessian_KK = hessian_of(x_TK)
    hessian_KK[70, 70] = -0.3  # fails in a late panel, some times
    config = GPTQConfig(act_group_aware=False, damp_percent=0.05)
    whole = factor_hessian(hessian_KK, config)
    given_KK = hessian_KK.clone()
    monkeypatch.setattr(hessian, "PANEL_COLUMNS", panel)
    factor = factor_hessian(hessian_KK, config)
    assert torch.equal(hessian_KK, given_KK)
    assert factor.raised == whole.raised > 2
    torch.testing.assert_close(factor.feedback_KK, whole.feedback_KK, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(factor.pivots_K, whole.pivots_K, rtol=1e-5, atol=0)
    damped = hessian_KK.double().numpy() + factor.damp_percent * hessian_KK.diagonal().double().mean().item() * np.eye(
        100
    )
    np.testing.assert_allclose(factor.pivots_K, np.diag(np.linalg.cholesky(np.linalg.inv(damped)).T), rtol=1e-5)


def test_dead_columns_do_not_change_the_damping_of_live_ones():
    """A diagonal of 1 for dead columns would, where activations are small."""
    x_TK = torch.randn(400, 64, generator=torch.Generator().manual_seed(0)) * 1e-4
    alone = factor_hessian(hessian_of(x_TK), GPTQConfig(act_group_aware=False))
    x_TK = torch.cat([x_TK, torch.zeros(400, 64)], dim=1)
    both = factor_hessian(hessian_of(x_TK), GPTQConfig(act_group_aware=False))
    assert both.dead_K.tolist() == [False] * 64 + [True] * 64
    torch.testing.assert_close(both.feedback_KK[:64, :64], alone.feedback_KK, rtol=1e-5, atol=1e-7)
    assert torch.equal(both.feedback_KK[64:, 64:], torch.eye(64))
    assert not both.feedback_KK[64:, :64].any()


def test_damping_is_raised_in_doubling_steps_until_the_hessian_factors():
    hessian_KK = torch.eye(64) * 0.95 + 0.05 * torch.ones(64, 64)
    hessian_KK[0, 0] = -0.3  # not positive definite below a damping of about 0.3
    config = GPTQConfig(act_group_aware=False, damp_percent=0.05, damp_increment=0.01)
    factor = factor_hessian(hessian_KK, config)
    steps = [0.05, 0.06, 0.08, 0.12, 0.20, 0.36]
    assert factor.damp_percent == pytest.approx(steps[factor.raised])
    assert factor.raised == 5


def test_a_hessian_that_no_damping_below_1_mends_is_a_named_error():
    hessian_KK = torch.eye(64)
    hessian_KK[5, 5] = -10
    with pytest.raises(HessianError, match=r"not positive definite .* round this module to nearest"):
        factor_hessian(hessian_KK, GPTQConfig(act_group_aware=False))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_are_no_matter_for_damping(bad):
    x_TK = torch.randn(50, 64)
    x_TK[17, 3] = bad
    with pytest.raises(ActivationError, match="NaN or Inf"):
        factor_hessian(hessian_of(x_TK), GPTQConfig(act_group_aware=False))
