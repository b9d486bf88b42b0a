"""How stored tensors change with their channels: which entries are repeated or left out, and how they are scaled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from s3d_fast.maths.reference import Widening
from s3d_fast.network.graph import READ, SHARED, AxisLayout, Graph, runs
from s3d_fast.network.slots import Array


@dataclass(frozen=True)
class Copies:
    """The copies of a unit's channels: channel j becomes `count[j]` copies; the other arrays hold all of them in order.

    Nothing is left of a channel with a count of 0. A copy that is new is not a copy in truth: it has parameters of its
    own, its weight is 0, and no history.
    """

    count: Array  # (M,)
    weight: Array  # (M',)
    new: Array | None = None  # (M',), bool; None if there are none

    @property
    def index(self) -> Array:
        """For every copy, the channel that it copies."""
        return np.repeat(np.arange(len(self.count)), self.count)

    @property
    def start(self) -> Array:
        """For every channel, its first copy."""
        return np.cumsum(self.count) - self.count


@dataclass(frozen=True)
class AxisGrowth:
    """How one axis grows: its entry n copies entry index[n] of the old axis."""

    index: Array
    scale: Array | None  # of the values: weights of read channels, shares of shared ones
    gradient: Array | None  # of gradients: weights of repeated channels; 0 for new ones
    new: Array | None = None  # whether an entry belongs to a new channel; None if there are none
    copy: Array | None = None  # which of its unit's copies an entry belongs to; -1 if that unit does not change


class Growth:
    """How every stored tensor of a graph grows for given copies of its units' channels."""

    def __init__(self, graph: Graph, copies: Mapping[str, Copies]) -> None:
        self.graph = graph
        self.by_number = [copies.get(name) for name in graph.units]
        self._kept: dict[object, AxisGrowth] = {}

    def tensors(self) -> dict[str, dict[int, AxisGrowth]]:
        """Return the axes that grow of every tensor that does."""
        found: dict[str, dict[int, AxisGrowth]] = {}
        for name, axes in self.graph.tensors.items():
            for axis, layout in axes.items():
                grown = self.axis(layout)
                if grown is not None:
                    found.setdefault(name, {})[axis] = grown
        return found

    def axis(self, layout: AxisLayout) -> AxisGrowth | None:
        """Return how an axis grows; None if none of its channels is split."""
        numbers = np.unique(layout.unit)
        if not any(number >= 0 and self.by_number[number] is not None for number in numbers.tolist()):
            return None
        # A depthwise convolution, its BatchNorm and others have the same channels.
        key = (layout.unit.tobytes(), layout.channel.tobytes(), layout.role.tobytes())
        if key not in self._kept:
            self._kept[key] = self._grown(layout)
        return self._kept[key]

    def _grown(self, layout: AxisLayout) -> AxisGrowth:
        starts, lengths = runs(layout)
        times = np.ones(len(starts), np.int64)
        first, begin = np.full(len(starts), -1), np.zeros(len(starts), np.int64)
        weights: list[Array] = []
        new: list[Array] = []
        offset = 0
        for number, copies in enumerate(self.by_number):
            mine = layout.unit[starts] == number
            if copies is None or not mine.any():
                continue
            channels = layout.channel[starts[mine]]
            times[mine] = copies.count[channels]
            first[mine], begin[mine] = offset + copies.start[channels], offset
            weights.append(copies.weight)
            new.append(np.zeros(len(copies.weight), bool) if copies.new is None else copies.new)
            offset += len(copies.weight)
        weight = np.concatenate(weights)
        # Every run is repeated as a whole: run r stands times[r] times, one after the other.
        run = np.repeat(np.arange(len(starts)), times)
        number_of_copy = np.arange(len(run)) - np.repeat(np.cumsum(times) - times, times)
        repeats = lengths[run]
        entry_run = np.repeat(np.arange(len(run)), repeats)
        inside = np.arange(len(entry_run)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        index = starts[run][entry_run] + inside
        copy = np.where(first[run] >= 0, first[run] + number_of_copy, -1)
        is_new = (copy >= 0) & np.concatenate(new)[np.maximum(copy, 0)]
        w = np.where(copy >= 0, weight[np.maximum(copy, 0)], 1.0)[entry_run]
        role = layout.role[index]
        scale = np.where(role == READ, w, 1.0)
        shares = role == SHARED
        if shares.any():
            # A new channel has no share.
            sharing = np.bincount(run, weights=~is_new, minlength=len(starts))
            share = np.where(is_new, 0.0, 1.0 / np.maximum(sharing[run], 1.0))
            scale = np.where(shares, share[entry_run], scale)
        is_new = is_new[entry_run]
        gradient = np.where(is_new, 0.0, np.where(role == READ, 1.0, w))
        return AxisGrowth(
            index,
            None if (scale == 1).all() else scale,
            None if (gradient == 1).all() else gradient,
            is_new if is_new.any() else None,
            np.where(copy >= 0, copy - begin[run], -1)[entry_run],
        )


@dataclass(frozen=True)
class Shift:
    """What is added to the rows of a tensor after they have been repeated: `values[which[n]]`, or nothing if -1."""

    values: Tensor  # (R, ...)
    which: Array
    scale: float


def widening(
    tensor: Tensor, axes: Mapping[int, AxisGrowth], row_axis: int | None = None, shift: Shift | None = None
) -> Widening:
    """Return how a tensor's values grow; `shift` is added along `row_axis`.

    The tensor is seen with its growing axes in front; `regrown` puts them back.
    """
    order, rest = _order(tensor.dim(), axes, row_axis)
    for axis in rest:
        tensor = _along(tensor, axis, axes[axis].index, axes[axis].scale)
    seen = tensor.permute(order)
    first, second = axes.get(order[0]), axes.get(order[1]) if len(order) > 1 else None
    return Widening(
        seen,
        _index(first, seen.shape[0], seen.device),
        None if first is None else _numbers(first.scale, seen),
        None if shift is None else shift.values.permute(order).to(seen),
        None if shift is None else torch.from_numpy(shift.which).to(seen.device),
        None if second is None else _index(second, seen.shape[1], seen.device),
        None if second is None else _numbers(second.scale, seen),
        1.0 if shift is None else shift.scale,
    )


def state_widening(
    tensor: Tensor, axes: Mapping[int, AxisGrowth], row_axis: int | None, scaled: Callable[[Array], Array]
) -> Widening:
    """Return how an entry of optimizer state grows: like gradients, scaled by a function of the copies' weights."""

    def numbers(growth: AxisGrowth | None) -> Array | None:
        return None if growth is None or growth.gradient is None else scaled(growth.gradient)

    order, rest = _order(tensor.dim(), axes, row_axis)
    for axis in rest:
        tensor = _along(tensor, axis, axes[axis].index, numbers(axes[axis]))
    seen = tensor.permute(order)
    first, second = axes.get(order[0]), axes.get(order[1]) if len(order) > 1 else None
    columns = None if second is None else _index(second, seen.shape[1], seen.device)
    rows = _index(first, seen.shape[0], seen.device)
    return Widening(seen, rows, _numbers(numbers(first), seen), None, None, columns, _numbers(numbers(second), seen))


def regrown(grown: Tensor, axes: Mapping[int, AxisGrowth], row_axis: int | None = None) -> Tensor:
    """Return a grown tensor with its axes in their own order."""
    order, _ = _order(grown.dim(), axes, row_axis)
    if order == sorted(order):
        return grown
    return grown.permute([order.index(axis) for axis in range(len(order))]).contiguous()


def _order(dimensions: int, axes: Mapping[int, AxisGrowth], row_axis: int | None) -> tuple[list[int], list[int]]:
    """Return the order of axes in which two that grow come first, and the axes that grow beyond those two."""
    growing = sorted(axes)
    if row_axis is None:
        row_axis = 0 if 0 in axes or len(growing) == 1 else growing[0]
    others = [axis for axis in growing if axis != row_axis]
    front = [row_axis, *others[:1]]
    return [*front, *(axis for axis in range(dimensions) if axis not in front)], others[1:]


def _along(tensor: Tensor, axis: int, index: Array, scale: Array | None) -> Tensor:
    tensor = tensor.index_select(axis, torch.from_numpy(index).to(tensor.device))
    numbers = _numbers(scale, tensor)
    return tensor if numbers is None else tensor * numbers.reshape(-1, *[1] * (tensor.dim() - 1 - axis))


def _index(growth: AxisGrowth | None, length: int, device: torch.device) -> Tensor:
    return torch.from_numpy(np.arange(length) if growth is None else growth.index).to(device)


def _numbers(values: Array | None, like: Tensor) -> Tensor | None:
    return None if values is None else torch.from_numpy(np.ascontiguousarray(values, np.float64)).to(like)
