"""The choice between forming S and Lanczos, layer by layer, by what each is expected to cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from s3d_fast import ops
from s3d_fast.operators import SplittingOperator
from s3d_fast.solvers import exact, lanczos
from s3d_fast.solvers.spectrum import Spectrum

# What reducing one D x D matrix costs, over what one product S v costs per row and filter: about 4/3 D^3 float64 flops
# in small loops against 4 N D flops near the machine's peak.
REDUCTION = 28.0


def solve(
    operators: Sequence[SplittingOperator],
    starts: Sequence[Tensor],  # each (M, D), unit vectors
    tol: float,
    max_iters: int,
    backend: str,
    progress: bool = False,
) -> list[Spectrum]:
    """Return the spectrum of every operator: by forming S where that is cheaper, by Lanczos elsewhere."""
    found: dict[int, Spectrum] = {}
    dense = [i for i, operator in enumerate(operators) if prefers_exact(operator, tol, backend)]
    found.update(zip(dense, exact.solve([operators[i] for i in dense], tol, backend), strict=True))
    rest = [i for i in range(len(operators)) if i not in found]
    chosen = ([operators[i] for i in rest], [starts[i] for i in rest])
    found.update(zip(rest, lanczos.solve(*chosen, tol, max_iters, backend, progress), strict=True))
    return [found[i] for i in range(len(operators))]


def prefers_exact(operator: SplittingOperator, tol: float, backend: str = "auto", rows: int | None = None) -> bool:
    """Return whether forming S is expected to cost less than Lanczos; both costs are in products S v.

    Reducing S takes a time that does not depend on the number of rows. Only operators made of rows can form S cheaply.
    `rows` stands in for the rows of an operator on one batch of many.
    """
    rows = operator.rows if rows is None else rows
    if rows is None:
        return False
    width = operator.shape[1]
    if rows == 0:
        # Formed already.
        return True
    return forming_products(operator, backend) + REDUCTION * width**2 / rows < expected_steps(width, tol)


def forming_products(operator: SplittingOperator, backend: str = "auto") -> float:
    """Return how many products S v take as long as forming S does: D / 4 where symmetry is used, else D / 2."""
    # Of the compiled kernels, only those of the CPU use it.
    symmetric = ops.resolve_backend(backend, torch.empty(0, dtype=operator.dtype, device=operator.device)) == "cpu"
    return (operator.shape[1] + 1) / (4 if symmetric else 2)


def expected_steps(width: int, tol: float) -> float:
    """Return how many Lanczos steps a layer is expected to take: about 8 per digit, and never more than D."""
    return min(width, 8 * (1 + max(0.0, -math.log10(tol))))
