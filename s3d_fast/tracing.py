"""Tracing: follow a model's channels from the layers that make them to the layers that read them."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from s3d_fast import fx_calls, layers
from s3d_fast.activations import Activation
from s3d_fast.graph import Graph, Layer, Layout, Segment, Unit


def trace(model: nn.Module, example_input: Any) -> Graph:
    """Find the units of a model by following one evaluation symbolically.

    Args:
        model: any nn.Module that torch.fx can trace; it is left as it was.
        example_input: a tensor, or a tuple of arguments, of the shapes that the model sees. The first dimension is
            the batch.

    Raises:
        ValueError: torch.fx cannot trace the model; the message names the line and what to do.
    """
    arguments = example_input if isinstance(example_input, tuple) else (example_input,)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        module = fx.GraphModule(model, _symbolic(model))
        with torch.no_grad():
            _Shapes(module).run(*arguments)
    finally:
        for part, training in modes.items():
            part.training = training
    return _Analysis(module).run()


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return layers.is_leaf(m) or super().is_leaf_module(m, module_qualified_name)


def _symbolic(model: nn.Module) -> fx.Graph:
    try:
        return _Tracer().trace(model)
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
        where = f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "an unknown line"
        raise ValueError(
            f"model cannot be traced by torch.fx at {where} ({error}). Control flow that depends on values must go: "
            "move it into a function marked by torch.fx.wrap, or into a module of its own that treats every channel "
            "alone and is made known by s3d_fast.register_layer"
        ) from error


def _is_users(filename: str) -> bool:
    return "/torch/" not in filename and not filename.startswith("<") and filename != __file__


class _Shapes(fx.Interpreter):
    """Notes the shape of every tensor in node.meta["shape"]."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            n.meta["shape"] = tuple(result.shape)
        return result


@dataclass(frozen=True)
class _Value:
    """A tensor whose axis `axis` holds channels laid out as `layout`."""

    layout: Layout
    axis: int

    def sources(self) -> list[str]:
        return [segment.source for segment in self.layout if segment.source is not None]


@dataclass
class _Draft:
    """A producer while the analysis runs."""

    name: str
    node: fx.Node
    kind: str
    reason: str | None = None
    no_activation: str | None = None
    followers: list[str] = field(default_factory=list)
    consumers: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


