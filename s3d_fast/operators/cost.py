"""The cost model: what forming the matrices costs, what Lanczos is expected to cost, both in products S v."""

from __future__ import annotations

import math

import torch

from s3d_fast.backends.choice import choose
from s3d_fast.operators.operator import SplittingOperator

# The cost of reducing one D x D matrix over that of one product S v, per row and filter: about 4/3 D^3 float64 flops
# in small loops against 4 N D flops near the machine's peak.
REDUCTION = 28.0


def prefers_exact(operator: SplittingOperator, tol: float, backend: str = "auto", rows: int | None = None) -> bool:
    """Return whether forming S is expected to cost less than Lanczos.

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
    chosen = choose(backend, torch.empty(0, dtype=operator.dtype, device=operator.device))
    return (operator.shape[1] + 1) / (4 if chosen.uses_symmetry else 2)


def expected_steps(width: int, tol: float) -> float:
    """Return how many Lanczos steps a layer is expected to take: about 8 per digit, and never more than D."""
    return min(width, 8 * (1 + max(0.0, -math.log10(tol))))
