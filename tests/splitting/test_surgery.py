"""Surgery: splits of size zero keep the function; loss, cost and optimizer state change as predicted."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from s3d_fast import (
    Cost,
    Graph,
    NeuronSplit,
    SplitPlan,
    apply_splits,
    capture,
    extremal_eigenpairs,
    marginal,
    optimal_split,
    select,
    trace,
)
from s3d_fast.models import EdgeConv
from s3d_fast.network.edgeconv import nearest_points
from tests.cases import relative_error
from tests.model_cases import BY_NAME, MODELS, ModelCase, data, net, outputs, random_plan, squared_error, traced

C_BOUND = 1.3
POSITIVE = (0.5, 0.5)
SIGNED = (-(C_BOUND - 1) / 2, (C_BOUND + 1) / 2)

every_model = pytest.mark.parametrize("case", MODELS, ids=str)


def optimal_plan(
    model: nn.Module,
    graph: Graph,
    batch: tuple[Tensor, Tensor],
    m: int,
    units: tuple[str, ...] | None = None,
    sharpness: float | None = None,
) -> SplitPlan:
    """Return a plan with the optimal split of every filter of the units, from exact eigenpairs."""
    captured = capture(model, squared_error, [batch], graph, sharpness=sharpness, units=units)
    splits = []
    for name, spectrum in extremal_eigenpairs(captured, solver="exact").items():
        best = optimal_split(spectrum.lambda_min, spectrum.v_min, spectrum.lambda_max, spectrum.v_max, m, C_BOUND)
        for neuron, (weights, offsets, gain) in enumerate(zip(*best, strict=True)):
            splits.append(NeuronSplit(name, neuron, weights, offsets, float(gain)))
    return SplitPlan(graph, splits)


def pair_plan(graph: Graph, weights: tuple[float, ...], every: int = 1) -> SplitPlan:
    """Return a plan that splits every `every`-th filter of every unit with the given weights."""
    w = torch.tensor(weights, dtype=torch.float64)
    return SplitPlan(
        graph,
        [
            NeuronSplit(unit.name, neuron, w, torch.zeros(len(w), unit.fan_in, dtype=torch.float64), 0.0)
            for unit in graph
            for neuron in range(0, unit.width, every)
        ],
    )


def fresh(case: ModelCase) -> tuple[nn.Module, Graph]:
    """Return a copy of a model that a test may change, and the graph of the original."""
    model, graph = traced(case)
    return copy.deepcopy(model), graph


def exact_units(graph: Graph) -> tuple[str, ...]:
    """Return the units that have splitting matrices."""
    return tuple(unit.name for unit in graph.captured())


def assert_sizes_agree(model: nn.Module) -> None:
    """Assert that the size attributes of every layer match its tensors."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            assert module.weight.shape[:2] == (module.out_channels, module.in_channels // module.groups)
            assert module.bias is None or module.bias.shape == (module.out_channels,)
        elif isinstance(module, nn.Linear):
            assert module.weight.shape == (module.out_features, module.in_features)
            assert module.bias is None or module.bias.shape == (module.out_features,)
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            tensors = (module.weight, module.bias, module.running_mean, module.running_var)
            assert all(tensor.shape == (module.num_features,) for tensor in tensors)  # type: ignore[union-attr]
        elif isinstance(module, EdgeConv):
            assert module.weight.shape == (module.out_features, 2 * module.in_features)
            assert module.norm.num_features == module.out_features
            assert module.metric.shape == (module.in_features,)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    return float(squared_error(outputs(model, batch[0]), batch[1]))


@every_model
def test_three_rounds_of_splits_of_size_zero_keep_the_outputs(case: ModelCase) -> None:
    model, graph = fresh(case)
    x = case.inputs()
    before = outputs(model, x)
    for m in (2, 3, 4):
        assert tuple(graph.units) == case.units
        plan = random_plan(graph, m, every=1 if m == 2 else 3, seed=m)
        apply_splits(model, plan, eps=0.0)
        assert relative_error(outputs(model, x), before) < 1e-10
        assert_sizes_agree(model)
        graph = trace(model, x)
        assert graph.widths() == plan.widths()


