"""Operators of units beyond one activation: against dense matrices, restricted, stored in other ways, and together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from s3d_fast import SplittingOperator, SumOperator
from s3d_fast.backends import operations
from s3d_fast.maths import reference
from s3d_fast.maths.reference import DepthwiseStage
from s3d_fast.operators import (
    DepthwiseOperator,
    EdgeConvOperator,
    GatedOperator,
    OwnRowsOperator,
    TiedConvOperator,
    matvec_all,
)
from s3d_fast.operators.streamed import DiskStream, StreamedOperator
from tests.backends.agreement import depthwise_of, edge_ties, gated_of, tied_of
from tests.cases import DEPTHWISE, ConvCase, EdgeCase, RowsCase, random_tensor, random_vectors, relative_error


def gated(full: bool, bias: bool, dtype: torch.dtype = torch.float64) -> GatedOperator:
    given = gated_of(RowsCase(23, 5, 4, dtype, bias), full)
    return GatedOperator(given["X"], given["c11"], given["c12"], given["c22"], bias=bias)


def dense_gated(operator: GatedOperator) -> Tensor:
    """Return S from its four blocks."""
    rows = reference.with_ones(operator.X) if operator.bias else operator.X
    zero = torch.zeros_like(operator.c11)

    def block(C: Tensor | None) -> Tensor:
        return torch.einsum("nm,nd,ne->mde", zero if C is None else C, rows, rows)

    upper = torch.cat([block(operator.c11), block(operator.c12)], -1)
    lower = torch.cat([block(operator.c12), block(operator.c22)], -1)
    return torch.cat([upper, lower], -2)


def depthwise(number: int, dtype: torch.dtype = torch.float64) -> DepthwiseOperator:
    given = depthwise_of(replace(DEPTHWISE[number], dtype=dtype))
    tensors = [given[name] for name in ("X", "C", "d", "weight")]
    return DepthwiseOperator(*tensors, stages=given["stages"], bias=given["bias"])


def jacobians(operator: DepthwiseOperator) -> list[Tensor]:
    """Return d z_i / d theta of every activation's input, each (B, H_i, W_i, M, D), by automatic differentiation."""
    rows = reference.with_ones(operator.X) if operator.bias else operator.X

    def inputs(theta: Tensor) -> tuple[Tensor, ...]:
        z = [(rows @ theta.T).reshape(operator.C[0].shape).movedim(-1, 1)]
        for slope, weight, stage in zip(operator.d, operator.weight, operator.stages, strict=True):
            maps = slope.movedim(-1, 1) * z[-1]
            geometry = (stage.stride, stage.padding, stage.dilation, len(weight))
            z.append(torch.nn.functional.conv2d(maps, weight[:, None], None, *geometry))
        return tuple(maps.movedim(1, -1) for maps in z)

    full = torch.autograd.functional.jacobian(inputs, torch.zeros(operator.shape, dtype=operator.dtype))
    # A channel depends on its own filter only.
    return [J.diagonal(dim1=3, dim2=4).movedim(-1, 3) for J in full]


def dense_depthwise(operator: DepthwiseOperator) -> Tensor:
    """Return S = sum_i J_i^T C_i J_i."""
    terms = zip(operator.C, jacobians(operator), strict=True)
    return sum(torch.einsum("bhwm,bhwmd,bhwme->mde", C, J, J) for C, J in terms)


def tied_edges(sloped: bool, dtype: torch.dtype = torch.float64) -> EdgeConvOperator:
    case = EdgeCase(2, 9, 3, 4, 5, dtype, bias=True)
    ties = edge_ties(case, sloped)
    X, winner, C = case.won()
    return EdgeConvOperator(X, winner, C, runner=ties.runner, K=ties.K, d1=ties.d1, d2=ties.d2, bias=True)


