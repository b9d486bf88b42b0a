"""Every operation as plain PyTorch, one expression each: the definition that tests and benchmarks compare with.

Nothing here checks its input; `backends.operations` does, once. Shapes: N rows, D parameters per filter, M filters;
leading dimensions of V (written `...`) hold several vectors per filter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight

from s3d_fast.maths.activations import Activation
from s3d_fast.maths.incoming import Incoming

Pair = tuple[int, int]


class ConvGeometry(NamedTuple):
    """The geometry of a 2-d convolution; every entry is (vertical, horizontal)."""

    kernel_size: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)


@dataclass(frozen=True)
class DepthwiseStage:
    """The geometry of a depthwise convolution, but for its kernel size; every entry is (vertical, horizontal)."""

    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)

    def size(self, maps: Sequence[int], kernel_size: Sequence[int]) -> Pair:
        """Return the height and width of the result; not positive where the input is too small."""
        vertical, horizontal = (
            (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, padding, dilation in zip(
                maps, kernel_size, self.stride, self.padding, self.dilation, strict=True
            )
        )
        return vertical, horizontal


class EdgeTies(NamedTuple):
    """The runners-up of EdgeConv's maxima: S gains sum K e e^T with e = d1 edge(winner) - d2 edge(runner)."""

    runner: Tensor  # (B, P, M), integers in [0, P)
    K: Tensor  # (B, P, M)
    d1: Tensor | None = None  # (B, P, M); if both are None, both are 1
    d2: Tensor | None = None  # (B, P, M)
    incoming: Incoming | None = None  # incoming_edges(runner), if known


class PoolTies(NamedTuple):
    """The two largest values of maxima over positions: S gains sum K e e^T with e = d1 x[first] - d2 x[second]."""

    first: Tensor  # (B, M, Q), the flat position of the winner, in [0, H' W')
    second: Tensor  # (B, M, Q), that of the runner-up
    K: Tensor  # (B, M, Q)
    d1: Tensor | None = None  # (B, M, Q); if both are None, both are 1
    d2: Tensor | None = None  # (B, M, Q)


def splitting_matvec(
    X: Tensor,  # (N, D)
    C: Tensor,  # (N, M)
    V: Tensor,  # (..., M, D), or (..., M, D + 1) with bias
    bias: bool = False,
) -> Tensor:  # like V
    """Return S_j v_j for every filter j, where S_j = sum_n C[n, j] x_n x_n^T:  ((X V^T) * C)^T X.

    With `bias`, every row is x_n = [X[n], 1]. Costs 4 N D M flops per vector; forms the (N, M) product.
    """
    X, C = X.to(V.dtype), C.to(V.dtype)
    if not bias:
        return ((X @ V.mT) * C).mT @ X
    U = (X @ V[..., :-1].mT + V[..., None, :, -1]) * C
    return torch.cat([U.mT @ X, U.sum(-2).unsqueeze(-1)], -1)


def gated_matvec(
    X: Tensor,  # (N, D)
    c11: Tensor,  # (N, M)
    c12: Tensor,  # (N, M)
    c22: Tensor | None,  # (N, M); None is zero
    V: Tensor,  # (..., M, 2 D), or (..., M, 2 (D + 1)) with bias
    bias: bool = False,
) -> Tensor:  # like V
    """Return S_j v_j for every gated unit h = act(a.x) psi(b.x), theta = [a, b], whose halves read the same rows.

    With v = [va, vb], p = X va and q = X vb:  S v = [X^T (c11 p + c12 q), X^T (c12 p + c22 q)]. With `bias`, every row
    is [X[n], 1] for both halves. Costs 8 N D M flops per vector.
    """
    c11, c12 = c11.to(V.dtype), c12.to(V.dtype)
    rows = with_ones(X.to(V.dtype)) if bias else X.to(V.dtype)
    p, q = rows @ V[..., : rows.shape[1]].mT, rows @ V[..., rows.shape[1] :].mT
    upper, lower = c11 * p + c12 * q, c12 * p
    if c22 is not None:
        lower = lower + c22.to(V.dtype) * q
    return torch.cat([upper.mT @ rows, lower.mT @ rows], -1)


