"""S v for a layer with any number of inputs, in two launches per chunk of rows: U = (X V^T) * C, then U^T X.

U (chunk, F) goes through memory. How it is stored depends on the rows:
    float32, float64    in the dtype of the rows
    bfloat16            in two bfloat16 planes, leading part and remainder, ready for the tensor cores of launch 2
    float16             in float32, since U can leave the range of float16
    16-bit, "medium"    in the dtype of the rows
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from s3d_fast.kernels import launch
from s3d_fast.kernels.device import Device, describe
from s3d_fast.kernels.launch import Config, tile_offsets
from s3d_fast.kernels.options import current
from s3d_fast.kernels.products import (
    dot,
    leading_part,
    product_form,
    rows_times,
    times_rows,
    wants_filters_along_threads,
)


@triton.jit(do_not_specialize=["begin", "end"])
def project_kernel(
    X,  # (N, D)
    C,  # (N, M)
    V,  # (F, D (+ 1)), any strides
    U,  # (planes, chunk, F)
    begin,
    end,  # the chunk's rows are [begin, end)
    D,
    F,
    M,
    x_row,
    x_column,
    c_row,
    c_column,
    v_row,
    v_column,
    plane,  # entries per plane of U
    K: tl.constexpr,
    BIAS: tl.constexpr,
    FORM: tl.constexpr,
    FAR: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """U = (X V^T + bias) * C for a chunk of rows."""
    number = V.dtype.element_ty
    # Neighbouring programs take the same rows: X is read from memory once; V is small and comes from the cache.
    blocks = tl.cdiv(F, BM)
    block = tl.program_id(0) % blocks
    row = (tl.program_id(0) // blocks).to(tl.int64) * BN
    own = tl.arange(0, BM)
    f = block * BM + own
    V += block.to(tl.int64) * BM * v_row
    r, k = tl.arange(0, BN), tl.arange(0, BK)
    inside_n, inside_f = r < end - begin - row, f < F
    x_tile = tile_offsets(r, x_row, k, x_column, FAR)
    v_tile = tile_offsets(k, v_column, own, v_row, FAR)
    X += (begin + row) * x_row
    u = tl.zeros((BN, BM), number)
    for first in range(0, D, BK):
        inside_d = k < D - first
        x = tl.load(X + x_tile, mask=inside_n[:, None] & inside_d[None, :], other=0.0)
        v = tl.load(V + v_tile, mask=inside_d[:, None] & inside_f[None, :], other=0.0)
        u = rows_times(x, v, u, FORM)
        X += (tl.full((), BK, tl.int64) if FAR else BK) * x_column
        V += (tl.full((), BK, tl.int64) if FAR else BK) * v_column
    if BIAS:
        # The loop has advanced V by whole blocks; the bias is entry D.
        left = D - tl.cdiv(D, BK) * BK
        u += tl.load(V + (own * v_row + left * v_column), mask=inside_f, other=0.0)[None, :]
    column = f if K == 1 else f % M
    inside = inside_n[:, None] & inside_f[None, :]
    c_tile = tile_offsets(r, c_row, column, c_column, FAR)
    u *= tl.load(C + (begin + row) * c_row + c_tile, mask=inside, other=0.0).to(number)
    where = U + row * F + (r[:, None] * F + f[None, :])
    if FORM == "split":
        high = leading_part(u, FORM)
        tl.store(where, high, mask=inside)
        tl.store(where + plane, (u - high.to(tl.float32)).to(tl.bfloat16), mask=inside)
    else:
        tl.store(where, u.to(U.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["begin", "end", "fresh"])
def accumulate_kernel(
    X,  # (N, D)
    U,  # (planes, chunk, F)
    out,  # (slices, F, D (+ 1))
    begin,
    end,  # the chunk's rows are [begin, end)
    D,
    F,
    x_row,
    x_column,
    plane,
    rows_per_slice,
    fresh,  # whether to ignore what `out` holds
    BIAS: tl.constexpr,
    FORM: tl.constexpr,
    FAR: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
):
    """out[slice] += U^T X over the slice's rows of a chunk; if fresh, out[slice] counts as zero before."""
    number = out.dtype.element_ty
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    f = tl.program_id(1) * BM + tl.arange(0, BM)
    slice_index = tl.program_id(2).to(tl.int64)
    row = slice_index * rows_per_slice
    rows = tl.minimum(row + rows_per_slice, end - begin) - row
    r = tl.arange(0, BK)
    inside_f, inside_d = f < F, d < D
    out += slice_index * F * (D + BIAS)
    where = out + f.to(tl.int64)[:, None] * (D + BIAS) + d[None, :]
    inside = inside_f[:, None] & inside_d[None, :]
    total = tl.load(where, mask=inside & (fresh == 0), other=0.0)
    bias_total = tl.zeros((BM,), number)
    x_tile = tile_offsets(r, x_row, d, x_column, FAR)
    u_tile = r[None, :] * F + f[:, None]
    X += (begin + row) * x_row
    U += row * F
    for first in range(0, rows, BK):
        inside_n = r < rows - first
        x = tl.load(X + x_tile, mask=inside_n[:, None] & inside_d[None, :], other=0.0)
        inside_u = inside_f[:, None] & inside_n[None, :]
        u = tl.load(U + u_tile, mask=inside_u, other=0.0)
        if FORM == "split":
            low = tl.load(U + plane + u_tile, mask=inside_u, other=0.0)
            total = dot(u, x, dot(low, x, total, "ieee"), "ieee")
            if BIAS:
                bias_total += tl.sum(u.to(number) + low.to(number), 1)
        else:
            total = times_rows(u.to(number), x, total, FORM)
            if BIAS:
                bias_total += tl.sum(u.to(number), 1)
        X += (tl.full((), BK, tl.int64) if FAR else BK) * x_row
        U += BK * F
    tl.store(where, total, mask=inside)
    if BIAS:
        # All programs along d have the same bias sums; the first one writes them.
        bias_where, writes = out + f.to(tl.int64) * (D + 1) + D, inside_f & (tl.program_id(0) == 0)
        bias_total += tl.load(bias_where, mask=writes & (fresh == 0), other=0.0)
        tl.store(bias_where, bias_total, mask=writes)