def dense_tied_edges(operator: EdgeConvOperator) -> Tensor:
    """Return S = sum C edge edge^T + K e e^T, one edge at a time."""
    X, batch = operator.X, torch.arange(len(operator.X))[:, None, None]
    centre = X[:, :, None].expand(-1, -1, operator.shape[0], -1)

    def edges(index: Tensor) -> Tensor:
        return reference.with_ones(torch.cat([X[batch, index] - centre, centre], -1))

    won, lost = edges(operator.winner), edges(operator.runner)
    one = torch.ones_like(operator.C)
    d1, d2 = (one, one) if operator.d1 is None else (operator.d1, operator.d2)
    e = d1[..., None] * won - d2[..., None] * lost
    return sum(torch.einsum("bpm,bpmd,bpme->mde", C, x, x) for C, x in ((operator.C, won), (operator.K, e)))


def tied_conv(sloped: bool, dtype: torch.dtype = torch.float64) -> TiedConvOperator:
    case = ConvCase(2, 2, 8, 7, 3, k=(2, 3), s=(2, 1), p=(0, 2), d=(3, 2), bias=sloped, dtype=dtype)
    given = tied_of(case, sloped)
    settings = {**given["ties"]._asdict(), **given["geometry"]._asdict(), "bias": sloped}
    return TiedConvOperator(given["X"], given["C"], **settings)


def dense_tied_conv(operator: TiedConvOperator) -> Tensor:
    """Return S = sum C x x^T + K e e^T over patches x."""
    kernel_size, stride, padding, dilation = operator.geometry
    x = torch.nn.functional.unfold(operator.X, kernel_size, dilation, padding, stride).mT
    x = (reference.with_ones(x) if operator.bias else x)[:, None].expand(-1, operator.shape[0], -1, -1)

    def at(index: Tensor) -> Tensor:
        return x.gather(2, index[..., None].expand(*index.shape, x.shape[-1]))

    one = torch.ones_like(operator.K)
    d1, d2 = (one, one) if operator.d1 is None else (operator.d1, operator.d2)
    e = d1[..., None] * at(operator.first) - d2[..., None] * at(operator.second)
    terms = ((operator.C.flatten(2), x), (operator.K, e))
    return sum(torch.einsum("bmn,bmnd,bmne->mde", C, rows, rows) for C, rows in terms)


def own_rows(bias: bool, dtype: torch.dtype = torch.float64) -> OwnRowsOperator:
    generator = torch.Generator().manual_seed(5)
    shapes = ((7, 4), (7, 3), (5, 3, 4 + bias), (5, 3))
    X, C, E, K = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return OwnRowsOperator(X, C, E, K, bias=bias)


def dense_own_rows(operator: OwnRowsOperator) -> Tensor:
    x = reference.with_ones(operator.X) if operator.bias else operator.X
    own = torch.einsum("rm,rmd,rme->mde", operator.K, operator.E, operator.E)
    return torch.einsum("nm,nd,ne->mde", operator.C, x, x) + own


FORMS: dict[str, tuple[Callable[..., SplittingOperator], Callable[..., Tensor]]] = {
    "gated": (lambda dtype=torch.float64: gated(True, True, dtype), dense_gated),
    "gated-linear": (lambda dtype=torch.float64: gated(False, False, dtype), dense_gated),
    "edges-tied": (lambda dtype=torch.float64: tied_edges(False, dtype), dense_tied_edges),
    "edges-tied-sloped": (lambda dtype=torch.float64: tied_edges(True, dtype), dense_tied_edges),
    "conv-tied": (lambda dtype=torch.float64: tied_conv(False, dtype), dense_tied_conv),
    "conv-tied-sloped": (lambda dtype=torch.float64: tied_conv(True, dtype), dense_tied_conv),
    "own-rows": (lambda dtype=torch.float64: own_rows(False, dtype), dense_own_rows),
    "own-rows-bias": (lambda dtype=torch.float64: own_rows(True, dtype), dense_own_rows),
    "depthwise": (lambda dtype=torch.float64: depthwise(0, dtype), dense_depthwise),
    "depthwise-strided": (lambda dtype=torch.float64: depthwise(1, dtype), dense_depthwise),
    "depthwise-stages": (lambda dtype=torch.float64: depthwise(2, dtype), dense_depthwise),
    "depthwise-sparse": (lambda dtype=torch.float64: depthwise(3, dtype), dense_depthwise),
}
every_form = pytest.mark.parametrize("form", FORMS)


