"""Surgery: carries out a plan on a model and its optimizer state; either everything changes, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from s3d_fast.backends.operations import grow_weights
from s3d_fast.base.world import existing
from s3d_fast.maths.reference import Widening
from s3d_fast.network.graph import REPEATED, Filters, Graph, Holder, holders_of, stored_tensors
from s3d_fast.network.growing import AxisGrowth, Growth, Shift, regrown, state_widening, widening
from s3d_fast.network.proof import output_change, output_tolerance, outputs_of
from s3d_fast.network.sharding import is_sharded, whole
from s3d_fast.network.sizes import fitting_sizes
from s3d_fast.network.undisturbed import undisturbed
from s3d_fast.network.undo import AllOrNothing, set_size
from s3d_fast.network.wrapping import inside, retire_wrappers
from s3d_fast.splitting.optimizers import Scaling, check_optimizer, unwrap_optimizer
from s3d_fast.splitting.plan import SplitPlan
from s3d_fast.splitting.unit_changes import UnitChange, unit_changes


def apply_splits(
    model: nn.Module,
    plan: SplitPlan,
    eps: float,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    also: Sequence[nn.Module] = (),
    check: Any = None,
) -> None:
    """Split neurons of a model in place, add new filters and remove neurons; carry the optimizer's state along.

    The row of a split neuron i becomes m rows theta + eps * delta_k. Every follower repeats the neuron's channel m
    times. In every consumer, the column W[:, i] becomes the m columns w_k * W[:, i]. At eps = 0 the model computes the
    same function as before. Optimizer state scales like the gradients: by w_k for copied rows and followers (second
    moments by w_k^2), and not at all for consumers' columns. A new filter has its own row, followers like those of
    another channel, columns of zeros, and state of zeros. Of a removed neuron nothing is left. Changed parameters are
    new nn.Parameter objects without a gradient, in the same parameter groups.

    Args:
        model: the model that the plan was made for, or another model with the same layers and sizes; also inside
            DistributedDataParallel, torch.compile and the like. A DistributedDataParallel must be made anew afterwards,
            see `rewrap`. A model that `fully_shard` has divided is gathered, split and divided again, with its
            optimizer; every process must call this, and has the whole model in memory meanwhile. The first process's
            plan counts.
        plan: from `select`.
        eps: the size of the step, >= 0.
        optimizer: one of torch's, or one that `register_optimizer` knows, over the model's parameters.
        also: other models with the same layers and sizes that must grow alike, such as an exponential moving average.
        check: an example input as for `trace`. The model is then evaluated in eval mode before and after the same
            plan with eps = 0; before, consumers read zero from neurons that are to be removed. If the outputs differ,
            nothing is changed.

    Raises:
        ValueError, TypeError: the plan does not fit the model, the optimizer belongs to another model or is not
            supported, a size attribute of a layer cannot be set, or `check` shows that the outputs would change.
            Nothing has changed then.
    """
    if not (isinstance(eps, (int, float)) and 0 <= eps < float("inf")):
        raise ValueError(f"eps must be a finite number >= 0, got {eps!r}")
    if not plan.graph.is_proved and check is None:
        raise ValueError(
            "the plan's graph was made by trace(..., prove=False): give apply_splits(..., check=example_input), or "
            "trace the model with a proof"
        )
    models = [inside(one) for one in (model, *also)]
    if any(is_sharded(one) for one in models):
        # Buffers differ between processes, so plans can; parts of different splits would not make one model.
        plan = replace(plan, splits=existing().same(plan.splits))
    for place, one in enumerate(models):
        _require_fit(plan.graph, one, "the model" if place == 0 else f"also[{place - 1}]")
    by_unit = unit_changes(plan)
    optimizer = None if optimizer is None else unwrap_optimizer(optimizer)
    with ExitStack() as shards:
        for place, one in enumerate(models):
            shards.enter_context(whole(one, optimizer if place == 0 else None))
        kinds = check_optimizer(optimizer, models[0])
        if not by_unit:
            return
        if check is not None:
            _check_outputs(models[0], check, plan, lambda: _split(models[:1], plan.graph, by_unit, 0.0, None, {}))
        _split(models, plan.graph, by_unit, eps, optimizer, kinds)
    for one in (model, *also):
        retire_wrappers(one)


def _require_fit(graph: Graph, model: nn.Module, what: str) -> None:
    try:
        graph.check(model)
    except ValueError as error:
        raise ValueError(f"plan does not fit {what}: {error}") from error


def _split(
    models: Sequence[nn.Module],
    graph: Graph,
    by_unit: Mapping[str, UnitChange],
    eps: float,
    optimizer: torch.optim.Optimizer | None,
    kinds: Mapping[str, Scaling],
) -> None:
    """Split all models, and grow the optimizer of the first; either everything changes, or nothing."""
    changes = [change for one in models for change in _changes(one, graph, by_unit, eps)]
    states = _widened_state(changes, optimizer, kinds)
    growing = [
        (entries, key, value)
        for entries in states
        for key, value in entries.items()
        if isinstance(value, _GrowingState)
    ]
    with torch.no_grad():
        grown = grow_weights([change.widening for change in changes] + [value.widening for *_, value in growing])
        for change, new in zip(changes, grown[: len(changes)], strict=True):
            change.make(new)
        _set_statistics(changes, graph, by_unit)
        for (entries, key, value), new in zip(growing, grown[len(changes) :], strict=True):
            entries[key] = regrown(new, value.axes, value.row_axis)

    touched = dict.fromkeys(module for change in changes for _, _, module in change.holders)
    with AllOrNothing(touched, optimizer):
        for change in changes:
            change.commit()
        if optimizer is not None:
            _commit_state(optimizer, changes, states)
        for module in touched:
            for name, size in fitting_sizes(module).items():
                set_size(module, name, size)


def _set_statistics(changes: Sequence[_Change], graph: Graph, by_unit: Mapping[str, UnitChange]) -> None:
    """Write the given entries of new channels, such as the statistics of their BatchNorms."""
    wanted = {name for change in by_unit.values() for own in change.statistics for name in own}
    numbers = {number: name for number, name in enumerate(graph.units) if name in by_unit}
    for change in changes:
        if change.name not in wanted or change.new is None or set(change.axes) != {0}:
            continue
        growth, unit = change.axes[0], graph.tensors[change.name][0].unit
        assert growth.copy is not None
        for number, name in numbers.items():
            mine = np.flatnonzero(unit[growth.index] == number)
            which = by_unit[name].new_of(growth.copy[mine])
            for place, new in zip(mine[which >= 0].tolist(), which[which >= 0].tolist(), strict=True):
                value = by_unit[name].statistics[new].get(change.name)
                if value is not None:
                    change.new[place] = value


def _check_outputs(model: nn.Module, example_input: Any, plan: SplitPlan, split: Callable[[], None]) -> None:
    """Raise ValueError if a plan with steps of size zero changes the model's outputs; the model stays as it is."""
    with undisturbed(model), torch.no_grad(), AllOrNothing(model.modules()) as undo:
        try:
            mask(model, plan, undo.write)
            before = outputs_of(model, example_input)
            split()
            after = outputs_of(model, example_input)
        except Exception as error:
            raise ValueError(f"check: after the split the model fails: {error}") from error
        finally:
            undo.undo()
    change = output_change(before, after)
    if not change <= output_tolerance(before):
        raise ValueError(f"check: the split would change the model's outputs by {change:.2g} of their size")


