"""Solvers: extreme eigenpairs against dense eigh, what is reported about them, and what they cost."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
from torch import Tensor

from s3d_fast import PointwiseOperator, Spectrum, SplittingOperator, SumOperator, extremal_eigenpairs
from tests.cases import CONVS, EDGES, RowsCase
from tests.operators.test_operators import operator_of

SOLVERS = ("lanczos", "rayleigh", "exact")
D = 24


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def prescribed(eigenvalues: Tensor, dtype: torch.dtype = torch.float64, seed: int = 3) -> PointwiseOperator:
    """Return the operator whose filter j has the eigenvalues eigenvalues[j] (M, D), along random directions."""
    width = eigenvalues.shape[1]
    Q, _ = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64, generator=generator(seed)))
    return PointwiseOperator(Q.to(dtype), eigenvalues.double().T.to(dtype))


def dense(operator: SplittingOperator) -> Tensor:
    """Return the matrices (M, D, D) of a pointwise operator in float64, from its own rows and coefficients."""
    assert isinstance(operator, PointwiseOperator)
    X, C = operator.X.double(), operator.C.double()
    return torch.einsum("nm,nd,ne->mde", C, X, X)


def filled(*leading: float, rest: float = 0.0, width: int = D) -> Tensor:
    """Return one filter's eigenvalues: the leading ones, then `rest`."""
    return torch.tensor([*leading] + [rest] * (width - len(leading)), dtype=torch.float64)[None]


def random_values(filters: int, width: int = D, seed: int = 5) -> Tensor:
    return torch.randn(filters, width, dtype=torch.float64, generator=generator(seed))


def spectra() -> dict[str, Tensor]:
    magnitudes = torch.logspace(-12, 3, D, dtype=torch.float64)
    alternating = magnitudes * torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(D // 2)
    uniform = torch.rand(3, D, dtype=torch.float64, generator=generator(6))
    single = {
        "random": random_values(4),
        "rank-one-positive": filled(2.5),
        "rank-one-negative": filled(-2.5),
        "rank-two": filled(-1.0, 3.0),
        "repeated-extremes": torch.cat([filled(-1, -1, -1, 2, 2, 2, 2, rest=0.3), filled(-2, -2, 1, 1, rest=0.0)]),
        "one-repeated-value": filled(-1.5, rest=-1.5),
        "two-values": filled(-1.0, -1.0, -1.0, rest=1.0),
        "negative-dominates": torch.cat([filled(-1e3, -1e2, 1e-3, rest=-1e-2), filled(-1e3, 1e-3, rest=0.0)]),
        "positive-dominates": filled(1e3, 1e2, -1e-3, rest=1e-2),
        "positive-definite": uniform + 0.1,
        "negative-definite": -uniform - 0.1,
        "zero": torch.zeros(3, D, dtype=torch.float64),
        "D1": torch.tensor([[2.0], [-3.0], [0.0]], dtype=torch.float64),
        "D2": torch.tensor([[2.0, -1.0], [0.0, 4.0], [-3.0, -3.0], [0.0, 0.0]], dtype=torch.float64),
        "D3": random_values(5, 3),
        "wide-positive": magnitudes[None],
        "wide-alternating": torch.stack([alternating, -alternating]),
    }
    same_width = [values for values in single.values() if values.shape[1] == D]
    return {**single, "mixed": torch.cat(same_width)}


SPECTRA = spectra()
# Relative to the spectral radius, for the residuals that a solver is asked for.
RESIDUAL = {torch.float64: 1e-6, torch.float32: 1e-4}
# The relative accuracy of a residual computed in this dtype.
ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-5}


@cache
def solved(name: str, solver: str, dtype: torch.dtype) -> tuple[PointwiseOperator, Spectrum]:
    operator = prescribed(SPECTRA[name], dtype)
    # Gradient descent has no end when eigenvalues lie close together: it is asked for less.
    tol = RESIDUAL[dtype] if solver != "rayleigh" else 1e-4
    return operator, extremal_eigenpairs(operator, solver, tol=tol, max_iters=4000 if solver == "rayleigh" else None)


