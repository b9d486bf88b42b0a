"""The best possible speed of the kernels on GPUs, by a roofline model: python -m benchmarks.roofline.

A MODEL, NOT A MEASUREMENT. A kernel takes the longest of three times, plus a fixed time per launch: its arithmetic at
the peak rate, its memory traffic at the peak bandwidth, and its reads from the level-2 cache at the cache's bandwidth.
An idle part of the last wave of programs slows the arithmetic; processors without a program slow the traffic.
Programs, tiles and slices are those that the kernels' own code would launch. Registers and shared memory, which limit
how many programs a processor holds, come from the compiler (docs/gpu.json, written by python -m s3d_fast.kernels.aot).
The unfused form is s3d_fast.maths.reference with every operation at the peaks and no idle wave, which favours it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from s3d_fast.base.tables import text_table
from s3d_fast.kernels import configs, grouped, launch, pointwise_wide
from s3d_fast.kernels.compiled import TARGETS, Target
from s3d_fast.kernels.grouped import Member
from s3d_fast.kernels.products import product_form
from s3d_fast.maths import reference
from s3d_fast.models.mobilenet import FULL_WIDTHS
from s3d_fast.solvers.lanczos import CHECK_EVERY
from tests.cases import LARGE_EDGES, NETWORKS, EdgeCase, RowsCase, mobilenet_layers

TABLE = Path(__file__).parents[1] / "docs" / "gpu.json"


@dataclass(frozen=True)
class Gpu:
    """The peak rates of a GPU per second, from its vendor's data sheet."""

    target: str
    memory: float  # bytes
    cache: float  # bytes read from level 2
    flops: dict[str, float]
    registers: int  # per processor
    threads: int  # per processor, at most
    shared_memory: int  # bytes per processor
    warp: int


# NVIDIA A100 80GB SXM, H100 SXM and AMD Instinct MI300X data sheets. Level 2: 5120 bytes per clock on A100 (from its
# whitepaper), assumed for H100 too; the peak of the Infinity Cache on MI300X.
GPUS = {
    "A100": Gpu("sm_80", 2.039e12, 5120 * 1.41e9, {"fp32": 19.5e12, "bf16": 312e12}, 65536, 2048, 167936, 32),
    "H100": Gpu("sm_90", 3.35e12, 5120 * 1.755e9, {"fp32": 66.9e12, "bf16": 989e12}, 65536, 2048, 233472, 32),
    "MI300X": Gpu("gfx942", 5.3e12, 17.2e12, {"fp32": 163.4e12, "bf16": 1307e12}, 131072, 2048, 65536, 64),
}
# The time between two queued kernels, and the time of a launch when the host is not ahead of the device.
GAP, HOST_LAUNCH = 2e-6, 5e-6
# Lanczos products of a layer: see test_lanczos in benchmarks/test_solvers.py.
STEPS = 44


@dataclass
class Work:
    """The work of a GPU in one or more launches."""

    flops: float = 0
    bytes: float = 0
    cached: float = 0  # bytes read through level 2
    seconds: float = 0
    launches: float = 0
    bound: str = ""

    def __add__(self, other: Work) -> Work:
        longer = self if self.seconds >= other.seconds else other
        return Work(
            self.flops + other.flops,
            self.bytes + other.bytes,
            self.cached + other.cached,
            self.seconds + other.seconds,
            self.launches + other.launches,
            longer.bound,
        )


@dataclass(frozen=True)
class Busy:
    """How much of the GPU the programs of a kernel use."""

    waves: float = 1.0  # the fraction of all waves, including the last, that is not idle
    processors: float = 1.0  # the fraction of processors that have a program


def kernel(gpu: Gpu, dtype: str, flops: float, moved: float, cached: float = 0, busy: Busy = Busy()) -> Work:  # noqa: B008
    """Return the work of one launch."""
    times = {
        "arithmetic": flops / gpu.flops[dtype] / busy.waves,
        "memory": moved / gpu.memory / busy.processors,
        "cache": cached / gpu.cache / busy.processors,
    }
    bound = max(times, key=times.__getitem__)
    return Work(flops, moved, cached, times[bound] + GAP, 1, bound)


