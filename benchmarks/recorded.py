"""The launches that a network takes on GPUs that are not here, and what one pass of every kernel costs.

    python -m benchmarks.recorded --name after
    python -m benchmarks.recorded --name before --kernels ANOTHER_CHECKOUT

The operations of a checkout run unchanged, with tensors on the CPU that nobody reads or writes; every launch of a
Triton kernel is recorded instead of run. Its kernel is compiled for the GPU, which gives registers, shared memory and
machine instructions, and small versions of it are executed in the simulator (NVIDIA), which gives what is executed.
Costs are those of a tile, plus those of a pass of its main loop: both are solved for from two numbers of rows. The
result is stored in docs/roofline.json, from which `benchmarks.roofline` computes times.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from benchmarks.networks import KINDS, NETWORK_SHAPES

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs" / "roofline.json"
TARGETS = ("sm_80", "sm_90", "gfx942")
# Sizes of the small versions: filters at most, and the two numbers of rows, for narrow and for wide layers.
FILTERS, NARROW_ROWS, WIDE_ROWS = 128, (512, 2048), (128, 256)
# Clouds of the small versions, and how many times fewer points they have than others have rows.
CLOUDS, FEWER = 2, 4


@dataclass(frozen=True)
class Shape:
    """The sizes of a layer: rows N = B * P of a cloud's points for EdgeConv, whose filters have 2 D inputs."""

    N: int
    D: int
    M: int
    bias: bool = False
    clouds: int = 0

    @property
    def kind(self) -> str:
        """What the costs of a pass depend on."""
        few = "few" if self.N <= 64 else "many"
        return f"{'edges' if self.clouds else 'rows'} D{self.D} M{min(self.M, FILTERS)} {few}" + " bias" * self.bias

    @property
    def leading(self) -> tuple[int, ...]:
        """The axes of the rows: clouds and points, or all rows."""
        return (self.clouds, self.N // self.clouds) if self.clouds else (self.N,)

    def small(self, rows: int) -> Shape:
        """Return a version that the simulator can run, with the same tiles."""
        if self.clouds:
            return replace(self, N=rows // FEWER, M=min(self.M, FILTERS), clouds=CLOUDS)
        return replace(self, N=min(self.N, rows), M=min(self.M, FILTERS))


@dataclass(frozen=True)
class Recorded:
    """One launch, as an operation made it. The names of its fields are those of `kernels.launch.Launch`."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int
    stages: int
    options: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the kernel."""
        return self.kernel.__name__

    def tables(self) -> list[dict[str, int]]:
        """Return the rows of the table of a grouped launch."""
        from s3d_fast.kernels.grouped import FIELDS

        return [dict(zip(FIELDS, row, strict=True)) for row in self.arguments["table"].tolist()]


def use_checkout(path: Path) -> None:
    """Let `import s3d_fast` find another checkout, and the simulator of this one."""
    if path.resolve() == ROOT:
        return
    assert "s3d_fast" not in sys.modules, "s3d_fast is imported already"
    packages = {"s3d_fast": [path / "s3d_fast"], "s3d_fast.kernels": [path / "kernels", ROOT / "kernels"]}
    for name, folders in packages.items():
        places = [str(folder) for folder in folders]
        spec = importlib.util.spec_from_file_location(
            name, folders[0] / "__init__.py", submodule_search_locations=places
        )
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        # The package imports its own kernels, which must be there by then.
        if name != "s3d_fast":
            sys.modules["s3d_fast"].kernels = module  # type: ignore[attr-defined]
    for name in reversed(packages):
        own = sys.modules[name].__spec__
        assert own is not None
        assert own.loader is not None
        own.loader.exec_module(sys.modules[name])


@lru_cache
def compiler() -> ModuleType:
    """Return `s3d_fast.kernels.compiled` of this checkout, whichever the kernels are from."""
    name = "s3d_fast.kernels.device"
    theirs = importlib.import_module(name)
    sys.modules[name] = _loaded("own_device", ROOT / "kernels" / "device.py")
    try:
        return _loaded("own_compiled", ROOT / "kernels" / "compiled.py")
    finally:
        sys.modules[name] = theirs


def _loaded(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def recording(target: str, processors: int | None = None) -> Iterator[list[Recorded]]:
    """Let kernels on CPU tensors be launched as on a GPU, and recorded instead of run."""
    from s3d_fast.kernels import device
    from s3d_fast.kernels.compiled import TARGETS as GPUS

    found: list[Recorded] = []

    def run(function: JITFunction, *arguments: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        warps, stages = options.pop("num_warps", 4), options.pop("num_stages", 2)
        signature = inspect.signature(function.fn)
        further = {name: options.pop(name) for name in [*options] if name not in signature.parameters}
        bound = signature.bind(*arguments, **options)
        bound.apply_defaults()
        found.append(Recorded(function, tuple(grid), dict(bound.arguments), warps, stages, further))

    gpu = GPUS[target].device
    before = JITFunction.run, device.INTERPRETER
    JITFunction.run, device.INTERPRETER = run, replace(gpu, processors=processors or gpu.processors)
    try:
        yield found
    finally:
        JITFunction.run, device.INTERPRETER = before


class Call:
    """S v for EdgeConv or, in one grouped call, for any number of other layers."""

    def __init__(self, shapes: Sequence[Shape], kind: str, target: str) -> None:
        self.shapes, self.target = shapes, target
        dtype, self.precision = KINDS[kind]
        self.stored: torch.dtype = getattr(torch, dtype)
        self.X = [self.rows(True, *own.leading, own.D) for own in shapes]
        self.C = [self.rows(False, *own.leading, own.M) for own in shapes]
        widths = [(2 if own.clouds else 1) * own.D + own.bias for own in shapes]
        self.V = [torch.empty(own.M, width, dtype=torch.float32) for own, width in zip(shapes, widths, strict=True)]
        self.of_rows = {own.data_ptr(): shape for X, shape in zip(self.X, shapes, strict=True) for own in _read(X)}

    def rows(self, is_multiplied: bool, *sizes: int) -> Tensor:
        """Return rows as a solver has them. Kernels of commit d1d8b60 take them as they are."""
        from s3d_fast.backends.triton import TRITON
        from s3d_fast.kernels.options import triton_options

        X = torch.empty(sizes, dtype=self.stored)
        if not hasattr(TRITON, "prepared"):
            return X
        with triton_options(precision=self.precision), recording(self.target):
            return TRITON.prepared(X, is_multiplied)

    @property
    def tensors(self) -> list[Tensor]:
        return [*(own for X in self.X for own in _read(X)), *self.C, *self.V]

    def run(self) -> None:
        from s3d_fast.kernels import grouped
        from s3d_fast.kernels.options import triton_options

        # The widths of earlier calls would be compiled in as well.
        grouped._PRESENT.clear()
        with triton_options(precision=self.precision):
            self._run()

    def _run(self) -> None:
        from s3d_fast.backends.triton import TRITON

        if not self.shapes[0].clouds:
            biases = [own.bias for own in self.shapes]
            TRITON.splitting_matvec_grouped(X=self.X, C=self.C, V=self.V, bias=biases)
            return
        from s3d_fast.maths.incoming import incoming_edges

        (X,), (C,), (V,) = self.X, self.C, self.V
        random = torch.Generator().manual_seed(0)
        edges = incoming_edges(torch.randint(C.shape[1], C.shape, generator=random))
        TRITON.edgeconv_matvec(X=X, winner=edges.winner, C=C, V=V, bias=False, incoming=edges, ties=None)

    def kinds(self, launch: Recorded) -> list[str]:
        """Return the kind of layer of every kind of tile of a launch."""
        if launch.name == "grouped_kernel":
            return [self.of_rows[row["X"]].kind for row in launch.tables()]
        if "X" in launch.arguments:
            return [self.of_rows[launch.arguments["X"].data_ptr()].kind]
        return [self.shapes[0].kind if len(self.shapes) == 1 else ""]


def _read(X: Tensor) -> list[Tensor]:
    """Return what kernels may read of rows: themselves, and planes that they carry."""
    return [X, *(own for name, own in vars(X).items() if name == "_s3d_fast_planes")]


# What a kernel does with its tensors; it does not use others here.
READS: dict[str, Callable[[dict[str, Any]], Sequence[str]]] = {
    "split_kernel": lambda a: ["V"],
    "fused_kernel": lambda a: ["X", "C", _vectors(a)],
    "project_kernel": lambda a: ["X", "C", _vectors(a)],
    "accumulate_kernel": lambda a: ["X", "U"],
    "column_sums_kernel": lambda a: ["U"],
    "sum_slices_kernel": lambda a: ["partial"],
    "point_products_kernel": lambda a: ["X", _vectors(a), *(["products", "C", "winner"] if a["EDGES"] else [])],
    "receive_kernel": lambda a: ["t", "order", "start"],
    "edge_sums_kernel": lambda a: ["X", "t", "received"],
}
WRITES: dict[str, Callable[[dict[str, Any]], Sequence[str]]] = {
    "split_kernel": lambda a: ["planes"],
    "fused_kernel": lambda a: ["out"],
    "project_kernel": lambda a: ["U"],
    "accumulate_kernel": lambda a: ["out"],
    # One entry of every row.
    "column_sums_kernel": lambda a: [],
    "sum_slices_kernel": lambda a: ["out"],
    "point_products_kernel": lambda a: ["t" if a["EDGES"] else "products"],
    "receive_kernel": lambda a: ["U" if "U" in a else "received"],
    "edge_sums_kernel": lambda a: ["out"],
    "split_layers_kernel": lambda a: ["planes"],
    "grouped_kernel": lambda a: ["partial"],
    "sum_layers_kernel": lambda a: ["out"],
}


def _vectors(arguments: dict[str, Any]) -> str:
    """Return what holds V: planes, or V itself in kernels that split it."""
    return "planes" if "planes" in arguments else "V"


def touched(launch: Recorded, stored: torch.dtype) -> list[tuple[int, int, bool]]:
    """Return the tensors that a launch reads and writes: address, bytes, and whether it writes them."""
    a, name = launch.arguments, launch.name
    if name in READS:
        found = [_whole(a[own], False) for own in READS[name](a)]
    elif name == "sum_layers_kernel":
        found = [_whole(a["partial"], False)]
    else:
        found = []
        vectors = _vectors(a) if name == "grouped_kernel" else "V"
        for row in launch.tables():
            if name == "grouped_kernel":
                # Zeros behind rows are read as well.
                sizes = {"X": row["x_row"] * row_bytes(a["FORM"], stored), "C": row["c_row"] * stored.itemsize}
                found += [(row[own], row["N"] * size, False) for own, size in sizes.items()]
            if vectors == "V":
                found.append((row["V"], 4 * row["F"] * (row["D"] + a["BIAS"]), False))
        if vectors == "planes":
            found.append(_whole(a["planes"], False))
    return found + [_whole(a[own], True) for own in WRITES[name](a)]


def row_bytes(form: str, stored: torch.dtype) -> int:
    """Return the bytes of an entry of the rows, in all planes; older kernels have no planes."""
    from s3d_fast.kernels import products

    known = getattr(products, "row_storage", None)
    count, dtype = known(form, stored) if known else (1, stored)
    return count * dtype.itemsize


def _whole(tensor: Tensor, writes: bool) -> tuple[int, int, bool]:
    rows = math.prod(tensor.shape[:-1])
    pitch = tensor.stride(-2) if tensor.dim() > 1 else tensor.numel()
    return tensor.data_ptr(), rows * pitch * tensor.element_size() if rows > 1 else tensor.nbytes, writes


@dataclass(frozen=True)
class Tiles:
    """Equal tiles of a launch: what a program computes; those of an older grouped kernel compute several."""

    number: int
    passes: int  # of the main loop, over all tiles
    longest: int  # of one tile


def tiles(launch: Recorded) -> list[Tiles]:
    """Return the tiles of every kind in a launch."""
    a, name, programs = launch.arguments, launch.name, math.prod(launch.grid)

    def over_rows(rows: int, per_slice: int, step: int, blocks: int) -> Tiles:
        counts = [math.ceil(min(per_slice, rows - first) / step) for first in range(0, rows, per_slice)]
        return Tiles(blocks * len(counts), blocks * sum(counts), max(counts))

    if name == "grouped_kernel":
        steps = a["TILES"][:: len(a["TILES"]) // _widths(a["TILES"])]
        return [
            over_rows(row["N"], row["rows_per_slice"], steps[row["width"]], row["blocks"]) for row in launch.tables()
        ]
    if name == "fused_kernel":
        return [over_rows(a["N"], a["rows_per_slice"], a["BN"], launch.grid[0])]
    if name == "accumulate_kernel":
        return [over_rows(a["end"] - a["begin"], a["rows_per_slice"], a["BK"], launch.grid[0] * launch.grid[1])]
    if name == "edge_sums_kernel":
        return [over_rows(a["R"], a["rows_per_slice"], a["BN"], launch.grid[0] * launch.grid[1])]
    passes = 1
    if name in ("project_kernel", "point_products_kernel"):
        passes = math.ceil((a["D"] if name == "project_kernel" else a["F"]) / a["BK"])
    return [Tiles(programs, programs * passes, passes)]


def _widths(sizes: Sequence[int]) -> int:
    """Return for how many widths the grouped kernel has tiles: rows and filters, and since then a flag, of each."""
    return len(sizes) // (3 if any(isinstance(own, bool) for own in sizes) else 2)


_ASSEMBLED: dict[str, Any] = {}


def assembled(launch: Recorded, target: str) -> Any:
    """Return the compiled code of a launch; equal code is compiled once."""
    own = compiler()
    how = (launch.warps, launch.stages, launch.options)
    key = repr((launch.name, target, how, own.specialize(launch, own.TARGETS[target])))
    if key not in _ASSEMBLED:
        _ASSEMBLED[key] = own.assemble(launch, own.TARGETS[target])
    return _ASSEMBLED[key]


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


def label(launch: Recorded) -> str:
    """Return the name of a kernel, and of its part in EdgeConv."""
    return launch.name + (", edges" if launch.arguments.get("EDGES") else "")


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
    found[options.name] = {
        "commit": subprocess.run(commit, check=True, capture_output=True, text=True).stdout.strip(),
        **own,
    }
    options.out.write_text(as_json(found) + "\n")


if __name__ == "__main__":
    main()
