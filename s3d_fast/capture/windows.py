"""Windows of maps: a few random tiles of every sample stand for all positions, before any coefficient is computed.

The chain of a convolution's filters is followed on small windows, as if each were a map of its own. A window holds what
the calls of the chain read to make one tile of its last maps. Curvature counts only at the positions that a tile owns,
and every position of every map belongs to one tile, so the expectation of S is that of all positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from s3d_fast.backends.operations import gather_patches
from s3d_fast.capture.depthwise import depthwise_chain
from s3d_fast.capture.draws import Draw
from s3d_fast.capture.values import Values
from s3d_fast.network.calls import Call, operation, pair
from s3d_fast.network.graph import FilterCall, Unit
from s3d_fast.network.links import Link
from s3d_fast.network.rules import rule_of

# Tiles at the first maps are about this wide where windows overlap: the wider, the smaller the part that overlaps.
TILE = 4
# Windows that overlap pay if they hold at most this share of the positions.
LARGEST_SHARE = 0.7
MAX_POOLS = frozenset({"aten.max_pool2d", "aten.max_pool2d_with_indices"})


class Reach(NamedTuple):
    """What the positions of a call's result see of its input, vertically and horizontally."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def seen(self, size: Sequence[int]) -> tuple[int, int]:
        """Return the size of what a block of positions sees."""
        height, width = (
            (n - 1) * s + d * (k - 1) + 1
            for n, k, s, d in zip(size, self.kernel, self.stride, self.dilation, strict=True)
        )
        return height, width

    @property
    def overlaps(self) -> bool:
        """Whether neighbouring positions see some of the same input."""
        return any(one > step for one, step in zip(self.seen((1, 1)), self.stride, strict=True))


@dataclass(frozen=True)
class Levels:
    """The maps along a unit's chain: those of the filters are level 0, those behind each window call one level more.

    Attributes:
        unit: the unit, with calls that pad nothing.
        of: the level of every node's value, by name.
        sizes: (height, width) of the maps of each level.
        reaches: between each level and the next.
        sources: what the filters' calls read, and how, by the name of the node that stands for it.
    """

    unit: Unit
    of: Mapping[str, int]
    sizes: Sequence[tuple[int, int]]
    reaches: Sequence[Reach]
    sources: Mapping[str, tuple[fx.Node, Reach]]


class _Unfit(Exception):
    """The chain cannot be followed on windows."""


def find_levels(unit: Unit, values: Values) -> Levels | None:
    """Return the levels of a unit whose filters and chain are on 2-d maps; None if it is another."""
    try:
        return _found(unit, values)
    except _Unfit:
        return None


def _found(unit: Unit, values: Values) -> Levels:
    rewriter = _Rewriter()
    calls = {call.node: call for one in unit.filters for call in one.calls}
    shapes = {_map_size(values.of(node)) for node in calls}
    if len(shapes) != 1 or any(not _is_plain(call) for call in calls.values()):
        raise _Unfit
    of = {node.name: 0 for node in calls}
    at = [0] * len(calls)
    sizes, reaches = [shapes.pop()], list[Reach]()
    links = []
    for link in unit.links:
        (own,) = known if len(known := {at[source] for source in link.sources}) == 1 else [-1]
        reach = _reach(link)
        here = own if reach is None else own + 1
        if own < 0 or (here < len(sizes) and _map_size(values.of(link.node)) != sizes[here]):
            raise _Unfit
        for node in link.inputs:
            if of.setdefault(node.name, own) != own and not link.is_shifted:
                raise _Unfit
        if reach is None:
            # An activation that changed places with a maximum takes nothing else; its node is that of the maximum.
            if not link.is_shifted:
                _note_constants(link, own, sizes[own], of, values)
        elif own == len(reaches):
            reaches.append(reach)
            sizes.append(_map_size(values.of(link.node)))
        elif reaches[own] != reach:
            raise _Unfit
        of[link.node.name] = here
        if link.graded is not None:
            of[link.graded.name] = here
        at.append(here)
        links.append(link if reach is None else rewriter.link(link))
    filters = [replace(one, calls=tuple(rewriter.call(calls[call.node]) for call in one.calls)) for one in unit.filters]
    return Levels(replace(unit, filters=tuple(filters), links=tuple(links)), of, sizes, reaches, rewriter.sources)


def _map_size(value: Any) -> tuple[int, int]:
    if not isinstance(value, Tensor) or value.dim() != 4:
        raise _Unfit
    return value.shape[2], value.shape[3]


