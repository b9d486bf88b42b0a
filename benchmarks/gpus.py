"""The constants of the models of GPUs, with their sources: one table for all models."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """A GPU; a processor is an SM, or a compute unit on AMD."""

    target: str
    processors: int
    clock: float  # per second
    memory: float  # bytes per second
    cache: float  # bytes per second, level 2 or Infinity Cache
    cache_size: int  # bytes
    flops: dict[str, float]  # per second, by the type of the factors
    issue: float  # instructions of warps per clock and processor
    float32: float  # float32 instructions of warps per clock and processor
    shared: float  # bytes of shared memory per clock and processor
    mma: float  # the part of the peak of tensor cores that instructions of a single warp reach
    registers: int  # per processor
    threads: int  # per processor, at most
    shared_memory: int  # bytes per processor
    warp: int  # threads


GPUS = {
    "A100": Gpu(
        "sm_80", 108, 1.41e9, 2.039e12, 5120 * 1.41e9, 40 << 20, {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12},
        4, 2, 128, 1.0, 65536, 2048, 167936, 32,
    ),
    "H100": Gpu(
        "sm_90", 132, 1.83e9, 3.35e12, 5120 * 1.83e9, 50 << 20, {"fp32": 66.9e12, "tf32": 494.7e12, "bf16": 989e12},
        4, 4, 128, 0.63, 65536, 2048, 233472, 32,
    ),
    "MI300X": Gpu(
        "gfx942", 304, 2.1e9, 5.3e12, 17.2e12, 256 << 20, {"fp32": 163.4e12, "tf32": 653.7e12, "bf16": 1307e12},
        1, 1, 128, 1.0, 131072, 2048, 65536, 64,
    ),
}  # fmt: skip

# What holds for all of them.
MEMORY_REACHED = 0.9
LIBRARY_REACHED = 0.8
GAP = 1.5e-6
HOST_LAUNCH = 5e-6
BARRIER, PRODUCT, START = 40, 35, 1200

SHEET = "data sheet: A100 80 GB SXM, H100 SXM, Instinct MI300X"
# What the page shows: a row of values by GPU, or one for all, and where they are from.
SOURCES: dict[str, tuple[str, Any, str]] = {
    "processors": ("processors", None, SHEET),
    "clock": ("clock, GHz", 1e9, f"boost clock that the peaks assume; {SHEET}. Long products run at lower clocks"),
    "memory": ("memory, TB/s", 1e12, SHEET),
    "cache": (
        "cache, TB/s", 1e12,
        "A100: 5120 bytes per clock (whitepaper); H100: assumed to be the same per clock; MI300X: Infinity Cache "
        "(CDNA 3 whitepaper)",
    ),
    "cache_size": ("cache, MiB", 1 << 20, SHEET),
    "flops": ("peak, Tflop/s", 1e12, f"{SHEET}; without sparsity; float32 on MI300X by its matrix cores"),
    "issue": (
        "instructions per clock and processor", None,
        "NVIDIA: 4 schedulers (whitepapers); MI300X: vector instructions of 64 threads on 4 x 16 lanes (CDNA 3 ISA)",
    ),
    "float32": ("float32 instructions per clock and processor", None, "CUDA C++ programming guide: throughput"),
    "shared": ("shared memory, bytes per clock and processor", None, "32 banks of 4 bytes (programming guides)"),
    "mma": (
        "part of the peak with mma.sync", None,
        "H100: assumed; published microbenchmarks (arXiv 2501.12084) find that only wgmma comes near the peak",
    ),
    "registers": ("registers per processor", None, "programming guides"),
    "threads": ("threads per processor", None, "programming guides"),
    "shared_memory": ("shared memory per processor, bytes", None, "programming guides"),
}  # fmt: skip
ASSUMED = {
    "part of the memory bandwidth that is reached": (f"{MEMORY_REACHED}", "assumed, for both forms"),
    "part of the peak that the library reaches": (f"{LIBRARY_REACHED}", "assumed; no idle wave, which favours it"),
    "from one kernel of a graph to the next": (f"{1e6 * GAP:g} us", "assumed, for both forms"),
    "a launch by the host, if it is not ahead": (f"{1e6 * HOST_LAUNCH:g} us", "assumed; eigen phases only"),
    "a barrier, for the program that waits": (f"{BARRIER} clocks", "assumed: about a round trip to shared memory"),
    "a product, for the one that needs its result": (f"{PRODUCT} clocks", "assumed; two in a pass"),
    "start of a tile until its first product": (f"{START} clocks", "assumed: two round trips to memory"),
}


def table() -> str:
    """Return the constants as a Markdown table."""
    lines = [f"| constant | {' | '.join(GPUS)} | source |", f"|---|{'--:|' * len(GPUS)}---|"]
    known = {field.name for field in fields(Gpu)}
    assert known >= SOURCES.keys()
    for name, (words, unit, source) in SOURCES.items():
        values = [getattr(gpu, name) for gpu in GPUS.values()]
        if isinstance(values[0], dict):
            for kind in values[0]:
                numbers = " | ".join(f"{value[kind] / unit:g}" for value in values)
                lines.append(f"| {words}, {kind} | {numbers} | {source} |")
        else:
            lines.append(f"| {words} | {' | '.join(f'{value / (unit or 1):g}' for value in values)} | {source} |")
    lines += [
        f"| {words} | {' | '.join([value] * len(GPUS))} | {source} |" for words, (value, source) in ASSUMED.items()
    ]
    return "\n".join(lines) + "\n"
