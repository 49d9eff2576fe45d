"""Importance of input columns: the mean square of what enters each, over all calibration tokens.

The output error of a row is, as far as columns are uncorrelated, the sum of its weights' squared errors times these
numbers. Other programs call them the importance matrix. They are the diagonal of the Hessian, at a K-th of its cost.

float64 sums of float32 squares: running sums in float32 would stop growing after some millions of tokens.

Shape suffixes: K in_features, T tokens.
"""

import torch
from torch import Tensor


class ImportanceSum:
    """Running sum of squares per input column; merge lanes in a fixed order and the result is the same for any pool."""

    def __init__(self, in_features: int, device: str | torch.device = "cpu") -> None:
        self._sums_K = torch.zeros(in_features, dtype=torch.float64, device=device)
        self.tokens = 0

    def add(self, x_TK: Tensor) -> None:
        """Count the inputs of some tokens, of any float dtype; padding must have been taken out."""
        self._sums_K += x_TK.float().square().sum(dim=0, dtype=torch.float64)
        self.tokens += len(x_TK)

    def merge(self, other: "ImportanceSum") -> None:
        """Count all that `other` has counted."""
        self._sums_K += other._sums_K.to(self._sums_K.device)
        self.tokens += other.tokens

    def importance(self) -> Tensor:
        """float32 [K]: the mean squares. ValueError when no token was counted."""
        if not self.tokens:
            raise ValueError("no calibration token reached this module; quantize it without importance")
        return (self._sums_K / self.tokens).float()
