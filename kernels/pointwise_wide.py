"""S v for a layer with any number of inputs, in two launches per chunk of rows: U = (X V^T) * C, then U^T X.

U (chunk, F) goes through memory, as launch 2 reads it: in bfloat16 planes, or in the dtype of V for IEEE products.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from s3d_fast.base.padding import padded_size
from s3d_fast.kernels import configs, launch, tiles
from s3d_fast.kernels.aligned import by_aligned_rows, is_aligned
from s3d_fast.kernels.device import INTERPRETED, Device, describe
from s3d_fast.kernels.launch import Launch, Plan, loadable, tile_offsets
from s3d_fast.kernels.options import TritonOptions, current
from s3d_fast.kernels.products import (
    PRODUCTS,
    current_form,
    factor_planes,
    factor_storage,
    is_by_single_multiplications,
    load_planes,
    product,
    row_planes,
    split_launch,
    store_planes,
)
from s3d_fast.kernels.tiles import Config


@triton.jit
def rows_product(
    X,
    planes,
    rows,  # how many rows from X on there are
    filters,  # how many filters from `planes` on there are
    D,
    x_plane,
    x_row,
    x_column,
    plane,
    pitch,
    WHOLE: tl.constexpr,  # whether X can be loaded up to a multiple of 16 columns
    FORM: tl.constexpr,
    ACROSS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """X V^T (BN, BM) for the first rows of X and the first filters of the planes of V."""
    number = tl.float64 if planes.dtype.element_ty == tl.float64 else tl.float32
    r, k, own = tl.arange(0, BN), tl.arange(0, BK), tl.arange(0, BM)
    inside_n, inside_f = r < rows, own < filters
    x_tile = tile_offsets(r, x_row, k, x_column)
    v_tile = k[:, None] * pitch + own[None, :] if ACROSS else k[:, None] + own[None, :] * pitch
    tl.assume(D > 0)
    u = tl.zeros((BN, BM), number)
    columns = loadable(D, WHOLE)
    # Rows of planes end in zeros, unless filters are contiguous.
    entries = D if ACROSS else pitch
    for first in range(0, D, BK):
        inside_x = inside_n[:, None] & (k < columns - first)[None, :]
        x = load_planes(X, x_plane, x_tile, inside_x, row_planes(FORM))
        inside_v = (k < entries - first)[:, None] & inside_f[None, :]
        v = load_planes(planes, plane, v_tile, inside_v, factor_planes(FORM))
        u = product(x, v, u, FORM)
        X += BK * x_column
        planes += BK * pitch if ACROSS else BK
    return u


@triton.jit(do_not_specialize=["begin", "end"])
def project_kernel(
    X,  # (planes, N, D)
    C,  # (N, M); None for no coefficients
    V,  # (F, D (+ 1))
    planes,  # (planes, F, pitch), those of V; if ACROSS, (planes, D, pitch)
    U,  # (planes, chunk, u_row); without coefficients (chunk, u_row)
    begin,
    end,  # the chunk's rows are [begin, end)
    D,
    F,
    M,
    x_plane,
    x_row,
    x_column,
    c_row,
    c_column,
    v_row,
    plane,
    pitch,
    u_plane,
    u_row,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    FORM: tl.constexpr,
    ACROSS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """U = (X V^T + bias) * C for a chunk of rows, in planes; without coefficients, as it is."""
    # Neighbouring programs take the same rows: X is read from memory once; V is small and comes from the cache.
    blocks = tl.cdiv(F, BM)
    first_filter = (tl.program_id(0) % blocks) * BM
    row = (tl.program_id(0) // blocks).to(tl.int64) * BN
    r, own = tl.arange(0, BN), tl.arange(0, BM)
    f = first_filter + own
    parts = planes + (first_filter if ACROSS else first_filter.to(tl.int64) * pitch)
    u = rows_product(
        X + (begin + row) * x_row, parts, end - begin - row, F - first_filter, D, x_plane, x_row, x_column,
        plane, pitch, WHOLE, FORM, ACROSS, BN, BM, BK,
    )  # fmt: skip
    inside_n, inside_f = r < end - begin - row, f < F
    if BIAS:
        u += tl.load(V + f.to(tl.int64) * v_row + D, mask=inside_f, other=0.0)[None, :]
    if C is not None:
        column = f if K == 1 else f % M
        c_tile = tile_offsets(r, c_row, column, c_column)
        inside = inside_n[:, None] & inside_f[None, :]
        u *= tl.load(C + (begin + row) * c_row + c_tile, mask=inside, other=0.0).to(u.dtype)
        places = r[:, None] * u_row + f[None, :]
        store_planes(U + row * u_row, u_plane, places, u, inside, factor_planes(FORM), FORM)
    else:
        inside = inside_n[:, None] & inside_f[None, :]
        tl.store(U + row * u_row + (r[:, None] * u_row + f[None, :]), u, mask=inside)


@triton.jit(do_not_specialize=["begin", "end", "fresh"])
def accumulate_kernel(
    X,  # (planes, N, D)
    U,  # (planes, chunk, u_row), of which F columns count
    out,  # (slices, filters, o_row)
    begin,
    end,  # the chunk's rows are [begin, end)
    D,
    F,
    filters,  # columns of U beyond these belong to the second half of a row of `out`
    x_plane,
    x_row,
    x_column,
    u_plane,
    u_row,
    o_row,
    half,  # where the second half of a row of `out` starts
    rows_per_slice,
    fresh,  # whether to ignore what `out` holds
    WHOLE: tl.constexpr,
    FORM: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
):
    """out[slice] += U^T X over the slice's rows of a chunk; if fresh, out[slice] counts as zero before."""
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    f = tl.program_id(1) * BM + tl.arange(0, BM)
    slice_index = tl.program_id(2).to(tl.int64)
    row = slice_index * rows_per_slice
    rows = tl.minimum(row + rows_per_slice, end - begin) - row
    r = tl.arange(0, BK)
    inside_f, inside_d = f < F, d < D
    # Rows of U end in zeros.
    inside_x, inside_u = d < loadable(D, WHOLE), f < u_row
    out += slice_index * filters * o_row
    starts = (f % filters).to(tl.int64) * o_row + (f // filters) * half
    where = out + starts[:, None] + d[None, :]
    inside = inside_f[:, None] & inside_d[None, :]
    total = tl.load(where, mask=inside & (fresh == 0), other=0.0)
    x_tile = tile_offsets(r, x_row, d, x_column)
    u_tile = r[None, :] * u_row + f[:, None]
    X += (begin + row) * x_row
    U += row * u_row
    tl.assume(rows > 0)
    for first in range(0, rows, BK):
        inside_n = r < rows - first
        x = load_planes(X, x_plane, x_tile, inside_n[:, None] & inside_x[None, :], row_planes(FORM))
        u = load_planes(U, u_plane, u_tile, inside_u[:, None] & inside_n[None, :], factor_planes(FORM))
        total = product(u, x, total, FORM)
        X += BK * x_row
        U += BK * u_row
    tl.store(where, total, mask=inside)


@triton.jit(do_not_specialize=["rows", "fresh", "first"])
def column_sums_kernel(
    U,  # (planes, chunk, u_row), of which the columns from `first` to F count
    out,  # (slices, filters, o_row)
    rows,  # of the chunk
    D,
    F,
    first,
    filters,
    u_plane,
    u_row,
    o_row,
    half,
    rows_per_slice,
    fresh,
    FORM: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """out[slice, ..., D] += the sums of the columns of U over the slice's rows of a chunk, for the bias.

    A kernel of its own: if tiles of U were also read by threads, the loop of `accumulate_kernel` would have one buffer
    less, and copies would overwrite what tensor cores still read.
    """
    number = out.dtype.element_ty
    f = first + tl.program_id(0) * BM + tl.arange(0, BM)
    slice_index = tl.program_id(1).to(tl.int64)
    begin = slice_index * rows_per_slice
    count = tl.minimum(begin + rows_per_slice, rows) - begin
    r = tl.arange(0, BK)
    tile = r[:, None] * u_row + f[None, :]
    U += begin * u_row
    # Each row of the tile adds up its own part: sums over rows in the loop would wait at barriers.
    parts = tl.zeros((BK, BM), number)
    for row in range(0, count, BK):
        inside = (r < count - row)[:, None] & (f < F)[None, :]
        u = load_planes(U, u_plane, tile, inside, factor_planes(FORM))
        # The smallest first: their sum is then rounded least.
        for i in tl.static_range(len(u)):
            parts += u[len(u) - 1 - i].to(number)
        U += BK * u_row
    total = tl.sum(parts, 0)
    where = out + slice_index * filters * o_row + (f % filters).to(tl.int64) * o_row + (f // filters) * half + D
    total += tl.load(where, mask=(f < F) & (fresh == 0), other=0.0)
    tl.store(where, total, mask=f < F)


SUMMED_COLUMNS, SUMMED_ROWS, SUMMED_WARPS = (64, 128, 4) if INTERPRETED else (32, 64, 4)


def product_memory(form: str, rows: int, columns: int, V: Tensor) -> Tensor:
    """Return memory for U, (planes, rows, padded columns), with zeros in the columns that are padding."""
    planes, dtype = factor_storage(form, V.dtype)
    U = V.new_empty(planes, rows, padded_size(columns), dtype=dtype)
    if columns < U.shape[2]:
        U[:, :, columns:].zero_()
    return U


def accumulate_launches(
    X: Tensor,  # (planes, N, D)
    U: Tensor,  # (planes, chunk, padded columns)
    out: Tensor,  # (slices, filters, ...)
    chunk: tuple[int, int],
    columns: int,
    half: int,
    biased: range,
    per_slice: int,
    form: str,
    config: Config,
    device: Device,
) -> list[Launch]:
    """Return the launches that add U^T X over a chunk of rows to every slice of `out`, and sums of columns of U.

    Column f belongs to row f % filters of `out`; from column `filters` on, to its second half. The sums of the columns
    `biased` go behind their halves.
    """
    _, filters, o_row = out.shape
    D = X.shape[2]
    # The last chunk may have fewer rows, and then no rows for the last slices.
    slices = triton.cdiv(chunk[1] - chunk[0], per_slice)
    common = dict(
        U=U, out=out, D=D, filters=filters, u_plane=U.stride(0), u_row=U.stride(1), o_row=o_row, half=half,
        rows_per_slice=per_slice, fresh=int(chunk[0] == 0), FORM=form,
    )  # fmt: skip
    arguments = dict(
        common, X=X, begin=chunk[0], end=chunk[1], F=columns, x_plane=X.stride(0), x_row=X.stride(1),
        x_column=X.stride(2), WHOLE=is_aligned(X), BM=config.filters, BD=config.rows, BK=config.depth,
    )  # fmt: skip
    grid = (max(1, triton.cdiv(D, config.rows)), triton.cdiv(columns, config.filters), slices)
    work = (PRODUCTS[form] * config.rows * config.filters * config.depth,)
    launches = [
        Launch(
            "wide, accumulate", accumulate_kernel, grid, arguments, config.warps, config.stages, work, config.label,
            configs.compiler_options(device, config),
        )
    ]  # fmt: skip
    if biased:
        arguments = dict(
            common, rows=chunk[1] - chunk[0], F=biased.stop, first=biased.start, BM=SUMMED_COLUMNS, BK=SUMMED_ROWS
        )
        blocks = triton.cdiv(len(biased), SUMMED_COLUMNS)
        launches.append(Launch("wide, bias", column_sums_kernel, (blocks, slices), arguments, SUMMED_WARPS))
    return launches


def chunk_rows(
    form: str, rows: int, columns: int, number: torch.dtype, pair: tuple[Config, Config], options: TritonOptions
) -> int:
    """Return how many rows of U are made at once: all, or as many as the scratch memory holds, in even parts."""
    planes, dtype = factor_storage(form, number)
    block = max(pair[0].rows, pair[1].depth)
    most = options.scratch_bytes // (planes * dtype.itemsize * padded_size(columns))
    return launch.part_size(rows, most, block)


def project_launch(
    name: str,
    X: Tensor,  # (planes, N, D)
    C: Tensor | None,  # (N, M)
    V: Tensor,  # (F, D (+ 1))
    parts: Tensor,  # the planes of V
    U: Tensor,  # (planes, chunk, padded filters); without coefficients (chunk, padded filters)
    chunk: tuple[int, int],
    bias: bool,
    form: str,
    config: Config,
    device: Device,
) -> Launch:
    """Return the launch of U = (X V^T + bias) * C for a chunk of rows."""
    (begin, end), D, F = chunk, X.shape[2], len(V)
    M, c_row, c_column = (F, 0, 0) if C is None else (C.shape[1], *C.stride())
    arguments = dict(
        X=X, C=C, V=V, planes=parts, U=U, begin=begin, end=end, D=D, F=F, M=M, x_plane=X.stride(0),
        x_row=X.stride(1), x_column=X.stride(2), c_row=c_row, c_column=c_column, v_row=V.stride(0),
        plane=parts.stride(0), pitch=parts.stride(1), u_plane=U.stride(0),
        u_row=U.stride(-2), K=1 if F == M else 2, BIAS=bias, WHOLE=is_aligned(X), FORM=form,
        ACROSS=is_by_single_multiplications(form, device), BN=config.rows, BM=config.filters, BK=config.depth,
    )  # fmt: skip
    grid = (triton.cdiv(F, config.filters) * triton.cdiv(end - begin, config.rows),)
    work = (PRODUCTS[form] * config.rows * config.filters * config.depth,)
    extra = configs.compiler_options(device, config)
    return Launch(name, project_kernel, grid, arguments, config.warps, config.stages, work, config.label, extra)


def slices_of(X: Tensor, rows: int, columns: int, config: Config, device: Device) -> tuple[int, int]:
    """Return the rows per slice and the number of slices of `accumulate_launches`."""
    tiles = max(1, triton.cdiv(X.shape[2], config.rows)) * triton.cdiv(columns, config.filters)
    return launch.share_rows(rows, tiles, config.depth, device, config.warps)


def plan(
    X: Tensor,  # (planes, N, D)
    C: Tensor,  # (N, M)
    V: Tensor,  # (F, D (+ 1)), contiguous
    bias: bool,
    form: str,
    device: Device,
    options: TritonOptions,
    pair: tuple[Config, Config],
) -> Plan:
    """Return the launches for rows of any width."""
    (_, N, D), F = X.shape, len(V)
    project, accumulate = pair[0], pair[1].for_bias(form) if bias else pair[1]
    across = is_by_single_multiplications(form, device)
    split, parts = split_launch(V, form, factor_storage(form, V.dtype), across, range(D))
    rows = chunk_rows(form, N, F, V.dtype, (project, accumulate), options)
    U = product_memory(form, rows, F, V)
    per_slice, slices = slices_of(X, rows, F, accumulate, device)
    out = V.new_empty(slices, *V.shape)
    name = "wide, project" + ", few rows" * (N <= tiles.FEW_ROWS)
    launches = [split]
    for begin in range(0, N, rows):
        chunk = begin, min(begin + rows, N)
        launches += [
            project_launch(name, X, C, V, parts, U, chunk, bias, form, project, device),
            *accumulate_launches(X, U, out, chunk, F, 0, range(F * bias), per_slice, form, accumulate, device),
        ]
    return launch.summed(launches, out)


def splitting_matvec(*, X: Tensor, C: Tensor, V: Tensor, bias: bool) -> Tensor:
    """Return S v for a layer of any width, as `s3d_fast.maths.reference.splitting_matvec` defines it."""
    if V.numel() == 0 or len(X) == 0:
        return torch.zeros_like(V)
    device, options = describe(X.device), current()
    form = current_form(X)

    def run(X: Tensor, coefficients: Sequence[Tensor], V: Tensor) -> Tensor:
        ((_, N, D), (C,)) = X.shape, coefficients
        shapes = (D, len(V), C.shape[1], X.stride()[1:], N.bit_length())
        key = ("wide", C.device, C.dtype, form, is_aligned(X), bias, *shapes)
        candidates = configs.wide(device, form, C.dtype, N)
        return launch.choose(key, candidates, lambda pair: plan(X, C, V, bias, form, device, options, pair))

    with launch.on_device(X):
        vectors = V.reshape(-1, V.shape[-1]).contiguous()
        return by_aligned_rows(form, X, [C], vectors, options, run).view(V.shape)
