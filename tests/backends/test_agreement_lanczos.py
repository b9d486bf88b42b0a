"""Every backend agrees with the reference on the parts of Lanczos: its steps, and the ends of small spectra."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from s3d_fast.backends.interface import Backend
from s3d_fast.maths import reference
from s3d_fast.maths.reference import KrylovState
from tests.backends.agreement import assert_agrees, assert_unchanged, krylov_state
from tests.cases import COMPUTE_DTYPES, DTYPE_NAMES, TOLERANCE, doubles, laid_out, random_tensor, relative_error

# The interpreter of Triton computes with masked entries too, which may overflow or be no numbers.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

compute_dtypes = pytest.mark.parametrize("dtype", COMPUTE_DTYPES, ids=DTYPE_NAMES.get)

# Powers of two, so that what is scaled is what it was but for its exponent: about 1e-30, 1e30, 1e-150 and 1e150.
SCALES = {torch.float32: (1.0, 2.0**-100, 2.0**100), torch.float64: (1.0, 2.0**-100, 2.0**100, 2.0**-498, 2.0**498)}


def matrices(M: int, D: int, dtype: torch.dtype) -> Tensor:
    """Return symmetric matrices: the first exhausts its space in two steps, the second is zero."""
    S = random_tensor(M, D, D, dtype=dtype)
    S = S + S.mT
    S[:1] = torch.eye(D, dtype=dtype)
    S[:1, 0, 0] = -3
    S[1:2] = 0
    return S


def applied(S: Tensor, vectors: Tensor) -> Tensor:
    return (S @ vectors.unsqueeze(-1)).squeeze(-1)


def copied(state: KrylovState) -> KrylovState:
    return tree_map(Tensor.clone, state)


def filters_of(state: KrylovState, filters: slice | list[int]) -> KrylovState:
    return tree_map(lambda tensor: tensor[filters], state)


def extend(backend: Backend, state: KrylovState, product: Tensor, step: int) -> None:
    """Take a step, and check that q becomes the new basis vector and the product stays as it was."""
    given = product.clone()
    backend.krylov_extend(state, product, step)
    assert_unchanged([state.q, product], [state.basis[:, step + 1], given])


def assert_same_state(state: KrylovState, expected: KrylovState, label: object = "") -> None:
    """Check every tensor of a state: the same entries are NaN, the others agree."""
    for name, wanted in vars(expected).items():
        now = getattr(state, name)
        assert torch.equal(now.isnan(), wanted.isnan()), (label, name)
        # Filters are of different magnitude.
        for j, (own, own_wanted) in enumerate(zip(now.nan_to_num(), wanted.nan_to_num(), strict=True)):
            error = relative_error(own, own_wanted)
            assert error < TOLERANCE[expected.basis.dtype], f"{label}, {name} of filter {j}: error {error}"
    assert torch.equal(state.length, expected.length), label
    assert torch.equal(state.beta == 0, expected.beta == 0), label


@compute_dtypes
@pytest.mark.parametrize("sizes", [(1, 1), (3, 2), (4, 16), (3, 33), (3, 200)], ids="M{0[0]}-D{0[1]}".format)
def test_steps(backend: Backend, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    M, D = sizes
    # As many as are more than one tile of the basis, where that is few.
    steps = min(D, 6) if D < 100 else 18
    # Norms are scaled in the same way whatever the width.
    for scale in SCALES[dtype] if D == 2 else SCALES[dtype][:1]:
        S = scale * matrices(M, D, dtype)
        expected = krylov_state(M, steps + 1, D, dtype)
        for step in range(steps):
            product = applied(S, expected.basis[:, step])
            state = copied(expected)
            extend(backend, state, product, step)
            reference.krylov_extend(expected, product, step)
            assert_same_state(state, expected, (scale, step))
        assert expected.length.tolist() == [min(2, D), 1, *[steps] * M][:M]


@compute_dtypes
def test_steps_with_vectors_of_every_width(backend: Backend, dtype: torch.dtype) -> None:
    for D in (1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300):
        S = random_tensor(1, D, D, dtype=dtype)
        expected = krylov_state(1, 3, D, dtype)
        for step in range(min(D, 2)):
            product = applied(S + S.mT, expected.basis[:, step])
            state = copied(expected)
            extend(backend, state, product, step)
            reference.krylov_extend(expected, product, step)
            assert_same_state(state, expected, (D, step))


@compute_dtypes
def test_many_steps_give_an_orthonormal_basis_and_the_spectrum(backend: Backend, dtype: torch.dtype) -> None:
    D, accuracy = 20, {torch.float64: 1e-12, torch.float32: 1e-4}[dtype]
    S = random_tensor(1, D, D)
    S = (S + S.mT).to(dtype)
    state = krylov_state(1, D + 1, D, dtype)
    for step in range(D):
        extend(backend, state, applied(S, state.basis[:, step]), step)
    alpha, beta = state.alpha, state.beta
    Q = state.basis[0, :D].double()
    assert state.length.item() == D
    assert beta[0, D - 1] == 0
    assert not state.basis[0, D].any()
    assert (Q @ Q.mT - torch.eye(D)).abs().max() < accuracy
    T = alpha[0, :D].diag() + beta[0, : D - 1].diag(1) + beta[0, : D - 1].diag(-1)
    found, expected = (torch.linalg.eigvalsh(matrix.double()) for matrix in (T, S[0]))
    assert relative_error(found, expected) < accuracy


@compute_dtypes
def test_what_is_left_of_a_product_almost_within_the_space_is_orthogonal_to_it(
    backend: Backend, dtype: torch.dtype
) -> None:
    left = {torch.float64: 1e-8, torch.float32: 1e-3}[dtype]
    Q = torch.linalg.qr(random_tensor(20, 20, dtype=dtype))[0].mT
    state = krylov_state(1, 7, 20, dtype)
    state.basis[0, :5] = Q[:5]
    state.beta[0, :4] = 1
    extend(backend, state, (Q[:5].sum(0) + left * Q[5])[None], 4)
    new = state.basis[0, 5]
    assert (Q[:5] @ new).abs().max() < 10 * torch.finfo(dtype).eps
    assert (new - Q[5]).abs().max() < 100 * torch.finfo(dtype).eps / left


@compute_dtypes
def test_a_space_as_large_as_its_vectors_is_exhausted_whatever_is_left(backend: Backend, dtype: torch.dtype) -> None:
    expected = krylov_state(2, 4, 3, dtype)
    expected.basis[:, 1:3] = 0
    expected.beta[:, :2] = 1
    state = copied(expected)
    product = random_tensor(2, 3, dtype=dtype, seed=5)
    extend(backend, state, product, 2)
    reference.krylov_extend(expected, product, 2)
    assert_same_state(state, expected)
    assert not state.beta[:, 2].any()
    assert not state.basis[:, 3].any()


@compute_dtypes
def test_an_exhausted_space_stays_as_it_is(backend: Backend, dtype: torch.dtype) -> None:
    M, D = 3, 9
    S = matrices(M, D, dtype)
    state = krylov_state(M, D + 1, D, dtype)
    for step in range(6):
        extend(backend, state, applied(S, state.basis[:, step]), step)
        for j, dimension in enumerate((2, 1)):
            if step + 1 >= dimension:
                assert state.length[j] == dimension
                assert not state.basis[j, dimension : step + 2].any()
                assert not state.alpha[j, dimension : step + 1].any()
                assert not state.beta[j, dimension - 1 : step + 1].any()
    # What a product with the zero vector gives has no part in it.
    before = copied(state)
    extend(backend, state, torch.full((M, D), 7.0, dtype=dtype), 6)
    assert torch.equal(state.length[:2], before.length[:2])
    assert torch.equal(state.scale[:2], before.scale[:2])


@pytest.mark.parametrize("D", [1, 3, 8, 13, 33], ids="D{}".format)
def test_a_step_writes_nothing_but_the_next_vector_and_its_numbers(backend: Backend, D: int) -> None:
    M, capacity = 3, 6
    state = krylov_state(M, capacity, D, torch.float64)
    held = tree_map(lambda tensor: torch.cat([tensor, tensor, tensor]), state)
    before, own = copied(held), filters_of(held, slice(M, 2 * M))
    extend(backend, own, random_tensor(M, D, seed=3), 0)
    for part in (slice(0, M), slice(2 * M, None)):
        assert_unchanged(filters_of(held, part), filters_of(before, part))
    assert torch.equal(own.basis[:, 0], state.basis[:, 0])
    assert own.basis[:, 1].isfinite().all()
    assert own.basis[:, 2:].isnan().all()
    assert all(numbers[:, 0].isfinite().all() and numbers[:, 1:].isnan().all() for numbers in (own.alpha, own.beta))


@compute_dtypes
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_what_is_no_number_stays_with_its_filter(backend: Backend, value: float, dtype: torch.dtype) -> None:
    M, D = 4, 9
    S = matrices(M, D, dtype)
    expected = krylov_state(M, 4, D, dtype)
    state = copied(expected)
    for step in range(3):
        product = applied(S, expected.basis[:, step])
        if step == 1:
            product[2, 4] = value
        extend(backend, state, product, step)
        reference.krylov_extend(expected, product, step)
        assert_same_state(filters_of(state, [0, 1, 3]), filters_of(expected, [0, 1, 3]), step)
        assert torch.equal(state.length, expected.length)
        for name, wanted in vars(expected).items():
            assert torch.equal(getattr(state, name)[2].isfinite(), wanted[2].isfinite()), (step, name)
    assert state.scale[2].isnan()


def test_a_scale_that_is_no_number_stays_so(backend: Backend) -> None:
    expected = krylov_state(3, 3, 5, torch.float64)
    expected.scale[1] = torch.nan
    state, product = copied(expected), random_tensor(3, 5, seed=5)
    # No number is small compared to NaN, so nothing but zero divided by zero is left.
    product[1] = 0
    extend(backend, state, product, 0)
    reference.krylov_extend(expected, product, 0)
    assert_same_state(state, expected)
    assert state.scale.isnan().tolist() == [False, True, False]


def test_no_filters_take_no_step_and_have_no_eigenvalues(backend: Backend) -> None:
    extend(backend, krylov_state(0, 3, 5, torch.float64), torch.zeros(0, 5, dtype=torch.float64), 0)
    empty = torch.zeros(0, 4, dtype=torch.float64)
    for values, vectors in (
        backend.tridiagonal_extremes(alpha=empty, beta=empty, length=torch.zeros(0, dtype=torch.int64)),
        backend.symmetric_extremes(torch.zeros(0, 4, 4, dtype=torch.float64)),
    ):
        assert (values.shape, vectors.shape) == ((0, 2), (0, 2, 4))


def assert_extreme_pairs(S: Tensor, values: Tensor, vectors: Tensor, labels: Sequence[object]) -> None:
    """Check the extreme eigenpairs of S (M, D, D) against LAPACK and against their definition."""
    S = S.double()
    assert (values.dtype, vectors.dtype) == (torch.float64, torch.float64)
    assert (values.shape, vectors.shape) == ((len(S), 2), (len(S), 2, S.shape[1]))
    expected = torch.linalg.eigvalsh(S)[:, [0, -1]]
    for j, label in enumerate(labels):
        radius = expected[j].abs().max()
        scale = radius if radius > 0 else 1
        assert (values[j] - expected[j]).abs().max() <= 1e-12 * scale, label
        residual = vectors[j] @ (S[j] / scale) - (values[j] / scale).unsqueeze(-1) * vectors[j]
        assert residual.abs().max() <= 1e-12, label
    assert relative_error(vectors.norm(dim=-1), torch.ones_like(values)) < 1e-12


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


@pytest.mark.parametrize("D", [1, 2, 3, 16, 17, 33, 64, 200], ids="D{}".format)
def test_extreme_pairs_of_symmetric_matrices(backend: Backend, D: int) -> None:
    named = symmetric(D)
    S = torch.stack([(matrix + matrix.mT) / 2 for matrix in named.values()])
    assert_extreme_pairs(S, *backend.symmetric_extremes(S), list(named))
    single = torch.stack([S[index] for index, name in enumerate(named) if "huge" not in name]).float()
    assert_extreme_pairs(single, *backend.symmetric_extremes(single), [name for name in named if "huge" not in name])


def tridiagonals(k: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return diagonals and off-diagonals of k entries, by name."""
    alpha, beta = random_tensor(k), random_tensor(k, seed=1)
    zero, one, cut = torch.zeros_like(alpha), torch.ones_like(alpha), beta.clone()
    cut[::2] = 0
    wilkinson = (torch.arange(k, dtype=torch.float64) - (k - 1) / 2).abs()
    graded = torch.logspace(-12, 3, k, dtype=torch.float64)
    return {
        "random": (alpha, beta),
        "positive": (alpha.abs() + 3, beta / 4),
        "negative": (-alpha.abs() - 3, beta / 4),
        "cut": (alpha, cut),
        "diagonal": (alpha, zero),
        "no-diagonal": (zero, beta),
        "zero": (zero, zero),
        "identity": (one, zero),
        "repeated": (-one, 1e-14 * beta),
        "two-values": (torch.where(torch.arange(k) % 2 == 0, 1.0, -1.0).double(), zero),
        "path": (zero, one),
        "wilkinson": (wilkinson, one),
        "graded": (graded, graded),
        "graded-backwards": (graded.flip(0), graded.flip(0)),
        "tiny": (2.0**-100 * alpha, 2.0**-100 * beta),
        "huge": (2.0**100 * alpha, 2.0**100 * beta),
        "very-tiny": (2.0**-498 * alpha, 2.0**-498 * beta),
        "very-huge": (2.0**498 * alpha, 2.0**498 * beta),
        "tiny-beside-huge": (1e-200 * alpha, 1e200 * beta),
        "huge-beside-tiny": (1e200 * alpha, 1e-200 * beta),
    }