def mask(model: nn.Module, plan: SplitPlan, write: Callable[[Tensor, Tensor], object] | None = None) -> None:
    """Let consumers read zero from all neurons that a plan removes: the network computes what it will without them.

    Args:
        model: the model that the plan was made for; changed in place.
        plan: the plan.
        write: writes values into a tensor; by default `Tensor.copy_`.
    """
    numbers = {name: place for place, name in enumerate(plan.graph.units)}
    removed: dict[int, list[int]] = {}
    for gone in plan.removed:
        removed.setdefault(numbers[gone.unit], []).append(gone.neuron)
    stored = stored_tensors(inside(model))
    for name, axes in plan.graph.tensors.items():
        for axis, layout in axes.items():
            read = np.zeros(len(layout), bool)
            for number, neurons in removed.items():
                read |= (layout.unit == number) & np.isin(layout.channel, neurons) & (layout.role != REPEATED)
            if not read.any():
                continue
            tensor = stored[name]
            index = torch.from_numpy(np.flatnonzero(read)).to(tensor.device)
            values = tensor.detach().index_fill(axis, index, 0)
            with torch.no_grad():
                tensor.copy_(values) if write is None else write(tensor, values)


@dataclass
class _GrowingState:
    """An entry of optimizer state, and how it grows."""

    widening: Widening
    axes: Mapping[int, AxisGrowth]
    row_axis: int | None


@dataclass
class _Change:
    """A change of one parameter or buffer: how its value grows, and how its entries of optimizer state grow."""

    name: str
    old: Tensor
    holders: list[Holder]  # every table that holds the tensor
    axes: Mapping[int, AxisGrowth]
    row_axis: int | None
    widening: Widening
    new: Tensor | None = None

    def state(self, tensor: Tensor, scaling: Scaling) -> _GrowingState | Tensor:
        """Return how an entry of optimizer state grows; axes over which it is a mean have length 1 and stay."""
        axes = {axis: growth for axis, growth in self.axes.items() if tensor.shape[axis] == self.old.shape[axis]}
        if not axes:
            return tensor
        return _GrowingState(state_widening(tensor, axes, self.row_axis, scaling), axes, self.row_axis)

    def make(self, grown: Tensor) -> None:
        """Make the tensor that takes the place of the old one."""
        grown = regrown(grown, self.axes, self.row_axis)
        if isinstance(self.old, nn.Parameter):
            grown = nn.Parameter(grown, requires_grad=self.old.requires_grad)
        self.new = grown

    def commit(self) -> None:
        """Put the new tensor in place of the old one, wherever that is held."""
        for table, name, _ in self.holders:
            table[name] = self.new


