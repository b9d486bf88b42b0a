"""How many products Lanczos needs for a random layer, and how many the paper's descent needs with its best step."""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.compare import compare, error
from benchmarks.device import BACKEND, DEVICE
from s3d_fast.operators import PointwiseOperator
from s3d_fast.solvers import Spectrum, extremal_eigenpairs

STEPS = (0.6, 0.8, 0.9, 1.0, 1.1)
ERROR = 1e-3
# Of the residual: at 1e-2 a few filters of such layers still exceed the error.
TOLERANCE = 3e-3


@pytest.fixture(scope="module")
def layer() -> PointwiseOperator:
    generator = torch.Generator().manual_seed(1)
    X, C = torch.randn(2, 4096, 256, generator=generator).to(DEVICE)
    return PointwiseOperator(X, C)


@pytest.fixture(scope="module")
def truth(layer: PointwiseOperator) -> Spectrum:
    return extremal_eigenpairs(layer, solver="exact")


def test_lanczos(benchmark: BenchmarkFixture, layer: PointwiseOperator, truth: Spectrum) -> None:
    benchmark.group = "solvers"
    found = extremal_eigenpairs(layer, tol=TOLERANCE, backend=BACKEND)
    worst = float(error(found, truth).max())
    print(f"\nlanczos: error {worst:.1e} of the spectral radius after {int(found.matvecs.max())} products")
    assert worst <= ERROR
    # The certificate takes about a fifth of them.
    assert int(found.matvecs.max()) <= 60
    compare(
        benchmark,
        lambda: extremal_eigenpairs(layer, tol=TOLERANCE, backend=BACKEND),
        {"reference": lambda: extremal_eigenpairs(layer, tol=TOLERANCE, backend="reference")},
        rounds=5,
    )


def test_exact(benchmark: BenchmarkFixture) -> None:
    benchmark.group = "solvers"
    generator = torch.Generator().manual_seed(1)
    X, C = torch.randn(2, 16384, 32, generator=generator).to(DEVICE)
    layer = PointwiseOperator(X, C)
    found, truth = (extremal_eigenpairs(layer, "exact", backend=backend) for backend in (BACKEND, "reference"))
    assert float(error(found, truth).max()) <= ERROR
    compare(
        benchmark,
        lambda: extremal_eigenpairs(layer, "exact", backend=BACKEND),
        {
            "reference": lambda: extremal_eigenpairs(layer, "exact", backend="reference"),
            "lanczos": lambda: extremal_eigenpairs(layer, "lanczos", tol=1e-2, backend=BACKEND),
        },
        rounds=9,
    )


def test_rayleigh(benchmark: BenchmarkFixture, layer: PointwiseOperator, truth: Spectrum) -> None:
    """The fewest iterations, by doubling, after which every filter is within the error, with the best step size."""
    needed = {}
    for step in STEPS:
        for iterations in (250, 500, 1000, 2000, 4000):
            found = extremal_eigenpairs(layer, "rayleigh", 1e-7, iterations, step=step)
            worst = float(error(found, truth).max())
            print(f"\nrayleigh, step {step}: error {worst:.1e} after {2 * iterations} products")
            if worst <= ERROR:
                needed[step] = iterations
                break
            if iterations >= min(needed.values(), default=4000):
                break
    best = min(needed, key=needed.__getitem__)
    assert 2 * needed[best] >= 10 * 50
    options = {"solver": "rayleigh", "tol": 1e-7, "max_iters": needed[best], "step": best}
    benchmark.pedantic(extremal_eigenpairs, (layer,), options, rounds=1)
