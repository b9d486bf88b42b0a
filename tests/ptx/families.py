"""Calls of every operation that has Triton kernels, for each family: aligned and general shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from s3d_fast.maths import reference
from s3d_fast.maths.activations import activation, activation_names
from s3d_fast.maths.reference import Widening
from tests.backends.agreement import (
    Arguments,
    assert_agrees,
    depthwise_of,
    edges_of,
    gated_of,
    kink_widths,
    krylov_layers,
    layers_of,
    rows_of,
)
from tests.cases import HALVED, SAME, UNEVEN, DepthwiseCase, EdgeCase, RowsCase, compute_dtype, random_tensor

# The largest error, as a fraction of the largest entry, against float64 with the same stored rows.
ROWS_TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-5, torch.float16: 1e-5}
# The same for results that are stored as the rows are: 16 bits round once more.
ENTRY_TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# The same for six bfloat16 products, and for products that round their factors to bfloat16.
PRECISION_TOLERANCE = {"high": 1e-6, "medium": 2.0**-6}


class Call(NamedTuple):
    """One call of an operation: arguments for rows of a dtype, and options of the kernels."""

    operation: str
    arguments: Callable[[torch.dtype], Arguments]
    kernels: set[str]  # the kernels that must have run, or others that take their place
    options: Mapping[str, Any] = MappingProxyType({})
    processors: int = 2  # of the GPU: few, so that programs have several tiles
    only: tuple[str, ...] = ()  # the dtypes to try; by default all that make a difference

    @property
    def dtypes(self) -> list[str]:
        """The names of the dtypes of rows that make a difference."""
        if self.only:
            return list(self.only)
        if "precision" in self.options:
            return ["fp32"] if self.options["precision"] == "high" else ["bf16", "fp16"]
        on_vectors = self.operation.startswith(("krylov", "tridiagonal", "certified"))
        return ["fp32", "fp64"] if on_vectors else list(DTYPES)

    def tolerance(self, dtype: torch.dtype) -> float:
        """The largest error, as a fraction of the largest entry."""
        if "precision" in self.options:
            return PRECISION_TOLERANCE[self.options["precision"]]
        is_entry = self.operation in ("curvature_coefficients", "grow_weights")
        return (ENTRY_TOLERANCE if is_entry else ROWS_TOLERANCE)[dtype]


def rows(*sizes: int, bias: bool = False, K: int = 0) -> Callable[[torch.dtype], Arguments]:
    return lambda dtype: rows_of(RowsCase(*sizes, dtype, bias, K))


def gated(*sizes: int, full: bool, bias: bool = False, K: int = 0) -> Callable[[torch.dtype], Arguments]:
    return lambda dtype: gated_of(RowsCase(*sizes, dtype, bias, K), full)


def edges(*sizes: int, ties: str = "none", bias: bool = False, K: int = 0) -> Callable[[torch.dtype], Arguments]:
    return lambda dtype: edges_of(EdgeCase(*sizes, dtype, bias, K), ties=ties)


def layers(*shapes: tuple[int, int, int], bias: bool = False, K: int = 0) -> Callable[[torch.dtype], Arguments]:
    return lambda dtype: layers_of([rows_of(RowsCase(*shape, dtype, bias, K)) for shape in shapes])


def stages(*sizes: Any, bias: bool = False, K: int = 0) -> Callable[[torch.dtype], Arguments]:
    return lambda dtype: depthwise_of(DepthwiseCase(*sizes, dtype, bias, K))


def curvature(name: str, by_width: bool = False) -> Callable[[torch.dtype], Arguments]:
    def arguments(dtype: torch.dtype) -> Arguments:
        act = activation("gelu", approximate="tanh") if name == "gelu_tanh" else activation(name)
        g, z = random_tensor(61, 17, dtype=dtype), 4 * random_tensor(61, 17, dtype=dtype, seed=1)
        settings = {"activation": act, "scale": random_tensor(17, dtype=dtype, seed=2), "axis": 1, "inplace": False}
        return {"g": g, "z": z, **settings, **(kink_widths(61, 17, dtype) if by_width else {})}

    return arguments


def surgery(dtype: torch.dtype) -> Arguments:
    rows, columns = torch.tensor([3, 0, 0, 1, 2]), torch.tensor([5, 0, 0, 2])
    weight = random_tensor(4, 6, 3, dtype=dtype)
    shift, shift_rows = random_tensor(3, 6, 3, dtype=dtype, seed=2), torch.tensor([-1, 2, 0, 0, -1])
    scales = random_tensor(5, dtype=dtype, seed=1), random_tensor(4, dtype=dtype, seed=3)
    full = Widening(weight, rows, scales[0], shift, shift_rows, columns, scales[1], 0.3)
    single = Widening(random_tensor(2, 700, dtype=dtype), torch.tensor([1, 0, 1, 1, 0]))
    return {"widenings": [full, single, Widening(random_tensor(5, dtype=dtype), torch.tensor([4, 4, 0]))]}


def krylov(M: int, D: int, step: int) -> Callable[[torch.dtype], Arguments]:
    def arguments(dtype: torch.dtype) -> Arguments:
        layers = krylov_layers([(M, D)], step, compute_dtype(dtype))
        return {"state": layers["states"][0], "product": layers["products"][0], "step": step}

    return arguments


def krylov_of(sizes: Sequence[tuple[int, int]], step: int) -> Callable[[torch.dtype], Arguments]:
    return lambda dtype: krylov_layers(sizes, step, compute_dtype(dtype))


def tridiagonal(dtype: torch.dtype) -> Arguments:
    alpha, beta = (random_tensor(7, 9, dtype=compute_dtype(dtype), seed=seed) for seed in range(2))
    return {"alpha": alpha, "beta": beta, "length": torch.tensor([9, 5, 1, 9, 2, 8, 3])}


def certificate(dtype: torch.dtype) -> Arguments:
    T = tridiagonal(dtype)
    T["beta"][1, 4] = 0
    values, _ = reference.tridiagonal_extremes(**T)
    return {**T, "values": values, "growth": torch.logspace(2, 9, 7, dtype=torch.float64)}


POINTWISE, WIDE = {"fused_kernel"}, {"project_kernel", "accumulate_kernel"}
GROUPED = {"grouped_kernel", "sum_layers_kernel"}
EDGES = {"point_products_kernel", "accumulate_kernel"}
DEPTHWISE = {"project_kernel", "stage_forth_kernel", "stage_back_kernel", "accumulate_kernel"}
# Where tiles of the fused kernel do not fit, the product goes through memory.
INSTEAD = {"gated_kernel": {"gated_project_kernel", "accumulate_kernel"}, "fused_kernel": WIDE}
MATVEC, GROUPED_MATVEC, EDGECONV = "splitting_matvec", "splitting_matvec_grouped", "edgeconv_matvec"

# Small shapes, which `make test` runs. Aligned ones are multiples of 16; general ones are not, and have a bias.
SMALL = {
    "pointwise 16": Call(MATVEC, rows(200, 16, 48), POINTWISE),
    "pointwise 32": Call(MATVEC, rows(150, 32, 16), POINTWISE),
    "pointwise 64": Call(MATVEC, rows(200, 64, 64), POINTWISE),
    "pointwise 128": Call(MATVEC, rows(150, 128, 32), POINTWISE),
    "pointwise 256": Call(MATVEC, rows(100, 256, 32), POINTWISE),
    "pointwise general": Call(MATVEC, rows(170, 37, 19, bias=True, K=2), POINTWISE),
    "pointwise 32 filters": Call(MATVEC, rows(150, 32, 32), POINTWISE),
    "pointwise 128 filters": Call(MATVEC, rows(90, 128, 128), POINTWISE),
    "pointwise 60 filters": Call(MATVEC, rows(90, 100, 60), POINTWISE),
    "pointwise sum of slices": Call(MATVEC, rows(530, 16, 16), POINTWISE | {"sum_slices_kernel"}),
    "pointwise atomic": Call(MATVEC, rows(530, 20, 20, bias=True), POINTWISE, {"atomic": True}),
    "wide": Call(MATVEC, rows(130, 288, 32), WIDE),
    "wide general": Call(MATVEC, rows(150, 300, 33, bias=True, K=2), WIDE),
    "grouped": Call(GROUPED_MATVEC, layers((150, 64, 48), (70, 32, 64), (64, 16, 80)), GROUPED),
    "grouped general": Call(GROUPED_MATVEC, layers((75, 37, 19), (80, 5, 3), bias=True), GROUPED),
    "gated": Call("gated_matvec", gated(150, 64, 32, full=False), {"gated_kernel"}),
    "gated general": Call("gated_matvec", gated(130, 20, 9, full=True, bias=True, K=2), {"gated_kernel"}),
    "edgeconv": Call(EDGECONV, edges(2, 48, 32, 4, 32), EDGES | {"receive_kernel"}),
    "edgeconv general": Call(EDGECONV, edges(2, 37, 20, 4, 24, bias=True, K=2), EDGES | {"receive_kernel"}),
    "edgeconv top-2": Call(EDGECONV, edges(2, 48, 32, 4, 32, ties="plain"), EDGES | {"receive_kernel"}),
    "edgeconv top-2 general": Call(
        EDGECONV, edges(2, 37, 20, 4, 24, ties="sloped", bias=True, K=2), EDGES | {"receive_kernel"}
    ),
    "edgeconv atomic": Call(EDGECONV, edges(2, 37, 20, 4, 24, bias=True), EDGES, {"atomic": True}),
    "depthwise": Call("depthwise_matvec", stages(2, 4, 5, 16, 32, (((3, 3), SAME),)), DEPTHWISE),
    "depthwise general": Call(
        "depthwise_matvec", stages(2, 5, 4, 9, 7, (((3, 3), HALVED), ((2, 1), UNEVEN)), bias=True, K=2), DEPTHWISE
    ),
    "curvature": Call("curvature_coefficients", curvature("silu"), {"curvature_kernel"}),
    "curvature by width": Call("curvature_coefficients", curvature("hardswish", True), {"curvature_kernel"}),
    "surgery": Call("grow_weights", surgery, {"grow_kernel"}),
    "krylov": Call("krylov_extend", krylov(5, 64, 3), {"extend_kernel"}),
    "krylov general": Call("krylov_extend", krylov(3, 523, 2), {"extend_kernel"}),
    "krylov grouped": Call(
        "krylov_extend_grouped", krylov_of([(2, 9), (1, 32), (2, 70), (1, 16)], 1), {"extend_kernel"}
    ),
    "tridiagonal": Call("tridiagonal_extremes", tridiagonal, {"extremes_kernel"}),
    "certificate": Call("certified_widths", certificate, {"widths_kernel"}),
}
SMALL |= {
    f"{name} {precision}": SMALL[name]._replace(options={"precision": precision})
    for name in ("pointwise 64", "pointwise 32 filters", "wide", "grouped", "gated", "edgeconv")
    for precision in PRECISION_TOLERANCE
}

# A size of 1 is a constant in compiled code. Tensor cores multiply bfloat16 planes, whatever the rows are.
SMALL |= {
    name: call._replace(only=("fp32", "bf16"))
    for name, call in {
        "pointwise of one": Call(MATVEC, rows(70, 1, 1, bias=True), POINTWISE),
        "wide of one": Call(MATVEC, rows(70, 300, 1), WIDE),
        "grouped of one": Call(GROUPED_MATVEC, layers((70, 1, 1), (1, 17, 32), (64, 20, 1)), GROUPED),
        "gated of one": Call("gated_matvec", gated(70, 1, 1, full=True), {"gated_kernel"}),
        "edgeconv of one": Call(EDGECONV, edges(1, 70, 1, 3, 1, ties="sloped"), EDGES | {"receive_kernel"}),
        "depthwise of one": Call("depthwise_matvec", stages(2, 5, 7, 1, 1, (((3, 3), SAME),)), DEPTHWISE),
        "krylov of one": Call("krylov_extend", krylov(1, 1, 0), {"extend_kernel"}),
    }.items()
}

# Larger shapes, every width and every activation, which the longer run adds.
LARGE = {
    **{f"pointwise {D} long": Call(MATVEC, rows(1100, D, 160), POINTWISE) for D in (16, 32, 64, 128, 256)},
    **{
        f"pointwise {D} general long": Call(MATVEC, rows(1001, D, 77, bias=True, K=2), POINTWISE)
        for D in (3, 17, 65, 129, 255)
    },
    "wide long": Call(MATVEC, rows(700, 512, 160), WIDE),
    "wide general long": Call(MATVEC, rows(701, 515, 163, bias=True), WIDE),
    "wide few rows long": Call(MATVEC, rows(20, 1024, 64), WIDE),
    "grouped long": Call(
        GROUPED_MATVEC, layers((600, 256, 96), (600, 128, 96), (600, 64, 96), (600, 32, 96), (600, 16, 96)), GROUPED
    ),
    "grouped general long": Call(
        GROUPED_MATVEC, layers((501, 250, 97), (501, 99, 97), (501, 33, 97), (201, 5, 97), bias=True), GROUPED
    ),
    **{f"gated {D} long": Call("gated_matvec", gated(700, D, 96, full=True), {"gated_kernel"}) for D in (16, 32, 64)},
    "gated general long": Call("gated_matvec", gated(701, 61, 35, full=True, bias=True, K=2), {"gated_kernel"}),
    "edgeconv long": Call(EDGECONV, edges(3, 256, 64, 8, 128), EDGES | {"receive_kernel"}),
    "edgeconv general long": Call(
        EDGECONV, edges(3, 201, 67, 8, 131, ties="sloped", bias=True, K=2), EDGES | {"receive_kernel"}
    ),
    **{
        f"curvature {name} long": Call("curvature_coefficients", curvature(name), {"curvature_kernel"})
        for name in (*activation_names(), "gelu_tanh")
    },
    **{
        f"curvature {name} by width long": Call("curvature_coefficients", curvature(name, True), {"curvature_kernel"})
        for name in activation_names()
        if activation(name).kinks
    },
    "krylov long": Call("krylov_extend", krylov(4, 2048, 5), {"extend_kernel"}),
}
# Sums over many rows in float32 are only as exact as the number of rows in one sum allows: a GPU has many programs.
LARGE = {name: call._replace(processors=16) for name, call in LARGE.items()}
LARGE |= {
    f"{name} {precision}": call._replace(options={"precision": precision})
    for name, call in LARGE.items()
    for precision in PRECISION_TOLERANCE
    if call.operation in ("splitting_matvec", "splitting_matvec_grouped", "gated_matvec", "edgeconv_matvec")
}
CALLS = SMALL | LARGE


class Outcome(NamedTuple):
    """What a simulated call showed."""

    kernels: set[str]
    findings: list[str]
    ambiguities: list[str]
    seconds: float


class FoundWrong(Exception):
    """The numbers are right, but the simulator has found something."""


def cases(target: str, calls: Mapping[str, Call]) -> list[ParameterSet]:
    """Return every call on a target, for every dtype that makes a difference, as parameters of a test."""
    return [
        pytest.param(target, name, dtype, id=f"{target}-{name.replace(' ', '_')}-{dtype}")
        for name, call in calls.items()
        for dtype in call.dtypes
    ]


def assert_clean(outcome: Outcome) -> None:
    """Check that the simulator has found nothing wrong."""
    if outcome.findings:
        raise FoundWrong("\n".join(outcome.findings))


def simulate(target: str, name: str, dtype_name: str) -> Outcome:
    """Run one of `CALLS` in the simulator and compare it with the reference in float64."""
    call, dtype = CALLS[name], DTYPES[dtype_name]
    return simulate_call(target, name, call, dtype, call.tolerance(dtype))


def simulate_call(target: str, name: str, call: Call, dtype: torch.dtype, tolerance: float) -> Outcome:
    """Run a call in the simulator and compare it with the reference in float64."""
    from s3d_fast.backends.triton import TRITON
    from s3d_fast.kernels.options import triton_options
    from s3d_fast.kernels.ptx.launch import simulated

    arguments = _as_a_solver_has_them(target, call, call.arguments(dtype))
    _forget()
    by_address = _by_address(call, arguments)
    with simulated(target, processors=call.processors, reachable=by_address) as report, triton_options(**call.options):
        assert_agrees(TRITON, call.operation, label=name, tolerance=tolerance, **arguments)
    kernels = {launch.kernel for launch in report.launches}
    missing = [one for one in call.kernels - kernels if not INSTEAD.get(one, {one}) <= kernels]
    assert not missing, f"{name}: only {kernels} ran"
    findings, ambiguities = list(map(str, report.findings)), list(map(str, report.ambiguities))
    return Outcome(kernels, findings, ambiguities, sum(launch.seconds for launch in report.launches))


def _forget() -> None:
    """Forget the widths of earlier calls, which would be compiled in as well."""
    from s3d_fast.kernels import grouped, krylov

    grouped._PRESENT.clear()
    krylov._PRESENT.clear()


def _as_a_solver_has_them(target: str, call: Call, arguments: Arguments) -> Arguments:
    """Return arguments whose rows need not be copied: kernels that find them by address would find the copies."""
    from s3d_fast.backends.triton import TRITON
    from s3d_fast.kernels.options import triton_options
    from s3d_fast.kernels.ptx.launch import simulated

    if call.operation != GROUPED_MATVEC:
        return arguments
    with simulated(target) as report, triton_options(**call.options):
        made = {name: [TRITON.prepared(rows, name == "X") for rows in arguments[name]] for name in ("X", "C")}
    report.require_clean()
    return {**arguments, **made}


def _by_address(call: Call, arguments: Arguments) -> list[Tensor]:
    """Return the arguments that kernels find by addresses in a table, with the planes that rows carry."""
    if not call.operation.startswith("krylov") and "grouped" not in call.operation:
        return []
    return [
        own for tensor in _tensors(arguments) for own in (tensor, *vars(tensor).values()) if isinstance(own, Tensor)
    ]


def _tensors(arguments: Arguments) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]


def mutate(target: str, name: str, dtype_name: str) -> list[Any]:
    """Return the mutants of the kernels of a call."""
    from s3d_fast.backends.triton import TRITON
    from s3d_fast.kernels.options import triton_options
    from s3d_fast.kernels.ptx.mutation import mutants

    call = CALLS[name]
    _forget()
    given = _as_a_solver_has_them(target, call, call.arguments(DTYPES[dtype_name]))
    before = tree_map_only(Tensor, Tensor.clone, given)
    by_address = _by_address(call, given)

    def run() -> list[Tensor]:
        # Some operations change their arguments, which kernels may have to find at their addresses.
        own = given if by_address else tree_map_only(Tensor, Tensor.clone, given)
        for tensor, old in zip(_tensors(given), _tensors(before), strict=True):
            tensor.copy_(old)
        result = getattr(TRITON, call.operation)(**own)
        return [leaf for leaf in tree_leaves((result, own)) if isinstance(leaf, Tensor)]

    with triton_options(**call.options):
        return mutants(target, run, by_address)


class Outlined(NamedTuple):
    """What the outline of a call's kernels shows, as they are and without each of their ordering instructions."""

    found: list[str]
    without: list[list[str]]  # in the order of `mutate`


