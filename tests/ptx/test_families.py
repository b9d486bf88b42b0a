"""Every kernel family, compiled for sm_80 and executed in the simulator, agrees with the reference.

The numbers are compared with float64, and nothing may be found wrong: no race, no access outside of tensors, no
uninitialised register or memory. `pytest -m long tests/ptx` adds larger shapes, every width and every activation. The
code for sm_90 is in `test_families_on_hopper.py`: two files run on two cores.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.ptx.families import LARGE, SMALL, Outcome, assert_clean, cases, simulate


@pytest.mark.parametrize(("target", "name", "dtype"), cases("sm_80", SMALL))
def test_small_shapes_agree_and_nothing_is_found(
    target: str, name: str, dtype: str, compiled: Callable[..., Outcome]
) -> None:
    assert_clean(compiled(simulate, target, name, dtype))


@pytest.mark.long
@pytest.mark.parametrize(("target", "name", "dtype"), cases("sm_80", LARGE))
def test_larger_shapes_agree_and_nothing_is_found(
    target: str, name: str, dtype: str, compiled: Callable[..., Outcome]
) -> None:
    assert_clean(compiled(simulate, target, name, dtype))


# The compiler contracts a product and the first step of a sum over threads, so that threads differ in the last bit.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("krylov", "fp32"), ("krylov", "fp64")],
)
def test_sums_over_threads_are_ambiguous_only_by_rounding(
    name: str, dtype: str, compiled: Callable[..., Outcome]
) -> None:
    outcome = compiled(simulate, "sm_80", name, dtype)
    assert outcome.findings == []
    assert all("differ by rounding to one place in shared memory" in line for line in outcome.ambiguities)
    assert outcome.ambiguities
