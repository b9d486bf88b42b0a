"""What a plan does to the channels of each unit, checked and laid out for surgery."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from s3d_fast.base import dtypes, require
from s3d_fast.network.graph import Graph, Unit
from s3d_fast.network.growing import Copies
from s3d_fast.splitting.plan import NeuronSplit, NewFilter, Removal, SplitPlan

# The weights of a neuron's copies must sum to 1 up to this rounding error.
MAX_WEIGHT_ERROR = 1e-5


@dataclass(frozen=True)
class UnitChange:
    """The channels of one unit after a plan.

    Attributes:
        copies: what becomes of every channel: copies of it, perhaps followed by new filters that resemble it.
        move_of: (all copies,), the row of `moves` that is added to a copy's filter; -1 for none.
        offsets: (all copies of split neurons, D), in units of the step.
        filters: (new filters, D).
        statistics: entries of new channels that are given, for every new filter.
    """

    copies: Copies
    move_of: np.ndarray
    offsets: Tensor
    filters: Tensor
    statistics: Sequence[Mapping[str, float]] = ()

    def new_of(self, copy: np.ndarray) -> np.ndarray:
        """Return which new filter each of these copies is; negative for those that are not new."""
        return np.where(copy >= 0, self.move_of[np.maximum(copy, 0)], -1) - len(self.offsets)

    def moves(self, eps: float) -> Tensor:
        """Return what is added to filters: the steps of copies, and new filters, which are added to zero."""
        steps = eps * self.offsets
        return torch.cat([steps, self.filters.to(steps.device)]) if len(self.filters) else steps


def unit_changes(plan: SplitPlan) -> dict[str, UnitChange]:
    """Return the changes by unit, in the order of the graph.

    Raises:
        ValueError, TypeError: something in the plan does not fit the graph.
    """
    _require_fit(plan)
    splits = plan.by_unit()
    new, removed = _grouped(plan.new), _grouped(plan.removed)
    changes = {}
    for name in plan.changed():
        own = splits.get(name, [])
        # All splits of a unit are checked at once; only the error message looks at them one by one.
        if own and not _are_valid(own):
            _explain_invalid(own)
        changes[name] = _change(plan.graph.units[name], own, new.get(name, []), removed.get(name, []))
    return changes


def _grouped(entries: Sequence[Any]) -> dict[str, list[Any]]:
    groups: dict[str, list[Any]] = {}
    for entry in entries:
        groups.setdefault(entry.unit, []).append(entry)
    return groups


def _change(
    unit: Unit, splits: Sequence[NeuronSplit], new: Sequence[NewFilter], removed: Sequence[Removal]
) -> UnitChange:
    splits = sorted(splits, key=lambda split: split.neuron)
    whole = np.ones(unit.width, bool)
    whole[[split.neuron for split in splits]] = False
    whole[[gone.neuron for gone in removed]] = False
    kept = np.flatnonzero(whole)
    counts = [split.copies for split in splits]
    rows = sum(counts)
    with torch.no_grad():
        # Splits may have different dtypes; float64 holds all of them exactly.
        weights = [split.weights.to("cpu", torch.float64) for split in splits]
        offsets = torch.cat([split.offsets for split in splits]) if splits else torch.zeros(0, unit.fan_in)
        filters = torch.stack([one.theta for one in new]) if new else torch.zeros(0, unit.fan_in)
    # Channels that stay, copies of split neurons, and new filters, in the order of the channels they come from.
    channel = np.concatenate(
        [kept, np.repeat([split.neuron for split in splits], counts), [one.like for one in new]]
    ).astype(np.int64)
    weight = np.concatenate([np.ones(len(kept)), *(one.numpy() for one in weights), np.zeros(len(new))])
    is_new = np.concatenate([np.zeros(len(kept) + rows, bool), np.ones(len(new), bool)])
    move_of = np.concatenate([np.full(len(kept), -1), np.arange(rows + len(new))])
    order = np.lexsort((is_new, channel))
    count = np.bincount(channel, minlength=unit.width)
    copies = Copies(count, weight[order], is_new[order] if len(new) else None)
    return UnitChange(copies, move_of[order], offsets, filters, [one.statistics for one in new])


def _require_fit(plan: SplitPlan) -> None:
    """Raise if one of the changes does not fit the graph."""
    seen: set[tuple[str, int]] = set()
    for split in plan.splits:
        # One check covers the usual case: a plan may have thousands of splits.
        unit = plan.graph.units.get(split.unit)
        if unit is None or (split.unit, split.neuron) in seen or not _fits(split, unit):
            _explain_misfit(split, plan.graph)
            raise ValueError(f"{_where(split)} is split twice")
        seen.add((split.unit, split.neuron))
    for gone in plan.removed:
        _require_neuron(gone.unit, gone.neuron, plan.graph)
        if (gone.unit, gone.neuron) in seen:
            raise ValueError(f"{_where(gone)} is removed, and split or removed once more")
        seen.add((gone.unit, gone.neuron))
    removed = {(gone.unit, gone.neuron) for gone in plan.removed}
    for one in plan.new:
        _require_neuron(one.unit, one.like, plan.graph)
        where = f"plan: a new filter of {one.unit!r}"
        require.tensor(f"{where}: theta", one.theta)
        require.shape(f"{where}: theta", one.theta, (plan.graph.units[one.unit].fan_in,))
        require.finite(f"{where}: theta", one.theta)
        if (one.unit, one.like) in removed:
            raise ValueError(f"{where} is like neuron {one.like}, which is removed; take another")
    for name, width in plan.widths().items():
        if width < 1:
            raise ValueError(f"plan: nothing would be left of {name!r}; keep at least one neuron")


def _fits(split: NeuronSplit, unit: Unit) -> bool:
    weights, offsets = split.weights, split.offsets
    return (
        isinstance(split.neuron, int)
        and 0 <= split.neuron < unit.width
        and isinstance(weights, Tensor)
        and isinstance(offsets, Tensor)
        and weights.dtype in dtypes.FLOAT_DTYPES
        and offsets.dtype in dtypes.FLOAT_DTYPES
        and weights.dim() == 1
        and tuple(offsets.shape) == (weights.shape[0], unit.fan_in)
    )


def _require_neuron(name: str, neuron: int, graph: Graph) -> None:
    unit = graph.units.get(name)
    if unit is None:
        raise ValueError(f"plan: {name!r} is not a unit; the units are {', '.join(graph.units)}")
    if not isinstance(neuron, int) or not 0 <= neuron < unit.width:
        raise ValueError(f"plan: neuron {neuron} of {name!r} does not exist: indices go from 0 to {unit.width - 1}")


def _explain_misfit(split: NeuronSplit, graph: Graph) -> None:
    _require_neuron(split.unit, split.neuron, graph)
    where, unit = _where(split), graph.units[split.unit]
    require.tensor(f"{where}: weights", split.weights)
    require.tensor(f"{where}: offsets", split.offsets)
    require.shape(f"{where}: weights", split.weights, ("m",))
    require.shape(f"{where}: offsets", split.offsets, (split.weights.shape[0], unit.fan_in))


def _where(change: NeuronSplit | Removal) -> str:
    return f"plan: neuron {change.neuron} of {change.unit!r}"


def _are_valid(splits: Sequence[NeuronSplit]) -> bool:
    """Return whether all numbers are finite, and the weights of every neuron sum to 1."""
    counts = torch.tensor([split.copies for split in splits])
    with torch.no_grad():
        weights = torch.cat([split.weights for split in splits]).to("cpu", torch.float64)
        offsets = torch.cat([split.offsets for split in splits])
        # A finite sum proves that every entry is finite.
        finite = bool(torch.isfinite(weights.sum() + offsets.sum().cpu()))
    of_split = torch.arange(len(counts)).repeat_interleave(counts)
    totals = torch.zeros(len(counts), dtype=torch.float64).index_add(0, of_split, weights)
    return finite and bool(((totals - 1).abs() <= MAX_WEIGHT_ERROR).all())


def _explain_invalid(splits: Sequence[NeuronSplit]) -> None:
    for split in splits:
        require.finite(f"{_where(split)}: weights", split.weights)
        require.finite(f"{_where(split)}: offsets", split.offsets)
        total = float(split.weights.double().sum())
        if abs(total - 1) > MAX_WEIGHT_ERROR:
            raise ValueError(f"{_where(split)}: weights must sum to 1, got {total:.8g}")
