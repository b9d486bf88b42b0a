"""Networks that were once changed without a word, or broken, by a split: each is kept or refused with a reason.

What is wrong about them cannot be seen in a graph of operations: Python code that depends on sizes. Every unit is split
alone and together with the others, at its first, its last, every second and every channel.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from s3d_fast import Graph, SplitPlan, apply_splits, trace
from tests.model_cases import data, net, unseen_plan


@dataclass(frozen=True)
class Case:
    """A network and what is known of it.

    Attributes:
        build: makes the network, equal every time; a copy would share the functions that are set on instances.
        inputs: makes the arguments for a batch size.
        units: the units that it must have; None if any are fine, as long as their splits keep the outputs.
        refused: layers that must not be split, with words of the reason.
        batch: the batch size for `trace`.
        example: makes the arguments for `trace`, if they are special.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    units: tuple[str, ...] | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    batch: int = 3
    example: Callable[[int], tuple[Tensor, ...]] | None = None

    def traced(self) -> Graph:
        """Return the graph of a new network."""
        return trace(self.build(), (self.example or self.inputs)(self.batch))


def rows(batch: int) -> tuple[Tensor, ...]:
    return (data(batch, 4),)


def images(batch: int) -> tuple[Tensor, ...]:
    return (data(batch, 3, 6, 6),)


def tokens(batch: int) -> tuple[Tensor, ...]:
    return (torch.randint(11, (batch, 5), generator=torch.Generator().manual_seed(batch)),)


def plain(width: int = 6, **options: Any) -> nn.Module:
    """Return a model of two linear layers and an activation."""
    layers = {"up": nn.Linear(4, width, **options), "down": nn.Linear(width, 2, **options)}
    return net(lambda self, x: self.down(F.silu(self.up(x))), **layers)


def between(change: Callable[[nn.Module, Tensor], Tensor], width: int = 6, **parts: nn.Module) -> nn.Module:
    """Return a model of two linear layers, with a function of the hidden channels between them."""
    parts = {"up": nn.Linear(4, width), "down": nn.Linear(width, 2), **parts}
    return net(lambda self, x: self.down(change(self, F.silu(self.up(x)))), **parts)


def after_convolution(change: Callable[[nn.Module, Tensor], Tensor], head: nn.Module) -> nn.Module:
    """Return a model of a convolution, a function of its channels, and a last layer."""
    parts = {"conv": nn.Conv2d(3, 4, 3), "head": head}
    return net(lambda self, x: self.head(change(self, F.silu(self.conv(x)))), **parts)


def hooked(layer: str, hook: Callable[..., Any], *, before: bool = False) -> nn.Module:
    """Return a model with a hook on one of its layers; on the model itself if the name is empty."""
    model = plain()
    module = model.get_submodule(layer)
    if before:
        module.register_forward_pre_hook(hook)
    else:
        module.register_forward_hook(hook)
    return model


