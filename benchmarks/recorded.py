"""The launches that a network takes on GPUs that are not here, and what one pass of every kernel costs.

    python -m benchmarks.recorded --name after
    python -m benchmarks.recorded --name before --kernels ANOTHER_CHECKOUT

The operations of a checkout run unchanged, with tensors on the CPU that nobody reads or writes; every launch of a
Triton kernel is recorded instead of run. Its kernel is compiled for the GPU, which gives registers, shared memory and
machine instructions, and small versions of it are executed in the simulator (NVIDIA), which gives what is executed.
Costs are those of a tile, plus those of a pass of its main loop: both are solved for from two numbers of rows. The
result is stored in docs/roofline.json, from which `benchmarks.roofline` computes times. `--targets` and `--rows`
replace a part of it.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.launches import (
    ROOT,
    Call,
    Shape,
    Tiles,
    assembled,
    label,
    recording,
    tiles,
    touched,
    use_checkout,
)
from benchmarks.networks import KINDS, NETWORK_SHAPES

RECORD = ROOT / "docs" / "roofline.json"
TARGETS = ("sm_80", "sm_90", "gfx942")
# Two numbers of rows of the small versions, for narrow and for wide layers.
NARROW_ROWS, WIDE_ROWS = (512, 3072), (128, 256)


def launches_of(shapes: Sequence[Shape], target: str, kind: str, is_compiled: bool) -> list[dict[str, Any]]:
    """Return the launches of S v of a network as plain data; tensors are numbered in the order in which they occur."""
    found, numbers = [], dict[int, int]()
    rows = [own for own in shapes if not own.clouds]
    calls = [Call(own, kind, target) for own in [*([rows] if rows else []), *([own] for own in shapes if own.clouds)]]
    # All calls and launches exist at once, so that each tensor has an address of its own.
    made = []
    for call in calls:
        with recording(target) as launches:
            call.run()
        made.append(launches)
    for call, launches in zip(calls, made, strict=True):
        for launch in launches:
            entry: dict[str, Any] = {
                "kernel": label(launch),
                "kinds": call.kinds(launch),
                "programs": math.prod(launch.grid),
                "tiles": [[own.number, own.passes, own.longest] for own in tiles(launch)],
                "touched": [
                    [numbers.setdefault(place, len(numbers)), size, writes]
                    for place, size, writes in touched(launch, call.stored)
                ],
                "warps": launch.warps,
            }
            if is_compiled:
                code = assembled(launch, target)
                entry |= {"registers": code.registers, "shared_memory": code.shared_memory, "spills": code.spills}
            found.append(entry)
    return found


# Kernels that only move numbers: their time is that of memory.
LIGHT = {"split_kernel", "split_layers_kernel", "sum_slices_kernel", "sum_layers_kernel", "column_sums_kernel"}


def costs_of(shape: Shape, target: str, kind: str) -> dict[str, dict[str, dict[str, float]]]:
    """Return what a tile and a pass cost, for every kernel of a layer: counts of a program."""
    from benchmarks import machine_code

    with recording(target) as launches:
        call = Call([shape], kind, target)
        call.run()
    executed = simulate(shape, target, kind) if target.startswith("sm") else {}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for launch in launches:
        name = label(launch)
        if launch.name in LIGHT or name in found:
            continue
        code = assembled(launch, target)
        is_nvidia = target.startswith("sm")
        read = machine_code.nvidia(code.listing, code.ptx) if is_nvidia else machine_code.amd(code.listing)
        parts = {"tile": dict(read.outside), "pass": dict(read.loop)}
        for part, counts in parts.items():
            counts = {kind: count * launch.warps for kind, count in counts.items()}
            counts |= {"barriers": counts.get("barriers", 0) / launch.warps} if "barriers" in counts else {}
            parts[part] = {**counts, **executed.get(name, {}).get(part, {})}
        (own,) = tiles(launch)
        only = parts["tile"].pop("only", None)
        assert only in (None, own.passes / own.number), f"{name} of {shape}: {only} passes were simulated, not {own}"
        # Its loop is over the incoming edges of a point, which the simulator has counted.
        if launch.name == "receive_kernel" and executed:
            parts = {"tile": {**executed[name]["tile"], "instructions": executed[name]["tile"]["executed"]}, "pass": {}}
        found[name] = {part: _rounded(counts) for part, counts in parts.items()}
    return found


def _rounded(counts: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{count:.6g}") for name, count in counts.items() if abs(count) > 1e-6}


def simulate(shape: Shape, target: str, kind: str) -> dict[str, dict[str, dict[str, float]]]:
    """Return what the simulator executes for a tile and for a pass of it, by kernel."""
    seen: dict[str, list[tuple[Tiles, dict[str, float]]]] = {}
    for rows in NARROW_ROWS if shape.D <= 256 else WIDE_ROWS:
        for name, own, counts in simulated_counts(shape.small(rows), target, kind):
            seen.setdefault(name, []).append((own, counts))
    return {name: solved(runs) for name, runs in seen.items()}


def simulated_counts(shape: Shape, target: str, kind: str) -> Iterator[tuple[str, Tiles, dict[str, float]]]:
    """Run a layer in the simulator; yield kernels, their tiles and what all of them executed."""
    from s3d_fast.kernels.ptx.launch import simulated

    call = Call([shape], kind, target)
    with recording(target, processors=1) as launches:
        call.run()
    with simulated(target, processors=1, reachable=call.tensors) as report:
        call.run()
    for launch, executed in zip(launches, report.launches, strict=True):
        if launch.name not in LIGHT:
            (own,) = tiles(launch)
            yield label(launch), own, counts_of(executed)


def solved(runs: Sequence[tuple[Tiles, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the costs of a tile and of a pass that explain two runs.

    If passes do not differ, all is the tile's, and is valid for this number of passes ("only").
    """
    (first, one), (second, other) = runs[0], runs[-1]
    few, many = first.passes / first.number, second.passes / second.number
    result: dict[str, dict[str, float]] = {"tile": {"only": few} if many == few else {}, "pass": {}}
    for kind in one:
        low, high = one[kind] / first.number, other[kind] / second.number
        slope = (high - low) / (many - few) if many != few else 0.0
        result["pass"][kind], result["tile"][kind] = slope, low - slope * few
    return result


