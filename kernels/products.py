"""Products of stored rows with float32 numbers that are accurate on tensor cores, too.

Tensor cores represent bfloat16 and float16 rows exactly (float16 as TF32), but not the other factor, which is float32.
We split that factor into a leading part, which is exact on the tensor core, and a remainder, which is rounded. The
remainder is at most 2^-8 (bfloat16) or 2^-10 (TF32) times the number. This takes two products, and the relative error
is at most 2^-16. float32 rows are split in the same way, into two TF32 parts; three of the four products count.

FORM, the form of a product, is one of
    ieee     both factors float32, or both float64; 16-bit rows are widened first
    tf32     both factors rounded to TF32; float16 rows are exact
    tf32x3   both factors in two TF32 parts; three products
    split    bfloat16 rows; the other factor in two bfloat16 parts
    widened  float16 rows as TF32; the other factor in two TF32 parts
    rounded  bfloat16 rows; the other factor rounded to bfloat16
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from s3d_fast.base.padding import padded_size
from s3d_fast.kernels.device import INTERPRETED, Device
from s3d_fast.kernels.launch import Launch

DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
# The number of products that a form takes on tensor cores.
PRODUCTS = {"ieee": 1, "tf32": 1, "tf32x3": 3, "split": 2, "widened": 2, "rounded": 1}


def product_form(stored: torch.dtype, precision: str, device: Device) -> str:
    """Return the FORM of a product with rows of this dtype, at one of the precisions of `triton_options`."""
    if stored == torch.float64:
        return "ieee"
    if stored == torch.bfloat16:
        return "rounded" if precision == "medium" else "split"
    if not device.has_tf32:
        return "ieee"
    if stored == torch.float16:
        # Rounded to float16, an intermediate product could overflow.
        return "tf32" if precision == "medium" else "widened"
    return {"highest": "ieee", "high": "tf32x3", "medium": "tf32"}[precision]


def is_by_single_multiplications(form: str, device: Device) -> bool:
    """Return whether products are made of single multiplications, not on tensor cores.

    On AMD they never are: its matrix cores multiply float32 and float64 directly.
    """
    return form == "ieee" and device.vendor != "amd"


def plane_storage(form: str, stored: torch.dtype) -> tuple[int, torch.dtype]:
    """Return the number of planes that store a factor of a product with these rows, and their dtype."""
    if form in ("split", "rounded"):
        return PRODUCTS[form], torch.bfloat16
    number = torch.float64 if stored == torch.float64 else torch.float32
    return (2 if form in ("tf32x3", "widened") else 1), number


# The interpreter multiplies the raw bits of 16-bit numbers. Widening them first changes no value and avoids this.
_WIDEN = tl.constexpr(INTERPRETED)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """a @ b + acc, in the accumulator's dtype."""
    if _WIDEN:
        a, b = a.to(acc.dtype), b.to(acc.dtype)
    return tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)


