"""ParoQuant: rotations that undo each other, a sample that does not depend on luck, and learning that pays."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tasks.methods.grid import WeightError
from tasks.methods.paroquant import (
    ROTATIONS,
    InputSample,
    ParoRows,
    Rotation,
    draw_pairs,
    quantize_weight,
    times_groups,
)
from tasks.quantization import ParoQuantConfig

QUICK = ParoQuantConfig(group_size=64, rotation_epochs=2, finetune_epochs=1, train_samples=256, validation_samples=32)


def ignore(what: str, error: float) -> None:
    """Progress that nobody looks at."""


def layer(out_features: int = 24, in_features: int = 128, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weights and inputs whose channels differ much in size."""
    generator = torch.Generator().manual_seed(seed)
    mixing_KK = torch.randn(in_features, in_features, generator=generator) / in_features**0.5 + torch.eye(in_features)
    x_TK = torch.randn(288, in_features, generator=generator) @ mixing_KK
    x_TK *= torch.randn(in_features, generator=generator).exp()
    weight_NK = torch.randn(out_features, in_features, generator=generator) / 50
    return weight_NK * torch.randn(in_features, generator=generator).exp(), x_TK


def output_error(weight_NK: Tensor, x_TK: Tensor, rows: ParoRows) -> float:
    return float((x_TK @ (weight_NK - rows.dequantize()).T).square().mean())


@pytest.mark.parametrize("group_size", [64, 128])
def test_each_rotation_pairs_every_channel_once_and_no_pair_comes_twice(group_size: int) -> None:
    pairs_RK = draw_pairs(3 * group_size, group_size, "model.layers.0.mlp.up_proj", 0)
    assert pairs_RK.dtype == torch.int16 and pairs_RK.shape == (ROTATIONS, 3 * group_size)
    for group_RC in pairs_RK.split(group_size, dim=1):
        met = set()
        for row_C in group_RC:
            assert sorted(row_C.tolist()) == list(range(group_size))
            met |= {frozenset(pair) for pair in row_C.reshape(-1, 2).tolist()}
        assert len(met) == ROTATIONS * group_size // 2


def test_pairs_depend_on_the_seed_and_the_modules_name_and_on_nothing_else() -> None:
    drawn = draw_pairs(128, 64, "a", 0)
    torch.manual_seed(1)
    assert torch.equal(draw_pairs(128, 64, "a", 0), drawn)
    assert not torch.equal(draw_pairs(128, 64, "b", 0), drawn)
    assert not torch.equal(draw_pairs(128, 64, "a", 1), drawn)
    assert not torch.equal(drawn[:, :64], drawn[:, 64:])


def one_by_one(x_TK: Tensor, rotation: Rotation) -> Tensor:
    """What the layout says that a reader does, pair by pair, in float64."""
    out_TK = x_TK.double() * rotation.channel_scales_K.double()
    half = rotation.group_size // 2
    for pairs_K, theta_P in zip(rotation.pairs_RK.long(), rotation.theta_RP.double(), strict=True):
        for number, (first, second) in enumerate(pairs_K.reshape(-1, 2)):
            start = number // half * rotation.group_size
            x_T, y_T = out_TK[:, start + first].clone(), out_TK[:, start + second].clone()
            cos, sin = theta_P[number].cos(), theta_P[number].sin()
            out_TK[:, start + first], out_TK[:, start + second] = x_T * cos + y_T * sin, y_T * cos - x_T * sin
    return out_TK


def test_one_matrix_a_group_is_the_rotations_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    theta_RP = torch.randn(ROTATIONS, 64, generator=generator).half()
    rotation = Rotation(draw_pairs(128, 64, "m", 0), theta_RP, torch.rand(128, generator=generator).half() + 0.5, 64)
    x_TK = torch.randn(5, 128, generator=generator)
    turned_TK = times_groups(x_TK * rotation.channel_scales_K.float(), rotation.matrices())
    torch.testing.assert_close(turned_TK, one_by_one(x_TK, rotation).float())  # float32 against float64
    identity_GCC = rotation.matrices() @ rotation.matrices().mT
    torch.testing.assert_close(identity_GCC, torch.eye(64).expand(2, -1, -1), rtol=0, atol=1e-5)


def test_what_is_exported_gives_the_outputs_of_a_reader_that_turns_its_inputs() -> None:
    weight_NK, x_TK = layer()
    rows = quantize_weight(weight_NK, x_TK, QUICK, "m", 0, ignore)
    as_read_TN = one_by_one(x_TK, rows.rotation) @ rows.turned.dequantize().double().T
    torch.testing.assert_close(x_TK @ rows.dequantize().T, as_read_TN.float(), rtol=1e-4, atol=1e-4)
    assert rows.loss == pytest.approx(output_error(weight_NK, x_TK, rows), rel=1e-4)


def test_learning_lowers_the_output_error_also_on_tokens_that_it_never_saw() -> None:
    weight_NK, x_TK = layer()
    seen_TK, unseen_TK = x_TK[:224], x_TK[224:]
    config = QUICK.model_copy(update={"rotation_epochs": 6, "train_batch_size": 32})
    plain = quantize_weight(weight_NK, None, config, "m", 0, ignore)
    rotated = quantize_weight(weight_NK, seen_TK, config.model_copy(update={"finetune_epochs": 0}), "m", 0, ignore)
    both = quantize_weight(weight_NK, seen_TK, config, "m", 0, ignore)
    for tokens_TK in (seen_TK, unseen_TK):
        assert output_error(weight_NK, tokens_TK, rotated) < 0.6 * output_error(weight_NK, tokens_TK, plain)
    assert output_error(weight_NK, seen_TK, both) < output_error(weight_NK, seen_TK, rotated)


