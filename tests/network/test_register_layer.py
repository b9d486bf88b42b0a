"""Registration: which arguments it accepts, and which it refuses at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

import s3d_fast as s3d
from s3d_fast.network import registered
from tests.model_cases import data, net, squared_error


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
