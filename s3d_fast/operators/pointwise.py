"""Linear layers and 1 x 1 convolutions: all filters share the same rows."""

from __future__ import annotations

from torch import Tensor

from s3d_fast.backends.arguments import require_rows
from s3d_fast.backends.choice import choose
from s3d_fast.operators.operator import SplittingOperator
from s3d_fast.operators.rows import restricted, squared_lengths, weighted_sizes


class PointwiseOperator(SplittingOperator):
    """The filters of a linear layer or a 1 x 1 convolution: S_j = X^T diag(C[:, j]) X."""

    CAN_CHANGE_DTYPE = True
    ONLY_LAUNCHES = True
    COEFFICIENTS = ("C",)
    WIDE_ROWS = ("X", "C")

    def __init__(
        self,
        X: Tensor,  # (N, D)
        C: Tensor,  # (N, M)
        *,
        bias: bool = False,
        check_finite: bool = True,
    ) -> None:
        require_rows(X, C, check_finite)
        self._describe(X, C, C.shape[1], X.shape[1] + bias)
        self.X, self.C, self.bias, self.rows = X, C, bias, len(X)

    def matvec(self, V: Tensor, backend: str = "auto") -> Tensor:
        self._require_vectors(V)
        return choose(backend, differentiable=(self.X, self.C, V)).splitting_matvec(
            X=self.X, C=self.C, V=V, bias=self.bias
        )

    def restrict(self, filters: Tensor) -> PointwiseOperator:
        return restricted(self, filters, C=1)

    def magnitude(self) -> Tensor:
        return weighted_sizes(self.C, squared_lengths(self.X, self.bias))

    def dense(self, backend: str = "auto") -> Tensor:
        return choose(backend, self.X, self.C).splitting_matrices(X=self.X, C=self.C, bias=self.bias)

    def add_dense(self, matrices: Tensor, weight: float = 1.0, backend: str = "auto") -> None:
        """Add `weight` times the matrices to `matrices`, (M, D, D), in one pass over the rows."""
        chosen = choose(backend, matrices, self.X, self.C)
        chosen.add_splitting_matrices(S=matrices, X=self.X, C=self.C, bias=self.bias, weight=weight)
