"""All layers at once: the product of every operator with its own vectors is one step of a solver."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from s3d_fast.backends.choice import choose
from s3d_fast.operators.depthwise import DepthwiseOperator
from s3d_fast.operators.operator import Provider, SplittingOperator
from s3d_fast.operators.pointwise import PointwiseOperator


def matvec_all(
    operators: Sequence[SplittingOperator], vectors: Sequence[Tensor], backend: str = "auto"
) -> list[Tensor]:
    """Return the product of every operator with its own vectors: one step of a solver for all layers.

    All operators on plain rows take one grouped call, and so do all that depthwise stages follow. All operators of a
    provider take one call of it.
    """
    results: list[Tensor | None] = [None] * len(operators)

    def add(index: int, product: Tensor, weight: float = 1.0) -> None:
        total = results[index]
        if total is None:
            results[index] = product if weight == 1 else product.mul_(weight)
        else:
            total.add_(product, alpha=weight)

    for provider, own in _by_provider(operators).items():
        products = provider.matvec_all([operators[i] for i in own], [vectors[i] for i in own], backend)
        for index, product in zip(own, products, strict=True):
            add(index, product)
    rows: list[tuple[int, PointwiseOperator, float]] = []
    stages: list[tuple[int, DepthwiseOperator, float]] = []
    for index, (operator, V) in enumerate(zip(operators, vectors, strict=True)):
        if operator.provider is not None:
            continue
        for term, weight in operator.weighted_terms():
            if isinstance(term, PointwiseOperator):
                rows.append((index, term, weight))
            elif isinstance(term, DepthwiseOperator):
                stages.append((index, term, weight))
            else:
                add(index, term.matvec(V, backend), weight)
    products = _rows_together([term for _, term, _ in rows], [vectors[index] for index, _, _ in rows], backend)
    products += _stages_together([term for _, term, _ in stages], [vectors[index] for index, _, _ in stages], backend)
    for (index, _, weight), product in zip([*rows, *stages], products, strict=True):
        add(index, product, weight)
    return [result for result in results if result is not None]


def _rows_together(terms: Sequence[PointwiseOperator], vectors: Sequence[Tensor], backend: str) -> list[Tensor]:
    """Return the products of operators on plain rows, in one call."""
    X, C, bias = [term.X for term in terms], [term.C for term in terms], [term.bias for term in terms]
    return choose(backend, differentiable=(*X, *C, *vectors)).splitting_matvec_grouped(X=X, C=C, V=vectors, bias=bias)


def _stages_together(terms: Sequence[DepthwiseOperator], vectors: Sequence[Tensor], backend: str) -> list[Tensor]:
    """Return the products of operators that depthwise stages follow, in one call."""
    C, d, weight = [term.C for term in terms], [term.d for term in terms], [term.weight for term in terms]
    tensors = [tensor for lists in (C, d, weight) for own in lists for tensor in own]
    X, bias, stages = [term.X for term in terms], [term.bias for term in terms], [term.stages for term in terms]
    chosen = choose(backend, *X, *tensors, differentiable=vectors)
    return chosen.depthwise_matvec_grouped(X=X, C=C, d=d, weight=weight, stages=stages, V=vectors, bias=bias)


def dense_all(operators: Sequence[SplittingOperator], backend: str = "auto") -> Iterator[Tensor]:
    """Yield the matrices of every operator in turn; all operators of a provider take one call of it."""
    found: dict[int, Tensor] = {}
    for provider, own in _by_provider(operators).items():
        found.update(zip(own, provider.dense_all([operators[i] for i in own], backend), strict=True))
    for index, operator in enumerate(operators):
        yield found.pop(index) if index in found else operator.dense(backend)


def moments_all(
    operators: Sequence[SplittingOperator], vectors: Sequence[Tensor], backend: str = "auto"
) -> list[Tensor]:
    """Return for every operator the number of its batches, the sum of q_b = v^T S_b v over them, and the sum of q_b^2.

    S is the average of S_b over batches b, the terms of a sum. The moments of an operator are (3, M), in float64. They
    cost as much as one product with each operator.
    """
    found: dict[int, Tensor] = {}
    for provider, own in _by_provider(operators).items():
        moments = provider.moments_all([operators[i] for i in own], [vectors[i] for i in own], backend)
        found.update(zip(own, moments, strict=True))
    for index, (operator, V) in enumerate(zip(operators, vectors, strict=True)):
        if index not in found:
            batches = operator.batches()
            products = matvec_all([batch for batch, _ in batches], [V] * len(batches), backend)
            pairs = zip(products, batches, strict=True)
            found[index] = moments_of([factor * (V * product).sum(-1) for product, (_, factor) in pairs])
    return [found[index] for index in range(len(operators))]


def moments_of(quotients: Sequence[Tensor]) -> Tensor:  # B times (M,) -> (3, M)
    """Return the number of quotients, their sum and the sum of their squares, for every filter."""
    q = torch.stack(list(quotients)).double()
    return torch.stack([torch.full_like(q[0], len(q)), q.sum(0), q.square().sum(0)])


def _by_provider(operators: Sequence[SplittingOperator]) -> dict[Provider, list[int]]:
    """Return, for every provider, the places of its operators."""
    places: dict[Provider, list[int]] = {}
    for index, operator in enumerate(operators):
        if operator.provider is not None:
            places.setdefault(operator.provider, []).append(index)
    return places
