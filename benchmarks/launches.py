"""The launches that operations make on GPUs that are not here: recorded instead of run, compiled, and described.

The operations of a checkout run unchanged, with tensors on the CPU that nobody reads or writes.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
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

from benchmarks.networks import KINDS

ROOT = Path(__file__).parents[1]
# Sizes of the small versions of layers: filters at most, clouds, and how many times fewer points they have than others
# have rows.
FILTERS, CLOUDS, FEWER = 128, 2, 4


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
    # The extension that is installed belongs to this checkout, and is not needed.
    sys.modules["s3d_fast._C"] = None  # type: ignore[assignment]
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
    # The simulator knows of padded rows, which older checkouts do not have.
    importlib.import_module("s3d_fast.base").__path__.append(str(ROOT / "s3d_fast" / "base"))


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
        found = [_whole(_read_rows(a, own), False) for own in READS[name](a)]
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


def _read_rows(arguments: dict[str, Any], name: str) -> Tensor:
    """Return the part of a tensor that a launch reads: of tensors with all rows, those of a chunk."""
    tensor = arguments[name]
    if "begin" not in arguments or name not in ("X", "C", "U"):
        return tensor
    begin, end = arguments["begin"], arguments["end"]
    return tensor[..., : end - begin, :] if name == "U" else tensor[..., begin:end, :]


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
        steps = a["TILES"][:: per_width(a["TILES"])]
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


def per_width(sizes: Sequence[int]) -> int:
    """Return how many of the grouped kernel's sizes each width has: rows and filters, a flag, and what came later."""
    flags = sum(isinstance(own, bool) for own in sizes)
    return len(sizes) // flags if flags else 2


_ASSEMBLED: dict[str, Any] = {}


def assembled(launch: Recorded, target: str) -> Any:
    """Return the compiled code of a launch; equal code is compiled once."""
    own = compiler()
    how = (launch.warps, launch.stages, launch.options)
    key = repr((launch.name, target, how, own.specialize(launch, own.TARGETS[target])))
    if key not in _ASSEMBLED:
        _ASSEMBLED[key] = own.assemble(launch, own.TARGETS[target])
    return _ASSEMBLED[key]


def label(launch: Recorded) -> str:
    """Return the name of a kernel, and of its part in EdgeConv."""
    return launch.name + (", edges" if launch.arguments.get("EDGES") else "")
