"""The operations with their input checked, and the one place where a backend is chosen."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from s3d_fast import checks, reference
from s3d_fast.activations import Activation

Pair = tuple[int, int]

BACKENDS = ("auto", "reference", "cpu", "triton")


def resolve_backend(backend: str) -> str:
    """Return the backend that does the work: "auto" becomes the fastest one there is.

    Raises:
        ValueError: the name is not one of BACKENDS.
        RuntimeError: the backend was asked for by name and is not there. There is no silent fallback.
    """
    checks.is_choice("backend", backend, BACKENDS)
    if backend in ("cpu", "triton"):
        raise RuntimeError(
            f"backend {backend!r} is not part of this version of s3d_fast, which computes with plain PyTorch on "
            "every device; use backend='auto' or 'reference'"
        )
    return "reference"


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
        X: the rows that every filter of the layer sees; float32, float64, or bfloat16/float16 (computed in float32).
        C: the curvature coefficients, in the dtype of X.
        V: one vector per filter, or K of them; in the dtype of the computation.
        bias: every row is [X[n], 1], and the last entry of each vector belongs to the bias.
        backend: "auto", "reference", "cpu" or "triton".
        check_finite: look for NaN and Inf in X and C, which costs a pass over both.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not match, or X or C is not finite.
        RuntimeError: the backend asked for is not there.
    """
    check_rows(X, C, check_finite)
    _check_vectors(V, C.shape[1], X.shape[1] + bias, X)
    resolve_backend(backend)
    return reference.splitting_matvec(X, C, V, bias)


