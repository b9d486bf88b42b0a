"""Small models for the tests of tracing, and what these tests assert about graphs and splits."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from s3d_fast import Graph, SplitPlan, apply_splits, trace
from s3d_fast.network.graph import READ
from tests.cases import relative_error
from tests.model_cases import net, outputs, random_plan, unseen_plan

IMAGES = (2, 3, 6, 6)


def two_linear(between: Callable[[nn.Module, Tensor], Tensor], **parts: nn.Module) -> nn.Module:
    """Return a model of two linear layers, `up` and `down`, with `between` applied between them."""
    parts = {"up": nn.Linear(4, 6), "down": nn.Linear(6, 2), **parts}
    return net(lambda self, x: self.down(between(self, self.up(x))), **parts)


def conv_then(after: Callable[[nn.Module, Tensor], object], **parts: nn.Module) -> nn.Module:
    """Return a model of a convolution with four filters and SiLU, followed by `after`."""
    return net(lambda self, x: after(self, F.silu(self.conv(x))), conv=nn.Conv2d(3, 4, 3, padding=1), **parts)


def row(graph: Graph, name: str) -> str:
    """Return the line of `graph.explain()` for one layer."""
    (line,) = [line for line in graph.explain().splitlines() if line.split()[:1] == [name]]
    return line


def assert_blocked(graph: Graph, name: str, *words: str) -> None:
    """Assert that a layer is no unit, and that its line of `graph.explain()` contains the given words."""
    assert name not in graph.units
    line = row(graph, name)
    assert re.search(r"\bno\b", line)
    for word in words:
        assert word in line, f"{word!r} is not in {line!r}"


def every_kind_of_plan(graph: Graph) -> Iterator[tuple[str, SplitPlan, float]]:
    """Yield plans that keep the outputs, with their names and step sizes.

    At a step of zero all units are split together. Every unit is also split alone, at its first, its last and every
    second channel, into three copies: the one that moves has weight zero, so that the outputs are kept at any step.
    """
    yield "all units", random_plan(graph, 3), 0.0
    for unit in graph:
        for name, neurons in {
            "first": [0],
            "last": [unit.width - 1],
            "every second": range(0, unit.width, 2),
        }.items():
            yield f"{name} of {unit.name}", unseen_plan(graph, unit.name, neurons), 1.0


def assert_splits_keep_outputs(model: nn.Module, x: Tensor, graph: Graph | None = None) -> Graph:
    """Assert that the model has units, and that splits which must not be seen are not; return its graph."""
    graph = trace(model, x) if graph is None else graph
    assert graph.units
    more = torch.cat([x, x.flip(-1)])[1:]
    inputs = [x, more] if len(x) > 1 else [x]
    before = [outputs(model, one) for one in inputs]
    for name, plan, eps in every_kind_of_plan(graph):
        split = copy.deepcopy(model)
        apply_splits(split, plan, eps=eps)
        for one, wanted in zip(inputs, before, strict=True):
            assert relative_error(outputs(split, one), wanted) < 1e-10, name
    return graph


def columns(graph: Graph, tensor: str, axis: int = 1) -> list[tuple[str, int] | None]:
    """Return, for every column of a weight, the unit and the channel that it reads; None if it reads no unit's."""
    names, layout = list(graph.units), graph.tensors[tensor][axis]
    assert all(role == READ for role, unit in zip(layout.role, layout.unit, strict=True) if unit >= 0)
    return [
        None if unit < 0 else (names[unit], int(channel))
        for unit, channel in zip(layout.unit, layout.channel, strict=True)
    ]


def channels_of(unit: str, width: int, times: int = 1) -> list[tuple[str, int] | None]:
    """Return the channels of a unit in order, each of them `times` times."""
    return [(unit, channel) for channel in range(width) for _ in range(times)]
