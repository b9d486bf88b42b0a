"""From instructions to functions that execute them: a table of opcodes, and access to operands by type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from s3d_fast.kernels.ptx.findings import Fault
from s3d_fast.kernels.ptx.parse import (
    SHARED,
    Address,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Program,
    Register,
    Special,
    Symbol,
    Vector,
)
from s3d_fast.kernels.ptx.values import UNSIGNED, Array, dtype, from_bfloat16, is_type, to_bits, width

if TYPE_CHECKING:
    from s3d_fast.kernels.ptx.wave import Wave

# The threads that execute an instruction; None means all.
Mask: TypeAlias = "Array | None"
Step: TypeAlias = Callable[["Wave", Mask], None]
Reader: TypeAlias = Callable[["Wave"], Array]
Writer: TypeAlias = Callable[["Wave", Array, Mask], None]

STEPS: dict[str, Callable[[Instruction], Step]] = {}
# Steps that change where threads are.
CONTROLS: dict[str, Callable[[Instruction, Program], Step]] = {}
# Opcodes whose first operand is not a register that they write.
WITHOUT_RESULT = frozenset(
    {"st", "red", "cp", "bar", "barrier", "fence", "membar", "bra", "brx", "ret", "exit", "stmatrix"}
)


@dataclass(frozen=True)
class Decoded:
    """An instruction, the registers it reads, and the function that executes it."""

    instruction: Instruction
    sources: frozenset[int]
    step: Step | None
    control: Step | None


def executes(*names: str) -> Callable[[Callable[[Instruction], Step]], Callable[[Instruction], Step]]:
    """Register a function that turns instructions of these names into steps."""

    def register(build: Callable[[Instruction], Step]) -> Callable[[Instruction], Step]:
        STEPS.update(dict.fromkeys(names, build))
        return build

    return register


def moves_threads(
    *names: str,
) -> Callable[[Callable[[Instruction, Program], Step]], Callable[[Instruction, Program], Step]]:
    """Register a function that turns instructions of these names into control steps."""

    def register(build: Callable[[Instruction, Program], Step]) -> Callable[[Instruction, Program], Step]:
        CONTROLS.update(dict.fromkeys(names, build))
        return build

    return register


def decode(program: Program) -> list[Decoded]:
    """Return the decoded instructions of a program.

    Raises:
        Fault: an instruction is not known, or not in this form.
    """
    return [_decode(instruction, program) for instruction in program.code]


def _decode(instruction: Instruction, program: Program) -> Decoded:
    # The forms of bar differ: bar.sync stops threads, bar.warp.sync does not.
    name = ".".join(instruction.parts[:2]) if instruction.name in ("bar", "barrier") else instruction.name
    try:
        if name in CONTROLS:
            return Decoded(instruction, _sources(instruction), None, CONTROLS[name](instruction, program))
        if name in STEPS:
            return Decoded(instruction, _sources(instruction), STEPS[name](instruction), None)
    except (Fault, KeyError, IndexError, AssertionError, ValueError) as error:
        raise unknown(instruction, program.name) from error
    raise unknown(instruction, program.name)


def unknown(instruction: Instruction, kernel: str = "") -> Fault:
    """Return the error for an instruction that the simulator does not know."""
    return Fault(f"{kernel}, PTX line {instruction.line}: unknown instruction {instruction.text}")


def _sources(instruction: Instruction) -> frozenset[int]:
    """Return the registers that an instruction reads; accumulators of wgmma are looked at where it is executed."""
    operands = instruction.operands if instruction.name in WITHOUT_RESULT else instruction.operands[1:]
    found = [instruction.guard] if instruction.guard is not None else []
    for operand in operands:
        for item in operand.items if isinstance(operand, Vector) else (operand,):
            item = item.base if isinstance(item, Address) else item
            item = item.register if isinstance(item, Negated) else item
            if isinstance(item, Register):
                found.append(item)
    return frozenset(register.index for register in found)


def types(instruction: Instruction) -> list[str]:
    """Return the types in an opcode, in their order."""
    return [part for part in instruction.parts if is_type(part)]


def reader(operand: Operand, kind: str) -> Reader:
    """Return a function that reads an operand as numbers of a type; bfloat16 comes as float32.

    Raises:
        Fault: the operand is not of this type. Pairs of 16-bit numbers are read as bits: see `halves`.
    """
    if kind.endswith("x2"):
        raise Fault(f"{kind} is not one number")
    if kind == "bf16":
        bits = reader(operand, "b16")
        return lambda wave: from_bfloat16(bits(wave))
    wanted = dtype(kind)
    if isinstance(operand, Register):
        index = operand.index
        if operand.bits == width(kind):
            return lambda wave: wave.registers[index].view(wanted)
        narrow = UNSIGNED[width(kind)]
        if operand.bits < width(kind):
            raise Fault(f"{operand.name} has {operand.bits} bits, and {kind} is wanted")
        return lambda wave: wave.registers[index].astype(narrow).view(wanted)
    if isinstance(operand, Negated):
        index = operand.register.index
        return lambda wave: ~wave.registers[index]
    if isinstance(operand, Immediate):
        constant = immediate(operand.text, kind)
        return lambda wave: constant
    if isinstance(operand, Special):
        return lambda wave: wave.special_value(operand).astype(UNSIGNED[width(kind)]).view(wanted)
    if isinstance(operand, Symbol):
        name = operand.name
        if name == SHARED:
            # Shared memory begins at address 0 of its own space.
            zero = np.zeros((), wanted)
            return lambda wave: zero
        return lambda wave: np.array(wave.memory.address_of_constant(name), wanted)
    raise Fault(f"an operand is {operand}")


def immediate(text: str, kind: str) -> Array:
    """Return a constant of the code as a number of a type."""
    if kind == "pred":
        return np.array(int(text) != 0)
    if text[:2].lower() in ("0f", "0d"):
        bits, value = (32, int(text[2:], 16)) if text[1] in "fF" else (64, int(text[2:], 16))
        if bits != width(kind):
            raise Fault(f"{text} is not a {kind}")
    elif "." in text:
        return np.array(float(text), dtype(kind))
    else:
        value = int(text.rstrip("U"), 0) & ((1 << width(kind)) - 1)
    return np.array(value, UNSIGNED[width(kind)]).view(dtype(kind))


def writer(operand: Operand, kind: str) -> Writer:
    """Return a function that writes numbers of a type; signed integers fill a wider register with their sign."""
    if isinstance(operand, Symbol) and operand.name == "_":
        return lambda wave, values, mask: None
    if not isinstance(operand, Register):
        raise Fault(f"a result is {operand}")
    index, bits = operand.index, operand.bits
    if bits < width(kind):
        raise Fault(f"{operand.name} has {bits} bits, and the result is {kind}")
    if bits > width(kind):
        wide = f"{'s' if kind[0] == 's' else 'u'}{bits}"
        fill: Any = dtype(kind) if kind[0] in "su" else UNSIGNED[width(kind)]
        return lambda wave, values, mask: wave.set(
            index, _full(wave, to_bits(to_bits(values, kind).view(fill).astype(dtype(wide)), wide)), mask
        )
    return lambda wave, values, mask: wave.set(index, _full(wave, to_bits(values, kind)), mask)


def _full(wave: Wave, bits: Array) -> Array:
    # A constant has one entry; a wave has at least 32 lanes.
    return bits if bits.size > 1 else np.full(wave.lanes, bits.reshape(()))


def items(operand: Operand) -> tuple[Any, ...]:
    """Return the parts of a vector, or a scalar as its only part."""
    return operand.items if isinstance(operand, Vector) else (operand,)


def address_reader(operand: Operand) -> Reader:
    """Return a function that gives the addresses of a memory operand, as int64."""
    if not isinstance(operand, Address):
        raise Fault(f"an address is {operand}")
    offset, base = operand.offset, operand.base
    kind = f"u{base.bits}" if isinstance(base, Register) else "u64"
    read = reader(base, kind)
    return lambda wave: _full(wave, read(wave).astype(np.int64) + offset)
