"""New filters: their slopes are the first-order decrease of the loss, and better proposals are steeper."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from s3d_fast import Graph, SplitPlan, apply_splits, propose_filters, trace
from s3d_fast.base.world import ALONE
from s3d_fast.splitting.proposals import Proposals
from s3d_fast.splitting.trial import Grown, Trial
from tests.model_cases import BY_NAME, MODELS, ModelCase, squared_error, traced

every_model = pytest.mark.parametrize("case", MODELS, ids=str)


def proposals_of(case: ModelCase, kind: str = "random", **options: object) -> tuple[nn.Module, Graph, list, dict]:
    model, graph = traced(case)
    batches = [case.batch(model, seed) for seed in (1, 2)]
    return model, graph, batches, propose_filters(model, squared_error, batches, graph, kind=kind, **options)


def loss_of(model: nn.Module, batches: list) -> Tensor:
    return torch.stack([squared_error(model(x), y) for x, y in batches]).mean()


@every_model
def test_a_slope_is_the_first_order_decrease(case: ModelCase) -> None:
    model, graph, batches, found = proposals_of(case, number=2)
    assert set(found) == set(graph.units)
    for name, own in found.items():
        grown = copy.deepcopy(model).eval()
        before = {key: tensor.shape for key, tensor in grown.named_parameters()}
        apply_splits(grown, SplitPlan(graph, (), new=[own[0]]), 0.1)
        base = loss_of(grown, batches)
        # Step along the gradient at those weights alone that read the new channel: they are zero.
        weights = [p for key, p in grown.named_parameters() if p.shape != before[key] and p.dim() > 1]
        gradients = torch.autograd.grad(base, weights, allow_unused=True)
        step, squares = 1e-6, 0.0
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                if gradient is not None:
                    moved = torch.where(weight == 0, gradient, 0)
                    squares += float(moved.square().sum())
                    weight -= step * moved
        slope = squares**0.5
        assert float(own.slope[0]) == pytest.approx(slope, rel=1e-9, abs=1e-12), name
        if slope > 1e-3:
            decrease = float((base - loss_of(grown, batches)).detach())
            assert decrease == pytest.approx(step * slope * slope, rel=1e-3), name


@every_model
def test_the_loss_does_not_change(case: ModelCase) -> None:
    model, graph, batches, found = proposals_of(case, number=3)
    grown = copy.deepcopy(model).eval()
    plan = SplitPlan(graph, (), new=[own[place] for own in found.values() for place in range(len(own))])
    with torch.no_grad():
        before = float(loss_of(model.eval(), batches))
        apply_splits(grown, plan, 0.3)
        assert float(loss_of(grown, batches)) == pytest.approx(before, rel=1e-10)
    assert trace(grown, case.inputs()).widths() == plan.widths()


@pytest.mark.parametrize("case", [BY_NAME[name] for name in ("mlp", "vgg", "mobilenet", "resnet")], ids=str)
def test_ascents_are_gradients_of_half_the_squared_slopes(case: ModelCase) -> None:
    model, graph = traced(case)
    batches = [case.batch(model)]
    found = propose_filters(model, squared_error, batches, graph, number=2)
    trial = Trial(model, squared_error, batches, graph, ALONE)

    def halves(proposals: dict[str, Proposals]) -> dict[str, Tensor]:
        # With the same statistics: the ascents hold them fixed.
        grown = Grown(trial, proposals)
        gradients = grown.gradients()
        return {name: grown.slopes(name, gradients).square() / 2 for name in proposals}

    ascents = trial.ascended(found)
    generator = torch.Generator().manual_seed(2)
    steps = {
        name: torch.randn(own.theta.shape, generator=generator, dtype=torch.float64) for name, own in found.items()
    }
    h = 1e-5
    up = halves({name: replace(own, theta=own.theta + h * steps[name]) for name, own in found.items()})
    down = halves({name: replace(own, theta=own.theta - h * steps[name]) for name, own in found.items()})
    for name in found:
        expected = (up[name] - down[name]) / (2 * h)
        along = (ascents[name][1] * steps[name]).sum(1)
        assert torch.allclose(along, expected, rtol=1e-4, atol=1e-9 + 1e-5 * float(expected.abs().max())), name


@pytest.mark.parametrize("kind", ["firefly", "gradmax"])
@pytest.mark.parametrize("case", [BY_NAME[name] for name in ("mlp", "vgg", "mobilenet", "dgcnn")], ids=str)
def test_better_proposals_are_steeper(case: ModelCase, kind: str) -> None:
    *_, plain = proposals_of(case, number=2)
    *_, better = proposals_of(case, kind, number=2)
    sums = {name: float(own.slope.sum()) for name, own in plain.items()}
    others = {name: float(own.slope.sum()) for name, own in better.items()}
    assert sum(others.values()) > 1.05 * sum(sums.values())


@pytest.mark.parametrize("act", [nn.Tanh(), nn.ReLU(), nn.Sigmoid()], ids=["tanh", "relu", "sigmoid"])
def test_gradmax_finds_the_singular_vectors_of_gradients_times_inputs(act: nn.Module) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 4, bias=False), act, nn.Linear(4, 3)).double()
    # So small that smooth units are linear.
    x, y = 1e-4 * torch.randn(50, 9, dtype=torch.float64), torch.randn(50, 3, dtype=torch.float64)
    graph = trace(model, x[:2])
    # Three products find what a power iteration needs dozens for: the matrix has three singular values.
    found = propose_filters(model, squared_error, [(x, y)], graph, kind="gradmax", number=2, refinements=3)
    output = model(x)
    (g,) = torch.autograd.grad(squared_error(output, y), output)
    U, singular, _ = torch.linalg.svd(x.mT @ g)
    (own,) = found.values()
    lengths = own.theta.norm(dim=1, keepdim=True)
    assert torch.allclose(((own.theta / lengths) @ U[:, :2]).abs().sort(1).values[:, 1], torch.ones(2).double())
    if isinstance(act, nn.Tanh):
        assert torch.allclose(own.slope.sort().values, (lengths[:, 0] * singular[:2]).sort().values, rtol=1e-6)


def test_gradmax_behind_a_batchnorm_is_that_of_centred_activations() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)).double()
    x, y = torch.randn(50, 6, dtype=torch.float64), torch.randn(50, 3, dtype=torch.float64)
    with torch.no_grad():
        model[1].weight.uniform_(-2, 2)
        model[1].bias.normal_()
        model[1].running_mean.normal_()
        model[1].running_var.uniform_(0.5, 2)
    model.eval()
    graph = trace(model, x[:2])
    trial = Trial(model, squared_error, [(x, y)], graph, ALONE)
    drawn = propose_filters(model, squared_error, [(x, y)], graph, number=3)
    (own,) = trial.singular(drawn, 7).values()
    output = model(x)
    (g,) = torch.autograd.grad(squared_error(output, y), output)
    U, _, _ = torch.linalg.svd(torch.cat([x, torch.ones(50, 1).double()], 1).mT @ g)
    theta = nn.functional.normalize(own.theta, dim=1)
    assert torch.allclose((theta @ U[:, :3]).abs(), torch.eye(3).double(), atol=1e-8)


def test_more_filters_than_parameters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.SiLU(), nn.Linear(4, 3)).double()
    x, y = torch.randn(50, 3, dtype=torch.float64), torch.randn(50, 3, dtype=torch.float64)
    graph = trace(model, x[:2])
    (own,) = propose_filters(model, squared_error, [(x, y)], graph, kind="gradmax", number=7).values()
    assert len(own) == 7
    assert bool(torch.isfinite(own.theta).all() and (own.slope > 0).all())


def test_batchnorm_statistics_are_those_of_the_data() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)).double()
    x, y = 3 + torch.randn(64, 6, dtype=torch.float64), torch.randn(64, 2, dtype=torch.float64)
    model(x)
    model.eval()
    graph = trace(model, x[:2])
    [own] = propose_filters(model, squared_error, [(x, y)], graph, number=2).values()
    apply_splits(model, SplitPlan(graph, (), new=[own[1]]), 0.0)
    z = model[0](x).detach()
    place = own.like[1] + 1
    assert float(model[1].running_mean[place]) == pytest.approx(float(z[:, place].mean()), rel=1e-12)
    assert float(model[1].running_var[place]) == pytest.approx(float(z[:, place].var(correction=0)), rel=1e-12)


def test_bad_arguments() -> None:
    case = BY_NAME["mlp"]
    model, graph = traced(case)
    batches = [case.batch(model)]
    for options, words in (
        ({"kind": "best"}, "kind"),
        ({"number": -1}, "number"),
        ({"units": ["none"]}, "not a unit"),
        ({"tries": 0}, "tries"),
    ):
        with pytest.raises(ValueError, match=words):
            propose_filters(model, squared_error, batches, graph, **options)
    with pytest.raises(ValueError, match="at least one batch"):
        propose_filters(model, squared_error, [], graph)
    assert propose_filters(model, squared_error, batches, graph, number=0) == {}


class Attending(nn.Module):
    """A hidden layer whose outputs attend to each other, by torch's fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, 3) -> (B, T, 8)
        y = self.second(torch.tanh(self.first(x))).unsqueeze(1)
        return nn.functional.scaled_dot_product_attention(y, y, y).squeeze(1)


@pytest.mark.parametrize("kind", ["firefly", "gradmax"])
def test_better_proposals_are_steeper_in_front_of_fused_attention(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Attending(), torch.randn(6, 16, 3)
    batches = [(x, torch.randn(6, 16, 8))]
    graph = trace(model, x)
    plain, better = (
        propose_filters(model, squared_error, batches, graph, kind=one, number=2) for one in ("random", kind)
    )
    assert float(better["first"].slope.sum()) > float(plain["first"].slope.sum())
