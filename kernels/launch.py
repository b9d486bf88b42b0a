"""How kernels are launched: configurations, tuning, how rows are shared out, and the sum of partial results."""

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
        """Return this configuration with no more filters than there are, but for the least that a product takes."""
        return replace(self, filters=power_of_two(filters, 16, self.filters))


def arithmetic(form: str, stored: torch.dtype) -> str:
    """Return the arithmetic that decides which configurations are good.

    "fp64"; "fp32", IEEE; "tensor" cores; or "widened", 16-bit rows in 32 bits, which take twice the room.
    """
    if stored == torch.float64:
        return "fp64"
    if form == "widened" or (form == "ieee" and stored != torch.float32):
        return "widened"
    return "fp32" if form == "ieee" else "tensor"


def shared_memory(device: Device, tiles: Sequence[int], buffered: Sequence[int], stages: int, epilogue: int = 0) -> int:
    """Return how much shared memory a program takes at most, for tiles of these many bytes, some of them loaded ahead.

    While one stage is worked on, the others are loaded. When the loop is over, the result passes through in place of
    the tiles; on AMD every tile that is not loaded ahead does so.
    """
    ahead = (stages - 1) * sum(buffered)
    if device.vendor == "amd":
        return max(*tiles, ahead, epilogue)
    return max(sum(tiles) + ahead, epilogue)


C = TypeVar("C")
_TUNED: dict[Hashable, object] = {}


def choose(key: Hashable, candidates: Sequence[C], run: Callable[[C], object]) -> C:
    """Return the configuration to use: the first one, or the fastest where tuning is on; that is found once per key.

    `candidates` are those that fit the device, the default one first; `run` launches with one of them.
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
    """Return the next power of two, within bounds."""
    return min(max(triton.next_power_of_2(max(size, 1)), least), most)


def fullness(programs: int, processors: int) -> float:
    """Return the fraction of the processors' time in which they have a program, if all programs take equally long."""
    return programs / (math.ceil(programs / processors) * processors)


# Rather few programs that leave little idle than many: each slice of the rows writes a result of its own. A processor
# has two programs at least, so that one computes while the other waits.
FULL_ENOUGH, AT_ONCE = 0.95, 2


def share_rows(rows: int, tiles: int, block: int, device: Device) -> tuple[int, int]:
    """Return how many rows one program takes, a multiple of `block`, and how many programs that makes of each tile.

    A program has four blocks or more, the last one perhaps fewer; there are at most four programs per processor, or one
    per tile.
    """
    most = max(1, min(4 * device.processors // tiles, rows // (4 * block)))
    full = {slices: fullness(tiles * slices, AT_ONCE * device.processors) for slices in range(1, most + 1)}
    slices = next((slices for slices in full if full[slices] >= FULL_ENOUGH), max(full, key=full.__getitem__))
    per_slice = math.ceil(rows / slices / block) * block
    return per_slice, math.ceil(rows / per_slice)


def on_device(tensor: Tensor) -> AbstractContextManager:
    """Return a context in which kernels go to the device of the tensor."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@triton.jit
def tile_offsets(i, i_stride, j, j_stride, FAR: tl.constexpr):
    """Where the entries of a tile are, from its origin: in 32 bits, which saves registers, unless that is too FAR."""
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