@every_model
@pytest.mark.parametrize("m", [2, 3, 4])
def test_optimal_splits_of_size_zero_keep_the_outputs(case: ModelCase, m: int) -> None:
    original, graph = traced(case, kinked=True)
    batch = case.batch(original)
    before = outputs(original, batch[0])
    plan = optimal_plan(original, graph, batch, m)
    assert plan.gain < 0
    model = copy.deepcopy(original)
    apply_splits(model, plan, eps=0.0)
    assert relative_error(outputs(model, batch[0]), before) < 1e-10
    widths = {unit.name: len(model.get_submodule(unit.name).weight) for unit in graph}
    assert widths == {unit.name: unit.width * (m if unit.name in case.captured else 1) for unit in graph}


@every_model
def test_a_split_model_can_be_trained(case: ModelCase) -> None:
    original, graph = traced(case)
    batch = case.batch(original)
    model = copy.deepcopy(original)
    apply_splits(model, optimal_plan(original, graph, batch, 2), eps=0.01)
    before = loss_of(model, batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with torch.random.fork_rng(devices=[]):
        loss = squared_error(model.train()(batch[0]), batch[1])
        loss.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    optimizer.step()
    assert loss_of(model, batch) != before


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 4), min_size=9, max_size=9), st.integers(0, 1000))
def test_every_neuron_may_have_its_own_number_of_copies(copies: list[int], seed: int) -> None:
    case = BY_NAME["mlp-batchnorm"]
    model, graph = fresh(case)
    generator = torch.Generator().manual_seed(seed)
    places = [(unit, neuron) for unit in graph for neuron in range(unit.width)]
    splits = []
    for (unit, neuron), m in zip(places, copies, strict=True):
        weights = torch.randn(m, generator=generator, dtype=torch.float64)
        weights[-1] += 1 - weights.sum()
        splits.append(NeuronSplit(unit.name, neuron, weights, torch.zeros(m, unit.fan_in, dtype=torch.float64), 0.0))
    order = torch.randperm(len(splits), generator=generator).tolist()
    before = outputs(model, case.inputs())
    apply_splits(model, SplitPlan(graph, [splits[i] for i in order]), eps=0.5)
    assert relative_error(outputs(model, case.inputs()), before) < 1e-10
    assert_sizes_agree(model)


def test_copies_stand_next_to_one_another_in_the_order_of_their_weights() -> None:
    model, graph = fresh(BY_NAME["mlp-batchnorm"])
    old = copy.deepcopy(model)
    w, delta = torch.tensor([0.7, -0.1, 0.4], dtype=torch.float64), data(3, 5)
    apply_splits(model, SplitPlan(graph, [NeuronSplit("layers.0", 1, w, delta, 0.0)]), eps=0.25)
    index = [0, 1, 1, 1, 2, 3, 4]
    rows = torch.cat([old.layers[0].weight, old.layers[0].bias[:, None]], 1)[index]
    rows[1:4] += 0.25 * delta
    torch.testing.assert_close(torch.cat([model.layers[0].weight, model.layers[0].bias[:, None]], 1), rows)
    for name in ("weight", "bias", "running_mean", "running_var"):
        assert torch.equal(getattr(model.layers[1], name), getattr(old.layers[1], name)[index])
    columns = old.layers[3].weight[:, index].clone()
    columns[:, 1:4] *= w
    torch.testing.assert_close(model.layers[3].weight, columns)


def test_copies_share_the_metric_of_an_edgeconv() -> None:
    case = BY_NAME["dgcnn"]
    model, graph = fresh(case)
    apply_splits(model, random_plan(graph, 2, units=["edgeconvs.0"], every=2), eps=0.0)
    apply_splits(model, random_plan(trace(model, case.inputs()), 3, units=["edgeconvs.0"], every=2), eps=0.0)
    # Neurons 0 and 2 of 4 became pairs: (a a) b (c c) d. Then positions 0, 2 and 4 of these six became triplets.
    expected = [1 / 6] * 3 + [1 / 2] + [1 / 3] * 3 + [1 / 2] + [1 / 6] * 3 + [1.0]
    torch.testing.assert_close(model.edgeconvs[1].metric, torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(model.edgeconvs[0].metric, torch.ones(3, dtype=torch.float64))


def test_an_empty_plan_changes_nothing() -> None:
    model, graph = fresh(BY_NAME["mlp"])
    parameters = list(model.parameters())
    apply_splits(model, SplitPlan(graph, []), eps=0.1)
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))


