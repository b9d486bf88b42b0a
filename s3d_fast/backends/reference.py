"""The reference backend: plain PyTorch, on any device; its results can be differentiated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from s3d_fast.backends.interface import Backend
from s3d_fast.base.dtypes import compute_dtype
from s3d_fast.maths import reference
from s3d_fast.maths.activations import Activation
from s3d_fast.maths.incoming import Incoming
from s3d_fast.maths.reference import ConvGeometry, DepthwiseStage, EdgeTies, KrylovState, PoolTies, Widening


class ReferenceBackend(Backend):
    """Every operation by its definition."""

    name = "reference"

    def why_not_dtype(self, dtype: torch.dtype) -> str:
        return ""

    def why_not_activation(self, activation: Activation) -> str:
        return ""

    def splitting_matvec(self, *, X: Tensor, C: Tensor, V: Tensor, bias: bool) -> Tensor:
        return reference.splitting_matvec(X, C, V, bias)

    def splitting_matvec_grouped(
        self, *, X: Sequence[Tensor], C: Sequence[Tensor], V: Sequence[Tensor], bias: Sequence[bool]
    ) -> list[Tensor]:
        return [reference.splitting_matvec(*layer) for layer in zip(X, C, V, bias, strict=True)]

    def gated_matvec(self, *, X: Tensor, c11: Tensor, c12: Tensor, c22: Tensor | None, V: Tensor, bias: bool) -> Tensor:
        return reference.gated_matvec(X, c11, c12, c22, V, bias)

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
        return reference.depthwise_matvec(X, C, d, weight, stages, V, bias)

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
        return [reference.depthwise_matvec(*layer) for layer in zip(X, C, d, weight, stages, V, bias, strict=True)]

    def depthwise_row_norms(self, *, X: Tensor, d: Tensor, weight: Tensor, stage: DepthwiseStage, bias: bool) -> Tensor:
        return reference.depthwise_row_norms(X, d, weight, stage, bias, compute_dtype(X.dtype))

    def splitting_matrices(self, *, X: Tensor, C: Tensor, bias: bool) -> Tensor:
        return reference.splitting_matrices(X, C, bias, compute_dtype(X.dtype))

    def add_splitting_matrices(self, *, S: Tensor, X: Tensor, C: Tensor, bias: bool, weight: float) -> None:
        S.add_(self.splitting_matrices(X=X, C=C, bias=bias), alpha=weight)

    def conv_matvec(self, *, X: Tensor, C: Tensor, V: Tensor, geometry: ConvGeometry, bias: bool) -> Tensor:
        return reference.conv_matvec(X, C, V, *geometry, bias)

    def tied_matvec(
        self, *, X: Tensor, C: Tensor, V: Tensor, ties: PoolTies, geometry: ConvGeometry, bias: bool
    ) -> Tensor:
        return reference.tied_matvec(X, C, V, ties, *geometry, bias)

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
        return reference.edgeconv_matvec(X, winner, C, V, bias, ties)

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
        C = reference.curvature_coefficients(g, z, activation, scale, axis, row_norm, bandwidth)
        return g.copy_(C) if inplace else C

    def activation_slopes(self, *, z: Tensor, activation: Activation, scale: Tensor | None, axis: int) -> Tensor:
        return reference.activation_slopes(z, activation, scale, axis)

    def grow_weights(self, widenings: Sequence[Widening]) -> list[Tensor]:
        return [reference.grow_weight(*widening) for widening in widenings]

    def krylov_extend(self, state: KrylovState, product: Tensor, step: int) -> None:
        reference.krylov_extend(state, product, step)

    def krylov_extend_grouped(
        self, *, states: Sequence[KrylovState], products: Sequence[Tensor], step: int, taken: Tensor
    ) -> None:
        for state, product in zip(states, products, strict=True):
            self.krylov_extend(state, product, step)
        taken.add_(1)

    def joint_matvec(self, *, X: Sequence[Tensor], C: Sequence[Tensor], V: Tensor, bias: Sequence[bool]) -> Tensor:
        return reference.joint_matvec(X, C, V, bias)

    def gather_patches(
        self, *, maps: Tensor, places: Tensor, kernel: tuple[int, int], dilation: tuple[int, int]
    ) -> Tensor:
        return reference.gather_patches(maps, places, kernel, dilation)

    def top_two(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return reference.top_two(values)

    def tridiagonal_extremes(self, *, alpha: Tensor, beta: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        return reference.tridiagonal_extremes(alpha, beta, length)

    def certified_widths(
        self, *, alpha: Tensor, beta: Tensor, length: Tensor, values: Tensor, growth: Tensor
    ) -> Tensor:
        return reference.certified_widths(alpha, beta, length, values, growth)

    def symmetric_extremes(self, S: Tensor) -> tuple[Tensor, Tensor]:
        return reference.symmetric_extremes(S)


REFERENCE = ReferenceBackend()
