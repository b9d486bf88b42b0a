"""Asynchronous copies from global to shared memory: cp.async, its groups, and waiting for them.

A copy reads at once and writes when its thread waits for it. Until then nobody may read or write its target, which
holds NaN, nor write its source. Every thread has groups of its own. A wait lets only the waiting thread see what it has
copied; the others need a barrier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from s3d_fast.kernels.ptx.decode import Mask, Step, address_reader, executes, reader, unknown
from s3d_fast.kernels.ptx.parse import Immediate, Instruction
from s3d_fast.kernels.ptx.values import Array

if TYPE_CHECKING:
    from s3d_fast.kernels.ptx.wave import Wave

# Hints that change nothing.
PREFETCHES = {"L2:64B", "L2:128B", "L2:256B"}


@dataclass
class Copy:
    """What one instruction copies: the lanes that do, to where, and in which of their groups."""

    lanes: Array
    places: Array
    values: Array  # (lanes, size), bytes
    sources: Array  # (lanes, k), the cells of global memory that are read
    group: Array

    def part(self, lanes: Array) -> Copy:
        """Return the copies of some lanes, given by a mask of these."""
        own = self.lanes, self.places, self.values, self.sources, self.group
        return Copy(*(array[lanes] for array in own))


class Copies:
    """The copies under way."""

    def __init__(self, lanes: int) -> None:
        self.pending: list[Copy] = []
        self.closed = np.zeros(lanes, np.int64)  # the groups that each lane has closed

    def start(self, wave: Wave, targets: Array, values: Array, sources: Array, mask: Mask) -> None:
        """Begin to copy bytes (lanes, size), read from cells of global memory, to addresses in shared memory."""
        shared, chosen, size = wave.shared, wave.chosen(mask), values.shape[1]
        places = shared.places(wave, targets, size, chosen)
        shared.note_write(wave, places, size, chosen)
        shared.count_passes(wave, targets, size, mask)
        shared.copies[shared.cells(places, size)] += 1
        shared.data[places[:, None] + np.arange(size)] = 0xFF
        self.pending.append(Copy(chosen, places, values[chosen], sources[chosen], self.closed[chosen]))

    def close(self, lanes: Array) -> None:
        """End the group that lanes have begun."""
        self.closed[lanes] += 1

    def wait(self, wave: Wave, mask: Mask, left: int) -> None:
        """Let all but the last `left` groups of these lanes arrive."""
        still = []
        for copy in self.pending:
            arrives = copy.group < self.closed[copy.lanes] - left
            if mask is not None:
                arrives &= mask[copy.lanes]
            if arrives.any():
                self._arrive(wave, copy if arrives.all() else copy.part(arrives))
            if not arrives.all():
                still.append(copy.part(~arrives))
        self.pending = still

    @staticmethod
    def _arrive(wave: Wave, copy: Copy) -> None:
        shared, size = wave.shared, copy.values.shape[1]
        cells = shared.cells(copy.places, size)
        shared.copies[cells] -= 1
        wave.memory.end_copy(copy.sources)
        shared.data[copy.places[:, None] + np.arange(size)] = copy.values
        shared.is_written[cells] = True
        shared.unfenced[cells] = copy.lanes[:, None]
        # The write is done now, not when it was begun.
        shared.hazards.wrote[cells] = wave.stamps.value[copy.lanes][:, None]


@executes("cp")
def copy(instruction: Instruction) -> Step:
    """Begin a copy, close a group of copies, or wait for groups."""
    if instruction.parts[1] != "async":
        raise unknown(instruction)
    form = instruction.parts[2]
    if form == "commit_group":
        return lambda wave, mask: wave.copies.close(wave.chosen(mask))
    if form == "wait_all":
        return lambda wave, mask: wave.copies.wait(wave, mask, -1)
    if form == "wait_group":
        (number,) = instruction.operands
        assert isinstance(number, Immediate)
        left = int(number.text, 0)
        return lambda wave, mask: wave.copies.wait(wave, mask, left)
    if form in ("ca", "cg"):
        return _begin(instruction)
    raise unknown(instruction)


def _begin(instruction: Instruction) -> Step:
    target, source, length, *given = instruction.operands
    assert isinstance(length, Immediate)
    # A policy of the cache would be one more operand.
    if not set(instruction.parts[3:]) <= {"shared", "shared:cta", "global"} | PREFETCHES or len(given) > 1:
        raise unknown(instruction)
    size = int(length.text, 0)
    to, at = address_reader(target), address_reader(source)
    read_given = reader(given[0], "u32") if given else None

    def run(wave: Wave, mask: Mask) -> None:
        values = np.zeros((wave.lanes, size), np.uint8)
        wanted = np.ones(wave.lanes, bool) if mask is None else mask
        if read_given is not None:
            # Bytes beyond those that are given become zero; Triton gives all or none.
            amount = np.broadcast_to(read_given(wave), wave.lanes)
            if (wanted & (amount != 0) & (amount != size)).any():
                raise wave.fault("cp.async of a part of its bytes")
            wanted = wanted & (amount != 0)
        if wanted.any():
            bits = min(size * 8, 64)
            values = wave.memory.load(wave, at(wave), bits, size * 8 // bits, wanted).view(np.uint8)
        sources = wave.memory.begin_copy(wave, at(wave), size, wanted)
        wave.copies.start(wave, to(wave), values, sources, mask)

    return run
