"""S v takes little memory beyond its inputs and its result, however many rows and filters there are."""

from __future__ import annotations

import pytest
import torch

from benchmarks.memory import extra_memories
from tests.cases import RowsCase

LIMIT = 8 << 20
CASES = (
    RowsCase(400_000, 16, 16, torch.float32),
    RowsCase(64, 64, 100_000, torch.float32),
    RowsCase(4096, 512, 512, torch.float64),
    RowsCase(100_000, 32, 64, torch.bfloat16),
)
# The reference forms a product with an entry for every row and filter.
FORMED = RowsCase(65536, 16, 64, torch.float32)


@pytest.fixture(scope="module")
def measured() -> dict[RowsCase, int]:
    """The extra memory of every case, and that of the reference."""
    cases = [("cpu", case) for case in CASES] + [("reference", FORMED)]
    return dict(zip((case for _, case in cases), extra_memories(cases), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_memory_is_bounded(case: RowsCase, measured: dict[RowsCase, int]) -> None:
    assert measured[case] <= LIMIT * torch.get_num_threads()


def test_the_measurement_sees_the_product_that_the_reference_forms(measured: dict[RowsCase, int]) -> None:
    assert measured[FORMED] >= FORMED.N * FORMED.M * 4