@triton.jit
def leading_part(v, FORM: tl.constexpr):
    """The leading part of float32 numbers, which is exact on the tensor core."""
    if FORM == "split" or FORM == "rounded":
        return v.to(tl.bfloat16)
    elif FORM == "ieee":
        return v
    else:
        # TF32 has 10 bits of mantissa: clear the other 13.
        return (v.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def remainder(v, high, FORM: tl.constexpr):
    """What the leading part leaves, as far as the tensor core represents it."""
    return leading_part(v - high.to(tl.float32), FORM)


@triton.jit
def times_stored(high, low, x, acc, FORM: tl.constexpr):
    """(high + low) @ x + acc, where x holds stored rows; `low` is not used if the factor is not in two parts."""
    if FORM == "split":
        return dot(high, x, dot(low, x, acc, "ieee"), "ieee")
    elif FORM == "rounded":
        return dot(high, x, acc, "ieee")
    elif FORM == "ieee":
        return dot(high, x.to(acc.dtype), acc, "ieee")
    elif FORM == "tf32":
        return dot(high, x.to(tl.float32), acc, "tf32")
    elif FORM == "widened":
        rows = x.to(tl.float32)
        return dot(high, rows, dot(low, rows, acc, "tf32"), "tf32")
    else:
        big = leading_part(x, FORM)
        small = remainder(x, big, FORM)
        return dot(high, big, dot(high, small, dot(low, big, acc, "tf32"), "tf32"), "tf32")


@triton.jit
def stored_times(x, high, low, acc, FORM: tl.constexpr):
    """x @ (high + low) + acc, where x holds stored rows; `low` is not used if the factor is not in two parts."""
    if FORM == "split":
        return dot(x, high, dot(x, low, acc, "ieee"), "ieee")
    elif FORM == "rounded":
        return dot(x, high, acc, "ieee")
    elif FORM == "ieee":
        return dot(x.to(acc.dtype), high, acc, "ieee")
    elif FORM == "tf32":
        return dot(x.to(tl.float32), high, acc, "tf32")
    elif FORM == "widened":
        rows = x.to(tl.float32)
        return dot(rows, high, dot(rows, low, acc, "tf32"), "tf32")
    else:
        big = leading_part(x, FORM)
        small = remainder(x, big, FORM)
        return dot(big, high, dot(small, high, dot(big, low, acc, "tf32"), "tf32"), "tf32")


@triton.jit
def times_rows(u, x, acc, FORM: tl.constexpr):
    """u @ x + acc, where x holds stored rows and u has the accumulator's dtype."""
    high = leading_part(u, FORM)
    if FORM == "split" or FORM == "widened" or FORM == "tf32x3":
        return times_stored(high, remainder(u, high, FORM), x, acc, FORM)
    else:
        return times_stored(high, high, x, acc, FORM)


@triton.jit
def load_planes(planes, plane, tile, inside, FORM: tl.constexpr):
    """The leading part and the remainder of a tile of a factor; twice the same if it has one plane."""
    high = tl.load(planes + tile, mask=inside, other=0.0)
    if FORM == "split" or FORM == "widened" or FORM == "tf32x3":
        return high, tl.load(planes + plane + tile, mask=inside, other=0.0)
    else:
        return high, high


@triton.jit
def store_planes(planes, plane, where, u, inside, FORM: tl.constexpr):
    """Store a factor: its leading part and, if it has two planes, its remainder."""
    high = leading_part(u, FORM)
    tl.store(planes + where, high, mask=inside)
    if FORM == "split" or FORM == "widened" or FORM == "tf32x3":
        tl.store(planes + plane + where, remainder(u, high, FORM), mask=inside)


@triton.jit
def split_tile(V, planes, plane, v_row, v_column, f, d, F, D, pitch, less, LESS: tl.constexpr, FORM: tl.constexpr,
               ACROSS: tl.constexpr):  # fmt: skip
    """Store a tile of V, minus the tile `less` entries before it if LESS, as planes; entries beyond D are zero."""
    inside = (f < F)[:, None] & (d < D)[None, :]
    places = V + f.to(tl.int64)[:, None] * v_row + d[None, :] * v_column
    v = tl.load(places, mask=inside, other=0.0)
    if LESS:
        v -= tl.load(places - less, mask=inside, other=0.0)
    if ACROSS:
        store_planes(planes, plane, d.to(tl.int64)[None, :] * pitch + f[:, None], v, inside, FORM)
    else:
        padded = (f < F)[:, None] & (d < pitch)[None, :]
        store_planes(planes, plane, f.to(tl.int64)[:, None] * pitch + d[None, :], v, padded, FORM)


@triton.jit
def split_kernel(
    V,  # (F, ...), of which D columns from `first` on count
    planes,  # (planes, F, pitch); if ACROSS, (planes, D, pitch)
    F,
    D,
    v_row,
    v_column,
    plane,
    pitch,
    first,
    less,
    LESS: tl.constexpr,
    FORM: tl.constexpr,
    ACROSS: tl.constexpr,
    BF: tl.constexpr,
    BD: tl.constexpr,
):
    """planes = the parts of V, or of V less what is `less` entries before it."""
    f = tl.program_id(0) * BF + tl.arange(0, BF)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    split_tile(V + first, planes, plane, v_row, v_column, f, d, F, D, pitch, less, LESS, FORM, ACROSS)


SPLIT_FILTERS, SPLIT_COLUMNS, SPLIT_WARPS = (64, 128, 4) if INTERPRETED else (8, 64, 4)


def split_launch(
    V: Tensor,  # (F, ...), contiguous rows
    form: str,
    stored: torch.dtype,
    across: bool,
    columns: range,  # those to split
    less: int = 0,
) -> tuple[Launch, Tensor]:
    """Return the launch that splits D columns of vectors into planes, and the planes: (planes, F, D), padded rows.

    If `across`, filters are contiguous: (planes, D, F). With `less`, the columns that are so many before these are
    subtracted first.
    """
    F, D = len(V), len(columns)
    count, dtype = plane_storage(form, stored)
    rows, entries = (D, F) if across else (F, D)
    planes = V.new_empty(count, rows, padded_size(entries), dtype=dtype)
    grid = (triton.cdiv(F, SPLIT_FILTERS), max(1, triton.cdiv(padded_size(D), SPLIT_COLUMNS)))
    arguments = dict(
        V=V, planes=planes, F=F, D=D, v_row=V.stride(0), v_column=V.stride(1), plane=planes.stride(0),
        pitch=planes.stride(1), first=columns.start, less=less, LESS=less > 0, FORM=form, ACROSS=across,
        BF=SPLIT_FILTERS, BD=SPLIT_COLUMNS,
    )  # fmt: skip
    return Launch("split", split_kernel, grid, arguments, SPLIT_WARPS), planes


@triton.jit
def plus(u, bias, one):
    """u + bias for a product u; `one` is `launch.hidden_one`.

    The compiler would make a single product start from the bias, and set its registers behind the fence of a wgmma.
    """
    if one is not None:
        return u * one + bias
    else:
        return u + bias
