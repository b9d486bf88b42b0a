"""The public operations on tensors: each checks its arguments, chooses a backend and calls it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from s3d_fast.backends.arguments import (
    require_conv,
    require_depthwise,
    require_edge_ties,
    require_edgeconv,
    require_gated,
    require_incoming,
    require_joint,
    require_pool_ties,
    require_rows,
    require_stage,
    require_vectors,
)
from s3d_fast.backends.choice import choose, unusable
from s3d_fast.backends.interface import Backend
from s3d_fast.backends.reference import REFERENCE
from s3d_fast.base import dtypes, require
from s3d_fast.maths.activations import Activation
from s3d_fast.maths.incoming import Incoming
from s3d_fast.maths.reference import DepthwiseStage, PoolTies, Widening


def splitting_matvec(
    X: Tensor,  # (N, D)
    C: Tensor,  # (N, M)
    V: Tensor,  # (M, D) or (K, M, D); D + 1 in place of D with bias
    *,
    bias: bool = False,
    backend: str = "auto",
    check_finite: bool = True,
) -> Tensor:  # like V
    """Return S_j v_j for all filters j at once:  ((X @ V.T) * C).T @ X.

    S_j = sum_n C[n, j] x_n x_n^T is the splitting matrix of filter j; it is never formed.

    Args:
        X: the rows, which all filters of the layer share; float32, float64, or bfloat16/float16 (computed in float32).
        C: the curvature coefficients, in the dtype of X.
        V: one vector per filter, or K of them; in the dtype of the computation.
        bias: every row is [X[n], 1], and the last entry of each vector belongs to the bias.
        backend: "auto", "reference", "cpu" or "triton".
        check_finite: check X and C for NaN and Inf, which costs a pass over both; inside `torch.compile` and
            `torch.export`, nothing is checked.

    All products can be differentiated: by the kernels themselves in V, and here in X and C too; elsewhere "auto" takes
    the reference where a gradient is required.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not match, or X or C is not finite.
        RuntimeError: the requested backend is not available, or has no derivative where a gradient is required.
    """
    require_rows(X, C, check_finite)
    require_vectors(V, C.shape[1], X.shape[1] + bias, dtypes.compute_dtype(X.dtype), X.device)
    return choose(backend, differentiable=(X, C, V)).splitting_matvec(X=X, C=C, V=V, bias=bias)


def splitting_matvec_grouped(
    X: Sequence[Tensor],  # each (N, D)
    C: Sequence[Tensor],  # each (N, M)
    V: Sequence[Tensor],  # each (M, D) or (K, M, D); D + 1 in place of D with bias
    *,
    bias: Sequence[bool] | None = None,
    backend: str = "auto",
    check_finite: bool = True,
) -> list[Tensor]:  # each like its V
    """Return S_j v_j for all filters of a list of layers, of any sizes, in one call.

    The results are those of a loop over `splitting_matvec`. On a CPU the threads share the work of all layers at once;
    a GPU needs one launch.

    Args:
        X, C, V: one entry per layer, as for `splitting_matvec`; all on one device.
        bias: one entry per layer; by default no layer has a bias.
        backend, check_finite: as for `splitting_matvec`.

    Raises: as `splitting_matvec`.
    """
    bias = [False] * len(X) if bias is None else list(bias)
    if not len(X) == len(C) == len(V) == len(bias):
        raise ValueError(
            f"X, C, V and bias must have one entry per layer, got {len(X)}, {len(C)}, {len(V)} and {len(bias)}"
        )
    for x, c, v, has_bias in zip(X, C, V, bias, strict=True):
        require_rows(x, c, check_finite)
        require_vectors(v, c.shape[1], x.shape[1] + has_bias, dtypes.compute_dtype(x.dtype), x.device)
    return choose(backend, differentiable=(*X, *C, *V)).splitting_matvec_grouped(X=X, C=C, V=V, bias=bias)


def gated_matvec(
    X: Tensor,  # (N, D)
    c11: Tensor,  # (N, M)
    c12: Tensor,  # (N, M)
    c22: Tensor | None,  # (N, M); None is zero
    V: Tensor,  # (M, 2 D) or (K, M, 2 D); D + 1 in place of D with bias
    *,
    bias: bool = False,
    backend: str = "auto",
    check_finite: bool = True,
) -> Tensor:  # like V
    """Return S_j v_j for all gated units h = act(a.x) psi(b.x), theta = [a, b], that read the same rows.

    S [va, vb] = [X^T (c11 p + c12 q), X^T (c12 p + c22 q)] with p = X va and q = X vb.

    Args:
        X: the rows, as for `splitting_matvec`.
        c11, c12, c22: g act''(z) psi(u), g act'(z) psi'(u) and g act(z) psi''(u), where g is the gradient of the loss
            with respect to h; the scales of BatchNorms are included. c22 is None where psi is linear.
        V: vectors [va, vb]. With bias, each half ends with the entry of its bias.
        bias, backend, check_finite: as for `splitting_matvec`.

    Raises: as `splitting_matvec`.
    """
    require_gated(X, c11, c12, c22, check_finite)
    require_vectors(V, c11.shape[1], 2 * (X.shape[1] + bias), dtypes.compute_dtype(X.dtype), X.device)
    chosen = choose(backend, X, c11, c12, c22, differentiable=(V,))
    return chosen.gated_matvec(X=X, c11=c11, c12=c12, c22=c22, V=V, bias=bias)


def depthwise_matvec(
    X: Tensor,  # (B H W, D)
    C: Sequence[Tensor],  # n + 1 times (B, H_i, W_i, M)
    d: Sequence[Tensor],  # n times (B, H_i, W_i, M)
    weight: Sequence[Tensor],  # n times (M, kh, kw)
    V: Tensor,  # (M, D) or (K, M, D); D + 1 in place of D with bias
    *,
    stages: Sequence[DepthwiseStage],  # n
    bias: bool = False,
    backend: str = "auto",
    check_finite: bool = True,
) -> Tensor:  # like V
    """Return S_j v_j for all filters of a pointwise layer that n depthwise stages follow.

    A stage is a depthwise convolution and an activation. With r_0 = X v:
    r_(i+1) = dw_i(d_i r_i),  y_n = C_n r_n,  y_i = C_i r_i + d_i dw_i^T(y_(i+1)),  S v = X^T y_0.

    Args:
        X: the rows of maps of height H and width W, as for `splitting_matvec`.
        C: g act''(z) of every activation, g being the gradient of the loss with respect to its output. The square of
            the first BatchNorm's scale is included in C[0].
        d: act'(z) of every activation but the last. The first BatchNorm's scale is included in d[0].
        weight: the weight of every depthwise convolution, times the scale of the BatchNorm behind it.
        stages: the geometry of every depthwise convolution.
        V, bias, backend, check_finite: as for `splitting_matvec`.

    Raises: as `splitting_matvec`.
    """
    require_depthwise(X, C, d, weight, stages, check_finite)
    require_vectors(V, C[0].shape[3], X.shape[1] + bias, dtypes.compute_dtype(X.dtype), X.device)
    chosen = choose(backend, X, *C, *d, *weight, differentiable=(V,))
    return chosen.depthwise_matvec(X=X, C=C, d=d, weight=weight, stages=stages, V=V, bias=bias)


def depthwise_row_norms(
    X: Tensor,  # (B H W, D)
    d: Tensor,  # (B, H, W, M)
    weight: Tensor,  # (M, kh, kw)
    *,
    stage: DepthwiseStage,
    bias: bool = False,
    backend: str = "auto",
    check_finite: bool = True,
) -> Tensor:  # (B, H', W', M)
    """Return |J|^2 at every place, where J is the gradient of the second activation's input by the filter.

    J = sum over taps t of w_t d[n + t] x[n + t]. The arguments are the first entries of those of `depthwise_matvec`;
    the result has the dtype of the computation.

    Raises: as `splitting_matvec`.
    """
    require_stage(X, d, weight, stage, check_finite)
    return choose(backend, X, d, weight).depthwise_row_norms(X=X, d=d, weight=weight, stage=stage, bias=bias)


def splitting_matrices(
    X: Tensor,  # (N, D)
    C: Tensor,  # (N, M)
    *,
    bias: bool = False,
    backend: str = "auto",
    check_finite: bool = True,
) -> Tensor:  # (M, D, D), or (M, D + 1, D + 1) with bias
    """Return the dense splitting matrices S_j = X^T diag(C[:, j]) X, for small D.

    On a GPU, PyTorch's own matrix products form them.

    Raises: as `splitting_matvec`.
    """
    require_rows(X, C, check_finite)
    return choose(backend, X, C).splitting_matrices(X=X, C=C, bias=bias)


def add_splitting_matrices(
    S: Tensor,  # (M, D, D), or (M, D + 1, D + 1) with bias; changed
    X: Tensor,  # (N, D)
    C: Tensor,  # (N, M)
    weight: float = 1.0,
    *,
    bias: bool = False,
    backend: str = "auto",
    check_finite: bool = True,
) -> Tensor:  # S
    """Add `weight` times the splitting matrices of (X, C) to S, and return S.

    Call it batch by batch to sum over many batches.

    Raises: as `splitting_matvec`; S is then unchanged.
    """
    require_rows(X, C, check_finite)
    require.tensor("S", S)
    width = X.shape[1] + bias
    require.shape("S", S, (C.shape[1], width, width))
    require.agreement("S", S, "X", X, dtype=dtypes.compute_dtype(X.dtype))
    require.number("weight", weight)
    choose(backend, S, X, C).add_splitting_matrices(S=S, X=X, C=C, bias=bias, weight=weight)
    return S


def conv_matvec(
    X: Tensor,  # (B, I, H, W)
    C: Tensor,  # (B, M, H', W')
    V: Tensor,  # (M, D) or (K, M, D), D = I * kh * kw (+ 1 with bias)
    *,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    bias: bool = False,
    backend: str = "auto",
    check_finite: bool = True,
) -> Tensor:  # like V
    """Return S_j v_j for every filter of a 2-d convolution, without forming its patches.

    Every backend uses PyTorch's own convolution and weight gradient.

    Raises: as `splitting_matvec`.
    """
    geometry = require_conv(X, C, kernel_size, stride, padding, dilation, check_finite)
    width = X.shape[1] * geometry.kernel_size[0] * geometry.kernel_size[1] + bias
    require_vectors(V, C.shape[1], width, dtypes.compute_dtype(X.dtype), X.device)
    return choose(backend, differentiable=(X, C, V)).conv_matvec(X=X, C=C, V=V, geometry=geometry, bias=bias)


def edgeconv_matvec(
    X: Tensor,  # (B, P, F)
    winner: Tensor,  # (B, P, M), int32 or int64
    C: Tensor,  # (B, P, M)
    V: Tensor,  # (M, 2 F) or (K, M, 2 F); 2 F + 1 with bias
    *,
    bias: bool = False,
    backend: str = "auto",
    check_finite: bool = True,
    incoming: Incoming | None = None,
    runner: Tensor | None = None,  # (B, P, M), int32 or int64
    K: Tensor | None = None,  # (B, P, M)
    d1: Tensor | None = None,  # (B, P, M)
    d2: Tensor | None = None,  # (B, P, M)
) -> Tensor:  # like V
    """Return S_j v_j for every EdgeConv filter; no tensor over edges is formed.

    Args:
        X: the features of the P points of each cloud.
        winner: for each point and filter, the index of the neighbour whose edge won the maximum.
        C: the curvature coefficients of the winning edges.
        V, bias, backend: as for `splitting_matvec`.
        check_finite: check X and C for NaN and Inf, and winner for indices out of range.
        incoming: `incoming_edges(winner)`. The Triton kernels need it; they compute it at every call unless it is
            given.
        runner: the index of the neighbour that came second.
        K: the coefficients of near ties: K e e^T is added, where e = d1 edge(winner) - d2 edge(runner).
        d1, d2: the slopes at the winner and the runner-up; 1 if they are not given.

    Raises: as `splitting_matvec`.
    """
    require_edgeconv(X, winner, C, check_finite)
    ties = require_edge_ties(X, C, runner, K, d1, d2, check_finite)
    require_vectors(V, C.shape[2], 2 * X.shape[2] + bias, dtypes.compute_dtype(X.dtype), X.device)
    chosen = choose(backend, X, C, K, d1, d2, differentiable=(V,))
    if incoming is not None and chosen.uses_incoming:
        require_incoming(incoming, winner, check_finite)
    return chosen.edgeconv_matvec(X=X, winner=winner, C=C, V=V, bias=bias, incoming=incoming, ties=ties)


def tied_matvec(
    X: Tensor,  # (B, I, H, W)
    C: Tensor,  # (B, M, H', W')
    V: Tensor,  # (M, D) or (K, M, D), D = I * kh * kw (+ 1 with bias)
    *,
    first: Tensor,  # (B, M, Q), int64
    second: Tensor,  # (B, M, Q), int64
    K: Tensor,  # (B, M, Q)
    d1: Tensor | None = None,  # (B, M, Q)
    d2: Tensor | None = None,  # (B, M, Q)
    kernel_size: Sequence[int] = (1, 1),
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    bias: bool = False,
    backend: str = "auto",
    check_finite: bool = True,
) -> Tensor:  # like V
    """Return S_j v_j for every filter of a 2-d convolution with maxima over positions behind it.

    To `conv_matvec`, this adds K e e^T for every maximum, e = d1 x[first] - d2 x[second]; x[n] is the patch at position
    n. Rows of B clouds, (B, P, D), are maps of height P and width 1. The products are PyTorch's convolution and weight
    gradient; ties take no further product.

    Args:
        X, C, V, kernel_size, stride, padding, dilation, bias, backend, check_finite: as for `conv_matvec`.
        first, second: the flat positions h W' + w of the largest and the second largest value of every maximum.
        K: the coefficients of near ties.
        d1, d2: the slopes at both positions; 1 if they are not given.

    Raises: as `splitting_matvec`.
    """
    geometry = require_conv(X, C, kernel_size, stride, padding, dilation, check_finite)
    ties = PoolTies(first, second, K, d1, d2)
    require_pool_ties(X, C, ties, check_finite)
    width = X.shape[1] * geometry.kernel_size[0] * geometry.kernel_size[1] + bias
    require_vectors(V, C.shape[1], width, dtypes.compute_dtype(X.dtype), X.device)
    chosen = choose(backend, C, K, d1, d2, differentiable=(X, V))
    return chosen.tied_matvec(X=X, C=C, V=V, ties=ties, geometry=geometry, bias=bias)


def curvature_coefficients(
    g: Tensor,  # (N, M), or any shape with the channels along `axis`
    z: Tensor,  # like g
    activation: Activation,
    scale: Tensor | None = None,  # (M,)
    *,
    axis: int = 1,
    inplace: bool = False,
    backend: str = "auto",
    row_norm: Tensor | None = None,  # (N,), or like g
    bandwidth: Tensor | None = None,  # (M,)
) -> Tensor:  # like g
    """Return C = g * act''(z) * s^2, the coefficients of the splitting matrices.

    Args:
        g: the gradient of the loss with respect to the activation's output.
        z: the activation's input.
        activation: from `s3d_fast.activation`.
        scale: s = gamma / sqrt(var + eps) where a BatchNorm stands between the filter and the activation.
        axis: the dimension of g and z that holds the channels.
        inplace: write the result over g, and return g.
        backend: as for `splitting_matvec`; "auto" uses the reference for an activation of your own.
        row_norm: |x_n| for every row n: the dimensions of g other than `axis`, flattened in their order. A tensor like
            g has a norm for every entry.
        bandwidth: the length of a step of every filter that its kinks are smoothed over, times |s|. A kink then has the
            sharpness 1 / (bandwidth_j * row_norm_n), in place of the activation's own; where that width is 0, kinks add
            nothing.

    Raises: as `splitting_matvec`.
    """
    require.tensor("g", g)
    require.tensor("z", z)
    require.shape("z", z, tuple(g.shape))
    require.agreement("z", z, "g", g)
    if not isinstance(axis, int) or not 0 <= axis < g.dim():
        raise ValueError(f"axis must be a dimension of g, which has shape {tuple(g.shape)}; got {axis!r}")
    if not isinstance(activation, Activation):
        raise TypeError(f"activation must be an Activation, from s3d_fast.activation; got {type(activation).__name__}")
    if (row_norm is None) != (bandwidth is None):
        raise ValueError("row_norm and bandwidth must be given together")
    rows = g.shape[:axis].numel() * g.shape[axis + 1 :].numel()
    sizes = {"scale": g.shape[axis], "row_norm": rows, "bandwidth": g.shape[axis]}
    for name, vector in (("scale", scale), ("row_norm", row_norm), ("bandwidth", bandwidth)):
        if vector is not None:
            require.tensor(name, vector)
            is_whole = name == "row_norm" and vector.dim() > 1
            require.shape(name, vector, tuple(g.shape) if is_whole else (sizes[name],))
            require.agreement(name, vector, "g", g)
    return unchecked_curvature(g, z, activation, scale, axis, inplace, backend, row_norm, bandwidth)


def unchecked_curvature(
    g: Tensor,
    z: Tensor,
    activation: Activation,
    scale: Tensor | None = None,
    axis: int = 1,
    inplace: bool = False,
    backend: str = "auto",
    row_norm: Tensor | None = None,
    bandwidth: Tensor | None = None,
) -> Tensor:
    """Return `curvature_coefficients` without checking the arguments."""
    chosen = choose(backend, g, z, scale, row_norm, bandwidth)
    why_not = chosen.why_not_dtype(g.dtype) or chosen.why_not_activation(activation)
    if why_not:
        chosen = _instead_of(chosen, why_not, backend)
    return chosen.curvature_coefficients(
        g=g,
        z=z,
        activation=activation,
        scale=scale,
        axis=axis,
        inplace=inplace,
        row_norm=row_norm,
        bandwidth=bandwidth,
    )


def activation_slopes(
    z: Tensor, activation: Activation, scale: Tensor | None = None, axis: int = 1, backend: str = "auto"
) -> Tensor:
    """Return act'(z) s, with one s for each entry of dimension `axis`; arguments are not checked."""
    chosen = choose(backend, z, scale)
    why_not = chosen.why_not_dtype(z.dtype) or chosen.why_not_activation(activation)
    if why_not:
        chosen = _instead_of(chosen, why_not, backend)
    return chosen.activation_slopes(z=z, activation=activation, scale=scale, axis=axis)


