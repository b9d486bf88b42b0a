"""Random networks on feature maps: every one is preserved by splits of size zero, or refused with a reason."""

from __future__ import annotations

import pytest

from tests.random_networks import check_random_networks


def test_random_networks_are_preserved_or_refused_and_most_have_units() -> None:
    check_random_networks(range(670), "map")


@pytest.mark.long
def test_many_random_networks_are_preserved_or_refused() -> None:
    check_random_networks(range(670, 7670), "map")