def _changes(model: nn.Module, graph: Graph, by_unit: Mapping[str, UnitChange], eps: float) -> list[_Change]:
    """Return how all tensors change."""
    stored, holders = stored_tensors(model), holders_of(model)
    changes = []
    for name, axes in Growth(graph, {unit: change.copies for unit, change in by_unit.items()}).tensors().items():
        tensor = stored[name]
        row_axis, shift = _shift(name, tensor, graph, by_unit, axes, eps)
        made = widening(tensor.detach(), _without_new_rows(axes, row_axis), row_axis, shift)
        changes.append(_Change(name, tensor, holders[id(tensor)], axes, row_axis, made))
    return changes


def _shift(
    name: str,
    tensor: Tensor,
    graph: Graph,
    by_unit: Mapping[str, UnitChange],
    axes: Mapping[int, AxisGrowth],
    eps: float,
) -> tuple[int | None, Shift | None]:
    """Return by how much the rows of a tensor move, and the axis of its rows."""
    movers: list[tuple[str, Filters, int]] = []
    for unit in by_unit:
        begin = 0
        for filters in graph.units[unit].filters:
            if name in (filters.weight, filters.bias):
                movers.append((unit, filters, begin))
            begin += filters.fan_in
    if not movers:
        return None, None
    axis = movers[0][1].row_axis if name == movers[0][1].weight else 0
    which = np.full(len(axes[axis].index), -1)
    parts, start = [], 0
    for unit, filters, begin in movers:
        change = by_unit[unit]
        # The last entry of a filter belongs to the bias, if there is one.
        width = tensor.numel() // tensor.shape[axis] if name == filters.weight else 1
        begin = begin if name == filters.weight else begin + filters.fan_in - 1
        own = change.moves(eps)[:, begin : begin + width]
        parts.append(own)
        # The copies of a row stand one after the other, so they are found in the order of the unit's channels.
        places = _copies_of_rows(axes[axis].index, filters.rows)
        which[places] = np.where(change.move_of >= 0, start + change.move_of, -1)
        start += len(own)
    offsets = torch.cat([part.to(tensor.device, tensor.dtype) for part in parts])
    rest = [size for place, size in enumerate(tensor.shape) if place != axis]
    values = offsets.reshape(-1, *rest).movedim(0, axis) if tensor.dim() > 1 else offsets.reshape(-1)
    return axis, Shift(values, which, 1.0)


def _without_new_rows(axes: Mapping[int, AxisGrowth], row_axis: int | None) -> Mapping[int, AxisGrowth]:
    """Return how axes grow if the rows of new channels start from zero: a shift then gives them their values."""
    rows = None if row_axis is None else axes[row_axis]
    if row_axis is None or rows is None or rows.new is None:
        return axes
    scale = np.ones(len(rows.index)) if rows.scale is None else rows.scale
    return {**axes, row_axis: replace(rows, scale=np.where(rows.new, 0.0, scale))}


def _copies_of_rows(index: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the places of all copies of some rows along a grown axis, row by row."""
    order = np.argsort(index, kind="stable")
    starts = np.searchsorted(index[order], rows, side="left")
    ends = np.searchsorted(index[order], rows, side="right")
    return np.concatenate([order[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)])


def _widened_state(
    changes: Sequence[_Change], optimizer: torch.optim.Optimizer | None, kinds: Mapping[str, Scaling]
) -> list[dict[str, object]]:
    """Return the optimizer's state of every changed tensor, with the growth in place of each tensor that must grow."""
    states: list[dict[str, object]] = []
    for change in changes:
        state = optimizer.state.get(change.old, {}) if optimizer is not None else {}
        entries: dict[str, object] = {}
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                sizes = zip(value.shape, change.old.shape, strict=False)
                fits = value.dim() == change.old.dim() and all(own in (1, other) for own, other in sizes)
                if key not in kinds or not fits:
                    raise ValueError(
                        f"optimizer: splitting does not know how its state {key!r} of shape {tuple(value.shape)} "
                        "scales; see s3d_fast.register_optimizer"
                    )
                value = change.state(value, kinds[key])
            entries[key] = value
        states.append(entries)
    return states


def _commit_state(
    optimizer: torch.optim.Optimizer, changes: Sequence[_Change], states: Sequence[dict[str, object]]
) -> None:
    successor = {id(change.old): change.new for change in changes if isinstance(change.new, nn.Parameter)}
    for group in optimizer.param_groups:
        group["params"] = [successor.get(id(parameter), parameter) for parameter in group["params"]]
    for change, entries in zip(changes, states, strict=True):
        if isinstance(change.new, nn.Parameter) and change.old in optimizer.state:
            del optimizer.state[change.old]
            optimizer.state[change.new] = entries
