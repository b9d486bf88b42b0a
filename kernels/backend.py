"""What the Triton backend can do, under the names and with the arguments of `s3d_fast.reference`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from s3d_fast import checks, reference
from s3d_fast.activations import Activation
from s3d_fast.incoming import Incoming
from s3d_fast.kernels import curvature, edgeconv, grouped, krylov, pointwise, pointwise_wide, surgery, tridiagonal
from s3d_fast.reference import Growth

__all__ = [
    "curvature_coefficients",
    "edgeconv_matvec",
    "grow_weights",
    "krylov_extend",
    "splitting_matvec",
    "splitting_matvec_grouped",
    "tridiagonal_extremes",
]

tridiagonal_extremes = tridiagonal.tridiagonal_extremes


def splitting_matvec(X: Tensor, C: Tensor, V: Tensor, bias: bool) -> Tensor:
    """Return S v of one layer."""
    family = pointwise if X.shape[1] <= pointwise.WIDEST else pointwise_wide
    return family.splitting_matvec(X, C, V, bias)


def splitting_matvec_grouped(
    X: Sequence[Tensor], C: Sequence[Tensor], V: Sequence[Tensor], bias: Sequence[bool]
) -> list[Tensor]:
    """Return S v of many layers."""
    return grouped.splitting_matvec_grouped([grouped.Layer(*layer) for layer in zip(X, C, V, bias, strict=True)])


def edgeconv_matvec(X: Tensor, incoming: Incoming, C: Tensor, V: Tensor, bias: bool) -> Tensor:
    """Return S v of an EdgeConv layer, whose winners come sorted."""
    return edgeconv.edgeconv_matvec(X, incoming, C, V, bias)


def knows(activation: Activation) -> bool:
    """Return whether there is a kernel for this activation."""
    return activation.formula is not None and len(activation.kinks) <= curvature.MOST_KINKS


def curvature_coefficients(
    g: Tensor, z: Tensor, activation: Activation, scale: Tensor | None, axis: int, inplace: bool
) -> Tensor:
    """Return C; `inplace` writes it over g."""
    if not inplace:
        return curvature.curvature_coefficients(g, z, activation, scale, axis)
    if g.is_contiguous():
        return curvature.curvature_coefficients(g, z, activation, scale, axis, out=g)
    return g.copy_(curvature.curvature_coefficients(g, z, activation, scale, axis))


def grow_weights(growths: Sequence[Growth]) -> list[Tensor]:
    """Return weights after splits; all shapes and indices are looked at before anything is computed."""
    for growth in growths:
        _check_shapes(growth)
    _check_indices(growths)
    return [surgery.grow_weight(growth) for growth in growths]


def _check_shapes(growth: Growth) -> None:
    weight, rows = growth.weight, growth.rows
    checks.has_shape("rows", rows, ("M'",))
    if growth.row_scale is not None:
        checks.has_shape("row_scale", growth.row_scale, (len(rows),))
    if growth.shift_rows is not None:
        checks.has_shape("shift_rows", growth.shift_rows, (len(rows),))
    if growth.shift is not None:
        shifted = "R" if growth.shift_rows is not None else len(rows)
        checks.has_shape("shift", growth.shift, (shifted, *weight.shape[1:]))
    if growth.columns is None and growth.column_scale is None:
        return
    if weight.dim() < 2:
        raise ValueError(f"weight must have columns to repeat or scale, got shape {tuple(weight.shape)}")
    columns = weight.shape[1]
    if growth.columns is not None:
        checks.has_shape("columns", growth.columns, ("I'",))
        columns = len(growth.columns)
    if growth.column_scale is not None:
        checks.has_shape("column_scale", growth.column_scale, (columns,))


def _check_indices(growths: Sequence[Growth]) -> None:
    names, outside = [], []
    for growth in growths:
        old_rows = len(growth.weight)
        ranges = {"rows": (growth.rows, 0, old_rows)}
        if growth.shift is not None and growth.shift_rows is not None:
            ranges["shift_rows"] = (growth.shift_rows, -1, len(growth.shift))
        if growth.columns is not None:
            ranges["columns"] = (growth.columns, 0, growth.weight.shape[1])
        for name, (index, low, high) in ranges.items():
            names.append(f"{name} must lie in [{low}, {high})")
            outside.append(((index < low) | (index >= high)).any())
    # One transfer for all of them.
    for name, is_outside in zip(names, torch.stack(outside).tolist() if outside else [], strict=True):
        if is_outside:
            raise IndexError(name)


def krylov_extend(
    basis: Tensor,
    product: Tensor,
    alpha: Tensor,
    beta: Tensor,
    length: Tensor,
    scale: Tensor,
    step: int,
    q: Tensor,
) -> None:
    """Take one Lanczos step in every space of a basis; the next basis vectors go to q too."""
    state = (alpha, beta, length, scale)
    is_dense = all(tensor.is_contiguous() for tensor in (basis, q, *state)) and alpha.shape == beta.shape
    if is_dense and basis.shape[2] * basis.itemsize <= krylov.WIDEST * torch.float32.itemsize:
        krylov.krylov_extend(basis, product, *state, step, q)
    else:
        reference.krylov_extend(basis, product, *state, step)
        q.copy_(basis[:, step + 1])