@every_form
def test_dense_and_products_are_those_of_the_formula(form: str) -> None:
    make, dense = FORMS[form]
    operator = make()
    expected = dense(operator)
    assert expected.shape == (*operator.shape, operator.shape[1])
    V = random_vectors(3, *operator.shape)
    for backend in ("reference", "cpu", "triton"):
        assert relative_error(operator.dense(backend), expected) < 1e-12
        product = (expected @ V.unsqueeze(-1)).squeeze(-1)
        assert relative_error(operator.matvec(V, backend), product) < 1e-12


@every_form
@pytest.mark.parametrize("filters", [[2], [2, 0], [-1, 1, 1]], ids=str)
def test_restrict_takes_some_filters_and_leaves_the_operator(form: str, filters: list[int]) -> None:
    operator = FORMS[form][0]()
    before, index = operator.dense(), torch.tensor(filters)
    some = operator.restrict(index)
    assert some.shape == (len(filters), operator.shape[1])
    assert relative_error(some.dense(), before[index]) < 1e-13
    assert torch.equal(operator.dense(), before)


@every_form
def test_the_magnitude_bounds_s_without_cancellation(form: str) -> None:
    operator = FORMS[form][0]()
    size = operator.magnitude()
    assert size is not None
    assert (size.shape, size.dtype) == (operator.shape[:1], operator.dtype)
    for name, value in vars(operator).items():
        if name.startswith(("C", "c1", "c2", "K")) and isinstance(value, Tensor):
            setattr(operator, name, value.abs())
    radius = torch.linalg.eigvalsh(operator.dense()).abs().amax(-1)
    assert bool((size >= radius * (1 - 1e-12)).all())
    # A bound that is not far off.
    assert bool((size <= 200 * radius).all())


@every_form
def test_sixteen_bits_halve_the_bytes_and_hardly_change_products(form: str) -> None:
    operator = FORMS[form][0](torch.float32)
    small = operator.stored_as(torch.bfloat16)
    whole = sum(t.nbytes for t in vars(operator).values() if isinstance(t, Tensor) and not t.is_floating_point())
    assert small.nbytes - whole == (operator.nbytes - whole) // 2
    V = random_vectors(*operator.shape, dtype=torch.float32)
    assert relative_error(small.matvec(V), operator.matvec(V)) < 0.05


@every_form
def test_an_operator_on_disk_gives_the_same_products(form: str) -> None:
    operator = FORMS[form][0]()
    stream = DiskStream(None, 1 << 20)
    stream.append("unit", operator)
    stream.batches = 1
    stored = StreamedOperator(stream, "unit", operator, operator.rows)
    V = random_vectors(2, *operator.shape)
    assert relative_error(stored.matvec(V), operator.matvec(V)) < 1e-14


def test_one_call_gives_the_products_of_all_forms() -> None:
    operators = [make() for make, _ in FORMS.values()]
    vectors = [random_vectors(*operator.shape) for operator in operators]
    for product, operator, V in zip(matvec_all(operators, vectors), operators, vectors, strict=True):
        assert relative_error(product, operator.matvec(V)) < 1e-13


