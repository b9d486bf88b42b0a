"""Removals and new filters: what is left computes the same as the masked network, and new filters change nothing."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from s3d_fast import (
    Graph,
    NeuronSplit,
    NewFilter,
    Removal,
    SplitPlan,
    apply_splits,
    count,
    filter_norms,
    mask,
    norm_scales,
    prune,
    removal_losses,
    scale_penalty,
    select_removals,
    trace,
)
from tests.cases import relative_error
from tests.model_cases import BY_NAME, MODELS, ModelCase, outputs, squared_error, traced

every_model = pytest.mark.parametrize("case", MODELS, ids=str)
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
}


def fresh(case: ModelCase) -> tuple[nn.Module, Graph]:
    model, graph = traced(case)
    return copy.deepcopy(model), graph


def removals(graph: Graph, seed: int = 0) -> SplitPlan:
    """Return the removal of about a third of every unit's neurons, where two or more are left."""
    generator = torch.Generator().manual_seed(seed)
    removed = []
    for name, unit in graph.units.items():
        number = max(1, unit.width // 3) if unit.width > 2 else 0
        neurons = torch.randperm(unit.width, generator=generator)[:number].tolist()
        removed += [Removal(name, neuron, 0.0) for neuron in neurons]
    return SplitPlan(graph, (), removed=removed)


def new_filters(graph: Graph, seed: int = 0, number: int = 2) -> list[NewFilter]:
    generator = torch.Generator().manual_seed(seed)
    return [
        NewFilter(
            name,
            torch.randn(unit.fan_in, generator=generator, dtype=torch.float64),
            int(torch.randint(unit.width, (), generator=generator)),
            0.0,
        )
        for name, unit in graph.units.items()
        for _ in range(number)
    ]


def splits(graph: Graph, every: int) -> list[NeuronSplit]:
    weights = torch.tensor([0.25, 0.75], dtype=torch.float64)
    return [
        NeuronSplit(name, neuron, weights, torch.zeros(2, unit.fan_in, dtype=torch.float64), 0.0)
        for name, unit in graph.units.items()
        for neuron in range(0, unit.width, every)
    ]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """Take a step, so that the optimizer has state."""
    out = model(x)
    squared_error(out, torch.ones_like(out)).backward()
    optimizer.step()
    optimizer.zero_grad()


@every_model
def test_a_pruned_network_equals_the_masked_one(case: ModelCase) -> None:
    model, graph = fresh(case)
    plan, x = removals(graph), case.inputs()
    masked = copy.deepcopy(model)
    mask(masked, plan)
    prune(model, plan, check=x)
    assert relative_error(outputs(model, x), outputs(masked, x)) <= 1e-10
    after = trace(model, x)
    assert after.widths() == plan.widths()
    assert count(after) == count(graph, plan.widths())
    assert sum(parameter.numel() for parameter in model.parameters()) == count(after).params


@every_model
def test_new_filters_change_nothing(case: ModelCase) -> None:
    model, graph = fresh(case)
    x = case.inputs()
    before = outputs(model, x)
    plan = SplitPlan(graph, (), new=new_filters(graph))
    apply_splits(model, plan, 0.3, check=x)
    assert relative_error(outputs(model, x), before) <= 1e-10
    after = trace(model, x)
    assert after.widths() == plan.widths() == {name: width + 2 for name, width in graph.widths().items()}
    assert count(after) == count(graph, plan.widths())


@every_model
def test_all_kinds_at_once(case: ModelCase) -> None:
    model, graph = fresh(case)
    x, removed = case.inputs(), removals(graph).removed
    gone = {(one.unit, one.neuron) for one in removed}
    new = [one for one in new_filters(graph) if (one.unit, one.like) not in gone]
    split = [one for one in splits(graph, 2) if (one.unit, one.neuron) not in gone]
    plan = SplitPlan(graph, split, new, removed)
    masked = copy.deepcopy(model)
    mask(masked, plan)
    apply_splits(model, plan, 0.0, check=x)
    assert relative_error(outputs(model, x), outputs(masked, x)) <= 1e-10
    assert trace(model, x).widths() == plan.widths()


def test_a_new_filter_has_the_parameters_it_was_given() -> None:
    model, graph = fresh(BY_NAME["mlp"])
    unit = next(iter(graph))
    theta = torch.arange(unit.fan_in, dtype=torch.float64)
    layer = model.get_submodule(unit.name)
    old = layer.weight.detach().clone()
    apply_splits(model, SplitPlan(graph, (), [NewFilter(unit.name, theta, 1, 0.0)]), 0.5)
    weight = model.get_submodule(unit.name).weight
    assert torch.equal(weight[2], theta[: weight.shape[1]])
    assert torch.equal(weight[[0, 1, *range(3, len(weight))]], old)
    consumer = model.get_submodule(unit.consumers[0]).weight
    assert torch.equal(consumer[:, 2], torch.zeros_like(consumer[:, 2]))


@pytest.mark.parametrize("name", OPTIMIZERS)
@every_model
def test_optimizer_state_follows(case: ModelCase, name: str) -> None:
    model, graph = fresh(case)
    x = case.inputs()
    optimizer = OPTIMIZERS[name](model.parameters())
    step(model, optimizer, x)
    removed = removals(graph).removed
    gone = {(one.unit, one.neuron) for one in removed}
    plan = SplitPlan(graph, (), [one for one in new_filters(graph) if (one.unit, one.like) not in gone], removed)
    before = {name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state}
    apply_splits(model, plan, 0.1, optimizer)
    sums: dict[str, float] = {}
    for own, parameter in model.named_parameters():
        if own not in before:
            continue
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, Tensor) and value.dim():
                assert value.shape == parameter.shape
                # State of new filters is zero, so that the sum never grows; what is left is what was there.
                sums[key] = sums.get(key, 0.0) + float(value.abs().sum()) - float(before[own][key].abs().sum())
    assert sums
    assert all(change <= 1e-12 for change in sums.values())
    step(model, optimizer, x)


