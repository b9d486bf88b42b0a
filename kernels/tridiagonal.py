"""Many small symmetric tridiagonal matrices in float64: their extreme eigenpairs, and the widths that certify these.

The eigenpairs come from bisection, then inverse iteration.

A lane computes one end of the spectrum of one matrix. A program goes through its matrices entry by entry, all lanes at
once. Each lane keeps the factors of its matrix in its own part of `work`. There is a barrier wherever a loop reads what
an earlier loop wrote, because a different thread may have written it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from s3d_fast.kernels import launch
from s3d_fast.kernels.device import INTERPRETED
from s3d_fast.kernels.launch import Launch, Plan

# Few lanes, so that even few filters make many programs; in the interpreter the number of lanes costs no time.
LANES, SHIFTS, WARPS = 256 if INTERPRETED else 8, 8, 1
# Each round keeps one of SHIFTS + 1 parts of the interval; 9^18 > 2^57 resolves the last bit of the spectral radius.
ROUNDS = 18
EPSILON = tl.constexpr(2.0**-52)
# The resolution of certified widths, in octaves.
RESOLUTION = tl.constexpr(1 / 16)


@triton.jit
def count_below(diagonal, coupling, boost, inverse, length, inside, x, tiny, steps):
    """The number of eigenvalues of each lane's scaled matrix below each shift x: Sturm's count of negative pivots.

    pivot_i = d_i - x - off_(i-1)^2 / pivot_(i-1)
    """
    below = tl.zeros(x.shape, tl.int32)
    pivot = tl.full(x.shape, 1.0, tl.float64)
    square = tl.zeros(inverse.shape, tl.float64)
    for i in range(steps):
        present = inside & (i < length)
        d = tl.load(diagonal + i, mask=present, other=0.0).to(tl.float64) * boost * inverse
        pivot = d[:, None] - x - square[:, None] / pivot
        pivot = tl.where(tl.abs(pivot) < tiny[:, None], -tiny[:, None], pivot)
        below += ((pivot < 0) & present[:, None]).to(tl.int32)
        off = tl.load(coupling + i, mask=inside & (i + 1 < length), other=0.0).to(tl.float64) * boost * inverse
        square = off * off
    return below


@triton.jit(do_not_specialize=["steps"])
def extremes_kernel(
    alpha,  # (M, ...) with row stride a_row
    beta,  # (M, ...) with row stride b_row
    length,  # (M,), int64
    values,  # (M, 2)
    vectors,  # (M, 2, steps)
    work,  # (5, steps, lanes)
    lanes,
    steps,
    a_row,
    b_row,
    LANES: tl.constexpr,
    SHIFTS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """T x = value x with |x| = 1, for the smallest (even lanes) and largest (odd lanes) eigenvalue of each matrix."""
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    inside = lane < lanes
    matrix, is_upper = lane // 2, lane % 2 == 1
    n = tl.load(length + matrix, mask=inside, other=1)
    diagonal, coupling = alpha + matrix * a_row, beta + matrix * b_row

    # Divide the matrix by its largest entry, so that no square overflows; then compute Gershgorin's bounds.
    largest = tl.zeros((LANES,), tl.float64)
    finite = inside
    for i in range(steps):
        d = tl.load(diagonal + i, mask=inside & (i < n), other=0.0).to(tl.float64)
        off = tl.load(coupling + i, mask=inside & (i + 1 < n), other=0.0).to(tl.float64)
        finite = finite & (tl.abs(d) < float("inf")) & (tl.abs(off) < float("inf"))
        largest = tl.maximum(largest, tl.maximum(tl.abs(d), tl.abs(off)))
    regular = finite & (largest > 0)
    # The inverse of a subnormal number overflows, so tiny matrices are scaled up first.
    boost = tl.where(largest < 2.0**-1000, tl.full((LANES,), 2.0**900, tl.float64), 1.0)
    inverse = 1 / tl.where(regular, largest * boost, 1.0)
    low, high = tl.zeros((LANES,), tl.float64), tl.zeros((LANES,), tl.float64)
    before = tl.zeros((LANES,), tl.float64)
    for i in range(steps):
        present = regular & (i < n)
        d = tl.load(diagonal + i, mask=present, other=0.0).to(tl.float64) * boost * inverse
        off = tl.load(coupling + i, mask=regular & (i + 1 < n), other=0.0).to(tl.float64) * boost * inverse
        reach = tl.abs(off) + before
        low = tl.minimum(low, tl.where(present, d - reach, 0.0))
        high = tl.maximum(high, tl.where(present, d + reach, 0.0))
        before = tl.abs(off)
    tiny = EPSILON * tl.maximum(tl.maximum(-low, high), 1.0) / 4
    low, high = low - 8 * tiny, high + 8 * tiny

    # SHIFTS shifts at once divide the interval by SHIFTS + 1 per round; bisection with one shift would halve it.
    part = (tl.arange(0, SHIFTS) + 1).to(tl.float64) / (SHIFTS + 1)
    wanted = tl.where(is_upper, n, 1)
    for _ in range(ROUNDS):
        x = low[:, None] + (high - low)[:, None] * part[None, :]
        enough = count_below(diagonal, coupling, boost, inverse, n, regular, x, tiny, steps) >= wanted[:, None]
        high = tl.minimum(high, tl.min(tl.where(enough, x, float("inf")), 1))
        low = tl.maximum(low, tl.max(tl.where(enough, float("-inf"), x), 1))
    value = low + (high - low) / 2
    found = tl.where(finite, tl.where(regular, value * largest, 0.0), float("nan"))
    tl.store(values + lane, found, mask=inside)

    # Factor T - value with row exchanges, since it is singular up to rounding. Beyond its end a matrix gets rows of the
    # identity, which leave the zeros of the vector unchanged.
    pivots = work + lane
    # int64: the planes of the work array may be larger than 2^31 entries together.
    plane = tl.full((), 1, tl.int64) * steps * lanes
    d = tl.load(diagonal, mask=regular, other=0.0).to(tl.float64) * boost * inverse - value
    u = tl.load(coupling, mask=regular & (n > 1), other=0.0).to(tl.float64) * boost * inverse
    for i in range(steps):
        here = regular & (i + 1 < n)
        below = tl.load(coupling + i, mask=here, other=0.0).to(tl.float64) * boost * inverse
        next_d = tl.load(diagonal + i + 1, mask=here, other=0.0).to(tl.float64) * boost * inverse
        next_d = tl.where(here, next_d - value, 1.0)
        next_u = tl.load(coupling + i + 1, mask=regular & (i + 2 < n), other=0.0).to(tl.float64) * boost * inverse
        swap = tl.abs(below) > tl.abs(d)
        pivot = tl.where(swap, below, d)
        pivot = tl.where(tl.abs(pivot) < tiny, tiny, pivot)
        ratio = tl.where(swap, d, below) / pivot
        upper = tl.where(swap, next_d, u)
        second = tl.where(swap, next_u, 0.0)
        tl.store(pivots, pivot, mask=inside)
        tl.store(pivots + plane, upper, mask=inside)
        tl.store(pivots + 2 * plane, second, mask=inside)
        tl.store(pivots + 3 * plane, ratio, mask=inside)
        tl.store(pivots + 4 * plane, swap.to(tl.float64), mask=inside)
        pivots += lanes
        d = tl.where(swap, u, next_d) - ratio * upper
        u = tl.where(swap, 0.0, next_u) - ratio * second

    tl.debug_barrier()
    # A pseudo-random start vector: by symmetry, a regular one could be orthogonal to the eigenvector.
    x_first = vectors + lane * steps
    state = 12345
    for i in range(steps):
        state = (state * 25173 + 13849) % 65536
        start = tl.where(i < n, 0.5 + state / 65536, 0.0)
        tl.store(x_first + i, tl.where(regular, start, i == 0), mask=inside)

    for sweep in tl.static_range(3):
        tl.debug_barrier()
        # The start is arbitrary, so the first sweep takes it as the result of the elimination, which it skips.
        if sweep > 0:
            current = tl.load(x_first, mask=regular, other=0.0)
            factors = work + lane
            for i in range(steps - 1):
                following = tl.load(x_first + i + 1, mask=regular, other=0.0)
                swap = tl.load(factors + 4 * plane, mask=regular, other=0.0) != 0
                ratio = tl.load(factors + 3 * plane, mask=regular, other=0.0)
                upper = tl.where(swap, following, current)
                tl.store(x_first + i, upper, mask=regular)
                current = tl.where(swap, current, following) - ratio * upper
                factors += lanes
            tl.store(x_first + steps - 1, current, mask=regular)
            tl.debug_barrier()
        factors = work + lane + (steps - 1) * lanes
        where = x_first + (steps - 1)
        after, second_after = tl.zeros((LANES,), tl.float64), tl.zeros((LANES,), tl.float64)
        size = tl.zeros((LANES,), tl.float64)
        for _ in range(steps):
            total = tl.load(where, mask=regular, other=0.0)
            total -= tl.load(factors + plane, mask=regular, other=0.0) * after
            total -= tl.load(factors + 2 * plane, mask=regular, other=0.0) * second_after
            total /= tl.load(factors, mask=regular, other=1.0)
            tl.store(where, total, mask=regular)
            size = tl.maximum(size, tl.abs(total))
            second_after, after = after, total
            factors -= lanes
            where -= 1
        tl.debug_barrier()
        squares = tl.zeros((LANES,), tl.float64)
        size = tl.where(size > 0, size, 1.0)
        for i in range(steps):
            entry = tl.load(x_first + i, mask=regular, other=0.0) / size
            squares += entry * entry
        norm = size * tl.sqrt(tl.where(squares > 0, squares, 1.0))
        for i in range(steps):
            tl.store(x_first + i, tl.load(x_first + i, mask=regular, other=0.0) / norm, mask=regular)


@triton.jit(do_not_specialize=["steps"])
def widths_kernel(
    alpha,  # (M, ...) with row stride a_row
    beta,  # (M, ...) with row stride b_row
    length,  # (M,), int64
    values,  # (M, 2)
    growth,  # (M,)
    widths,  # (M, 2)
    lanes,
    steps,
    a_row,
    b_row,
    LANES: tl.constexpr,
):
    """The least w with sum_i phi_i(theta -+ w)^2 >= growth; phi_i / phi_(i - 1) = pivot_i / beta_i."""
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    inside = lane < lanes
    matrix = lane // 2
    sign = tl.where(lane % 2 == 1, tl.full((LANES,), 1.0, tl.float64), -1.0)
    n = tl.load(length + matrix, mask=inside, other=1)
    diagonal, coupling = alpha + matrix * a_row, beta + matrix * b_row
    theta = tl.load(values + lane, mask=inside, other=0.0)
    other = tl.load(values + (lane ^ 1), mask=inside, other=0.0)
    wanted = tl.load(growth + matrix, mask=inside, other=4.0)
    last = tl.load(coupling + n - 1, mask=inside, other=0.0)

    largest = tl.zeros((LANES,), tl.float64)
    finite = inside & (tl.abs(theta) < float("inf")) & (tl.abs(other) < float("inf"))
    for i in range(steps):
        d = tl.load(diagonal + i, mask=inside & (i < n), other=0.0).to(tl.float64)
        off = tl.load(coupling + i, mask=inside & (i < n), other=0.0).to(tl.float64)
        finite = finite & (tl.abs(d) < float("inf")) & (tl.abs(off) < float("inf"))
        largest = tl.maximum(largest, tl.maximum(tl.abs(d), tl.abs(off)))
    regular = finite & (last != 0)
    scale = tl.where(regular, largest, 1.0)

    low = tl.full((LANES,), -52.0, tl.float64)
    high = tl.log2(wanted) / 2 + 1
    while tl.max(high - low, 0) > RESOLUTION:
        middle = low + (high - low) / 2
        mu = theta / scale + sign * tl.exp2(middle)
        pivot, square = tl.full((LANES,), 1.0, tl.float64), tl.zeros((LANES,), tl.float64)
        term, total = tl.full((LANES,), 1.0, tl.float64), tl.full((LANES,), 1.0, tl.float64)
        for i in range(steps):
            present = regular & (i < n)
            d = tl.load(diagonal + i, mask=present, other=0.0).to(tl.float64) / scale
            off = tl.load(coupling + i, mask=present, other=1.0).to(tl.float64) / scale
            pivot = sign * (mu - d) - square / pivot
            # A pivot that is not positive is rounding error: mu is too close to theta.
            term = tl.where(present & (pivot > 0), term * (pivot / off) * (pivot / off), 0.0)
            total += term
            square = off * off
        moves, grown = high - low > RESOLUTION, total >= wanted
        high = tl.where(moves & grown, middle, high)
        low = tl.where(moves & (grown == 0), middle, low)
    width = tl.where(finite, tl.exp2(high) * scale, float("inf"))
    tl.store(widths + lane, tl.where(last == 0, 0.0, width), mask=inside)


def widths_plan(alpha: Tensor, beta: Tensor, length: Tensor, values: Tensor, growth: Tensor) -> Plan:
    """Return the launch that computes the certified widths of at least one matrix."""
    alpha, beta = (tensor if tensor.stride(1) == 1 else tensor.contiguous() for tensor in (alpha, beta))
    lanes, steps = 2 * len(alpha), alpha.shape[1]
    widths = torch.empty_like(values, memory_format=torch.contiguous_format)
    arguments = dict(
        alpha=alpha, beta=beta, length=length.contiguous(), values=values.contiguous(), growth=growth.contiguous(),
        widths=widths, lanes=lanes, steps=steps, a_row=alpha.stride(0), b_row=beta.stride(0), LANES=LANES,
    )  # fmt: skip
    grid = (triton.cdiv(lanes, LANES),)
    return Plan([Launch("certified widths", widths_kernel, grid, arguments, WARPS, label=f"{LANES} lanes")], widths)


def certified_widths(*, alpha: Tensor, beta: Tensor, length: Tensor, values: Tensor, growth: Tensor) -> Tensor:
    """Return the widths, as `s3d_fast.maths.reference.certified_widths` defines them."""
    if len(alpha) == 0:
        return torch.empty_like(values, memory_format=torch.contiguous_format)
    with launch.on_device(alpha):
        return widths_plan(alpha, beta, length, values, growth).run()


def extremes_plan(alpha: Tensor, beta: Tensor, length: Tensor, vectors: Tensor) -> Plan:
    """Return the launch that computes the extreme eigenvalues of at least one matrix, and writes their vectors."""
    alpha, beta = (tensor if tensor.stride(1) == 1 else tensor.contiguous() for tensor in (alpha, beta))
    filters, steps = alpha.shape
    values = alpha.new_empty(filters, 2, dtype=torch.float64)
    work = alpha.new_empty(5, steps, 2 * filters, dtype=torch.float64)
    arguments = dict(
        alpha=alpha, beta=beta, length=length.contiguous(), values=values, vectors=vectors, work=work,
        lanes=2 * filters, steps=steps, a_row=alpha.stride(0), b_row=beta.stride(0), LANES=LANES, SHIFTS=SHIFTS,
        ROUNDS=ROUNDS,
    )  # fmt: skip
    grid = (triton.cdiv(2 * filters, LANES),)
    return Plan([Launch("tridiagonal", extremes_kernel, grid, arguments, WARPS, label=f"{LANES} lanes")], values)


def tridiagonal_extremes(*, alpha: Tensor, beta: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Return the extreme eigenpairs, as `s3d_fast.maths.reference.tridiagonal_extremes` defines them."""
    filters, steps = alpha.shape
    vectors = alpha.new_empty(filters, 2, steps, dtype=torch.float64)
    if filters == 0:
        return alpha.new_empty(0, 2, dtype=torch.float64), vectors
    with launch.on_device(alpha):
        return extremes_plan(alpha, beta, length, vectors).run(), vectors
