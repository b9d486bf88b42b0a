"""S v by shape and dtype, the grouped call on the layers of networks, EdgeConv, and the dense S."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch.utils._pytree import tree_map_only

from benchmarks.compare import compare, fma_peak, matmul_peak
from benchmarks.device import BACKEND, DEVICE, ON_CPU
from benchmarks.memory import extra_memory
from s3d_fast.backends import operations
from s3d_fast.backends.choice import choose
from s3d_fast.maths import reference
from s3d_fast.maths.incoming import incoming_edges
from s3d_fast.maths.reference import DepthwiseStage
from s3d_fast.models.mobilenet import STRIDES
from tests.backends.agreement import depthwise_of, edges_of, layers_of, norms_of, tied_of
from tests.cases import (
    LARGE_EDGES,
    LARGE_ROWS,
    NETWORKS,
    TOLERANCE,
    ConvCase,
    DepthwiseCase,
    EdgeCase,
    RowsCase,
    compute_dtype,
    random_vectors,
    relative_error,
)

# torch.compile emits warnings about its own code.
pytestmark = pytest.mark.filterwarnings("default")

LARGE_CONVS = [
    ConvCase(32, channels, size, size, channels, k=(3, 3), p=(1, 1), dtype=torch.float32)
    for channels, size in ((32, 32), (64, 16))
]
AIMS = {32: (2.0, 0.50), 64: (1.8, 0.65), 128: (1.3, 0.80), 256: (1.3, 0.80), 512: (1.3, 0.80)}


@pytest.mark.parametrize("case", LARGE_ROWS, ids=str)
def test_splitting_matvec(benchmark: BenchmarkFixture, case: RowsCase) -> None:
    benchmark.group = "S v"
    X, C = (tensor.to(DEVICE) for tensor in case.tensors())
    V = random_vectors(case.M, case.D, dtype=case.dtype).to(DEVICE)
    compiled = torch.compile(reference.splitting_matvec, dynamic=False)

    def ours() -> torch.Tensor:
        return operations.splitting_matvec(X, C, V, backend=BACKEND, check_finite=False)

    expected = reference.splitting_matvec(X.double(), C.double(), V.double())
    assert relative_error(ours(), expected) <= TOLERANCE[case.dtype]
    aims = dict(zip(("reference", "sgemm"), AIMS[case.D], strict=True)) if case.dtype == torch.float32 else {}
    compare(
        benchmark,
        ours,
        {
            "reference": lambda: reference.splitting_matvec(X, C, V),
            "torch.compile": lambda: compiled(X, C, V),
        },
        limits=[matmul_peak(compute_dtype(case.dtype) if ON_CPU else case.dtype)],
        rates=fma_peak() if compute_dtype(case.dtype) == torch.float32 else [],
        work=4 * case.N * case.D * case.M,
        aims=aims,
    )
    benchmark.extra_info["memory"] = {
        "ours": extra_memory(BACKEND, case),
        "reference": extra_memory("reference", case),
    }


@pytest.mark.parametrize("case", LARGE_ROWS[:5], ids=str)
def test_gated_matvec(benchmark: BenchmarkFixture, case: RowsCase) -> None:
    benchmark.group = "gated S v"
    X, C = (tensor.to(DEVICE) for tensor in case.tensors())
    c12, c22 = C.flip(0), C.flip(1)
    V = random_vectors(case.M, 2 * case.D, dtype=case.dtype).to(DEVICE)

    def ours() -> torch.Tensor:
        return operations.gated_matvec(X, C, c12, c22, V, backend=BACKEND, check_finite=False)

    expected = reference.gated_matvec(*(tensor.double() for tensor in (X, C, c12, c22, V)))
    assert relative_error(ours(), expected) <= TOLERANCE[case.dtype]
    others = {"reference": lambda: reference.gated_matvec(X, C, c12, c22, V)}
    aims = {"reference": 1.5, "sgemm": 0.6} if case.D >= 128 else {}
    compare(benchmark, ours, others, limits=[matmul_peak()], work=8 * case.N * case.D * case.M, aims=aims, rounds=9)


@pytest.mark.parametrize("name", NETWORKS)
def test_grouped(benchmark: BenchmarkFixture, name: str) -> None:
    benchmark.group = "S v of all layers in one call"
    cases = NETWORKS[name]
    tensors = [case.tensors() for case in cases]
    X, C = [x.to(DEVICE) for x, _ in tensors], [c.to(DEVICE) for _, c in tensors]
    V = [random_vectors(case.M, case.D + case.bias, dtype=case.dtype).to(DEVICE) for case in cases]
    bias = [case.bias for case in cases]

    def ours() -> list[torch.Tensor]:
        return operations.splitting_matvec_grouped(X, C, V, bias=bias, backend=BACKEND, check_finite=False)

    def loop() -> list[torch.Tensor]:
        return [reference.splitting_matvec(*layer) for layer in zip(X, C, V, bias, strict=True)]

    for case, found, expected in zip(cases, ours(), loop(), strict=True):
        assert relative_error(found, expected) <= TOLERANCE[case.dtype]
    work = sum(4 * case.N * (case.D + case.bias) * case.M for case in cases)
    others, aims = {"reference": loop}, {}
    if name.startswith("MobileNetV1, 32"):
        # One compiled function for all layers: with static sizes it would be compiled again for every layer.
        compiled = torch.compile(reference.splitting_matvec, dynamic=True)
        others["torch.compile"] = lambda: [compiled(*layer) for layer in zip(X, C, V, bias, strict=True)]
        aims = {"reference": 2.5}
    compare(benchmark, ours, others, limits=[matmul_peak()], work=work, aims=aims)


def depthwise_layers(filters: int, size: int, batch: int) -> list[DepthwiseCase]:
    """Return the pointwise layers of MobileNetV1, each with the depthwise convolution behind it."""
    layers = []
    for stride in STRIDES[1:]:
        stage = DepthwiseStage((stride, stride), (1, 1))
        layers.append(DepthwiseCase(batch, size, size, filters, filters, (((3, 3), stage),), torch.float32))
        size //= stride
    return layers


MOBILENET = depthwise_layers(32, 32, 128)
# The first of each size and stride, which are the largest.
DISTINCT_LAYERS = list(dict.fromkeys(MOBILENET))


@pytest.mark.parametrize("case", DISTINCT_LAYERS, ids=str)
def test_depthwise_matvec(benchmark: BenchmarkFixture, case: DepthwiseCase) -> None:
    benchmark.group = "S v with a depthwise stage"
    layer = to_device(depthwise_of(case))
    X, C, V = layer["X"], layer["C"][0].flatten(0, 2), layer["V"]
    tensors = [layer[name] for name in ("X", "C", "d", "weight", "V")]

    def ours() -> torch.Tensor:
        return operations.depthwise_matvec(*tensors, stages=layer["stages"], backend=BACKEND, check_finite=False)

    def plain() -> torch.Tensor:
        return operations.splitting_matvec(X, C, V, backend=BACKEND, check_finite=False)

    assert relative_error(ours(), reference.depthwise_matvec(**layer)) <= TOLERANCE[case.dtype]
    others = {"reference": lambda: reference.depthwise_matvec(**layer), "S v without the stage": plain}
    compare(benchmark, ours, others, aims={"S v without the stage": 0.4}, rounds=9)


def test_depthwise_grouped(benchmark: BenchmarkFixture) -> None:
    benchmark.group = "S v with a depthwise stage"
    layers = layers_of([to_device(depthwise_of(case)) for case in MOBILENET])
    plain = {"X": layers["X"], "C": [C[0].flatten(0, 2) for C in layers["C"]], "V": layers["V"], "bias": layers["bias"]}
    chosen = choose(BACKEND)
    others = {
        "reference": lambda: choose("reference").depthwise_matvec_grouped(**layers),
        "S v without the stage": lambda: chosen.splitting_matvec_grouped(**plain),
    }
    aims = {"S v without the stage": 0.4}
    compare(benchmark, lambda: chosen.depthwise_matvec_grouped(**layers), others, aims=aims, rounds=9)


@pytest.mark.parametrize("case", DISTINCT_LAYERS[:3], ids=str)
def test_depthwise_row_norms(benchmark: BenchmarkFixture, case: DepthwiseCase) -> None:
    benchmark.group = "norms of the rows behind a depthwise stage"
    given = to_device(norms_of(case))
    X, C = given["X"], given["d"].flatten(0, 2)
    V = random_vectors(case.M, case.D, dtype=case.dtype).to(DEVICE)
    chosen = choose(BACKEND)

    def two_products() -> None:
        for _ in range(2):
            chosen.splitting_matvec(X=X, C=C, V=V, bias=False)

    assert relative_error(chosen.depthwise_row_norms(**given), reference.depthwise_row_norms(**given)) <= 1e-4
    others = {"reference": lambda: reference.depthwise_row_norms(**given), "2 products": two_products}
    compare(benchmark, lambda: chosen.depthwise_row_norms(**given), others, aims={"2 products": 1.0}, rounds=9)


def to_device(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with their tensors on the device of the benchmarks."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(DEVICE), arguments)


def tied_edges(case: EdgeCase, ties: str) -> dict[str, Any]:
    """Return the arguments of `edgeconv_matvec` as operators pass them: with indices of 32 bits on the CPU."""
    arguments = to_device(edges_of(case, incoming=not ON_CPU, ties=ties))
    if not ON_CPU:
        return arguments
    return tree_map_only(
        torch.Tensor, lambda tensor: tensor if tensor.is_floating_point() else tensor.to(torch.int32), arguments
    )


@pytest.mark.parametrize("case", LARGE_EDGES, ids=str)
def test_edgeconv_matvec(benchmark: BenchmarkFixture, case: EdgeCase) -> None:
    benchmark.group = "EdgeConv S v"
    X, neighbours, slot, C = (tensor.to(DEVICE) for tensor in case.tensors())
    winner = neighbours.gather(-1, slot)
    V = random_vectors(case.M, 2 * case.F, dtype=case.dtype).to(DEVICE)
    # Sorted once per layer for all products, as the operators do; the CPU kernels do not need it.
    incoming = None if ON_CPU else incoming_edges(winner)
    others = {"reference": lambda: reference.edgeconv_matvec(X, winner, C, V)}
    aims = {}
    if (case.F, case.M) == (64, 64):
        compiled = torch.compile(reference.edgeconv_matvec, dynamic=False)
        others["torch.compile"] = lambda: compiled(X, winner, C, V)
        others["reference, by edges"] = lambda: reference.edgeconv_matvec_edges(X, neighbours, slot, C, V)
        aims = {"reference": 2.0, "reference, by edges": 10.0}

    def ours() -> torch.Tensor:
        return operations.edgeconv_matvec(X, winner, C, V, backend=BACKEND, check_finite=False, incoming=incoming)

    assert relative_error(ours(), reference.edgeconv_matvec(X, winner, C, V)) <= TOLERANCE[case.dtype]
    work = 8 * case.B * case.P * case.F * case.M
    compare(benchmark, ours, others, limits=[matmul_peak()], work=work, aims=aims, rounds=9)


@pytest.mark.parametrize("sloped", [False, True], ids=["plain", "sloped"])
@pytest.mark.parametrize("case", LARGE_EDGES, ids=str)
def test_edgeconv_ties(benchmark: BenchmarkFixture, case: EdgeCase, sloped: bool) -> None:
    benchmark.group = "EdgeConv S v with ties"
    given = tied_edges(case, "sloped" if sloped else "plain")
    chosen = choose(BACKEND)

    def ours() -> torch.Tensor:
        return chosen.edgeconv_matvec(**given)

    expected = choose("reference").edgeconv_matvec(**given)
    assert relative_error(ours(), expected) <= TOLERANCE[case.dtype]
    others = {
        "reference": lambda: choose("reference").edgeconv_matvec(**given),
        "S v without ties": lambda: chosen.edgeconv_matvec(**{**given, "ties": None}),
    }
    compare(benchmark, ours, others, rounds=9)


@pytest.mark.parametrize("ties", ["plain", "sloped"])
def test_edgeconv_ties_of_a_network(benchmark: BenchmarkFixture, ties: str) -> None:
    # A layer with 3 features does little but read indices and coefficients, and ties double those.
    benchmark.group = "S v of DGCNN's EdgeConv layers with ties"
    layers = [tied_edges(case, ties) for case in LARGE_EDGES]
    chosen = choose(BACKEND)

    def ours() -> list[torch.Tensor]:
        return [chosen.edgeconv_matvec(**layer) for layer in layers]

    def without() -> list[torch.Tensor]:
        return [chosen.edgeconv_matvec(**{**layer, "ties": None}) for layer in layers]

    compare(benchmark, ours, {"S v without ties": without}, aims={"S v without ties": 1 / 1.3}, rounds=9)


@pytest.mark.parametrize("case", LARGE_CONVS, ids=str)
def test_tied_matvec(benchmark: BenchmarkFixture, case: ConvCase) -> None:
    benchmark.group = "S v of a convolution with ties"
    # One tie for each window of a 2 x 2 MaxPool.
    given = to_device(tied_of(case, False, case.H * case.W // 4))
    conv = {name: value for name, value in given.items() if name != "ties"}
    chosen = choose(BACKEND)
    expected = choose("reference").tied_matvec(**given)
    assert relative_error(chosen.tied_matvec(**given), expected) <= TOLERANCE[case.dtype]
    others = {
        "reference": lambda: choose("reference").tied_matvec(**given),
        "S v without ties": lambda: chosen.conv_matvec(**conv),
    }
    compare(benchmark, lambda: chosen.tied_matvec(**given), others, aims={"S v without ties": 1 / 1.3}, rounds=9)


def test_splitting_matrices(benchmark: BenchmarkFixture) -> None:
    benchmark.group = "dense S"
    case = RowsCase(65536, 32, 32, torch.float32)
    X, C = (tensor.to(DEVICE) for tensor in case.tensors())
    V = random_vectors(case.M, case.D, dtype=case.dtype).to(DEVICE)

    def ours() -> torch.Tensor:
        return operations.splitting_matrices(X, C, backend=BACKEND, check_finite=False)

    def ten_products() -> None:
        for _ in range(10):
            operations.splitting_matvec(X, C, V, backend=BACKEND, check_finite=False)

    assert relative_error(ours(), reference.splitting_matrices(X, C)) <= TOLERANCE[case.dtype]
    others = {"reference": lambda: reference.splitting_matrices(X, C), "10 products": ten_products}
    # Symmetry halves the work: 2 flops for each of the D (D + 1) / 2 pairs.
    work = case.N * case.D * (case.D + 1) * case.M
    compare(benchmark, ours, others, limits=[matmul_peak()], work=work, aims={"10 products": 1.0}, rounds=9)
