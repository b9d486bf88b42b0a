"""S v takes little memory beyond its inputs and its result, however many rows and filters there are."""

from __future__ import annotations

import pytest
import torch

from benchmarks.memory import extra_memory
from tests.cases import RowsCase

LIMIT = 8 << 20


@pytest.mark.parametrize(
    "case",
    [
        RowsCase(400_000, 16, 16, torch.float32),
        RowsCase(64, 64, 100_000, torch.float32),
        RowsCase(4096, 512, 512, torch.float64),
        RowsCase(100_000, 32, 64, torch.bfloat16),
    ],
    ids=str,
)
def test_memory_is_bounded(case: RowsCase) -> None:
    assert extra_memory("cpu", case) <= LIMIT * torch.get_num_threads()


def test_the_measurement_sees_the_product_that_the_reference_forms() -> None:
    case = RowsCase(65536, 16, 64, torch.float32)
    assert extra_memory("reference", case) >= case.N * case.M * 4
