"""The exact solver: form S and reduce it to tridiagonal form. For small D, and for checking the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from s3d_fast import ops
from s3d_fast.operators import SplittingOperator, dense_all
from s3d_fast.solvers.spectrum import Found, Spectrum, measured, unit_vectors


def solve(operators: Sequence[SplittingOperator], tol: float, backend: str) -> list[Spectrum]:
    """Return the spectrum of every operator by forming S and reducing it in float64: O(M D^2) memory, O(M D^3) time.

    A filter counts as having had no matvecs: the residuals are those of S as it was formed.
    """
    spectra = []
    for operator, matrices in zip(operators, dense_all(operators, backend), strict=True):
        _, vectors = ops.symmetric_extremes(matrices, backend=backend)
        zero = torch.zeros(operator.shape[0], dtype=torch.int64, device=operator.device)
        vectors = vectors.to(operator.dtype)
        V = unit_vectors(Found(vectors[:, 0], vectors[:, 1], zero, zero))
        SV = torch.einsum("mde,kme->kmd", matrices, V)
        spectra.append(measured(V, SV, zero, zero, tol))
    return spectra
