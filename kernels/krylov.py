"""One Lanczos step for a whole layer in one launch: orthogonalize S q against the basis twice, then normalize."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from s3d_fast.kernels import launch
from s3d_fast.kernels.launch import Launch
from s3d_fast.maths.reference import KrylovState

# The longest float32 vector that a program keeps in registers; a float64 vector may be half as long.
WIDEST = 16384
# Entries of the basis that a program holds at once.
TILE = 4096


@triton.jit
def orthogonalize(w, space, step, D, BK: tl.constexpr, BD: tl.constexpr):
    """w - Q^T Q w, where Q is the first step + 1 basis vectors: classical Gram-Schmidt, which reads Q once."""
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
    alpha,  # (M, ...) with row stride t_row
    beta,  # like alpha
    length,  # (M,), int64
    scale,  # (M,)
    q,  # (M, D)
    step,
    D,
    capacity,
    p_row,
    t_row,
    noise,  # rounding error, as a fraction of the largest entry of T
    BK: tl.constexpr,
    BD: tl.constexpr,
):
    """alpha = q.w, then w = (1 - Q^T Q)^2 w, beta = |w|, next q = w / beta, for w = S q: one step for one filter."""
    j = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    inside = d < D
    space = basis + j * capacity * D
    alpha += j * t_row + step
    beta += j * t_row + step
    # Read everything before any of it is overwritten; the sums below are barriers.
    done = tl.load(beta - 1, mask=step > 0, other=1.0) == 0
    before, dimension = tl.load(scale + j), tl.load(length + j)
    w = tl.load(product + j * p_row + d, mask=inside, other=0.0)
    last = tl.load(space + step * D + d, mask=inside, other=0.0)
    a = tl.sum(last * w, 0)
    # The first pass removes the component along the space; the second removes what rounding left of it.
    w = orthogonalize(w, space, step, D, BK, BD)
    w = orthogonalize(w, space, step, D, BK, BD)
    # Divided by the largest entry first, so that squares neither overflow nor underflow.
    size = tl.max(tl.abs(w), 0)
    unit = w / tl.where(size > 0, size, 1)
    b = tl.sqrt(tl.sum(unit * unit, 0)) * size
    largest = tl.maximum(before, tl.abs(a) + b, propagate_nan=tl.PropagateNan.ALL)
    exhausted = done | (b <= noise * largest) | (step + 1 == D)
    tl.store(length + j, tl.where(done, dimension, step + 1))
    tl.store(scale + j, tl.where(done, before, largest))
    tl.store(alpha, tl.where(done, 0.0, a))
    tl.store(beta, tl.where(exhausted, 0.0, b))
    vector = tl.where(exhausted, 0.0, w / b)
    tl.store(space + (step + 1) * D + d, vector, mask=inside)
    tl.store(q + j * D + d, vector, mask=inside)


def config(width: int) -> tuple[int, int, int]:
    """Return the basis vectors loaded at once, the padded length of a vector, and the number of warps."""
    BD = launch.power_of_two(width, 16, WIDEST)
    return max(1, TILE // BD), BD, min(16, max(4, BD // 512))


def supports(state: KrylovState) -> bool:
    """Return whether the kernel can extend these spaces: vectors that a program can hold, and contiguous tensors."""
    if state.alpha.shape != state.beta.shape:
        return False
    if state.basis.shape[2] * state.basis.itemsize > WIDEST * torch.float32.itemsize:
        return False
    tensors = (state.basis, state.q, state.alpha, state.beta, state.length, state.scale)
    return all(tensor.is_contiguous() for tensor in tensors)


def plan(state: KrylovState, product: Tensor, step: int) -> Launch:
    """Return the launch of one step in spaces of at least one filter."""
    filters, capacity, D = state.basis.shape
    product = product if product.stride(1) == 1 else product.contiguous()
    BK, BD, warps = config(D)
    arguments = dict(
        basis=state.basis, product=product, alpha=state.alpha, beta=state.beta, length=state.length, scale=state.scale,
        q=state.q, step=step, D=D, capacity=capacity, p_row=product.stride(0), t_row=state.alpha.stride(0),
        noise=torch.finfo(state.basis.dtype).eps * (10 + D**0.5), BK=BK, BD=BD,
    )  # fmt: skip
    return Launch("krylov", extend_kernel, (filters,), arguments, warps, label=f"{BK}x{BD}, {warps} warps")


def krylov_extend(state: KrylovState, product: Tensor, step: int) -> None:
    """Take one Lanczos step in spaces that the kernel supports, as `s3d_fast.maths.reference.krylov_extend` does."""
    if len(state.basis) == 0:
        return
    with launch.on_device(state.basis):
        plan(state, product, step).run()
