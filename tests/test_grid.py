"""The integer grid: what it covers, how near it comes, and what it refuses."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tasks.methods.grid import (
    LARGEST_HALF,
    QuantizedRows,
    WeightError,
    check_weight,
    columns_per_group,
    find_grid,
    round_to_grid,
)
from tasks.quantization import GPTQConfig, RTNConfig

BITS = [2, 3, 4, 8]


@st.composite
def groups(draw: st.DrawFn) -> tuple[Tensor, RTNConfig]:
    """Rows of one group, of any magnitude that a float16 scale reaches, perhaps shifted off zero, and a grid for them."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    magnitude = 10.0 ** draw(st.floats(-9, 4))
    shift = draw(st.sampled_from([0.0, 0.0, 1.0, -1.0, 4.0]))
    weight_RC = (torch.randn(5, draw(st.integers(1, 40)), generator=generator) + shift) * magnitude
    config = RTNConfig(
        bits=draw(st.sampled_from(BITS)),
        sym=draw(st.booleans()),
        checkpoint_format=draw(st.sampled_from(["gptq", "gptq_v2"])),
    )
    return weight_RC, config


@given(groups())
@example((torch.zeros(3, 4), RTNConfig(sym=True)))
@example((torch.zeros(3, 4), RTNConfig(sym=False)))
@example((torch.full((1, 4), 3.0), RTNConfig(bits=2, sym=False)))
@example((torch.full((1, 4), 2.0**-30), RTNConfig(sym=False)))
@settings(deadline=None)
def test_rounding_inside_the_grid_is_off_by_at_most_half_a_step(case):
    weight_RC, config = case
    scale_R, zero_R = find_grid(weight_RC, config)
    codes_RC = round_to_grid(weight_RC, scale_R[:, None], zero_R[:, None], config.bits)
    error_RC = ((codes_RC - zero_R[:, None]) * scale_R[:, None] - weight_RC).abs()
    lowest_R, highest_R = -zero_R * scale_R, (2**config.bits - 1 - zero_R) * scale_R
    is_inside_RC = (weight_RC >= lowest_R[:, None]) & (weight_RC <= highest_R[:, None])
    half_RC = scale_R[:, None] / 2 * (1 + 1e-5)  # float32 rounding of weight / scale
    assert bool((error_RC <= half_RC)[is_inside_RC].all())


@given(groups())
@example((torch.full((1, 4), 3.0), RTNConfig(bits=2, sym=False)))
@settings(deadline=None)
def test_the_grid_covers_its_group(case):
    weight_RC, config = case
    scale_R, zero_R = find_grid(weight_RC, config)
    last_code = 2**config.bits - 1
    # Half a step beyond the last code still rounds to it well; the scale's float16 rounding moves the ends by
    # last_code * 2^-11 of a step, a zero point's rounding by half a step.
    slack_R = scale_R * (0.5 + last_code * 2.0**-11 + 1e-4)
    assert bool((weight_RC.amin(dim=1) >= -zero_R * scale_R - slack_R).all())
    assert bool((weight_RC.amax(dim=1) <= (last_code - zero_R) * scale_R + slack_R).all())


@given(groups())
@settings(deadline=None)
def test_scales_are_positive_float16_values_and_zeros_are_codes(case):
    weight_RC, config = case
    scale_R, zero_R = find_grid(weight_RC, config)
    assert torch.equal(scale_R, scale_R.half().float())
    assert bool(((scale_R > 0) & scale_R.isfinite()).all())
    assert torch.equal(zero_R, zero_R.round())
    lowest = 1 if config.checkpoint_format == "gptq" else 0
    assert int(zero_R.min()) >= lowest and int(zero_R.max()) <= 2**config.bits - 1


@pytest.mark.parametrize("bits", BITS)
def test_a_symmetric_grid_has_its_zero_in_the_middle_code(bits):
    _, zero_R = find_grid(torch.randn(4, 8), RTNConfig(bits=bits))
    assert zero_R.tolist() == [2 ** (bits - 1)] * 4


@pytest.mark.parametrize("bits", BITS)
def test_a_symmetric_grid_uses_the_code_more_that_it_has_below_zero(bits):
    middle = 2 ** (bits - 1)
    negative_scale_R, _ = find_grid(torch.tensor([[-1.0, 0.2, 0.5]]), RTNConfig(bits=bits))
    positive_scale_R, _ = find_grid(torch.tensor([[1.0, -0.2, -0.5]]), RTNConfig(bits=bits))
    assert negative_scale_R.item() == 1 / middle  # -1 has a code of its own
    assert positive_scale_R.item() == pytest.approx(1 / (middle - 0.5), rel=2.0**-11)  # 1 is half a step off


@pytest.mark.parametrize("bits", BITS)
def test_positive_groups_keep_zero_point_0_only_where_the_layout_can_store_it(bits):
    weight_RC = torch.linspace(0.1, 1.0, 16)[None]
    scale_R, zero_R = find_grid(weight_RC, RTNConfig(bits=bits, sym=False, checkpoint_format="gptq_v2"))
    assert (zero_R.item(), scale_R.item()) == (0, pytest.approx(1 / (2**bits - 1), rel=1e-3))
    scale_R, zero_R = find_grid(weight_RC, RTNConfig(bits=bits, sym=False, checkpoint_format="gptq"))
    assert (zero_R.item(), scale_R.item()) == (1, pytest.approx(1 / (2**bits - 2), rel=1e-3))


