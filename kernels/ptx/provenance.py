"""Which registers of a program hold floating-point numbers: the stores of compiled code say only how wide they are."""

from __future__ import annotations

from s3d_fast.kernels.ptx.decode import WITHOUT_RESULT, items, types
from s3d_fast.kernels.ptx.parse import Immediate, Instruction, Operand, Program, Register, Vector

# Instructions that copy registers, and the operands that they copy.
COPIES = {"mov": (1,), "selp": (1, 2), "shfl": (1,)}


def float_registers(program: Program) -> frozenset[int]:
    """Return the registers that hold float32 or float64 numbers and nothing else, from wherever they are written."""
    copied: dict[int, set[int]] = {}
    floats: set[int] = set()
    others: set[int] = set()
    for instruction in program.code:
        for index in _results(instruction):
            sources = _copied(instruction)
            if sources is not None:
                copied.setdefault(index, set()).update(sources)
            elif instruction.name not in COPIES and types(instruction)[:1] in (["f32"], ["f64"]):
                floats.add(index)
            else:
                others.add(index)
    return frozenset(_reached(floats, copied) - _reached(others, copied))


def _results(instruction: Instruction) -> list[int]:
    if instruction.name in WITHOUT_RESULT or not instruction.operands:
        return []
    return [item.index for item in items(instruction.operands[0]) if isinstance(item, Register)]


def _copied(instruction: Instruction) -> list[int] | None:
    """Return the registers that an instruction copies whole, None if it does something else; constants are no one's."""
    if instruction.name not in COPIES or (isinstance(instruction.operands[0], Vector) and instruction.name == "mov"):
        return None
    sources: list[Operand] = [instruction.operands[place] for place in COPIES[instruction.name]]
    if not all(isinstance(source, Register | Immediate) for source in sources):
        return None
    return [source.index for source in sources if isinstance(source, Register)]


def _reached(first: set[int], copied: dict[int, set[int]]) -> set[int]:
    """Return registers and all that copies of them reach."""
    reached, size = set(first), -1
    while len(reached) > size:
        size = len(reached)
        reached |= {index for index, sources in copied.items() if not sources.isdisjoint(reached)}
    return reached
