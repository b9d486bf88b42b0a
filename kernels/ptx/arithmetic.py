"""Arithmetic and logic on registers.

Instructions that round once do so here, but for float64 `fma`, see `fused`: 16-bit numbers are calculated with in wider
types, whose results are exact or rounded such that rounding them again is rounding once. Approximate instructions
(`ex2.approx`, `div.full`, ...) give the correctly rounded result, which is within the bounds that the instruction set
states for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from s3d_fast.kernels.ptx.decode import Mask, Step, executes, reader, types, unknown, writer
from s3d_fast.kernels.ptx.parse import Instruction
from s3d_fast.kernels.ptx.values import SIGNED, UNSIGNED, Array, flushed, halves, is_float, to_bits, width

if TYPE_CHECKING:
    from s3d_fast.kernels.ptx.wave import Wave

# Splits a float64 into two halves of 26 bits, whose products are exact.
SPLITTER = 2.0**27 + 1


def fused(a: Array, b: Array, c: Array) -> Array:
    """Return a b + c, rounded once; of float64 almost always, since what rounding has lost is itself rounded."""
    if a.dtype != np.float64:
        # Products of narrower numbers are exact.
        return odd_sum(a.astype(np.float64) * b, c.astype(np.float64)).astype(a.dtype)
    product = a * b
    total = product + c
    rest = total - product
    # What rounding has lost of the product and of the sum.
    lost = (product - (total - rest)) + (c - rest) + _lost_of_product(a, b, product)
    # Adding zero would change the sign of a total of -0.
    return np.where(np.isfinite(lost) & (lost != 0), total + lost, total)


def odd_sum(a: Array, b: Array) -> Array:
    """Return a + b, rounded to the neighbour whose last bit is set where there are two, if that makes a difference.

    It does not unless the last 28 bits are zero: others are no tie of a narrower type, and no number of one.
    """
    total = np.ascontiguousarray(a + b)
    bits = total.view(np.int64)
    is_close = (bits & 0xFFFFFFF) == 0
    if not is_close.any():
        return total
    rest = total - a
    lost = (a - (total - rest)) + (b - rest)
    # All of these have an even last bit. What is lost has the sign of the total if that is too small.
    is_wrong = is_close & np.isfinite(lost) & (lost != 0)
    return np.where(is_wrong, np.where((lost > 0) == (total > 0), bits + 1, bits - 1), bits).view(np.float64)


def fused_halves(a: Array, b: Array, c: Array) -> Array:
    """Return a b + c of 16-bit numbers as float64, from which rounding to 16 bits is rounding once."""
    return odd_sum(a.astype(np.float64) * b, c.astype(np.float64))


def _lost_of_product(a: Array, b: Array, product: Array) -> Array:
    a_high = a * SPLITTER - (a * SPLITTER - a)
    b_high = b * SPLITTER - (b * SPLITTER - b)
    a_low, b_low = a - a_high, b - b_high
    return ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def divided(a: Array, b: Array) -> Array:
    """Return the quotient; of integers, rounded toward zero."""
    if a.dtype.kind == "f":
        return a / b
    if a.dtype.kind == "u":
        return np.where(b == 0, ~np.zeros_like(a), a // np.where(b == 0, 1, b).astype(a.dtype))
    # The magnitude of the smallest integer is beyond the signed type.
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    quotient = (np.abs(a).view(unsigned) // np.abs(np.where(b == 0, 1, b)).astype(unsigned)).view(a.dtype)
    return np.where(b == 0, -1, np.where((a < 0) != (b < 0), -quotient, quotient)).astype(a.dtype)


def remainder(a: Array, b: Array) -> Array:
    """Return what is left of an integer division, with the sign of the dividend."""
    return np.where(b == 0, a, np.fmod(a, np.where(b == 0, 1, b).astype(a.dtype)))


def smaller(a: Array, b: Array) -> Array:
    """Return the minimum; a number if the other is NaN."""
    return _signed_zero(a, b, np.fmin(a, b), -1) if a.dtype.kind == "f" else np.minimum(a, b)


def larger(a: Array, b: Array) -> Array:
    """Return the maximum; a number if the other is NaN."""
    return _signed_zero(a, b, np.fmax(a, b), 1) if a.dtype.kind == "f" else np.maximum(a, b)


def smaller_or_nan(a: Array, b: Array) -> Array:
    """Return the minimum; NaN if one is NaN."""
    return _signed_zero(a, b, np.minimum(a, b), -1)


def larger_or_nan(a: Array, b: Array) -> Array:
    """Return the maximum; NaN if one is NaN."""
    return _signed_zero(a, b, np.maximum(a, b), 1)


def _signed_zero(a: Array, b: Array, chosen: Array, sign: int) -> Array:
    """Return the chosen extremes, but of 0 and -0 the one of this sign: numpy returns any of both."""
    is_pair = (a == 0) & (b == 0) & (np.signbit(a) != np.signbit(b))
    return np.where(is_pair, np.copysign(chosen.dtype.type(0), sign), chosen).astype(chosen.dtype)


FUNCTIONS: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "fma": fused,
    "div": divided,
    "rem": remainder,
    "min": smaller,
    "max": larger,
    "neg": np.negative,
    "abs": np.abs,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "rcp": lambda a: np.divide(a.dtype.type(1), a),
    "sqrt": np.sqrt,
    "rsqrt": lambda a: np.divide(a.dtype.type(1), np.sqrt(a)),
    "ex2": np.exp2,
    "lg2": np.log2,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "copysign": lambda a, b: np.copysign(b, a),
}
# What an opcode may contain besides its name and type. Anything else may change the result, and is unknown.
MODIFIERS = frozenset({"rn", "lo", "approx", "full", "ftz", "NaN"})


@executes(*FUNCTIONS)
def calculate(instruction: Instruction) -> Step:
    """Apply a function to numbers of one type."""
    if instruction.name == "mul" and instruction.parts[1] in ("wide", "hi"):
        return multiply_wide(instruction)
    (kind,) = types(instruction)
    if not set(instruction.parts[1:]) <= MODIFIERS | {kind}:
        raise unknown(instruction)
    function = FUNCTIONS[instruction.name]
    if "NaN" in instruction.parts:
        function = {"min": smaller_or_nan, "max": larger_or_nan}[instruction.name]
    if kind.endswith("x2"):
        return _calculate_pairs(instruction, kind.removesuffix("x2"), function)
    flushes = "ftz" in instruction.parts
    if flushes and kind not in ("f16", "f32") and instruction.name not in ("rcp", "rsqrt"):
        raise unknown(instruction)
    target, *sources = instruction.operands
    readers, write = [reader(source, kind) for source in sources], writer(target, kind)
    if instruction.name in ("rcp", "rsqrt") and kind == "f64" and flushes:
        exact = function
        # A first guess: the low half of the result is zero.
        function = lambda a: (exact(a).view(np.uint64) & ~np.uint64(0xFFFFFFFF)).view(np.float64)  # noqa: E731
    # Products of bfloat16 numbers may be too small for float32.
    is_wide = kind == "bf16"
    function = fused_halves if is_wide and function is fused else function

    def run(wave: Wave, mask: Mask) -> None:
        values = [read(wave).astype(np.float64) if is_wide else read(wave) for read in readers]
        if flushes:
            write(wave, flushed(function(*map(flushed, values))), mask)
        else:
            write(wave, function(*values), mask)

    return run


def _calculate_pairs(instruction: Instruction, half: str, function: Callable[..., Array]) -> Step:
    """Apply a function to both 16-bit numbers of registers, in float64, and round the results."""
    if "ftz" in instruction.parts:
        raise unknown(instruction)
    function = fused_halves if function is fused else function
    target, *sources = instruction.operands
    readers, write = [reader(source, "b32") for source in sources], writer(target, "b32")

    def run(wave: Wave, mask: Mask) -> None:
        values = [halves(np.broadcast_to(read(wave), wave.lanes), half).astype(np.float64) for read in readers]
        write(wave, to_bits(function(*values), half).view(np.uint32)[:, 0], mask)

    return run


def multiply_wide(instruction: Instruction) -> Step:
    """Multiply integers without loss: the whole product, or its upper half."""
    form, kind = instruction.parts[1], instruction.parts[2]
    bits = width(kind)
    target, *sources = instruction.operands
    readers = [reader(source, kind) for source in sources]
    write = writer(target, f"{kind[0]}{2 * bits}" if form == "wide" else kind)
    if bits == 64:
        if form == "wide":
            raise unknown(instruction)
        return lambda wave, mask: write(wave, _upper_half(*(read(wave) for read in readers)), mask)
    wide = (SIGNED if kind[0] == "s" else UNSIGNED)[2 * bits]

    def run(wave: Wave, mask: Mask) -> None:
        a, b = (read(wave).astype(wide) for read in readers)
        write(wave, a * b if form == "wide" else (a * b) >> wide.type(bits), mask)

    return run


def _upper_half(a: Array, b: Array) -> Array:
    """Return the upper 64 bits of products of 64-bit integers."""
    product = a.astype(object) * b.astype(object)
    # Without a dtype, numpy makes float64 of integers on both sides of 2^63.
    return np.array([int(p) >> 64 for p in np.atleast_1d(product)], a.dtype)


@executes("mad")
def multiply_add(instruction: Instruction) -> Step:
    """Multiply integers and add one of the result's width."""
    form, kind = instruction.parts[1], instruction.parts[2]
    if form not in ("lo", "wide"):
        raise unknown(instruction)
    result = kind if form == "lo" else f"{kind[0]}{2 * width(kind)}"
    target, a, b, c = instruction.operands
    read_a, read_b, read_c, write = reader(a, kind), reader(b, kind), reader(c, result), writer(target, result)
    wide = (SIGNED if kind[0] == "s" else UNSIGNED)[width(result)]

    def run(wave: Wave, mask: Mask) -> None:
        write(wave, read_a(wave).astype(wide) * read_b(wave).astype(wide) + read_c(wave), mask)

    return run