every_spectrum = pytest.mark.parametrize("name", SPECTRA)
every_solver = pytest.mark.parametrize("solver", SOLVERS)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])


@every_spectrum
@every_solver
@both_dtypes
def test_the_ends_are_those_of_eigh(name: str, solver: str, dtype: torch.dtype) -> None:
    operator, spectrum = solved(name, solver, dtype)
    values = torch.linalg.eigvalsh(dense(operator))
    radius = values.abs().amax(-1)
    tol = 1e-4 if solver == "rayleigh" else RESIDUAL[dtype]
    for found, expected in ((spectrum.lambda_min, values[:, 0]), (spectrum.lambda_max, values[:, -1])):
        assert found.dtype == dtype
        assert bool(((found - expected).abs() <= tol * radius).all())
    assert bool(spectrum.converged.all())
    torch.testing.assert_close(spectrum.radius.double(), radius, rtol=tol, atol=0)


@every_spectrum
@every_solver
@both_dtypes
def test_vectors_have_unit_length_and_their_rayleigh_quotients_are_the_eigenvalues(
    name: str, solver: str, dtype: torch.dtype
) -> None:
    operator, spectrum = solved(name, solver, dtype)
    S, rounding = dense(operator), ROUNDING[dtype]
    radius = torch.linalg.eigvalsh(S).abs().amax(-1)
    for value, vector in ((spectrum.lambda_min, spectrum.v_min), (spectrum.lambda_max, spectrum.v_max)):
        v = vector.double()
        torch.testing.assert_close(v.norm(dim=-1), torch.ones_like(v[:, 0]), rtol=0, atol=rounding)
        quotient = torch.einsum("md,mde,me->m", v, S, v)
        assert bool(((quotient - value).abs() <= rounding * radius).all())


@every_spectrum
@every_solver
@both_dtypes
def test_the_residual_is_true_and_an_eigenvalue_lies_within_it(name: str, solver: str, dtype: torch.dtype) -> None:
    operator, spectrum = solved(name, solver, dtype)
    S = dense(operator)
    values = torch.linalg.eigvalsh(S)
    slack = ROUNDING[dtype] * values.abs().amax(-1)
    ends = (
        (spectrum.lambda_min, spectrum.v_min, spectrum.residual_min),
        (spectrum.lambda_max, spectrum.v_max, spectrum.residual_max),
    )
    for value, vector, residual in ends:
        v = vector.double()
        recomputed = ((S @ v.unsqueeze(-1)).squeeze(-1) - value[:, None] * v).norm(dim=-1)
        # Reported residuals include a bound of their rounding errors.
        bound = 6 * torch.finfo(dtype).eps * operator.magnitude()
        assert bool((recomputed <= residual + 0.1 * slack).all())
        assert bool((residual <= recomputed + slack + bound).all())
        nearest = (values - value[:, None]).abs().amin(-1)
        assert bool((nearest <= residual + slack).all())


@every_solver
@both_dtypes
def test_vectors_are_the_eigenvectors_where_there_is_a_gap(solver: str, dtype: torch.dtype) -> None:
    values = torch.cat([filled(-2.0, 3.0, rest=0.5), filled(-3.0, 1.0, rest=-0.5)])
    operator = prescribed(values, dtype)
    spectrum = extremal_eigenpairs(operator, solver, tol=1e-5, max_iters=500)
    X = operator.X
    for j in range(2):
        # Row i of X is the eigenvector of the i-th prescribed eigenvalue.
        assert abs(float(spectrum.v_min[j] @ X[0])) == pytest.approx(1, abs=1e-5)
        assert abs(float(spectrum.v_max[j] @ X[1])) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("solver", ["lanczos", "rayleigh"])
