"""EoRA: a low-rank adapter that takes back most of what quantization did to a linear's outputs.

Liu et al., "EoRA", arXiv 2410.21271. For weights W [N, K], their quantized values W' and the covariance C of the inputs,
the rank-r matrix D that minimises E|(W - W' - D) x|^2 is the best one of (W - W') C^(1/2), brought back from the
eigenspace of C. The paper and its programs take that road, with C^(-1/2) of eigenvalues that may be 0. It is not needed:
with U the first r left singular vectors of (W - W') C^(1/2), the same D is U U^T (W - W'). Any root of C has the same
left singular vectors, so a Cholesky factor does, and directions in which no input went are projected like all others
instead of being divided by nothing.

B = U and A = U^T (W - W'), each column of B and row of A scaled to the same norm, so that half precision holds both.
The singular vectors come from an eigendecomposition of the smaller Gram matrix, in float64; products are float32.

On a CPU the last bits depend on the number of threads, which the caller fixes. Agrees with the road over eigenvalues
where all of them are positive. Shape suffixes: N out_features, K in_features, R rank.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Of the mean diagonal. Small against any input that matters; it decides only between directions that no input has.
RIDGE = 1e-6


class LowRank(NamedTuple):
    """An adapter's matrices: a linear's outputs get `x A^T B^T` added. `loss` is what is left of the output error."""

    a_RK: Tensor
    b_NR: Tensor
    loss: float


def root_of(hessian_KK: Tensor) -> Tensor:
    """A lower triangle L, float32 [K, K], with L L^T = the Hessian 2 * C, but for a ridge; on its device.

    ValueError where no ridge below the mean makes it positive definite: it holds NaN or Inf, or is no covariance.
    """
    doubled_KK = hessian_KK.double()
    diagonal_K = doubled_KK.diagonal().clone()
    mean = float(diagonal_K.mean())
    ridge = RIDGE
    while ridge < 1:
        doubled_KK.diagonal().copy_(diagonal_K + (ridge * mean if mean > 0 else 1.0))
        lower_KK, failed_at = torch.linalg.cholesky_ex(doubled_KK)
        if not int(failed_at):
            return lower_KK.float()
        ridge *= 10
    raise ValueError("the covariance of its inputs has no root: it holds NaN or Inf, or sums that lost their precision")


def compensate(lost_NK: Tensor, root_KK: Tensor | None, rank: int, dtype: torch.dtype) -> LowRank:
    """The adapter for W - W', float32 on any device, rounded to `dtype`; loss: mean square per token and output channel.

    Without a root, of a module that no token reached, all inputs count alike.
    """
    seen_NK = lost_NK if root_KK is None else lost_NK @ root_KK.to(lost_NK.device)
    left_NR = _left_singular_vectors(seen_NK, rank)
    a_RK = left_NR.T @ lost_NK
    balance_R = a_RK.norm(dim=1).sqrt()  # a column of `left_NR` has norm 1
    is_used_R = balance_R > 0
    a_RK = (a_RK / torch.where(is_used_R, balance_R, 1.0)[:, None]).to(dtype)
    b_NR = (left_NR * balance_R).to(dtype)
    left_over_NK = lost_NK - b_NR.float() @ a_RK.float()
    if root_KK is not None:
        left_over_NK = left_over_NK @ root_KK.to(lost_NK.device) / 2**0.5  # the Hessian is twice the covariance
    loss = float(left_over_NK.double().square().sum() / len(lost_NK))
    return LowRank(a_RK.contiguous().cpu(), b_NR.contiguous().cpu(), loss)


def _left_singular_vectors(matrix_NK: Tensor, rank: int) -> Tensor:
    """The first `rank` of them, float32 [N, R], orthonormal."""
    rows, columns = matrix_NK.shape
    if rows <= columns:
        return torch.linalg.eigh((matrix_NK @ matrix_NK.T).double()).eigenvectors[:, -rank:].flip(1).float()
    right_KR = torch.linalg.eigh((matrix_NK.T @ matrix_NK).double()).eigenvectors[:, -rank:].flip(1)
    # Orthonormal also where singular values are 0 and a division by them would not be.
    return torch.linalg.qr(matrix_NK.double() @ right_KR).Q.float()
