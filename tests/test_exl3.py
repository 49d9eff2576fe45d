"""EXL3's turning, feedback and scales, against dense float64 formulas; and what it does with awkward weights."""

import pytest
import torch
from torch import Tensor

from tasks.methods import exl3
from tasks.methods.exl3 import TrellisWeight, block_lower, inner_hessian, matrix_of, quantize_weight, tiles_of, words_of
from tasks.methods.exl3_trellis import codebook
from tasks.methods.grid import WeightError
from tasks.methods.hessian import ActivationError, HessianError
from tasks.quantization import EXL3Config

NAME = "model.layers.0.self_attn.q_proj"


def weight_of(rows: int = 128, columns: int = 128, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * 0.02


def hessian_of(features: int, seed: int = 1) -> Tensor:
    """Of correlated inputs with channels of unlike size."""
    generator = torch.Generator().manual_seed(seed)
    mixing_KK = torch.randn(features, features, generator=generator) * torch.exp(-torch.arange(features) / 30.0)
    x_TK = torch.randn(4 * features, features, generator=generator) @ mixing_KK.t()
    x_TK *= torch.exp(torch.randn(features, generator=generator) / 2)
    return 2 * x_TK.t() @ x_TK / len(x_TK)


def quantized(
    weight_NK: Tensor,
    hessian_KK: Tensor | None = None,
    bits: int = 8,
    config: EXL3Config | None = None,
    name: str = NAME,
) -> TrellisWeight:
    """At 8 bits unless said: the search is fastest there."""
    return quantize_weight(weight_NK, hessian_KK, config or EXL3Config(), bits, name, seed=0)


def hadamard(features: int) -> Tensor:
    """Blocks of 128, by parity of common bits, float64."""
    entries = [[(-1.0) ** (i & j).bit_count() for j in range(128)] for i in range(128)]
    block = torch.tensor(entries, dtype=torch.float64) / 128**0.5
    return torch.block_diag(*[block] * (features // 128))


def output_error(dequantized_NK: Tensor, weight_NK: Tensor, hessian_KK: Tensor) -> float:
    """Mean over rows of the squared output error per token, in float64."""
    error_NK = dequantized_NK.double() - weight_NK.double()
    return float((error_NK @ hessian_KK.double() * error_NK).sum()) / 2 / len(weight_NK)


def test_tiles_hold_the_elements_that_tensor_cores_do() -> None:
    matrix_KN = torch.arange(32 * 48).reshape(32, 48)
    tiles_RCL = tiles_of(matrix_KN)
    assert tiles_RCL.shape == (2, 3, 256)
    for row, column in ((0, 0), (1, 2)):
        for thread in range(32):
            rows = [thread % 4 * 2 + add for add in (0, 1, 8, 9)]
            columns = [thread // 4, thread // 4 + 8]
            expected = [int(matrix_KN[16 * row + k, 16 * column + n]) for n in columns for k in rows]
            assert tiles_RCL[row, column, 8 * thread : 8 * thread + 8].tolist() == expected
    assert torch.equal(matrix_of(tiles_RCL), matrix_KN)


def test_what_is_read_is_the_dense_formula() -> None:
    rows = quantized(weight_of(128, 256))
    inner_KN = matrix_of(codebook("mcg")[words_of(rows.symbols_RCL, 8)]).double()
    turned_KN = hadamard(256) @ inner_KN @ hadamard(128)
    expected_KN = rows.suh_K.double()[:, None] * turned_KN * rows.svh_N.double()
    torch.testing.assert_close(rows.dequantize(), expected_KN.t().float(), rtol=1e-4, atol=1e-7)  # float32 sums of 128


def test_the_hessian_of_what_is_coded_is_the_dense_formula() -> None:
    hessian_KK, suh_K = hessian_of(256), torch.randn(256)
    dense_KK = hadamard(256) @ torch.diag(suh_K.double())
    expected_KK = dense_KK @ hessian_KK.double() @ dense_KK.t()
    torch.testing.assert_close(inner_hessian(hessian_KK, suh_K), expected_KK)


def test_the_factor_is_unit_lower_in_blocks_and_leaves_a_block_diagonal() -> None:
    hessian_KK = inner_hessian(hessian_of(128), torch.ones(128))
    regularised_KK = hessian_KK + 0.025 * hessian_KK.diagonal().mean() * torch.eye(128)
    lower_KK = block_lower(hessian_KK.clone(), 0.025)
    assert lower_KK is not None
    blocks = lower_KK.reshape(8, 16, 8, 16).transpose(1, 2)
    for i in range(8):
        torch.testing.assert_close(blocks[i, i], torch.eye(16))
        assert not blocks[i, i + 1 :].any()
    middle_KK = torch.linalg.solve(lower_KK.double(), regularised_KK)
    middle_KK = torch.linalg.solve(lower_KK.double(), middle_KK.t())
    off_KK = middle_KK.clone()
    for i in range(8):
        off_KK[16 * i : 16 * i + 16, 16 * i : 16 * i + 16] = 0
    assert float(off_KK.abs().max()) < 1e-5 * float(middle_KK.abs().max())  # of a float32 factor


def test_feedback_lowers_the_output_error_and_the_loss_tells_it() -> None:
    weight_NK, hessian_KK = weight_of(), hessian_of(128)
    fed_back, direct = quantized(weight_NK, hessian_KK, bits=4), quantized(weight_NK, bits=4)
    error = output_error(fed_back.dequantize(), weight_NK, hessian_KK)
    assert error < 0.4 * output_error(direct.dequantize(), weight_NK, hessian_KK)
    assert fed_back.loss == pytest.approx(error, rel=1e-3)
    squared = (direct.dequantize() - weight_NK).double().square().mean()
    assert direct.loss == pytest.approx(float(squared), rel=1e-6)
    # Near what Gaussian weights lose at 4 bits.
    assert float(squared / weight_NK.double().square().mean()) < 0.0052


def test_what_is_coded_has_the_scale_of_the_codebook() -> None:
    rows = quantized(weight_of(), bits=8)
    inner_KN = matrix_of(codebook("mcg")[words_of(rows.symbols_RCL, 8)])
    spread = float(inner_KN.square().mean().sqrt())
    usual = exl3.SPREADS["mcg"] * exl3.USUAL_SCALES[8]
    assert exl3.SCALES_TRIED[0] * usual * 0.99 < spread < exl3.SCALES_TRIED[-1] * usual * 1.01


def test_channels_of_zeros_come_back_as_zeros() -> None:
    weight_NK = weight_of()
    weight_NK[5] = 0
    weight_NK[:, 77] = 0
    for hessian_KK in (None, hessian_of(128)):
        read_NK = quantized(weight_NK, hessian_KK).dequantize()
        assert not read_NK[5].any()
        torch.testing.assert_close(read_NK, weight_NK, rtol=0, atol=2e-3)


def test_a_matrix_of_zeros_comes_back_as_zeros() -> None:
    rows = quantized(torch.zeros(128, 128), hessian_of(128))
    assert not rows.dequantize().any() and rows.loss == 0.0


@pytest.mark.parametrize("size", [1e-9, 1e-4, 1.0, 1e4])
def test_weights_of_any_size_keep_their_relative_error(size: float) -> None:
    weight_NK = weight_of() * size
    read_NK = quantized(weight_NK).dequantize()
    assert float((read_NK.double() - weight_NK).square().mean() / weight_NK.double().square().mean()) < 1e-4


def test_weights_that_no_scale_holds_are_refused() -> None:
    with pytest.raises(WeightError, match="NaN"):
        quantized(weight_of().index_fill_(0, torch.tensor([3]), torch.nan))
    with pytest.raises(WeightError, match="out of the range of float16"):
        quantized(weight_of() * 1e20)


def test_hessians_that_are_of_no_use_are_told() -> None:
    with pytest.raises(ActivationError):
        quantized(weight_of(), hessian_of(128).fill_(torch.inf))
    with pytest.raises(HessianError, match="sigma_reg"):
        block_lower(-torch.eye(128, dtype=torch.float64), 0.025)
    assert block_lower(torch.zeros(128, 128, dtype=torch.float64), 0.025) is None


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_hessian_of_one_token_or_of_silent_channels_does(tokens: int) -> None:
    x_TK = torch.zeros(2, 128)
    x_TK[:, :60] = torch.randn(2, 60, generator=torch.Generator().manual_seed(0)) * tokens
    read_NK = quantized(weight_of(), x_TK.t() @ x_TK).dequantize()
    assert bool(read_NK.isfinite().all())
    torch.testing.assert_close(read_NK, weight_of(), rtol=0, atol=2e-2)


def test_signs_come_from_the_seed_and_the_name_alone() -> None:
    weight_KN = weight_of().t()
    one = exl3._channel_scales(weight_KN, True, NAME, 0)
    assert all(torch.equal(a, b) for a, b in zip(one, exl3._channel_scales(weight_KN, True, NAME, 0), strict=True))
    for other in (exl3._channel_scales(weight_KN, True, NAME, 1), exl3._channel_scales(weight_KN, True, "other", 0)):
        for a, b in zip(one, other, strict=True):
            assert 30 < int((a.sign() != b.sign()).sum()) < 98


def test_output_scales_are_left_out_where_few_input_channels_carry_the_activations() -> None:
    config = EXL3Config()
    even_KK, skewed_KK = torch.eye(128), torch.eye(128)
    skewed_KK[:2, :2] *= 1e6
    assert exl3._skew(even_KK, config) < exl3.SKEW < exl3._skew(skewed_KK, config)
    weight_KN = weight_of().t() * torch.linspace(0.5, 2, 128)
    (_, with_scales_N), (_, without_N) = (exl3._channel_scales(weight_KN, asked, NAME, 0) for asked in (True, False))
    assert with_scales_N.abs().max() > 2 * with_scales_N.abs().min()
    assert bool((without_N.abs() == 1).all())