def test_state_of_new_filters_is_zero() -> None:
    model, graph = fresh(BY_NAME["mlp"])
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, BY_NAME["mlp"].inputs())
    unit = next(iter(graph))
    theta = torch.ones(unit.fan_in, dtype=torch.float64)
    apply_splits(model, SplitPlan(graph, (), [NewFilter(unit.name, theta, 0, 0.0)]), 0.1, optimizer)
    rows = optimizer.state[model.get_submodule(unit.name).weight]
    columns = optimizer.state[model.get_submodule(unit.consumers[0]).weight]
    for key in ("exp_avg", "exp_avg_sq"):
        assert not rows[key][1].any()
        assert not columns[key][:, 1].any()
        assert rows[key][0].any()
        assert columns[key][:, 0].any()


def bad_plans(graph: Graph) -> dict[str, tuple[SplitPlan, str]]:
    unit = next(iter(graph))
    theta = torch.zeros(unit.fan_in, dtype=torch.float64)
    gone = Removal(unit.name, 0, 0.0)
    return {
        "no such unit": (SplitPlan(graph, (), removed=[Removal("none", 0, 0.0)]), "not a unit"),
        "no such neuron": (SplitPlan(graph, (), removed=[Removal(unit.name, 99, 0.0)]), "does not exist"),
        "twice": (SplitPlan(graph, (), removed=[gone, gone]), "once more"),
        "split and removed": (SplitPlan(graph, splits(graph, 1), removed=[gone]), "once more"),
        "like a removed one": (SplitPlan(graph, (), [NewFilter(unit.name, theta, 0, 0.0)], [gone]), "is removed"),
        "wrong size": (SplitPlan(graph, (), [NewFilter(unit.name, theta[1:], 0, 0.0)]), "shape"),
        "not finite": (SplitPlan(graph, (), [NewFilter(unit.name, theta / 0, 0, 0.0)]), "finite"),
        "nothing left": (
            SplitPlan(graph, (), removed=[Removal(unit.name, n, 0.0) for n in range(unit.width)]),
            "at least one",
        ),
    }


@pytest.mark.parametrize("kind", list(bad_plans(traced(BY_NAME["mlp"])[1])))
def test_bad_plans_change_nothing(kind: str) -> None:
    model, graph = fresh(BY_NAME["mlp"])
    plan, words = bad_plans(graph)[kind]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises((ValueError, TypeError), match=words):
        apply_splits(model, plan, 0.1)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_prune_takes_removals_only() -> None:
    model, graph = fresh(BY_NAME["mlp"])
    with pytest.raises(ValueError, match="removals only"):
        prune(model, SplitPlan(graph, splits(graph, 1)))