def joint_matvec(
    X: Sequence[Tensor],  # n times (N, D_a)
    C: Sequence[Tensor],  # n (n + 1) / 2 times (N, M): for the pairs (0, 0), (0, 1), ..., (1, 1), (1, 2), ...
    V: Tensor,  # (..., M, sum of D_a), with D_a + 1 in place of D_a where the layer has a bias
    bias: Sequence[bool],
) -> Tensor:  # like V
    """Return S_j v_j for every channel that n layers write, theta = [theta_0, theta_1, ...], each from its own rows.

    With v = [v_0, v_1, ...] and u_a = X_a v_a, block a of S v is X_a^T (sum_b C_ab u_b). With a bias, every row is
    [X_a[n], 1].
    """
    rows = [with_ones(x.to(V.dtype)) if one else x.to(V.dtype) for x, one in zip(X, bias, strict=True)]
    u = [x @ v.mT for x, v in zip(rows, V.split([x.shape[1] for x in rows], -1), strict=True)]
    pairs = [(a, b) for a in range(len(rows)) for b in range(a, len(rows))]
    sums = [torch.zeros_like(one) for one in u]
    for (a, b), own in zip(pairs, C, strict=True):
        for to, of in {(a, b), (b, a)}:
            sums[to] = sums[to] + own.to(V.dtype) * u[of]
    return torch.cat([y.mT @ x for y, x in zip(sums, rows, strict=True)], -1)


def depthwise_matvec(
    X: Tensor,  # (B H W, D), the rows of maps of height H and width W
    C: Sequence[Tensor],  # n + 1 times (B, H_i, W_i, M); H_0 = H and W_0 = W
    d: Sequence[Tensor],  # n times (B, H_i, W_i, M), as the first n of C
    weight: Sequence[Tensor],  # n times (M, kh, kw)
    stages: Sequence[DepthwiseStage],  # n
    V: Tensor,  # (..., M, D), or (..., M, D + 1) with bias
    bias: bool = False,
) -> Tensor:  # like V
    """Return S_j v_j for every pointwise filter that n stages of a depthwise convolution and an activation follow.

    r_0 = X v,  r_(i+1) = dw_i(d_i r_i),  y_n = C_n r_n,  y_i = C_i r_i + d_i dw_i^T(y_(i+1)),  S v = X^T y_0. So S is
    the sum over all n + 1 activations of J_i^T C_i J_i, where J_i is the Jacobian of the activation's input.
    """
    if V.numel() == 0 or X.shape[0] == 0:
        return torch.zeros_like(V)
    rows = with_ones(X.to(V.dtype)) if bias else X.to(V.dtype)
    copies, filters = V.shape[:-2].numel(), V.shape[-2]

    def channels_first(maps: Tensor) -> Tensor:
        return maps.to(V.dtype).movedim(-1, -3)

    r = [channels_first((rows @ V.reshape(copies, filters, -1).mT).reshape(copies, *C[0].shape))]
    slopes, kernels = [channels_first(d_i) for d_i in d], [w.to(V.dtype).unsqueeze(1) for w in weight]
    geometries = [(stage.stride, stage.padding, stage.dilation, filters) for stage in stages]
    for slope, kernel, geometry in zip(slopes, kernels, geometries, strict=True):
        following = F.conv2d((slope * r[-1]).flatten(0, 1), kernel, None, *geometry)
        r.append(following.reshape(copies, -1, *following.shape[1:]))
    y = channels_first(C[-1]) * r[-1]
    for i in reversed(range(len(stages))):
        back = conv2d_input(r[i].flatten(0, 1).shape, kernels[i], y.flatten(0, 1), *geometries[i])
        y = channels_first(C[i]) * r[i] + slopes[i] * back.reshape(r[i].shape)
    return (y.movedim(2, -1).reshape(copies, -1, filters).mT @ rows).reshape(V.shape)


