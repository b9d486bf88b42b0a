"""Operators: every class against its dense matrices; restrictions to some filters; sums."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from s3d_fast import ConvOperator, EdgeConvOperator, PointwiseOperator, SplittingOperator, SumOperator
from s3d_fast.operators import DenseOperator, matvec_all
from tests.cases import (
    CONVS,
    EDGES,
    ROWS,
    TOLERANCE,
    Case,
    ConvCase,
    EdgeCase,
    RowsCase,
    compute_dtype,
    random_vectors,
    relative_error,
)


def rows_of(case: Case, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return the rows of every filter, (N, M, D), and the coefficients, (N, M), by brute force in float64."""
    if isinstance(case, EdgeCase):
        X, neighbours, slot, C = case.tensors(seed)
        winner, X = neighbours.gather(2, slot), X.double()
        rows = torch.stack(
            [
                torch.cat([X[b, winner[b, i, j]] - X[b, i], X[b, i]])
                for b in range(case.B)
                for i in range(case.P)
                for j in range(case.M)
            ]
        ).reshape(-1, case.M, 2 * case.F)
        C = C.double().flatten(0, 1)
    else:
        X, C = (tensor.double() for tensor in case.tensors(seed))
        if isinstance(case, ConvCase):
            X = F.unfold(X, case.k, case.d, case.p, case.s).mT.flatten(0, 1)
            C = C.movedim(1, -1).flatten(0, 2)
        rows = X[:, None].expand(-1, C.shape[1], -1)
    if case.bias:
        rows = torch.cat([rows, torch.ones_like(rows[..., :1])], -1)
    return rows, C


def operator_of(case: Case, seed: int = 0) -> SplittingOperator:
    if isinstance(case, EdgeCase):
        X, neighbours, slot, C = case.tensors(seed)
        return EdgeConvOperator(X, neighbours.gather(2, slot), C, bias=case.bias)
    if isinstance(case, ConvCase):
        X, C = case.tensors(seed)
        return ConvOperator(X, C, kernel_size=case.k, **case.geometry, bias=case.bias)
    assert isinstance(case, RowsCase)
    return PointwiseOperator(*case.tensors(seed), bias=case.bias)


every_case = pytest.mark.parametrize("case", [*ROWS, *CONVS, *EDGES], ids=str)
one_of_each = pytest.mark.parametrize("case", [ROWS[2], CONVS[1], EDGES[1]], ids=str)


@every_case
def test_dense_is_the_sum_of_outer_products(case: Case) -> None:
    rows, C = rows_of(case)
    expected = torch.einsum("nm,nmd,nme->mde", C, rows, rows)
    S = operator_of(case).dense()
    assert relative_error(S, expected) < TOLERANCE[case.dtype]
    assert relative_error(S, S.mT) < TOLERANCE[case.dtype]


@every_case
@pytest.mark.parametrize("K", [None, 2], ids=["one", "K2"])
def test_matvec_is_dense_times_vector(case: Case, K: int | None) -> None:
    operator = operator_of(case)
    V = random_vectors(*operator.shape if K is None else (K, *operator.shape), dtype=operator.dtype)
    expected = (operator.dense() @ V.unsqueeze(-1)).squeeze(-1)
    assert relative_error(operator.matvec(V), expected) < TOLERANCE[operator.dtype]


@every_case
def test_products_keep_the_shape_dtype_and_device_of_the_vectors(case: Case) -> None:
    operator = operator_of(case)
    rows, C = rows_of(case)
    assert operator.shape == (C.shape[1], rows.shape[2])
    assert operator.dtype == compute_dtype(case.dtype)
    assert operator.device == torch.device("cpu")
    V = random_vectors(*operator.shape, dtype=operator.dtype)
    SV = operator.matvec(V)
    assert (SV.shape, SV.dtype, SV.device) == (V.shape, operator.dtype, operator.device)
    assert operator.dense().shape == (*operator.shape, operator.shape[1])
    assert operator.dense().dtype == operator.dtype


@one_of_each
@pytest.mark.parametrize("filters", [[2], [2, 0], [1, 1, 0]], ids=str)
def test_restrict_takes_the_rows_of_some_filters(case: Case, filters: list[int]) -> None:
    operator, index = operator_of(case), torch.tensor(filters)
    some = operator.restrict(index)
    assert type(some) is type(operator)
    assert some.shape == (len(filters), operator.shape[1])
    V = random_vectors(*operator.shape)
    assert relative_error(some.matvec(V[index]), operator.matvec(V)[index]) < 1e-13
    assert relative_error(some.dense(), operator.dense()[index]) < 1e-13


@one_of_each
def test_restrict_leaves_the_operator_as_it_was(case: Case) -> None:
    operator = operator_of(case)
    V = random_vectors(*operator.shape)
    before = operator.matvec(V)
    operator.restrict(torch.tensor([0]))
    assert torch.equal(operator.matvec(V), before)


def test_a_convolution_with_a_one_by_one_kernel_is_pointwise() -> None:
    X, C = ConvCase(2, 3, 5, 5, 4, k=(1, 1)).tensors()
    pointwise = PointwiseOperator(X.movedim(1, -1).flatten(0, 2), C.movedim(1, -1).flatten(0, 2))
    assert relative_error(ConvOperator(X, C, kernel_size=(1, 1)).dense(), pointwise.dense()) < 1e-13


