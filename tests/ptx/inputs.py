"""Inputs for small kernels: integers and floating-point numbers of every kind, and results that nobody has written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
I8, U8, I32, U32, I64, U64 = torch.int8, torch.uint8, torch.int32, torch.uint32, torch.int64, torch.uint64
# What a kernel has not written.
UNWRITTEN = 77


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def out(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, UNWRITTEN, dtype=dtype)


def small_integers(*shape: int, dtype: torch.dtype = F32, seed: int = 0, largest: int = 8) -> Tensor:
    """Return integers whose products and sums every dtype here holds exactly."""
    return torch.randint(-largest, largest + 1, shape, generator=generator(seed)).to(dtype)


def integers(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return integers of every magnitude, the extremes first."""
    bits = 8 * dtype.itemsize
    wide = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator(seed))
    wide >>= 64 - bits + torch.randint(0, bits - 1, (count,), generator=generator(seed + 100))
    wide[:4] = torch.tensor([-(2 ** (bits - 1)), 2 ** (bits - 1) - 1, -1, 0])
    return wide.to({4: I32, 8: I64, 1: I8}[dtype.itemsize]).view(dtype)


def divisors(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return integers without 0, whose quotients with the extremes exist."""
    found = integers(count, dtype, seed)
    signed = found.view({4: I32, 8: I64}[dtype.itemsize])
    signed[signed == 0] = 5
    signed[:4] = torch.tensor([3, -2, 7, 11])
    return found


SPECIAL = (0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, -1.0, 1.5, -2.5, 0.5)


def floats(dtype: torch.dtype, seed: int, count: int = 256) -> Tensor:
    """Return numbers of every kind, `seed` times as far apart: all pairs of the special ones, then random ones."""
    special = torch.tensor(SPECIAL, dtype=F64)
    pairs = (special.repeat(len(special)), special.repeat_interleave(len(special)))[seed % 2]
    random = torch.randn(count - len(pairs), generator=generator(seed), dtype=F64)
    random *= 2.0 ** torch.randint(-5, 6, random.shape, generator=generator(seed + 100))
    return torch.cat([pairs, random]).to(dtype)


def numbers(dtype: torch.dtype, seed: int) -> Tensor:
    """Return numbers of every kind, some of them the same for every seed."""
    if dtype.is_floating_point:
        return floats(dtype, seed)
    found = integers(256, dtype, seed)
    found[64:96] = torch.arange(-8, 24).to(I64).to(dtype)
    return found


def convertible(dtype: torch.dtype, is_finite: bool) -> Tensor:
    """Return numbers that are hard to convert: ties, numbers that overflow to infinity, and subnormal ones.

    With is_finite only those that are in the range of int8.
    """
    if not dtype.is_floating_point:
        # The ties of float32 and of bfloat16, and whole numbers up to the ends of the range.
        ties = torch.tensor([2**24 + 1, 2**24 + 3, 2**53 + 1, 257, 259, 65519, 65520, 2049, 2051])
        bound = 2 ** (8 * dtype.itemsize - 1)
        found = integers(64, dtype, 0)
        found[: len(ties)] = torch.where(ties < bound, ties, found[: len(ties)].to(I64)).to(dtype)
        return found
    halves = torch.arange(-16, 16, dtype=F64) / 2
    if is_finite:
        more = torch.tensor([127.99, -127.99, 100.5, -99.5, 1e-7, -1e-7, 0.999999, -0.999999], dtype=F64)
        return torch.cat([halves, more, 30 * torch.randn(24, generator=generator(0), dtype=F64)]).to(dtype)
    steps = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-24], dtype=F64)
    above = torch.tensor([65504, 65519, 65520, 3.3895e38, 3.3961e38, 3.5e38, torch.inf, torch.nan], dtype=F64)
    below = torch.tensor([2.0**-25, 1.5 * 2.0**-25, 3 * 2.0**-26, 1e-5, 2.0**-130, 3 * 2.0**-150, 1e-40], dtype=F64)
    both = torch.cat([steps, above, below])
    return torch.cat([halves[:24], both, -both]).to(dtype)


def matrix(rows: int, columns: int, dtype: torch.dtype, is_transposed: bool = False, seed: int = 0) -> Tensor:
    shape = (columns, rows) if is_transposed else (rows, columns)
    made = small_integers(*shape, dtype=dtype, seed=seed)
    return made.T if is_transposed else made


def converted(dtype: torch.dtype, is_finite: bool) -> Callable[[], Sequence[Any]]:
    targets = [F64, F32, F16, BF16, I64, I32, I8, U8]
    whole = is_finite or not dtype.is_floating_point
    return lambda: (
        convertible(dtype, is_finite),
        *(out(64, dtype=target) if whole or target.is_floating_point else None for target in targets),
    )


def dotted(
    dtype: torch.dtype, M: int, N: int, K: int, transposed: tuple[bool, ...], twice: bool = False
) -> Callable[[], Sequence[Any]]:
    def arguments() -> Sequence[Any]:
        a, b = matrix(M, K, dtype, transposed[0], 0), matrix(K, N, dtype, transposed[1], 1)
        return a, b, out(M, K if twice else N, dtype=F64 if dtype == F64 else F32), *a.stride(), *b.stride()

    return arguments
