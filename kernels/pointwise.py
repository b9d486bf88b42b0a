"""S v for a layer with at most 256 inputs, in one launch: the (N, M) product stays on chip, tile by tile."""

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

# The widest row for which a program keeps its sums in registers.
WIDEST = 256


@triton.jit
def fused_rows(
    X,
    C,
    V,
    first,
    last,  # the program's rows are [first, last), int64
    first_filter,
    D,
    F,
    M,
    x_row,
    x_column,
    c_row,
    c_column,
    v_row,
    v_column,  # always 1, hidden from the compiler
    K: tl.constexpr,
    BIAS: tl.constexpr,
    FORM: tl.constexpr,
    ACROSS: tl.constexpr,
    FAR: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
):
    """U^T X (BM, BD), and the sum of the rows of U (BM,), for U = (X V^T + bias) * C over the rows [first, last)."""
    number = V.dtype.element_ty
    r, d, own = tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BM)
    f = first_filter + own
    inside_f, inside_d = f < F, d < D
    V += first_filter.to(tl.int64) * v_row
    # If ACROSS, threads read V along the filters. The tile keeps this layout in shared memory only if the compiler does
    # not know that the entries of a vector are contiguous.
    along = d * v_column if ACROSS else d
    v = tl.load(V + (own[None, :] * v_row + along[:, None]), mask=inside_d[:, None] & inside_f[None, :], other=0.0)
    if BIAS:
        b = tl.load(V + (own * v_row + D), mask=inside_f, other=0.0)
    # With K vectors per filter, the F = K M rows of V share the M columns of C.
    column = f if K == 1 else f % M
    x_tile = tile_offsets(r, x_row, d, x_column, FAR)
    c_tile = tile_offsets(r, c_row, column, c_column, FAR)
    total = tl.zeros((BM, BD), number)
    bias_total = tl.zeros((BM,), number)
    for begin in range(first, last, BN):
        inside_n = r < last - begin
        x = tl.load(X + begin * x_row + x_tile, mask=inside_n[:, None] & inside_d[None, :], other=0.0)
        c = tl.load(C + begin * c_row + c_tile, mask=inside_n[:, None] & inside_f[None, :], other=0.0)
        u = rows_times(x, v, tl.zeros((BN, BM), number), FORM)
        if BIAS:
            u += b[None, :]
        u *= c.to(number)
        total = times_rows(tl.trans(u), x, total, FORM)
        if BIAS:
            bias_total += tl.sum(u, 0)
    return total, bias_total


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
    d = tl.arange(0, BD)
    f = first_filter + tl.arange(0, BM)
    rows = out + f.to(tl.int64) * (D + BIAS)
    inside_f = f < F
    inside = inside_f[:, None] & (d < D)[None, :]
    if ATOMIC:
        tl.atomic_add(rows[:, None] + d[None, :], total, mask=inside, sem="relaxed")
        if BIAS:
            tl.atomic_add(rows + D, bias_total, mask=inside_f, sem="relaxed")
    else:
        tl.store(rows[:, None] + d[None, :], total, mask=inside)
        if BIAS:
            tl.store(rows + D, bias_total, mask=inside_f)


@triton.jit(do_not_specialize=["v_column"])
def fused_kernel(
    X,  # (N, D)
    C,  # (N, M)
    V,  # (F, D), or (F, D + 1) with bias; F = K M
    out,  # (slices, F, D (+ 1)); if ATOMIC, (F, D (+ 1)), zero at first
    N,
    D,
    F,
    M,
    x_row,
    x_column,
    c_row,
    c_column,
    v_row,
    v_column,
    rows_per_slice,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    ATOMIC: tl.constexpr,
    FORM: tl.constexpr,
    ACROSS: tl.constexpr,
    FAR: tl.constexpr,
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
        X,
        C,
        V,
        first,
        last,
        first_filter,
        D,
        F,
        M,
        x_row,
        x_column,
        c_row,
        c_column,
        v_row,
        v_column,
        K,
        BIAS,
        FORM,
        ACROSS,
        FAR,
        BN,
        BM,
        BD,
    )
    if not ATOMIC:
        out += slice_index * F * (D + BIAS)
    store_sums(out, total, bias_total, first_filter, D, F, BIAS, ATOMIC, BM, BD)


