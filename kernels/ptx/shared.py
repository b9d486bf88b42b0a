"""Shared memory of the programs that run at once, with what is needed to notice misuse.

Memory is divided into cells, as large as the smallest access of the kernel. For each cell we know who accessed it last,
whether it was ever written, how many copies into it and how many products reading it are under way, and whether the
asynchronous proxy, through which wgmma reads, may not see the last write yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from s3d_fast.kernels.ptx.banks import passes
from s3d_fast.kernels.ptx.findings import conflict
from s3d_fast.kernels.ptx.hazards import Hazards
from s3d_fast.kernels.ptx.values import UNSIGNED, Array

if TYPE_CHECKING:
    from s3d_fast.kernels.ptx.decode import Mask
    from s3d_fast.kernels.ptx.wave import Wave

# Shared memory of a program begins at a multiple of this, since the swizzles of wgmma depend on addresses.
ALIGNMENT = 1024
NOBODY = -1


class SharedMemory:
    """The shared memory of several programs, one after the other."""

    def __init__(self, programs: int, size: int, grain: int) -> None:
        self.size, self.grain = size, grain
        self.stride = -(-max(size, 1) // ALIGNMENT) * ALIGNMENT
        # What was never written reads as NaN in every floating-point type.
        self.data = np.full(programs * self.stride, 0xFF, np.uint8)
        cells = len(self.data) // grain
        self.hazards = Hazards(cells)
        self.is_written = np.zeros(cells, bool)
        self.copies = np.zeros(cells, np.int16)
        self.products = np.zeros(cells, np.int16)
        # The thread, of all that run at once, whose write the asynchronous proxy may not see.
        self.unfenced = np.full(cells, NOBODY, np.int32)

    def places(self, wave: Wave, addresses: Array, size: int, chosen: Array) -> Array:
        """Return where the chosen lanes access `size` bytes, as offsets into `data`."""
        own = addresses[chosen]
        if (bad := own % size != 0).any():
            raise wave.fault(f"misaligned access of {size} bytes to shared memory", int(chosen[np.argmax(bad)]))
        if (bad := (own < 0) | (own + size > self.size)).any():
            lane = int(np.argmax(bad))
            where = f"{own[lane]} of {self.size} bytes"
            raise wave.fault(f"access outside of shared memory, at {where}", int(chosen[lane]))
        return own + wave.program_of[chosen] * self.stride

    def cells(self, places: Array, size: int) -> Array:
        """Return the cells (lanes, k) that accesses of `size` bytes touch."""
        return (places // self.grain)[:, None] + np.arange(size // self.grain)

    def load(self, wave: Wave, addresses: Array, bits: int, count: int, mask: Mask) -> Array:
        """Return `count` numbers of `bits` bits for each lane: (lanes, count), zero where the mask is off."""
        size, chosen = bits // 8 * count, wave.chosen(mask)
        places = self.places(wave, addresses, size, chosen)
        self.note_read(wave, places, size, chosen)
        self.count_passes(wave, addresses, size, mask)
        found = np.zeros((wave.lanes, count), UNSIGNED[bits])
        found[chosen] = self.data.view(UNSIGNED[bits])[(places * 8 // bits)[:, None] + np.arange(count)]
        return found

    def store(self, wave: Wave, addresses: Array, values: Array, mask: Mask, are_floats: bool = False) -> None:
        """Write values (lanes, count), unsigned integers of any width, which may stand for float numbers."""
        count, itemsize, chosen = values.shape[1], values.itemsize, wave.chosen(mask)
        size = count * itemsize
        places = self.places(wave, addresses, size, chosen)
        self.note_write(wave, places, size, chosen)
        self.count_passes(wave, addresses, size, mask)
        data, where, own = (
            self.data.view(values.dtype),
            (places // itemsize)[:, None] + np.arange(count),
            values[chosen],
        )
        data[where] = own
        found = data[where]
        if (bad := found != own).any():
            wave.find_among(conflict(own[bad], found[bad], "shared", are_floats), chosen, bad)

    def note_read(self, wave: Wave, places: Array, size: int, chosen: Array) -> None:
        """Check that what is read was written, has arrived, and is not written at the same time."""
        cells = self.cells(places, size)
        if (bad := self.copies[cells] > 0).any():
            wave.find_among("race: shared memory read while cp.async writes it", chosen, bad)
        elif not (written := self.is_written[cells]).all():
            wave.find_among("uninitialised shared memory", chosen, ~written)
        if (raced := self.hazards.check_read(cells, wave.stamps.value[chosen])) is not None:
            wave.find_among("race: shared memory read after a write, without a barrier", chosen, raced)

    def note_write(self, wave: Wave, places: Array, size: int, chosen: Array) -> None:
        """Check that nobody else accesses what is written."""
        cells = self.cells(places, size)
        if (bad := self.copies[cells] > 0).any():
            wave.find_among("race: shared memory written while cp.async writes it", chosen, bad)
        if (bad := self.products[cells] > 0).any():
            wave.find_among("race: shared memory written while wgmma reads it", chosen, bad)
        if (raced := self.hazards.check_write(cells, wave.stamps.value[chosen])) is not None:
            wave.find_among("race: shared memory written after another access, without a barrier", chosen, raced)
        self.is_written[cells] = True
        self.unfenced[cells] = chosen[:, None]

    def fence(self, mask: Mask) -> None:
        """Let the asynchronous proxy see what these threads have written."""
        if mask is None:
            self.unfenced[:] = NOBODY
        else:
            waiting = np.flatnonzero(self.unfenced != NOBODY)
            self.unfenced[waiting[mask[self.unfenced[waiting]]]] = NOBODY

    def count_passes(self, wave: Wave, addresses: Array, size: int, mask: Mask) -> None:
        """Count passes over memory, and bytes, for one instruction."""
        own = addresses if mask is None else np.where(mask, addresses, -1)
        kind = wave.current.name if wave.current.name in ("ldmatrix", "stmatrix") else ".".join(wave.current.parts[:2])
        kind = kind.split(":")[0]
        wave.tally.add_passes(kind, *passes(own, size))
        wave.tally.add_bytes(kind, int(wave.lanes if mask is None else mask.sum()) * size)