@pytest.mark.parametrize("factor", [1e6, 1e-6])
@both_dtypes
def test_the_tolerance_is_relative_to_the_spectral_radius(solver: str, factor: float, dtype: torch.dtype) -> None:
    values = torch.cat([random_values(6), filled(2.0), filled(-1.0, 2.0, rest=0.1)])
    plain = extremal_eigenpairs(prescribed(values, dtype), solver, tol=1e-3, max_iters=60)
    scaled = extremal_eigenpairs(prescribed(values * factor, dtype), solver, tol=1e-3, max_iters=60)
    assert torch.equal(plain.iterations, scaled.iterations)
    assert torch.equal(plain.matvecs, scaled.matvecs)
    assert torch.equal(plain.converged, scaled.converged)
    torch.testing.assert_close(scaled.lambda_max / factor, plain.lambda_max, rtol=1e-3, atol=0)


def layers() -> dict[str, SplittingOperator]:
    """Return operators of unequal shapes and kinds."""
    return {
        "linear": prescribed(random_values(5)),
        "narrow": prescribed(random_values(3, 1)),
        "convolution": operator_of(CONVS[1]),
        "edges": operator_of(EDGES[1]),
        "mixed": prescribed(torch.cat([torch.zeros(2, D), filled(1.0), random_values(2, seed=9)])),
    }


def assert_same_ends(actual: Spectrum, expected: Spectrum, atol: float) -> None:
    for field in ("lambda_min", "lambda_max"):
        scale = expected.radius.clamp(min=1)
        assert bool(((getattr(actual, field) - getattr(expected, field)).abs() <= atol * scale).all())


@pytest.mark.parametrize("solver", ["lanczos", "exact"])
def test_layers_solved_together_are_as_if_solved_alone(solver: str) -> None:
    operators = layers()
    together = extremal_eigenpairs(list(operators.values()), solver, tol=1e-8)
    named = extremal_eigenpairs(operators, solver, tol=1e-8)
    assert isinstance(together, list)
    assert list(named) == list(operators)
    for (name, operator), spectrum in zip(operators.items(), together, strict=True):
        alone = extremal_eigenpairs(operator, solver, tol=1e-8)
        assert bool(alone.converged.all())
        assert torch.equal(spectrum.converged, alone.converged)
        assert_same_ends(spectrum, alone, 1e-10)
        assert_same_ends(named[name], alone, 1e-10)


def test_descent_on_layers_together_is_as_if_alone() -> None:
    operators = [prescribed(torch.cat([filled(-1.0, 2.0, rest=0.2), filled(0.5)])), prescribed(filled(-3.0, width=5))]
    together = extremal_eigenpairs(operators, "rayleigh", tol=1e-6)
    for operator, spectrum in zip(operators, together, strict=True):
        assert_same_ends(spectrum, extremal_eigenpairs(operator, "rayleigh", tol=1e-6), 1e-10)


def test_no_layers_have_no_spectra() -> None:
    assert extremal_eigenpairs([]) == []
    assert extremal_eigenpairs({}) == {}


@every_solver
def test_rows_and_coefficients_stand_for_their_operator(solver: str) -> None:
    X, C = RowsCase(30, 8, 5).tensors()
    assert_identical(
        extremal_eigenpairs((X, C), solver, max_iters=20),
        extremal_eigenpairs(PointwiseOperator(X, C), solver, max_iters=20),
    )


@pytest.mark.parametrize("solver", ["lanczos", "rayleigh"])
def test_not_converging_is_visible(solver: str) -> None:
    operator = prescribed(torch.cat([random_values(3), filled(0.0)]))
    spectrum = extremal_eigenpairs(operator, solver, tol=1e-6, max_iters=3)
    assert spectrum.converged.tolist() == [False, False, False, True]
    assert bool((torch.maximum(spectrum.residual_min, spectrum.residual_max)[:3] > 1e-6 * spectrum.radius[:3]).all())
    assert "1 converged" in repr(spectrum)
    # The result is still usable: a quotient of unit vectors, inside the spectrum.
    values = torch.linalg.eigvalsh(dense(operator))
    assert bool((spectrum.lambda_min >= values[:, 0] - 1e-12).all())
    assert bool((spectrum.lambda_max <= values[:, -1] + 1e-12).all())


