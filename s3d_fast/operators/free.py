"""Matrices of one's own, given by a function that multiplies by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from s3d_fast.base import dtypes, require
from s3d_fast.operators.operator import SplittingOperator


class MatrixFreeOperator(SplittingOperator):
    """M symmetric D x D matrices, given by a function that takes V (M, D) and returns the products S_j v_j, (M, D).

    Nothing checks that the matrices are symmetric. Filters that have left a solver get zero vectors: their products
    are computed and not used.
    """

    def __init__(
        self,
        product: Callable[[Tensor], Tensor],
        shape: Sequence[int],  # (M, D)
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if not callable(product):
            raise TypeError(f"product must be a function, got {type(product).__name__}")
        if len(tuple(shape)) != 2:
            raise ValueError(f"shape must be (M, D), got {tuple(shape)}")
        for name, size in zip(("M", "D"), shape, strict=True):
            require.count(name, size)
        require.choice("dtype", dtype, (torch.float32, torch.float64))
        self.product, self.shape = product, (int(shape[0]), int(shape[1]))
        self.dtype, self.device = dtypes.compute_dtype(dtype), torch.device(device)
        self.filters: Tensor | None = None
        self.matrices = self.shape[0]

    def matvec(self, V: Tensor, backend: str = "auto") -> Tensor:
        self._require_vectors(V)
        if V.dim() == 3:
            return torch.stack([self.matvec(own, backend) for own in V])
        given = V
        if self.filters is not None:
            given = V.new_zeros(self.matrices, V.shape[1])
            given[self.filters] = V
        result = self.product(given)
        if not isinstance(result, Tensor) or result.shape != given.shape or result.dtype != V.dtype:
            found = f"{tuple(result.shape)}, {result.dtype}" if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(f"the product must be a tensor like V, {tuple(given.shape)}, {V.dtype}; got {found}")
        return result if self.filters is None else result[self.filters]

    def restrict(self, filters: Tensor) -> MatrixFreeOperator:
        rest = MatrixFreeOperator(self.product, (len(filters), self.shape[1]), self.dtype, self.device)
        rest.filters = filters if self.filters is None else self.filters[filters]
        rest.matrices = self.matrices
        return rest
