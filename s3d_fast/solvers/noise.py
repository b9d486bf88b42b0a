"""Sampling errors: how far v^T S v would differ on other data, and the tolerance that is worth reaching."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from s3d_fast.operators import SplittingOperator, moments_all
from s3d_fast.solvers.spectrum import Spectrum

# The tolerances between which the one that follows from the noise lies. Coarser ones choose other filters; finer ones
# are rarely paid back.
FINEST, COARSEST = 1e-2, 0.1
# The probability that an eigenvalue is wrong, where the tolerance follows from the noise.
COARSE_DELTA = 1e-2
# The tolerance, in units of the sampling error.
SHARE = 1 / 3


def sampling_errors(
    operators: Mapping[str, SplittingOperator], spectra: Mapping[str, Spectrum], backend: str = "auto"
) -> Tensor | None:
    """Return the standard error of v_min^T S v_min over the spectral radius, for the filters for which it is known.

    None if it is known for no filter: with a single batch, or where batches were added up. It costs as much as one
    product with every operator.
    """
    found = []
    vectors = [spectra[name].v_min for name in operators]
    for name, moments in zip(operators, moments_all(list(operators.values()), vectors, backend), strict=True):
        count, total, squares = moments
        variance = (squares - total.square() / count).clamp(min=0) / (count - 1)
        radius = spectra[name].radius.double()
        known = (count > 1) & (radius > 0)
        found.append(((variance / count).sqrt() / radius)[known].cpu())
    errors = torch.cat(found) if found else torch.zeros(0)
    return errors if len(errors) else None


def worthwhile_tolerance(errors: Tensor | None) -> float:
    """Return the tolerance that is a third of the median sampling error, between 0.01 and 0.1.

    An eigenvalue that is known better than the data know it gains nothing. Without an estimate it is the finest.
    """
    if errors is None:
        return FINEST
    return min(COARSEST, max(FINEST, SHARE * float(errors.median())))
