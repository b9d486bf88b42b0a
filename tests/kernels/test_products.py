"""Numbers as sums of bfloat16 planes: exact where they should be, and products of the planes that count."""

from __future__ import annotations

import pytest
import torch

from s3d_fast.kernels.aligned import in_planes
from s3d_fast.kernels.products import PLANES, product_form, row_storage
from tests.cases import random_tensor
from tests.kernel_cases import GPUS

pytest.importorskip("triton")


def test_every_float16_number_is_the_sum_of_two_planes() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    X = every[every.isfinite()].view(-1, 31)
    planes = in_planes("bf16x3", X)
    assert len(planes) == 2
    assert torch.equal(planes.double().sum(0), X.double())


def test_float32_numbers_are_the_sums_of_three_planes() -> None:
    # Of the smallest numbers, bits would be below those of bfloat16.
    scale = torch.logspace(-30, 30, 40, base=10.0)
    X = (random_tensor(50, 40) * scale).float()
    planes = in_planes("bf16x6", X)
    assert len(planes) == 3
    assert torch.equal(planes.double().sum(0), X.double())
    sizes = planes.double().abs()
    # The interpreter does not round to the nearest number, but cuts bits off.
    assert (sizes[1:] < 2.0**-7 * sizes[:-1]).logical_or(sizes[1:] == 0).all()


@pytest.mark.parametrize("form", PLANES)
def test_products_of_planes_that_are_large_enough_together_count(form: str) -> None:
    rows, factors, products = PLANES[form]
    assert products == sum(i + j < max(rows, factors) for i in range(rows) for j in range(factors))


def test_rows_are_multiplied_in_planes_of_bfloat16_except_where_ieee_is_wanted_or_as_fast() -> None:
    forms = {
        (torch.float64, "medium"): "ieee",
        (torch.float32, "highest"): "ieee",
        (torch.float32, "high"): "bf16x6",
        (torch.float32, "medium"): "bf16x1",
        (torch.float16, "highest"): "bf16x3",
        (torch.bfloat16, "high"): "bf16x2",
    }
    for (stored, precision), form in forms.items():
        assert product_form(stored, precision, GPUS["hopper"]) == form
        assert row_storage(form, stored)[1] == (stored if form == "ieee" else torch.bfloat16)
    assert product_form(torch.float32, "high", GPUS["amd"]) == "ieee"
