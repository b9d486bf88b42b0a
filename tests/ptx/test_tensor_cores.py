"""Products on tensor cores, compiled from small Triton kernels and executed, against float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

from tests.ptx.kernels import Product, Ran, accumulate, multiply

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# Products are exact, and their sums are rounded to float32 or float64; TF32 rounds the factors first.
TOLERANCE = {BF16: 1e-6, F16: 1e-6, F32: 1e-3, F64: 1e-14}
NAMES = {BF16: "bf16", F16: "f16", F32: "tf32", F64: "f64"}


def assert_right(ran: Ran, dtype: torch.dtype, twice: bool = False) -> None:
    # The first of two products is rounded to the dtype of the rows, perhaps to the other side of a tie.
    allowed = {BF16: 2.0**-8, F16: 2.0**-11}.get(dtype, TOLERANCE[dtype]) if twice else TOLERANCE[dtype]
    assert ran.error <= allowed
    assert ran.findings == []


@pytest.mark.parametrize("transposed", list(product((False, True), repeat=2)), ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64], ids=NAMES.get)
def test_mma_multiplies(dtype: torch.dtype, transposed: tuple[bool, bool], compiled: Callable[..., Ran]) -> None:
    ran = compiled(multiply, "sm_80", Product(dtype, 32, 32, 32, 4, *transposed))
    assert_right(ran, dtype)
    assert any(name.startswith("mma m") and name.endswith(NAMES[dtype]) for name in ran.instructions)
    assert ran.multiplications == 32**3


@pytest.mark.parametrize("transposed", list(product((False, True), repeat=2)), ids=str)
@pytest.mark.parametrize("sizes", [(64, 16, 16), (64, 64, 32), (128, 32, 64), (64, 128, 128), (128, 256, 64)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=NAMES.get)
def test_wgmma_multiplies_with_every_swizzle(
    dtype: torch.dtype, sizes: tuple[int, int, int], transposed: tuple[bool, bool], compiled: Callable[..., Ran]
) -> None:
    ran = compiled(multiply, "sm_90", Product(dtype, *sizes, 4, *transposed))
    assert_right(ran, dtype)
    assert any(name.startswith("wgmma m64") for name in ran.instructions)
    assert ran.multiplications == sizes[0] * sizes[1] * sizes[2]


@pytest.mark.parametrize("warps", [4, 8])
def test_wgmma_multiplies_tf32_and_shares_rows_out_over_warpgroups(warps: int, compiled: Callable[..., Ran]) -> None:
    for dtype, b_transposed in ((F32, True), (BF16, False), (F16, True)):
        ran = compiled(multiply, "sm_90", Product(dtype, 128, 64, 64, warps, False, b_transposed))
        assert_right(ran, dtype)
        assert any(name.startswith("wgmma m64") for name in ran.instructions)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=NAMES.get)
def test_a_product_is_the_factor_of_another(target: str, dtype: torch.dtype, compiled: Callable[..., Ran]) -> None:
    ran = compiled(multiply, target, Product(dtype, 64, 64, 64, 4, twice=True))
    assert_right(ran, dtype, twice=True)
    # On sm_90 the first factor comes from registers.
    assert ("{" in next(line for line in ran.ptx.splitlines()[::-1] if "mma" in line and ".f32" in line)) is True


def test_matrices_of_8_x_8_are_loaded_and_stored(compiled: Callable[..., Ran]) -> None:
    loaded = compiled(multiply, "sm_80", Product(BF16, 64, 64, 64, 4))
    assert "ldmatrix.sync.aligned.m8n8.x4.shared.b16" in loaded.ptx
    assert "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16" in loaded.ptx
    assert_right(loaded, BF16)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_copies_ahead_of_products_arrive(target: str, stages: int, compiled: Callable[..., Ran]) -> None:
    ran = compiled(accumulate, target, BF16, 5, stages)
    assert_right(ran, BF16)
    assert ("asynchronous copy" in ran.instructions) == (stages > 1)
