"""C = g * act''(z) * s^2 in one pass, for every activation with a formula."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from s3d_fast.kernels import launch
from s3d_fast.kernels.launch import Launch, Plan
from s3d_fast.kernels.options import MOST_KINKS
from s3d_fast.maths.activations import Activation

BLOCK, WARPS = 1024, 4


@triton.jit
def slope(x):
    """The derivative of the sigmoid, sigmoid(x) sigmoid(-x), without cancellation."""
    e = tl.exp(-tl.abs(x))
    inverse = 1 / (1 + e)
    return e * inverse * inverse


@triton.jit
def tanh_half(x):
    """tanh(x / 2) = 2 sigmoid(x) - 1; near zero, where this cancels, its Taylor series."""
    h = 0.5 * x
    near = tl.abs(h) < 0.04
    q = tl.where(near, h * h, 0.0)
    series = h * (1 - q * (1 / 3 - q * (2 / 15 - q * (17 / 315 - q * (62 / 2835 - q * (1382 / 155925))))))
    e = tl.exp(-tl.abs(x))
    magnitude = (1 - e) / (1 + e)
    return tl.where(near, series, tl.where(x < 0, -magnitude, magnitude))


@triton.jit
def within(x, bound):
    """x clamped to [-bound, bound]; outside, the derivative is constant to the last bit. NaN stays NaN."""
    return tl.where(x > bound, bound, tl.where(x < -bound, -bound, x))


@triton.jit
def curvature(z, NAME: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """act''(z) away from kinks: the formulas of `s3d_fast.maths.activations`."""
    root_2pi: tl.constexpr = 2.5066282746310002
    if NAME == "silu":
        # For large |z| the slope is 0; clamping z avoids 0 * infinity.
        return slope(z) * (2 - within(z, 1e4) * tanh_half(z))
    elif NAME == "gelu":
        x = within(z, 40.0)
        return (2 - x * x) * tl.exp(-0.5 * x * x) / root_2pi
    elif NAME == "gelu_tanh":
        p: tl.constexpr = 0.7978845608028654
        q: tl.constexpr = 0.044715
        x = within(z, 10.0)
        u = p * (x + q * x * x * x)
        du = p * (1 + 3 * q * x * x)
        ddu = 6 * p * q * x
        return 4 * slope(2 * u) * (du + 0.5 * x * (ddu - 2 * tanh_half(2 * u) * du * du))
    elif NAME == "softplus":
        return tl.where(A * z > B, 0.0, A * slope(A * z))
    elif NAME == "tanh":
        return -8 * tanh_half(2 * z) * slope(2 * z)
    elif NAME == "sigmoid":
        return -slope(z) * tanh_half(z)
    elif NAME == "elu":
        return tl.where(z > 0, 0.0, A * tl.exp(tl.where(z > 0, 0.0, z)))
    elif NAME == "hardswish":
        return (tl.abs(z) < 3).to(z.dtype) * (1 / 3)
    elif NAME == "gaussian":
        x = within(z, 40.0)
        return (x * x - 1) * tl.exp(-0.5 * x * x)
    else:
        tl.static_assert(NAME == "none")
        return tl.zeros_like(z)


@triton.jit
def curvature_kernel(
    g,
    z,
    scale,  # (channels,); not read unless SCALED
    row_norm,  # (rows,); this and the next not read unless BY_WIDTH
    bandwidth,  # (channels,)
    out,
    size,
    channels,
    inner,  # consecutive entries of one channel
    NAME: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    KINKS: tl.constexpr,  # number of kinks
    AT_0: tl.constexpr,
    JUMP_0: tl.constexpr,
    AT_1: tl.constexpr,
    JUMP_1: tl.constexpr,
    SHARPNESS: tl.constexpr,
    SCALED: tl.constexpr,
    BY_WIDTH: tl.constexpr,
    LEAST: tl.constexpr,  # the smallest normal number
    NUMBER: tl.constexpr,  # the dtype of the arithmetic
    BLOCK: tl.constexpr,
):
    """out = g * act''(z) * scale^2, where each kink adds JUMP * beta * slope(beta * (z - AT)) to act''.

    beta is SHARPNESS; if BY_WIDTH, it is 1 / (row_norm * bandwidth), or 0 where that width is not a normal number.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    x = tl.load(z + i, mask=inside, other=0.0).to(NUMBER)
    second = curvature(x, NAME, A, B)
    channel = (i // inner) % channels
    if KINKS > 0 and BY_WIDTH:
        # int64: a sample may have more than 2^31 entries.
        row = i // (tl.full((), 1, tl.int64) * channels * inner) * inner + i % inner
        width = tl.load(row_norm + row, mask=inside, other=0.0).to(NUMBER)
        width *= tl.load(bandwidth + channel, mask=inside, other=0.0).to(NUMBER)
        vanishes = width < LEAST
        beta = tl.where(vanishes, 0.0, 1 / tl.where(vanishes, 1.0, width))
        second += JUMP_0 * beta * slope(beta * (x - AT_0))
        if KINKS > 1:
            second += JUMP_1 * beta * slope(beta * (x - AT_1))
    else:
        if KINKS > 0:
            second += (JUMP_0 * SHARPNESS) * slope(SHARPNESS * (x - AT_0))
        if KINKS > 1:
            second += (JUMP_1 * SHARPNESS) * slope(SHARPNESS * (x - AT_1))
    result = tl.load(g + i, mask=inside, other=0.0).to(NUMBER) * second
    if SCALED:
        s = tl.load(scale + channel, mask=inside, other=0.0).to(NUMBER)
        result *= s * s
    tl.store(out + i, result.to(out.dtype.element_ty), mask=inside)


def plan(
    g: Tensor,
    z: Tensor,
    activation: Activation,
    scale: Tensor | None,
    axis: int,
    out: Tensor | None,
    row_norm: Tensor | None = None,
    bandwidth: Tensor | None = None,
) -> Plan:
    """Return the launch for at least one entry."""
    g, z = g.contiguous(), z.contiguous()
    out = torch.empty_like(g) if out is None else out
    given = dict(scale=scale, row_norm=row_norm, bandwidth=bandwidth)
    arguments = dict(
        {name: g if vector is None else vector.contiguous() for name, vector in given.items()},
        **constants(activation),
        g=g, z=z, out=out, size=g.numel(), channels=g.shape[axis], inner=g.shape[axis + 1 :].numel(),
        SCALED=scale is not None, BY_WIDTH=row_norm is not None, LEAST=least_number(g.dtype),
        NUMBER=tl.float64 if g.dtype == torch.float64 else tl.float32, BLOCK=BLOCK,
    )  # fmt: skip
    grid = (triton.cdiv(g.numel(), BLOCK),)
    return Plan([Launch("curvature", curvature_kernel, grid, arguments, WARPS, label=str(BLOCK))], out)


def curvature_coefficients(
    *,
    g: Tensor,
    z: Tensor,
    activation: Activation,
    scale: Tensor | None,
    axis: int,
    out: Tensor | None,
    row_norm: Tensor | None = None,
    bandwidth: Tensor | None = None,
) -> Tensor:
    """Return C as `s3d_fast.maths.reference.curvature_coefficients` does; `out` must be contiguous and may be g."""
    if g.numel() == 0:
        return torch.empty_like(g) if out is None else out
    with launch.on_device(g):
        return plan(g, z, activation, scale, axis, out, row_norm, bandwidth).run()


def least_number(dtype: torch.dtype) -> float:
    """Return the smallest normal number of the arithmetic for entries of this dtype."""
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).tiny


def constants(activation: Activation) -> dict[str, str | int | float]:
    """Return the kernel's compile-time constants for an activation."""
    assert activation.formula is not None
    kinks = [(kink.at, kink.jump) for kink in activation.kinks] + [(0.0, 0.0)] * MOST_KINKS
    return {
        "NAME": activation.formula.name,
        "A": activation.formula.a,
        "B": activation.formula.b,
        "KINKS": len(activation.kinks),
        "AT_0": float(kinks[0][0]),
        "JUMP_0": float(kinks[0][1]),
        "AT_1": float(kinks[1][0]),
        "JUMP_1": float(kinks[1][1]),
        "SHARPNESS": float(activation.sharpness),
    }
