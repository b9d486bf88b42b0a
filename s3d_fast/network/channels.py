"""Follows channels through a traced graph, from the layers that make them to the layers that read them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod

from torch import fx

from s3d_fast.maths.activations import Activation
from s3d_fast.network import fx_calls, layers
from s3d_fast.network.graph import Graph, Layer, Layout, Segment, Unit


@dataclass(frozen=True)
class _Value:
    """A tensor whose axis `axis` holds channels laid out as `layout`."""

    layout: Layout
    axis: int

    def producers(self) -> list[str]:
        return [segment.producer for segment in self.layout if segment.producer is not None]


@dataclass(frozen=True)
class _Size:
    """A number, or a shape, that depends on the producers' numbers of channels; `axis` is the channel axis, if any."""

    producers: frozenset[str]
    axis: int | None
    rank: int


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


class ChannelAnalysis:
    """Follows channel layouts through a traced graph, node by node; every node must have its shape in `meta`."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.modules = dict(module.named_modules())
        self.roles = layers.roles(self.modules)
        self.values: dict[fx.Node, _Value] = {}
        self.sizes: dict[fx.Node, _Size] = {}
        self.drafts: dict[str, _Draft] = {}
        self.layers: dict[str, Layer] = {}
        self.activations: dict[str, tuple[Activation, fx.Node, str | None]] = {}
        self.own_activation: dict[fx.Node, str] = {}
        self.calls: dict[str, int] = {}
        for node in module.graph.nodes:
            if node.op == "call_module":
                self.calls[node.target] = self.calls.get(node.target, 0) + 1
        self.tensor_nodes = {n for n in module.graph.nodes if "shape" in n.meta or n.meta.get("holds_tensors")}
        self.entangled = self._entangled()

    def run(self) -> Graph:
        """Return the graph: every layer that holds channels, and the units among them."""
        for node in self.module.graph.nodes:
            if node.op == "call_module":
                self._block_sizes(node)
                self._module(node)
            elif node.op in ("call_function", "call_method"):
                self._function(node)
            elif node.op == "output":
                self._block_inputs(node, "it is the model's output")
                self._block_sizes(node)
        units = {}
        for name, draft in self.drafts.items():
            # Report channels that must not change before a missing activation.
            draft.reason = draft.reason or draft.no_activation
            if draft.reason is None and not draft.consumers:
                draft.reason = "nothing consumes it"
            if draft.reason is None:
                units[name] = self._unit(draft)
            else:
                self.layers[name] = replace(self.layers[name], reason=draft.reason)
        return Graph(self.module, units, self.layers, self._others())

    def _others(self) -> dict[str, str]:
        """Return the types of the remaining modules with parameters, by name."""
        return {
            name: type(module).__name__
            for name, module in self.modules.items()
            if name not in self.layers and name in self.calls and any(True for _ in module.parameters())
        }

    def _unit(self, draft: _Draft) -> Unit:
        act, act_node, norm = self.activations[draft.name]
        before = self.values[draft.node if draft.kind == "edgeconv" else act_node.all_input_nodes[0]]
        return Unit(
            name=draft.name,
            kind=draft.kind,
            width=self.layers[draft.name].width,
            fan_in=self.roles[draft.name].fan_in,
            norm=norm,
            activation=act,
            producer_node=draft.node.name,
            activation_node=act_node.name,
            activation_axis=before.axis,
            followers=tuple(dict.fromkeys(draft.followers)),
            consumers=tuple(dict.fromkeys(draft.consumers)),
            left_out=tuple(dict.fromkeys(draft.left_out)),
        )

    def _module(self, node: fx.Node) -> None:
        name = str(node.target)
        role, value = self.roles[name], self._input(node)
        axis_is_1 = value is None or value.axis == 1
        if role.kind in layers.PRODUCERS:
            self._producer(node, name, role)
        elif role.kind in ("depthwise", "batchnorm") and axis_is_1:
            self._follower(node, name, role)
        elif role.kind == "custom" and role.per_channel:
            self._follower(node, name, role, curved=not role.linear)
        elif role.kind == "custom":
            self._pass(node, curved=None if role.linear else name)
        elif role.kind in ("activation", "curved"):
            self._pass(node, curved=name)
        elif role.kind == "dropout":
            self._pass(node)
        elif role.kind == "spatial":
            self._spatial(node)
        elif role.kind == "flatten":
            self._reshape(node, "flatten")
        elif role.kind == "mixing":
            self._block_inputs(node, f"{role.word} '{name}' mixes its channels")
        else:
            self._block_inputs(node, f"splitting does not support {role.word} '{name}'")

    def _producer(self, node: fx.Node, name: str, role: layers.Role) -> None:
        value, shape, kind, width = self._input(node), node.meta["shape"], role.kind, role.width
        layout: Layout = (Segment(None, role.input_width),) if value is None else value.layout
        self._note(name, kind, width, layout, prod(shape[1:]) // width)
        draft = self.drafts.setdefault(name, _Draft(name, node, kind))
        draft.reason = draft.reason or self._unsplittable(name, role)
        if value is not None:
            self._block(value, self._unreadable(name, role, value, node))
            for producer in value.producers():
                self.drafts[producer].consumers.append(name)
        self.values[node] = _Value((Segment(name, width),), 1 if kind == "conv" else len(shape) - 1)
        if draft.reason is None:
            found = self._find_activation(node, name, role)
            if isinstance(found, str):
                draft.no_activation = found
            else:
                self.activations[name] = found
                self.own_activation[found[1]] = name

    def _note(self, name: str, kind: str, width: int, inputs: Layout, positions: int) -> None:
        self.layers[name] = Layer.of(
            self.modules[name], self.roles[name].tensors, name, kind, width, inputs, positions, self.calls[name]
        )

    def _unsplittable(self, name: str, role: layers.Role) -> str | None:
        """Return why the layer's own filters cannot be split, or None."""
        if role.is_grouped:
            return "it is a grouped convolution"
        if self.calls[name] > 1:
            return f"it is called {self.calls[name]} times"
        if name in self.entangled:
            return f"it {self.entangled[name]}"
        if not role.has_stored_rows:
            return "its weight is computed, not stored (a parametrization?)"
        return None

    def _unreadable(self, name: str, role: layers.Role, value: _Value, node: fx.Node) -> str | None:
        """Return why the layer's columns cannot be split, or None."""
        rank = len(node.all_input_nodes[0].meta["shape"])
        if value.axis != (1 if role.kind == "conv" else rank - 1):
            return f"'{name}' reads an axis other than its channels"
        if role.is_grouped:
            return f"it feeds the grouped convolution '{name}'"
        if self.calls[name] > 1:
            return f"its consumer '{name}' is called {self.calls[name]} times"
        if name in self.entangled:
            return f"its consumer '{name}' {self.entangled[name]}"
        if not role.has_stored_columns:
            return f"the weight of its consumer '{name}' is computed, not stored"
        return None

    def _find_activation(
        self, node: fx.Node, name: str, role: layers.Role
    ) -> tuple[Activation, fx.Node, str | None] | str:
        """Return the activation of a producer, its node and the BatchNorm before it; or why there is none."""
        if role.kind == "edgeconv":
            if role.activation is None:
                return f"its activation {role.word} is not known"
            return role.activation, node, None
        norm: str | None = None
        while True:
            # Users that only read the shape do not count.
            users = [user for user in node.users if user in self.tensor_nodes or user.op == "output"]
            if len(users) != 1:
                return "its output is used in more than one place before an activation"
            (node,) = users
            if node.op == "call_module":
                following = self.roles[str(node.target)]
                act = following.activation
                if act is not None and act.name != "identity":
                    return act, node, norm
                if following.kind == "batchnorm" and norm is None:
                    norm = str(node.target)
                    continue
                if act is not None or following.selects:
                    continue
            elif node.op in ("call_function", "call_method"):
                act = fx_calls.functional_activation(node)
                if act is not None:
                    return act, node, norm
                if fx_calls.name(node) in fx_calls.SELECTING:
                    continue
            return f"no activation follows it: '{node.name}' comes first"

    def _follower(self, node: fx.Node, name: str, role: layers.Role, curved: bool = False) -> None:
        """Record a layer that treats channels one by one, with parameters or statistics for each."""
        value, shape, multiplier = self._input(node), node.meta["shape"], role.multiplier
        if value is None:
            width = shape[1] // multiplier
            self._note(name, role.kind, width, (Segment(None, width),), prod(shape[1:]) // shape[1])
            return
        if self.calls[name] > 1:
            self._block(value, f"'{name}', which follows it, is called {self.calls[name]} times")
        if name in self.entangled:
            self._block(value, f"'{name}', which follows it, {self.entangled[name]}")
        if not role.has_stored_channels:
            self._block(value, f"the parameters of '{name}', which follows it, are computed, not stored")
        channels = shape[value.axis] // multiplier
        self._note(name, role.kind, channels, value.layout, prod(shape[1:]) // shape[value.axis])
        for producer in value.producers():
            self.drafts[producer].followers.append(name)
        layout = tuple(segment._replace(repeat=segment.repeat * multiplier) for segment in value.layout)
        self.values[node] = replace(value, layout=layout)
        if curved:
            self._leave_out(node, value, name)

    def _function(self, node: fx.Node) -> None:
        name = fx_calls.name(node)
        if "shape" not in node.meta:
            if not node.meta.get("holds_tensors"):
                self._number(node, name)
            elif name in ("max", "min") and self._input(node) is not None:
                # The pair that max(x, dim) returns.
                self._reduce(node, name)
            else:
                self._block_inputs(node, f"'{node.name}' ({name}) takes its channels apart")
            return
        if name not in fx_calls.RESHAPING or self._input(node) is None:
            self._block_sizes(node)
        inputs = self._inputs(node)
        if not inputs:
            return
        if fx_calls.functional_activation(node) is not None or name in fx_calls.CURVED:
            self._pass(node, curved=node.name)
        elif name in fx_calls.ELEMENTWISE:
            self._pass(node)
        elif name in fx_calls.ARITHMETIC:
            self._arithmetic(node, name)
        elif name in fx_calls.CONCATENATING:
            self._concatenate(node)
        elif name in fx_calls.REDUCING:
            self._reduce(node, name)
        elif name in fx_calls.SPATIAL:
            self._spatial(node)
        elif name in fx_calls.RESHAPING:
            self._reshape(node, name)
        elif name == "getitem" and node.args[1] == 0 and fx_calls.name(node.all_input_nodes[0]) in ("max", "min"):
            self.values[node] = inputs[0]
        elif name in fx_calls.MIXING:
            self._block_inputs(node, f"{name} '{node.name}' mixes its channels")
        else:
            self._block_inputs(node, f"the operation '{name}' is not known")

    def _number(self, node: fx.Node, name: str) -> None:
        """Follow a size: a number that depends on the number of channels may only be used to shape tensors."""
        if name in fx_calls.NOT_SIZES:
            return
        for given in node.all_input_nodes:
            size = self.sizes.get(given)
            if given in self.values:
                value, rank = self.values[given], len(given.meta["shape"])
                size = _Size(frozenset(value.producers()), value.axis if name in ("size", "shape") else None, rank)
            index = node.args[1] if len(node.args) > 1 and name in ("size", "getitem") else None
            if size is not None and size.axis is not None and isinstance(index, int):
                if index % size.rank != size.axis:
                    continue
                size = replace(size, axis=None)
            if size is not None and node in self.sizes:
                size = replace(size, producers=size.producers | self.sizes[node].producers, axis=None)
            if size is not None:
                self.sizes[node] = size

    def _arithmetic(self, node: fx.Node, name: str) -> None:
        """Follow arithmetic such as x + 1; an operation on two tensors with channels ties their channels together."""
        tensors = [arg for arg in fx_calls.operands(node) if isinstance(arg, fx.Node) and "shape" in arg.meta]
        holder = next(arg for arg in tensors if arg in self.values)
        value = self.values[holder]
        axis = value.axis - len(holder.meta["shape"])
        for other in tensors:
            # A tensor that is the same for all channels counts as a number.
            alike = len(other.meta["shape"]) < -axis or other.meta["shape"][axis] == 1
            if other is not holder and (other in self.values or not alike):
                what = "residual addition" if name in ("add", "iadd") else f"operation {name}"
                self._block_inputs(node, f"the {what} '{node.name}' ties its channels to those of another tensor")
                return
        linear = name in ("add", "iadd", "sub", "isub", "rsub")
        linear |= name in ("mul", "imul") and tensors.count(holder) == 1
        linear |= name in ("truediv", "div") and tensors.count(holder) == 1 and fx_calls.operands(node)[0] is holder
        if len(node.meta["shape"]) != len(holder.meta["shape"]):
            value = replace(value, axis=axis + len(node.meta["shape"]))
        self.values[node] = value
        if not linear:
            self._leave_out(node, value, node.name)

    def _concatenate(self, node: fx.Node) -> None:
        parts = fx_calls.argument(node, 0, "tensors", ())
        dim = fx_calls.argument(node, 1, "dim", 0) % len(node.meta["shape"])
        if any(self.values[part].axis != dim for part in parts if part in self.values):
            self._block_inputs(node, f"'{node.name}' concatenates along another axis than its channels")
            return
        layout: list[Segment] = []
        for part in parts:
            layout += self.values[part].layout if part in self.values else [Segment(None, part.meta["shape"][dim])]
        self.values[node] = _Value(tuple(layout), dim)

    def _reduce(self, node: fx.Node, name: str) -> None:
        """Follow a mean, a maximum or a sum over other axes than the channels."""
        value = self._inputs(node)[0]
        rank = len(node.all_input_nodes[0].meta["shape"])
        dims = fx_calls.argument(node, 1, "dim", None)
        if isinstance(dims, fx.Node):
            self._arithmetic(node, name)
            return
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

    def _spatial(self, node: fx.Node) -> None:
        """Follow pooling, padding and resizing of feature maps."""
        value = self._input(node)
        if value is None:
            return
        before, after = node.all_input_nodes[0].meta["shape"], node.meta["shape"]
        if value.axis != 1 or len(before) != 4 or len(after) != 4 or before[1] != after[1]:
            self._block(value, f"'{node.name}' does not keep its channels apart")
        else:
            self._pass(node)

    def _reshape(self, node: fx.Node, name: str) -> None:
        value = self._input(node)
        if value is None:
            return
        before, after, axis = node.all_input_nodes[0].meta["shape"], node.meta["shape"], value.axis
        moved = fx_calls.moved_axis(node, axis, before) if node.op != "call_module" else None
        if moved is not None:
            self.values[node] = replace(value, axis=moved)
            return
        behind = len(before) - axis
        repeat = 1
        if name not in ("flatten", "view", "reshape"):
            target = None
        elif after[: axis + 1] == before[: axis + 1]:
            # Only dimensions behind the channels are rearranged.
            target = axis
        elif len(after) >= behind and after[len(after) - behind :] == before[axis:]:
            # Only dimensions before the channels are rearranged.
            target = len(after) - behind
        elif after[:axis] == before[:axis] and len(after) == axis + 1:
            # All dimensions behind the channels are flattened: every channel becomes `repeat` neighbouring entries.
            target, repeat = axis, prod(before[axis + 1 :])
        else:
            target = None
        if target is None:
            self._block(value, f"'{node.name}' ({name}) rearranges its channels")
            self._block_sizes(node)
            return
        wanted = fx_calls.sizes(node) if name in ("view", "reshape") else []
        if len(wanted) == len(after) and isinstance(wanted[target], int) and wanted[target] != -1:
            self._block(value, f"'{node.name}' reshapes its channels to a size that is written into the code")
        own = self.sizes.get(wanted[target]) if len(wanted) == len(after) else None
        # A size that follows the channels is allowed only if it is their own, and only along their axis.
        fits = own is not None and own.producers == frozenset(value.producers())
        self._block_sizes(node, except_for=wanted[target] if fits else None)
        layout = tuple(segment._replace(repeat=segment.repeat * repeat) for segment in value.layout)
        self.values[node] = _Value(layout, target)

    def _pass(self, node: fx.Node, curved: str | None = None) -> None:
        """Pass the channels on unchanged; `curved` names a nonlinear operation."""
        value = self._input(node)
        if value is None:
            return
        self.values[node] = value
        if curved is not None:
            self._leave_out(node, value, curved)

    def _leave_out(self, node: fx.Node, value: _Value, name: str) -> None:
        for producer in value.producers():
            if self.own_activation.get(node) != producer:
                self.drafts[producer].left_out.append(name)

    def _block(self, value: _Value, reason: str | None) -> None:
        for producer in value.producers():
            self.drafts[producer].reason = self.drafts[producer].reason or reason

    def _block_inputs(self, node: fx.Node, reason: str) -> None:
        for value in self._inputs(node):
            self._block(value, reason)

    def _block_sizes(self, node: fx.Node, except_for: object = None) -> None:
        for size in (self.sizes[arg] for arg in node.all_input_nodes if arg in self.sizes and arg is not except_for):
            for producer in size.producers:
                draft = self.drafts[producer]
                draft.reason = draft.reason or f"its number of channels enters '{node.name}' as a number"

    def _inputs(self, node: fx.Node) -> list[_Value]:
        return [self.values[arg] for arg in node.all_input_nodes if arg in self.values]

    def _input(self, node: fx.Node) -> _Value | None:
        inputs = self._inputs(node)
        return inputs[0] if inputs else None

    def _entangled(self) -> dict[str, str]:
        """Return the modules whose parameters are also used elsewhere, each with a phrase for `reason`."""
        owners: dict[int, str] = {}
        found: dict[str, str] = {}
        for name, module in self.modules.items():
            for parameter in module.parameters(recurse=False):
                other = owners.setdefault(id(parameter), name)
                if other != name:
                    found[name], found[other] = f"shares its weight with '{other}'", f"shares its weight with '{name}'"
        for node in self.module.graph.nodes:
            if node.op == "get_attr":
                owner = str(node.target).rpartition(".")[0]
                if owner in self.calls:
                    found.setdefault(owner, f"has a parameter, '{node.target}', that is also used directly")
        return found
