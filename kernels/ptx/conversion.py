"""Instructions that move and convert numbers between registers, choose between them, or make predicates of them.

A conversion rounds once, whatever the two types are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from s3d_fast.kernels.ptx.decode import Mask, Reader, Step, executes, reader, types, unknown, writer
from s3d_fast.kernels.ptx.parse import Instruction, Vector
from s3d_fast.kernels.ptx.values import UNSIGNED, Array, dtype, flushed, is_float, to_bits, width

if TYPE_CHECKING:
    from s3d_fast.kernels.ptx.wave import Wave

ROUNDED = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@executes("mov")
def move(instruction: Instruction) -> Step:
    """Copy a register, or take one apart into several, or put several together."""
    (kind,) = types(instruction)
    target, source = instruction.operands
    if isinstance(target, Vector):
        return _unpack(target, reader(source, f"b{width(kind)}"), width(kind))
    if isinstance(source, Vector):
        return _pack(instruction, source, width(kind))
    bits = kind if kind == "pred" else f"b{width(kind)}"
    read, write = reader(source, bits), writer(target, bits)
    return lambda wave, mask: write(wave, read(wave), mask)


def _unpack(target: Vector, read: Reader, bits: int) -> Step:
    part = bits // len(target.items)
    writers = [writer(item, f"b{part}") for item in target.items]

    def run(wave: Wave, mask: Mask) -> None:
        value = np.ascontiguousarray(np.broadcast_to(read(wave), wave.lanes))
        parts = value.view(UNSIGNED[part]).reshape(wave.lanes, -1)
        for i, write in enumerate(writers):
            write(wave, np.ascontiguousarray(parts[:, i]), mask)

    return run


def _pack(instruction: Instruction, source: Vector, bits: int) -> Step:
    part = bits // len(source.items)
    readers, write = [reader(item, f"b{part}") for item in source.items], writer(instruction.operands[0], f"b{bits}")

    def run(wave: Wave, mask: Mask) -> None:
        parts = np.stack([np.broadcast_to(read(wave), wave.lanes) for read in readers], 1)
        write(wave, parts.view(UNSIGNED[bits])[:, 0], mask)

    return run


@executes("selp")
def select(instruction: Instruction) -> Step:
    """Choose one of two values by a predicate."""
    (kind,) = types(instruction)
    target, a, b, predicate = instruction.operands
    read_a, read_b, choose = reader(a, kind), reader(b, kind), reader(predicate, "pred")
    write = writer(target, kind)
    return lambda wave, mask: write(wave, np.where(choose(wave), read_a(wave), read_b(wave)), mask)


@executes("cvt")
def convert(instruction: Instruction) -> Step:
    """Convert between types; two float32 may become the halves of one register, the first the upper one."""
    result, source = types(instruction)
    target, *given = instruction.operands
    modifiers = set(instruction.parts[1:]) - {result, source}
    readers = [reader(operand, source) for operand in given]
    if result.endswith("x2"):
        return _convert_pair(instruction, readers, result, modifiers)
    (read,), write = readers, writer(target, result)
    roundings = modifiers - {"sat", "ftz"}
    if roundings not in _roundings(result, source) or not _fits(modifiers, result, source):
        raise unknown(instruction)
    rounding = next((ROUNDED[name] for name in roundings if name in ROUNDED), None)
    # Only float32 numbers are flushed, before and after.
    flushes = [("ftz" in modifiers and kind == "f32") for kind in (source, result)]

    def run(wave: Wave, mask: Mask) -> None:
        value = flushed(read(wave)) if flushes[0] else read(wave)
        value = value if rounding is None else rounding(value)
        if is_float(source) and not is_float(result):
            value = _clipped(value, result, source)
        elif "sat" in modifiers:
            value = np.clip(np.nan_to_num(value, nan=0.0), 0, 1)
        elif not is_float(source) and not is_float(result):
            value = value.astype(dtype(result))
        write(wave, flushed(value.astype(np.float32)) if flushes[1] else value, mask)

    return run


def _roundings(result: str, source: str) -> list[set[str]]:
    """Return the ways to round that are known for a conversion: none where it is exact."""
    if result == "tf32":
        return [{"rna"}] if source == "f32" else []
    whole = [{name} for name in ROUNDED]
    if not is_float(result):
        return whole if is_float(source) else [set()]
    if not is_float(source):
        return [{"rn"}]
    if result == source:
        return [set(), *whole]
    # Both types of 16 bits have numbers that the other one has not.
    return [set()] if width(result) > width(source) else [{"rn"}]


def _fits(modifiers: set[str], result: str, source: str) -> bool:
    """Return whether a conversion has numbers that it can clamp to 0 and 1, or flush."""
    saturates, flushes = "sat" in modifiers, "ftz" in modifiers
    return (not saturates or (is_float(result) and is_float(source))) and (not flushes or "f32" in (result, source))


def _clipped(values: Array, kind: str, source: str) -> Array:
    """Return floating-point numbers as integers: beyond the range its ends.

    NaN becomes zero; if one of both types has 64 bits, the integer whose highest bit alone is set.
    """
    limits, bits = np.iinfo(dtype(kind)), width(kind)
    inside = np.nan_to_num(np.clip(values.astype(np.float64), float(limits.min), float(limits.max)), nan=0.0)
    # The largest 64-bit integer is no float64: 2^63 must not wrap.
    is_top = inside >= float(limits.max)
    found = np.where(is_top, limits.max, np.where(is_top, 0.0, inside).astype(dtype(kind)))
    if 64 not in (bits, width(source)):
        return found
    return np.where(np.isnan(values), np.array(1 << (bits - 1), UNSIGNED[bits]).view(dtype(kind)), found)


def _convert_pair(instruction: Instruction, readers: list[Reader], result: str, modifiers: set[str]) -> Step:
    write, half = writer(instruction.operands[0], "b32"), result.removesuffix("x2")
    if len(readers) != 2 or types(instruction)[1] != "f32" or modifiers != {"rn"}:
        raise unknown(instruction)

    def run(wave: Wave, mask: Mask) -> None:
        upper, lower = (to_bits(read(wave), half).astype(np.uint32) for read in readers)
        write(wave, (upper << np.uint32(16)) | lower, mask)

    return run


@executes("cvta")
def convert_address(instruction: Instruction) -> Step:
    """Convert an address between spaces, which here have the same addresses."""
    target, source = instruction.operands
    read, write = reader(source, "b64"), writer(target, "b64")
    return lambda wave, mask: write(wave, read(wave), mask)


@executes("prmt")
def permute_bytes(instruction: Instruction) -> Step:
    """Choose four of the eight bytes of two registers; bit 3 of a choice asks for the byte's sign instead."""
    target, *sources = instruction.operands
    if instruction.parts[1:] != ("b32",):
        raise unknown(instruction)
    readers, write = [reader(source, "b32") for source in sources], writer(target, "b32")

    def run(wave: Wave, mask: Mask) -> None:
        low, high, choice = (np.broadcast_to(read(wave), wave.lanes) for read in readers)
        found = np.stack([low, high], 1).view(np.uint8)
        result = np.zeros((wave.lanes, 4), np.uint8)
        for i in range(4):
            nibble = (choice >> np.uint32(4 * i)) & np.uint32(15)
            byte = np.take_along_axis(found, (nibble & np.uint32(7)).astype(np.int64)[:, None], 1)[:, 0]
            result[:, i] = np.where(nibble & 8, np.where(byte & 128, 255, 0), byte)
        write(wave, result.view(np.uint32)[:, 0], mask)

    return run


@executes("testp")
def test_number(instruction: Instruction) -> Step:
    """Tell whether numbers are finite, infinite, or numbers at all."""
    tests: dict[str, Callable[[Array], Array]] = {
        "finite": np.isfinite, "infinite": np.isinf, "notanumber": np.isnan, "number": lambda v: ~np.isnan(v),
    }  # fmt: skip
    test, kind = tests[instruction.parts[1]], instruction.parts[2]
    target, source = instruction.operands
    read, write = reader(source, kind), writer(target, "pred")
    return lambda wave, mask: write(wave, test(read(wave)), mask)
