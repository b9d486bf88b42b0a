"""The steps of Lanczos by the Triton kernels: what goes to them, what to the reference, and how programs share work.

That they agree with the reference is in `tests/backends/test_agreement_lanczos.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_map

from s3d_fast.backends.choice import choose
from s3d_fast.kernels import krylov, tridiagonal
from tests.backends.agreement import assert_agrees, krylov_state
from tests.cases import laid_out, random_tensor
from tests.kernel_cases import recorded

# The interpreter computes with masked entries too, which may overflow or be no numbers.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("poisoned")]


def test_a_vector_that_no_program_holds_goes_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(krylov, "WIDEST", 16)
    launches = recorded(monkeypatch, krylov, "extend_kernel")
    for D, dtype, count in ((16, torch.float32, 1), (17, torch.float32, 0), (17, torch.float64, 0)):
        launches.clear()
        state = krylov_state(2, 3, D, dtype)
        product = random_tensor(2, D, dtype=dtype, seed=5)
        assert_agrees(choose("triton"), "krylov_extend", state=state, product=product, step=0)
        assert len(launches) == count


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "stepped", "offset"])
def test_a_state_of_any_layout_agrees_and_only_a_dense_one_goes_to_the_kernel(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = recorded(monkeypatch, krylov, "extend_kernel")
    state = tree_map(lambda tensor: laid_out(tensor, layout), krylov_state(3, 4, 9, torch.float64))
    for step in range(3):
        product = laid_out(random_tensor(3, 9, seed=step), layout)
        assert_agrees(choose("triton"), "krylov_extend", state=state, product=product, step=step, label=step)
    assert len(launches) == 3 * (layout == "contiguous")


def test_matrices_shared_out_over_programs_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    alpha, beta, length = random_tensor(7, 3), random_tensor(7, 3, seed=1), torch.tensor([3, 1, 2, 2, 3, 3, 1])
    expected = choose("triton").tridiagonal_extremes(alpha=alpha, beta=beta, length=length)
    monkeypatch.setattr(tridiagonal, "LANES", 8)
    launches = recorded(monkeypatch, tridiagonal, "extremes_kernel")
    found = choose("triton").tridiagonal_extremes(alpha=alpha, beta=beta, length=length)
    assert launches[0].grid[0] > 1
    assert all(map(torch.equal, found, expected))


def test_what_is_no_number_stays_with_its_matrix() -> None:
    k = 5
    alpha, beta, length = random_tensor(9, k), random_tensor(9, k, seed=1), torch.full((9,), k)
    bad = {1: (alpha, torch.nan), 3: (beta, torch.nan), 4: (alpha, torch.inf), 6: (beta, -torch.inf)}
    for j, (tensor, value) in bad.items():
        tensor[j, 2] = value
    values, vectors = choose("triton").tridiagonal_extremes(alpha=alpha, beta=beta, length=length)
    good = [j for j in range(9) if j not in bad]
    assert values[list(bad)].isnan().all()
    kept = {"alpha": alpha[good], "beta": beta[good], "length": length[good]}
    expected = assert_agrees(choose("triton"), "tridiagonal_extremes", **kept)
    assert torch.equal(values[good], expected[0])
    assert torch.equal(vectors[good], expected[1])


@pytest.mark.parametrize("step", [-1, 3, 4])
def test_a_step_beyond_the_basis_is_refused_before_anything_is_written(step: int) -> None:
    # The kernel would write the first vector of the next filter.
    state = krylov_state(3, 4, 9, torch.float32)
    before = tree_map(torch.clone, state)
    for call in (choose("triton").krylov_extend, choose("reference").krylov_extend)[: 1 if step < 0 else 2]:
        with pytest.raises(IndexError):
            call(state, random_tensor(3, 9, dtype=torch.float32), step)
    assert torch.equal(state.basis[:, 0], before.basis[:, 0])


def test_coefficients_without_room_for_the_step_are_refused() -> None:
    state = krylov_state(3, 9, 9, torch.float32)
    short = replace(state, alpha=state.alpha[:, :2].contiguous(), beta=state.beta[:, :2].contiguous())
    with pytest.raises(IndexError, match="an entry 2 for every filter"):
        choose("triton").krylov_extend(short, random_tensor(3, 9, dtype=torch.float32), 2)