_WGMMA = re.compile(r"wgmma\.mma_async\S*\.m(\d+)n(\d+)k(\d+)\.\w+\.(\w+)\.\w+\s+\{[^}]*\},\s*(\{)?")
_BITS = {"bf16": 16, "f16": 16, "tf32": 32}


def counts_of(executed: Any) -> dict[str, float]:
    """Return what all programs of a simulated launch executed together."""
    lines = executed.ptx.splitlines()
    operands = 0
    for line, times in executed.executed.items():
        if match := _WGMMA.search(lines[line - 1]):
            M, N, K, bits = int(match[1]), int(match[2]), int(match[3]), _BITS[match[4]]
            # Four warps together; their left factor is in registers or, like the right one, in shared memory.
            operands += times // 4 * (N + (0 if match[5] else M)) * K * bits // 8
    moved = executed.bytes
    by_class = executed.instructions
    return {
        "executed": sum(by_class.values()),
        "tensor": executed.multiplications,
        "shared bytes": 128 * sum(taken for taken, _ in executed.passes.values()) + operands,
        "conflict bytes": 128 * sum(taken - least for taken, least in executed.passes.values()),
        "requested bytes": sum(moved.get(kind, 0) for kind in ("ld.global", "st.global", "atom.global")),
        "barriers": by_class.get("barrier", 0) / (executed.threads // 32),
        "wgmma": sum(times for name, times in by_class.items() if name.startswith("wgmma")),
        "mma": sum(times for name, times in by_class.items() if name.startswith("mma")),
    }


def record(targets: Sequence[str], kinds: Sequence[str], is_compiled: bool = True) -> dict[str, Any]:
    """Return launches and costs of all networks."""
    result: dict[str, Any] = {"networks": {}, "costs": {}}
    for target in targets:
        for kind in kinds:
            # AMD multiplies float32 rows directly, at both precisions.
            if target == "gfx942" and kind == "fp32 high":
                continue
            where = f"{target} {kind}"
            for network, sizes in NETWORK_SHAPES.items():
                shapes = [Shape(*own) for own in sizes]
                own = launches_of(shapes, target, kind, is_compiled)
                result["networks"].setdefault(network, {})[where] = own
                for shape in shapes if is_compiled else ():
                    known = result["costs"].setdefault(where, {})
                    if shape.kind not in known:
                        print(where, shape.kind, file=sys.stderr, flush=True)
                        known[shape.kind] = costs_of(shape, target, kind)
    return result


def as_json(entry: Any, depth: int = 4) -> str:
    """Return JSON with one line per leaf of this depth."""
    if depth and isinstance(entry, dict):
        return "{" + ",".join(f"\n{json.dumps(key)}: {as_json(own, depth - 1)}" for key, own in entry.items()) + "}"
    return json.dumps(entry, separators=(",", ":"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the record of a checkout, or print its launches without compiling."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recorded", description=__doc__)
    parser.add_argument("--name", choices=("before", "after"), default="after")
    parser.add_argument("--kernels", type=Path, default=ROOT, help="the checkout whose kernels are measured")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--rows", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--launches", action="store_true", help="print the launches as JSON; compile nothing")
    parser.add_argument("--out", type=Path, default=RECORD)
    options = parser.parse_args(arguments)
    use_checkout(options.kernels)
    from s3d_fast.kernels.device import INTERPRETED

    if INTERPRETED:
        parser.error("TRITON_INTERPRET is set, so nothing would be compiled; unset it")
    torch.set_num_threads(1)
    own = record(options.targets, options.rows, not options.launches)
    if options.launches:
        print(json.dumps(own["networks"]))
        return
    commit = ["git", "-C", str(options.kernels), "rev-parse", "--short", "HEAD"]
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    known = found.get(options.name, {})
    # Other targets and rows stay as they are; a test compares their launches with those of the present kernels.
    found[options.name] = {
        "commit": subprocess.run(commit, check=True, capture_output=True, text=True).stdout.strip(),
        "networks": {name: known.get("networks", {}).get(name, {}) | new for name, new in own["networks"].items()},
        "costs": known.get("costs", {}) | own["costs"],
    }
    options.out.write_text(as_json(found) + "\n")


if __name__ == "__main__":
    main()
