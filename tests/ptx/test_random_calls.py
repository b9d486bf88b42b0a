"""Random calls of all operations, compiled for sm_80 and sm_90 and executed in the simulator, agree with the reference.

A few run always, 400 with `pytest -m long`; S3D_RANDOM_CALLS=FIRST:END takes others of these.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.ptx.families import Outcome, assert_clean
from tests.ptx.random_calls import drawn, simulate_drawn

TARGETS = ("sm_80", "sm_90")
FEW = range(4)
MANY = range(*map(int, os.environ.get("S3D_RANDOM_CALLS", "4:204").split(":")))


def agrees(target: str, seed: int, compiled: Callable[..., Outcome]) -> None:
    print(drawn(seed).name)
    assert_clean(compiled(simulate_drawn, target, seed))


@pytest.mark.parametrize("seed", FEW)
@pytest.mark.parametrize("target", TARGETS)
def test_a_few_random_calls_agree(target: str, seed: int, compiled: Callable[..., Outcome]) -> None:
    agrees(target, seed, compiled)


@pytest.mark.long
@pytest.mark.parametrize("seed", MANY)
@pytest.mark.parametrize("target", TARGETS)
def test_random_calls_agree(target: str, seed: int, compiled: Callable[..., Outcome]) -> None:
    agrees(target, seed, compiled)
