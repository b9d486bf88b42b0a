"""The graph of a model: which channels can be split together, and which entries of which tensors belong to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from s3d_fast.base.tables import html_table, text_table
from s3d_fast.maths.activations import Activation
from s3d_fast.network.calls import operation
from s3d_fast.network.links import Link
from s3d_fast.network.sizes import SIZE_ATTRIBUTES
from s3d_fast.network.slots import Array

# What happens to an entry of a channel when the channel is split into copies with weights w_k: it is repeated;
# repeated and multiplied by w_k (columns of consumers); or repeated and divided by the number of copies.
REPEATED, READ, SHARED = 0, 1, 2


@dataclass(frozen=True)
class AxisLayout:
    """The channels along one axis of a stored tensor.

    Entry n belongs to channel `channel[n]` of unit number `unit[n]`, or to none if that is -1. Neighbouring entries of
    one channel are copied together. `role[n]` is REPEATED, READ or SHARED.
    """

    unit: Array
    channel: Array
    role: Array

    def __len__(self) -> int:
        return len(self.unit)


@dataclass(frozen=True)
class AxisSize:
    """The length of an axis: a fixed part, and so many entries for every channel of some units."""

    fixed: int
    per_channel: Mapping[str, int]

    def at(self, widths: Mapping[str, int]) -> int:
        """Return the length at these widths, which must hold every unit."""
        return self.fixed + sum(entries * widths[unit] for unit, entries in self.per_channel.items())


@dataclass(frozen=True)
class SizedProduct:
    """A number that is proportional to the lengths of some axes: parameters of a tensor, or MACs of a call."""

    factor: float
    sizes: tuple[AxisSize, ...]

    def at(self, widths: Mapping[str, int]) -> float:
        """Return the number at these widths."""
        total = self.factor
        for size in self.sizes:
            total *= size.at(widths)
        return total

    def units(self) -> set[str]:
        """Return the units that it depends on."""
        return {unit for size in self.sizes for unit in size.per_channel}


@dataclass(frozen=True)
class FilterCall:
    """A call that makes channels: its node, what it reads, its weight, how that is viewed, and its bias."""

    node: fx.Node
    source: fx.Node
    weight: fx.Node
    views: tuple[fx.Node, ...]
    bias: fx.Node | None


@dataclass(frozen=True)
class Filters:
    """Rows of one weight that make a unit's channels, one per channel; they move when channels are split.

    Attributes:
        weight: the name of the tensor.
        row_axis: the axis of its filters.
        rows: the place of each channel's filter along this axis.
        bias: the name of the tensor with the filters' biases, if they have any.
        fan_in: the number of parameters of a filter, including its bias.
        calls: the calls that use the weight.
    """

    weight: str
    row_axis: int
    rows: Array
    bias: str | None
    fan_in: int
    calls: tuple[FilterCall, ...] = ()


@dataclass(frozen=True)
class Unit:
    """Channels that can be split: each is made by a filter, or by several that are split together.

    Attributes:
        name: the name of the first layer whose filters move.
        kind: "conv", "linear" or "edgeconv".
        width: the number of its channels when the model was traced.
        filters: the rows that move, by weight; theta of a channel is all of them one after the other.
        links: its chain, the calls between the filters and the layers that read its channels.
        norm: the name of the BatchNorm behind the first filters, if there is one.
        activation: the first activation of its chain; None if there is none of a single entry.
        followers: names of the layers that treat its channels one by one, including `norm`; also of layers whose
            filters are split along.
        consumers: names of the layers that read its channels.
        uncaptured: why `capture` cannot compute its splitting matrices; empty if it can.
        curved_by: what `activations` returns, in a graph that is `portable` and has no links.
    """

    name: str
    kind: str
    width: int
    filters: tuple[Filters, ...]
    links: tuple[Link, ...] = field(default=(), repr=False)
    norm: str | None = None
    activation: Activation | None = None
    followers: tuple[str, ...] = ()
    consumers: tuple[str, ...] = ()
    uncaptured: str = ""
    curved_by: tuple[str, ...] | None = None

    @property
    def fan_in(self) -> int:
        """D, the number of parameters that make a channel, including biases."""
        return sum(one.fan_in for one in self.filters)

    @property
    def weight(self) -> str:
        """The name of the first filters' weight."""
        return self.filters[0].weight

    @property
    def bias(self) -> str | None:
        """The name of the first filters' bias."""
        return self.filters[0].bias

    @property
    def row_axis(self) -> int:
        """The axis of the first filters in their weight."""
        return self.filters[0].row_axis

    @property
    def rows(self) -> Array:
        """The places of the first filters in their weight."""
        return self.filters[0].rows

    def activations(self) -> list[str]:
        """Return the names of the functions that give its chain curvature, in order."""
        if self.curved_by is not None:
            return list(self.curved_by)
        if not self.links:
            return [] if self.activation is None else [self.activation.name]
        names = []
        for link in self.links:
            if link.kind == "curve" and link.activation is not None:
                names.append("prelu" if link.slope is not None else link.activation.name)
            elif link.is_curved:
                names.append(operation(link.node).removeprefix("aten."))
        return names

    def __repr__(self) -> str:
        read = f", read by {', '.join(self.consumers)}" if self.consumers else ""
        return f"Unit({self.name!r}, {self.kind}, {self.width} channels of {self.fan_in} parameters{read})"

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return self is other


