"""The eigen phase at the scale of ImageNet: images of 224 x 224, more data than memory, and cost against data."""

from __future__ import annotations

import copy
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn

import s3d_fast as s3d
from benchmarks.compare import compare, error
from benchmarks.device import DEVICE, ON_CPU, seconds
from benchmarks.memory import peak_memory, resident_memory
from s3d_fast.base import byte_counts
from s3d_fast.models import MobileNetV1
from s3d_fast.operators import matvec_all
from s3d_fast.operators.streamed import DiskStream

TOLERANCE = 1e-2
IMAGES, BATCH = 64, 8
BUDGET = "4GiB"
# The other benchmarks capture small batches, within a tenth of the memory that they would need: one must fit.
SMALL_BATCH, SMALL_BATCHES = 1, 16
SIZES = (1, 2, 4, 8)

pytestmark = pytest.mark.skipif(not ON_CPU, reason="it measures the memory of the process")


@dataclass(frozen=True)
class Images:
    """Batches of images whose power falls with frequency, as in photographs; every pass makes them again."""

    batches: int
    batch_size: int
    size: int = 224

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.batch(index) for index in range(self.batches))

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        """Return images and labels of a batch."""
        generator = torch.Generator().manual_seed(index)
        noise = torch.randn(self.batch_size, 3, self.size, self.size, generator=generator)
        rows, columns = torch.fft.fftfreq(self.size)[:, None], torch.fft.rfftfreq(self.size)
        frequency = (rows.square() + columns.square()).sqrt().clamp(min=1 / self.size)
        x = torch.fft.irfft2(torch.fft.rfft2(noise) / frequency, s=(self.size, self.size))
        x = x / x.std(dim=(1, 2, 3), keepdim=True)
        y = torch.randint(1000, (self.batch_size,), generator=generator)
        return x.contiguous(memory_format=torch.channels_last).to(DEVICE), y.to(DEVICE)


