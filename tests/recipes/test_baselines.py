"""Baselines: random splits, and the uniformly scaled network that is closest in size."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import s3d_fast as s3d
from s3d_fast.models.mlp import MLP
from s3d_fast.models.mobilenet import MobileNetV1
from s3d_fast.recipes.baselines import parameter_count, random_plan, scaled_widths

UNITS = ["layers.0", "layers.2"]


def graph_of(*hidden: int) -> s3d.Graph:
    return s3d.trace(MLP([3, *hidden, 2]), torch.zeros(2, 3))


def seeded(seed: int, graph: s3d.Graph, units: Sequence[str], **selection: object) -> s3d.SplitPlan:
    torch.manual_seed(seed)
    return random_plan(graph, units, selection)


def neurons(plan: s3d.SplitPlan) -> list[tuple[str, int]]:
    return [(split.unit, split.neuron) for split in plan.splits]


@pytest.mark.parametrize(("fraction", "count"), [(0.05, 1), (0.25, 5), (0.35, 7), (1.0, 20)])
def test_the_fraction_determines_the_number_of_splits(fraction: float, count: int) -> None:
    plan = seeded(0, graph_of(8, 12), UNITS, fraction=fraction)
    assert len(plan) == len(set(neurons(plan))) == count


def test_a_random_split_has_two_equal_copies_with_opposite_offsets() -> None:
    # m and c have no effect on random splits.
    plan = seeded(1, graph_of(8, 12), UNITS, fraction=0.5, m=4, c=3.0)
    for split in plan.splits:
        assert split.weights.tolist() == [0.5, 0.5]
        first, second = split.offsets
        assert torch.equal(first, -second)
        assert float(first.norm()) == pytest.approx(1, rel=1e-6)
        assert math.isnan(split.gain)
    assert math.isnan(plan.gain)
    assert math.isnan(plan.predicted_change(0.01))


def test_directions_are_uniformly_distributed() -> None:
    torch.manual_seed(2)
    graph = graph_of(400)
    directions = torch.stack([split.offsets[0] for split in random_plan(graph, ["layers.0"], {}).splits]).double()
    assert directions.shape == (400, 4)
    # The standard deviation is 1/40 for entries of the mean, and at most 1/89 for entries of the second moment.
    assert float(directions.mean(0).abs().max()) < 4 / 40
    assert float((directions.mT @ directions / 400 - torch.eye(4) / 4).abs().max()) < 4 / 80


@pytest.mark.parametrize("unit", UNITS)
def test_only_the_given_units_are_split(unit: str) -> None:
    graph = graph_of(8, 12)
    plan = seeded(3, graph, [unit], fraction=0.5)
    assert {split.unit for split in plan.splits} == {unit}
    # The fraction counts only neurons that may be split.
    assert len(plan) == graph.units[unit].width / 2


def test_a_plan_depends_only_on_the_seed_of_pytorch() -> None:
    graph = graph_of(8, 12)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    first = seeded(4, graph, UNITS, fraction=0.35)
    random.seed(2)
    np.random.seed(2)  # noqa: NPY002
    # The weights of the model do not matter.
    second, other = seeded(4, graph_of(8, 12), UNITS, fraction=0.35), seeded(5, graph, UNITS, fraction=0.35)
    assert neurons(first) == neurons(second)
    for split, same in zip(first.splits, second.splits, strict=True):
        assert torch.equal(split.offsets, same.offsets)
    assert neurons(first) != neurons(other)


def test_every_neuron_is_equally_likely() -> None:
    graph, draws, share = graph_of(8, 12), 600, 0.25
    counts = dict.fromkeys(itertools.chain(*([(unit.name, j) for j in range(unit.width)] for unit in graph)), 0)
    torch.manual_seed(6)
    for _ in range(draws):
        for name in neurons(random_plan(graph, UNITS, {"fraction": share})):
            counts[name] += 1
    assert sum(counts.values()) == draws * 5
    deviations = np.array(list(counts.values())) - draws * share
    # Chi-square with 19 degrees of freedom, for samples without replacement: above 43.8 in one case of a thousand.
    assert 19 / 20 * float((deviations**2).sum()) / (draws * share * (1 - share)) < 43.8


@pytest.mark.parametrize("cost", ["macs", "params", "filters"])
def test_random_splits_stay_within_a_budget(cost: str) -> None:
    graph = graph_of(8, 12)
    budget = {"macs": 60, "params": 80, "filters": 4}[cost]
    for seed in range(5):
        plan = seeded(seed, graph, UNITS, budget=budget, cost=cost)
        added = {"macs": plan.added().macs, "params": plan.added().params, "filters": len(plan)}[cost]
        assert 0 < added <= budget


class Spread(nn.Module):
    """A convolution with BatchNorm, a depthwise and a pointwise convolution, and a classifier; all are smooth."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 5, 3, padding=1)
        self.norm = nn.BatchNorm2d(5)
        self.depthwise = nn.Conv2d(5, 5, 3, padding=1, groups=5)
        self.second = nn.Conv2d(5, 6, 1)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        x = torch.tanh(self.second(torch.tanh(self.depthwise(x))))
        return self.head(x.mean((2, 3)))


