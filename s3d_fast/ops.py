"""The operations with their input checked, and the one place where a backend is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from s3d_fast import checks, extension, reference, triton_kernels
from s3d_fast.activations import Activation
from s3d_fast.incoming import Incoming, incoming_edges
from s3d_fast.reference import Growth

Pair = tuple[int, int]

BACKENDS = ("auto", "reference", "cpu", "triton")

# The formulas of act'' that the extension knows, in the order of its enumeration `Curvature`.
_CURVATURES = ("none", "silu", "gelu", "gelu_tanh", "softplus", "tanh", "sigmoid", "elu", "hardswish", "gaussian")


def resolve_backend(backend: str, *tensors: Tensor | None) -> str:
    """Return the backend that does the work on these tensors: "auto" becomes the fastest one that can.

    Raises:
        ValueError: the name is not one of BACKENDS.
        RuntimeError: the backend was asked for by name and is not there, or cannot work on these tensors. There is no
            silent fallback.
    """
    checks.is_choice("backend", backend, BACKENDS)
    if backend == "reference":
        return "reference"
    given = [tensor for tensor in tensors if tensor is not None]
    if backend != "auto":
        why_not = _WHY_NOT[backend](given)
        if why_not:
            raise RuntimeError(f"backend {backend!r} cannot be used: {why_not}")
        return backend
    # The interpreter is for tests: what runs on a CPU goes to the C++ extension whether or not it is on.
    fastest = "triton" if any(tensor.is_cuda for tensor in given) else "cpu"
    return "reference" if _WHY_NOT[fastest](given) else fastest


def _why_not_cpu(tensors: Sequence[Tensor]) -> str:
    if extension.module is None:
        return f"{extension.why_not}; {extension.HOW_TO_BUILD}"
    for tensor in tensors:
        if tensor.device.type != "cpu":
            return f"a tensor is on {tensor.device}"
    return _why_not_differentiable(tensors)


def _why_not_triton(tensors: Sequence[Tensor]) -> str:
    return triton_kernels.why_not(tensors) or _why_not_differentiable(tensors)


def _why_not_differentiable(tensors: Sequence[Tensor]) -> str:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "its operations cannot be differentiated, and a tensor requires a gradient; use backend='reference'"
    return ""


_WHY_NOT = {"cpu": _why_not_cpu, "triton": _why_not_triton}


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
    chosen = resolve_backend(backend, X, C, V)
    if chosen == "cpu":
        return torch.ops.s3d_fast.splitting_matvec(X, C, V, bias)
    if chosen == "triton":
        return triton_kernels.kernels().splitting_matvec(X, C, V, bias)
    return reference.splitting_matvec(X, C, V, bias)


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

    The same as a loop of `splitting_matvec`, but the work of all layers is shared out over the threads at once, or is
    one launch on a GPU.

    Args:
        X, C, V: one entry per layer, as for `splitting_matvec`; all on one device.
        bias: one entry per layer; none has a bias by default.
        backend, check_finite: as for `splitting_matvec`.

    Raises: as `splitting_matvec`.
    """
    bias = [False] * len(X) if bias is None else list(bias)
    if not len(X) == len(C) == len(V) == len(bias):
        raise ValueError(
            f"X, C, V and bias must have one entry per layer, got {len(X)}, {len(C)}, {len(V)} and {len(bias)}"
        )
    for x, c, v, has_bias in zip(X, C, V, bias, strict=True):
        check_rows(x, c, check_finite)
        _check_vectors(v, c.shape[1], x.shape[1] + has_bias, x)
    chosen = resolve_backend(backend, *X, *C, *V)
    if chosen == "cpu" and len(X):
        return torch.ops.s3d_fast.splitting_matvec_grouped(X, C, V, bias)
    if chosen == "triton":
        return triton_kernels.kernels().splitting_matvec_grouped(X, C, V, bias)
    return [reference.splitting_matvec(*layer) for layer in zip(X, C, V, bias, strict=True)]


