"""Sums of operators: several batches of data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from s3d_fast.operators.operator import SplittingOperator


class SumOperator(SplittingOperator):
    """The weighted sum of operators of one shape: the average over several batches of data."""

    def __init__(self, terms: Sequence[SplittingOperator], weights: Sequence[float] | None = None) -> None:
        if not terms:
            raise ValueError("terms must hold at least one operator, got none")
        self.terms = list(terms)
        self.weights = [1.0] * len(self.terms) if weights is None else list(weights)
        if len(self.weights) != len(self.terms):
            raise ValueError(f"weights must have {len(self.terms)} entries, one per term; got {len(self.weights)}")
        for term in self.terms:
            if not isinstance(term, SplittingOperator):
                raise TypeError(f"terms must be SplittingOperators, got {type(term).__name__}")
        first = self.terms[0]
        for term in self.terms[1:]:
            if (term.shape, term.dtype, term.device) != (first.shape, first.dtype, first.device):
                raise ValueError(f"terms must agree in shape, dtype and device, got {first} and {term}")
        self.shape, self.dtype, self.device = first.shape, first.dtype, first.device
        rows = [term.rows for term in self.terms]
        self.rows = None if None in rows else sum(count for count in rows if count is not None)

    @property
    def nbytes(self) -> int:
        """The bytes that the terms hold in memory."""
        return sum(term.nbytes for term in self.terms)

    def matvec(self, V: Tensor, backend: str = "auto") -> Tensor:
        self._require_vectors(V)
        result = torch.zeros_like(V)
        for term, weight in zip(self.terms, self.weights, strict=True):
            result.add_(term.matvec(V, backend), alpha=weight)
        return result

    def restrict(self, filters: Tensor) -> SumOperator:
        return SumOperator([term.restrict(filters) for term in self.terms], self.weights)

    def weighted_terms(self) -> list[tuple[SplittingOperator, float]]:
        return [
            (own, weight * factor)
            for term, weight in zip(self.terms, self.weights, strict=True)
            for own, factor in term.weighted_terms()
        ]

    def magnitude(self) -> Tensor | None:
        parts = [term.magnitude() for term in self.terms]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        return torch.stack([part * abs(weight) for part, weight in zip(known, self.weights, strict=True)]).sum(0)

    def dense(self, backend: str = "auto") -> Tensor:
        matrices = torch.zeros(*self.shape, self.shape[1], dtype=self.dtype, device=self.device)
        for term, weight in zip(self.terms, self.weights, strict=True):
            term.add_dense(matrices, weight, backend)
        return matrices
