"""Fewer rows than columns: S in the coordinates of its rows, where products take less time.

Let X X^T = L L^T (N x N, Cholesky). The rows are X = L Q with orthonormal rows of Q, so that

    S = X^T diag(c) X = Q^T (L^T diag(c) L) Q

has the eigenvalues of L^T diag(c) L and, since N < D, the eigenvalue 0. A column of zeros behind L stands for the
latter. An eigenvector needs no Q: v = S v / lambda is a multiple of X^T a with a = c * (L w), and everything that must
be known of it is found among the rows: with G = X X^T,

    |v|^2 = a^T G a,   S v = X^T (c * G a),   |S v - lambda v|^2 = b^T G b,   b = c * G a - lambda a.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from s3d_fast.operators.cost import expected_steps
from s3d_fast.operators.operator import SplittingOperator
from s3d_fast.operators.pointwise import PointwiseOperator

# The part of its mean diagonal that is added to X X^T, so that it has a Cholesky factor if rows are dependent.
SHIFT = 1e-12
# A vector with more than this part of its squared length in the column of zeros belongs to the eigenvalue 0.
NULL_PART = 0.5
# Lanczos takes about this share of the expected steps. The other numbers are flops in units of those of a product:
# those of X X^T and of what is found among the rows are in float64; factoring runs in small loops.
STEPS_SHARE, GRAM, FACTOR, AMONG_ROWS, GAIN = 0.5, 4.0, 2.0, 24.0, 0.8


def prefers_few_rows(operator: SplittingOperator, tol: float) -> bool:
    """Return whether the coordinates of the rows are expected to cost less than products with the rows."""
    (M, D), N = operator.shape, operator.rows
    if N is None or not can_reduce(operator):
        return False
    steps = STEPS_SHARE * expected_steps(D, tol)
    reduced = GRAM * N * N * D + FACTOR * N**3 + (4 * min(steps, N) + AMONG_ROWS) * N * N * M + 4 * N * D * M
    return reduced < GAIN * 4 * steps * N * D * M


def can_reduce(operator: SplittingOperator) -> bool:
    """Return whether an operator consists of rows, at most half as many as columns."""
    return bool(operator.rows) and 2 * (operator.rows or 0) <= operator.shape[1] and bool(_terms(operator))


def _terms(operator: SplittingOperator) -> list[tuple[PointwiseOperator, float]]:
    """Return the parts of an operator with their weights; none if they are not rows and coefficients."""
    terms = operator.weighted_terms()
    pointwise = [(term, weight) for term, weight in terms if isinstance(term, PointwiseOperator)]
    return pointwise if len(pointwise) == len(terms) and operator.provider is None else []


@dataclass(frozen=True)
class Lifted:
    """Vectors that have come back from the coordinates of the rows, both ends of M filters."""

    V: Tensor  # (2, M, D), unit vectors
    values: Tensor  # (2, M), v^T S v
    errors: Tensor  # (2, M), |S v - (v^T S v) v|
    noise: Tensor  # (M,), how far the coordinates may have moved eigenvalues, beyond rounding errors of products


class FewRows:
    """An operator with fewer rows than columns; `reduced` has the same eigenvalues, in N + 1 columns."""

    def __init__(self, operator: SplittingOperator) -> None:
        terms = _terms(operator)
        self.operator, self.bias = operator, terms[0][0].bias
        self.X = torch.cat([term.X for term, _ in terms]).to(operator.dtype)
        self.C = torch.cat([term.C.to(operator.dtype) * weight for term, weight in terms])
        rows = self.X.double()
        self.gram = rows @ rows.mT + float(self.bias)  # (N, N)
        self.shift = SHIFT * self.gram.diagonal().mean()
        shifted = self.gram.clone()
        # All rows may be zero.
        shifted.diagonal().add_(self.shift + torch.finfo(torch.float64).tiny)
        self.factor = torch.linalg.cholesky(shifted)
        columns = torch.nn.functional.pad(self.factor, (0, 1)).to(operator.dtype)
        self.reduced = PointwiseOperator(columns, self.C, check_finite=False)

    def lift(self, W: Tensor, direction: Tensor) -> Lifted:
        """Return the vectors that belong to vectors in the coordinates of the rows.

        Args:
            W: (2, M, N + 1), unit vectors, both ends of every filter.
            direction: (D,), any direction at random; its part that is orthogonal to the rows belongs to the eigenvalue
                0.
        """
        c, G = self.C.double(), self.gram
        a = c * (self.factor @ W[..., :-1].double().mT)  # (2, N, M)
        Ga = G @ a
        lengths = (a * Ga).sum(1, keepdim=True).clamp(min=0).sqrt()  # (2, 1, M)
        is_null = (W[..., -1].square() > NULL_PART) | (lengths[:, 0] == 0)  # (2, M)
        lengths = torch.where(is_null[:, None], 1, lengths)
        a, Ga = a / lengths, Ga / lengths
        values = (c * Ga.square()).sum(1)  # (2, M)
        b = c * Ga - values[:, None] * a
        errors = (b * (G @ b)).sum(1).clamp(min=0).sqrt()
        factors = a.to(self.operator.dtype)
        V = factors.mT @ self.X
        if self.bias:
            V = torch.cat([V, factors.sum(1).unsqueeze(-1)], -1)
        if bool(is_null.any()):
            V = torch.where(is_null.unsqueeze(-1), self._orthogonal(direction.double()).to(V), V)
            values, errors = (torch.where(is_null, 0, tensor) for tensor in (values, errors))
        # Where L is rounded, eigenvalues move as by the rounding of the rows.
        size = self.reduced.magnitude()
        noise = 2 * torch.finfo(self.operator.dtype).eps * size + self.shift.to(size) * self.C.abs().amax(0)
        return Lifted(V, values.to(V), errors.to(V), noise)

    def _orthogonal(self, vector: Tensor) -> Tensor:  # (D,)
        """Return the part of a vector that is orthogonal to all rows, with unit length."""
        rows = self.X.double()
        # The second time removes what rounding errors, and the shift, have left.
        for _ in range(2):
            features = vector[:-1] if self.bias else vector
            along = rows @ features + (vector[-1] if self.bias else 0)
            weights = torch.cholesky_solve(along.unsqueeze(-1), self.factor).squeeze(-1)
            part = rows.mT @ weights
            vector = vector - (torch.cat([part, weights.sum()[None]]) if self.bias else part)
        return vector / vector.norm()
