"""Instructions that move and convert numbers between registers, choose between them, or make predicates of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from s3d_fast.kernels.ptx.decode import Mask, Reader, Step, executes, items, reader, types, unknown, writer
from s3d_fast.kernels.ptx.parse import Instruction, Vector
from s3d_fast.kernels.ptx.values import UNSIGNED, Array, dtype, is_float, to_bfloat16, to_bits, width

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
    readers = [reader(operand, source) for operand in given]
    modifiers = set(instruction.parts[1:]) - {result, source}
    if not modifiers <= {"rn", "rna", "rz", "sat", "ftz", "relu", *ROUNDED} or "relu" in modifiers:
        raise unknown(instruction)
    if result.endswith("x2"):
        return _convert_pair(instruction, readers, result)
    rounding = next((ROUNDED[name] for name in modifiers if name in ROUNDED), None)
    write = writer(target, result)
    if (
        "rz" in modifiers
        or ("sat" in modifiers and not is_float(result))
        or (result == "tf32" and "rna" not in modifiers)
    ):
        raise unknown(instruction)

    def run(wave: Wave, mask: Mask) -> None:
        value = readers[0](wave)
        value = value if rounding is None else rounding(value)
        if is_float(source) and not is_float(result):
            value = _clipped(value, result)
        elif "sat" in modifiers:
            value = np.clip(np.nan_to_num(value, nan=0.0), 0, 1)
        elif not is_float(source) and not is_float(result):
            value = value.astype(dtype(result))
        write(wave, value, mask)

    return run


def _clipped(values: Array, kind: str) -> Array:
    """Return floating-point numbers as integers: beyond the range its ends, and zero for NaN."""
    limits = np.iinfo(dtype(kind))
    inside = np.nan_to_num(np.clip(values.astype(np.float64), float(limits.min), float(limits.max)), nan=0.0)
    # The largest 64-bit integer is no float64: 2^63 must not wrap.
    is_top = inside >= float(limits.max)
    return np.where(is_top, limits.max, np.where(is_top, 0.0, inside).astype(dtype(kind)))


def _convert_pair(instruction: Instruction, readers: list[Reader], result: str) -> Step:
    write = writer(instruction.operands[0], "b32")
    if len(readers) != 2 or types(instruction)[1] != "f32":
        raise unknown(instruction)

    def half(values: Array) -> Array:
        return to_bfloat16(values) if result == "bf16x2" else to_bits(values, "f16")

    def run(wave: Wave, mask: Mask) -> None:
        upper, lower = (half(read(wave)).astype(np.uint32) for read in readers)
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


@executes("shfl")
def shuffle(instruction: Instruction) -> Step:
    """Read a register of another thread of the warp; where there is no such thread, the own one."""
    _, _, mode, kind = instruction.parts
    target, source, offset, clamp, _ = instruction.operands
    write, *predicates = (writer(item, t) for item, t in zip(items(target), (kind, "pred"), strict=False))
    read, read_offset, read_clamp = reader(source, kind), reader(offset, "u32"), reader(clamp, "u32")

    def run(wave: Wave, mask: Mask) -> None:
        lane, by = wave.every_lane % 32, read_offset(wave).astype(np.int64) & 31
        limits = read_clamp(wave).astype(np.int64)
        segment = (limits >> 8) & 31
        highest = (lane & segment) | (limits & 31 & ~segment)
        chosen = {
            "idx": (lane & segment) | (by & ~segment), "bfly": lane ^ by, "down": lane + by, "up": lane - by,
        }[mode]  # fmt: skip
        exists = chosen >= highest if mode == "up" else chosen <= highest
        chosen = wave.every_lane - lane + np.where(exists, chosen, lane)
        if mask is not None and not mask[chosen[mask]].all():
            wave.find("shuffle from a thread that does not take part", mask)
        write(wave, np.broadcast_to(read(wave), wave.lanes)[chosen], mask)
        for write_exists in predicates:
            write_exists(wave, exists, mask)

    return run


REDUCED = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}  # fmt: skip


@executes("redux")
def reduce_warp(instruction: Instruction) -> Step:
    """Combine a register of all threads of a warp."""
    _, _, name, kind = instruction.parts
    target, source, _ = instruction.operands
    combine, read, write = REDUCED[name], reader(source, kind), writer(target, kind)

    def run(wave: Wave, mask: Mask) -> None:
        values = np.broadcast_to(read(wave), wave.lanes).reshape(-1, 32)
        write(wave, np.repeat(combine.reduce(values, axis=1, dtype=values.dtype), 32), mask)

    return run


@executes("vote")
def vote(instruction: Instruction) -> Step:
    """Combine a predicate of all threads of a warp: all, any, or one bit for each."""
    mode = instruction.parts[2]
    target, source, _ = instruction.operands
    read, write = reader(source, "pred"), writer(target, "b32" if mode == "ballot" else "pred")

    def run(wave: Wave, mask: Mask) -> None:
        votes = np.broadcast_to(read(wave), wave.lanes)
        votes = (votes if mask is None else votes & mask).reshape(-1, 32)
        if mode == "ballot":
            result = (votes.astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(1, dtype=np.uint32)
        else:
            result = {"all": votes.all, "any": votes.any}[mode](axis=1)
        write(wave, np.repeat(result, 32), mask)

    return run
