"""EoRA against the road over eigenvalues that the paper takes, and at the edges where that road divides by nothing."""

import pytest
import torch
from torch import Tensor

from tasks.methods.eora import LowRank, compensate, root_of
from tasks.methods.hessian import HessianSum

SHAPES = ((48, 96), (96, 48), (64, 64))


def case(out_features: int, in_features: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """What quantization lost, and correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    mixing_KK = torch.randn(in_features, in_features, generator=generator) / in_features**0.5 + torch.eye(in_features)
    x_TK = torch.randn(500, in_features, generator=generator) @ mixing_KK
    return torch.randn(out_features, in_features, generator=generator) / 50, x_TK


def hessian_of(x_TK: Tensor) -> Tensor:
    total = HessianSum(x_TK.shape[1], "cpu")
    total.add(x_TK)
    return total.hessian()


def output_error(lost_NK: Tensor, x_TK: Tensor, made: LowRank) -> float:
    left_NK = lost_NK - made.b_NR.float() @ made.a_RK.float()
    return float((x_TK @ left_NK.T).square().mean())


def over_eigenvalues(lost_NK: Tensor, x_TK: Tensor, rank: int) -> Tensor:
    """The paper's: project into the eigenspace, truncate there, and come back."""
    values_K, vectors_KK = torch.linalg.eigh(x_TK.double().T @ x_TK.double())
    there_KK = vectors_KK * values_K.sqrt()
    left, values, right = torch.linalg.svd(lost_NK.double() @ there_KK, full_matrices=False)
    return (left[:, :rank] * values[:rank]) @ right[:rank] @ torch.linalg.inv(there_KK)


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_papers_matrix(shape: tuple[int, int]) -> None:
    lost_NK, x_TK = case(*shape)
    made = compensate(lost_NK, root_of(hessian_of(x_TK)), 8, torch.float32)
    expected_NK = over_eigenvalues(lost_NK, x_TK, 8).float()
    # The ridge, and float32 products.
    torch.testing.assert_close(made.b_NR @ made.a_RK, expected_NK, rtol=0, atol=2e-4 * float(expected_NK.abs().max()))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_loss_is_the_output_error_and_falls_with_the_rank_to_nothing(shape: tuple[int, int]) -> None:
    lost_NK, x_TK = case(*shape)
    root_KK = root_of(hessian_of(x_TK))
    errors = []
    for rank in (1, 4, 16, min(shape)):
        made = compensate(lost_NK, root_KK, rank, torch.float32)
        assert made.a_RK.shape == (rank, shape[1]) and made.b_NR.shape == (shape[0], rank)
        errors.append(output_error(lost_NK, x_TK, made))
        assert made.loss == pytest.approx(errors[-1], rel=1e-3, abs=1e-10)
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-9


def test_looking_at_the_inputs_beats_a_plain_decomposition_of_the_weights() -> None:
    lost_NK, x_TK = case(48, 96)
    x_TK = x_TK * torch.linspace(0.05, 3, 96)
    seeing = compensate(lost_NK, root_of(hessian_of(x_TK)), 8, torch.float32)
    blind = compensate(lost_NK, None, 8, torch.float32)
    assert output_error(lost_NK, x_TK, seeing) < 0.9 * output_error(lost_NK, x_TK, blind)


@pytest.mark.parametrize("shape", SHAPES)
def test_fewer_tokens_than_channels_and_dead_channels_are_no_trouble(shape: tuple[int, int]) -> None:
    lost_NK, x_TK = case(*shape)
    x_TK = x_TK[:20]
    x_TK[:, 5] = 0
    made = compensate(lost_NK, root_of(hessian_of(x_TK)), 8, torch.float32)
    correction_NK = made.b_NR @ made.a_RK
    assert bool(correction_NK.isfinite().all())
    # Nothing is divided by the inputs that were never seen.
    assert float(correction_NK.abs().max()) < 2 * float(lost_NK.abs().max())
    assert output_error(lost_NK, x_TK, made) < 0.7 * float((x_TK @ lost_NK.T).square().mean())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_half_precision_holds_both_matrices(dtype: torch.dtype, size: float) -> None:
    lost_NK, x_TK = case(48, 96)
    made = compensate(size * lost_NK, root_of(hessian_of(x_TK)), 8, dtype)
    assert made.a_RK.dtype == made.b_NR.dtype == dtype
    exact = compensate(size * lost_NK, root_of(hessian_of(x_TK)), 8, torch.float32)
    assert made.loss < 1.01 * exact.loss


def test_weights_that_lost_nothing_get_an_adapter_of_zeros() -> None:
    _, x_TK = case(48, 96)
    for root_KK in (None, root_of(hessian_of(x_TK))):
        made = compensate(torch.zeros(48, 96), root_KK, 8, torch.bfloat16)
        assert made.loss == 0 and not bool((made.b_NR @ made.a_RK).any())


def test_a_covariance_of_zeros_has_a_root_and_one_with_nan_has_not() -> None:
    assert bool(root_of(torch.zeros(8, 8)).isfinite().all())
    with pytest.raises(ValueError, match="has no root"):
        root_of(torch.full((8, 8), torch.nan))