def outlined(target: str, name: str, dtype_name: str) -> Outlined:
    """Execute the kernels of a call in outline, and all of their mutants."""
    from s3d_fast.backends.triton import TRITON
    from s3d_fast.kernels.options import triton_options
    from s3d_fast.kernels.ptx.findings import Fault
    from s3d_fast.kernels.ptx.launch import simulated
    from s3d_fast.kernels.ptx.mutation import ordering_instructions, without_line
    from s3d_fast.kernels.ptx.outline import outline

    call = CALLS[name]
    _forget()
    given = _as_a_solver_has_them(target, call, call.arguments(DTYPES[dtype_name]))
    numbers: list[list[int | float]] = []

    def note(arguments: Sequence[Any]) -> None:
        numbers.append([0 if isinstance(own, Tensor) else own for own in arguments])

    with simulated(target, reachable=_by_address(call, given), after=note) as report, triton_options(**call.options):
        getattr(TRITON, call.operation)(**given)
    found, without, seen = [], [], set()
    for launch, own in zip(report.launches, numbers, strict=True):
        if launch.ptx in seen:
            continue
        seen.add(launch.ptx)
        found += map(str, outline(launch.ptx, own, launch.grid, launch.shared_memory))
        for line, _ in ordering_instructions(launch.ptx):
            mutant = without_line(launch.ptx, line)
            try:
                kinds = [finding.kind for finding in outline(mutant, own, launch.grid, launch.shared_memory)]
            except Fault as fault:
                kinds = [str(fault)]
            without.append(kinds)
    return Outlined(found, without)
