"""Side-by-side timing: every round times the competitors, then ours, so that both see the same machine."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from pytest_benchmark.fixture import BenchmarkFixture

from s3d_fast import extension
from s3d_fast.solvers import Spectrum

Call = Callable[[], object]


class Limit:
    """What bounds an operation, measured in the same rounds: so much work, done by something at full speed."""

    def __init__(self, name: str, work: float, run: Call) -> None:
        self.name, self.work, self.run = name, work, run


def matmul_peak(dtype: torch.dtype = torch.float32) -> Limit:
    """Return the flops of a large square matrix product: sgemm, or dgemm for float64."""
    size = 1024
    A, out = torch.randn(size, size, dtype=dtype), torch.empty(size, size, dtype=dtype)
    return Limit("sgemm" if dtype == torch.float32 else "dgemm", 2 * size**3, lambda: torch.mm(A, A, out=out))


def copy_bandwidth(megabytes: int = 128) -> Limit:
    """Return the bytes read and written by a copy between two tensors that exist and are too large for any cache."""
    source = torch.ones(megabytes << 20, dtype=torch.uint8)
    target = torch.ones_like(source)
    return Limit("copy", 2 * source.numel(), lambda: target.copy_(source))


def clone_bandwidth(tensors: Sequence[torch.Tensor]) -> Limit:
    """Return the bytes read and written by copying tensors into memory that is allocated for it."""
    total = sum(tensor.nbytes for tensor in tensors)
    return Limit("clone", 2 * total, lambda: [tensor.clone() for tensor in tensors])


@contextlib.contextmanager
def without_extension() -> Iterator[None]:
    """Let everything compute as if the extension had not been built: plain PyTorch."""
    module, extension.module = extension.module, None
    try:
        yield
    finally:
        extension.module = module


def compare(
    benchmark: BenchmarkFixture,
    ours: Call,
    others: Mapping[str, Call],
    *,
    limits: Sequence[Limit] = (),
    work: float = 0,
    aims: Mapping[str, float] | None = None,
    rounds: int = 15,
) -> None:
    """Time `ours` as the benchmark, and write ratios to its extra_info.

    Args:
        others: the competitors by name; a ratio above 1 says that ours is faster.
        limits: what ours is bounded by.
        work: of ours, in the unit of the limits: flops or bytes.
        aims: by name of a competitor or of a limit, what the ratio should be at least.
        rounds: the ratio is the median over rounds of the competitor's time over ours in the same round.
    """
    calls = {**others, **{limit.name: limit.run for limit in limits}}
    times: dict[str, list[float]] = {name: [] for name in calls}

    def time_others() -> None:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)

    for _ in range(2):
        time_others()
        ours()
    for measured in times.values():
        measured.clear()
    benchmark.pedantic(ours, setup=time_others, rounds=rounds, iterations=1)
    if benchmark.stats is None:
        return
    mine = benchmark.stats.stats.data
    ratios = {
        name: statistics.median(theirs / own for theirs, own in zip(measured, mine, strict=True))
        for name, measured in times.items()
    }
    # Of a limit, the fraction of its speed; of a competitor, how many times faster than it.
    ratios.update({limit.name: ratios[limit.name] * work / limit.work for limit in limits})
    benchmark.extra_info["ratios"] = ratios
    benchmark.extra_info["aims"] = dict(aims or {})


def error(found: Spectrum, truth: Spectrum) -> torch.Tensor:
    """Return the larger error of the two eigenvalues of every filter, in units of its spectral radius."""
    low, high = (found.lambda_min - truth.lambda_min).abs(), (found.lambda_max - truth.lambda_max).abs()
    # A filter that gets no gradient has S = 0.
    return torch.maximum(low, high) / torch.where(truth.radius > 0, truth.radius, 1)
