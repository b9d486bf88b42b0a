"""Growth by new filters, by relative steps and by steps of a search; what fresh data keep; how copies part."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import s3d_fast as s3d
from s3d_fast.growth.separation import copies_after, distances, parting_rate, steps_to_part
from s3d_fast.growth.split_step import kept_gain
from s3d_fast.growth.step_size import StepSize
from s3d_fast.models.mlp import MLP
from tests import grow_worker
from tests.model_cases import BY_NAME, squared_error, traced


def states(run: s3d.Grower) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in run.model.state_dict().items()}


WAYS: dict[str, dict[str, Any]] = {
    "new": {"splits": False, "new_filters": {"kind": "random"}},
    "firefly": {"splits": False, "new_filters": {"kind": "firefly"}},
    "gradmax": {"splits": False, "new_filters": {"kind": "gradmax", "number": 3}},
    "both": {"new_filters": {"kind": "random"}},
    "relative": {"eps": "relative:0.3"},
    "search": {"eps": "search"},
    "relative new": {"eps": "relative:0.3", "new_filters": {"kind": "random"}},
    "budget": {"new_filters": {}, "selection": {"m": "knapsack", "c": 1.3, "budget": 40, "cost": "params"}},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_grows_and_resumes(way: str, tmp_path: Path) -> None:
    whole = grow_worker.grower(None, **WAYS[way])
    history = whole.run()
    assert sum(history[-1].widths.values()) > sum(history[0].widths.values())
    for phase in history[:-1]:
        grown = phase.splits + phase.added
        assert grown > 0
        assert phase.eps is not None
        assert phase.relative is ("eps" in WAYS[way])
    if way in ("new", "firefly", "gradmax"):
        assert all(phase.splits == 0 and phase.added > 0 for phase in history[:-1])
        # New filters do not change the loss.
        assert all(phase.split_loss == pytest.approx(phase.loss, rel=1e-4) for phase in history[:-1])
        assert all(phase.slope > 0 for phase in history[:-1])
    grow_worker.grower(tmp_path, phases=2, **WAYS[way]).run()
    resumed = grow_worker.grower(tmp_path, **WAYS[way])
    resumed.run(resume=True)
    for name, tensor in states(whole).items():
        assert torch.equal(tensor, states(resumed)[name]), name
    assert (resumed.report()).exists()


def test_a_run_does_not_resume_in_another_way(tmp_path: Path) -> None:
    grow_worker.grower(tmp_path, phases=2).run()
    for options in (WAYS["new"], WAYS["relative"]):
        with pytest.raises(ValueError, match="other settings"):
            grow_worker.grower(tmp_path, **options).run(resume=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"splits": False}, "nothing"),
        ({"new_filters": {"kind": "best"}}, "kind"),
        ({"new_filters": {"model": 3}}, "not an option"),
        ({"eps": "relative:-1"}, "eps"),
        ({"eps": "relative"}, "eps"),
        ({"eps": "half"}, "eps"),
        ({"eps": 0.0}, "eps"),
    ],
)
def test_bad_options_fail_before_training(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        grow_worker.grower(None, **options)


def test_step_sizes() -> None:
    assert StepSize.of(0.01) == StepSize(0.01)
    assert StepSize.of("0.02") == StepSize(0.02)
    assert StepSize.of("relative:0.3") == StepSize(0.3, relative=True)
    assert StepSize.of("search").search
    for text in ("0.02", "relative:0.3", "search"):
        assert StepSize.of(str(StepSize.of(text))) == StepSize.of(text)


def test_a_relative_step_moves_every_filter_by_the_same_share() -> None:
    torch.manual_seed(0)
    model = MLP([3, 6, 2]).double()
    with torch.no_grad():
        model.layers[0].weight *= torch.arange(1, 7)[:, None]
    x, y = torch.randn(40, 3, dtype=torch.float64), torch.randint(2, (40,))
    lengths = torch.cat([model.layers[0].weight, model.layers[0].bias[:, None]], 1).norm(dim=1)
    step = s3d.grow_step(model, cross_entropy, [(x, y)], eps="relative:0.2", fraction=0.5, c=1.0)
    assert step
    for split in step.plan.splits:
        moved = 0.2 * split.offsets.norm(dim=1)
        assert torch.allclose(moved, 0.2 * lengths[split.neuron].to(moved), rtol=1e-5)


def test_the_search_takes_the_size_with_the_least_loss() -> None:
    run = grow_worker.grower(None, eps="search", phases=2)
    sizes = StepSize.of("search").sizes()
    history = run.run()
    assert history[0].eps in sizes
    assert history[0].split_loss <= history[0].loss * (1 + 1e-6)


def test_kept_gain_is_the_quadratic_form() -> None:
    case = BY_NAME["vgg"]
    model, graph = traced(case)
    operators = s3d.capture(model, squared_error, [case.batch(model)], graph)
    for m in (2, 3, 4):
        plan = s3d.select(s3d.extremal_eigenpairs(operators, tol=1e-8), graph, m=m, c=1.5)
        # On the same data the promise is kept.
        assert kept_gain(operators, plan.by_unit()) == pytest.approx(plan.gain, rel=1e-6)
    other = s3d.capture(model, squared_error, [case.batch(model, 9)], graph)
    expected = 0.0
    dense = {name: operator.dense() for name, operator in other.items()}
    for split in plan.splits:
        S = dense[split.unit][split.neuron]
        expected += float((split.weights * torch.einsum("kd,de,ke->k", split.offsets, S, split.offsets)).sum())
    assert kept_gain(other, plan.by_unit()) == pytest.approx(expected, rel=1e-9)


def test_every_phase_measures_what_fresh_data_keep() -> None:
    x, target = grow_worker.data(96)
    run = grow_worker.grower(None, fresh=[(x[48:], target[48:])])
    history = run.run()
    assert all(phase.kept is not None and phase.kept < 1.0 for phase in history[:-1])
    assert history[-1].kept is None
    same = grow_worker.grower(None, fresh=[(x[:24], target[:24])], rows_per_sample=None, solver={"tol": 1e-5})
    # Bandwidths of kinks do not depend on the batches: the same data keep everything.
    assert same.run()[0].kept == pytest.approx(1.0, rel=1e-3)


def test_copies_are_found_after_the_split() -> None:
    torch.manual_seed(0)
    model = MLP([3, 5, 4, 2]).double()
    x, y = torch.randn(40, 3, dtype=torch.float64), torch.randint(2, (40,))
    graph = s3d.trace(model, x[:2])
    spectra = s3d.extremal_eigenpairs(s3d.capture(model, cross_entropy, [(x, y)], graph))
    plan = s3d.select(spectra, graph, fraction=0.5, c=1.0)
    groups = copies_after(plan)
    parents = {name: dict(model.named_parameters())[f"{name}.weight"].detach().clone() for name in groups}
    s3d.apply_splits(model, plan, 0.1)
    after = s3d.trace(model, x[:2])
    for name, own in groups.items():
        weight = dict(model.named_parameters())[f"{name}.weight"].detach()
        for (first, number), split in zip(own, plan.by_unit()[name], strict=True):
            assert number == split.copies
            if name == next(iter(graph)).name:
                # The mean of two copies is their parent.
                assert torch.allclose(weight[first : first + 2].mean(0), parents[name][split.neuron])
    found = distances(model, after, groups)
    assert len(found) == len(plan)
    # Copies at +-0.1 v, relative to the length of the filters.
    assert bool((found > 0).all())


def test_the_formula_of_separation() -> None:
    # One neuron, whose loss is -lambda/2 u^2 along its copies: gradient descent parts them as the formula says.
    rate, momentum, curvature, apart = 5e-4, 0.9, -3.0, 1e-3
    u, velocity, steps = apart / 2, 0.0, 0
    while 2 * u < 1:
        velocity = momentum * velocity - 0.5 * curvature * u
        u += rate * velocity
        steps += 1
    torch.manual_seed(0)
    model = MLP([3, 1, 2]).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    graph = s3d.trace(model, x)
    name = next(iter(graph)).name
    v = torch.nn.functional.normalize(torch.randn(graph.units[name].fan_in, dtype=torch.float64), dim=0)
    split = s3d.NeuronSplit(name, 0, torch.full((2,), 0.5).double(), torch.stack([v, -v]), curvature)
    plan = s3d.SplitPlan(graph, [split])
    predicted = steps_to_part(plan, apart / 2, {name: torch.ones(1)}, rate, momentum)
    assert predicted == pytest.approx(steps, rel=0.1)
    assert steps_to_part(plan, 0.5, {name: torch.ones(1)}, rate, momentum) == pytest.approx(0.0, abs=1e-9)
    assert math.isnan(steps_to_part(s3d.SplitPlan(graph, []), 0.5, {}, rate, momentum))


@pytest.mark.parametrize(("m", "c"), [(2, 1.0), (2, 3.0), (3, 3.0)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_rate_at_which_copies_part_is_that_of_gradient_descent(m: int, c: float, sign: float) -> None:
    # The gradient of copy k is w_k S (theta_k - theta); S has one eigenvalue that matters.
    S = sign * torch.diag(torch.tensor([2.0, 1e-6], dtype=torch.float64))
    low, high = torch.linalg.eigh(S).eigenvalues
    vectors = torch.linalg.eigh(S).eigenvectors
    found = s3d.optimal_split(low, vectors[:, 0], high, vectors[:, 1], m, c)
    if float(found.gain) == 0:
        assert (sign, c) == (1.0, 1.0)
        return
    split = s3d.NeuronSplit("unit", 0, found.weights, found.offsets, float(found.gain))
    rate, copies = 1e-3, 1e-4 * found.offsets
    apart = [float(torch.cdist(copies, copies).max())]
    for _ in range(4000):
        copies = copies - rate * found.weights[:, None] * (copies @ S)
        apart.append(float(torch.cdist(copies, copies).max()))
    assert math.log(apart[4000] / apart[2000]) / 2000 == pytest.approx(parting_rate(split, rate, 0.0), rel=0.02)


def test_history_tells_how_far_copies_are_apart(tmp_path: Path) -> None:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    run = grow_worker.grower(tmp_path, optimizer=sgd, eps="relative:0.3")
    history = run.run()
    assert history[0].apart is None
    assert all(phase.apart is not None and phase.apart > 0 for phase in history[1:])
    assert all(phase.steps_to_part is not None for phase in history[:-1])
    small = grow_worker.grower(None, optimizer=sgd, eps=1e-4).run()
    assert small[1].apart < history[1].apart


def test_grow_step_adds_filters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x, y = torch.randn(40, 3), torch.randint(2, (40,))
    optimizer = torch.optim.Adam(model.parameters())
    before = model(x).detach()
    step = s3d.grow_step(model, cross_entropy, [(x, y)], optimizer, splits=False, new_filters={}, top_k=3)
    assert model[0].out_features == 7
    assert len(step.plan.new) == 3
    assert torch.allclose(model(x), before, atol=1e-6)


def test_prune_and_regrow_within_a_budget(tmp_path: Path) -> None:
    options = {
        "new_filters": {"kind": "random"},
        "removals": True,
        "eps": 1.0,
        "selection": {"m": 2, "c": 1.3, "budget": 0, "cost": "params"},
    }
    run = grow_worker.grower(tmp_path, **options)
    history = run.run()
    assert any(phase.removed > 0 for phase in history)
    assert any(phase.added + phase.splits > 0 for phase in history)
    assert all(after.params <= before.params for before, after in itertools.pairwise(history))
    assert run.report().exists()
    with pytest.raises(ValueError, match="budget"):
        grow_worker.grower(None, removals=True).run()
