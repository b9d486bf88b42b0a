"""Random networks on feature maps: every one is preserved by splits of size zero, or refused with a reason."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.random_networks import check_random_network

QUIET = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@settings(QUIET, max_examples=660)
@given(st.randoms(use_true_random=False))
def test_random_networks_are_preserved_or_refused(draw: random.Random) -> None:
    check_random_network(draw, "map")


def test_most_random_networks_have_units() -> None:
    found = [check_random_network(random.Random(seed), "map") for seed in range(40)]
    assert sum(count > 0 for count in found) >= 20


@pytest.mark.long
@settings(QUIET, max_examples=7000)
@given(st.randoms(use_true_random=False))
def test_many_random_networks_are_preserved_or_refused(draw: random.Random) -> None:
    check_random_network(draw, "map")
