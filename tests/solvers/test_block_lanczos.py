"""Block Lanczos against dense eigenvalues: exact where the space is complete, and before better than powers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from s3d_fast.solvers.block_lanczos import largest_eigenpairs


def matrices(*sizes: int) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {}
    for size in sizes:
        M = torch.randn(size, size, generator=generator, dtype=torch.float64)
        found[size] = M.mT @ M
    return found


def starts(*shapes: tuple[int, int]) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {size: torch.randn(count, size, generator=generator) for count, size in shapes}


def test_complete_spaces_are_exact_and_take_no_more_products() -> None:
    S = matrices(3, 8, 12)
    asked: list[list[int]] = []

    def product(rows: dict[int, Tensor]) -> dict[int, Tensor]:
        asked.append(sorted(rows))
        return {size: own @ S[size] for size, own in rows.items()}

    found = largest_eigenpairs(product, starts((5, 3), (4, 8), (4, 12)), 9)
    # Three rows are enough for the first, two blocks for the second, three for the third.
    assert asked == [[3, 8, 12], [8, 12], [12]]
    for size, (values, vectors) in found.items():
        kept = min(size, 5 if size == 3 else 4)
        expected, basis = torch.linalg.eigh(S[size])
        assert (values.shape, vectors.shape) == ((kept,), (kept, size))
        assert torch.allclose(values, expected.flip(0)[:kept], rtol=1e-10)
        assert torch.allclose((vectors @ basis.flip(1)[:, :kept]).abs(), torch.eye(kept).double(), atol=1e-7)


def test_few_products_find_more_than_a_power_iteration() -> None:
    S = matrices(60)
    start = starts((4, 60))
    values, vectors = largest_eigenpairs(lambda rows: {60: rows[60] @ S[60]}, start, 3)[60]
    power = start[60].double()
    # The space of three products holds two steps of the power iteration; the third is for its Rayleigh quotients.
    for _ in range(2):
        power = torch.linalg.qr((power @ S[60]).mT).Q.mT
    best = torch.linalg.eigvalsh(S[60]).flip(0)[:4].sum()
    assert torch.trace(power @ S[60] @ power.mT) < values.sum() < best
    assert torch.allclose(vectors @ vectors.mT, torch.eye(4).double(), atol=1e-10)
    assert torch.allclose((vectors @ S[60] * vectors).sum(1), values)


def test_zeros_and_dependent_rows() -> None:
    S = matrices(5)
    rows = torch.zeros(3, 5)
    rows[1:] = torch.randn(5, generator=torch.Generator().manual_seed(0))
    values, vectors = largest_eigenpairs(lambda own: {5: own[5] @ S[5]}, {5: rows}, 1)[5]
    assert (values.shape, vectors.shape) == ((1,), (1, 5))
    values, vectors = largest_eigenpairs(lambda own: pytest.fail("asked"), {5: torch.zeros(2, 5)}, 2)[5]
    assert (values.shape, vectors.shape) == ((0,), (0, 5))
    with pytest.raises(ValueError, match="steps"):
        largest_eigenpairs(lambda own: own, {5: rows}, 0)
