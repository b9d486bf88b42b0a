"""Every backend agrees with the reference: every operation, the products of rows, convolutions and EdgeConv in full.

`test_agreement_entries.py` has the operations that work entry by entry, `test_agreement_lanczos.py` those of Lanczos.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_map_only

from s3d_fast.backends import operations
from s3d_fast.backends.interface import Backend
from s3d_fast.maths.incoming import incoming_edges
from s3d_fast.maths.reference import ConvGeometry, EdgeTies, PoolTies
from tests.backends.agreement import (
    EXAMPLES,
    Definitions,
    PublicOperations,
    assert_agrees,
    assert_unchanged,
    changed_by,
    conv_of,
    depthwise_of,
    edges_of,
    gated_of,
    layers_of,
    norms_of,
    rows_of,
    tied_of,
)
from tests.cases import (
    CONVS,
    DEPTHWISE,
    DTYPES,
    LAYOUTS,
    PAIRWISE_EDGES,
    PAIRWISE_ROWS,
    SAME,
    ConvCase,
    DepthwiseCase,
    EdgeCase,
    RowsCase,
    compute_dtype,
    embedded,
    laid_out,
    random_tensor,
    relative_error,
)

# The interpreter of Triton computes with masked entries too, which may overflow or be no numbers.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# Where the matrices are small enough to be formed.
SMALL_ROWS = [case for case in PAIRWISE_ROWS if case.M * case.D**2 <= 500_000]
# Layers that share a call, less those that take long alone.
LAYERS = [case for case in PAIRWISE_ROWS if case.N * case.D * case.M * max(1, case.K) <= 3_000_000]
CALLS = 5

plain_and_bias = pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])


def operation_of(example: str) -> str:
    return example.partition(":")[0]


def test_every_operation_of_the_interface_has_an_example_and_a_definition() -> None:
    abstract = {name for name in Backend.__abstractmethods__ if not name.startswith("why_not")}
    assert abstract == set(map(operation_of, EXAMPLES))
    assert abstract == {name for name, _ in inspect.getmembers(Definitions, inspect.isfunction)}


# A matrix of equal columns is not symmetric; which of equal values comes first is not said.
EXAMPLES_AND_LAYOUTS = set(product(EXAMPLES, LAYOUTS)) - {("symmetric_extremes", "broadcast-last")}


@pytest.mark.parametrize(("example", "layout"), sorted(EXAMPLES_AND_LAYOUTS))
def test_every_operation_agrees_in_every_layout(backend: Backend, example: str, layout: str) -> None:
    name = operation_of(example)
    buffers: list[Tensor] = []

    def lay_out(tensor: Tensor) -> Tensor:
        if layout not in ("stepped", "offset"):
            return laid_out(tensor, layout)
        view, buffer = embedded(tensor, layout)
        buffers.append(buffer)
        return view

    given = EXAMPLES[example]()
    changed = changed_by(name, given)
    arguments = {
        argument: value if argument in changed else tree_map_only(Tensor, lay_out, value)
        for argument, value in given.items()
    }
    if example == "edgeconv_matvec:incoming":
        arguments["incoming"] = incoming_edges(arguments["winner"])
    before = [buffer.clone() for buffer in buffers]
    assert_agrees(backend, name, **arguments)
    # What surrounds the arguments is NaN: had it been used, the result would be so too.
    assert_unchanged(buffers, before, "what surrounds an argument")


@pytest.mark.parametrize("example", [name for name in EXAMPLES if hasattr(operations, operation_of(name))])
@pytest.mark.parametrize("name", ["auto", "reference", "cpu", "triton"])
def test_public_operations_hand_on_all_their_arguments(name: str, example: str) -> None:
    assert_agrees(PublicOperations(name), operation_of(example), **EXAMPLES[example]())


@pytest.mark.parametrize("case", PAIRWISE_ROWS, ids=str)
def test_matvec(backend: Backend, case: RowsCase) -> None:
    assert_agrees(backend, "splitting_matvec", **rows_of(case))


@pytest.mark.parametrize("case", PAIRWISE_ROWS[::2], ids=str)
def test_gated_matvec(backend: Backend, case: RowsCase) -> None:
    assert_agrees(backend, "gated_matvec", **gated_of(case, full=case.K != 1))


@pytest.mark.parametrize("case", DEPTHWISE, ids=str)
def test_depthwise(backend: Backend, case: DepthwiseCase) -> None:
    assert_agrees(backend, "depthwise_matvec", **depthwise_of(case))
    assert_agrees(backend, "depthwise_row_norms", **norms_of(case))


def test_depthwise_layers_of_unequal_sizes_and_dtypes(backend: Backend) -> None:
    assert_agrees(backend, "depthwise_matvec_grouped", **layers_of([depthwise_of(case) for case in DEPTHWISE]))
    empty = dict.fromkeys(("X", "C", "d", "weight", "stages", "V", "bias"), ())
    assert backend.depthwise_matvec_grouped(**empty) == []


@plain_and_bias
@pytest.mark.parametrize("zero", ["B", "D", "M", "K"])
def test_depthwise_layers_with_a_size_of_zero(backend: Backend, zero: str, bias: bool) -> None:
    sizes = {name: 0 if name == zero else size for name, size in {"B": 2, "D": 3, "M": 4}.items()}
    case = DepthwiseCase(H=4, W=5, stages=(((3, 3), SAME),), bias=bias, **sizes)
    vectors = {"V": random_tensor(0 if zero == "K" else 2, case.M, case.width)}
    assert_agrees(backend, "depthwise_matvec", **{**depthwise_of(case), **vectors})
    assert_agrees(backend, "depthwise_row_norms", **norms_of(case))


@pytest.mark.parametrize("first", range(CALLS))
def test_matvec_of_layers_of_unequal_sizes_and_dtypes(backend: Backend, first: int) -> None:
    cases = LAYERS[first::CALLS]
    assert len({case.dtype for case in cases}) > 1
    assert_agrees(backend, "splitting_matvec_grouped", **layers_of([rows_of(case) for case in cases]))


def test_matvec_of_no_layers_and_of_one(backend: Backend) -> None:
    assert backend.splitting_matvec_grouped(X=[], C=[], V=[], bias=[]) == []
    assert_agrees(backend, "splitting_matvec_grouped", **layers_of([rows_of(RowsCase(70, 17, 6, bias=True))]))


@pytest.mark.parametrize("case", SMALL_ROWS, ids=str)
def test_dense_matrices(backend: Backend, case: RowsCase) -> None:
    X, C = case.tensors()
    S = assert_agrees(backend, "splitting_matrices", X=X, C=C, bias=case.bias)
    if backend.uses_symmetry:
        assert torch.equal(S, S.mT)


@pytest.mark.parametrize("case", SMALL_ROWS[::3], ids=str)
def test_dense_matrices_are_added_to_what_is_there(backend: Backend, case: RowsCase) -> None:
    whole = torch.full((case.M + 4, case.width, case.width), torch.nan, dtype=compute_dtype(case.dtype))
    S = whole[2:-2]
    # Not a symmetric matrix, which would hide an exchange of the two triangles.
    S.copy_(random_tensor(*S.shape, seed=4))
    X, C = case.tensors()
    assert_agrees(backend, "add_splitting_matrices", S=S, X=X, C=C, bias=case.bias, weight=-0.3)
    assert whole[:2].isnan().all()
    assert whole[-2:].isnan().all()


@pytest.mark.parametrize("case", CONVS, ids=str)
@pytest.mark.parametrize("K", [0, 2], ids=["one", "K2"])
def test_convolution(backend: Backend, case: ConvCase, K: int) -> None:
    assert_agrees(backend, "conv_matvec", **conv_of(replace(case, K=K)))


@pytest.mark.parametrize("case", PAIRWISE_EDGES, ids=str)
def test_edgeconv(backend: Backend, case: EdgeCase) -> None:
    assert_agrees(backend, "edgeconv_matvec", **edges_of(case, incoming=case.B == 2))


@pytest.mark.parametrize("case", PAIRWISE_EDGES[::2], ids=str)
def test_edgeconv_with_ties(backend: Backend, case: EdgeCase) -> None:
    for ties in ("plain", "sloped"):
        assert_agrees(backend, "edgeconv_matvec", label=ties, **edges_of(case, case.B == 2, ties))


@pytest.mark.parametrize("case", PAIRWISE_EDGES[1::2], ids=str)
def test_edgeconv_with_indices_of_32_bits(backend: Backend, case: EdgeCase) -> None:
    for ties in ("none", "plain", "sloped"):
        given = edges_of(case, ties=ties)
        wide = backend.edgeconv_matvec(**given)
        given["winner"] = given["winner"].int()
        if given["ties"] is not None:
            # Indices of two types may meet.
            mixed = backend.edgeconv_matvec(**given)
            assert torch.equal(mixed, wide)
            given["ties"] = given["ties"]._replace(runner=given["ties"].runner.int())
        SV = assert_agrees(backend, "edgeconv_matvec", label=ties, **given)
        assert torch.equal(SV, wide)


def test_edgeconv_with_slopes_of_one_is_edgeconv_without_slopes(backend: Backend) -> None:
    given = edges_of(EdgeCase(2, 37, 5, 4, 6, bias=True, K=2), ties="plain")
    one = torch.ones_like(given["C"])
    plain = backend.edgeconv_matvec(**given)
    sloped = backend.edgeconv_matvec(**{**given, "ties": given["ties"]._replace(d1=one, d2=one)})
    assert relative_error(sloped, plain) < 1e-13


@pytest.mark.parametrize("case", CONVS, ids=str)
@pytest.mark.parametrize("sloped", [False, True], ids=["plain", "sloped"])
def test_convolution_under_maxima(backend: Backend, case: ConvCase, sloped: bool) -> None:
    for K, ties in ((0, 9), (2, 1), (1, 0)):
        given = tied_of(replace(case, K=K), sloped, ties)
        assert_agrees(backend, "tied_matvec", label=(K, ties), **given)
        given["X"] = given["X"].contiguous(memory_format=torch.channels_last)
        assert_agrees(backend, "tied_matvec", label=(K, ties, "channels last"), **given)


@pytest.mark.parametrize("sloped", [False, True], ids=["plain", "sloped"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"])
def test_maxima_over_small_windows_of_rows(backend: Backend, dtype: torch.dtype, sloped: bool) -> None:
    for B, D, (height, width), M, bias, K, ties in (
        (30, 5, (2, 2), 3, True, 0, 1),
        (7, 36, (2, 2), 40, False, 2, 1),
        (61, 27, (3, 3), 17, True, 0, 4),
        (2, 600, (9, 9), 33, True, 1, 25),
        (1, 3, (1, 1), 1, False, 0, 1),
        (3, 8, (12, 12), 9, True, 0, 6),
    ):
        given = tied_of(ConvCase(B, D, height, width, M, k=(1, 1), bias=bias, K=K, dtype=dtype), sloped, ties)
        for name in ("X", "C"):
            given[name] = given[name].contiguous(memory_format=torch.channels_last)
        assert_agrees(backend, "tied_matvec", label=(B, D, M), **given)


def test_edgeconv_where_one_point_wins_everywhere(backend: Backend) -> None:
    # At last the filters disagree, and so do the clouds.
    different = (torch.arange(6) * 7 + torch.arange(2)[:, None, None]).expand(2, 37, 6) % 37
    winners = [*(torch.full((2, 37, 6), point) for point in (0, 17, 36)), different.contiguous()]
    for winner, dtype in zip(winners, DTYPES, strict=True):
        case = EdgeCase(2, 37, 5, 4, 6, dtype, bias=True, K=2)
        assert_agrees(backend, "edgeconv_matvec", label=dtype, **{**edges_of(case), "winner": winner})


def test_edgeconv_where_every_point_wins_itself(backend: Backend) -> None:
    for (B, P), dtype in zip([(1, 1), (5, 1), (3, 40), (2, 9)], DTYPES, strict=True):
        case = EdgeCase(B, P, 5, 1, 6, dtype)
        winner = torch.arange(P)[:, None].expand(B, P, 6)
        SV = assert_agrees(backend, "edgeconv_matvec", label=dtype, **{**edges_of(case), "winner": winner})
        # Such an edge is [0, x].
        assert SV[:, :5].abs().max() < 1e-5 * SV.abs().max()


@pytest.mark.parametrize("sign", ["negative", "zero-rows", "zero-columns", "zero"])
def test_coefficients_of_any_sign(backend: Backend, sign: str) -> None:
    for dtype in DTYPES[::2] if sign == "negative" else DTYPES[1::2]:
        X, C = RowsCase(131, 19, 21, dtype).tensors()
        C = {
            "negative": -C.abs() - 0.1,
            "zero-rows": C.index_fill(0, torch.arange(40, 110), 0),
            "zero-columns": C.index_fill(1, torch.tensor(3), 0),
            "zero": torch.zeros_like(C),
        }[sign]
        V = RowsCase(0, 19, 21, dtype).vectors()
        SV = assert_agrees(backend, "splitting_matvec", X=X, C=C, V=V, bias=False)
        S = assert_agrees(backend, "splitting_matrices", X=X, C=C, bias=False)
        edges = edges_of(EdgeCase(1, 131, 19, 4, 21, dtype))
        edge_SV = assert_agrees(backend, "edgeconv_matvec", **{**edges, "C": C[None]})
        no_curvature = (C == 0).all(0)
        assert not any(result[no_curvature].any() for result in (SV, S, edge_SV))


@plain_and_bias
@pytest.mark.parametrize("zero", ["N", "D", "M", "K"])
def test_rows_with_a_size_of_zero(backend: Backend, zero: str, bias: bool) -> None:
    N, D, M, K = (0 if name == zero else size for name, size in {"N": 5, "D": 3, "M": 4, "K": 2}.items())
    rows = {"X": random_tensor(N, D), "C": random_tensor(N, M), "bias": bias}
    layer = {**rows, "V": random_tensor(K, M, D + bias)}
    assert_agrees(backend, "splitting_matvec", **layer)
    other = rows_of(RowsCase(20, 5, 3, bias=bias))
    assert_agrees(backend, "splitting_matvec_grouped", **layers_of([layer, other]))
    C, V = rows["C"], random_tensor(K, M, 2 * (D + bias))
    assert_agrees(backend, "gated_matvec", X=rows["X"], c11=C, c12=C, c22=C, V=V, bias=bias)
    assert_agrees(backend, "splitting_matrices", **rows)
    assert_agrees(backend, "add_splitting_matrices", S=random_tensor(M, D + bias, D + bias), weight=2.0, **rows)


@plain_and_bias
@pytest.mark.parametrize("zero", ["B", "P", "F", "M", "K"])
def test_clouds_with_a_size_of_zero(backend: Backend, zero: str, bias: bool) -> None:
    sizes = {"B": 2, "P": 5, "F": 3, "M": 4, "K": 2}
    B, P, F, M, K = (0 if name == zero else size for name, size in sizes.items())
    X, C, V = random_tensor(B, P, F), random_tensor(B, P, M), random_tensor(K, M, 2 * F + bias)
    winner = torch.zeros(B, P, M, dtype=torch.int64)
    layer = {"X": X, "winner": winner, "C": C, "V": V, "bias": bias, "incoming": None}
    for ties in (None, EdgeTies(winner, C), EdgeTies(winner, C, C, C)):
        assert_agrees(backend, "edgeconv_matvec", **layer, ties=ties)


@plain_and_bias
@pytest.mark.parametrize(("B", "M"), [(0, 3), (2, 0)], ids=["no-images", "no-filters"])
def test_convolutions_with_a_size_of_zero(backend: Backend, B: int, M: int, bias: bool) -> None:
    X, C, V = random_tensor(B, 2, 5, 5), random_tensor(B, M, 3, 3), random_tensor(2, M, 18 + bias)
    layer = {"X": X, "C": C, "V": V, "geometry": ConvGeometry((3, 3)), "bias": bias}
    assert_agrees(backend, "conv_matvec", **layer)
    place = torch.zeros(B, M, 2, dtype=torch.int64)
    assert_agrees(backend, "tied_matvec", **layer, ties=PoolTies(place, place + 1, random_tensor(B, M, 2)))


layouts, flags, stored_dtypes, vectors = (
    st.sampled_from(LAYOUTS),
    st.booleans(),
    st.sampled_from(DTYPES),
    st.integers(0, 3),
)
small = settings(deadline=None, max_examples=40, derandomize=True)


@given(st.integers(0, 210), st.integers(1, 40), st.integers(1, 40), stored_dtypes, flags, vectors, *[layouts] * 3)
@small
def test_rows_of_any_shape_and_layout(
    backend: Backend, N: int, D: int, M: int, dtype: torch.dtype, bias: bool, K: int, x: str, c: str, v: str
) -> None:
    layer = rows_of(RowsCase(N, D, M, dtype, bias, K))
    layer.update({name: laid_out(layer[name], layout) for name, layout in (("X", x), ("C", c), ("V", v))})
    SV = assert_agrees(backend, "splitting_matvec", **layer)
    (grouped,) = assert_agrees(backend, "splitting_matvec_grouped", **layers_of([layer]))
    assert relative_error(grouped, SV) < 1e-5
    assert_agrees(backend, "splitting_matrices", X=layer["X"], C=layer["C"], bias=bias)


@given(
    *(st.integers(1, 3), st.integers(1, 120), st.integers(1, 20), st.integers(1, 40)),
    *(stored_dtypes, flags, vectors, st.lists(layouts, min_size=4, max_size=4)),
)
@small
def test_clouds_of_any_shape_and_layout(
    backend: Backend, B: int, P: int, F: int, M: int, dtype: torch.dtype, bias: bool, K: int, chosen: list[str]
) -> None:
    layer = edges_of(EdgeCase(B, P, F, min(P, 5), M, dtype, bias, K))
    names = ("X", "winner", "C", "V")
    layer.update({name: laid_out(layer[name], layout) for name, layout in zip(names, chosen, strict=True)})
    assert_agrees(backend, "edgeconv_matvec", **layer)