@both_dtypes
def test_converged_means_residuals_and_widths_within_the_tolerance(dtype: torch.dtype) -> None:
    operator = prescribed(random_values(40), dtype)
    for max_iters in (4, 8, 12, 16):
        spectrum = extremal_eigenpairs(operator, "lanczos", tol=1e-3, max_iters=max_iters)
        ends = (spectrum.residual_min, spectrum.residual_max, spectrum.width_min, spectrum.width_max)
        worst = torch.stack(ends).amax(0)
        assert torch.equal(spectrum.converged, worst <= 1e-3 * spectrum.radius)


def assert_identical(a: Spectrum, b: Spectrum) -> None:
    assert a.layer == b.layer
    for field in dataclasses.fields(Spectrum):
        if field.name == "layer":
            continue
        assert torch.equal(getattr(a, field.name), getattr(b, field.name)), field.name


@every_solver
@both_dtypes
def test_one_seed_gives_the_same_bits(solver: str, dtype: torch.dtype) -> None:
    operator = prescribed(random_values(4), dtype)
    first = extremal_eigenpairs(operator, solver, max_iters=6, generator=generator(11))
    assert_identical(first, extremal_eigenpairs(operator, solver, max_iters=6, generator=generator(11)))
    unseeded = extremal_eigenpairs(operator, solver, max_iters=6)
    assert_identical(unseeded, extremal_eigenpairs(operator, solver, max_iters=6))


@pytest.mark.parametrize("solver", ["lanczos", "rayleigh"])
def test_another_seed_starts_elsewhere(solver: str) -> None:
    operator = prescribed(random_values(4))
    first = extremal_eigenpairs(operator, solver, max_iters=2, generator=generator(11))
    second = extremal_eigenpairs(operator, solver, max_iters=2, generator=generator(12))
    assert not torch.equal(first.lambda_max, second.lambda_max)


@every_solver
def test_the_global_random_state_is_untouched(solver: str) -> None:
    before = torch.get_rng_state()
    extremal_eigenpairs(prescribed(random_values(4)), solver, max_iters=5)
    extremal_eigenpairs(prescribed(random_values(4)), solver, max_iters=5, generator=generator())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("solver", "per_step"), [("lanczos", 1), ("rayleigh", 2)])
@pytest.mark.parametrize("max_iters", [1, 2, 7, 12])
def test_max_iters_is_respected(solver: str, per_step: int, max_iters: int) -> None:
    spectrum = extremal_eigenpairs(prescribed(random_values(4)), solver, tol=1e-12, max_iters=max_iters)
    assert spectrum.iterations.tolist() == [max_iters] * 4
    # Descent measures its residuals by two more products, and a Krylov space of all D steps certifies them.
    assert spectrum.matvecs.tolist() == [per_step * max_iters + (2 + D) * (solver == "rayleigh")] * 4


class CountingOperator(SplittingOperator):
    """An operator that counts the products spent on each filter, restrictions included."""

    def __init__(self, inner: SplittingOperator, counts: Tensor | None = None, filters: Tensor | None = None) -> None:
        self.inner, self.shape, self.dtype, self.device = inner, inner.shape, inner.dtype, inner.device
        self.counts = torch.zeros(inner.shape[0], dtype=torch.int64) if counts is None else counts
        self.filters = torch.arange(inner.shape[0]) if filters is None else filters

    def matvec(self, V: Tensor, backend: str = "auto") -> Tensor:
        self.counts[self.filters] += 1 if V.dim() == 2 else len(V)
        return self.inner.matvec(V, backend)

    def restrict(self, filters: Tensor) -> CountingOperator:
        return CountingOperator(self.inner.restrict(filters), self.counts, self.filters[filters])


