"""How long S v takes on GPUs, by a model of compiled kernels: python -m benchmarks.roofline.

A MODEL, NOT A MEASUREMENT. Launches, tiles and what a pass of a loop costs come from docs/roofline.json, which
`python -m benchmarks.recorded` writes: machine instructions, tensor-core work as emitted, shared memory with its bank
conflicts, barriers and requested bytes. A launch keeps several units busy; each takes its work over its peak rate, with
whole tiles on every processor:
    tensor   multiply-adds of the tensor cores
    issue    instructions of all warps
    float32  float32 instructions
    shared   bytes of shared memory, bank conflicts included
    cache    bytes that programs request
    memory   bytes of tensors that are not in the cache
    latency  barriers, dependent products and the start of a tile, for as many programs as a processor holds at once
If units overlap fully, a launch takes the longest of these times; if they do not overlap at all, their sum. Both are
shown: the truth lies between, if the constants (benchmarks/gpus.py) are right. The unfused form is that of
benchmarks/unfused.py, with full overlap.
"""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpus import (
    BARRIER,
    GAP,
    GPUS,
    HOST_LAUNCH,
    LIBRARY_REACHED,
    MEMORY_REACHED,
    PRODUCT,
    START,
    Gpu,
)
from benchmarks.launches import Shape
from benchmarks.networks import KINDS, NETWORK_SHAPES
from benchmarks.recorded import LIGHT, RECORD
from benchmarks.unfused import FACTORS, operations
from s3d_fast.base.tables import text_table
from s3d_fast.maths import reference
from s3d_fast.solvers.lanczos import CHECK_EVERY

# Lanczos products of a layer: see test_lanczos in benchmarks/test_solvers.py.
STEPS = 44
# The type of the factors of our products, and their number.
MULTIPLIED = {"fp32": "fp32", "fp32 high": "bf16", "bf16": "bf16"}
PRODUCTS = {"fp32": 1, "fp32 high": 6, "bf16": 2}
# The same accuracy: what the best unfused form may be, and what there was before six bfloat16 products.
AS_ACCURATE = {"fp32 high": "fp32"}
NETWORKS = {name: [Shape(*own) for own in shapes] for name, shapes in NETWORK_SHAPES.items()}


