"""Sampling errors: how far v^T S v would differ on other data, and the tolerance that is worth reaching."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from s3d_fast.operators import SplittingOperator
from s3d_fast.solvers.spectrum import Spectrum

# The tolerances between which the one that follows from the noise lies. Coarser ones choose other filters; finer ones
# are rarely paid back.
FINEST, COARSEST = 1e-2, 0.1
# The tolerance, in units of the sampling error.
SHARE = 1 / 3


def quotients_by_batch(operator: SplittingOperator, V: Tensor, backend: str = "auto") -> Tensor | None:
    """Return v^T S_b v for every batch b, (B, M): the terms of the average over batches; None if they are not known.

    It costs as much as one product with the operator.
    """
    terms = operator.weighted_terms()
    if operator.provider is not None or len(terms) < 2:
        return None
    total = sum(weight for _, weight in terms)
    return torch.stack([(V * term.matvec(V, backend)).sum(-1) * total for term, _ in terms])


def sampling_errors(operators: Mapping[str, SplittingOperator], spectra: Mapping[str, Spectrum]) -> Tensor | None:
    """Return the standard error of v_min^T S v_min over the spectral radius, for the filters for which it is known.

    None if it is known for no filter: with a single batch, or where batches were added up.
    """
    found = []
    for name, operator in operators.items():
        spectrum = spectra[name]
        quotients = quotients_by_batch(operator, spectrum.v_min)
        if quotients is None:
            continue
        error = quotients.double().std(0) / len(quotients) ** 0.5
        alive = spectrum.radius > 0
        found.append((error[alive] / spectrum.radius[alive].double()).cpu())
    errors = torch.cat(found) if found else torch.zeros(0)
    return errors if len(errors) else None


def worthwhile_tolerance(errors: Tensor | None) -> float:
    """Return the tolerance that is a third of the median sampling error, between 0.01 and 0.1.

    An eigenvalue that is known better than the data know it gains nothing. Without an estimate it is the finest.
    """
    if errors is None:
        return FINEST
    return min(COARSEST, max(FINEST, SHARE * float(errors.median())))