# (vendor, arithmetic) -> width -> (rows, filters, warps, stages), the default first. Tiles of IEEE products are small:
# each multiplication is a separate instruction with its operands in registers. On AMD, a thread has 512 registers with
# four warps, and half as many with eight.
CONFIGS: dict[tuple[str, str], dict[int, tuple[tuple[int, int, int, int], ...]]] = {
    ("nvidia", "fp32"): {
        16: ((32, 64, 4, 3), (16, 128, 8, 3)),
        32: ((32, 64, 8, 3), (16, 128, 8, 3)),
        64: ((32, 64, 8, 3), (16, 128, 8, 3), (16, 64, 8, 4)),
        128: ((16, 64, 8, 3), (32, 32, 8, 3)),
        256: ((16, 32, 8, 3), (16, 64, 8, 3), (16, 16, 8, 4)),
    },
    ("nvidia", "tensor"): {
        16: ((32, 64, 4, 3), (64, 64, 4, 3)),
        32: ((64, 64, 4, 3), (32, 64, 4, 4), (32, 128, 8, 3)),
        64: ((32, 64, 4, 3), (64, 64, 4, 3), (64, 32, 4, 3)),
        128: ((32, 64, 8, 3), (64, 64, 8, 3), (32, 32, 4, 3)),
        256: ((32, 32, 8, 3), (16, 32, 8, 3), (16, 32, 4, 3), (16, 16, 4, 3)),
    },
    ("nvidia", "widened"): {
        16: ((32, 32, 4, 3),),
        32: ((32, 32, 4, 3),),
        64: ((32, 32, 4, 3), (16, 32, 4, 3)),
        128: ((16, 32, 8, 3),),
        256: ((16, 16, 8, 3),),
    },
    ("nvidia", "fp64"): {
        16: ((16, 32, 4, 3),),
        32: ((16, 32, 4, 3),),
        64: ((16, 32, 4, 3),),
        128: ((16, 16, 8, 3),),
        256: ((16, 16, 8, 2),),
    },
    ("amd", "fp32"): {
        16: ((32, 64, 4, 2), (32, 128, 4, 2)),
        32: ((32, 64, 4, 2), (64, 64, 4, 2)),
        64: ((32, 64, 4, 2), (16, 64, 4, 2)),
        128: ((32, 32, 4, 2), (16, 64, 4, 2)),
        256: ((16, 32, 4, 2), (32, 32, 4, 2), (16, 16, 4, 2)),
    },
}
CONFIGS["amd", "tensor"] = CONFIGS["amd", "widened"] = CONFIGS["amd", "fp32"]
CONFIGS["amd", "fp64"] = {width: ((16, 16, 4, 2),) for width in (16, 32, 64, 128, 256)}


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
    """Return an upper bound on the shared memory of a program; `config.depth` is the width."""
    BN, BM, BD, size = config.rows, config.filters, config.depth, stored.itemsize
    number = max(size, 4)
    # The vectors, the product while it becomes an operand, and in TF32 also the rows. "widened" has vectors and product
    # in two parts.
    parts = 2 if form == "widened" else 1
    rows = BN * BD * number if form in ("tf32", "widened") else 0
    tiles = [parts * BM * BD * number, 2 * parts * BN * BM * number, rows]
    return launch.shared_memory(device, tiles, [BN * BD * size, BN * BM * size], config.stages)


def splitting_matvec(*, X: Tensor, C: Tensor, V: Tensor, bias: bool) -> Tensor:
    """Return S v for at most WIDEST inputs, as `s3d_fast.maths.reference.splitting_matvec` defines it."""
    (N, D), M, options = X.shape, C.shape[1], current()
    if V.numel() == 0 or N == 0:
        return torch.zeros_like(V)
    vectors = V.reshape(-1, V.shape[-1]).contiguous()
    F = len(vectors)
    device = describe(X.device)
    form = product_form(X.dtype, options.arithmetic, device)
    width = launch.power_of_two(D, 16, WIDEST)

    def run(config: Config) -> Tensor:
        blocks = triton.cdiv(F, config.filters)
        per_slice, slices = launch.share_rows(N, blocks, config.rows, device)
        atomic = options.atomic and slices > 1
        out = torch.zeros_like(vectors) if atomic else vectors.new_empty(slices, *vectors.shape)
        fused_kernel[(blocks, slices)](
            X,
            C,
            vectors,
            out,
            N,
            D,
            F,
            M,
            *X.stride(),
            *C.stride(),
            *vectors.stride(),
            per_slice,
            K=1 if F == M else 2,
            BIAS=bias,
            ATOMIC=atomic,
            FORM=form,
            ACROSS=wants_filters_along_threads(form, device),
            FAR=launch.is_far((config.rows, width), X.stride()) or launch.is_far((config.rows, M), C.stride()),
            BN=config.rows,
            BM=config.filters,
            BD=width,
            **config.compile_options,
        )
        return out if atomic else launch.sum_slices(out)

    with launch.on_device(X):
        key = ("pointwise", X.device, X.dtype, form, width, F, M, bias, options.atomic, X.stride(), N.bit_length())
        config = launch.choose(key, configs(device, form, X.dtype, width, F), run)
        return run(config).view(V.shape)
