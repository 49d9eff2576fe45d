"""GPTAQ and FOEM against the least squares that they stand for, against another program, and against plain GPTQ."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tasks.methods import rtn
from tasks.methods.gptaq import AsymmetricSum, with_shift
from tasks.methods.gptq import ActivationError, Factor, factor_hessian, quantize_rows
from tasks.methods.grid import QuantizedRows, find_grid
from tasks.quantization import GPTQConfig

GOLDEN = Path(__file__).parent / "golden" / "gptqmodel_gptaq.safetensors"
ORDERS: dict[str, dict[str, Any]] = {
    "column order": {"act_group_aware": False},
    "desc_act": {"desc_act": True},
    "group aware": {"act_group_aware": True},
}
THEIR_OPTIONS: dict[str, dict[str, Any]] = {
    "gptaq": {"gptaq": True},
    "gptaq_whole": {"gptaq": {"alpha": 1.0}},
    "gptaq_desc_act": {"gptaq": True, "desc_act": True},
    "gptaq_static": {"gptaq": True, "static_groups": True},
    "gptaq_channel": {"gptaq": True, "group_size": -1},
    "foem": {"foem": True},
    "foem_desc_act": {"foem": {"beta": 0.1}, "desc_act": True},
    "foem_gptaq": {"foem": {"alpha": 0.25, "beta": 0.2}},
}


def config_of(**options: Any) -> GPTQConfig:
    return GPTQConfig(**({"group_size": 32, "act_group_aware": False} | options))


def layer(rows: int, columns: int, tokens: int = 600, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, correlated inputs, and the same inputs of another model, which differ in a way that is correlated too."""
    generator = torch.Generator().manual_seed(seed)

    def mixing() -> Tensor:
        return torch.randn(columns, columns, generator=generator) / columns**0.5

    size_K = torch.exp(torch.randn(columns, generator=generator))
    x_TK = torch.randn(tokens, columns, generator=generator) @ (mixing() + torch.eye(columns)) * size_K
    noise_TK = torch.randn(tokens, columns, generator=generator) * size_K
    weight_NK = torch.randn(rows, columns, generator=generator) * 0.02
    return weight_NK, x_TK, x_TK + 0.1 * (x_TK @ mixing() + noise_TK)


def factor_of(x_TK: Tensor, original_TK: Tensor, config: GPTQConfig) -> Factor:
    total = AsymmetricSum(x_TK.shape[1], "cpu")
    total.add(x_TK, original_TK)
    factor = factor_hessian(total.hessian(), config)
    return with_shift(factor, total.cross(), config.asymmetry) if config.asymmetry else factor


def quantized(weight_NK: Tensor, x_TK: Tensor, original_TK: Tensor, config: GPTQConfig) -> QuantizedRows:
    return quantize_rows(weight_NK, factor_of(x_TK, original_TK, config), config)


def output_error(dense_NK: Tensor, weight_NK: Tensor, x_TK: Tensor, original_TK: Tensor) -> float:
    """Mean of |W' x - W x~|^2."""
    return float((dense_NK.double() @ x_TK.double().T - weight_NK.double() @ original_TK.double().T).square().mean())


@pytest.mark.parametrize("order", ORDERS)
def test_what_a_column_brings_in_the_other_model_is_taken_up_by_the_columns_after_it_in_least_squares(
    order: str,
) -> None:
    """Column by column in float64, with the damping as one more token per column."""
    weight_NK, x_TK, original_TK = layer(6, 64)
    config = config_of(gptaq={"alpha": 0.5}, **ORDERS[order])
    factor = factor_of(x_TK, original_TK, config)
    order_K = torch.arange(64) if factor.order_K is None else factor.order_K
    x, d = x_TK.double(), (original_TK - x_TK).double()
    damp = config.damp_percent * float(x.square().sum(dim=0).mean())
    damped = torch.cat([x, damp**0.5 * torch.eye(64, dtype=torch.float64)])
    expected_NK = weight_NK.double().clone()
    for place, column in enumerate(order_K[:-1].tolist()):
        after = order_K[place + 1 :]
        target = torch.cat([d[:, column], torch.zeros(64, dtype=torch.float64)])
        share_F = torch.linalg.lstsq(damped[:, after], target[:, None], driver="gelsd").solution[:, 0]
        expected_NK[:, after] += 0.5 * weight_NK[:, column, None].double() * share_F
    # Sums and products are float32.
    scale = float((expected_NK - weight_NK).abs().max())
    torch.testing.assert_close(factor.aim(weight_NK).double(), expected_NK, rtol=0, atol=1e-4 * scale)
    assert scale > 1e-3


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("group", [32, -1])
def test_outputs_are_nearer_to_the_other_models_than_plain_gptqs_on_tokens_that_were_seen_and_others(
    order: str, group: int
) -> None:
    weight_NK, x_TK, original_TK = layer(48, 128, tokens=1600)
    seen, unseen = slice(0, 800), slice(800, 1600)
    errors = {}
    for alpha in (0.0, 0.25, 1.0):
        config = config_of(group_size=group, gptaq={"alpha": alpha}, **ORDERS[order])
        dense_NK = quantized(weight_NK, x_TK[seen], original_TK[seen], config).dequantize()
        errors[alpha] = [output_error(dense_NK, weight_NK, x_TK[part], original_TK[part]) for part in (seen, unseen)]
    for part in (0, 1):
        assert errors[0.25][part] < 0.995 * errors[0.0][part]
        assert errors[1.0][part] < 0.995 * errors[0.0][part]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("options", [{"gptaq": {"alpha": 0.0}}, {"foem": {"alpha": 0.0, "beta": 0.0}}])