def _is_plain(call: FilterCall) -> bool:
    """Return whether a filter's call is a convolution of 2-d maps with a stored weight."""
    bound = Call(call.node)
    stored = [bound.get("weight"), bound.get("bias")]
    return (
        bound.operation == "aten.conv2d"
        and not call.views
        and int(bound["groups"]) == 1
        and not isinstance(bound["padding"], str)
        and all(one is None or getattr(one, "op", "") == "get_attr" for one in stored)
    )


def _reach(link: Link) -> Reach | None:
    """Return what a link's result sees of its input; None if each entry sees the entry at its own position."""
    name, call = operation(link.node), Call(link.node)
    if link.kind == "maximum":
        if name not in MAX_POOLS or call["ceil_mode"] or pair(call["padding"]) != (0, 0):
            raise _Unfit
        stride = call["stride"] or call["kernel_size"]
        return Reach(pair(call["kernel_size"]), pair(stride), (0, 0), pair(call["dilation"]))
    if link.kind == "linear" and name == "aten.conv2d":
        weight = call["weight"]
        if isinstance(call["padding"], str) or getattr(weight, "op", "") != "get_attr":
            raise _Unfit
        kernel = pair(weight.meta["val"].shape[2:])
        return Reach(kernel, pair(call["stride"]), pair(call["padding"]), pair(call["dilation"]))
    is_pointwise = link.kind in ("curve", "sum", "scale") or (
        link.kind == "linear" and rule_of(name).is_elementwise and not link.is_shifted
    )
    if not is_pointwise:
        raise _Unfit
    return None


def _note_constants(link: Link, level: int, size: tuple[int, int], of: dict[str, int], values: Values) -> None:
    """Note the level of other tensors that a pointwise call takes: maps of this size, or the same at all positions."""
    if link.kind == "scale":
        return
    for node in link.node.all_input_nodes:
        if node in link.inputs or node is link.slope:
            continue
        value = values.of(node)
        if not isinstance(value, Tensor) or value.dim() == 0:
            continue
        if max(value.shape[-2:]) > 1 and (node.op == "get_attr" or value.dim() != 4 or value.shape[2:] != size):
            raise _Unfit
        if node.op != "get_attr" and value.dim() == 4 and of.setdefault(node.name, level) != level:
            raise _Unfit


