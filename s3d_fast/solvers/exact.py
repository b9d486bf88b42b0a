"""The exact solver: form S and reduce it to tridiagonal form. For small D, and for checking the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from s3d_fast.backends.choice import choose
from s3d_fast.operators import dense_all
from s3d_fast.solvers.judgement import judged
from s3d_fast.solvers.solver import Eigenproblem, Solver
from s3d_fast.solvers.spectrum import Found, Spectrum, Status, measured, unit_vectors


@dataclass(frozen=True)
class Exact(Solver):
    """Forms S and reduces it in float64: O(M D^2) memory, O(M D^3) time."""

    uses_starts: ClassVar[bool] = False

    def solve(self, problem: Eigenproblem) -> list[Spectrum]:
        """Return the spectrum of every operator; the start vectors are not used.

        `matvecs` is 0 for every filter: the residuals come from products with the formed S.
        """
        found = []
        for operator, matrices in zip(problem.operators, dense_all(problem.operators, problem.backend), strict=True):
            _, vectors = choose(problem.backend, matrices).symmetric_extremes(matrices)
            zero = torch.zeros(operator.shape[0], dtype=torch.int64, device=operator.device)
            vectors = vectors.to(operator.dtype)
            V = unit_vectors(Found(vectors[:, 0], vectors[:, 1], zero, zero))
            SV = torch.einsum("mde,kme->kmd", matrices, V)
            # Nothing can be missed: the widths are those of rounding errors.
            found.append(measured(V, SV, zero, zero))
        statuses = [Status.STAGNATION] * len(found)
        return judged(problem.operators, found, statuses, problem.tol, problem.backend)
