"""Judging eigenpairs: which filters have converged, rounding errors included, and why the others have not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from s3d_fast.operators import SplittingOperator
from s3d_fast.solvers.rounding import in_double, rounding_error
from s3d_fast.solvers.spectrum import Pairs, Spectrum, Status


def judged(
    operators: Sequence[SplittingOperator],
    pairs: Sequence[Pairs],
    otherwise: Sequence[Tensor | Status],
    tol: float,
    backend: str,
) -> list[Spectrum]:
    """Return the spectra of eigenpairs.

    A filter has converged if its residuals and widths, rounding errors included, are at most tol times its spectral
    radius. Where the bound of the rounding errors alone prevents that, one product in float64 replaces the bound.

    Args:
        operators: the operators that were solved, with all their filters.
        pairs: what was found for each.
        otherwise: the status of filters that have not converged, (M,) or one for all, for each operator.
        tol: the tolerance.
        backend: the name of the backend.
    """
    all_judged = [_Judged(*each, tol) for each in zip(operators, pairs, strict=True)]
    if all_judged:
        # The host waits for the device once, for all operators.
        device = all_judged[0].doubtful.device
        flags = torch.cat([one.doubtful.to(device) for one in all_judged]).tolist()
        first = 0
        for one in all_judged:
            own = flags[first : first + len(one.doubtful)]
            first += len(own)
            places = [place for place, is_doubtful in enumerate(own) if is_doubtful]
            if places:
                one.correct(torch.tensor(places, device=one.doubtful.device), backend)
    return [one.spectrum(status) for one, status in zip(all_judged, otherwise, strict=True)]


class _Judged:
    """The eigenpairs of one operator with their rounding errors."""

    def __init__(self, operator: SplittingOperator, pairs: Pairs, tol: float) -> None:
        self.operator, self.pairs, self.tol = operator, pairs, tol
        # If both eigenvalues are equal, rounding can put them in the wrong order.
        order = pairs.values.argsort(0)
        self.values, self.errors, widths = (of.gather(0, order) for of in (pairs.values, pairs.errors, pairs.widths))
        self.V = pairs.V.gather(0, order.unsqueeze(-1).expand_as(pairs.V))
        self.rounding = rounding_error(operator, self.values) + pairs.noise
        self.residuals, self.widths = self.errors + self.rounding, widths + self.rounding
        is_close = torch.maximum(self.errors, widths).amax(0) <= tol * self.values.abs().amax(0)
        self.doubtful = is_close & ~self.converged  # (M,)

    @property
    def converged(self) -> Tensor:  # (M,)
        """Whether residuals and widths are small enough, for each filter."""
        return torch.maximum(self.residuals, self.widths).amax(0) <= self.tol * self.values.abs().amax(0)

    def correct(self, places: Tensor, backend: str) -> None:
        """Replace the bound of the rounding errors of some filters by what a product in float64 finds."""
        exact = in_double(self.operator, self.V[:, places], places, backend)
        if exact is None:
            return
        quotients, true = exact
        values, errors = self.values[:, places], self.errors[:, places]
        # How far the pairs really were off.
        moved = (quotients - values).abs() + (true - errors).clamp(min=0)
        rounded = quotients.to(values)
        self.values[:, places] = rounded
        residuals = (true + (quotients - rounded).abs()).to(values)
        # Rounded up: these are bounds.
        self.residuals[:, places] = torch.nextafter(residuals, torch.full_like(residuals, torch.inf))
        self.widths[:, places] = (self.widths[:, places] - self.rounding[places] + moved).to(values)

    def spectrum(self, otherwise: Tensor | Status) -> Spectrum:
        converged = self.converged
        # Not in place: a status may be one number for all filters.
        status = torch.where(converged, int(Status.CONVERGED), otherwise)
        status = torch.where(self.values.isfinite().all(0), status, int(Status.BREAKDOWN)).to(torch.int8)
        return Spectrum(
            lambda_min=self.values[0],
            v_min=self.V[0],
            lambda_max=self.values[1],
            v_max=self.V[1],
            residual_min=self.residuals[0],
            residual_max=self.residuals[1],
            converged=converged,
            iterations=self.pairs.iterations,
            matvecs=self.pairs.matvecs,
            width_min=self.widths[0],
            width_max=self.widths[1],
            status=status,
        )
