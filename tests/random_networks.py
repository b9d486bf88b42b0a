"""Random networks over all operations that `trace` has rules for, and the check that none is changed silently."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import s3d_fast as s3d
from tests.model_cases import random_plan

Layer = Callable[[Tensor], Tensor]


class Swish(nn.Module):
    """An activation that is written out."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


class OwnLinear(nn.Linear):
    """A subclass with a forward pass of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t() + self.bias


ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.relu,
    F.silu,
    F.gelu,
    torch.tanh,
    F.mish,
    F.selu,
    F.celu,
    F.hardswish,
    F.elu,
    F.softplus,
    lambda x: x * torch.sigmoid(x),
    lambda x: F.relu(x, inplace=True),
    lambda x: F.leaky_relu(x, 0.1),
    lambda x: x.clamp(-1, 1),
    lambda x: F.relu(x) ** 2,
    lambda x: F.dropout(torch.tanh(x), training=False),
)


class RandomNetwork(nn.Module):
    """A network that `draw` makes: a list of steps, each of which takes the tensors so far and makes another."""

    def __init__(self, draw: random.Random, layout: str) -> None:
        super().__init__()
        self.draw, self.layout = draw, layout
        self.parts = nn.ModuleList()
        self.free = nn.ParameterList()
        self.steps: list[Callable[[list[Tensor]], Tensor]] = []
        self.text: list[str] = []
        self.width = draw.choice((2, 3, 4, 6))
        self.saved_widths: list[int] = []
        self.two_outputs = draw.random() < 0.2
        self._step("input", self._producer(3, self.width))
        for _ in range(draw.randint(2, 7)):
            self._more()
        self._activate()
        self._step("output", self._producer(self.width, 2))
        del self.draw

    def forward(self, x: Tensor) -> Any:
        values = [x]
        for step in self.steps:
            values.append(step(values))
        out = values[-1]
        if self.layout != "vector":
            out = out.mean(tuple(range(2, out.dim()))) if self.layout == "map" else out.mean(1)
        return {"first": out, "second": values[1].mean()} if self.two_outputs else out

    def example(self, batch: int) -> Tensor:
        """Return an input of this batch size."""
        shapes = {"vector": (3,), "map": (3, 6, 5), "sequence": (4, 3)}
        generator = torch.Generator().manual_seed(batch)
        return torch.randn(batch, *shapes[self.layout], generator=generator, dtype=torch.float64)

    def _step(self, text: str, function: Layer) -> None:
        self.text.append(text)
        self.steps.append(lambda values: function(values[-1]))

    def _add(self, module: nn.Module) -> nn.Module:
        self.parts.append(module)
        return module

    def _parameter(self, *shape: int) -> Callable[[], nn.Parameter]:
        """Return a function that finds a parameter of the network; a split puts another object in its place."""
        self.free.append(nn.Parameter(torch.randn(shape)))
        place = len(self.free) - 1
        return lambda: self.free[place]

    def _producer(self, inputs: int, outputs: int) -> Layer:
        """Return a layer that makes channels."""
        draw = self.draw
        if self.layout == "map":
            kernel = draw.choice((1, 1, 3))
            kind = draw.choice(("conv", "conv", "conv", "same", "transposed", "weight_norm", "frozen"))
            if kind == "transposed":
                return self._add(nn.ConvTranspose2d(inputs, outputs, kernel, padding=kernel // 2))
            padding: Any = "same" if kind == "same" else kernel // 2
            conv: nn.Module = nn.Conv2d(inputs, outputs, kernel, padding=padding, bias=draw.random() < 0.7)
        else:
            kind = draw.choice(("linear", "linear", "own", "matmul", "einsum", "weight_norm", "frozen", "function"))
            if kind == "own":
                return self._add(OwnLinear(inputs, outputs))
            if kind == "matmul":
                weight = self._parameter(inputs, outputs)
                return lambda x: x @ weight()
            if kind == "einsum":
                weight = self._parameter(outputs, inputs)
                equation = "bi,oi->bo" if self.layout == "vector" else "bti,oi->bto"
                return lambda x: torch.einsum(equation, x, weight())
            if kind == "function":
                weight, bias = self._parameter(outputs, inputs), self._parameter(outputs)
                return lambda x: F.linear(x, weight(), bias())
            conv = nn.Linear(inputs, outputs, bias=draw.random() < 0.7)
        if kind == "weight_norm":
            conv = parametrizations.weight_norm(conv)
        if kind == "frozen":
            conv.requires_grad_(False)
        return self._add(conv)

    def _axis(self) -> int:
        return {"vector": 1, "map": 1, "sequence": 2}[self.layout]

    def _per_channel(self, parameter: Callable[[], nn.Parameter]) -> Tensor:
        return parameter()[:, None, None] if self.layout == "map" else parameter()

    def _activate(self) -> None:
        index = self.draw.randrange(len(ACTIVATIONS) + 2)
        if index < len(ACTIVATIONS):
            self._step(f"activation {index}", ACTIVATIONS[index])
        elif index == len(ACTIVATIONS):
            self._step("swish", self._add(Swish()))
        else:
            channels = self.width if self.layout != "sequence" and self.draw.random() < 0.5 else 1
            self._step("prelu", self._add(nn.PReLU(channels)))

    def _more(self) -> None:
        kinds = (
            *("layer", "layer", "layer", "norm", "activation", "activation", "residual", "residual", "gate", "chunk"),
            *("squeeze", "scale", "cat", "save", "depthwise", "grouped", "space", "size", "hook", "shared", "view"),
            *("mix", "slice", "shift", "instance", "permute", "factor", "function", "mean", "inplace", "flip"),
        )
        kind = self.draw.choice(kinds)
        getattr(self, f"_make_{kind}")()

    def _make_layer(self) -> None:
        width = self.draw.choice((2, 3, 4, 6))
        self._activate() if self.draw.random() < 0.6 else None
        self._step(f"layer {self.width} -> {width}", self._producer(self.width, width))
        self.width = width

    def _make_norm(self) -> None:
        if self.layout == "map":
            self._step("batchnorm", self._add(nn.BatchNorm2d(self.width)))
        elif self.layout == "vector":
            self._step("batchnorm", self._add(nn.BatchNorm1d(self.width)))
        else:
            norm = self._add(nn.BatchNorm1d(self.width))
            self._step("batchnorm", lambda x: norm(x.transpose(1, 2)).transpose(1, 2))

    def _make_instance(self) -> None:
        if self.layout == "map":
            self._step("instance norm", self._add(nn.InstanceNorm2d(self.width, affine=True)))

    def _make_activation(self) -> None:
        self._activate()

    def _make_residual(self) -> None:
        act = self.draw.choice(ACTIVATIONS[:6])
        inner, outer = self._producer(self.width, self.width), self._producer(self.width, self.width)
        sign = self.draw.choice((1, -1, 0.5))
        self._step("residual", lambda x: x + sign * outer(act(inner(x))))

    def _make_gate(self) -> None:
        a, b = self._producer(self.width, 4), self._producer(self.width, 4)
        act = self.draw.choice(ACTIVATIONS[:6])
        self._step("gate", lambda x: act(a(x)) * b(x))
        self.width = 4

    def _make_chunk(self) -> None:
        layer, axis = self._producer(self.width, 6), self._axis()
        form = self.draw.choice(("chunk", "split", "glu", "slice"))

        def gated(x: Tensor) -> Tensor:
            h = layer(x)
            if form == "glu":
                return F.glu(h, axis)
            half = h.shape[axis] // 2
            a, b = {
                "chunk": lambda: h.chunk(2, axis),
                "split": lambda: h.split(half, axis),
                "slice": lambda: (h.narrow(axis, 0, half), h.narrow(axis, half, half)),
            }[form]()
            return F.silu(a) * b

        self._step(f"chunk ({form})", gated)
        self.width = 3

    def _make_squeeze(self) -> None:
        if self.layout != "map":
            return
        down, up = nn.Conv2d(self.width, 2, 1), nn.Conv2d(2, self.width, 1)
        self._add(down), self._add(up)
        self._step("squeeze", lambda x: x * torch.sigmoid(up(torch.relu(down(x.mean((2, 3), keepdim=True))))))

    def _make_scale(self) -> None:
        scale = self._parameter(self.width)
        plus = self.draw.random() < 0.5
        self._step("scale", lambda x: x + self._per_channel(scale) if plus else x * self._per_channel(scale))

    def _make_save(self) -> None:
        self.saved_widths.append(self.width)
        place = len(self.steps)
        self._step("save", lambda x: x)
        self.saved = place + 1

    def _make_cat(self) -> None:
        axis = self._axis()
        layer = self._producer(self.width, 3)
        act = self.draw.choice(ACTIVATIONS[:6])
        twice = self.draw.random() < 0.2
        self._step("cat", lambda x: torch.cat([x, act(layer(x)), *([x] if twice else [])], axis))
        self.width = self.width + 3 + (self.width if twice else 0)

    def _make_depthwise(self) -> None:
        if self.layout == "map":
            multiplier = self.draw.choice((1, 1, 2))
            conv = nn.Conv2d(self.width, multiplier * self.width, 3, padding=1, groups=self.width)
            self._step("depthwise", self._add(conv))
            self.width *= multiplier

    def _make_grouped(self) -> None:
        if self.layout == "map" and self.width % 2 == 0:
            self._step("grouped", self._add(nn.Conv2d(self.width, 4, 1, groups=2)))
            self.width = 4

    def _make_space(self) -> None:
        if self.layout == "map":
            self._step(
                "space",
                self.draw.choice(
                    (
                        lambda x: F.max_pool2d(x, 3, 1, 1),
                        lambda x: F.avg_pool2d(x, 3, 1, 1),
                        lambda x: F.interpolate(x, scale_factor=2),
                        lambda x: F.pad(x, (1, 1)),
                        lambda x: F.adaptive_avg_pool2d(x, 3),
                        lambda x: F.adaptive_max_pool2d(x, 3),
                    )
                ),
            )
        elif self.layout == "sequence":
            self._step("space", self.draw.choice((lambda x: x[:, 1:], lambda x: torch.softmax(x, 1))))

    def _make_size(self) -> None:
        layer = self._producer(self.width, 4)
        how = self.draw.choice(("attribute", "shape"))
        attribute = "out_channels" if self.layout == "map" else "out_features"
        axis = self._axis()

        def divided(x: Tensor) -> Tensor:
            h = torch.tanh(layer(x))
            return h / (getattr(layer, attribute, 4) if how == "attribute" else h.shape[axis] ** 0.5)

        self._step(f"size ({how})", divided)
        self.width = 4

    def _make_hook(self) -> None:
        layer = self._producer(self.width, 3)
        if isinstance(layer, nn.Module):
            kind = self.draw.choice(("harmless", "size"))
            axis = self._axis()

            def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
                return output * 2 if kind == "harmless" else output * output.shape[axis]

            layer.register_forward_hook(hook)
        self._step("hook", layer)
        self.width = 3

    def _make_shared(self) -> None:
        layer = self._producer(self.width, self.width)
        act = self.draw.choice(ACTIVATIONS[:6])
        self._step("shared", lambda x: layer(act(layer(x))))

    def _make_view(self) -> None:
        width = self.width
        if width % 2 == 0 and self.layout == "vector":
            dynamic = self.draw.random() < 0.5
            self._step(
                "view", lambda x: x.view(len(x), 2, -1 if dynamic else width // 2).transpose(1, 2).reshape(len(x), -1)
            )
        elif self.layout == "map":
            self._step("view", lambda x: x.flatten(2).unflatten(2, x.shape[2:]))

    def _make_mix(self) -> None:
        norm = self.draw.choice(("layer", "group", "softmax", "normalize"))
        axis = self._axis()
        if norm == "softmax":
            self._step("mix", lambda x: torch.softmax(x, axis))
        elif norm == "normalize":
            self._step("mix", lambda x: F.normalize(x, dim=axis))
        elif norm == "layer" and self.layout != "map":
            self._step("mix", self._add(nn.LayerNorm(self.width)))
        elif self.layout == "map":
            self._step("mix", self._add(nn.GroupNorm(1, self.width)))

    def _make_slice(self) -> None:
        if self.width > 2:
            axis, width = self._axis(), self.width
            keep = self.draw.choice(("first", "all but one"))
            self._step("slice", lambda x: x.narrow(axis, 0, 2 if keep == "first" else x.shape[axis] - 1))
            self.width = 2 if keep == "first" else width - 1

    def _make_shift(self) -> None:
        if self.layout == "map":
            self._step("shift", lambda x: F.pad(x, (0, 0, 0, 0, 1, -1)))
        else:
            self._step("shift", lambda x: torch.roll(x, 1, -1))

    def _make_permute(self) -> None:
        if self.layout == "map":
            linear = self._add(nn.Linear(self.width, 4))
            self._step("permute", lambda x: torch.tanh(linear(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2))
            self.width = 4
        elif self.layout == "sequence":
            tokens = self._add(nn.LazyLinear(4))
            self._step("permute", lambda x: tokens(torch.tanh(x).transpose(1, 2)).transpose(1, 2))

    def _make_factor(self) -> None:
        factor = torch.rand(self.width, dtype=torch.float64)
        self._step("factor", lambda x: x * (factor[:, None, None] if self.layout == "map" else factor))

    def _make_function(self) -> None:
        self._step("function", self.draw.choice((torch.abs, torch.sin, lambda x: torch.sqrt(1 + x * x), torch.neg)))

    def _make_mean(self) -> None:
        axis = self._axis()
        self._step("mean", lambda x: x - x.mean(axis, keepdim=True))

    def _make_inplace(self) -> None:
        def inplace(x: Tensor) -> Tensor:
            h = x * 3
            h += x
            return h.mul_(2)

        self._step("inplace", inplace)

    def _make_flip(self) -> None:
        axis = self._axis()
        self._step("flip", lambda x: x + x.flip(axis))


def check_random_networks(seeds: range, layout: str) -> None:
    """Assert that the networks of these seeds are preserved or refused with a reason, and that most have units."""
    found = []
    for seed in seeds:
        try:
            found.append(check_random_network(random.Random(seed), layout))
        except Exception as error:  # noqa: PERF203
            raise AssertionError(f"the network of seed {seed}: {error}") from error
    assert sum(count > 0 for count in found) >= len(seeds) / 2


def check_random_network(draw: random.Random, layout: str) -> int:
    """Assert that a random network is preserved by a split of all its units; return how many it has.

    What has no unit has a reason. The network has taken an optimizer step before the split, and takes one after it.
    """
    torch.manual_seed(draw.randrange(2**20))
    model = RandomNetwork(draw, layout).double().eval()
    inputs = [model.example(batch) for batch in (2, 5)]
    with torch.no_grad():
        model(inputs[0])
        for parameter in model.parameters():
            parameter.normal_(std=0.7)
        before = [outputs(model, x) for x in inputs]
    try:
        graph = s3d.trace(model, inputs[0])
    except ValueError as error:
        if "cannot be exported" not in str(error):
            raise
        return 0
    for layer in graph.layers.values():
        assert layer.name in graph.units or not layer.makes_channels or layer.reason, model.text
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=1e-3) if trained and _can_train(model, inputs[1]) else None
    if optimizer is not None:
        optimizer.step()
        before = [[out.detach() for out in outputs(model, x)] for x in inputs]
    s3d.apply_splits(model, random_plan(graph, 3, every=2), eps=0.0, optimizer=optimizer)
    with torch.no_grad():
        for x, wanted in zip(inputs, before, strict=True):
            for a, b in zip(wanted, outputs(model, x), strict=True):
                assert a.shape == b.shape, model.text
                if bool(torch.isfinite(a).all()):
                    error = float((a - b).abs().max() / a.abs().max().clamp(min=1e-3))
                    assert error < 1e-9, (error, model.text, graph.explain())
    if optimizer is not None:
        assert _can_train(model, inputs[1]), model.text
        optimizer.step()
    return len(graph)


def _can_train(model: nn.Module, x: Tensor) -> bool:
    """Return whether a gradient can be computed in training mode: some in-place operations forbid it."""
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.train().zero_grad()
    try:
        sum(out.square().mean() for out in outputs(model, x)).backward()  # type: ignore[union-attr]
    except RuntimeError as error:
        if "inplace" not in str(error) and "does not require grad" not in str(error):
            raise
        return False
    finally:
        model.eval()
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if buffer.shape == statistics[name].shape:
                    buffer.copy_(statistics[name])
    return True


def outputs(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return all outputs of a model."""
    found = model(x.clone())
    return list(found.values()) if isinstance(found, dict) else [found]
