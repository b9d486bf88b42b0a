"""The Triton backend. Importing this module imports Triton, so `choice` imports it only at the first use."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from s3d_fast.backends.interface import Backend
from s3d_fast.backends.reference import REFERENCE
from s3d_fast.base import require
from s3d_fast.kernels import curvature, edgeconv, grouped, krylov, pointwise, pointwise_wide, surgery, tridiagonal
from s3d_fast.maths.activations import Activation
from s3d_fast.maths.incoming import Incoming, incoming_edges
from s3d_fast.maths.reference import ConvGeometry, Widening


class TritonBackend(Backend):
    """Kernels for NVIDIA and AMD. Dense matrices, convolutions and dense eigenproblems are PyTorch's own."""

    name = "triton"
    uses_incoming = True

    def why_not_dtype(self, dtype: torch.dtype) -> str:
        return ""

    def why_not_activation(self, activation: Activation) -> str:
        known = activation.formula is not None and len(activation.kinks) <= curvature.MOST_KINKS
        return "" if known else f"it has no formula for {activation.name!r}"

    def splitting_matvec(self, X: Tensor, C: Tensor, V: Tensor, bias: bool) -> Tensor:
        family = pointwise.splitting_matvec if X.shape[1] <= pointwise.WIDEST else pointwise_wide.splitting_matvec
        return family(X, C, V, bias)

    def splitting_matvec_grouped(
        self, X: Sequence[Tensor], C: Sequence[Tensor], V: Sequence[Tensor], bias: Sequence[bool]
    ) -> list[Tensor]:
        return grouped.splitting_matvec_grouped([grouped.Member(*layer) for layer in zip(X, C, V, bias, strict=True)])

    def splitting_matrices(self, X: Tensor, C: Tensor, bias: bool) -> Tensor:
        return REFERENCE.splitting_matrices(X, C, bias)

    def add_splitting_matrices(self, S: Tensor, X: Tensor, C: Tensor, bias: bool, weight: float) -> None:
        REFERENCE.add_splitting_matrices(S, X, C, bias, weight)

    def conv_matvec(self, X: Tensor, C: Tensor, V: Tensor, geometry: ConvGeometry, bias: bool) -> Tensor:
        return REFERENCE.conv_matvec(X, C, V, geometry, bias)

    def edgeconv_matvec(
        self, X: Tensor, winner: Tensor, C: Tensor, V: Tensor, bias: bool, incoming: Incoming | None
    ) -> Tensor:
        return edgeconv.edgeconv_matvec(X, incoming or incoming_edges(winner), C, V, bias)

    def curvature_coefficients(
        self, g: Tensor, z: Tensor, activation: Activation, scale: Tensor | None, axis: int, inplace: bool
    ) -> Tensor:
        if not inplace:
            return curvature.curvature_coefficients(g, z, activation, scale, axis)
        if g.is_contiguous():
            return curvature.curvature_coefficients(g, z, activation, scale, axis, out=g)
        return g.copy_(curvature.curvature_coefficients(g, z, activation, scale, axis))

    def grow_weights(self, widenings: Sequence[Widening]) -> list[Tensor]:
        for widening in widenings:
            _require_shapes(widening)
        _require_indices(widenings)
        return [surgery.grow_weight(widening) for widening in widenings]

    def krylov_extend(
        self,
        basis: Tensor,
        product: Tensor,
        alpha: Tensor,
        beta: Tensor,
        length: Tensor,
        scale: Tensor,
        step: int,
        q: Tensor,
    ) -> None:
        state = (alpha, beta, length, scale)
        is_dense = all(tensor.is_contiguous() for tensor in (basis, q, *state)) and alpha.shape == beta.shape
        if is_dense and basis.shape[2] * basis.itemsize <= krylov.WIDEST * torch.float32.itemsize:
            krylov.krylov_extend(basis, product, *state, step, q)
        else:
            REFERENCE.krylov_extend(basis, product, *state, step, q)

    def tridiagonal_extremes(self, alpha: Tensor, beta: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        return tridiagonal.tridiagonal_extremes(alpha, beta, length)

    def symmetric_extremes(self, S: Tensor) -> tuple[Tensor, Tensor]:
        return REFERENCE.symmetric_extremes(S)


TRITON = TritonBackend()


def _require_shapes(widening: Widening) -> None:
    weight, rows = widening.weight, widening.rows
    require.shape("rows", rows, ("M'",))
    if widening.row_scale is not None:
        require.shape("row_scale", widening.row_scale, (len(rows),))
    if widening.shift_rows is not None:
        require.shape("shift_rows", widening.shift_rows, (len(rows),))
    if widening.shift is not None:
        shifted = "R" if widening.shift_rows is not None else len(rows)
        require.shape("shift", widening.shift, (shifted, *weight.shape[1:]))
    if widening.columns is None and widening.column_scale is None:
        return
    if weight.dim() < 2:
        raise ValueError(f"weight must have columns to repeat or scale, got shape {tuple(weight.shape)}")
    columns = weight.shape[1]
    if widening.columns is not None:
        require.shape("columns", widening.columns, ("I'",))
        columns = len(widening.columns)
    if widening.column_scale is not None:
        require.shape("column_scale", widening.column_scale, (columns,))


def _require_indices(widenings: Sequence[Widening]) -> None:
    names, outside = [], []
    for widening in widenings:
        old_rows = len(widening.weight)
        ranges = {"rows": (widening.rows, 0, old_rows)}
        if widening.shift is not None and widening.shift_rows is not None:
            ranges["shift_rows"] = (widening.shift_rows, -1, len(widening.shift))
        if widening.columns is not None:
            ranges["columns"] = (widening.columns, 0, widening.weight.shape[1])
        for name, (index, low, high) in ranges.items():
            names.append(f"{name} must lie in [{low}, {high})")
            outside.append(((index < low) | (index >= high)).any())
    # One transfer from the device for all checks.
    for name, is_outside in zip(names, torch.stack(outside).tolist() if outside else [], strict=True):
        if is_outside:
            raise IndexError(name)
