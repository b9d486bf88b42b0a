"""Every kernel family, compiled for sm_80 and sm_90 and executed in the simulator, agrees with the reference.

The numbers are compared with float64, and nothing may be found wrong: no race, no access outside of tensors, no
uninitialised register or memory. `pytest -m long tests/ptx` adds larger shapes, every width and every activation.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from _pytest.mark import ParameterSet

from tests.ptx.families import LARGE, SMALL, Call, Outcome, simulate

TARGETS = ("sm_80", "sm_90")

UNWAITED = "the last wgmma of an iteration still reads the buffer into which cp.async of this iteration copies"
MOVED = "accumulators are moved to other registers while wgmma adds to them"
UNFENCED = "accumulators get their first value after wgmma.fence"
# What is known to be wrong on sm_90: why -> call -> dtypes. What is repaired must be taken out.
KNOWN: dict[str, dict[str, tuple[str, ...]]] = {
    UNWAITED: {
        "pointwise 16": ("bf16",),
        "pointwise 64": ("bf16",),
        "pointwise 64 high": ("fp32",),
        "pointwise 64 medium": ("bf16", "fp16"),
        "grouped high": ("fp32",),
        "grouped medium": ("bf16", "fp16"),
        "pointwise 16 long": ("bf16",),
        "pointwise 64 long": ("bf16",),
        "pointwise 16 long high": ("fp32",),
        "pointwise 16 long medium": ("bf16", "fp16"),
        "pointwise 64 long high": ("fp32",),
        "pointwise 64 long medium": ("bf16", "fp16"),
        "pointwise 128 long high": ("fp32",),
        "pointwise 128 long medium": ("bf16", "fp16"),
        "pointwise 3 general long high": ("fp32",),
        "pointwise 65 general long high": ("fp32",),
        "wide general long high": ("fp32",),
        "grouped long high": ("fp32",),
        "grouped long medium": ("bf16", "fp16"),
    },
    MOVED: {
        "edgeconv high": ("fp32",),
        "edgeconv long high": ("fp32",),
        "edgeconv general long high": ("fp32",),
    },
    UNFENCED: {
        "pointwise 17 general long high": ("fp32",),
        "pointwise 17 general long medium": ("bf16", "fp16"),
    },
}


def known_fault(target: str, name: str, dtype: str) -> str:
    """Return why a call is known to be wrong; empty if it is not."""
    return next((why for why, calls in KNOWN.items() if target == "sm_90" and dtype in calls.get(name, ())), "")


class FoundWrong(Exception):
    """The numbers are right, but the simulator has found something."""


def cases(calls: dict[str, Call]) -> list[ParameterSet]:
    """Return every call on every target, for every dtype that makes a difference."""
    return [
        parameters(target, name, dtype) for target in TARGETS for name, call in calls.items() for dtype in call.dtypes
    ]


def parameters(target: str, name: str, dtype: str) -> ParameterSet:
    reason = known_fault(target, name, dtype)
    marks = [pytest.mark.xfail(raises=FoundWrong, reason=reason, strict=True)] if reason else []
    return pytest.param(target, name, dtype, id=f"{target}-{name.replace(' ', '_')}-{dtype}", marks=marks)


def assert_clean(outcome: Outcome) -> None:
    if outcome.findings:
        raise FoundWrong("\n".join(outcome.findings))


@pytest.mark.parametrize(("target", "name", "dtype"), cases(SMALL))
def test_small_shapes_agree_and_nothing_is_found(
    target: str, name: str, dtype: str, compiled: Callable[..., Outcome]
) -> None:
    assert_clean(compiled(simulate, target, name, dtype))


@pytest.mark.long
@pytest.mark.parametrize(("target", "name", "dtype"), cases(LARGE))
def test_larger_shapes_agree_and_nothing_is_found(
    target: str, name: str, dtype: str, compiled: Callable[..., Outcome]
) -> None:
    assert_clean(compiled(simulate, target, name, dtype))


def test_what_is_known_to_be_wrong_is_among_the_cases() -> None:
    every = SMALL | LARGE
    assert all(set(dtypes) <= set(every[name].dtypes) for calls in KNOWN.values() for name, dtypes in calls.items())


# The compiler contracts a product and the first step of a sum over threads, so that threads differ in the last bit.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("krylov", "fp32"), ("krylov", "fp64"), ("pointwise atomic", "fp64"), ("grouped general", "fp64")],
)
def test_sums_over_threads_are_ambiguous_only_by_rounding(
    name: str, dtype: str, compiled: Callable[..., Outcome]
) -> None:
    outcome = compiled(simulate, "sm_80", name, dtype)
    assert outcome.findings == []
    assert all("differ by rounding to one place in shared memory" in line for line in outcome.ambiguities)
    assert outcome.ambiguities
