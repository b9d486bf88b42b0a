"""Launches in the simulator: our own code on CPU tensors, what a report tells, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from s3d_fast.kernels.ptx.launch import simulated


def launches(target: str, processors: int) -> dict[str, Any]:
    """Return what a report tells of one product, and whether everything is as before afterwards."""
    from triton.runtime.jit import JITFunction

    from s3d_fast.backends.triton import TRITON
    from s3d_fast.kernels import device

    before = JITFunction.run, device.INTERPRETER
    X, C, V = torch.ones(2048, 64).bfloat16(), torch.ones(2048, 32).bfloat16(), torch.ones(32, 64)
    with simulated(target, processors=processors) as report:
        TRITON.splitting_matvec(X=X, C=C, V=V, bias=False)
    report.require_clean()
    first = next(launch for launch in report.launches if launch.kernel == "fused_kernel")
    return {
        "grids": [launch.grid for launch in report.launches],
        "kernels": [launch.kernel for launch in report.launches],
        "instructions": dict(report.instructions),
        "multiplications": first.multiplications,
        "bytes": first.bytes,
        "conflicts": first.bank_conflicts,
        "is restored": before == (JITFunction.run, device.INTERPRETER),
    }


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_a_report_counts_what_a_roofline_needs(target: str, compiled: Callable[..., dict[str, Any]]) -> None:
    found = compiled(launches, target, 2)
    assert found["kernels"] == ["split_kernel", "fused_kernel", "sum_slices_kernel"]
    assert found["grids"][1][1] > 1
    # Two products of 2048 x 64 x 32, each in two parts; a GPU may multiply more than it needs.
    assert found["multiplications"] >= 2 * 2 * 2048 * 64 * 32
    # Every row is read once by each block of filters.
    assert found["bytes"]["ld.global"] >= 2 * 2048 * (64 + 32)
    assert all(ratio >= 1 for ratio in found["conflicts"].values())
    assert {"barrier", "shared load", "global store", "asynchronous copy", "float"} <= found["instructions"].keys()
    assert found["is restored"]


def test_processors_determine_the_programs(compiled: Callable[..., dict[str, Any]]) -> None:
    few, many = (compiled(launches, "sm_80", processors)["grids"][1] for processors in (1, 4))
    assert few[0] * few[1] < many[0] * many[1]


def sums(target: str, size: int) -> float:
    """Return the error of a sum over more slices than are read at once."""
    from s3d_fast.kernels import launch

    torch.manual_seed(0)
    partial = torch.randn(2 * launch.SUM_SLICES + 7, size)
    with simulated(target) as report:
        total = launch.summed([], partial).run()
    report.require_clean()
    return float((total - partial.double().sum(0)).abs().max())


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_sums_over_many_slices(target: str, compiled: Callable[..., float]) -> None:
    for size in (1, 64, 131):
        assert compiled(sums, target, size) < 1e-5, size


def edited() -> list[str]:
    """Return what is found if every barrier of a kernel becomes one of a warp."""
    from s3d_fast.backends.triton import TRITON

    def without_barriers(name: str, ptx: str) -> str:
        return ptx.replace("bar.sync \t0;", "bar.warp.sync -1;") if name == "fused_kernel" else ptx

    X, C, V = torch.ones(128, 64).bfloat16(), torch.ones(128, 64).bfloat16(), torch.ones(64, 64)
    with simulated("sm_80", edit=without_barriers) as report:
        TRITON.splitting_matvec(X=X, C=C, V=V, bias=False)
    with pytest.raises(AssertionError, match="race: shared memory"):
        report.require_clean()
    return [str(finding) for finding in report.findings]


def test_the_code_of_a_kernel_can_be_edited(compiled: Callable[..., list[str]]) -> None:
    found = compiled(edited)
    assert found
    assert all("fused_kernel, PTX line" in line for line in found)


def test_targets_that_it_does_not_know_and_interpreted_kernels_are_refused() -> None:
    for target in ("gfx942", "sm_100"):
        with pytest.raises(ValueError, match=f"'sm_80' or 'sm_90', got '{target}'"), simulated(target):
            pass
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"), simulated("sm_80"):
        pass
