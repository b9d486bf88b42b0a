"""Optimizers: their state is carried through splits, their refusals name the way out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import s3d_fast as s3d
from s3d_fast.splitting import optimizers
from tests.model_cases import random_plan

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2, eps=1e-30),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2, eps=1e-30),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2, eps=1e-30),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-30),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
}


class Lion(torch.optim.Optimizer):
    """Steps by the sign of an average of gradients."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.sub_(group["lr"] * torch.sign(0.9 * average + 0.1 * p.grad))
                average.mul_(0.99).add_(p.grad, alpha=0.01)


class Wrapped(torch.optim.Optimizer):
    """A wrapper with the interface of an optimizer, as Accelerate has."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


@pytest.fixture(autouse=True)
def _fresh_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "_STATES", dict(optimizers._STATES))


def network() -> tuple[nn.Module, Tensor, Tensor]:
    """Return a small network and data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.SiLU(), nn.Linear(5, 2)).double()
    return model, torch.randn(9, 3, dtype=torch.float64), torch.randn(9, 2, dtype=torch.float64)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Take one step of training."""
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()


@pytest.mark.parametrize("name", MAKERS)
def test_copies_step_like_the_original_where_steps_do_not_depend_on_the_size_of_gradients(name: str) -> None:
    # With eps -> 0 these optimizers divide by the size of the gradient, so a copy moves exactly like its original.
    model, x, y = network()
    optimizer = MAKERS[name](model.parameters())
    # RAdam begins with plain gradients.
    for _ in range(8):
        step(model, optimizer, x, y)
    graph = s3d.trace(model, x)
    whole = copy.deepcopy(model)
    plan = random_plan(graph, 2, units=["0"], signed=False)
    s3d.apply_splits(model, plan, eps=0.0, optimizer=optimizer)
    states = optimizer.state[model[0].weight]  # type: ignore[index]
    assert all(value.shape in ((), model[0].weight.shape) for value in states.values() if isinstance(value, Tensor))  # type: ignore[union-attr, index]
    step(model, optimizer, x, y)
    first, again = model[0].weight.detach(), whole[0].weight.detach()  # type: ignore[index]
    rows = torch.arange(4).repeat_interleave(2)
    moved = (first - again[rows]).abs().max()
    assert moved > 1e-4
    # Both copies of a row have moved alike.
    torch.testing.assert_close(first[0::2], first[1::2], rtol=1e-9, atol=1e-12)


def test_factored_second_moments_grow_along_their_own_axes() -> None:
    model, x, y = network()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    step(model, optimizer, x, y)
    before = optimizer.state[model[2].weight]["row_var"].clone()  # type: ignore[index]
    plan = random_plan(s3d.trace(model, x), 2)
    s3d.apply_splits(model, plan, eps=0.0, optimizer=optimizer)
    state = optimizer.state[model[2].weight]  # type: ignore[index]
    assert state["row_var"].shape == (10, 1)
    assert state["col_var"].shape == (1, 8)
    weights = torch.cat([split.weights for split in plan.splits if split.unit == "2"])
    torch.testing.assert_close(state["row_var"], before.repeat_interleave(2, 0) * weights[:, None] ** 2)
    step(model, optimizer, x, y)


def test_an_unknown_optimizer_is_refused_until_it_is_registered() -> None:
    model, x, y = network()
    optimizer = Lion(model.parameters())
    step(model, optimizer, x, y)
    plan = random_plan(s3d.trace(model, x), 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(TypeError, match=r"s3d_fast\.register_optimizer\(Lion"):
        s3d.apply_splits(model, plan, eps=0.1, optimizer=optimizer)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    s3d.register_optimizer(Lion, {"exp_avg": "gradient"})
    s3d.apply_splits(model, plan, eps=0.1, optimizer=optimizer)
    assert optimizer.state[model[0].weight]["exp_avg"].shape == (8, 3)  # type: ignore[index]
    step(model, optimizer, x, y)


def test_a_state_that_was_not_registered_is_refused() -> None:
    model, x, y = network()
    optimizer = Lion(model.parameters())
    step(model, optimizer, x, y)
    s3d.register_optimizer(Lion, {})
    with pytest.raises(ValueError, match=r"'exp_avg' of shape .*register_optimizer"):
        s3d.apply_splits(model, random_plan(s3d.trace(model, x), 2), eps=0.1, optimizer=optimizer)


@pytest.mark.parametrize(
    ("kind", "state", "error"), [(nn.Linear, {}, TypeError), (Lion, {"exp_avg": "like a gradient"}, ValueError)]
)
def test_bad_registrations_are_refused(kind: Any, state: dict[str, str], error: type[Exception]) -> None:
    with pytest.raises(error):
        s3d.register_optimizer(kind, state)


def test_a_wrapped_optimizer_is_seen_through() -> None:
    model, x, y = network()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, x, y)
    s3d.apply_splits(model, random_plan(s3d.trace(model, x), 2), eps=0.1, optimizer=Wrapped(optimizer))
    assert optimizer.state[model[0].weight]["exp_avg"].shape == (8, 3)  # type: ignore[index]


def test_an_average_of_the_model_grows_along() -> None:
    model, x, y = network()
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        step(model, optimizer, x, y)
        ema.update_parameters(model)
    plan = random_plan(s3d.trace(model, x), 3)
    with torch.no_grad():
        before = ema(x)
        assert not torch.allclose(before, model(x))
    s3d.apply_splits(model, plan, eps=0.0, optimizer=optimizer, also=[ema])
    torch.testing.assert_close(ema(x), before, rtol=1e-9, atol=1e-9)
    step(model, optimizer, x, y)
    ema.update_parameters(model)


def test_a_model_that_does_not_fit_stops_everything() -> None:
    model, x, _ = network()
    other = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 6), nn.SiLU(), nn.Linear(6, 2)).double()
    with pytest.raises(ValueError, match=r"plan does not fit also\[0\]"):
        s3d.apply_splits(model, random_plan(s3d.trace(model, x), 2), eps=0.1, also=[other])
    assert model[0].out_features == 4  # type: ignore[index, union-attr]


class Divided(nn.Module):
    """Divides by a number of neurons if asked."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.divide = nn.Linear(3, 4), nn.Linear(4, 2), False

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(torch.tanh(self.up(x)))
        return h / self.up.out_features if self.divide else h


def test_a_check_finds_a_change_and_undoes_it() -> None:
    model, x = Divided().double(), torch.randn(5, 3, dtype=torch.float64)
    plan = random_plan(s3d.trace(model, x), 2)
    model.divide = True
    weight = model.up.weight
    with pytest.raises(ValueError, match=r"check: the split would change the model's outputs by 0\.5"):
        s3d.apply_splits(model, plan, eps=0.1, check=x)
    assert model.up.weight is weight
    assert model.up.out_features == 4
    model.divide = False
    s3d.apply_splits(model, plan, eps=0.1, check=x)
    assert model.up.out_features == 8


def test_a_plan_of_a_graph_without_a_proof_needs_a_check() -> None:
    model, x = Divided().double(), torch.randn(5, 3, dtype=torch.float64)
    plan = random_plan(s3d.trace(model, x, prove=False), 2)
    with pytest.raises(ValueError, match="prove=False"):
        s3d.apply_splits(model, plan, eps=0.1)
    assert model.up.out_features == 4
    s3d.apply_splits(model, plan, eps=0.1, check=x)
    assert model.up.out_features == 8
