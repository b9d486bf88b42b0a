"""Gated units: two filters that read the same rows, and whose results are multiplied."""

from __future__ import annotations

import torch
from torch import Tensor

from s3d_fast.backends.arguments import require_gated
from s3d_fast.backends.choice import choose
from s3d_fast.operators.operator import SplittingOperator
from s3d_fast.operators.rows import restricted, squared_lengths, weighted_sizes


class GatedOperator(SplittingOperator):
    """Gated units h = act(a.x) psi(b.x), theta = [a, b]: S = [X^T c11 X, X^T c12 X; X^T c12 X, X^T c22 X]."""

    CAN_CHANGE_DTYPE = True
    ONLY_LAUNCHES = True
    COEFFICIENTS = ("c11", "c12", "c22")
    WIDE_ROWS = ("X", *COEFFICIENTS)

    def __init__(
        self,
        X: Tensor,  # (N, D)
        c11: Tensor,  # (N, M)
        c12: Tensor,  # (N, M)
        c22: Tensor | None = None,  # (N, M); None is zero
        *,
        bias: bool = False,
        check_finite: bool = True,
    ) -> None:
        require_gated(X, c11, c12, c22, check_finite)
        self._describe(X, c11, c11.shape[1], 2 * (X.shape[1] + bias))
        self.X, self.c11, self.c12, self.c22, self.bias = X, c11, c12, c22, bias

    def matvec(self, V: Tensor, backend: str = "auto") -> Tensor:
        self._require_vectors(V)
        chosen = choose(backend, self.X, self.c11, self.c12, self.c22, differentiable=(V,))
        return chosen.gated_matvec(X=self.X, c11=self.c11, c12=self.c12, c22=self.c22, V=V, bias=self.bias)

    def restrict(self, filters: Tensor) -> GatedOperator:
        axes = {"c11": 1, "c12": 1} | ({} if self.c22 is None else {"c22": 1})
        return restricted(self, filters, **axes)

    def magnitude(self) -> Tensor:
        squares = squared_lengths(self.X, self.bias)
        blocks = [(self.c11, 1), (self.c12, 2), *([] if self.c22 is None else [(self.c22, 1)])]
        return sum((count * weighted_sizes(C, squares) for C, count in blocks), torch.zeros(()))
