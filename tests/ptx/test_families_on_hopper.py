"""Every kernel family, compiled for sm_90 and executed in the simulator: see `test_families.py`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.ptx.families import LARGE, SMALL, Outcome, assert_clean, cases, simulate


@pytest.mark.parametrize(("target", "name", "dtype"), cases("sm_90", SMALL))
def test_small_shapes_agree_and_nothing_is_found(
    target: str, name: str, dtype: str, compiled: Callable[..., Outcome]
) -> None:
    assert_clean(compiled(simulate, target, name, dtype))


@pytest.mark.long
@pytest.mark.parametrize(("target", "name", "dtype"), cases("sm_90", LARGE))
def test_larger_shapes_agree_and_nothing_is_found(
    target: str, name: str, dtype: str, compiled: Callable[..., Outcome]
) -> None:
    assert_clean(compiled(simulate, target, name, dtype))