# (vendor, arithmetic) -> pairs of configurations, one per kernel; the default pair first. In the second of a pair,
# `rows` counts columns of X and `depth` counts rows.
CONFIGS: dict[tuple[str, str], tuple[tuple[Config, Config], ...]] = {
    ("nvidia", "fp32"): (
        (Config(128, 64, 16, 8, 3), Config(128, 64, 16, 8, 3)),
        (Config(64, 64, 16, 4, 3), Config(64, 64, 16, 8, 3)),
    ),
    ("nvidia", "tensor"): (
        (Config(128, 64, 32, 8, 3), Config(128, 64, 32, 8, 3)),
        (Config(64, 128, 32, 8, 3), Config(128, 128, 32, 8, 3)),
        (Config(64, 64, 32, 4, 3), Config(64, 64, 32, 4, 3)),
    ),
    ("nvidia", "widened"): ((Config(64, 64, 32, 8, 3), Config(64, 64, 32, 8, 3)),),
    ("nvidia", "fp64"): ((Config(32, 32, 16, 4, 3), Config(32, 32, 16, 4, 3)),),
    ("amd", "fp32"): (
        (Config(128, 64, 32, 4, 2), Config(128, 64, 32, 4, 2)),
        (Config(64, 64, 32, 4, 2), Config(64, 64, 32, 4, 2)),
    ),
    ("amd", "tensor"): (
        (Config(128, 64, 64, 4, 2), Config(128, 128, 32, 4, 2)),
        (Config(128, 64, 32, 4, 2), Config(128, 64, 32, 4, 2)),
    ),
    ("amd", "fp64"): ((Config(32, 32, 16, 4, 2), Config(32, 32, 16, 4, 2)),),
    ("interpreter", "fp64"): ((Config(128, 64, 128, 1, 1), Config(128, 64, 128, 1, 1)),) * 2,
}
CONFIGS["amd", "widened"] = CONFIGS["amd", "fp32"]
for _arithmetic in ("fp32", "tensor", "widened"):
    CONFIGS["interpreter", _arithmetic] = CONFIGS["interpreter", "fp64"]


# Used instead of CONFIGS if sizes or strides are not multiples of 16: every entry then needs its own address.
UNALIGNED: dict[tuple[str, str], tuple[tuple[Config, Config], ...]] = {
    ("nvidia", "tensor"): ((Config(128, 64, 32, 8, 3), Config(64, 64, 32, 8, 3)),),
}


