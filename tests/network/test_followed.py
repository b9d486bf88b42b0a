"""What is followed: which layers can be split, where their channels go, and that splits of them keep the outputs."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from s3d_fast import Activation, Graph, trace
from tests.model_cases import BY_NAME, MODELS, ModelCase, data, net, traced
from tests.network.tracing_cases import (
    IMAGES,
    assert_blocked,
    assert_splits_keep_outputs,
    channels_of,
    columns,
    conv_then,
    row,
    two_linear,
)


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_every_model_has_its_known_units(case: ModelCase) -> None:
    _, graph = traced(case)
    assert tuple(graph.units) == case.units
    assert tuple(unit.name for unit in graph.captured()) == case.captured
    assert graph.widths() == {name: graph.layers[name].width for name in case.units}
    for name in case.units:
        assert re.search(r"\byes\b", row(graph, name))
        assert graph.layers[name].reason is None


def test_a_unit_of_the_mlp_with_batchnorm_has_its_norm() -> None:
    unit = traced(BY_NAME["mlp-batchnorm"])[1].units["layers.0"]
    assert (unit.kind, unit.width, unit.fan_in, unit.norm) == ("linear", 5, 5, "layers.1")
    assert (unit.followers, unit.consumers) == (("layers.1",), ("layers.3",))
    assert unit.activations() == ["silu"]
    assert unit.activation is not None
    assert unit.activation.name == "silu"


def test_the_chain_of_a_pointwise_layer_of_mobilenet_goes_through_the_depthwise_layer() -> None:
    _, graph = traced(BY_NAME["mobilenet"])
    stem = graph.units["stem.0"]
    assert stem.followers == ("stem.1", "blocks.0.0", "blocks.0.1")
    assert stem.consumers == ("blocks.0.3",)
    assert stem.activations() == ["silu", "silu"]
    assert graph.units["blocks.12.3"].activations() == ["silu"]
    assert graph.units["blocks.12.3"].consumers == ("head",)


def test_vgg_flattens_every_channel_into_one_column_per_position() -> None:
    _, graph = traced(BY_NAME["vgg"])
    assert columns(graph, "classifier.0.weight") == channels_of("features.49", 4, times=4)
    assert columns(graph, "features.3.weight") == channels_of("features.0", 3)
    assert graph.units["features.3"].norm == "features.4"


def test_dgcnn_reads_its_concatenations_in_order() -> None:
    _, graph = traced(BY_NAME["dgcnn"])
    widths = (4, 3, 4, 3)
    assert columns(graph, "embed.weight") == [
        one for i, width in enumerate(widths) for one in channels_of(f"edgeconvs.{i}", width)
    ]
    assert columns(graph, "head.0.weight") == 2 * channels_of("embed", 5)
    # An edge convolution reads the differences of neighbours, then the points themselves.
    assert columns(graph, "edgeconvs.2.weight") == 2 * channels_of("edgeconvs.1", 3)
    assert graph.units["edgeconvs.1"].consumers == ("edgeconvs.2", "embed")
    assert graph.units["edgeconvs.1"].kind == "edgeconv"
    assert graph.units["edgeconvs.1"].fan_in == 8
    assert graph.units["embed"].norm == "norm"


def test_the_feed_forward_layer_of_a_transformer_is_its_unit() -> None:
    _, graph = traced(BY_NAME["transformer"])
    for name in ("query", "key", "value"):
        assert_blocked(graph, name, "unflatten", "rearranges its channels")
    for name in ("project", "down"):
        assert_blocked(graph, name, "add", "ties it to a tensor that no layer makes")
    assert graph.units["up"].activation is not None
    assert graph.units["up"].activation.name == "gelu"


def test_a_normalised_weight_has_rows_that_can_be_split() -> None:
    model = net(
        lambda self, x: self.c(F.relu(self.b(F.relu(self.a(x))))),
        a=nn.Linear(4, 5),
        b=nn.Linear(5, 6),
        c=nn.Linear(6, 2),
    )
    nn.utils.parametrizations.weight_norm(model.b)
    graph = assert_splits_keep_outputs(model, data(3, 4))
    assert list(graph.units) == ["b"]
    assert "computed, not stored" in graph.units["b"].uncaptured
    # Its columns have a common length, so that they cannot be scaled one by one.
    assert_blocked(graph, "a", "computed, not stored")


def test_a_bias_may_be_parametrized() -> None:
    model = two_linear(lambda self, h: F.relu(h))
    nn.utils.parametrize.register_parametrization(model.up, "bias", nn.Tanh())
    graph = assert_splits_keep_outputs(model, data(3, 4))
    # The bias does not move with the filter.
    assert graph.units["up"].fan_in == 4


@pytest.mark.parametrize("linear", [True, False], ids=["linear", "curved"])
def test_a_number_per_channel_follows(linear: bool) -> None:
    model = two_linear(lambda self, h: F.silu(h) * self.scale if linear else F.silu(h) ** self.scale.abs().ceil())
    model.scale = nn.Parameter(torch.rand(6, dtype=torch.float64))
    graph = assert_splits_keep_outputs(model, data(3, 4))
    assert graph.units["up"].followers == ("scale",)
    assert graph.units["up"].activations() == (["silu"] if linear else ["silu", "pow"])


def test_an_output_may_be_used_before_its_activation() -> None:
    model = net(
        lambda self, x: self.down(torch.cat([F.relu(h := self.up(x)), h], 1)), up=nn.Linear(4, 6), down=nn.Linear(12, 2)
    )
    graph = assert_splits_keep_outputs(model, data(3, 4))
    assert graph.units["up"].activations() == ["relu"]


def test_images_may_be_concatenated_along_another_axis() -> None:
    model = conv_then(lambda self, h: self.head(torch.cat([h, h], 2)), head=nn.Conv2d(4, 2, 1))
    assert list(assert_splits_keep_outputs(model, data(*IMAGES)).units) == ["conv"]


def test_a_linear_layer_may_read_another_axis() -> None:
    model = conv_then(lambda self, h: self.head(self.line(h).mean((2, 3))), line=nn.Linear(6, 5), head=nn.Linear(4, 2))
    graph = assert_splits_keep_outputs(model, data(*IMAGES))
    assert (list(graph.units), graph.units["conv"].consumers) == (["conv"], ("head",))


def test_an_activation_module_may_be_used_many_times() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.c(self.act(self.b(self.act(self.a(x)))))

    model = net(forward, a=nn.Linear(4, 5), b=nn.Linear(5, 6), c=nn.Linear(6, 2), act=nn.SiLU())
    assert list(assert_splits_keep_outputs(model, data(3, 4)).units) == ["a", "b"]


FORMS: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], Callable[[nn.Module, Tensor], Tensor], int, int]] = {
    # The function to test, its form with modules, the columns of the head, and its entries per channel.
    "module Flatten": (lambda s, h: s.flat(h), lambda s, h: h.flatten(1), 144, 36),
    "torch.flatten": (lambda s, h: torch.flatten(h, 1), lambda s, h: h.flatten(1), 144, 36),
    "view": (lambda s, h: h.view(h.size(0), -1), lambda s, h: h.flatten(1), 144, 36),
    "view of shape": (lambda s, h: h.view(h.shape[0], -1), lambda s, h: h.flatten(1), 144, 36),
    "reshape": (lambda s, h: h.reshape(h.shape[0], -1), lambda s, h: h.flatten(1), 144, 36),
    "reshape to a tuple": (lambda s, h: torch.reshape(h, (h.shape[0], -1)), lambda s, h: h.flatten(1), 144, 36),
    "view of a tuple": (lambda s, h: h.view((-1, h.size(1) * 36)), lambda s, h: h.flatten(1), 144, 36),
    "mean": (lambda s, h: h.mean((2, 3)), lambda s, h: s.pool(h).flatten(1), 4, 1),
    "mean, dims one by one": (lambda s, h: h.mean(-1).mean(-1), lambda s, h: s.pool(h).flatten(1), 4, 1),
    "amax": (lambda s, h: h.amax((2, 3)), lambda s, h: s.pool(h).flatten(1), 4, 1),
    "adaptive_avg_pool2d": (
        lambda s, h: F.adaptive_avg_pool2d(h, 1).flatten(1),
        lambda s, h: s.pool(h).flatten(1),
        4,
        1,
    ),
    "squeeze": (
        lambda s, h: F.adaptive_avg_pool2d(h, 1).squeeze(-1).squeeze(-1),
        lambda s, h: s.pool(h).flatten(1),
        4,
        1,
    ),
    "max_pool2d": (lambda s, h: F.max_pool2d(h, 2).flatten(1), lambda s, h: s.max(h).flatten(1), 36, 9),
    "avg_pool2d": (lambda s, h: F.avg_pool2d(h, 2).flatten(1), lambda s, h: s.max(h).flatten(1), 36, 9),
    "dropout": (lambda s, h: F.dropout(h, 0.5, s.training).flatten(1), lambda s, h: s.drop(h).flatten(1), 144, 36),
    "permute": (lambda s, h: h.permute(0, 2, 3, 1).mean((1, 2)), lambda s, h: s.pool(h).flatten(1), 4, 1),
    "transpose": (lambda s, h: h.transpose(1, 3).mean((1, 2)), lambda s, h: s.pool(h).flatten(1), 4, 1),
    "torch.transpose": (
        lambda s, h: torch.transpose(h, 1, 2).mean((1, 3)),
        lambda s, h: s.pool(h).flatten(1),
        4,
        1,
    ),
    "plus a number": (lambda s, h: (h + 1.0).flatten(1), lambda s, h: h.flatten(1), 144, 36),
    "number minus": (lambda s, h: (1.0 - h).flatten(1), lambda s, h: h.flatten(1), 144, 36),
    "mask": (lambda s, h: (h * s.mask).flatten(1), lambda s, h: h.flatten(1), 144, 36),
    "computed mask": (
        lambda s, h: (torch.linspace(0, 1, 6, dtype=torch.float64) * h).flatten(1),
        lambda s, h: h.flatten(1),
        144,
        36,
    ),
    "pad": (lambda s, h: F.pad(h, (1, 0, 0, 1)).flatten(1), lambda s, h: s.zero(h).flatten(1), 196, 49),
    "interpolate": (
        lambda s, h: F.interpolate(h, scale_factor=2.0).mean((2, 3)),
        lambda s, h: s.pool(h).flatten(1),
        4,
        1,
    ),
}


def form_model(after: Callable[[nn.Module, Tensor], Tensor], columns: int) -> nn.Module:
    model = conv_then(
        lambda self, h: self.head(after(self, h)),
        flat=nn.Flatten(),
        pool=nn.AdaptiveAvgPool2d(1),
        max=nn.MaxPool2d(2),
        drop=nn.Dropout(0.5),
        zero=nn.ZeroPad2d((1, 0, 0, 1)),
        head=nn.Linear(columns, 2),
    )
    model.register_buffer("mask", data(1, 6, 6))
    return model


def described(graph: Graph) -> list[tuple[object, ...]]:
    """Return the properties of the units, except the names of nodes."""

    def name(activation: Activation | None) -> str:
        return "" if activation is None else activation.name

    return [(u.name, u.kind, u.width, u.fan_in, u.norm, name(u.activation), u.followers, u.consumers) for u in graph]


@pytest.mark.parametrize("form", FORMS)
def test_functional_forms_are_followed_like_modules(form: str) -> None:
    function, module, width, repeat = FORMS[form]
    graph = assert_splits_keep_outputs(form_model(function, width), data(*IMAGES))
    assert list(graph.units) == ["conv"]
    assert columns(graph, "head.weight") == channels_of("conv", 4, repeat)
    assert described(graph) == described(trace(form_model(module, width), data(*IMAGES), prove=False))


KEYWORDS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "flatten": lambda s, h: torch.flatten(input=h, start_dim=1),
    "unsqueeze": lambda s, h: h.flatten(1).unsqueeze(dim=1).mean(1),
    "permute": lambda s, h: h.permute(dims=(0, 1, 3, 2)).flatten(1),
    "transpose": lambda s, h: h.transpose(dim0=2, dim1=3).flatten(1),
    "mean": lambda s, h: torch.mean(input=h.unsqueeze(-1), dim=-1).flatten(1),
    "max_pool2d": lambda s, h: F.max_pool2d(input=h, kernel_size=1).flatten(1),
    "cat": lambda s, h: torch.cat(tensors=[h[:0], h], dim=0).flatten(1),
    "add": lambda s, h: torch.add(input=h, other=1.0).flatten(1),
    "relu": lambda s, h: F.relu(input=h).flatten(1),
}


@pytest.mark.parametrize("which", KEYWORDS)
def test_keyword_arguments_are_followed(which: str) -> None:
    graph = assert_splits_keep_outputs(form_model(KEYWORDS[which], 144), data(*IMAGES))
    assert list(graph.units) == ["conv"]


@pytest.mark.parametrize(
    "act",
    [F.relu, torch.relu, lambda h: h.relu(), lambda h: F.relu(h, inplace=True), lambda h: h.relu_(), F.relu_],
    ids=["F.relu", "torch.relu", "method", "inplace", "relu_", "F.relu_"],
)
def test_every_form_of_relu_is_an_activation(act: Callable[[Tensor], Tensor]) -> None:
    unit = trace(two_linear(lambda self, h: act(h)), data(3, 4)).units["up"]
    assert unit.activation is not None
    assert unit.activations() == ["relu"]


@pytest.mark.parametrize("slope", [0.05, 0.3])
def test_options_of_functional_activations_are_read(slope: float) -> None:
    z = data(50)
    for form in (lambda self, h: F.leaky_relu(h, slope), lambda self, h: F.leaky_relu(h, negative_slope=slope)):
        act = trace(two_linear(form), data(3, 4)).units["up"].activation
        assert act is not None
        assert torch.equal(act(z), F.leaky_relu(z, slope))


# Formulas of activations, and the name of the one that each of them is; None if it has no name.
WRITTEN_OUT: dict[str, tuple[Callable[[Tensor], Tensor], str | None]] = {
    "swish": (lambda h: h * torch.sigmoid(h), "silu"),
    "swish, the other way round": (lambda h: torch.sigmoid(h).mul(h), "silu"),
    "swish by exp": (lambda h: h / (1 + torch.exp(-h)), "silu"),
    "relu by maximum": (lambda h: torch.maximum(h, torch.zeros_like(h)), "relu"),
    "relu by clamp": (lambda h: h.clamp(min=0), "relu"),
    "relu6 by clamp": (lambda h: h.clamp(0, 6), "relu6"),
    "gelu by erf": (lambda h: 0.5 * h * (1 + torch.erf(h / 2**0.5)), "gelu"),
    "softplus": (lambda h: torch.log1p(torch.exp(-h.abs())) + h.relu(), "softplus"),
    "sine": (lambda h: torch.sin(3 * h), None),
    "mish": (lambda h: F.mish(h), None),
}


@pytest.mark.parametrize("which", WRITTEN_OUT)
def test_activations_may_be_written_out(which: str) -> None:
    function, name = WRITTEN_OUT[which]
    graph = assert_splits_keep_outputs(two_linear(lambda self, h: function(h)), data(3, 4))
    (unit,) = graph.captured()
    assert unit.activation is not None
    assert name is None or unit.activation.name == name
    z = torch.linspace(-4, 4, 81, dtype=torch.float64)[1:-1:3].requires_grad_()
    torch.testing.assert_close(unit.activation(z), function(z))
    (slope,) = torch.autograd.grad(function(z).sum(), z, create_graph=True)
    torch.testing.assert_close(unit.activation.first(z), slope)
    if slope.requires_grad and name not in ("relu", "relu6", "softplus"):
        (bend,) = torch.autograd.grad(slope.sum(), z)
        torch.testing.assert_close(unit.activation.second(z), bend)


def test_branches_are_concatenated_at_their_offsets() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        branches = [F.silu(self.b(x)), x, F.silu(self.a(x))]
        return self.head(torch.cat(branches, dim=1).flatten(1))

    model = net(forward, a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(3, 2, 3, padding=1), head=nn.Linear(9 * 36, 2))
    graph = assert_splits_keep_outputs(model, data(*IMAGES))
    inputs: list[tuple[str, int] | None] = [None] * (3 * 36)
    assert columns(graph, "head.weight") == channels_of("b", 2, 36) + inputs + channels_of("a", 4, 36)


def test_one_branch_may_be_concatenated_twice() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = F.silu(self.a(x))
        return self.head(torch.cat([h.amax((2, 3)), h.mean((2, 3))], 1))

    model = net(forward, a=nn.Conv2d(3, 4, 1), head=nn.Linear(8, 2))
    graph = assert_splits_keep_outputs(model, data(*IMAGES))
    assert columns(graph, "head.weight") == 2 * channels_of("a", 4)


def test_channels_are_followed_through_max_with_indices() -> None:
    model = conv_then(lambda self, h: self.head(h.flatten(1).unsqueeze(1).max(1)[0]), head=nn.Linear(144, 2))
    assert list(assert_splits_keep_outputs(model, data(*IMAGES)).units) == ["conv"]


@pytest.mark.parametrize("multiplier", [1, 2, 3])
def test_depthwise_convolutions_are_followers(multiplier: int) -> None:
    model = conv_then(
        lambda self, h: self.head(self.norm(self.depthwise(h)).flatten(1)),
        depthwise=nn.Conv2d(4, 4 * multiplier, 3, groups=4),
        norm=nn.BatchNorm2d(4 * multiplier),
        head=nn.Linear(64 * multiplier, 2),
    )
    graph = assert_splits_keep_outputs(model, data(*IMAGES))
    assert graph.units["conv"].followers == ("depthwise", "norm")
    assert [*graph.tensors["norm.weight"][0].channel] == [c for c in range(4) for _ in range(multiplier)]
    assert columns(graph, "head.weight") == channels_of("conv", 4, 16 * multiplier)
    assert len(graph.units["conv"].activations()) == 1


SECOND_NONLINEARITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "square": torch.square,
    "power": lambda h: h**2,
    "product with itself": lambda h: h * h,
    "one over": lambda h: 1.0 / (h + 3.0),
    "exp": lambda h: h.exp(),
}


@pytest.mark.parametrize("which", SECOND_NONLINEARITIES)
def test_a_later_nonlinearity_is_part_of_the_chain(which: str) -> None:
    graph = assert_splits_keep_outputs(two_linear(lambda self, h: SECOND_NONLINEARITIES[which](F.silu(h))), data(3, 4))
    assert len(graph.units["up"].activations()) == 2
    assert ", ".join(graph.units["up"].activations()) in row(graph, "up")


def test_a_model_with_several_inputs_is_traced_with_a_tuple() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = nn.Linear(4, 3), nn.Linear(5, 2), nn.Linear(5, 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.head(torch.cat([F.relu(self.a(x)), F.relu(self.b(y))], -1))

    graph = trace(Two().double(), (data(3, 4), data(3, 5)))
    assert list(graph.units) == ["a", "b"]
    assert columns(graph, "head.weight") == channels_of("a", 3) + channels_of("b", 2)
    named = trace(Two().double(), {"y": data(3, 5), "x": data(3, 4)})
    assert described(named) == described(graph)
