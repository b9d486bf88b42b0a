"""The cost of a model at given widths of its units: parameters, and multiply-accumulates per sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from s3d_fast.network import layers
from s3d_fast.network.edgeconv import EdgeConv
from s3d_fast.network.graph import Graph, Layer


@dataclass(frozen=True)
class Cost:
    """Parameters, and multiply-accumulates (MACs) of the matrix products and convolutions for one sample."""

    params: int
    macs: int

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.params - other.params, self.macs - other.macs)

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.params + other.params, self.macs + other.macs)


def count(graph: Graph, widths: Mapping[str, int] | None = None) -> Cost:
    """Return the cost of all layers in `graph` at the given widths of the units (by default the traced widths).

    Other modules are not counted: they cost the same at all widths.
    """
    total = Cost(0, 0)
    for layer in graph.layers.values():
        total = total + layer_cost(graph, layer, widths or {})
    return total


def marginal(graph: Graph, widths: Mapping[str, int] | None = None) -> dict[str, Cost]:
    """Return, for every unit, the cost of one more copy of a filter; the other units keep their widths.

    The copy needs a row, a channel in every follower, and a column in every consumer.
    """
    now = {**graph.widths(), **(widths or {})}
    result = {}
    for name, unit in graph.units.items():
        more = {**now, name: now[name] + 1}
        delta = Cost(0, 0)
        for touched in dict.fromkeys((name, *unit.followers, *unit.consumers)):
            layer = graph.layers[touched]
            delta = delta + (layer_cost(graph, layer, more) - layer_cost(graph, layer, now))
        result[name] = delta
    return result


def layer_cost(graph: Graph, layer: Layer, widths: Mapping[str, int]) -> Cost:
    """Return the cost of one layer at the given widths of the units."""
    module = graph.module.get_submodule(layer.name)
    entries = graph.channels_of(layer.inputs, widths)
    out = widths.get(layer.name, layer.width)
    calls = layer.positions * layer.calls
    bias = layers.has_bias(module)
    if isinstance(module, EdgeConv):
        norm = 2 * out if module.norm.affine else 0
        # Two products over points, and the distances of the neighbour search between all pairs of points.
        return Cost(2 * out * entries + norm, calls * (2 * out * entries + layer.positions * entries))
    if layer.kind == "conv":
        assert isinstance(module, nn.Conv2d)
        taps = module.kernel_size[0] * module.kernel_size[1] * entries // module.groups
        return Cost(out * (taps + bias), calls * out * taps)
    if layer.kind == "linear":
        return Cost(out * (entries + bias), calls * out * entries)
    if layer.kind == "depthwise":
        assert isinstance(module, nn.Conv2d)
        channels = entries * (module.out_channels // module.in_channels)
        taps = module.kernel_size[0] * module.kernel_size[1]
        return Cost(channels * (taps + bias), layer.positions * layer.calls * channels * taps)
    slices = sum(parameter[0].numel() for parameter in module.parameters(recurse=False) if parameter.dim())
    return Cost(slices * entries, 0)
