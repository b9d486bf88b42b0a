"""S v for gated units with at most 256 inputs, in one launch: the (N, M) products stay on chip, tile by tile."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from s3d_fast.kernels import launch
from s3d_fast.kernels.device import Device, describe
from s3d_fast.kernels.launch import Config, tile_offsets
from s3d_fast.kernels.options import current
from s3d_fast.kernels.products import product_form, rows_times, times_rows, wants_filters_along_threads


@triton.jit(do_not_specialize=["v_column"])
def gated_kernel(
    X,  # (N, D)
    c11,  # (N, M)
    c12,  # (N, M)
    c22,  # (N, M); not read unless FULL
    V,  # (F, 2 D), or (F, 2 (D + 1)) with bias; F = K M
    out,  # (slices, F, 2 (D (+ 1)))
    N,
    D,
    F,
    M,
    x_row,
    x_column,
    c11_row,
    c11_column,
    c12_row,
    c12_column,
    c22_row,
    c22_column,
    v_row,
    v_column,  # always 1, hidden from the compiler: see `pointwise.fused_rows`
    rows_per_slice,
    K: tl.constexpr,
    FULL: tl.constexpr,  # whether c22 is given
    BIAS: tl.constexpr,
    FORM: tl.constexpr,
    ACROSS: tl.constexpr,
    FAR: tl.constexpr,
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
    V += first_filter.to(tl.int64) * v_row
    along = d * v_column if ACROSS else d
    places = own[None, :] * v_row + along[:, None]
    inside_v = inside_d[:, None] & inside_f[None, :]
    half = D + BIAS
    a = tl.load(V + places, mask=inside_v, other=0.0)
    b = tl.load(V + half + places, mask=inside_v, other=0.0)
    if BIAS:
        a_bias = tl.load(V + (own * v_row + D), mask=inside_f, other=0.0)
        b_bias = tl.load(V + half + (own * v_row + D), mask=inside_f, other=0.0)
    column = f if K == 1 else f % M
    x_tile = tile_offsets(r, x_row, d, x_column, FAR)
    c11_tile = tile_offsets(r, c11_row, column, c11_column, FAR)
    c12_tile = tile_offsets(r, c12_row, column, c12_column, FAR)
    c22_tile = tile_offsets(r, c22_row, column, c22_column, FAR)
    a_total, b_total = tl.zeros((BM, BD), number), tl.zeros((BM, BD), number)
    a_ones, b_ones = tl.zeros((BM,), number), tl.zeros((BM,), number)
    for begin in range(first, last, BN):
        inside_n = r < last - begin
        inside = inside_n[:, None] & inside_f[None, :]
        x = tl.load(X + begin * x_row + x_tile, mask=inside_n[:, None] & inside_d[None, :], other=0.0)
        p = rows_times(x, a, tl.zeros((BN, BM), number), FORM)
        q = rows_times(x, b, tl.zeros((BN, BM), number), FORM)
        if BIAS:
            p += a_bias[None, :]
            q += b_bias[None, :]
        mixed = tl.load(c12 + begin * c12_row + c12_tile, mask=inside, other=0.0).to(number)
        upper = tl.load(c11 + begin * c11_row + c11_tile, mask=inside, other=0.0).to(number) * p + mixed * q
        lower = mixed * p
        if FULL:
            lower += tl.load(c22 + begin * c22_row + c22_tile, mask=inside, other=0.0).to(number) * q
        a_total = times_rows(tl.trans(upper), x, a_total, FORM)
        b_total = times_rows(tl.trans(lower), x, b_total, FORM)
        if BIAS:
            a_ones += tl.sum(upper, 0)
            b_ones += tl.sum(lower, 0)
    rows = out + (slice_index * F + f.to(tl.int64)) * (2 * half)
    inside_out = inside_f[:, None] & inside_d[None, :]
    tl.store(rows[:, None] + d[None, :], a_total, mask=inside_out)
    tl.store(rows[:, None] + half + d[None, :], b_total, mask=inside_out)
    if BIAS:
        tl.store(rows + D, a_ones, mask=inside_f)
        tl.store(rows + half + D, b_ones, mask=inside_f)


# (vendor, arithmetic) -> width -> (rows, filters, warps, stages), the default first. A program has the vectors and sums
# of two halves, so tiles have about half the filters of `pointwise`. Missing widths would
# spill registers, or not fit into the shared memory of small GPUs.
CONFIGS: dict[tuple[str, str], dict[int, tuple[tuple[int, int, int, int], ...]]] = {
    ("nvidia", "fp32"): {
        16: ((32, 32, 4, 3), (16, 64, 8, 3)),
        32: ((32, 32, 8, 3), (16, 64, 8, 3)),
        64: ((16, 32, 8, 3), (32, 32, 8, 3)),
        128: ((16, 32, 8, 3), (16, 16, 8, 3)),
        256: ((16, 16, 8, 2),),
    },
    ("nvidia", "tensor"): {
        16: ((32, 32, 4, 3), (64, 32, 4, 3)),
        32: ((32, 32, 8, 3), (64, 32, 8, 3)),
        64: ((32, 32, 8, 3), (16, 32, 4, 3)),
        128: ((16, 32, 8, 3), (16, 16, 8, 3)),
        256: ((16, 16, 8, 3), (16, 16, 4, 3)),
    },
    ("nvidia", "widened"): {
        16: ((32, 16, 4, 3),),
        32: ((32, 16, 4, 3),),
        64: ((16, 16, 4, 3),),
        128: ((16, 16, 8, 2),),
    },
    ("nvidia", "fp64"): {
        16: ((16, 16, 4, 3),),
        32: ((16, 16, 4, 3),),
        64: ((16, 16, 4, 3),),
        128: ((16, 16, 8, 2),),
    },
    ("amd", "fp32"): {
        16: ((32, 32, 4, 2), (32, 64, 4, 2)),
        32: ((32, 32, 4, 2), (32, 64, 4, 2)),
        64: ((32, 32, 4, 2), (16, 32, 4, 2)),
        128: ((16, 32, 4, 2), (16, 16, 4, 2)),
        256: ((16, 16, 4, 2),),
    },
}
CONFIGS["amd", "tensor"] = CONFIGS["amd", "fp32"]
CONFIGS["amd", "widened"] = {width: CONFIGS["amd", "fp32"][width] for width in (16, 32, 64, 128)}
CONFIGS["amd", "fp64"] = {width: ((16, 16, 4, 2),) for width in (16, 32, 64, 128)}


def widths(device: Device, form: str, stored: torch.dtype) -> list[int]:
    """Return the widths of a half that a program can hold, in ascending order."""
    if device.vendor == "interpreter":
        return [16, 32, 64, 128, 256]
    return list(CONFIGS[device.vendor, launch.arithmetic(form, stored)])


def supports(X: Tensor) -> bool:
    """Return whether the rows are narrow enough for the sums of both halves to stay in registers."""
    device = describe(X.device)
    return X.shape[1] <= widths(device, product_form(X.dtype, current().arithmetic, device), X.dtype)[-1]


def configs(device: Device, form: str, stored: torch.dtype, width: int, filters: int) -> list[Config]:
    """Return the configurations for a layer, the default one first; only those that fit the device."""
    if device.vendor == "interpreter":
        return [Config(128, 64, width, 1, 1).for_filters(filters), Config(64, 32, width, 1, 1).for_filters(filters)]
    table = CONFIGS[device.vendor, launch.arithmetic(form, stored)][width]
    candidates = [
        Config(rows, block, width, warps, stages).for_filters(filters) for rows, block, warps, stages in table
    ]
    return [
        config
        for config in dict.fromkeys(candidates)
        if shared_memory(config, device, form, stored) <= device.shared_memory
    ]


def shared_memory(config: Config, device: Device, form: str, stored: torch.dtype) -> int:
    """Return an upper bound on the shared memory of a program; `config.depth` is the width of one half."""
    BN, BM, BD, size = config.rows, config.filters, config.depth, stored.itemsize
    number = max(size, 4)
    # The vectors of both halves, a product while it becomes an operand, and in TF32 also the rows.
    parts = 2 if form == "widened" else 1
    rows = BN * BD * number if form in ("tf32", "widened") else 0
    tiles = [2 * parts * BM * BD * number, 4 * parts * BN * BM * number, rows]
    return launch.shared_memory(device, tiles, [BN * BD * size, 3 * BN * BM * size], config.stages)


def gated_matvec(*, X: Tensor, c11: Tensor, c12: Tensor, c22: Tensor | None, V: Tensor, bias: bool) -> Tensor:
    """Return S v for rows that `supports` accepts, as `s3d_fast.maths.reference.gated_matvec` defines it."""
    (N, D), M, options = X.shape, c11.shape[1], current()
    if V.numel() == 0 or N == 0:
        return torch.zeros_like(V)
    vectors = V.reshape(-1, V.shape[-1]).contiguous()
    F = len(vectors)
    device = describe(X.device)
    form = product_form(X.dtype, options.arithmetic, device)
    width = launch.power_of_two(D, 16, widths(device, form, X.dtype)[-1])
    last = c12 if c22 is None else c22

    def run(config: Config) -> Tensor:
        blocks = triton.cdiv(F, config.filters)
        per_slice, slices = launch.share_rows(N, blocks, config.rows, device)
        out = vectors.new_empty(slices, *vectors.shape)
        coefficients = (c11.stride(), c12.stride(), last.stride())
        gated_kernel[(blocks, slices)](
            X, c11, c12, last, vectors, out, N, D, F, M,
            *X.stride(), *sum(coefficients, ()), *vectors.stride(), per_slice,
            K=1 if F == M else 2, FULL=c22 is not None, BIAS=bias, FORM=form,
            ACROSS=wants_filters_along_threads(form, device),
            FAR=launch.is_far((config.rows, width), X.stride())
            or any(launch.is_far((config.rows, M), strides) for strides in coefficients),
            BN=config.rows, BM=config.filters, BD=width, **config.compile_options,
        )  # fmt: skip
        return launch.sum_slices(out)

    with launch.on_device(X):
        key = ("gated", X.device, X.dtype, form, width, F, M, bias, c22 is None, X.stride(), N.bit_length())
        return run(launch.choose(key, configs(device, form, X.dtype, width, F), run)).view(V.shape)
