"""S v for many layers in one launch: each program loops over tiles of all layers, which a table describes.

A tile is a block of filters and a slice of the rows of one layer, computed as in `pointwise`. A second launch sums the
slices of all layers, in a fixed order. Layers share a launch if they agree in dtype, vectors per filter, bias and
alignment. Layers with more than 256 inputs use `pointwise_wide`, one by one: each of them fills a GPU by itself.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from s3d_fast.kernels import launch, pointwise, pointwise_wide
from s3d_fast.kernels.device import Device, describe
from s3d_fast.kernels.launch import Config
from s3d_fast.kernels.options import current
from s3d_fast.kernels.pointwise import WIDEST, fused_rows, store_sums
from s3d_fast.kernels.products import DTYPES, product_form, wants_filters_along_threads

WIDTHS = (16, 32, 64, 128, 256)
# With row strides of at least this, offsets inside a tile can overflow 32 bits.
FARTHEST = 2**23
# The numbers of tiles per program to try, in this order.
TILES_PER_PROGRAM = range(3, 9)
# The columns of the table; each layer is one row.
FIELDS = (
    "X", "C", "V", "N", "D", "F", "M", "x_row", "c_row", "width", "blocks", "rows_per_slice", "slices", "first_tile",
    "partial", "out", "first_sum",
)  # fmt: skip
(X_, C_, V_, N_, D_, F_, M_, X_ROW, C_ROW, WIDTH, BLOCKS, PER_SLICE, SLICES, FIRST_TILE, PARTIAL, OUT, FIRST_SUM) = (
    tl.constexpr(i) for i in range(len(FIELDS))
)
ROW = tl.constexpr(len(FIELDS))


@triton.jit
def layer_of(table, index, layers, COLUMN: tl.constexpr, LAYERS: tl.constexpr):
    """The table row of the layer that work item `index` belongs to; COLUMN holds the first item of each layer."""
    i = tl.arange(0, LAYERS)
    first = tl.load(table + i * ROW + COLUMN, mask=i < layers, other=index + 1)
    return table + (tl.sum((first <= index).to(tl.int32), 0) - 1) * ROW


@triton.jit(do_not_specialize=["layers", "tiles", "v_column"])
def grouped_kernel(
    table,  # (layers, ROW), int64
    partial,  # the sums of all slices of all layers, one after the other
    layers,
    tiles,
    v_column,  # always 1, see `fused_rows`
    ROWS: tl.constexpr,  # the type of X and C
    K: tl.constexpr,
    BIAS: tl.constexpr,
    X_ALIGNED: tl.constexpr,  # whether addresses, sizes and strides of X and V are multiples of 16
    C_ALIGNED: tl.constexpr,  # the same for C
    FORM: tl.constexpr,
    ACROSS: tl.constexpr,
    LAYERS: tl.constexpr,
    PRESENT: tl.constexpr,  # bit i is set if there are layers of the i-th width
    TILES: tl.constexpr,  # rows and filters of a tile, by width
):
    """partial = ((X V^T) * C)^T X for each tile of all layers: a block of filters and a slice of the rows."""
    number = partial.dtype.element_ty
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = layer_of(table, tile, layers, FIRST_TILE, LAYERS)
        X = tl.load(row + X_).to(tl.pointer_type(ROWS))
        C = tl.load(row + C_).to(tl.pointer_type(ROWS))
        V = tl.load(row + V_).to(tl.pointer_type(number))
        D = tl.load(row + D_).to(tl.int32)
        F = tl.load(row + F_).to(tl.int32)
        M = tl.load(row + M_).to(tl.int32)
        x_row = tl.load(row + X_ROW).to(tl.int32)
        c_row = tl.load(row + C_ROW).to(tl.int32)
        if X_ALIGNED:
            X, V = tl.multiple_of(X, 16), tl.multiple_of(V, 16)
            D, x_row = tl.multiple_of(D, 16), tl.multiple_of(x_row, 16)
        if C_ALIGNED:
            C, c_row = tl.multiple_of(C, 16), tl.multiple_of(c_row, 16)
            F, M = tl.multiple_of(F, 16), tl.multiple_of(M, 16)
        local = tile - tl.load(row + FIRST_TILE).to(tl.int32)
        blocks = tl.load(row + BLOCKS).to(tl.int32)
        slice_index = (local // blocks).to(tl.int64)
        first = slice_index * tl.load(row + PER_SLICE)
        last = tl.minimum(first + tl.load(row + PER_SLICE), tl.load(row + N_))
        out = partial + tl.load(row + PARTIAL) + slice_index * F * (D + BIAS)
        width = tl.load(row + WIDTH).to(tl.int32)
        for i in tl.static_range(5):
            # The outer condition is known at compile time, the inner one is not.
            if (PRESENT >> i) % 2 == 1:  # noqa: SIM102
                if width == i:
                    BN: tl.constexpr = TILES[2 * i]
                    BM: tl.constexpr = TILES[2 * i + 1]
                    BD: tl.constexpr = 16 << i
                    first_filter = (local % blocks) * BM
                    total, bias_total = fused_rows(
                        X, C, V, first, last, first_filter, D, F, M, x_row, 1, c_row, 1, D + BIAS, v_column,
                        K, BIAS, FORM, ACROSS, False, BN, BM, BD,
                    )  # fmt: skip
                    store_sums(out, total, bias_total, first_filter, D, F, BIAS, False, BM, BD)


@triton.jit(do_not_specialize=["layers"])
def sum_layers_kernel(table, partial, out, layers, BIAS: tl.constexpr, LAYERS: tl.constexpr, BLOCK: tl.constexpr):
    """out = sum over the slices, in their order, of partial[slice], for each layer."""
    row = layer_of(table, tl.program_id(0), layers, FIRST_SUM, LAYERS)
    size = tl.load(row + F_) * (tl.load(row + D_) + BIAS)
    i = (tl.program_id(0) - tl.load(row + FIRST_SUM)) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    where = partial + tl.load(row + PARTIAL) + i
    total = tl.zeros((BLOCK,), out.dtype.element_ty)
    for _ in range(tl.load(row + SLICES)):
        total += tl.load(where, mask=inside, other=0.0)
        where += size
    tl.store(out + tl.load(row + OUT) + i, total, mask=inside)


class Member(NamedTuple):
    """The arguments of `splitting_matvec` for one layer."""

    X: Tensor
    C: Tensor
    V: Tensor
    bias: bool


@dataclass(frozen=True)
class GroupedConfig:
    """How the grouped kernel is compiled."""

    tiles: tuple[tuple[int, int], ...]  # (rows, filters) of a tile, for each of WIDTHS
    warps: int
    stages: int
    per_processor: int  # programs on one processor


# (vendor, arithmetic) -> configurations, the default first. One kernel contains the code for every width that occurs
# and needs as many registers as the widest, so tiles are smaller than in `pointwise`.
CONFIGS: dict[tuple[str, str], tuple[GroupedConfig, ...]] = {
    ("nvidia", "fp32"): (GroupedConfig(((32, 64), (32, 64), (32, 64), (16, 64), (16, 32)), 8, 3, 1),),
    ("nvidia", "tensor"): (
        GroupedConfig(((32, 64), (32, 64), (32, 64), (32, 64), (16, 32)), 8, 3, 1),
        GroupedConfig(((32, 64), (32, 64), (32, 64), (16, 64), (16, 32)), 8, 3, 1),
    ),
    ("nvidia", "widened"): (GroupedConfig(((32, 32), (32, 32), (32, 32), (16, 32), (16, 16)), 8, 3, 1),),
    ("nvidia", "fp64"): (GroupedConfig(((16, 16),) * 5, 8, 2, 1),),
    ("amd", "fp32"): (GroupedConfig(((32, 64), (32, 64), (32, 64), (32, 32), (16, 32)), 4, 2, 1),),
    ("amd", "tensor"): (GroupedConfig(((32, 64), (32, 64), (32, 64), (32, 32), (16, 32)), 4, 2, 1),),
    ("amd", "widened"): (GroupedConfig(((16, 32), (16, 32), (16, 32), (16, 32), (16, 16)), 4, 2, 1),),
    ("amd", "fp64"): (GroupedConfig(((16, 16),) * 5, 4, 2, 1),),
    ("interpreter", "fp64"): (
        GroupedConfig(((128, 64),) * 5, 1, 1, 1),
        GroupedConfig(((64, 32),) * 5, 1, 1, 2),
    ),
}
# Used instead of CONFIGS if X may be unaligned: every entry of a tile then needs its own address.
UNALIGNED: dict[tuple[str, str], tuple[GroupedConfig, ...]] = {
    ("nvidia", "fp32"): (GroupedConfig(((32, 32), (32, 32), (32, 32), (32, 32), (16, 16)), 8, 3, 1),),
    ("nvidia", "tensor"): (GroupedConfig(((32, 32), (32, 32), (32, 32), (32, 32), (16, 16)), 8, 3, 1),),
    ("nvidia", "widened"): (GroupedConfig(((16, 32), (16, 32), (16, 32), (16, 16), (16, 16)), 8, 3, 1),),
    ("amd", "fp32"): (GroupedConfig(((16, 32), (16, 32), (16, 32), (16, 32), (16, 16)), 4, 2, 1),),
    ("amd", "tensor"): (GroupedConfig(((16, 32), (16, 32), (16, 32), (16, 32), (16, 16)), 4, 2, 1),),
}
for _arithmetic in ("fp32", "tensor", "widened"):
    CONFIGS["interpreter", _arithmetic] = CONFIGS["interpreter", "fp64"]


def configs(device: Device, form: str, stored: torch.dtype, is_aligned: bool) -> list[GroupedConfig]:
    """Return the configurations that fit the device, the default one first."""
    key = (device.vendor, launch.arithmetic(form, stored))
    table = CONFIGS[key] if is_aligned else UNALIGNED.get(key, CONFIGS[key])
    return [config for config in table if shared_memory(config, device, form, stored) <= device.shared_memory]


def shared_memory(config: GroupedConfig, device: Device, form: str, stored: torch.dtype) -> int:
    """Return an upper bound on the shared memory of a program: the maximum over its tiles."""
    return max(
        pointwise.shared_memory(Config(rows, filters, width, config.warps, config.stages), device, form, stored)
        for width, (rows, filters) in zip(WIDTHS, config.tiles, strict=True)
    )


@dataclass(frozen=True)
class Table:
    """A table on the device, and the sizes that a launch needs."""

    entries: Tensor
    tiles: int
    sums: int
    partial_size: int
    out_offsets: list[int]
    out_size: int
    present: int


# Addresses, shapes and strides determine a table, so every step of a solver can reuse it.
_TABLES: OrderedDict[Hashable, Table] = OrderedDict()
_TABLES_LOCK = threading.Lock()
MOST_TABLES = 64
# The widths that each kernel is compiled for. None is removed when a layer is done: an unused width costs less than
# compiling again.
_PRESENT: dict[Hashable, int] = {}
LEAST_LAYERS = 32


def splitting_matvec_grouped(layers: Sequence[Member]) -> list[Tensor]:
    """Return S v for every layer, as `s3d_fast.maths.reference.splitting_matvec` defines it."""
    results: list[Tensor | None] = [None] * len(layers)
    groups: dict[Hashable, list[int]] = {}
    for index, layer in enumerate(layers):
        X, C, V, bias = layer
        if V.numel() == 0 or len(X) == 0:
            results[index] = torch.zeros_like(V)
        elif X.shape[1] > WIDEST:
            results[index] = pointwise_wide.splitting_matvec(X=X, C=C, V=V, bias=bias)
        elif X.stride(1) != 1 or C.stride(1) != 1 or max(X.stride(0), C.stride(0)) >= FARTHEST:
            results[index] = pointwise.splitting_matvec(X=X, C=C, V=V, bias=bias)
        else:
            one_each = V.numel() == V.shape[-1] * C.shape[1]
            groups.setdefault((X.device, X.dtype, one_each, bias, _alignment(layer)), []).append(index)
    for members in groups.values():
        for index, result in zip(members, _run([layers[i] for i in members]), strict=True):
            results[index] = result
    return [result for result in results if result is not None]


def _alignment(layer: Member) -> tuple[bool, bool]:
    """Return whether addresses, sizes and strides are multiples of 16: for X and V, and for C."""
    X, C, V, _ = layer
    of_x = (X.data_ptr(), V.data_ptr(), X.shape[1], X.stride(0))
    of_c = (C.data_ptr(), C.shape[1], C.stride(0))
    return all(number % 16 == 0 for number in of_x), all(number % 16 == 0 for number in of_c)


def _run(layers: Sequence[Member]) -> list[Tensor]:
    first = layers[0]
    vectors = [layer.V.contiguous() for layer in layers]
    device, stored, number = describe(first.X.device), first.X.dtype, first.V.dtype
    form = product_form(stored, current().arithmetic, device)
    x_aligned, c_aligned = _alignment(first)
    one_each = vectors[0].numel() == first.C.shape[1] * vectors[0].shape[-1]
    kind = (first.X.device, stored, form, one_each, first.bias, x_aligned, c_aligned)
    LAYERS = max(LEAST_LAYERS, triton.next_power_of_2(len(layers)))

    def run(config: GroupedConfig) -> list[Tensor]:
        table = _table(layers, vectors, config, device)
        _PRESENT[kind] = _PRESENT.get(kind, 0) | table.present
        partial = first.X.new_empty(table.partial_size, dtype=number)
        out = first.X.new_empty(table.out_size, dtype=number)
        grouped_kernel[(min(table.tiles, config.per_processor * device.processors),)](
            table.entries, partial, len(layers), table.tiles, 1,
            ROWS=DTYPES[stored], K=1 if one_each else 2, BIAS=first.bias, X_ALIGNED=x_aligned, C_ALIGNED=c_aligned,
            FORM=form, ACROSS=wants_filters_along_threads(form, device), LAYERS=LAYERS, PRESENT=_PRESENT[kind],
            TILES=sum(config.tiles, ()),
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
        sum_layers_kernel[(table.sums,)](
            table.entries, partial, out, len(layers), BIAS=first.bias, LAYERS=LAYERS, BLOCK=launch.SUM_BLOCK,
            num_warps=launch.SUM_WARPS,
        )  # fmt: skip
        return [out[offset:][: V.numel()].view(V.shape) for offset, V in zip(table.out_offsets, vectors, strict=True)]

    with launch.on_device(first.X):
        shapes = tuple((layer.X.shape, V.shape) for layer, V in zip(layers, vectors, strict=True))
        key = ("grouped", kind, shapes)
        return run(launch.choose(key, configs(device, form, stored, x_aligned), run))


def _table(layers: Sequence[Member], vectors: Sequence[Tensor], config: GroupedConfig, device: Device) -> Table:
    identities = (_identity(layer, V) for layer, V in zip(layers, vectors, strict=True))
    where = layers[0].X.device
    # A table is copied to the device on the stream of its first use; only later calls on that stream may read it.
    stream = torch.cuda.current_stream(where).cuda_stream if where.type == "cuda" else 0
    key = (config, where, stream, layers[0].X.dtype, *identities)
    with _TABLES_LOCK:
        if key in _TABLES:
            _TABLES.move_to_end(key)
            return _TABLES[key]
        if where.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("call the grouped product once with these tensors before a CUDA graph captures it")
        table = _TABLES[key] = make_table(layers, vectors, config, device)
        if len(_TABLES) > MOST_TABLES:
            _TABLES.popitem(last=False)
        return table


def _identity(layer: Member, V: Tensor) -> Hashable:
    X, C = layer.X, layer.C
    return X.data_ptr(), C.data_ptr(), V.data_ptr(), X.shape, C.shape[1], V.shape, X.stride(0), C.stride(0)


def make_table(layers: Sequence[Member], vectors: Sequence[Tensor], config: GroupedConfig, device: Device) -> Table:
    """Return the table of these layers, with the work of each divided into tiles."""
    widths = [WIDTHS.index(launch.power_of_two(layer.X.shape[1], WIDTHS[0], WIDTHS[-1])) for layer in layers]
    blocks = [
        triton.cdiv(V.numel() // V.shape[-1], config.tiles[width][1]) for V, width in zip(vectors, widths, strict=True)
    ]
    # A row of a tile costs width x filters multiplications, and all tiles get about the same work. The number of tiles
    # per program is the one that leaves the fewest programs idle in the last round.
    costs = [WIDTHS[width] * config.tiles[width][1] for width in widths]
    programs = config.per_processor * device.processors
    work = sum(len(layer.X) * n * cost for layer, n, cost in zip(layers, blocks, costs, strict=True)) / programs

    def slice_rows(per_program: int) -> list[int]:
        wanted = [int(work / per_program / cost) for cost in costs]
        steps = [config.tiles[width][0] for width in widths]
        return [
            min(max(4, triton.cdiv(rows, step)), triton.cdiv(len(layer.X), step)) * step
            for layer, rows, step in zip(layers, wanted, steps, strict=True)
        ]

    def count_tiles(per_slice: Sequence[int]) -> int:
        return sum(
            n * triton.cdiv(len(layer.X), rows) for layer, n, rows in zip(layers, blocks, per_slice, strict=True)
        )

    shares = max(
        (slice_rows(per_program) for per_program in TILES_PER_PROGRAM),
        key=lambda per_slice: launch.fullness(count_tiles(per_slice), programs),
    )
    rows, offsets = [], []
    tiles = sums = partial = out = 0
    for layer, V, width, n_blocks, per_slice in zip(layers, vectors, widths, blocks, shares, strict=True):
        (N, D), M, size = layer.X.shape, layer.C.shape[1], V.numel()
        slices = triton.cdiv(N, per_slice)
        addresses = [layer.X.data_ptr(), layer.C.data_ptr(), V.data_ptr()]
        sizes = [N, D, size // V.shape[-1], M, layer.X.stride(0), layer.C.stride(0)]
        rows.append([*addresses, *sizes, width, n_blocks, per_slice, slices, tiles, partial, out, sums])
        offsets.append(out)
        tiles += n_blocks * slices
        sums += triton.cdiv(size, launch.SUM_BLOCK)
        partial += slices * size
        # Every result begins at a multiple of 16 entries, so that vector loads are aligned.
        out += triton.cdiv(size, 16) * 16
    table = torch.tensor(rows, dtype=torch.int64)
    if layers[0].X.is_cuda:
        table = table.pin_memory().to(layers[0].X.device, non_blocking=True)
    return Table(table, tiles, sums, partial, offsets, out, sum({1 << width for width in widths}))
