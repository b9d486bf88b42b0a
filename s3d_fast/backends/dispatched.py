"""A backend by the operators torch.ops.s3d_fast.*: PyTorch finds the kernels for the device of the tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from s3d_fast.backends.derivatives import asks_for_derivatives
from s3d_fast.backends.interface import Backend
from s3d_fast.backends.reference import REFERENCE
from s3d_fast.base.dtypes import COMPUTE_DTYPES
from s3d_fast.maths import reference
from s3d_fast.maths.activations import Activation
from s3d_fast.maths.incoming import Incoming
from s3d_fast.maths.reference import ConvGeometry, DepthwiseStage, EdgeTies, KrylovState, PoolTies, Widening

# The formulas of act'' in the operators, in the order of the enumeration `Curvature` of csrc/kernels.h.
FORMULAS = ("none", "silu", "gelu", "gelu_tanh", "softplus", "tanh", "sigmoid", "elu", "hardswish", "gaussian")


class DispatchedBackend(Backend):
    """All operations by operators; convolutions are PyTorch's own."""

    def rounds(self) -> bool:
        """Return whether products may round all their factors to bfloat16."""
        raise NotImplementedError

    def why_not_dtype(self, dtype: torch.dtype) -> str:
        return "" if dtype in COMPUTE_DTYPES else f"it does not support {dtype}"

    def why_not_activation(self, activation: Activation) -> str:
        return "" if activation.formula is not None else f"it has no formula for {activation.name!r}"

    def splitting_matvec(self, *, X: Tensor, C: Tensor, V: Tensor, bias: bool) -> Tensor:
        return call("splitting_matvec", X, C, V, bias, self.rounds())

    def splitting_matvec_grouped(
        self, *, X: Sequence[Tensor], C: Sequence[Tensor], V: Sequence[Tensor], bias: Sequence[bool]
    ) -> list[Tensor]:
        # Without tensors, the dispatcher cannot choose an operator.
        return call("splitting_matvec_grouped", X, C, V, bias, self.rounds()) if X else []

    def gated_matvec(self, *, X: Tensor, c11: Tensor, c12: Tensor, c22: Tensor | None, V: Tensor, bias: bool) -> Tensor:
        return call("gated_matvec", X, c11, c12, c22, V, bias)

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
        (result,) = self.depthwise_matvec_grouped(
            X=[X], C=[C], d=[d], weight=[weight], stages=[stages], V=[V], bias=[bias]
        )
        return result

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
        if not X:
            return []
        counts = [len(own) for own in stages]
        geometry = [number for own in stages for stage in own for number in _numbers(stage)]
        flat = [list(itertools.chain.from_iterable(of_layers)) for of_layers in (C, d, weight)]
        return call("depthwise_matvec_grouped", X, *flat, counts, geometry, V, bias)

    def depthwise_row_norms(self, *, X: Tensor, d: Tensor, weight: Tensor, stage: DepthwiseStage, bias: bool) -> Tensor:
        return call("depthwise_row_norms", X, d, weight, _numbers(stage), bias)

    def splitting_matrices(self, *, X: Tensor, C: Tensor, bias: bool) -> Tensor:
        return call("splitting_matrices", X, C, bias)

    def add_splitting_matrices(self, *, S: Tensor, X: Tensor, C: Tensor, bias: bool, weight: float) -> None:
        if S.is_contiguous():
            call("add_splitting_matrices", S, X, C, bias, weight)
        else:
            S.add_(self.splitting_matrices(X=X, C=C, bias=bias), alpha=weight)

    def conv_matvec(self, *, X: Tensor, C: Tensor, V: Tensor, geometry: ConvGeometry, bias: bool) -> Tensor:
        return REFERENCE.conv_matvec(X=X, C=C, V=V, geometry=geometry, bias=bias)

    def tied_matvec(
        self, *, X: Tensor, C: Tensor, V: Tensor, ties: PoolTies, geometry: ConvGeometry, bias: bool
    ) -> Tensor:
        def between(P: Tensor) -> Tensor:
            return call("tied_maps", P, C, *ties)

        return reference.conv_product(X, V, *geometry, bias, between)

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
        of_ties = (None,) * 4 if ties is None else ties[:4]
        of_runners = None if ties is None else ties.incoming
        edges = [None if own is None else list(own) for own in (incoming, of_runners)]
        return call("edgeconv_matvec", X, winner, C, V, bias, *of_ties, *edges)

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
        last = g.dim() - 1
        if axis != last and not g.is_contiguous():
            # Channels that are innermost in memory become the last dimension, without a copy.
            g_last, z_last = g.movedim(axis, -1), z.movedim(axis, -1)
            if g_last.is_contiguous() and z_last.is_contiguous():
                norm = row_norm if row_norm is None or row_norm.dim() == 1 else row_norm.movedim(axis, -1)
                C = self.curvature_coefficients(
                    g=g_last, z=z_last, activation=activation, scale=scale, axis=last, inplace=inplace,
                    row_norm=norm, bandwidth=bandwidth,
                )  # fmt: skip
                return g if inplace else C.movedim(-1, axis)
        settings = (scale, axis, *_formula(activation), activation.sharpness, row_norm, bandwidth)
        if inplace and g.is_contiguous():
            call("curvature_coefficients_", g, z, *settings)
            return g
        C = call("curvature_coefficients", g, z, *settings)
        return g.copy_(C) if inplace else C

    def activation_slopes(self, *, z: Tensor, activation: Activation, scale: Tensor | None, axis: int) -> Tensor:
        if activation.formula is not None and activation.formula.name == "gelu":
            # The operator has no error function.
            return REFERENCE.activation_slopes(z=z, activation=activation, scale=scale, axis=axis)
        return call("activation_slopes", z, scale, axis, *_formula(activation))

    def grow_weights(self, widenings: Sequence[Widening]) -> list[Tensor]:
        return call("grow_weights", *map(list, zip(*widenings, strict=True))) if widenings else []

    def krylov_extend(self, state: KrylovState, product: Tensor, step: int) -> None:
        call("krylov_extend", state.basis, product, state.alpha, state.beta, state.length, state.scale, step)
        state.q.copy_(state.basis[:, step + 1])

    def krylov_extend_grouped(
        self, *, states: Sequence[KrylovState], products: Sequence[Tensor], step: int, taken: Tensor
    ) -> None:
        for state, product in zip(states, products, strict=True):
            self.krylov_extend(state, product, step)
        taken.add_(1)

    def joint_matvec(self, *, X: Sequence[Tensor], C: Sequence[Tensor], V: Tensor, bias: Sequence[bool]) -> Tensor:
        return call("joint_matvec", list(X), list(C), V, list(bias), self.rounds())

    def gather_patches(
        self, *, maps: Tensor, places: Tensor, kernel: tuple[int, int], dilation: tuple[int, int]
    ) -> Tensor:
        return call("gather_patches", maps, places, list(kernel), list(dilation))

    def top_two(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return call("top_two", values)

    def tridiagonal_extremes(self, *, alpha: Tensor, beta: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        return call("tridiagonal_extremes", alpha, beta, length)

    def certified_widths(
        self, *, alpha: Tensor, beta: Tensor, length: Tensor, values: Tensor, growth: Tensor
    ) -> Tensor:
        return call("certified_widths", alpha, beta, length, values, growth)

    def symmetric_extremes(self, S: Tensor) -> tuple[Tensor, Tensor]:
        return call("symmetric_extremes", S)


def _formula(activation: Activation) -> tuple[int, float, float, list[float], list[float]]:
    """Return an activation as the operators take it."""
    formula = activation.formula
    assert formula is not None
    at, jump = [float(kink.at) for kink in activation.kinks], [float(kink.jump) for kink in activation.kinks]
    return FORMULAS.index(formula.name), formula.a, formula.b, at, jump


def call(name: str, *arguments: Any) -> Any:
    """Call an operator; where nothing asks for a derivative, without its autograd kernel, which takes 5 us."""
    operator = getattr(torch.ops.s3d_fast, name)
    if torch.compiler.is_compiling() or asks_for_derivatives(arguments):
        return operator(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def _numbers(stage: DepthwiseStage) -> list[int]:
    """Return a geometry as the operators take it."""
    return [*stage.stride, *stage.padding, *stage.dilation]
