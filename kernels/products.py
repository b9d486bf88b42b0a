"""Products of stored rows with float32 numbers that are accurate on tensor cores, too.

Tensor cores multiply bfloat16 numbers, which have 8 bits, exactly, and sum in float32. So both factors become sums of
bfloat16 planes, a = a_0 + a_1 + ..., where each plane is what the planes before it leave, rounded: it is at most 2^-8
times as large as the one before. Of the products a_i b_j those count whose planes are large enough together.

FORM, the form of a product, names the number of bfloat16 products it takes:
    ieee     none: both factors float32, or both float64; 16-bit rows are widened first
    bf16x1   both factors rounded to bfloat16
    bf16x2   bfloat16 rows; the other factor in two planes
    bf16x3   float16 rows, exact in two planes; the other factor in two planes
    bf16x6   float32 rows in three planes, which hold all 24 bits; the other factor in three planes
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from s3d_fast.base.padding import padded_size
from s3d_fast.kernels.device import INTERPRETED, Device, describe
from s3d_fast.kernels.launch import Launch
from s3d_fast.kernels.options import current

DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
# The planes of the rows, the planes of the other factor, and the number of products on tensor cores.
PLANES = {"ieee": (1, 1, 1), "bf16x1": (1, 1, 1), "bf16x2": (1, 2, 2), "bf16x3": (2, 2, 3), "bf16x6": (3, 3, 6)}
PRODUCTS = {form: products for form, (_, _, products) in PLANES.items()}


def product_form(stored: torch.dtype, precision: str, device: Device) -> str:
    """Return the FORM of a product with rows of this dtype, at one of the precisions of `triton_options`."""
    if stored == torch.float64:
        return "ieee"
    if stored == torch.bfloat16:
        return "bf16x1" if precision == "medium" else "bf16x2"
    if not device.has_bf16:
        return "ieee"
    if precision == "medium":
        return "bf16x1"
    # AMD's matrix cores multiply float32 directly, nearly as fast as six times bfloat16.
    if stored == torch.float32 and (precision == "highest" or device.vendor == "amd"):
        return "ieee"
    return "bf16x3" if stored == torch.float16 else "bf16x6"


def current_form(X: Tensor) -> str:
    """Return the FORM of a product with these rows, at the precision in force."""
    return product_form(X.dtype, current().arithmetic, describe(X.device))


def is_by_single_multiplications(form: str, device: Device) -> bool:
    """Return whether products are made of single multiplications, not on tensor cores.

    On AMD they never are: its matrix cores multiply float32 and float64 directly.
    """
    return form == "ieee" and device.vendor != "amd"


Storage = tuple[int, torch.dtype]


def row_storage(form: str, stored: torch.dtype) -> Storage:
    """Return the number of planes in which products of this form read rows of a dtype, and the planes' dtype."""
    return PLANES[form][0], stored if form == "ieee" else torch.bfloat16


def factor_storage(form: str, number: torch.dtype) -> Storage:
    """Return the number of planes in which products of this form read the other factor, and the planes' dtype."""
    return PLANES[form][1], number if form == "ieee" else torch.bfloat16


@triton.constexpr_function
def row_planes(form):
    """The planes of the rows in a product of this form."""
    return PLANES[form][0]


@triton.constexpr_function
def factor_planes(form):
    """The planes of the other factor in a product of this form."""
    return PLANES[form][1]


# The interpreter multiplies the raw bits of 16-bit numbers. Widening them first changes no value and avoids this.
_WIDEN = tl.constexpr(INTERPRETED)


@triton.jit
def dot(a, b, acc, FORM: tl.constexpr):
    """a @ b + acc, in the accumulator's dtype."""
    if _WIDEN or FORM == "ieee":
        a, b = a.to(acc.dtype), b.to(acc.dtype)
    return tl.dot(a, b, acc, input_precision="ieee", out_dtype=acc.dtype)


@triton.jit
def product(a, b, acc, FORM: tl.constexpr):
    """a @ b + acc for factors in planes, a tuple of tiles each; the smallest products are added first."""
    LAST: tl.constexpr = max(len(a), len(b)) - 1
    for back in tl.static_range(LAST + 1):
        # The planes i and j of these products have i + j = LAST - back.
        for i in tl.static_range(LAST - back + 1):
            if i < len(a) and LAST - back - i < len(b):
                acc = dot(a[i], b[LAST - back - i], acc, FORM)
    return acc


@triton.jit
def planes_of(v, COUNT: tl.constexpr, FORM: tl.constexpr):
    """The COUNT planes of float32 numbers, as a tuple; the numbers themselves in an IEEE product."""
    if FORM == "ieee":
        return (v,)
    else:
        first = v.to(tl.bfloat16)
        rest = v - first.to(tl.float32)
        second = rest.to(tl.bfloat16)
        if COUNT == 1:
            return (first,)
        elif COUNT == 2:
            return (first, second)
        else:
            return (first, second, (rest - second.to(tl.float32)).to(tl.bfloat16))