def test_a_plan_may_be_applied_to_a_copy_of_the_model() -> None:
    case = BY_NAME["resnet"]
    model, graph = traced(case)
    twin = copy.deepcopy(model)
    apply_splits(twin, random_plan(graph, 2), eps=0.0)
    assert relative_error(outputs(twin, case.inputs()), outputs(model, case.inputs())) < 1e-10
    assert trace(model, case.inputs()).widths() == graph.widths()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_parameters_stay_parameters(dtype: torch.dtype) -> None:
    model, graph = fresh(BY_NAME["mobilenet"])
    model.to(dtype)
    frozen = {name for index, (name, _) in enumerate(model.named_parameters()) if index % 3 == 0}
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name not in frozen
    names = list(dict(model.named_parameters())), list(dict(model.named_buffers()))
    squares = [parameter.square().sum() for parameter in model.parameters()]
    torch.stack(squares).sum().backward()
    apply_splits(model, random_plan(graph, 2), eps=0.01)
    assert (list(dict(model.named_parameters())), list(dict(model.named_buffers()))) == names
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter
        assert parameter.dtype == dtype
        assert parameter.device.type == "cpu"
        assert parameter.requires_grad == (name not in frozen)
        assert parameter.is_leaf
        # Only parameters that did not change keep a gradient.
        assert parameter.grad is None or parameter.grad.shape == parameter.shape
    for name, buffer in model.named_buffers():
        assert buffer.dtype == (torch.int64 if name.endswith("num_batches_tracked") else dtype)


def test_depthwise_filters_with_a_multiplier_follow() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.depthwise(torch.relu(self.conv(x)))))
        return self.head(h.flatten(1))

    model = net(
        forward,
        conv=nn.Conv2d(2, 3, 3),
        depthwise=nn.Conv2d(3, 6, 2, groups=3),
        norm=nn.BatchNorm2d(6),
        head=nn.Linear(54, 2),
    )
    x = data(2, 2, 6, 6)
    before = outputs(model, x)
    for m in (2, 3):
        apply_splits(model, random_plan(trace(model, x), m, every=2), eps=0.0)
        assert relative_error(outputs(model, x), before) < 1e-10
    depthwise = model.depthwise
    width = len(model.conv.weight)
    assert (depthwise.in_channels, depthwise.groups, depthwise.out_channels) == (width, width, 2 * width)
    assert_sizes_agree(model)


def remainder_slope(
    model: nn.Module, plan: SplitPlan, batch: tuple[Tensor, Tensor], smallest: float, largest: float
) -> float:
    """Return the slope of log |change of the loss - prediction| over log eps, fitted to five steps."""
    before = loss_of(model, batch)
    steps = torch.logspace(math.log10(smallest), math.log10(largest), 5, dtype=torch.float64)
    remainders = []
    for eps in steps.tolist():
        split = copy.deepcopy(model)
        apply_splits(split, plan, eps=eps)
        remainders.append(abs(loss_of(split, batch) - before - plan.predicted_change(eps)))
    remainder = torch.tensor(remainders, dtype=torch.float64)
    # Otherwise the fit would see rounding errors.
    assert remainder.min() > 20 * torch.finfo(torch.float64).eps * before
    x, y = steps.log(), remainder.log()
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


# Steps large enough to stand above rounding, and small enough that no nearest neighbour and no maximum changes.
RANGES = {
    "mlp": (3e-3, 3e-2),
    "mlp-batchnorm": (3e-3, 3e-2),
    "vgg": (3e-5, 3e-4),
    "resnet": (1e-3, 1e-2),
    "dgcnn": (3e-5, 3e-4),
    "pointnet": (3e-4, 3e-3),
    "pointnet2": (3e-4, 3e-3),
    "transformer": (3e-3, 3e-2),
}


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("m", [2, 3, 4])
def test_the_remainder_falls_like_the_third_power_of_the_step(name: str, m: int) -> None:
    case = BY_NAME[name]
    model, graph = traced(case)
    batch = case.batch(model)
    units = exact_units(graph)
    assert units == case.units
    # So sharp that no tie between values counts: within these steps, none changes.
    plan = optimal_plan(model, graph, batch, m, units, sharpness=1e9)
    # Four copies have pairs of opposite offsets: their remainder falls faster and reaches rounding errors earlier.
    smallest, largest = (1.2e-4, 3e-4) if (name, m) == ("dgcnn", 4) else RANGES[name]
    assert remainder_slope(model, plan, batch, smallest, largest) >= 2.8


