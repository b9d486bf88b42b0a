"""Each barrier, fence and wait of a kernel, taken out in turn, is noticed or shown to be unneeded, also in outline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.ptx.families import SMALL, mutate, outlined

TARGETS = ("sm_80", "sm_90")
# Kernels with all kinds of ordering, which `make test` mutates; the longer run takes every family.
SHORT = (("pointwise 64", "bf16"), ("wide", "bf16"), ("edgeconv", "bf16"), ("krylov", "fp32"), ("tridiagonal", "fp32"))
LONG = tuple((name, dtype) for name, call in SMALL.items() for dtype in call.dtypes[-2:] if (name, dtype) not in SHORT)
# Kernels that do what a table says: the outline also takes ways that a call does not.
BY_TABLE = {"split_layers_kernel", "grouped_kernel", "sum_layers_kernel", "extend_kernel"}
# Of these a few must be reported in each kernel: what the simulator must not overlook.
NEEDED = {
    ("sm_80", "pointwise 64", "bf16"): {"bar.sync": 3, "cp.async.wait_group": 1},
    ("sm_90", "pointwise 64", "bf16"): {
        "bar.sync": 3, "cp.async.wait_group": 1, "wgmma.wait_group": 1, "wgmma.fence": 1, "fence.proxy.async": 1,
    },
    ("sm_80", "krylov", "fp32"): {"bar.sync": 8},
    ("sm_80", "tridiagonal", "fp32"): {"bar.sync": 6},
}  # fmt: skip


def assert_noticed(target: str, name: str, dtype: str, compiled: Callable[..., list]) -> None:
    found = compiled(mutate, target, name, dtype)
    assert [mutant for mutant in found if mutant.outcome not in ("reported", "unneeded")] == []
    assert all(mutant.reason for mutant in found)
    reported = Counter(mutant.instruction for mutant in found if mutant.outcome == "reported")
    for instruction, least in NEEDED.get((target, name, dtype), {}).items():
        assert reported[instruction] >= least, (instruction, reported)
    assert_found_in_outline(target, name, dtype, found, compiled)


def assert_found_in_outline(
    target: str, name: str, dtype: str, mutants: list[Any], compiled: Callable[..., list]
) -> None:
    """Check that the outline finds nothing in a call's kernels, and of their mutants what the simulator finds."""
    found, without = compiled(outlined, target, name, dtype)
    assert found == []
    for mutant, own in zip(mutants, without, strict=True):
        # The outline does not look at global memory, and sees branches that the call does not take.
        if "global memory" in mutant.reason or mutant.reason == "not executed in this case":
            continue
        if mutant.outcome == "reported":
            assert own, mutant
        elif mutant.kernel not in BY_TABLE:
            assert not own, (mutant, own)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("name", "dtype"), SHORT)
def test_a_missing_barrier_or_wait_is_noticed(
    name: str, dtype: str, target: str, compiled: Callable[..., list]
) -> None:
    assert_noticed(target, name, dtype, compiled)


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("name", "dtype"), LONG)
def test_a_missing_barrier_or_wait_of_any_family_is_noticed(
    name: str, dtype: str, target: str, compiled: Callable[..., list]
) -> None:
    assert_noticed(target, name, dtype, compiled)


def ordering(ptx: str) -> list[tuple[int, str]]:
    from s3d_fast.kernels.ptx.mutation import ordering_instructions

    return ordering_instructions(ptx)


def test_guards_and_long_names_hide_no_barrier(compiled: Callable[..., list]) -> None:
    lines = (
        "@%p1 bar.sync 0;",
        "barrier.cta.sync.aligned 0;",
        "@!%p2 \tfence.proxy.async.shared::cta;",
        "add.s32 %r1;",
    )
    found = compiled(ordering, "\t" + "\n\t".join(lines))
    assert found == [(1, "bar.sync"), (2, "barrier.cta.sync"), (3, "fence.proxy.async")]


def test_the_table_counts_every_mutant(compiled: Callable[..., list]) -> None:
    from s3d_fast.kernels.ptx.mutation import table

    found = compiled(mutate, "sm_80", "krylov", "fp32")
    header, _, *rows = table(found).splitlines()
    assert header.startswith("| kernel | target | instruction |")
    numbers = [[int(cell) for cell in row.split("|")[4:8]] for row in rows]
    assert sum(removed for removed, *_ in numbers) == len(found)
    assert all(removed == sum(outcomes) for removed, *outcomes in numbers)
