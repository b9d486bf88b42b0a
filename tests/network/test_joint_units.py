"""Joint units: layers whose channels are added, multiplied or shared are split together; parts of layers apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from s3d_fast import trace
from tests.model_cases import BY_NAME, data, net, traced
from tests.network.tracing_cases import (
    IMAGES,
    assert_blocked,
    assert_splits_keep_outputs,
    channels_of,
    columns,
    conv_then,
)


def test_the_layers_of_a_residual_stream_are_one_unit() -> None:
    _, graph = traced(BY_NAME["resnet"])
    stem = graph.units["stem.0"]
    assert {"stem.1", "blocks.0.conv2", "blocks.0.bn2", "blocks.1.conv2", "blocks.1.bn2"} == set(stem.followers)
    assert stem.consumers == ("blocks.0.conv1", "blocks.1.conv1", "blocks.2.conv1", "blocks.2.shortcut.0")
    assert [one.weight for one in stem.filters] == ["stem.0.weight", "blocks.0.conv2.weight", "blocks.1.conv2.weight"]
    assert stem.activations() == ["silu"] * 3
    for name in ("blocks.0.conv2", "blocks.1.conv2"):
        assert_blocked(graph, name, "it is split along with 'stem.0'")
    assert_blocked(graph, "blocks.2.shortcut.0", "it is split along with 'blocks.2.conv2'")
    assert "blocks.2.shortcut.0" in graph.units["blocks.2.conv2"].followers
    assert graph.units["blocks.1.conv1"].consumers == ("blocks.1.conv2",)


def four(forward: Callable[[nn.Module, Tensor], Tensor], **parts: nn.Module) -> nn.Module:
    """Return a model with layers of 4 -> 6 (a and b), 6 -> 6 (mid) and 6 -> 2 (c and d) channels."""
    layers = {"a": nn.Linear(4, 6), "b": nn.Linear(4, 6), "mid": nn.Linear(6, 6)}
    return net(forward, **layers, c=nn.Linear(6, 2), d=nn.Linear(6, 2), **parts)


def share(model: nn.Module, one: str, other: str) -> nn.Module:
    """Let a layer use the weight of another one."""
    model.get_submodule(other).weight = model.get_submodule(one).weight
    return model


# A model, its only unit, the layers that are split along with it, and the layers that read its channels.
JOINT: dict[str, tuple[Callable[[], nn.Module], str, tuple[str, ...], tuple[str, ...]]] = {
    "residual addition": (
        lambda: four(lambda s, x: s.c(F.silu(h := F.silu(s.a(x))) + s.mid(h))),
        "a",
        ("mid",),
        ("mid", "c"),
    ),
    "gate": (lambda: four(lambda s, x: s.c(F.relu(s.a(x)) * torch.sigmoid(s.b(x)))), "a", ("b",), ("c",)),
    "gate that the channels make": (
        lambda: four(lambda s, x: s.c((h := F.silu(s.a(x))) * torch.sigmoid(s.mid(h)))),
        "a",
        ("mid",),
        ("mid", "c"),
    ),
    "maximum": (lambda: four(lambda s, x: s.c(torch.max(F.relu(s.a(x)), F.relu(s.b(x))))), "a", ("b",), ("c",)),
    "difference": (lambda: four(lambda s, x: s.c(torch.tanh(s.a(x) - s.b(x)))), "a", ("b",), ("c",)),
    "where": (lambda: four(lambda s, x: s.c(torch.where(s.a(x) > 0, s.a(x), s.b(x)))), "a", ("b",), ("c",)),
    "batchnorm called twice": (
        lambda: four(lambda s, x: s.c(F.relu(s.norm(s.a(x)))) + s.d(F.relu(s.norm(s.b(x)))), norm=nn.BatchNorm1d(6)),
        "a",
        ("b", "norm"),
        ("c", "d"),
    ),
    "layer called twice": (
        lambda: four(lambda s, x: s.c(F.relu(s.mid(F.relu(s.mid(F.relu(s.a(x)))))))),
        "a",
        ("mid",),
        ("mid", "c"),
    ),
    "layers that share their rows": (
        lambda: share(four(lambda s, x: s.c(F.relu(s.a(x))) + s.d(F.silu(s.b(x.square())))), "a", "b"),
        "a",
        ("b",),
        ("c", "d"),
    ),
    "layers that share their columns": (
        lambda: share(four(lambda s, x: s.c(F.relu(s.a(x))) * s.d(F.silu(s.b(x)))), "c", "d"),
        "a",
        ("b",),
        ("c",),
    ),
    "weight that is also used directly": (
        lambda: four(lambda s, x: s.c(F.relu(s.a(x))) + s.d(F.silu(F.linear(x.square(), s.a.weight)))),
        "a",
        (),
        ("c", "d"),
    ),
}


@pytest.mark.parametrize("which", JOINT)
def test_layers_whose_channels_belong_together_are_one_unit(which: str) -> None:
    build, name, along, consumers = JOINT[which]
    graph = assert_splits_keep_outputs(build(), data(3, 4))
    assert list(graph.units) == [name]
    unit = graph.units[name]
    assert (set(unit.followers), set(unit.consumers)) == (set(along), set(consumers))


def test_a_squeeze_and_excitation_gate_is_split_along() -> None:
    def gated(self: nn.Module, h: Tensor) -> Tensor:
        gate = torch.sigmoid(self.expand(F.relu(self.squeeze(h.mean((2, 3), keepdim=True)))))
        return self.head(h * gate)

    layers = {"squeeze": nn.Conv2d(4, 2, 1), "expand": nn.Conv2d(2, 4, 1), "head": nn.Conv2d(4, 2, 1)}
    graph = assert_splits_keep_outputs(conv_then(gated, **layers), data(*IMAGES))
    assert list(graph.units) == ["conv", "squeeze"]
    assert graph.units["conv"].followers == ("expand",)
    assert graph.units["conv"].consumers == ("squeeze", "head")


# Two halves of six channels are multiplied.
GATED_HALVES: dict[str, Callable[[Tensor], Tensor]] = {
    "glu": lambda h: F.glu(h, 1),
    "chunk": lambda h: F.silu(h.chunk(2, 1)[0]) * h.chunk(2, 1)[1],
    "slices": lambda h: F.silu(h[:, : h.shape[1] // 2]) * h[:, h.shape[1] // 2 :],
    "split": lambda h: torch.mul(*torch.tanh(h).split(h.shape[1] // 2, 1)),
}


@pytest.mark.parametrize("which", GATED_HALVES)
def test_channels_that_a_gate_ties_are_split_together(which: str) -> None:
    model = net(lambda self, x: self.down(GATED_HALVES[which](self.up(x))), up=nn.Linear(4, 6), down=nn.Linear(3, 2))
    graph = assert_splits_keep_outputs(model, data(3, 4))
    assert graph.widths() == {"up": 3}
    assert [channel for channel in graph.tensors["up.weight"][0].channel] == [0, 1, 2, 0, 1, 2]


def test_equal_parts_of_a_layer_grow_together_and_unequal_ones_not_at_all() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        a, b = F.silu(self.up(x)).split([self.left.in_features, self.right.in_features], 1)
        return self.left(a) + self.right(b)

    model = net(forward, up=nn.Linear(4, 6), left=nn.Linear(3, 2), right=nn.Linear(3, 2))
    graph = assert_splits_keep_outputs(model, data(3, 4))
    assert graph.widths() == {"up": 3}
    assert columns(graph, "right.weight") == columns(graph, "left.weight") == channels_of("up", 3)
    model = net(forward, up=nn.Linear(4, 7), left=nn.Linear(3, 2), right=nn.Linear(4, 2))
    graph = trace(model, data(3, 4))
    assert not graph.units
    assert "at a place that does not grow along" in str(graph.layers["up"].reason)
