"""The operators torch.ops.s3d_fast.* by the operations of a backend: Triton on CUDA, the reference elsewhere.

On a CPU the kernels of csrc/ take precedence, where the extension is there.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from s3d_fast.backends import fakes
from s3d_fast.backends.dispatched import FORMULAS
from s3d_fast.backends.interface import Backend
from s3d_fast.backends.reference import REFERENCE
from s3d_fast.kernels.options import triton_options
from s3d_fast.maths import reference
from s3d_fast.maths.activations import Activation, Formula, Kink, from_formula
from s3d_fast.maths.incoming import Incoming
from s3d_fast.maths.reference import ConvGeometry, DepthwiseStage, EdgeTies, KrylovState, PoolTies, Widening


def register(library: torch.library.Library) -> None:
    """Give every operator its kernels for CUDA and for devices without kernels of their own."""
    for name in IMPLEMENTATIONS:
        library.impl(name, kernel(name, _for_cuda), "CUDA")
        library.impl(name, kernel(name, lambda _: REFERENCE), "CompositeExplicitAutograd")


def kernel(name: str, choose: Callable[[torch.device], Backend]) -> Callable[..., Any]:
    """Return an operator's kernel: it checks its arguments and calls the backend chosen for their device."""
    implementation, check = IMPLEMENTATIONS[name], fakes.FAKES[name]

    def call(*arguments: Any) -> Any:
        for tensor in itertools.chain.from_iterable(a if isinstance(a, list | tuple) else (a,) for a in arguments):
            if isinstance(tensor, Tensor) and tensor.layout is not torch.strided:
                raise NotImplementedError(f"s3d_fast::{name} takes strided tensors, got {tensor.layout}")
        check(*arguments)
        first = arguments[0]
        device = (first if isinstance(first, Tensor) else first[0]).device
        return implementation(choose(device), *arguments)

    return call


@cache
def _for_cuda(device: torch.device) -> Backend:
    """Return the Triton backend, or the reference where it cannot be used; that is said once."""
    from s3d_fast.backends.choice import why_not_on

    reason = why_not_on(device)
    if reason:
        warnings.warn(f"s3d_fast computes on {device} without its kernels: {reason}", stacklevel=3)
        return REFERENCE
    from s3d_fast.backends.triton import TRITON

    return TRITON


def splitting_matvec(backend: Backend, X: Tensor, C: Tensor, V: Tensor, bias: bool, rounded: bool = False) -> Tensor:
    with _rounding(rounded):
        return backend.splitting_matvec(X=X, C=C, V=V, bias=bias)


def splitting_matvec_grouped(
    backend: Backend,
    X: Sequence[Tensor],
    C: Sequence[Tensor],
    V: Sequence[Tensor],
    bias: Sequence[bool],
    rounded: bool = False,
) -> list[Tensor]:
    with _rounding(rounded):
        return backend.splitting_matvec_grouped(X=X, C=C, V=V, bias=bias)


def _rounding(rounded: bool) -> AbstractContextManager:
    return triton_options(precision="medium") if rounded else nullcontext()


def gated_matvec(
    backend: Backend, X: Tensor, c11: Tensor, c12: Tensor, c22: Tensor | None, V: Tensor, bias: bool
) -> Tensor:
    return backend.gated_matvec(X=X, c11=c11, c12=c12, c22=c22, V=V, bias=bias)


def joint_matvec(
    backend: Backend,
    X: Sequence[Tensor],
    C: Sequence[Tensor],
    V: Tensor,
    bias: Sequence[bool],
    rounded: bool = False,
) -> Tensor:
    with _rounding(rounded):
        return backend.joint_matvec(X=X, C=C, V=V, bias=bias)