@executes("shl", "shr")
def shift(instruction: Instruction) -> Step:
    """Shift by any number of places; beyond the width, only the sign is left."""
    (kind,) = types(instruction)
    is_left, bits = instruction.name == "shl", width(kind)
    target, source, amount = instruction.operands
    read, read_amount, write = reader(source, kind), reader(amount, "u32"), writer(target, kind)

    def run(wave: Wave, mask: Mask) -> None:
        value, places = read(wave), read_amount(wave)
        clipped = np.minimum(places, bits - 1).astype(value.dtype)
        shifted = value << clipped if is_left else value >> clipped
        is_lost = (places >= bits) & (is_left or value.dtype.kind == "u")
        write(wave, np.where(is_lost, 0, shifted).astype(value.dtype), mask)

    return run


@executes("shf")
def funnel_shift(instruction: Instruction) -> Step:
    """Shift two registers as one of 64 bits, and return its upper or lower half."""
    direction, mode = instruction.parts[1:3]
    target, *sources = instruction.operands
    readers, write = [reader(source, "u32") for source in sources], writer(target, "b32")

    def run(wave: Wave, mask: Mask) -> None:
        low, high, amount = (read(wave).astype(np.uint64) for read in readers)
        amount = amount & np.uint64(31) if mode == "wrap" else np.minimum(amount, np.uint64(32))
        both = (high << np.uint64(32)) | low
        shifted = (both << amount) >> np.uint64(32) if direction == "l" else both >> amount
        write(wave, (shifted & np.uint64(0xFFFFFFFF)).astype(np.uint32), mask)

    return run


