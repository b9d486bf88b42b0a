"""Small Triton kernels of tiles: memory, layouts, reductions, control flow and products; see `small_kernels`."""

from __future__ import annotations

import triton
import triton.language as tl

from tests.ptx.small_kernels import INTERPRETED, narrowed, widened


@triton.jit
def masked_kernel(a, mask, out, count, step, N: tl.constexpr):
    """Loads and stores of a part, of every other place, and where a stored mask says so."""
    i = tl.arange(0, N)
    inside = i < count
    tl.store(out + i, tl.load(a + i, mask=inside, other=3))
    tl.store(out + N + i, tl.load(a + i, mask=inside, cache_modifier=".ca", other=0), mask=inside)
    tl.store(out + 2 * N + i, tl.load(a + i * step, mask=i * step < count, other=-1, cache_modifier=".cg"))
    tl.store(out + 3 * N + i * step, tl.load(a + i), mask=i * step < N)
    given = tl.load(mask + i)
    tl.store(out + 4 * N + i, tl.load(a + N - 1 - i, mask=given & inside, other=7), mask=given)


@triton.jit
def tile_kernel(a, out, rows, columns, a_row, a_column, out_row, out_column, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """A tile at run-time strides, added to its first column, for every program: (rows, columns)."""
    m = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = (m < rows)[:, None] & (n < columns)[None, :]
    tile = tl.load(a + m[:, None] * a_row + n[None, :] * a_column, mask=inside, other=0)
    first = tl.load(a + m * a_row, mask=m < rows, other=0)
    tl.store(out + m[:, None] * out_row + n[None, :] * out_column, tile + first[:, None], mask=inside)


@triton.jit
def far_kernel(a, rows, out, stride, base, N: tl.constexpr):
    """Rows whose offsets take 64 bits: entry `rows[i] * stride - base` of a."""
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(a + (tl.load(rows + i) * stride - base)))


@triton.jit
def address_kernel(a, distances, out, N: tl.constexpr):
    """Rows that are known by their addresses: so many bytes behind that of a."""
    i = tl.arange(0, N)
    address = a.to(tl.int64) + tl.load(distances + tl.program_id(0))
    tl.store(out + tl.program_id(0) * N + i, tl.load(address.to(tl.pointer_type(out.dtype.element_ty)) + i))


