"""What the operators torch.ops.s3d_fast.* return on tensors without data, for `torch.compile` and `torch.export`.

Each function checks the arguments of its operator as csrc/ does, and returns empty results. `implementations` checks
the arguments of other kernels by it. Sizes may be symbols: one
compiled graph serves every number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from s3d_fast.backends.arguments import require_pairs
from s3d_fast.base import require
from s3d_fast.base.dtypes import COMPUTE_DTYPES, HALF_DTYPES, INDEX_DTYPES, compute_dtype

# As many kinks as csrc/kernels.h has room for.
_MOST_KINKS = 8
# The formulas of csrc/kernels.h: how many, and the one without slopes.
_CURVATURES, _GELU = 10, 2


def splitting_matvec(X: Tensor, C: Tensor, V: Tensor, bias: bool, rounded: bool = False) -> Tensor:
    _require_compute_dtype("V", V)
    _require_rows(X, C, V.dtype, V.device)
    _require_vectors(V, C.shape[1], X.shape[1] + bias)
    return V.new_empty(V.shape)


def splitting_matvec_grouped(
    X: Sequence[Tensor], C: Sequence[Tensor], V: Sequence[Tensor], bias: Sequence[bool], rounded: bool = False
) -> list[Tensor]:
    if not len(X) == len(C) == len(V) == len(bias):
        raise ValueError(
            f"X, C, V and bias must have one entry per layer, got {len(X)}, {len(C)}, {len(V)} and {len(bias)}"
        )
    return [splitting_matvec(*layer) for layer in zip(X, C, V, bias, strict=True)]


def gated_matvec(X: Tensor, c11: Tensor, c12: Tensor, c22: Tensor | None, V: Tensor, bias: bool) -> Tensor:
    _require_compute_dtype("V", V)
    _require_rows(X, c11, V.dtype, V.device, "c11")
    for name, other in (("c12", c12), ("c22", c22)):
        if other is not None:
            _require_stored(name, other, V.dtype, V.device)
            require.shape(name, other, c11.shape)
    _require_vectors(V, c11.shape[1], 2 * (X.shape[1] + bias))
    return V.new_empty(V.shape)


def joint_matvec(
    X: Sequence[Tensor], C: Sequence[Tensor], V: Tensor, bias: Sequence[bool], rounded: bool = False
) -> Tensor:
    _require_compute_dtype("V", V)
    require_pairs(X, C, bias)
    for x in X:
        _require_rows(x, C[0], V.dtype, V.device, "C")
    for own in C:
        _require_stored("C", own, V.dtype, V.device)
        require.shape("C", own, C[0].shape)
    _require_vectors(V, C[0].shape[1], sum(x.shape[1] + one for x, one in zip(X, bias, strict=True)))
    return V.new_empty(V.shape)


def depthwise_matvec_grouped(
    X: Sequence[Tensor],
    C: Sequence[Tensor],
    d: Sequence[Tensor],
    weight: Sequence[Tensor],
    stages: Sequence[int],
    geometry: Sequence[int],
    V: Sequence[Tensor],
    bias: Sequence[bool],
) -> list[Tensor]:
    total = sum(stages)
    if not len(X) == len(stages) == len(V) == len(bias) or min(stages, default=1) < 1:
        raise ValueError("X, stages, V and bias must have one entry per layer, and stages must be positive")
    if not (len(C) == total + len(X) and len(d) == len(weight) == total and len(geometry) == 6 * total):
        raise ValueError(f"C must have {total + len(X)} entries, d and weight {total} and geometry {6 * total}")
    results, at = [], 0
    for layer, count in enumerate(stages):
        own = V[layer]
        _require_compute_dtype("V", own)
        _require_stored("X", X[layer], own.dtype, own.device)
        require.shape("X", X[layer], ("B H W", "D"))
        require.shape("C", C[at + layer], ("B", "H", "W", "M"))
        shape = tuple(C[at + layer].shape)
        if shape[0] * shape[1] * shape[2] != X[layer].shape[0]:
            raise ValueError(f"C must have shape (B, H, W, M) with B H W = {X[layer].shape[0]}, got {shape}")
        for stage in range(at, at + count):
            for name, maps in (("C", C[stage + layer]), ("d", d[stage])):
                _require_stored(name, maps, own.dtype, own.device)
                require.shape(name, maps, shape)
            _require_stored("weight", weight[stage], own.dtype, own.device)
            shape = _stage_shape(shape, weight[stage], geometry[6 * stage : 6 * stage + 6])
        at += count
        _require_stored("C", C[at + layer], own.dtype, own.device)
        require.shape("C", C[at + layer], shape)
        _require_vectors(own, shape[3], X[layer].shape[1] + bias[layer])
        results.append(own.new_empty(own.shape))
    return results


def depthwise_row_norms(X: Tensor, d: Tensor, weight: Tensor, geometry: Sequence[int], bias: bool) -> Tensor:
    dtype = compute_dtype(X.dtype)
    for name, tensor in (("X", X), ("d", d), ("weight", weight)):
        _require_stored(name, tensor, dtype, X.device)
    require.shape("X", X, ("B H W", "D"))
    require.shape("d", d, ("B", "H", "W", "M"))
    if d.shape[0] * d.shape[1] * d.shape[2] != X.shape[0]:
        raise ValueError(f"d must have shape (B, H, W, M) with B H W = {X.shape[0]}, got {tuple(d.shape)}")
    return X.new_empty(_stage_shape(tuple(d.shape), weight, geometry), dtype=dtype)


def edgeconv_matvec(
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
    _require_compute_dtype("V", V)
    for name, tensor in (("X", X), ("C", C)):
        _require_stored(name, tensor, V.dtype, V.device)
    require.shape("X", X, ("B", "P", "F"))
    require.shape("C", C, (*X.shape[:2], "M"))
    if (runner is None) != (K is None) or (d1 is None) != (d2 is None) or (K is None and d1 is not None):
        raise ValueError("runner and K must be given together, and d1 and d2 with both of them")
    for name, index in (("winner", winner), ("runner", runner)):
        if index is not None:
            _require_one_of(name, index, INDEX_DTYPES, V.device)
            require.shape(name, index, C.shape)
    for name, ties in (("K", K), ("d1", d1), ("d2", d2)):
        if ties is not None:
            _require_stored(name, ties, V.dtype, V.device)
            require.shape(name, ties, C.shape)
    for name, edges in (("incoming", incoming), ("runner_incoming", runner_incoming)):
        if edges is not None:
            _require_edges(name, edges, C)
    _require_vectors(V, C.shape[2], 2 * X.shape[2] + bias)
    return V.new_empty(V.shape)


def tied_rows_matvec(
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
    _require_compute_dtype("V", V)
    _require_rows(X, C, V.dtype, V.device, "C")
    _require_ties(first, second, K, d1, d2, ("windows", C.shape[1], "Q"), V)
    if K.shape[0] == 0 or X.shape[0] % K.shape[0] != 0:
        raise ValueError(f"the windows of K must divide {X.shape[0]} rows, got {K.shape[0]}")
    _require_vectors(V, C.shape[1], X.shape[1] + bias)
    return V.new_empty(V.shape)


def _require_edges(name: str, edges: Sequence[Tensor], C: Tensor) -> None:
    if len(edges) != 3:
        raise ValueError(f"{name} must be the 3 tensors of incoming_edges, got {len(edges)}")
    clouds, points, filters = C.shape
    for part, size in zip(edges, (points, points, points + 1), strict=True):
        _require_like(name, part, torch.int32, C.device)
        require.shape(name, part, (clouds, size, filters))


def tied_maps(
    P: Tensor,
    C: Tensor,
    first: Tensor,
    second: Tensor,
    K: Tensor,
    d1: Tensor | None = None,
    d2: Tensor | None = None,
) -> Tensor:
    _require_compute_dtype("P", P)
    require.shape("P", P, ("B", "K M", "H", "W"))
    _require_stored("C", C, P.dtype, P.device)
    require.shape("C", C, (P.shape[0], "M", P.shape[2], P.shape[3]))
    if (P.shape[1] % C.shape[1] if C.shape[1] else P.shape[1]) != 0:
        raise ValueError(f"C must have the shape (B, M, H, W) of P {tuple(P.shape)}, got {tuple(C.shape)}")
    _require_ties(first, second, K, d1, d2, (*C.shape[:2], "Q"), P)
    contiguous = P.is_contiguous() or P.stride(1) != 1
    return torch.empty_like(P, memory_format=torch.contiguous_format if contiguous else torch.channels_last)


def splitting_matrices(X: Tensor, C: Tensor, bias: bool) -> Tensor:
    dtype = compute_dtype(X.dtype)
    _require_rows(X, C, dtype, X.device)
    width = X.shape[1] + bias
    return X.new_empty((C.shape[1], width, width), dtype=dtype)


def add_splitting_matrices(out: Tensor, X: Tensor, C: Tensor, bias: bool, weight: float) -> None:
    _require_compute_dtype("out", out)
    _require_rows(X, C, out.dtype, out.device)
    width = X.shape[1] + bias
    require.shape("out", out, (C.shape[1], width, width))
    _require_contiguous("out", out)


def curvature_coefficients(
    g: Tensor,
    z: Tensor,
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
    _require_compute_dtype("g", g)
    _require_like("z", z, g.dtype, g.device)
    require.shape("z", z, g.shape)
    if not 0 <= axis < g.dim():
        raise ValueError(f"axis must be a dimension of g, got {axis} for {tuple(g.shape)}")
    if (row_norm is None) != (bandwidth is None):
        raise ValueError("row_norm and bandwidth must be given together")
    rows = 1
    for size in (*g.shape[:axis], *g.shape[axis + 1 :]):
        rows = rows * size
    sizes = {"scale": g.shape[axis], "row_norm": rows, "bandwidth": g.shape[axis]}
    for name, vector in (("scale", scale), ("row_norm", row_norm), ("bandwidth", bandwidth)):
        if vector is not None:
            _require_like(name, vector, g.dtype, g.device)
            is_whole = name == "row_norm" and vector.dim() > 1
            require.shape(name, vector, g.shape if is_whole else (sizes[name],))
    _require_formula(curvature, kink_at, kink_jump)
    return g.new_empty(g.shape)


def activation_slopes(
    z: Tensor,
    scale: Tensor | None,
    axis: int,
    curvature: int,
    a: float,
    b: float,
    kink_at: Sequence[float],
    kink_jump: Sequence[float],
) -> Tensor:
    _require_compute_dtype("z", z)
    if not 0 <= axis < z.dim():
        raise ValueError(f"axis must be a dimension of z, got {axis} for {tuple(z.shape)}")
    if scale is not None:
        _require_like("scale", scale, z.dtype, z.device)
        require.shape("scale", scale, (z.shape[axis],))
    _require_formula(curvature, kink_at, kink_jump)
    if curvature == _GELU:
        raise ValueError("curvature: there is no slope of gelu")
    return z.new_empty(z.shape)


def _require_formula(curvature: int, kink_at: Sequence[float], kink_jump: Sequence[float]) -> None:
    if not 0 <= curvature < _CURVATURES:
        raise ValueError(f"curvature must lie in [0, {_CURVATURES}), got {curvature}")
    if len(kink_at) != len(kink_jump) or len(kink_at) > _MOST_KINKS:
        raise ValueError(
            f"kink_at and kink_jump must have the same length, at most {_MOST_KINKS}, "
            f"got {len(kink_at)} and {len(kink_jump)}"
        )


def curvature_coefficients_(g: Tensor, *others: object) -> None:
    curvature_coefficients(g, *others)  # type: ignore[arg-type]
    _require_contiguous("g", g)


def grow_weights(
    weight: Sequence[Tensor],
    rows: Sequence[Tensor],
    row_scale: Sequence[Tensor | None],
    shift: Sequence[Tensor | None],
    shift_rows: Sequence[Tensor | None],
    columns: Sequence[Tensor | None],
    column_scale: Sequence[Tensor | None],
    shift_scale: Sequence[float],
) -> list[Tensor]:
    lists = (weight, rows, row_scale, shift, shift_rows, columns, column_scale, shift_scale)
    if any(len(own) != len(weight) for own in lists):
        raise ValueError(f"each list must have one entry per weight, of which there are {len(weight)}")
    return [_grown(*arguments) for arguments in zip(*lists[:-1], strict=True)]


def krylov_extend(
    basis: Tensor, product: Tensor, alpha: Tensor, beta: Tensor, length: Tensor, scale: Tensor, step: int
) -> None:
    _require_compute_dtype("basis", basis)
    require.shape("basis", basis, ("M", "capacity", "D"))
    filters, capacity, width = basis.shape
    if width < 1:
        raise ValueError(f"basis must have shape (M, capacity, D) with D > 0, got {tuple(basis.shape)}")
    if not 0 <= step < capacity - 1:
        raise ValueError(f"step must lie in [0, {capacity - 1}), got {step}")
    require.shape("product", product, (filters, width))
    for name, tensor in (("alpha", alpha), ("beta", beta)):
        require.shape(name, tensor, (filters, "steps"))
        if tensor.shape[1] <= step:
            raise ValueError(
                f"{name} must have shape ({filters}, steps) with steps > {step}, got {tuple(tensor.shape)}"
            )
    for name, tensor in (("length", length), ("scale", scale)):
        require.shape(name, tensor, (filters,))
    _require_like("length", length, torch.int64, basis.device)
    changed = (("basis", basis), ("alpha", alpha), ("beta", beta), ("scale", scale), ("length", length))
    for name, tensor in (("product", product), *changed[:-1]):
        _require_like(name, tensor, basis.dtype, basis.device)
    for name, tensor in changed:
        _require_contiguous(name, tensor)


def symmetric_extremes(S: Tensor) -> tuple[Tensor, Tensor]:
    _require_compute_dtype("S", S)
    require.shape("S", S, ("M", "D", "D"))
    filters, width, other = S.shape
    if width != other or width < 1:
        raise ValueError(f"S must have shape (M, D, D) with D > 0, got {tuple(S.shape)}")
    return _pairs(S, filters, width)


def tridiagonal_extremes(alpha: Tensor, beta: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    _require_tridiagonal(alpha, beta, length)
    return _pairs(alpha, alpha.shape[0], alpha.shape[1])


def top_two(values: Tensor) -> tuple[Tensor, Tensor]:
    _require_compute_dtype("values", values)
    if values.dim() != 3 or values.shape[1] < 2:
        raise ValueError(f"values must have shape (R, k, M) with k >= 2, got {tuple(values.shape)}")
    rows, _, columns = values.shape
    first, second = (values.new_empty((rows, columns), dtype=torch.int64) for _ in range(2))
    return first, second


def gather_patches(maps: Tensor, places: Tensor, kernel: Sequence[int], dilation: Sequence[int]) -> Tensor:
    _require_compute_dtype("maps", maps)
    _require_like("places", places, torch.int64, maps.device)
    require.shape("maps", maps, ("B", "C", "H", "W"))
    require.shape("places", places, ("N", 3))
    if len(kernel) != 2 or len(dilation) != 2 or min(*kernel, *dilation) < 1:
        raise ValueError(f"kernel and dilation must be pairs of positive numbers, got {kernel} and {dilation}")
    return maps.new_empty(places.shape[0], maps.shape[1] * kernel[0] * kernel[1])


def certified_widths(alpha: Tensor, beta: Tensor, length: Tensor, values: Tensor, growth: Tensor) -> Tensor:
    _require_tridiagonal(alpha, beta, length)
    _require_like("values", values, torch.float64, alpha.device)
    _require_like("growth", growth, torch.float64, alpha.device)
    require.shape("values", values, (alpha.shape[0], 2))
    require.shape("growth", growth, (alpha.shape[0],))
    return torch.empty_like(values, memory_format=torch.contiguous_format)


def _require_tridiagonal(alpha: Tensor, beta: Tensor, length: Tensor) -> None:
    _require_compute_dtype("alpha", alpha)
    _require_like("beta", beta, alpha.dtype, alpha.device)
    _require_like("length", length, torch.int64, alpha.device)
    require.shape("alpha", alpha, ("M", "k"))
    if alpha.shape[1] < 1:
        raise ValueError(f"alpha must have shape (M, k) with k > 0, got {tuple(alpha.shape)}")
    require.shape("beta", beta, alpha.shape)
    require.shape("length", length, (alpha.shape[0],))


def _pairs(like: Tensor, filters: int, width: int) -> tuple[Tensor, Tensor]:
    """Return empty eigenvalues (M, 2) and eigenvectors (M, 2, D)."""
    return (
        like.new_empty((filters, 2), dtype=torch.float64),
        like.new_empty((filters, 2, width), dtype=torch.float64),
    )


def _grown(
    weight: Tensor,
    rows: Tensor,
    row_scale: Tensor | None,
    shift: Tensor | None,
    shift_rows: Tensor | None,
    columns: Tensor | None,
    column_scale: Tensor | None,
) -> Tensor:
    _require_compute_dtype("weight", weight)
    if weight.dim() < 1:
        raise ValueError("weight must have at least one dimension")
    _require_vector("rows", rows, torch.int64, weight)
    count = rows.shape[0]
    if row_scale is not None:
        _require_vector("row_scale", row_scale, weight.dtype, weight, count)
    if shift is not None:
        _require_like("shift", shift, weight.dtype, weight.device)
        require.shape("shift", shift, ("R" if shift_rows is not None else count, *weight.shape[1:]))
    if shift_rows is not None:
        if shift is None:
            raise ValueError("shift_rows needs shift, got shift_rows alone")
        _require_vector("shift_rows", shift_rows, torch.int64, weight, count)
    sizes = [count, *weight.shape[1:]]
    if columns is not None or column_scale is not None:
        if weight.dim() < 2:
            raise ValueError(f"weight must have columns, got shape {tuple(weight.shape)}")
        if columns is not None:
            _require_vector("columns", columns, torch.int64, weight)
            sizes[1] = columns.shape[0]
        if column_scale is not None:
            _require_vector("column_scale", column_scale, weight.dtype, weight, sizes[1])
    return weight.new_empty(sizes)


def _stage_shape(maps: tuple[int, ...], weight: Tensor, geometry: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the maps behind a depthwise stage; raise unless weight and geometry belong to `maps`."""
    require.shape("weight", weight, (maps[3], "kh", "kw"))
    if weight.shape[1] < 1 or weight.shape[2] < 1:
        raise ValueError(f"weight must have shape ({maps[3]}, kh, kw), got {tuple(weight.shape)}")
    if len(geometry) != 6:
        raise ValueError(f"geometry must have 6 numbers for each stage, got {len(geometry)}")
    if not all((0 if place in (2, 3) else 1) <= number < 1 << 20 for place, number in enumerate(geometry)):
        raise ValueError(f"geometry must hold strides and dilations >= 1 and paddings >= 0, got {list(geometry)}")
    sizes = []
    for axis in (0, 1):
        stride, padding, dilation = geometry[axis::2]
        reach = maps[1 + axis] + 2 * padding - dilation * (weight.shape[1 + axis] - 1) - 1
        sizes.append(0 if reach < 0 else reach // stride + 1)
    return (maps[0], *sizes, maps[3])


def _require_compute_dtype(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in COMPUTE_DTYPES:
        raise TypeError(f"{name} must be float32 or float64, got {tensor.dtype}")


def _require_ties(
    first: Tensor,
    second: Tensor,
    K: Tensor,
    d1: Tensor | None,
    d2: Tensor | None,
    shape: Sequence[int | str],
    like: Tensor,
) -> None:
    """Raise unless all are tensors of the ties of maxima, with this shape and the dtype and device of `like`."""
    if (d1 is None) != (d2 is None):
        raise ValueError("d1 and d2 must be given together")
    _require_stored("K", K, like.dtype, like.device)
    require.shape("K", K, shape)
    for name, index in (("first", first), ("second", second)):
        _require_like(name, index, torch.int64, like.device)
        require.shape(name, index, K.shape)
    for name, slope in (("d1", d1), ("d2", d2)):
        if slope is not None:
            _require_stored(name, slope, like.dtype, like.device)
            require.shape(name, slope, K.shape)


def _require_like(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    _require_one_of(name, tensor, (dtype,), device)


def _require_stored(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """Raise unless the tensor is on the device and stored in the dtype, or in 16 bits if that is float32."""
    _require_one_of(name, tensor, (dtype, *HALF_DTYPES) if dtype == torch.float32 else (dtype,), device)


def _require_one_of(name: str, tensor: Tensor, allowed: Sequence[torch.dtype], device: torch.device) -> None:
    if tensor.dtype not in allowed:
        raise TypeError(f"{name} must be {' or '.join(map(str, allowed))}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")


def _require_rows(X: Tensor, C: Tensor, dtype: torch.dtype, device: torch.device, name: str = "C") -> None:
    _require_stored("X", X, dtype, device)
    require.shape("X", X, ("N", "D"))
    _require_stored(name, C, dtype, device)
    require.shape(name, C, (X.shape[0], "M"))


def _require_vectors(V: Tensor, filters: int, width: int) -> None:
    require.shape("V", V, ("K", filters, width) if V.dim() == 3 else (filters, width))


def _require_vector(name: str, vector: Tensor, dtype: torch.dtype, weight: Tensor, size: int | None = None) -> None:
    _require_like(name, vector, dtype, weight.device)
    require.shape(name, vector, ("any" if size is None else size,))


def _require_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, because the operator changes it")


FAKES: dict[str, Callable[..., object]] = {
    fake.__name__: fake
    for fake in (
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


def register() -> None:
    """Give every operator its function."""
    for name, fake in FAKES.items():
        torch.library.register_fake(f"s3d_fast::{name}", fake)
