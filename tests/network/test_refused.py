"""What is refused: layers that cannot be split, each with the reason, and models that cannot be traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from s3d_fast import register_layer, trace
from tests.model_cases import BY_NAME, MODELS, ModelCase, data, net, traced
from tests.network.tracing_cases import IMAGES, assert_blocked, conv_then, row, two_linear


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_every_layer_that_is_no_unit_has_a_reason(case: ModelCase) -> None:
    _, graph = traced(case)
    for layer in graph.layers.values():
        if layer.kind in ("conv", "linear", "edgeconv") and layer.name not in graph.units:
            assert layer.reason
            assert layer.reason in row(graph, layer.name)


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("mlp", "layers.4"),
        ("vgg", "classifier.3"),
        ("resnet", "head"),
        ("mobilenet", "head"),
        ("dgcnn", "head.8"),
    ],
)
def test_the_last_layer_is_blocked_as_the_models_output(name: str, last: str) -> None:
    assert_blocked(traced(BY_NAME[name])[1], last, "the model's output")


# What happens to the hidden channels h of a linear layer with ReLU, and words of the reason.
BETWEEN: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], tuple[str, ...]]] = {
    "LayerNorm": (lambda s, h: s.norm(h), ("layer_norm", "'norm'", "mixes its channels")),
    "layer_norm": (lambda s, h: F.layer_norm(h, (6,)), ("layer_norm", "mixes its channels")),
    "Softmax": (lambda s, h: s.softmax(h), ("softmax", "'softmax'", "mixes its channels")),
    "softmax": (lambda s, h: torch.softmax(h, -1), ("softmax", "mixes its channels")),
    "method softmax": (lambda s, h: h.softmax(-1), ("softmax", "mixes its channels")),
    "normalize": (lambda s, h: F.normalize(h, dim=1), ("norm", "over its channels")),
    "cumsum": (lambda s, h: torch.cumsum(h, 1), ("cumsum", "along its channels")),
    "sort": (lambda s, h: h.sort(1)[0], ("sort", "along its channels")),
    "roll": (lambda s, h: h.roll(1, 1), ("roll", "moves its channels")),
    "flip": (lambda s, h: h.flip(1), ("flip", "its channels")),
    "every second": (lambda s, h: h[:, ::2].repeat_interleave(2, 1), ("slice", "every 2th of its channels")),
    "index": (lambda s, h: h[:, torch.tensor([1, 0, 2, 3, 5, 4])], ("index", "chooses among its channels")),
    "unbind": (lambda s, h: torch.stack(h.unbind(1)[::-1], 1), ("unbind", "takes its channels apart")),
    "pairs": (lambda s, h: h.view(-1, 3, 2).mean(2).repeat(1, 2), ("view", "rearranges its channels")),
    "products of all pairs": (
        lambda s, h: (h.unsqueeze(1) * h.unsqueeze(2)).sum(1),
        ("sum", "over its channels"),
    ),
    "constant per channel": (
        lambda s, h: h * torch.linspace(1, 2, 6, dtype=h.dtype),
        ("mul", "ties it to a tensor that no layer makes"),
    ),
    "noise": (lambda s, h: h + torch.rand_like(h), ("rand_like", "draws other numbers for every copy")),
    "pixel_shuffle": (
        lambda s, h: F.pixel_shuffle(h[:, :, None, None], 1).flatten(1),
        ("pixel_shuffle", "rearranges its channels"),
    ),
    "unknown operation": (
        lambda s, h: torch.special.bessel_j0(h),
        ("splitting does not support the operation special_bessel_j0",),
    ),
    "number of channels as a factor": (lambda s, h: h * h.size(-1) ** -0.5, ("changes the output by",)),
    "mean of channels": (lambda s, h: h - h.mean(1, keepdim=True), ("mean", "over its channels")),
}


@pytest.mark.parametrize("which", BETWEEN)
def test_what_channels_cannot_pass_blocks_their_layer(which: str) -> None:
    between, words = BETWEEN[which]
    model = two_linear(lambda self, h: between(self, F.relu(h)), norm=nn.LayerNorm(6), softmax=nn.Softmax(-1))
    assert_blocked(trace(model, data(3, 4)), "up", *words)


def test_a_groupnorm_mixes_channels() -> None:
    model = conv_then(lambda self, h: self.head(self.norm(h)), norm=nn.GroupNorm(2, 4), head=nn.Conv2d(4, 2, 1))
    assert_blocked(trace(model, data(*IMAGES)), "conv", "group_norm", "'norm'", "mixes its channels")


def test_recurrent_layers_block() -> None:
    model = net(
        lambda self, x: self.head(self.lstm(F.silu(self.up(x)))[0]),
        up=nn.Linear(4, 6),
        lstm=nn.LSTM(6, 5, batch_first=True),
        head=nn.Linear(5, 2),
    )
    assert_blocked(trace(model, data(3, 7, 4)), "up", "LSTM")


def test_a_layer_that_shares_the_weight_of_one_that_reads_the_input_is_blocked() -> None:
    model = net(
        lambda self, x: self.c(F.relu(self.b(F.relu(self.a(x))))),
        a=nn.Linear(4, 4),
        b=nn.Linear(4, 4),
        c=nn.Linear(4, 2),
    )
    model.b.weight = model.a.weight
    graph = trace(model, data(3, 4))
    assert graph.units == {}
    assert_blocked(graph, "a", "reads channels that no layer makes")


def test_a_producer_whose_consumer_also_reads_a_constant_is_blocked() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = F.relu(self.up(x))
        return self.a(h) + self.b(torch.ones_like(x))

    model = net(forward, up=nn.Linear(4, 4), a=nn.Linear(4, 2), b=nn.Linear(4, 2))
    model.b.weight = model.a.weight
    assert_blocked(trace(model, data(3, 4)), "up", "'b'", "reads channels that no layer makes")


def test_a_weight_that_makes_and_reads_the_same_channels_blocks() -> None:
    model = net(lambda self, x: F.linear(F.relu(self.up(x)), self.up.weight.t()), up=nn.Linear(4, 6))
    assert_blocked(trace(model, data(3, 4)), "up", "a weight that it uses is shared")


def test_grouped_convolutions_are_blocked() -> None:
    model = conv_then(
        lambda self, h: self.head(F.relu(self.grouped(h))),
        grouped=nn.Conv2d(4, 6, 3, groups=2),
        head=nn.Conv2d(6, 2, 1),
    )
    graph = trace(model, data(*IMAGES))
    assert_blocked(graph, "grouped", "grouped convolution")
    assert_blocked(graph, "conv", "grouped convolution", "'grouped'")


def test_pooling_over_the_channels_blocks() -> None:
    model = net(
        lambda self, x: self.down(self.pool(F.relu(self.up(x)))),
        up=nn.Linear(4, 6),
        pool=nn.AvgPool2d(2),
        down=nn.Linear(3, 2),
    )
    assert_blocked(trace(model, data(2, 5, 6, 4)), "up", "'pool'", "along its channels")


def test_a_mean_over_channels_blocks() -> None:
    model = conv_then(lambda self, h: self.head(h) + h.mean(1, keepdim=True), head=nn.Conv2d(4, 2, 1))
    assert_blocked(trace(model, data(*IMAGES)), "conv", "mean", "channels")


def test_a_sum_of_halves_blocks() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = F.relu(self.up(x))
        a, b = h.chunk(2, 1)
        return self.down(h) + (a * b).sum(-1, keepdim=True)

    model = net(forward, up=nn.Linear(4, 6), down=nn.Linear(6, 2))
    assert_blocked(trace(model, data(3, 4)), "up", "sum", "over its channels")


def test_a_linear_layer_on_another_axis_does_not_read_channels() -> None:
    model = conv_then(lambda self, h: self.head(h), head=nn.Linear(6, 2))
    assert_blocked(trace(model, data(*IMAGES)), "conv", "the model's output")


def test_a_layer_without_an_activation_is_blocked() -> None:
    assert_blocked(trace(two_linear(lambda self, h: h), data(3, 4)), "up", "no activation follows")


def test_a_layer_that_nothing_consumes_is_no_unit() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        F.relu(self.up(x))
        return self.down(x)

    model = net(forward, up=nn.Linear(4, 6), down=nn.Linear(4, 2))
    graph = trace(model, data(3, 4))
    assert graph.unused == ("up.weight", "up.bias")
    for name in graph.unused:
        assert_blocked(graph, name, "does not use it in eval mode")


RESHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda h: h.view(-1, 144),
    "reshape": lambda h: h.reshape(h.size(0), 144),
    "tuple": lambda h: h.reshape((-1, 144)),
    "function": lambda h: torch.reshape(h, (h.size(0), 144)),
    "keyword": lambda h: h.reshape(shape=(-1, 144)),
}


@pytest.mark.parametrize("form", RESHAPES)
def test_a_reshape_with_the_size_written_into_the_code_blocks(form: str) -> None:
    model = conv_then(lambda self, h: self.head(RESHAPES[form](h)), head=nn.Linear(144, 2))
    assert_blocked(trace(model, data(*IMAGES)), "conv", "after a split the model fails")


def test_a_channel_shuffle_blocks() -> None:
    def shuffle(self: nn.Module, h: Tensor) -> Tensor:
        b, c, height, width = h.shape
        return self.head(h.view(b, 2, c // 2, height, width).transpose(1, 2).reshape(b, c, height, width))

    model = conv_then(shuffle, head=nn.Conv2d(4, 2, 1))
    assert_blocked(trace(model, data(*IMAGES)), "conv", "rearranges its channels")


def test_channels_that_are_split_at_a_number_in_the_code_are_blocked() -> None:
    model = net(
        lambda self, x: self.down(torch.mul(*torch.split(F.relu(self.up(x)), 3, 1))),
        up=nn.Linear(4, 6),
        down=nn.Linear(3, 2),
    )
    assert_blocked(trace(model, data(3, 4)), "up", "after a split the model fails")


def test_only_modules_can_be_registered() -> None:
    with pytest.raises(TypeError, match="module_type"):
        register_layer(torch.relu)  # type: ignore[arg-type]


def test_only_modules_can_be_traced() -> None:
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got function"):
        trace(F.relu, data(3, 4))  # type: ignore[arg-type]


def test_the_error_for_control_flow_that_depends_on_data_says_where_and_what_to_do() -> None:
    def between(self: nn.Module, h: Tensor) -> Tensor:
        if h.sum() > 0:
            h = -h
        return F.relu(h)

    line = between.__code__.co_firstlineno + 1
    with pytest.raises(ValueError, match=rf"test_refused\.py:{line}: if h\.sum\(\) > 0") as error:
        trace(two_linear(between), data(3, 4))
    assert "register_layer" in str(error.value)


@pytest.mark.parametrize("shape", [(3, 5), (3,), (0, 5)], ids=str)
def test_an_example_that_the_model_cannot_evaluate_is_an_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="example_input cannot be evaluated by the model"):
        trace(two_linear(lambda self, h: F.relu(h)), data(*shape))


# Models whose code takes only some batch sizes: fewer samples than in the example fail.
BATCHES: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], int]] = {
    "a multiple of four": (lambda self, x: self.down(F.silu(self.up(x))).view(-1, 4, 2).mean(1), 8),
    "four": (lambda self, x: self.down(F.silu(self.up(x))).view(4, 2), 4),
}


@pytest.mark.parametrize("which", BATCHES)
def test_a_model_may_take_only_some_batch_sizes(which: str) -> None:
    forward, batch = BATCHES[which]
    model = net(forward, up=nn.Linear(4, 6), down=nn.Linear(6, 2))
    assert list(trace(model, data(batch, 4)).units) == ["up"]


def test_an_image_without_a_batch_axis_can_be_traced() -> None:
    model = conv_then(lambda self, h: self.head(h), head=nn.Conv2d(4, 2, 1))
    assert list(trace(model, data(3, 6, 6)).units) == ["conv"]


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({}, "its weight is computed from the buffer '0.parametrizations.weight.0.base'"),
        ({"orthogonal_map": "cayley"}, "its weight is computed from the buffer '0.parametrizations.weight.0.base'"),
        ({"use_trivialization": False}, "has no filters of its own"),
    ],
    ids=["householder", "cayley", "without a base"],
)
def test_an_orthogonal_weight_is_refused(options: dict[str, Any], because: str) -> None:
    # Equal rows are not orthogonal: there is nothing to split.
    layer = parametrizations.orthogonal(nn.Linear(4, 4), **options)
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 2)).double()
    graph = trace(model, data(5, 4))
    assert not graph.units
    assert because in row(graph, "0")