class _Rewriter:
    """Makes calls that pad nothing, in a graph of their own; the nodes of the model's graph stay as they are."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.made: dict[tuple[str, str], fx.Node] = {}
        self.sources: dict[str, tuple[fx.Node, Reach]] = {}

    def _stored(self, node: fx.Node | None) -> fx.Node | None:
        return None if node is None else self._node("get_attr", str(node.target), node.name, node)

    def _node(self, op: str, target: str, name: str, like: fx.Node) -> fx.Node:
        if (op, name) not in self.made:
            made = self.graph.create_node(op, target, (), {}, name=name)
            made.meta = like.meta
            self.made[op, name] = made
        return self.made[op, name]

    def _unpadded(self, node: fx.Node, given: Mapping[fx.Node, fx.Node]) -> fx.Node:
        if ("call", node.name) not in self.made:
            arguments = {**Call(node).arguments, "padding": [0, 0]}
            arguments = fx.map_arg(arguments, lambda one: given[one] if one in given else self._stored(one))
            made = self.graph.create_node("call_function", node.target, (), arguments, name=node.name)
            made.meta = node.meta
            self.made["call", node.name] = made
        return self.made["call", node.name]

    def link(self, link: Link) -> Link:
        inputs = tuple(self._node("placeholder", one.name, one.name, one) for one in link.inputs)
        node = self._unpadded(link.node, dict(zip(link.inputs, inputs, strict=True)))
        return replace(link, node=node, inputs=inputs)

    def call(self, call: FilterCall) -> FilterCall:
        bound = Call(call.node)
        name = f"{call.source.name}_of_{call.node.name}"
        source = self._node("placeholder", name, name, call.source)
        node = self._unpadded(call.node, {call.source: source})
        kernel = pair(call.weight.meta["val"].shape[2:])
        geometry = (pair(bound[one]) for one in ("stride", "padding", "dilation"))
        self.sources[source.name] = (call.source, Reach(kernel, *geometry))
        weight, bias = self._stored(call.weight), self._stored(call.bias)
        assert weight is not None
        return FilterCall(node, source, weight, (), bias)


@dataclass(frozen=True)
class Tiling:
    """How the maps of all levels are divided into tiles, and what a window holds at each level."""

    tile: tuple[int, int]  # positions of the last level
    strides: Sequence[tuple[int, int]]  # positions of each level between neighbouring positions of the last
    margins: Sequence[tuple[int, int]]  # positions of each level before those that a tile owns
    windows: Sequence[tuple[int, int]]
    grid: tuple[int, int]  # tiles, vertically and horizontally

    @property
    def positions(self) -> int:
        """How many positions of the first level a tile owns."""
        return self.tile[0] * self.strides[0][0] * self.tile[1] * self.strides[0][1]


def tiling_of(levels: Levels) -> Tiling | None:
    """Return the division into tiles; None if windows would not hold all that a tile owns."""
    strides, margins = [(1, 1)], [(0, 0)]
    for reach in reversed(levels.reaches):
        strides.insert(0, (strides[0][0] * reach.stride[0], strides[0][1] * reach.stride[1]))
        margins.insert(0, tuple(m * s + p for m, s, p in zip(margins[0], reach.stride, reach.padding, strict=True)))  # type: ignore[arg-type]
    is_apart = not any(reach.overlaps for reach in levels.reaches)
    tile = (1, 1) if is_apart else (max(1, TILE // strides[0][0]), max(1, TILE // strides[0][1]))
    windows = [tile]
    for reach in reversed(levels.reaches):
        windows.insert(0, reach.seen(windows[0]))
    grid = [1, 1]
    for axis in (0, 1):
        for size, stride, margin, window in zip(levels.sizes, strides, margins, windows, strict=True):
            owned = tile[axis] * stride[axis]
            if margin[axis] + owned > window[axis]:
                return None
            grid[axis] = max(grid[axis], -(-size[axis] // owned))
    return Tiling(tile, strides, margins, windows, (grid[0], grid[1]))


def windowed(unit: Unit, values: Values, count: int, seed: int) -> tuple[Unit, WindowValues] | None:
    """Return a unit and its values on windows with about `count` positions of every sample; None to keep all.

    A unit of convolutions keeps all positions if windows would hold most of them anyway.
    """
    levels = find_levels(unit, values)
    tiling = None if levels is None else tiling_of(levels)
    if levels is None or tiling is None:
        return None
    tiles = tiling.grid[0] * tiling.grid[1]
    wanted = max(1, count // tiling.positions)
    kernels = [reach.kernel for _, reach in levels.sources.values()]
    if levels.reaches:
        (height, width), (down, right) = levels.sizes[0], tiling.windows[0]
        # Windows that lie apart are rows of patches: products with these are faster than convolutions.
        is_apart = not any(reach.overlaps for reach in levels.reaches)
        if min(wanted, tiles) * down * right > (1 if is_apart else LARGEST_SHARE) * height * width:
            return None
        if any(reach.padding != (0, 0) for reach in levels.reaches) and not _stops_at_borders(unit, levels):
            return None
    elif wanted >= tiles and set(kernels) == {(1, 1)}:
        # Larger kernels have all their patches laid out as rows: products with these are faster than convolutions.
        return None
    samples = len(values.of(unit.filters[0].calls[0].node))
    device = values.of(unit.filters[0].calls[0].node).device
    draw = Draw.of(samples, tiles, wanted, device, seed)
    return levels.unit, WindowValues(values, levels, tiling, draw)


def _stops_at_borders(unit: Unit, levels: Levels) -> bool:
    """Return whether positions beyond the border have no tangents: their rows are zero, and nothing else moves."""
    is_one_stage = depthwise_chain(unit) is not None and len(levels.reaches) == 1
    return is_one_stage and unit.filters[0].bias is None


class WindowValues(Values):
    """The values of one batch on windows, each taken as a map of its own; gradients count at owned positions."""

    def __init__(self, values: Values, levels: Levels, tiling: Tiling, draw: Draw) -> None:
        super().__init__(values.module, values.kept, values.gradients, values.stored)
        self.levels, self.tiling, self.draw = levels, tiling, draw
        self.cropped: dict[str, Tensor] = {}
        self.places: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.patches: dict[str, Tensor] = {}

    def of(self, node: fx.Node) -> Any:
        """Return the value of a node on all windows, (n, C, h, w)."""
        if node.op == "get_attr":
            return super().of(node)
        if node.name not in self.cropped:
            self.cropped[node.name] = self._crop_of(node)
        return self.cropped[node.name]

    def _crop_of(self, node: fx.Node) -> Any:
        if node.name in self.levels.sources:
            source, reach = self.levels.sources[node.name]
            maps = super().of(source)
            start = [first * s - p for first, s, p in zip(self._starts(0), reach.stride, reach.padding, strict=True)]
            places, inside = self._places(start, reach.seen(self.tiling.windows[0]), maps.shape[2:])
            return self._gathered(maps, places, inside, reach.seen(self.tiling.windows[0]))
        value = super().of(node)
        if node.name not in self.levels.of:
            # Not a map, and the same at all positions.
            return value
        level = self.levels.of[node.name]
        if value.shape[2:] == self.levels.sizes[level]:
            return self._crop(value, level)
        samples, tiles = self.draw.index.shape
        return value.repeat_interleave(tiles, 0) if len(value) == samples else value

    def gradient(self, node: fx.Node) -> Tensor:
        """Return the gradient of the loss on all windows, with the weights of the positions that tiles own."""
        level = self.levels.of[node.name]
        (down, right), (top, left) = self.tiling.windows[level], self.tiling.margins[level]
        owned = [n * s for n, s in zip(self.tiling.tile, self.tiling.strides[level], strict=True)]
        g = self._crop(super().gradient(node), level)
        mask = g.new_zeros(down, right)
        mask[top : top + owned[0], left : left + owned[1]] = 1
        return g * (self.weight.to(g.dtype)[:, None, None, None] * mask)

    @cached_property
    def weight(self) -> Tensor:  # (n,)
        """For how many tiles each one stands."""
        return self.draw.weight.repeat(len(self.draw.index))

    def rows(self, call: FilterCall) -> Tensor | None:
        """Return the rows that filters see at all positions of the windows, (n h w, D); zero beyond the border."""
        name = call.source.name
        if name not in self.patches:
            source, reach = self.levels.sources[name]
            self.patches[name] = self._patches(super().of(source), reach)
        return self.patches[name]

    def _patches(self, maps: Tensor, reach: Reach) -> Tensor:
        places, inside = self._level(0)
        y, x = places // self.levels.sizes[0][1], places % self.levels.sizes[0][1]
        sample = self._sample(maps)[:, None, None].expand_as(places)
        corners = (y * reach.stride[0] - reach.padding[0], x * reach.stride[1] - reach.padding[1])
        at = torch.stack([sample, *corners], -1).view(-1, 3)
        rows = gather_patches(maps, at, reach.kernel, reach.dilation)
        return rows if inside is None else rows.mul_(inside.view(-1, 1))

    def _sample(self, maps: Tensor) -> Tensor:  # (n,)
        """Return the sample that every window belongs to; 0 if all samples share the maps."""
        samples, tiles = self.draw.index.shape
        numbers = torch.arange(samples, device=maps.device).repeat_interleave(tiles)
        return numbers if len(maps) == samples else torch.zeros_like(numbers)

    def _starts(self, level: int) -> list[Tensor]:
        """Return where every window begins in the maps of a level: rows and columns, (n,) each."""
        across = self.tiling.grid[1]
        tiles = (self.draw.index.flatten() // across, self.draw.index.flatten() % across)
        return [
            tile * (size * stride) - margin
            for tile, size, stride, margin in zip(
                tiles, self.tiling.tile, self.tiling.strides[level], self.tiling.margins[level], strict=True
            )
        ]

    @staticmethod
    def _positions(start: Sequence[Tensor], window: Sequence[int]) -> tuple[Tensor, Tensor]:  # (n, h), (n, w)
        y, x = (
            first[:, None] + torch.arange(size, device=first.device) for first, size in zip(start, window, strict=True)
        )
        return y, x

    def _places(
        self, start: Sequence[Tensor], window: Sequence[int], size: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the flat places of the windows' positions in a map, and which lie inside; None if all do."""
        (y, x), (height, width) = self._positions(start, window), size
        inside = ((y >= 0) & (y < height))[:, :, None] & ((x >= 0) & (x < width))[:, None, :]
        places = y.clamp(0, height - 1)[:, :, None] * width + x.clamp(0, width - 1)[:, None, :]
        return places, None if bool(inside.all()) else inside

    def _level(self, level: int) -> tuple[Tensor, Tensor | None]:
        """Return the places of the windows' positions in the maps of a level, and which lie inside."""
        if level not in self.places:
            self.places[level] = self._places(self._starts(level), self.tiling.windows[level], self.levels.sizes[level])
        return self.places[level]

    def _crop(self, value: Tensor, level: int) -> Tensor:
        return self._gathered(value, *self._level(level), self.tiling.windows[level])

    def _gathered(
        self, maps: Tensor, places: Tensor, inside: Tensor | None, window: Sequence[int]
    ) -> Tensor:  # (n, C, h, w)
        whole = places + self._sample(maps)[:, None, None] * (maps.shape[2] * maps.shape[3])
        rows = maps.permute(0, 2, 3, 1).reshape(-1, maps.shape[1]).index_select(0, whole.flatten())
        if inside is not None:
            rows *= inside.flatten()[:, None]
        return rows.view(-1, *window, maps.shape[1]).permute(0, 3, 1, 2)
