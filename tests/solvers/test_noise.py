"""Sampling errors over batches, and the tolerance that follows from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from s3d_fast import DenseOperator, PointwiseOperator, SumOperator, extremal_eigenpairs
from s3d_fast.operators import moments_all
from s3d_fast.operators.streamed import DiskStream, StreamedOperator
from s3d_fast.solvers.noise import COARSEST, FINEST, sampling_errors, worthwhile_tolerance

BATCHES, M, D = 5, 3, 6


def batches(spread: float = 1.0) -> list[PointwiseOperator]:
    """Return the same rows and coefficients for every batch, but for a part of this size."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(40, D, generator=generator, dtype=torch.float64)
    C = torch.randn(40, M, generator=generator, dtype=torch.float64)
    others = torch.randn(BATCHES, 40, M, generator=generator, dtype=torch.float64)
    return [PointwiseOperator(X, C + spread * other) for other in others]


def average(terms: list[PointwiseOperator]) -> SumOperator:
    return SumOperator(terms, [1 / len(terms)] * len(terms))


def quotients(terms: list[PointwiseOperator], V: torch.Tensor) -> torch.Tensor:
    """Return v^T S_b v of every batch, from formed matrices."""
    return torch.stack([torch.einsum("md,mde,me->m", V, term.dense(), V) for term in terms])


def test_moments_are_those_of_the_quotients_of_every_batch() -> None:
    terms, V = batches(), torch.randn(M, D, dtype=torch.float64)
    q = quotients(terms, V)
    alone = moments_all([terms[0]], [V])[0]
    together = moments_all([average(terms), terms[0]], [V, V])
    torch.testing.assert_close(together[0], torch.stack([torch.full((M,), 5.0).double(), q.sum(0), q.square().sum(0)]))
    torch.testing.assert_close(together[1], alone)
    torch.testing.assert_close(alone[1], q[0])


def test_moments_of_a_stream_are_those_of_its_batches(tmp_path: Path) -> None:
    terms, V = batches(), torch.randn(M, D, dtype=torch.float64)
    stream = DiskStream(tmp_path, 1 << 12)
    for term in terms:
        stream.append("unit", term)
    stream.batches = len(terms)
    operator = StreamedOperator(stream, "unit", terms[0], None)
    torch.testing.assert_close(moments_all([operator], [V])[0], moments_all([average(terms)], [V])[0])
    some = torch.tensor([2, 0])
    expected = moments_all([average(terms)], [V])[0][:, some]
    torch.testing.assert_close(moments_all([operator.restrict(some)], [V[some]])[0], expected)


def test_errors_are_standard_errors_of_the_mean_over_the_radius() -> None:
    terms = batches()
    operators = {"unit": average(terms)}
    spectra = {"unit": extremal_eigenpairs(operators["unit"], "exact")}
    q = quotients(terms, spectra["unit"].v_min)
    errors = sampling_errors(operators, spectra)
    assert errors is not None
    torch.testing.assert_close(errors, q.std(0) / BATCHES**0.5 / spectra["unit"].radius)


@pytest.mark.parametrize("kind", ["one batch", "formed", "zero"])
def test_errors_that_cannot_be_known_are_not(kind: str) -> None:
    terms = batches()
    operator = {
        "one batch": terms[0],
        "formed": DenseOperator(average(terms).dense()),
        "zero": average([PointwiseOperator(term.X, 0 * term.C) for term in terms]),
    }[kind]
    assert sampling_errors({"unit": operator}, {"unit": extremal_eigenpairs(operator, "exact")}) is None


def test_the_tolerance_is_a_third_of_the_median_error_within_its_limits() -> None:
    assert worthwhile_tolerance(None) == FINEST
    for error, tol in ((1e-4, FINEST), (0.12, 0.04), (3.0, COARSEST)):
        assert worthwhile_tolerance(torch.tensor([0.0, error, 1e9])) == pytest.approx(tol)


def test_batches_that_agree_ask_for_the_finest_tolerance() -> None:
    operator = average(batches(spread=1e-3))
    errors = sampling_errors({"unit": operator}, {"unit": extremal_eigenpairs(operator)})
    assert worthwhile_tolerance(errors) == FINEST