def depthwise_row_norms(
    X: Tensor,  # (B H W, D)
    d: Tensor,  # (B, H, W, M)
    weight: Tensor,  # (M, kh, kw)
    stage: DepthwiseStage,
    bias: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:  # (B, H', W', M)
    """Return |J|^2 for the activation behind the first depthwise stage, in `dtype` (by default the dtype of X).

    J = sum over taps t of w_t d[n + t] x[n + t], so |J|^2 = sum over t, t' of w_t w_t' d[n + t] d[n + t'] <x[n + t],
    x[n + t']>: all channels share the products of neighbouring rows. With `bias`, every row is [X[n], 1].
    """
    kernel_size, dtype = weight.shape[1:], dtype or X.dtype
    X, d, weight = X.to(dtype), d.to(dtype), weight.to(dtype)
    sizes = stage.size(d.shape[1:3], kernel_size)
    border = [stage.padding[1]] * 2 + [stage.padding[0]] * 2
    rows = with_ones(X) if bias else X
    rows = rows.reshape(*d.shape[:3], rows.shape[1])

    def at(maps: Tensor, tap: Pair) -> Tensor:
        """Return the entries of maps (B, H, W, ...) that a tap meets, zero beyond the border."""
        padded = F.pad(maps, [0, 0, *border])
        for axis in (0, 1):
            places = torch.arange(sizes[axis], device=X.device) * stage.stride[axis] + tap[axis] * stage.dilation[axis]
            padded = padded.index_select(1 + axis, places)
        return padded

    taps = [(i, j) for i in range(kernel_size[0]) for j in range(kernel_size[1])]
    near = [at(rows, tap) for tap in taps]
    slopes = [weight[:, i, j] * at(d, (i, j)) for i, j in taps]
    total = torch.zeros_like(slopes[0])
    for t in range(len(taps)):
        for s in range(t + 1):
            product = (near[t] * near[s]).sum(-1, keepdim=True)
            total += (1 if s == t else 2) * product * slopes[t] * slopes[s]
    # Rounding must not make a square negative.
    return total.clamp(min=0)


def splitting_matrices(
    X: Tensor,  # (N, D)
    C: Tensor,  # (N, M)
    bias: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:  # (M, D, D), or (M, D + 1, D + 1) with bias
    """Return the dense splitting matrices S_j = X^T diag(C[:, j]) X in `dtype` (by default the dtype of X)."""
    rows = with_ones(X) if bias else X
    rows, C = rows.to(dtype or X.dtype), C.to(dtype or X.dtype)
    if C.shape[1] == 0:
        return rows.new_zeros(0, rows.shape[1], rows.shape[1])
    return torch.stack([(rows * c[:, None]).mT @ rows for c in C.unbind(1)])


def conv_matvec(
    X: Tensor,  # (B, I, H, W), the layer's input
    C: Tensor,  # (B, M, H', W')
    V: Tensor,  # (..., M, D), D = I * kh * kw (+ 1 with bias), laid out like the flattened filters
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    bias: bool = False,
) -> Tensor:  # like V
    """Return S_j v_j for every filter of a convolution:  conv_weight_grad(X, C * conv(X, V)).

    The rows x_n are the patches of X, which are never formed.
    """
    C = C.to(V.dtype).repeat(1, V.shape[:-2].numel(), 1, 1)
    return conv_product(X, V, kernel_size, stride, padding, dilation, bias, lambda P: P * C)


def conv_product(
    X: Tensor,  # (B, I, H, W)
    V: Tensor,  # (..., M, D)
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    bias: bool,
    between: Callable[[Tensor], Tensor],
) -> Tensor:  # like V
    """Return conv_weight_grad(X, between(conv(X, V))); `between` maps (B, K M, H', W') to the same shape."""
    X = X.to(V.dtype)
    weight = (V[..., :-1] if bias else V).reshape(-1, X.shape[1], *kernel_size)
    offset = V[..., -1].reshape(-1) if bias else None
    if len(weight) == 0:
        return torch.zeros_like(V)
    geometry = (list(stride), list(padding), list(dilation))
    U = between(F.conv2d(X, weight, offset, *geometry))
    result = conv2d_weight(X, list(weight.shape), U, *geometry).flatten(1)
    if bias:
        result = torch.cat([result, U.sum((0, 2, 3))[:, None]], 1)
    return result.reshape(V.shape)


def tied_maps(
    P: Tensor,  # (B, K M, H', W'), the products of all positions with K vectors per filter
    C: Tensor,  # (B, M, H', W')
    ties: PoolTies,
) -> Tensor:  # like P
    """Return T = C * P, plus d1 t at the first position of every tie and minus d2 t at the second.

    t = K (d1 P[first] - d2 P[second]).
    """
    copies = P.shape[1] // max(1, C.shape[1])
    K, first, second = (own.repeat(1, copies, 1) for own in (ties.K.to(P.dtype), ties.first, ties.second))
    flat = P.flatten(2)
    p1, p2 = flat.gather(2, first), flat.gather(2, second)
    if ties.d1 is None or ties.d2 is None:
        forth = K * (p1 - p2)
        back = -forth
    else:
        d1, d2 = (own.to(P.dtype).repeat(1, copies, 1) for own in (ties.d1, ties.d2))
        t = K * (d1 * p1 - d2 * p2)
        forth, back = d1 * t, -d2 * t
    T = flat * C.to(P.dtype).repeat(1, copies, 1, 1).flatten(2)
    return T.scatter_add(2, first, forth).scatter_add(2, second, back).reshape(P.shape)


def tied_matvec(
    X: Tensor,  # (B, I, H, W), the layer's input
    C: Tensor,  # (B, M, H', W')
    V: Tensor,  # (..., M, D), D = I * kh * kw (+ 1 with bias)
    ties: PoolTies,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    bias: bool = False,
) -> Tensor:  # like V
    """Return S_j v_j for every filter of a convolution with maxima over positions behind it.

    conv_weight_grad(X, tied_maps(conv(X, V))):  ties take no further product.
    """
    return conv_product(X, V, kernel_size, stride, padding, dilation, bias, lambda P: tied_maps(P, C, ties))


def edgeconv_matvec(
    X: Tensor,  # (B, P, F), the features of P points
    winner: Tensor,  # (B, P, M), integers in [0, P): the neighbour that won the maximum
    C: Tensor,  # (B, P, M)
    V: Tensor,  # (..., M, 2 F), or (..., M, 2 F + 1) with bias
    bias: bool = False,
    ties: EdgeTies | None = None,
) -> Tensor:  # like V
    """Return S_j v_j for every EdgeConv filter, in the point-level form.

    The row of point i and filter j is the winning edge e = [x_w - x_i, x_i], w = winner[., i, j]. With v = [a, b],
    v.e = a.x_w + (b - a).x_i, so two products over points, a gather and a scatter replace all work over edges. Ties add
    t = K (d1 u - d2 u'), where u' belongs to the runner-up: d1 t to the winner's edge, and -d2 t to the runner-up's.
    """
    X, C = X.to(V.dtype), C.to(V.dtype)
    a, b = V[..., : X.shape[-1]], V[..., X.shape[-1] : 2 * X.shape[-1]]
    P = X @ a.mT.unsqueeze(-3)
    index = winner.long().expand(P.shape)
    own = X @ (b - a).mT.unsqueeze(-3)
    if bias:
        own = own + V[..., None, None, :, -1]
    u = P.gather(-2, index) + own
    t = C * u
    received = torch.zeros_like(t).scatter_add(-2, index, t)
    if ties is not None:
        second, K = ties.runner.long().expand(P.shape), ties.K.to(V.dtype)
        if ties.d1 is None or ties.d2 is None:
            forth = K * (P.gather(-2, index) - P.gather(-2, second))
            back = -forth
        else:
            d1, d2 = ties.d1.to(V.dtype), ties.d2.to(V.dtype)
            tie = K * (d1 * u - d2 * (P.gather(-2, second) + own))
            forth, back = d1 * tie, -d2 * tie
            t = t + forth + back
        received = received.scatter_add(-2, index, forth).scatter_add(-2, second, back)
    parts = [((received - t).mT @ X).sum(-3), (t.mT @ X).sum(-3)]
    if bias:
        parts.append(t.sum((-3, -2)).unsqueeze(-1))
    return torch.cat(parts, -1)


def edge_rows(
    X: Tensor,  # (B, P, F)
    neighbours: Tensor,  # (B, P, k), integers in [0, P)
) -> Tensor:  # (B, P, k, 2 F)
    """Return the edge features e_ij = [x_j - x_i, x_i] of EdgeConv."""
    batch = torch.arange(len(X), device=X.device)[:, None, None]
    centre = X[:, :, None].expand(-1, -1, neighbours.shape[-1], -1)
    return torch.cat([X[batch, neighbours] - centre, centre], -1)


def edgeconv_matvec_edges(
    X: Tensor,  # (B, P, F)
    neighbours: Tensor,  # (B, P, k)
    slot: Tensor,  # (B, P, M), integers in [0, k): which neighbour won the maximum
    C: Tensor,  # (B, P, M)
    V: Tensor,  # (..., M, 2 F), or (..., M, 2 F + 1) with bias
    bias: bool = False,
) -> Tensor:  # like V
    """Return S_j v_j for every EdgeConv filter, edge by edge: the definition that `edgeconv_matvec` reproduces.

    Every edge is a row; an edge that did not win the maximum for filter j has the coefficient 0 there.
    """
    rows = edge_rows(X, neighbours).flatten(0, 2)
    edges = C.new_zeros(*neighbours.shape, C.shape[-1]).scatter(-2, slot.unsqueeze(-2), C.unsqueeze(-2))
    return splitting_matvec(rows, edges.flatten(0, 2), V, bias)


def curvature_coefficients(
    g: Tensor,  # (N, M) or any other shape with the channels along `axis`: dLoss / dh
    z: Tensor,  # like g, the input of the activation
    activation: Activation,
    scale: Tensor | None = None,  # (M,), s = gamma / sqrt(var + eps) of a following BatchNorm
    axis: int = 1,
    row_norm: Tensor | None = None,  # (N,), one entry for each row: the other dimensions of g, flattened; or like g
    bandwidth: Tensor | None = None,  # (M,)
) -> Tensor:  # like g
    """Return C = g * act''(z) * s^2.

    With `row_norm` and `bandwidth`, a kink at row n and filter j has the sharpness 1 / (bandwidth_j * row_norm_n): the
    scale of a step of the filter. Where that width is zero or subnormal, kinks add nothing.
    """
    sharpness = None
    channels = [-1, *[1] * (g.dim() - 1 - axis)]
    if row_norm is not None and bandwidth is not None:
        if row_norm.dim() == 1:
            row_norm = row_norm.reshape(*g.shape[:axis], 1, *g.shape[axis + 1 :])
        width = row_norm * bandwidth.reshape(channels)
        vanishes = width < torch.finfo(width.dtype).tiny
        sharpness = torch.where(vanishes, 0, 1 / torch.where(vanishes, 1, width))
    C = g * activation.second(z, sharpness)
    return C if scale is None else C * scale.reshape(channels) ** 2


def activation_slopes(z: Tensor, activation: Activation, scale: Tensor | None = None, axis: int = 1) -> Tensor:
    """Return act'(z) s, with one s for each entry of dimension `axis`."""
    d = activation.first(z)
    return d if scale is None else d * scale.reshape(-1, *[1] * (z.dim() - 1 - axis))


def top_two(values: Tensor) -> tuple[Tensor, Tensor]:  # (R, k, M) -> (R, M), (R, M)
    """Return the places of the largest and the second largest of k finite values, for every column."""
    first, second = values.topk(2, dim=1).indices.unbind(1)
    return first, second


def gather_patches(
    maps: Tensor,  # (B, C, H, W)
    places: Tensor,  # (N, 3), int64
    kernel: tuple[int, int],
    dilation: tuple[int, int],
) -> Tensor:  # (N, C kh kw)
    """Return patches of maps as rows, each in the order of a filter's weight, (C, kh, kw); zero beyond the borders.

    Every row of `places` is the sample, and the row and column of the first tap, which may lie outside the maps.
    """
    height, width = maps.shape[2:]
    sample, y, x = (one[:, None, None] for one in places.unbind(1))
    y = y + torch.arange(kernel[0], device=maps.device)[:, None] * dilation[0]
    x = x + torch.arange(kernel[1], device=maps.device) * dilation[1]
    inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
    # With channels last, a patch is kh kw rows of C numbers.
    lines = maps.permute(0, 2, 3, 1).reshape(-1, maps.shape[1])
    at = (sample * height + y.clamp(0, height - 1)) * width + x.clamp(0, width - 1)
    rows = lines.index_select(0, at.flatten()) * inside.reshape(-1, 1)
    return rows.view(len(places), -1, maps.shape[1]).mT.reshape(len(places), -1)


def with_ones(X: Tensor) -> Tensor:
    """Return [X, 1], the rows of a filter with a bias."""
    return torch.cat([X, X.new_ones(*X.shape[:-1], 1)], -1)


class Widening(NamedTuple):
    """The arguments of `grow_weight`: how one tensor grows."""

    weight: Tensor
    rows: Tensor
    row_scale: Tensor | None = None
    shift: Tensor | None = None
    shift_rows: Tensor | None = None
    columns: Tensor | None = None
    column_scale: Tensor | None = None
    shift_scale: float = 1.0


def grow_weight(
    weight: Tensor,  # (M, I, ...), or (M,) for one number per channel
    rows: Tensor,  # (M',), which row each new row copies
    row_scale: Tensor | None = None,  # (M',)
    shift: Tensor | None = None,  # (R, I, ...), added to the copied rows
    shift_rows: Tensor | None = None,  # (M',), which row of shift; -1 for none; by default row i for new row i
    columns: Tensor | None = None,  # (I',), which column each new column copies
    column_scale: Tensor | None = None,  # (I',)
    shift_scale: float = 1.0,
) -> Tensor:  # (M', I', ...)
    """Return (row_scale * weight[rows] + shift_scale * shift[shift_rows])[:, columns] * column_scale."""
    result = weight.index_select(0, rows)
    if row_scale is not None:
        result = result * row_scale.reshape(-1, *[1] * (result.dim() - 1))
    if shift is not None and shift_rows is not None:
        moved = (shift_rows >= 0).nonzero().squeeze(-1)
        result = result.index_add(0, moved, shift.index_select(0, shift_rows[moved]), alpha=shift_scale)
    elif shift is not None:
        result = result + shift_scale * shift
    if columns is not None:
        result = result.index_select(1, columns)
    if column_scale is not None:
        result = result * column_scale.reshape(-1, *[1] * (result.dim() - 2))
    return result


@dataclass(frozen=True, kw_only=True, eq=False)
class KrylovState:
    """The Krylov spaces of M filters; `krylov_extend` changes every tensor in place."""

    basis: Tensor  # (M, capacity, D), orthonormal vectors
    q: Tensor  # (M, D), the last vector of every basis
    alpha: Tensor  # (M, capacity), the diagonal of T = Q^T S Q
    beta: Tensor  # (M, capacity), its off-diagonal; beta[:, k] couples vector k to vector k + 1
    length: Tensor  # (M,), int64, the dimension of each space
    scale: Tensor  # (M,), the largest entry of T so far


def krylov_extend(
    state: KrylovState,
    product: Tensor,  # (M, D), S q for q = basis[:, step]
    step: int,
) -> None:
    """Turn S q into the next basis vector of every Krylov space, and write it to basis[:, step + 1] and to q.

    A space that S maps into itself is exhausted: it gets the coupling 0 and the zero vector, and stops growing.
    """
    basis, beta, length, scale = state.basis, state.beta, state.length, state.scale
    width = basis.shape[2]
    done = beta[:, step - 1] == 0 if step else torch.zeros_like(length, dtype=torch.bool)
    space = basis[:, : step + 1]
    a = (basis[:, step] * product).sum(-1)
    # The first pass removes the component along the space; the second removes what rounding left of it.
    for _ in range(2):
        product = product - (space.mT @ (space @ product.unsqueeze(-1))).squeeze(-1)
    b = safe_norm(product)
    largest = torch.maximum(scale, a.abs() + b)
    exhausted = done | (b <= coupling_noise(width, b.dtype) * largest)
    if step + 1 == width:
        exhausted = torch.ones_like(exhausted)
    length.copy_(torch.where(done, length, step + 1))
    scale.copy_(torch.where(done, scale, largest))
    state.alpha[:, step] = torch.where(done, 0, a)
    beta[:, step] = torch.where(exhausted, 0, b)
    basis[:, step + 1] = torch.where(exhausted.unsqueeze(-1), 0, product / b.unsqueeze(-1))
    state.q.copy_(basis[:, step + 1])


def coupling_noise(width: int, dtype: torch.dtype) -> float:
    """Return the coupling, in units of the spectral radius, up to which a Krylov space counts as exhausted."""
    return torch.finfo(dtype).eps * (10 + width**0.5)


def tridiagonal_extremes(
    alpha: Tensor,  # (M, k), the diagonals
    beta: Tensor,  # (M, k), the off-diagonals; the last entry is not part of T
    length: Tensor,  # (M,), int64 in [1, k]: the size of each matrix
) -> tuple[Tensor, Tensor]:  # (M, 2) and (M, 2, k), float64
    """Return the smallest and largest eigenvalue of symmetric tridiagonal matrices, and their unit vectors."""
    alpha, beta = alpha.double(), beta.double()
    steps = alpha.shape[1]
    # A matrix smaller than k is padded with diagonal entries above its spectrum. They couple to nothing and sort last,
    # so the first `length` eigenvalues are the matrix's own.
    index = torch.arange(steps, device=alpha.device)
    inside = index < length.unsqueeze(-1)
    coupled = index + 1 < length.unsqueeze(-1)
    zero = torch.zeros_like(alpha)
    largest = torch.maximum(torch.where(inside, alpha.abs(), zero), torch.where(coupled, beta.abs(), zero)).amax(-1)
    above = torch.where(largest > 0, 4 * largest, 1)
    diagonal = torch.where(inside, alpha, above.unsqueeze(-1))
    coupling = torch.diag_embed(torch.where(coupled, beta, zero)[:, :-1], -1) if steps > 1 else 0
    values, vectors = torch.linalg.eigh(torch.diag_embed(diagonal) + coupling)
    ends = torch.stack([torch.zeros_like(length), length - 1], -1)
    vectors = vectors.gather(-1, ends.unsqueeze(-2).expand(-1, steps, -1))
    return values.gather(-1, ends), vectors.mT


def certified_widths(
    alpha: Tensor,  # (M, k), the diagonals of T
    beta: Tensor,  # (M, k), the off-diagonals; entry `length - 1` couples to the next vector, 0 if there is none
    length: Tensor,  # (M,), int64 in [1, k]: the size of each matrix
    values: Tensor,  # (M, 2), float64, the smallest and largest eigenvalue of each T
    growth: Tensor,  # (M,), float64, larger than 1
) -> Tensor:  # (M, 2), float64
    """Return the least w with sum_i phi_i(theta -+ w)^2 >= growth, i = 0 ... length; theta is an extreme value of T.

    phi_i are the Lanczos polynomials: q_(i + 1) = phi_i(S) q_1. An eigenvector u of S whose eigenvalue lies more than w
    beyond theta has |<q_1, u>|^2 < 1 / growth. If q_1 is a random unit vector of D entries, the probability of that is
    at most sqrt(2 D / (pi growth)). The widths are rounded up by at most a factor of 2^(1/16). They are 0 if the space
    is exhausted, and infinite if T is not finite.
    """
    steps = alpha.shape[1]
    last = beta.gather(1, length.unsqueeze(-1) - 1).squeeze(-1)
    inside = torch.arange(steps, device=alpha.device) < length.unsqueeze(-1)
    alpha, beta = (torch.where(inside, tensor.double(), 0) for tensor in (alpha, beta))
    largest = torch.maximum(alpha.abs(), beta.abs()).amax(-1)
    finite = largest.isfinite() & values.isfinite().all(-1)
    scale = torch.where(finite & (largest > 0), largest, 1)
    diagonal, off = alpha / scale.unsqueeze(-1), beta / scale.unsqueeze(-1)
    sign = torch.tensor([-1.0, 1.0], dtype=torch.float64, device=alpha.device)
    low = torch.full_like(values, -52.0)
    high = (torch.log2(growth) / 2 + 1).unsqueeze(-1).expand_as(values).clone()
    while bool((high - low > 1 / 16).any()):
        middle = low + (high - low) / 2
        mu = values / scale.unsqueeze(-1) + sign * torch.exp2(middle)
        pivot, square, term, total = torch.ones_like(mu), torch.zeros_like(mu), torch.ones_like(mu), torch.ones_like(mu)
        for i in range(steps):
            pivot = sign * (mu - diagonal[:, i, None]) - square / pivot
            # A pivot that is not positive is rounding error: mu is too close to theta.
            term = torch.where((pivot > 0) & inside[:, i, None], term * (pivot / off[:, i, None]).square(), 0)
            total = total + term
            square = off[:, i, None].square()
        grown = total >= growth.unsqueeze(-1)
        moves = high - low > 1 / 16
        high, low = torch.where(moves & grown, middle, high), torch.where(moves & ~grown, middle, low)
    widths = torch.where(finite.unsqueeze(-1), torch.exp2(high) * scale.unsqueeze(-1), torch.inf)
    return torch.where((last == 0).unsqueeze(-1), 0, widths)


def symmetric_extremes(S: Tensor) -> tuple[Tensor, Tensor]:  # (M, D, D) -> (M, 2) and (M, 2, D), float64
    """Return the smallest and largest eigenvalue of symmetric matrices, and their unit vectors."""
    S = S.double()
    # LAPACK reads only one triangle, so make both agree.
    values, vectors = torch.linalg.eigh((S + S.mT) / 2)
    return values[:, [0, -1]], vectors[..., [0, -1]].mT


def safe_norm(vectors: Tensor) -> Tensor:
    """Return the norms along the last dimension; no square overflows or underflows, whatever the scale of S."""
    largest = vectors.abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, largest, 1)
    return (vectors / scale).norm(dim=-1) * scale.squeeze(-1)
