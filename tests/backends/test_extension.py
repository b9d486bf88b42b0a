"""The compiled kernels against the reference, for every instruction set that this processor has."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from s3d_fast import Activation, activation, activation_names
from s3d_fast.backends import operations
from s3d_fast.maths import reference
from tests.cases import TOLERANCE, EdgeCase, RowsCase, compute_dtype, random_vectors, relative_error
from tests.extension_cases import (
    COMPUTE_DTYPES,
    DTYPES,
    VectorsCase,
    doubles,
    grow,
    krylov_state,
    laid_out,
    random_tensor,
)

_C = pytest.importorskip("s3d_fast._C")
kernels = torch.ops.s3d_fast
pytestmark = pytest.mark.usefixtures("isa")


def rows_cases() -> list[VectorsCase]:
    """Return every D with every M in every dtype, and N, K and bias as they fall."""
    choice = random.Random(0).choice
    return [
        VectorsCase(choice([0, 1, 95, 96, 97, 500]), D, M, dtype, choice([False, True]), choice([0, 1, 2, 3]))
        for D, M, dtype in product([1, 3, 16, 33, 64, 200, 300, 520], [1, 7, 16, 17, 32, 65], DTYPES)
    ]


def edge_cases() -> list[EdgeCase]:
    choice = random.Random(1).choice
    return [
        EdgeCase(choice([1, 2, 3]), P, features, min(P, 4), choice([1, 7, 16, 17, 65]), dtype, choice([False, True]))
        for P, features, dtype in product([1, 7, 95, 96, 97], [1, 3, 16, 33, 100], DTYPES)
    ]


ROWS = rows_cases()
SMALL_ROWS = [case for case in ROWS if case.M * case.D**2 <= 1_000_000]


def test_the_instruction_set_in_use_is_the_one_asked_for(isa: str) -> None:
    assert _C.isa() == isa
    assert set(_C.available_isas()) <= set(_C.compiled_isas())
    for name in {"none", "", *_C.compiled_isas()} - set(_C.available_isas()):
        with pytest.raises(ValueError, match=f"isa must be one that this processor has: .*got {name}"):
            _C.use_isa(name)
    assert _C.isa() == isa


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_matvec_agrees_with_the_reference(case: VectorsCase) -> None:
    X, C, V = *case.tensors(), case.vectors()
    SV = kernels.splitting_matvec(X, C, V, case.bias)
    assert (SV.shape, SV.dtype) == (V.shape, V.dtype)
    assert relative_error(SV, reference.splitting_matvec(*doubles(X, C, V), case.bias)) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("first", range(0, len(ROWS), 8))
def test_a_grouped_matvec_of_unequal_layers_agrees_with_separate_ones(first: int) -> None:
    cases = ROWS[first : first + 8]
    X, C = zip(*(case.tensors() for case in cases), strict=True)
    V, bias = [case.vectors() for case in cases], [case.bias for case in cases]
    assert len({case.dtype for case in cases}) > 1
    grouped = kernels.splitting_matvec_grouped(X, C, V, bias)
    assert len(grouped) == len(cases)
    for case, SV, *layer in zip(cases, grouped, X, C, V, bias, strict=True):
        alone = kernels.splitting_matvec(*layer)
        assert SV.dtype == alone.dtype
        assert relative_error(SV, alone) < TOLERANCE[case.dtype] / 10
        expected = reference.splitting_matvec(*doubles(*layer[:3]), layer[3])
        assert relative_error(SV, expected) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("K", [0, 2])
@pytest.mark.parametrize("case", edge_cases(), ids=str)
def test_edgeconv_matvec_agrees_with_the_reference(case: EdgeCase, K: int) -> None:
    X, neighbours, slot, C = case.tensors()
    winner = neighbours.gather(2, slot)
    V = random_vectors(*[K] * (K > 0), case.M, 2 * case.F + case.bias, dtype=case.dtype)
    SV = kernels.edgeconv_matvec(X, winner, C, V, case.bias)
    expected = reference.edgeconv_matvec(X.double(), winner, *doubles(C, V), case.bias)
    assert SV.dtype == V.dtype
    assert relative_error(SV, expected) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("sizes", [(0, 5, 3, 4), (2, 0, 3, 4), (2, 5, 0, 4), (2, 5, 3, 0)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_sizes_of_zero_are_allowed(sizes: tuple[int, int, int, int], bias: bool) -> None:
    B, P, width, M = sizes
    X, C, winner = random_tensor(B, P, width), random_tensor(B, P, M), torch.zeros(B, P, M, dtype=torch.int64)
    V = random_tensor(2, M, 2 * width + bias)
    expected = reference.edgeconv_matvec(X, winner, C, V, bias)
    assert relative_error(kernels.edgeconv_matvec(X, winner, C, V, bias), expected) < 1e-12
    rows, V = (X.flatten(0, 1), C.flatten(0, 1)), random_tensor(2, M, width + bias)
    expected = reference.splitting_matvec(*rows, V, bias)
    assert relative_error(kernels.splitting_matvec(*rows, V, bias), expected) < 1e-12
    expected = reference.splitting_matrices(*rows, bias)
    assert relative_error(kernels.splitting_matrices(*rows, bias), expected) < 1e-12


@pytest.mark.parametrize("case", SMALL_ROWS, ids=str)
def test_dense_matrices_agree_with_the_reference_and_are_symmetric(case: VectorsCase) -> None:
    X, C = case.tensors()
    S = kernels.splitting_matrices(X, C, case.bias)
    assert S.dtype == compute_dtype(case.dtype)
    assert relative_error(S, reference.splitting_matrices(*doubles(X, C), case.bias)) < TOLERANCE[case.dtype]
    assert torch.equal(S, S.mT)


@pytest.mark.parametrize("weight", [1.0, -0.3])
@pytest.mark.parametrize("case", SMALL_ROWS[::3], ids=str)
def test_dense_matrices_are_added_to_what_is_there(case: VectorsCase, weight: float) -> None:
    X, C = case.tensors()
    before = random_tensor(case.M, case.D + case.bias, case.D + case.bias, dtype=compute_dtype(case.dtype), seed=4)
    before = before + before.mT
    S = before.clone()
    assert kernels.add_splitting_matrices(S, X, C, case.bias, weight) is None
    expected = before.double() + weight * reference.splitting_matrices(*doubles(X, C), case.bias)
    assert relative_error(S, expected) < TOLERANCE[case.dtype]


def test_dense_matrices_are_added_to_any_matrix_and_not_just_to_symmetric_ones() -> None:
    X, C = RowsCase(9, 4, 3).tensors()
    before = random_tensor(3, 4, 4, seed=4)
    S = operations.add_splitting_matrices(before.clone(), X, C, backend="cpu")
    expected = operations.add_splitting_matrices(before.clone(), X, C, backend="reference")
    assert relative_error(S, expected) < 1e-12


def activations() -> list[Activation]:
    options: list[tuple[str, dict[str, Any]]] = [
        ("leaky_relu", {"negative_slope": -0.2}),
        ("elu", {"alpha": 0.4}),
        ("softplus", {"beta": 2.5, "threshold": 3.0}),
        ("gelu", {"approximate": "tanh"}),
        ("relu6", {"sharpness": 11.0}),
    ]
    return [*map(activation, activation_names()), *(activation(name, **chosen) for name, chosen in options)]


every_activation = pytest.mark.parametrize(
    "act", activations(), ids=[*activation_names(), "leaky_relu-0.2", "elu0.4", "softplus2.5", "gelu_tanh", "relu6-11"]
)
every_dtype = pytest.mark.parametrize("dtype", COMPUTE_DTYPES, ids=["fp64", "fp32"])


@every_activation
@every_dtype
@pytest.mark.parametrize("inplace", [False, True], ids=["new", "inplace"])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((37,), 0), ((61, 17), 1), ((61, 17), 0), ((3, 5, 7, 6), 1), ((2, 9, 1, 5), 3), ((0, 3), 1), ((5, 1), 1)],
    ids=str,
)
def test_curvature_agrees_with_the_reference(
    act: Activation, dtype: torch.dtype, inplace: bool, shape: tuple[int, ...], axis: int
) -> None:
    g, z = random_tensor(*shape, dtype=dtype), 4 * random_tensor(*shape, dtype=dtype, seed=1)
    for scale in (None, random_tensor(shape[axis], dtype=dtype, seed=2)):
        expected = reference.curvature_coefficients(
            *doubles(g, z), act, None if scale is None else scale.double(), axis
        )
        given_g = g.clone()
        C = operations.curvature_coefficients(given_g, z, act, scale, axis=axis, inplace=inplace, backend="cpu")
        assert C.dtype == dtype
        assert (C is given_g) == inplace
        assert relative_error(C, expected) < TOLERANCE[dtype]


@every_activation
@every_dtype
def test_curvature_is_right_for_extreme_inputs(act: Activation, dtype: torch.dtype) -> None:
    sizes = [0.0, 1e-45, 1e-30, 1e-5, 1, 3, 6, 10, 19, 21, 40, 87, 89, 100, 500, 708, 711, 1e4, 1e30, 3e38, torch.inf]
    sizes += [1e-310, 1e150, 1e300] * (dtype == torch.float64)
    z = torch.tensor([sign * size for size in sizes for sign in (1, -1)], dtype=dtype)
    g = torch.linspace(0.5, 2, len(z), dtype=dtype)
    expected = reference.curvature_coefficients(*doubles(g, z), act, axis=0)
    finite = expected.isfinite()
    assert finite.sum() >= len(z) - 2
    C = operations.curvature_coefficients(g, z, act, axis=0, backend="cpu")
    assert relative_error(C[finite], expected[finite]) < TOLERANCE[dtype]


@every_activation
@every_dtype
def test_curvature_of_nan_is_nan_as_in_the_reference(act: Activation, dtype: torch.dtype) -> None:
    # As many NaN as fill several registers, and a remainder.
    z, g = torch.full((67,), torch.nan, dtype=dtype), torch.ones(67, dtype=dtype)
    expected = int(reference.curvature_coefficients(g, z, act, axis=0).isnan().sum())
    assert int(operations.curvature_coefficients(g, z, act, axis=0, backend="cpu").isnan().sum()) == expected
    assert operations.curvature_coefficients(z, g, act, axis=0, backend="cpu").isnan().all()


WEIGHT_SHAPES = ((5,), (5, 7), (5, 40), (4, 3, 5), (4, 6, 3, 3), (3, 2, 1, 17))
COLUMNS: dict[str, Callable[[int], list[int]]] = {
    "reversed": lambda size: list(range(size))[::-1],
    "repeated": lambda size: [i // 2 for i in range(2 * size)],
    "unsorted": lambda size: [(7 * i + 3) % size for i in range(size + 5)],
    "grown": lambda size: [*range(size), 0, size - 1],
    "one": lambda size: [size - 1],
    "none": lambda size: [],
}


@every_dtype
@pytest.mark.parametrize("shape", WEIGHT_SHAPES, ids=str)
@pytest.mark.parametrize("shifted", ["unshifted", "one-after-the-other", "by-rows"])
@pytest.mark.parametrize("scaled", ["", "rows", "columns", "rows-columns"])
def test_grown_weights_agree_with_the_reference(
    shape: tuple[int, ...], shifted: str, scaled: str, dtype: torch.dtype
) -> None:
    weight, rows = random_tensor(*shape, dtype=dtype), torch.tensor([*range(shape[0])[::-1], 0, 0, shape[0] - 1])
    M = len(rows)
    row_scale = random_tensor(M, dtype=dtype, seed=1) if "rows" in scaled else None
    shift = shift_rows = None
    if shifted == "one-after-the-other":
        shift = random_tensor(M, *shape[1:], dtype=dtype, seed=2)
    elif shifted == "by-rows":
        shift = random_tensor(2, *shape[1:], dtype=dtype, seed=2)
        shift_rows = torch.tensor([(-1, 1, 0)[i % 3] for i in range(M)])
    choices: list[Tensor | None] = [None]
    if len(shape) > 1:
        choices += [torch.tensor(choose(shape[1]), dtype=torch.int64) for choose in COLUMNS.values()]
    elif "columns" in scaled:
        with pytest.raises(ValueError, match="weight must have columns"):
            grow(weight, rows, row_scale, shift, shift_rows, None, random_tensor(5, dtype=dtype))
        return
    for columns in choices:
        column_scale = None
        if "columns" in scaled:
            column_scale = random_tensor(shape[1] if columns is None else len(columns), dtype=dtype, seed=3)
        arguments = (weight, rows, row_scale, shift, shift_rows, columns, column_scale)
        wide = [value.double() if value is not None and value.is_floating_point() else value for value in arguments]
        grown = grow(*arguments, shift_scale=0.3)
        assert grown.dtype == dtype
        assert relative_error(grown, reference.grow_weight(*wide, shift_scale=0.3)) < (
            1e-15 if dtype == torch.float64 else 1e-6
        )


@every_dtype
@pytest.mark.parametrize("sizes", [(1, 1), (3, 2), (7, 16), (17, 33), (5, 200)], ids=str)
def test_lanczos_steps_agree_with_the_reference(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    M, D = sizes
    steps = min(D, 20)
    # The first filter's space is exhausted after two steps, the second's S is zero.
    S = random_tensor(M, D, D, dtype=dtype)
    S = S + S.mT
    S[:1] = torch.eye(D, dtype=dtype)
    S[:1, 0, 0] = -3
    S[1:2] = 0
    expected = krylov_state(M, steps + 1, D, dtype)
    for step in range(steps):
        q = expected[0][:, step]
        product = (S @ q.unsqueeze(-1)).squeeze(-1)
        state = [tensor.clone() for tensor in expected]
        assert kernels.krylov_extend(state[0], product, *state[1:], step) is None
        reference.krylov_extend(expected[0], product, *expected[1:], step)
        for now, wanted in zip(state, expected, strict=True):
            assert torch.equal(now.isnan(), wanted.isnan())
            assert relative_error(now.nan_to_num(), wanted.nan_to_num()) < TOLERANCE[dtype]
    assert torch.equal(expected[3], torch.tensor([min(2, D), 1, *[steps] * M][:M]))


def assert_extreme_pairs(S: Tensor, values: Tensor, vectors: Tensor) -> None:
    """Check the extreme eigenpairs of S (M, D, D) against LAPACK and against their definition."""
    S = S.double()
    assert (values.dtype, vectors.dtype) == (torch.float64, torch.float64)
    expected = torch.linalg.eigvalsh(S)[:, [0, -1]]
    residual = vectors @ S - values.unsqueeze(-1) * vectors
    for j, radius in enumerate(expected.abs().amax(-1)):
        scale = radius if radius > 0 else 1
        assert (values[j] - expected[j]).abs().max() <= 1e-12 * scale
        assert (residual[j].abs() / scale).max() <= 1e-12
    assert relative_error(vectors.norm(dim=-1), torch.ones_like(values)) < TOLERANCE[torch.float64]


def symmetric(D: int) -> dict[str, Tensor]:
    """Return symmetric D x D matrices by name."""
    S, Q = random_tensor(D, D), torch.linalg.qr(random_tensor(D, D, seed=1))[0]
    S = S + S.mT
    u, signs = Q[:, :1], torch.ones(D, dtype=torch.float64)
    signs[: (D + 1) // 2] = -1
    graded = torch.logspace(-15, 3, D, dtype=torch.float64)
    return {
        "random": S,
        "positive": S @ S,
        "negative": -S @ S,
        "zero": torch.zeros_like(S),
        "identity": torch.eye(D, dtype=torch.float64),
        "minus-identity": -torch.eye(D, dtype=torch.float64),
        "rank-one": u @ u.mT,
        "minus-rank-one": -u @ u.mT,
        "two-values": (Q * signs) @ Q.mT,
        "nearly-repeated": torch.eye(D, dtype=torch.float64) + 1e-14 * S,
        "diagonal": torch.linspace(-1, 2, D, dtype=torch.float64).diag(),
        "one-entry": torch.zeros_like(S).index_put((torch.tensor(D - 1), torch.tensor(D - 1)), u.new_tensor(2.0)),
        "ones": torch.ones_like(S),
        "graded": (Q * graded) @ Q.mT,
        "tridiagonal": torch.diag_embed(S[0]) + sum(S[0, : D - 1].diag(k) for k in (1, -1)),
        "huge": 1e200 * S,
        "tiny": 1e-200 * S,
        "huge-rank-one": 1e200 * u @ u.mT,
        "tiny-identity": 1e-200 * torch.eye(D, dtype=torch.float64),
    }


@pytest.mark.parametrize("D", [1, 2, 3, 16, 17, 33, 64, 200])
def test_extreme_pairs_of_symmetric_matrices(D: int) -> None:
    matrices = symmetric(D)
    S = torch.stack([(matrix + matrix.mT) / 2 for matrix in matrices.values()])
    assert_extreme_pairs(S, *kernels.symmetric_extremes(S))
    single = torch.stack([S[index] for index, name in enumerate(matrices) if "huge" not in name]).float()
    assert_extreme_pairs(single, *kernels.symmetric_extremes(single))
    for layout in ("transposed", "stepped", "offset"):
        values, vectors = kernels.symmetric_extremes(laid_out(S, layout))
        assert_extreme_pairs(S, values, vectors)


def tridiagonals(k: int) -> tuple[Tensor, Tensor]:
    """Return diagonals and off-diagonals (M, k) of many kinds."""
    alpha, beta = random_tensor(k), random_tensor(k, seed=1)
    zero, one, cut = torch.zeros(k), torch.ones(k), beta.clone()
    cut[::2] = 0
    wilkinson = (torch.arange(k, dtype=torch.float64) - (k - 1) / 2).abs()
    kinds = [
        (alpha, beta),
        (alpha, cut),
        (alpha, zero),
        (zero, beta),
        (zero, zero),
        (one, zero),
        (-one, 1e-14 * beta),
        (zero, one),
        (wilkinson, one),
        (1e200 * alpha, 1e200 * beta),
        (1e-200 * alpha, 1e-200 * beta),
        (1e-200 * alpha, 1e200 * beta),
        (torch.logspace(-12, 3, k), torch.logspace(-12, 3, k)),
    ]
    diagonals, couplings = zip(*kinds, strict=True)
    return torch.stack(doubles(*diagonals)), torch.stack(doubles(*couplings))


@every_dtype
@pytest.mark.parametrize("k", [1, 2, 3, 4, 17, 60])
def test_extreme_pairs_of_tridiagonal_matrices(k: int, dtype: torch.dtype) -> None:
    alpha, beta = tridiagonals(k)
    kept = alpha.abs().amax(-1) + beta.abs().amax(-1) < 1e30 if dtype == torch.float32 else slice(None)
    alpha, beta = alpha[kept].to(dtype), beta[kept].to(dtype)
    for length in sorted({1, (k + 1) // 2, k}):
        # What lies beyond the end has no part in the matrix.
        a, b = alpha.clone(), beta.clone()
        a[:, length:], b[:, length - 1 :] = torch.nan, torch.nan
        lengths = torch.full((len(a),), length)
        T = torch.diag_embed(a[:, :length])
        for side in (1, -1):
            T = T + torch.diag_embed(b[:, : length - 1], side)
        for layout in ("contiguous", "transposed", "stepped", "offset"):
            values, vectors = kernels.tridiagonal_extremes(laid_out(a, layout), laid_out(b, layout), lengths)
            assert vectors.shape == (len(a), 2, k)
            assert_extreme_pairs(T, values, vectors[:, :, :length])
            assert vectors[:, :, length:].count_nonzero() == 0