class Table:
    """Registers and shared memory of the compiled kernels."""

    def __init__(self, path: Path) -> None:
        self.entries = json.loads(path.read_text())

    def busy(self, gpu: Gpu, dtype: str, name: str, programs: int, warps: int) -> Busy:
        """Return how much of the GPU this many programs of a kernel use."""
        wanted = (name, gpu.target, dtype)
        entry = next(item for item in self.entries if (item["kernel"], item["target"], item["dtype"]) == wanted)
        threads, processors = warps * gpu.warp, TARGETS[gpu.target].device.processors
        at_once = min(
            gpu.registers // (threads * entry["registers"]),
            gpu.threads // threads,
            gpu.shared_memory // max(1, entry["shared_memory"]),
        )
        slots = processors * max(1, at_once)
        return Busy(programs / (math.ceil(programs / slots) * slots), min(1, programs / processors))


class Fused:
    """The Triton kernels' work on one GPU."""

    def __init__(self, gpu: Gpu, dtype: str, table: Table) -> None:
        self.gpu, self.dtype, self.table = gpu, dtype, table
        self.target: Target = TARGETS[gpu.target]
        self.stored = torch.float32 if dtype == "fp32" else torch.bfloat16
        self.form = product_form(self.stored, "highest", self.target.device)
        # The split form stores the other factor in two parts, which takes two products.
        self.parts = 2 if self.form == "split" else 1

    def narrow(self, cases: Sequence[RowsCase]) -> Work:
        """Return the work of one grouped launch and of the launch that adds up its slices."""
        if not cases:
            return Work()
        config = configs.grouped(self.target.device, self.form, self.stored)[0]
        layers = [_meta_layer(case, self.stored) for case in cases]
        plan = grouped.make_table(layers, [layer.V for layer in layers], config, self.target.device)
        flops = moved = cached = 0.0
        for case in cases:
            width = launch.power_of_two(case.D, 16, 256)
            filters = config.configs[configs.WIDTHS.index(width)].filters
            blocks = math.ceil(case.M / filters)
            flops += 4 * case.N * width * blocks * filters * self.parts
            moved += case.N * (case.D + case.M) * self.stored.itemsize + 4 * case.M * case.D
            cached += blocks * case.N * case.D * self.stored.itemsize
        # Tiles are equal work, so only the last round of tiles leaves processors idle.
        programs = self.target.device.processors * config.per_processor
        rounds = math.ceil(plan.tiles / programs)
        busy = Busy(plan.tiles / (rounds * programs), min(1, plan.tiles / programs))
        product = kernel(self.gpu, self.dtype, flops, moved + 4 * plan.partial_size, cached, busy)
        return product + kernel(self.gpu, "fp32", plan.partial_size, 4 * (plan.partial_size + plan.out_size))

    def wide(self, case: RowsCase) -> Work:
        """Return the work of a layer with more than 256 inputs: two launches and the sum of their slices."""
        device, size = self.target.device, self.stored.itemsize
        project, accumulate = configs.wide(device, self.form, self.stored, case.N)[0]
        name = "wide, project" + ", few rows" * (case.N <= configs.FEW_ROWS)
        planes, product_dtype = pointwise_wide.product_storage(self.form, self.stored)
        product_bytes = planes * product_dtype.itemsize * case.N * case.M
        flops = 2 * case.N * case.D * case.M * self.parts
        blocks = math.ceil(case.M / project.filters)
        programs = blocks * math.ceil(case.N / project.rows)
        busy = self.table.busy(self.gpu, self.dtype, name, programs, project.warps)
        X, C, V = case.N * case.D * size, case.N * case.M * size, 4 * case.M * case.D
        cached = blocks * X + math.ceil(case.N / project.rows) * V
        first = kernel(self.gpu, self.dtype, flops, X + C + V + product_bytes, cached, busy)
        tiles = math.ceil(case.D / accumulate.rows) * math.ceil(case.M / accumulate.filters)
        _, slices = launch.share_rows(case.N, tiles, accumulate.depth, device)
        busy = self.table.busy(self.gpu, self.dtype, "wide, accumulate", tiles * slices, accumulate.warps)
        cached = math.ceil(case.M / accumulate.filters) * X + math.ceil(case.D / accumulate.rows) * product_bytes
        second = kernel(self.gpu, self.dtype, flops, X + product_bytes + slices * V, cached, busy)
        if slices == 1:
            return first + second
        return first + second + kernel(self.gpu, "fp32", slices * V / 4, (slices + 1) * V)

    def edges(self, case: EdgeCase) -> Work:
        """Return the work of an EdgeConv layer: four launches and the sum of their slices."""
        rows, size = case.B * case.P, self.stored.itemsize
        pair = configs.wide(self.target.device, self.form, self.stored, rows)[0]
        product, sums = pair[0].for_gathers(), pair[1].for_inputs(case.F)
        X, C, V, L = rows * case.F * size, rows * case.M * size, 8 * case.M * case.F, 4 * rows * case.M
        flops = 2 * rows * case.F * case.M * self.parts
        programs = math.ceil(rows / product.rows) * math.ceil(case.M / product.filters)
        busy = self.table.busy(self.gpu, self.dtype, "edgeconv, points", programs, product.warps)
        first = kernel(self.gpu, self.dtype, flops, X + V + L, 0, busy)
        # Reading P at the winners hits the cache: a cloud's part of P is small. Winners take 4 bytes, like a product.
        second = kernel(self.gpu, self.dtype, flops, X + V + L + C + L + L, L, busy)
        # order and start take 4 bytes each; reading t in this order hits the cache.
        third = kernel(self.gpu, "fp32", rows * case.M, 5 * L, L)
        tiles = math.ceil(case.F / sums.rows) * math.ceil(2 * case.M / sums.filters)
        _, slices = launch.share_rows(rows, tiles, sums.depth, self.target.device)
        busy = self.table.busy(self.gpu, self.dtype, "wide, accumulate", tiles * slices, sums.warps)
        cached = math.ceil(case.F / sums.rows) * 2 * L
        fourth = kernel(self.gpu, self.dtype, 2 * flops, X + 2 * L + slices * V, cached, busy)
        return first + second + third + fourth + kernel(self.gpu, "fp32", slices * V / 4, (slices + 1) * V)

    def lanczos_step(self, sizes: Sequence[tuple[int, int]], step: int) -> Work:
        """Return the work of orthogonalising every layer, a launch each, and a share of the check of all layers."""
        work = Work()
        for filters, width in sizes:
            work += kernel(self.gpu, "fp32", 8 * filters * width * step, 4 * filters * width * (2 * step + 3))
        # The tridiagonal eigenproblem is a chain of divisions: about 30 sweeps, 40 clocks per step.
        seconds = 30 * step * 40 / 1.5e9 + GAP
        return work + Work(seconds=seconds / CHECK_EVERY, launches=1 / CHECK_EVERY, bound="latency")


