"""Branches, returns, and barriers of a program."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from s3d_fast.kernels.ptx.decode import Control, Mask, Step, executes, moves_warps, reader, unknown
from s3d_fast.kernels.ptx.parse import Immediate, Instruction, Program, Symbol
from s3d_fast.kernels.ptx.values import Array

if TYPE_CHECKING:
    from s3d_fast.kernels.ptx.wave import Wave

WARP = 32
# The place of warps that have returned.
DONE = 1 << 40


@moves_warps("bra")
def bra(instruction: Instruction, program: Program) -> Control:
    """Go to a label, where the guard holds; it must hold for all threads of a warp or for none."""
    (target,) = instruction.operands
    assert isinstance(target, Symbol)
    goal = program.labels[target.name]

    def run(wave: Wave, mask: Mask, group: Array) -> None:
        wave.pc[_whole_warps(wave, mask, group)] = goal

    return run


@moves_warps("brx")
def brx(instruction: Instruction, program: Program) -> Control:
    """Go to one of several labels, by an index."""
    index, table = instruction.operands
    assert isinstance(table, Symbol)
    goals = np.array([program.labels[name] for name in program.tables[table.name]])
    read = reader(index, "u32")

    def run(wave: Wave, mask: Mask, group: Array) -> None:
        warps = _whole_warps(wave, mask, group)
        chosen = np.broadcast_to(read(wave), wave.lanes).reshape(-1, WARP)
        if (chosen[warps] != chosen[warps, :1]).any():
            raise wave.fault("threads of one warp branch to different places")
        if (chosen[warps] >= len(goals)).any():
            raise wave.fault("an indexed branch leaves its table")
        wave.pc[warps] = goals[chosen[warps, 0]]

    return run


@moves_warps("ret", "exit")
def ret(instruction: Instruction, program: Program) -> Control:
    """End warps."""

    def run(wave: Wave, mask: Mask, group: Array) -> None:
        wave.pc[_whole_warps(wave, mask, group)] = DONE
        _release(wave)

    return run


@moves_warps("bar.sync", "barrier.sync", "bar.cta", "barrier.cta")
def barrier(instruction: Instruction, program: Program) -> Control:
    """Wait until all warps of the program are here."""
    name, *count = instruction.operands
    assert isinstance(name, Immediate)
    number = int(name.text, 0)
    if count and count != [Immediate(str(program.threads))]:
        # A barrier of some warps would order only these.
        raise unknown(instruction)

    def run(wave: Wave, mask: Mask, group: Array) -> None:
        wave.barrier[_whole_warps(wave, mask, group)] = number
        _release(wave)

    return run


@executes("bar.warp")
def warp_barrier(instruction: Instruction) -> Step:
    """Order the accesses of the threads of each warp."""
    return lambda wave, mask: wave.stamps.sync_warps(mask)


def _whole_warps(wave: Wave, mask: Mask, group: Array) -> Array:
    """Return the warps of a group all of whose threads are in the mask; it is an error if only some are."""
    if mask is None:
        return group
    lanes = mask.reshape(-1, WARP)
    chosen = lanes.all(1)
    if (chosen != lanes.any(1)).any():
        raise wave.fault("threads of one warp branch differently", int(np.argmax(lanes.any(1) & ~chosen)) * WARP)
    return chosen


def _release(wave: Wave) -> None:
    """Let programs go on all of whose warps wait or have returned."""
    by_program = wave.barrier.reshape(len(wave.places), -1)
    is_done = wave.pc.reshape(len(wave.places), -1) == DONE
    ready = ((by_program >= 0) | is_done).all(1) & (by_program >= 0).any(1)
    if not ready.any():
        return
    numbers = np.where(is_done, by_program.max(1, keepdims=True), by_program)[ready]
    if (numbers != numbers[:, :1]).any():
        raise wave.fault("warps wait at different barriers")
    by_program[ready] = -1
    wave.stamps.new_epoch(ready)