def few_slow_filters() -> Tensor:
    """Return the eigenvalues of 60 filters of rank one and, last, 4 filters whose extremes are hard to tell apart."""
    width = 96
    easy = filled(1.0, width=width).repeat(60, 1) * torch.linspace(-2, 3, 60, dtype=torch.float64)[:, None]
    return torch.cat([easy, torch.linspace(-1, 1, width, dtype=torch.float64).repeat(4, 1)])


def test_filters_that_converge_early_cost_less() -> None:
    operator = CountingOperator(prescribed(few_slow_filters()))
    spectrum = extremal_eigenpairs(operator, "lanczos", tol=1e-6)
    assert bool(spectrum.converged.all())
    assert int(spectrum.matvecs[:60].max()) * 3 < int(spectrum.matvecs[60:].min())
    assert int(spectrum.iterations[:60].max()) < int(spectrum.iterations[60:].min())


def test_matvecs_are_the_products_that_were_computed() -> None:
    operator = CountingOperator(prescribed(few_slow_filters()))
    assert torch.equal(extremal_eigenpairs(operator, "lanczos", tol=1e-6).matvecs, operator.counts)


def test_counts_are_per_filter() -> None:
    values = torch.cat([filled(1.0), random_values(5), torch.zeros(1, D)])
    for solver in SOLVERS:
        spectrum = extremal_eigenpairs(prescribed(values), solver, max_iters=40)
        assert len(spectrum) == 7
        for count in (spectrum.iterations, spectrum.matvecs):
            assert count.dtype == torch.int64
            assert count.shape == (7,)
        assert bool((spectrum.iterations <= 40).all())
        assert spectrum.converged.dtype == torch.bool


def test_a_tighter_tolerance_costs_more_and_gives_more() -> None:
    operator = prescribed(random_values(6, 64))
    loose, tight = (extremal_eigenpairs(operator, "lanczos", tol=tol) for tol in (1e-1, 1e-8))
    assert int(loose.matvecs.max()) < int(tight.matvecs.min())
    assert float((tight.residual_max / loose.residual_max).max()) < 1e-2


@both_dtypes
def test_rank_deficient_rows_are_solved(dtype: torch.dtype) -> None:
    X, C = RowsCase(5, 40, 6, dtype).tensors(seed=17)
    spectrum = extremal_eigenpairs((X, C), "lanczos", tol=RESIDUAL[dtype])
    values = torch.linalg.eigvalsh(dense(PointwiseOperator(X, C)))
    radius = values.abs().amax(-1)
    assert bool(spectrum.converged.all())
    assert bool(((spectrum.lambda_min - values[:, 0]).abs() <= RESIDUAL[dtype] * radius).all())
    assert bool(((spectrum.lambda_max - values[:, -1]).abs() <= RESIDUAL[dtype] * radius).all())