@pytest.mark.parametrize("name", RANGES)
def test_the_loss_falls(name: str) -> None:
    case = BY_NAME[name]
    model, graph = traced(case)
    batch = case.batch(model)
    spectra = extremal_eigenpairs(capture(model, squared_error, [batch], graph), solver="exact")
    plan = select(spectra, graph, m=2, c=C_BOUND, fraction=0.35)
    eps = RANGES[name][1]
    before = loss_of(model, batch)
    split = copy.deepcopy(model)
    apply_splits(split, plan, eps=eps)
    assert loss_of(split, batch) < before + 0.5 * plan.predicted_change(eps) < before


@pytest.mark.parametrize("m", [2, 3, 4])
def test_the_units_of_mobilenet_have_all_their_curvature(m: int) -> None:
    case = BY_NAME["mobilenet"]
    model, graph = traced(case)
    batch = case.batch(model)
    plan = optimal_plan(model, graph, batch, m)
    assert remainder_slope(model, plan, batch, 1e-3, 1e-2) >= 2.8


@register_flop_formula(nearest_points._opoverload.overloadpacket)
def _flops_of_distances(x: tuple[int, ...], *_: object, **__: object) -> int:
    """Return the flops of our own operation, which PyTorch's counter does not look into."""
    clouds, points, features = x
    return 2 * clouds * points * points * features


def recount(model: nn.Module, x: Tensor) -> Cost:
    """Return the parameters of a model and the MACs that PyTorch itself counts for one sample."""
    counter = FlopCounterMode(display=False)
    with counter:
        outputs(model, x)
    macs, rest = divmod(counter.get_total_flops(), 2 * len(x))
    assert rest == 0
    return Cost(sum(parameter.numel() for parameter in model.parameters()), macs)


@every_model
@pytest.mark.parametrize("m", [2, 4])
def test_a_plan_adds_the_cost_that_it_predicts(case: ModelCase, m: int) -> None:
    model, graph = fresh(case)
    x = case.inputs()
    plan = random_plan(graph, m, every=2)
    before = recount(model, x)
    apply_splits(model, plan, eps=0.0)
    assert plan.added() == recount(model, x) - before


@every_model
def test_the_marginal_cost_is_the_cost_of_one_more_copy(case: ModelCase) -> None:
    model, graph = traced(case)
    x = case.inputs()
    before = recount(model, x)
    prices = marginal(graph)
    assert list(prices) == list(case.units)
    for name, price in prices.items():
        split = copy.deepcopy(model)
        plan = random_plan(graph, 2, units=[name], every=1000)
        assert len(plan) == 1
        apply_splits(split, plan, eps=0.0)
        assert recount(split, x) - before == price, name


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "nesterov": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.8, nesterov=True),
    "adam": lambda p, lr: torch.optim.Adam(p, lr=lr, eps=1e-30),
    "amsgrad": lambda p, lr: torch.optim.Adam(p, lr=lr, amsgrad=True, eps=1e-30),
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr=lr, eps=1e-30, weight_decay=0.1),
    "rmsprop": lambda p, lr: torch.optim.RMSprop(p, lr=lr, eps=1e-30),
    "rmsprop, momentum": lambda p, lr: torch.optim.RMSprop(p, lr=lr, momentum=0.9, eps=1e-30),
    "rmsprop, centered": lambda p, lr: torch.optim.RMSprop(p, lr=lr, momentum=0.9, centered=True, eps=1e-30),
}


def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]) -> None:
    """Take a step on every batch, in eval mode, so that only the gradients matter."""
    model.eval()
    for x, target in batches:
        optimizer.zero_grad()
        squared_error(model(x), target).backward()
        optimizer.step()


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the tensors of an optimizer's state as (parameter name, key, tensor)."""
    for name, parameter in model.named_parameters():
        assert parameter in optimizer.state
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, Tensor):
                yield name, key, value


