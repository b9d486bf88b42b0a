"""Instructions that move data between registers and memory: loads, stores, atomic additions, and 8 x 8 matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from s3d_fast.kernels.ptx.decode import Mask, Step, address_reader, executes, items, reader, types, unknown, writer
from s3d_fast.kernels.ptx.parse import Address, Instruction, Register, Symbol
from s3d_fast.kernels.ptx.values import Array, dtype, width

if TYPE_CHECKING:
    from s3d_fast.kernels.ptx.wave import Wave

WARP = 32
# What the opcode of an atomic addition may contain besides its name and type.
ADDITIONS = frozenset(
    {"global", "add", "gpu", "sys", "relaxed", "acquire", "release", "acq_rel", "noftz", "v2", "v4", "v8"}
)


def _space(instruction: Instruction) -> str:
    space = instruction.parts[1].split(":")[0]
    if space not in ("global", "shared"):
        raise unknown(instruction)
    return space


@executes("ld")
def load(instruction: Instruction) -> Step:
    """Load a parameter, or one to four numbers per thread."""
    target, source = instruction.operands
    (kind,) = types(instruction)
    if instruction.parts[1] == "param":
        return _load_parameter(instruction, kind)
    space, read = _space(instruction), address_reader(source)
    # A vector has no sign: its entries fill registers of their own width.
    writers = [writer(item, kind) for item in items(target)]

    def run(wave: Wave, mask: Mask) -> None:
        memory = wave.shared if space == "shared" else wave.memory
        found = memory.load(wave, read(wave), width(kind), len(writers), mask)
        for i, write in enumerate(writers):
            write(wave, np.ascontiguousarray(found[:, i]).view(dtype(kind)), mask)

    return run


def _load_parameter(instruction: Instruction, kind: str) -> Step:
    target, source = instruction.operands
    assert isinstance(source, Address)
    assert isinstance(source.base, Symbol)
    name, write = source.base.name, writer(target, kind)
    first, size = source.offset, width(kind) // 8

    def run(wave: Wave, mask: Mask) -> None:
        found = wave.parameters.get(name, b"")
        if first < 0 or first + size > len(found):
            raise wave.fault(f"load of {size} bytes at {first} of a parameter of {len(found)}")
        write(wave, np.frombuffer(found[first : first + size], dtype(kind)).reshape(()), mask)

    return run


@executes("st")
def store(instruction: Instruction) -> Step:
    """Store one to four numbers per thread."""
    target, source = instruction.operands
    (kind,) = types(instruction)
    space, read = _space(instruction), address_reader(target)
    readers = [reader(item, f"b{width(kind)}") for item in items(source)]
    stored = {item.index if isinstance(item, Register) else None for item in items(source)}

    def run(wave: Wave, mask: Mask) -> None:
        memory = wave.shared if space == "shared" else wave.memory
        values = np.stack([np.broadcast_to(read_value(wave), wave.lanes) for read_value in readers], 1)
        memory.store(wave, read(wave), values, mask, stored <= wave.program.floats)

    return run


@executes("atom", "red")
def add_atomically(instruction: Instruction) -> Step:
    """Add to global memory; atom also returns what was there before."""
    *target, place, source = instruction.operands
    (kind,) = types(instruction)
    # Additions of the scope .cta are not atomic for other programs.
    if not {"global", "add"} <= set(instruction.parts[1:]) <= ADDITIONS | {kind}:
        raise unknown(instruction)
    if kind.startswith("bf16"):
        # Memory has no numbers of this type.
        raise unknown(instruction)
    is_pair = kind == "f16x2"
    stored = "b32" if is_pair else kind
    read, readers = address_reader(place), [reader(item, stored) for item in items(source)]
    writers = [writer(item, stored) for item in items(target[0])] if target else []

    def run(wave: Wave, mask: Mask) -> None:
        values = np.stack([np.broadcast_to(read_value(wave), wave.lanes) for read_value in readers], 1)
        before = wave.memory.add(wave, read(wave), values.view(np.float16) if is_pair else values, mask)
        before = before.view(values.dtype)
        for i, write in enumerate(writers):
            write(wave, np.ascontiguousarray(before[:, i]), mask)

    return run


@executes("ldmatrix")
def load_matrices(instruction: Instruction) -> Step:
    """Load 1, 2 or 4 matrices of 8 rows of 16 bytes per warp; thread 8 i + j gives the address of row j of matrix i."""
    target, source = instruction.operands
    writers, is_transposed = _matrices(instruction, items(target))
    read = address_reader(source)

    def run(wave: Wave, mask: Mask) -> None:
        rows = _rows(wave, mask, len(writers))
        found = wave.shared.load(wave, read(wave), 64, 2, rows).reshape(-1, WARP, 2)
        for i, write in enumerate(writers):
            matrices = np.ascontiguousarray(found[:, 8 * i : 8 * i + 8]).view(np.uint16).reshape(-1, 8, 8)
            matrices = matrices.transpose(0, 2, 1) if is_transposed else matrices
            write(wave, np.ascontiguousarray(matrices).view(np.uint32).reshape(-1), mask)

    return run


@executes("stmatrix")
def store_matrices(instruction: Instruction) -> Step:
    """Store 1, 2 or 4 matrices per warp: the inverse of ldmatrix."""
    target, source = instruction.operands
    sources, is_transposed = items(source), "trans" in instruction.parts
    _matrices(instruction, sources)
    read, readers = address_reader(target), [reader(item, "b32") for item in sources]

    def run(wave: Wave, mask: Mask) -> None:
        values = np.zeros((wave.warps, WARP, 2), np.uint64)
        for i, read_value in enumerate(readers):
            matrices = np.ascontiguousarray(read_value(wave)).view(np.uint16).reshape(-1, 8, 8)
            matrices = matrices.transpose(0, 2, 1) if is_transposed else matrices
            values[:, 8 * i : 8 * i + 8] = np.ascontiguousarray(matrices).view(np.uint64)
        wave.shared.store(wave, read(wave), values.reshape(-1, 2), _rows(wave, mask, len(readers)))

    return run


def _matrices(instruction: Instruction, registers: tuple) -> tuple[list, bool]:
    (number,) = (part for part in instruction.parts if part in ("x1", "x2", "x4"))
    if "m8n8" not in instruction.parts or "b16" not in instruction.parts or int(number[1:]) != len(registers):
        raise unknown(instruction)
    return [writer(item, "b32") for item in registers], "trans" in instruction.parts


def _rows(wave: Wave, mask: Mask, matrices: int) -> Array:
    """Return the threads that give addresses."""
    giving = wave.every_lane % WARP < 8 * matrices
    return giving if mask is None else giving & mask
