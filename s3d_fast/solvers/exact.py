"""The exact solver: form S and take all of its eigenvalues. For small D, and for checking the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from s3d_fast.operators import SplittingOperator
from s3d_fast.solvers.spectrum import Spectrum, measure


def solve(operators: Sequence[SplittingOperator], tol: float, backend: str) -> list[Spectrum]:
    """Return the spectrum of every operator by dense eigendecomposition in float64: O(M D^2) memory, O(M D^3) time.

    A filter counts as having had no matvecs but those of the final residuals.
    """
    spectra = []
    for operator in operators:
        # LAPACK reads one triangle: make sure that both agree.
        S = operator.dense(backend).double()
        _, vectors = torch.linalg.eigh((S + S.mT) / 2)
        zero = torch.zeros(operator.shape[0], dtype=torch.int64, device=operator.device)
        v_min, v_max = vectors[..., 0].to(operator.dtype), vectors[..., -1].to(operator.dtype)
        spectra.append(measure(operator, v_min, v_max, zero, zero, tol, backend))
    return spectra