@pytest.mark.parametrize("weights", [POSITIVE, SIGNED], ids=["positive", "signed"])
@pytest.mark.parametrize("which", OPTIMIZERS)
@pytest.mark.parametrize("name", ["mlp-batchnorm", "resnet", "mobilenet", "dgcnn", "vgg"])
def test_carried_state_is_what_the_split_model_would_have_accumulated(
    name: str, which: str, weights: tuple[float, float]
) -> None:
    case = BY_NAME[name]
    model, graph = fresh(case)
    batches = [case.batch(model, seed=seed) for seed in (1, 2, 3)]
    plan = pair_plan(graph, weights, every=2)

    split = copy.deepcopy(model)
    apply_splits(split, plan, eps=0.0)
    # At a learning rate of 0 the weights do not move, so both models compute the same function at every step.
    expected_optimizer = OPTIMIZERS[which](split.parameters(), lr=0.0)
    accumulate(split, expected_optimizer, batches)

    optimizer = OPTIMIZERS[which](model.parameters(), lr=0.0)
    accumulate(model, optimizer, batches)
    apply_splits(model, plan, eps=0.0, optimizer=optimizer)

    expected = list(states(split, expected_optimizer))
    actual = list(states(model, optimizer))
    assert [entry[:2] for entry in actual] == [entry[:2] for entry in expected]
    for (parameter, key, value), (_, _, wanted) in zip(actual, expected, strict=True):
        assert value.dtype == wanted.dtype
        assert relative_error(value, wanted) < 1e-8, (parameter, key)
    assert [group["params"] for group in optimizer.param_groups] == [list(model.parameters())]


@pytest.mark.parametrize("weights", [POSITIVE, SIGNED, (0.5, 0.8, -0.3)], ids=["positive", "signed", "three"])
def test_gradients_of_copied_rows_are_weighted_and_gradients_of_columns_are_not(weights: tuple[float, ...]) -> None:
    case = BY_NAME["mlp-batchnorm"]
    model, graph = fresh(case)
    batch = case.batch(model)
    split = copy.deepcopy(model)
    w, m = torch.tensor(weights, dtype=torch.float64), len(weights)
    splits = [NeuronSplit("layers.0", j, w, torch.zeros(m, 5, dtype=torch.float64), 0.0) for j in range(5)]
    apply_splits(split, SplitPlan(graph, splits), eps=0.0)
    for each in (model, split):
        squared_error(each(batch[0]), batch[1]).backward()
    scale = w.repeat(5)
    for layer in (0, 1):
        for name in ("weight", "bias"):
            parent = getattr(model.layers[layer], name).grad.repeat_interleave(m, 0)
            wanted = parent * (scale[:, None] if parent.dim() == 2 else scale)
            torch.testing.assert_close(getattr(split.layers[layer], name).grad, wanted, rtol=1e-10, atol=1e-14)
    wanted = model.layers[3].weight.grad.repeat_interleave(m, 1)
    torch.testing.assert_close(split.layers[3].weight.grad, wanted, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("which", OPTIMIZERS)
def test_state_fits_the_parameters_after_three_rounds_of_training(which: str) -> None:
    case = BY_NAME["resnet"]
    model = case.model()
    batches = [case.batch(model, seed=seed) for seed in (1, 2)]
    optimizer = OPTIMIZERS[which](model.parameters(), lr=1e-4)
    for m in (2, 3, 4):
        accumulate(model, optimizer, batches)
        apply_splits(model, random_plan(trace(model, case.inputs()), m, every=4), eps=0.01, optimizer=optimizer)
        assert optimizer.param_groups[0]["params"] == list(model.parameters())
        assert set(optimizer.state) == set(model.parameters())
        for name, key, value in states(model, optimizer):
            if value.dim():
                assert value.shape == model.get_parameter(name).shape, key
    accumulate(model, optimizer, batches)
    assert all(value.isfinite().all() for _, _, value in states(model, optimizer))
    # The saved state can be loaded into an optimizer of a copy.
    twin = copy.deepcopy(model)
    fresh = OPTIMIZERS[which](twin.parameters(), lr=1e-4)
    fresh.load_state_dict(optimizer.state_dict())


def test_parameter_groups_keep_their_options_and_order() -> None:
    model, graph = fresh(BY_NAME["mlp-batchnorm"])
    decayed = [name for name, p in model.named_parameters() if p.dim() == 2][::-1]
    others = [name for name, p in model.named_parameters() if p.dim() == 1]
    groups = [
        {"params": [model.get_parameter(name) for name in others], "lr": 0.3, "weight_decay": 0.0, "label": "others"},
        {
            "params": [model.get_parameter(name) for name in decayed],
            "lr": 0.1,
            "weight_decay": 0.01,
            "label": "decayed",
        },
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.99))
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    apply_splits(model, random_plan(graph, 2), eps=0.1, optimizer=optimizer)
    assert [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups] == options
    for group, names in zip(optimizer.param_groups, (others, decayed), strict=True):
        assert len(group["params"]) == len(names)
        assert all(p is model.get_parameter(name) for p, name in zip(group["params"], names, strict=True))


