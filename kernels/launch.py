"""How kernels are launched: configurations, tuning, dividing rows between programs, and summing partial results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from s3d_fast.kernels.device import INTERPRETED, Device
from s3d_fast.kernels.options import current


@dataclass(frozen=True)
class Config:
    """The sizes of a program's tile, and how it is compiled."""

    rows: int
    filters: int
    depth: int  # entries of a row
    warps: int
    stages: int

    @property
    def compile_options(self) -> dict[str, int]:
        """The keyword arguments of a launch."""
        return {"num_warps": self.warps, "num_stages": self.stages}

    def for_filters(self, filters: int) -> Config:
        """Return this configuration with smaller tiles for layers with few filters; a product needs at least 16."""
        return replace(self, filters=power_of_two(filters, 16, self.filters))


def arithmetic(form: str, stored: torch.dtype) -> str:
    """Return the kind of arithmetic, which selects the table of configurations.

    "fp64"; "fp32" (IEEE); "tensor" (tensor cores); or "widened" (16-bit rows as 32 bits, which need twice the space).
    """
    if stored == torch.float64:
        return "fp64"
    if form == "widened" or (form == "ieee" and stored != torch.float32):
        return "widened"
    return "fp32" if form == "ieee" else "tensor"


def shared_memory(device: Device, tiles: Sequence[int], buffered: Sequence[int], stages: int, epilogue: int = 0) -> int:
    """Return an upper bound on the shared memory of a program. All sizes are in bytes.

    `buffered` tiles are loaded ahead: while the program works on one stage, the others are loaded. After the loop, the
    result (`epilogue`) takes the place of the tiles. On AMD, tiles that are not buffered also take each other's place.
    """
    ahead = (stages - 1) * sum(buffered)
    if device.vendor == "amd":
        return max(*tiles, ahead, epilogue)
    return max(sum(tiles) + ahead, epilogue)


C = TypeVar("C")
_TUNED: dict[Hashable, object] = {}


def choose(key: Hashable, candidates: Sequence[C], run: Callable[[C], object]) -> C:
    """Return the configuration to use: the first candidate or, if tuning is on, the fastest, timed once per key.

    `candidates` are the configurations that fit the device, the default one first; `run` launches one of them.
    """
    if not candidates:
        raise RuntimeError(f"no configuration of the kernel fits this device: {key}")
    if not current().tune or len(candidates) == 1:
        return candidates[0]
    if key not in _TUNED:
        _TUNED[key] = min(candidates, key=lambda candidate: _seconds(lambda: run(candidate)))
    return _TUNED[key]  # type: ignore[return-value]


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
# this fraction of the time. A processor runs two programs at once: one computes while the other waits.
FULL_ENOUGH, AT_ONCE = 0.95, 2


def share_rows(rows: int, tiles: int, block: int, device: Device) -> tuple[int, int]:
    """Return the number of rows per program, a multiple of `block`, and the number of programs per tile.

    A program gets at least four blocks, except perhaps the last one. There are at most four programs per processor; if
    there are more tiles than that, each tile has one program.
    """
    most = max(1, min(4 * device.processors // tiles, rows // (4 * block)))
    full = {slices: fullness(tiles * slices, AT_ONCE * device.processors) for slices in range(1, most + 1)}
    slices = next((slices for slices in full if full[slices] >= FULL_ENOUGH), max(full, key=full.__getitem__))
    per_slice = math.ceil(rows / slices / block) * block
    return per_slice, math.ceil(rows / per_slice)


def on_device(tensor: Tensor) -> AbstractContextManager:
    """Return a context in which kernels launch on the device of the tensor."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@triton.jit
def tile_offsets(i, i_stride, j, j_stride, FAR: tl.constexpr):
    """i * i_stride + j * j_stride for the entries of a tile, in 64 bits if FAR, else in 32, which saves registers."""
    if FAR:
        return i.to(tl.int64)[:, None] * i_stride + j.to(tl.int64)[None, :] * j_stride
    else:
        return i[:, None] * i_stride + j[None, :] * j_stride


def is_far(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether offsets inside a tile of this shape need 64 bits."""
    return sum(size * stride for size, stride in zip(shape, strides, strict=True)) >= 2**31


@triton.jit(do_not_specialize=["slices"])
def sum_slices_kernel(
    partial,  # (slices, size)
    out,  # (size,)
    size,
    slices,
    BLOCK: tl.constexpr,
):
    """out = sum over the slices, in their order, of partial[slice]."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    total = tl.zeros((BLOCK,), out.dtype.element_ty)
    where = partial + i
    for _ in range(slices):
        total += tl.load(where, mask=inside, other=0.0)
        where += size
    tl.store(out + i, total, mask=inside)


SUM_BLOCK, SUM_WARPS = 512, 4


def sum_slices(partial: Tensor) -> Tensor:  # (slices, ...) -> (...)
    """Return the sum over the first dimension, always in the same order."""
    if len(partial) == 1:
        return partial[0]
    out = torch.empty_like(partial[0])
    grid = (triton.cdiv(out.numel(), SUM_BLOCK),)
    sum_slices_kernel[grid](partial, out, out.numel(), len(partial), BLOCK=SUM_BLOCK, num_warps=SUM_WARPS)
    return out
