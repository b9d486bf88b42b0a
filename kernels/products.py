"""Products of stored rows with float32 numbers that are accurate on tensor cores, too.

Tensor cores represent bfloat16 and float16 rows exactly (float16 as TF32), but not the other factor, which is float32.
We split that factor into a leading part, which is exact on the tensor core, and a remainder, which is rounded. The
remainder is at most 2^-8 (bfloat16) or 2^-10 (TF32) times the number. This takes two products, and the relative error
is at most 2^-16.

FORM, the form of a product, is one of
    ieee     both factors float32, or both float64; 16-bit rows are widened first
    tf32     both factors float32, each rounded to TF32
    split    bfloat16 rows; the other factor in two bfloat16 parts
    widened  float16 rows as TF32; the other factor in two TF32 parts
    rounded  16-bit rows; the other factor rounded to 16 bits
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from s3d_fast.kernels.device import INTERPRETED, Device

DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def product_form(stored: torch.dtype, precision: str, device: Device) -> str:
    """Return the FORM of a product with rows of this dtype, at one of the precisions of `triton_options`."""
    if stored == torch.float64:
        return "ieee"
    if stored in (torch.bfloat16, torch.float16) and precision == "medium":
        return "rounded"
    if stored == torch.bfloat16:
        return "split"
    if not device.has_tf32:
        return "ieee"
    if stored == torch.float16:
        return "widened"
    return "ieee" if precision == "highest" else "tf32"


def wants_filters_along_threads(form: str, device: Device) -> bool:
    """Return whether threads should read V along the filters: if products are made of single multiplications.

    On AMD they never are: its matrix cores multiply float32 and float64 directly.
    """
    return form == "ieee" and device.vendor != "amd"


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
    if FORM == "split":
        return v.to(tl.bfloat16)
    else:
        # TF32 has 10 bits of mantissa: clear the other 13.
        return (v.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def rows_times(x, v, acc, FORM: tl.constexpr):
    """x @ v + acc, where x holds stored rows and v has the accumulator's dtype."""
    if FORM == "split" or FORM == "widened":
        high = leading_part(v, FORM)
        low = leading_part(v - high.to(tl.float32), FORM)
        if FORM == "split":
            return dot(x, high, dot(x, low, acc, "ieee"), "ieee")
        else:
            rows = x.to(tl.float32)
            return dot(rows, high, dot(rows, low, acc, "tf32"), "tf32")
    elif FORM == "rounded":
        return dot(x, v.to(x.dtype), acc, "ieee")
    else:
        return dot(x.to(acc.dtype), v, acc, FORM)


@triton.jit
def times_rows(u, x, acc, FORM: tl.constexpr):
    """u @ x + acc, where x holds stored rows and u has the accumulator's dtype."""
    if FORM == "split" or FORM == "widened":
        high = leading_part(u, FORM)
        low = leading_part(u - high.to(tl.float32), FORM)
        if FORM == "split":
            return dot(high, x, dot(low, x, acc, "ieee"), "ieee")
        else:
            rows = x.to(tl.float32)
            return dot(high, rows, dot(low, rows, acc, "tf32"), "tf32")
    elif FORM == "rounded":
        return dot(u.to(x.dtype), x, acc, "ieee")
    else:
        return dot(u, x.to(acc.dtype), acc, FORM)
