"""Products of stored rows with float32 numbers that keep float32 accuracy on tensor cores too.

Rows in bfloat16 or float16 are exact operands of tensor cores; the other factor, which is float32, is not. It is taken
apart into a leading part that the tensor core represents exactly and a remainder that is 2^-8 (bfloat16) or 2^-11
(TF32, which holds float16 exactly) times smaller and is rounded: two products, with a relative error of 2^-16 or less.

The form of a product, FORM, is one of
    ieee     float32 by float32 multiplications, or float64 by float64 ones; 16-bit rows are widened
    tf32     float32 numbers, each rounded to TF32
    split    bfloat16 rows, the other factor in two parts of bfloat16
    widened  float16 rows as TF32, the other factor in two parts of TF32
    rounded  16-bit rows, the other factor rounded to 16 bits
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
    """Return the form of product for rows of this dtype, at a precision of `triton_options`."""
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
    """Return whether products are made of single multiplications, which read V with filters along the threads.

    AMD's matrix cores multiply float32 and float64 numbers as they are.
    """
    return form == "ieee" and device.vendor != "amd"


# The interpreter multiplies the bits of 16-bit numbers; widened, which changes no value, they are multiplied rightly.
_WIDEN = tl.constexpr(INTERPRETED)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """a @ b + acc, in the accumulator's type."""
    if _WIDEN:
        a, b = a.to(acc.dtype), b.to(acc.dtype)
    return tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)


@triton.jit
def leading_part(v, FORM: tl.constexpr):
    """The leading part of float32 numbers that is exact on the tensor core."""
    if FORM == "split":
        return v.to(tl.bfloat16)
    else:
        # TF32 keeps 10 bits of the mantissa.
        return (v.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def rows_times(x, v, acc, FORM: tl.constexpr):
    """x @ v + acc, where x holds rows as they are stored and v is of the accumulator's type."""
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
    """u @ x + acc, where x holds rows as they are stored and u is of the accumulator's type."""
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
