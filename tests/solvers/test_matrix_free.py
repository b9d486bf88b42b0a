"""Matrices given by a function: every option arrives, functions may do as they like, and bad ones are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from s3d_fast import DenseOperator, extremal_eigenpairs
from s3d_fast.operators import MatrixFreeOperator
from s3d_fast.solvers import Cut, Lanczos

M, D = 6, 20
SOLVERS = ("lanczos", "auto", "exact", "rayleigh")


def matrices(dtype: torch.dtype = torch.float32) -> Tensor:
    A = torch.randn(M, D, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return (A + A.mT).to(dtype)


S = matrices()
VALUES = torch.linalg.eigvalsh(S.double())
DIAGONAL = torch.linspace(-1, 1, D)


def product(V: Tensor) -> Tensor:
    return torch.einsum("mde,me->md", S, V)


@pytest.mark.parametrize("solver", SOLVERS)
def test_both_ends_are_those_of_the_matrices(solver: str) -> None:
    spectrum = extremal_eigenpairs(product, solver, tol=1e-3, shape=(M, D))
    assert bool(spectrum.converged.all())
    torch.testing.assert_close(
        spectrum.lambda_min.double(), VALUES[:, 0], rtol=0, atol=1e-3 * float(VALUES.abs().max())
    )
    torch.testing.assert_close(
        spectrum.lambda_max.double(), VALUES[:, -1], rtol=0, atol=1e-3 * float(VALUES.abs().max())
    )


OPTIONS: list[dict[str, Any]] = [
    {"max_iters": 3},
    {"solver": "lanczos", "max_iters": 5, "delta": 0.5},
    {"solver": "auto", "delta": 1e-6, "tol": 1e-2},
    {"solver": "rayleigh", "max_iters": 4, "step": 0.2, "delta": 0.1},
    {"solver": Lanczos(max_iters=4)},
    {"backend": "reference", "tol": 0.1},
    {"until": Cut(2), "tol": 0.1},
    {"max_iters": 7, "until": Cut(2, 3, 1.5)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_every_option_arrives(options: dict[str, Any]) -> None:
    """A function is solved as the operator is that it stands for."""
    generators = [torch.Generator().manual_seed(7) for _ in range(2)]
    free = extremal_eigenpairs(product, shape=(M, D), generator=generators[0], **options)
    given = extremal_eigenpairs(MatrixFreeOperator(product, (M, D)), generator=generators[1], **options)
    assert free.matvecs.tolist() == given.matvecs.tolist()
    assert free.reasons() == given.reasons()
    torch.testing.assert_close(free.lambda_min, given.lambda_min)
    torch.testing.assert_close(free.width_max, given.width_max)


def test_a_function_is_called_once_per_step() -> None:
    calls: list[torch.Size] = []

    def counting(V: Tensor) -> Tensor:
        calls.append(V.shape)
        return product(V)

    spectrum = extremal_eigenpairs(counting, shape=(M, D))
    assert len(calls) == int(spectrum.matvecs.max())
    assert set(calls) == {torch.Size([M, D])}
    assert extremal_eigenpairs(counting, shape=(M, D), max_iters=3, tol=1e-6).matvecs.tolist() == [3] * M


def changing(V: Tensor) -> Tensor:
    return V.mul_(DIAGONAL)


BUFFER = torch.empty(M, D)


def buffered(V: Tensor) -> Tensor:
    return torch.mul(V, DIAGONAL, out=BUFFER)


def transposed(V: Tensor) -> Tensor:
    return (V * DIAGONAL).T.contiguous().T


def differentiating(V: Tensor) -> Tensor:
    W = torch.zeros(M, D, requires_grad=True)
    (slope,) = torch.autograd.grad((W.square() @ DIAGONAL).sum() / 2, W, create_graph=True)
    return torch.autograd.grad(slope, W, V)[0]


def learning(V: Tensor) -> Tensor:
    return V * DIAGONAL.clone().requires_grad_()


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("function", [changing, buffered, transposed, differentiating, learning])
def test_a_function_may_change_reuse_and_differentiate(function: Callable[[Tensor], Tensor], solver: str) -> None:
    spectrum = extremal_eigenpairs(function, solver, shape=(M, D), tol=1e-2)
    assert bool(spectrum.converged.all())
    assert not spectrum.lambda_min.requires_grad
    torch.testing.assert_close(spectrum.lambda_min, torch.full((M,), -1.0), rtol=0, atol=1e-2)
    torch.testing.assert_close(spectrum.lambda_max, torch.full((M,), 1.0), rtol=0, atol=1e-2)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_function_may_return_a_view_of_its_argument(solver: str) -> None:
    same = extremal_eigenpairs(lambda V: V, solver, shape=(M, D))
    torch.testing.assert_close(same.lambda_min, torch.ones(M))
    flipped = extremal_eigenpairs(lambda V: V.flip(-1), solver, shape=(M, D))
    torch.testing.assert_close(flipped.lambda_min, -torch.ones(M), rtol=0, atol=1e-3)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("shape", [(1, D), (4, 1), (1, 1)])
def test_one_matrix_and_one_dimension(shape: tuple[int, int], solver: str) -> None:
    spectrum = extremal_eigenpairs(lambda V: V * DIAGONAL[-shape[1] :], solver, shape=shape, tol=1e-2)
    assert bool(spectrum.converged.all())
    torch.testing.assert_close(spectrum.lambda_max, torch.ones(shape[0]), rtol=0, atol=1e-2)


def test_double_precision() -> None:
    A = matrices(torch.float64)
    spectrum = extremal_eigenpairs(
        lambda V: torch.einsum("mde,me->md", A, V), shape=(M, D), dtype=torch.float64, tol=1e-12
    )
    assert bool(spectrum.converged.all())
    torch.testing.assert_close(spectrum.lambda_max, torch.linalg.eigvalsh(A)[:, -1], rtol=1e-12, atol=1e-12)


def test_several_vectors_per_matrix_and_restrictions() -> None:
    operator = MatrixFreeOperator(product, (M, D))
    V = torch.randn(3, M, D)
    torch.testing.assert_close(operator.matvec(V), torch.einsum("mde,kme->kmd", S, V))
    torch.testing.assert_close(operator.matvec(V[0].T.contiguous().T), product(V[0]))
    rest = operator.restrict(torch.tensor([1, 4, -1])).restrict(torch.tensor([2, 0]))
    torch.testing.assert_close(rest.matvec(V[:, [5, 1]]), torch.einsum("mde,kme->kmd", S[[5, 1]], V[:, [5, 1]]))
    torch.testing.assert_close(operator.dense(), S)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_product_that_is_not_finite_spoils_one_filter_only(solver: str) -> None:
    def broken(V: Tensor) -> Tensor:
        SV = product(V)
        SV[2] *= math.nan
        return SV

    spectrum = extremal_eigenpairs(broken, solver, shape=(M, D), tol=1e-2)
    assert spectrum.reasons() == {"converged": M - 1, "breakdown": 1}
    assert not bool(spectrum.converged[2])


@pytest.mark.parametrize("solver", SOLVERS)
def test_matrices_that_are_not_symmetric_are_refused(solver: str) -> None:
    A = torch.randn(M, D, D)
    with pytest.raises(ValueError, match="must be symmetric"):
        extremal_eigenpairs(lambda V: torch.einsum("mde,me->md", A, V), solver, shape=(M, D))


def test_products_in_bfloat16_and_noise_count_as_symmetric() -> None:
    def rough(V: Tensor) -> Tensor:
        SV = torch.einsum("mde,me->md", S.bfloat16(), V.bfloat16()).float()
        # Zero but for rounding errors.
        SV[0] = 1e-7 * torch.randn(D)
        return SV

    spectrum = extremal_eigenpairs(rough, shape=(M, D), tol=0.1)
    torch.testing.assert_close(
        spectrum.lambda_max[1:].double(), VALUES[1:, -1], rtol=0, atol=0.1 * float(VALUES.abs().max())
    )


BAD: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "dtype": (lambda V: product(V).double(), r"like V, \(6, 20\), torch.float32 on cpu; got \(6, 20\), torch.float64"),
    "shape": (lambda V: product(V)[:3], r"got \(3, 20\), torch.float32"),
    "device": (lambda V: product(V).to("meta"), "on cpu; got .* on meta"),
    "nothing": (lambda V: None, "got NoneType"),
}


@pytest.mark.parametrize("name", BAD)
def test_products_unlike_the_vectors_are_refused(name: str) -> None:
    function, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        extremal_eigenpairs(function, shape=(M, D))


@pytest.mark.parametrize("shape", [5, (5,), (2, 3, 4), (0, 3), (3, 0), (2.5, 3), "ab", (-1, 3), (True, 3)])
def test_shapes_that_are_none_are_refused(shape: Any) -> None:
    with pytest.raises(ValueError, match=r"shape must be \(M, D\)|[MD] must be an integer"):
        extremal_eigenpairs(product, shape=shape)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float16, torch.bfloat16, torch.complex64, "float32"])
def test_dtypes_without_arithmetic_are_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match="dtype must be one of"):
        extremal_eigenpairs(product, shape=(M, D), dtype=dtype)


def test_arguments_that_contradict_are_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        extremal_eigenpairs(product)
    with pytest.raises(ValueError, match="belong to a function"):
        extremal_eigenpairs(DenseOperator(S), shape=(M, D))
    with pytest.raises(TypeError, match=r"becomes one by MatrixFreeOperator"):
        extremal_eigenpairs([product])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="no option 'stepp'"):
        extremal_eigenpairs(product, shape=(M, D), stepp=1)
    with pytest.raises(TypeError, match="holds its own options"):
        extremal_eigenpairs(product, Lanczos(3), shape=(M, D), max_iters=5)
    with pytest.raises(ValueError, match="max_iters"):
        extremal_eigenpairs(product, shape=(M, D), max_iters=0)
    with pytest.raises(ZeroDivisionError):
        extremal_eigenpairs(lambda V: V * (1 // 0), shape=(M, D))