@dataclass(frozen=True)
class Layer:
    """A layer that holds channels, and why it cannot be split."""

    name: str
    kind: str
    width: int
    reason: str | None = None  # None for a unit, and for a layer that makes no channels
    makes_channels: bool = False


@dataclass
class Graph:
    """The result of `trace`: a model's units, and how its tensors depend on their widths.

    After layers have changed size, trace again.

    Attributes:
        module: the model as a graph of ATen operations; its parameters are the model's own.
        units: the units by name.
        layers: the layers that hold channels by name.
        tensors: for every stored tensor that a split changes, the layouts of its axes.
        parameters, products: sizes of all parameters, and the MACs of all calls per sample.
        unused: names of parameters that the model does not use in eval mode.
    """

    module: fx.GraphModule
    units: dict[str, Unit]
    layers: dict[str, Layer]
    tensors: dict[str, dict[int, AxisLayout]]
    parameters: list[SizedProduct] = field(default_factory=list)
    products: list[SizedProduct] = field(default_factory=list)
    unused: tuple[str, ...] = ()
    sizes: dict[str, dict[str, object]] = field(default_factory=dict)  # of the modules that hold used tensors
    is_proved: bool = False  # whether trial splits have shown that every unit leaves the outputs alone
    traced: object = None  # the model's `fingerprint`, which `trace` sets
    model: nn.Module | None = field(default=None, repr=False)
    variants: list[Graph] = field(default_factory=list, repr=False)  # of the same model, for inputs of other sizes

    def __iter__(self) -> Iterator[Unit]:
        return iter(self.units.values())

    def __len__(self) -> int:
        """Return the number of units."""
        return len(self.units)

    def __bool__(self) -> bool:
        """Return True, also for a graph without units."""
        return True

    def widths(self) -> dict[str, int]:
        """Return the width of every unit when the model was traced."""
        return {name: unit.width for name, unit in self.units.items()}

    def captured(self) -> list[Unit]:
        """Return the units whose splitting matrices `capture` can compute."""
        return [unit for unit in self if not unit.uncaptured]

    def explain(self) -> str:
        """Return a table of all layers: whether each can be split, and why not."""
        return text_table([["layer", "kind", "width", "splittable", "because"], *self.explained()])

    def explained(self) -> list[list[str]]:
        """Return a row for every layer: its name, kind and width, "yes" or "no" for a split, and why."""
        rows = []
        for layer in self.layers.values():
            unit = self.units.get(layer.name)
            if unit is not None:
                acts = ", ".join(dict.fromkeys(unit.activations())) or "no curvature"
                because = f"{acts}, consumed by {', '.join(unit.consumers)}"
                if unit.uncaptured:
                    because += f"; capture leaves it out: {unit.uncaptured}"
            elif layer.reason is not None:
                because = layer.reason
            else:
                followed = [unit.name for unit in self if layer.name in unit.followers]
                because = f"follows {', '.join(followed)}" if followed else "has no filters of its own"
            rows.append([layer.name, layer.kind, str(layer.width), "no" if unit is None else "yes", because])
        rows += [[name, "parameter", "", "no", "the model does not use it in eval mode"] for name in self.unused]
        return rows

    def _repr_html_(self) -> str:
        return html_table([["layer", "kind", "width", "splittable", "because"], *self.explained()])

    def __repr__(self) -> str:
        names = [f"{name}: {unit.width}" for name, unit in self.units.items()]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        return f"Graph({len(names)} units of {len(self.layers)} layers; {', '.join(names[:4]) or 'none'}{more})"

    def portable(self) -> Graph:
        """Return the part that surgery and costs need, without the model and its calls; it can be pickled.

        `capture` needs the whole graph: trace the model again for it.
        """
        units = {
            name: replace(
                unit,
                links=(),
                filters=tuple(replace(one, calls=()) for one in unit.filters),
                activation=None,
                curved_by=tuple(unit.activations()),
            )
            for name, unit in self.units.items()
        }
        empty = fx.GraphModule(nn.Module(), fx.Graph())
        return replace(self, module=empty, units=units, traced=None, model=None, variants=[])

    def check(self, model: nn.Module) -> None:
        """Raise ValueError unless the model's tensors have the sizes that they had when the model was traced."""
        for name, sizes in self.sizes.items():
            try:
                now = sizes_of(model.get_submodule(name))
            except AttributeError:
                raise ValueError(f"model has no layer {name!r}, but the traced model has") from None
            for what, size in sizes.items():
                if now.get(what) != size:
                    raise ValueError(
                        f"graph is stale or belongs to another model: {what} of {name!r} was {size} when the model was "
                        f"traced and is {now.get(what)} now; trace the model again"
                    )

    def check_same(self, model: nn.Module) -> None:
        """Raise ValueError unless this graph was traced from this very model and is not stale."""
        self.check(model)
        now = stored_tensors(model)
        for name, tensor in stored_tensors(self.module).items():
            if name in now and now[name] is not tensor:
                layer = name.rpartition(".")[0]
                raise ValueError(f"graph belongs to another model: its {layer!r} is another object than the model's")

    def is_current(self, model: nn.Module) -> bool:
        """Return whether nothing has changed that tracing the model again could show."""
        return self.traced is not None and self.traced == fingerprint(model)


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers by name; a tensor that is shared appears under each of its names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def filter_lengths(unit: Unit, stored: Mapping[str, Tensor]) -> Tensor:
    """Return |theta| of every channel of a unit in float64, from a model's `stored_tensors`."""
    return filter_values(unit, stored).norm(dim=1)


