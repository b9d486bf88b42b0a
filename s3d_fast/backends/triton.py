"""The Triton backend. Importing this module imports Triton, so `choice` imports it only at the first use."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from s3d_fast.backends.interface import Backend
from s3d_fast.backends.reference import REFERENCE
from s3d_fast.base import require
from s3d_fast.base.dtypes import compute_dtype
from s3d_fast.kernels import (
    aligned,
    curvature,
    dense,
    depthwise,
    edgeconv,
    gated,
    grouped,
    krylov,
    pointwise,
    pointwise_wide,
    products,
    surgery,
    tridiagonal,
)
from s3d_fast.kernels.options import exact_products, why_not_activation
from s3d_fast.maths.activations import Activation
from s3d_fast.maths.incoming import Incoming, incoming_edges
from s3d_fast.maths.reference import ConvGeometry, DepthwiseStage, EdgeTies, KrylovState, PoolTies, Widening


class TritonBackend(Backend):
    """Kernels for NVIDIA and AMD.

    Dense matrices and their eigenproblems, convolutions and channels of several layers use PyTorch, whose products are
    then IEEE: see `exact_products`.
    """

    name = "triton"
    uses_incoming = True

    def why_not_dtype(self, dtype: torch.dtype) -> str:
        return ""

    def why_not_activation(self, activation: Activation) -> str:
        return why_not_activation(activation)

    def prepared_bytes(self, X: Tensor, is_multiplied: bool) -> int:
        return aligned.prepared_bytes(products.current_form(X), X, is_multiplied)

    def prepared(self, X: Tensor, is_multiplied: bool) -> Tensor:
        return aligned.prepared(products.current_form(X), X, is_multiplied)

    def splitting_matvec(self, *, X: Tensor, C: Tensor, V: Tensor, bias: bool) -> Tensor:
        if X.shape[1] == 0:
            # The kernels' products need at least one column.
            return REFERENCE.splitting_matvec(X=X, C=C, V=V, bias=bias)
        family = pointwise if pointwise.supports(X) else pointwise_wide
        return family.splitting_matvec(X=X, C=C, V=V, bias=bias)

    def splitting_matvec_grouped(
        self, *, X: Sequence[Tensor], C: Sequence[Tensor], V: Sequence[Tensor], bias: Sequence[bool]
    ) -> list[Tensor]:
        layers = [grouped.Member(*layer) for layer in zip(X, C, V, bias, strict=True)]
        found = iter(grouped.splitting_matvec_grouped([layer for layer in layers if layer.X.shape[1] > 0]))
        return [next(found) if layer.X.shape[1] > 0 else self.splitting_matvec(**layer._asdict()) for layer in layers]

    def gated_matvec(self, *, X: Tensor, c11: Tensor, c12: Tensor, c22: Tensor | None, V: Tensor, bias: bool) -> Tensor:
        if X.shape[1] == 0:
            return REFERENCE.gated_matvec(X=X, c11=c11, c12=c12, c22=c22, V=V, bias=bias)
        return gated.gated_matvec(X=X, c11=c11, c12=c12, c22=c22, V=V, bias=bias)

    def depthwise_matvec(
        self,
        *,
        X: Tensor,
        C: Sequence[Tensor],
        d: Sequence[Tensor],
        weight: Sequence[Tensor],
        stages: Sequence[DepthwiseStage],
        V: Tensor,
        bias: bool,
    ) -> Tensor:
        if not depthwise.supports(X, C):
            with exact_products():
                return REFERENCE.depthwise_matvec(X=X, C=C, d=d, weight=weight, stages=stages, V=V, bias=bias)
        return depthwise.depthwise_matvec(X=X, C=C, d=d, weight=weight, stages=stages, V=V, bias=bias)

    def depthwise_matvec_grouped(
        self,
        *,
        X: Sequence[Tensor],
        C: Sequence[Sequence[Tensor]],
        d: Sequence[Sequence[Tensor]],
        weight: Sequence[Sequence[Tensor]],
        stages: Sequence[Sequence[DepthwiseStage]],
        V: Sequence[Tensor],
        bias: Sequence[bool],
    ) -> list[Tensor]:
        layers = zip(X, C, d, weight, stages, V, bias, strict=True)
        names = ("X", "C", "d", "weight", "stages", "V", "bias")
        return [self.depthwise_matvec(**dict(zip(names, layer, strict=True))) for layer in layers]

    @exact_products()
    def depthwise_row_norms(self, *, X: Tensor, d: Tensor, weight: Tensor, stage: DepthwiseStage, bias: bool) -> Tensor:
        return REFERENCE.depthwise_row_norms(X=X, d=d, weight=weight, stage=stage, bias=bias)

    @exact_products()
    def splitting_matrices(self, *, X: Tensor, C: Tensor, bias: bool) -> Tensor:
        return dense.splitting_matrices(X=X, C=C, bias=bias, dtype=compute_dtype(X.dtype))

    def add_splitting_matrices(self, *, S: Tensor, X: Tensor, C: Tensor, bias: bool, weight: float) -> None:
        S.add_(self.splitting_matrices(X=X, C=C, bias=bias), alpha=weight)

    @exact_products()
    def conv_matvec(self, *, X: Tensor, C: Tensor, V: Tensor, geometry: ConvGeometry, bias: bool) -> Tensor:
        return REFERENCE.conv_matvec(X=X, C=C, V=V, geometry=geometry, bias=bias)

    @exact_products()
    def tied_matvec(
        self, *, X: Tensor, C: Tensor, V: Tensor, ties: PoolTies, geometry: ConvGeometry, bias: bool
    ) -> Tensor:
        return REFERENCE.tied_matvec(X=X, C=C, V=V, ties=ties, geometry=geometry, bias=bias)

    def edgeconv_matvec(
        self,
        *,
        X: Tensor,
        winner: Tensor,
        C: Tensor,
        V: Tensor,
        bias: bool,
        incoming: Incoming | None,
        ties: EdgeTies | None,
    ) -> Tensor:
        if X.shape[2] == 0:
            # The kernels' products need at least one feature.
            return REFERENCE.edgeconv_matvec(X=X, winner=winner, C=C, V=V, bias=bias, incoming=incoming, ties=ties)
        edges = incoming or incoming_edges(winner)
        if ties is not None and ties.incoming is None:
            ties = ties._replace(incoming=incoming_edges(ties.runner))
        return edgeconv.edgeconv_matvec(X=X, incoming=edges, C=C, V=V, bias=bias, ties=ties)

    def curvature_coefficients(
        self,
        *,
        g: Tensor,
        z: Tensor,
        activation: Activation,
        scale: Tensor | None,
        axis: int,
        inplace: bool,
        row_norm: Tensor | None = None,
        bandwidth: Tensor | None = None,
    ) -> Tensor:
        if row_norm is not None and row_norm.dim() > 1:
            # The kernel takes one norm for each row.
            return REFERENCE.curvature_coefficients(
                g=g, z=z, activation=activation, scale=scale, axis=axis, inplace=inplace, row_norm=row_norm,
                bandwidth=bandwidth,
            )  # fmt: skip
        out = g if inplace and g.is_contiguous() else None
        C = curvature.curvature_coefficients(
            g=g, z=z, activation=activation, scale=scale, axis=axis, out=out, row_norm=row_norm, bandwidth=bandwidth
        )
        return g.copy_(C) if inplace and out is None else C

    def activation_slopes(self, *, z: Tensor, activation: Activation, scale: Tensor | None, axis: int) -> Tensor:
        return REFERENCE.activation_slopes(z=z, activation=activation, scale=scale, axis=axis)

    def grow_weights(self, widenings: Sequence[Widening]) -> list[Tensor]:
        for widening in widenings:
            _require_shapes(widening)
        _require_indices(widenings)
        return [surgery.grow_weight(widening) for widening in widenings]

    def krylov_extend(self, state: KrylovState, product: Tensor, step: int) -> None:
        taken = torch.full((), step, dtype=torch.int64, device=product.device)
        self.krylov_extend_grouped(states=[state], products=[product], step=step, taken=taken)

    def krylov_extend_grouped(
        self, *, states: Sequence[KrylovState], products: Sequence[Tensor], step: int, taken: Tensor
    ) -> None:
        _require_room(states, step)
        pairs = list(zip(states, products, strict=True))
        together = [(state, product) for state, product in pairs if krylov.supports(state)]
        if len(together) < len(pairs) and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("vectors too long for the kernel are orthogonalized with the step's number on the host")
        for state, product in pairs:
            if not krylov.supports(state):
                REFERENCE.krylov_extend(state, product, step)
        if together:
            own, given = zip(*together, strict=True)
            krylov.krylov_extend(own, products=given, taken=taken)
        taken.add_(1)

    @exact_products()
    def joint_matvec(self, *, X: Sequence[Tensor], C: Sequence[Tensor], V: Tensor, bias: Sequence[bool]) -> Tensor:
        return REFERENCE.joint_matvec(X=X, C=C, V=V, bias=bias)

    def gather_patches(
        self, *, maps: Tensor, places: Tensor, kernel: tuple[int, int], dilation: tuple[int, int]
    ) -> Tensor:
        return REFERENCE.gather_patches(maps=maps, places=places, kernel=kernel, dilation=dilation)

    def top_two(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return REFERENCE.top_two(values)

    def tridiagonal_extremes(self, *, alpha: Tensor, beta: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        return tridiagonal.tridiagonal_extremes(alpha=alpha, beta=beta, length=length)

    def certified_widths(
        self, *, alpha: Tensor, beta: Tensor, length: Tensor, values: Tensor, growth: Tensor
    ) -> Tensor:
        return tridiagonal.certified_widths(alpha=alpha, beta=beta, length=length, values=values, growth=growth)

    def symmetric_extremes(self, S: Tensor) -> tuple[Tensor, Tensor]:
        return REFERENCE.symmetric_extremes(S)


TRITON = TritonBackend()


def _require_room(states: Sequence[KrylovState], step: int) -> None:
    """Check what the kernel does not: a step writes the next vector, and layers share the rows of alpha and beta."""
    for state in states:
        capacity = state.basis.shape[1]
        if not 0 <= step < capacity - 1:
            raise IndexError(f"step must lie in [0, {capacity - 1}), as the basis holds {capacity} vectors; got {step}")
        if state.alpha.shape[1] <= step or state.alpha.shape != state.beta.shape:
            raise IndexError(
                f"alpha and beta must have an entry {step} for every filter, got shapes {tuple(state.alpha.shape)} and "
                f"{tuple(state.beta.shape)}"
            )


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
