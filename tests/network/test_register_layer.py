"""Registration: which arguments it accepts and which it refuses at once, and how registered layers are followed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import s3d_fast as s3d
from s3d_fast.network import registered
from tests.cases import relative_error
from tests.model_cases import data, net, random_plan, squared_error
from tests.network.tracing_cases import assert_splits_keep_outputs, two_linear


@pytest.fixture(autouse=True)
def _fresh_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered, "REGISTERED", dict(registered.REGISTERED))


class Act(nn.Module):
    """An activation that is not known without registration."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x)


@dataclass
class Maker:
    """A callable with options that cannot be hashed."""

    name: str

    def __call__(self, module: nn.Module) -> s3d.Activation:
        assert isinstance(module, Act)
        return s3d.activation(self.name)


@pytest.mark.parametrize(
    "which",
    ["silu", nn.SiLU(), F.silu, s3d.activation("silu"), lambda module: s3d.activation("silu"), Maker("silu")],
    ids=["name", "module", "function", "activation", "lambda", "callable"],
)
def test_an_activation_can_be_given_in_every_form(which: Any) -> None:
    s3d.register_layer(Act, activation=which)
    model = net(lambda self, x: self.down(self.act(self.up(x))), up=nn.Linear(3, 4), act=Act(), down=nn.Linear(4, 2))  # type: ignore[operator]
    x, target = data(5, 3), data(5, 2)
    graph = s3d.trace(model, x)
    assert graph.units["up"].activation.name == "silu"
    assert s3d.capture(model, squared_error, [(x, target)], graph)["up"].dense().shape == (4, 4, 4)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"activation": 3}, TypeError, "activation must be an Activation, a name, module or function .*got 3"),
        ({"activation": ["silu"]}, TypeError, "activation must be an Activation"),
        ({"activation": nn.SiLU}, TypeError, "activation must be an Activation"),
        ({"activation": nn.Linear(2, 2)}, TypeError, "activation must be an Activation"),
        ({"activation": "swoosh"}, ValueError, "activation must be one of relu, .*got 'swoosh'"),
        ({"per_channel": "weight"}, TypeError, "per_channel must be a sequence of names.*got 'weight'"),
        ({"per_channel": ["weight", 3]}, TypeError, "per_channel must be a sequence of names"),
        ({"per_channel": None}, TypeError, "per_channel must be a sequence of names"),
        ({"size_attributes": "channels"}, TypeError, "size_attributes must be a sequence of names"),
        ({"size_attributes": [None]}, TypeError, "size_attributes must be a sequence of names"),
    ],
)
def test_a_bad_registration_is_refused_at_once(options: Mapping[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        s3d.register_layer(Act, **options)
    assert registered.custom_layer(Act()) is None


def test_a_function_that_returns_no_activation_is_an_error() -> None:
    s3d.register_layer(Act, activation=lambda module: "silu")  # type: ignore[arg-type, return-value]
    model = net(lambda self, x: self.down(self.act(self.up(x))), up=nn.Linear(3, 4), act=Act(), down=nn.Linear(4, 2))  # type: ignore[operator]
    with pytest.raises(TypeError, match="the activation of Act must make an Activation, got 'silu'"):
        s3d.trace(model, data(5, 3))


class Swish2(nn.Module):
    """x sigmoid(2 x), with control flow that torch.export cannot follow."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(2 * x) if bool(torch.isfinite(x).all()) else x


class Scale(nn.Module):
    """A factor per channel of the last axis."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.factor = nn.Parameter(torch.linspace(0.5, 2.0, channels))

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[-1] == self.channels
        return x * self.factor


def swish2() -> s3d.Activation:
    def first(z: Tensor) -> Tensor:
        s = torch.sigmoid(2 * z)
        return s + 2 * z * s * (1 - s)

    def second(z: Tensor) -> Tensor:
        s = torch.sigmoid(2 * z)
        return 4 * s * (1 - s) * (1 + z * (1 - 2 * s))

    return s3d.Activation("swish2", lambda z: z * torch.sigmoid(2 * z), first, second)


@pytest.mark.parametrize("fixed", [True, False], ids=["activation", "function of the module"])
def test_a_users_activation_can_be_registered(fixed: bool) -> None:
    s3d.register_layer(Swish2, activation=swish2() if fixed else lambda module: swish2())
    model = two_linear(lambda self, h: self.act(h), act=Swish2())
    x = data(9, 4)
    graph = assert_splits_keep_outputs(model, x)
    unit = graph.units["up"]
    assert unit.activation is not None
    assert unit.activation.name == "swish2"
    assert unit.activations() == ["swish2"]

    # x sigmoid(2 x) = silu(2 x) / 2: the curvature can be compared with a SiLU at twice the weights.
    doubled = two_linear(lambda self, h: F.silu(h) * 0.5)
    with torch.no_grad():
        doubled.load_state_dict(model.state_dict())
        doubled.up.weight.mul_(2)
        doubled.up.bias.mul_(2)
    target = data(9, 2)
    S = s3d.capture(model, squared_error, [(x, target)], graph)["up"].dense()
    S2 = s3d.capture(doubled, squared_error, [(x, target)], s3d.trace(doubled, x))["up"].dense()
    assert relative_error(S, 4 * S2) < 1e-12


def test_a_registered_activation_may_be_used_many_times() -> None:
    s3d.register_layer(Swish2, activation=swish2())

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.c(self.act(self.b(self.act(self.a(x)))))

    model = net(forward, a=nn.Linear(4, 5), b=nn.Linear(5, 6), c=nn.Linear(6, 2), act=Swish2())
    assert list(s3d.trace(model, data(3, 4)).units) == ["a", "b"]


@pytest.mark.parametrize("linear", [True, False])
def test_a_scale_per_channel_can_be_registered(linear: bool) -> None:
    s3d.register_layer(Scale, per_channel=["factor"], size_attributes=["channels"], linear=linear)
    model = two_linear(lambda self, h: self.scale(F.silu(h)), scale=Scale(6))
    graph = assert_splits_keep_outputs(model, data(3, 4))
    unit = graph.units["up"]
    assert unit.followers == ("scale",)
    assert unit.consumers == ("down",)
    assert len(unit.activations()) == (1 if linear else 2)
    s3d.apply_splits(model, random_plan(graph, 2), eps=0.0)
    assert model.scale.channels == len(model.scale.factor) == 12
