"""Splits and loads that fail halfway leave model and optimizer as they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import s3d_fast as s3d
from s3d_fast.growth import checkpoint
from s3d_fast.models.mlp import MLP
from s3d_fast.network import registered
from tests.model_cases import data, net, outputs, random_plan


@pytest.fixture(autouse=True)
def _fresh_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered, "REGISTERED", dict(registered.REGISTERED))


class Scale(nn.Module):
    """A factor per channel; subclasses define the attribute `channels`."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.offset: nn.Parameter | None
        self.register_parameter("offset", None)
        self.factor = nn.Parameter(torch.rand(channels, dtype=torch.float64) + 0.5)
        self.register_buffer("seen", torch.arange(channels))
        self._channels = channels

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class ReadOnly(Scale):
    """The number of channels cannot be set."""

    @property
    def channels(self) -> int:
        return self._channels


class Refusing(ReadOnly):
    """Setting the number of channels fails halfway."""

    error: BaseException = RuntimeError("no other size than mine")

    @property
    def channels(self) -> int:
        return self._channels

    @channels.setter
    def channels(self, channels: int) -> None:
        self._channels = channels
        self.extra = "left behind"
        raise self.error


class Interrupted(Refusing):
    """The user stops the programme while the number of channels is set."""

    error = KeyboardInterrupt()


class Following(Scale):
    """The number of channels is computed from a tensor."""

    @property
    def channels(self) -> int:
        return len(self.factor)


def scaled(scale: type[Scale], width: int = 5) -> nn.Module:
    """Return a model with a registered layer between two others, all in float64."""
    s3d.register_layer(
        scale, per_channel=["offset", "factor", "seen"], size_attributes=["channels"], activation=None, linear=True
    )
    torch.manual_seed(0)
    parts = {"up": nn.Linear(3, width), "scale": scale(width), "down": nn.Linear(width, 2)}
    return net(lambda self, x: self.down(self.scale(F.silu(self.up(x)))), **parts)  # type: ignore[operator]


def contents(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[object]:
    """Return the identities and contents of all objects in a model and its optimizer."""
    found: list[object] = []

    def note(name: object, value: object) -> None:
        held = value.detach().cpu().numpy().tobytes() if isinstance(value, Tensor) else None
        found.append((name, id(value), held))

    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            note((name, attribute), value)
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
            note((name, attribute), tensor)
    if optimizer is not None:
        for group in optimizer.param_groups:
            note("group", group)
            for key, value in group.items():
                note(key, value)
            found.append([id(parameter) for parameter in group["params"]])
        for parameter, state in optimizer.state.items():
            note("state", state)
            found.append(id(parameter))
            for key, value in state.items():
                note(key, value)
    return found


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer | None]] = {
    "none": lambda parameters: None,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("scale", "error"), [(ReadOnly, ValueError), (Refusing, ValueError), (Interrupted, KeyboardInterrupt)]
)
def test_a_size_that_cannot_be_set_leaves_model_and_optimizer_alone(
    scale: type[Scale], error: type[BaseException], name: str
) -> None:
    model = scaled(scale)
    x = data(4, 3)
    optimizer = OPTIMIZERS[name](model.parameters())
    model(x).square().sum().backward()
    if optimizer is not None:
        optimizer.step()
    # The proof would have found out already.
    graph = s3d.trace(model, x, prove=False)
    graph.is_proved = True
    plan = random_plan(graph, 2)
    result = outputs(model, x)
    before = contents(model, optimizer)
    words = f"'channels' of {scale.__name__} cannot be set to 10" if error is ValueError else None
    with pytest.raises(error, match=words):
        s3d.apply_splits(model, plan, 0.1, optimizer)
    assert contents(model, optimizer) == before
    assert torch.equal(outputs(model, x), result)


@pytest.mark.parametrize("scale", [ReadOnly, Refusing])
def test_a_size_that_cannot_be_set_is_found_by_the_proof(scale: type[Scale]) -> None:
    model = scaled(scale)
    before = contents(model)
    graph = s3d.trace(model, data(4, 3))
    assert graph.units == {}
    assert f"'channels' of {scale.__name__} cannot be set to " in (graph.layers["up"].reason or "")
    assert contents(model) == before


def test_an_interrupted_proof_leaves_the_model_alone() -> None:
    model = scaled(Interrupted)
    before = contents(model)
    with pytest.raises(KeyboardInterrupt):
        s3d.trace(model, data(4, 3))
    assert contents(model) == before


def test_a_size_that_follows_the_tensors_need_not_be_set() -> None:
    model = scaled(Following)
    x = data(4, 3)
    before = outputs(model, x)
    s3d.apply_splits(model, random_plan(s3d.trace(model, x), 2), 0.0)
    assert isinstance(model.scale, Following)
    assert model.scale.channels == 10
    torch.testing.assert_close(outputs(model, x), before)


