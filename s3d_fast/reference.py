"""Every operation as plain PyTorch, one expression each: the definition that tests and benchmarks compare with.

Nothing here checks its input; `s3d_fast.ops` does, once. Shapes: N rows, D parameters per filter, M filters, and any
leading dimensions of V (written `...`) hold several vectors per filter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from s3d_fast.activations import Activation


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


def splitting_matrices(
    X: Tensor,  # (N, D)
    C: Tensor,  # (N, M)
    bias: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:  # (M, D, D), or (M, D + 1, D + 1) with bias
    """Return the dense splitting matrices S_j = X^T diag(C[:, j]) X in `dtype` (that of X by default)."""
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
    X, C = X.to(V.dtype), C.to(V.dtype)
    weight = (V[..., :-1] if bias else V).reshape(-1, X.shape[1], *kernel_size)
    offset = V[..., -1].reshape(-1) if bias else None
    if len(weight) == 0:
        return torch.zeros_like(V)
    copies = V.shape[:-2].numel()
    geometry = (list(stride), list(padding), list(dilation))
    U = F.conv2d(X, weight, offset, *geometry) * C.repeat(1, copies, 1, 1)
    result = conv2d_weight(X, list(weight.shape), U, *geometry).flatten(1)
    if bias:
        result = torch.cat([result, U.sum((0, 2, 3))[:, None]], 1)
    return result.reshape(V.shape)


def edgeconv_matvec(
    X: Tensor,  # (B, P, F), the features of P points
    winner: Tensor,  # (B, P, M), integers in [0, P): the neighbour that won the maximum
    C: Tensor,  # (B, P, M)
    V: Tensor,  # (..., M, 2 F), or (..., M, 2 F + 1) with bias
    bias: bool = False,
) -> Tensor:  # like V
    """Return S_j v_j for every EdgeConv filter, in the point-level form.

    The row of point i and filter j is the winning edge e = [x_w - x_i, x_i], w = winner[., i, j]. With v = [a, b],
    v.e = a.x_w + (b - a).x_i, so two products over points, a gather and a scatter replace all work over edges.
    """
    X, C = X.to(V.dtype), C.to(V.dtype)
    a, b = V[..., : X.shape[-1]], V[..., X.shape[-1] : 2 * X.shape[-1]]
    P = X @ a.mT.unsqueeze(-3)
    index = winner.expand(P.shape)
    u = P.gather(-2, index) + X @ (b - a).mT.unsqueeze(-3)
    if bias:
        u = u + V[..., None, None, :, -1]
    t = C * u
    received = torch.zeros_like(t).scatter_add(-2, index, t)
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
    g: Tensor,  # (N, M), dLoss / dh
    z: Tensor,  # (N, M), the input of the activation
    activation: Activation,
    scale: Tensor | None = None,  # (M,), s = gamma / sqrt(var + eps) of a following BatchNorm
) -> Tensor:  # (N, M)
    """Return C = g * act''(z) * s^2."""
    C = g * activation.second(z)
    return C if scale is None else C * scale**2


def with_ones(X: Tensor) -> Tensor:
    """Return [X, 1]: the rows that a filter with a bias sees."""
    return torch.cat([X, X.new_ones(*X.shape[:-1], 1)], -1)


def grow_weight(
    weight: Tensor,  # (M, I, ...), or (M,) for one number per channel
    rows: Tensor,  # (M',), which row each new row copies
    row_scale: Tensor | None = None,  # (M',)
    shift: Tensor | None = None,  # (M', I, ...), added to the copied rows
    columns: Tensor | None = None,  # (I',), which column each new column copies
    column_scale: Tensor | None = None,  # (I',)
) -> Tensor:  # (M', I', ...)
    """Return (row_scale * weight[rows] + shift)[:, columns] * column_scale: rows first, columns after."""
    result = weight.index_select(0, rows)
    if row_scale is not None:
        result = result * row_scale.reshape(-1, *[1] * (result.dim() - 1))
    if shift is not None:
        result = result + shift
    if columns is not None:
        result = result.index_select(1, columns)
    if column_scale is not None:
        result = result * column_scale.reshape(-1, *[1] * (result.dim() - 2))
    return result
