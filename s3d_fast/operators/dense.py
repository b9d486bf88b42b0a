"""Splitting matrices that are already formed."""

from __future__ import annotations

import torch
from torch import Tensor

from s3d_fast.base import require
from s3d_fast.operators.operator import SplittingOperator


class DenseOperator(SplittingOperator):
    """Splitting matrices that are already formed; `rows` is 0, since no rows are left to add up.

    `size` is the magnitude of the sums that formed them; by default the Frobenius norms of the matrices.
    """

    ONLY_LAUNCHES = True

    def __init__(self, matrices: Tensor, size: Tensor | None = None) -> None:  # (M, D, D), (M,)
        require.tensor("matrices", matrices)
        require.shape("matrices", matrices, ("M", matrices.shape[-1], matrices.shape[-1]))
        require.not_empty("matrices", matrices)
        self.matrices, self.shape, self.rows = matrices, (len(matrices), matrices.shape[-1]), 0
        self.dtype, self.device, self.size = matrices.dtype, matrices.device, size

    def matvec(self, V: Tensor, backend: str = "auto") -> Tensor:
        self._require_vectors(V)
        return torch.einsum("mde,...me->...md", self.matrices, V)

    def restrict(self, filters: Tensor) -> DenseOperator:
        return DenseOperator(self.matrices[filters], None if self.size is None else self.size[filters])

    def magnitude(self) -> Tensor:
        return torch.linalg.matrix_norm(self.matrices) if self.size is None else self.size

    def dense(self, backend: str = "auto") -> Tensor:
        return self.matrices
