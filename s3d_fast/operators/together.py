"""All layers at once: the product of every operator with its own vectors is one step of a solver."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from s3d_fast.backends.choice import choose
from s3d_fast.operators.operator import Provider, SplittingOperator
from s3d_fast.operators.pointwise import PointwiseOperator


def matvec_all(
    operators: Sequence[SplittingOperator], vectors: Sequence[Tensor], backend: str = "auto"
) -> list[Tensor]:
    """Return the product of every operator with its own vectors: one step of a solver for all layers.

    All operators on plain rows take one grouped call, and all operators of a provider take one call of it.
    """
    results: list[Tensor | None] = [None] * len(operators)
    for provider, own in _by_provider(operators).items():
        products = provider.matvec_all([operators[i] for i in own], [vectors[i] for i in own], backend)
        for index, product in zip(own, products, strict=True):
            results[index] = product
    rows: list[tuple[int, PointwiseOperator, float]] = []
    for index, (operator, V) in enumerate(zip(operators, vectors, strict=True)):
        if operator.provider is not None:
            continue
        # A shortcut for the usual case: this runs at every step.
        terms = [(operator, 1.0)] if isinstance(operator, PointwiseOperator) else operator.row_terms()
        if terms is None:
            results[index] = operator.matvec(V, backend)
        else:
            rows += [(index, term, weight) for term, weight in terms]
    X, C = [term.X for _, term, _ in rows], [term.C for _, term, _ in rows]
    V_of_rows = [vectors[index] for index, _, _ in rows]
    bias = [term.bias for _, term, _ in rows]
    products = choose(backend, *X, *C, *V_of_rows).splitting_matvec_grouped(X=X, C=C, V=V_of_rows, bias=bias)
    for (index, _, weight), product in zip(rows, products, strict=True):
        total = results[index]
        if total is None:
            results[index] = product if weight == 1 else product.mul_(weight)
        else:
            total.add_(product, alpha=weight)
    return [result for result in results if result is not None]


def dense_all(operators: Sequence[SplittingOperator], backend: str = "auto") -> Iterator[Tensor]:
    """Yield the matrices of every operator in turn; all operators of a provider take one call of it."""
    found: dict[int, Tensor] = {}
    for provider, own in _by_provider(operators).items():
        found.update(zip(own, provider.dense_all([operators[i] for i in own], backend), strict=True))
    for index, operator in enumerate(operators):
        yield found.pop(index) if index in found else operator.dense(backend)


def _by_provider(operators: Sequence[SplittingOperator]) -> dict[Provider, list[int]]:
    """Return, for every provider, the places of its operators."""
    places: dict[Provider, list[int]] = {}
    for index, operator in enumerate(operators):
        if operator.provider is not None:
            places.setdefault(operator.provider, []).append(index)
    return places
