"""S v for an EdgeConv layer without any tensor over edges: a few small launches, and products over points.

The kernels work on points. X holds the rows of all points of all clouds, w = winner[i, f], and v = [a, b]:
    launch 1  P = X A^T
    launch 2  t = C * (P[w] + X (B - A)^T + bias), with the gather P[w] in the epilogue of the product
    launch 3  received[j, f] = sum of t[i, f] over all i with w = j, in the order of i; U = [received - t, t]
    launch 4  U^T X and sum t, by the kernel of `pointwise_wide`
With the option `atomic`, launch 2 computes `received` by atomic additions, and launch 3 only reads it.

With ties, launch 2 also gathers P at the runner-up. It writes t, what the point itself keeps, and `back`, what the
runner-up's edge gets; the winner's edge gets t - back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from s3d_fast.kernels import configs, launch
from s3d_fast.kernels.aligned import aligned, copied_at_once, in_planes, is_aligned
from s3d_fast.kernels.device import INTERPRETED, Device, describe
from s3d_fast.kernels.launch import Launch, Plan, tile_offsets
from s3d_fast.kernels.options import TritonOptions, current
from s3d_fast.kernels.pointwise_wide import (
    accumulate_launches,
    product_memory,
    rows_product,
    slices_of,
)
from s3d_fast.kernels.products import (
    PRODUCTS,
    current_form,
    factor_planes,
    factor_storage,
    is_by_single_multiplications,
    split_launch,
    store_planes,
)
from s3d_fast.kernels.tiles import Config
from s3d_fast.maths.incoming import Incoming
from s3d_fast.maths.reference import EdgeTies


@triton.jit
def point_products_kernel(
    X,  # (planes, R, F), the rows of all points
    V,  # (L, 2 F (+ 1)) with L = K M
    planes,  # (planes, L, pitch), those of A (launch 1) or B - A (launch 2); if ACROSS, (planes, F, pitch)
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
    x_plane,
    x_row,
    x_column,
    c_row,
    c_column,
    v_row,
    plane,
    pitch,
    EDGES: tl.constexpr,  # False for launch 1, True for launch 2
    TIES: tl.constexpr,
    SLOPES: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    ATOMIC: tl.constexpr,
    WHOLE: tl.constexpr,  # whether X can be loaded up to a multiple of 16 columns
    FORM: tl.constexpr,
    ACROSS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """P = X A^T. EDGES: t = C * (P[w] + X (B - A)^T + bias). TIES: plus K e (e.v), e = d1 edge(w) - d2 edge(r)."""
    number = V.dtype.element_ty
    blocks = tl.cdiv(L, BM)
    first_filter = (tl.program_id(0) % blocks) * BM
    row = (tl.program_id(0) // blocks).to(tl.int64) * BN
    r, own = tl.arange(0, BN), tl.arange(0, BM)
    f = first_filter + own
    total = rows_product(
        X + row * x_row, planes + first_filter.to(tl.int64) * (1 if ACROSS else pitch), R - row, L - first_filter, F,
        x_plane, x_row, x_column, plane, pitch, WHOLE, FORM, ACROSS, BN, BM, BK,
    )  # fmt: skip
    inside_n, inside_f = r < R - row, f < L
    inside = inside_n[:, None] & inside_f[None, :]
    tile = r[:, None] * L + f[None, :]
    if EDGES:
        if BIAS:
            total += tl.load(V + f.to(tl.int64) * v_row + 2 * F, mask=inside_f, other=0.0)[None, :]
        column = f if K == 1 else f % M
        w = tl.load(winner + row * M + (r[:, None] * M + column[None, :]), mask=inside, other=0)
        n = row + r
        won = ((n - n % points)[:, None] + w) * L + f[None, :]
        winning = tl.load(products + won, mask=inside, other=0.0)
        c_tile = tile_offsets(r, c_row, column, c_column)
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
    received,  # (R, L), read if GIVEN
    U,  # (planes, R, u_row)
    R,
    L,
    M,
    points,
    u_plane,
    u_row,
    TIES: tl.constexpr,
    GIVEN: tl.constexpr,
    FORM: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    K: tl.constexpr,
):
    """U = [received - t, t], received[j, f] = sum of t[i, f] over all points i whose winner is j, in their order."""
    blocks = tl.cdiv(L, BM)
    f = (tl.program_id(0) % blocks) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) // blocks).to(tl.int64) * BN + tl.arange(0, BN)
    inside = (n < R)[:, None] & (f < L)[None, :]
    column = f if K == 1 else f % M
    places = n[:, None] * L + f[None, :]
    if GIVEN:
        total = tl.load(received + places, mask=inside, other=0.0)
    else:
        total = incoming_sum(t, back, order, start, n, f, column, inside, L, M, points, TIES, BN, BM)
        if TIES:
            total += incoming_sum(
                back, back, runner_order, runner_start, n, f, column, inside, L, M, points, False, BN, BM
            )
    sent = tl.load(t + places, mask=inside, other=0.0)
    where = n[:, None] * u_row + f[None, :]
    store_planes(U, u_plane, where, total - sent, inside, factor_planes(FORM), FORM)
    store_planes(U, u_plane, where + L, sent, inside, factor_planes(FORM), FORM)


# Few points per tile: a tile takes as long as its point with the most edges. It has half as many float64 filters.
RECEIVE_ROWS, RECEIVE_FILTERS, RECEIVE_WARPS = 256 if INTERPRETED else 8, 32, 1


def plan(
    X: Tensor,  # (planes, clouds points, F)
    incoming: Incoming,
    C: Tensor,  # (clouds, points, M)
    V: Tensor,  # (L, 2 F (+ 1))
    bias: bool,
    ties: EdgeTies | None,
    form: str,
    device: Device,
    options: TritonOptions,
    pair: tuple[Config, Config],
) -> Plan:
    """Return the launches for contiguous vectors."""
    (_, R, F), (_, points, M), L = X.shape, C.shape, len(V)
    K, storage = 1 if L == M else 2, factor_storage(form, V.dtype)
    product, sums = pair[0].for_gathers(), (pair[1].for_bias(form) if bias else pair[1]).for_inputs(F)
    across = is_by_single_multiplications(form, device)
    coefficients = aligned("ieee", C.reshape(R, M))
    runners = incoming if ties is None or ties.incoming is None else ties.incoming
    given = [] if ties is None else [ties.K, *(own for own in (ties.d1, ties.d2) if own is not None)]
    # K, d1 and d2; what is missing is not read.
    tie = ([own.reshape(R, M).contiguous() for own in given] + [coefficients] * 3)[:3]
    first, a_planes = split_launch(V, form, storage, across, range(F))
    second, difference = split_launch(V, form, storage, across, range(F, 2 * F), less=F)
    products, t = V.new_empty(2, R, L)
    received = V.new_zeros(R, L) if options.atomic else t
    back = t if ties is None else torch.empty_like(t)
    launches = [first, second]
    for is_second, planes in enumerate((a_planes, difference)):
        arguments = dict(
            X=X, V=V, planes=planes, products=products, C=coefficients, winner=incoming.winner, t=t,
            received=received, runner=runners.winner, tie=tie[0], d1=tie[1], d2=tie[2], back=back, R=R, F=F, L=L, M=M,
            points=points, x_plane=X.stride(0), x_row=X.stride(1), x_column=X.stride(2), c_row=coefficients.stride(0),
            c_column=coefficients.stride(1), v_row=V.stride(0), plane=planes.stride(0), pitch=planes.stride(1),
            EDGES=bool(is_second), TIES=ties is not None, SLOPES=len(given) > 1, BIAS=bias, ATOMIC=options.atomic, K=K,
            WHOLE=is_aligned(X), FORM=form, ACROSS=across, BN=product.rows, BM=product.filters,
            BK=product.depth,
        )  # fmt: skip
        name = "edgeconv, " + (
            "edges" + ", atomic" * options.atomic + ", tied" * (ties is not None) if is_second else "points"
        )
        grid = (triton.cdiv(L, product.filters) * triton.cdiv(R, product.rows),)
        work = (PRODUCTS[form] * product.rows * product.filters * product.depth,)
        launches.append(
            Launch(
                name, point_products_kernel, grid, arguments, product.warps, product.stages, work, product.label,
                configs.compiler_options(device, product),
            )
        )  # fmt: skip
    U = product_memory(form, R, 2 * L, V)
    filters = RECEIVE_FILTERS * torch.float32.itemsize // V.itemsize
    arguments = dict(
        t=t, order=incoming.order, start=incoming.start, back=back, runner_order=runners.order,
        runner_start=runners.start, received=received, U=U, R=R, L=L, M=M, points=points, u_plane=U.stride(0),
        u_row=U.stride(1), TIES=ties is not None, GIVEN=options.atomic, FORM=form, BN=RECEIVE_ROWS, BM=filters, K=K,
    )  # fmt: skip
    name = "edgeconv, receive" + ", atomic" * options.atomic + ", tied" * (ties is not None)
    grid = (triton.cdiv(L, filters) * triton.cdiv(R, RECEIVE_ROWS),)
    launches.append(Launch(name, receive_kernel, grid, arguments, RECEIVE_WARPS))
    per_slice, slices = slices_of(X, R, 2 * L, sums, device)
    out = V.new_empty(slices, *V.shape)
    biased = range(L, 2 * L) if bias else range(0)
    launches += accumulate_launches(X, U, out, (0, R), 2 * L, F, biased, per_slice, form, sums, device)
    return launch.summed(launches, out)


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
    device = describe(X.device)
    form = current_form(X)
    at_once = copied_at_once(form, X, options)
    if at_once < clouds:
        total = torch.zeros_like(V)
        for first in range(0, clouds, at_once):
            own = slice(first, first + at_once)
            edges, tied = _of_clouds(incoming, own), _ties_of_clouds(ties, own)
            total += edgeconv_matvec(X=X[own], incoming=edges, C=C[own], V=V, bias=bias, ties=tied)
        return total
    rows = in_planes(form, X)
    candidates = configs.wide(device, form, X.dtype, clouds * points)
    shapes = (bias, ties is None, options.atomic, F, len(vectors), M, (clouds * points).bit_length())
    key = ("edgeconv", X.device, X.dtype, form, is_aligned(rows), *shapes)
    with launch.on_device(X):
        result = launch.choose(
            key, candidates, lambda pair: plan(rows, incoming, C, vectors, bias, ties, form, device, options, pair)
        )
    return result.view(V.shape)


def _of_clouds(edges: Incoming, own: slice) -> Incoming:
    """Return the edges of some clouds."""
    return Incoming(*(tensor[own] for tensor in edges))


def _ties_of_clouds(ties: EdgeTies | None, own: slice) -> EdgeTies | None:
    """Return the ties of some clouds."""
    if ties is None:
        return None
    d1, d2 = (None if slopes is None else slopes[own] for slopes in (ties.d1, ties.d2))
    incoming = None if ties.incoming is None else _of_clouds(ties.incoming, own)
    return EdgeTies(ties.runner[own], ties.K[own], d1, d2, incoming)