def splitting_matrices(
    X: Tensor,  # (N, D)
    C: Tensor,  # (N, M)
    *,
    bias: bool = False,
    backend: str = "auto",
    check_finite: bool = True,
) -> Tensor:  # (M, D, D), or (M, D + 1, D + 1) with bias
    """Return the dense splitting matrices S_j = X^T diag(C[:, j]) X, for small D.

    On a GPU these are PyTorch's own matrix products.

    Raises: as `splitting_matvec`.
    """
    check_rows(X, C, check_finite)
    if resolve_backend(backend, X, C) == "cpu":
        return torch.ops.s3d_fast.splitting_matrices(X, C, bias)
    return reference.splitting_matrices(X, C, bias, checks.compute_dtype(X.dtype))


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
    """Add `weight` times the splitting matrices of some rows to S: many batches, one after the other.

    Raises: as `splitting_matvec`; S has not been changed then.
    """
    check_rows(X, C, check_finite)
    checks.is_tensor("S", S)
    width = X.shape[1] + bias
    checks.has_shape("S", S, (C.shape[1], width, width))
    checks.agrees("S", S, "X", X, dtype=checks.compute_dtype(X.dtype))
    checks.is_number("weight", weight)
    if resolve_backend(backend, S, X, C) == "cpu" and S.is_contiguous():
        torch.ops.s3d_fast.add_splitting_matrices(S, X, C, bias, weight)
        return S
    return S.add_(splitting_matrices(X, C, bias=bias, backend=backend, check_finite=False), alpha=weight)


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

    On every backend this is PyTorch's own convolution and its own weight gradient.

    Raises: as `splitting_matvec`.
    """
    geometry = check_conv(X, C, kernel_size, stride, padding, dilation, check_finite)
    _check_vectors(V, C.shape[1], X.shape[1] * geometry[0][0] * geometry[0][1] + bias, X)
    resolve_backend(backend, X, C, V)
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
    incoming: Incoming | None = None,
) -> Tensor:  # like V
    """Return S_j v_j for every EdgeConv filter; no tensor over edges is formed.

    Args:
        X: the features of the P points of each cloud.
        winner: for each point and filter, the index of the neighbour whose edge won the maximum.
        C: the curvature coefficients of the winning edges.
        V, bias, backend: as for `splitting_matvec`.
        check_finite: look for NaN and Inf in X and C, and for indices out of range in winner.
        incoming: `incoming_edges(winner)`, for many products with one layer. The Triton kernels work with it, and make
            it at every call where it is not given.

    Raises: as `splitting_matvec`.
    """
    check_edgeconv(X, winner, C, check_finite)
    _check_vectors(V, C.shape[2], 2 * X.shape[2] + bias, X)
    chosen = resolve_backend(backend, X, C, V)
    if chosen == "cpu":
        return torch.ops.s3d_fast.edgeconv_matvec(X, winner, C, V, bias)
    if chosen == "triton":
        if incoming is None:
            incoming = incoming_edges(winner)
        else:
            _check_incoming(incoming, winner, check_finite)
        return triton_kernels.kernels().edgeconv_matvec(X, incoming, C, V, bias)
    return reference.edgeconv_matvec(X, winner, C, V, bias)


def _check_incoming(incoming: Incoming, winner: Tensor, check_values: bool) -> None:
    clouds, points, filters = winner.shape
    shapes = ((clouds, points, filters), (clouds, points, filters), (clouds, points + 1, filters))
    for tensor, shape in zip(incoming, shapes, strict=True):
        if tuple(tensor.shape) != shape or tensor.device != winner.device or not tensor.is_contiguous():
            raise ValueError(
                f"incoming must be incoming_edges(winner), got a tensor of shape {tuple(tensor.shape)} in it"
            )
    if check_values and not torch.equal(incoming.winner, winner.to(torch.int32)):
        raise ValueError("incoming must be incoming_edges(winner), got that of another winner")


def curvature_coefficients(
    g: Tensor,  # (N, M), or any shape with the channels along `axis`
    z: Tensor,  # like g
    activation: Activation,
    scale: Tensor | None = None,  # (M,)
    *,
    axis: int = 1,
    inplace: bool = False,
    backend: str = "auto",
) -> Tensor:  # like g
    """Return C = g * act''(z) * s^2, the coefficients of the splitting matrices.

    Args:
        g: the gradient of the loss with respect to the activation's output.
        z: the activation's input.
        activation: from `s3d_fast.activation`.
        scale: s = gamma / sqrt(var + eps) where a BatchNorm stands between the filter and the activation.
        axis: the dimension of g and z that scale belongs to.
        inplace: write the result over g, and return g.
        backend: as for `splitting_matvec`; "auto" takes the reference for an activation of your own.

    Raises: as `splitting_matvec`.
    """
    checks.is_tensor("g", g)
    checks.is_tensor("z", z)
    checks.has_shape("z", z, tuple(g.shape))
    checks.agrees("z", z, "g", g)
    if not isinstance(axis, int) or not 0 <= axis < g.dim():
        raise ValueError(f"axis must be a dimension of g, which has shape {tuple(g.shape)}; got {axis!r}")
    if not isinstance(activation, Activation):
        raise TypeError(f"activation must be an Activation, from s3d_fast.activation; got {type(activation).__name__}")
    if scale is not None:
        checks.is_tensor("scale", scale)
        checks.has_shape("scale", scale, (g.shape[axis],))
        checks.agrees("scale", scale, "g", g)
    chosen = _backend_for_curvature(backend, activation, g, z, scale)
    if chosen == "triton":
        return triton_kernels.kernels().curvature_coefficients(g, z, activation, scale, axis, inplace)
    if axis != g.dim() - 1 and not g.is_contiguous():
        # Channels that are innermost in memory are a last dimension; anything else would have to be copied.
        g_last, z_last = g.movedim(axis, -1), z.movedim(axis, -1)
        if g_last.is_contiguous() and z_last.is_contiguous():
            C = curvature_coefficients(
                g_last, z_last, activation, scale, axis=g.dim() - 1, inplace=inplace, backend=backend
            )
            return g if inplace else C.movedim(-1, axis)
    if chosen == "cpu":
        assert activation.formula is not None
        at, jump = [kink.at for kink in activation.kinks], [kink.jump for kink in activation.kinks]
        kind = _CURVATURES.index(activation.formula.name)
        settings = (scale, axis, kind, activation.formula.a, activation.formula.b, at, jump, activation.sharpness)
        if inplace and g.is_contiguous():
            torch.ops.s3d_fast.curvature_coefficients_(g, z, *settings)
            return g
        C = torch.ops.s3d_fast.curvature_coefficients(g, z, *settings)
    else:
        C = reference.curvature_coefficients(g, z, activation, scale, axis)
    return g.copy_(C) if inplace else C


def _backend_for_curvature(backend: str, activation: Activation, g: Tensor, z: Tensor, scale: Tensor | None) -> str:
    chosen = resolve_backend(backend, g, z, scale)
    if chosen == "reference":
        return chosen
    why_not = ""
    if chosen == "cpu" and g.dtype not in checks.COMPUTE_DTYPES:
        why_not = f"it does not compute in {g.dtype}"
    if activation.formula is None or (chosen == "triton" and not triton_kernels.kernels().knows(activation)):
        why_not = f"it has no formula for {activation.name!r}"
    if why_not and backend != "auto":
        raise RuntimeError(f"backend {chosen!r} cannot be used: {why_not}; use backend='reference'")
    return "reference" if why_not else chosen


def grow_weights(growths: Sequence[Growth], *, backend: str = "auto") -> list[Tensor]:
    """Return the weights of layers, and their optimizer state, after splits: `reference.grow_weight` for each.

    All of them are one call where the backend has one; indices out of range raise an IndexError or a RuntimeError.
    """
    backends = [_backend_for_growth(growth, backend) for growth in growths]
    by_backend = {name: [g for g, own in zip(growths, backends, strict=True) if own == name] for name in set(backends)}
    grown = {name: iter(_GROW[name](chosen)) for name, chosen in by_backend.items()}
    return [next(grown[name]) for name in backends]


def _backend_for_growth(growth: Growth, backend: str) -> str:
    chosen = resolve_backend(backend, growth.weight, growth.row_scale, growth.shift, growth.column_scale)
    if chosen == "cpu" and growth.weight.dtype not in checks.COMPUTE_DTYPES:
        if backend == "cpu":
            raise RuntimeError(f"backend 'cpu' cannot be used: it does not compute in {growth.weight.dtype}")
        return "reference"
    return chosen


_GROW: dict[str, Callable[[list[Growth]], list[Tensor]]] = {
    "reference": lambda growths: [reference.grow_weight(*growth) for growth in growths],
    "cpu": lambda growths: torch.ops.s3d_fast.grow_weights(*map(list, zip(*growths, strict=True))),
    "triton": lambda growths: triton_kernels.kernels().grow_weights(growths),
}


def krylov_extend(
    basis: Tensor,
    product: Tensor,
    alpha: Tensor,
    beta: Tensor,
    length: Tensor,
    scale: Tensor,
    step: int,
    q: Tensor,  # (M, D); changed
    *,
    backend: str = "auto",
) -> None:
    """Take one Lanczos step in every space of a basis: see `reference.krylov_extend`. q becomes basis[:, step + 1]."""
    state = (alpha, beta, length, scale)
    chosen = resolve_backend(backend, basis, product)
    if chosen == "triton":
        triton_kernels.kernels().krylov_extend(basis, product, *state, step, q)
        return
    if chosen == "cpu":
        torch.ops.s3d_fast.krylov_extend(basis, product, *state, step)
    else:
        reference.krylov_extend(basis, product, *state, step)
    q.copy_(basis[:, step + 1])


def tridiagonal_extremes(
    alpha: Tensor,  # (M, k)
    beta: Tensor,  # (M, k)
    length: Tensor,  # (M,)
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # (M, 2) and (M, 2, k), float64
    """Return the extreme eigenpairs of symmetric tridiagonal matrices: see `reference.tridiagonal_extremes`."""
    chosen = resolve_backend(backend, alpha, beta)
    if chosen == "cpu":
        return torch.ops.s3d_fast.tridiagonal_extremes(alpha, beta, length)
    if chosen == "triton":
        return triton_kernels.kernels().tridiagonal_extremes(alpha, beta, length)
    return reference.tridiagonal_extremes(alpha, beta, length)


def symmetric_extremes(
    S: Tensor,  # (M, D, D)
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # (M, 2) and (M, 2, D), float64
    """Return the extreme eigenpairs of symmetric matrices: see `reference.symmetric_extremes`."""
    if resolve_backend(backend, S) == "cpu":
        return torch.ops.s3d_fast.symmetric_extremes(S)
    return reference.symmetric_extremes(S)


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