class _Analysis:
    """Follows channel layouts through the traced graph, node by node."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.modules = dict(module.named_modules())
        self.values: dict[fx.Node, _Value] = {}
        self.drafts: dict[str, _Draft] = {}
        self.layers: dict[str, Layer] = {}
        self.activations: dict[str, tuple[Activation, fx.Node, str | None]] = {}
        self.own_activation: dict[fx.Node, str] = {}
        self.calls: dict[str, int] = {}
        for node in module.graph.nodes:
            if node.op == "call_module":
                self.calls[node.target] = self.calls.get(node.target, 0) + 1
        self.shared = self._shared_weights()

    def run(self) -> Graph:
        for node in self.module.graph.nodes:
            if node.op == "call_module":
                self._module(node, self.modules[node.target])
            elif node.op in ("call_function", "call_method"):
                self._function(node)
            elif node.op == "output":
                for value in self._inputs(node):
                    self._block(value, "it is the model's output")
        units = {}
        for name, draft in self.drafts.items():
            # A channel that must not change is the better reason; that S is zero comes second.
            draft.reason = draft.reason or draft.no_activation
            if draft.reason is None and not draft.consumers:
                draft.reason = "nothing consumes it"
            if draft.reason is not None:
                self.layers[name] = replace(self.layers[name], reason=draft.reason)
                continue
            act, act_node, norm = self.activations[name]
            units[name] = Unit(
                name=name,
                kind=draft.kind,
                width=self.layers[name].width,
                fan_in=_fan_in(self.modules[name]),
                norm=norm,
                activation=act,
                producer_node=draft.node.name,
                activation_node=act_node.name,
                followers=tuple(dict.fromkeys(draft.followers)),
                consumers=tuple(dict.fromkeys(draft.consumers)),
                left_out=tuple(dict.fromkeys(draft.left_out)),
            )
        return Graph(self.module, units, self.layers)

    def _module(self, node: fx.Node, module: nn.Module) -> None:
        name = str(node.target)
        kind = layers.producer_kind(module)
        if kind is not None:
            self._producer(node, name, module, kind)
        elif layers.is_depthwise(module) and self._axis_is(node, 1):
            self._follower(node, name, "depthwise", module.out_channels // module.in_channels)  # type: ignore
        elif layers.is_batchnorm(module) and self._axis_is(node, 1):
            self._follower(node, name, "batchnorm")
        elif layers.custom_layer(module) is not None:
            custom = layers.custom_layer(module)
            self._follower(node, name, "custom", curved=not custom.smooth)  # type: ignore[union-attr]
        elif layers.activation_of(module) is not None:
            self._pass(node, curved=name)
        elif isinstance(module, layers.PASSING):
            self._pass(node)
        else:
            mixing = next((word for kind_, word in layers.MIXING.items() if isinstance(module, kind_)), None)
            if mixing is not None:
                self._block_inputs(node, f"{mixing} '{name}' mixes its channels")
            else:
                self._block_inputs(node, f"{type(module).__name__} '{name}' is not a layer that splits know")

    def _producer(self, node: fx.Node, name: str, module: nn.Module, kind: str) -> None:
        value = self._input(node)
        axis = 1 if kind == "conv" else len(node.meta["shape"]) - 1
        fan = sum(seg.channels * seg.repeat for seg in value.layout) if value is not None else _input_width(module)
        layout: Layout = value.layout if value is not None else (Segment(None, fan),)
        shape = node.meta["shape"]
        width = layers.output_width(module)
        positions = 1
        for size in shape[1:]:
            positions *= size
        self.layers[name] = Layer(name, kind, width, layout, positions // width, self.calls[name])
        draft = self.drafts.setdefault(name, _Draft(name, node, kind))
        draft.reason = draft.reason or self._unsplittable(name, module)

        if value is not None:
            grouped = isinstance(module, nn.Conv2d) and module.groups > 1
            if value.axis != _input_axis(kind, node):
                self._block(value, f"'{name}' reads another axis than its channels")
            elif grouped:
                self._block(value, f"it feeds the grouped convolution '{name}'")
            elif self.calls[name] > 1:
                self._block(value, f"its consumer '{name}' is called {self.calls[name]} times")
            elif name in self.shared:
                self._block(value, f"its consumer '{name}' shares its weight with '{self.shared[name]}'")
            elif not _is_plain(module):
                self._block(value, f"the weight of its consumer '{name}' is computed, not stored")
            for source in value.sources():
                self.drafts[source].consumers.append(name)

        self.values[node] = _Value((Segment(name, width),), axis)
        if draft.reason is None:
            found = self._find_activation(node, module, kind)
            if isinstance(found, str):
                draft.no_activation = found
            else:
                self.activations[name] = found
                self.own_activation[found[1]] = name

    def _find_activation(
        self, node: fx.Node, module: nn.Module, kind: str
    ) -> tuple[Activation, fx.Node, str | None] | str:
        """Return the activation of a producer, its node and the BatchNorm before it; or why there is none."""
        if kind == "edgeconv":
            act = layers.activation_of(module.activation)  # type: ignore[arg-type]
            if act is None:
                return f"its activation {type(module.activation).__name__} is not known"
            return act, node, None
        norm: str | None = None
        while True:
            users = list(node.users)
            if len(users) != 1:
                return "its output is used in more than one place before an activation"
            (node,) = users
            if node.op == "call_module":
                following = self.modules[str(node.target)]
                act = layers.activation_of(following)
                if act is not None and act.name != "identity":
                    return act, node, norm
                if layers.is_batchnorm(following) and norm is None:
                    norm = str(node.target)
                    continue
                if act is not None or isinstance(following, (nn.Dropout, nn.Dropout2d)):
                    continue
            elif node.op in ("call_function", "call_method"):
                act = fx_calls.functional_activation(node)
                if act is not None:
                    return act, node, norm
                if fx_calls.name(node) in fx_calls.RESHAPING | {"dropout", "contiguous"}:
                    continue
            return "no activation follows it, so that its splitting matrix is zero"

    def _unsplittable(self, name: str, module: nn.Module) -> str | None:
        if isinstance(module, nn.Conv2d) and module.groups > 1:
            return "it is a grouped convolution"
        if self.calls[name] > 1:
            return f"it is called {self.calls[name]} times"
        if name in self.shared:
            return f"it shares its weight with '{self.shared[name]}'"
        if not _is_plain(module):
            return "its weight is computed, not stored (a parametrization?)"
        return None

    def _follower(self, node: fx.Node, name: str, kind: str, multiplier: int = 1, curved: bool = False) -> None:
        value = self._input(node)
        shape = node.meta["shape"]
        if value is None:
            width = shape[1] if len(shape) > 1 else 1
            self.layers[name] = Layer(name, kind, width, (Segment(None, width),), 1, self.calls[name])
            return
        if self.calls[name] > 1:
            self._block(value, f"'{name}', which follows it, is called {self.calls[name]} times")
        if name in self.shared:
            self._block(value, f"'{name}', which follows it, shares its weight with '{self.shared[name]}'")
        positions = 1
        for axis, size in enumerate(shape[1:], 1):
            positions *= 1 if axis == value.axis else size
        self.layers[name] = Layer(name, kind, shape[value.axis], value.layout, positions, self.calls[name])
        for source in value.sources():
            self.drafts[source].followers.append(name)
        layout = tuple(replace(segment, repeat=segment.repeat * multiplier) for segment in value.layout)
        self.values[node] = replace(value, layout=layout)
        if curved:
            self._leave_out(node, value, name)

    def _function(self, node: fx.Node) -> None:
        name = fx_calls.name(node)
        if "shape" not in node.meta:
            # Not a tensor: a size, or the pair that max(x, dim) returns.
            if name in ("max", "min") and self._input(node) is not None:
                self._reduce(node, name)
            return
        inputs = self._inputs(node)
        if not inputs:
            return
        if fx_calls.functional_activation(node) is not None:
            self._pass(node, curved=node.name)
        elif name in fx_calls.ELEMENTWISE:
            self._pass(node)
        elif name in fx_calls.CURVED:
            self._pass(node, curved=node.name)
        elif name in fx_calls.ARITHMETIC:
            self._arithmetic(node, name)
        elif name in fx_calls.CONCATENATING:
            self._concatenate(node)
        elif name in fx_calls.REDUCING:
            self._reduce(node, name)
        elif name in fx_calls.SPATIAL:
            self._spatial(node, name)
        elif name in fx_calls.RESHAPING:
            self._reshape(node, name)
        elif name == "getitem" and node.args[1] == 0 and node.args[0] in self.values:
            self.values[node] = self.values[node.args[0]]  # type: ignore[index]
        elif name in fx_calls.MIXING:
            self._block_inputs(node, f"{name} '{node.name}' mixes its channels")
        else:
            self._block_inputs(node, f"the operation '{name}' is not known")

    def _arithmetic(self, node: fx.Node, name: str) -> None:
        """Follow x + 1 and the like; two tensors of channels that meet are tied to one another."""
        tensors = [arg for arg in node.args if isinstance(arg, fx.Node) and "shape" in arg.meta]
        value = self._inputs(node)[0]
        holder = next(arg for arg in tensors if arg in self.values)
        for other in tensors:
            if other is holder:
                continue
            # A tensor that treats all channels alike is as good as a number.
            axis = value.axis - len(node.meta["shape"])
            alike = len(other.meta["shape"]) < -axis or other.meta["shape"][axis] == 1
            if other in self.values or not alike:
                what = {"add": "residual addition", "iadd": "residual addition"}.get(name, f"operation {name}")
                self._block_inputs(node, f"the {what} '{node.name}' ties its channels to those of another tensor")
                return
        if name in ("pow", "rpow") or (name in ("truediv", "div") and holder is not node.args[0]):
            self._pass(node, curved=node.name)
        else:
            self._pass(node)

    def _concatenate(self, node: fx.Node) -> None:
        parts = [part for part in node.args[0] if isinstance(part, fx.Node)]  # type: ignore[union-attr]
        dim = fx_calls.argument(node, 1, "dim", 0) % len(node.meta["shape"])
        known = [self.values[part] for part in parts if part in self.values]
        if any(value.axis != dim for value in known):
            self._block_inputs(node, f"'{node.name}' concatenates along another axis than its channels")
            return
        layout: list[Segment] = []
        for part in parts:
            layout += self.values[part].layout if part in self.values else [Segment(None, part.meta["shape"][dim])]
        self.values[node] = _Value(tuple(layout), dim)

    def _reduce(self, node: fx.Node, name: str) -> None:
        """Follow a mean, a maximum or a sum over other axes than the channels."""
        value = self._inputs(node)[0]
        rank = len(node.args[0].meta["shape"])  # type: ignore[union-attr]
        dims = fx_calls.argument(node, 1, "dim", None)
        if dims is None:
            self._block_inputs(node, f"'{node.name}' takes the {name} over all axes")
            return
        dims = [dim % rank for dim in ([dims] if isinstance(dims, int) else dims)]
        if value.axis in dims:
            self._block_inputs(node, f"'{node.name}' takes the {name} over its channels")
            return
        keep = fx_calls.argument(node, 2, "keepdim", False)
        axis = value.axis if keep else value.axis - sum(dim < value.axis for dim in dims)
        self.values[node] = replace(value, axis=axis)

    def _spatial(self, node: fx.Node, name: str) -> None:
        """Follow pooling, padding and resizing of feature maps."""
        value = self._inputs(node)[0]
        before, after = node.args[0].meta["shape"], node.meta["shape"]  # type: ignore[union-attr]
        if value.axis != 1 or len(before) != len(after) or len(after) < 3 or before[1] != after[1]:
            self._block_inputs(node, f"'{node.name}' ({name}) does not keep its channels apart")
        else:
            self._pass(node)

    def _reshape(self, node: fx.Node, name: str) -> None:
        value = self._inputs(node)[0]
        before, after = node.args[0].meta["shape"], node.meta["shape"]  # type: ignore[union-attr]
        axis = fx_calls.moved_axis(node, value.axis, before)
        if axis is not None:
            self.values[node] = replace(value, axis=axis)
            return
        # Flattening everything behind the channels: every channel becomes `repeat` neighbouring entries.
        behind = 1
        for size in before[value.axis + 1 :]:
            behind *= size
        keeps_front = after[: value.axis] == before[: value.axis]
        literal = [arg for arg in node.args[1:] if isinstance(arg, int)]
        fixed = name in ("view", "reshape") and after[-1] in literal
        if name in ("flatten", "view", "reshape") and keeps_front and len(after) == value.axis + 1 and not fixed:
            layout = tuple(replace(segment, repeat=segment.repeat * behind) for segment in value.layout)
            self.values[node] = _Value(layout, value.axis)
        elif fixed:
            self._block_inputs(node, f"'{node.name}' reshapes to a size that is written into the code")
        else:
            self._block_inputs(node, f"'{node.name}' ({name}) rearranges its channels")

    def _pass(self, node: fx.Node, curved: str | None = None) -> None:
        """Let the channels pass unchanged; `curved` names a nonlinear operation."""
        value = self._input(node)
        if value is None:
            return
        self.values[node] = value
        if curved is not None:
            self._leave_out(node, value, curved)

    def _leave_out(self, node: fx.Node, value: _Value, name: str) -> None:
        for source in value.sources():
            if self.own_activation.get(node) != source:
                self.drafts[source].left_out.append(name)

    def _block(self, value: _Value, reason: str) -> None:
        for source in value.sources():
            self.drafts[source].reason = self.drafts[source].reason or reason

    def _block_inputs(self, node: fx.Node, reason: str) -> None:
        for value in self._inputs(node):
            self._block(value, reason)

    def _inputs(self, node: fx.Node) -> list[_Value]:
        return [self.values[arg] for arg in node.all_input_nodes if arg in self.values]

    def _input(self, node: fx.Node) -> _Value | None:
        inputs = self._inputs(node)
        return inputs[0] if inputs else None

    def _axis_is(self, node: fx.Node, axis: int) -> bool:
        value = self._input(node)
        return value is None or value.axis == axis

    def _shared_weights(self) -> dict[str, str]:
        """Return the modules that share a parameter with another one, with that one's name."""
        owners: dict[int, str] = {}
        shared: dict[str, str] = {}
        for name, module in self.modules.items():
            for parameter in module.parameters(recurse=False):
                other = owners.setdefault(id(parameter), name)
                if other != name:
                    shared[name], shared[other] = other, name
        return shared


def _input_axis(kind: str, node: fx.Node) -> int:
    shape = node.all_input_nodes[0].meta["shape"]
    return 1 if kind == "conv" else len(shape) - 1


def _is_plain(module: nn.Module) -> bool:
    return isinstance(module._parameters.get("weight"), nn.Parameter)


def _input_width(module: nn.Module) -> int:
    return int(module.in_channels if isinstance(module, nn.Conv2d) else module.in_features)  # type: ignore[arg-type]


def _fan_in(module: nn.Module) -> int:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight[0].numel() + (getattr(module, "bias", None) is not None)
