"""What it means that a backend agrees with the reference: the definitions, one call of each operation, the check."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass, tree_leaves, tree_map_only

from s3d_fast import Activation, activation
from s3d_fast.backends import operations
from s3d_fast.backends.interface import Backend
from s3d_fast.maths import reference
from s3d_fast.maths.incoming import incoming_edges
from s3d_fast.maths.reference import ConvGeometry, DepthwiseStage, EdgeTies, KrylovState, PoolTies, Widening
from tests.cases import (
    DEPTHWISE,
    ENTRY_TOLERANCE,
    TOLERANCE,
    ConvCase,
    DepthwiseCase,
    EdgeCase,
    RowsCase,
    compute_dtype,
    random_tensor,
    random_vectors,
    relative_error,
)

Arguments = dict[str, Any]
# So that functions on trees of tensors reach those of a state.
register_dataclass(KrylovState)


class Definitions:
    """Every operation of `Backend` by `maths.reference` alone: what its arguments become, and what it returns."""

    def splitting_matvec(self, *, X: Tensor, C: Tensor, V: Tensor, bias: bool) -> Tensor:
        return reference.splitting_matvec(X, C, V, bias)

    def splitting_matvec_grouped(self, *, X: Any, C: Any, V: Any, bias: Any) -> list[Tensor]:
        return [reference.splitting_matvec(*layer) for layer in zip(X, C, V, bias, strict=True)]

    def gated_matvec(self, *, X: Tensor, c11: Tensor, c12: Tensor, c22: Tensor | None, V: Tensor, bias: bool) -> Tensor:
        return reference.gated_matvec(X, c11, c12, c22, V, bias)

    def depthwise_matvec(
        self, *, X: Tensor, C: Any, d: Any, weight: Any, stages: Sequence[DepthwiseStage], V: Tensor, bias: bool
    ) -> Tensor:
        return reference.depthwise_matvec(X, C, d, weight, stages, V, bias)

    def depthwise_matvec_grouped(
        self, *, X: Any, C: Any, d: Any, weight: Any, stages: Any, V: Any, bias: Any
    ) -> list[Tensor]:
        return [reference.depthwise_matvec(*layer) for layer in zip(X, C, d, weight, stages, V, bias, strict=True)]

    def depthwise_row_norms(self, *, X: Tensor, d: Tensor, weight: Tensor, stage: DepthwiseStage, bias: bool) -> Tensor:
        return reference.depthwise_row_norms(X, d, weight, stage, bias)

    def splitting_matrices(self, *, X: Tensor, C: Tensor, bias: bool) -> Tensor:
        return reference.splitting_matrices(X, C, bias)

    def add_splitting_matrices(self, *, S: Tensor, X: Tensor, C: Tensor, bias: bool, weight: float) -> None:
        S += weight * reference.splitting_matrices(X, C, bias)

    def conv_matvec(self, *, X: Tensor, C: Tensor, V: Tensor, geometry: ConvGeometry, bias: bool) -> Tensor:
        return reference.conv_matvec(X, C, V, *geometry, bias)

    def tied_matvec(
        self, *, X: Tensor, C: Tensor, V: Tensor, ties: PoolTies, geometry: ConvGeometry, bias: bool
    ) -> Tensor:
        return reference.tied_matvec(X, C, V, ties, *geometry, bias)

    def edgeconv_matvec(
        self, *, X: Tensor, winner: Tensor, C: Tensor, V: Tensor, bias: bool, incoming: Any, ties: EdgeTies | None
    ) -> Tensor:
        return reference.edgeconv_matvec(X, winner, C, V, bias, ties)

    def curvature_coefficients(
        self,
        *,
        g: Tensor,
        z: Tensor,
        activation: Activation,
        scale: Tensor | None,
        axis: int,
        inplace: bool,
        row_norm: Tensor | None = None,
        bandwidth: Tensor | None = None,
    ) -> Tensor:
        C = reference.curvature_coefficients(g, z, activation, scale, axis, row_norm, bandwidth)
        return g.copy_(C) if inplace else C

    def activation_slopes(self, *, z: Tensor, activation: Activation, scale: Tensor | None, axis: int) -> Tensor:
        return reference.activation_slopes(z, activation, scale, axis)

    def joint_matvec(self, *, X: Sequence[Tensor], C: Sequence[Tensor], V: Tensor, bias: Sequence[bool]) -> Tensor:
        return reference.joint_matvec(X, C, V, bias)

    def top_two(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return reference.top_two(values)

    def gather_patches(
        self, *, maps: Tensor, places: Tensor, kernel: tuple[int, int], dilation: tuple[int, int]
    ) -> Tensor:
        return reference.gather_patches(maps, places, kernel, dilation)

    def grow_weights(self, widenings: Sequence[Widening]) -> list[Tensor]:
        return [reference.grow_weight(*widening) for widening in widenings]

    def krylov_extend(self, state: KrylovState, product: Tensor, step: int) -> None:
        reference.krylov_extend(state, product, step)

    def krylov_extend_grouped(self, *, states: Any, products: Any, step: int, taken: Tensor) -> None:
        for state, product in zip(states, products, strict=True):
            reference.krylov_extend(state, product, step)
        taken += 1

    def tridiagonal_extremes(self, *, alpha: Tensor, beta: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        return reference.tridiagonal_extremes(alpha, beta, length)

    def certified_widths(
        self, *, alpha: Tensor, beta: Tensor, length: Tensor, values: Tensor, growth: Tensor
    ) -> Tensor:
        return reference.certified_widths(alpha, beta, length, values, growth)

    def symmetric_extremes(self, S: Tensor) -> tuple[Tensor, Tensor]:
        return reference.symmetric_extremes(S)


class PublicOperations:
    """The public calls with the signatures of `Backend`, each on the backend of a given name."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def splitting_matvec(self, *, X: Tensor, C: Tensor, V: Tensor, bias: bool) -> Tensor:
        return operations.splitting_matvec(X, C, V, bias=bias, backend=self.backend)

    def splitting_matvec_grouped(self, *, X: Any, C: Any, V: Any, bias: Any) -> list[Tensor]:
        return operations.splitting_matvec_grouped(X, C, V, bias=bias, backend=self.backend)

    def gated_matvec(self, *, X: Tensor, c11: Tensor, c12: Tensor, c22: Tensor | None, V: Tensor, bias: bool) -> Tensor:
        return operations.gated_matvec(X, c11, c12, c22, V, bias=bias, backend=self.backend)

    def depthwise_matvec(
        self, *, X: Tensor, C: Any, d: Any, weight: Any, stages: Sequence[DepthwiseStage], V: Tensor, bias: bool
    ) -> Tensor:
        return operations.depthwise_matvec(X, C, d, weight, V, stages=stages, bias=bias, backend=self.backend)

    def depthwise_row_norms(self, *, X: Tensor, d: Tensor, weight: Tensor, stage: DepthwiseStage, bias: bool) -> Tensor:
        return operations.depthwise_row_norms(X, d, weight, stage=stage, bias=bias, backend=self.backend)

    def splitting_matrices(self, *, X: Tensor, C: Tensor, bias: bool) -> Tensor:
        return operations.splitting_matrices(X, C, bias=bias, backend=self.backend)

    def add_splitting_matrices(self, *, S: Tensor, X: Tensor, C: Tensor, bias: bool, weight: float) -> None:
        assert operations.add_splitting_matrices(S, X, C, weight, bias=bias, backend=self.backend) is S

    def conv_matvec(self, *, X: Tensor, C: Tensor, V: Tensor, geometry: ConvGeometry, bias: bool) -> Tensor:
        return operations.conv_matvec(X, C, V, **geometry._asdict(), bias=bias, backend=self.backend)

    def tied_matvec(
        self, *, X: Tensor, C: Tensor, V: Tensor, ties: PoolTies, geometry: ConvGeometry, bias: bool
    ) -> Tensor:
        given = {**ties._asdict(), **geometry._asdict()}
        return operations.tied_matvec(X, C, V, **given, bias=bias, backend=self.backend)

    def edgeconv_matvec(
        self, *, X: Tensor, winner: Tensor, C: Tensor, V: Tensor, bias: bool, incoming: Any, ties: EdgeTies | None
    ) -> Tensor:
        given = {} if ties is None else {name: getattr(ties, name) for name in ("runner", "K", "d1", "d2")}
        settings = {"bias": bias, "incoming": incoming, "backend": self.backend}
        return operations.edgeconv_matvec(X, winner, C, V, **settings, **given)

    def curvature_coefficients(
        self,
        *,
        g: Tensor,
        z: Tensor,
        activation: Activation,
        scale: Tensor | None,
        axis: int,
        inplace: bool,
        row_norm: Tensor | None = None,
        bandwidth: Tensor | None = None,
    ) -> Tensor:
        settings = {"axis": axis, "inplace": inplace, "backend": self.backend}
        settings |= {"row_norm": row_norm, "bandwidth": bandwidth}
        return operations.curvature_coefficients(g, z, activation, scale, **settings)

    def activation_slopes(self, *, z: Tensor, activation: Activation, scale: Tensor | None, axis: int) -> Tensor:
        return operations.activation_slopes(z, activation, scale, axis, self.backend)

    def joint_matvec(self, *, X: Sequence[Tensor], C: Sequence[Tensor], V: Tensor, bias: Sequence[bool]) -> Tensor:
        return operations.joint_matvec(X, C, V, bias=bias, backend=self.backend)

    def top_two(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return operations.top_two(values, self.backend)

    def gather_patches(
        self, *, maps: Tensor, places: Tensor, kernel: tuple[int, int], dilation: tuple[int, int]
    ) -> Tensor:
        return operations.gather_patches(maps, places, kernel, dilation, self.backend)

    def grow_weights(self, widenings: Sequence[Widening]) -> list[Tensor]:
        return operations.grow_weights(widenings, backend=self.backend)


# The arguments that an operation changes.
CHANGED = {
    "add_splitting_matrices": ("S",),
    "krylov_extend": ("state",),
    "krylov_extend_grouped": ("states", "taken"),
}
DEFINITIONS = Definitions()


def changed_by(name: str, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the arguments that a call of an operation changes."""
    return ("g",) if arguments.get("inplace") else CHANGED.get(name, ())


def assert_agrees(
    backend: Backend | PublicOperations,
    name: str,
    *,
    label: object = "",
    tolerance: float | None = None,
    **arguments: Any,
) -> Any:
    """Check an operation against its definition in float64, and every argument afterwards; return the result.

    By default, the tables of `tests.cases` say what is allowed for a dtype.
    """
    wide = tree_map_only(Tensor, _in_float64, arguments)
    expected = getattr(DEFINITIONS, name)(**wide)
    before = tree_map_only(Tensor, Tensor.clone, arguments)
    result = getattr(backend, name)(**arguments)
    changed = changed_by(name, arguments)
    table = ENTRY_TOLERANCE if name in ("curvature_coefficients", "activation_slopes", "grow_weights") else TOLERANCE
    if tolerance is not None:
        table = dict.fromkeys(table, tolerance)
    for argument, now in arguments.items():
        if argument in changed:
            for tensor, truth in zip(tree_leaves(now), tree_leaves(wide[argument]), strict=True):
                # Numbers of steps are exact.
                assert_close(tensor, truth, table.get(tensor.dtype, 0), f"{label}: {argument}")
        else:
            assert_unchanged(now, before[argument], f"{label}: {argument} of {name}")
    assert not arguments.get("inplace") or result is arguments["g"], label
    if expected is None:
        assert result is None, label
        return None
    if name.endswith("extremes"):
        _turn(expected[1], result[1])
    found, wanted, dtypes = tree_leaves(result), tree_leaves(expected), _result_dtypes(name, arguments)
    assert len(found) == len(wanted), label
    for number, (tensor, truth, dtype) in enumerate(zip(found, wanted, dtypes, strict=True)):
        assert tensor.dtype == dtype, f"{label}: result {number} is {tensor.dtype}"
        # Places are exact.
        assert_close(tensor, truth, table.get(dtype, 0), f"{label}: result {number}")
    return result


def assert_close(found: Tensor, expected: Tensor, tolerance: float, label: object = "") -> None:
    """Check entries up to a fraction of the largest; what is NaN in one is NaN in the other."""
    assert torch.equal(found.isnan(), expected.isnan()), label
    error = relative_error(found.nan_to_num(), expected.nan_to_num())
    assert error <= tolerance, f"{label}: error {error}"


def assert_unchanged(now: Any, before: Any, label: object = "") -> None:
    """Check that every tensor among the arguments has the same bits as before."""
    for tensor, old in zip(tree_leaves(now), tree_leaves(before), strict=True):
        if isinstance(tensor, Tensor):
            torch.testing.assert_close(
                tensor, old, rtol=0, atol=0, equal_nan=True, msg=lambda message: f"{label} was changed: {message}"
            )


def _in_float64(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64, copy=True) if tensor.is_floating_point() else tensor.clone()


def _turn(expected: Tensor, found: Tensor) -> None:
    """Give eigenvectors, which are known up to their sign, the signs of others."""
    expected *= torch.where((expected * found).sum(-1, keepdim=True) < 0, -1.0, 1.0)


def _result_dtypes(name: str, arguments: Mapping[str, Any]) -> list[torch.dtype]:
    if name.endswith("extremes"):
        return [torch.float64] * 2
    if name == "certified_widths":
        return [torch.float64]
    if name == "top_two":
        return [torch.int64] * 2
    if name == "gather_patches":
        return [arguments["maps"].dtype]
    if name == "joint_matvec":
        return [compute_dtype(arguments["X"][0].dtype)]
    if name.endswith("_grouped"):
        return [compute_dtype(X.dtype) for X in arguments["X"]]
    if name == "grow_weights":
        return [widening.weight.dtype for widening in arguments["widenings"]]
    if name in ("curvature_coefficients", "activation_slopes"):
        return [arguments["z"].dtype]
    return [compute_dtype(arguments["X"].dtype)]


def krylov_state(M: int, capacity: int, D: int, dtype: torch.dtype) -> KrylovState:
    """Return the state before the first step; NaN where nothing has been written."""
    basis = torch.full((M, capacity, D), torch.nan, dtype=dtype)
    basis[:, 0] = torch.nn.functional.normalize(random_tensor(M, D, dtype=dtype, seed=1), dim=-1)
    return KrylovState(
        basis=basis,
        q=torch.full((M, D), torch.nan, dtype=dtype),
        alpha=torch.full((M, capacity), torch.nan, dtype=dtype),
        beta=torch.full((M, capacity), torch.nan, dtype=dtype),
        length=torch.zeros(M, dtype=torch.int64),
        scale=torch.zeros(M, dtype=dtype),
    )


def krylov_layers(sizes: Sequence[tuple[int, int]], step: int, dtype: torch.dtype) -> Arguments:
    """Return the arguments of step `step` for layers of these sizes, (M, D), with the steps before it taken."""
    states, products = [], []
    for seed, (M, D) in enumerate(sizes):
        # Layers share a row stride of alpha and beta.
        state = krylov_state(M, step + 2, D, dtype)
        S = random_tensor(M, D, D, dtype=dtype, seed=seed)
        for earlier in range(step):
            reference.krylov_extend(state, torch.einsum("mij,mj->mi", S + S.mT, state.basis[:, earlier]), earlier)
        states.append(state)
        products.append(random_tensor(M, D, dtype=dtype, seed=5 + seed))
    return {"states": states, "products": products, "step": step, "taken": torch.tensor(step)}


def rows_of(case: RowsCase) -> Arguments:
    """Return the arguments of `splitting_matvec`."""
    X, C = case.tensors()
    return {"X": X, "C": C, "V": case.vectors(), "bias": case.bias}


def joint_of(
    widths: Sequence[int],
    bias: Sequence[bool],
    M: int,
    N: int,
    K: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Arguments:
    """Return the arguments of `joint_matvec`."""
    pairs = len(widths) * (len(widths) + 1) // 2
    return {
        "X": [random_tensor(N, width, dtype=dtype, seed=seed) for seed, width in enumerate(widths)],
        "C": [random_tensor(N, M, dtype=dtype, seed=10 + seed) for seed in range(pairs)],
        "V": random_tensor(*([] if K is None else [K]), M, sum(widths) + sum(bias), dtype=dtype, seed=30),
        "bias": list(bias),
    }


def gated_of(case: RowsCase, full: bool = True) -> Arguments:
    """Return the arguments of `gated_matvec`; without `full`, c22 is zero."""
    X, c11 = case.tensors()
    c12, c22 = (random_tensor(case.N, case.M, dtype=case.dtype, seed=seed) for seed in (3, 4))
    V = random_vectors(*[case.K] * (case.K > 0), case.M, 2 * case.width, dtype=case.dtype)
    return {"X": X, "c11": c11, "c12": c12, "c22": c22 if full else None, "V": V, "bias": case.bias}


def depthwise_of(case: DepthwiseCase) -> Arguments:
    """Return the arguments of `depthwise_matvec`."""
    X, C, d, weight = case.tensors()
    stages = [stage for _, stage in case.stages]
    return {"X": X, "C": C, "d": d, "weight": weight, "stages": stages, "V": case.vectors(), "bias": case.bias}


def norms_of(case: DepthwiseCase) -> Arguments:
    """Return the arguments of `depthwise_row_norms`."""
    X, _, d, weight = case.tensors()
    return {"X": X, "d": d[0], "weight": weight[0], "stage": case.stages[0][1], "bias": case.bias}


def layers_of(layers: Sequence[Arguments]) -> Arguments:
    """Return the arguments of a grouped product, made of those of every layer."""
    return {name: [layer[name] for layer in layers] for name in layers[0]}


def edges_of(case: EdgeCase, incoming: bool = False, ties: str = "none") -> Arguments:
    """Return the arguments of `edgeconv_matvec`; `ties` is "none", "plain" or "sloped"."""
    X, winner, C = case.won()
    edges = incoming_edges(winner) if incoming else None
    known = None if ties == "none" else edge_ties(case, ties == "sloped", incoming)
    arguments = {"X": X, "winner": winner, "C": C, "V": case.vectors(), "bias": case.bias}
    return {**arguments, "incoming": edges, "ties": known}


def edge_ties(case: EdgeCase, sloped: bool, incoming: bool = False) -> EdgeTies:
    """Return random runners-up, some of which are the winners themselves, with coefficients and slopes."""
    shape = (case.B, case.P, case.M)
    runner = torch.randint(case.P, shape, generator=torch.Generator().manual_seed(5))
    K, d1, d2 = (random_tensor(*shape, dtype=case.dtype, seed=seed) for seed in (6, 7, 8))
    edges = incoming_edges(runner) if incoming else None
    return EdgeTies(runner, K, d1, d2, edges) if sloped else EdgeTies(runner, K, incoming=edges)


def tied_of(case: ConvCase, sloped: bool, ties: int = 5) -> Arguments:
    """Return the arguments of `tied_matvec`, with this many maxima for every map."""
    arguments = conv_of(case)
    B, M, *size = arguments["C"].shape
    generator = torch.Generator().manual_seed(5)
    first, second = (torch.randint(math.prod(size), (B, M, ties), generator=generator) for _ in range(2))
    K, d1, d2 = (random_tensor(B, M, ties, dtype=case.dtype, seed=seed) for seed in (6, 7, 8))
    return {**arguments, "ties": PoolTies(first, second, K, d1, d2) if sloped else PoolTies(first, second, K)}


def conv_of(case: ConvCase) -> Arguments:
    """Return the arguments of `conv_matvec`."""
    X, C = case.tensors()
    geometry = ConvGeometry(case.k, case.s, case.p, case.d)
    return {"X": X, "C": C, "V": case.vectors(), "geometry": geometry, "bias": case.bias}


def _curvature(axis: int, inplace: bool) -> Arguments:
    g, z, scale = random_tensor(5, 7, 3), 4 * random_tensor(5, 7, 3, seed=1), random_tensor((5, 7, 3)[axis], seed=2)
    return {"g": g, "z": z, "activation": activation("hardswish"), "scale": scale, "axis": axis, "inplace": inplace}


def kink_widths(
    rows: int, channels: int, dtype: torch.dtype = torch.float64, whole: tuple[int, ...] | None = None
) -> Arguments:
    """Return the widths of kinks of `curvature_coefficients`; the first row has the norm 0.

    Every entry of a tensor of the shape `whole` has a norm of its own.
    """
    row_norm = random_tensor(*([rows] if whole is None else whole), seed=3).abs() + 0.1
    row_norm[:1] = 0
    return {"row_norm": row_norm.to(dtype), "bandwidth": (random_tensor(channels, seed=4).abs() + 0.1).to(dtype)}


def _grow() -> Arguments:
    weight, rows, columns = random_tensor(4, 6, 3), torch.tensor([3, 0, 0, 1, 2]), torch.tensor([5, 0, 0, 2])
    shift, shift_rows = random_tensor(3, 6, 3, seed=2), torch.tensor([-1, 2, 0, 0, -1])
    scales = random_tensor(5, seed=1), random_tensor(4, seed=3)
    full = Widening(weight, rows, scales[0], shift, shift_rows, columns, scales[1], 0.3)
    single = Widening(random_tensor(2, 3, dtype=torch.float32), torch.tensor([1, 0, 1]))
    return {"widenings": [full, single, Widening(random_tensor(5), torch.tensor([4, 4, 0]))]}


def _krylov() -> Arguments:
    return {"state": krylov_state(3, 4, 9, torch.float64), "product": random_tensor(3, 9, seed=5), "step": 0}


def _tridiagonal() -> Arguments:
    return {"alpha": random_tensor(3, 5), "beta": random_tensor(3, 5, seed=1), "length": torch.tensor([5, 1, 3])}


def _certificates() -> Arguments:
    T = _tridiagonal()
    T["beta"][1, 0] = 0
    values, _ = reference.tridiagonal_extremes(**T)
    return {**T, "values": values, "growth": torch.tensor([1e3, 1e9, 1e6], dtype=torch.float64)}


def _matrices() -> Arguments:
    X, C = RowsCase(97, 9, 5).tensors()
    return {"X": X, "C": C, "bias": True}


def _sum_of_matrices(transposed: bool) -> Arguments:
    S = random_tensor(5, 10, 10, seed=4)
    return {"S": S.mT.contiguous().mT if transposed else S, **_matrices(), "weight": -0.3}


# One call of every operation that leaves no argument out; what distinguishes two calls of one stands after a colon.
EXAMPLES: dict[str, Callable[[], Arguments]] = {
    "splitting_matvec": lambda: rows_of(RowsCase(130, 20, 9, bias=True, K=2)),
    "splitting_matvec:wide": lambda: rows_of(RowsCase(130, 270, 9, bias=True, K=2)),
    "splitting_matvec_grouped": lambda: layers_of(
        [rows_of(RowsCase(70, 20, 9, bias=True)), rows_of(RowsCase(600, 16, 32, K=2))]
    ),
    "joint_matvec": lambda: joint_of((7, 30, 4), (False, True, True), 9, 130, K=2),
    "joint_matvec:alone": lambda: joint_of((300,), (True,), 40, 70),
    "gated_matvec": lambda: gated_of(RowsCase(130, 20, 9, bias=True, K=2)),
    "gated_matvec:linear": lambda: gated_of(RowsCase(130, 270, 9), full=False),
    "depthwise_matvec": lambda: depthwise_of(DEPTHWISE[1]),
    "depthwise_matvec_grouped": lambda: layers_of([depthwise_of(case) for case in DEPTHWISE[:3]]),
    "depthwise_row_norms": lambda: norms_of(DEPTHWISE[1]),
    "splitting_matrices": _matrices,
    "add_splitting_matrices": lambda: _sum_of_matrices(False),
    "add_splitting_matrices:transposed": lambda: _sum_of_matrices(True),
    "conv_matvec": lambda: conv_of(ConvCase(2, 3, 9, 8, 4, k=(2, 3), s=(2, 1), p=(0, 2), d=(3, 2), bias=True, K=2)),
    "edgeconv_matvec": lambda: edges_of(EdgeCase(2, 13, 6, 4, 5, bias=True, K=2)),
    "edgeconv_matvec:incoming": lambda: edges_of(EdgeCase(2, 13, 6, 4, 5, bias=True, K=2), incoming=True),
    "edgeconv_matvec:tied": lambda: edges_of(EdgeCase(2, 13, 6, 4, 5, bias=True, K=2), ties="sloped"),
    "tied_matvec": lambda: tied_of(ConvCase(2, 3, 9, 8, 4, k=(2, 3), s=(2, 1), p=(0, 2), bias=True, K=2), True),
    "curvature_coefficients": lambda: _curvature(1, False),
    "curvature_coefficients:inplace": lambda: _curvature(0, True),
    "curvature_coefficients:by-width": lambda: {**_curvature(1, False), **kink_widths(15, 7)},
    "curvature_coefficients:by-entry": lambda: {**_curvature(1, False), **kink_widths(15, 7, whole=(5, 7, 3))},
    "activation_slopes": lambda: {key: _curvature(1, False)[key] for key in ("z", "activation", "scale", "axis")},
    "top_two": lambda: {"values": random_tensor(6, 9, 70)},
    "gather_patches": lambda: {
        "maps": random_tensor(2, 3, 5, 6),
        "places": torch.tensor([[0, 0, 0], [1, -1, -2], [1, 4, 5], [0, 2, 3], [1, -9, 1]]),
        "kernel": (3, 2),
        "dilation": (1, 2),
    },
    "grow_weights": _grow,
    "krylov_extend": _krylov,
    "krylov_extend_grouped": lambda: krylov_layers([(3, 9), (2, 16), (1, 40)], 0, torch.float64),
    "tridiagonal_extremes": _tridiagonal,
    "certified_widths": _certificates,
    "symmetric_extremes": lambda: {"S": random_tensor(3, 5, 5) + random_tensor(3, 5, 5).mT},
}