def test_rows_of_clouds_are_maps_of_width_one() -> None:
    X, C = random_tensor(2, 7, 3), random_tensor(2, 4, 7, 1)
    first, second, K = torch.full((2, 4, 1), 6), torch.full((2, 4, 1), 2), random_tensor(2, 4, 1)
    operator = TiedConvOperator(X.mT.unsqueeze(-1), C, first=first, second=second, K=K)
    e = X[:, 6] - X[:, 2]
    expected = torch.einsum("bmp,bpd,bpe->mde", C[..., 0], X, X) + torch.einsum("bm,bd,be->mde", K[..., 0], e, e)
    assert relative_error(operator.dense(), expected) < 1e-12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"runner": None}, "runner and K must be given together"),
        ({"d1": None}, "d1 and d2 together"),
        ({"runner": torch.full((2, 9, 5), 9)}, r"runner must lie in \[0, 9\)"),
        ({"K": random_tensor(2, 9, 4)}, r"K must have shape \(2, 9, 5\)"),
    ],
)
def test_bad_ties_of_edges_are_refused(change: dict[str, Any], message: str) -> None:
    good = vars(tied_edges(True))
    given = {name: good[name] for name in ("X", "winner", "C", "runner", "K", "d1", "d2")}
    with pytest.raises(ValueError, match=message):
        EdgeConvOperator(**{**given, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d2": None}, "d1 and d2 must be given together"),
        ({"first": torch.full((2, 3, 5), -1)}, "first must lie in"),
        ({"second": torch.zeros(2, 3, 4, dtype=torch.int64)}, r"second must have shape \(2, 3, 5\)"),
        ({"K": random_tensor(2, 2, 5)}, r"K must have shape \(2, 3, Q\)"),
    ],
)
def test_bad_ties_of_positions_are_refused(change: dict[str, Any], message: str) -> None:
    operator = tied_conv(True)
    given = {name: getattr(operator, name) for name in ("X", "C", "first", "second", "K", "d1", "d2")}
    with pytest.raises(ValueError, match=message):
        TiedConvOperator(**{**given, **operator.geometry._asdict(), **change})


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_row_norms_are_those_of_the_second_activations_jacobian(number: int, backend: str) -> None:
    operator = depthwise(number)
    given = {"stage": operator.stages[0], "bias": operator.bias, "backend": backend}
    norms = operations.depthwise_row_norms(operator.X, operator.d[0], operator.weight[0], **given)
    assert relative_error(norms, jacobians(operator)[1].square().sum(-1)) < 1e-12


def test_a_sum_of_batches_is_one_grouped_call() -> None:
    terms = [depthwise(0), depthwise(0).restrict(torch.tensor([3, 2, 1, 0]))]
    total = SumOperator(terms, [0.5, -2.0])
    V = random_vectors(*total.shape)
    (product,) = matvec_all([total], [V])
    assert relative_error(product, 0.5 * terms[0].matvec(V) - 2 * terms[1].matvec(V)) < 1e-13


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"C": [random_tensor(2, 6, 5, 4)]}, "C must have one entry more than d, weight and stages"),
        ({"X": random_tensor(59, 3)}, "X must have one row for each place of d"),
        ({"d": [random_tensor(2, 6, 4, 4)]}, r"d\[0\] must have shape \(2, 6, 5, 4\)"),
        ({"weight": [random_tensor(3, 3, 3)]}, r"weight\[0\] must have shape \(4, kh, kw\)"),
        ({"weight": [random_tensor(4, 9, 3)]}, r"weight\[0\] must fit into maps of \(6, 5\)"),
        ({"stages": [DepthwiseStage((2, 2), (1, 1))]}, r"C\[1\] must have shape \(2, 3, 3, 4\)"),
        ({"stages": [DepthwiseStage((0, 1))]}, "stride must"),
    ],
)
def test_bad_tensors_of_depthwise_stages_are_refused(change: dict[str, Any], message: str) -> None:
    given = {name: value for name, value in depthwise_of(DEPTHWISE[0]).items() if name != "V"}
    with pytest.raises(ValueError, match=message):
        DepthwiseOperator(**{**given, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"X": random_tensor(4)}, r"X must have shape \(N, D\), got \(4,\)"),
        ({"c11": random_tensor(5, 3)}, r"c11 must have shape \(6, M\), got \(5, 3\)"),
        ({"c12": random_tensor(6, 2)}, r"c12 must have shape \(6, 3\), got \(6, 2\)"),
        ({"c22": random_tensor(3, 6)}, r"c22 must have shape \(6, 3\), got \(3, 6\)"),
        ({"c22": torch.full((6, 3), torch.nan, dtype=torch.float64)}, "c22 must be finite"),
    ],
)
def test_bad_tensors_of_gated_units_are_refused(change: dict[str, Tensor], message: str) -> None:
    good = {"X": random_tensor(6, 4), **dict.fromkeys(("c11", "c12", "c22"), random_tensor(6, 3))}
    with pytest.raises(ValueError, match=message):
        GatedOperator(**{**good, **change})