def test_a_random_split_changes_the_outputs_by_the_square_of_the_step() -> None:
    def change(eps: float) -> float:
        torch.manual_seed(7)
        model = Spread().double().eval()
        x = torch.randn(4, 2, 5, 5, dtype=torch.float64)
        graph = s3d.trace(model, x)
        before = model(x)
        plan = seeded(8, graph, list(graph.units), fraction=0.5)
        s3d.apply_splits(model, plan, eps)
        assert s3d.trace(model, x).widths() == plan.widths()
        return float((model(x) - before).abs().max().detach())

    small, large = change(1e-4), change(1e-3)
    assert 0 < small < 1e-6
    # The first order cancels: the copies have opposite offsets and equal weights.
    assert large / small == pytest.approx(100, rel=0.1)


def quadratic(widths: Sequence[int]) -> int:
    """Return the number of parameters of a network of linear layers."""
    return sum(a * b + b for a, b in itertools.pairwise((3, *widths, 2)))


def every_scaling(widths: Sequence[int], largest: float) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """Return all results of scaling the widths by one factor, up to the largest, and rounding them.

    The results change at factors that make a product half-integer. The first set holds the results between these
    factors. The second holds the results exactly at them, where rounding may go either way.
    """
    edges = sorted({(k + 0.5) / width for width in widths for k in range(int(largest * width) + 1)})
    between = [edges[0] / 2, *((low + high) / 2 for low, high in itertools.pairwise(edges))]
    first, second = (
        {tuple(max(1, round(factor * width)) for width in widths) for factor in factors} for factors in (between, edges)
    )
    return first, second


@pytest.mark.parametrize("size", [sum, quadratic], ids=["filters", "parameters"])
@pytest.mark.parametrize("widths", [(2, 2, 2), (3, 5, 8), (7,), (1, 10)], ids=str)
def test_no_other_factor_gives_a_closer_size(widths: tuple[int, ...], size: Callable[[Sequence[int]], int]) -> None:
    choices, at_edges = every_scaling(widths, 12)
    largest = size([8 * width for width in widths])
    for wanted in range(1, largest, max(1, largest // 60)):
        best = min(abs(size(choice) - wanted) for choice in choices)
        found = scaled_widths(widths, wanted, size)
        assert found in choices | at_edges
        assert abs(size(found) - wanted) <= best, (wanted, found)


def test_an_exact_size_is_found() -> None:
    assert scaled_widths((4, 8), 12, sum) == (4, 8)
    assert scaled_widths((4, 8), 36, sum) == (12, 24)
    assert scaled_widths((64, 128), 3, sum) == (1, 2)


def test_parameters_are_counted_without_allocation() -> None:
    def make() -> nn.Module:
        return MobileNetV1((8,) * 14, 10)

    assert parameter_count(make) == sum(parameter.numel() for parameter in make().parameters())
    # Allocated, they would take four terabytes.
    assert parameter_count(lambda: nn.Linear(10**6, 10**6, bias=False)) == 10**12
    assert make().head.weight.device.type == "cpu"