@pytest.mark.parametrize("sym", [True, False])
def test_steps_below_the_normal_halves_are_rounded_up_so_that_no_weight_is_clipped(sym):
    for exponent in range(-45, -10):
        weight_RC = torch.tensor([[-1.0, 0.3, 1.0]]) * 2.0**exponent * 1.37
        scale_R, zero_R = find_grid(weight_RC, RTNConfig(sym=sym))
        codes_RC = round_to_grid(weight_RC, scale_R[:, None], zero_R[:, None], 4)
        error_RC = ((codes_RC - zero_R[:, None]) * scale_R[:, None] - weight_RC).abs()
        assert float(error_RC.max()) <= float(scale_R) * 0.51


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_the_search_never_loses_to_the_full_range(bits, sym):
    torch.manual_seed(0)
    weight_RC = torch.randn(64, 32) ** 3

    def errors(config: RTNConfig) -> Tensor:
        scale_R, zero_R = find_grid(weight_RC, config)
        codes_RC = round_to_grid(weight_RC, scale_R[:, None], zero_R[:, None], bits)
        return ((codes_RC - zero_R[:, None]) * scale_R[:, None] - weight_RC).abs().pow(2.4).sum(dim=1)

    # v2, where neither integer beside the ideal zero is out of bounds.
    plain = RTNConfig(bits=bits, sym=sym, checkpoint_format="gptq_v2")
    searched_R, plain_R = errors(plain.model_copy(update={"mse": 2.4})), errors(plain)
    assert bool((searched_R <= plain_R).all())
    if bits < 8:
        assert float(searched_R.sum()) < float(plain_R.sum()) * 0.99


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_refused_with_its_row(bad):
    weight_NK = torch.randn(6, 32).bfloat16()
    weight_NK[4, 7] = bad
    with pytest.raises(WeightError, match=r"row 4 .*NaN or infinite"):
        check_weight(weight_NK, RTNConfig())


@pytest.mark.parametrize("bits", BITS)
def test_the_largest_weight_is_the_one_whose_scale_is_the_largest_half(bits):
    limit = LARGEST_HALF * (2**bits - 1) / 2
    weight_NK = torch.zeros(3, 32)
    weight_NK[1, 0] = limit
    check_weight(weight_NK, RTNConfig(bits=bits))
    scale_R, _ = find_grid(weight_NK, RTNConfig(bits=bits))
    assert scale_R[1].item() == LARGEST_HALF
    weight_NK[1, 0] = limit * 1.001
    with pytest.raises(WeightError, match=f"row 1 .*at {bits} bits .*use more bits"):
        check_weight(weight_NK, RTNConfig(bits=bits))


def test_a_group_size_that_does_not_divide_is_refused():
    assert columns_per_group(576, RTNConfig(group_size=64)) == 64
    assert columns_per_group(576, RTNConfig(group_size=-1)) == 576
    with pytest.raises(ValueError, match="in_features 576 is not a multiple of group_size 128"):
        columns_per_group(576, GPTQConfig(group_size=128))


@st.composite
def quantized_rows(draw: st.DrawFn) -> QuantizedRows:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows, groups, size = draw(st.integers(1, 9)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    return QuantizedRows(
        torch.randint(0, 16, (rows, groups * size), generator=generator).to(torch.uint8),
        (torch.rand(rows, groups, generator=generator) + 0.1).half(),
        torch.randint(0, 16, (rows, groups), generator=generator).to(torch.int32),
        torch.arange(groups, dtype=torch.int32).repeat_interleave(size),
        torch.rand(rows, generator=generator),
    )


@given(quantized_rows(), st.data())
@settings(deadline=None)
def test_concatenating_slices_gives_the_rows_back(rows, data):
    count = len(rows.codes_NK)
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=4)))
    parts = [rows.rows(a, b) for a, b in zip([0, *cuts], [*cuts, count], strict=True)]
    joined = QuantizedRows.concatenate(parts)
    for field in ("codes_NK", "scales_NG", "zeros_NG", "g_idx_K", "losses_N"):
        assert torch.equal(getattr(joined, field), getattr(rows, field))
    assert torch.equal(joined.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert joined.loss == pytest.approx(float(rows.losses_N.mean()))


def test_rows_with_other_groups_are_not_joined():
    rows = QuantizedRows(
        torch.zeros(1, 4, dtype=torch.uint8),
        torch.ones(1, 2, dtype=torch.half),
        torch.zeros(1, 2, dtype=torch.int32),
        torch.tensor([0, 0, 1, 1], dtype=torch.int32),
        torch.zeros(1),
    )
    other = QuantizedRows(
        rows.codes_NK, rows.scales_NG, rows.zeros_NG, torch.tensor([0, 1, 0, 1], dtype=torch.int32), rows.losses_N
    )
    with pytest.raises(ValueError, match="different `g_idx`"):
        QuantizedRows.concatenate([rows, other])


def test_dequantizing_follows_g_idx():
    rows = QuantizedRows(
        torch.tensor([[3, 5, 1]], dtype=torch.uint8),
        torch.tensor([[0.5, 2.0]], dtype=torch.half),
        torch.tensor([[1, 4]], dtype=torch.int32),
        torch.tensor([1, 0, 1], dtype=torch.int32),
        torch.zeros(1),
    )
    assert rows.dequantize().tolist() == [[-2.0, 2.0, -6.0]]
