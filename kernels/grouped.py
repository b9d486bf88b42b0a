"""S v for many layers in one launch: each program loops over tiles of all layers, which a table describes.

A tile is a block of filters and a slice of the rows of one layer, computed as in `pointwise`. A launch before splits
the vectors of all layers into planes; a launch behind it sums the slices of all layers, in a fixed order. Layers share
these launches if they agree in dtype, vectors per filter, bias and alignment. Layers that are too wide use
`pointwise_wide`, one by one: each of them fills a GPU by itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from s3d_fast.base.padding import MULTIPLE, padded_size
from s3d_fast.kernels import configs, launch, pointwise, pointwise_wide
from s3d_fast.kernels.aligned import aligned, in_planes, is_near, is_whole, ready_planes
from s3d_fast.kernels.device import Device, describe
from s3d_fast.kernels.launch import Launch, Plan, slices_added
from s3d_fast.kernels.options import current
from s3d_fast.kernels.pointwise import fused_rows, store_sums
from s3d_fast.kernels.products import (
    DTYPES,
    PRODUCTS,
    SPLIT_COLUMNS,
    SPLIT_FILTERS,
    SPLIT_WARPS,
    current_form,
    factor_planes,
    factor_storage,
    is_by_single_multiplications,
    row_storage,
    split_tile,
)
from s3d_fast.kernels.tables import Tables, layer_of, on_device, padded_layers
from s3d_fast.kernels.tiles import FEW_FILTERS, WIDTHS, GroupedConfig

# The numbers of tiles per program to try, in this order.
TILES_PER_PROGRAM = range(3, 9)
# The columns of the table; each layer is one row.
FIELDS = (
    "X", "C", "V", "N", "D", "F", "M", "x_plane", "x_row", "c_row", "width", "blocks", "rows_per_slice", "slices",
    "first_tile", "partial", "out", "first_sum", "planes", "first_split",
)  # fmt: skip
(
    X_, C_, V_, N_, D_, F_, M_, X_PLANE, X_ROW, C_ROW, WIDTH, BLOCKS, PER_SLICE, SLICES, FIRST_TILE, PARTIAL, OUT,
    FIRST_SUM, PLANES, FIRST_SPLIT,
) = (tl.constexpr(i) for i in range(len(FIELDS)))  # fmt: skip
ROW = tl.constexpr(len(FIELDS))


@triton.jit
def pitch_of(D, F, ACROSS: tl.constexpr):
    """The length of a row of a layer's planes, a multiple of 16."""
    return tl.multiple_of(tl.cdiv(F if ACROSS else D, 16) * 16, 16)


@triton.jit(do_not_specialize=["layers"])
def split_layers_kernel(
    table,  # (layers, ROW), int64
    planes,  # the parts of the vectors of all layers, one after the other
    layers,
    NUMBER: tl.constexpr,  # the type of V
    BIAS: tl.constexpr,
    FORM: tl.constexpr,
    ACROSS: tl.constexpr,
    LAYERS: tl.constexpr,
    BF: tl.constexpr,
    BD: tl.constexpr,
):
    """planes = the parts of the vectors of each layer."""
    row = layer_of(table, tl.program_id(0), layers, FIRST_SPLIT, ROW, LAYERS)
    V = tl.load(row + V_).to(tl.pointer_type(NUMBER))
    D, F = tl.load(row + D_).to(tl.int32), tl.load(row + F_).to(tl.int32)
    pitch = pitch_of(D, F, ACROSS)
    plane = (D if ACROSS else F).to(tl.int64) * pitch
    f = (tl.program_id(0) - tl.load(row + FIRST_SPLIT).to(tl.int32)) * BF + tl.arange(0, BF)
    own = planes + tl.load(row + PLANES)
    for first in range(0, tl.cdiv(D, 16) * 16, BD):
        split_tile(
            V,
            own,
            plane,
            D + BIAS,
            1,
            f,
            first + tl.arange(0, BD),
            F,
            D,
            pitch,
            0,
            False,
            factor_planes(FORM),
            FORM,
            ACROSS,
        )


