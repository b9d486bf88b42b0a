"""Global memory: the tensors of a launch, of which alone programs may read and write.

The tensors are copied into one array and back, so that an access of all programs is one numpy operation. For each cell
we know which programs have read, written and added to it: between programs there is no order, so a cell that one writes
must be touched by no other. Atomic additions may meet each other, in a program as well, but not other accesses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from s3d_fast.base.padding import is_padded, padded_size
from s3d_fast.kernels.ptx.findings import Fault, conflict
from s3d_fast.kernels.ptx.hazards import Hazards
from s3d_fast.kernels.ptx.values import UNSIGNED, Array

if TYPE_CHECKING:
    from s3d_fast.kernels.ptx.decode import Mask
    from s3d_fast.kernels.ptx.wave import Wave

# Tensors keep their addresses modulo this, and lie at least as far from each other.
ALIGNMENT = 128
# Instead of the number of a program: several.
SEVERAL = -2
NOBODY = -1
# Constant data of a kernel gets addresses that no tensor has.
CONSTANTS = 1 << 60


class GlobalMemory:
    """The tensors of one launch; `grain` is the size of the smallest access."""

    def __init__(self, tensors: Sequence[Tensor], constants: Mapping[str, bytes], grain: int) -> None:
        self.grain = grain
        spans = _merged([_span(tensor) for tensor in tensors if tensor.numel()])
        self._spans, self._constants = spans, dict[str, int]()
        bases, sizes = [first for first, _ in spans], [last - first for first, last in spans]
        address = CONSTANTS
        for name, data in constants.items():
            self._constants[name] = address
            bases.append(address)
            sizes.append(len(data))
            # At least one place is free between two tables.
            address += (len(data) // ALIGNMENT + 1) * ALIGNMENT
        self.base, self.size = np.array(bases, np.int64), np.array(sizes, np.int64)
        starts, end = [], 0
        for base, size in zip(bases, sizes, strict=True):
            starts.append(end + base % ALIGNMENT)
            end = -(-(starts[-1] + size) // ALIGNMENT) * ALIGNMENT
        self.start = np.array(starts, np.int64)
        self.data = np.zeros(end, np.uint8)
        for (first, last), start in zip(spans, starts, strict=False):
            self.data[start : start + last - first] = _host(first, last)
        for name, data in constants.items():
            start = starts[bases.index(self._constants[name])]
            self.data[start : start + len(data)] = np.frombuffer(data, np.uint8)
        cells = end // grain
        self.hazards = Hazards(cells)
        # The additions, as accesses that may meet each other; none before the first one.
        self.additions: Hazards | None = None
        self.writer = np.full(cells, NOBODY, np.int32)
        self.reader = np.full(cells, NOBODY, np.int32)
        self.adder = np.full(cells, NOBODY, np.int32)
        self.copies = np.zeros(cells, np.int32)  # that are under way and read a cell
        self.is_inside = self._insides(tensors, cells)

    def _insides(self, tensors: Sequence[Tensor], cells: int) -> Array:
        """Return which cells belong to tensors or constants: between the rows of a view may be those of another."""
        inside: Array = np.zeros(cells * self.grain, bool)
        for tensor in tensors:
            if tensor.numel():
                shape, first = _shape(tensor), tensor.data_ptr()
                at = int(np.searchsorted(self.base[: len(self._spans)], first, "right")) - 1
                start = int(self.start[at] + first - self.base[at])
                sizes = [*(stride * tensor.itemsize for stride in tensor.stride()), 1]
                view = np.lib.stride_tricks.as_strided(inside[start:], (*shape, tensor.itemsize), sizes)
                view[...] = True
        for start, size in list(zip(self.start, self.size, strict=True))[len(self._spans) :]:
            inside[start : start + size] = True
        return np.logical_and.reduce(inside.reshape(-1, self.grain), 1)

    def address_of_constant(self, name: str) -> int:
        """Return where constant data of the kernel lies."""
        if name not in self._constants:
            raise Fault(f"unknown name {name}")
        return self._constants[name]

    def write_back(self) -> None:
        """Copy what programs have written to the tensors."""
        for (first, last), start in zip(self._spans, self.start, strict=False):
            _host(first, last)[:] = self.data[start : start + last - first]

    def places(self, wave: Wave, addresses: Array, size: int, chosen: Array) -> Array:
        """Return where the chosen lanes access `size` bytes, as offsets into `data`."""
        own = addresses[chosen]
        if (bad := own % size != 0).any():
            raise wave.fault(f"misaligned access of {size} bytes to global memory", int(chosen[np.argmax(bad)]))
        if not len(self.base):
            raise wave.fault("access outside of all tensors, of which there are none", int(chosen[0]))
        tensor = np.searchsorted(self.base, own, "right") - 1
        offset = own - self.base[tensor]
        if (bad := (tensor < 0) | (offset + size > self.size[tensor])).any():
            lane = int(np.argmax(bad))
            raise wave.fault(f"access outside of all tensors, {self._nearest(int(own[lane]))}", int(chosen[lane]))
        return self.start[tensor] + offset

    def _nearest(self, address: int) -> str:
        beyond = address - (self.base + self.size)
        ahead = self.base - address
        distance = np.maximum(beyond, ahead)
        tensor = int(np.argmin(distance))
        side = "beyond the end" if beyond[tensor] >= ahead[tensor] else "before the start"
        return f"{int(distance[tensor])} bytes {side} of one of {int(self.size[tensor])} bytes"

    def load(self, wave: Wave, addresses: Array, bits: int, count: int, mask: Mask) -> Array:
        """Return `count` numbers of `bits` bits for each lane: (lanes, count), zero where the mask is off."""
        size, chosen = bits // 8 * count, wave.chosen(mask)
        places = self.places(wave, addresses, size, chosen)
        self._note_read(wave, self._cells(places, size), chosen)
        wave.tally.add_bytes("ld.global", len(chosen) * size)
        found = np.zeros((wave.lanes, count), UNSIGNED[bits])
        found[chosen] = self.data.view(UNSIGNED[bits])[(places * 8 // bits)[:, None] + np.arange(count)]
        return found

    def store(self, wave: Wave, addresses: Array, values: Array, mask: Mask, are_floats: bool) -> None:
        """Write values (lanes, count), unsigned integers of any width, which may stand for float numbers."""
        count, itemsize, chosen = values.shape[1], values.itemsize, wave.chosen(mask)
        size = count * itemsize
        places = self.places(wave, addresses, size, chosen)
        self._note_write(wave, self._cells(places, size), chosen)
        wave.tally.add_bytes("st.global", len(chosen) * size)
        data, where, own = (
            self.data.view(values.dtype),
            (places // itemsize)[:, None] + np.arange(count),
            values[chosen],
        )
        data[where] = own
        found = data[where]
        if (bad := found != own).any():
            wave.find_among(conflict(own[bad], found[bad], "global", are_floats), chosen, bad)

    def add(self, wave: Wave, addresses: Array, values: Array, mask: Mask) -> Array:
        """Add values (lanes, count) atomically, one lane after the other; return what was there before.

        In global memory, float32 additions take subnormal numbers for zeros, and give zeros for them.
        """
        count, itemsize, chosen = values.shape[1], values.itemsize, wave.chosen(mask)
        places = self.places(wave, addresses, count * itemsize, chosen)
        self._note_add(wave, self._cells(places, count * itemsize), chosen)
        wave.tally.add_bytes("atom.global", len(chosen) * count * itemsize)
        data, where = self.data.view(values.dtype), (places // itemsize)[:, None] + np.arange(count)
        before = np.zeros_like(values)
        flush = _flushed if values.dtype == np.float32 else _unchanged
        if len(np.unique(where)) == where.size:
            before[chosen] = data[where]
            data[where] = flush(flush(data[where]) + flush(values[chosen]))
        else:
            for lane, place in zip(chosen, where, strict=True):
                before[lane] = data[place]
                data[place] = flush(flush(data[place]) + flush(values[lane]))
        return before

    def _cells(self, places: Array, size: int) -> Array:
        return (places // self.grain)[:, None] + np.arange(size // self.grain)

    def begin_copy(self, wave: Wave, addresses: Array, size: int, lanes: Array) -> Array:
        """Note that lanes (a mask) begin to copy from here; return the cells (all lanes, k), NOBODY for the others."""
        cells = np.full((wave.lanes, size // self.grain), NOBODY)
        if lanes.any():
            chosen = np.flatnonzero(lanes)
            cells[chosen] = self._cells(self.places(wave, addresses, size, chosen), size)
            np.add.at(self.copies, cells[chosen], 1)
        return cells

    def end_copy(self, cells: Array) -> None:
        """Note that copies from these cells have arrived."""
        np.subtract.at(self.copies, cells[cells != NOBODY], 1)

    def _check_inside(self, wave: Wave, cells: Array, chosen: Array) -> None:
        if (bad := ~self.is_inside[cells]).any():
            raise wave.fault("access between the rows of a tensor", int(chosen[np.argmax(bad.any(1))]))

    def _check_copies(self, wave: Wave, cells: Array, chosen: Array) -> None:
        if (bad := self.copies[cells] > 0).any():
            wave.find_among("race: global memory written while cp.async reads it", chosen, bad)

    def _note_read(self, wave: Wave, cells: Array, chosen: Array) -> None:
        self._check_inside(wave, cells, chosen)
        own = wave.number_of[chosen][:, None]
        for other, verb in ((self.writer[cells], "writes"), (self.adder[cells], "adds to")):
            if (bad := (other != NOBODY) & (other != own)).any():
                wave.find_among(f"race: global memory read that another program {verb}", chosen, bad)
        if (raced := self.hazards.check_read(cells, wave.stamps.value[chosen])) is not None:
            wave.find_among("race: global memory read after a write of another thread, no barrier", chosen, raced)
        self._check_additions(wave, cells, chosen, "read")
        self._note(self.reader, cells, own)

    def _note_write(self, wave: Wave, cells: Array, chosen: Array) -> None:
        self._check_inside(wave, cells, chosen)
        self._check_copies(wave, cells, chosen)
        own = wave.number_of[chosen][:, None]
        # Noted first: two programs may write with one instruction.
        self._note(self.writer, cells, own)
        others = ((self.writer[cells], "writes"), (self.reader[cells], "reads"), (self.adder[cells], "adds to"))
        for other, verb in others:
            if (bad := (other != NOBODY) & (other != own)).any():
                wave.find_among(f"race: global memory written that another program {verb}", chosen, bad)
        if (raced := self.hazards.check_write(cells, wave.stamps.value[chosen])) is not None:
            wave.find_among("race: global memory written after an access of another thread, no barrier", chosen, raced)
        self._check_additions(wave, cells, chosen, "written")

    def _check_additions(self, wave: Wave, cells: Array, chosen: Array, verb: str) -> None:
        if self.additions is None:
            return
        if (raced := self.additions.read_before(cells, wave.stamps.value[chosen])) is not None:
            wave.find_among(f"race: global memory {verb} after another thread added to it, no barrier", chosen, raced)

    def _note_add(self, wave: Wave, cells: Array, chosen: Array) -> None:
        self._check_inside(wave, cells, chosen)
        self._check_copies(wave, cells, chosen)
        own = wave.number_of[chosen][:, None]
        for other, verb in ((self.writer[cells], "writes"), (self.reader[cells], "reads")):
            if (bad := (other != NOBODY) & (other != own)).any():
                wave.find_among(f"race: global memory added to that another program {verb}", chosen, bad)
        stamp = wave.stamps.value[chosen]
        for raced in (self.hazards.written_before(cells, stamp), self.hazards.read_before(cells, stamp)):
            if raced is not None:
                kind = "race: global memory added to after an access of another thread, no barrier"
                wave.find_among(kind, chosen, raced)
        self.additions = self.additions or Hazards(len(self.adder))
        self.additions.note_add(cells, stamp)
        self._note(self.adder, cells, own)

    @staticmethod
    def _note(programs: Array, cells: Array, own: Array) -> None:
        before = programs[cells]
        own = np.broadcast_to(own, cells.shape)
        programs[cells] = np.where((before == NOBODY) | (before == own), own, SEVERAL)
        # Two programs at once: the last one written must not hide the others.
        if (hidden := (programs[cells] != own) & (programs[cells] != SEVERAL)).any():
            programs[cells[hidden]] = SEVERAL


def _flushed(numbers: Array) -> Array:
    """Return float32 numbers with zeros of their sign for subnormal ones."""
    return np.where(np.abs(numbers) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), numbers), numbers)


def _unchanged(numbers: Array) -> Array:
    return numbers


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses from the first to behind the last byte of a tensor."""
    reach = sum((size - 1) * stride for size, stride in zip(_shape(tensor), tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.itemsize


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor with the zeros behind its rows."""
    return (*tensor.shape[:-1], padded_size(tensor.shape[-1])) if is_padded(tensor) else tuple(tensor.shape)


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return spans in order, with those that overlap as one."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(set(spans)):
        if found and first < found[-1][1]:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return found


def _host(first: int, last: int) -> Array:
    """Return the host's memory between two addresses."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * (last - first)).from_address(first))