def splitting_matrices(
    X: Tensor,  # (N, D)
    C: Tensor,  # (N, M)
    *,
    bias: bool = False,
    backend: str = "auto",
    check_finite: bool = True,
) -> Tensor:  # (M, D, D), or (M, D + 1, D + 1) with bias
    """Return the dense splitting matrices S_j = X^T diag(C[:, j]) X, for small D.

    Raises: as `splitting_matvec`.
    """
    check_rows(X, C, check_finite)
    resolve_backend(backend)
    return reference.splitting_matrices(X, C, bias, checks.compute_dtype(X.dtype))


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

    Raises: as `splitting_matvec`.
    """
    geometry = check_conv(X, C, kernel_size, stride, padding, dilation, check_finite)
    _check_vectors(V, C.shape[1], X.shape[1] * geometry[0][0] * geometry[0][1] + bias, X)
    resolve_backend(backend)
    return reference.conv_matvec(X, C, V, *geometry, bias)


def edgeconv_matvec(
    X: Tensor,  # (B, P, F)
    winner: Tensor,  # (B, P, M), int64
    C: Tensor,  # (B, P, M)
    V: Tensor,  # (M, 2 F) or (K, M, 2 F); 2 F + 1 with bias
    *,
    bias: bool = False,
    backend: str = "auto",
    check_finite: bool = True,
) -> Tensor:  # like V
    """Return S_j v_j for every EdgeConv filter; no tensor over edges is formed.

    Args:
        X: the features of the P points of each cloud.
        winner: for each point and filter, the index of the neighbour whose edge won the maximum.
        C: the curvature coefficients of the winning edges.
        V, bias, backend: as for `splitting_matvec`.
        check_finite: look for NaN and Inf in X and C, and for indices out of range in winner.

    Raises: as `splitting_matvec`.
    """
    check_edgeconv(X, winner, C, check_finite)
    _check_vectors(V, C.shape[2], 2 * X.shape[2] + bias, X)
    resolve_backend(backend)
    return reference.edgeconv_matvec(X, winner, C, V, bias)


def curvature_coefficients(
    g: Tensor,  # (N, M)
    z: Tensor,  # (N, M)
    activation: Activation,
    scale: Tensor | None = None,  # (M,)
    *,
    backend: str = "auto",
) -> Tensor:  # (N, M)
    """Return C = g * act''(z) * s^2, the coefficients of the splitting matrices.

    Args:
        g: the gradient of the loss with respect to the activation's output.
        z: the activation's input.
        activation: from `s3d_fast.activation`.
        scale: s = gamma / sqrt(var + eps) where a BatchNorm stands between the filter and the activation.

    Raises: as `splitting_matvec`.
    """
    checks.is_tensor("g", g)
    checks.has_shape("g", g, ("N", "M"))
    checks.is_tensor("z", z)
    checks.has_shape("z", z, tuple(g.shape))
    checks.agrees("z", z, "g", g)
    if not isinstance(activation, Activation):
        raise TypeError(f"activation must be an Activation, from s3d_fast.activation; got {type(activation).__name__}")
    if scale is not None:
        checks.is_tensor("scale", scale)
        checks.has_shape("scale", scale, (g.shape[1],))
        checks.agrees("scale", scale, "g", g)
    resolve_backend(backend)
    return reference.curvature_coefficients(g, z, activation, scale)


def grow_weight(
    weight: Tensor,  # (M, I, ...), or (M,)
    rows: Tensor,  # (M',), int64
    row_scale: Tensor | None = None,  # (M',)
    shift: Tensor | None = None,  # (M', I, ...)
    columns: Tensor | None = None,  # (I',), int64
    column_scale: Tensor | None = None,  # (I',)
    *,
    backend: str = "auto",
) -> Tensor:  # (M', I', ...)
    """Return (row_scale * weight[rows] + shift)[:, columns] * column_scale: the weight of a layer after splits.

    Indices out of range raise an IndexError or a RuntimeError, before anything is changed.
    """
    resolve_backend(backend)
    return reference.grow_weight(weight, rows, row_scale, shift, columns, column_scale)


def check_rows(X: Tensor, C: Tensor, check_finite: bool = True) -> None:
    """Raise unless X (N, D) and C (N, M) are rows and coefficients that go together."""
    _check_pair(X, C, ("N", "D"))
    checks.has_shape("C", C, (len(X), "M"))
    _check_values(X, C, check_finite)


def check_conv(
    X: Tensor,
    C: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    check_finite: bool = True,
) -> tuple[Pair, Pair, Pair, Pair]:
    """Return the geometry as pairs; raise unless X and C are input and coefficients of such a convolution.

    X is (B, I, H, W) and C is (B, M, H', W').
    """
    _check_pair(X, C, ("B", "I", "H", "W"))
    kernel_size = checks.is_pair("kernel_size", kernel_size, 1)
    stride = checks.is_pair("stride", stride, 1)
    padding = checks.is_pair("padding", padding, 0)
    dilation = checks.is_pair("dilation", dilation, 1)
    sizes = [
        (X.shape[2 + d] + 2 * padding[d] - dilation[d] * (kernel_size[d] - 1) - 1) // stride[d] + 1 for d in (0, 1)
    ]
    if min(sizes) < 1:
        raise ValueError(f"X must be at least as large as the kernel, got {tuple(X.shape)} for {tuple(kernel_size)}")
    checks.has_shape("C", C, (len(X), "M", *sizes))
    _check_values(X, C, check_finite)
    return kernel_size, stride, padding, dilation


def check_edgeconv(X: Tensor, winner: Tensor, C: Tensor, check_finite: bool = True) -> None:
    """Raise unless X (B, P, F), winner (B, P, M) and C (B, P, M) describe an EdgeConv layer."""
    _check_pair(X, C, ("B", "P", "F"))
    checks.has_shape("C", C, (*X.shape[:2], "M"))
    _check_values(X, C, check_finite)
    if not isinstance(winner, Tensor) or winner.dtype != torch.int64:
        raise TypeError(f"winner must be an int64 tensor, got {getattr(winner, 'dtype', type(winner).__name__)}")
    checks.has_shape("winner", winner, tuple(C.shape))
    if winner.device != X.device:
        raise ValueError(f"winner must be on {X.device} like X, got {winner.device}")
    if check_finite and winner.numel():
        low, high = (int(bound) for bound in winner.aminmax())
        if low < 0 or high >= X.shape[1]:
            raise ValueError(f"winner must lie in [0, {X.shape[1]}), got indices from {low} to {high}")


def _check_pair(X: Tensor, C: Tensor, shape: Sequence[str]) -> None:
    checks.is_tensor("X", X)
    checks.is_tensor("C", C)
    checks.has_shape("X", X, shape)
    checks.agrees("C", C, "X", X)


def _check_values(X: Tensor, C: Tensor, check_finite: bool) -> None:
    if check_finite:
        checks.is_finite("X", X)
        checks.is_finite("C", C)


def _check_vectors(V: Tensor, filters: int, width: int, X: Tensor) -> None:
    checks.is_tensor("V", V)
    checks.has_shape("V", V, ("K", filters, width) if V.dim() == 3 else (filters, width))
    checks.agrees("V", V, "X", X, dtype=checks.compute_dtype(X.dtype))