# Used instead of the first of a pair for at most FEW_ROWS rows: most reads are then of V, and small tiles spread them
# over many programs.
FEW_ROWS, FEW_ROWS_CONFIG = 64, Config(16, 16, 64, 4, 3)


def configs(device: Device, form: str, stored: torch.dtype, is_aligned: bool) -> list[tuple[Config, Config]]:
    """Return the pairs of configurations that fit the device, the default one first."""
    key = (device.vendor, launch.arithmetic(form, stored))
    table = CONFIGS[key] if is_aligned else UNALIGNED.get(key, CONFIGS[key])
    return [
        pair
        for pair in table
        if all(shared_memory(config, device, form, stored) <= device.shared_memory for config in pair)
    ]


def shared_memory(config: Config, device: Device, form: str, stored: torch.dtype) -> int:
    """Return an upper bound on the shared memory of a program of either kernel."""
    size, number = stored.itemsize, max(4, stored.itemsize)
    rows, filters, depth = config.rows, config.filters, config.depth
    epilogue = rows * filters * number
    # Factors that are widened or split in two parts are copied.
    copies = [2 * depth * (rows + filters) * 4] if form in ("split", "widened") else [0]
    return launch.shared_memory(
        device, copies, [rows * depth * size, filters * depth * number], config.stages, epilogue
    )


def product_storage(form: str, stored: torch.dtype) -> tuple[int, torch.dtype]:
    """Return the number of planes that store U, and their dtype."""
    if form == "split":
        return 2, stored
    return 1, torch.float32 if stored == torch.float16 and form != "rounded" else stored


def splitting_matvec(*, X: Tensor, C: Tensor, V: Tensor, bias: bool) -> Tensor:
    """Return S v for a layer of any width, as `s3d_fast.maths.reference.splitting_matvec` defines it."""
    (N, D), M, options = X.shape, C.shape[1], current()
    if V.numel() == 0 or N == 0:
        return torch.zeros_like(V)
    vectors = V.reshape(-1, V.shape[-1]).contiguous()
    F = len(vectors)
    device = describe(X.device)
    form = product_form(X.dtype, options.arithmetic, device)
    columns = vectors.mT.contiguous().mT if wants_filters_along_threads(form, device) else vectors
    planes, product_dtype = product_storage(form, X.dtype)
    row_bytes = planes * product_dtype.itemsize * F
    far = any(launch.is_far((256, max(D, F)), tensor.stride()) for tensor in (X, C, columns))

    def run(pair: tuple[Config, Config]) -> Tensor:
        project, accumulate = pair
        if N <= FEW_ROWS:
            project = FEW_ROWS_CONFIG
        block = max(project.rows, accumulate.depth)
        most = options.scratch_bytes // row_bytes
        chunk = N if most >= N else max(block, most // block * block)
        U = X.new_empty(planes, min(chunk, N), F, dtype=product_dtype)
        tiles = (triton.cdiv(D, accumulate.rows), triton.cdiv(F, accumulate.filters))
        per_slice, slices = launch.share_rows(min(chunk, N), tiles[0] * tiles[1], accumulate.depth, device)
        out = vectors.new_empty(slices, *vectors.shape)
        for begin in range(0, N, chunk):
            end = min(begin + chunk, N)
            programs = triton.cdiv(F, project.filters) * triton.cdiv(end - begin, project.rows)
            project_kernel[(programs,)](
                X, C, columns, U, begin, end, D, F, M, *X.stride(), *C.stride(), *columns.stride(), U.stride(0),
                K=1 if F == M else 2, BIAS=bias, FORM=form, FAR=far,
                BN=project.rows, BM=project.filters, BK=project.depth, **project.compile_options,
            )  # fmt: skip
            accumulate_kernel[(*tiles, slices)](
                X, U, out, begin, end, D, F, *X.stride(), U.stride(0), per_slice, int(begin == 0),
                BIAS=bias, FORM=form, FAR=far, BM=accumulate.filters, BD=accumulate.rows, BK=accumulate.depth,
                **accumulate.compile_options,
            )  # fmt: skip
        return launch.sum_slices(out)

    with launch.on_device(X):
        is_aligned = all(number % 16 == 0 for number in (D, F, M, X.stride(0), C.stride(0)))
        kind = (X.device, X.dtype, form, is_aligned, bias)
        key = ("pointwise_wide", kind, D, F, M, X.stride(), N.bit_length())
        return run(launch.choose(key, configs(device, form, X.dtype, is_aligned), run)).view(V.shape)
