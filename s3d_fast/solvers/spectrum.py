"""The result of every solver, and the functions that compute it from eigenvectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from s3d_fast.base import require
from s3d_fast.base.tables import html_table
from s3d_fast.maths.reference import safe_norm
from s3d_fast.operators import SplittingOperator, matvec_all
from s3d_fast.operators.operator import LayerShape


class Status(IntEnum):
    """Why a solver stopped working on a filter."""

    CONVERGED = 0  # residuals and certified widths are at most tol times the spectral radius
    DECIDED = 1  # it was certain whether the filter belongs to those that gain the most: `until`
    STEPS = 2  # the solver ran out of steps
    STAGNATION = 3  # rounding errors of the products exceed the tolerance; more steps do not help
    BREAKDOWN = 4  # a product was not finite
    SADDLE = 5  # descent came to rest at an eigenvalue that is not extreme


@dataclass(frozen=True)
class Spectrum:
    """The extreme eigenpairs of the splitting matrix of each of M filters.

    The eigenvalues are the Rayleigh quotients of the vectors, so v^T S v = lambda holds whether or not a filter has
    converged. The residuals come from products with the vectors, or with basis vectors that they combine, and include
    rounding errors. The interval lambda +- residual contains an eigenvalue of S.

    That this is the extreme eigenvalue is what the widths certify: the extreme eigenvalues of S lie in `interval_min`
    and `interval_max`, unless the random start vector was unlucky, which has a probability of at most `delta`.
    """

    lambda_min: Tensor  # (M,)
    v_min: Tensor  # (M, D), unit vectors
    lambda_max: Tensor  # (M,)
    v_max: Tensor  # (M, D), unit vectors
    residual_min: Tensor  # (M,), |S v_min - lambda_min v_min|
    residual_max: Tensor  # (M,), |S v_max - lambda_max v_max|
    converged: Tensor  # (M,), bool: residuals and certified widths are at most tol times the spectral radius
    iterations: Tensor  # (M,), int64: solver steps until the filter had converged, or until the solver stopped
    matvecs: Tensor  # (M,), int64: products S v spent on the filter
    layer: LayerShape | None = None  # of the filters' layer, if `capture` knows it
    width_min: Tensor | None = None  # (M,), how far below lambda_min the smallest eigenvalue may lie; None: unknown
    width_max: Tensor | None = None  # (M,), how far above lambda_max the largest eigenvalue may lie; None: unknown
    status: Tensor | None = None  # (M,), int8, a `Status` for each filter: why the solver stopped; None: unknown

    @property
    def interval_min(self) -> Tensor:
        """The certified interval of the smallest eigenvalue of each filter, (M, 2)."""
        return torch.stack([self.lambda_min - _known("width_min", self.width_min), self.lambda_min], -1)

    @property
    def interval_max(self) -> Tensor:
        """The certified interval of the largest eigenvalue of each filter, (M, 2)."""
        return torch.stack([self.lambda_max, self.lambda_max + _known("width_max", self.width_max)], -1)

    def reasons(self) -> dict[str, int]:
        """Return for how many filters the solver stopped for each reason: {"converged": 30, "steps": 2}."""
        status = _known("status", self.status)
        counts = torch.bincount(status.long(), minlength=len(Status)).tolist()
        return {reason.name.lower(): counts[reason] for reason in Status if counts[reason]}

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


def _known(name: str, value: Tensor | None) -> Tensor:
    if value is None:
        raise ValueError(f"{name} is not known: no solver made this spectrum")
    return value


@dataclass(frozen=True)
class Found:
    """The vectors that a solver found for the filters of one operator, before their residuals are computed."""

    v_min: Tensor  # (M, D)
    v_max: Tensor  # (M, D)
    iterations: Tensor  # (M,)
    matvecs: Tensor  # (M,)


def measure(operators: Sequence[SplittingOperator], found: Sequence[Found], backend: str) -> list[Pairs]:
    """Return the eigenpairs that belong to the vectors found; costs two more products with each operator."""
    vectors = [unit_vectors(ends) for ends in found]
    products = matvec_all(operators, vectors, backend)
    return [
        measured(V, SV, ends.iterations, ends.matvecs + 2) for V, SV, ends in zip(vectors, products, found, strict=True)
    ]


def measured(V: Tensor, SV: Tensor, iterations: Tensor, matvecs: Tensor) -> Pairs:
    """Return the eigenpairs that belong to vectors V and their products SV, both (2, M, D)."""
    values = (V * SV).sum(-1)
    errors = safe_norm(SV - values.unsqueeze(-1) * V)
    return Pairs(V, values, errors, torch.zeros_like(errors), torch.zeros_like(errors[0]), iterations, matvecs)


def unit_vectors(found: Found) -> Tensor:  # (2, M, D)
    """Return the vectors found, with unit length and comparable signs: the largest entry is positive."""
    V = torch.nn.functional.normalize(torch.stack([found.v_min, found.v_max]), dim=-1)
    largest = V.gather(-1, V.abs().argmax(-1, keepdim=True))
    return torch.where(largest < 0, -V, V)


@dataclass(frozen=True)
class Pairs:
    """Eigenpairs before they are judged: both ends of M filters, the smaller first, without rounding errors."""

    V: Tensor  # (2, M, D)
    values: Tensor  # (2, M)
    errors: Tensor  # (2, M), |S v - lambda v|
    widths: Tensor  # (2, M), how far beyond each value the extreme eigenvalue may lie
    noise: Tensor  # (M,), rounding errors of the solver, beyond those of products
    iterations: Tensor  # (M,)
    matvecs: Tensor  # (M,)