def tied_rows_matvec(
    backend: Backend,
    X: Tensor,
    C: Tensor,
    V: Tensor,
    first: Tensor,
    second: Tensor,
    K: Tensor,
    d1: Tensor | None,
    d2: Tensor | None,
    bias: bool,
    rounded: bool = False,
) -> Tensor:
    # The rows of every window are a map of a 1 x 1 convolution.
    maps, coefficients = (one.reshape(len(K), -1, 1, one.shape[1]).permute(0, 3, 1, 2) for one in (X, C))
    ties, geometry = PoolTies(first, second, K, d1, d2), ConvGeometry((1, 1), (1, 1), (0, 0), (1, 1))
    with _rounding(rounded):
        return backend.tied_matvec(X=maps, C=coefficients, V=V, ties=ties, geometry=geometry, bias=bias).contiguous()


def depthwise_matvec_grouped(
    backend: Backend,
    X: Sequence[Tensor],
    C: Sequence[Tensor],
    d: Sequence[Tensor],
    weight: Sequence[Tensor],
    stages: Sequence[int],
    geometry: Sequence[int],
    V: Sequence[Tensor],
    bias: Sequence[bool],
) -> list[Tensor]:
    every = [_stage(geometry[first : first + 6]) for first in range(0, len(geometry), 6)]
    return backend.depthwise_matvec_grouped(
        X=X,
        C=_by_layer(C, [count + 1 for count in stages]),
        d=_by_layer(d, stages),
        weight=_by_layer(weight, stages),
        stages=_by_layer(every, stages),
        V=V,
        bias=bias,
    )


def _by_layer(flat: Sequence[Any], counts: Sequence[int]) -> list[Sequence[Any]]:
    lists, at = [], 0
    for count in counts:
        lists.append(flat[at : at + count])
        at += count
    return lists


def _stage(numbers: Sequence[int]) -> DepthwiseStage:
    """Return a geometry from the numbers of an operator."""
    vertical, horizontal = numbers[::2], numbers[1::2]
    return DepthwiseStage(*zip(vertical, horizontal, strict=True))


def depthwise_row_norms(
    backend: Backend, X: Tensor, d: Tensor, weight: Tensor, geometry: Sequence[int], bias: bool
) -> Tensor:
    return backend.depthwise_row_norms(X=X, d=d, weight=weight, stage=_stage(geometry), bias=bias)


def edgeconv_matvec(
    backend: Backend,
    X: Tensor,
    winner: Tensor,
    C: Tensor,
    V: Tensor,
    bias: bool,
    runner: Tensor | None = None,
    K: Tensor | None = None,
    d1: Tensor | None = None,
    d2: Tensor | None = None,
    incoming: Sequence[Tensor] | None = None,
    runner_incoming: Sequence[Tensor] | None = None,
) -> Tensor:
    edges, of_runners = (None if own is None else Incoming(*own) for own in (incoming, runner_incoming))
    ties = None if runner is None or K is None else EdgeTies(runner, K, d1, d2, of_runners)
    return backend.edgeconv_matvec(X=X, winner=winner, C=C, V=V, bias=bias, incoming=edges, ties=ties)


def tied_maps(
    backend: Backend,
    P: Tensor,
    C: Tensor,
    first: Tensor,
    second: Tensor,
    K: Tensor,
    d1: Tensor | None = None,
    d2: Tensor | None = None,
) -> Tensor:
    # No other backend has this step between two convolutions.
    T = reference.tied_maps(P, C, PoolTies(first, second, K, d1, d2))
    is_contiguous = P.is_contiguous() or P.stride(1) != 1
    return T.contiguous(memory_format=torch.contiguous_format if is_contiguous else torch.channels_last)


def splitting_matrices(backend: Backend, X: Tensor, C: Tensor, bias: bool) -> Tensor:
    return backend.splitting_matrices(X=X, C=C, bias=bias)


def add_splitting_matrices(backend: Backend, out: Tensor, X: Tensor, C: Tensor, bias: bool, weight: float) -> None:
    backend.add_splitting_matrices(S=out, X=X, C=C, bias=bias, weight=weight)


def curvature_coefficients(backend: Backend, g: Tensor, z: Tensor, *settings: Any) -> Tensor:
    return _coefficients(backend, g, z, False, *settings)


def curvature_coefficients_(backend: Backend, g: Tensor, z: Tensor, *settings: Any) -> None:
    _coefficients(backend, g, z, True, *settings)