class Hidden(nn.Module):
    """Divides by the number of its channels, which no graph shows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.second(h) / self.first.out_features


def test_check_refuses_what_changes_the_outputs() -> None:
    torch.manual_seed(0)
    model = Hidden().double()
    x = torch.randn(4, 3, dtype=torch.float64)
    graph = trace(model, x, prove=False)
    plan = SplitPlan(graph, (), removed=[Removal("first", 1, 0.0)])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="change the model's outputs"):
        prune(model, plan, check=x)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@every_model
def test_filter_norms(case: ModelCase) -> None:
    model, graph = traced(case)
    for name, scores in filter_norms(model, graph).items():
        unit = graph.units[name]
        expected = torch.zeros(unit.width, dtype=torch.float64)
        for filters in unit.filters:
            weight = dict(model.named_parameters())[filters.weight].detach()
            for place, row in enumerate(filters.rows.tolist()):
                expected[place] += float(weight.select(filters.row_axis, row).abs().sum())
        assert torch.allclose(scores, expected)


def test_norm_scales_and_their_penalty() -> None:
    model, graph = traced(BY_NAME["mobilenet"])
    scales = norm_scales(model, graph)
    assert scales
    for name, own in scales.items():
        norm = model.get_submodule(str(graph.units[name].norm))
        assert torch.allclose(own, norm.weight.detach().abs().double())
    penalty = scale_penalty(model, graph)
    assert float(penalty.detach()) == pytest.approx(sum(float(own.sum()) for own in scales.values()))
    twice = scale_penalty(model, graph, dict.fromkeys(scales, 2.0))
    assert float(twice.detach()) == pytest.approx(2 * float(penalty.detach()))
    penalty.backward()
    with pytest.raises(ValueError, match="no BatchNorm"):
        scale_penalty(*traced(BY_NAME["mlp"]))


def test_selection_takes_the_lowest_scores() -> None:
    _, graph = traced(BY_NAME["mlp"])
    scores = {name: torch.arange(unit.width) + 10.0 * place for place, (name, unit) in enumerate(graph.units.items())}
    plan = select_removals(scores, graph, fraction=0.25)
    everything = sorted(((float(v), name, n) for name, own in scores.items() for n, v in enumerate(own.tolist())))
    wanted = round(0.25 * len(everything))
    expected = [(name, n) for _, name, n in everything]
    chosen = [(one.unit, one.neuron) for one in plan.removed]
    assert chosen == expected[:wanted]
    most = select_removals(scores, graph, fraction=0.99)
    # Two neurons of every unit stay, whatever their scores.
    assert set(most.widths().values()) == {2}


@pytest.mark.parametrize("cost", ["params", "macs"])
@pytest.mark.parametrize("case", [BY_NAME["vgg"], BY_NAME["mobilenet"], BY_NAME["resnet"]], ids=str)
def test_a_budget_holds(case: ModelCase, cost: str) -> None:
    model, graph = fresh(case)
    budget = 0.7 * getattr(count(graph), cost)
    plan = select_removals(filter_norms(model, graph), graph, budget=budget, cost=cost)
    assert getattr(count(graph, plan.widths()), cost) <= budget
    last = SplitPlan(graph, (), removed=plan.removed[:-1])
    assert getattr(count(graph, last.widths()), cost) > budget
    prune(model, plan, check=case.inputs())
    assert getattr(count(trace(model, case.inputs())), cost) <= budget
    with pytest.raises(ValueError, match="budget"):
        select_removals(filter_norms(*traced(case)), graph, budget=1.0, cost=cost)


def test_every_unit_loses_the_same_share() -> None:
    model, graph = traced(BY_NAME["vgg"])
    plan = select_removals(filter_norms(model, graph), graph, fraction=0.5, by_unit=True)
    for name, width in plan.widths().items():
        assert abs(width - graph.units[name].width / 2) <= 1


def test_widths_stay_multiples() -> None:
    model, graph = traced(BY_NAME["vgg"])
    plan = select_removals(filter_norms(model, graph), graph, fraction=0.5, round_to=2)
    for name, width in plan.widths().items():
        assert width % 2 == 0 or width == graph.units[name].width


def test_plans_can_be_pickled_and_printed() -> None:
    _, graph = traced(BY_NAME["mlp"])
    plan = SplitPlan(graph, splits(graph, 3), new_filters(graph), [Removal(next(iter(graph)).name, 1, 0.5)])
    again = pickle.loads(pickle.dumps(plan))
    assert again.widths() == plan.widths()
    assert len(again) == len(plan)
    assert "new filters" in repr(plan)
    assert "removals" in repr(plan)
    assert "after" in str(plan)


# Not DGCNN: which points are neighbours changes at once, not step by step.
@pytest.mark.parametrize("case", [BY_NAME[name] for name in ("mlp", "vgg", "mobilenet", "resnet")], ids=str)
def test_removal_losses_are_the_first_order_change(case: ModelCase) -> None:
    model, graph = traced(case)
    batch = case.batch(model)
    estimates = removal_losses(model, squared_error, [batch], graph)
    before = float(squared_error(model(batch[0]), batch[1]).detach())
    step = 1e-6
    for name in graph.units:
        for neuron in (0, graph.units[name].width - 1):
            plan = SplitPlan(graph, (), removed=[Removal(name, neuron, 0.0)])
            masked = copy.deepcopy(model)
            mask(masked, plan)
            with torch.no_grad():
                # A small step towards the masked weights.
                for own, other in zip(masked.parameters(), model.parameters(), strict=True):
                    own.copy_(other + step * (own - other))
                change = (float(squared_error(masked(batch[0]), batch[1])) - before) / step
            assert float(estimates[name][neuron]) == pytest.approx(abs(change), rel=1e-3, abs=1e-6), (name, neuron)