@triton.jit(do_not_specialize=["layers"])
def grouped_kernel(
    table,  # (layers, ROW), int64
    planes,
    partial,  # the sums of all slices of all layers, one after the other
    layers,
    one,
    ROWS: tl.constexpr,  # the type of X
    COEFFICIENTS: tl.constexpr,  # the type of C
    K: tl.constexpr,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,  # whether X and C can be loaded up to a multiple of 16 columns
    FORM: tl.constexpr,
    ACROSS: tl.constexpr,
    LAYERS: tl.constexpr,
    PRESENT: tl.constexpr,  # bit i is set if there are layers of the i-th width
    TILES: tl.constexpr,  # rows, filters, whether it is turned, and the parts of C's tile, by width
):
    """partial = ((X V^T) * C)^T X for each tile of all layers: a block of filters and a slice of the rows."""
    number = partial.dtype.element_ty
    tile = tl.program_id(0)
    row = layer_of(table, tile, layers, FIRST_TILE, ROW, LAYERS)
    X = tl.load(row + X_).to(tl.pointer_type(ROWS))
    C = tl.load(row + C_).to(tl.pointer_type(COEFFICIENTS))
    V = tl.load(row + V_).to(tl.pointer_type(number))
    D = tl.load(row + D_).to(tl.int32)
    F = tl.load(row + F_).to(tl.int32)
    M = tl.load(row + M_).to(tl.int32)
    x_plane = tl.load(row + X_PLANE)
    x_row = tl.load(row + X_ROW).to(tl.int32)
    c_row = tl.load(row + C_ROW).to(tl.int32)
    if WHOLE:
        X, x_plane, x_row = tl.multiple_of(X, 16), tl.multiple_of(x_plane, 16), tl.multiple_of(x_row, 16)
        C, c_row = tl.multiple_of(C, 16), tl.multiple_of(c_row, 16)
        if K > 1:
            M = tl.multiple_of(M, 16)
    pitch = pitch_of(D, F, ACROSS)
    plane = (D if ACROSS else F).to(tl.int64) * pitch
    parts = planes + tl.multiple_of(tl.load(row + PLANES), 16)
    local = tile - tl.load(row + FIRST_TILE).to(tl.int32)
    blocks = tl.load(row + BLOCKS).to(tl.int32)
    slice_index = (local // blocks).to(tl.int64)
    first = slice_index * tl.load(row + PER_SLICE)
    last = tl.minimum(first + tl.load(row + PER_SLICE), tl.load(row + N_))
    out = partial + tl.load(row + PARTIAL) + slice_index * F * (D + BIAS)
    width = tl.load(row + WIDTH).to(tl.int32)
    for i in tl.static_range(len(TILES) // 4):
        # The outer condition is known at compile time, the inner one is not.
        if (PRESENT >> i) % 2 == 1:  # noqa: SIM102
            if width == i:
                BN: tl.constexpr = TILES[4 * i]
                BM: tl.constexpr = TILES[4 * i + 1]
                TURNED: tl.constexpr = TILES[4 * i + 2]
                PARTS: tl.constexpr = TILES[4 * i + 3]
                BD: tl.constexpr = 16 << i
                first_filter = (local % blocks) * BM
                total, bias_total = fused_rows(
                    X, C, V, parts, first, last, first_filter, D, F, M, x_plane, x_row, 1, c_row, 1, D + BIAS, plane,
                    pitch, one, K, BIAS, WHOLE, FORM, ACROSS, TURNED, PARTS, BN, BM, BD,
                )  # fmt: skip
                store_sums(out, total, bias_total, first_filter, D, F, BIAS, False, BM, BD)


@triton.jit(do_not_specialize=["layers"])
def sum_layers_kernel(
    table,
    partial,
    out,
    layers,
    BIAS: tl.constexpr,
    LAYERS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = sum over the slices of partial[slice], for each layer."""
    row = layer_of(table, tl.program_id(0), layers, FIRST_SUM, ROW, LAYERS)
    size = tl.load(row + F_) * (tl.load(row + D_) + BIAS)
    i = (tl.program_id(0) - tl.load(row + FIRST_SUM)) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    total = slices_added(partial + tl.load(row + PARTIAL) + i, inside, size, tl.load(row + SLICES), AT_ONCE, BLOCK)
    tl.store(out + tl.load(row + OUT) + i, total, mask=inside)


class Member(NamedTuple):
    """The arguments of `splitting_matvec` for one layer."""

    X: Tensor
    C: Tensor
    V: Tensor
    bias: bool


@dataclass(frozen=True)
class Table:
    """A table on the device, and the sizes that a launch needs."""

    entries: Tensor
    tiles: int
    sums: int
    splits: int
    partial_size: int
    planes_size: int
    out_offsets: list[int]
    out_size: int
    present: int


_TABLES: Tables[Table] = Tables()
# The widths that each kernel is compiled for. None is removed when a layer is done: an unused width costs less than
# compiling again.
_PRESENT: dict[Hashable, int] = {}


class Layer(NamedTuple):
    """A layer of a list, as its kernel reads it; V is contiguous."""

    X: Tensor  # (planes, N, D)
    C: Tensor  # (N, M)
    V: Tensor
    bias: bool

    @property
    def filters(self) -> int:
        """The number of vectors."""
        return self.V.numel() // self.V.shape[-1]

    @property
    def is_whole(self) -> bool:
        """Whether its rows can be loaded in whole vectors."""
        return is_whole(self.X, [self.C], self.filters)

    @property
    def has_one_each(self) -> bool:
        """Whether there is one vector per filter."""
        return self.filters == self.C.shape[1]


def splitting_matvec_grouped(layers: Sequence[Member]) -> list[Tensor]:
    """Return S v for every layer, as `s3d_fast.maths.reference.splitting_matvec` defines it."""
    results: list[Tensor | None] = [None] * len(layers)
    groups: dict[Hashable, dict[int, Layer]] = {}
    for index, given in enumerate(layers):
        if given.V.numel() == 0 or len(given.X) == 0:
            results[index] = torch.zeros_like(given.V)
            continue
        form = current_form(given.X)
        layer = _listed(given, form)
        if layer is None:
            alone = pointwise if pointwise.supports(given.X) else pointwise_wide
            results[index] = alone.splitting_matvec(**given._asdict())
        else:
            is_few = _has_few_filters(given, form)
            key = (given.X.device, given.X.dtype, layer.has_one_each, layer.bias, layer.is_whole, form, is_few)
            groups.setdefault(key, {})[index] = layer
    for (*_, form, is_few), members in groups.items():  # type: ignore[misc]
        for index, result in zip(members, _run(list(members.values()), form, is_few), strict=True):
            results[index] = result
    return [result for result in results if result is not None]


def _listed(given: Member, form: str) -> Layer | None:
    """Return the layer, with copies of its rows where they must be; None if it cannot be in a list."""
    X, C, V, bias = given
    planes, vectors = ready_planes(form, X), V.contiguous()
    if planes is not None:
        layer = Layer(planes, C, vectors, bias)
        if form == "ieee" or layer.is_whole:
            is_listed = X.shape[1] <= _widest(form, C, layer.is_whole, _has_few_filters(given, form))
            return layer if is_listed and planes.stride(2) == C.stride(1) == 1 and is_near(C) else None
    count, dtype = row_storage(form, X.dtype)
    scratch = len(X) * (count * dtype.itemsize * X.shape[1] + C.itemsize * C.shape[1])
    is_listed = X.shape[1] <= _widest(form, C, True, _has_few_filters(given, form))
    # Of several vectors per filter, only the first would begin at a multiple of 16.
    is_odd = vectors.numel() != C.shape[1] * V.shape[-1] and C.shape[1] % MULTIPLE != 0
    if not is_listed or is_odd or scratch > current().scratch_bytes:
        return None
    layer = Layer(in_planes(form, X), aligned(form, C), vectors, bias)
    return layer if layer.C.stride(1) == 1 else None


def _configs(form: str, C: Tensor, is_whole: bool, has_few_filters: bool) -> list[GroupedConfig]:
    return configs.grouped(describe(C.device), form, C.dtype, is_whole, has_few_filters)


def _widest(form: str, C: Tensor, is_whole: bool, has_few_filters: bool) -> int:
    """Return the most inputs that a layer in a list may have."""
    found = _configs(form, C, is_whole, has_few_filters)
    return WIDTHS[min(len(config.tiles) for config in found) - 1] if found else 0


def _has_few_filters(given: Member, form: str) -> bool:
    """Return whether a layer takes the configuration for few filters, if there is one."""
    X, C, V, _ = given
    if V.numel() > FEW_FILTERS * V.shape[-1]:
        return False
    is_special = _configs(form, C, True, True) != _configs(form, C, True, False)
    return is_special and X.shape[1] <= _widest(form, C, True, True)


def _run(layers: Sequence[Layer], form: str, has_few_filters: bool) -> list[Tensor]:
    C = layers[0].C
    device = describe(C.device)
    candidates = _configs(form, C, layers[0].is_whole, has_few_filters)
    shapes = tuple((layer.X.shape, layer.V.shape) for layer in layers)
    key = ("grouped", C.device, C.dtype, form, layers[0].bias, layers[0].is_whole, shapes)
    offsets: list[int] = []

    def make(config: GroupedConfig) -> Plan:
        table = _table(layers, form, config, device, C.device)
        offsets[:] = table.out_offsets
        return plan(layers, table, form, device, config)

    with launch.on_device(C):
        out = launch.choose(key, candidates, make)
    return [out[offset:][: layer.V.numel()].view(layer.V.shape) for offset, layer in zip(offsets, layers, strict=True)]


def plan(layers: Sequence[Layer], table: Table, form: str, device: Device, config: GroupedConfig) -> Plan:
    """Return the launches for layers of one kind; their results follow each other as the table says."""
    first = layers[0]
    number = first.V.dtype
    across = is_by_single_multiplications(form, device)
    kind = (first.C.device, first.C.dtype, form, first.has_one_each, first.bias, first.is_whole, config)
    _PRESENT[kind] = _PRESENT.get(kind, 0) | table.present
    planes = first.V.new_empty(table.planes_size, dtype=factor_storage(form, number)[1])
    partial = first.V.new_empty(table.partial_size)
    out = first.V.new_empty(table.out_size)
    common = dict(table=table.entries, layers=len(layers), BIAS=first.bias, LAYERS=padded_layers(len(layers)))
    split = Launch(
        "grouped, split", split_layers_kernel, (table.splits,),
        dict(
            common, planes=planes, NUMBER=DTYPES[number], FORM=form, ACROSS=across, BF=SPLIT_FILTERS, BD=SPLIT_COLUMNS
        ),
        SPLIT_WARPS,
    )  # fmt: skip
    work = [
        2 * PRODUCTS[form] * own.rows * own.filters * own.depth
        for i, own in enumerate(config.configs)
        if _PRESENT[kind] >> i & 1
    ]
    sizes = [
        (own.rows, own.filters, own.turned, configs.coefficient_parts(own, device, first.C.dtype))
        for own in config.configs
    ]
    tiles = Launch(
        "grouped", grouped_kernel, (table.tiles,),
        dict(
            common, planes=planes, partial=partial, one=launch.hidden_one(device),
            ROWS=DTYPES[first.X.dtype], COEFFICIENTS=DTYPES[first.C.dtype], K=1 if first.has_one_each else 2,
            WHOLE=first.is_whole, FORM=form,
            ACROSS=across, PRESENT=_PRESENT[kind],
            TILES=sum(sizes, ()),
        ),
        config.warps, config.stages, tuple(work), config.label, configs.compiler_options(device, config),
    )  # fmt: skip
    sums = Launch(
        "grouped, sums", sum_layers_kernel, (table.sums,),
        dict(common, partial=partial, out=out, AT_ONCE=launch.SUM_SLICES, BLOCK=launch.SUM_BLOCK),
        launch.SUM_WARPS,
    )  # fmt: skip
    return Plan([split, tiles, sums], out)


def _table(layers: Sequence[Layer], form: str, config: GroupedConfig, device: Device, where: torch.device) -> Table:
    key = (config, where, layers[0].C.dtype, form, *map(_identity, layers))
    return _TABLES.find(key, where, lambda: make_table(layers, form, config, device))


def _identity(layer: Layer) -> Hashable:
    tensors = layer.X, layer.C, layer.V
    return *(tensor.data_ptr() for tensor in tensors), *((tensor.shape, tensor.stride()) for tensor in tensors)


def make_table(layers: Sequence[Layer], form: str, config: GroupedConfig, device: Device) -> Table:
    """Return the table of these layers, with the work of each divided into tiles."""
    across, count = is_by_single_multiplications(form, device), factor_storage(form, layers[0].V.dtype)[0]
    widths = [WIDTHS.index(launch.power_of_two(layer.X.shape[2], WIDTHS[0], WIDTHS[-1])) for layer in layers]
    blocks = [triton.cdiv(layer.filters, config.tiles[width][1]) for layer, width in zip(layers, widths, strict=True)]
    # A row of a tile costs width x filters multiplications, and all tiles get about the same work. Every slice writes
    # sums of its own, so we take the smallest number of tiles per program that leaves few programs idle in the last
    # round.
    costs = [WIDTHS[width] * config.tiles[width][1] for width in widths]
    programs = config.per_processor * device.processors
    work = sum(len(layer.C) * n * cost for layer, n, cost in zip(layers, blocks, costs, strict=True)) / programs

    def slice_rows(per_program: int) -> list[int]:
        wanted = [int(work / per_program / cost) for cost in costs]
        steps = [config.tiles[width][0] for width in widths]
        return [
            min(max(4, triton.cdiv(rows, step)), triton.cdiv(len(layer.C), step)) * step
            for layer, rows, step in zip(layers, wanted, steps, strict=True)
        ]

    def count_tiles(per_slice: Sequence[int]) -> int:
        return sum(
            n * triton.cdiv(len(layer.C), rows) for layer, n, rows in zip(layers, blocks, per_slice, strict=True)
        )

    choices = [slice_rows(per_program) for per_program in TILES_PER_PROGRAM]
    full = [launch.fullness(count_tiles(per_slice), programs) for per_slice in choices]
    shares = choices[next((i for i, own in enumerate(full) if own >= launch.FULL_ENOUGH), full.index(max(full)))]
    rows, offsets = [], []
    tiles = sums = splits = partial = planes = out = 0
    for layer, width, n_blocks, per_slice in zip(layers, widths, blocks, shares, strict=True):
        X, C, V, _ = layer
        (_, N, D), F, size = X.shape, layer.filters, V.numel()
        slices = triton.cdiv(N, per_slice)
        addresses = [X.data_ptr(), C.data_ptr(), V.data_ptr()]
        sizes = [N, D, F, C.shape[1], X.stride(0), X.stride(1), C.stride(0)]
        rows.append([*addresses, *sizes, width, n_blocks, per_slice, slices, tiles, partial, out, sums, planes, splits])
        offsets.append(out)
        tiles += n_blocks * slices
        sums += triton.cdiv(size, launch.SUM_BLOCK)
        partial += slices * size
        planes += count * (D * padded_size(F) if across else F * padded_size(D))
        splits += triton.cdiv(F, SPLIT_FILTERS)
        # Every result begins at a multiple of 16 entries, so that vector loads are aligned.
        out += triton.cdiv(size, 16) * 16
    entries = on_device(rows, layers[0].C.device)
    present = sum({1 << width for width in widths})
    return Table(entries, tiles, sums, splits, partial, planes, offsets, out, present)