def test_start_vectors_are_independent_of_data_from_the_commonest_seed() -> None:
    torch.manual_seed(0)
    X, C = torch.randn(2, 40), torch.rand(2, 5) + 0.1
    # Two rows with positive coefficients: the smallest eigenvalue is 0, along everything orthogonal to the rows.
    spectrum = extremal_eigenpairs((X, C), "lanczos")
    assert bool((spectrum.lambda_min.abs() <= 1e-5 * spectrum.radius).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_rows_stored_in_16_bits_are_solved_in_float32(dtype: torch.dtype) -> None:
    X, C = RowsCase(50, 12, 4, dtype).tensors()
    spectrum = extremal_eigenpairs((X, C), "lanczos", tol=1e-4)
    values = torch.linalg.eigvalsh(dense(PointwiseOperator(X.double(), C.double())))
    assert spectrum.lambda_min.dtype == torch.float32
    radius = values.abs().amax(-1)
    assert bool(((spectrum.lambda_min - values[:, 0]).abs() <= 1e-4 * radius).all())
    assert bool(((spectrum.lambda_max - values[:, -1]).abs() <= 1e-4 * radius).all())


def test_lanczos_is_ten_times_cheaper_than_descent_on_a_random_layer() -> None:
    """N2048-D128-M64-fp32: both ends of every filter to 1e-3 in 50 products; descent needs over ten times as many."""
    torch.manual_seed(0)
    X, C = torch.randn(2048, 128), torch.randn(2048, 64)
    operator = PointwiseOperator(X, C)
    values = torch.linalg.eigvalsh(torch.stack([(X * c[:, None]).T @ X for c in C.T]))

    def error(spectrum: Spectrum) -> float:
        worst = torch.maximum((spectrum.lambda_min - values[:, 0]).abs(), (spectrum.lambda_max - values[:, -1]).abs())
        return float((worst / values.abs().amax(-1)).max())

    spectrum = extremal_eigenpairs(operator, "lanczos", tol=1e-2)
    matvecs = int(spectrum.matvecs.max())
    print(f"lanczos: error {error(spectrum):.1e} of the spectral radius after {matvecs} products")
    assert bool(spectrum.converged.all())
    assert error(spectrum) <= 1e-3
    assert matvecs <= 50

    for step in (0.3, 0.6, 0.9, 1.2):
        # Two products per iteration, and a tolerance that it does not reach, so that it uses them all.
        descent = extremal_eigenpairs(operator, "rayleigh", tol=1e-9, max_iters=5 * matvecs, step=step)
        products = int(descent.matvecs.min())
        print(f"rayleigh, step {step}: error {error(descent):.1e} after {products} products")
        assert products >= 10 * matvecs
        assert error(descent) > 1e-3


def test_a_difference_of_operators_is_solved() -> None:
    case = RowsCase(300, 12, 5, torch.float64)
    terms = [PointwiseOperator(*case.tensors(seed=seed)) for seed in (1, 2)]
    spectrum = extremal_eigenpairs(SumOperator(terms, [1.0, -1.0]), "lanczos", tol=1e-9)
    values = torch.linalg.eigvalsh(terms[0].dense() - terms[1].dense())
    torch.testing.assert_close(spectrum.lambda_min, values[:, 0])
    torch.testing.assert_close(spectrum.lambda_max, values[:, -1])


@both_dtypes
@pytest.mark.parametrize("tol", [1e-1, 1e-2, 1e-4])
def test_residuals_of_lanczos_are_those_of_products(tol: float, dtype: torch.dtype) -> None:
    """Nothing is measured; the Ritz vectors' products follow from those of the basis, up to rounding."""
    X, C = RowsCase(20_000, 96, 40, dtype).tensors(seed=3)
    operator = PointwiseOperator(X, C)
    spectrum = extremal_eigenpairs(operator, "lanczos", tol=tol)
    V = torch.stack([spectrum.v_min, spectrum.v_max])
    SV = operator.matvec(V)
    unit = 100 * torch.finfo(dtype).eps
    values = torch.stack([spectrum.lambda_min, spectrum.lambda_max])
    residuals = torch.stack([spectrum.residual_min, spectrum.residual_max])
    assert float((((V * SV).sum(-1) - values).abs() / spectrum.radius).max()) < unit
    true = (SV - values[..., None] * V).norm(dim=-1)
    bound = 5 * torch.finfo(dtype).eps * operator.magnitude()
    assert bool((true <= residuals + unit * spectrum.radius).all())
    assert bool((residuals <= true + bound + unit * spectrum.radius).all())
    assert bool(spectrum.converged.all())
    assert float((residuals.amax(0) / spectrum.radius).max()) <= tol