@triton.jit
def layout_kernel(a, out, M: tl.constexpr, N: tl.constexpr):
    """The entries of a tile, (M, N), in other orders."""
    m, n = tl.arange(0, M), tl.arange(0, N)
    all_of = tl.arange(0, M * N)
    tile = tl.load(a + m[:, None] * N + n[None, :])
    tl.store(out + n[:, None] * M + m[None, :], tl.trans(tile))
    tl.store(out + M * N + all_of, tl.reshape(tl.trans(tile), (M * N,)))
    cube = tl.permute(tl.reshape(tile, (M // 4, 4, N)), (2, 0, 1))
    tl.store(out + 2 * M * N + all_of, tl.ravel(cube))
    left, right = tl.split(tl.reshape(tile, (M, N // 2, 2)))
    half = tl.arange(0, N // 2)
    tl.store(out + 3 * M * N + m[:, None] * (N // 2) + half[None, :], left)
    tl.store(out + 3 * M * N + M * N // 2 + m[:, None] * (N // 2) + half[None, :], right)
    tl.store(out + 4 * M * N + all_of, tl.ravel(tl.permute(tl.join(right, left), (2, 1, 0))))
    tl.store(out + 5 * M * N + m[:, None] * N + n[None, :], tl.interleave(left, right))
    line = tl.load(a + n)
    tl.store(out + 6 * M * N + m[:, None] * N + n[None, :], tl.broadcast_to(line[None, :], (M, N)))
    wide = tl.expand_dims(line, 1) + tl.load(a + m)[None, :]
    tl.store(out + 7 * M * N + m[:, None] * N + n[None, :], tl.trans(wide))


@triton.jit
def gather_kernel(a, down, along, out, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    place = m * N + n
    tile = tl.load(a + place)
    tl.store(out + place, tl.gather(tile, tl.load(down + place), 0))
    tl.store(out + M * N + place, tl.gather(tile, tl.load(along + place), 1))


@triton.jit
def reduce_kernel(a, out, places, M: tl.constexpr, N: tl.constexpr):
    """Sums, extremes and the places of these: along the rows, along the columns, over everything."""
    m, n = tl.arange(0, M), tl.arange(0, N)
    tile = tl.load(a + m[:, None] * N + n[None, :])
    tl.store(out + n, tl.sum(tile, 0))
    tl.store(out + N + n, tl.max(tile, 0))
    tl.store(out + 2 * N + n, tl.min(tile, 0))
    tl.store(places + n, tl.argmax(tile, 0))
    tl.store(places + N + n, tl.argmin(tile, 0))
    out += 3 * N
    places += 2 * N
    tl.store(out + m, tl.sum(tile, 1))
    tl.store(out + M + m, tl.max(tile, 1))
    tl.store(out + 2 * M + m, tl.min(tile, 1))
    tl.store(places + m, tl.argmax(tile, 1))
    tl.store(places + M + m, tl.argmin(tile, 1))
    out += 3 * M
    tl.store(out, tl.sum(tile))
    tl.store(out + 1, tl.max(tl.max(tile, 1), 0))
    tl.store(out + 2, tl.min(tile))


@triton.jit
def softmax_kernel(a, out, N: tl.constexpr):
    """Sums of float numbers, whose order is open."""
    i = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(a + i)
    x = tl.exp(x - tl.max(x, 0))
    tl.store(out + i, x / tl.sum(x, 0))


@triton.jit
def largest_and_count(value, count, other, other_count):
    top = tl.maximum(value, other)
    return top, tl.where(value == top, count, 0) + tl.where(other == top, other_count, 0)


@triton.jit
def custom_reduce_kernel(a, top, count, M: tl.constexpr, N: tl.constexpr):
    """The largest entry of each row, and how often it is there."""
    m, n = tl.arange(0, M), tl.arange(0, N)
    tile = tl.load(a + m[:, None] * N + n[None, :])
    value, times = tl.reduce((tile, tl.full((M, N), 1, tl.int32)), 1, largest_and_count)
    tl.store(top + m, value)
    tl.store(count + m, times)


@triton.jit
def composed(slope, offset, other, other_offset):
    return slope * other, offset * other + other_offset


@triton.jit
def scan_kernel(a, b, out, M: tl.constexpr, N: tl.constexpr):
    """Running sums along both axes and backwards, running products, and maps applied one after the other."""
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    place = m * N + n
    x, y = tl.load(a + place), tl.load(b + place)
    tl.store(out + place, tl.cumsum(x, 0))
    tl.store(out + M * N + place, tl.cumsum(x, 1))
    tl.store(out + 2 * M * N + place, tl.cumsum(x, 1, reverse=True))
    tl.store(out + 3 * M * N + place, tl.cumprod(y, 0))
    slope, offset = tl.associative_scan((y, x), 1, composed)
    tl.store(out + 4 * M * N + place, slope)
    tl.store(out + 5 * M * N + place, offset)


@triton.jit
def sort_kernel(a, out, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    tile = tl.load(a + m * N + n)
    tl.store(out + m * N + n, tl.sort(tile))
    tl.store(out + M * N + m * N + n, tl.flip(tile, 1))


@triton.jit
def atomic_add_kernel(a, buckets, sums, own, before, count, N: tl.constexpr):
    """Sums of the entries with the same bucket over all programs, and to places of its own, after `before`."""
    i = tl.program_id(0) * N + tl.arange(0, N)
    x, bucket = tl.load(a + i), tl.load(buckets + i)
    tl.atomic_add(sums + bucket, x, mask=i < count, sem="relaxed")
    tl.store(before + i, tl.atomic_add(own + i, x))


@triton.jit
def loop_kernel(a, lengths, out, N: tl.constexpr):
    """Sums over a number of rows that is known only at run time, in loops of three kinds."""
    i = tl.arange(0, N)
    row = tl.program_id(0)
    length = tl.load(lengths + row)
    total, products = tl.zeros((N,), tl.int32), tl.full((N,), 1, tl.int32)
    for k in range(length):
        x = tl.load(a + k * N + i)
        total += x
        for j in tl.range(k, length, 2):
            products = (products * (x + j)) & 0xFFF
    for k in tl.static_range(3):
        if k != 1:
            total += tl.load(a + k * N + i) * k
    tl.store(out + row * 2 * N + i, total)
    tl.store(out + (row * 2 + 1) * N + i, products)


@triton.jit
def while_kernel(a, out, count):
    """The steps to 1, all and those up, if even numbers are halved and odd ones go to 3 n + 1; for some programs."""
    place = tl.program_id(0)
    if place >= count:
        return
    number = tl.load(a + place)
    steps, odd = 0, 0
    while number != 1:
        if number % 2 == 0:
            number = number // 2
        else:
            number = 3 * number + 1
            odd += 1
        steps += 1
    tl.store(out + place, steps * 1000 + odd)


@triton.jit
def branch_kernel(a, limits, out, scale, N: tl.constexpr):
    """Branches on the place of a program, on loaded numbers and on an argument, one inside the other."""
    i = tl.arange(0, N)
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place = (z * tl.num_programs(1) + y) * tl.num_programs(0) + x
    low, high = tl.load(limits), tl.load(limits + 1)
    value = tl.load(a + i)
    if x == 0:
        value += 1
        if y > low:
            value = value * scale
            if z == 1:
                value -= tl.sum(value, 0)
        else:
            value = -value
    elif (x + y < high) and (scale > 2):
        value = tl.where(value > low, value, y)
    tl.store(out + place * N + i, value)


@triton.jit
def switch_kernel(a, choices, out, N: tl.constexpr):
    """Each program does what a loaded number asks for, of six."""
    i = tl.arange(0, N)
    value = tl.load(a + i)
    choice = tl.load(choices + tl.program_id(0))
    if choice == 0:
        value = value * 3
    elif choice == 1:
        value = tl.sum(value, 0) - value
    elif choice == 2:
        value = tl.cumsum(value, 0)
    elif choice == 3:
        value = tl.load(a + N - 1 - i)
    elif choice == 4:
        value = value // 3
    elif choice == 5:
        value = tl.where(value > 0, value, tl.max(value, 0))
    tl.store(out + tl.program_id(0) * N + i, value)


@triton.jit
def dot_kernel(
    a, b, out, a_row, a_column, b_row, b_column, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    PRECISION: tl.constexpr, TWICE: tl.constexpr,
):  # fmt: skip
    """out = a b, or with TWICE (a b) b^T, where a b is rounded to the dtype of a."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    number: tl.constexpr = out.dtype.element_ty
    stored: tl.constexpr = a.dtype.element_ty
    left = tl.load(a + m[:, None] * a_row + k[None, :] * a_column)
    right = tl.load(b + k[:, None] * b_row + n[None, :] * b_column)
    if INTERPRETED:
        # The interpreter multiplies the raw bits of bfloat16 numbers.
        left, right = widened(left), widened(right)
    total = tl.dot(left, right, input_precision=PRECISION, out_dtype=number)
    if not TWICE:
        tl.store(out + m[:, None] * N + n[None, :], total)
    else:
        first = narrowed(total) if stored == tl.bfloat16 else total.to(stored)
        if INTERPRETED:
            first = widened(first)
        total = tl.dot(first, tl.trans(right), input_precision=PRECISION, out_dtype=number)
        tl.store(out + m[:, None] * K + k[None, :], total)


@triton.jit
def pipeline_kernel(a, b, c, out, sums, rows, BLOCK: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr):
    """out = a^T b, and sums = the column sums of c, over the rows of each program, with loads ahead of products."""
    i, n = tl.arange(0, BLOCK), tl.arange(0, N)
    first = tl.program_id(0) * rows
    total, column = tl.zeros((N, N), tl.float32), tl.zeros((N,), tl.float32)
    for step in tl.range(tl.cdiv(rows, BLOCK), num_stages=STAGES):
        row = step * BLOCK + i
        inside = (row < rows)[:, None]
        place = (first + row[:, None]) * N + n[None, :]
        left = tl.load(a + place, mask=inside, other=0)
        right = tl.load(b + place, mask=inside, other=0)
        if INTERPRETED:
            # The interpreter multiplies the raw bits of bfloat16 numbers.
            left, right = widened(left), widened(right)
        total += tl.dot(tl.trans(left), right, input_precision="ieee")
        column += tl.sum(tl.load(c + place, mask=inside, other=0), 0)
    out += tl.program_id(0) * N * N
    tl.store(out + n[:, None] * N + n[None, :], total)
    tl.store(sums + tl.program_id(0) * N + n, column)
