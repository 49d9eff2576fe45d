"""GPTQ against a plain float64 loop, against another program, and at the edges of its numbers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tasks.methods import rtn
from tasks.methods.gptq import Factor, HessianError, HessianSum, factor_hessian, quantize_rows
from tasks.methods.grid import QuantizedRows, WeightError, find_grid
from tasks.quantization import GPTQConfig

GOLDEN = Path(__file__).parent / "golden"
OPTIONS: dict[str, dict] = {
    "plain": {},
    "group 96": {"group_size": 96},
    "group 192": {"group_size": 192},
    "channel": {"group_size": -1},
    "asym": {"sym": False},
    "asym v2": {"sym": False, "checkpoint_format": "gptq_v2"},
    "2 bits": {"bits": 2},
    "3 bits": {"bits": 3, "sym": False},
    "8 bits": {"bits": 8},
    "desc_act": {"desc_act": True},
    "desc_act asym": {"desc_act": True, "sym": False},
    "group aware": {"act_group_aware": True},
    "group aware channel": {"act_group_aware": True, "group_size": -1},
    "static": {"static_groups": True},
    "static desc_act": {"static_groups": True, "desc_act": True, "sym": False},
    "static group aware": {"static_groups": True, "act_group_aware": True},
    "mse": {"mse": 2.4},
    "small blocks": {"block_size": 40},
    "one block": {"block_size": 1000},
}

THEIR_OPTIONS: dict[str, dict] = {
    "plain": {},
    "g64": {"group_size": 64},
    "channel": {"group_size": -1},
    "asym": {"sym": False},
    "b2": {"bits": 2},
    "b3": {"bits": 3},
    "b8": {"bits": 8},
    "desc_act": {"desc_act": True},
    "group_aware": {"act_group_aware": True},
    "static": {"static_groups": True},
    "static_desc_act": {"static_groups": True, "desc_act": True},
    "mse": {"mse": 2.4},
    "b2_asym_mse": {"bits": 2, "sym": False, "mse": 2.4},
}


def config_of(name: str) -> GPTQConfig:
    return GPTQConfig(**({"group_size": 32, "act_group_aware": False} | OPTIONS[name]))


def layer(out_features: int, in_features: int, tokens: int = 600, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight and inputs with correlated channels of very different size, as in a language model."""
    generator = torch.Generator().manual_seed(seed)
    mix_KK = torch.randn(in_features, in_features, generator=generator) / in_features**0.5 + torch.eye(in_features)
    size_K = torch.exp(torch.randn(in_features, generator=generator))
    x_TK = torch.randn(tokens, in_features, generator=generator) @ mix_KK * size_K
    return torch.randn(out_features, in_features, generator=generator) * 0.02, x_TK


def hessian_of(x_TK: Tensor) -> Tensor:
    hessian = HessianSum(x_TK.shape[1], "cpu")
    hessian.add(x_TK)
    return hessian.hessian()


def output_error(rows: QuantizedRows, weight_NK: Tensor, x_TK: Tensor) -> float:
    return float(((rows.dequantize() - weight_NK).double() @ x_TK.double().T).square().mean())


