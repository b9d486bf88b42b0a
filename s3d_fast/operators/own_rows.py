"""Rows that all filters share, and a few that belong to one filter each: maxima over many positions."""

from __future__ import annotations

import torch
from torch import Tensor

from s3d_fast.backends.arguments import require_own_rows, require_rows
from s3d_fast.backends.choice import choose
from s3d_fast.operators.operator import SplittingOperator
from s3d_fast.operators.rows import restricted, squared_lengths, weighted_sizes


class OwnRowsOperator(SplittingOperator):
    """S_j = X^T diag(C[:, j]) X + sum_r K[r, j] e_rj e_rj^T, where row e_rj belongs to filter j alone.

    Under a maximum over a whole cloud or map, every filter has one near tie per sample: rows of its own are far fewer
    than positions. They hold the entry of the bias, too.
    """

    CAN_CHANGE_DTYPE = True
    COEFFICIENTS = ("C", "K")

    def __init__(
        self,
        X: Tensor,  # (N, D)
        C: Tensor,  # (N, M)
        E: Tensor,  # (R, M, D), or (R, M, D + 1) with a bias
        K: Tensor,  # (R, M)
        *,
        bias: bool = False,
        check_finite: bool = True,
    ) -> None:
        require_rows(X, C, check_finite)
        self._describe(X, C, C.shape[1], X.shape[1] + bias)
        require_own_rows(E, K, X, *self.shape, check_finite)
        self.X, self.C, self.E, self.K, self.bias = X, C, E, K, bias

    def matvec(self, V: Tensor, backend: str = "auto") -> Tensor:
        self._require_vectors(V)
        shared = choose(backend, differentiable=(self.X, self.C, V)).splitting_matvec(
            X=self.X, C=self.C, V=V, bias=self.bias
        )
        rows = self.E.to(V.dtype).transpose(0, 1)  # (M, R, D)
        vectors = V.reshape(-1, *self.shape).permute(1, 2, 0)  # (M, D, K)
        weighted = torch.bmm(rows, vectors) * self.K.to(V.dtype).T.unsqueeze(2)
        return shared + torch.bmm(rows.mT, weighted).permute(2, 0, 1).reshape(V.shape)

    def restrict(self, filters: Tensor) -> OwnRowsOperator:
        return restricted(self, filters, C=1, E=1, K=1)

    def magnitude(self) -> Tensor:
        own = (self.K.to(self.dtype).abs() * squared_lengths(self.E, False)).sum(0)
        return weighted_sizes(self.C, squared_lengths(self.X, self.bias)) + own

    def dense(self, backend: str = "auto") -> Tensor:
        shared = choose(backend, self.X, self.C).splitting_matrices(X=self.X, C=self.C, bias=self.bias)
        rows = self.E.to(shared.dtype).transpose(0, 1)
        return shared + torch.bmm(rows.mT * self.K.to(shared.dtype).T.unsqueeze(1), rows)
