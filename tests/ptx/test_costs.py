"""Costs of a tile and of a pass, solved for from two simulated sizes, are what a third size executes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.launches import Shape
from benchmarks.recorded import simulate, simulated_counts

Counts = dict[str, dict[str, float]]


def costs(shape: Shape, target: str) -> dict[str, Counts]:
    return simulate(shape, target, "bf16")


def executed(shape: Shape, target: str) -> list[Any]:
    return list(simulated_counts(shape, target, "bf16"))


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    ("shape", "rows"), [(Shape(100352, 64, 128), 1280), (Shape(6272, 512, 512), 384)], ids=["grouped", "wide"]
)
def test_a_third_size_executes_what_two_predict(
    target: str, shape: Shape, rows: int, compiled: Callable[..., Any]
) -> None:
    known = compiled(costs, shape, target)
    for kernel, tiles, counts in compiled(executed, shape.small(rows), target):
        for name, count in counts.items():
            own = known[kernel]
            predicted = tiles.number * own["tile"][name] + tiles.passes * own["pass"].get(name, 0)
            assert predicted == pytest.approx(count, rel=1e-6, abs=1e-6), (kernel, name)


def conflicts(target: str, D: int) -> float:
    """Return the part of the passes over shared memory that conflicts take, in the kernel with products."""
    (counts,) = (counts for _, _, counts in simulated_counts(Shape(512, D, 128), target, "bf16") if counts["tensor"])
    return float(counts["conflict bytes"] / counts["shared bytes"])


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_narrow_layers_with_many_filters_cause_no_bank_conflicts(target: str, compiled: Callable[..., float]) -> None:
    for D in (32, 64, 128):
        assert compiled(conflicts, target, D) == 0, D


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_the_record_has_the_costs_of_the_present_kernels(target: str, compiled: Callable[..., Any]) -> None:
    from benchmarks.roofline import load

    stored = load()["after"]["costs"][f"{target} bf16"]
    for shape in (Shape(100352, 128, 128), Shape(6272, 512, 512), Shape(16384, 64, 128, clouds=16)):
        for kernel, parts in compiled(costs, shape, target).items():
            for part, counts in parts.items():
                # Machine instructions are not the simulator's; winners are not those of the network.
                for name in ("tensor", "shared bytes", "barriers") if kernel != "receive_kernel" else ():
                    found = stored[shape.kind][kernel][part].get(name, 0)
                    assert found == pytest.approx(counts.get(name, 0), rel=1e-4, abs=1e-6), (kernel, part, name)