@executes("bfe")
def extract_bits(instruction: Instruction) -> Step:
    """Return some bits of a number, signed or not."""
    (kind,) = types(instruction)
    target, *sources = instruction.operands
    read, read_first, read_count = reader(sources[0], kind), reader(sources[1], "u32"), reader(sources[2], "u32")
    write, bits = writer(target, kind), width(kind)

    def run(wave: Wave, mask: Mask) -> None:
        value, first, count = read(wave), read_first(wave) & 255, np.minimum(read_count(wave) & 255, bits)
        # Behind the last bit there are copies of the sign, or zeros.
        moved = value >> np.minimum(first, bits - 1).astype(value.dtype)
        moved = np.where((first >= bits) & (value.dtype.kind == "u"), value.dtype.type(0), moved)
        # Move the wanted bits to the top, then down again: the sign comes along.
        unwanted = np.minimum(bits - count.astype(np.int64), bits - 1).astype(value.dtype)
        write(wave, np.where(count == 0, 0, (moved << unwanted) >> unwanted).astype(value.dtype), mask)

    return run


@executes("lop3")
def logic_of_three(instruction: Instruction) -> Step:
    """Apply any logical function of three bits, given by its table, to three registers."""
    target, *sources, table = instruction.operands
    readers, read_table, write = [reader(s, "b32") for s in sources], reader(table, "u32"), writer(target, "b32")

    def run(wave: Wave, mask: Mask) -> None:
        a, b, c = (read(wave) for read in readers)
        wanted, result = int(read_table(wave)), np.zeros(wave.lanes, np.uint32)
        for case in range(8):
            if wanted >> case & 1:
                result |= (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
        write(wave, result, mask)

    return run


@executes("popc", "clz")
def count_bits(instruction: Instruction) -> Step:
    """Count the bits that are set, or the zeros above the highest one."""
    (kind,) = types(instruction)
    target, source = instruction.operands
    read, write, is_popc = reader(source, kind), writer(target, "u32"), instruction.name == "popc"

    def run(wave: Wave, mask: Mask) -> None:
        value = np.broadcast_to(read(wave), wave.lanes)
        counts = [bin(int(v)).count("1") if is_popc else width(kind) - int(v).bit_length() for v in value]
        write(wave, np.array(counts, np.uint32), mask)

    return run


COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
COMBINED = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def comparison(name: str, kind: str) -> Callable[[Array, Array], Array]:
    """Return a comparison; those of floating-point numbers are false for NaN, or with a u at the end true."""
    if not is_float(kind):
        return COMPARISONS[name]
    if name in ("nan", "num"):
        return lambda a, b: (np.isnan(a) | np.isnan(b)) == (name == "nan")
    if name in ("equ", "neu", "ltu", "leu", "gtu", "geu"):
        inner = COMPARISONS[name[:2]]
        return lambda a, b: inner(a, b) | np.isnan(a) | np.isnan(b)
    if name == "ne":
        return lambda a, b: (a != b) & ~(np.isnan(a) | np.isnan(b))
    return COMPARISONS[name]


@executes("setp")
def compare(instruction: Instruction) -> Step:
    """Compare, perhaps combine with a predicate, and write the outcome, perhaps also its opposite.

    Of pairs of 16-bit numbers, the outcome of the lower ones and that of the upper ones.
    """
    name, *modifiers, kind = instruction.parts[1:]
    target, a, b, *third = instruction.operands
    half = kind.removesuffix("x2")
    compared, is_pair = comparison(name, half), half != kind
    combine = COMBINED[modifiers[0]] if modifiers else None
    read_a, read_b = (reader(source, "b32" if is_pair else kind) for source in (a, b))
    read_third = reader(third[0], "pred") if third else None
    if (combine is None) != (read_third is None) or len(modifiers) > 1:
        raise unknown(instruction)
    targets = target.items if hasattr(target, "items") else (target,)
    writers = [writer(item, "pred") for item in targets]

    def run(wave: Wave, mask: Mask) -> None:
        values = read_a(wave), read_b(wave)
        if is_pair:
            both = compared(*(halves(np.broadcast_to(value, wave.lanes), half) for value in values))
            result, second = both[:, 0], both[:, 1]
        else:
            result = compared(*values)
            second = ~result
        if combine is not None and read_third is not None:
            other = read_third(wave)
            result, second = combine(result, other), combine(second, other)
        for write, value in zip(writers, (result, second), strict=False):
            write(wave, value, mask)

    return run
