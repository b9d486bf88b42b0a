"""Selection among splits, new filters and removals: against brute force, and through surgery."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from s3d_fast import (
    Graph,
    Proposals,
    SplitPlan,
    apply_splits,
    capture,
    count,
    extremal_eigenpairs,
    propose_filters,
    select,
    trace,
)
from s3d_fast.maths.schemes import split_gain
from s3d_fast.network.graph import filter_lengths
from tests.model_cases import BY_NAME, squared_error, traced

EPS = 0.1


def small() -> SimpleNamespace:
    """Return a network of two units with few neurons, and everything that selection needs."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)
    ).double()
    x, y = torch.randn(20, 3, dtype=torch.float64), torch.randn(20, 2, dtype=torch.float64)
    graph = trace(model, x[:2])
    spectra = extremal_eigenpairs(capture(model, squared_error, [(x, y)], graph))
    proposals = propose_filters(model, squared_error, [(x, y)], graph, number=2)
    return SimpleNamespace(model=model, graph=graph, spectra=spectra, proposals=proposals, x=x, y=y)


SMALL = small()


def best_by_force(graph: Graph, options: list[list[tuple[str, int, float]]], budget: float, cost: str) -> float:
    """Return the least sum of gains; `options` holds, for every neuron, what can be done: (unit, growth, gain)."""
    start, best = getattr(count(graph), cost), np.inf
    for choice in itertools.product(*[[None, *own] for own in options]):
        taken = [one for one in choice if one is not None]
        widths = graph.widths()
        for unit, growth, _ in taken:
            widths[unit] += growth
        if getattr(count(graph, widths), cost) - start <= budget:
            best = min(best, sum(gain for *_, gain in taken))
    return best


def value(plan: SplitPlan, losses: dict[str, Tensor]) -> float:
    """Return the gains of everything in a plan, on the scale of splits."""
    new = sum(-2 / EPS * one.slope for one in plan.new)
    return plan.gain + new + sum(2 / EPS**2 * float(losses[gone.unit][gone.neuron]) for gone in plan.removed)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    share=st.floats(-0.3, 0.8),
    cost=st.sampled_from(["params", "macs"]),
    m=st.sampled_from([2, "knapsack"]),
    kinds=st.sampled_from(["new", "removals", "both", "all"]),
)
def test_the_best_within_a_budget(seed: int, share: float, cost: str, m: int | str, kinds: str) -> None:
    graph = SMALL.graph
    generator = torch.Generator().manual_seed(seed)
    spectra = SMALL.spectra if kinds != "both" else {}
    proposals = {
        name: Proposals(
            name,
            own.theta,
            own.like,
            torch.rand(2, generator=generator, dtype=torch.float64) * 0.02,
            own.reach,
            own.statistics,
        )
        for name, own in (SMALL.proposals if kinds != "removals" else {}).items()
    }
    losses = {
        name: torch.rand(unit.width, generator=generator, dtype=torch.float64) * 1e-3
        for name, unit in (graph.units if kinds != "new" else {}).items()
    }
    if not losses:
        share = abs(share)
    budget = share * getattr(count(graph), cost)
    options: list[list[tuple[str, int, float]]] = []
    for name, unit in graph.units.items():
        stay = set() if name not in losses else set(losses[name].argsort(stable=True)[-2:].tolist())
        for neuron in range(unit.width):
            own: list[tuple[str, int, float]] = []
            if name in spectra:
                low, high = spectra[name].lambda_min[neuron], spectra[name].lambda_max[neuron]
                gains = {k: float(split_gain(low, high, k, 1.3)) for k in ((2, 3, 4) if m == "knapsack" else (2,))}
                own += [(name, k - 1, gain) for k, gain in gains.items() if gain < 0]
            if name in losses and neuron not in stay:
                own.append((name, -1, 2 / EPS**2 * float(losses[name][neuron])))
            options.append(own)
        options += [[(name, 1, -2 / EPS * slope)] for slope in proposals[name].slope.tolist()] if proposals else []
    expected = best_by_force(graph, options, budget, cost)
    call = {"m": m, "budget": budget, "cost": cost, "proposals": proposals, "losses": losses, "eps": EPS}
    if expected == np.inf:
        with pytest.raises(ValueError, match="budget"):
            select(spectra, graph, **call)
        return
    plan = select(spectra, graph, **call)
    assert getattr(plan.added(), cost) <= budget
    assert value(plan, losses) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_new_filters_compete_with_splits() -> None:
    plan = select(SMALL.spectra, SMALL.graph, top_k=4, proposals=SMALL.proposals, eps=EPS)
    gains = [split.gain for split in plan.splits] + [-2 / EPS * one.slope for one in plan.new]
    every = [
        float(split_gain(low, high, 2, 1.3))
        for spectrum in SMALL.spectra.values()
        for low, high in zip(spectrum.lambda_min, spectrum.lambda_max, strict=True)
    ] + [-2 / EPS * slope for own in SMALL.proposals.values() for slope in own.slope.tolist()]
    assert sorted(gains) == pytest.approx(sorted(every)[:4])


