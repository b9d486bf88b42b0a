"""Selection: the chosen splits are the best within the limits, at their true cost."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

import s3d_fast as s3d
from s3d_fast.models.mlp import MLP
from s3d_fast.network import costs
from tests.model_cases import net

Ends = tuple[Sequence[float], Sequence[float]]
reproducible = settings(max_examples=60, deadline=None, derandomize=True, database=None)
# Gains are sums of a few float64 numbers of order one.
SLACK = 1e-9


class ConvNet(nn.Module):
    """A convolution, a depthwise convolution with BatchNorm, a pointwise convolution, and a classifier."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, first, 3, padding=1)
        self.depthwise = nn.Conv2d(first, first, 3, padding=1, groups=first, bias=False)
        self.norm = nn.BatchNorm2d(first)
        self.second = nn.Conv2d(first, second, 1)
        self.head = nn.Linear(second, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.silu(self.first(x))
        x = torch.nn.functional.silu(self.norm(self.depthwise(x)))
        x = torch.nn.functional.silu(self.second(x))
        return self.head(x.mean((2, 3)))


@functools.cache
def mlp_graph(*hidden: int) -> s3d.Graph:
    return s3d.trace(MLP([3, *hidden, 2]), torch.zeros(2, 3))


def conv_graph(first: int, second: int) -> s3d.Graph:
    return s3d.trace(ConvNet(first, second), torch.zeros(1, 2, 6, 6))


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def made_up(graph: s3d.Graph, ends: Mapping[str, Ends], dtype: torch.dtype = torch.float64) -> dict[str, s3d.Spectrum]:
    """Return spectra with the given smallest and largest eigenvalues per unit; the eigenvectors are axes."""
    spectra = {}
    for name, (low, high) in ends.items():
        unit = graph.units[name]
        axes = torch.eye(unit.fan_in, dtype=dtype)
        count = torch.zeros(unit.width, dtype=torch.int64)
        spectra[name] = s3d.Spectrum(
            lambda_min=torch.tensor(low, dtype=dtype),
            v_min=axes[0].repeat(unit.width, 1),
            lambda_max=torch.tensor(high, dtype=dtype),
            v_max=axes[1].repeat(unit.width, 1),
            residual_min=torch.zeros(unit.width, dtype=dtype),
            residual_max=torch.zeros(unit.width, dtype=dtype),
            converged=torch.ones(unit.width, dtype=torch.bool),
            iterations=count,
            matvecs=count,
        )
    return spectra


def negative(graph: s3d.Graph, gains: Sequence[Sequence[float]]) -> dict[str, s3d.Spectrum]:
    """Return spectra with the given gains at m = 2 and c = 1: all eigenvalues of a neuron equal its gain."""
    return made_up(graph, {name: (row, row) for name, row in zip(graph.units, gains, strict=True)})


def random_spectra(graph: s3d.Graph, rng: np.random.Generator) -> dict[str, s3d.Spectrum]:
    """Return spectra of all kinds: indefinite, definite, and zero."""
    ends = {}
    for unit in graph:
        pair = np.sort(rng.normal(size=(2, unit.width)), axis=0) * rng.exponential(size=unit.width)
        pair[:, rng.random(unit.width) < 0.1] = 0
        ends[unit.name] = (pair[0].tolist(), pair[1].tolist())
    return made_up(graph, ends)


def chosen(plan: s3d.SplitPlan) -> dict[tuple[str, int], int]:
    """Return the number of copies of every split neuron; assert that no neuron is split twice."""
    found = {(split.unit, split.neuron): split.copies for split in plan.splits}
    assert len(found) == len(plan) == len(plan.splits)
    return found


def gain_table(graph: s3d.Graph, spectra: Mapping[str, s3d.Spectrum], c: float) -> NDArray[np.float64]:
    """Return the gain of every neuron for 1, 2, 3 and 4 copies: (neurons, 4)."""
    low = torch.cat([spectra[name].lambda_min for name in graph.units])
    high = torch.cat([spectra[name].lambda_max for name in graph.units])
    columns = [torch.zeros_like(low)] + [s3d.split_gain(low, high, m, c) for m in (2, 3, 4)]
    return torch.stack(columns, 1).numpy()


def all_choices(graph: s3d.Graph) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return every choice of 1 to 4 copies per neuron, (choices, neurons), and the new filters, (choices, units)."""
    widths = list(graph.widths().values())
    copies = np.indices((4,) * sum(widths)).reshape(sum(widths), -1).T + 1
    parts = np.split(copies - 1, np.cumsum(widths)[:-1], axis=1)
    return copies, np.stack([part.sum(1) for part in parts], 1)


def best_gain(table: NDArray[np.float64], copies: NDArray[np.int64], allowed: NDArray[np.bool_]) -> float:
    gains = table[np.arange(len(table)), copies - 1].sum(1)
    return float(gains[allowed].min())


@pytest.mark.parametrize("top_k", [0, 1, 2, 5, 6, 100])
@pytest.mark.parametrize("m", [2, 3, 4])
def test_top_k_takes_the_largest_gains(top_k: int, m: int) -> None:
    graph = mlp_graph(4, 5)
    subsets = np.indices((2,) * 9).reshape(9, -1).T
    for seed in range(10):
        spectra = random_spectra(graph, np.random.default_rng(seed))
        plan = s3d.select(spectra, graph, m=m, c=1.3, top_k=top_k)
        gains = gain_table(graph, spectra, 1.3)[:, m - 1]
        best = float((subsets @ gains)[subsets.sum(1) <= top_k].min())
        assert set(chosen(plan).values()) <= {m}
        assert len(plan) <= top_k
        assert plan.gain == pytest.approx(best, abs=SLACK)


@given(st.lists(st.floats(-5, 5, allow_subnormal=False), min_size=7, max_size=7), st.integers(0, 8), st.floats(0, 2))
@reproducible
def test_any_top_k_takes_the_first_of_the_neurons_sorted_by_gain(gains: list[float], k: int, threshold: float) -> None:
    graph = mlp_graph(3, 4)
    plan = s3d.select(negative(graph, [gains[:3], gains[3:]]), graph, m=2, c=1, top_k=k, threshold=threshold)
    names = [("layers.0", j) for j in range(3)] + [("layers.2", j) for j in range(4)]
    # Python's sort is stable: equal gains stay in the order of the units, then of the neurons.
    order = sorted((gain, place) for place, gain in enumerate(gains) if gain < -threshold)
    assert set(chosen(plan)) == {names[place] for _, place in order[:k]}


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5, 1, 1.0])
def test_a_fraction_is_a_share_of_all_neurons(fraction: float) -> None:
    graph = mlp_graph(8, 12)
    spectra = negative(graph, [[-1 - j / 8 for j in range(8)], [-1 - j / 12 for j in range(12)]])
    plan = s3d.select(spectra, graph, c=1, fraction=fraction)
    assert len(plan) == fraction * 20
    assert chosen(plan) == chosen(s3d.select(spectra, graph, c=1, top_k=round(fraction * 20)))


@pytest.mark.parametrize(("unit", "count"), [("layers.0", 3), ("layers.2", 2)])
def test_a_fraction_is_a_share_of_the_neurons_with_a_spectrum(unit: str, count: int) -> None:
    graph = mlp_graph(6, 4)
    spectra = {unit: negative(graph, [[-1.0, -5.0, -3.0, -2.0, -4.0, -0.5], [-1.0, -3.0, -2.0, -4.0]])[unit]}
    plan = s3d.select(spectra, graph, c=1, fraction=0.5)
    assert len(plan) == count
    assert chosen(plan) == chosen(s3d.select(spectra, graph, c=1, top_k=count))
    assert {split.unit for split in plan.splits} == {unit}
    # Without a limit, all neurons with a spectrum are split, and no others.
    every = graph.widths() | {unit: 4 * count}
    assert s3d.select(spectra, graph, c=1).widths() == s3d.select(spectra, graph, c=1, fraction=1.0).widths() == every


def test_without_a_limit_every_neuron_that_gains_is_split() -> None:
    graph = mlp_graph(4)
    plan = s3d.select(negative(graph, [[-1.0, 0.5, -1e-30, 0.0]]), graph, c=1)
    assert set(chosen(plan)) == {("layers.0", 0), ("layers.0", 2)}
    assert chosen(s3d.select({}, graph)) == {}


@pytest.mark.parametrize(
    "limit",
    [
        {},
        {"top_k": 6},
        {"fraction": 1.0},
        {"budget": 1e6},
        {"budget": 1e6, "cost": "params"},
        {"budget": 1e6, "cost": "macs"},
        {"budget": 1e6, "m": "knapsack"},
        {"budget": 1e6, "m": "knapsack", "relax": True},
    ],
    ids=str,
)
def test_neurons_without_gain_are_never_chosen(limit: dict[str, Any]) -> None:
    graph = mlp_graph(3, 3)
    # Neuron 0 has a positive spectrum, which c = 1 cannot use; neuron 1 has S = 0; neuron 2 gains.
    ends = ([0.5, 0.0, -1.0], [2.0, 0.0, 1.0])
    plan = s3d.select(made_up(graph, dict.fromkeys(graph.units, ends)), graph, c=1, **limit)
    assert set(chosen(plan)) == {("layers.0", 2), ("layers.2", 2)}
    nothing = made_up(graph, dict.fromkeys(graph.units, ([0.0, 0.5, 0.0], [0.0, 1.0, 3.0])))
    assert len(s3d.select(nothing, graph, c=1, **limit)) == 0


@pytest.mark.parametrize("limit", [{}, {"top_k": 4}, {"budget": 10}], ids=str)
def test_a_gain_must_be_below_the_threshold(limit: dict[str, Any]) -> None:
    graph = mlp_graph(4)
    spectra = negative(graph, [[-0.5, -1.0, -2.0, -0.25]])
    for threshold, neurons in [(0, {0, 1, 2, 3}), (0.25, {0, 1, 2}), (0.3, {0, 1, 2}), (1.0, {2}), (2.0, set())]:
        plan = s3d.select(spectra, graph, c=1, threshold=threshold, **limit)
        assert {neuron for _, neuron in chosen(plan)} == neurons


@pytest.mark.parametrize("limit", [{}, {"fraction": 1.0}, {"budget": 100}], ids=str)
@pytest.mark.parametrize("m", [2, 3])
def test_caps_bound_the_new_filters_of_a_unit(limit: dict[str, Any], m: int) -> None:
    graph = mlp_graph(4, 4)
    spectra = negative(graph, [[-4.0, -1.0, -3.0, -2.0], [-1.0, -2.0, -3.0, -4.0]])
    for caps, split in [
        (4, {"layers.0": 4 // (m - 1), "layers.2": 4 // (m - 1)}),
        (3, {"layers.0": 3 // (m - 1), "layers.2": 3 // (m - 1)}),
        (0, {"layers.0": 0, "layers.2": 0}),
        ({"layers.2": 2}, {"layers.0": 4, "layers.2": 2 // (m - 1)}),
        ({"layers.2": 0, "layers.0": 1}, {"layers.0": 1 // (m - 1), "layers.2": 0}),
    ]:
        plan = s3d.select(spectra, graph, m=m, c=1.0001, caps=caps, **limit)
        found = chosen(plan)
        # Within a unit, the caps keep the best neurons.
        best = {"layers.0": [0, 2, 3, 1], "layers.2": [3, 2, 1, 0]}
        assert set(found) == {(name, neuron) for name, count in split.items() for neuron in best[name][:count]}


def test_the_knapsack_stays_within_the_caps() -> None:
    graph = mlp_graph(3, 3)
    copies, added = all_choices(graph)
    for seed in range(20):
        spectra = random_spectra(graph, np.random.default_rng(seed))
        caps = {"layers.0": 2, "layers.2": 3}
        plan = s3d.select(spectra, graph, m="knapsack", c=2, budget=4, caps=caps)
        allowed = (added.sum(1) <= 4) & (added <= [2, 3]).all(1)
        assert plan.gain == pytest.approx(best_gain(gain_table(graph, spectra, 2), copies, allowed), abs=SLACK)
        assert all(plan.widths()[name] - 3 <= cap for name, cap in caps.items())


@pytest.mark.parametrize("round_to", [1, 2, 4, 8])
@pytest.mark.parametrize("m", [2, 3])
def test_widths_are_rounded_by_dropping_the_smallest_gains(round_to: int, m: int) -> None:
    graph = mlp_graph(6, 5)
    for seed in range(10):
        spectra = random_spectra(graph, np.random.default_rng(seed))
        free = chosen(s3d.select(spectra, graph, m=m, c=1.5))
        plan = s3d.select(spectra, graph, m=m, c=1.5, round_to=round_to)
        gains = dict(zip(graph.units, np.split(gain_table(graph, spectra, 1.5)[:, m - 1], [6]), strict=True))
        for name, before in graph.widths().items():
            after = plan.widths()[name]
            assert after == before or after % round_to == 0
            available = sorted(gains[name][neuron] for unit, neuron in free if unit == name)
            kept = sorted(gains[name][neuron] for unit, neuron in chosen(plan) if unit == name)
            # The best neurons of the unit are kept, as many as possible.
            most = max(k for k in range(len(available) + 1) if k == 0 or (before + k * (m - 1)) % round_to == 0)
            assert kept == available[:most]


@pytest.mark.parametrize("limit", [{"top_k": 3}, {"fraction": 3 / 7}, {"budget": 3}, {"budget": 3, "m": "knapsack"}])
@pytest.mark.parametrize("gain", [-1.0, -1e-8, -1e8])
def test_ties_go_to_the_first_unit_and_the_lowest_index(limit: dict[str, Any], gain: float) -> None:
    graph = mlp_graph(2, 5)
    spectra = negative(graph, [[gain] * 2, [gain] * 5])
    # The order of the spectra must not matter.
    for order in (spectra, dict(reversed(spectra.items()))):
        plan = s3d.select(order, graph, c=1, **limit)
        assert set(chosen(plan)) == {("layers.0", 0), ("layers.0", 1), ("layers.2", 0)}


def test_a_selection_can_be_repeated() -> None:
    graph = conv_graph(5, 6)
    spectra = random_spectra(graph, np.random.default_rng(0))
    for options in ({"top_k": 4}, {"budget": 300, "cost": "params", "m": "knapsack"}):
        first, second = (s3d.select(spectra, graph, **options) for _ in range(2))
        assert chosen(first) == chosen(second)


@pytest.mark.parametrize("m", [2, 3, 4])
@pytest.mark.parametrize("c", [1, 1.3, 3])
def test_a_plan_holds_the_optimal_split_of_every_neuron(m: int, c: float) -> None:
    graph = mlp_graph(4, 3)
    spectra = random_spectra(graph, np.random.default_rng(m))
    plan = s3d.select(spectra, graph, m=m, c=c)
    for split in plan.splits:
        spectrum = spectra[split.unit]
        wanted = s3d.optimal_split(
            *(
                part[split.neuron]
                for part in (spectrum.lambda_min, spectrum.v_min, spectrum.lambda_max, spectrum.v_max)
            ),
            m,
            c,
        )
        torch.testing.assert_close(split.weights, wanted.weights, rtol=0, atol=1e-12)
        torch.testing.assert_close(split.offsets, wanted.offsets, rtol=0, atol=1e-12)
        assert split.gain == pytest.approx(float(wanted.gain), rel=1e-12)
        assert split.gain < 0
    assert plan.gain == pytest.approx(gain_table(graph, spectra, c)[:, m - 1].sum(), abs=SLACK)
    assert plan.predicted_change(0.1) == pytest.approx(0.005 * plan.gain)


def test_a_plan_reports_widths_cost_and_gain() -> None:
    graph = mlp_graph(4, 3)
    spectra = negative(graph, [[-1.0, -1.0, 1.0, 1.0], [-2.0, 1.0, 1.0]])
    plan = s3d.select(spectra, graph, m=3, c=1)
    assert plan.widths() == {"layers.0": 8, "layers.2": 5}
    assert plan.added().params == parameters(MLP([3, 8, 5, 2])) - parameters(MLP([3, 4, 3, 2]))
    assert plan.added().macs == (3 * 8 + 8 * 5 + 5 * 2) - (3 * 4 + 4 * 3 + 3 * 2)
    assert plan.gain == pytest.approx(-4.0)
    lines = {line.split()[0]: line.split()[1:] for line in str(plan).splitlines() if line.strip()}
    assert lines["layers.0"][:3] == ["4", "8", "-2"]
    assert lines["layers.2"][:3] == ["3", "5", "-2"]
    assert lines["all"][:3] == ["7", "13", "-4"]
    # A unit that does not grow has no line.
    alone = s3d.select(spectra, graph, m=2, c=1, caps={"layers.0": 0})
    assert not any(line.startswith("layers.0") for line in str(alone).splitlines())


def test_a_plan_predicts_the_parameters_of_grown_convolutions() -> None:
    graph = conv_graph(4, 5)
    plan = s3d.select(random_spectra(graph, np.random.default_rng(1)), graph, c=1.3)
    before, after = graph.widths(), plan.widths()
    assert sum(after.values()) > sum(before.values())
    assert plan.added().params == parameters(ConvNet(*after.values())) - parameters(ConvNet(*before.values()))


@pytest.mark.parametrize("c", [1, 1.3, 3])
@pytest.mark.parametrize("budget", [0, 1, 2, 3, 5, 7.5, 18, 100])
def test_the_knapsack_over_filters_is_the_best_of_all_choices(c: float, budget: float) -> None:
    graph = mlp_graph(2, 4)
    copies, added = all_choices(graph)
    for seed in range(8):
        spectra = random_spectra(graph, np.random.default_rng(seed))
        plan = s3d.select(spectra, graph, m="knapsack", c=c, budget=budget)
        table = gain_table(graph, spectra, c)
        assert sum(copies - 1 for copies in chosen(plan).values()) <= budget
        assert plan.gain == pytest.approx(best_gain(table, copies, added.sum(1) <= budget), abs=SLACK)


@pytest.mark.parametrize("m", [2, 3, 4])
def test_a_budget_for_one_m_is_the_best_of_all_choices(m: int) -> None:
    graph = mlp_graph(2, 4)
    copies, added = all_choices(graph)
    for seed in range(10):
        spectra = random_spectra(graph, np.random.default_rng(seed))
        plan = s3d.select(spectra, graph, m=m, c=1.3, budget=7)
        allowed = np.isin(copies, (1, m)).all(1) & (added.sum(1) <= 7)
        assert plan.gain == pytest.approx(best_gain(gain_table(graph, spectra, 1.3), copies, allowed), abs=SLACK)


def test_the_knapsack_takes_prices_from_a_function() -> None:
    graph = mlp_graph(3, 3)
    copies, added = all_choices(graph)
    prices = {"layers.0": 2.5, "layers.2": 1.0}
    for seed in range(15):
        spectra = random_spectra(graph, np.random.default_rng(seed))
        plan = s3d.select(spectra, graph, m="knapsack", c=2, budget=6, cost=lambda unit: prices[unit.name])
        allowed = added @ list(prices.values()) <= 6
        assert plan.gain == pytest.approx(best_gain(gain_table(graph, spectra, 2), copies, allowed), abs=SLACK)


def mlp_params(added: NDArray[np.int64], first: int, second: int) -> NDArray[np.int64]:
    """Return the parameters that new filters add to MLP([3, first, second, 2]), for every choice."""
    w, v = first + added[:, 0], second + added[:, 1]
    return (4 * w + (w + 1) * v + 2 * (v + 1)) - (4 * first + (first + 1) * second + 2 * (second + 1))


def mlp_macs(added: NDArray[np.int64], first: int, second: int) -> NDArray[np.int64]:
    w, v = first + added[:, 0], second + added[:, 1]
    return (3 * w + w * v + 2 * v) - (3 * first + first * second + 2 * second)


@pytest.mark.parametrize("cost", ["params", "macs"])
@pytest.mark.parametrize("budget", [0, 6, 7, 20, 35, 60, 120, 1000])
def test_the_true_cost_stays_within_the_budget(cost: str, budget: int) -> None:
    graph = mlp_graph(3, 3)
    count = mlp_params if cost == "params" else mlp_macs
    for seed in range(10):
        spectra = random_spectra(graph, np.random.default_rng(seed))
        for relax in (False, True):
            plan = s3d.select(spectra, graph, m="knapsack", c=2, budget=budget, cost=cost, relax=relax)
            growth = np.array([[plan.widths()[name] - 3 for name in graph.units]])
            assert int(count(growth, 3, 3)[0]) <= budget
            assert getattr(plan.added(), cost) == int(count(growth, 3, 3)[0])


@pytest.mark.parametrize("cost", ["params", "macs"])
def test_the_knapsack_is_the_best_of_all_choices_where_one_layer_grows(cost: str) -> None:
    graph = mlp_graph(4, 2)
    copies, added = all_choices(graph)
    count = mlp_params if cost == "params" else mlp_macs
    for seed, budget in itertools.product(range(5), (6, 13, 21, 40)):
        spectra = random_spectra(graph, np.random.default_rng(seed))
        spectra["layers.2"] = made_up(graph, {"layers.2": ([0.0] * 2, [0.0] * 2)})["layers.2"]
        plan = s3d.select(spectra, graph, m="knapsack", c=2, budget=budget, cost=cost)
        allowed = count(added, 4, 2) <= budget
        assert plan.gain == pytest.approx(best_gain(gain_table(graph, spectra, 2), copies, allowed), abs=SLACK)


@pytest.mark.parametrize("cost", ["params", "macs"])
def test_the_knapsack_is_the_best_of_all_choices_where_neighbours_grow(cost: str) -> None:
    graph = mlp_graph(3, 3)
    copies, added = all_choices(graph)
    count = mlp_params if cost == "params" else mlp_macs
    for seed, budget in itertools.product(range(5), (20, 35, 60, 120)):
        spectra = random_spectra(graph, np.random.default_rng(seed))
        plan = s3d.select(spectra, graph, m="knapsack", c=2, budget=budget, cost=cost)
        allowed = count(added, 3, 3) <= budget
        assert plan.gain == pytest.approx(best_gain(gain_table(graph, spectra, 2), copies, allowed), abs=SLACK)


@pytest.mark.parametrize("cost", ["params", "macs"])
def test_a_convolution_net_grows_within_the_budget(cost: str) -> None:
    graph = conv_graph(5, 6)
    small = parameters(ConvNet(5, 6))
    for seed, budget in itertools.product(range(5), (40, 200, 400)):
        spectra = random_spectra(graph, np.random.default_rng(seed))
        plan = s3d.select(spectra, graph, m="knapsack", c=2, budget=budget * (36 if cost == "macs" else 1), cost=cost)
        assert len(plan) > 0
        if cost == "params":
            assert parameters(ConvNet(*plan.widths().values())) - small <= budget
        else:
            assert plan.added().macs <= budget * 36


def test_the_exact_solution_is_never_worse_than_the_relaxation() -> None:
    graph = mlp_graph(5, 7)
    rng = np.random.default_rng(0)
    better = 0
    for _ in range(60):
        spectra, c, budget = random_spectra(graph, rng), 1 + 2 * rng.random(), int(rng.integers(1, 25))
        exact = s3d.select(spectra, graph, m="knapsack", c=c, budget=budget)
        relaxed = s3d.select(spectra, graph, m="knapsack", c=c, budget=budget, relax=True)
        assert sum(copies - 1 for copies in chosen(relaxed).values()) <= budget
        assert exact.gain <= relaxed.gain + SLACK
        better += exact.gain < relaxed.gain - SLACK
    assert better > 0


def test_the_exact_solution_is_never_worse_than_the_relaxation_at_true_cost() -> None:
    graph = mlp_graph(5, 7)
    rng = np.random.default_rng(1)
    for _ in range(40):
        spectra, c, budget = random_spectra(graph, rng), 1 + 2 * rng.random(), int(rng.integers(10, 200))
        exact = s3d.select(spectra, graph, m="knapsack", c=c, budget=budget, cost="params")
        relaxed = s3d.select(spectra, graph, m="knapsack", c=c, budget=budget, cost="params", relax=True)
        assert relaxed.added().params <= budget
        assert exact.gain <= relaxed.gain + SLACK


@pytest.mark.parametrize("budget", [3, 100])
def test_copies_without_more_gain_are_not_made(budget: int) -> None:
    graph = mlp_graph(4)
    # With c = 1, a third copy gains nothing more; with eigenvalues of one sign, a fourth copy gains nothing more.
    ends: dict[str, Ends] = {"layers.0": ([-1.0, -2.0, -3.0, -1.5], [2.0, 1.0, -1.0, 0.0])}
    plan = s3d.select(made_up(graph, ends), graph, m="knapsack", c=1, budget=budget)
    assert set(chosen(plan).values()) == {2}
    definite: dict[str, Ends] = {"layers.0": ([-1.0, -2.0, -3.0, -1.5], [-0.5, -1.0, 0.0, -0.1])}
    plan = s3d.select(made_up(graph, definite), graph, m="knapsack", c=3, budget=100)
    assert set(chosen(plan).values()) == {3}


def test_a_large_budget_buys_four_copies_of_every_neuron() -> None:
    graph = mlp_graph(3, 3)
    ends: dict[str, Ends] = dict.fromkeys(graph.units, ([-1.0] * 3, [2.0] * 3))
    plan = s3d.select(made_up(graph, ends), graph, m="knapsack", c=3, budget=18)
    assert set(chosen(plan).values()) == {4}
    assert len(plan) == 6


def test_tiny_gains_are_chosen_like_large_ones() -> None:
    graph = mlp_graph(3, 3)
    copies, added = all_choices(graph)
    for seed in range(5):
        spectra = random_spectra(graph, np.random.default_rng(seed))
        tiny = {
            name: replace(s, lambda_min=s.lambda_min * 1e-12, lambda_max=s.lambda_max * 1e-12)
            for name, s in spectra.items()
        }
        plan = s3d.select(tiny, graph, m="knapsack", c=2, budget=4)
        best = best_gain(gain_table(graph, tiny, 2), copies, added.sum(1) <= 4)
        assert plan.gain == pytest.approx(best, rel=1e-9, abs=0)


def test_float32_spectra_are_supported() -> None:
    graph = mlp_graph(3)
    spectra = made_up(graph, {"layers.0": ([-1.0, -2.0, 0.5], [1.0, 1.0, 1.0])}, torch.float32)
    assert set(chosen(s3d.select(spectra, graph, c=1))) == {("layers.0", 0), ("layers.0", 1)}
    assert set(chosen(s3d.select(spectra, graph, m="knapsack", c=1, budget=1))) == {("layers.0", 1)}


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"m": 5}, "m"),
        ({"m": 1}, "m"),
        ({"m": 2.5}, "m"),
        ({"m": "x"}, "m"),
        ({"m": "knapsack"}, "budget"),
        ({"m": "knapsack", "top_k": 2}, "budget"),
        ({"m": "knapsack", "fraction": 0.5}, "budget"),
        ({"c": 0.99}, "c"),
        ({"c": -1}, "c"),
        ({"c": math.nan}, "c"),
        ({"c": math.inf}, "c"),
        ({"fraction": 0}, "fraction"),
        ({"fraction": -0.5}, "fraction"),
        ({"fraction": 1.01}, "fraction"),
        ({"fraction": math.nan}, "fraction"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": 1, "fraction": 0.5}, "top_k"),
        ({"top_k": 1, "budget": 3}, "budget"),
        ({"fraction": 0.5, "budget": 3}, "fraction"),
        ({"budget": -1}, "budget"),
        ({"budget": math.nan}, "budget"),
        ({"budget": math.inf}, "budget"),
        ({"budget": "many"}, "budget"),
        ({"threshold": -0.1}, "threshold"),
        ({"threshold": math.nan}, "threshold"),
        ({"round_to": 0}, "round_to"),
        ({"round_to": 1.5}, "round_to"),
        ({"caps": -1}, "caps"),
        ({"caps": -1, "budget": 3}, "caps"),
        ({"caps": {"layers.9": 3}}, "caps"),
        ({"cost": "watts", "budget": 3}, "cost"),
        ({"cost": lambda unit: 0.0, "budget": 3}, "cost"),
        ({"cost": lambda unit: -1.0, "budget": 3}, "cost"),
        ({"cost": lambda unit: math.nan, "budget": 3}, "cost"),
        ({"cost": lambda unit: math.inf, "budget": 3}, "cost"),
    ],
    ids=lambda value: re.sub(r"<function .*? at 0x\w+>", "function", str(value)),
)
def test_bad_arguments_are_named(options: dict[str, Any], argument: str) -> None:
    graph = mlp_graph(3)
    spectra = negative(graph, [[-1.0, -2.0, -3.0]])
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        s3d.select(spectra, graph, **options)


def cut(spectrum: s3d.Spectrum) -> s3d.Spectrum:
    return replace(spectrum, **{name: value[:2] for name, value in vars(spectrum).items() if value is not None})


def narrow(spectrum: s3d.Spectrum) -> s3d.Spectrum:
    return replace(spectrum, v_min=spectrum.v_min[:, :-1], v_max=spectrum.v_max[:, :-1])


def uneven(spectrum: s3d.Spectrum) -> s3d.Spectrum:
    return replace(spectrum, lambda_min=spectrum.lambda_min[:2], lambda_max=spectrum.lambda_max[:2])


def undefined(spectrum: s3d.Spectrum) -> s3d.Spectrum:
    return replace(spectrum, lambda_min=spectrum.lambda_min * math.nan)


@pytest.mark.parametrize("limit", [{"top_k": 1}, {"m": "knapsack", "budget": 2}], ids=str)
@pytest.mark.parametrize(
    ("change", "words"),
    [(cut, "spectra"), (narrow, "spectra"), (uneven, "spectra|lambda_min"), (undefined, "lambda_min")],
)
def test_spectra_must_fit_the_graph(
    change: Callable[[s3d.Spectrum], s3d.Spectrum], words: str, limit: dict[str, Any]
) -> None:
    graph = mlp_graph(3)
    spectra = negative(graph, [[-1.0, -2.0, -3.0]])
    with pytest.raises(ValueError, match=words):
        s3d.select({"layers.0": change(spectra["layers.0"])}, graph, **limit)


def test_spectra_of_a_layer_that_is_no_unit_are_refused() -> None:
    graph = mlp_graph(3)
    spectra = negative(graph, [[-1.0, -2.0, -3.0]])
    for name in ("layers.2", "elsewhere"):
        with pytest.raises(ValueError, match=rf"spectra.*{name}"):
            s3d.select({**spectra, name: spectra["layers.0"]}, graph, c=1)


@pytest.mark.parametrize("cost", ["params", "macs"])
@pytest.mark.parametrize("relax", [True, False])
def test_a_weight_that_reads_and_writes_one_unit_costs_its_square(cost: str, relax: bool) -> None:
    model = net(
        lambda s, x: s.head(torch.relu(h := torch.relu(s.stem(x))) + s.body(h)),
        stem=nn.Linear(3, 6),
        body=nn.Linear(6, 6),
        head=nn.Linear(6, 2),
    )
    graph = s3d.trace(model, torch.zeros(2, 3, dtype=torch.float64))
    (unit,) = graph
    filters, width = unit.width, unit.fan_in
    vectors = torch.zeros(filters, width, dtype=torch.float64)
    vectors[:, 0] = 1
    low = -torch.arange(1.0, filters + 1, dtype=torch.float64)
    zero = torch.zeros(filters, dtype=torch.float64)
    count = torch.zeros(filters, dtype=torch.int64)
    spectra = {unit.name: s3d.Spectrum(low, vectors, zero, vectors, zero, zero, zero == 0, count, count)}
    before = costs.count(graph)
    for growth in range(1, filters + 1):
        exact = getattr(costs.count(graph, {unit.name: filters + growth}) - before, cost)
        for budget, wanted in ((exact, growth), (exact - 1, growth - 1)):
            plan = s3d.select(spectra, graph, m=2, c=1.0, budget=budget, cost=cost, relax=relax)
            assert getattr(plan.added(), cost) <= budget
            assert len(plan) == wanted or relax
