"""The graph of a model: which layers can be split, what follows them channel by channel, and what consumes them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx, nn

from s3d_fast.base.tables import text_table
from s3d_fast.maths.activations import Activation
from s3d_fast.network.layers import PRODUCERS


class Segment(NamedTuple):
    """Consecutive entries along a channel axis that come from one layer: `channels` channels of `repeat` entries each.

    `producer` is the layer's name; None if no producer makes the channels, as in the model's input.
    """

    producer: str | None
    channels: int
    repeat: int = 1


Layout = tuple[Segment, ...]

# The attributes of PyTorch's modules that hold numbers of channels.
SIZE_ATTRIBUTES = ("in_channels", "out_channels", "groups", "num_features", "in_features", "out_features")


@dataclass(frozen=True)
class Unit:
    """A layer whose filters can be split.

    Attributes:
        name: the name of the layer in the model.
        kind: "conv", "linear" or "edgeconv".
        width: the number of its filters when the model was traced.
        fan_in: D, the number of parameters of a filter, including its bias.
        norm: the name of the BatchNorm between the filters and the activation, if there is one.
        activation: the activation of the filters' outputs.
        followers: names of the layers that treat its channels one by one, including `norm`.
        consumers: names of the layers that read its channels.
        left_out: names of later nonlinear followers; the splitting matrix leaves out their curvature.
    """

    name: str
    kind: str
    width: int
    fan_in: int
    norm: str | None
    activation: Activation
    producer_node: str
    activation_node: str
    activation_axis: int  # the axis of the channels in the activation's input
    followers: tuple[str, ...] = ()
    consumers: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layer:
    """A layer that holds channels: the sizes that its cost depends on, and why it cannot be split."""

    name: str
    kind: str  # conv, linear, edgeconv, depthwise, batchnorm, custom
    width: int
    inputs: Layout  # the channels that it reads, or that it treats one by one
    positions: int  # positions per sample where it is evaluated
    calls: int
    sizes: Mapping[str, object]  # the shapes of its own tensors, and its size attributes, by name
    reason: str | None = None  # why it cannot be split; None for a unit, and if it is no producer

    @classmethod
    def of(
        cls,
        module: nn.Module,
        tensors: Collection[str],
        name: str,
        kind: str,
        width: int,
        inputs: Layout,
        positions: int,
        calls: int,
    ) -> Layer:
        """Return the layer of a module, with its size attributes and the shapes of its tensors of these names."""
        sizes = {what: size for what, size in sizes_of(module).items() if what in tensors or what in SIZE_ATTRIBUTES}
        return cls(name, kind, width, inputs, positions, calls, sizes)


@dataclass
class Graph:
    """The result of `trace`: a model's units and layers. After layers have changed size, trace again."""

    module: fx.GraphModule
    units: dict[str, Unit]
    layers: dict[str, Layer]
    others: dict[str, str]  # types of the other modules with parameters, by name
    traced: object = None  # the model's `fingerprint`, which `trace` sets

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

    def explain(self) -> str:
        """Return a table of all layers: whether each can be split, and why not."""
        rows = [["layer", "kind", "width", "splittable", "because"]]
        for layer in self.layers.values():
            unit = self.units.get(layer.name)
            if unit is not None:
                because = f"{unit.activation.name}, consumed by {', '.join(unit.consumers)}"
                if unit.left_out:
                    because += f"; leaves out the curvature of {', '.join(unit.left_out)}"
            elif layer.kind in PRODUCERS:
                because = layer.reason or ""
            else:
                followed = [unit.name for unit in self if layer.name in unit.followers]
                because = f"follows {', '.join(followed)}" if followed else "has no filters of its own"
            rows.append([layer.name, layer.kind, str(layer.width), "no" if unit is None else "yes", because])
        for name, kind in self.others.items():
            rows.append([name, kind, "", "no", "splitting does not support this layer"])
        return text_table(rows)

    def channels_of(self, inputs: Layout, widths: Mapping[str, int] | None = None) -> int:
        """Return the number of entries along a channel axis of this layout, at the given widths of the units."""
        widths = widths or {}
        return sum(widths.get(segment.producer or "", segment.channels) * segment.repeat for segment in inputs)

    def check(self, model: nn.Module) -> None:
        """Raise ValueError unless the model's layers have the sizes that they had when the model was traced."""
        for name, layer in self.layers.items():
            try:
                module = model.get_submodule(name)
            except AttributeError:
                raise ValueError(f"model has no layer {name!r}, but the traced model has") from None
            now = sizes_of(module)
            for what, size in layer.sizes.items():
                if now.get(what) != size:
                    raise ValueError(
                        f"graph is stale or belongs to another model: {what} of {name!r} was {size} when the model was "
                        f"traced and is {now.get(what)} now; trace the model again"
                    )

    def check_same(self, model: nn.Module) -> None:
        """Raise ValueError unless this graph was traced from this very model and is not stale."""
        self.check(model)
        for name in self.layers:
            if model.get_submodule(name) is not self.module.get_submodule(name):
                raise ValueError(f"graph belongs to another model: its {name!r} is another object than the model's")

    def is_current(self, model: nn.Module) -> bool:
        """Return whether nothing has changed that tracing the model again could show."""
        return self.traced is not None and self.traced == fingerprint(model)


def fingerprint(model: nn.Module) -> object:
    """Return all that tracing depends on: modules, plain attributes, sizes, and which parameters are shared."""
    found: list[object] = []
    for name, module in model.named_modules(remove_duplicate=False):
        plain = {
            key: value
            for key, value in vars(module).items()
            if key != "training" and isinstance(value, (bool, int, float, str, tuple, type(None)))
        }
        # An instance may have its own forward pass.
        found.append((name, module, plain, vars(module).get("forward"), sizes_of(module)))
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.append((name, owners.setdefault(id(parameter), name)))
    return found


def sizes_of(module: nn.Module) -> dict[str, object]:
    """Return the shapes of a module's own parameters and buffers, and its size attributes, by name."""
    stored = {**module._parameters, **module._buffers}
    sizes: dict[str, object] = {name: tuple(tensor.shape) for name, tensor in stored.items() if tensor is not None}
    return sizes | {name: value for name in SIZE_ATTRIBUTES if isinstance(value := getattr(module, name, None), int)}