class Unfused:
    """The reference's work on one GPU: matrix products and elementwise operations through memory."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def rows(self, case: RowsCase, dtype: str) -> Work:
        """Return the work of ((X V^T) * C)^T X, operation by operation, in float32; 16-bit rows are converted first."""
        X, C, V = 4 * case.N * case.D, 4 * case.N * case.M, 4 * case.M * case.D
        flops = 2 * case.N * case.D * case.M
        work = kernel(self.gpu, "fp32", flops, X + V + C)
        work += kernel(self.gpu, "fp32", case.N * case.M, 3 * C)
        work += kernel(self.gpu, "fp32", flops, C + X + V)
        if dtype != "fp32":
            work += kernel(self.gpu, "fp32", 0, 1.5 * X) + kernel(self.gpu, "fp32", 0, 1.5 * C)
        return work

    def edges(self, case: EdgeCase, dtype: str) -> Work:
        """Return the work of `reference.edgeconv_matvec`, operation by operation."""
        rows = case.B * case.P
        X, L, V = 4 * rows * case.F, 4 * rows * case.M, 8 * case.M * case.F
        flops = 2 * rows * case.F * case.M
        work = kernel(self.gpu, "fp32", flops, X + V + L) + kernel(self.gpu, "fp32", flops, X + V + L)
        # gather (its index is 8 bytes), add, times C, zeros, scatter, difference; then two products and their sums.
        for moved in (4 * L, 3 * L, 3 * L, L, 5 * L, 3 * L):
            work += kernel(self.gpu, "fp32", 0, moved)
        work += kernel(self.gpu, "fp32", flops, X + L + case.B * V) + kernel(
            self.gpu, "fp32", flops, X + L + case.B * V
        )
        if dtype != "fp32":
            work += kernel(self.gpu, "fp32", 0, 1.5 * X) + kernel(self.gpu, "fp32", 0, 1.5 * L)
        return work

    def lanczos_step(self, sizes: Sequence[tuple[int, int]], step: int) -> Work:
        """Return the work of `reference.krylov_extend` for every layer and a share of the check, by operation."""
        work = Work()
        for filters, width in sizes:
            work += kernel(self.gpu, "fp32", 8 * filters * width * step, 4 * filters * width * (4 * step + 12))
            work += Work(seconds=(KRYLOV_LAUNCHES - 1) * GAP, launches=KRYLOV_LAUNCHES - 1, bound="memory")
        # A batched eigenproblem: about 9 k^3 flops per matrix in float64, at a tenth of the float32 peak.
        seconds = 9 * step**3 * sum(filters for filters, _ in sizes) / (self.gpu.flops["fp32"] / 10)
        launches = TRIDIAGONAL_LAUNCHES / CHECK_EVERY
        return work + Work(seconds=seconds / CHECK_EVERY + launches * GAP, launches=launches, bound="arithmetic")


class _Launches(TorchDispatchMode):
    """Count operations that compute something: each is at least one launch on a GPU."""

    VIEWS = (
        "view",
        "select",
        "slice",
        "transpose",
        "unsqueeze",
        "squeeze",
        "expand",
        "t",
        "detach",
        "alias",
        "as_strided",
    )

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.__name__.split(".")[0].strip("_") not in self.VIEWS
        return func(*args, **(kwargs or {}))


def launches_of(call: Callable[[], object]) -> int:
    """Return the least number of launches that a call in plain PyTorch makes."""
    with _Launches() as mode:
        call()
    return mode.count


def _krylov_launches() -> int:
    state = reference.KrylovState(
        basis=torch.eye(8).expand(3, 8, 8).contiguous(),
        q=torch.ones(3, 8),
        alpha=torch.ones(3, 8),
        beta=torch.ones(3, 8),
        length=torch.ones(3, dtype=torch.int64),
        scale=torch.ones(3),
    )
    product = torch.ones(3, 8)
    # Plain PyTorch would not need the copy of the last vector, which stays at a fixed address for the kernels.
    return launches_of(lambda: reference.krylov_extend(state, product, 4)) - 1


def _tridiagonal_launches() -> int:
    numbers = torch.ones(3, 8)
    return launches_of(lambda: reference.tridiagonal_extremes(numbers, numbers, torch.full((3,), 8)))


KRYLOV_LAUNCHES, TRIDIAGONAL_LAUNCHES = _krylov_launches(), _tridiagonal_launches()


def _meta_layer(case: RowsCase, stored: torch.dtype) -> Member:
    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    V = empty(case.M, case.D, dtype=torch.float32)
    return Member(empty(case.N, case.D, dtype=stored), empty(case.N, case.M, dtype=stored), V, False)


NETWORK_LAYERS: dict[str, tuple[list[RowsCase], list[EdgeCase]]] = {
    "MobileNetV1 1.0x, ImageNet, batch 32": (mobilenet_layers(FULL_WIDTHS, 32 * 112 * 112), []),
    "DGCNN, batch 16": (NETWORKS["DGCNN embedding and head, batch 16"], list(LARGE_EDGES)),
}


def predict(gpu: Gpu, dtype: str, table: Table, rows: list[RowsCase], edges: list[EdgeCase]) -> dict[str, list[Work]]:
    """Return the fused and the unfused work by name: of every layer, of one S v, and of an eigen phase."""
    fused, unfused = Fused(gpu, dtype, table), Unfused(gpu)
    narrow = [case for case in rows if case.D <= 256]
    results: dict[str, list[Work]] = {}
    if narrow:
        name = f"{len(narrow)} layers in one launch"
        results[name] = [fused.narrow(narrow), sum((unfused.rows(case, dtype) for case in narrow), Work())]
    parts = [
        (f"N{case.N} D{case.D} M{case.M}", fused.wide(case), unfused.rows(case, dtype)) for case in rows if case.D > 256
    ]
    parts += [
        (f"EdgeConv B{case.B} P{case.P} F{case.F} M{case.M}", fused.edges(case), unfused.edges(case, dtype))
        for case in edges
    ]
    # Layers of the same shape share one line.
    for name in dict.fromkeys(name for name, _, _ in parts):
        equal = [part for part in parts if part[0] == name]
        label = name if len(equal) == 1 else f"{len(equal)} x {name}"
        results[label] = [sum((ours for _, ours, _ in equal), Work()), sum((theirs for _, _, theirs in equal), Work())]
    products = [sum((pair[i] for pair in results.values()), Work()) for i in (0, 1)]
    sizes = [(case.M, case.D) for case in rows] + [(case.M, 2 * case.F) for case in edges]
    phase = [Work(), Work()]
    for i, form in enumerate((fused, unfused)):
        for step in range(1, STEPS + 1):
            once = products[i] + form.lanczos_step(sizes, step)
            # If the host launches kernels more slowly than the device runs them, the device waits for the host.
            once.seconds = max(once.seconds, once.launches * HOST_LAUNCH)
            phase[i] += once
    return {**results, "S v of the network": products, f"eigen phase, {STEPS} steps": phase}


def report(table: Table, dtypes: Sequence[str]) -> str:
    """Return the predictions as a table."""
    head = ["GPU", "rows", "work", "GB", "Tflop", "flop/byte", "bound", "ms", "unfused ms", "ratio"]
    lines = [head]
    for network, (rows, edges) in NETWORK_LAYERS.items():
        lines.append([network, *[""] * (len(head) - 1)])
        for name, gpu in GPUS.items():
            for dtype in dtypes:
                for part, (ours, theirs) in predict(gpu, dtype, table, rows, edges).items():
                    traffic = [f"{ours.bytes / 1e9:.3g}", f"{ours.flops / 1e12:.3g}", f"{ours.flops / ours.bytes:.0f}"]
                    times = [f"{1e3 * ours.seconds:.3g}", f"{1e3 * theirs.seconds:.3g}"]
                    ratio = f"{theirs.seconds / ours.seconds:.1f}"
                    lines.append([name, dtype, part, *traffic, ours.bound, *times, ratio])
    return text_table(lines)


def main() -> None:
    """Print the predictions."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roofline", description=__doc__)
    parser.add_argument("--table", type=Path, default=TABLE, help="registers and shared memory of the compiled kernels")
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    options = parser.parse_args()
    print("A MODEL, NOT A MEASUREMENT: every kernel reaches the peaks of the data sheets.\n")
    print(report(Table(options.table), options.dtypes))


if __name__ == "__main__":
    main()
