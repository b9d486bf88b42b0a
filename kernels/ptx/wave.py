"""Programs of a launch that are executed at once: their registers, and where each thread is.

All threads of all programs execute an instruction together, as one numpy operation. Where threads are at different
instructions, those that are furthest behind go first, until they meet others or branch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from s3d_fast.kernels.ptx.control import DONE, WARP
from s3d_fast.kernels.ptx.copies import Copies
from s3d_fast.kernels.ptx.decode import Decoded, Mask
from s3d_fast.kernels.ptx.findings import Fault, Finding
from s3d_fast.kernels.ptx.hazards import Stamps
from s3d_fast.kernels.ptx.parse import Instruction, Program, Special
from s3d_fast.kernels.ptx.shared import SharedMemory
from s3d_fast.kernels.ptx.tensors import GlobalMemory
from s3d_fast.kernels.ptx.values import UNSIGNED, Array
from s3d_fast.kernels.ptx.wgmma import WarpgroupProducts

# No kernel of a test takes as many instructions: one that does would never end.
MOST_STEPS = 1_000_000

Place = tuple[int, int, int]


@dataclass
class Tally:
    """What the programs of a launch have executed so far, and what was found."""

    executed: Array  # by instruction: how many warps executed it
    findings: dict[tuple[str, int], Finding] = field(default_factory=dict)  # by kind and line
    bytes: dict[str, int] = field(default_factory=dict)  # moved, by kind of access
    passes: dict[str, tuple[int, int]] = field(default_factory=dict)  # over shared memory: taken, and needed at least
    epochs: Iterator[int] = field(default_factory=lambda: count(1))  # numbers for what lies between two barriers

    def add_bytes(self, kind: str, amount: int) -> None:
        """Add to the bytes moved by one kind of access."""
        self.bytes[kind] = self.bytes.get(kind, 0) + amount

    def add_passes(self, kind: str, taken: int, least: int) -> None:
        """Add to the passes over shared memory of one kind of access."""
        before = self.passes.get(kind, (0, 0))
        self.passes[kind] = (before[0] + taken, before[1] + least)


class Wave:
    """The state of some programs of a launch."""

    def __init__(
        self,
        program: Program,
        code: Sequence[Decoded],
        first: int,  # the number of the first program in the launch
        places: Sequence[Place],
        grid: Place,
        parameters: Mapping[str, bytes],
        memory: GlobalMemory,
        shared: SharedMemory,
        tally: Tally,
    ) -> None:
        self.program, self.code, self.places, self.parameters = program, code, places, parameters
        self.memory, self.shared, self.tally = memory, shared, tally
        self.threads = program.threads
        self.lanes = len(places) * self.threads
        self.warps = self.lanes // WARP
        self.every_lane = np.arange(self.lanes)
        self.stamps = Stamps(len(places), self.threads, tally.epochs)
        self.program_of = self.every_lane // self.threads
        self.number_of = (first + self.program_of).astype(np.int32)
        self.copies, self.products = Copies(self.lanes), WarpgroupProducts(self.warps)
        # No array of a register is changed in place, so that those not yet written can share one.
        unset = {bits: np.zeros(self.lanes, UNSIGNED[bits]) for bits in UNSIGNED} | {1: np.zeros(self.lanes, bool)}
        self.registers = [unset[register.bits] for register in program.registers]
        # Registers that not all threads have written yet, with those that have.
        self.written = {register.index: unset[1] for register in program.registers}
        # Registers to look at before use: these, and those that a product under way uses.
        self.watched = set(self.written)
        # The step of the last write, and the threads that wrote.
        self.last_write: list[tuple[int, Mask]] = [(0, None)] * len(program.registers)
        self.step_number = 0
        self.special = self._specials(grid)
        self.pc = np.zeros(self.lanes, np.int64)
        self.barrier = np.full(self.lanes, -1)  # at which a thread waits
        self.waits_for_warp = np.zeros(self.lanes, bool)
        self.current = program.code[0]

    def _specials(self, grid: Place) -> dict[str, Array]:
        thread = self.stamps.thread.astype(np.uint32)
        zero = np.zeros_like(thread)
        found = {"%tid.x": thread, "%tid.y": zero, "%tid.z": zero, "%laneid": thread % np.uint32(WARP)}
        found |= {"%ntid.x": zero + np.uint32(self.threads), "%ntid.y": zero + np.uint32(1)}
        for axis, letter in enumerate("xyz"):
            own = np.array([place[axis] for place in self.places], np.uint32)
            found[f"%ctaid.{letter}"] = np.repeat(own, self.threads)
            found[f"%nctaid.{letter}"] = zero + np.uint32(grid[axis])
        return found

    def special_value(self, operand: Special) -> Array:
        """Return the value of a register that the GPU sets."""
        if operand.name not in self.special:
            raise self.fault(f"unknown register {operand.name}")
        return self.special[operand.name]

    def warps_of(self, mask: Mask) -> Array:
        """Return which warps have threads in a mask."""
        return self._lanes(mask).reshape(-1, WARP).max(1)

    def chosen(self, mask: Mask) -> Array:
        """Return the numbers of the lanes of a mask."""
        return self.every_lane if mask is None else np.flatnonzero(mask)

    def _lanes(self, mask: Mask) -> Array:
        return np.ones(self.lanes, bool) if mask is None else mask

    def set(self, index: int, bits: Array, mask: Mask) -> None:
        """Write a register in the threads of a mask."""
        self.last_write[index] = (self.step_number, mask)
        if index in self.watched:
            self._check_write(index, mask)
        if mask is None:
            self.registers[index] = bits
        else:
            self.registers[index] = np.where(mask, bits, self.registers[index])

    def _check_write(self, index: int, mask: Mask) -> None:
        if self.products.uses(index) and (lanes := self.products.use(index, self._lanes(mask))).any():
            self.find("register written while wgmma uses it", lanes)
        self.note_written(index, mask)

    def note_written(self, index: int, mask: Mask) -> None:
        """Note that the threads of a mask have given a register a value."""
        if index in self.written and mask is not None:
            self.written[index] = self.written[index] | mask
        if index in self.written and (mask is None or self.written[index].all()):
            del self.written[index]
            if not self.products.uses(index):
                self.watched.discard(index)

    def check_written(self, index: int, mask: Mask) -> None:
        """Check that a register has a value in the threads of a mask."""
        if index in self.written and (missing := ~self.written[index] & self._lanes(mask)).any():
            self.find(f"uninitialised register {self.program.registers[index].name}", missing)

    def _inspect(self, sources: frozenset[int], mask: Mask) -> None:
        """Look at the watched registers that an instruction reads."""
        for index in sources & self.watched:
            self.check_written(index, mask)
            if self.products.uses(index):
                lanes = self.products.use(index, self._lanes(mask), accumulators_only=True)
                if lanes.any():
                    name = self.program.registers[index].name
                    self.find(f"register {name} read while wgmma adds to it", lanes)

    def find(self, kind: str, lanes: Array | None) -> None:
        """Note a finding at the present instruction; the first of these lanes is named."""
        key = (kind, self.current.line)
        if key not in self.tally.findings:
            self.tally.findings[key] = self._finding(kind, 0 if lanes is None else int(np.argmax(lanes)))

    def find_among(self, kind: str, chosen: Array, bad: Array) -> None:
        """Note a finding in some of the chosen lanes: `bad` (len(chosen), ...) says which."""
        lanes = np.zeros(self.lanes, bool)
        lanes[chosen[bad.reshape(len(chosen), -1).any(1)]] = True
        self.find(kind, lanes)

    def fault(self, kind: str, lane: int = 0) -> Fault:
        """Return an error that names the present instruction, and the program and thread of a lane."""
        return Fault(str(self._finding(kind, lane)))

    def _finding(self, kind: str, lane: int) -> Finding:
        place, thread = self.places[lane // self.threads], lane % self.threads
        return Finding(kind, self.program.name, self.current.line, self.current.text, place, thread)

    def run(self) -> None:
        """Execute all programs to their end."""
        while True:
            runnable = np.where((self.barrier >= 0) | self.waits_for_warp, DONE, self.pc)
            here = int(runnable.min())
            if here == DONE:
                break
            group = runnable == here
            later = runnable[~group]
            self._execute(here, int(later.min()) if len(later) else DONE, group)
            if self.step_number > MOST_STEPS:
                raise self.fault(f"more than {MOST_STEPS} instructions")
        if (self.barrier >= 0).any() or self.waits_for_warp.any():
            raise self.fault("threads wait for others that never come")

    def _execute(self, pc: int, stop: int, group: Array) -> None:
        """Execute from one place on, with a group of threads, to the next branch or barrier or to where others are."""
        mask: Mask = None if group.all() else group
        by_warp = group.reshape(-1, WARP)
        whole = (by_warp | (self.pc.reshape(-1, WARP) == DONE)).all(1)
        warps, is_whole = int(by_warp.any(1).sum()), bool((by_warp.any(1) <= whole).all())
        executed, registers, watched = self.tally.executed, self.registers, self.watched
        while pc != stop:
            decoded = self.code[pc]
            self.current = instruction = decoded.instruction
            if not is_whole and "sync" in instruction.parts:
                self._gather_warps(pc, group)
                return
            executed[pc] += warps
            self.step_number += 1
            active = mask
            if instruction.guard is not None:
                allowed = registers[instruction.guard.index]
                allowed = ~allowed if instruction.is_guard_negated else allowed
                active = allowed if mask is None else allowed & mask
                self._require_whole_warps(instruction, active)
            if not decoded.sources.isdisjoint(watched):
                self._inspect(decoded.sources, active)
            if decoded.control is not None:
                self.pc[group] = pc + 1
                decoded.control(self, self.moving(pc, decoded, active, group))
                return
            if active is None or active is mask or active.any():
                self.step(decoded, active)
            pc += 1
        self.pc[group] = pc

    def step(self, decoded: Decoded, mask: Mask) -> None:
        """Execute an instruction that moves no thread."""
        assert decoded.step is not None
        decoded.step(self, mask)

    def moving(self, pc: int, decoded: Decoded, mask: Mask, group: Array) -> Mask:
        """Return which threads of a group a control instruction moves: those of the mask, where its guard holds."""
        return mask

    def _require_whole_warps(self, instruction: Instruction, active: Array) -> None:
        """Refuse instructions of whole warps that a guard takes from some threads; all threads have come to it."""
        if "sync" not in instruction.parts or (instruction.name == "barrier" and "aligned" not in instruction.parts):
            return
        is_missing = ~active & (self.pc != DONE) & np.repeat(active.reshape(-1, WARP).any(1), WARP)
        if is_missing.any():
            raise self.fault("a part of a warp executes an instruction of the whole warp", int(np.argmax(is_missing)))

    def _gather_warps(self, pc: int, group: Array) -> None:
        """Let threads that have come to an instruction of whole warps wait for the other threads of their warps."""
        self.pc[group] = pc
        self.waits_for_warp[group] = True
        here = (self.waits_for_warp & (self.pc == pc)).reshape(-1, WARP)
        complete = (here | (self.pc.reshape(-1, WARP) == DONE)).all(1)
        self.waits_for_warp[np.repeat(complete, WARP)] = False