def quantize_plainly(weight_NK: Tensor, hessian_KK: Tensor, config: GPTQConfig) -> np.ndarray:
    """GPTQ in float64 as the paper writes it, one column and all later ones at a time; the dequantized weights [N, K].

    Grids come from `find_grid`, which has its own tests.
    """
    w = weight_NK.double().numpy().copy()
    h = hessian_KK.double().numpy().copy()
    columns, size = w.shape[1], w.shape[1] if config.group_size == -1 else config.group_size
    diagonal = np.diag(h).copy()
    order = np.arange(columns)
    if config.desc_act:
        order = np.argsort(-diagonal, kind="stable")
    if config.act_group_aware:
        groups = [order[start : start + size] for start in range(0, columns, size)]
        groups = [group[np.argsort(-diagonal[group], kind="stable")] for group in groups]
        order = np.concatenate([groups[i] for i in np.argsort([-diagonal[g].max() for g in groups], kind="stable")])
    original = w.copy()
    w, h = w[:, order], h[order][:, order]
    h[np.diag_indices(columns)] += config.damp_percent * diagonal.mean()
    upper = np.linalg.cholesky(np.linalg.inv(h)).T

    def grid(group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scale, zero = find_grid(torch.from_numpy(group).float(), config)
        return scale.double().numpy(), zero.double().numpy()

    static = [grid(original[:, start : start + size]) for start in range(0, columns, size)]
    dense, grids = np.zeros_like(w), {}
    at_block_start = w.copy()
    for i in range(columns):
        if i % config.block_size == 0:
            at_block_start = w.copy()
        if i % size == 0:
            grids[i // size] = grid(at_block_start[:, i : i + size])
        scale, zero = static[order[i] // size] if config.static_groups else grids[i // size]
        code = np.clip(np.round(w[:, i] / scale) + zero, 0, 2**config.bits - 1)
        dense[:, i] = scale * (code - zero)
        error = (w[:, i] - dense[:, i]) / upper[i, i]
        w[:, i:] -= np.outer(error, upper[i, i:])
    return dense[:, np.argsort(order)]


@pytest.mark.parametrize("name", OPTIONS)
def test_it_agrees_with_a_plain_float64_loop(name):
    config = config_of(name)
    weight_NK, x_TK = layer(24, 192)
    hessian_KK = hessian_of(x_TK)
    rows = quantize_rows(weight_NK, factor_hessian(hessian_KK, config), config)
    expected_NK = torch.from_numpy(quantize_plainly(weight_NK, hessian_KK, config))
    # Where float32 puts a weight on the other side of a rounding boundary, its row goes another, equally good way.
    same_N = torch.isclose(rows.dequantize().double(), expected_NK, rtol=1e-6, atol=1e-9).all(dim=1)
    assert same_N.double().mean() > (0.5 if config.bits == 8 else 0.85)
    theirs = float(((expected_NK - weight_NK) @ x_TK.double().T).square().mean())
    assert output_error(rows, weight_NK, x_TK) == pytest.approx(theirs, rel=0.01)


def theirs_and_ours(name: str) -> tuple[QuantizedRows, QuantizedRows, float]:
    """What GPTQModel made of the golden layer, what we make of it, and the ratio of our output error to theirs."""
    tensors = load_file(GOLDEN / "gptqmodel_gptq.safetensors")
    weight_NK, x_TK = tensors["weight"].float() / 1024, tensors["inputs"].float() / 8
    # v2, since that program chooses zero points of 0.
    plain = {"group_size": 32, "act_group_aware": False, "checkpoint_format": "gptq_v2"}
    config = GPTQConfig(**(plain | THEIR_OPTIONS[name]))
    theirs = QuantizedRows(
        tensors[f"{name}.codes"],
        tensors[f"{name}.scales"],
        tensors[f"{name}.zeros"].int(),
        tensors[f"{name}.g_idx"].int(),
        torch.zeros(12),
    )
    ours = quantize_rows(weight_NK, factor_hessian(hessian_of(x_TK), config), config)
    return theirs, ours, output_error(ours, weight_NK, x_TK) / output_error(theirs, weight_NK, x_TK)


@pytest.mark.parametrize("name", ["asym", "b2_asym_mse"])
def test_it_chooses_the_codes_of_another_program_where_the_grids_are_alike(name):
    theirs, ours, ratio = theirs_and_ours(name)
    # Theirs chooses codes before scales are rounded to float16, so that a few rows of twelve take another turn at one
    # column, for better or worse.
    assert (ours.codes_NK == theirs.codes_NK).all(dim=1).sum() >= 8
    assert (ours.codes_NK == theirs.codes_NK).float().mean() > 0.96
    assert ratio < 1.05


@pytest.mark.parametrize("name", THEIR_OPTIONS)
def test_columns_fall_into_the_groups_that_another_program_gives_them(name):
    theirs, ours, ratio = theirs_and_ours(name)
    assert torch.equal(ours.g_idx_K, theirs.g_idx_K)
    assert torch.equal(ours.zeros_NG, theirs.zeros_NG) or "asym" in name
    assert ratio < 1.05


def test_over_all_options_it_beats_another_program_by_its_finer_symmetric_grid():
    ratios = torch.tensor([theirs_and_ours(name)[2] for name in THEIR_OPTIONS])
    assert float(ratios.log().mean().exp()) < 0.95


@pytest.mark.parametrize("name", OPTIONS)
def test_it_beats_rounding_to_nearest_on_the_inputs_it_saw(name):
    config = config_of(name)
    weight_NK, x_TK = layer(16, 192)
    rows = quantize_rows(weight_NK, factor_hessian(hessian_of(x_TK), config), config)
    assert output_error(rows, weight_NK, x_TK) < 0.95 * output_error(
        rtn.quantize_rows(weight_NK, config), weight_NK, x_TK
    )


def test_the_loss_is_the_mean_squared_output_error_when_damping_is_small():
    weight_NK, x_TK = layer(16, 96)
    config = GPTQConfig(group_size=32, damp_percent=1e-7)
    rows = quantize_rows(weight_NK, factor_hessian(hessian_of(x_TK), config), config)
    assert rows.loss == pytest.approx(output_error(rows, weight_NK, x_TK), rel=1e-3)
    assert rows.losses_N.shape == (16,)


@pytest.mark.parametrize("name", ["group aware", "group aware channel", "static desc_act", "plain"])
def test_orders_that_are_undone_leave_g_idx_natural(name):
    config = config_of(name)
    weight_NK, x_TK = layer(4, 192)
    rows = quantize_rows(weight_NK, factor_hessian(hessian_of(x_TK), config), config)
    size = 192 if config.group_size == -1 else config.group_size
    assert rows.g_idx_K.tolist() == [k // size for k in range(192)]


def test_desc_act_groups_columns_by_falling_activation():
    weight_NK, x_TK = layer(4, 192)
    hessian_KK = hessian_of(x_TK)
    config = config_of("desc_act")
    rows = quantize_rows(weight_NK, factor_hessian(hessian_KK, config), config)
    rank_K = hessian_KK.diagonal().argsort(descending=True).argsort()
    assert torch.equal(rows.g_idx_K.long(), rank_K // 32)


@pytest.mark.parametrize("name", ["plain", "desc_act", "group aware", "static desc_act"])
def test_dead_columns_keep_their_weight_rounded_plainly(name):
    config = config_of(name)
    weight_NK, x_TK = layer(8, 192)
    dead = [3, 64, 65, 191]
    x_TK[:, dead] = 0
    factor = factor_hessian(hessian_of(x_TK), config)
    assert factor.dead_K.nonzero().flatten().tolist() == dead
    rows = quantize_rows(weight_NK, factor, config)
    columns_K = rows.g_idx_K[dead].long()
    steps_ND = (weight_NK[:, dead] / rows.scales_NG[:, columns_K].float()).round() + rows.zeros_NG[:, columns_K]
    assert torch.equal(rows.codes_NK[:, dead].float(), steps_ND.clamp(0, 15))
    assert rows.loss == pytest.approx(output_error(rows, weight_NK, x_TK), rel=0.3)


def test_an_input_that_is_always_zero_falls_back_to_plain_rounding():
    weight_NK, _ = layer(8, 64)
    config = GPTQConfig(group_size=32)
    factor = factor_hessian(torch.zeros(64, 64), config)
    assert bool(factor.dead_K.all())
    rows = quantize_rows(weight_NK, factor, config)
    assert torch.equal(rows.codes_NK, rtn.quantize_rows(weight_NK, config).codes_NK)
    assert rows.loss == 0


@pytest.mark.parametrize("tokens", [1, 5])
def test_fewer_distinct_tokens_than_columns_still_factor(tokens):
    weight_NK, x_TK = layer(8, 192, tokens=tokens)
    config = GPTQConfig(group_size=32)
    factor = factor_hessian(hessian_of(x_TK.repeat(100, 1)), config)
    assert factor.raised == 0
    rows = quantize_rows(weight_NK, factor, config)
    assert bool(rows.dequantize().isfinite().all())
    assert output_error(rows, weight_NK, x_TK) < output_error(rtn.quantize_rows(weight_NK, config), weight_NK, x_TK)


def factor_of(in_features: int, config: GPTQConfig) -> Factor:
    return factor_hessian(hessian_of(layer(1, in_features)[1]), config)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e9])
def test_weights_that_no_grid_holds_are_refused(bad):
    config = GPTQConfig(group_size=32)
    weight_NK, _ = layer(4, 64)
    weight_NK[3, 60] = bad
    with pytest.raises(WeightError, match="row 3 "):
        quantize_rows(weight_NK, factor_of(64, config), config)


def test_feedback_that_diverges_is_a_hessian_error():
    config = GPTQConfig(group_size=32)
    weight_NK, _ = layer(4, 64)
    feedback_KK = torch.full((64, 64), 1e30).tril(-1) + torch.eye(64)
    factor = Factor(feedback_KK, torch.ones(64), None, torch.zeros(64, dtype=torch.bool), 0.05, 0)
    with pytest.raises(HessianError, match="diverged"):
        quantize_rows(weight_NK, factor, config)


@pytest.mark.parametrize("name", OPTIONS)
def test_rows_of_zeros_come_back_as_exact_zeros(name):
    config = config_of(name)
    weight_NK, x_TK = layer(6, 192)
    weight_NK[2] = 0
    rows = quantize_rows(weight_NK, factor_hessian(hessian_of(x_TK), config), config)
    assert not rows.dequantize()[2].any()
    assert rows.losses_N[2] == 0
    assert bool((rows.scales_NG > 0).all() and rows.scales_NG.isfinite().all())


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("magnitude", [1e-6, 1e-9, 1e-40])
def test_tiny_weights_stay_finite_and_no_farther_than_a_few_steps(magnitude, sym):
    config = GPTQConfig(group_size=32, sym=sym)
    weight_NK, x_TK = layer(6, 64)
    weight_NK = weight_NK * 50 * magnitude
    rows = quantize_rows(weight_NK, factor_hessian(hessian_of(x_TK), config), config)
    error = (rows.dequantize() - weight_NK).abs().max()
    assert bool(rows.scales_NG.isfinite().all()) and error <= max(magnitude * 5, 2.0**-22)


def test_an_8_bit_grid_is_nearly_lossless():
    config = GPTQConfig(bits=8, group_size=32)
    weight_NK, x_TK = layer(16, 192)
    rows = quantize_rows(weight_NK, factor_hessian(hessian_of(x_TK), config), config)
    signal = float((weight_NK.double() @ x_TK.double().T).square().mean())
    assert output_error(rows, weight_NK, x_TK) < 1e-4 * signal


@pytest.mark.parametrize("name", ["plain", "desc_act", "asym", "mse"])
def test_stacked_modules_round_as_they_would_alone(name):
    config = config_of(name)
    weight_NK, x_TK = layer(96, 192)
    factor = factor_hessian(hessian_of(x_TK), config)
    whole = quantize_rows(weight_NK, factor, config)
    for start, stop in ((0, 64), (64, 80), (80, 96)):
        part = quantize_rows(weight_NK[start:stop], factor, config)
        # Products over other numbers of rows may differ in the last bit: a code on a boundary may move.
        assert (part.codes_NK == whole.codes_NK[start:stop]).float().mean() > 0.98
        assert part.loss == pytest.approx(whole.rows(start, stop).loss, rel=0.02)


def test_the_same_rows_give_the_same_bits_every_time():
    config = GPTQConfig(group_size=32)
    weight_NK, x_TK = layer(100, 192)
    first, second = (quantize_rows(weight_NK, factor_hessian(hessian_of(x_TK), config), config) for _ in range(2))
    assert torch.equal(first.codes_NK, second.codes_NK)
    assert torch.equal(first.losses_N, second.losses_N)


@pytest.mark.parametrize("name", ["plain", "desc_act", "static", "asym"])
@pytest.mark.parametrize("rows", [1, 8])
def test_inputs_are_left_as_they_were(rows, name):
    config = config_of(name)
    weight_NK, x_TK = layer(rows, 192)
    hessian_KK = hessian_of(x_TK)
    factor = factor_hessian(hessian_KK, config)
    before = [tensor.clone() for tensor in (weight_NK, hessian_KK, factor.feedback_KK, factor.pivots_K)]
    factor_hessian(hessian_KK, config)
    quantize_rows(weight_NK, factor, config)
    for tensor, expected in zip((weight_NK, hessian_KK, factor.feedback_KK, factor.pivots_K), before, strict=True):
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("name", ["plain", "desc_act"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_round_as_their_float32_values(dtype, name):
    config = config_of(name)
    weight_NK, x_TK = layer(8, 192)
    weight_NK = weight_NK.to(dtype)
    factor = factor_hessian(hessian_of(x_TK), config)
    rows, expected = (quantize_rows(w, factor, config) for w in (weight_NK, weight_NK.float()))
    assert torch.equal(rows.codes_NK, expected.codes_NK)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", OPTIONS)
def test_a_gpu_is_as_good_as_the_cpu(name):
    config = config_of(name)
    weight_NK, x_TK = layer(64, 192)
    on_gpu = HessianSum(192, "cuda")
    on_gpu.add(x_TK.cuda())
    rows = quantize_rows(weight_NK.cuda(), factor_hessian(on_gpu.hessian(), config), config).to("cpu")
    expected = quantize_rows(weight_NK, factor_hessian(hessian_of(x_TK), config), config)
    assert (rows.codes_NK == expected.codes_NK).float().mean() > 0.95
    assert output_error(rows, weight_NK, x_TK) == pytest.approx(output_error(expected, weight_NK, x_TK), rel=0.01)
