"""AMC: budgets hold, what is useless goes, the agent learns, and the same seed finds the same plan."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import s3d_fast as s3d
from s3d_fast.recipes import amc
from s3d_fast.recipes.amc import _Agent, masked_loss, searched_plan


def network() -> tuple[nn.Module, s3d.Graph, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return a network whose first layer has 14 neurons of 16 that nothing depends on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    with torch.no_grad():
        model[0].weight[:2] *= 2
        model[2].weight[:, 2:] *= 1e-3
    batches = [(x := torch.randn(64, 6), model(x).detach()) for _ in range(2)]
    return model, s3d.trace(model, batches[0][0][:2]), batches


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_the_budget_holds_and_useless_neurons_go(share: float) -> None:
    model, graph, batches = network()
    budget = share * s3d.count(graph).macs
    torch.manual_seed(0)
    plan = searched_plan(model, graph, list(graph.units), budget, F.mse_loss, batches)
    assert s3d.count(graph, plan.widths()).macs <= budget
    assert min(plan.widths().values()) >= 2
    assert plan.widths()["0"] < plan.widths()["2"]
    # At least as good as the same share of every layer, which is the first episode.
    torch.manual_seed(0)
    uniform = searched_plan(model, graph, list(graph.units), budget, F.mse_loss, batches, episodes=1)
    widths = uniform.widths()
    assert abs(widths["0"] - widths["2"]) <= 1
    assert masked_loss(model, plan, F.mse_loss, batches) < masked_loss(model, uniform, F.mse_loss, batches)


def test_the_same_seed_finds_the_same_plan_and_leaves_the_random_state() -> None:
    model, graph, batches = network()
    plans = []
    for _ in range(2):
        torch.manual_seed(3)
        plans.append(searched_plan(model, graph, list(graph.units), 200, F.mse_loss, batches, episodes=30))
        plans.append(torch.rand(()))
    assert plans[0].removed == plans[2].removed
    assert plans[1] == plans[3]


def test_a_budget_out_of_reach() -> None:
    model, graph, batches = network()
    with pytest.raises(ValueError, match="prune to a larger share"):
        searched_plan(model, graph, list(graph.units), 3, F.mse_loss, batches)


def test_the_agent_learns_what_pays() -> None:
    torch.manual_seed(0)
    agent = _Agent()
    states = [torch.eye(amc.FEATURES)[place] for place in range(3)]
    # What is best in the three layers of an episode.
    best = torch.tensor([0.9, 0.2, 0.6])
    for episode in range(120):
        steps = [(state, agent.action(state, episode)) for state in states]
        actions = torch.tensor([action for _, action in steps])
        agent.remember(steps, -float((actions - best).square().sum()))
        if episode >= amc.RANDOM:
            for _ in range(amc.UPDATES):
                agent.learn()
    with torch.no_grad():
        found = torch.cat([agent.actor(state) for state in states])
    assert torch.allclose(found, best, atol=0.15)
