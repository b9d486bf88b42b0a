"""How kernels are launched: configurations, tuning, dividing rows between programs, and summing partial results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from s3d_fast.kernels.device import INTERPRETED, Device
from s3d_fast.kernels.options import current


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel. It runs, or it is compiled for a GPU that is not here: both see the same arguments."""

    name: str
    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int
    stages: int = 2
    # The multiplications of tensor cores that one pass of each loop needs; empty if the kernel has no product.
    work: tuple[int, ...] = ()
    label: str = ""
    # Further options of the compiler.
    options: Mapping[str, int] = field(default_factory=dict)

    def run(self) -> Any:
        """Launch the kernel on the current device; return what Triton compiled for it, None if it is interpreted."""
        return self.kernel[self.grid](**self.arguments, num_warps=self.warps, num_stages=self.stages, **self.options)


class Plan(NamedTuple):
    """The launches of an operation, in their order, and the tensor that holds its result after them."""

    launches: list[Launch]
    result: Tensor

    def run(self) -> Tensor:
        """Launch all kernels and return the result."""
        for launch in self.launches:
            launch.run()
        return self.result


C = TypeVar("C")
_TUNED: dict[Hashable, object] = {}


def choose(key: Hashable, candidates: Sequence[C], make: Callable[[C], Plan]) -> Tensor:
    """Run the plan of one configuration: of the first or, if tuning is on, of the fastest, timed once per key.

    `candidates` are the configurations that fit the device, the default one first; `make` returns the plan of one.
    """
    if not candidates:
        raise RuntimeError(f"no configuration of the kernel fits this device: {key}")
    if not current().tune or len(candidates) == 1:
        return make(candidates[0]).run()
    if key not in _TUNED:
        _TUNED[key] = _fastest(key, candidates, make)
    return make(_TUNED[key]).run()  # type: ignore[arg-type]


def _fastest(key: Hashable, candidates: Sequence[C], make: Callable[[C], Plan]) -> C:
    """Return the fastest configuration. One that does not launch is left out, unless none does."""
    times: dict[C, float] = {}
    errors: list[Exception] = []
    for candidate in candidates:
        try:
            times[candidate] = _seconds(lambda candidate=candidate: make(candidate).run())  # type: ignore[misc]
        except (RuntimeError, triton.TritonError) as error:  # noqa: PERF203 - a launch takes longer
            errors.append(error)
    if not times:
        raise RuntimeError(f"no configuration of the kernel launches on this device: {key}") from errors[0]
    return min(times, key=times.__getitem__)


def _seconds(call: Callable[[], object]) -> float:
    call()
    if not INTERPRETED:
        return triton.testing.do_bench(call, return_mode="median")
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def power_of_two(size: int, least: int, most: int) -> int:
    """Return the smallest power of two that is at least `size`, clamped to [least, most]."""
    return min(max(triton.next_power_of_2(max(size, 1)), least), most)


def fullness(programs: int, processors: int) -> float:
    """Return the fraction of the time that processors are busy, if all programs take equally long."""
    return programs / (math.ceil(programs / processors) * processors)


# Each slice of the rows writes its own result, so we take the smallest number of slices that keeps processors busy for
# this fraction of the time. A processor runs at least two programs at once: one computes while the other waits.
FULL_ENOUGH, AT_ONCE = 0.95, 2


