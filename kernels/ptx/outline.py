"""Execute one program of a kernel in outline, without data: is shared memory used in order?

Addresses in shared memory and the descriptors of products come from the thread's number and from the launch's numbers,
not from data. So the simulator can follow them without tensors: loads give zeros, and what depends on them is unknown.
Where a branch depends on data, all threads go one way, and other runs go others. Loops are left after a few passes: by
then every slot of their buffers has been read and overwritten.

This takes a fraction of a second, and covers what the order of instructions decides: races in shared memory (copies and
products under way included), reads of what nothing has written, and missing fences and waits. It does not see what is
wrong with data only: threads of a program that part at a branch on data, or that write different data to one place.
What it could not judge is reported: instructions that no run reached, ways of a branch that no run went, and uses of
shared memory that data decide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import numpy as np

from s3d_fast.kernels.ptx.decode import WITHOUT_RESULT, Decoded, Mask, items
from s3d_fast.kernels.ptx.execute import LARGEST_ACCESS, decoded, parameter_bytes, smallest_access
from s3d_fast.kernels.ptx.findings import Finding
from s3d_fast.kernels.ptx.parse import Address, Instruction, Program, Register, Symbol
from s3d_fast.kernels.ptx.shared import SharedMemory
from s3d_fast.kernels.ptx.tensors import GlobalMemory
from s3d_fast.kernels.ptx.values import UNSIGNED, Array
from s3d_fast.kernels.ptx.wave import Tally, Wave

# More than twice the slots of any buffer, plus the passes that copies are ahead.
PASSES = 10
# Runs that look for ways not yet gone, those in a row that find none, and runs that go random ways.
MOST_RUNS, IDLE_RUNS, RANDOM_RUNS = 256, 64, 8
# Instructions whose result is data.
GIVE_DATA = frozenset({"ldmatrix", "atom", "mma", "wgmma"})
# A loop: the places of its start and of the branch back.
Loop = tuple[int, int]


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
    tally, reached, taken = Tally(np.zeros(len(code), np.int64)), set[int](), dict[int, list[int]]()
    with np.errstate(all="ignore"):
        for ways in _runs():
            shared = SharedMemory(1, shared_memory, smallest_access(program, "shared"))
            parameters = parameter_bytes(program, arguments)
            memory = _NoData([], program.constants, LARGEST_ACCESS)
            wave = _OutlineWave(
                ways, reached, program, code, 0, [(0, 0, 0)], (x, y, z), parameters, memory, shared, tally
            )
            wave.run()
            for pc, counts in ways.taken.items():
                taken[pc] = [max(both) for both in zip(counts, taken.get(pc, counts), strict=True)]
    found = [finding for finding in tally.findings.values() if not finding.is_ambiguous]
    missed = [own for own in program.code if _uses_shared_memory(own) and id(own) not in reached]
    if missed:
        kind = f"no run reached {len(missed)} instructions, first"
        found.append(Finding(kind, program.name, missed[0].line, missed[0].text, (0, 0, 0), 0))
    if one_way := [program.code[pc] for pc, counts in sorted(taken.items()) if not all(counts)]:
        kind = f"no run went all ways of {len(one_way)} branches, first"
        found.append(Finding(kind, program.name, one_way[0].line, one_way[0].text, (0, 0, 0), 0))
    return found


class _Ways:
    """Which ways branches that depend on data have gone, by place in the program."""

    def __init__(self) -> None:
        self.taken: dict[int, list[int]] = {}  # how often each way
        self.has_new = False

    def next(self, pc: int, ways: int, stays: int | None) -> int:
        """Return the way that a branch goes; `stays` is the one that stays in a loop, if another leaves it."""
        taken = self.taken.setdefault(pc, [0] * ways)
        way = self.choose(taken, stays)
        self.has_new |= not taken[way]
        taken[way] += 1
        return way

    def choose(self, taken: Sequence[int], stays: int | None) -> int:
        """Return the way that was gone least often: behind it may be branches with new ways."""
        return taken.index(min(taken))

    @property
    def are_known(self) -> bool:
        """Whether every branch on data that was met has gone all of its ways."""
        return all(all(taken) for taken in self.taken.values())


class _Straight(_Ways):
    """Stay in loops, and always go the same way elsewhere: the first or the last."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.is_last = is_last

    def choose(self, taken: Sequence[int], stays: int | None) -> int:
        return stays if stays is not None else self.is_last * (len(taken) - 1)


class _Random(_Ways):
    """Go random ways; with `lingers`, stay in loops."""

    def __init__(self, seed: int, lingers: bool) -> None:
        super().__init__()
        self.random, self.lingers = Random(seed), lingers

    def choose(self, taken: Sequence[int], stays: int | None) -> int:
        return stays if stays is not None and self.lingers else self.random.randrange(len(taken))


