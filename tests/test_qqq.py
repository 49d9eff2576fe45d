"""QQQ: what its codes stand for is what a reader multiplies, and nothing leaves the 8-bit numbers behind them."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from tasks.formats import qqq as layout
from tasks.methods import gptq
from tasks.methods.grid import WeightError
from tasks.methods.hessian import HessianSum, factor_hessian
from tasks.methods.qqq import QQQRows, as_gptq, quantize_rows, round_to_nearest
from tasks.quantization import GPTQConfig, QQQConfig

GOLDEN = Path(__file__).parent / "golden" / "gptqmodel_qqq.safetensors"
GROUP_SIZES = (128, -1)


def hessian_of(x_TK: Tensor) -> Tensor:
    total = HessianSum(x_TK.shape[1], "cpu")
    total.add(x_TK)
    return total.hessian()


def layer(out_features: int = 64, in_features: int = 384, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weights of rows of many sizes, and correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    weight_NK = torch.randn(out_features, in_features, generator=generator)
    weight_NK *= torch.randn(out_features, 1, generator=generator).exp()
    mixing_KK = torch.randn(in_features, in_features, generator=generator) / in_features**0.5 + torch.eye(in_features)
    return weight_NK, torch.randn(900, in_features, generator=generator) @ mixing_KK


def output_error(x_TK: Tensor, weight_NK: Tensor, rows: QQQRows) -> float:
    return float((x_TK @ (weight_NK - rows.dequantize()).T).square().mean())


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_error_feedback_beats_rounding_to_nearest(group_size: int) -> None:
    weight_NK, x_TK = layer()
    config = QQQConfig(group_size=group_size)
    rows = quantize_rows(weight_NK, factor_hessian(hessian_of(x_TK), as_gptq(config)), config)
    nearest = round_to_nearest(weight_NK, config)
    assert output_error(x_TK, weight_NK, rows) < 0.6 * output_error(x_TK, weight_NK, nearest)
    # The loss is the output error of undamped inputs, and damping adds little to it.
    assert rows.loss == pytest.approx(output_error(x_TK, weight_NK, rows), rel=0.05)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_output_error_is_below_another_programs_on_its_own_inputs(group_size: int) -> None:
    tensors = load_file(GOLDEN)
    x_TK, weight_NK = tensors["inputs"].float() / 8, tensors["weight"].float() / 1024
    theirs = layout.unpack(
        {f"m.{part}": tensors[f"g{group_size}.{part}"] for part in layout.parts(QQQConfig())}, "m", QQQConfig()
    )
    config = QQQConfig(group_size=group_size, act_group_aware=False)
    ours = quantize_rows(weight_NK, factor_hessian(hessian_of(x_TK), as_gptq(config)), config)
    ratio = output_error(x_TK, weight_NK, ours) / output_error(x_TK, weight_NK, theirs)
    assert 0.5 < ratio < 1.0
    in_order = quantize_rows(
        weight_NK, factor_hessian(hessian_of(x_TK), as_gptq(QQQConfig(group_size=group_size))), config
    )
    assert output_error(x_TK, weight_NK, in_order) < output_error(x_TK, weight_NK, ours)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_a_search_over_shrunken_grids_lowers_the_weight_error(group_size: int) -> None:
    weight_NK, _ = layer()
    error = {
        mse: (round_to_nearest(weight_NK, QQQConfig(group_size=group_size, mse=mse)).dequantize() - weight_NK).norm()
        for mse in (0.0, 2.0)
    }
    assert error[2.0] < error[0.0]


def test_groups_cost_little_against_a_grid_without_a_second_scale() -> None:
    weight_NK, x_TK = layer(in_features=512)
    config = QQQConfig()
    factor = factor_hessian(hessian_of(x_TK), as_gptq(config))
    plain = gptq.quantize_rows(weight_NK, factor, GPTQConfig(damp_percent=0.005))
    assert quantize_rows(weight_NK, factor, config).loss < 1.15 * plain.loss


extremes = st.sampled_from([0.0, 1e-45, 1e-38, 1e-20, 6e-5, 1.0, 3e4, 1e30])


@given(st.lists(extremes, min_size=2, max_size=4), st.sampled_from(GROUP_SIZES), st.sampled_from([0.0, 2.4]))
def test_rows_of_any_size_stay_inside_eight_bits_and_come_back_near(
    sizes: list[float], group_size: int, mse: float
) -> None:
    generator = torch.Generator().manual_seed(len(sizes))
    weight_NK = torch.cat([torch.randn(2, 128, generator=generator) * size for size in sizes], dim=1)
    config = QQQConfig(group_size=group_size, mse=mse)
    rows = round_to_nearest(weight_NK, config)
    assert bool((rows.channel_N > 0).all()) and bool(rows.channel_N.isfinite().all())
    steps_NGC = rows.codes_NK.float().sub(8).reshape(2, len(sizes), -1)
    unclamped_NGC = (steps_NGC * rows.group_NG[..., None].float()).round() if group_size > 0 else steps_NGC * 16
    assert float(unclamped_NGC.min()) >= -128 and float(unclamped_NGC.max()) <= 127  # kernels wrap instead
    dense_NK = rows.dequantize()
    assert bool(dense_NK.isfinite().all())
    assert bool((dense_NK[weight_NK == 0] == 0).all())
    if not mse:  # the search clips the largest weights for the sake of the others
        largest_N1 = weight_NK.abs().amax(dim=1, keepdim=True)
        assert bool(((dense_NK - weight_NK).abs() <= largest_N1 / 7 + 1e-28).all())


def test_weights_that_grow_past_the_channels_grid_are_clipped_and_their_error_passed_on() -> None:
    weight_NK, x_TK = layer(in_features=256)
    x_TK[:, 200] = 0.999 * x_TK[:, 0] + 0.001 * x_TK[:, 200]
    weight_NK[:, 0] = weight_NK.abs().amax(dim=1) * 1.4999  # whose rounding error all goes to column 200
    weight_NK[:, 200] = weight_NK[:, 0]
    config = QQQConfig(act_group_aware=False)
    rows = quantize_rows(weight_NK, factor_hessian(hessian_of(x_TK), as_gptq(config)), config)
    assert float(rows.group_NG.max()) <= 16
    assert output_error(x_TK, weight_NK, rows) < output_error(x_TK, weight_NK, round_to_nearest(weight_NK, config))


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_units_of_rows_join_to_the_whole(group_size: int) -> None:
    weight_NK, x_TK = layer()
    config = QQQConfig(group_size=group_size)
    factor = factor_hessian(hessian_of(x_TK), as_gptq(config))
    whole = quantize_rows(weight_NK, factor, config)
    joined = QQQRows.concatenate([whole.rows(0, 24), whole.rows(24, 64)])
    for name in ("codes_NK", "channel_N", "group_NG", "losses_N"):
        assert torch.equal(getattr(joined, name), getattr(whole, name))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_row(bad: float) -> None:
    weight_NK, _ = layer()
    weight_NK[5, 3] = bad
    with pytest.raises(WeightError, match="row 5"):
        round_to_nearest(weight_NK, QQQConfig())
