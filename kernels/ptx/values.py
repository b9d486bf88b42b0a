"""The types of PTX as numpy arrays: registers hold unsigned bits, which instructions read as numbers of a type."""

from __future__ import annotations

import re
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

UNSIGNED: dict[int, np.dtype[Any]] = {
    8: np.dtype(np.uint8),
    16: np.dtype(np.uint16),
    32: np.dtype(np.uint32),
    64: np.dtype(np.uint64),
}
SIGNED: dict[int, np.dtype[Any]] = {
    8: np.dtype(np.int8),
    16: np.dtype(np.int16),
    32: np.dtype(np.int32),
    64: np.dtype(np.int64),
}
FLOATS: dict[int, np.dtype[Any]] = {16: np.dtype(np.float16), 32: np.dtype(np.float32), 64: np.dtype(np.float64)}
# TF32 keeps 10 of the 23 bits of a float32's mantissa.
TF32_MASK = np.uint32(0xFFFFE000)


def is_type(word: str) -> bool:
    """Return whether a part of an opcode is a type."""
    return re.fullmatch(r"[usbf](8|16|32|64)|bf16|tf32|f16x2|bf16x2|pred", word) is not None


def width(kind: str) -> int:
    """Return the bits of a type; 1 for predicates."""
    if kind == "pred":
        return 1
    if kind in ("tf32", "f16x2", "bf16x2"):
        return 32
    return int(kind.lstrip("usbf"))


def is_float(kind: str) -> bool:
    """Return whether the numbers of a type are floating-point."""
    return kind[0] == "f" or kind in ("bf16", "tf32")


def dtype(kind: str) -> np.dtype[Any]:
    """Return the numpy type of registers that are read as this type; bfloat16 has none, see `from_bits`."""
    if kind == "pred":
        return np.dtype(bool)
    table = {"f": FLOATS, "s": SIGNED, "u": UNSIGNED, "b": UNSIGNED}["b" if "x2" in kind or kind == "bf16" else kind[0]]
    return table[width(kind)]


def from_bits(bits: Array, kind: str) -> Array:
    """Return the numbers that bits of the width of a type stand for; bfloat16 as float32."""
    return from_bfloat16(bits) if kind == "bf16" else bits.view(dtype(kind))


def to_bits(values: Array, kind: str) -> Array:
    """Return the bits of numbers; floating-point numbers are rounded to the type, integers wrap."""
    if kind == "pred":
        return values
    if kind == "bf16":
        return to_bfloat16(values)
    if kind == "tf32":
        return to_tf32(values)
    wanted = dtype(kind)
    return np.ascontiguousarray(values.astype(wanted, copy=False)).view(UNSIGNED[width(kind)])


def from_bfloat16(bits: Array) -> Array:
    """Return bfloat16 numbers, given by their 16 bits, as float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(values: Array) -> Array:
    """Round numbers of any type once to bfloat16, to the nearest and even, and return their 16 bits."""
    narrow = np.ascontiguousarray(values if values.dtype == np.float32 else _to_odd_float32(values))
    bits = narrow.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(narrow), np.uint16(0x7FFF), rounded)


def _to_odd_float32(values: Array) -> Array:
    """Round numbers to float32, to the neighbour whose last bit is set where there are two.

    Such numbers lie on the same side of each number and tie of a narrower type as before, so that rounding them again
    is rounding once.
    """
    if values.dtype.kind in "iu":
        # Beyond 2^53 the last 11 bits of 64 become one, and float64 holds the integer.
        one = values.dtype.type(1)
        if values.dtype.itemsize == 8:
            low = values & values.dtype.type(2047)
            is_large = (values >= 1 << 53) | (values <= -(1 << 53) if values.dtype.kind == "i" else False)
            values = np.where(is_large, (values ^ low) | (low != 0).astype(values.dtype) << (one * 11), values)
        values = values.astype(np.float64)
    near = np.ascontiguousarray(values.astype(np.float32))
    toward_zero = np.where(np.abs(near) > np.abs(values), np.nextafter(near, np.float32(0)), near)
    is_inexact = (toward_zero != values) & ~np.isnan(values)
    return (toward_zero.view(np.uint32) | is_inexact.astype(np.uint32)).view(np.float32)


def to_tf32(values: Array) -> Array:
    """Round float32 numbers to TF32, halves away from zero, and return their 32 bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return np.where(np.isfinite(values), (bits + np.uint32(0x1000)) & TF32_MASK, bits)


def halves(bits: Array, kind: str) -> Array:
    """Return the two 16-bit numbers in each 32-bit register as float32: (...,) to (..., 2), the lower one first."""
    pairs = np.ascontiguousarray(bits).view(np.uint16).reshape(*bits.shape, 2)
    return from_bfloat16(pairs) if kind == "bf16" else pairs.view(np.float16).astype(np.float32)


def flushed(values: Array) -> Array:
    """Return numbers with subnormal ones replaced by zero, as instructions marked .ftz do."""
    zero = values.dtype.type(0)
    return np.where(np.abs(values) < np.finfo(values.dtype).tiny, np.copysign(zero, values), values)
