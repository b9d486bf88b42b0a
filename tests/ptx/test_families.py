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

UNWAITED = "the second wgmma of an iteration still reads the buffer into which cp.async of this iteration copies"
MOVED = "accumulators are moved to other registers while wgmma adds to them"
# What is known to be wrong in a kernel: (target, call, dtype) -> why. An entry that is repaired must be taken out.
KNOWN: dict[tuple[str, str, str], str] = {
    ("sm_90", "pointwise 16", "bf16"): UNWAITED,
    ("sm_90", "pointwise 64", "bf16"): UNWAITED,
    ("sm_90", "pointwise 64 high", "fp32"): UNWAITED,
    ("sm_90", "pointwise 64 medium", "bf16"): UNWAITED,
    ("sm_90", "pointwise 64 medium", "fp16"): UNWAITED,
    ("sm_90", "grouped high", "fp32"): UNWAITED,
    ("sm_90", "grouped medium", "bf16"): UNWAITED,
    ("sm_90", "grouped medium", "fp16"): UNWAITED,
    ("sm_90", "edgeconv high", "fp32"): MOVED,
}


class FoundWrong(Exception):
    """The numbers are right, but the simulator has found something."""


def cases(calls: dict[str, Call]) -> list[ParameterSet]:
    """Return every call on every target, for every dtype that makes a difference."""
    return [
        parameters(target, name, dtype) for target in TARGETS for name, call in calls.items() for dtype in call.dtypes
    ]


def parameters(target: str, name: str, dtype: str) -> ParameterSet:
    reason = KNOWN.get((target, name, dtype))
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
    calls = SMALL | LARGE
    assert all(target in TARGETS and dtype in calls[name].dtypes for target, name, dtype in KNOWN)


# The compiler contracts a product and the first step of a sum over threads, so that threads differ in the last bit.
@pytest.mark.parametrize(("name", "dtype"), [("krylov", "fp32"), ("krylov", "fp64"), ("pointwise general", "fp64")])
def test_sums_over_threads_are_ambiguous_only_by_rounding(
    name: str, dtype: str, compiled: Callable[..., Outcome]
) -> None:
    outcome = compiled(simulate, "sm_80", name, dtype)
    assert outcome.findings == []
    assert all("differ by rounding to one place in shared memory" in line for line in outcome.ambiguities)
    assert outcome.ambiguities
