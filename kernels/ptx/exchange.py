"""Instructions in which the threads of a warp take part together: shuffles, reductions, votes, and `bar.warp.sync`.

All threads of a warp that have not returned must execute them, and their mask must name all: others are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from s3d_fast.kernels.ptx.decode import Mask, Step, executes, items, reader, unknown, writer
from s3d_fast.kernels.ptx.parse import Instruction, Operand
from s3d_fast.kernels.ptx.values import Array

if TYPE_CHECKING:
    from s3d_fast.kernels.ptx.wave import Wave

WARP = 32
EVERYBODY = np.uint32(0xFFFFFFFF)


def _members(operand: Operand) -> Callable[[Wave, Mask], None]:
    """Return a function that requires that the mask of an instruction names all threads."""
    read = reader(operand, "u32")

    def require_everybody(wave: Wave, mask: Mask) -> None:
        chosen = wave.chosen(mask)
        if (bad := np.broadcast_to(read(wave), wave.lanes)[chosen] != EVERYBODY).any():
            raise wave.fault("the mask does not name all threads of the warp", int(chosen[np.argmax(bad)]))

    return require_everybody


@executes("bar.warp")
def warp_barrier(instruction: Instruction) -> Step:
    """Order the accesses of the threads of each warp."""
    (members,) = instruction.operands
    if instruction.parts != ("bar", "warp", "sync"):
        raise unknown(instruction)
    require_everybody = _members(members)

    def run(wave: Wave, mask: Mask) -> None:
        require_everybody(wave, mask)
        wave.stamps.sync_warps(mask)

    return run


# The thread to read from, by the own place in the warp, the offset, and the mask of segments.
SOURCES: dict[str, Callable[[Array, Array, Array], Array]] = {
    "idx": lambda lane, by, segment: (lane & segment) | (by & ~segment),
    "bfly": lambda lane, by, segment: lane ^ by,
    "down": lambda lane, by, segment: lane + by,
    "up": lambda lane, by, segment: lane - by,
}


@executes("shfl")
def shuffle(instruction: Instruction) -> Step:
    """Read a register of another thread of the warp; where there is no such thread, the own one."""
    _, form, mode, kind = instruction.parts
    target, source, offset, clamp, members = instruction.operands
    if (form, kind) != ("sync", "b32"):
        raise unknown(instruction)
    write, *predicates = (writer(item, t) for item, t in zip(items(target), (kind, "pred"), strict=False))
    read, read_offset, read_clamp = reader(source, kind), reader(offset, "u32"), reader(clamp, "u32")
    source_of, require_everybody = SOURCES[mode], _members(members)

    def run(wave: Wave, mask: Mask) -> None:
        require_everybody(wave, mask)
        lane, by = wave.every_lane % WARP, read_offset(wave).astype(np.int64) & 31
        limits = read_clamp(wave).astype(np.int64)
        segment = (limits >> 8) & 31
        highest = (lane & segment) | (limits & 31 & ~segment)
        chosen = source_of(lane, by, segment)
        exists = chosen >= highest if mode == "up" else chosen <= highest
        chosen = wave.every_lane - lane + np.where(exists, chosen, lane)
        if mask is not None and not mask[chosen[mask]].all():
            wave.find("shuffle from a thread that does not take part", mask)
        write(wave, np.broadcast_to(read(wave), wave.lanes)[chosen], mask)
        for write_exists in predicates:
            write_exists(wave, exists, mask)

    return run


# How to combine two numbers, and the number that changes nothing.
REDUCED: dict[str, tuple[np.ufunc, Callable[[np.dtype], int]]] = {
    "add": (np.add, lambda kind: 0),
    "min": (np.minimum, lambda kind: int(np.iinfo(kind).max)),
    "max": (np.maximum, lambda kind: int(np.iinfo(kind).min)),
    "and": (np.bitwise_and, lambda kind: int(np.iinfo(kind).max)),
    "or": (np.bitwise_or, lambda kind: 0),
    "xor": (np.bitwise_xor, lambda kind: 0),
}


@executes("redux")
def reduce_warp(instruction: Instruction) -> Step:
    """Combine a register of all threads of a warp."""
    _, form, name, kind = instruction.parts
    target, source, members = instruction.operands
    if form != "sync" or kind not in (("b32",) if name in ("and", "or", "xor") else ("s32", "u32")):
        raise unknown(instruction)
    (combine, neutral), read, write = REDUCED[name], reader(source, kind), writer(target, kind)
    require_everybody = _members(members)

    def run(wave: Wave, mask: Mask) -> None:
        require_everybody(wave, mask)
        values = np.broadcast_to(read(wave), wave.lanes)
        # Threads that have returned do not count.
        values = values if mask is None else np.where(mask, values, values.dtype.type(neutral(values.dtype)))
        write(wave, np.repeat(combine.reduce(values.reshape(-1, WARP), axis=1, dtype=values.dtype), WARP), mask)

    return run


@executes("vote")
def vote(instruction: Instruction) -> Step:
    """Combine a predicate of all threads of a warp: all, any, or one bit for each."""
    _, form, mode, kind = instruction.parts
    target, source, members = instruction.operands
    if form != "sync" or (mode, kind) not in (("all", "pred"), ("any", "pred"), ("ballot", "b32")):
        raise unknown(instruction)
    read, write, require_everybody = reader(source, "pred"), writer(target, kind), _members(members)

    def run(wave: Wave, mask: Mask) -> None:
        require_everybody(wave, mask)
        votes = np.broadcast_to(read(wave), wave.lanes)
        if mask is not None:
            # Threads that have returned do not count.
            votes = votes | ~mask if mode == "all" else votes & mask
        votes = votes.reshape(-1, WARP)
        if mode == "ballot":
            result = (votes.astype(np.uint32) << np.arange(WARP, dtype=np.uint32)).sum(1, dtype=np.uint32)
        else:
            result = votes.all(1) if mode == "all" else votes.any(1)
        write(wave, np.repeat(result, WARP), mask)

    return run
