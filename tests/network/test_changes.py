"""Layers that have changed since the trace, the cost of a depthwise bias, and BatchNorms without statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import s3d_fast as s3d
from tests.model_cases import Net, data, net, squared_error
from tests.network.tracing_cases import assert_splits_keep_outputs


class Separable(nn.Module):
    """A convolution, a depthwise convolution with bias and several outputs per channel, and another convolution."""

    def __init__(self, width: int, second: int = 3, multiplier: int = 1) -> None:
        super().__init__()
        self.up = nn.Conv2d(2, width, 3)
        self.depthwise = nn.Conv2d(width, width * multiplier, (3, 2), groups=width, bias=True)
        self.down = nn.Conv2d(width * multiplier, second, 1)
        self.head = nn.Linear(second, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.down(F.silu(self.depthwise(F.silu(self.up(x))))))
        return self.head(x.mean((2, 3)))


IMAGES = (2, 2, 6, 6)


@pytest.mark.parametrize("multiplier", [1, 2])
def test_a_depthwise_layer_that_has_changed_makes_a_graph_stale(multiplier: int) -> None:
    model = Separable(4, multiplier=multiplier)
    graph = s3d.trace(model, torch.zeros(IMAGES))
    graph.check(model)
    graph.check(Separable(4, multiplier=multiplier))
    for channels in (3, 5, 8):
        model.depthwise = Separable(channels, multiplier=multiplier).depthwise
        # All other layers are unchanged.
        with pytest.raises(ValueError, match="'depthwise'"):
            graph.check(model)
        assert not graph.is_current(model)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("multiplier", [1, 3])
def test_the_bias_of_a_depthwise_layer_is_counted(multiplier: int) -> None:
    graph = s3d.trace(Separable(4, 3, multiplier), torch.zeros(IMAGES))
    assert list(graph.units) == ["up", "down"]
    for width, second in ((4, 3), (5, 3), (2, 7), (11, 1)):
        widths = {"up": width, "down": second}
        here = parameters(Separable(width, second, multiplier))
        assert s3d.count(graph, widths).params == here
        more = {name: cost.params for name, cost in s3d.marginal(graph, widths).items()}
        assert more["up"] == parameters(Separable(width + 1, second, multiplier)) - here
        assert more["down"] == parameters(Separable(width, second + 1, multiplier)) - here


def normalised(norm: nn.Module | Callable[[Tensor], Tensor], last: bool = False) -> nn.Module:
    """Return a model with a norm before or, if `last`, after the activation of its first layer."""

    def forward(self: Any, x: Tensor) -> Tensor:
        own = self.norm if isinstance(norm, nn.Module) else norm
        x = own(F.silu(self.up(x))) if last else F.silu(own(self.up(x)))
        return self.head(F.silu(self.down(x)).mean((2, 3)))

    torch.manual_seed(0)
    parts = {"up": nn.Conv2d(2, 4, 3), "down": nn.Conv2d(4, 3, 3), "head": nn.Linear(3, 2)}
    return Net(forward, **parts, **({"norm": norm} if isinstance(norm, nn.Module) else {})).double().eval()


def by_the_batch(x: Tensor) -> Tensor:
    """Return the output of a BatchNorm without running statistics."""
    return F.batch_norm(x, None, None, training=True)


@pytest.mark.parametrize("last", [False, True], ids=["before", "after"])
def test_a_batchnorm_without_statistics_follows_but_is_not_linear(last: bool) -> None:
    x, target = data(*IMAGES), data(2, 2)
    model = normalised(nn.BatchNorm2d(4, track_running_stats=False), last)
    # Its outputs depend on the whole batch, but every channel has statistics of its own.
    graph = assert_splits_keep_outputs(model, x)
    assert list(graph.units) == ["up", "down"]
    up = graph.units["up"]
    assert up.norm is None
    assert up.followers == ("norm",)
    assert "batch_norm" in up.activations()
    # It is not folded into the convolution before it either.
    other = normalised(by_the_batch, last)
    wanted = s3d.capture(other, squared_error, [(x, target)], s3d.trace(other, x))["down"].dense()
    found = s3d.capture(model, squared_error, [(x, target)], graph)["down"].dense()
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    # With statistics it has no curvature.
    usual = s3d.trace(normalised(nn.BatchNorm2d(4), last), x)
    assert [unit.name for unit in usual.captured()] == ["up", "down"]
    assert usual.units["up"].activations() == ["silu"]
    assert usual.units["up"].norm == (None if last else "norm")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (nn.Conv2d(4, 8, 3, groups=4), nn.Conv2d(8, 8, 3, groups=8)),
        (nn.Conv2d(4, 4, 1, groups=1), nn.Conv2d(8, 4, 1, groups=2)),
    ],
    ids=["depthwise", "grouped"],
)
def test_a_layer_with_other_channels_makes_a_graph_stale_even_if_its_weight_has_the_same_shape(
    before: nn.Module, after: nn.Module
) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.head(F.silu(self.conv(F.silu(self.stem(x)))).mean((2, 3)))

    channels = before.out_channels
    model = net(forward, stem=nn.Conv2d(2, 4, 1), conv=before, head=nn.Linear(channels, 3))
    graph = s3d.trace(model, data(*IMAGES))
    graph.check(model)
    model.conv = after
    with pytest.raises(ValueError, match=r"stale.*'conv'.*trace the model again"):
        graph.check(model)


def test_a_batchnorm_whose_statistics_were_removed_is_no_norm_of_a_unit() -> None:
    norm = nn.BatchNorm2d(4)
    norm.running_mean = norm.running_var = None
    graph = s3d.trace(normalised(norm), data(*IMAGES))
    assert not any(unit.norm for unit in graph)
