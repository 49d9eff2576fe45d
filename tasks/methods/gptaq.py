"""GPTAQ and FOEM: what GPTQ's error feedback leaves out, added to it.

GPTAQ (Li et al., arXiv 2504.02692). A layer deep in a quantized model gets inputs X, where the unquantized model had X~.
GPTQ asks W' X to be like W X; here it is to be like W X~, the output that the source's weights gave in the source's own
model. With D = X~ - X, the column w_i of W should have brought w_i d_i more than what the quantized layer can see, and the
columns that are rounded after it, F, take that up as they take up rounding errors: by the least squares

    delta_F = w_i d_i X_F^T (X_F X_F^T)^-1 ,   together   W (I + P),   P = (R U^T above its diagonal) U

with R = D X^T, and U the upper Cholesky factor of H^-1: U_FF^T U_FF is the inverse of the trailing block of H. All of it
is known before the first column is rounded, so it is added to the weights at once, and GPTQ rounds the sum. `alpha` is
the share of it that is added; the authors' programs take a quarter, since R is seen on the calibration tokens only.

They let column i pass on w_i as it is when it is rounded, with the corrections of the columns before, and as rounded
itself to columns of later blocks; here it passes on the source's w_i, as the least squares have it. The order in which
columns are rounded decides who takes up what: R is put into it as H is. A dead column takes up nothing, but what it would
have brought in the source's model counts for the columns behind it: with `desc_act`, where dead columns are last, for none.

FOEM (Zheng et al., arXiv 2507.11017). Corrected weights are no longer the source's, and the loss has a first-order term
there that GPTQ takes for zero. A share `beta` of how far a column has come from the source is taken back just before it is
rounded, and as much less of it is handed on as an error:

    v_i = (1 - beta) (w_i + corrections) + beta w_i ,   error = (v_i - v'_i) - beta (v_i - w_i)

The loop is in columns.py. The authors' program leaves out the first column of each block of 128; that is not meant, and
not done here. With alpha both are done; what is taken back is measured from the source's weights, as it is there.

R is summed in float32 like H; see hessian.py. Agrees with the least squares solved column by column in float64, and with
GPTQModel 7.7.0 (see the tests). Shape suffixes: N out_features, K in_features, T tokens.
"""

from dataclasses import replace

import torch
from torch import Tensor

from tasks.methods.hessian import TOKENS_AT_ONCE, ActivationError, Factor, HessianSum


class AsymmetricSum(HessianSum):
    """The sums of x x^T and of (x~ - x) x^T over real tokens: x as the quantized model has it, x~ as the source."""

    def __init__(self, in_features: int, device: torch.device | str) -> None:
        super().__init__(in_features, device)
        self._cross_KK = torch.zeros_like(self._sum_KK)

    def add(self, x_TK: Tensor, original_TK: Tensor | None = None) -> None:
        """Add tokens [..., K], and the same tokens in the source's model, of any float dtype; without them, D is 0."""
        super().add(x_TK)
        x_TK = x_TK.reshape(-1, x_TK.shape[-1])
        original_TK = x_TK if original_TK is None else original_TK.reshape(-1, x_TK.shape[-1])
        for part_TK, original_part_TK in zip(
            x_TK.split(TOKENS_AT_ONCE), original_TK.split(TOKENS_AT_ONCE), strict=True
        ):
            part_TK = part_TK.to(self._cross_KK)
            self._cross_KK.addmm_((original_part_TK.to(part_TK) - part_TK).t(), part_TK)

    def merge(self, other: HessianSum) -> None:
        """Add another lane's tokens, from any device."""
        assert isinstance(other, AsymmetricSum)
        super().merge(other)
        self._cross_KK += other._cross_KK.to(self._cross_KK.device)

    def cross(self) -> Tensor:
        """R = 2/T * sum (x~ - x) x^T, float32 [K, K]: rows by what differs, columns by x. Handed over, not copied."""
        cross_KK = self._cross_KK
        del self._cross_KK
        cross_KK *= 2 / self.tokens
        return cross_KK


def with_shift(factor: Factor, cross_KK: Tensor, alpha: float) -> Factor:
    """The factor with `alpha` P, by input column, as its `shift_KK`; `cross_KK` is that of the same tokens.

    ActivationError for NaN or Inf.
    """
    if not bool(cross_KK.isfinite().all()):
        raise ActivationError(
            "the sums that compare its inputs with the unquantized model's hold NaN or Inf: activations of the source "
            "overflowed; it is damaged, or needs a wider compute dtype than the one it ran in"
        )
    order_K = factor.order_K
    if order_K is not None:
        cross_KK = cross_KK.index_select(0, order_K)
        cross_KK = cross_KK.index_select(1, order_K)
    # U_ij = feedback_ji * pivot_i: the pivots of U^T and of U stand side by side.
    above_KK = (cross_KK @ factor.feedback_KK).triu_(1).mul_(factor.pivots_K.square() * alpha)
    del cross_KK
    shift_KK = above_KK @ factor.feedback_KK.t()
    del above_KK
    if order_K is not None:
        place_K = torch.argsort(order_K)
        shift_KK = shift_KK.index_select(0, place_K)
        shift_KK = shift_KK.index_select(1, place_K)
    return replace(factor, shift_KK=shift_KK)