def test_a_state_that_learning_made_worse_is_not_kept() -> None:
    weight_NK, x_TK = layer()
    wild = QUICK.model_copy(update={"rotation_lr": 50.0, "weight_lr": 10.0})
    told: list[float] = []
    rows = quantize_weight(weight_NK, x_TK, wild, "m", 0, lambda what, error: told.append(error))
    plain = quantize_weight(weight_NK, None, wild, "m", 0, ignore)
    assert max(told) > 10 * min(told) or told[0] > 1
    assert output_error(weight_NK, x_TK, rows) <= 1.01 * output_error(weight_NK, x_TK, plain)


def test_progress_tells_each_epoch_of_both_stages() -> None:
    weight_NK, x_TK = layer()
    told: list[str] = []
    quantize_weight(weight_NK, x_TK, QUICK, "m", 0, lambda what, error: told.append(what))
    assert told == ["rotations, epoch 1 of 2", "rotations, epoch 2 of 2", "weights, epoch 1 of 1"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_same_bits_come_out_twice_and_half_precision_weights_are_their_float32_values(dtype: torch.dtype) -> None:
    weight_NK, x_TK = layer()
    weight_NK = weight_NK.to(dtype)
    first = quantize_weight(weight_NK, x_TK, QUICK, "m", 0, ignore)
    with torch.no_grad():
        again = quantize_weight(weight_NK.float(), x_TK, QUICK, "m", 0, ignore)
    for name in ("codes_NK", "scales_NG", "zeros_NG", "losses_N"):
        assert torch.equal(getattr(first.turned, name), getattr(again.turned, name))
    for name in ("pairs_RK", "theta_RP", "channel_scales_K"):
        assert torch.equal(getattr(first.rotation, name), getattr(again.rotation, name))


extremes = st.sampled_from([0.0, 1e-30, 1e-6, 1.0, 1e4])


@given(st.lists(extremes, min_size=2, max_size=2), st.booleans())
def test_weights_of_any_size_stay_finite_and_zeros_stay_zeros(sizes: list[float], learns: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    weight_NK = torch.cat([torch.randn(8, 64, generator=generator) * size for size in sizes], dim=1)
    config = QUICK.model_copy(update={"rotation_epochs": 1, "train_batch_size": 32})
    sample_TK = torch.randn(40, 128, generator=generator) if learns else None
    rows = quantize_weight(weight_NK, sample_TK, config, "m", 0, ignore)
    dense_NK = rows.dequantize()
    assert bool(dense_NK.isfinite().all())
    if not any(sizes):
        assert not bool(dense_NK.any())
    largest = float(weight_NK.abs().max())
    assert float((dense_NK - weight_NK).abs().max()) <= 0.3 * largest + 1e-6


def test_weights_that_no_scale_reaches_and_nan_are_refused_by_row() -> None:
    weight_NK, _ = layer()
    for value, message in ((torch.nan, "row 3 .*NaN"), (1e7, "row 3 holds weights whose step does not fit float16")):
        broken_NK = weight_NK.clone()
        broken_NK[3, 5] = value
        with pytest.raises(WeightError, match=message):
            quantize_weight(broken_NK, None, QUICK, "m", 0, ignore)


# The sample ---------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 30))
def test_a_sample_does_not_depend_on_how_tokens_are_cut_into_batches(sizes: list[int], rows: int) -> None:
    x_TK = torch.arange(sum(sizes), dtype=torch.float32)[:, None]
    by_batch, at_once = InputSample(1, "cpu", rows), InputSample(1, "cpu", rows)
    for part in x_TK.split(sizes):
        by_batch.add(part)
    at_once.add(x_TK)
    assert torch.equal(by_batch.sample(), at_once.sample())
    assert by_batch.tokens == len(x_TK)
    assert len(by_batch.sample()) <= rows
    assert len(x_TK) <= rows or 2 * len(by_batch.sample()) >= rows - 1


@given(st.lists(st.integers(0, 60), min_size=2, max_size=5), st.integers(2, 30))
def test_lanes_are_merged_in_order_and_stay_evenly_spread(lanes: list[int], rows: int) -> None:
    total, start = InputSample(1, "cpu", rows), 0
    for length in lanes:
        lane = InputSample(1, "cpu", rows)
        lane.add(torch.arange(start, start + length, dtype=torch.float32)[:, None])
        total.merge(lane)
        start += length
    kept = total.sample()[:, 0].tolist()
    assert kept == sorted(set(kept)) and len(kept) <= rows
    assert total.tokens == sum(lanes)
    assert len(kept) >= min(sum(lanes), rows // 4)


def test_a_sample_keeps_its_own_copy() -> None:
    sample, x_TK = InputSample(4, "cpu", 8), torch.ones(3, 4)
    sample.add(x_TK)
    x_TK.zero_()
    assert bool((sample.sample() == 1).all())