def filter_values(unit: Unit, stored: Mapping[str, Tensor]) -> Tensor:  # (M, D)
    """Return theta of every channel of a unit in float64 on the CPU, from a model's `stored_tensors`."""
    parts = []
    for one in unit.filters:
        rows = torch.from_numpy(one.rows)
        weight = stored[one.weight].detach().double().cpu().movedim(one.row_axis, 0)
        parts.append(weight.reshape(len(weight), -1)[rows])
        if one.bias is not None:
            parts.append(stored[one.bias].detach().double().cpu()[rows].unsqueeze(1))
    return torch.cat(parts, 1)


Holder = tuple[dict[str, Any], str, nn.Module]


def holders_of(model: nn.Module) -> dict[int, list[Holder]]:
    """Return every place that holds a stored tensor, by the tensor's id: a table of a module, the key, the module."""
    found: dict[int, list[Holder]] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    found.setdefault(id(tensor), []).append((table, key, module))
    return found


def fingerprint(model: nn.Module) -> object:
    """Return all that tracing depends on: modules, plain attributes, sizes, hooks, and which parameters are shared."""
    found: list[object] = []
    for name, module in model.named_modules(remove_duplicate=False):
        plain = {
            key: value
            for key, value in vars(module).items()
            if key != "training" and isinstance(value, (bool, int, float, str, tuple, type(None)))
        }
        hooks = [tuple(hooks) for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        # An instance may have its own forward pass.
        found.append((name, module, plain, vars(module).get("forward"), sizes_of(module), hooks))
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.append((name, owners.setdefault(id(parameter), name)))
    return found


def hooks_of(model: nn.Module) -> object:
    """Return the forward hooks of all modules, which the graph contains."""
    return [tuple(hooks) for module in model.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks)]


def sizes_of(module: nn.Module) -> dict[str, object]:
    """Return the shapes of a module's own parameters and buffers, and its size attributes, by name."""
    stored = {**module._parameters, **module._buffers}
    sizes: dict[str, object] = {name: tuple(tensor.shape) for name, tensor in stored.items() if tensor is not None}
    return sizes | {name: value for name in SIZE_ATTRIBUTES if isinstance(value := getattr(module, name, None), int)}


def runs(layout: AxisLayout) -> tuple[Array, Array]:
    """Return the starts and lengths of the runs of neighbouring entries that belong to one channel."""
    if len(layout) == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    same = (layout.unit[1:] == layout.unit[:-1]) & (layout.channel[1:] == layout.channel[:-1]) & (layout.unit[1:] >= 0)
    starts = np.flatnonzero(np.concatenate([[True], ~same]))
    return starts, np.diff(np.append(starts, len(layout)))