def test_without_a_share_it_is_gptq_bit_for_bit(order: str, options: dict[str, Any]) -> None:
    weight_NK, x_TK, original_TK = layer(24, 192)
    config = config_of(**ORDERS[order])
    plain = quantized(weight_NK, x_TK, original_TK, config)
    for rows in (
        quantized(weight_NK, x_TK, original_TK, config_of(**options, **ORDERS[order])),
        quantized(weight_NK, x_TK, x_TK, config_of(gptaq=True, **ORDERS[order])),  # nothing differs
    ):
        assert torch.equal(rows.codes_NK, plain.codes_NK) and torch.equal(rows.scales_NG, plain.scales_NG)
        assert torch.equal(rows.losses_N, plain.losses_N)


def plainly(
    weight_NK: Tensor, x_TK: Tensor, original_TK: Tensor, config: GPTQConfig, *, as_theirs: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The column loop in float64 as the authors' programs write it: codes and dequantized weights [N, K].

    as_theirs: a column passes on what it has become, as rounded beyond its block; first columns of blocks are not taken
    back. Grids come from `find_grid`, which has its own tests.
    """
    w, x, original = (t.double().numpy() for t in (weight_NK, x_TK, original_TK))
    w, columns = w.copy(), w.shape[1]
    size = columns if config.group_size == -1 else config.group_size
    h = 2 / len(x) * x.T @ x
    cross = 2 / len(x) * (original - x).T @ x
    order = np.argsort(-np.diag(h), kind="stable") if config.desc_act else np.arange(columns)
    first, w = w.copy(), w[:, order]
    h, cross = h[order][:, order], cross[order][:, order]
    h[np.diag_indices(columns)] += config.damp_percent * np.diag(h).mean()
    upper = np.linalg.cholesky(np.linalg.inv(h)).T
    p = config.asymmetry * np.triu(cross @ upper.T, 1) @ upper
    beta, source = config.first_order, w.copy()

    def grid(group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scale, zero = find_grid(torch.from_numpy(group).float(), config)
        return scale.double().numpy(), zero.double().numpy()

    static = [grid(first[:, start : start + size]) for start in range(0, columns, size)]
    if not as_theirs:
        w = w + w @ p
    codes, dense = np.zeros_like(w), np.zeros_like(w)
    for i in range(columns):
        block_stop = min(i // 128 * 128 + 128, columns)
        if i % 128 == 0:
            at_block_start = w.copy()
        if i % size == 0:
            scale, zero = grid(at_block_start[:, i : i + size])
        if config.static_groups:
            scale, zero = static[order[i] // size]
        if not (as_theirs and i % 128 == 0):
            w[:, i] -= beta * (w[:, i] - source[:, i])
        codes[:, i] = np.clip(np.round(w[:, i] / scale) + zero, 0, 2**config.bits - 1)
        dense[:, i] = scale * (codes[:, i] - zero)
        was = w[:, i].copy()
        error = (was - dense[:, i] - beta * (was - source[:, i])) / upper[i, i]
        w[:, i + 1 :] -= np.outer(error, upper[i, i + 1 :])
        if as_theirs:
            w[:, i + 1 : block_stop] += np.outer(was, p[i, i + 1 : block_stop])
            w[:, block_stop:] += np.outer(dense[:, i], p[i, block_stop:])
    back = np.argsort(order)
    return codes[:, back], dense[:, back]


@pytest.mark.parametrize("name", THEIR_OPTIONS)
def test_it_is_what_another_program_computes_but_for_what_a_column_passes_on(name: str) -> None:
    tensors = load_file(GOLDEN)
    weight_NK = tensors["weight"].float() / 1024
    x_TK, original_TK = tensors["inputs"].float() / 8, tensors["originals"].float() / 8
    # v2, since that program chooses zero points of 0.
    config = config_of(sym=False, checkpoint_format="gptq_v2", **THEIR_OPTIONS[name])
    theirs = QuantizedRows(
        tensors[f"{name}.codes"], tensors[f"{name}.scales"], tensors[f"{name}.zeros"].int(),
        tensors[f"{name}.g_idx"].int(), torch.zeros(12),
    )  # fmt: skip
    ours = quantized(weight_NK, x_TK, original_TK, config)
    # The loop, with their rule and with ours: rows that fall on a rounding boundary go another way from there on.
    for rows, as_theirs in ((theirs, True), (ours, False)):
        codes_NK, _ = plainly(weight_NK, x_TK, original_TK, config, as_theirs=as_theirs)
        same_N = (rows.codes_NK.numpy() == codes_NK).all(axis=1)
        # Theirs chooses codes before scales are rounded to float16.
        assert same_N.sum() >= 7, f"{'theirs' if as_theirs else 'ours'}: {same_N.sum()} of 12 rows"
    assert torch.equal(ours.g_idx_K, theirs.g_idx_K)
    aimed_TK = original_TK if config.asymmetry else x_TK
    ratio = output_error(ours.dequantize(), weight_NK, x_TK, aimed_TK) / output_error(
        theirs.dequantize(), weight_NK, x_TK, aimed_TK
    )
    assert ratio < 1.05


@pytest.mark.parametrize("options", [{"gptaq": {"alpha": 1.0}}, {"foem": {"beta": 0.3}}, {"foem": {"alpha": 0.5}}])
@pytest.mark.parametrize("order", ORDERS)
def test_the_loss_is_the_mean_squared_output_error_from_what_is_aimed_at(options: dict[str, Any], order: str) -> None:
    weight_NK, x_TK, original_TK = layer(16, 96)
    config = config_of(damp_percent=1e-7, **options, **ORDERS[order])
    factor = factor_of(x_TK, original_TK, config)
    rows = quantize_rows(weight_NK, factor, config)
    expected = output_error(rows.dequantize(), factor.aim(weight_NK), x_TK, x_TK)
    assert rows.loss == pytest.approx(expected, rel=2e-3)


def test_a_column_that_is_taken_back_wholly_is_rounded_to_nearest() -> None:
    weight_NK, x_TK, original_TK = layer(16, 96)
    config = config_of(foem={"beta": 1.0}, static_groups=True)
    rows = quantized(weight_NK, x_TK, original_TK, config)
    # What is taken back is handed on as well: v - (v - w) is w but for its last bit.
    assert (rows.codes_NK == rtn.quantize_rows(weight_NK, config).codes_NK).float().mean() > 0.999


def test_the_way_from_the_source_is_shorter_the_more_is_taken_back() -> None:
    weight_NK, x_TK, original_TK = layer(32, 192)
    far = [
        float(
            (quantized(weight_NK, x_TK, original_TK, config_of(foem={"beta": beta})).dequantize() - weight_NK)
            .square()
            .mean()
        )
        for beta in (0.0, 0.1, 0.2, 0.5)
    ]
    assert far == sorted(far, reverse=True)


def test_a_column_that_is_dead_here_but_not_there_is_taken_up_by_others() -> None:
    weight_NK, x_TK, original_TK = layer(24, 64, tokens=1200)
    x_TK[:, 5] = 0
    original_TK[:, 5] = x_TK[:, 6] * 2
    config = config_of(gptaq={"alpha": 1.0})
    factor = factor_of(x_TK, original_TK, config)
    aimed_NK = factor.aim(weight_NK)
    assert torch.equal(aimed_NK[:, 5], weight_NK[:, 5]) and bool(factor.dead_K[5])
    rows = quantize_rows(weight_NK, factor, config)
    plain = quantized(weight_NK, x_TK, original_TK, config_of())
    assert output_error(rows.dequantize(), weight_NK, x_TK, original_TK) < 0.9 * output_error(
        plain.dequantize(), weight_NK, x_TK, original_TK
    )


def test_the_sums_do_not_depend_on_how_tokens_are_split() -> None:
    _, x_TK, original_TK = layer(1, 48, tokens=700)
    whole, parts = AsymmetricSum(48, "cpu"), AsymmetricSum(48, "cpu")
    whole.add(x_TK, original_TK)
    for start, stop in ((0, 100), (100, 650), (650, 700)):
        part = AsymmetricSum(48, "cpu")
        part.add(x_TK[start:stop].reshape(2, -1, 48), original_TK[start:stop].reshape(2, -1, 48))
        parts.merge(part)
    expected_KK = 2 / 700 * (original_TK - x_TK).double().T @ x_TK.double()
    for total in (whole, parts):
        torch.testing.assert_close(total.cross().double(), expected_KK, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            total.hessian().double(), 2 / 700 * x_TK.double().T @ x_TK.double(), rtol=1e-4, atol=1e-4
        )


def test_activations_of_the_other_model_that_overflow_are_an_error_of_their_own() -> None:
    _, x_TK, original_TK = layer(1, 48)
    original_TK[3, 3] = torch.inf
    with pytest.raises(ActivationError, match="unquantized model's"):
        factor_of(x_TK, original_TK, config_of(gptaq=True))