def test_a_smaller_step_favours_new_filters() -> None:
    def new(eps: float) -> int:
        return len(select(SMALL.spectra, SMALL.graph, top_k=3, proposals=SMALL.proposals, eps=eps).new)

    assert new(1e-6) == 3
    assert new(1e6) == 0


def test_relative_steps() -> None:
    stored = dict(SMALL.model.named_parameters())
    lengths = {name: filter_lengths(unit, stored) for name, unit in SMALL.graph.units.items()}
    plan = select(SMALL.spectra, SMALL.graph, lengths=lengths)
    plain = select(SMALL.spectra, SMALL.graph)
    assert [(s.unit, s.neuron) for s in plan.splits] == [(s.unit, s.neuron) for s in plain.splits]
    expected = plain.relative_to(SMALL.model)
    for split, same in zip(plan.splits, expected.splits, strict=True):
        assert split.gain == pytest.approx(same.gain)
        assert torch.allclose(split.offsets, same.offsets)
    # Ranking is by the scaled gains.
    gains = {(s.unit, s.neuron): s.gain for s in expected.splits}
    best = select(SMALL.spectra, SMALL.graph, lengths=lengths, top_k=2)
    assert {(s.unit, s.neuron) for s in best.splits} == set(sorted(gains, key=gains.__getitem__)[:2])
    with pytest.raises(ValueError, match="no lengths"):
        select(SMALL.spectra, SMALL.graph, lengths={})


def test_reach_is_the_length_of_output_weights() -> None:
    for name, consumer in (("0", "2"), ("2", "4")):
        own = SMALL.proposals[name]
        columns = SMALL.model.get_submodule(consumer).weight.detach().norm(dim=0)
        assert torch.allclose(own.reach, columns[list(own.like)])


def test_prune_and_grow_in_one_plan() -> None:
    case = BY_NAME["vgg"]
    model, graph = traced(case)
    model = copy.deepcopy(model)
    batches = [case.batch(model)]
    proposals = propose_filters(model, squared_error, batches, graph, number=1)
    losses = {
        name: torch.rand(unit.width, generator=torch.Generator().manual_seed(1)).double() * 1e-6
        for name, unit in graph.units.items()
    }
    plan = select({}, graph, budget=0, cost="macs", proposals=proposals, losses=losses, eps=0.1)
    assert plan.new
    assert plan.removed
    assert plan.added().macs <= 0
    apply_splits(model, plan, 0.1, check=case.inputs())
    assert trace(model, case.inputs()).widths() == plan.widths()


def test_bad_arguments() -> None:
    graph, proposals = SMALL.graph, SMALL.proposals
    losses = {name: torch.zeros(unit.width) for name, unit in graph.units.items()}
    for options, words in (
        ({"proposals": proposals}, "need eps"),
        ({"proposals": {"none": proposals["0"]}, "eps": EPS}, "not a unit"),
        ({"losses": losses, "eps": EPS}, "need a budget"),
        ({"losses": {"0": torch.zeros(9)}, "eps": EPS, "budget": 5}, "shape"),
        ({"losses": {"0": -torch.ones(3)}, "eps": EPS, "budget": 5}, ">= 0"),
        ({"losses": losses, "eps": EPS, "budget": -1e9}, "no removals reach"),
    ):
        with pytest.raises(ValueError, match=words):
            select({}, graph, **options)
    with pytest.raises(TypeError, match="Proposals"):
        select({}, graph, proposals={"0": torch.zeros(3)}, eps=EPS)
