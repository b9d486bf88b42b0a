"""Argument checks of the operations: made once, by the public calls or when an operator is built."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from s3d_fast.base import dtypes, require
from s3d_fast.maths.incoming import Incoming
from s3d_fast.maths.reference import ConvGeometry, DepthwiseStage, EdgeTies, PoolTies


def require_rows(X: Tensor, C: Tensor, check_finite: bool = True) -> None:
    """Raise unless X (N, D) and C (N, M) are rows and coefficients of one dtype on one device."""
    tensors = isinstance(X, Tensor) and isinstance(C, Tensor)
    # One condition covers the usual case.
    if not (tensors and X.dim() == C.dim() == 2 and X.shape[0] == C.shape[0] and _agree(X, C)):
        _require_pair(X, C, ("N", "D"))
        require.shape("C", C, (X.shape[0], "M"))
    _require_finite(X, C, check_finite)


def require_own_rows(E: Tensor, K: Tensor, X: Tensor, filters: int, width: int, check_finite: bool = True) -> None:
    """Raise unless E (R, M, D) and K (R, M) are rows of filters and coefficients, with the dtype and device of X."""
    _require_like_rows("E", E, X, ("R", filters, width), check_finite)
    _require_like_rows("K", K, X, (len(E), filters), check_finite)


def require_gated(
    X: Tensor,  # (N, D)
    c11: Tensor,  # (N, M)
    c12: Tensor,  # (N, M)
    c22: Tensor | None,  # (N, M)
    check_finite: bool = True,
) -> None:
    """Raise unless X holds rows, and c11, c12 and c22 coefficients of one shape, dtype and device."""
    require.tensor("X", X)
    require.shape("X", X, ("N", "D"))
    if check_finite:
        require.finite("X", X)
    _require_like_rows("c11", c11, X, (X.shape[0], "M"), check_finite)
    for name, coefficients in {"c12": c12, **({} if c22 is None else {"c22": c22})}.items():
        _require_like_rows(name, coefficients, X, tuple(c11.shape), check_finite)


def require_pairs(X: Sequence[Tensor], C: Sequence[Tensor], bias: Sequence[bool]) -> None:
    """Raise unless there is an entry of X and bias for every layer, and of C for every pair of layers."""
    count = len(X)
    if not count or len(bias) != count or len(C) != count * (count + 1) // 2:
        raise ValueError(
            "X and bias must have one entry per layer, and C one per pair of layers, "
            f"got {count}, {len(bias)} and {len(C)}"
        )


def require_joint(
    X: Sequence[Tensor],  # n times (N, D_a)
    C: Sequence[Tensor],  # n (n + 1) / 2 times (N, M)
    bias: Sequence[bool],
    check_finite: bool = True,
) -> None:
    """Raise unless X holds rows of several layers, and C coefficients for every pair of them."""
    require_pairs(X, C, bias)
    for x in X:
        require.tensor("X", x)
        require.shape("X", x, (len(X[0]), "D"))
        if check_finite:
            require.finite("X", x)
        if x.dtype != X[0].dtype or x.device != X[0].device:
            raise ValueError(f"X must have one dtype and device, got {X[0].dtype} on {X[0].device} and {x.dtype}")
    _require_like_rows("C", C[0], X[0], (len(X[0]), "M"), check_finite)
    for own in C[1:]:
        _require_like_rows("C", own, X[0], tuple(C[0].shape), check_finite)


def require_depthwise(
    X: Tensor,  # (B H W, D)
    C: Sequence[Tensor],  # n + 1 times (B, H_i, W_i, M)
    d: Sequence[Tensor],  # n times (B, H_i, W_i, M)
    weight: Sequence[Tensor],  # n times (M, kh, kw)
    stages: Sequence[DepthwiseStage],  # n
    check_finite: bool = True,
) -> None:
    """Raise unless the tensors describe a pointwise layer with depthwise stages behind it."""
    if not len(stages) == len(d) == len(weight) == len(C) - 1 or not stages:
        raise ValueError(
            "C must have one entry more than d, weight and stages, which have one for each stage; "
            f"got {len(C)}, {len(d)}, {len(weight)} and {len(stages)}"
        )
    require.tensor("C[0]", C[0])
    require.shape("C[0]", C[0], ("B", "H", "W", "M"))
    shape = tuple(C[0].shape)
    for number, (c, slope, kernel, stage) in enumerate(zip(C, d, weight, stages, strict=False)):
        _require_like_rows(f"C[{number}]", c, X, shape, check_finite)
        size = require_stage(X, slope, kernel, stage, check_finite, str(number), shape)
        shape = (shape[0], *size, shape[3])
    _require_like_rows(f"C[{len(stages)}]", C[-1], X, shape, check_finite)


def require_stage(
    X: Tensor,  # (B H W, D)
    d: Tensor,  # (B, H_i, W_i, M)
    weight: Tensor,  # (M, kh, kw)
    stage: DepthwiseStage,
    check_finite: bool = True,
    number: str = "",
    shape: Sequence[int] | None = None,
) -> tuple[int, int]:
    """Return the size of a depthwise stage's result; raise unless d, of this shape, and weight belong to the stage.

    `number` is the stage's place in lists. Without a shape, the stage is the first: H and W are those of d.
    """
    place = f"[{number}]" if number else ""
    if not isinstance(stage, DepthwiseStage):
        raise TypeError(f"stage{place} must be a DepthwiseStage, got {type(stage).__name__}")
    require.tensor("X", X)
    require.shape("X", X, ("B H W", "D"))
    if check_finite and number in ("", "0"):
        require.finite("X", X)
    _require_like_rows(f"d{place}", d, X, shape or ("B", "H", "W", "M"), check_finite)
    if number in ("", "0") and d.shape[:3].numel() != X.shape[0]:
        raise ValueError(f"X must have one row for each place of d, got {X.shape[0]} for {tuple(d.shape)}")
    _require_like_rows(f"weight{place}", weight, X, (d.shape[3], "kh", "kw"), check_finite)
    require.pair("stride", stage.stride, 1)
    require.pair("padding", stage.padding, 0)
    require.pair("dilation", stage.dilation, 1)
    size = stage.size(d.shape[1:3], weight.shape[1:])
    if min(*size, *weight.shape[1:]) < 1:
        raise ValueError(f"weight{place} must fit into maps of {tuple(d.shape[1:3])}, got {tuple(weight.shape)}")
    return size


def require_conv(
    X: Tensor,  # (B, I, H, W)
    C: Tensor,  # (B, M, H', W')
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    check_finite: bool = True,
) -> ConvGeometry:
    """Return the geometry of a convolution; raise unless X can be its input and C its coefficients."""
    _require_pair(X, C, ("B", "I", "H", "W"))
    geometry = ConvGeometry(
        require.pair("kernel_size", kernel_size, 1),
        require.pair("stride", stride, 1),
        require.pair("padding", padding, 0),
        require.pair("dilation", dilation, 1),
    )
    sizes = [
        (X.shape[2 + d] + 2 * geometry.padding[d] - geometry.dilation[d] * (geometry.kernel_size[d] - 1) - 1)
        // geometry.stride[d]
        + 1
        for d in (0, 1)
    ]
    if min(sizes) < 1:
        raise ValueError(f"X must be at least as large as the kernel, got {tuple(X.shape)} for {geometry.kernel_size}")
    require.shape("C", C, (X.shape[0], "M", *sizes))
    _require_finite(X, C, check_finite)
    return geometry


def require_edgeconv(X: Tensor, winner: Tensor, C: Tensor, check_finite: bool = True) -> None:
    """Raise unless X (B, P, F), winner (B, P, M) and C (B, P, M) describe an EdgeConv layer."""
    _require_pair(X, C, ("B", "P", "F"))
    require.shape("C", C, (*X.shape[:2], "M"))
    _require_finite(X, C, check_finite)
    _require_index("winner", winner, X, C.shape, X.shape[1], check_finite, dtypes.INDEX_DTYPES)


def require_edge_ties(
    X: Tensor,  # (B, P, F)
    C: Tensor,  # (B, P, M)
    runner: Tensor | None,  # (B, P, M)
    K: Tensor | None,  # (B, P, M)
    d1: Tensor | None,  # (B, P, M)
    d2: Tensor | None,  # (B, P, M)
    check_finite: bool = True,
) -> EdgeTies | None:
    """Return the ties of an EdgeConv layer, if there are any; raise unless the tensors describe them."""
    if (runner is None) != (K is None) or (d1 is None) != (d2 is None) or (K is None and d1 is not None):
        raise ValueError("runner and K must be given together, and d1 and d2 together with both of them")
    if runner is None or K is None:
        return None
    _require_index("runner", runner, X, C.shape, X.shape[1], check_finite, dtypes.INDEX_DTYPES)
    for name, tensor in (("K", K), ("d1", d1), ("d2", d2)):
        if tensor is not None:
            _require_like_rows(name, tensor, X, tuple(C.shape), check_finite)
    return EdgeTies(runner, K, d1, d2)


def require_pool_ties(
    X: Tensor,
    C: Tensor,  # (B, M, H', W')
    ties: PoolTies,
    check_finite: bool = True,
) -> None:
    """Raise unless the ties have the shape (B, M, Q), the dtype and device of X, and positions in [0, H' W')."""
    if (ties.d1 is None) != (ties.d2 is None):
        raise ValueError("d1 and d2 must be given together")
    _require_like_rows("K", ties.K, X, (*C.shape[:2], "Q"), check_finite)
    for name, tensor in (("d1", ties.d1), ("d2", ties.d2)):
        if tensor is not None:
            _require_like_rows(name, tensor, X, tuple(ties.K.shape), check_finite)
    for name, tensor in (("first", ties.first), ("second", ties.second)):
        _require_index(name, tensor, X, ties.K.shape, C.shape[2] * C.shape[3], check_finite)


def require_incoming(incoming: Incoming, winner: Tensor, check_values: bool) -> None:
    """Raise unless `incoming` has the shapes of `incoming_edges(winner)`; `check_values` compares the winners too."""
    clouds, points, filters = winner.shape
    shapes = ((clouds, points, filters), (clouds, points, filters), (clouds, points + 1, filters))
    for tensor, shape in zip(incoming, shapes, strict=True):
        if tuple(tensor.shape) != shape or tensor.device != winner.device or not tensor.is_contiguous():
            raise ValueError(
                f"incoming must be incoming_edges(winner), got one with a tensor of shape {tuple(tensor.shape)}"
            )
    if check_values and not torch.compiler.is_compiling() and not torch.equal(incoming.winner, winner.to(torch.int32)):
        raise ValueError("incoming must be incoming_edges(winner), got the edges of another winner")


def require_vectors(V: Tensor, filters: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise unless V holds one vector per filter, (M, D), or K vectors per filter, (K, M, D); X has this device."""
    # One condition covers the usual case: this runs at every product.
    fits = isinstance(V, Tensor) and V.dim() in (2, 3) and V.shape[-2:] == (filters, width)
    if fits and V.dtype == dtype and V.device == device:
        return
    require.tensor("V", V)
    require.shape("V", V, ("K", filters, width) if V.dim() == 3 else (filters, width))
    if V.dtype != dtype:
        raise TypeError(f"V must be {dtype} to go with X, got {V.dtype}")
    if V.device != device:
        raise ValueError(f"V must be on {device} like X, got {V.device}")