def test_an_optimizer_may_hold_only_some_of_the_parameters() -> None:
    case = BY_NAME["mlp-batchnorm"]
    model, graph = fresh(case)
    optimizer = torch.optim.Adam(model.layers[3].parameters(), lr=0.0)
    accumulate(model, optimizer, [case.batch(model)])
    apply_splits(model, random_plan(graph, 2), eps=0.0, optimizer=optimizer)
    assert optimizer.param_groups[0]["params"] == list(model.layers[3].parameters())
    assert set(optimizer.state) == set(model.layers[3].parameters())


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]] = {
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8),
}


@pytest.mark.parametrize("which", SCHEDULERS)
def test_learning_rate_schedules_continue_after_a_split(which: str) -> None:
    case = BY_NAME["mlp"]
    rates = []
    for splitting in (False, True):
        model = case.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = SCHEDULERS[which](optimizer)
        seen = []
        for epoch in range(6):
            accumulate(model, optimizer, [case.batch(model)])
            scheduler.step()
            seen.append(optimizer.param_groups[0]["lr"])
            if splitting and epoch in (1, 3):
                plan = random_plan(trace(model, case.inputs()), 2, every=2)
                apply_splits(model, plan, eps=0.01, optimizer=optimizer)
        rates.append(seen)
    assert rates[0] == rates[1]


# The optimizer, and the factor of a split row's step: an adaptive step has the sign of the gradient, not its size.
STEPPERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], Callable[[Tensor], Tensor]]] = {
    "sgd": (torch.optim.SGD, lambda w: w.square().sum()),
    "momentum": (partial(torch.optim.SGD, momentum=0.9), lambda w: w.square().sum()),
    "adam": (partial(torch.optim.Adam, eps=1e-20), lambda w: w.abs().sum()),
    "rmsprop": (partial(torch.optim.RMSprop, momentum=0.5, eps=1e-20), lambda w: w.abs().sum()),
}


@pytest.mark.parametrize("which", STEPPERS)
@pytest.mark.parametrize("weights", [POSITIVE, SIGNED, (0.5, 0.8, -0.3)], ids=["positive", "signed", "three"])
def test_the_first_step_after_a_split_moves_the_function_as_predicted(weights: tuple[float, ...], which: str) -> None:
    """A split rescales the step of every parameter by a known factor; the outputs move accordingly.

    Copy k of a row moves by w_k times its parent's step (by sign(w_k) times it, if steps are adaptive). Its output has
    the weight w_k, so the factor of a row is sum w_k^2 (or sum |w_k|). Each of the m columns moves like its parent, so
    the factor of a column is m. For an entry in a split row and a split column the factors multiply.
    """
    case = BY_NAME["mlp-batchnorm"]
    model, graph = traced(case)
    x, target = case.batch(model)
    w, m = torch.tensor(weights, dtype=torch.float64), len(weights)
    make, row_factor = STEPPERS[which]
    # The even filters of the first unit and the odd ones of the second.
    chosen = {"layers.0": range(0, 5, 2), "layers.3": range(1, 4, 2)}
    splits = [
        NeuronSplit(name, neuron, w, torch.zeros(m, graph.units[name].fan_in, dtype=torch.float64), 0.0)
        for name, neurons in chosen.items()
        for neuron in neurons
    ]
    factor = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    for name, follower, consumer in (("layers.0", "layers.1", "layers.3"), ("layers.3", "layers.4", "layers.6")):
        rows = list(chosen[name])
        for prefix in (name, follower):
            factor[f"{prefix}.weight"][rows] *= row_factor(w)
            factor[f"{prefix}.bias"][rows] *= row_factor(w)
        factor[f"{consumer}.weight"][:, rows] *= m

    def step(lr: float, split: bool) -> nn.Module:
        """Return the model after a step of size lr, with the state of two earlier steps; `split` splits it before."""
        stepped = copy.deepcopy(model)
        optimizer = make(stepped.parameters(), lr=0.0)
        for scale in (1.0, -0.5):
            optimizer.zero_grad()
            (scale * squared_error(stepped(x), target)).backward()
            optimizer.step()
        if split:
            apply_splits(stepped, SplitPlan(graph, splits), eps=0.0, optimizer=optimizer)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        squared_error(stepped(x), target).backward()
        optimizer.step()
        return stepped

    # A step of size 1 is the velocity of the unsplit model; the model is not evaluated there.
    unsplit = dict(step(1.0, split=False).named_parameters())
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    tangents = tuple(factor[name] * (unsplit[name].detach() - p) for name, p in parameters.items())
    _, predicted = torch.autograd.functional.jvp(
        lambda *p: torch.func.functional_call(model, dict(zip(parameters, p, strict=True)), (x,)),
        tuple(parameters.values()),
        tangents,
    )
    before = outputs(model, x)

    def velocity(lr: float) -> Tensor:
        return (outputs(step(lr, split=True), x) - before) / lr

    measured = 2 * velocity(1e-6) - velocity(2e-6)
    assert relative_error(measured, predicted) < 1e-7


