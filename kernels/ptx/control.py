"""Branches, returns, and barriers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from s3d_fast.kernels.ptx.decode import Mask, Step, moves_threads, reader, unknown
from s3d_fast.kernels.ptx.parse import Immediate, Instruction, Program, Symbol

if TYPE_CHECKING:
    from s3d_fast.kernels.ptx.wave import Wave

WARP = 32
# The place of threads that have returned.
DONE = 1 << 40


@moves_threads("bra")
def bra(instruction: Instruction, program: Program) -> Step:
    """Go to a label, where the guard holds."""
    (target,) = instruction.operands
    assert isinstance(target, Symbol)
    goal = program.labels[target.name]

    def run(wave: Wave, mask: Mask) -> None:
        wave.pc[wave.chosen(mask)] = goal

    return run


@moves_threads("brx")
def brx(instruction: Instruction, program: Program) -> Step:
    """Go to one of several labels, by an index."""
    index, table = instruction.operands
    assert isinstance(table, Symbol)
    goals = np.array([program.labels[name] for name in program.tables[table.name]])
    read = reader(index, "u32")

    def run(wave: Wave, mask: Mask) -> None:
        chosen = wave.chosen(mask)
        number = np.broadcast_to(read(wave), wave.lanes)[chosen]
        if (bad := number >= len(goals)).any():
            raise wave.fault("an indexed branch leaves its table", int(chosen[np.argmax(bad)]))
        wave.pc[chosen] = goals[number]

    return run


@moves_threads("ret", "exit")
def ret(instruction: Instruction, program: Program) -> Step:
    """End threads."""

    def run(wave: Wave, mask: Mask) -> None:
        wave.pc[wave.chosen(mask)] = DONE
        _release(wave)

    return run


@moves_threads("bar.sync", "barrier.sync", "bar.cta", "barrier.cta")
def barrier(instruction: Instruction, program: Program) -> Step:
    """Wait until all threads of the program are here."""
    name, *count = instruction.operands
    assert isinstance(name, Immediate)
    number = int(name.text, 0)
    # Who only arrives does not wait. A barrier of some warps would order only these.
    is_known = set(instruction.parts[1:]) <= {"cta", "sync", "aligned"} and "sync" in instruction.parts
    if not is_known or (count and count != [Immediate(str(program.threads))]):
        raise unknown(instruction)

    def run(wave: Wave, mask: Mask) -> None:
        wave.barrier[wave.chosen(mask)] = number
        _release(wave)

    return run


def _release(wave: Wave) -> None:
    """Let programs go on all of whose threads wait or have returned."""
    by_program = wave.barrier.reshape(len(wave.places), -1)
    is_done = wave.pc.reshape(len(wave.places), -1) == DONE
    ready = ((by_program >= 0) | is_done).all(1) & (by_program >= 0).any(1)
    if not ready.any():
        return
    numbers = np.where(is_done, by_program.max(1, keepdims=True), by_program)[ready]
    if (numbers != numbers[:, :1]).any():
        raise wave.fault("threads wait at different barriers")
    by_program[ready] = -1
    wave.stamps.new_epoch(ready)
