"""Caps and budgets: plans stay within them, and no other plan within them is better."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import s3d_fast as s3d
from tests.splitting.test_selection import (
    all_choices,
    best_gain,
    conv_graph,
    gain_table,
    mlp_graph,
    negative,
    random_spectra,
)

Copies = int | str


@pytest.mark.parametrize("cost", ["filters", "params", "macs"])
@pytest.mark.parametrize(("m", "caps", "most"), [(4, 2, 0), (4, 1, 0), (3, 1, 0), (4, 4, 3), (4, 5, 3), (3, 3, 2)])
def test_a_cap_is_rounded_down_to_whole_splits(m: int, caps: int, most: int, cost: str) -> None:
    graph = mlp_graph(4, 4)
    spectra = negative(graph, [[-4.0, -1.0, -3.0, -2.0], [-1.0, -2.0, -3.0, -4.0]])
    for relax in (False, True):
        plan = s3d.select(spectra, graph, m=m, c=1, caps=caps, budget=10**6, cost=cost, relax=relax)
        assert all(width - 4 <= caps for width in plan.widths().values())
        if not relax:
            assert plan.widths() == {"layers.0": 4 + most, "layers.2": 4 + most}


def test_a_unit_that_cannot_grow_leaves_the_budget_to_others() -> None:
    graph = mlp_graph(2, 2)
    spectra = negative(graph, [[-9.0, -8.0], [-2.0, -1.0]])
    plan = s3d.select(spectra, graph, m=4, c=1, caps={"layers.0": 2}, budget=3)
    assert plan.widths() == {"layers.0": 2, "layers.2": 5}


def added_cost(graph: s3d.Graph, cost: str, growth: np.ndarray) -> np.ndarray:
    """Return the cost that each row of `growth`, new filters per unit, adds according to `count`."""
    rows, place = np.unique(growth, axis=0, return_inverse=True)
    if cost == "filters":
        return growth.sum(1)
    before, widths = s3d.count(graph), graph.widths()
    found = []
    for row in rows.tolist():
        grown = {name: width + more for (name, width), more in zip(widths.items(), row, strict=True)}
        found.append(getattr(s3d.count(graph, grown) - before, cost))
    return np.array(found)[place.reshape(-1)]


GRAPHS: dict[str, Callable[[], s3d.Graph]] = {
    "mlp-2-4": lambda: mlp_graph(2, 4),
    "mlp-2-2-2": lambda: mlp_graph(2, 2, 2),
    "conv-2-3": lambda: conv_graph(2, 3),
    "mlp-5": lambda: mlp_graph(5),
}


@pytest.mark.parametrize("m", [2, 3, 4, "knapsack"])
@pytest.mark.parametrize("cost", ["filters", "params", "macs"])
@pytest.mark.parametrize("kind", GRAPHS)
def test_a_plan_is_the_best_of_all_within_caps_and_budget(kind: str, cost: str, m: Copies) -> None:
    graph = GRAPHS[kind]()
    copies, growth = all_choices(graph)
    price = added_cost(graph, cost, growth)
    rng = np.random.default_rng(list(GRAPHS).index(kind))
    for _ in range(8):
        spectra, c = random_spectra(graph, rng), float(rng.choice([1, 1.3, 3]))
        budget = int(price.max() * rng.random() ** 2)
        each = {name: int(rng.integers(0, 7)) for name in graph.units if rng.random() < 0.7}
        caps: int | dict[str, int] | None = [None, int(rng.integers(0, 7)), each][int(rng.integers(3))]
        cap = [(caps.get(name, 99) if isinstance(caps, dict) else 99 if caps is None else caps) for name in graph.units]
        allowed = (price <= budget) & (growth <= cap).all(1)
        if m != "knapsack":
            allowed &= np.isin(copies, (1, m)).all(1)
        best = best_gain(np.minimum(gain_table(graph, spectra, c), 0), copies, allowed)
        for relax in (False, True):
            plan = s3d.select(spectra, graph, m=m, c=c, cost=cost, budget=budget, caps=caps, relax=relax)
            grown = np.array([[plan.widths()[unit.name] - unit.width for unit in graph]])
            assert (grown <= cap).all(), (caps, grown)
            assert added_cost(graph, cost, grown)[0] <= budget
            assert plan.gain >= best - 1e-9
            if not relax:
                assert plan.gain == pytest.approx(best, abs=1e-6)


def test_ties_go_to_the_first_unit_only_within_the_budget() -> None:
    graph = mlp_graph(7, 7)
    # In floating point, 3 x 0.1 + 4 x 0.1 is 0.7, and 7 x 0.1 is a little more.
    spectra = negative(graph, [[-1.0] * 7, [-1.0] * 7])
    for budget in np.arange(1, 14) / 10:
        plan = s3d.select(spectra, graph, c=1, budget=float(budget), cost=lambda unit: 0.1)
        grown = np.array([plan.widths()[name] - 7 for name in graph.units], dtype=np.float64)
        assert np.full(2, 0.1) @ grown <= budget
