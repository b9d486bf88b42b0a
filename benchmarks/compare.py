"""Side-by-side timing: every round times the competitors, then ours, so that both see the same machine."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.device import DEVICE, ON_CPU, seconds
from s3d_fast.backends import extension, operations
from s3d_fast.backends.reference import REFERENCE
from s3d_fast.solvers import Spectrum

Call = Callable[[], object]


class Limit:
    """A hardware limit, measured in the same rounds: `run` does `work` flops or bytes at full speed."""

    def __init__(self, name: str, work: float, run: Call) -> None:
        self.name, self.work, self.run = name, work, run


class Rate:
    """A hardware limit that a call measures itself, in the same rounds: flops or bytes per second."""

    def __init__(self, name: str, measure: Callable[[], float]) -> None:
        self.name, self.measure = name, measure


def fma_peak() -> list[Rate]:
    """Return the peak of fused multiply-adds in float32 on all threads of a CPU; nothing on a GPU."""
    kernels = extension.module
    if kernels is None or not ON_CPU:
        return []
    isa = kernels.available_isas()[0]
    return [Rate("FMA peak", lambda: torch.get_num_threads() * kernels.fma_peak(isa))]


GEMM = {torch.float32: "sgemm", torch.float64: "dgemm", torch.bfloat16: "bf16 gemm", torch.float16: "fp16 gemm"}


def matmul_peak(dtype: torch.dtype = torch.float32) -> Limit:
    """Return the limit of arithmetic: a matrix product by the vendor's library, large enough to fill the device."""
    size = 1024 if ON_CPU else 8192
    A = torch.randn(size, size, device=DEVICE).to(dtype)
    out = torch.empty_like(A)
    return Limit(GEMM[dtype], 2 * size**3, lambda: torch.mm(A, A, out=out))


def copy_bandwidth(megabytes: int = 128) -> Limit:
    """Return the limit of bandwidth: a copy between two existing tensors that are too large for any cache."""
    source = torch.ones(megabytes << 20, dtype=torch.uint8, device=DEVICE)
    target = torch.ones_like(source)
    return Limit("copy", 2 * source.numel(), lambda: target.copy_(source))


def clone_bandwidth(tensors: Sequence[torch.Tensor]) -> Limit:
    """Return the limit of bandwidth into new memory: copies of tensors into memory allocated for them."""
    total = sum(tensor.nbytes for tensor in tensors)
    return Limit("clone", 2 * total, lambda: [tensor.clone() for tensor in tensors])


@contextlib.contextmanager
def plain_pytorch() -> Iterator[None]:
    """Make every operation use the reference backend."""
    chosen, operations.choose = operations.choose, lambda name, *tensors: REFERENCE
    try:
        yield
    finally:
        operations.choose = chosen


def compare(
    benchmark: BenchmarkFixture,
    ours: Call,
    others: Mapping[str, Call],
    *,
    limits: Sequence[Limit] = (),
    rates: Sequence[Rate] = (),
    work: float = 0,
    aims: Mapping[str, float] | None = None,
    rounds: int = 15,
) -> None:
    """Time `ours` as the benchmark, and write ratios to its extra_info.

    Args:
        others: the competitors by name; a ratio above 1 says that ours is faster.
        limits, rates: the hardware limits of ours.
        work: the work of ours, in the unit of the limits: flops or bytes.
        aims: the smallest ratio wanted, by name of a competitor or limit.
        rounds: how many rounds; a ratio is the median over rounds of the competitor's time over ours.
    """
    calls = {**others, **{limit.name: limit.run for limit in limits}}
    times: dict[str, list[float]] = {name: [] for name in calls}
    mine: list[float] = []
    peaks: dict[str, list[float]] = {rate.name: [] for rate in rates}

    def time_others() -> None:
        for name, call in calls.items():
            times[name].append(seconds(call))
        for rate in rates:
            peaks[rate.name].append(rate.measure())

    def time_ours() -> None:
        mine.append(seconds(ours))

    for _ in range(2):
        time_others()
        time_ours()
    for measured in (mine, *times.values(), *peaks.values()):
        measured.clear()
    benchmark.pedantic(time_ours, setup=time_others, rounds=rounds, iterations=1)
    if benchmark.stats is None:
        return
    ratios = {
        name: statistics.median(theirs / own for theirs, own in zip(measured, mine, strict=True))
        for name, measured in times.items()
    }
    # For a limit: the fraction of it that ours reaches. For a competitor: how many times faster ours is.
    ratios.update({limit.name: ratios[limit.name] * work / limit.work for limit in limits})
    for name, measured in peaks.items():
        ratios[name] = statistics.median(work / own / peak for own, peak in zip(mine, measured, strict=True))
    benchmark.extra_info["ratios"] = ratios
    # The aims are set for CPUs.
    benchmark.extra_info["aims"] = dict(aims or {}) if ON_CPU else {}


def error(found: Spectrum, truth: Spectrum) -> torch.Tensor:
    """Return the larger error of the two eigenvalues of every filter, in units of its spectral radius."""
    low, high = (found.lambda_min - truth.lambda_min).abs(), (found.lambda_max - truth.lambda_max).abs()
    # A filter that gets no gradient has S = 0.
    return torch.maximum(low, high) / torch.where(truth.radius > 0, truth.radius, 1)
