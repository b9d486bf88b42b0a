"""The cost model: the cost of forming S and the expected cost of Lanczos, both in products S v."""

from __future__ import annotations

import math

import torch

from s3d_fast.backends.choice import choose
from s3d_fast.operators.operator import SplittingOperator

# Reducing a D x D matrix takes as long as REDUCTION * D^2 / N products S v: about 4/3 D^3 float64 flops in small loops
# against 4 N D flops near the machine's peak. A step of Lanczos takes as long as OVERHEAD / N products beside its own
# one: orthogonality and checks.
REDUCTION, OVERHEAD = 28.0, 0.0
# The same on a CPU with at least so many rows: measured for N from 256 to 16,384 and D from 17 to 145.
MANY_ROWS, REDUCTION_MEASURED, OVERHEAD_MEASURED = 128, 6.0, 300.0


def prefers_exact(operator: SplittingOperator, tol: float, backend: str = "auto", rows: int | None = None) -> bool:
    """Return whether forming S is expected to cost less than Lanczos.

    The time of reducing S does not depend on the number of rows. Only operators on plain rows can form S cheaply. If
    the operator holds one batch of many, `rows` is the number of rows of all batches.
    """
    rows = operator.rows if rows is None else rows
    if rows is None:
        return False
    width = operator.shape[1]
    if rows == 0:
        # S is formed already.
        return True
    is_measured = operator.device.type == "cpu" and rows >= MANY_ROWS
    reduction, overhead = (REDUCTION_MEASURED, OVERHEAD_MEASURED) if is_measured else (REDUCTION, OVERHEAD)
    steps = expected_steps(width, tol) * (1 + overhead / rows)
    return forming_products(operator, backend) + reduction * width**2 / rows < steps


def forming_products(operator: SplittingOperator, backend: str = "auto") -> float:
    """Return how many products S v take as long as forming S: D / 4 if the backend uses symmetry, else D / 2."""
    chosen = choose(backend, torch.empty(0, dtype=operator.dtype, device=operator.device))
    return (operator.shape[1] + 1) / (4 if chosen.uses_symmetry else 2)


def expected_steps(width: int, tol: float) -> float:
    """Return the expected number of Lanczos steps of a layer: about 8 per digit of `tol`, and at most D."""
    return min(width, 8 * (1 + max(0.0, -math.log10(tol))))