def bits(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[object, ...]:
    """Return copies of everything that a failed call must not touch."""
    state = copy.deepcopy(model.state_dict())
    identities = [id(value) for value in model.state_dict(keep_vars=True).values()]
    sizes = [
        [getattr(module, name, None) for name in ("in_channels", "out_channels", "groups", "num_features")]
        for module in model.modules()
    ]
    return state, identities, sizes, copy.deepcopy(optimizer.state_dict()) if optimizer is not None else None


def assert_same_bits(actual: object, expected: object) -> None:
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor)
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    elif isinstance(expected, dict):
        assert isinstance(actual, dict)
        assert list(actual) == list(expected)
        for key, value in expected.items():
            assert_same_bits(actual[key], value)
    elif isinstance(expected, (list, tuple)):
        assert isinstance(actual, (list, tuple))
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same_bits(one, other)
    else:
        assert actual == expected


def refuse(
    plan: SplitPlan,
    model: nn.Module,
    match: str,
    *,
    eps: float = 0.1,
    optimizer: torch.optim.Optimizer | None = None,
    error: type[Exception] | tuple[type[Exception], ...] = ValueError,
) -> None:
    """Assert that a call raises an error with a message and changes nothing."""
    before = bits(model, optimizer)
    with pytest.raises(error, match=match):
        apply_splits(model, plan, eps=eps, optimizer=optimizer)
    assert_same_bits(bits(model, optimizer), before)


def prepared() -> tuple[nn.Module, SplitPlan, torch.optim.Optimizer]:
    """Return a model, a good plan for it and an optimizer with state."""
    case = BY_NAME["resnet"]
    model, graph = fresh(case)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    accumulate(model, optimizer, [case.batch(model)])
    return model, random_plan(graph, 2, every=2), optimizer


NAN = float("nan")
SPOIL: dict[str, tuple[Callable[[NeuronSplit], NeuronSplit], str]] = {
    "unknown unit": (lambda s: replace(s, unit="blocks.7.conv1"), r"'blocks\.7\.conv1' is not a unit"),
    "layer that is no unit": (lambda s: replace(s, unit="head"), r"'head' is not a unit"),
    "layer that is split along": (lambda s: replace(s, unit="blocks.0.conv2"), r"'blocks\.0\.conv2' is not a unit"),
    "index too large": (lambda s: replace(s, neuron=99), r"neuron 99 .*'blocks\.2\.conv2'"),
    "index is the width": (lambda s: replace(s, neuron=4), r"neuron 4 .*does not exist.*0 to 3"),
    "negative index": (lambda s: replace(s, neuron=-1), r"neuron -1 .*'blocks\.2\.conv2'"),
    "duplicate neuron": (lambda s: replace(s, neuron=0), r"neuron 0 .*'blocks\.2\.conv2' is split twice"),
    "index of another type": (lambda s: replace(s, neuron=1.0), r"neuron 1\.0"),
    "short vectors": (lambda s: replace(s, offsets=s.offsets[:, :-1]), r"offsets must have shape \(2, 30\).*\(2, 29\)"),
    "too few vectors": (lambda s: replace(s, offsets=s.offsets[:1]), r"offsets must have shape"),
    "flat vectors": (lambda s: replace(s, offsets=s.offsets[0]), r"offsets must have shape"),
    "weights of two dimensions": (lambda s: replace(s, weights=s.weights[None]), r"weights must have shape"),
    "weights that sum to 2": (lambda s: replace(s, weights=2 * s.weights), r"weights must sum to 1, got 2"),
    "weights that nearly sum to 1": (lambda s: replace(s, weights=s.weights + 1e-4), r"weights must sum to 1"),
    "nan weights": (lambda s: replace(s, weights=s.weights * NAN), r"weights must be finite"),
    "nan offsets": (lambda s: replace(s, offsets=s.offsets * NAN), r"offsets must be finite"),
    "infinite offsets": (lambda s: replace(s, offsets=s.offsets / 0), r"offsets must be finite"),
    "no copies": (lambda s: replace(s, weights=s.weights[:0], offsets=s.offsets[:0]), r"weights"),
}


