"""S v for an EdgeConv layer without any tensor over edges: four launches and a sum.

The kernels work on points. X holds the rows of all points of all clouds, w = winner[i, f], and v = [a, b]:
    launch 1  P = X A^T
    launch 2  t = C * (P[w] + X (B - A)^T + bias), with the gather P[w] in the epilogue of the product
    launch 3  received[j, f] = sum of t[i, f] over all i with w = j, in the order of i
    launch 4  [(received - t)^T X, t^T X, sum t]
With the option `atomic`, launch 2 computes `received` by atomic additions, and launch 3 is skipped.

With ties, launch 2 also gathers P at the runner-up. It writes t, what the point itself keeps, and `back`, what the
runner-up's edge gets; the winner's edge gets t - back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from s3d_fast.kernels import launch
from s3d_fast.kernels.device import INTERPRETED, Device, describe
from s3d_fast.kernels.launch import Config, tile_offsets
from s3d_fast.kernels.options import current
from s3d_fast.kernels.products import product_form, rows_times, times_rows, wants_filters_along_threads
from s3d_fast.maths.incoming import Incoming
from s3d_fast.maths.reference import EdgeTies


@triton.jit
def point_products_kernel(
    X,  # (R, F), the rows of all points
    V,  # (L, 2 F (+ 1)) with L = K M, any strides
    products,  # (R, L): P, written by launch 1 and read by launch 2
    C,  # (R, M)
    winner,  # (R, M), int32
    t,  # (R, L)
    received,  # (R, L); if ATOMIC, zero at first and added to
    runner,  # (R, M), int32; this and the next four only if TIES
    tie,  # (R, M): K
    d1,  # (R, M); d1 and d2 only if SLOPES
    d2,  # (R, M)
    back,  # (R, L)
    R,
    F,
    L,
    M,
    points,  # per cloud
    x_row,
    x_column,
    c_row,
    c_column,
    v_row,
    v_column,
    EDGES: tl.constexpr,  # False for launch 1, True for launch 2
    TIES: tl.constexpr,
    SLOPES: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    ATOMIC: tl.constexpr,
    FORM: tl.constexpr,
    FAR: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """P = X A^T. EDGES: t = C * (P[w] + X (B - A)^T + bias). TIES: plus K e (e.v), e = d1 edge(w) - d2 edge(r)."""
    number = V.dtype.element_ty
    blocks = tl.cdiv(L, BM)
    block = tl.program_id(0) % blocks
    row = (tl.program_id(0) // blocks).to(tl.int64) * BN
    own = tl.arange(0, BM)
    f = block * BM + own
    V += block.to(tl.int64) * BM * v_row
    r, k = tl.arange(0, BN), tl.arange(0, BK)
    inside_n, inside_f = r < R - row, f < L
    inside = inside_n[:, None] & inside_f[None, :]
    x_tile = tile_offsets(r, x_row, k, x_column, FAR)
    v_tile = tile_offsets(k, v_column, own, v_row, FAR)
    X += row * x_row
    second = V + (F + tl.zeros((), tl.int64)) * v_column
    bias = second + (F + tl.zeros((), tl.int64)) * v_column
    total = tl.zeros((BN, BM), number)
    for first in range(0, F, BK):
        inside_d = k < F - first
        x = tl.load(X + x_tile, mask=inside_n[:, None] & inside_d[None, :], other=0.0)
        inside_v = inside_d[:, None] & inside_f[None, :]
        v = tl.load(V + v_tile, mask=inside_v, other=0.0)
        if EDGES:
            v = tl.load(second + v_tile, mask=inside_v, other=0.0) - v
        total = rows_times(x, v, total, FORM)
        X += (tl.full((), BK, tl.int64) if FAR else BK) * x_column
        V += (tl.full((), BK, tl.int64) if FAR else BK) * v_column
        second += (tl.full((), BK, tl.int64) if FAR else BK) * v_column
    tile = r[:, None] * L + f[None, :]
    if EDGES:
        if BIAS:
            total += tl.load(bias + own * v_row, mask=inside_f, other=0.0)[None, :]
        column = f if K == 1 else f % M
        w = tl.load(winner + row * M + (r[:, None] * M + column[None, :]), mask=inside, other=0)
        n = row + r
        won = ((n - n % points)[:, None] + w) * L + f[None, :]
        winning = tl.load(products + won, mask=inside, other=0.0)
        c_tile = tile_offsets(r, c_row, column, c_column, FAR)
        c = tl.load(C + row * c_row + c_tile, mask=inside, other=0.0).to(number)
        if TIES:
            places = row * M + (r[:, None] * M + column[None, :])
            lost = ((n - n % points)[:, None] + tl.load(runner + places, mask=inside, other=0)) * L + f[None, :]
            losing = tl.load(products + lost, mask=inside, other=0.0)
            k = tl.load(tie + places, mask=inside, other=0.0).to(number)
            if SLOPES:
                first_slope = tl.load(d1 + places, mask=inside, other=0.0).to(number)
                second_slope = tl.load(d2 + places, mask=inside, other=0.0).to(number)
                both = k * (first_slope * (total + winning) - second_slope * (total + losing))
                returned = -second_slope * both
                total = c * (total + winning) + first_slope * both + returned
            else:
                returned = k * (losing - winning)
                total = c * (total + winning)
            tl.store(back + row * L + tile, returned, mask=inside)
            if ATOMIC:
                tl.atomic_add(received + won, total - returned, mask=inside, sem="relaxed")
                tl.atomic_add(received + lost, returned, mask=inside, sem="relaxed")
        else:
            total = c * (total + winning)
            if ATOMIC:
                tl.atomic_add(received + won, total, mask=inside, sem="relaxed")
        tl.store(t + row * L + tile, total, mask=inside)
    else:
        tl.store(products + row * L + tile, total, mask=inside)


@triton.jit
def incoming_sum(
    t,
    back,
    order,
    start,
    n,
    f,
    column,
    inside,
    L,
    M,
    points,
    LESS: tl.constexpr,  # whether `back` is subtracted
    BN: tl.constexpr,
    BM: tl.constexpr,
):
    """The sum of t[i, f] (- back[i, f]) over the edges i that come in at every point n, in the order of i."""
    cloud = n // points
    where = (n + cloud)[:, None] * M + column[None, :]
    first = tl.load(start + where, mask=inside, other=0)
    count = tl.load(start + where + M, mask=inside, other=0) - first
    origin = (cloud * points)[:, None]
    edges = order + (origin + first) * M + column[None, :]
    total = tl.zeros((BN, BM), t.dtype.element_ty)
    longest = tl.max(tl.max(count, 1), 0)
    step = 0
    while step < longest:
        present = inside & (step < count)
        i = tl.load(edges, mask=present, other=0)
        place = (origin + i) * L + f[None, :]
        total += tl.load(t + place, mask=present, other=0.0)
        if LESS:
            total -= tl.load(back + place, mask=present, other=0.0)
        edges += M
        step += 1
    return total


@triton.jit
def receive_kernel(
    t,  # (R, L)
    order,  # (R, M), int32: `Incoming.order`
    start,  # (R + clouds, M), int32: `Incoming.start`
    back,  # (R, L); this and the next two only if TIES
    runner_order,  # like order, of the runners-up
    runner_start,  # like start
    received,  # (R, L)
    R,
    L,
    M,
    points,
    K: tl.constexpr,
    TIES: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
):
    """received[j, f] = sum of t[i, f] over all i with winner[i, f] = j, in the order of i.

    If TIES, `back` is part of t and belongs to the runner-up: it is added to the sum over all i with runner[i, f] = j.
    """
    blocks = tl.cdiv(L, BM)
    f = (tl.program_id(0) % blocks) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) // blocks).to(tl.int64) * BN + tl.arange(0, BN)
    inside = (n < R)[:, None] & (f < L)[None, :]
    column = f if K == 1 else f % M
    total = incoming_sum(t, back, order, start, n, f, column, inside, L, M, points, TIES, BN, BM)
    if TIES:
        total += incoming_sum(back, back, runner_order, runner_start, n, f, column, inside, L, M, points, False, BN, BM)
    tl.store(received + n[:, None] * L + f[None, :], total, mask=inside)


# Few points per tile: a tile takes as long as its point with the most edges.
RECEIVE_ROWS, RECEIVE_FILTERS, RECEIVE_WARPS = 256 if INTERPRETED else 8, 32, 1


@triton.jit
def edge_sums_kernel(
    X,  # (R, F)
    t,  # (R, L)
    received,  # (R, L)
    out,  # (slices, L, 2 F (+ 1))
    R,
    F,
    L,
    x_row,
    x_column,
    rows_per_slice,
    BIAS: tl.constexpr,
    FORM: tl.constexpr,
    FAR: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
):
    """[(received - t)^T X, t^T X, sum t] for a block of filters, a block of features and a slice of the points."""
    number = out.dtype.element_ty
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    f = tl.program_id(1) * BM + tl.arange(0, BM)
    slice_index = tl.program_id(2).to(tl.int64)
    first = slice_index * rows_per_slice
    last = tl.minimum(first + rows_per_slice, R)
    r = tl.arange(0, BN)
    inside_d, inside_f = d < F, f < L
    x_tile = tile_offsets(r, x_row, d, x_column, FAR)
    tile = r[:, None] * L + f[None, :]
    a, b = tl.zeros((BM, BD), number), tl.zeros((BM, BD), number)
    bias_total = tl.zeros((BM,), number)
    for begin in range(first, last, BN):
        inside_n = r < last - begin
        inside = inside_n[:, None] & inside_f[None, :]
        x = tl.load(X + begin * x_row + x_tile, mask=inside_n[:, None] & inside_d[None, :], other=0.0)
        sent = tl.load(t + begin * L + tile, mask=inside, other=0.0)
        got = tl.load(received + begin * L + tile, mask=inside, other=0.0)
        a = times_rows(tl.trans(got - sent), x, a, FORM)
        b = times_rows(tl.trans(sent), x, b, FORM)
        if BIAS:
            bias_total += tl.sum(sent, 0)
    rows = out + (slice_index * L + f.to(tl.int64)) * (2 * F + BIAS)
    inside_out = inside_f[:, None] & inside_d[None, :]
    tl.store(rows[:, None] + d[None, :], a, mask=inside_out)
    tl.store(rows[:, None] + F + d[None, :], b, mask=inside_out)
    if BIAS:
        tl.store(rows + 2 * F, bias_total, mask=inside_f & (tl.program_id(0) == 0))


# (vendor, arithmetic) -> pairs of configurations, for the products and for the sums; the default pair first.
CONFIGS: dict[tuple[str, str], tuple[tuple[Config, Config], ...]] = {
    ("nvidia", "fp32"): (
        (Config(64, 64, 16, 8, 3), Config(32, 32, 64, 8, 3)),
        (Config(64, 32, 32, 4, 3), Config(32, 64, 64, 8, 3)),
    ),
    ("nvidia", "tensor"): (
        (Config(64, 64, 32, 8, 3), Config(32, 64, 64, 8, 3)),
        (Config(128, 64, 32, 8, 3), Config(32, 32, 64, 4, 3)),
    ),
    ("nvidia", "widened"): ((Config(64, 32, 32, 8, 3), Config(32, 32, 64, 8, 3)),),
    ("nvidia", "fp64"): ((Config(32, 32, 16, 4, 3), Config(16, 16, 32, 4, 3)),),
    ("amd", "fp32"): (
        (Config(64, 64, 32, 4, 2), Config(32, 32, 64, 4, 2)),
        (Config(32, 64, 32, 4, 2), Config(32, 64, 64, 4, 2)),
    ),
    ("amd", "tensor"): (
        (Config(64, 64, 32, 4, 2), Config(32, 64, 64, 4, 2)),
        (Config(32, 64, 32, 4, 2), Config(32, 32, 64, 4, 2)),
    ),
    ("amd", "fp64"): ((Config(32, 32, 16, 4, 2), Config(16, 16, 32, 4, 2)),),
    ("interpreter", "fp64"): ((Config(128, 64, 128, 1, 1), Config(128, 64, 128, 1, 1)),) * 2,
}
CONFIGS["amd", "widened"] = CONFIGS["amd", "fp32"]
for _arithmetic in ("fp32", "tensor", "widened"):
    CONFIGS["interpreter", _arithmetic] = CONFIGS["interpreter", "fp64"]


def configs(device: Device, form: str, stored: torch.dtype) -> list[tuple[Config, Config]]:
    """Return the pairs of configurations that fit the device, the default one first."""
    table = CONFIGS[device.vendor, launch.arithmetic(form, stored)]
    limit = device.shared_memory
    return [pair for pair in table if max(shared_memory(*pair, device, stored)) <= limit]


def shared_memory(product: Config, sums: Config, device: Device, stored: torch.dtype) -> tuple[int, int]:
    """Return upper bounds on the shared memory of one program: of the products, and of the sums."""
    size, number = stored.itemsize, max(4, stored.itemsize)
    found = []
    for config, other in ((product, product.depth), (sums, sums.rows)):
        # The other factor is loaded as two tensors: A and B, or t and received. As an operand it has two parts.
        factor = other * config.filters * number
        rows = config.rows * config.depth
        # Addresses of winners, 8 bytes each.
        epilogue = 8 * config.rows * config.filters
        tiles, buffered = [2 * factor, rows * number], [rows * size, 2 * factor]
        found.append(launch.shared_memory(device, tiles, buffered, config.stages, epilogue))
    return found[0], found[1]


def edgeconv_matvec(
    *, X: Tensor, incoming: Incoming, C: Tensor, V: Tensor, bias: bool, ties: EdgeTies | None
) -> Tensor:
    """Return S v for EdgeConv filters, as `s3d_fast.maths.reference.edgeconv_matvec` defines it.

    `ties.incoming` must be known.
    """
    (clouds, points, F), M, options = X.shape, C.shape[2], current()
    if V.numel() == 0 or clouds * points == 0:
        return torch.zeros_like(V)
    vectors = V.reshape(-1, V.shape[-1]).contiguous()
    L, R = len(vectors), clouds * points
    K = 1 if L == M else 2
    device = describe(X.device)
    form = product_form(X.dtype, options.arithmetic, device)
    columns = vectors.mT.contiguous().mT if wants_filters_along_threads(form, device) else vectors
    rows, coefficients = X.reshape(R, F), C.reshape(R, M)
    runners = incoming if ties is None or ties.incoming is None else ties.incoming
    given = [] if ties is None else [ties.K, *(own for own in (ties.d1, ties.d2) if own is not None)]
    # K, d1 and d2; what is missing is not read.
    tie = ([own.reshape(R, M).contiguous() for own in given] + [coefficients] * 3)[:3]
    far = any(launch.is_far((256, max(2 * F, L)), tensor.stride()) for tensor in (rows, coefficients, columns))

    def run(pair: tuple[Config, Config]) -> Tensor:
        product, sums = pair
        products, t = vectors.new_empty(2, R, L)
        received = vectors.new_zeros(R, L) if options.atomic else torch.empty_like(t)
        back = t if ties is None else torch.empty_like(t)
        programs = triton.cdiv(L, product.filters) * triton.cdiv(R, product.rows)
        for is_second in (False, True):
            point_products_kernel[(programs,)](
                rows, columns, products, coefficients, incoming.winner, t, received, runners.winner, *tie, back,
                R, F, L, M, points, *rows.stride(), *coefficients.stride(), *columns.stride(),
                EDGES=is_second, TIES=ties is not None, SLOPES=len(given) > 1, BIAS=bias, ATOMIC=options.atomic,
                FORM=form, FAR=far,
                BN=product.rows, BM=product.filters, BK=product.depth, K=K, **product.compile_options,
            )  # fmt: skip
        if not options.atomic:
            programs = triton.cdiv(L, RECEIVE_FILTERS) * triton.cdiv(R, RECEIVE_ROWS)
            receive_kernel[(programs,)](
                t, incoming.order, incoming.start, back, runners.order, runners.start, received, R, L, M, points,
                TIES=ties is not None, BN=RECEIVE_ROWS, BM=RECEIVE_FILTERS, K=K, num_warps=RECEIVE_WARPS,
            )  # fmt: skip
        tiles = (max(1, triton.cdiv(F, sums.depth)), triton.cdiv(L, sums.filters))
        per_slice, slices = launch.share_rows(R, tiles[0] * tiles[1], sums.rows, device)
        out = vectors.new_empty(slices, *vectors.shape)
        edge_sums_kernel[(*tiles, slices)](
            rows, t, received, out, R, F, L, *rows.stride(), per_slice, BIAS=bias, FORM=form, FAR=far,
            BN=sums.rows, BM=sums.filters, BD=sums.depth, **sums.compile_options,
        )  # fmt: skip
        return launch.sum_slices(out)

    with launch.on_device(X):
        key = ("edgeconv", X.device, X.dtype, form, bias, len(given), options.atomic, F, L, M, R.bit_length())
        return run(launch.choose(key, configs(device, form, X.dtype), run)).view(V.shape)