@triton.jit
def load_planes(planes, plane, tile, inside, COUNT: tl.constexpr):
    """The tiles of COUNT planes, as a tuple."""
    first = tl.load(planes + tile, mask=inside, other=0.0)
    if COUNT == 1:
        return (first,)
    elif COUNT == 2:
        return (first, tl.load(planes + plane + tile, mask=inside, other=0.0))
    else:
        # Twice the distance of planes may exceed 32 bits.
        next_plane = planes + plane
        second = tl.load(next_plane + tile, mask=inside, other=0.0)
        return (first, second, tl.load(next_plane + plane + tile, mask=inside, other=0.0))


@triton.jit
def store_planes(planes, plane, where, v, inside, COUNT: tl.constexpr, FORM: tl.constexpr):
    """Store the COUNT planes of numbers."""
    parts = planes_of(v, COUNT, FORM)
    for i in tl.static_range(len(parts)):
        tl.store(planes + where, parts[i], mask=inside)
        planes += plane


@triton.jit
def transposed(tiles):
    """The transposes of a tuple of tiles."""
    if len(tiles) == 1:
        return (tl.trans(tiles[0]),)
    elif len(tiles) == 2:
        return (tl.trans(tiles[0]), tl.trans(tiles[1]))
    else:
        return (tl.trans(tiles[0]), tl.trans(tiles[1]), tl.trans(tiles[2]))


@triton.jit
def split_tile(V, planes, plane, v_row, v_column, f, d, F, D, pitch, less, LESS: tl.constexpr, COUNT: tl.constexpr,
               FORM: tl.constexpr, ACROSS: tl.constexpr):  # fmt: skip
    """Store a tile of V, minus the tile `less` entries before it if LESS, as planes; entries beyond D are zero."""
    inside = (f < F)[:, None] & (d < D)[None, :]
    places = V + f.to(tl.int64)[:, None] * v_row + d[None, :] * v_column
    v = tl.load(places, mask=inside, other=0.0)
    if LESS:
        v -= tl.load(places - less, mask=inside, other=0.0)
    if FORM != "ieee":
        v = v.to(tl.float32)
    if ACROSS:
        store_planes(planes, plane, d.to(tl.int64)[None, :] * pitch + f[:, None], v, inside, COUNT, FORM)
    else:
        padded = (f < F)[:, None] & (d < pitch)[None, :]
        store_planes(planes, plane, f.to(tl.int64)[:, None] * pitch + d[None, :], v, padded, COUNT, FORM)


@triton.jit
def split_kernel(
    V,  # (F, ...), of which D columns from `first` on count
    planes,  # (COUNT, F, pitch); if ACROSS, (COUNT, D, pitch)
    F,
    D,
    v_row,
    v_column,
    plane,
    pitch,
    first,
    less,
    LESS: tl.constexpr,
    COUNT: tl.constexpr,
    FORM: tl.constexpr,
    ACROSS: tl.constexpr,
    BF: tl.constexpr,
    BD: tl.constexpr,
):
    """planes = the planes of V, or of V less what is `less` entries before it."""
    f = tl.program_id(0) * BF + tl.arange(0, BF)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    split_tile(V + first, planes, plane, v_row, v_column, f, d, F, D, pitch, less, LESS, COUNT, FORM, ACROSS)


SPLIT_FILTERS, SPLIT_COLUMNS, SPLIT_WARPS = (64, 128, 4) if INTERPRETED else (8, 64, 4)


def split_launch(
    V: Tensor,  # (F, ...)
    form: str,
    storage: Storage,
    across: bool,
    columns: range,  # those to split
    less: int = 0,
    name: str = "split",
) -> tuple[Launch, Tensor]:
    """Return the launch that splits D columns of vectors or rows, and their planes: (planes, F, D), padded rows.

    If `across`, filters are contiguous: (planes, D, F). With `less`, the columns that are so many before these are
    subtracted first.
    """
    F, D = len(V), len(columns)
    count, dtype = storage
    rows, entries = (D, F) if across else (F, D)
    planes = V.new_empty(count, rows, padded_size(entries), dtype=dtype)
    grid = (triton.cdiv(F, SPLIT_FILTERS), max(1, triton.cdiv(padded_size(D), SPLIT_COLUMNS)))
    arguments = dict(
        V=V, planes=planes, F=F, D=D, v_row=V.stride(0), v_column=V.stride(1), plane=planes.stride(0),
        pitch=planes.shape[2], first=columns.start, less=less, LESS=less > 0, COUNT=count, FORM=form, ACROSS=across,
        BF=SPLIT_FILTERS, BD=SPLIT_COLUMNS,
    )  # fmt: skip
    return Launch(name, split_kernel, grid, arguments, SPLIT_WARPS), planes


@triton.jit
def plus(u, bias, one):
    """u + bias for a product u; `one` is `launch.hidden_one`.

    The compiler would make a single product start from the bias, and set its registers behind the fence of a wgmma.
    """
    if one is not None:
        return u * one + bias
    else:
        return u + bias
