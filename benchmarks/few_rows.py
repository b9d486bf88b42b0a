"""Fewer rows than columns: `python -m benchmarks.few_rows` prints what the coordinates of the rows gain.

CPU seconds on one thread, in turn, of a solve with the rows and of one in their coordinates, for random ReLU rows; and
whether "auto" takes the latter.
"""

from __future__ import annotations

import importlib
import statistics

import torch

import s3d_fast as s3d
from benchmarks.phases import seconds
from s3d_fast.base.tables import text_table
from s3d_fast.operators import PointwiseOperator
from s3d_fast.operators.few_rows import prefers_few_rows

SHAPES = ((16, 512, 128), (128, 512, 256), (16, 2048, 512), (64, 2048, 256), (256, 2304, 128), (512, 4608, 512))
TOO_MANY = (1024, 2304, 128)
TOLERANCE = 1e-2


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    auto = importlib.import_module("s3d_fast.solvers.auto")
    choice = auto.prefers_few_rows
    rows = [["N, D, M", "with the rows / in their coordinates", "taken"]]
    for N, D, M in (*SHAPES, TOO_MANY):
        torch.manual_seed(0)
        operator = PointwiseOperator(torch.randn(N, D).relu(), torch.randn(N, M))
        ratios = []
        for _ in range(3):
            taken = {}
            for few in (True, False):
                auto.prefers_few_rows = lambda operator, tol, few=few: few
                taken[few] = seconds(lambda own=operator: s3d.extremal_eigenpairs(own, tol=TOLERANCE))
            ratios.append(taken[False] / taken[True])
        auto.prefers_few_rows = choice
        rows.append([f"{N}, {D}, {M}", f"{statistics.median(ratios):.2f}", str(prefers_few_rows(operator, TOLERANCE))])
    print(text_table(rows))


if __name__ == "__main__":
    main()