def replaced_forward(forward: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    """Return a model whose first layer has a `forward` of its own, as some libraries patch them in."""
    model = plain()
    up = model.get_submodule("up")
    up.forward = types.MethodType(forward, up)  # type: ignore[method-assign]
    return model


class ScaledLinear(nn.Linear):
    """Divides by a power of its size."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) * self.out_features**-0.5


class PlainLinear(nn.Linear):
    """Computes what its base class computes, in its own words."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t() + self.bias


class StandardizedConv2d(nn.Conv2d):
    """Normalises every filter: rows stay apart, columns do not."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        weight = weight / (weight.square().mean((1, 2, 3), keepdim=True) + 1e-5).sqrt()
        return self._conv_forward(x, weight, self.bias)


class PaddedConv2d(nn.Conv2d):
    """Pads by an amount of its own before the convolution."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (1, 0, 1, 0)))


def shared_weight() -> nn.Module:
    """Return two layers on different inputs that share a weight, but not their biases."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.c(F.silu(self.a(x))) + self.d(torch.tanh(self.b(x.square())))

    model = net(forward, a=nn.Linear(4, 6), b=nn.Linear(4, 6), c=nn.Linear(6, 2), d=nn.Linear(6, 2))
    model.b.weight = model.a.weight
    return model


def shared_square_weight() -> nn.Module:
    """Return two layers that share a weight, one after the other."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.last(F.silu(self.b(F.silu(self.a(F.silu(self.first(x)))))))

    model = net(forward, first=nn.Linear(4, 6), a=nn.Linear(6, 6), b=nn.Linear(6, 6), last=nn.Linear(6, 2))
    model.b.weight = model.a.weight
    return model


def tied_autoencoder() -> nn.Module:
    """Return a model whose decoder has the transposed weight of its encoder."""
    return net(lambda self, x: F.linear(F.silu(self.up(x)), self.up.weight.t()), up=nn.Linear(4, 6))


def tied_embedding(residual: bool) -> nn.Module:
    """Return a language model whose head has the weight of its embedding."""

    def forward(self: Any, words: Tensor) -> Tensor:
        h = self.embed(words)
        new = self.down(F.silu(self.up(h)))
        return self.head(F.silu(h + new) if residual else new)

    parts = {"up": nn.Linear(4, 6), "down": nn.Linear(6, 4), "head": nn.Linear(4, 11, bias=False)}
    model = net(forward, embed=nn.Embedding(11, 4), **parts)
    model.head.weight = model.embed.weight
    return model


class Auxiliary(nn.Module):
    """A head that is used in training mode only, as in GoogLeNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 5, 3)
        self.head = nn.Linear(5, 2)
        self.extra = nn.Sequential(
            nn.Conv2d(6, 4, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
        )

    def forward(self, x: Tensor) -> Any:
        h = F.silu(self.norm(self.first(x)))
        y = self.head(F.silu(self.second(h)).mean((2, 3)))
        return (y, self.extra(h)) if self.training else y


def auxiliary() -> nn.Module:
    torch.manual_seed(0)
    return Auxiliary().double().eval()


def noisy_in_training() -> nn.Module:
    return between(lambda self, h: h + torch.randn(len(h), 6, dtype=h.dtype) if self.training else h)


def counting_in_training() -> nn.Module:
    """Return a model with a buffer of one number per channel that is used in training mode only."""

    def change(self: Any, h: Tensor) -> Tensor:
        if self.training:
            self.seen.add_(h.detach().mean(0))
        return h

    model = between(change)
    model.register_buffer("seen", torch.zeros(6, dtype=torch.float64))
    return model


def halves(take: Callable[[Tensor], Sequence[Tensor]]) -> nn.Module:
    """Return a model whose hidden channels go to two layers, one half each."""

    def forward(self: Any, x: Tensor) -> Tensor:
        a, b = take(F.silu(self.up(x)))
        return self.left(a) + self.right(b)

    return net(forward, up=nn.Linear(4, 6), left=nn.Linear(3, 2), right=nn.Linear(3, 2))


def halves_of_two_layers() -> nn.Module:
    """Return a model that divides a concatenation in the middle again."""

    def forward(self: Any, x: Tensor) -> Tensor:
        a, b = torch.cat([F.silu(self.a(x)), F.silu(self.b(x))], 1).chunk(2, 1)
        return self.left(a) + self.right(b)

    return net(forward, a=nn.Linear(4, 6), b=nn.Linear(4, 6), left=nn.Linear(6, 2), right=nn.Linear(6, 2))


def compared_widths() -> nn.Module:
    """Return a model that asks whether two layers have the same width."""

    def forward(self: Any, x: Tensor) -> Tensor:
        a, b = F.silu(self.a(x)), F.silu(self.b(x))
        return self.left(a) + (self.right(b) if a.shape == b.shape else 0.0)

    return net(forward, a=nn.Linear(4, 6), b=nn.Linear(4, 6), left=nn.Linear(6, 2), right=nn.Linear(6, 2))


def sized(finish: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a model whose code reads a size, with a function of its output."""
    parts = {"up": nn.Linear(4, 6), "down": nn.Linear(6, 8)}
    return net(lambda self, x: finish(self.down(3 * F.silu(self.up(x)) / self.up.out_features)), **parts)


CHANGES, FAILS = "splitting it changes the output", "after a split the model fails"
CASES: dict[str, Case] = {
    "hook that scales": Case(lambda: hooked("up", lambda module, inputs, output: 2 * output), rows, ("up",)),
    "hook that reads a size": Case(
        lambda: hooked("up", lambda module, inputs, output: output / module.out_features), rows, (), {"up": CHANGES}
    ),
    "hook that reads a shape": Case(
        lambda: hooked("up", lambda module, inputs, output: output / output.shape[-1]), rows, (), {"up": CHANGES}
    ),
    "hook with a factor per channel": Case(
        lambda: hooked("down", lambda module, inputs: (inputs[0] * torch.linspace(1, 2, 6).double(),), before=True),
        rows,
        (),
        {"up": "ties it to a tensor that no layer makes"},
    ),
    "hook on the model": Case(
        lambda: hooked("", lambda module, inputs: (inputs[0] / module.up.out_features,), before=True),
        rows,
        (),
        {"up": CHANGES},
    ),
    "hook that changes the first channel": Case(
        lambda: hooked("up", lambda module, inputs, output: torch.cat([3 * output[:, :1], output[:, 1:]], 1)), rows
    ),
    "size attribute": Case(lambda: between(lambda self, h: h / self.up.out_features), rows, (), {"up": CHANGES}),
    "size of a consumer": Case(lambda: between(lambda self, h: h / self.down.in_features), rows, (), {"up": CHANGES}),
    "size of another axis": Case(lambda: between(lambda self, h: h / self.up.in_features), rows, ("up",)),
    "size attribute, traced with zeros": Case(
        lambda: net(
            lambda self, x: self.down(F.silu(self.up(x)) / self.up.out_features),
            up=nn.Linear(4, 6, bias=False),
            down=nn.Linear(6, 2, bias=False),
        ),
        rows,
        example=lambda batch: (torch.zeros(batch, 4, dtype=torch.float64),),
    ),
    "size attribute, masked outputs": Case(
        lambda: sized(lambda y: y.masked_fill(torch.arange(8) < 2, float("-inf"))), rows
    ),
    "size attribute, complex outputs": Case(
        lambda: sized(lambda y: torch.view_as_complex(y.reshape(-1, 4, 2).contiguous())), rows
    ),
    "size attribute, integer outputs": Case(lambda: sized(lambda y: (100 * y).long()), rows),
    "size attribute, boolean outputs": Case(lambda: sized(lambda y: y > 0.1), rows, batch=8),
    "forward replaced": Case(
        lambda: replaced_forward(lambda self, x: torch.tanh(F.linear(x, self.weight, self.bias))), rows, ("up",)
    ),
    "forward replaced, reads a size": Case(
        lambda: replaced_forward(lambda self, x: F.linear(x, self.weight) / self.out_features),
        rows,
        (),
        {"up": CHANGES},
    ),
    "channels shifted by pad": Case(
        lambda: between(lambda self, h: F.pad(h, (1, -1))), rows, (), {"up": "works along its channels"}
    ),
    "channels of images shifted by pad": Case(
        lambda: after_convolution(lambda self, h: F.pad(h, (0, 0, 0, 0, 1, -1)), nn.Conv2d(4, 2, 1)),
        images,
        (),
        {"conv": "works along its channels"},
    ),
    "channels shifted by roll": Case(
        lambda: between(lambda self, h: h.roll(1, 1)), rows, (), {"up": "moves its channels"}
    ),
    "channels shifted by slices": Case(lambda: between(lambda self, h: torch.cat([h[:, 1:], h[:, :1]], 1), 20), rows),
    "channels shifted by slices from the end": Case(
        lambda: between(lambda self, h: torch.cat([h[:, -1:], h[:, :-1]], 1), 20), rows
    ),
    "halves swapped": Case(
        lambda: between(lambda self, h: torch.cat([h[:, h.shape[1] // 2 :], h[:, : h.shape[1] // 2]], 1), 20), rows
    ),
    "halves by chunk": Case(lambda: halves(lambda h: h.chunk(2, 1)), rows),
    "halves by slices": Case(lambda: halves(lambda h: (h[:, : h.shape[1] // 2], h[:, h.shape[1] // 2 :])), rows),
    "halves of two layers": Case(halves_of_two_layers, rows),
    "widths compared": Case(compared_widths, rows),
    "subclass that reads its size": Case(
        lambda: net(lambda s, x: s.down(F.silu(s.up(x))), up=ScaledLinear(4, 6), down=nn.Linear(6, 2)),
        rows,
        (),
        {"up": CHANGES},
    ),
    "subclass of Linear": Case(
        lambda: net(lambda s, x: s.down(F.silu(s.up(x))), up=PlainLinear(4, 6), down=PlainLinear(6, 2)), rows, ("up",)
    ),
    "subclass of Conv2d": Case(
        lambda: net(lambda s, x: s.b(F.silu(s.a(x))), a=PaddedConv2d(3, 4, 3), b=PaddedConv2d(4, 2, 3)), images, ("a",)
    ),
    "subclass that normalises filters": Case(
        lambda: net(
            lambda s, x: s.c(F.silu(s.b(F.silu(s.a(x))))),
            a=StandardizedConv2d(3, 4, 3),
            b=StandardizedConv2d(4, 5, 3),
            c=nn.Conv2d(5, 2, 1),
        ),
        images,
        ("b",),
        {"a": "takes the mean over its channels"},
    ),
    "view with the size written out": Case(
        lambda: after_convolution(lambda self, h: h.view(-1, 64), nn.Linear(64, 2)), images, (), {"conv": FAILS}
    ),
    "view with the channels written out": Case(
        lambda: after_convolution(lambda self, h: h.view(len(h), 4, 16).mean(2), nn.Linear(4, 2)),
        images,
        (),
        {"conv": FAILS},
    ),
    "view, as many samples as channels": Case(
        lambda: after_convolution(lambda self, h: h.view(h.shape[0], -1), nn.Linear(64, 2)), images, ("conv",), batch=4
    ),
    "view, as many positions as channels": Case(
        lambda: after_convolution(lambda self, h: h.view(-1, h.shape[2], h.shape[1], 4).mean((1, 3)), nn.Linear(4, 2)),
        images,
        (),
        {"conv": ""},
        batch=4,
    ),
    "linear layer on another axis": Case(
        lambda: net(
            lambda s, x: s.head(s.line(F.silu(s.conv(x))).mean((2, 3))),
            conv=nn.Conv2d(3, 4, 3),
            line=nn.Linear(4, 5),
            head=nn.Linear(4, 2),
        ),
        images,
        ("conv",),
        batch=4,
    ),
    "in place after alpha_dropout": Case(
        lambda: between(lambda self, h: F.alpha_dropout(h, 0.5, self.training).mul_(2.0)), rows, ("up",)
    ),
    "shared weight": Case(shared_weight, rows, ("a",)),
    "shared square weight": Case(shared_square_weight, rows, ("first",)),
    "tied autoencoder": Case(tied_autoencoder, rows, (), {"up": "a weight that it uses is shared"}),
    "tied embedding": Case(lambda: tied_embedding(residual=False), tokens, ("up",), {"down": ""}),
    "tied embedding, residual": Case(lambda: tied_embedding(residual=True), tokens, ("up",), {"down": ""}),
    "auxiliary head": Case(auxiliary, images, ("second",), {"first": "fails in training, where it also uses extra"}),
    "noise of a size written out, in training": Case(noisy_in_training, rows),
    "numbers per channel, in training": Case(counting_in_training, rows),
}


@cache
def graph_of(name: str) -> Graph:
    return CASES[name].traced()


def tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def evaluated(model: nn.Module, arguments: tuple[Tensor, ...]) -> list[Tensor]:
    with torch.no_grad():
        return tensors(model.eval()(*arguments))


def assert_equal_outputs(found: list[Tensor], wanted: list[Tensor], what: str) -> None:
    for one, other in zip(found, wanted, strict=True):
        if not other.is_floating_point() and not other.is_complex():
            assert torch.equal(one, other), what
            continue
        size = float(other[torch.isfinite(other)].abs().max())
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9 * size, msg=lambda text: f"{what}: {text}")


def plans(graph: Graph) -> Iterator[tuple[str, SplitPlan]]:
    """Yield plans for every unit alone and for all of them, with their names."""

    def neurons(unit: str) -> dict[str, list[int]]:
        every = list(range(graph.units[unit].width))
        return {"first": every[:1], "last": every[-1:], "every second": every[::2], "every": every}

    for which in ("first", "last", "every second", "every"):
        alone = {name: unseen_plan(graph, name, neurons(name)[which]) for name in graph.units}
        for name, plan in alone.items():
            yield f"{which} channel of {name}", plan
        yield f"{which} channel of all units", SplitPlan(graph, [s for plan in alone.values() for s in plan.splits])


@pytest.mark.parametrize("name", CASES)
def test_units_are_found_or_refused_with_a_reason(name: str) -> None:
    case, graph = CASES[name], graph_of(name)
    if case.units is not None:
        assert tuple(graph.units) == case.units
    for layer, words in case.refused.items():
        assert layer not in graph.units
        assert words in (graph.layers[layer].reason or "")
    for layer in graph.layers.values():
        if layer.makes_channels and layer.name not in graph.units:
            assert layer.reason
            assert layer.reason in graph.explain()


@pytest.mark.parametrize("name", CASES)
def test_splits_are_not_seen_in_the_outputs(name: str) -> None:
    case, graph = CASES[name], graph_of(name)
    arguments = [case.inputs(case.batch), case.inputs(case.batch + 2)]
    before = [evaluated(case.build(), one) for one in arguments]
    for what, plan in plans(graph):
        model = case.build()
        apply_splits(model, plan, eps=1.0)
        for one, wanted in zip(arguments, before, strict=True):
            assert_equal_outputs(evaluated(model, one), wanted, what)


@pytest.mark.parametrize("name", CASES)
def test_split_networks_can_be_trained(name: str) -> None:
    case, graph = CASES[name], graph_of(name)
    for what, plan in plans(graph):
        model = case.build()
        apply_splits(model, plan, eps=0.1)
        torch.manual_seed(0)
        found = [one for one in tensors(model.train()(*case.inputs(case.batch))) if one.requires_grad]
        if found:
            sum(one[torch.isfinite(one)].abs().sum() for one in found).backward()
            assert all(p.grad is None or p.grad.shape == p.shape for p in model.parameters()), what