def _coefficients(
    backend: Backend,
    g: Tensor,
    z: Tensor,
    inplace: bool,
    scale: Tensor | None,
    axis: int,
    curvature: int,
    a: float,
    b: float,
    kink_at: Sequence[float],
    kink_jump: Sequence[float],
    sharpness: float,
    row_norm: Tensor | None = None,
    bandwidth: Tensor | None = None,
) -> Tensor:
    activation = _activation(curvature, a, b, kink_at, kink_jump, sharpness)
    chosen = REFERENCE if backend.why_not_activation(activation) else backend
    C = chosen.curvature_coefficients(
        g=g, z=z, activation=activation, scale=scale, axis=axis, inplace=inplace, row_norm=row_norm,
        bandwidth=bandwidth,
    )  # fmt: skip
    return C if inplace else C.contiguous()


def activation_slopes(
    backend: Backend,
    z: Tensor,
    scale: Tensor | None,
    axis: int,
    curvature: int,
    a: float,
    b: float,
    kink_at: Sequence[float],
    kink_jump: Sequence[float],
) -> Tensor:
    activation = _activation(curvature, a, b, kink_at, kink_jump)
    return backend.activation_slopes(z=z, activation=activation, scale=scale, axis=axis).contiguous()


def _activation(
    curvature: int,
    a: float,
    b: float,
    kink_at: Sequence[float],
    kink_jump: Sequence[float],
    sharpness: float = 1.0,
) -> Activation:
    kinks = [Kink(*kink) for kink in zip(kink_at, kink_jump, strict=True)]
    return from_formula(Formula(FORMULAS[curvature], a, b), kinks, sharpness)


def grow_weights(backend: Backend, *lists: Sequence[Any]) -> list[Tensor]:
    return backend.grow_weights([Widening(*own) for own in zip(*lists, strict=True)])


def krylov_extend(
    backend: Backend,
    basis: Tensor,
    product: Tensor,
    alpha: Tensor,
    beta: Tensor,
    length: Tensor,
    scale: Tensor,
    step: int,
) -> None:
    q = basis.new_empty(basis.shape[0], basis.shape[2])
    state = KrylovState(basis=basis, q=q, alpha=alpha, beta=beta, length=length, scale=scale)
    backend.krylov_extend(state, product, step)


def symmetric_extremes(backend: Backend, S: Tensor) -> tuple[Tensor, Tensor]:
    return _contiguous(backend.symmetric_extremes(S))


def tridiagonal_extremes(backend: Backend, alpha: Tensor, beta: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    return _contiguous(backend.tridiagonal_extremes(alpha=alpha, beta=beta, length=length))


def certified_widths(
    backend: Backend, alpha: Tensor, beta: Tensor, length: Tensor, values: Tensor, growth: Tensor
) -> Tensor:
    return backend.certified_widths(alpha=alpha, beta=beta, length=length, values=values, growth=growth).contiguous()


def top_two(backend: Backend, values: Tensor) -> tuple[Tensor, Tensor]:
    return _contiguous(backend.top_two(values))


def gather_patches(
    backend: Backend, maps: Tensor, places: Tensor, kernel: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    taps, steps = (kernel[0], kernel[1]), (dilation[0], dilation[1])
    return backend.gather_patches(maps=maps, places=places, kernel=taps, dilation=steps)


def _contiguous(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return two results of their own, laid out as the fakes promise."""
    first, second = (tensor.clone(memory_format=torch.contiguous_format) for tensor in pair)
    return first, second


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    implementation.__name__: implementation
    for implementation in (
        splitting_matvec,
        splitting_matvec_grouped,
        gated_matvec,
        joint_matvec,
        depthwise_matvec_grouped,
        depthwise_row_norms,
        edgeconv_matvec,
        tied_maps,
        tied_rows_matvec,
        splitting_matrices,
        add_splitting_matrices,
        curvature_coefficients,
        curvature_coefficients_,
        activation_slopes,
        grow_weights,
        krylov_extend,
        symmetric_extremes,
        tridiagonal_extremes,
        certified_widths,
        top_two,
        gather_patches,
    )
}