def trained(batches: list[tuple[Tensor, Tensor]]) -> tuple[nn.Module, s3d.Graph]:
    """Return MobileNetV1 1.0x after a training step on every batch, with BatchNorm statistics of these batches."""
    torch.manual_seed(0)
    model = MobileNetV1().to(DEVICE, memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        training_pass(model, [batch])
        optimizer.step()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.reset_running_stats()
            norm.momentum = None
    with torch.no_grad():
        for x, _ in batches:
            model(x)
    model.eval()
    return model, s3d.trace(model, batches[0][0][:2])


def training_pass(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    model.train()
    for x, y in batches:
        F.cross_entropy(model(x), y).backward()


def step_of(captured: s3d.Captured) -> Callable[[], object]:
    """Return a call that computes one product S v of all filters."""
    operators = list(captured.values())
    vectors = [F.normalize(torch.randn(operator.shape), dim=-1).to(operator.device) for operator in operators]
    return lambda: matvec_all(operators, vectors)


def test_eigen_phase_at_224(benchmark: BenchmarkFixture) -> None:
    benchmark.group = "eigen phase of MobileNetV1 1.0x, 64 images of 224 x 224, 64 rows each, within 4 GiB"
    batches = list(Images(IMAGES // BATCH, BATCH))
    whole = [tuple(torch.cat(parts) for parts in zip(*batches, strict=True))]
    model, graph = trained(batches)
    # Training changes the statistics and so the spectra; the timed training passes use a copy.
    other = copy.deepcopy(model)

    def phase() -> dict[str, s3d.Spectrum]:
        operators = s3d.capture(model, F.cross_entropy, batches, graph, rows_per_sample=64, memory_budget=BUDGET)
        return s3d.extremal_eigenpairs(operators, solver="auto", tol=TOLERANCE)

    spectra, peak = peak_memory(phase)
    assert all(bool(spectrum.converged.all()) for spectrum in spectra.values())
    assert peak <= byte_counts.as_bytes("budget", BUDGET)
    compare(
        benchmark,
        phase,
        {
            "forward + backward": lambda: training_pass(other, whole),
            f"forward + backward, {BATCH} at a time": lambda: training_pass(other, batches),
        },
        aims={"forward + backward": 1 / 3},
        rounds=3,
    )
    benchmark.extra_info["figures"] = {
        "products": str(max(int(spectrum.matvecs.max()) for spectrum in spectra.values())),
        "peak memory of the process": byte_counts.as_text(peak),
    }


def test_spilled_step(benchmark: BenchmarkFixture) -> None:
    benchmark.group = "a step of the solver with a tenth of the memory"
    batches = list(Images(SMALL_BATCHES, SMALL_BATCH))
    model, graph = trained(batches)
    whole = s3d.capture(model, F.cross_entropy, batches, graph)
    spilled = s3d.capture(model, F.cross_entropy, batches, graph, memory_budget=whole.nbytes // 10)
    assert isinstance(spilled.stream, DiskStream)
    file = spilled.stream.file.fileno()
    os.fsync(file)
    # Layers whose S was formed need no products; leave them out of both.
    assert spilled.plan is not None
    on_disk = [name for name, place in spilled.plan.places.items() if place == "disk"]
    for captured in (whole, spilled):
        for name in set(captured) - set(on_disk):
            del captured[name]
    expected = s3d.extremal_eigenpairs(whole, tol=1e-5)
    found = s3d.extremal_eigenpairs(spilled, tol=1e-5)
    assert max(float(error(found[name], expected[name]).max()) for name in found) <= 1e-3

    step = step_of(spilled)

    def cold() -> None:
        # The kernel caches the file in free memory; drop the cache, so that it has to read the file again.
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        step()

    compare(benchmark, step, {"in memory": step_of(whole), "file not cached": cold}, aims={"in memory": 0.5}, rounds=15)
    benchmark.extra_info["figures"] = {
        "on disk": byte_counts.as_text(spilled.plan.disk_bytes),
        "budget": byte_counts.as_text(whole.nbytes // 10),
    }


def test_cost_against_data(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """Time is linear in the number of images, and memory does not grow with it."""
    benchmark.group = "cost against data"
    base = Images(SMALL_BATCHES, SMALL_BATCH)
    model, graph = trained(list(base))
    budget = s3d.capture(model, F.cross_entropy, base, graph).nbytes // 10

    def measure(size: int) -> tuple[float, float, int, int]:
        """Return the seconds of the capture and of a step, the memory that both take, and the bytes on disk."""
        images = Images(size * SMALL_BATCHES, SMALL_BATCH)
        times: list[float] = []

        def work() -> s3d.Captured:
            captured: list[s3d.Captured] = []
            options = {"memory_budget": budget, "scratch": tmp_path}
            times.append(
                seconds(lambda: captured.append(s3d.capture(model, F.cross_entropy, images, graph, **options)))
            )
            step = step_of(captured[0])
            times.append(statistics.median(seconds(step) for _ in range(3)))
            return captured[0]

        before = resident_memory()
        captured, peak = peak_memory(work)
        assert captured.plan is not None
        return times[0], times[1], peak - before, captured.plan.disk_bytes

    measure(SIZES[0])
    results: dict[int, list[tuple[float, float, int, int]]] = {size: [] for size in SIZES}

    def measure_all() -> None:
        for size in SIZES:
            results[size].append(measure(size))

    benchmark.pedantic(measure_all, rounds=3, iterations=1)
    rows = [["images", "capture, per image", "step, per image", "on disk", "memory"]]
    for size, measured in results.items():
        capture, step = (
            statistics.median(own[i] / first[i] / size for own, first in zip(measured, results[1], strict=True))
            for i in (0, 1)
        )
        taken = statistics.median(own[2] for own in measured)
        images = size * SMALL_BATCHES * SMALL_BATCH
        shown = [byte_counts.as_text(amount) for amount in (measured[0][3], int(taken))]
        rows.append([f"{size}x: {images}", f"{capture:.2f}", f"{step:.2f}", *shown])
        assert taken <= 1.15 * statistics.median(first[2] for first in results[1])
    benchmark.extra_info["table"] = rows