class Padded(nn.Module):
    """A model with buffers that cannot be written in place."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        self.register_buffer("padding", torch.zeros(1).expand(5))
        with torch.inference_mode():
            self.register_buffer("made_elsewhere", torch.zeros(2))
        self.register_buffer("windows", torch.arange(5.0).unfold(0, 3, 1))
        self.last = nn.Linear(width, 2)

    @property
    def out_features(self) -> int:
        """The size of a part; it has no setter."""
        return self.first.out_features

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x))) + self.padding.sum() + self.made_elsewhere.sum()


@pytest.mark.parametrize("width", [3, 4])
def test_views_that_cannot_be_written_are_replaced(width: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    source, model = Padded(4), Padded(width)
    source.padding = torch.arange(5.0)
    source.made_elsewhere = torch.tensor([7.0, 8.0])
    source.windows = torch.arange(9.0).reshape(3, 3)
    s3d.save_grown(source, tmp_path / "net.safetensors")
    s3d.load_grown(model, tmp_path / "net.safetensors")
    for name, tensor in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert model.out_features == 4
    assert torch.equal(outputs(model, torch.ones(1, 2)), outputs(source, torch.ones(1, 2)))
    # Parameters that have the right size stay the same objects.
    again = [id(parameter) for parameter in model.parameters()]
    s3d.load_grown(model, tmp_path / "net.safetensors")
    assert [id(parameter) for parameter in model.parameters()] == again


@pytest.mark.parametrize(
    ("scale", "error"), [(ReadOnly, ValueError), (Refusing, ValueError), (Interrupted, KeyboardInterrupt)]
)
def test_a_load_that_fails_leaves_the_model_alone(
    scale: type[Scale], error: type[BaseException], tmp_path: Path
) -> None:
    source, model = scaled(scale, 7), scaled(scale, 5)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1)
    s3d.save_grown(source, tmp_path / "net.safetensors")
    before = contents(model)
    with pytest.raises(error):
        s3d.load_grown(model, tmp_path / "net.safetensors")
    # The last layer's bias has the same size as in the file: it was written, and then restored.
    assert contents(model) == before


def test_a_tensor_that_cannot_be_written_leaves_the_model_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MLP([2, 3, 2])
    s3d.save_grown(MLP([2, 3, 2]), tmp_path / "net.safetensors")
    before = contents(model)
    copy = Tensor.copy_

    def failing(tensor: Tensor, *arguments: Any) -> Tensor:
        if tensor is model.get_parameter("layers.2.weight"):
            raise RuntimeError("cannot be written")
        return copy(tensor, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "copy_", failing)
        with pytest.raises(RuntimeError, match="cannot be written"):
            s3d.load_grown(model, tmp_path / "net.safetensors")
    assert contents(model) == before


def test_a_size_that_follows_the_tensors_is_loaded(tmp_path: Path) -> None:
    source, model = scaled(Following, 7), scaled(Following, 5)
    s3d.save_grown(source, tmp_path / "net.safetensors")
    s3d.load_grown(model, tmp_path / "net.safetensors")
    x = data(4, 3)
    assert torch.equal(outputs(model, x), outputs(source, x))
    assert list(s3d.trace(model, x).widths().values()) == [7]


def test_a_registered_layer_without_size_and_without_its_first_tensor_is_loaded(tmp_path: Path) -> None:
    source, model = scaled(Scale, 7), scaled(Scale, 5)
    s3d.register_layer(Scale, per_channel=["offset", "factor", "seen"], linear=True)
    s3d.save_grown(source, tmp_path / "net.safetensors")
    s3d.load_grown(model, tmp_path / "net.safetensors")
    assert torch.equal(outputs(model, data(4, 3)), outputs(source, data(4, 3)))
    # A tensor without dimensions has no channels.
    tensors, record = checkpoint.read(tmp_path / "net.safetensors")
    tensors["scale.factor"] = torch.zeros((), dtype=torch.float64)
    before = contents(model)
    with pytest.raises(ValueError, match=r"scale\.factor"):
        checkpoint.restore(model, tensors, record)
    assert contents(model) == before


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight


@pytest.mark.parametrize("width", [3, 4])
def test_a_weight_that_two_layers_share_stays_one_weight(width: int, tmp_path: Path) -> None:
    source, model = Tied(4), Tied(width)
    s3d.save_grown(source, tmp_path / "net.safetensors")
    s3d.load_grown(model, tmp_path / "net.safetensors")
    assert model.first.weight is model.second.weight
    assert torch.equal(model.first.weight, source.first.weight)