def _agree(X: Tensor, C: Tensor) -> bool:
    return X.dtype in dtypes.FLOAT_DTYPES and C.dtype == X.dtype and C.device == X.device


def _require_pair(X: Tensor, C: Tensor, shape: Sequence[str]) -> None:
    require.tensor("X", X)
    require.tensor("C", C)
    require.shape("X", X, shape)
    require.agreement("C", C, "X", X)


def _require_index(
    name: str,
    index: Tensor,
    X: Tensor,
    shape: Sequence[int],
    size: int,
    check_values: bool,
    allowed: Sequence[torch.dtype] = (torch.int64,),
) -> None:
    """Raise unless the index is of these dtypes and shape, on the device of X; `check_values`: and in [0, size)."""
    if not isinstance(index, Tensor) or index.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(f"{name} must be an {names} tensor, got {getattr(index, 'dtype', type(index).__name__)}")
    require.shape(name, index, tuple(shape))
    if index.device != X.device:
        raise ValueError(f"{name} must be on {X.device} like X, got {index.device}")
    # Inside torch.compile, reading a number would divide the graph.
    if check_values and not torch.compiler.is_compiling() and index.numel():
        low, high = (int(bound) for bound in index.aminmax())
        if low < 0 or high >= size:
            raise ValueError(f"{name} must lie in [0, {size}), got indices from {low} to {high}")


def _require_like_rows(name: str, tensor: Tensor, X: Tensor, shape: Sequence[int | str], check_finite: bool) -> None:
    """Raise unless a tensor has this shape, and the dtype and device of X."""
    require.tensor(name, tensor)
    require.shape(name, tensor, shape)
    require.agreement(name, tensor, "X", X)
    if check_finite:
        require.finite(name, tensor)


def _require_finite(X: Tensor, C: Tensor, check_finite: bool) -> None:
    if check_finite:
        require.finite("X", X)
        require.finite("C", C)
