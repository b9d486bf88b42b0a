"""The interface between layers and solvers: splitting matrices, given by their products with vectors."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from s3d_fast.backends.arguments import require_vectors
from s3d_fast.base import dtypes, require


@dataclass(frozen=True)
class LayerShape:
    """The shape of a layer's weight, the axis of its filters, and whether they have a bias."""

    weight: tuple[int, ...]
    row_axis: int
    bias: bool


class Provider(ABC):
    """Computes the products of operators that hold no data of their own, for all layers at once."""

    @abstractmethod
    def matvec_all(
        self, operators: Sequence[SplittingOperator], vectors: Sequence[Tensor], backend: str
    ) -> list[Tensor]:
        """Return the product of every operator of this provider with its own vectors."""

    @abstractmethod
    def dense_all(self, operators: Sequence[SplittingOperator], backend: str) -> list[Tensor]:
        """Return the matrices of every operator of this provider, each (M, D, D)."""

    @abstractmethod
    def moments_all(
        self, operators: Sequence[SplittingOperator], vectors: Sequence[Tensor], backend: str
    ) -> list[Tensor]:
        """Return the moments over batches of every operator of this provider: see `moments_all`."""


class SplittingOperator(ABC):
    """M symmetric D x D matrices, one per filter. Only `dense` forms them.

    Attributes:
        shape: (M, D).
        dtype: the dtype of the vectors and of the arithmetic.
        device: the device of the vectors.
        provider: computes the products, if the operator itself does not.
        rows: N, if the matrices are sums over N rows and cheap to form; else None.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    provider: Provider | None = None
    rows: int | None = None
    # Whether `in_dtype` gives the same operator in another dtype: all its numbers are tensors of its own.
    CAN_CHANGE_DTYPE: ClassVar[bool] = False
    # Whether a product only launches kernels on tensors of the operator, so that a CUDA graph can repeat it.
    ONLY_LAUNCHES: ClassVar[bool] = False
    # How the names of tensors begin that S is linear in, and of those that no sample has a part of; all other tensors
    # have the samples along their first axis. None are named if batches cannot be stacked.
    COEFFICIENTS: ClassVar[tuple[str, ...]] = ()
    PER_FILTER: ClassVar[tuple[str, ...]] = ()
    # The tensors that products on GPUs load in whole vectors along their last axis; the rows that they multiply first.
    WIDE_ROWS: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def matvec(self, V: Tensor, backend: str = "auto") -> Tensor:
        """Return S_j v_j for all filters j; V is (M, D), or (K, M, D) for K vectors per filter."""

    @abstractmethod
    def restrict(self, filters: Tensor) -> SplittingOperator:
        """Return the operator restricted to some filters; `filters` holds their indices."""

    def dense(self, backend: str = "auto") -> Tensor:
        """Return the matrices themselves, (M, D, D), column by column."""
        filters, width = self.shape
        basis = torch.eye(width, dtype=self.dtype, device=self.device)[:, None].expand(-1, filters, -1)
        # At most 64 columns at a time: a product with K vectors may need K times the memory of one.
        columns = [self.matvec(block.contiguous(), backend) for block in basis.split(64)]
        return torch.cat(columns).permute(1, 2, 0).contiguous()

    def add_dense(self, matrices: Tensor, weight: float = 1.0, backend: str = "auto") -> None:
        """Add `weight` times the matrices to `matrices`, (M, D, D)."""
        matrices.add_(self.dense(backend), alpha=weight)

    def weighted_terms(self) -> list[tuple[SplittingOperator, float]]:
        """Return this operator as a weighted sum of operators that are not sums."""
        return [(self, 1.0)]

    def batches(self) -> list[tuple[SplittingOperator, float]]:
        """Return operators and factors: S is the average over batches of factor times operator."""
        terms = self.weighted_terms()
        total = sum(weight for _, weight in terms)
        return [(term, total) for term, _ in terms]

    def magnitude(self) -> Tensor | None:
        """Return A_j = sum_n |C_nj| |x_n|^2 for every filter, (M,): S without cancellation.

        Products S v have rounding errors of about the machine epsilon times A_j, however small S_j itself is. An upper
        bound is good enough. None means that it is not known.
        """
        return None

    def stored_as(self, dtype: torch.dtype | None) -> SplittingOperator:
        """Return the operator with its float32 tensors in another dtype; None keeps them."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            if dtype is not None and isinstance(value, Tensor) and value.dtype == torch.float32:
                setattr(other, name, value.to(dtype))
        return other

    def in_dtype(self, dtype: torch.dtype) -> SplittingOperator:
        """Return the operator with all its numbers in another dtype, and the arithmetic that goes with it."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and value.is_floating_point():
                setattr(other, name, value.to(dtype))
        other.dtype = dtypes.compute_dtype(dtype)
        return other

    @property
    def nbytes(self) -> int:
        """The bytes that the operator holds in memory."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))

    @property
    def evaluations(self) -> int:
        """How often every filter is evaluated: samples times positions."""
        C = getattr(self, "C", None)
        return C.numel() // self.shape[0] if isinstance(C, Tensor) else 0

    def _require_vectors(self, V: Tensor) -> None:
        require_vectors(V, *self.shape, self.dtype, self.device)

    def _describe(self, X: Tensor, C: Tensor, filters: int, width: int) -> None:
        for name, tensor in (("X", X), ("C", C)):
            if tensor.numel() == 0:
                require.not_empty(name, tensor)
        self.shape = (filters, width)
        self.dtype = dtypes.compute_dtype(X.dtype)
        self.device = X.device

    def __repr__(self) -> str:
        filters, width = self.shape
        return f"{type(self).__name__}(M={filters}, D={width}, {self.dtype}, {self.device})"
