"""Races inside a program: two threads at one place in memory, at least one of them writing, with nothing between.

A barrier of the program orders all its threads, `bar.warp.sync` those of a warp. Every thread has a stamp that says
after which of both it is running:

    stamp = epoch << 37 | syncs << 11 | thread

The epoch is a number that no other program and no time between two barriers shares; `syncs` counts the warp's own
synchronisations since then. Each cell of memory keeps the stamps of its last write and of its last read, and the set of
warps that have read it in that epoch.

Threads of a warp that execute one instruction read together. Triton lets several threads load the same number and one
of them store it later; these need no synchronisation.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from s3d_fast.kernels.ptx.values import Array

EPOCH, SYNCS = 37, 11
THREAD_MASK, WARP_MASK = np.int64(0x3FF), np.int64(0x3E0)
# Set in the stamp of a read if other threads of the warp have read the cell in another instruction.
SEVERAL = np.int64(0x400)


class Stamps:
    """The stamps of all threads of the programs that run at once."""

    def __init__(self, programs: int, threads: int, epochs: Iterator[int]) -> None:
        self.programs, self._epochs = programs, epochs
        self.thread = np.tile(np.arange(threads, dtype=np.int64), programs)
        self.value = self.thread.copy()
        self.new_epoch(np.ones(programs, bool))

    def new_epoch(self, programs: Array) -> None:
        """Note a barrier of these programs."""
        chosen = np.flatnonzero(programs)
        epochs = np.fromiter(self._epochs, np.int64, len(chosen))
        by_program, threads = self.value.reshape(self.programs, -1), self.thread.reshape(self.programs, -1)
        by_program[chosen] = (epochs << EPOCH)[:, None] | threads[chosen]

    def sync_warps(self, mask: Array | None) -> None:
        """Note that warps have synchronised their own threads; a mask must hold whole warps."""
        if mask is None:
            self.value += 1 << SYNCS
        else:
            self.value[mask] += 1 << SYNCS


class Hazards:
    """What was last done to each cell of a memory."""

    def __init__(self, cells: int) -> None:
        self.wrote = np.zeros(cells, np.int64)
        self.read = np.zeros(cells, np.int64)
        self.readers = np.zeros(cells, np.uint32)

    def check_read(self, cells: Array, stamp: Array) -> Array | None:
        """Note that threads read cells (lanes, k); return the lanes that race with an earlier write, if any."""
        raced = self.written_before(cells, stamp)
        self._note_read(cells, stamp)
        return raced

    def check_write(self, cells: Array, stamp: Array) -> Array | None:
        """Note that threads write cells (lanes, k); return the lanes that race with an earlier access, if any."""
        raced = self.written_before(cells, stamp)
        if raced is None:
            raced = self.read_before(cells, stamp)
        self.wrote[cells] = stamp[:, None]
        # Threads that write one number to one place: the last one does not stand for the others.
        if (hidden := self.wrote[cells] != stamp[:, None]).any():
            self.wrote[cells[hidden]] |= SEVERAL
        return raced

    def written_before(self, cells: Array, stamp: Array) -> Array | None:
        """Return the lanes whose cells another thread has written, with nothing in between."""
        return self._unordered(self.wrote[cells], stamp)

    def note_add(self, cells: Array, stamp: Array) -> None:
        """Note that threads add to cells (lanes, k) atomically: like reads, but one thread never stands for others."""
        self._note_read(cells, stamp)
        places, times = np.unique(cells, return_counts=True)
        self.read[places[times > 1]] |= SEVERAL

    def read_before(self, cells: Array, stamp: Array) -> Array | None:
        """Return the lanes whose cells another thread has read, with nothing in between."""
        earlier = self.read[cells]
        recent = (earlier >> EPOCH) == (stamp >> EPOCH)[:, None]
        if not recent.any():
            return None
        own = np.left_shift(np.uint32(1), ((stamp & WARP_MASK) >> 5).astype(np.uint32))[:, None]
        raced = recent & ((self.readers[cells] & ~own) != 0)
        lanes = raced.any(1)
        within = self._unordered(earlier, stamp)
        lanes = lanes if within is None else lanes | within
        return lanes if lanes.any() else None

    def note_read_by_warps(self, cells: Array, stamp: np.int64, warps: int) -> None:
        """Note that several warps of one program, given as bits, read cells (k,) together."""
        is_stale = (self.read[cells] >> EPOCH) != (stamp >> EPOCH)
        self.readers[cells[is_stale]] = 0
        self.readers[cells] |= np.uint32(warps)
        self.read[cells] = stamp | SEVERAL

    def is_written_since_barrier(self, cells: Array, stamp: np.int64) -> bool:
        """Return whether any of the cells (k,) of one program was written since that program's last barrier."""
        return bool(((self.wrote[cells] >> EPOCH) == (stamp >> EPOCH)).any())

    @staticmethod
    def _unordered(earlier: Array, stamp: Array) -> Array | None:
        """Return the lanes whose access is not ordered after the earlier one by another thread, if any."""
        mine = stamp[:, None]
        recent = (earlier >> EPOCH) == (mine >> EPOCH)
        if not recent.any():
            return None
        is_other = ((earlier ^ mine) & (THREAD_MASK | SEVERAL)) != 0
        is_ordered = (((earlier ^ mine) & WARP_MASK) == 0) & ((earlier >> SYNCS) < (mine >> SYNCS))
        lanes = (recent & is_other & ~is_ordered).any(1)
        return lanes if lanes.any() else None

    def _note_read(self, cells: Array, stamp: Array) -> None:
        earlier, mine = self.read[cells], stamp[:, None]
        recent = (earlier >> EPOCH) == (mine >> EPOCH)
        if not recent.all():
            self.readers[cells[~recent]] = 0
        warps = (stamp & WARP_MASK) >> 5
        # One warp of each program at a time: in one assignment, two warps would overwrite each other's bits.
        for warp in np.unique(warps):
            self.readers[cells[warps == warp]] |= np.uint32(1) << np.uint32(warp)
        # Of the threads that read together, the first one stands for all: if it writes later, it does so after them.
        # Copies, since numpy may walk through reversed views in the order of memory.
        self.read[cells[::-1].copy()] = np.broadcast_to(mine, cells.shape)[::-1].copy()
        change = earlier ^ self.read[cells]
        joined = (change >> SYNCS == 0) & (change & WARP_MASK == 0) & (change & (THREAD_MASK | SEVERAL) != 0)
        if joined.any():
            self.read[cells[joined]] |= SEVERAL
