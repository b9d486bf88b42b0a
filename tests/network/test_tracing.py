"""Tracing: which layers can be split, why the others cannot, and where their channels go."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from s3d_fast import Activation, Graph, apply_splits, capture, register_layer, trace
from s3d_fast.network import layers
from s3d_fast.network.graph import Segment
from tests.cases import relative_error
from tests.model_cases import BY_NAME, MODELS, ModelCase, data, net, outputs, random_plan, squared_error

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


def assert_splits_keep_outputs(model: nn.Module, x: Tensor) -> None:
    """Assert that the model has units, and that a split of size zero of all of them keeps the outputs."""
    model = copy.deepcopy(model)
    before = outputs(model, x)
    graph = trace(model, x)
    assert graph.units
    apply_splits(model, random_plan(graph, 3), eps=0.0)
    assert relative_error(outputs(model, x), before) < 1e-10


@pytest.fixture
def _fresh_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_CUSTOM", dict(layers._CUSTOM))


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_every_model_has_its_known_units(case: ModelCase) -> None:
    graph = trace(case.model(), case.inputs())
    assert tuple(graph.units) == case.units
    assert graph.widths() == {name: graph.layers[name].width for name in case.units}
    for name in case.units:
        assert re.search(r"\byes\b", row(graph, name))
        assert graph.layers[name].reason is None


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_every_layer_that_is_no_unit_has_a_reason(case: ModelCase) -> None:
    graph = trace(case.model(), case.inputs())
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
    case = BY_NAME[name]
    assert_blocked(trace(case.model(), case.inputs()), last, "the model's output")


def test_a_unit_of_the_mlp_with_batchnorm_has_its_norm() -> None:
    case = BY_NAME["mlp-batchnorm"]
    unit = trace(case.model(), case.inputs()).units["layers.0"]
    assert (unit.kind, unit.width, unit.fan_in, unit.norm) == ("linear", 5, 5, "layers.1")
    assert (unit.followers, unit.consumers, unit.left_out) == (("layers.1",), ("layers.3",), ())
    assert unit.activation.name == "silu"


def test_residual_additions_tie_the_stream_of_a_resnet() -> None:
    case = BY_NAME["resnet"]
    graph = trace(case.model(), case.inputs())
    additions = [node.name for node in graph.module.graph.nodes if "add" in node.name]
    assert len(additions) == 3
    for index in range(3):
        assert_blocked(graph, f"blocks.{index}.conv2", f"residual addition '{additions[index]}'")
    assert_blocked(graph, "stem.0", f"residual addition '{additions[0]}'")
    assert_blocked(graph, "blocks.2.shortcut.0", f"residual addition '{additions[2]}'")
    assert graph.units["blocks.1.conv1"].consumers == ("blocks.1.conv2",)


def test_pointwise_layers_of_mobilenet_leave_out_the_depthwise_activation() -> None:
    case = BY_NAME["mobilenet"]
    graph = trace(case.model(), case.inputs())
    stem = graph.units["stem.0"]
    assert stem.followers == ("stem.1", "blocks.0.0", "blocks.0.1")
    assert stem.consumers == ("blocks.0.3",)
    assert stem.left_out == ("blocks.0.2",)
    assert "blocks.0.2" in row(graph, "stem.0")
    assert graph.units["blocks.12.3"].left_out == ()
    assert graph.units["blocks.12.3"].consumers == ("head",)


def test_vgg_flattens_every_channel_into_one_column_per_position() -> None:
    case = BY_NAME["vgg"]
    graph = trace(case.model(), case.inputs())
    assert graph.layers["classifier.0"].inputs == (Segment("features.49", 4, 4),)
    assert graph.layers["features.3"].inputs == (Segment("features.0", 3),)
    assert graph.units["features.3"].norm == "features.4"


def test_dgcnn_reads_its_concatenations_in_order() -> None:
    case = BY_NAME["dgcnn"]
    graph = trace(case.model(), case.inputs())
    widths = (4, 3, 4, 3)
    assert graph.layers["embed"].inputs == tuple(Segment(f"edgeconvs.{i}", width) for i, width in enumerate(widths))
    assert graph.layers["head.0"].inputs == (Segment("embed", 5), Segment("embed", 5))
    assert graph.units["edgeconvs.1"].consumers == ("edgeconvs.2", "embed")
    assert graph.units["edgeconvs.1"].kind == "edgeconv"
    assert graph.units["edgeconvs.1"].fan_in == 8
    assert graph.units["embed"].norm == "norm"


def test_only_the_feed_forward_layer_of_a_transformer_is_a_unit() -> None:
    case = BY_NAME["transformer"]
    graph = trace(case.model(), case.inputs())
    additions = [node.name for node in graph.module.graph.nodes if "add" in node.name]
    for name in ("query", "key", "value"):
        assert_blocked(graph, name, "unflatten", "not known")
    assert_blocked(graph, "project", f"residual addition '{additions[0]}'")
    assert_blocked(graph, "down", f"residual addition '{additions[1]}'")
    assert graph.units["up"].activation.name == "gelu"


def test_a_layernorm_mixes_channels() -> None:
    model = two_linear(lambda self, h: self.norm(F.relu(h)), norm=nn.LayerNorm(6))
    assert_blocked(trace(model, data(3, 4)), "up", "LayerNorm", "'norm'")


def test_a_functional_layernorm_mixes_channels() -> None:
    model = two_linear(lambda self, h: F.layer_norm(F.relu(h), (6,)))
    assert_blocked(trace(model, data(3, 4)), "up", "layer_norm")


def test_a_groupnorm_mixes_channels() -> None:
    model = conv_then(lambda self, h: self.head(self.norm(h)), norm=nn.GroupNorm(2, 4), head=nn.Conv2d(4, 2, 1))
    assert_blocked(trace(model, data(*IMAGES)), "conv", "GroupNorm", "'norm'")


@pytest.mark.parametrize("form", ["module", "function", "method"])
def test_a_softmax_mixes_channels(form: str) -> None:
    between = {
        "module": lambda self, h: self.softmax(F.relu(h)),
        "function": lambda self, h: torch.softmax(F.relu(h), -1),
        "method": lambda self, h: h.relu().softmax(-1),
    }[form]
    model = two_linear(between, softmax=nn.Softmax(-1))
    assert_blocked(trace(model, data(3, 4)), "up", "softmax")


def test_layers_that_share_a_weight_are_blocked() -> None:
    model = net(
        lambda self, x: self.c(F.relu(self.b(F.relu(self.a(x))))),
        a=nn.Linear(4, 4),
        b=nn.Linear(4, 4),
        c=nn.Linear(4, 2),
    )
    model.b.weight = model.a.weight
    graph = trace(model, data(3, 4))
    assert_blocked(graph, "a", "shares its weight", "'b'")
    assert_blocked(graph, "b", "shares its weight", "'a'")


def test_a_producer_whose_consumer_shares_its_weight_is_blocked() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = F.relu(self.up(x))
        return self.a(h) + self.b(torch.ones_like(x))

    model = net(forward, up=nn.Linear(4, 4), a=nn.Linear(4, 2), b=nn.Linear(4, 2))
    model.b.weight = model.a.weight
    assert_blocked(trace(model, data(3, 4)), "up", "shares its weight", "'a'")


def test_a_layer_whose_weight_is_also_used_directly_is_blocked() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return F.linear(self.down(F.relu(self.up(x))), self.up.weight)

    model = net(forward, up=nn.Linear(4, 6), down=nn.Linear(6, 4))
    assert_blocked(trace(model, data(3, 4)), "up", "weight")


def test_a_layer_that_is_called_twice_is_blocked() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = F.relu(self.up(x))
        return self.down(F.relu(self.mid(F.relu(self.mid(h)))))

    model = net(forward, up=nn.Linear(4, 6), mid=nn.Linear(6, 6), down=nn.Linear(6, 2))
    graph = trace(model, data(3, 4))
    assert_blocked(graph, "mid", "called 2 times")
    assert_blocked(graph, "up", "'mid'", "called 2 times")


def test_a_batchnorm_that_is_called_twice_blocks_both_layers() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.head(torch.cat([F.relu(self.norm(self.a(x))), F.relu(self.norm(self.b(x)))], 1))

    model = net(forward, a=nn.Linear(4, 3), b=nn.Linear(4, 3), norm=nn.BatchNorm1d(3), head=nn.Linear(6, 2))
    graph = trace(model, data(3, 4))
    assert_blocked(graph, "a", "'norm'", "called 2 times")
    assert_blocked(graph, "b", "'norm'", "called 2 times")


def test_an_activation_module_may_be_used_many_times() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.c(self.act(self.b(self.act(self.a(x)))))

    model = net(forward, a=nn.Linear(4, 5), b=nn.Linear(5, 6), c=nn.Linear(6, 2), act=nn.SiLU())
    assert list(trace(model, data(3, 4)).units) == ["a", "b"]
    assert_splits_keep_outputs(model, data(3, 4))


def test_grouped_convolutions_are_blocked() -> None:
    model = conv_then(
        lambda self, h: self.head(F.relu(self.grouped(h))),
        grouped=nn.Conv2d(4, 6, 3, groups=2),
        head=nn.Conv2d(6, 2, 1),
    )
    graph = trace(model, data(*IMAGES))
    assert_blocked(graph, "grouped", "grouped convolution")
    assert_blocked(graph, "conv", "grouped convolution 'grouped'")


def test_an_unknown_operation_is_named() -> None:
    model = two_linear(lambda self, h: torch.cumsum(F.relu(h), 1))
    assert_blocked(trace(model, data(3, 4)), "up", "cumsum", "not known")


def test_an_unknown_module_is_named() -> None:
    model = two_linear(lambda self, h: self.odd(F.relu(h)), odd=nn.PixelShuffle(1))
    assert_blocked(trace(model, data(3, 4, 6, 4)), "up", "PixelShuffle", "'odd'")


def pieces_by_chunk(h: Tensor) -> tuple[Tensor, ...]:
    return h.chunk(2, 1)


def pieces_by_split(h: Tensor) -> tuple[Tensor, ...]:
    return torch.split(h, 3, 1)


def pieces_by_unbind(h: Tensor) -> tuple[Tensor, ...]:
    return h.unbind(1)


@pytest.mark.parametrize("pieces", [pieces_by_chunk, pieces_by_split, pieces_by_unbind])
def test_channels_that_are_taken_apart_are_blocked(pieces: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = F.relu(self.up(x))
        parts = pieces(h)
        return self.down(h) + (parts[0] * parts[1]).sum(-1, keepdim=True)

    model = net(forward, up=nn.Linear(4, 6), down=nn.Linear(6, 2))
    assert_blocked(trace(model, data(3, 4)), "up", "takes its channels apart")


def test_an_elementwise_maximum_ties_two_layers() -> None:
    model = net(
        lambda self, x: self.down(torch.max(F.relu(self.a(x)), F.relu(self.b(x)))),
        a=nn.Linear(4, 6),
        b=nn.Linear(4, 6),
        down=nn.Linear(6, 2),
    )
    graph = trace(model, data(3, 4))
    assert_blocked(graph, "a")
    assert_blocked(graph, "b")


def test_pooling_over_the_channels_blocks() -> None:
    model = net(
        lambda self, x: self.down(self.pool(F.relu(self.up(x)))),
        up=nn.Linear(4, 6),
        pool=nn.AvgPool2d(2),
        down=nn.Linear(3, 2),
    )
    assert_blocked(trace(model, data(2, 5, 6, 4)), "up", "'pool'")


def test_the_number_of_channels_as_a_factor_blocks() -> None:
    def scaled(self: nn.Module, h: Tensor) -> Tensor:
        h = F.relu(h)
        return h * h.size(-1) ** -0.5

    model = two_linear(scaled)
    assert "up" not in trace(model, data(3, 4)).units


def test_parametrized_weights_are_blocked() -> None:
    model = net(
        lambda self, x: self.c(F.relu(self.b(F.relu(self.a(x))))),
        a=nn.Linear(4, 5),
        b=nn.Linear(5, 6),
        c=nn.Linear(6, 2),
    )
    nn.utils.parametrizations.weight_norm(model.b)
    graph = trace(model, data(3, 4))
    assert_blocked(graph, "b", "computed", "parametrization")
    assert_blocked(graph, "a", "'b'", "computed")


def test_a_parametrized_bias_is_blocked() -> None:
    model = two_linear(lambda self, h: F.relu(h))
    nn.utils.parametrize.register_parametrization(model.up, "bias", nn.Tanh())
    assert_blocked(trace(model, data(3, 4)), "up", "computed")


def test_a_layer_without_an_activation_is_blocked() -> None:
    assert_blocked(trace(two_linear(lambda self, h: h), data(3, 4)), "up", "no activation follows")


def test_an_output_that_is_used_twice_before_its_activation_blocks() -> None:
    model = net(
        lambda self, x: self.down(torch.cat([F.relu(h := self.up(x)), h], 1)), up=nn.Linear(4, 6), down=nn.Linear(12, 2)
    )
    assert_blocked(trace(model, data(3, 4)), "up", "more than one place")


def test_a_layer_that_nothing_consumes_is_no_unit() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        F.relu(self.up(x))
        return self.down(x)

    model = net(forward, up=nn.Linear(4, 6), down=nn.Linear(4, 2))
    assert_blocked(trace(model, data(3, 4)), "up", "nothing consumes it")


def test_a_mean_over_channels_blocks() -> None:
    model = conv_then(lambda self, h: self.head(h) + h.mean(1, keepdim=True), head=nn.Conv2d(4, 2, 1))
    assert_blocked(trace(model, data(*IMAGES)), "conv", "mean", "channels")


def test_a_concatenation_along_another_axis_blocks() -> None:
    model = conv_then(lambda self, h: self.head(torch.cat([h, h], 2)), head=nn.Conv2d(4, 2, 1))
    assert_blocked(trace(model, data(*IMAGES)), "conv", "concatenates along another axis")


def test_a_linear_layer_on_another_axis_blocks() -> None:
    model = conv_then(lambda self, h: self.head(h), head=nn.Linear(6, 2))
    assert "conv" not in trace(model, data(*IMAGES)).units


def test_per_channel_factors_in_the_code_block() -> None:
    model = two_linear(lambda self, h: F.relu(h) * self.scale)
    model.scale = nn.Parameter(torch.rand(6, dtype=torch.float64))
    assert_blocked(trace(model, data(3, 4)), "up", "ties its channels")


def test_a_gate_ties_the_channels_of_two_layers() -> None:
    model = net(
        lambda self, x: self.down(F.relu(self.up(x)) * torch.sigmoid(self.gate(x))),
        up=nn.Linear(4, 6),
        gate=nn.Linear(4, 6),
        down=nn.Linear(6, 2),
    )
    graph = trace(model, data(3, 4))
    assert_blocked(graph, "up", "ties its channels")
    assert_blocked(graph, "gate", "ties its channels")


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
    assert_blocked(trace(model, data(*IMAGES)), "conv", "size that is written into the code")


def test_a_channel_shuffle_blocks() -> None:
    def shuffle(self: nn.Module, h: Tensor) -> Tensor:
        b, c, height, width = h.shape
        return self.head(h.view(b, 2, c // 2, height, width).transpose(1, 2).reshape(b, c, height, width))

    model = conv_then(shuffle, head=nn.Conv2d(4, 2, 1))
    assert_blocked(trace(model, data(*IMAGES)), "conv", "rearranges its channels")


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
    model.register_buffer("mask", data(2, 1, 6, 6))
    return model


def described(graph: Graph) -> list[tuple[object, ...]]:
    """Return the properties of the units, except the names of nodes."""
    return [
        (u.name, u.kind, u.width, u.fan_in, u.norm, u.activation.name, u.followers, u.consumers, u.left_out)
        for u in graph
    ]


@pytest.mark.parametrize("form", FORMS)
def test_functional_forms_are_followed_like_modules(form: str) -> None:
    function, module, columns, repeat = FORMS[form]
    graph = trace(form_model(function, columns), data(*IMAGES))
    assert list(graph.units) == ["conv"]
    assert graph.layers["head"].inputs == (Segment("conv", 4, repeat),)
    assert described(graph) == described(trace(form_model(module, columns), data(*IMAGES)))
    assert_splits_keep_outputs(form_model(function, columns), data(*IMAGES))


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
def test_keyword_arguments_are_followed_or_block(which: str) -> None:
    x = data(*IMAGES)
    model = form_model(KEYWORDS[which], 144)
    graph = trace(model, x)
    if graph.units:
        assert_splits_keep_outputs(model, x)
    else:
        assert_blocked(graph, "conv")


@pytest.mark.parametrize(
    "act",
    [F.relu, torch.relu, lambda h: h.relu(), lambda h: F.relu(h, inplace=True), lambda h: h.relu_(), F.relu_],
    ids=["F.relu", "torch.relu", "method", "inplace", "relu_", "F.relu_"],
)
def test_every_form_of_relu_is_an_activation(act: Callable[[Tensor], Tensor]) -> None:
    graph = trace(two_linear(lambda self, h: act(h)), data(3, 4))
    assert graph.units["up"].activation.name == "relu"
    assert graph.units["up"].left_out == ()


@pytest.mark.parametrize("slope", [0.05, 0.3])
def test_options_of_functional_activations_are_read(slope: float) -> None:
    z = data(50)
    for form in (lambda self, h: F.leaky_relu(h, slope), lambda self, h: F.leaky_relu(h, negative_slope=slope)):
        act = trace(two_linear(form), data(3, 4)).units["up"].activation
        assert torch.equal(act(z), F.leaky_relu(z, slope))


def test_branches_are_concatenated_at_their_offsets() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        branches = [F.silu(self.b(x)), x, F.silu(self.a(x))]
        return self.head(torch.cat(branches, dim=1).flatten(1))

    model = net(forward, a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(3, 2, 3, padding=1), head=nn.Linear(9 * 36, 2))
    graph = trace(model, data(*IMAGES))
    assert graph.layers["head"].inputs == (Segment("b", 2, 36), Segment(None, 3, 36), Segment("a", 4, 36))
    assert_splits_keep_outputs(model, data(*IMAGES))


def test_one_branch_may_be_concatenated_twice() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = F.silu(self.a(x))
        return self.head(torch.cat([h.amax((2, 3)), h.mean((2, 3))], 1))

    model = net(forward, a=nn.Conv2d(3, 4, 1), head=nn.Linear(8, 2))
    assert trace(model, data(*IMAGES)).layers["head"].inputs == (Segment("a", 4), Segment("a", 4))
    assert_splits_keep_outputs(model, data(*IMAGES))


def test_channels_are_followed_through_max_with_indices() -> None:
    model = conv_then(lambda self, h: self.head(h.flatten(1).unsqueeze(1).max(1)[0]), head=nn.Linear(144, 2))
    assert list(trace(model, data(*IMAGES)).units) == ["conv"]
    assert_splits_keep_outputs(model, data(*IMAGES))


@pytest.mark.parametrize("multiplier", [1, 2, 3])
def test_depthwise_convolutions_are_followers(multiplier: int) -> None:
    model = conv_then(
        lambda self, h: self.head(self.norm(self.depthwise(h)).flatten(1)),
        depthwise=nn.Conv2d(4, 4 * multiplier, 3, groups=4),
        norm=nn.BatchNorm2d(4 * multiplier),
        head=nn.Linear(64 * multiplier, 2),
    )
    graph = trace(model, data(*IMAGES))
    assert graph.units["conv"].followers == ("depthwise", "norm")
    assert graph.layers["norm"].inputs == (Segment("conv", 4, multiplier),)
    assert graph.layers["head"].inputs == (Segment("conv", 4, 16 * multiplier),)
    assert graph.units["conv"].left_out == ()
    assert_splits_keep_outputs(model, data(*IMAGES))


SECOND_NONLINEARITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "square": torch.square,
    "power": lambda h: h**2,
    "product with itself": lambda h: h * h,
    "one over": lambda h: 1.0 / (h + 3.0),
    "exp": lambda h: h.exp(),
}


@pytest.mark.parametrize("which", SECOND_NONLINEARITIES)
def test_a_later_nonlinearity_is_left_out_and_named(which: str) -> None:
    model = two_linear(lambda self, h: SECOND_NONLINEARITIES[which](F.silu(h)))
    graph = trace(model, data(3, 4))
    assert len(graph.units["up"].left_out) == 1
    assert graph.units["up"].left_out[0] in row(graph, "up")
    assert_splits_keep_outputs(model, data(3, 4))


class Swish2(nn.Module):
    """x sigmoid(2 x), with control flow that torch.fx cannot trace."""

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


def swish2() -> Activation:
    def first(z: Tensor) -> Tensor:
        s = torch.sigmoid(2 * z)
        return s + 2 * z * s * (1 - s)

    def second(z: Tensor) -> Tensor:
        s = torch.sigmoid(2 * z)
        return 4 * s * (1 - s) * (1 + z * (1 - 2 * s))

    return Activation("swish2", lambda z: z * torch.sigmoid(2 * z), first, second)


@pytest.mark.usefixtures("_fresh_registry")
@pytest.mark.parametrize("fixed", [True, False], ids=["activation", "function of the module"])
def test_a_users_activation_can_be_registered(fixed: bool) -> None:
    register_layer(Swish2, activation=swish2() if fixed else lambda module: swish2())
    model = two_linear(lambda self, h: self.act(h), act=Swish2())
    x = data(9, 4)
    graph = trace(model, x)
    assert graph.units["up"].activation.name == "swish2"
    assert graph.units["up"].left_out == ()
    assert_splits_keep_outputs(model, x)

    # x sigmoid(2 x) = silu(2 x) / 2: the curvature can be compared with a SiLU at twice the weights.
    doubled = two_linear(lambda self, h: F.silu(h) * 0.5)
    with torch.no_grad():
        doubled.load_state_dict(model.state_dict())
        doubled.up.weight.mul_(2)
        doubled.up.bias.mul_(2)
    target = data(9, 2)
    S = capture(model, squared_error, [(x, target)], graph)["up"].dense()
    S2 = capture(doubled, squared_error, [(x, target)], trace(doubled, x))["up"].dense()
    assert relative_error(S, 4 * S2) < 1e-12


@pytest.mark.usefixtures("_fresh_registry")
def test_a_registered_activation_may_be_used_many_times() -> None:
    register_layer(Swish2, activation=swish2())

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.c(self.act(self.b(self.act(self.a(x)))))

    model = net(forward, a=nn.Linear(4, 5), b=nn.Linear(5, 6), c=nn.Linear(6, 2), act=Swish2())
    assert list(trace(model, data(3, 4)).units) == ["a", "b"]


@pytest.mark.usefixtures("_fresh_registry")
@pytest.mark.parametrize("linear", [True, False])
def test_a_scale_per_channel_can_be_registered(linear: bool) -> None:
    register_layer(Scale, per_channel=["factor"], size_attributes=["channels"], linear=linear)
    model = two_linear(lambda self, h: self.scale(F.silu(h)), scale=Scale(6))
    x = data(3, 4)
    graph = trace(model, x)
    unit = graph.units["up"]
    assert unit.followers == ("scale",)
    assert unit.consumers == ("down",)
    assert unit.left_out == (() if linear else ("scale",))
    assert_splits_keep_outputs(model, x)
    apply_splits(model, random_plan(graph, 2), eps=0.0)
    assert model.scale.channels == len(model.scale.factor) == 12


class UnknownScale(nn.Module):
    """A factor per channel that is not registered."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(channels))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_a_scale_per_channel_that_is_not_registered_blocks() -> None:
    model = two_linear(lambda self, h: self.scale(F.silu(h)), scale=UnknownScale(6))
    assert_blocked(trace(model, data(3, 4)), "up", "ties its channels")


