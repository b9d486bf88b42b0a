"""Rows in bfloat16: which operators are rounded, and what that changes of their eigenvalues."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from s3d_fast import ConvOperator, PointwiseOperator, SplittingOperator, SumOperator, extremal_eigenpairs
from s3d_fast.backends import extension
from s3d_fast.operators import JointOperator, averaged
from s3d_fast.operators.rounded import rounded_where_faster


@pytest.fixture(params=[True, False], ids=["with", "without"])
def has_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the processor is said to multiply bfloat16 numbers."""
    monkeypatch.setattr(extension, "has_bfloat16_products", lambda: request.param)
    return request.param


def rows(D: int = 64, M: int = 64, dtype: torch.dtype = torch.float32, seed: int = 0) -> PointwiseOperator:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(500, D, generator=generator, dtype=dtype).relu_()
    return PointwiseOperator(X, torch.randn(500, M, generator=generator, dtype=dtype))


def stored(operator: SplittingOperator) -> set[torch.dtype]:
    found = [value for term, _ in operator.weighted_terms() for value in vars(term).values()]
    return {value.dtype for value in found if isinstance(value, Tensor)}


def test_wide_layers_are_rounded_where_that_is_faster(has_products: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    X, C = ([torch.randn(300, 64, generator=generator) for _ in range(count)] for count in (2, 3))
    joint = JointOperator(X, C, bias=[False, True])
    wide = [rows(), joint, SumOperator([rows(), rows(seed=1)]), averaged([rows(), rows(seed=1)])]
    maps = ConvOperator(torch.randn(2, 64, 4, 4), torch.randn(2, 64, 4, 4), kernel_size=(1, 1))
    others = [rows(D=63), rows(M=63), rows(dtype=torch.float64), maps]
    found = rounded_where_faster([*wide, *others])
    for operator, given in zip(found, wide, strict=False):
        assert stored(operator) == ({torch.bfloat16} if has_products else {torch.float32})
        assert stored(given) == {torch.float32}
        V = torch.randn(operator.shape)
        exact = given.matvec(V)
        assert float((operator.matvec(V) - exact).norm() / exact.norm()) < 1e-2
    assert all(one is other for one, other in zip(found[len(wide) :], others, strict=True))


@pytest.mark.usefixtures("has_products")
@pytest.mark.parametrize("solver", ["lanczos", "auto", "exact"])
def test_medium_precision_moves_eigenvalues_by_less_than_a_percent(solver: str) -> None:
    operators = {"wide": rows(96, 80), "narrow": rows(20, 9)}
    exact = extremal_eigenpairs(operators, "exact")
    found = extremal_eigenpairs(operators, solver, tol=1e-2, precision="medium")
    for name, spectrum in found.items():
        assert bool(spectrum.converged.all())
        for end in ("lambda_min", "lambda_max"):
            error = (getattr(spectrum, end) - getattr(exact[name], end)).abs() / exact[name].radius
            assert float(error.max()) < 2e-2


def test_a_precision_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="precision"):
        extremal_eigenpairs(rows(), precision="low")
