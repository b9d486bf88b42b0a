"""Asynchronous products of four warps on tensor cores: wgmma, with operands in shared memory.

A product reads shared memory and its registers from when it is begun until the warps wait for it. Until then nobody may
write what it reads, nor read or write its accumulators. It reads shared memory through the asynchronous proxy, which
sees what threads or cp.async have written only after `fence.proxy.async`; and it sees registers that were written
before `wgmma.fence`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from s3d_fast.kernels.ptx.decode import Mask, Reader, Step, executes, items, reader, types, unknown
from s3d_fast.kernels.ptx.mma import GROUP, WITHIN, left_fragment, shape_of
from s3d_fast.kernels.ptx.parse import Immediate, Instruction, Register, Vector
from s3d_fast.kernels.ptx.shared import NOBODY
from s3d_fast.kernels.ptx.values import TF32_MASK, Array, from_bfloat16

if TYPE_CHECKING:
    from s3d_fast.kernels.ptx.wave import Wave

WARP, WARPGROUP = 32, 128
# The bytes of a row of the swizzled layout, and the address bits that are exchanged, by the descriptor's mode.
SWIZZLES = {0: (16, 0), 1: (128, 7), 2: (64, 3), 3: (32, 1)}

# The bits of a descriptor that are understood: addresses and the mode, not the offset of the swizzle's base.
DESCRIPTOR = 0x3FFF | 0x3FFF << 16 | 0x3FFF << 32 | 3 << 62
# What a fence of the asynchronous proxy may be restricted to, and still concern shared memory.
PROXY_SPACES = ((), ("shared:cta",), ("shared:cluster",))
PLAIN_FENCES = frozenset({"acq_rel", "acquire", "release", "sc", "cta", "cluster", "gpu", "gl", "sys"})


@dataclass
class Product:
    """A product under way: the registers and the shared memory that it uses."""

    accumulators: tuple[int, ...]
    fragments: tuple[int, ...]
    group: Array  # of each warp
    left: Array  # the warps that have not waited for it
    reads: list[tuple[int, Array]] = field(default_factory=list)  # the first lane of a warpgroup, and cells


class WarpgroupProducts:
    """The products under way."""

    def __init__(self, warps: int) -> None:
        self.pending: list[Product] = []
        self.closed = np.zeros(warps, np.int64)  # the groups that each warp has closed
        self.fenced = np.full(warps, -1, np.int64)  # the step of the last wgmma.fence
        self.accumulators: Counter[int] = Counter()
        self.fragments: Counter[int] = Counter()

    def uses(self, register: int) -> bool:
        """Return whether a product under way uses a register, in any warp."""
        return register in self.accumulators or register in self.fragments

    def use(self, register: int, lanes: Array, accumulators_only: bool = False) -> Array:
        """Return which of these lanes (a mask) have a product under way that uses a register."""
        warps = np.zeros(len(self.closed), bool)
        for product in self.pending:
            if register in product.accumulators or (register in product.fragments and not accumulators_only):
                warps |= product.left
        return np.repeat(warps, WARP) & lanes

    def begin(self, wave: Wave, product: Product) -> None:
        """Note a product that has begun."""
        self.pending.append(product)
        self.accumulators.update(product.accumulators)
        self.fragments.update(product.fragments)
        wave.watched.update(product.accumulators, product.fragments)

    def wait(self, wave: Wave, warps: Array, left: int) -> None:
        """Let all but the last `left` groups of these warps be done."""
        for product in self.pending:
            done = product.left & warps & (product.group < self.closed - left)
            product.left &= ~done
            for lane, cells in product.reads:
                if done[lane // WARP]:
                    wave.shared.products[cells] -= 1
                    _note_read(wave, lane, cells)
            if not product.left.any():
                self.accumulators -= Counter(product.accumulators)
                self.fragments -= Counter(product.fragments)
                idle = {register for register in product.accumulators + product.fragments if not self.uses(register)}
                wave.watched -= idle - wave.written.keys()
        self.pending = [product for product in self.pending if product.left.any()]


def _note_read(wave: Wave, lane: int, cells: Array) -> None:
    first_warp = lane % wave.threads // WARP
    wave.shared.hazards.note_read_by_warps(cells, wave.stamps.value[lane], 0xF << first_warp)


@executes("fence", "membar")
def fence(instruction: Instruction) -> Step:
    """Make writes visible to the asynchronous proxy. Other fences order nothing that a barrier does not."""
    if instruction.parts[1:3] == ("proxy", "async") and instruction.parts[3:] in PROXY_SPACES:
        return lambda wave, mask: wave.shared.fence(mask)
    # No product reads global memory.
    if instruction.parts != ("fence", "proxy", "async", "global") and not set(instruction.parts[1:]) <= PLAIN_FENCES:
        raise unknown(instruction)
    return lambda wave, mask: None


@executes("wgmma")
def warpgroup_product(instruction: Instruction) -> Step:
    """Begin a product, fence registers, close a group of products, or wait for groups."""
    form = instruction.parts[1]
    if form == "mma_async":
        return _begin(instruction)
    if form == "fence":
        return _fence
    if form == "commit_group":
        return _close
    if form == "wait_group":
        (number,) = instruction.operands
        assert isinstance(number, Immediate)
        left = int(number.text, 0)
        return lambda wave, mask: wave.products.wait(wave, _whole_groups(wave, mask), left)
    raise unknown(instruction)


def _fence(wave: Wave, mask: Mask) -> None:
    wave.products.fenced[_whole_groups(wave, mask)] = wave.step_number


def _close(wave: Wave, mask: Mask) -> None:
    wave.products.closed[_whole_groups(wave, mask)] += 1


def _whole_groups(wave: Wave, mask: Mask) -> Array:
    """Return the warps that execute an instruction, four neighbours together."""
    warps = wave.warps_of(mask)
    groups = warps.reshape(-1, WARPGROUP // WARP)
    if (partial := groups.any(1) & ~groups.all(1)).any():
        raise wave.fault("a part of four warps executes wgmma", int(np.argmax(partial)) * WARPGROUP)
    return warps


@dataclass(frozen=True)
class Operand:
    """How a product finds a factor in shared memory: `rows` of K numbers, perhaps transposed."""

    rows: int
    K: int
    kind: str
    is_transposed: bool
    read: Reader  # of the descriptor

    @property
    def itemsize(self) -> int:
        """The bytes of a number."""
        return 4 if self.kind == "tf32" else 2

    def fetch(self, wave: Wave, firsts: Array, product: Product) -> Array:
        """Return the factors (warpgroups, rows, K) of the warpgroups that begin at these lanes."""
        descriptors = np.broadcast_to(self.read(wave), wave.lanes)[firsts]
        found = np.zeros((len(firsts), self.rows, self.K))
        for descriptor in np.unique(descriptors):
            own = np.flatnonzero(descriptors == descriptor)
            if int(descriptor) & ~DESCRIPTOR:
                raise wave.fault(f"unknown descriptor of wgmma {int(descriptor):#x}", int(firsts[own[0]]))
            offsets, cells = _layout(
                int(descriptor), self.rows, self.K, self.itemsize, self.is_transposed, wave.shared.grain
            )
            if offsets.max() + self.itemsize > wave.shared.size:
                raise wave.fault("wgmma reads outside of shared memory", int(firsts[own[0]]))
            for index in own:
                lane = int(firsts[index])
                base = int(wave.program_of[lane]) * wave.shared.stride
                self._check(wave, lane, cells + base // wave.shared.grain, product)
                found[index] = self._numbers(wave.shared.data, offsets + base)
        return found

    def _numbers(self, data: Array, places: Array) -> Array:
        if self.kind == "tf32":
            return (data.view(np.uint32)[places // 4] & TF32_MASK).view(np.float32)
        bits = data.view(np.uint16)[places // 2]
        return from_bfloat16(bits) if self.kind == "bf16" else bits.view(np.float16)

    @staticmethod
    def _check(wave: Wave, lane: int, cells: Array, product: Product) -> None:
        shared, at = wave.shared, np.zeros(wave.lanes, bool)
        at[lane] = True
        if (shared.copies[cells] > 0).any():
            wave.find("race: wgmma reads shared memory while cp.async writes it", at)
        elif not shared.is_written[cells].all():
            wave.find("uninitialised shared memory", at)
        elif shared.hazards.is_written_since_barrier(cells, wave.stamps.value[lane]):
            wave.find("race: wgmma reads shared memory after a write, without a barrier", at)
        if (shared.unfenced[cells] != NOBODY).any():
            wave.find("wgmma reads shared memory after a write, without fence.proxy.async", at)
        shared.products[cells] += 1
        _note_read(wave, lane, cells)
        product.reads.append((lane, cells))


@lru_cache(maxsize=4096)
def _layout(descriptor: int, rows: int, K: int, itemsize: int, is_transposed: bool, grain: int) -> tuple[Array, Array]:
    """Return the offsets (rows, K) of the numbers that a descriptor stands for, and the cells that they lie in."""
    start, leading, stride = (((descriptor >> shift) & 0x3FFF) << 4 for shift in (0, 16, 32))
    width, exchanged = SWIZZLES[descriptor >> 62 & 3]
    per_row = width // itemsize
    row, k = np.meshgrid(np.arange(rows), np.arange(K), indexing="ij")
    if width == 16 and is_transposed:
        offsets = row % per_row * itemsize + row // per_row * stride + k % 8 * 16 + k // 8 * leading
    elif width == 16:
        offsets = row % 8 * 16 + row // 8 * stride + k % per_row * itemsize + k // per_row * leading
    elif is_transposed:
        offsets = row % per_row * itemsize + row // per_row * leading + k % 8 * width + k // 8 * stride
    else:
        offsets = row % 8 * width + row // 8 * stride + k * itemsize
    offsets = offsets + start
    # Bits 4 to 6 of an address are exchanged by bits 7 to 9.
    offsets = offsets ^ ((offsets >> 7 & exchanged) << 4)
    cells = np.unique((offsets[..., None] + np.arange(0, itemsize, min(grain, itemsize))) // grain)
    return offsets, cells


def _begin(instruction: Instruction) -> Step:
    """D = A B, or A B + D if a predicate says so; A has 64 rows, in shared memory or in registers."""
    M, N, K = shape_of(instruction)
    result, left, right = types(instruction)
    target, a, b, adds, *numbers = instruction.operands
    flags = [int(number.text) for number in numbers if isinstance(number, Immediate)]
    if M != 64 or result != "f32" or left != right or left not in ("bf16", "f16", "tf32") or flags[:2] != [1, 1]:
        raise unknown(instruction)
    transposed = [flag == 1 for flag in flags[2:]]
    accumulators = [item.index for item in items(target) if isinstance(item, Register)]
    in_registers = isinstance(a, Vector)
    fragments = [item.index for item in items(a) if isinstance(item, Register)] if in_registers else []
    if len(accumulators) != N // 2:
        raise unknown(instruction)
    A = None if in_registers else Operand(M, K, left, any(transposed[:1]), reader(a, "b64"))
    B = Operand(N, K, left, any(transposed[-1:]), reader(b, "b64"))
    read_adds = reader(adds, "pred")
    number = np.arange(len(accumulators))[:, None]
    rows, columns = GROUP + 8 * (number // 2 % 2), 8 * (number // 4) + 2 * WITHIN + number % 2

    def run(wave: Wave, mask: Mask) -> None:
        warps = _whole_groups(wave, mask)
        firsts = np.flatnonzero(warps.reshape(-1, WARPGROUP // WARP).any(1)) * WARPGROUP
        adding = np.broadcast_to(read_adds(wave), wave.lanes)
        _check_registers(wave, warps, mask, accumulators, fragments, bool(adding[wave.chosen(mask)].any()))
        product = Product(tuple(accumulators), tuple(fragments), wave.products.closed.copy(), warps.copy())
        if A is None:
            registers = [wave.registers[index] for index in fragments]
            factor = left_fragment(registers, left, 16, K).reshape(-1, 64, K)[firsts // WARPGROUP]
        else:
            factor = A.fetch(wave, firsts, product)
        total = np.zeros((wave.warps // 4, 64, N))
        total[firsts // WARPGROUP] = factor @ B.fetch(wave, firsts, product).transpose(0, 2, 1)
        sums = total.reshape(-1, 16, N)[:, rows, columns]  # (warps, accumulators, 32)
        for i, index in enumerate(accumulators):
            before = np.where(adding, wave.registers[index].view(np.float32), np.float32(0))
            bits = (before + sums[:, i].reshape(-1)).astype(np.float32).view(np.uint32)
            # Not `wave.set`: products may follow each other on the same accumulators.
            wave.registers[index] = bits if mask is None else np.where(mask, bits, wave.registers[index])
            wave.note_written(index, mask)
        wave.products.begin(wave, product)

    return run


def _check_registers(
    wave: Wave, warps: Array, mask: Mask, accumulators: list[int], fragments: list[int], is_adding: bool
) -> None:
    fenced = int(wave.products.fenced[warps].min())
    if fenced < 0:
        wave.find("wgmma before any wgmma.fence", mask)
    for index in (*accumulators, *fragments):
        name = wave.program.registers[index].name
        if is_adding or index in fragments:
            wave.check_written(index, mask)
        step, writers = wave.last_write[index]
        if step > fenced and (wave.warps_of(writers) & warps).any():
            wave.find(f"wgmma uses register {name} written after the last wgmma.fence", mask)
