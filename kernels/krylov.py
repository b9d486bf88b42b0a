"""One Lanczos step of every filter in one launch: orthogonalize S q against the basis, twice, and normalize."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from s3d_fast.kernels import launch

# The longest vector that a program keeps in registers: in float32, and half of that in float64.
WIDEST = 16384
# Entries of the basis that a program holds at once.
TILE = 4096


@triton.jit
def orthogonalize(w, space, step, D, BK: tl.constexpr, BD: tl.constexpr):
    """w - Q^T Q w for the first step + 1 rows of Q: classical Gram-Schmidt, which reads Q once."""
    d = tl.arange(0, BD)
    along = tl.zeros((BD,), w.dtype)
    for first in range(0, step + 1, BK):
        k = first + tl.arange(0, BK)
        inside = (k <= step)[:, None] & (d < D)[None, :]
        Q = tl.load(space + k[:, None] * D + d[None, :], mask=inside, other=0.0)
        component = tl.sum(Q * w[None, :], 1)
        along += tl.sum(Q * component[:, None], 0)
    return w - along


@triton.jit(
    do_not_specialize=["step", "capacity", "t_row"],
    do_not_specialize_on_alignment=["alpha", "beta", "length", "scale"],
)
def extend_kernel(
    basis,  # (M, capacity, D)
    product,  # (M, D)
    alpha,  # (M, ...), rows t_row apart
    beta,  # like alpha
    length,  # (M,), int64
    scale,  # (M,)
    q,  # (M, D)
    step,
    D,
    capacity,
    p_row,
    t_row,
    noise,  # rounding, as a fraction of the largest entry of T
    BK: tl.constexpr,
    BD: tl.constexpr,
):
    """The step of `s3d_fast.reference.krylov_extend` for one filter."""
    j = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    inside = d < D
    space = basis + j * capacity * D
    alpha += j * t_row + step
    beta += j * t_row + step
    # Everything that is overwritten is read first: the sums below are barriers.
    done = tl.load(beta - 1, mask=step > 0, other=1.0) == 0
    before, dimension = tl.load(scale + j), tl.load(length + j)
    w = tl.load(product + j * p_row + d, mask=inside, other=0.0)
    last = tl.load(space + step * D + d, mask=inside, other=0.0)
    a = tl.sum(last * w, 0)
    # Once removes the component along the space; twice removes what rounding left of it.
    w = orthogonalize(w, space, step, D, BK, BD)
    w = orthogonalize(w, space, step, D, BK, BD)
    # Squares of entries divided by the largest neither overflow nor underflow.
    size = tl.max(tl.abs(w), 0)
    unit = w / tl.where(size > 0, size, 1)
    b = tl.sqrt(tl.sum(unit * unit, 0)) * size
    # NaN in a or b must not vanish in the maximum.
    largest = tl.where(tl.abs(a) + b <= before, before, tl.abs(a) + b)
    exhausted = done | (b <= noise * largest) | (step + 1 == D)
    tl.store(length + j, tl.where(done, dimension, step + 1))
    tl.store(scale + j, tl.where(done, before, largest))
    tl.store(alpha, tl.where(done, 0.0, a))
    tl.store(beta, tl.where(exhausted, 0.0, b))
    vector = tl.where(exhausted, 0.0, w / b)
    tl.store(space + (step + 1) * D + d, vector, mask=inside)
    tl.store(q + j * D + d, vector, mask=inside)


def config(width: int) -> tuple[int, int, int]:
    """Return rows of the basis at once, entries of a vector, and warps."""
    BD = launch.power_of_two(width, 16, WIDEST)
    return max(1, TILE // BD), BD, min(16, max(4, BD // 512))


def krylov_extend(
    basis: Tensor,
    product: Tensor,
    alpha: Tensor,
    beta: Tensor,
    length: Tensor,
    scale: Tensor,
    step: int,
    q: Tensor,  # (M, D), the next basis vectors; changed
) -> None:
    """Take one Lanczos step: see `s3d_fast.reference.krylov_extend`. D is at most WIDEST; the state is contiguous."""
    filters, capacity, D = basis.shape
    if filters == 0:
        return
    product = product if product.stride(1) == 1 else product.contiguous()
    BK, BD, warps = config(D)
    noise = torch.finfo(basis.dtype).eps * (10 + D**0.5)
    with launch.on_device(basis):
        extend_kernel[(filters,)](
            basis, product, alpha, beta, length, scale, q, step, D, capacity, product.stride(0),
            alpha.stride(0), noise, BK=BK, BD=BD, num_warps=warps,
        )  # fmt: skip