class Cache:
    """Which tensors are in the cache of a GPU: those touched last, as far as they fit."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.held: dict[Any, float] = {}

    def missed(self, touched: Iterable[Sequence[Any]]) -> float:
        """Touch tensors (name, bytes, writes); return the bytes that memory moves. All that is written counts."""
        moved = 0.0
        for name, size, writes in touched:
            moved += size if writes or name not in self.held else 0
            self.held.pop(name, None)
            self.held[name] = size
            while sum(self.held.values()) > self.size:
                del self.held[next(iter(self.held))]
        return moved


@dataclass
class Time:
    """Seconds of launches: if the units of a GPU overlap fully, and if they do not."""

    fastest: float = 0.0
    slowest: float = 0.0
    launches: float = 0.0
    bounds: Counter[str] = field(default_factory=Counter)  # seconds of `fastest` by the unit that takes longest
    work: Counter[str] = field(default_factory=Counter)  # multiply-adds of tensor cores, bytes

    @classmethod
    def of(cls, terms: dict[str, float], work: dict[str, float]) -> Time:
        """Return the time of a launch whose units are busy for these seconds."""
        bound = max(terms, key=terms.__getitem__)
        longest = terms[bound] + GAP
        return cls(longest, sum(terms.values()) + GAP, 1, Counter({bound: longest}), Counter(work))

    def __add__(self, other: Time) -> Time:
        return Time(
            self.fastest + other.fastest, self.slowest + other.slowest, self.launches + other.launches,
            self.bounds + other.bounds, self.work + other.work,
        )  # fmt: skip

    @property
    def bound(self) -> str:
        """The unit that takes longest, over all launches."""
        return max(self.bounds, key=self.bounds.__getitem__, default="")


def resident(gpu: Gpu, launch: dict[str, Any]) -> int:
    """Return how many programs a processor holds at once."""
    threads = launch["warps"] * gpu.warp
    by_registers = gpu.registers // (threads * max(1, launch["registers"]))
    by_memory = gpu.shared_memory // max(1, launch["shared_memory"])
    return max(1, min(by_registers, by_memory, gpu.threads // threads))


def launch_time(gpu: Gpu, kind: str, launch: dict[str, Any], costs: dict[str, Any], cache: Cache) -> Time:
    """Return the time of one launch; `costs` are those of its kernels, by kind of layer."""
    moved = cache.missed(launch["touched"])
    touched = sum(size for _, size, _ in launch["touched"])
    number = sum(own[0] for own in launch["tiles"])
    # Fewer programs than processors do not use all of the bandwidth.
    reach = min(1.0, number / gpu.processors)
    terms = {"memory": moved / gpu.memory / MEMORY_REACHED / reach}
    work = {"bytes": moved}
    if launch["kernel"] in LIGHT:
        terms["cache"] = touched / gpu.cache / reach
        return Time.of(terms, work)
    total: Counter[str] = Counter()
    waits = []
    for name, (count, passes, longest) in zip(launch["kinds"], launch["tiles"], strict=True):
        cost = costs[name][launch["kernel"]]
        for part, times in (("tile", count), ("pass", passes)):
            total.update({key: times * amount for key, amount in cost[part].items()})
        barriers = cost["tile"].get("barriers", 0) + longest * cost["pass"].get("barriers", 0)
        waits.append((count, START + barriers * BARRIER + longest * 2 * PRODUCT))
    # Tiles are whole: the busiest processor has the most of them.
    busiest = math.ceil(number / gpu.processors) / number
    clocks = {
        "issue": total["instructions"] / gpu.issue,
        "shared": total["shared bytes"] / gpu.shared,
    }
    if total["tensor"]:
        peak = gpu.flops[MULTIPLIED[kind]] / 2 / gpu.processors / gpu.clock
        clocks["tensor"] = total["tensor"] / peak / (gpu.mma if total["mma"] > total["wgmma"] else 1)
    if gpu.target.startswith("sm"):
        clocks["float32"] = total["fp32"] / gpu.float32
    terms |= {name: count * busiest / gpu.clock for name, count in clocks.items()}
    terms["cache"] = max(total["requested bytes"], moved) / gpu.cache / reach
    at_once = gpu.processors * resident(gpu, launch)
    rounds = sum(count * wait for count, wait in waits) / at_once
    terms["latency"] = max(rounds, max(wait for _, wait in waits)) / gpu.clock
    return Time.of(terms, {**work, "tensor": total["tensor"], "shared": total["shared bytes"]})


def kinds_of(gpu: Gpu) -> list[str]:
    """Return the kinds of rows that differ: MI300X multiplies float32 rows directly, at both precisions."""
    return [kind for kind in KINDS if gpu.target.startswith("sm") or kind not in AS_ACCURATE]


def fused(record: dict[str, Any], network: str, gpu: Gpu, kind: str) -> list[tuple[str, Time]]:
    """Return the kernels of S v of a network and their times, launch by launch."""
    where, cache = f"{gpu.target} {kind}", Cache(gpu.cache_size)
    costs = record["costs"][where]
    launches = record["networks"][network][where]
    return [(launch["kernel"], launch_time(gpu, kind, launch, costs, cache)) for launch in launches]


def before_and_after(record: dict[str, Any], network: str, gpu: Gpu, kind: str) -> tuple[Time, Time]:
    """Return the times of S v of a network; those before are of kernels that were as accurate."""
    before = fused(record["before"], network, gpu, AS_ACCURATE.get(kind, kind))
    return summed(before), summed(fused(record["after"], network, gpu, kind))


def unfused(shapes: Sequence[Shape], gpu: Gpu, kind: str) -> Time:
    """Return the time of the best unfused form that is as accurate."""
    forms = [kind, AS_ACCURATE[kind]] if kind in AS_ACCURATE else [kind]
    return min((_unfused(shapes, gpu, own) for own in forms), key=lambda time: time.fastest)


def _unfused(shapes: Sequence[Shape], gpu: Gpu, kind: str) -> Time:
    cache, total = Cache(gpu.cache_size), Time()
    for layer, shape in enumerate(shapes):
        for own in operations(layer, shape, kind):
            moved = cache.missed(own.touched)
            terms = {
                "memory": moved / gpu.memory / MEMORY_REACHED,
                "cache": sum(size for _, size, _ in own.touched) / gpu.cache,
                "tensor": 2 * own.multiply_adds / gpu.flops[FACTORS[kind]] / LIBRARY_REACHED,
            }
            total += Time.of(terms, {"bytes": moved, "tensor": own.multiply_adds})
    return total


def needed(shapes: Sequence[Shape], kind: str) -> float:
    """Return the multiply-adds that S v needs, with as many products as our arithmetic takes."""
    return sum(PRODUCTS[kind] * 2 * own.N * own.D * own.M * (2 if own.clouds else 1) for own in shapes)


def summed(times: Iterable[tuple[str, Time]]) -> Time:
    """Return the time of all launches, one after the other."""
    return sum((time for _, time in times), Time())


def lanczos_step(gpu: Gpu, shapes: Sequence[Shape], step: int) -> Time:
    """Return the time of orthogonalising every layer, a launch each, and a share of the check of all layers."""
    total = Time()
    for own in shapes:
        width = own.D * (2 if own.clouds else 1)
        moved = 4 * own.M * width * (2 * step + 3)
        total += Time.of({"memory": moved / gpu.memory / MEMORY_REACHED}, {"bytes": moved})
    # The tridiagonal eigenproblem is a chain of divisions: about 30 sweeps, 40 clocks per step.
    seconds = (30 * step * 40 / gpu.clock + GAP) / CHECK_EVERY
    return total + Time(seconds, seconds, 1 / CHECK_EVERY, Counter(latency=seconds))


def unfused_lanczos_step(gpu: Gpu, shapes: Sequence[Shape], step: int) -> Time:
    """Return the time of `reference.krylov_extend` for every layer and a share of the check, by operation."""
    total = Time()
    for own in shapes:
        width = own.D * (2 if own.clouds else 1)
        moved = 4 * own.M * width * (4 * step + 12)
        once = Time.of({"memory": moved / gpu.memory / MEMORY_REACHED}, {"bytes": moved})
        gaps = (KRYLOV_LAUNCHES - 1) * GAP
        total += once + Time(gaps, gaps, KRYLOV_LAUNCHES - 1, Counter(memory=gaps))
    # A batched eigenproblem: about 9 k^3 flops per matrix in float64, at a tenth of the float32 peak.
    flops = 9 * step**3 * sum(own.M for own in shapes)
    launches = TRIDIAGONAL_LAUNCHES / CHECK_EVERY
    seconds = flops / (gpu.flops["fp32"] / 10) / CHECK_EVERY + launches * GAP
    return total + Time(seconds, seconds, launches, Counter(float32=seconds))


def eigen_phase(product: Time, step: Callable[[int], Time]) -> Time:
    """Return the time of all steps; if the host launches more slowly than the device runs, the device waits for it."""
    total = Time()
    for number in range(1, STEPS + 1):
        once = product + step(number)
        once.fastest = max(once.fastest, once.launches * HOST_LAUNCH)
        once.slowest = max(once.slowest, once.launches * HOST_LAUNCH)
        total += once
    return total


class _Launches(TorchDispatchMode):
    """Count operations that compute something: each is at least one launch on a GPU."""

    VIEWS = (
        "view", "select", "slice", "transpose", "unsqueeze", "squeeze", "expand", "t", "detach", "alias", "as_strided",
    )  # fmt: skip

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


def milliseconds(time: Time) -> str:
    """Return both times in milliseconds."""
    return f"{1e3 * time.fastest:.3g} to {1e3 * time.slowest:.3g}"


def comparison(record: dict[str, Any]) -> str:
    """Return a Markdown table: S v of every network before, after and unfused."""
    head = ["network", "GPU", "rows", "before, ms", "after, ms", "unfused, ms", "bound", "work"]
    lines = [f"| {' | '.join(head)} | before / after | unfused / after |", "|---|---|---|--:|--:|--:|---|--:|--:|--:|"]
    for network, shapes in NETWORKS.items():
        for name, gpu in GPUS.items():
            for kind in kinds_of(gpu):
                before, after = before_and_after(record, network, gpu, kind)
                other = unfused(shapes, gpu, kind)
                emitted = f"{after.work['tensor'] / needed(shapes, kind):.2f}" if after.work["tensor"] else ""
                cells = [
                    network, name, kind, milliseconds(before), milliseconds(after), f"{1e3 * other.fastest:.3g}",
                    after.bound, emitted, ratios(before, after),
                    f"{other.fastest / after.slowest:.1f} to {other.fastest / after.fastest:.1f}",
                ]  # fmt: skip
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def ratios(before: Time, after: Time) -> str:
    """Return how many times faster the kernels became, under both assumptions."""
    return _range([before.fastest / after.fastest, before.slowest / after.slowest])


def conclusion(record: dict[str, Any]) -> str:
    """Return two sentences: how much faster the kernels became, and how they stand against the unfused form."""
    gains: dict[tuple[str, str], list[float]] = {}
    against: dict[str, list[float]] = {}
    for network, shapes in NETWORKS.items():
        for name, gpu in GPUS.items():
            for kind in kinds_of(gpu):
                before, after = before_and_after(record, network, gpu, kind)
                vendor = "NVIDIA's GPUs" if gpu.target.startswith("sm") else name
                found = gains.setdefault((kind, vendor), [])
                found += [before.fastest / after.fastest, before.slowest / after.slowest]
                other = unfused(shapes, gpu, kind)
                against.setdefault(kind, []).extend([other.fastest / after.slowest, other.fastest / after.fastest])
    became = [f"{_range(own)} times as fast with {kind} rows on {where}" for (kind, where), own in gains.items()]
    stand = [f"{_range(own)} times as fast with {kind} rows" for kind, own in against.items()]
    text = (
        f"Compared with the kernels before, S v is {', '.join(became[:-1])} and {became[-1]}. "
        f"Compared with the best unfused form it is {', '.join(stand[:-1])} and {stand[-1]}; the lower figures "
        "are for kernels in which nothing overlaps, the upper ones for full overlap."
    )
    return textwrap.fill(text, 120) + "\n"


def _range(numbers: Sequence[float]) -> str:
    low, high = f"{min(numbers):.1f}", f"{max(numbers):.1f}"
    return low if low == high else f"{low} to {high}"


def details(record: dict[str, Any]) -> str:
    """Return a table of the kernels of S v, and of an eigen phase."""
    head = ["GPU", "rows", "kernel", "launches", "ms", "bound", "memory GB", "shared GB", "Tmul-add"]
    lines = [head]
    for network, shapes in NETWORKS.items():
        lines.append([network, *[""] * (len(head) - 1)])
        for name, gpu in GPUS.items():
            for kind in kinds_of(gpu):
                launches = fused(record["after"], network, gpu, kind)
                parts = {kernel: summed(own for own in launches if own[0] == kernel) for kernel, _ in launches}
                phase = eigen_phase(summed(launches), partial(lanczos_step, gpu, shapes))
                other = eigen_phase(unfused(shapes, gpu, kind), partial(unfused_lanczos_step, gpu, shapes))
                parts |= {f"eigen phase, {STEPS} steps": phase, "the same, unfused": other}
                for part, time in parts.items():
                    amounts = [time.work["bytes"] / 1e9, time.work["shared"] / 1e9, time.work["tensor"] / 1e12]
                    numbers = [f"{amount:.3g}" if amount else "" for amount in amounts]
                    lines.append([name, kind, part, f"{time.launches:.0f}", milliseconds(time), time.bound, *numbers])
    return text_table(lines)


def load(path: Path = RECORD) -> dict[str, Any]:
    """Return the record of both versions of the kernels."""
    return json.loads(path.read_text())


def main() -> None:
    """Print the predictions."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roofline", description=__doc__)
    parser.add_argument("--record", type=Path, default=RECORD, help="what python -m benchmarks.recorded has written")
    options = parser.parse_args()
    record = load(options.record)
    print("A MODEL, NOT A MEASUREMENT.\n")
    print(comparison(record))
    print(details(record))


if __name__ == "__main__":
    main()