@pytest.mark.parametrize("which", SPOIL)
def test_a_bad_split_is_refused_and_changes_nothing(which: str) -> None:
    model, plan, optimizer = prepared()
    spoil, match = SPOIL[which]
    # The last of many splits is bad: the others could have been made before it.
    bad = SplitPlan(plan.graph, [*plan.splits[:-1], spoil(plan.splits[-1])])
    refuse(bad, model, match, optimizer=optimizer)


@pytest.mark.parametrize("weights", [[0.5, 0.5], torch.tensor([1, 0])], ids=["list", "integers"])
def test_weights_of_another_type_are_refused(weights: object) -> None:
    model, plan, optimizer = prepared()
    bad = SplitPlan(plan.graph, [*plan.splits[:-1], replace(plan.splits[-1], weights=weights)])
    refuse(bad, model, "weights must be", optimizer=optimizer, error=TypeError)


@pytest.mark.parametrize("eps", [-0.1, NAN, float("inf"), "0.1", None])
def test_a_bad_step_is_refused(eps: float) -> None:
    model, plan, optimizer = prepared()
    refuse(plan, model, "eps must be", eps=eps, optimizer=optimizer)


def test_the_optimizer_of_another_model_is_refused() -> None:
    model, plan, _ = prepared()
    refuse(plan, model, "not the model's", optimizer=torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1))


def test_an_optimizer_that_holds_more_than_the_model_is_refused() -> None:
    model, plan, _ = prepared()
    extra = nn.Parameter(torch.zeros(3))
    refuse(plan, model, "1 parameter", optimizer=torch.optim.SGD([*model.parameters(), extra], lr=0.1))


@pytest.mark.parametrize("kind", [torch.optim.ASGD, torch.optim.LBFGS])
def test_an_optimizer_of_another_kind_is_refused(kind: type[torch.optim.Optimizer]) -> None:
    model, plan, _ = prepared()
    optimizer = kind(model.parameters(), lr=0.1)
    words = f"SGD, Adam, AdamW.*got {kind.__name__}.*register_optimizer"
    refuse(plan, model, words, optimizer=optimizer, error=TypeError)


def test_a_stale_plan_is_refused() -> None:
    model, plan, optimizer = prepared()
    apply_splits(model, plan, eps=0.0, optimizer=optimizer)
    # The message names the first layer of the model that has changed.
    refuse(plan, model, r"plan does not fit the model.*'stem\.0'", optimizer=optimizer)


def test_a_plan_for_another_architecture_is_refused() -> None:
    _, plan, _ = prepared()
    refuse(plan, BY_NAME["mlp"].model(), "has no layer")


def test_a_model_whose_columns_do_not_fit_is_refused() -> None:
    model, plan, optimizer = prepared()
    conv = model.blocks[1].conv2
    conv.weight = nn.Parameter(conv.weight.detach()[:, :-1].contiguous())
    conv.in_channels -= 1
    refuse(plan, model, r"'blocks\.1\.conv2'", error=(ValueError, TypeError))
    assert optimizer.state


def test_checks_do_not_evaluate_computed_weights() -> None:
    model = BY_NAME["mlp"].model()
    nn.utils.parametrizations.spectral_norm(model.layers[4])
    x = BY_NAME["mlp"].inputs()
    plan = random_plan(trace(model, x), 2, units=["layers.0"])
    # In train mode, every access to the weight updates the vectors of spectral_norm.
    model.train()
    refuse(SplitPlan(plan.graph, [*plan.splits, plan.splits[0]]), model, "split twice")
    before = outputs(model, x)
    apply_splits(model, plan, eps=0.0)
    assert relative_error(outputs(model, x), before) < 1e-10


def test_unknown_optimizer_state_is_refused() -> None:
    model, plan, optimizer = prepared()
    parameter = model.blocks[2].conv1.weight
    optimizer.state[parameter]["my_average"] = torch.zeros_like(parameter)
    refuse(plan, model, "'my_average'", optimizer=optimizer)
