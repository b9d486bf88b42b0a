"""The compiled kernels and memory: layouts, what is read, what is written, and the same bits every time."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from s3d_fast import activation
from s3d_fast.backends import operations
from s3d_fast.maths import reference
from tests.cases import TOLERANCE, EdgeCase, RowsCase, random_vectors, relative_error
from tests.extension_cases import (
    COMPUTE_DTYPES,
    DTYPES,
    IN_PLACE,
    LAYOUTS,
    VectorsCase,
    doubles,
    embedded,
    good_calls,
    grow,
    krylov_state,
    laid_out,
    random_tensor,
    tensors_of,
)

pytest.importorskip("s3d_fast._C")
kernels = torch.ops.s3d_fast
pytestmark = pytest.mark.usefixtures("isa")

shapes, layouts, flags = st.integers(1, 40), st.sampled_from(LAYOUTS), st.booleans()
stored_dtypes, filters = st.sampled_from(DTYPES), st.integers(1, 40)


@given(st.integers(0, 210), shapes, filters, st.integers(0, 3), flags, stored_dtypes, layouts, layouts, layouts)
@settings(deadline=None, max_examples=60, derandomize=True)
def test_rows_of_any_shape_and_layout_agree_with_the_reference(
    N: int, D: int, M: int, K: int, bias: bool, dtype: torch.dtype, x_layout: str, c_layout: str, v_layout: str
) -> None:
    case = VectorsCase(N, D, M, dtype, bias, K)
    X, C = case.tensors()
    X, C, V = laid_out(X, x_layout), laid_out(C, c_layout), laid_out(case.vectors(), v_layout)
    expected = reference.splitting_matvec(*doubles(X, C, V), bias)
    assert relative_error(kernels.splitting_matvec(X, C, V, bias), expected) < TOLERANCE[dtype]
    expected = reference.splitting_matrices(*doubles(X, C), bias)
    assert relative_error(kernels.splitting_matrices(X, C, bias), expected) < TOLERANCE[dtype]


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 120), st.integers(1, 20), filters),
    *(st.integers(0, 3), flags, stored_dtypes, st.lists(layouts, min_size=4, max_size=4)),
)
@settings(deadline=None, max_examples=60, derandomize=True)
def test_clouds_of_any_shape_and_layout_agree_with_the_reference(
    sizes: tuple[int, int, int, int], K: int, bias: bool, dtype: torch.dtype, chosen: list[str]
) -> None:
    B, P, width, M = sizes
    X, neighbours, slot, C = EdgeCase(B, P, width, min(P, 5), M, dtype, bias).tensors()
    V = random_vectors(*[K] * (K > 0), M, 2 * width + bias, dtype=dtype)
    tensors = (X, neighbours.gather(2, slot), C, V)
    X, winner, C, V = (laid_out(tensor, layout) for tensor, layout in zip(tensors, chosen, strict=True))
    expected = reference.edgeconv_matvec(X.double(), winner, *doubles(C, V), bias)
    assert relative_error(kernels.edgeconv_matvec(X, winner, C, V, bias), expected) < TOLERANCE[dtype]


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    *(st.integers(1, 30), st.integers(0, 30), st.lists(flags, min_size=5, max_size=5), st.sampled_from(COMPUTE_DTYPES)),
    *(st.lists(layouts, min_size=7, max_size=7), st.randoms(use_true_random=False)),
)
@settings(deadline=None, max_examples=60, derandomize=True)
def test_weights_of_any_shape_and_layout_agree_with_the_reference(
    shape: list[int],
    rows: int,
    columns: int,
    given_options: list[bool],
    dtype: torch.dtype,
    chosen: list[str],
    rng: random.Random,
) -> None:
    has_row_scale, has_shift, has_shift_rows, has_columns, has_column_scale = given_options
    many = len(shape) > 1
    width = columns if has_columns else shape[1] if many else 0

    def index(count: int, low: int, high: int) -> Tensor:
        return torch.tensor([rng.randrange(low, high) for _ in range(count)], dtype=torch.int64)

    arguments = (
        random_tensor(*shape, dtype=dtype),
        index(rows, 0, shape[0]),
        random_tensor(rows, dtype=dtype, seed=1) if has_row_scale else None,
        random_tensor(3 if has_shift_rows else rows, *shape[1:], dtype=dtype, seed=2) if has_shift else None,
        index(rows, -1, 3) if has_shift and has_shift_rows else None,
        index(columns, 0, shape[1]) if has_columns and many else None,
        random_tensor(width, dtype=dtype, seed=3) if has_column_scale and many else None,
    )
    laid = [None if value is None else laid_out(value, layout) for value, layout in zip(arguments, chosen, strict=True)]
    wide = [value.double() if value is not None and value.is_floating_point() else value for value in laid]
    error = relative_error(grow(*laid), reference.grow_weight(*wide))
    assert error < (1e-15 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("sign", ["mixed", "negative", "zero-rows", "zero-columns", "zero"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp64", "fp32", "bf16", "fp16"])
def test_coefficients_of_any_sign_give_what_the_reference_gives(sign: str, dtype: torch.dtype) -> None:
    X, C = RowsCase(131, 19, 21, dtype).tensors()
    if sign == "negative":
        C = -C.abs() - 0.1
    elif sign != "mixed":
        C = C.clone()
        C[slice(40, 110) if sign != "zero-columns" else slice(None), 3 if sign == "zero-columns" else slice(None)] = 0
    if sign == "zero":
        C = torch.zeros_like(C)
    V = random_vectors(21, 19, dtype=dtype)
    SV, S = kernels.splitting_matvec(X, C, V, False), kernels.splitting_matrices(X, C, False)
    assert relative_error(SV, reference.splitting_matvec(*doubles(X, C, V))) < TOLERANCE[dtype]
    assert relative_error(S, reference.splitting_matrices(*doubles(X, C))) < TOLERANCE[dtype]
    zero = (C == 0).all(0)
    assert not SV[zero].any()
    assert not S[zero].any()


def test_in_place_operators_write_nothing_outside_their_output() -> None:
    X, C = RowsCase(97, 9, 5).tensors()
    whole = torch.full((9, 9, 9), torch.nan, dtype=torch.float64)
    whole[2:7] = 0
    kernels.add_splitting_matrices(whole[2:7], X, C, False, 1.0)
    assert relative_error(whole[2:7], reference.splitting_matrices(X, C)) < 1e-12
    assert whole[:2].isnan().all()
    assert whole[7:].isnan().all()

    for size in range(1, 40):
        g, z = random_tensor(size), random_tensor(size, seed=1)
        whole = torch.full((size + 16,), torch.nan, dtype=torch.float64)
        whole[8:-8] = g
        operations.curvature_coefficients(whole[8:-8], z, activation("silu"), axis=0, inplace=True, backend="cpu")
        assert relative_error(whole[8:-8], g * activation("silu").second(z)) < 1e-12
        assert whole[:8].isnan().all()
        assert whole[-8:].isnan().all()


@pytest.mark.parametrize("D", [1, 3, 8, 13, 33])
def test_a_lanczos_step_writes_nothing_but_the_next_vector_and_its_numbers(D: int) -> None:
    M, capacity, step = 3, 6, 0
    state = krylov_state(M, capacity, D, torch.float64)
    held = [torch.cat([tensor, tensor, tensor]) for tensor in state]
    before = [tensor.clone() for tensor in held]
    kernels.krylov_extend(held[0][M : 2 * M], random_tensor(M, D, seed=3), *(t[M : 2 * M] for t in held[1:]), step)
    for tensor, old in zip(held, before, strict=True):
        for part in (slice(0, M), slice(2 * M, None)):
            torch.testing.assert_close(tensor[part], old[part], rtol=0, atol=0, equal_nan=True)
    basis, alpha, beta, _, _ = (tensor[M : 2 * M] for tensor in held)
    assert torch.equal(basis[:, 0], state[0][:, 0])
    assert basis[:, 1].isfinite().all()
    assert basis[:, 2:].isnan().all()
    assert all(numbers[:, 0].isfinite().all() and numbers[:, 1:].isnan().all() for numbers in (alpha, beta))


@pytest.mark.parametrize("name", good_calls())
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "stepped", "offset"])
def test_inputs_and_what_surrounds_them_are_never_changed(name: str, layout: str) -> None:
    arguments = list(good_calls()[name])
    watched: list[Tensor] = []
    for position, argument in enumerate(arguments):
        if position in IN_PLACE.get(name, ()):
            continue
        if isinstance(argument, Tensor):
            arguments[position], buffer = (
                embedded(argument, layout)
                if layout in ("stepped", "offset")
                else (
                    laid_out(argument, layout),
                    argument,
                )
            )
            watched += [arguments[position], buffer]
        elif isinstance(argument, list):
            watched += tensors_of((argument,))
    before = [tensor.clone() for tensor in watched]
    getattr(kernels, name)(*arguments)
    for tensor, old in zip(watched, before, strict=True):
        torch.testing.assert_close(tensor, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", good_calls())
def test_what_surrounds_the_inputs_is_never_used(name: str) -> None:
    def run(layout: str) -> list[Tensor]:
        arguments = list(good_calls()[name])
        for position, argument in enumerate(arguments):
            if position in IN_PLACE.get(name, ()):
                continue
            if isinstance(argument, list):
                arguments[position] = [laid_out(x, layout) if isinstance(x, Tensor) else x for x in argument]
            elif isinstance(argument, Tensor):
                arguments[position] = laid_out(argument, layout)
        result = getattr(kernels, name)(*arguments)
        changed = [arguments[position] for position in IN_PLACE.get(name, ())]
        return [*changed, *tensors_of(result if isinstance(result, tuple) else (result,))]

    expected = run("contiguous")
    for layout in ("offset", "stepped"):
        for actual, wanted in zip(run(layout), expected, strict=True):
            assert relative_error(actual, wanted) < 1e-13


def larger_calls() -> dict[str, tuple]:
    """Return arguments that are enough work for several threads, by operator."""
    rows = RowsCase(2100, 65, 33, torch.float32, bias=True)
    X, C = rows.tensors()
    V = random_vectors(2, 33, 66, dtype=torch.float32)
    points, neighbours, slot, points_C = EdgeCase(4, 130, 17, 5, 40, torch.float32).tensors()
    S = kernels.splitting_matrices(X, C, True)
    g, z = random_tensor(400, 33, 9, dtype=torch.float32), random_tensor(400, 33, 9, dtype=torch.float32, seed=1)
    index = torch.arange(900) % 300
    return {
        "splitting_matvec": (X, C, V, True),
        "splitting_matvec_grouped": ([X, X[:300]], [C, C[:300]], [V, V[0]], [True, True]),
        "edgeconv_matvec": (points, neighbours.gather(2, slot), points_C, random_vectors(40, 34, dtype=X.dtype), False),
        "splitting_matrices": (X, C, True),
        "curvature_coefficients": (g, z, C[0], 1, 1, 0.0, 0.0, [], [], 3.0),
        "grow_weights": (
            [random_tensor(300, 70), random_tensor(300)],
            [index, index],
            [random_tensor(900), None],
            [None, None],
            [None, None],
            [torch.arange(70) % 9, None],
            [None, None],
            [1.0, 1.0],
        ),
        "symmetric_extremes": (S,),
        "tridiagonal_extremes": (random_tensor(50, 30), random_tensor(50, 30, seed=1), torch.full((50,), 30)),
    }


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", larger_calls())
def test_the_same_call_gives_the_same_bits(name: str, threads: int) -> None:
    arguments = larger_calls()[name]
    torch.set_num_threads(threads)
    try:
        results = [getattr(kernels, name)(*arguments) for _ in range(5)]
    finally:
        torch.set_num_threads(1)
    one_thread = getattr(kernels, name)(*arguments)
    first, *others = [tensors_of(tuple(r) if isinstance(r, tuple | list) else (r,)) for r in (*results, one_thread)]
    assert all(torch.equal(a, b) for other in others[:-1] for a, b in zip(first, other, strict=True))
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(first, others[-1], strict=True))
