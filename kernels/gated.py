"""S v for gated units: [X^T (c11 p + c12 q), X^T (c12 p + c22 q)] with p = X A^T and q = X B^T, where v = [a, b].

Narrow rows take one launch: the (N, M) products stay on chip, tile by tile. For wider rows, a first launch stores both
products times the coefficients, and a second one multiplies them with X, as in `pointwise_wide`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from s3d_fast.kernels import configs, launch
from s3d_fast.kernels.aligned import by_aligned_rows, is_aligned, is_whole
from s3d_fast.kernels.coefficients import coefficient_offsets, load_coefficients
from s3d_fast.kernels.device import Device, describe
from s3d_fast.kernels.launch import Launch, Plan, loadable, tile_offsets
from s3d_fast.kernels.options import TritonOptions, current
from s3d_fast.kernels.pointwise_wide import (
    accumulate_launches,
    chunk_rows,
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
    load_planes,
    planes_of,
    plus,
    product,
    row_planes,
    split_launch,
    store_planes,
    transposed,
)
from s3d_fast.kernels.tiles import Config


@triton.jit
def gated_kernel(
    X,  # (planes, N, D)
    c11,  # (N, M)
    c12,  # (N, M)
    c22,  # (N, M); not read unless FULL
    V,  # (F, 2 D), or (F, 2 (D + 1)) with bias; F = K M
    a_planes,  # (planes, F, pitch), those of A; if ACROSS, (planes, D, pitch)
    b_planes,
    out,  # (slices, F, 2 (D (+ 1)))
    N,
    D,
    F,
    M,
    x_plane,
    x_row,
    x_column,
    c11_row,
    c11_column,
    c12_row,
    c12_column,
    c22_row,
    c22_column,
    v_row,
    plane,
    pitch,
    rows_per_slice,
    one,  # see `launch.hidden_one`
    K: tl.constexpr,
    FULL: tl.constexpr,  # whether c22 is given
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,  # whether X and the coefficients can be loaded up to a multiple of 16 columns
    FORM: tl.constexpr,
    ACROSS: tl.constexpr,
    PARTS: tl.constexpr,  # of a tile of coefficients
    BN: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
):
    """[X^T (c11 p + c12 q), X^T (c12 p + c22 q)], p = X A^T and q = X B^T, for some filters and a slice of the rows."""
    number = V.dtype.element_ty
    first_filter = tl.program_id(0) * BM
    slice_index = tl.program_id(1).to(tl.int64)
    first = slice_index * rows_per_slice
    last = tl.minimum(first + rows_per_slice, N)
    r, d, own = tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BM)
    f = first_filter + own
    inside_f, inside_d = f < F, d < D
    half = D + BIAS
    if BIAS:
        V += first_filter.to(tl.int64) * v_row
        a_bias = tl.load(V + (own * v_row + D), mask=inside_f, other=0.0)
        b_bias = tl.load(V + half + (own * v_row + D), mask=inside_f, other=0.0)
    if ACROSS:
        v_tile, inside_v = d[:, None] * pitch + own[None, :], inside_d[:, None] & inside_f[None, :]
        start = first_filter.to(tl.int64)
    else:
        # Rows of planes end in zeros.
        v_tile, inside_v = own[:, None] * pitch + d[None, :], inside_f[:, None] & (d < pitch)[None, :]
        start = first_filter.to(tl.int64) * pitch
    a = load_planes(a_planes + start, plane, v_tile, inside_v, factor_planes(FORM))
    b = load_planes(b_planes + start, plane, v_tile, inside_v, factor_planes(FORM))
    x_tile = tile_offsets(r, x_row, d, x_column)
    c11_tile, c_rows, inside_c = coefficient_offsets(
        c11, first_filter, F, M, c11_row, c11_column, K, WHOLE, PARTS, BN, BM
    )
    c12_tile, _, _ = coefficient_offsets(c12, first_filter, F, M, c12_row, c12_column, K, WHOLE, PARTS, BN, BM)
    c22_tile = c12_tile
    if FULL:
        c22_tile, _, _ = coefficient_offsets(c22, first_filter, F, M, c22_row, c22_column, K, WHOLE, PARTS, BN, BM)
    # No program is without rows: the assembler then sees no path on which sums are defined a second time.
    tl.assume(first < last)
    inside_x = d < loadable(D, WHOLE)
    a_total, b_total = tl.zeros((BM, BD), number), tl.zeros((BM, BD), number)
    # Rows are added up after the loop: warps would have to wait for each other in every pass.
    a_ones = tl.zeros((BN, BM) if ACROSS else (BM, BN), number)
    b_ones = a_ones
    for begin in range(first, last, BN):
        rows = last - begin
        inside = (r < rows)[:, None] & inside_x[None, :]
        x = load_planes(X + begin * x_row, x_plane, x_tile, inside, row_planes(FORM))
        own_a = load_coefficients(
            c11 + begin * c11_row, c11_tile, c_rows, inside_c, rows, c11_row, one, not ACROSS, PARTS, BN, BM
        )
        mixed = load_coefficients(
            c12 + begin * c12_row, c12_tile, c_rows, inside_c, rows, c12_row, one, not ACROSS, PARTS, BN, BM
        )
        own_b = mixed
        if FULL:
            own_b = load_coefficients(
                c22 + begin * c22_row, c22_tile, c_rows, inside_c, rows, c22_row, one, not ACROSS, PARTS, BN, BM
            )
        if ACROSS:
            p = product(x, a, tl.zeros((BN, BM), number), FORM)
            q = product(x, b, tl.zeros((BN, BM), number), FORM)
        else:
            p = product(a, transposed(x), tl.zeros((BM, BN), number), FORM)
            q = product(b, transposed(x), tl.zeros((BM, BN), number), FORM)
        if BIAS:
            p = plus(p, a_bias[None, :] if ACROSS else a_bias[:, None], one)
            q = plus(q, b_bias[None, :] if ACROSS else b_bias[:, None], one)
        upper = own_a.to(number) * p + mixed.to(number) * q
        lower = mixed.to(number) * p
        if FULL:
            lower += own_b.to(number) * q
        if BIAS:
            a_ones += upper
            b_ones += lower
        if ACROSS:
            upper, lower = tl.trans(upper), tl.trans(lower)
        a_total = product(planes_of(upper, factor_planes(FORM), FORM), x, a_total, FORM)
        b_total = product(planes_of(lower, factor_planes(FORM), FORM), x, b_total, FORM)
    out += (slice_index * F + first_filter) * (2 * half)
    places = own[:, None] * (2 * half) + d[None, :]
    inside_out = inside_f[:, None] & inside_d[None, :]
    tl.store(out + places, a_total, mask=inside_out)
    tl.store(out + half + places, b_total, mask=inside_out)
    if BIAS:
        axis: tl.constexpr = 0 if ACROSS else 1
        tl.store(out + (own * (2 * half) + D), tl.sum(a_ones, axis), mask=inside_f)
        tl.store(out + (own * (2 * half) + half + D), tl.sum(b_ones, axis), mask=inside_f)


@triton.jit(do_not_specialize=["begin", "end"])
def gated_project_kernel(
    X,  # (planes, N, D)
    c11,  # (N, M)
    c12,  # (N, M)
    c22,  # (N, M); not read unless FULL
    V,  # (F, 2 (D (+ 1)))
    a_planes,  # (planes, F, pitch), those of A; if ACROSS, (planes, D, pitch)
    b_planes,
    U,  # (planes, chunk, u_row): both halves, one behind the other
    begin,
    end,  # the chunk's rows are [begin, end)
    D,
    F,
    M,
    x_plane,
    x_row,
    x_column,
    c11_row,
    c11_column,
    c12_row,
    c12_column,
    c22_row,
    c22_column,
    v_row,
    plane,
    pitch,
    u_plane,
    u_row,
    K: tl.constexpr,
    FULL: tl.constexpr,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    FORM: tl.constexpr,
    ACROSS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """U = [c11 p + c12 q, c12 p + c22 q], p = X A^T and q = X B^T, for a chunk of rows."""
    blocks = tl.cdiv(F, BM)
    first_filter = (tl.program_id(0) % blocks) * BM
    row = (tl.program_id(0) // blocks).to(tl.int64) * BN
    r, own = tl.arange(0, BN), tl.arange(0, BM)
    f = first_filter + own
    start = first_filter.to(tl.int64) * (1 if ACROSS else pitch)
    rows, filters = end - begin - row, F - first_filter
    X += (begin + row) * x_row
    p = rows_product(
        X, a_planes + start, rows, filters, D, x_plane, x_row, x_column, plane, pitch, WHOLE, FORM, ACROSS, BN, BM,
        BK,
    )  # fmt: skip
    q = rows_product(
        X, b_planes + start, rows, filters, D, x_plane, x_row, x_column, plane, pitch, WHOLE, FORM, ACROSS, BN, BM,
        BK,
    )  # fmt: skip
    inside = (r < rows)[:, None] & (own < filters)[None, :]
    if BIAS:
        bias = V + f.to(tl.int64) * v_row + D
        p += tl.load(bias, mask=own < filters, other=0.0)[None, :]
        q += tl.load(bias + D + 1, mask=own < filters, other=0.0)[None, :]
    column = f if K == 1 else f % M
    row += begin
    mixed = tl.load(c12 + row * c12_row + tile_offsets(r, c12_row, column, c12_column), mask=inside, other=0.0)
    first = tl.load(c11 + row * c11_row + tile_offsets(r, c11_row, column, c11_column), mask=inside, other=0.0)
    U += (row - begin) * u_row
    places = r[:, None] * u_row + f[None, :]
    upper = first.to(p.dtype) * p + mixed.to(p.dtype) * q
    store_planes(U, u_plane, places, upper, inside, factor_planes(FORM), FORM)
    lower = mixed.to(p.dtype) * p
    if FULL:
        last = tl.load(c22 + row * c22_row + tile_offsets(r, c22_row, column, c22_column), mask=inside, other=0.0)
        lower += last.to(p.dtype) * q
    store_planes(U, u_plane, places + F, lower, inside, factor_planes(FORM), FORM)


Coefficients = tuple[Tensor, Tensor, Tensor | None]


def _common(X: Tensor, c: Coefficients, V: Tensor, form: str, across: bool, bias: bool) -> tuple[list[Launch], dict]:
    """Return the launches that split both halves of the vectors, and the arguments that both kernels have."""
    D, (c11, c12, c22) = X.shape[2], c
    half, storage = D + bias, factor_storage(form, V.dtype)
    first, a_planes = split_launch(V, form, storage, across, range(D))
    second, b_planes = split_launch(V, form, storage, across, range(half, half + D))
    last = c12 if c22 is None else c22
    arguments = dict(
        X=X, c11=c11, c12=c12, c22=last, V=V, a_planes=a_planes, b_planes=b_planes, D=D, F=len(V), M=c11.shape[1],
        x_plane=X.stride(0), x_row=X.stride(1), x_column=X.stride(2), c11_row=c11.stride(0), c11_column=c11.stride(1),
        c12_row=c12.stride(0), c12_column=c12.stride(1), c22_row=last.stride(0), c22_column=last.stride(1),
        v_row=V.stride(0), plane=a_planes.stride(0), pitch=a_planes.stride(1), K=1 if len(V) == c11.shape[1] else 2,
        FULL=c22 is not None, BIAS=bias, WHOLE=is_whole(X, (c11, c12, last), len(V)), FORM=form, ACROSS=across,
    )  # fmt: skip
    return [first, second], arguments


def plan(
    X: Tensor,  # (planes, N, D)
    c: Coefficients,
    V: Tensor,  # (F, 2 (D (+ 1))), contiguous
    bias: bool,
    form: str,
    device: Device,
    config: Config,
) -> Plan:
    """Return the launches for narrow rows."""
    N, F = X.shape[1], len(V)
    across = is_by_single_multiplications(form, device)
    splits, common = _common(X, c, V, form, across, bias)
    blocks = triton.cdiv(F, config.filters)
    per_slice, slices = launch.share_rows(N, blocks, config.rows, device, config.warps)
    out = V.new_empty(slices, *V.shape)
    arguments = dict(
        common, out=out, N=N, rows_per_slice=per_slice, one=launch.hidden_one(device),
        PARTS=0 if across else configs.coefficient_parts(config, device, c[0].dtype), BN=config.rows,
        BM=config.filters, BD=config.depth,
    )  # fmt: skip
    work = (4 * PRODUCTS[form] * config.rows * config.filters * config.depth,)
    grid = (blocks, slices)
    fused = Launch(
        "gated", gated_kernel, grid, arguments, config.warps, config.stages, work, config.label,
        configs.compiler_options(device, config),
    )  # fmt: skip
    return launch.summed([*splits, fused], out)


def wide_plan(
    X: Tensor,  # (planes, N, D)
    c: Coefficients,
    V: Tensor,  # (F, 2 (D (+ 1))), contiguous
    bias: bool,
    form: str,
    device: Device,
    options: TritonOptions,
    pair: tuple[Config, Config],
) -> Plan:
    """Return the launches for rows of any width."""
    (_, N, D), F = X.shape, len(V)
    project, accumulate = pair[0].for_two_products(X.stride(2) != 1), pair[1].for_bias(form) if bias else pair[1]
    splits, common = _common(X, c, V, form, is_by_single_multiplications(form, device), bias)
    chunk = chunk_rows(form, N, 2 * F, V.dtype, (project, accumulate), options)
    U = product_memory(form, chunk, 2 * F, V)
    per_slice, slices = slices_of(X, chunk, 2 * F, accumulate, device)
    out = V.new_empty(slices, *V.shape)
    launches = splits
    for begin in range(0, N, chunk):
        end = min(begin + chunk, N)
        arguments = dict(
            common, U=U, begin=begin, end=end, u_plane=U.stride(0), u_row=U.stride(1), BN=project.rows,
            BM=project.filters, BK=project.depth,
        )  # fmt: skip
        grid = (triton.cdiv(F, project.filters) * triton.cdiv(end - begin, project.rows),)
        work = (PRODUCTS[form] * project.rows * project.filters * project.depth,) * 2
        launches += [
            Launch(
                "gated, project", gated_project_kernel, grid, arguments, project.warps, project.stages, work,
                project.label, configs.compiler_options(device, project),
            ),
            *accumulate_launches(
                X, U, out, (begin, end), 2 * F, D + bias, range(2 * F * bias), per_slice, form, accumulate,
                device,
            ),
        ]  # fmt: skip
    return launch.summed(launches, out)


def gated_matvec(*, X: Tensor, c11: Tensor, c12: Tensor, c22: Tensor | None, V: Tensor, bias: bool) -> Tensor:
    """Return S v, as `s3d_fast.maths.reference.gated_matvec` defines it."""
    if V.numel() == 0 or len(X) == 0:
        return torch.zeros_like(V)
    device, options = describe(X.device), current()
    form = current_form(X)
    width = launch.power_of_two(X.shape[1], 16, 1 << 30)

    def run(X: Tensor, coefficients: Sequence[Tensor], V: Tensor) -> Tensor:
        (_, N, D), F = X.shape, len(V)
        first, second, *last = coefficients
        c = (first, second, last[0] if last else None)
        shapes = (D, F, first.shape[1], bias, c22 is None, X.stride()[1:], N.bit_length())
        key = ("gated", first.device, first.dtype, form, is_aligned(X, *coefficients), *shapes)
        if candidates := configs.gated(device, form, first.dtype, width, F, bias):
            return launch.choose(key, candidates, lambda own: plan(X, c, V, bias, form, device, own))
        pairs = configs.wide(device, form, first.dtype, N)
        return launch.choose(key, pairs, lambda own: wide_plan(X, c, V, bias, form, device, options, own))

    with launch.on_device(X):
        vectors = V.reshape(-1, V.shape[-1]).contiguous()
        given = [c for c in (c11, c12, c22) if c is not None]
        return by_aligned_rows(form, X, given, vectors, options, run).view(V.shape)
