"""The certificate of eigenvalues: what it promises holds for every spectrum, and a filter says why it stopped."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from s3d_fast import DenseOperator, PointwiseOperator, Spectrum, extremal_eigenpairs
from s3d_fast.backends.choice import choose
from s3d_fast.maths import reference
from s3d_fast.maths.schemes import split_gain
from s3d_fast.solvers import Cut, Status

D = 48


def diagonal(values: Tensor) -> DenseOperator:
    """Return matrices with these eigenvalues (M, D); random starts make the basis irrelevant."""
    return DenseOperator(torch.diag_embed(values))


def families(filters: int, width: int = D) -> dict[str, Tensor]:
    """Return spectra (M, D) that hide their ends."""
    generator = torch.Generator().manual_seed(1)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=generator)

    bulk = 2 * uniform(filters, width) - 1
    planted, pairs, far = bulk.clone(), bulk.clone(), bulk * 0.1
    planted[:, 0] = 1.1
    pairs[:, 0], pairs[:, 1] = 1.05, 1.03
    far[:, 0], far[:, 1] = 1.0, -0.5
    small = uniform(filters, width)
    small[:, 0] = -0.05
    return {
        "uniform": bulk,
        "planted": planted,
        "close-pairs": pairs,
        "far": far,
        "small-min": small,
        "decay": torch.logspace(0, -6, width, dtype=torch.float64) * (1 - 2 * (uniform(filters, width) < 0.5)),
        "cluster": 1 + 1e-3 * uniform(filters, width),
    }


FAMILIES = families(400)
ends = pytest.mark.parametrize("tol", [1e-1, 1e-2, 1e-3])


def wrong(spectrum: Spectrum, values: Tensor, tol: float) -> int:
    """Return for how many filters that count as converged an end is off by more than the tolerance."""
    radius = values.abs().amax(-1)
    off = torch.maximum(spectrum.lambda_min - values.amin(-1), values.amax(-1) - spectrum.lambda_max)
    return int((spectrum.converged & (off > tol * radius)).sum())


def assert_residuals_hold(spectrum: Spectrum, S: Tensor, slack: float = 0.0) -> None:
    """Check that no true residual, in float64, exceeds the one reported."""
    for value, vector, residual in (
        (spectrum.lambda_min, spectrum.v_min, spectrum.residual_min),
        (spectrum.lambda_max, spectrum.v_max, spectrum.residual_max),
    ):
        v = vector.double()
        true = ((S @ v.unsqueeze(-1)).squeeze(-1) - value.double()[:, None] * v).norm(dim=-1)
        assert bool((true <= residual.double() * (1 + slack)).all())


@ends
@pytest.mark.parametrize("delta", [1e-1, 1e-3])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_more_filters_are_wrong_than_promised(name: str, delta: float, tol: float) -> None:
    values = FAMILIES[name]
    spectrum = extremal_eigenpairs(diagonal(values), "lanczos", tol=tol, delta=delta)
    assert bool(spectrum.converged.all())
    # Three standard deviations above what may be missed.
    expected = delta * len(values)
    assert wrong(spectrum, values, tol) <= expected + 3 * math.sqrt(expected)


@ends
@pytest.mark.parametrize("name", FAMILIES)
def test_intervals_hold_the_extreme_eigenvalues_after_any_number_of_steps(name: str, tol: float) -> None:
    values = FAMILIES[name]
    for steps in (1, 2, 3, 5, 8):
        spectrum = extremal_eigenpairs(diagonal(values), "lanczos", tol=tol, max_iters=steps)
        slack = 1e-12 * values.abs().amax(-1)
        low, high = spectrum.interval_min, spectrum.interval_max
        assert int((low[:, 0] > values.amin(-1) + slack).sum()) <= 4
        assert bool((low[:, 1] >= values.amin(-1) - slack).all())
        assert int((high[:, 1] < values.amax(-1) - slack).sum()) <= 4
        assert bool((high[:, 0] <= values.amax(-1) + slack).all())


def test_a_second_eigenvalue_is_not_taken_for_the_first() -> None:
    """A start vector with little of the first eigenvector finds the second one first, with a small residual."""
    values = torch.linspace(-0.1, 0.1, D, dtype=torch.float64).repeat(2000, 1)
    values[:, 0], values[:, 1] = 1.0, 0.9
    loose = extremal_eigenpairs(diagonal(values), "lanczos", tol=1e-2, delta=0.9)
    certain = extremal_eigenpairs(diagonal(values), "lanczos", tol=1e-2, delta=1e-4)
    assert wrong(loose, values, 1e-2) > 0
    assert wrong(certain, values, 1e-2) == 0
    assert int(certain.matvecs.sum()) > int(loose.matvecs.sum())


@pytest.mark.parametrize("solver", ["lanczos", "rayleigh"])
def test_descent_at_rest_elsewhere_is_not_converged(solver: str) -> None:
    # An eigenvalue of which the start has nothing: descent cannot see it, and neither can a space without rounding.
    values = FAMILIES["close-pairs"]
    spectrum = extremal_eigenpairs(diagonal(values), solver, tol=1e-1)
    assert wrong(spectrum, values, 1e-1) == 0
    if solver == "rayleigh":
        assert spectrum.reasons().get("saddle", 0) > 0


def cancelling(apart: float, dtype: torch.dtype = torch.float32) -> PointwiseOperator:
    """Return rows that come twice, nearly equal, with opposite coefficients: S is the rest of large sums."""
    generator = torch.Generator().manual_seed(2)
    X = torch.randn(300, 24, generator=generator, dtype=torch.float64)
    other = X + apart * torch.randn(300, 24, generator=generator, dtype=torch.float64)
    C = torch.randn(300, 40, generator=generator, dtype=torch.float64)
    return PointwiseOperator(torch.cat([X, other]).to(dtype), torch.cat([C, -C]).to(dtype))


@pytest.mark.parametrize("solver", ["lanczos", "exact", "rayleigh"])
@pytest.mark.parametrize("apart", [1e-2, 1e-3, 1e-5, 0.0])
def test_residuals_hold_where_coefficients_cancel(solver: str, apart: float) -> None:
    operator = cancelling(apart)
    spectrum = extremal_eigenpairs(operator, solver, tol=1e-2, max_iters=200)
    X, C = operator.X.double(), operator.C.double()
    S = torch.einsum("nm,nd,ne->mde", C, X, X)
    assert_residuals_hold(spectrum, S, 1e-5)
    assert wrong(spectrum, torch.linalg.eigvalsh(S), 1e-2) == 0
    if apart == 0:
        # S is zero, and what products give is noise.
        assert not spectrum.converged.any()


@pytest.mark.parametrize("rank", [1, 2, 4, 8])
def test_residuals_hold_where_spaces_are_exhausted(rank: int) -> None:
    """An exhausted space drops its last coupling, which is small and not zero."""
    generator = torch.Generator().manual_seed(rank)
    X, C = torch.randn(rank, 64, generator=generator), torch.randn(rank, 500, generator=generator)
    spectrum = extremal_eigenpairs((X, C), "lanczos", tol=1e-2)
    S = torch.einsum("nm,nd,ne->mde", C.double(), X.double(), X.double())
    assert_residuals_hold(spectrum, S)
    assert bool(spectrum.converged.all())


@pytest.mark.parametrize("share", [1.0, 0.01])
@pytest.mark.parametrize("scale", [1e-41, 1e-39, 1e-37])
@pytest.mark.parametrize("solver", ["lanczos", "exact", "rayleigh"])
def test_residuals_hold_where_numbers_underflow(solver: str, scale: float, share: float) -> None:
    """Dead neurons have few coefficients, below the smallest normal number of float32, 1.2e-38."""
    generator = torch.Generator().manual_seed(6)
    X, C = torch.randn(100, 16, generator=generator), scale * torch.randn(100, 200, generator=generator)
    C = C * (torch.rand(100, 200, generator=generator) < share)
    spectrum = extremal_eigenpairs((X, C), solver, tol=1e-2)
    S = torch.einsum("nm,nd,ne->mde", C.double(), X.double(), X.double())
    assert_residuals_hold(spectrum, S)
    assert wrong(spectrum, torch.linalg.eigvalsh(S), 1e-2) == 0


def test_a_zero_filter_has_converged() -> None:
    X, C = torch.randn(50, 6), torch.randn(50, 3)
    C[:, 1] = 0
    for solver in ("lanczos", "exact", "rayleigh", "auto"):
        spectrum = extremal_eigenpairs((X, C), solver, tol=1e-3)
        assert bool(spectrum.converged[1])
        assert float(spectrum.radius[1]) == 0


def test_filters_say_why_they_stopped() -> None:
    values = FAMILIES["uniform"][:8]
    assert extremal_eigenpairs(diagonal(values), "lanczos", tol=1e-6, max_iters=3).reasons() == {"steps": 8}
    assert extremal_eigenpairs(diagonal(values), "lanczos", tol=1e-6).reasons() == {"converged": 8}
    assert extremal_eigenpairs(cancelling(0.0), "lanczos", tol=1e-2).reasons() == {"stagnation": 40}
    broken = diagonal(values)
    broken.matrices[2, 0, 0] = math.nan
    spectrum = extremal_eigenpairs(broken, "lanczos", tol=1e-2)
    assert spectrum.reasons() == {"converged": 7, "breakdown": 1}
    assert spectrum.status is not None
    assert Status(int(spectrum.status[2])) is Status.BREAKDOWN


@pytest.mark.parametrize("delta", [0, 1, -0.1, 2.0, math.nan, "x"])
def test_a_delta_that_is_no_probability_is_refused(delta: float) -> None:
    for solver in ("lanczos", "auto", "rayleigh"):
        with pytest.raises(ValueError, match=r"delta must be a number in \(0, 1\)"):
            extremal_eigenpairs((torch.ones(2, 2), torch.ones(2, 2)), solver, delta=delta)


def test_widths_are_the_least_that_the_polynomials_certify() -> None:
    generator = torch.Generator().manual_seed(3)
    alpha, beta = torch.rand(2, 20, 7, dtype=torch.float64, generator=generator)
    length = torch.randint(1, 8, (20,), generator=generator)
    growth = torch.logspace(1, 12, 20, dtype=torch.float64)
    values, _ = reference.tridiagonal_extremes(alpha, beta, length)
    widths = choose("cpu", alpha).certified_widths(alpha=alpha, beta=beta, length=length, values=values, growth=growth)
    for j in range(20):
        n = int(length[j])
        for end, sign in ((0, -1), (1, 1)):
            if widths[j, end] < 1e-14:
                # The sum is large enough at theta itself.
                continue
            for factor, enough in ((1.0, True), (2 ** (-1 / 8), False)):
                mu = values[j, end] + sign * factor * widths[j, end]
                # The three-term recurrence of the Lanczos polynomials.
                before, now, total = 0.0, 1.0, 1.0
                for i in range(n):
                    coupling = beta[j, i - 1] * before if i else 0.0
                    before, now = now, ((mu - alpha[j, i]) * now - coupling) / beta[j, i]
                    total += now**2
                assert bool(total >= growth[j] * (1 - 1e-9)) is enough


def candidates() -> list[DenseOperator]:
    generator = torch.Generator().manual_seed(4)
    scales = torch.rand(2, 120, 1, dtype=torch.float64, generator=generator)
    return [diagonal(scale * torch.randn(120, D, dtype=torch.float64, generator=generator)) for scale in scales]


@pytest.mark.parametrize(("m", "c"), [(2, 1.0), (2, 1.3), (3, 2.0), (4, 3.0)])
def test_filters_stop_at_the_cut_and_the_same_ones_are_chosen(m: int, c: float) -> None:
    operators = candidates()
    truth = torch.cat([-split_gain(*_ends(operator), m, c) for operator in operators])
    wanted = set(truth.topk(84).indices.tolist())
    full = extremal_eigenpairs(operators, "lanczos", tol=1e-1, delta=1e-2)
    stopped = extremal_eigenpairs(operators, "lanczos", tol=1e-1, delta=1e-2, until=Cut(84, m, c))
    found = torch.cat([-split_gain(spectrum.lambda_min, spectrum.lambda_max, m, c) for spectrum in stopped])
    assert len(wanted & set(found.topk(84).indices.tolist())) >= 83
    products = [sum(int(spectrum.matvecs.sum()) for spectrum in spectra) for spectra in (full, stopped)]
    assert products[1] < 0.8 * products[0]
    assert all("decided" in spectrum.reasons() for spectrum in stopped)


def _ends(operator: DenseOperator) -> tuple[Tensor, Tensor]:
    values = operator.matrices.diagonal(dim1=1, dim2=2)
    return values.amin(-1), values.amax(-1)


def test_a_cut_counts_the_filters_whose_matrices_were_formed() -> None:
    generator = torch.Generator().manual_seed(5)
    small = PointwiseOperator(torch.randn(500, 6, generator=generator), torch.randn(500, 30, generator=generator))
    large = PointwiseOperator(torch.randn(400, 200, generator=generator), torch.randn(400, 30, generator=generator))
    for cut in (Cut(10), Cut(60), Cut(1000)):
        spectra = extremal_eigenpairs([small, large], "auto", tol=1e-1, until=cut)
        assert spectra[0].matvecs.max() == 0 < spectra[1].matvecs.min()
        exact = extremal_eigenpairs([small, large], "exact")
        gains = [torch.cat([-s.lambda_min for s in found]) for found in (spectra, exact)]
        chosen = [set(gain.topk(min(cut.count, 60)).indices.tolist()) for gain in gains]
        assert len(chosen[0] & chosen[1]) >= 0.98 * len(chosen[0])


@pytest.mark.parametrize("bad", [0, -1, 1.5, "x"])
def test_a_cut_of_no_filters_is_refused(bad: int) -> None:
    with pytest.raises(ValueError, match="count"):
        Cut(bad)
    with pytest.raises(TypeError, match="until must be a Cut"):
        extremal_eigenpairs([], until=3)  # type: ignore[call-overload]
