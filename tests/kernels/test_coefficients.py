"""Tiles of coefficients, cut into parts or not: they have the same entries."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from s3d_fast.kernels import configs, tiles
from s3d_fast.kernels.coefficients import coefficient_offsets, load_coefficients
from s3d_fast.kernels.compiled import TARGETS
from s3d_fast.kernels.launch import power_of_two, programs_at_once
from s3d_fast.kernels.tiles import Config
from tests.cases import random_tensor


@triton.jit
def copy_kernel(
    C, out, first_row, first_filter, N, F, M, row, K: tl.constexpr, PARTS: tl.constexpr, BN: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """out = a tile of C, transposed."""
    tile, r, inside = coefficient_offsets(C, first_filter, F, M, row, 1, K, False, PARTS, BN, BM)
    c = load_coefficients(C + first_row * row, tile, r, inside, N - first_row, row, None, True, PARTS, BN, BM)
    tl.store(out + tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :], c)


def expected(C: Tensor, K: int, first_row: int, first_filter: int, shape: tuple[int, int]) -> Tensor:
    """Return the transposed tile; what lies outside of C is zero."""
    BM, BN = shape
    full = torch.zeros(first_filter + BM, first_row + BN, dtype=C.dtype)
    repeated = C.repeat(1, K).T
    inside = repeated[: full.shape[0], : full.shape[1]]
    full[: inside.shape[0], : inside.shape[1]] = inside
    return full[first_filter:, first_row:]


@pytest.mark.parametrize("parts", [0, 1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_tile_that_is_cut_has_the_entries_of_one_that_is_not(dtype: torch.dtype, parts: int) -> None:
    BN, BM = 32, 16
    for N, M, K in ((100, 48, 1), (33, 5, 1), (70, 20, 2), (1, 1, 1)):
        # Rows are apart, as those of a view.
        C = random_tensor(N, M + 3, dtype=dtype)[:, :M]
        for first_row, first_filter in ((0, 0), (32, 0), (64, 16), (0, 32)):
            out = torch.full((BM, BN), torch.nan, dtype=dtype)
            copy_kernel[(1,)](C, out, first_row, first_filter, N, K * M, M, C.stride(0), K, parts, BN, BM)
            assert torch.equal(out, expected(C, K, first_row, first_filter, (BM, BN))), (N, M, K, first_row)


def every_config(target: str, form: str, dtype: torch.dtype) -> list[Config]:
    device, found = TARGETS[target].device, list[Config]()
    for width in tiles.WIDTHS:
        for filters in (16, 32, 64, 1024):
            for bias in (False, True):
                found += configs.pointwise(device, form, dtype, power_of_two(width, 16, 256), filters, bias)
                found += configs.gated(device, form, dtype, width, filters, bias)
    for few in (False, True):
        found += [own for config in configs.grouped(device, form, dtype, True, few) for own in config.configs]
    return found


@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize(("form", "dtype"), [("bf16x2", torch.bfloat16), ("bf16x3", torch.float16)])
def test_every_thread_copies_16_bytes_of_a_part(target: str, form: str, dtype: torch.dtype) -> None:
    device, cut = TARGETS[target].device, 0
    for config in every_config(target, form, dtype):
        parts = configs.coefficient_parts(config, device, dtype)
        cut += parts > 0
        if parts:
            assert config.rows % (8 * parts) == 0, config
            assert config.rows * config.filters // parts == 8 * 32 * config.warps, config
    # The compiler for B200 and AMD's GPUs does not copy asynchronously, or transposes otherwise.
    assert (cut > 0) == (target in ("sm_80", "sm_90"))


def test_other_coefficients_are_not_cut() -> None:
    config = Config(32, 64, 64, 2, 3)
    device = TARGETS["sm_80"].device
    assert configs.coefficient_parts(config, device, torch.bfloat16) == 4
    assert configs.coefficient_parts(config, device, torch.float32) == 0
    assert configs.coefficient_parts(Config(32, 64, 128, 4, 3), device, torch.bfloat16) == 0


def test_small_programs_fill_a_processor() -> None:
    for target, warps, programs in (("sm_80", 1, 8), ("sm_80", 2, 4), ("sm_80", 8, 2), ("gfx942", 1, 4)):
        device = TARGETS[target].device
        assert programs_at_once(device, warps) == programs * device.processors