def joint_matvec(
    X: Sequence[Tensor],  # n times (N, D_a)
    C: Sequence[Tensor],  # n (n + 1) / 2 times (N, M): for the pairs (0, 0), (0, 1), ..., (1, 1), (1, 2), ...
    V: Tensor,  # (M, D) or (K, M, D), D = sum of D_a, with D_a + 1 in place of D_a where the layer has a bias
    *,
    bias: Sequence[bool],
    backend: str = "auto",
    check_finite: bool = True,
) -> Tensor:  # like V
    """Return S_j v_j for channels that several layers write, each from rows of its own: see `reference.joint_matvec`.

    Raises: as `splitting_matvec`.
    """
    require_joint(X, C, bias, check_finite)
    width = sum(x.shape[1] + one for x, one in zip(X, bias, strict=True))
    require_vectors(V, C[0].shape[1], width, dtypes.compute_dtype(X[0].dtype), X[0].device)
    return choose(backend, *X, *C, differentiable=(V,)).joint_matvec(X=X, C=C, V=V, bias=bias)


def top_two(values: Tensor, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Return the places of the largest and the second largest of k finite values, (R, k, M), for every column."""
    if values.dim() != 3 or values.shape[1] < 2:
        raise ValueError(f"values must have shape (R, k, M) with k >= 2, got {tuple(values.shape)}")
    chosen = choose(backend, values)
    why_not = chosen.why_not_dtype(values.dtype)
    if why_not:
        chosen = _instead_of(chosen, why_not, backend)
    return chosen.top_two(values)


def gather_patches(
    maps: Tensor,  # (B, C, H, W)
    places: Tensor,  # (N, 3), int64
    kernel: Sequence[int],
    dilation: Sequence[int] = (1, 1),
    backend: str = "auto",
) -> Tensor:  # (N, C kh kw)
    """Return patches of maps as rows, zero beyond the borders: see `reference.gather_patches`."""
    require.tensor("maps", maps)
    require.shape("maps", maps, ("B", "C", "H", "W"))
    if not isinstance(places, Tensor) or places.dtype != torch.int64 or places.device != maps.device:
        raise TypeError(f"places must be an int64 tensor on {maps.device}, got {places!r}")
    require.shape("places", places, ("N", 3))
    taps, steps = require.pair("kernel", kernel, 1), require.pair("dilation", dilation, 1)
    if len(places) and not 0 <= int(places[:, 0].min()) <= int(places[:, 0].max()) < len(maps):
        raise IndexError(f"places must name samples in [0, {len(maps)})")
    chosen = choose(backend, maps)
    why_not = chosen.why_not_dtype(maps.dtype)
    if why_not:
        chosen = _instead_of(chosen, why_not, backend)
    return chosen.gather_patches(maps=maps, places=places, kernel=taps, dilation=steps)


def grow_weights(widenings: Sequence[Widening], *, backend: str = "auto") -> list[Tensor]:
    """Return the weights of layers, and their optimizer state, after splits: `reference.grow_weight` for each.

    All tensors of one backend take one call.

    Raises:
        IndexError, RuntimeError: an index is out of range.
    """
    by_kind: dict[object, list[int]] = {}
    for place, widening in enumerate(widenings):
        by_kind.setdefault((widening.weight.dtype, widening.weight.device), []).append(place)
    by_backend: dict[Backend, list[int]] = {}
    for places in by_kind.values():
        tensors = [tensor for place in places for tensor in widenings[place] if isinstance(tensor, Tensor)]
        chosen = choose(backend, *(tensor for tensor in tensors if tensor.is_floating_point()))
        why_not = chosen.why_not_dtype(tensors[0].dtype)
        by_backend.setdefault(_instead_of(chosen, why_not, backend) if why_not else chosen, []).extend(places)
    grown: dict[int, Tensor] = {}
    for chosen, places in by_backend.items():
        grown.update(zip(places, chosen.grow_weights([widenings[place] for place in places]), strict=True))
    return [grown[place] for place in range(len(widenings))]


def _instead_of(chosen: Backend, why_not: str, asked: str) -> Backend:
    """Return the reference if "auto" chose a backend that lacks something; raise if it was requested by name."""
    if asked != "auto":
        raise unusable(chosen.name, f"{why_not}; use backend='reference'")
    return REFERENCE
