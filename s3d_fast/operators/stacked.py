"""Batches laid out as one: products with many small batches spend their time on everything but the products."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from s3d_fast.operators.operator import SplittingOperator
from s3d_fast.operators.sums import SumOperator

# Batches with more bytes than this are left as they are: a copy would cost more than it saves.
LARGEST_BATCH = 2 * 2**20


class StackedOperator(SplittingOperator):
    """The average over several batches of one form, with the rows of all batches in one operator.

    `whole` is that operator; `lengths` tells how many entries of each of its tensors belong to each batch.
    """

    def __init__(self, whole: SplittingOperator, lengths: Mapping[str, Sequence[int]]) -> None:
        self.whole, self.lengths = whole, dict(lengths)
        self.shape, self.dtype, self.device, self.rows = whole.shape, whole.dtype, whole.device, whole.rows

    def matvec(self, V: Tensor, backend: str = "auto") -> Tensor:
        return self.whole.matvec(V, backend)

    def restrict(self, filters: Tensor) -> StackedOperator:
        return StackedOperator(self.whole.restrict(filters), self.lengths)

    def weighted_terms(self) -> list[tuple[SplittingOperator, float]]:
        return self.whole.weighted_terms()

    def batches(self) -> list[tuple[SplittingOperator, float]]:
        counts = len(next(iter(self.lengths.values())))
        terms = []
        for batch in range(counts):
            term = copy.copy(self.whole)
            for name, lengths in self.lengths.items():
                setattr(term, name, getattr(self.whole, name).narrow(0, sum(lengths[:batch]), lengths[batch]))
            terms.append((term, float(counts)))
        return terms

    def magnitude(self) -> Tensor | None:
        return self.whole.magnitude()

    def dense(self, backend: str = "auto") -> Tensor:
        return self.whole.dense(backend)

    def add_dense(self, matrices: Tensor, weight: float = 1.0, backend: str = "auto") -> None:
        self.whole.add_dense(matrices, weight, backend)

    @property
    def nbytes(self) -> int:
        """The bytes that all batches hold in memory."""
        return self.whole.nbytes


def averaged(terms: Sequence[SplittingOperator]) -> SplittingOperator:
    """Return the average of operators on batches of equal weight: stacked where that pays, else their sum."""
    if len(terms) == 1:
        return terms[0]
    weight = 1 / len(terms)
    stacked = _stacked(terms, weight)
    return SumOperator(terms, [weight] * len(terms)) if stacked is None else stacked


def _stacked(terms: Sequence[SplittingOperator], weight: float) -> StackedOperator | None:
    first = terms[0]
    if not first.COEFFICIENTS or any(type(term) is not type(first) or term.nbytes > LARGEST_BATCH for term in terms):
        return None
    # Batches may differ in the shapes of their maps, and in tensors that are left out where they are zero or one.
    if any(_layout(term) != _layout(first) for term in terms):
        return None
    names = [name for name in _layout(first) if not name.startswith(first.PER_FILTER)]
    parts = {name: [getattr(term, name) for term in terms] for name in names}
    whole = copy.copy(first)
    for name, own in parts.items():
        joined = torch.cat(own)
        setattr(whole, name, joined.mul_(weight) if name.startswith(first.COEFFICIENTS) else joined)
    if first.rows is not None:
        whole.rows = sum(term.rows or 0 for term in terms)
    return StackedOperator(whole, {name: [len(one) for one in own] for name, own in parts.items()})


def _layout(operator: SplittingOperator) -> dict[str, torch.Size]:
    """Return the tensors of an operator with their shapes but for the first axis."""
    return {name: value.shape[1:] for name, value in vars(operator).items() if isinstance(value, Tensor)}