def _runs() -> Iterator[_Ways]:
    """Yield the ways of each run: until all are known, and then combinations of them. Without data, one run is all."""
    ways, idle = _Ways(), 0
    for _ in range(MOST_RUNS):
        ways.has_new = False
        yield ways
        idle = 0 if ways.has_new else idle + 1
        if ways.are_known or idle == IDLE_RUNS:
            break
    if ways.taken:
        yield from (_Straight(False), _Straight(True))
        yield from (_Random(seed, lingers=seed % 2 == 0) for seed in range(RANDOM_RUNS))


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

    def begin_copy(self, wave: Wave, addresses: Array, size: int, lanes: Array) -> Array:
        """Return no cells."""
        return np.zeros((wave.lanes, 0), np.int64)


class _OutlineWave(Wave):
    """One program, some of whose registers are unknown."""

    def __init__(self, ways: _Ways, reached: set[int], program: Program, *others: Any) -> None:
        super().__init__(program, *others)
        self.ways, self.reached = ways, reached
        self.unknown: set[int] = set()
        self.loops = [
            (goal, pc)
            for pc, own in enumerate(program.code)
            if own.name == "bra" and (goal := _goal(own, program)) <= pc
        ]
        self.passes: Counter[Loop] = Counter()

    def step(self, decoded: Decoded, mask: Mask) -> None:
        """Execute an instruction, and note whether its results are known; products need not be computed."""
        instruction = decoded.instruction
        self.reached.add(id(instruction))
        self._check_use(instruction, mask)
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

    def _check_use(self, instruction: Instruction, mask: Mask) -> None:
        if not _deciding(instruction).isdisjoint(self.unknown):
            self.find("shared memory whose use data decide", mask)

    def moving(self, pc: int, decoded: Decoded, mask: Mask, group: Array) -> Mask:
        """Return which threads take a branch: all or none if it depends on data, or if it ends the last pass."""
        instruction = decoded.instruction
        if mask is None or mask.any():
            self.reached.add(id(instruction))
        if instruction.name not in ("bra", "brx"):
            self._check_use(instruction, mask)
            return mask
        is_known, nobody = decoded.sources.isdisjoint(self.unknown), np.zeros(self.lanes, bool)
        if instruction.name == "brx":
            if is_known:
                return mask
            table = instruction.operands[-1]
            assert isinstance(table, Symbol)
            goals = [self.program.labels[name] for name in self.program.tables[table.name]]
            self.pc[group] = goals[self.ways.next(pc, len(goals), None)]
            return nobody
        goal = _goal(instruction, self.program)
        if goal <= pc:
            self.passes[goal, pc] += 1
        taken = mask
        if instruction.guard is not None:
            spent = [loop for loop, passes in self.passes.items() if passes >= PASSES and loop[0] <= pc <= loop[1]]
            if (goal, pc) in spent:
                taken = nobody
            elif any(end < goal for _, end in spent):
                taken = group
            elif not is_known:
                taken = group if self.ways.next(pc, 2, self._staying(pc, goal)) else nobody
        self._leave_loops(pc, goal, taken, group)
        return taken

    def _staying(self, pc: int, goal: int) -> int | None:
        """Return whether a branch stays in a loop if it is taken (1) or if not (0); None if it leaves none."""
        if goal <= pc:
            return 1
        return 0 if any(start <= pc <= end < goal for start, end in self.loops) else None

    def _leave_loops(self, pc: int, goal: int, taken: Mask, group: Array) -> None:
        """Forget the passes of loops that all threads of a group have left."""
        is_taken = taken is None or bool((taken & group).sum() == group.sum())
        if is_taken or not (taken is None or taken.any()):
            place = goal if is_taken else pc + 1
            for start, end in [loop for loop in self.passes if not loop[0] <= place <= loop[1]]:
                del self.passes[start, end]


def _goal(branch: Instruction, program: Program) -> int:
    target = branch.operands[-1]
    assert isinstance(target, Symbol)
    return program.labels[target.name]


def _results(instruction: Instruction) -> list[int]:
    if instruction.name in WITHOUT_RESULT or not instruction.operands:
        return []
    return [item.index for item in items(instruction.operands[0]) if isinstance(item, Register)]


def _uses_shared_memory(instruction: Instruction) -> bool:
    kinds = ("cp", "wgmma", "ldmatrix", "stmatrix", "bar", "barrier")
    return instruction.name in kinds or any(part.startswith("shared") for part in instruction.parts)


def _deciding(instruction: Instruction) -> set[int]:
    """Return the registers that decide whether and where an instruction uses shared memory."""
    if not _uses_shared_memory(instruction):
        return set()
    # The second address of a copy is one of global memory.
    places = instruction.operands[:1] if instruction.name == "cp" else instruction.operands
    found: list[object] = [own.base for own in places if isinstance(own, Address)]
    if instruction.parts[:2] == ("wgmma", "mma_async"):
        found += instruction.operands[1:3]
    if instruction.guard is not None:
        found.append(instruction.guard)
    return {own.index for own in found if isinstance(own, Register)}


def _gives_data(instruction: Instruction) -> bool:
    return instruction.name in GIVE_DATA or (instruction.name == "ld" and instruction.parts[1] != "param")
