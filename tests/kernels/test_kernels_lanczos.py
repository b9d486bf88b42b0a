"""The steps of Lanczos by the Triton kernels, in Triton's interpreter, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from s3d_fast.backends.choice import choose
from s3d_fast.kernels import krylov, tridiagonal
from s3d_fast.maths import reference
from tests.cases import TOLERANCE, relative_error
from tests.extension_cases import doubles, krylov_state, laid_out, random_tensor
from tests.kernel_cases import compute_dtypes, poisoned, recorded  # noqa: F401

# The interpreter computes with masked entries too, which may overflow or be no numbers.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("poisoned")]

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


def extend(state: list[Tensor], product: Tensor, step: int) -> None:
    """Take a step by the Triton backend, and check that q becomes the new basis vector."""
    q = torch.full_like(product, torch.nan)
    given = product.clone()
    choose("triton").krylov_extend(state[0], product, *state[1:], step, q)
    torch.testing.assert_close(q, state[0][:, step + 1], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(product, given, rtol=0, atol=0, equal_nan=True)


def assert_same_state(state: list[Tensor], expected: list[Tensor], label: object = "") -> None:
    """Check basis, alpha, beta, length and scale: the same entries are NaN, the others agree."""
    names = ("basis", "alpha", "beta", "length", "scale")
    for name, now, wanted in zip(names, state, expected, strict=True):
        assert torch.equal(now.isnan(), wanted.isnan()), (label, name)
        # Filters are of different magnitude.
        for j, (own, own_wanted) in enumerate(zip(now.nan_to_num(), wanted.nan_to_num(), strict=True)):
            error = relative_error(own, own_wanted)
            assert error < TOLERANCE[expected[0].dtype], f"{label}, {name} of filter {j}: error {error}"
    assert torch.equal(state[3], expected[3]), label
    assert torch.equal(state[2] == 0, expected[2] == 0), label


@compute_dtypes
@pytest.mark.parametrize("sizes", [(1, 1), (3, 2), (4, 16), (3, 33), (3, 300)], ids=str)
def test_steps_agree_with_the_reference(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    M, D = sizes
    # As many as are more than one tile of the basis, where that is few.
    steps = min(D, 6) if D < 300 else 10
    for scale in SCALES[dtype] if D < 20 else SCALES[dtype][:1]:
        S = scale * matrices(M, D, dtype)
        expected = krylov_state(M, steps + 1, D, dtype)
        for step in range(steps):
            product = applied(S, expected[0][:, step])
            state = [tensor.clone() for tensor in expected]
            extend(state, product, step)
            reference.krylov_extend(expected[0], product, *expected[1:], step)
            assert_same_state(state, expected, (scale, step))
        assert expected[3].tolist() == [min(2, D), 1, *[steps] * M][:M]


@compute_dtypes
def test_vectors_of_every_width_agree_with_the_reference(dtype: torch.dtype) -> None:
    for D in (1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 299, 300):
        S = random_tensor(1, D, D, dtype=dtype)
        expected = krylov_state(1, 3, D, dtype)
        for step in range(min(D, 2)):
            product = applied(S + S.mT, expected[0][:, step])
            state = [tensor.clone() for tensor in expected]
            extend(state, product, step)
            reference.krylov_extend(expected[0], product, *expected[1:], step)
            assert_same_state(state, expected, (D, step))


def test_a_vector_that_no_program_holds_agrees_with_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(krylov, "WIDEST", 16)
    launches = recorded(monkeypatch, krylov, "extend_kernel")
    for D, dtype, count in ((16, torch.float32, 1), (17, torch.float32, 0), (17, torch.float64, 0)):
        launches.clear()
        expected = krylov_state(2, 3, D, dtype)
        state = [tensor.clone() for tensor in expected]
        product = random_tensor(2, D, dtype=dtype, seed=5)
        extend(state, product, 0)
        reference.krylov_extend(expected[0], product, *expected[1:], 0)
        assert_same_state(state, expected, (D, dtype))
        assert len(launches) == count


@compute_dtypes
def test_many_steps_give_an_orthonormal_basis_and_the_spectrum(dtype: torch.dtype) -> None:
    D, accuracy = 20, {torch.float64: 1e-12, torch.float32: 1e-4}[dtype]
    S = random_tensor(1, D, D)
    S = (S + S.mT).to(dtype)
    state = krylov_state(1, D + 1, D, dtype)
    for step in range(D):
        extend(state, applied(S, state[0][:, step]), step)
    basis, alpha, beta, length, _ = state
    Q = basis[0, :D].double()
    assert length.item() == D
    assert beta[0, D - 1] == 0
    assert not basis[0, D].any()
    assert (Q @ Q.mT - torch.eye(D)).abs().max() < accuracy
    T = alpha[0, :D].diag() + beta[0, : D - 1].diag(1) + beta[0, : D - 1].diag(-1)
    found, expected = (torch.linalg.eigvalsh(matrix.double()) for matrix in (T, S[0]))
    assert relative_error(found, expected) < accuracy


@compute_dtypes
def test_what_is_left_of_a_product_almost_within_the_space_is_orthogonal_to_it(dtype: torch.dtype) -> None:
    left = {torch.float64: 1e-8, torch.float32: 1e-3}[dtype]
    Q = torch.linalg.qr(random_tensor(20, 20, dtype=dtype))[0].mT
    state = krylov_state(1, 7, 20, dtype)
    state[0][0, :5] = Q[:5]
    state[2][0, :4] = 1
    extend(state, (Q[:5].sum(0) + left * Q[5])[None], 4)
    new = state[0][0, 5]
    assert (Q[:5] @ new).abs().max() < 10 * torch.finfo(dtype).eps
    assert (new - Q[5]).abs().max() < 100 * torch.finfo(dtype).eps / left


@compute_dtypes
def test_a_space_as_large_as_its_vectors_is_exhausted_whatever_is_left(dtype: torch.dtype) -> None:
    expected = krylov_state(2, 4, 3, dtype)
    expected[0][:, 1:3] = 0
    expected[2][:, :2] = 1
    state = [tensor.clone() for tensor in expected]
    product = random_tensor(2, 3, dtype=dtype, seed=5)
    extend(state, product, 2)
    reference.krylov_extend(expected[0], product, *expected[1:], 2)
    assert_same_state(state, expected)
    assert not state[2][:, 2].any()
    assert not state[0][:, 3].any()


@compute_dtypes
def test_an_exhausted_space_stays_as_it_is(dtype: torch.dtype) -> None:
    M, D = 3, 9
    S = matrices(M, D, dtype)
    state = krylov_state(M, D + 1, D, dtype)
    for step in range(6):
        extend(state, applied(S, state[0][:, step]), step)
        for j, dimension in enumerate((2, 1)):
            if step + 1 >= dimension:
                assert state[3][j] == dimension
                assert not state[0][j, dimension : step + 2].any()
                assert not state[1][j, dimension : step + 1].any()
                assert not state[2][j, dimension - 1 : step + 1].any()
    # What a product with the zero vector gives has no part in it.
    before = [tensor[:2].clone() for tensor in state]
    extend(state, torch.full((M, D), 7.0, dtype=dtype), 6)
    for name, now, old in zip(("length", "scale"), (state[3], state[4]), before[3:], strict=True):
        assert torch.equal(now[:2], old), name


@pytest.mark.parametrize("D", [1, 3, 8, 13, 33])
def test_a_step_writes_nothing_but_the_next_vector_and_its_numbers(D: int) -> None:
    M, capacity = 3, 6
    state = krylov_state(M, capacity, D, torch.float64)
    held = [torch.cat([tensor, tensor, tensor]) for tensor in state]
    before = [tensor.clone() for tensor in held]
    extend([tensor[M : 2 * M] for tensor in held], random_tensor(M, D, seed=3), 0)
    for tensor, old in zip(held, before, strict=True):
        for part in (slice(0, M), slice(2 * M, None)):
            torch.testing.assert_close(tensor[part], old[part], rtol=0, atol=0, equal_nan=True)
    basis, alpha, beta, _, _ = (tensor[M : 2 * M] for tensor in held)
    assert torch.equal(basis[:, 0], state[0][:, 0])
    assert basis[:, 1].isfinite().all()
    assert basis[:, 2:].isnan().all()
    assert all(numbers[:, 0].isfinite().all() and numbers[:, 1:].isnan().all() for numbers in (alpha, beta))


def test_state_and_products_of_every_layout_agree_with_the_reference() -> None:
    M, D = 3, 9
    S = matrices(M, D, torch.float64)
    for layout in ("contiguous", "transposed", "stepped", "offset"):
        expected = krylov_state(M, 4, D, torch.float64)
        state = [laid_out(tensor.clone(), layout) for tensor in expected]
        for step in range(3):
            product = applied(S, expected[0][:, step])
            q = laid_out(torch.zeros_like(product), layout)
            given = laid_out(product, layout)
            choose("triton").krylov_extend(state[0], given, *state[1:], step, q)
            reference.krylov_extend(expected[0], product, *expected[1:], step)
            assert_same_state(state, expected, (layout, step))
            assert torch.equal(q, state[0][:, step + 1])
        # Products alone may be laid out in any way too.
        state, again = krylov_state(M, 4, D, torch.float64), krylov_state(M, 4, D, torch.float64)
        product = random_tensor(M, D, seed=4)
        extend(state, laid_out(product, layout), 0)
        reference.krylov_extend(again[0], product, *again[1:], 0)
        assert_same_state(state, again, layout)


@compute_dtypes
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_what_is_no_number_stays_with_its_filter(value: float, dtype: torch.dtype) -> None:
    M, D = 4, 9
    S = matrices(M, D, dtype)
    expected = krylov_state(M, 4, D, dtype)
    state = [tensor.clone() for tensor in expected]
    for step in range(3):
        product = applied(S, expected[0][:, step])
        if step == 1:
            product[2, 4] = value
        extend(state, product, step)
        reference.krylov_extend(expected[0], product, *expected[1:], step)
        assert_same_state([tensor[[0, 1, 3]] for tensor in state], [tensor[[0, 1, 3]] for tensor in expected], step)
        assert torch.equal(state[3], expected[3])
        for now, wanted in zip(state, expected, strict=True):
            assert torch.equal(now[2].isfinite(), wanted[2].isfinite()), step


def test_no_filters_take_no_step() -> None:
    extend(krylov_state(0, 3, 5, torch.float64), torch.zeros(0, 5, dtype=torch.float64), 0)


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
        "no diagonal": (zero, beta),
        "zero": (zero, zero),
        "identity": (one, zero),
        "repeated": (-one, 1e-14 * beta),
        "two values": (torch.where(torch.arange(k) % 2 == 0, 1.0, -1.0).double(), zero),
        "path": (zero, one),
        "wilkinson": (wilkinson, one),
        "graded": (graded, graded),
        "graded backwards": (graded.flip(0), graded.flip(0)),
        "tiny": (2.0**-100 * alpha, 2.0**-100 * beta),
        "huge": (2.0**100 * alpha, 2.0**100 * beta),
        "very tiny": (2.0**-498 * alpha, 2.0**-498 * beta),
        "very huge": (2.0**498 * alpha, 2.0**498 * beta),
        "tiny beside huge": (1e-200 * alpha, 1e200 * beta),
        "huge beside tiny": (1e200 * alpha, 1e-200 * beta),
    }


def assert_extreme_pairs(alpha: Tensor, beta: Tensor, length: Tensor, labels: list[Any]) -> None:
    """Check eigenpairs against the reference, and against their definition: residuals and norms."""
    before = [tensor.clone() for tensor in (alpha, beta, length)]
    values, vectors = choose("triton").tridiagonal_extremes(alpha, beta, length)
    for tensor, old in zip((alpha, beta, length), before, strict=True):
        torch.testing.assert_close(tensor, old, rtol=0, atol=0, equal_nan=True)
    assert (values.dtype, vectors.dtype) == (torch.float64, torch.float64)
    assert (values.shape, vectors.shape) == ((len(alpha), 2), (len(alpha), 2, alpha.shape[1]))
    expected, _ = reference.tridiagonal_extremes(alpha, beta, length)
    for j, label in enumerate(labels):
        n, radius = int(length[j]), expected[j].abs().max().item()
        a, b = doubles(alpha[j, :n], beta[j, : n - 1])
        scale = radius if radius > 0 else 1.0
        assert (values[j] - expected[j]).abs().max() <= 2e-14 * scale, label
        for value, vector in zip(values[j] / scale, vectors[j], strict=True):
            x = vector[:n]
            residual = (a / scale - value) * x
            residual[1:] += b / scale * x[:-1]
            residual[:-1] += b / scale * x[1:]
            assert residual.abs().max() <= 1e-12, label
            assert abs(x.norm() - 1) <= 1e-12, label
            assert not vector[n:].any(), label


@compute_dtypes
@pytest.mark.parametrize("k", [1, 2, 3, 5, 17, 30])
def test_extreme_pairs_agree_with_the_reference_for_every_kind_and_length(k: int, dtype: torch.dtype) -> None:
    kinds = tridiagonals(k)
    if dtype == torch.float32:
        kinds = {name: pair for name, pair in kinds.items() if max(x.abs().max() for x in pair) < 1e37}
    diagonals, couplings, lengths, labels = [], [], [], []
    for length in sorted({1, 2, (k + 1) // 2, k - 1, k} & set(range(1, k + 1))):
        for name, (alpha, beta) in kinds.items():
            # What lies beyond the end has no part in the matrix.
            a, b = alpha.to(dtype, copy=True), beta.to(dtype, copy=True)
            a[length:], b[length - 1 :] = torch.nan, torch.nan
            diagonals.append(a)
            couplings.append(b)
            lengths.append(length)
            labels.append((name, length))
    assert_extreme_pairs(torch.stack(diagonals), torch.stack(couplings), torch.tensor(lengths), labels)


def test_matrices_of_every_length_share_a_call_in_every_layout() -> None:
    k = 5
    alpha, beta, length = random_tensor(k, k), random_tensor(k, k, seed=1), torch.arange(1, k + 1)
    for layout in ("contiguous", "transposed", "stepped", "offset", "broadcast-first", "broadcast-last"):
        lengths = laid_out(length, "stepped" if layout == "stepped" else "contiguous")
        assert_extreme_pairs(laid_out(alpha, layout), laid_out(beta, layout), lengths, [(layout, n) for n in length])
    # Rows of a larger buffer, as a solver has them.
    assert_extreme_pairs(random_tensor(k, 20)[:, :k], random_tensor(k, 30, seed=1)[:, :k], length, list(length))


def test_matrices_shared_out_over_programs_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    alpha, beta, length = random_tensor(7, 3), random_tensor(7, 3, seed=1), torch.tensor([3, 1, 2, 2, 3, 3, 1])
    expected = choose("triton").tridiagonal_extremes(alpha, beta, length)
    monkeypatch.setattr(tridiagonal, "LANES", 8)
    launches = recorded(monkeypatch, tridiagonal, "extremes_kernel")
    found = choose("triton").tridiagonal_extremes(alpha, beta, length)
    assert launches[0].grid[0] > 1
    assert all(map(torch.equal, found, expected))


def test_what_is_no_number_stays_with_its_matrix() -> None:
    k = 5
    alpha, beta, length = random_tensor(9, k), random_tensor(9, k, seed=1), torch.full((9,), k)
    bad = {1: (alpha, torch.nan), 3: (beta, torch.nan), 4: (alpha, torch.inf), 6: (beta, -torch.inf)}
    for j, (tensor, value) in bad.items():
        tensor[j, 2] = value
    values, vectors = choose("triton").tridiagonal_extremes(alpha, beta, length)
    good = [j for j in range(9) if j not in bad]
    assert values[list(bad)].isnan().all()
    expected = choose("triton").tridiagonal_extremes(alpha[good], beta[good], length[good])
    assert torch.equal(values[good], expected[0])
    assert torch.equal(vectors[good], expected[1])
    assert_extreme_pairs(alpha[good], beta[good], length[good], good)


def test_matrices_of_subnormal_numbers_have_eigenvalues_too() -> None:
    alpha, beta = torch.tensor([[1.0, 2.0]]).double() * 1e-310, torch.tensor([[1.0, 0.0]]).double() * 1e-310
    values, vectors = choose("triton").tridiagonal_extremes(alpha, beta, torch.tensor([2]))
    expected, _ = reference.tridiagonal_extremes(alpha, beta, torch.tensor([2]))
    assert relative_error(values * 1e200, expected * 1e200) < 1e-10
    assert relative_error(vectors.norm(dim=-1), torch.ones(1, 2)) < 1e-10


def test_no_matrices_have_no_eigenvalues() -> None:
    empty = torch.zeros(0, 4, dtype=torch.float64)
    values, vectors = choose("triton").tridiagonal_extremes(empty, empty, torch.zeros(0, dtype=torch.int64))
    assert (values.shape, vectors.shape) == ((0, 2), (0, 2, 4))
