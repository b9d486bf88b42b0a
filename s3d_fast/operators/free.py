"""Matrices of one's own, given by a function that multiplies by them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from s3d_fast.base import dtypes, require
from s3d_fast.operators.operator import SplittingOperator

# Of |S a| |b| + |S b| |a|: how far a^T S b and b^T S a may differ. Products in bfloat16 stay below it.
ASYMMETRY = 1e-2
# Products that are compared with the first one. The first ones of a solver may have equal vectors.
COMPARED = 3


class MatrixFreeOperator(SplittingOperator):
    """M symmetric D x D matrices, given by a function that takes V (M, D) and returns the products S_j v_j, (M, D).

    The function gets vectors of its own, which it may change, and runs with gradients enabled, so that it can
    differentiate. Filters that have left a solver get zero vectors: their products are computed and not used.

    The first products are checked: a^T S b = b^T S a must hold for most filters. That costs no further product, and
    finds functions whose matrices are far from symmetric.
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
        if not isinstance(shape, Sequence) or len(shape) != 2:
            raise ValueError(f"shape must be (M, D), got {shape!r}")
        for name, size in zip(("M", "D"), shape, strict=True):
            require.count(name, size)
        require.choice("dtype", dtype, (torch.float32, torch.float64))
        self.product, self.shape = product, (int(shape[0]), int(shape[1]))
        # "cuda" becomes "cuda:0", as vectors have it.
        self.dtype, self.device = dtypes.compute_dtype(dtype), torch.empty(0, device=device).device
        self.filters: Tensor | None = None
        self.matrices = self.shape[0]
        self.first: tuple[Tensor, Tensor] | None = None
        self.compared = 0

    def matvec(self, V: Tensor, backend: str = "auto") -> Tensor:
        self._require_vectors(V)
        # The function may return the same memory every time: its result is copied at once.
        result = torch.empty_like(V, memory_format=torch.contiguous_format)
        for own, into in zip(V.reshape(-1, *self.shape), result.view(-1, *self.shape), strict=True):
            given = own.clone() if self.filters is None else own.new_zeros(self.matrices, self.shape[1])
            if self.filters is not None:
                given[self.filters] = own
            products = self._products(given)
            into.copy_(products if self.filters is None else products[self.filters])
            if self.filters is None and self.compared < COMPARED:
                self._require_symmetric(own, into)
        return result

    def _products(self, V: Tensor) -> Tensor:  # (matrices, D) -> (matrices, D)
        with torch.enable_grad():
            result = self.product(V)
        if not isinstance(result, Tensor):
            raise ValueError(f"the product must be a tensor like V, got {type(result).__name__}")
        wanted, found = ((tuple(of.shape), of.dtype, of.device) for of in (V, result))
        if wanted != found:
            (shape, dtype, device), (*got, where) = wanted, found
            raise ValueError(
                f"the product must be a tensor like V, {shape}, {dtype} on {device}; got {got[0]}, {got[1]} on {where}"
            )
        return result.detach()

    def _require_symmetric(self, V: Tensor, SV: Tensor) -> None:
        if self.first is None:
            self.first = V.clone(), SV.clone()
            return
        W, SW = self.first
        one, other = (W * SV).sum(-1), (V * SW).sum(-1)
        size = W.norm(dim=-1) * SV.norm(dim=-1) + V.norm(dim=-1) * SW.norm(dim=-1)
        bad = (one - other).abs() > ASYMMETRY * size
        # Of a matrix that is zero but for rounding errors, products are noise: a few filters prove nothing.
        if bool(2 * bad.sum() > (size > 0).sum()):
            j = int(bad.nonzero()[0])
            raise ValueError(
                f"the matrices must be symmetric: a^T S b = {float(one[j]):.4g} and b^T S a = {float(other[j]):.4g} "
                f"differ for filter {j}; a function of (S + S^T) / 2 or of S^T S would do"
            )
        self.compared += 1
        if self.compared == COMPARED:
            self.first = None

    def restrict(self, filters: Tensor) -> MatrixFreeOperator:
        rest = copy.copy(self)
        rest.shape = (len(filters), self.shape[1])
        rest.filters = torch.arange(self.matrices, device=filters.device) if self.filters is None else self.filters
        rest.filters = rest.filters[filters]
        return rest
