"""Execute one program of a kernel in outline, without data: is shared memory used in order?

Addresses in shared memory and the descriptors of products come from the thread's number and from the launch's numbers,
not from data. So the simulator can follow them without tensors: loads give zeros, and what depends on them is unknown.
Where a branch depends on data, one run takes it and another does not. Loops are left after a few passes: by then every
slot of their buffers has been read and overwritten.

This takes a fraction of a second, and covers what the order of instructions decides: races in shared memory (copies and
products under way included), reads of what nothing has written, and missing fences and waits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from s3d_fast.kernels.ptx.decode import WITHOUT_RESULT, Decoded, Mask, items
from s3d_fast.kernels.ptx.execute import LARGEST_ACCESS, decoded, parameter_bytes, smallest_access
from s3d_fast.kernels.ptx.findings import Finding
from s3d_fast.kernels.ptx.parse import Instruction, Register, Symbol
from s3d_fast.kernels.ptx.shared import SharedMemory
from s3d_fast.kernels.ptx.tensors import GlobalMemory
from s3d_fast.kernels.ptx.values import UNSIGNED, Array
from s3d_fast.kernels.ptx.wave import Tally, Wave

# More than twice the slots of any buffer, plus the passes that copies are ahead.
PASSES = 10
# Every run takes a side of a branch that none has taken before.
MOST_RUNS = 64
# Instructions whose result is data.
GIVE_DATA = frozenset({"ldmatrix", "atom", "mma", "wgmma"})


def outline(ptx: str, arguments: Sequence[int | float], grid: Sequence[int], shared_memory: int) -> list[Finding]:
    """Return what is wrong with the use of shared memory in the first program of a launch.

    Args:
        ptx: a PTX file with one entry.
        arguments: the parameters of the kernel, in order; any numbers for addresses.
        grid: the number of programs along up to three axes.
        shared_memory: bytes for each program.

    Raises:
        Fault: an unknown instruction, or an access outside of shared memory or misaligned.
    """
    program, code = decoded(ptx)
    x, y, z = (*grid, 1, 1, 1)[:3]
    tally, sides = Tally(np.zeros(len(code), np.int64)), _Sides()
    with np.errstate(all="ignore"):
        for _ in range(MOST_RUNS):
            shared = SharedMemory(1, shared_memory, smallest_access(program, "shared"))
            parameters = parameter_bytes(program, arguments)
            memory = _NoData([], program.constants, LARGEST_ACCESS)
            _OutlineWave(sides, program, code, 0, [(0, 0, 0)], (x, y, z), parameters, memory, shared, tally).run()
            if not sides.has_new():
                break
    found = [finding for finding in tally.findings.values() if not finding.is_ambiguous]
    unreached = [own.instruction for own, times in zip(code, tally.executed, strict=True) if not times]
    return found + [
        Finding("not reached in outline", program.name, own.line, own.text, (0, 0, 0), 0)
        for own in unreached
        if _uses_shared_memory(own)
    ]


class _Sides:
    """Which ways branches that depend on data have gone, by place in the program."""

    def __init__(self) -> None:
        self.gone: defaultdict[int, set[int]] = defaultdict(set)
        self._known = 0

    def next(self, pc: int, ways: int) -> int:
        """Return a way that was not gone before, the first one if there is none."""
        way = next((way for way in range(ways) if way not in self.gone[pc]), 0)
        self.gone[pc].add(way)
        return way

    def has_new(self) -> bool:
        """Return whether a way was gone since the last call that was not gone before."""
        before, self._known = self._known, sum(map(len, self.gone.values()))
        return self._known > before


class _NoData(GlobalMemory):
    """Global memory without contents."""

    def load(self, wave: Wave, addresses: Array, bits: int, count: int, mask: Mask) -> Array:
        """Return zeros."""
        return np.zeros((wave.lanes, count), UNSIGNED[bits])

    def store(self, wave: Wave, addresses: Array, values: Array, mask: Mask, are_floats: bool) -> None:
        """Do nothing."""

    def add(self, wave: Wave, addresses: Array, values: Array, mask: Mask) -> Array:
        """Return zeros, as what was there before."""
        return np.zeros_like(values)


class _OutlineWave(Wave):
    """One program, some of whose registers are unknown."""

    def __init__(self, sides: _Sides, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.sides = sides
        self.unknown: set[int] = set()
        self.passes: Counter[tuple[int, int]] = Counter()  # of the loop from a place to a branch

    def step(self, decoded: Decoded, mask: Mask) -> None:
        """Execute an instruction, and note whether its results are known; products need not be computed."""
        instruction = decoded.instruction
        results = _results(instruction)
        if instruction.name == "mma":
            for index in results:
                self.set(index, self.registers[index], mask)
        else:
            super().step(decoded, mask)
        if _gives_data(instruction) or not decoded.sources.isdisjoint(self.unknown):
            self.unknown.update(results)
        elif mask is None:
            self.unknown.difference_update(results)

    def moving(self, pc: int, decoded: Decoded, mask: Mask) -> Mask:
        """Return which threads take a branch: all or none if it depends on data, none at the end of the last pass."""
        instruction = decoded.instruction
        if instruction.name not in ("bra", "brx"):
            return mask
        is_known = decoded.sources.isdisjoint(self.unknown)
        everyone, nobody = self.pc == pc + 1, np.zeros(self.lanes, bool)
        *_, target = instruction.operands
        assert isinstance(target, Symbol)
        if instruction.name == "brx":
            if is_known:
                return mask
            goals = [self.program.labels[name] for name in self.program.tables[target.name]]
            self.pc[everyone] = goals[self.sides.next(pc, len(goals))]
            return nobody
        goal = self.program.labels[target.name]
        if goal <= pc:
            return self._repeating((goal, pc), is_known, mask, instruction.guard is not None)
        if instruction.guard is None:
            return mask
        ended = [loop for loop in self.passes if self.passes[loop] >= PASSES and loop[0] <= pc <= loop[1] < goal]
        for loop in ended:
            self.passes[loop] = 0
        if is_known and not ended:
            return mask
        return everyone if ended or self.sides.next(pc, 2) else nobody

    def _repeating(self, loop: tuple[int, int], is_known: bool, mask: Mask, can_leave: bool) -> Mask:
        """Return which threads go back to the start of a loop; if it cannot be left here, a later branch leaves it."""
        everyone, nobody = self.pc == loop[1] + 1, np.zeros(self.lanes, bool)
        self.passes[loop] += 1
        if can_leave and (self.passes[loop] >= PASSES or (is_known and mask is not None and not mask.any())):
            self.passes[loop] = 0
            return nobody
        return mask if is_known else everyone


def _results(instruction: Instruction) -> list[int]:
    if instruction.name in WITHOUT_RESULT or not instruction.operands:
        return []
    return [item.index for item in items(instruction.operands[0]) if isinstance(item, Register)]


def _uses_shared_memory(instruction: Instruction) -> bool:
    kinds = ("cp", "wgmma", "ldmatrix", "stmatrix", "bar", "barrier")
    return instruction.name in kinds or any(part.startswith("shared") for part in instruction.parts)


def _gives_data(instruction: Instruction) -> bool:
    return instruction.name in GIVE_DATA or (instruction.name == "ld" and instruction.parts[1] != "param")