@compute_dtypes
@pytest.mark.parametrize("k", [1, 2, 3, 5, 20], ids="k{}".format)
def test_extreme_pairs_of_tridiagonal_matrices(backend: Backend, k: int, dtype: torch.dtype) -> None:
    kinds = tridiagonals(k)
    if dtype == torch.float32:
        kinds = {name: pair for name, pair in kinds.items() if max(x.abs().max() for x in pair) < 1e37}
    alpha, beta = (torch.stack(part).to(dtype) for part in zip(*kinds.values(), strict=True))
    sizes = sorted({1, 2, (k + 1) // 2, k - 1, k} & set(range(1, k + 1)))
    length = torch.tensor(sizes).repeat_interleave(len(kinds))
    alpha, beta = alpha.repeat(len(sizes), 1), beta.repeat(len(sizes), 1)
    # What lies beyond the end has no part in the matrix.
    index = torch.arange(k)
    alpha[index >= length[:, None]] = torch.nan
    beta[index >= length[:, None] - 1] = torch.nan
    given = alpha.clone(), beta.clone(), length.clone()
    values, vectors = backend.tridiagonal_extremes(alpha=alpha, beta=beta, length=length)
    assert_unchanged([alpha, beta, length], given)
    for n, some in zip(sizes, torch.arange(len(length)).split(len(kinds)), strict=True):
        T = torch.diag_embed(alpha[some, :n]).double()
        for side in (1, -1):
            T = T + torch.diag_embed(beta[some, : n - 1], side)
        labels = [(name, n) for name in kinds]
        assert_extreme_pairs(T, values[some], vectors[some][:, :, :n], labels)
        assert not vectors[some][:, :, n:].any()


def test_rows_of_a_larger_buffer_are_matrices(backend: Backend) -> None:
    k = 5
    length = torch.arange(1, k + 1)
    alpha, beta = random_tensor(k, 20)[:, :k], random_tensor(k, 30, seed=1)[:, :k]
    assert_agrees(backend, "tridiagonal_extremes", alpha=alpha, beta=beta, length=laid_out(length, "stepped"))


def test_matrices_of_subnormal_numbers_have_eigenvalues_too(backend: Backend) -> None:
    alpha, beta = (torch.tensor([row], dtype=torch.float64) * 1e-310 for row in ([1.0, 2.0], [1.0, 0.0]))
    values, vectors = backend.tridiagonal_extremes(alpha=alpha, beta=beta, length=torch.tensor([2]))
    expected, _ = reference.tridiagonal_extremes(*doubles(alpha, beta), torch.tensor([2]))
    assert relative_error(values * 1e200, expected * 1e200) < 1e-10
    assert relative_error(vectors.norm(dim=-1), torch.ones(1, 2)) < 1e-10
