"""The result of every solver, and the functions that compute it from eigenvectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from s3d_fast.base import require
from s3d_fast.base.tables import html_table
from s3d_fast.maths.reference import safe_norm
from s3d_fast.operators import SplittingOperator, matvec_all
from s3d_fast.operators.operator import LayerShape


@dataclass(frozen=True)
class Spectrum:
    """The extreme eigenpairs of the splitting matrix of each of M filters.

    The eigenvalues are the Rayleigh quotients of the vectors, so v^T S v = lambda holds whether or not a filter has
    converged. The residuals come from products with the vectors, or with basis vectors that they combine, and include
    rounding errors. The interval lambda +- residual contains an eigenvalue of S.
    """

    lambda_min: Tensor  # (M,)
    v_min: Tensor  # (M, D), unit vectors
    lambda_max: Tensor  # (M,)
    v_max: Tensor  # (M, D), unit vectors
    residual_min: Tensor  # (M,), |S v_min - lambda_min v_min|
    residual_max: Tensor  # (M,), |S v_max - lambda_max v_max|
    converged: Tensor  # (M,), bool: both residuals are at most tol times the spectral radius
    iterations: Tensor  # (M,), int64: solver steps until the filter had converged, or until the solver stopped
    matvecs: Tensor  # (M,), int64: products S v spent on the filter
    layer: LayerShape | None = None  # of the filters' layer, if `capture` knows it

    @property
    def radius(self) -> Tensor:
        """The spectral radius max(|lambda_min|, |lambda_max|) of each filter, (M,)."""
        return torch.maximum(self.lambda_min.abs(), self.lambda_max.abs())

    def as_weights(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Return "v_min" or "v_max" in the shapes of the layer's weight and bias; None if it has no bias.

        Raises:
            ValueError: the name is another, the spectrum does not come from `capture` or `capture_layers`, or several
                layers make the unit's channels.
        """
        require.choice("name", name, ("v_min", "v_max"))
        if self.layer is None:
            raise ValueError(
                "the layer's shape is not known: the operator does not come from a capture, or several layers make its "
                "channels"
            )
        vectors, shape, axis = getattr(self, name), self.layer.weight, self.layer.row_axis
        columns = vectors[:, :-1] if self.layer.bias else vectors
        rest = [size for place, size in enumerate(shape) if place != axis]
        weight = columns.reshape(len(vectors), *rest).movedim(0, axis)
        return weight, vectors[:, -1] if self.layer.bias else None

    def __len__(self) -> int:
        return len(self.lambda_min)

    def __repr__(self) -> str:
        if not len(self):
            return "Spectrum(0 filters)"
        return (
            f"Spectrum({len(self)} filters, {int(self.converged.sum())} converged, "
            f"lambda_min >= {self.lambda_min.min().item():.3g}, lambda_max <= {self.lambda_max.max().item():.3g}, "
            f"at most {int(self.matvecs.max())} matvecs)"
        )

    def _repr_html_(self) -> str:
        if not len(self):
            return html_table([["filters"], ["0"]])
        rows = [["", "least", "median", "largest"]]
        for name in ("lambda_min", "lambda_max", "residual_min", "residual_max", "matvecs"):
            values = getattr(self, name).detach().double()
            rows.append([name, *(f"{float(value):.4g}" for value in (values.min(), values.median(), values.max()))])
        return html_table(rows, f"{len(self)} filters, {int(self.converged.sum())} converged.")


@dataclass(frozen=True)
class Found:
    """The vectors that a solver found for the filters of one operator, before their residuals are computed."""

    v_min: Tensor  # (M, D)
    v_max: Tensor  # (M, D)
    iterations: Tensor  # (M,)
    matvecs: Tensor  # (M,)


def measure(operators: Sequence[SplittingOperator], found: Sequence[Found], tol: float, backend: str) -> list[Spectrum]:
    """Return the spectra that belong to the vectors found; costs two more products with each operator."""
    vectors = [unit_vectors(ends) for ends in found]
    products = matvec_all(operators, vectors, backend)
    return [
        measured(V, SV, ends.iterations, ends.matvecs + 2, tol)
        for V, SV, ends in zip(vectors, products, found, strict=True)
    ]


def measured(V: Tensor, SV: Tensor, iterations: Tensor, matvecs: Tensor, tol: float) -> Spectrum:
    """Return the spectrum that belongs to vectors V and their products SV, both (2, M, D)."""
    values = (V * SV).sum(-1)
    return spectrum(V, values, safe_norm(SV - values.unsqueeze(-1) * V), iterations, matvecs, tol)


def unit_vectors(found: Found) -> Tensor:  # (2, M, D)
    """Return the vectors found, with unit length and comparable signs: the largest entry is positive."""
    V = torch.nn.functional.normalize(torch.stack([found.v_min, found.v_max]), dim=-1)
    largest = V.gather(-1, V.abs().argmax(-1, keepdim=True))
    return torch.where(largest < 0, -V, V)


def spectrum(
    V: Tensor,  # (2, M, D)
    values: Tensor,  # (2, M)
    residuals: Tensor,  # (2, M)
    iterations: Tensor,
    matvecs: Tensor,
    tol: float,
) -> Spectrum:
    """Return the spectrum that consists of the given eigenpairs, smaller eigenvalue first."""
    # If both eigenvalues are equal, rounding can put them in the wrong order.
    order = values.argsort(0)
    values, residuals = values.gather(0, order), residuals.gather(0, order)
    V = V.gather(0, order.unsqueeze(-1).expand_as(V))
    radius = values.abs().amax(0)
    return Spectrum(
        lambda_min=values[0],
        v_min=V[0],
        lambda_max=values[1],
        v_max=V[1],
        residual_min=residuals[0],
        residual_max=residuals[1],
        converged=residuals.amax(0) <= tol * radius,
        iterations=iterations,
        matvecs=matvecs,
    )