def test_dense_is_complete_with_more_columns_than_one_block() -> None:
    case = ConvCase(1, 8, 4, 4, 2, k=(3, 3), p=(1, 1), bias=True)
    rows, C = rows_of(case)
    assert rows.shape[2] > 64
    assert relative_error(operator_of(case).dense(), torch.einsum("nm,nmd,nme->mde", C, rows, rows)) < 1e-12


@every_case
def test_the_magnitude_is_the_sum_over_rows_without_cancellation(case: Case) -> None:
    operator = operator_of(case)
    size = operator.magnitude()
    assert size is not None
    assert (size.shape, size.dtype) == (operator.shape[:1], operator.dtype)
    rows, C = rows_of(case)
    expected = torch.einsum("nm,nm->m", C.abs(), rows.square().sum(-1).expand_as(C)).to(size)
    if isinstance(case, EdgeCase):
        # A bound: the length of an edge is at most that of both its ends.
        assert bool((size >= expected).all())
    else:
        assert relative_error(size, expected) < 10 * TOLERANCE[case.dtype]
    assert bool((size.double() * (1 + 1e-6) >= torch.linalg.eigvalsh(operator.dense().double()).abs().amax(-1)).all())


def test_the_magnitude_of_a_sum_is_the_sum_of_magnitudes() -> None:
    terms = [operator_of(ROWS[2], seed) for seed in (0, 1)]
    first, second = (term.magnitude() for term in terms)
    assert first is not None
    assert second is not None
    for weights in ([1.0, 3.0], [2.0, -2.0], [0.0, 0.0]):
        size = SumOperator(terms, weights).magnitude()
        assert size is not None
        torch.testing.assert_close(size, abs(weights[0]) * first + abs(weights[1]) * second)


def test_formed_matrices_keep_the_magnitude_of_the_sums_that_formed_them() -> None:
    terms = operator_of(ROWS[2])
    formed = DenseOperator(terms.dense(), terms.magnitude())
    assert torch.equal(formed.restrict(torch.tensor([1])).magnitude(), terms.magnitude()[[1]])
    assert torch.equal(DenseOperator(terms.dense()).magnitude(), torch.linalg.matrix_norm(terms.dense()))


@one_of_each
def test_a_sum_is_the_weighted_sum_of_its_terms(case: Case) -> None:
    terms, weights = [operator_of(case, seed) for seed in range(3)], [0.5, -2.0, 1.25]
    total = SumOperator(terms, weights)
    expected = sum(weight * term.dense() for weight, term in zip(weights, terms, strict=True))
    V = random_vectors(2, *total.shape)
    assert (total.shape, total.dtype, total.device) == (terms[0].shape, terms[0].dtype, terms[0].device)
    assert relative_error(total.dense(), expected) < 1e-13
    assert relative_error(total.matvec(V), (expected @ V.unsqueeze(-1)).squeeze(-1)) < 1e-12


@one_of_each
def test_the_weights_of_a_sum_are_one_by_default(case: Case) -> None:
    terms = [operator_of(case, seed) for seed in range(2)]
    assert relative_error(SumOperator(terms).dense(), terms[0].dense() + terms[1].dense()) < 1e-13


def test_batches_add_up_to_the_whole() -> None:
    X, C = RowsCase(12, 5, 4).tensors()
    whole = PointwiseOperator(X, C)
    batches = SumOperator([PointwiseOperator(x, c) for x, c in zip(X.split(5), C.split(5), strict=True)])
    assert relative_error(batches.dense(), whole.dense()) < 1e-13


@one_of_each
def test_the_restriction_of_a_sum_is_the_sum_of_restrictions(case: Case) -> None:
    total = SumOperator([operator_of(case, seed) for seed in range(2)], [0.3, 0.7])
    index = torch.tensor([2, 0])
    assert relative_error(total.restrict(index).dense(), total.dense()[index]) < 1e-13


def test_terms_of_different_kinds_may_be_added() -> None:
    X, C = ConvCase(2, 3, 5, 5, 4, k=(1, 1)).tensors()
    conv = ConvOperator(X, C, kernel_size=(1, 1))
    pointwise = PointwiseOperator(*RowsCase(9, 3, 4).tensors())
    assert relative_error(SumOperator([conv, pointwise]).dense(), conv.dense() + pointwise.dense()) < 1e-13


@one_of_each
def test_repr_says_kind_size_and_dtype(case: Case) -> None:
    operator = operator_of(case)
    M, D = operator.shape
    for shown in (operator, SumOperator([operator])):
        assert repr(shown).startswith(type(shown).__name__)
        assert all(word in repr(shown) for word in (f"M={M}", f"D={D}", "torch.float64", "cpu"))


def test_one_call_gives_the_products_of_all_layers() -> None:
    operators = [operator_of(case) for case in (ROWS[2], CONVS[1], EDGES[1])]
    vectors = [random_vectors(*operator.shape) for operator in operators]
    products = matvec_all(operators, vectors)
    assert all(
        torch.equal(product, operator.matvec(V))
        for product, operator, V in zip(products, operators, vectors, strict=True)
    )


@one_of_each
def test_reference_and_auto_backends_agree(case: Case) -> None:
    operator = operator_of(case)
    V = random_vectors(*operator.shape)
    assert relative_error(operator.matvec(V, "auto"), operator.matvec(V, "reference")) < 1e-12
    assert relative_error(operator.dense("auto"), operator.dense("reference")) < 1e-12