def share_rows(rows: int, tiles: int, block: int, device: Device, warps: int) -> tuple[int, int]:
    """Return the number of rows per program, a multiple of `block`, and the number of programs per tile.

    A program gets at least four blocks, except perhaps the last one. There are at most twice as many programs as run at
    once; if there are more tiles than that, each tile has one program.
    """
    most = max(1, min(2 * programs_at_once(device, warps) // tiles, rows // (4 * block)))
    full = {slices: fullness(tiles * slices, programs_at_once(device, warps)) for slices in range(1, most + 1)}
    slices = next((slices for slices in full if full[slices] >= FULL_ENOUGH), max(full, key=full.__getitem__))
    per_slice = math.ceil(rows / slices / block) * block
    return per_slice, math.ceil(rows / per_slice)


def hidden_one(device: Device) -> float | None:
    """Return the argument `one` of kernels that transpose what they load.

    On NVIDIA, the compiler copies such a tile asynchronously only if it is computed with before it is transposed: the
    kernel multiplies it by this number, which must not be known at compile time. The interpreter copies nothing, and
    would multiply the raw bits of 16-bit numbers.
    """
    return 1.0 if device.vendor == "nvidia" and not INTERPRETED else None


def on_device(tensor: Tensor) -> AbstractContextManager:
    """Return a context in which kernels launch on the device of the tensor."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@triton.jit
def tile_offsets(i, i_stride, j, j_stride):
    """i * i_stride + j * j_stride for the entries of a tile, in 32 bits: see `aligned.is_near`."""
    return i[:, None] * i_stride + j[None, :] * j_stride


@triton.jit
def loadable(size, WHOLE: tl.constexpr):
    """How many entries of a row may be loaded: `size`, or with WHOLE as many as the next multiple of 16."""
    if WHOLE:
        # Plain arithmetic: a size of 1 is a constant, which takes no hint that it is a multiple.
        return tl.cdiv(size, 16) * 16
    else:
        return size


@triton.jit
def slices_added(where, inside, size, slices, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr):
    """The sums over the slices, in a fixed order, of `size` entries each, for the BLOCK entries at `where`.

    Many slices are read at once: one after the other, every read would wait for the one before.
    """
    r = tl.arange(0, AT_ONCE)
    total = tl.zeros((AT_ONCE, BLOCK), where.dtype.element_ty)
    places = where[None, :] + r.to(tl.int64)[:, None] * size
    for first in range(0, slices, AT_ONCE):
        total += tl.load(places, mask=(r < slices - first)[:, None] & inside[None, :], other=0.0)
        places += AT_ONCE * size
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["slices"])
def sum_slices_kernel(
    partial,  # (slices, size)
    out,  # (size,)
    size,
    slices,
    AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = sum over the slices of partial[slice]."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    total = slices_added(partial + i, inside, tl.cast(size, tl.int64), slices, AT_ONCE, BLOCK)
    tl.store(out + i, total, mask=inside)


# Four warps: each thread reads 16 bytes at a time, four times before it waits.
SUM_SLICES, SUM_BLOCK, SUM_WARPS = 32, 512 if INTERPRETED else 64, 4


def summed(launches: list[Launch], partial: Tensor) -> Plan:  # partial: (slices, ...)
    """Return the plan whose result is the sum over the slices that these launches write, always in the same order."""
    if len(partial) == 1:
        return Plan(launches, partial[0])
    out = torch.empty_like(partial[0])
    arguments = dict(
        partial=partial, out=out, size=out.numel(), slices=len(partial), AT_ONCE=SUM_SLICES, BLOCK=SUM_BLOCK
    )
    grid = (triton.cdiv(out.numel(), SUM_BLOCK),)
    return Plan([*launches, Launch("sum of slices", sum_slices_kernel, grid, arguments, SUM_WARPS)], out)


def part_size(total: int, most: int, step: int = 1) -> int:
    """Return the size of even parts of a total: multiples of `step`, with at most `most`, but at least one step.

    A last part that is much smaller than the others would leave most processors idle.
    """
    if total <= most:
        return total
    parts = math.ceil(total / max(step, most // step * step))
    return math.ceil(total / parts / step) * step


# What a processor has warps of its own for, at least: AMD's has four units, NVIDIA's four with two warps each.
WARPS_AT_ONCE = {"amd": 4, "nvidia": 8}


def programs_at_once(device: Device, warps: int) -> int:
    """Return how many programs of so many warps run at once."""
    return device.processors * max(AT_ONCE, WARPS_AT_ONCE.get(device.vendor, 0) // warps)