def test_only_modules_can_be_registered() -> None:
    with pytest.raises(TypeError, match="module_type"):
        register_layer(torch.relu)  # type: ignore[arg-type]


def test_the_error_for_control_flow_that_depends_on_data_says_where_and_what_to_do() -> None:
    def between(self: nn.Module, h: Tensor) -> Tensor:
        if h.sum() > 0:
            h = -h
        return F.relu(h)

    line = between.__code__.co_firstlineno + 1
    with pytest.raises(ValueError, match=rf"test_tracing\.py:{line}: if h\.sum\(\) > 0") as error:
        trace(two_linear(between), data(3, 4))
    assert "torch.fx.wrap" in str(error.value)
    assert "register_layer" in str(error.value)


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_tracing_changes_nothing(case: ModelCase) -> None:
    model = case.model()
    model.train()
    # Mixed modes, which no single call of train or eval would restore.
    for index, module in enumerate(model.modules()):
        module.training = index % 3 != 0
    modes = [module.training for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    trace(model, case.inputs())
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_tracing_a_model_that_draws_random_numbers_keeps_the_random_state() -> None:
    model = two_linear(lambda self, h: F.dropout(F.relu(h), 0.5))
    random_state = torch.get_rng_state()
    trace(model, data(3, 4))
    assert torch.equal(torch.get_rng_state(), random_state)


def test_modes_are_restored_when_tracing_fails() -> None:
    model = two_linear(lambda self, h: self.odd(h) if h.sum() > 0 else h, odd=nn.ReLU())
    model.train()
    model.down.eval()
    with pytest.raises(ValueError, match="cannot be traced"):
        trace(model, data(3, 4))
    assert model.training
    assert model.up.training
    assert not model.down.training


def test_a_model_with_several_inputs_is_traced_with_a_tuple() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = nn.Linear(4, 3), nn.Linear(5, 2), nn.Linear(5, 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.head(torch.cat([F.relu(self.a(x)), F.relu(self.b(y))], -1))

    graph = trace(Two().double(), (data(3, 4), data(3, 5)))
    assert list(graph.units) == ["a", "b"]
    assert graph.layers["head"].inputs == (Segment("a", 3), Segment("b", 2))


def test_the_length_of_a_graph_is_its_number_of_units() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 5), nn.SiLU(), nn.Linear(5, 2))
    graph = trace(model, torch.zeros(1, 3))
    assert len(graph) == len(list(graph)) == 2
    assert len(trace(nn.Linear(3, 4), torch.zeros(1, 3))) == 0
