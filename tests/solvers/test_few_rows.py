"""Layers with fewer rows than columns: the same eigenpairs, found in the coordinates of the rows."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import s3d_fast as s3d
from s3d_fast.operators import PointwiseOperator, SplittingOperator, SumOperator, averaged
from s3d_fast.operators.few_rows import FewRows, can_reduce, prefers_few_rows
from s3d_fast.solvers import Cut, Spectrum

auto = importlib.import_module("s3d_fast.solvers.auto")


@pytest.fixture(autouse=True)
def always_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the coordinates of the rows wherever that is possible, whatever it costs."""
    monkeypatch.setattr(auto, "prefers_exact", lambda *_: False)
    monkeypatch.setattr(auto, "prefers_few_rows", lambda operator, tol: can_reduce(operator))


def signed(N: int, M: int, generator: torch.Generator) -> Tensor:
    return torch.randn(N, M, generator=generator)


def positive(N: int, M: int, generator: torch.Generator) -> Tensor:
    return torch.rand(N, M, generator=generator) + 0.1


def negative(N: int, M: int, generator: torch.Generator) -> Tensor:
    return -positive(N, M, generator)


def some_dead(N: int, M: int, generator: torch.Generator) -> Tensor:
    return signed(N, M, generator) * (torch.arange(M) % 3 > 0)


def assert_right(operator: SplittingOperator, spectrum: Spectrum, tol: float) -> None:
    """Compare with the eigenvalues of the formed S in float64, and check vectors and residuals by a product."""
    S = sum(
        (term.in_dtype(torch.float64).dense("reference") * weight for term, weight in operator.weighted_terms()),
        start=torch.zeros((), dtype=torch.float64),
    )
    values = torch.linalg.eigvalsh(S)
    radius = values.abs().amax(-1)
    assert bool(spectrum.converged.all()), spectrum.reasons()
    ends = (
        (spectrum.lambda_min, spectrum.v_min, spectrum.residual_min, values[:, 0], spectrum.interval_min),
        (spectrum.lambda_max, spectrum.v_max, spectrum.residual_max, values[:, -1], spectrum.interval_max),
    )
    for value, vector, residual, true, interval in ends:
        assert bool(((value - true).abs() <= tol * radius).all())
        # A quotient, rounded, may lie a little beyond the true value.
        slack = 20 * torch.finfo(spectrum.lambda_min.dtype).eps * radius
        assert bool(((interval[:, 0] <= true + slack) & (true <= interval[:, 1] + slack)).all())
        v = vector.double()
        assert torch.allclose(v.norm(dim=-1), torch.ones(len(v), dtype=torch.float64), atol=1e-5)
        error = (torch.einsum("mde,me->md", S, v) - value.double()[:, None] * v).norm(dim=-1)
        assert bool((error <= residual.double() * (1 + 1e-3) + 1e-30).all())


@pytest.mark.parametrize("coefficients", [signed, positive, negative, some_dead])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("tol", [1e-1, 1e-3])
def test_eigenpairs_are_those_of_s(
    coefficients: Callable[..., Tensor], bias: bool, dtype: torch.dtype, tol: float
) -> None:
    generator = torch.Generator().manual_seed(3)
    X = torch.relu(torch.randn(12, 70, generator=generator)).to(dtype)
    operator = PointwiseOperator(X, coefficients(12, 9, generator).to(dtype), bias=bias)
    assert_right(operator, s3d.extremal_eigenpairs(operator, "auto", tol), tol)


@pytest.mark.parametrize("kind", ["repeated", "zero", "one row", "tiny"])
def test_dependent_rows(kind: str) -> None:
    generator = torch.Generator().manual_seed(4)
    X, C = torch.randn(10, 40, generator=generator), torch.randn(10, 6, generator=generator)
    if kind == "repeated":
        X[5:] = X[:5]
    elif kind == "zero":
        X.zero_()
    elif kind == "one row":
        X, C = X[:1], C[:1]
    else:
        X *= 1e-12
    operator = PointwiseOperator(X, C)
    assert_right(operator, s3d.extremal_eigenpairs(operator, "auto", 1e-2), 1e-2)


def test_batches_are_stacked() -> None:
    generator = torch.Generator().manual_seed(5)
    terms = [
        PointwiseOperator(torch.randn(n, 50, generator=generator), torch.randn(n, 7, generator=generator))
        for n in (3, 6, 4)
    ]
    for operator in (averaged(terms), SumOperator(terms, [0.5, 0.25, 2.0])):
        assert_right(operator, s3d.extremal_eigenpairs(operator, "auto", 1e-2), 1e-2)


def test_a_filter_that_comes_back_badly_is_solved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lift = FewRows.lift

    def spoilt(self: FewRows, W: Tensor, direction: Tensor) -> object:
        lifted = lift(self, W, direction)
        lifted.errors[0, 2] = 10 * lifted.values.abs().max()
        return lifted

    monkeypatch.setattr(FewRows, "lift", spoilt)
    generator = torch.Generator().manual_seed(6)
    operator = PointwiseOperator(torch.randn(9, 60, generator=generator), torch.randn(9, 5, generator=generator))
    spectrum = s3d.extremal_eigenpairs(operator, "auto", 1e-3)
    assert_right(operator, spectrum, 1e-3)
    assert int(spectrum.matvecs[2]) > int(spectrum.matvecs[1])


def test_the_cut_sees_all_layers() -> None:
    generator = torch.Generator().manual_seed(7)
    layers = [
        PointwiseOperator(torch.randn(N, 64, generator=generator), torch.randn(N, 20, generator=generator))
        for N in (10, 12, 31)
    ]
    whole = s3d.extremal_eigenpairs(layers, "auto", 1e-3)
    cut = s3d.extremal_eigenpairs(layers, "auto", 1e-3, until=Cut(12))

    def chosen(spectra: list[Spectrum]) -> set[int]:
        gains = -torch.cat([spectrum.lambda_min for spectrum in spectra])
        return set(gains.topk(12).indices.tolist())

    assert len(chosen(whole) & chosen(cut)) >= 11
    assert sum(int(s.matvecs.sum()) for s in cut) < sum(int(s.matvecs.sum()) for s in whole)


def test_the_start_follows_the_generator() -> None:
    generator = torch.Generator().manual_seed(8)
    operator = PointwiseOperator(torch.randn(9, 60, generator=generator), torch.randn(9, 5, generator=generator))

    def solve(seed: int | None) -> Spectrum:
        start = None if seed is None else torch.Generator().manual_seed(seed)
        return s3d.extremal_eigenpairs(operator, "auto", 1e-1, generator=start)

    assert torch.equal(solve(None).v_min, solve(None).v_min)
    assert torch.equal(solve(1).v_min, solve(1).v_min)
    assert not torch.equal(solve(1).v_min, solve(2).v_min)


@pytest.mark.parametrize(
    ("N", "D", "M", "expected"),
    [(16, 2048, 512, True), (256, 2304, 128, True), (1024, 2304, 128, False), (256, 256, 64, False)],
)
def test_cost_model(N: int, D: int, M: int, expected: bool) -> None:
    # Measured: 9, 1.5 and 0.3 times as fast as products with the rows; the last has as many rows as columns.
    assert prefers_few_rows(PointwiseOperator(torch.zeros(N, D), torch.zeros(N, M)), 1e-2) is expected
