"""S v for a layer with few inputs (`tiles`), in one launch: the (N, M) product stays on chip, tile by tile."""

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
    transposed,
)
from s3d_fast.kernels.tiles import Config


@triton.jit
def fused_rows(
    X,
    C,
    V,
    planes,
    first,
    last,  # the program's rows are [first, last), int64
    first_filter,
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
    one,  # see `launch.hidden_one`
    K: tl.constexpr,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,  # whether X and C can be loaded up to a multiple of 16 columns
    FORM: tl.constexpr,
    ACROSS: tl.constexpr,
    TURNED: tl.constexpr,
    PARTS: tl.constexpr,  # of a tile of C
    BN: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
):
    """U^T X (BM, BD), and the sum of the rows of U (BM,), for U = (X V^T + bias) * C over the rows [first, last).

    On tensor cores we compute U^T = V X^T: its layout in registers is that of the left factor of U^T X. By single
    multiplications (ACROSS), we compute U: threads then read V along the filters.
    """
    number = V.dtype.element_ty
    r, d, own = tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BM)
    f = first_filter + own
    inside_f, inside_d = f < F, d < D
    if BIAS:
        b = tl.load(V + first_filter.to(tl.int64) * v_row + (own * v_row + D), mask=inside_f, other=0.0)
    if ACROSS:
        v_tile, inside_v = d[:, None] * pitch + own[None, :], inside_d[:, None] & inside_f[None, :]
        planes += first_filter
    else:
        # Rows of planes end in zeros.
        inside_p = d < pitch
        planes += first_filter.to(tl.int64) * pitch
        if TURNED:
            v_tile, inside_v = own[:, None] * pitch + d[None, :], inside_f[:, None] & inside_p[None, :]
        else:
            v_tile, inside_v = d[:, None] + own[None, :] * pitch, inside_p[:, None] & inside_f[None, :]
    v = load_planes(planes, plane, v_tile, inside_v, factor_planes(FORM))
    x_tile = tile_offsets(r, x_row, d, x_column)
    c_tile, c_rows, inside_c = coefficient_offsets(C, first_filter, F, M, c_row, c_column, K, WHOLE, PARTS, BN, BM)
    # No program is without rows: the assembler then sees no path on which the sums are defined a second time.
    tl.assume(first < last)
    inside_x = d < loadable(D, WHOLE)
    total = tl.zeros((BM, BD), number)
    # Rows are added up after the loop: warps would have to wait for each other in every pass.
    ones = tl.zeros((BM, BN) if TURNED else (BN, BM), number)
    for begin in range(first, last, BN):
        inside = (r < last - begin)[:, None] & inside_x[None, :]
        x = load_planes(X + begin * x_row, x_plane, x_tile, inside, row_planes(FORM))
        c = load_coefficients(
            C + begin * c_row, c_tile, c_rows, inside_c, last - begin, c_row, one, TURNED, PARTS, BN, BM
        )
        if not TURNED:
            u = product(x, v, tl.zeros((BN, BM), number), FORM)
            if BIAS:
                u = plus(u, b[None, :], one)
            u *= c.to(number)
            if BIAS:
                ones += u
            u = tl.trans(u)
        else:
            u = product(v, transposed(x), tl.zeros((BM, BN), number), FORM)
            if BIAS:
                u = plus(u, b[:, None], one)
            u *= c.to(number)
            if BIAS:
                ones += u
        total = product(planes_of(u, factor_planes(FORM), FORM), x, total, FORM)
    return total, tl.sum(ones, 1 if TURNED else 0)


@triton.jit
def store_sums(
    out,
    total,
    bias_total,
    first_filter,
    D,
    F,
    BIAS: tl.constexpr,
    ATOMIC: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
):  # out: (F, D), or (F, D + 1) with bias
    """out = the sums of one program; if ATOMIC, out += these sums."""
    d, own = tl.arange(0, BD), tl.arange(0, BM)
    out += first_filter.to(tl.int64) * (D + BIAS)
    inside_f = first_filter + own < F
    inside = inside_f[:, None] & (d < D)[None, :]
    places = own[:, None] * (D + BIAS) + d[None, :]
    if ATOMIC:
        tl.atomic_add(out + places, total, mask=inside, sem="relaxed")
        if BIAS:
            tl.atomic_add(out + (own * (D + 1) + D), bias_total, mask=inside_f, sem="relaxed")
    else:
        tl.store(out + places, total, mask=inside)
        if BIAS:
            tl.store(out + (own * (D + 1) + D), bias_total, mask=inside_f)


@triton.jit
def fused_kernel(
    X,  # (planes, N, D)
    C,  # (N, M)
    V,  # (F, D), or (F, D + 1) with bias; F = K M
    planes,  # (planes, F, pitch), those of V; if ACROSS, (planes, D, pitch)
    out,  # (slices, F, D (+ 1)); if ATOMIC, (F, D (+ 1)), zero at first
    N,
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
    rows_per_slice,
    one,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    ATOMIC: tl.constexpr,
    FORM: tl.constexpr,
    ACROSS: tl.constexpr,
    TURNED: tl.constexpr,
    PARTS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
):
    """((X V^T) * C)^T X for a block of filters and a slice of the rows."""
    first_filter = tl.program_id(0) * BM
    slice_index = tl.program_id(1).to(tl.int64)
    first = slice_index * rows_per_slice
    last = tl.minimum(first + rows_per_slice, N)
    total, bias_total = fused_rows(
        X, C, V, planes, first, last, first_filter, D, F, M, x_plane, x_row, x_column, c_row, c_column, v_row, plane,
        pitch, one, K, BIAS, WHOLE, FORM, ACROSS, TURNED, PARTS, BN, BM, BD,
    )  # fmt: skip
    if not ATOMIC:
        out += slice_index * F * (D + BIAS)
    store_sums(out, total, bias_total, first_filter, D, F, BIAS, ATOMIC, BM, BD)


def plan(
    X: Tensor,  # (planes, N, D)
    C: Tensor,  # (N, M)
    V: Tensor,  # (F, D (+ 1)), contiguous
    bias: bool,
    form: str,
    device: Device,
    options: TritonOptions,
    config: Config,
) -> Plan:
    """Return the launches for rows that are narrow enough."""
    (_, N, D), F = X.shape, len(V)
    across = is_by_single_multiplications(form, device)
    split, planes = split_launch(V, form, factor_storage(form, V.dtype), across, range(D))
    blocks = triton.cdiv(F, config.filters)
    per_slice, slices = launch.share_rows(N, blocks, config.rows, device, config.warps)
    atomic = options.atomic and slices > 1 and configs.adds_atomically(config, device)
    out = torch.zeros_like(V) if atomic else V.new_empty(slices, *V.shape)
    M = C.shape[1]
    arguments = dict(
        X=X, C=C, V=V, planes=planes, out=out, N=N, D=D, F=F, M=M, x_plane=X.stride(0), x_row=X.stride(1),
        x_column=X.stride(2), c_row=C.stride(0), c_column=C.stride(1), v_row=V.stride(0), plane=planes.stride(0),
        pitch=planes.stride(1),
        rows_per_slice=per_slice, one=launch.hidden_one(device), K=1 if F == M else 2, BIAS=bias,
        WHOLE=is_whole(X, [C], F), ATOMIC=atomic, FORM=form, ACROSS=across,
        TURNED=config.turned, PARTS=configs.coefficient_parts(config, device, C.dtype), BN=config.rows,
        BM=config.filters, BD=config.depth,
    )  # fmt: skip
    work = 2 * PRODUCTS[form] * config.rows * config.filters * config.depth
    name = "pointwise" + ", atomic" * atomic
    fused = Launch(
        name, fused_kernel, (blocks, slices), arguments, config.warps, config.stages, (work,), config.label,
        configs.compiler_options(device, config),
    )  # fmt: skip
    return Plan([split, fused], out) if atomic else launch.summed([split, fused], out)


def supports(X: Tensor) -> bool:
    """Return whether the rows are narrow enough for the sums of a block of filters to stay in registers."""
    device, width = describe(X.device), launch.power_of_two(X.shape[1], 16, 1 << 30)
    form = current_form(X)
    return bool(configs.pointwise(device, form, X.dtype, width, 1 << 30))


def splitting_matvec(*, X: Tensor, C: Tensor, V: Tensor, bias: bool) -> Tensor:
    """Return S v for rows that it `supports`, as `s3d_fast.maths.reference.splitting_matvec` defines it."""
    if V.numel() == 0 or len(X) == 0:
        return torch.zeros_like(V)
    device, options = describe(X.device), current()
    form = current_form(X)
    width = launch.power_of_two(X.shape[1], 16, 1 << 30)

    def run(X: Tensor, coefficients: Sequence[Tensor], V: Tensor) -> Tensor:
        (C,), F = coefficients, len(V)
        shapes = (width, F, C.shape[1], bias, options.atomic, X.stride()[1:], X.shape[1].bit_length())
        key = ("pointwise", C.device, C.dtype, form, is_aligned(X, C), *shapes)
        candidates = configs.pointwise(device, form, C.dtype, width, F, bias, options.atomic)
        return launch.choose(key, candidates, lambda config: plan(X, C, V, bias, form, device, options, config))

    with launch.on_device(X):
        vectors = V.reshape(-1, V.shape[-1]).contiguous()
        return by_aligned_rows(form, X, [C], vectors, options, run).view(V.shape)
