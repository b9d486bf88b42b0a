"""New filters: which filters would decrease the loss the fastest, once their consumers begin to read them.

A new filter is read with weight 0, so that the network computes the same function. The loss depends on it by the slope

    |dL/dw|,    w: all weights with which consumers read the new channel,

the largest decrease of the loss per length of a step along w. All slopes come from one trial: a copy of the network
with all proposed filters, and its plain gradients. This holds for any chain, since the trial is the network itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from s3d_fast.base import require
from s3d_fast.base.losses import checked_loss
from s3d_fast.network.graph import READ, Filters, Graph, Unit, filter_lengths, stored_tensors
from s3d_fast.network.growing import AxisGrowth, Growth
from s3d_fast.network.wrapping import inside
from s3d_fast.splitting.plan import NewFilter, SplitPlan
from s3d_fast.splitting.surgery import apply_splits
from s3d_fast.splitting.unit_changes import unit_changes

KINDS = ("random", "firefly", "gradmax")
# Random filters per proposal among which "firefly" takes the best, and the steps by which it and "gradmax" improve.
TRIES, REFINEMENTS = 4, 3
# The part of its length by which a step of "firefly" turns a filter.
TURN = 0.5
# The most filters that are proposed for a unit by default.
MOST = 32


@dataclass(frozen=True)
class Proposals:
    """Filters that one unit could get, the steepest first."""

    unit: str
    theta: Tensor  # (K, D)
    like: tuple[int, ...]  # (K,), the channel from which followers are copied
    slope: Tensor  # (K,), float64
    reach: Tensor  # (K,), float64: the length of the output weights of the channel that a filter resembles
    statistics: Mapping[str, Tensor]  # name of a BatchNorm's buffer -> (K,), its entries for the new channels

    def __len__(self) -> int:
        return len(self.like)

    def __getitem__(self, number: int) -> NewFilter:
        """Return one of the filters, ready for a plan."""
        statistics = {name: float(values[number]) for name, values in self.statistics.items()}
        return NewFilter(self.unit, self.theta[number], self.like[number], float(self.slope[number]), statistics)

    def take(self, places: Sequence[int]) -> Proposals:
        """Return some of the filters."""
        index = torch.tensor(list(places), dtype=torch.int64)
        return replace(
            self,
            theta=self.theta[index.to(self.theta.device)],
            like=tuple(self.like[place] for place in places),
            slope=self.slope[index],
            reach=self.reach[index],
            statistics={name: values[index.to(values.device)] for name, values in self.statistics.items()},
        )


def propose_filters(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    batches: Collection[Any],
    graph: Graph,
    *,
    kind: str = "random",
    number: int | Mapping[str, int] | None = None,
    units: Sequence[str] | None = None,
    tries: int = TRIES,
    refinements: int = REFINEMENTS,
    generator: torch.Generator | None = None,
) -> dict[str, Proposals]:
    """Return filters that units could get, with the slopes of the loss at their output weights; `select` chooses some.

    Every filter is as long as the one whose channel it resembles, so that it is as large as what is there.

    Args:
        model: the network, which is copied; the copy is evaluated in eval mode.
        loss_fn: as for `capture`.
        batches: as for `capture`; iterated several times.
        graph: from `trace`.
        kind: "random", random directions; "firefly", the best of `tries` times as many, improved by gradient ascent on
            their slopes (Wu et al., "Firefly neural architecture descent", 2020); "gradmax", orthogonal directions by
            power iteration on the slopes, which for linear units are the singular vectors of the matrix of gradients
            times inputs (Evci et al., "GradMax", 2022).
        number: how many filters to propose, for every unit or by unit; by default as many as it has, at most 32.
        units: names of units; all by default.
        tries: random filters for every filter that "firefly" keeps.
        refinements: the steps of "firefly" and "gradmax".
        generator: draws the random directions; by default every call draws the same.

    Raises:
        ValueError, TypeError: bad arguments, a batch or loss that `capture` would refuse.
    """
    require.choice("kind", kind, KINDS)
    require.count("tries", tries)
    require.count("refinements", refinements, at_least=0)
    if not len(batches):
        raise ValueError("batches must hold at least one batch, got none")
    names = list(graph.units) if units is None else list(units)
    for name in names:
        if name not in graph.units:
            raise ValueError(f"units: {name!r} is not a unit of the model, which has {', '.join(graph.units)}")
    graph.check(inside(model))
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    wanted = {name: _number(number, graph.units[name]) for name in names}
    stored = stored_tensors(inside(model))
    many = tries if kind == "firefly" else 1
    found = {
        name: _drawn(graph, graph.units[name], many * count, stored, generator)
        for name, count in wanted.items()
        if count
    }
    if not found:
        return {}
    trial = _Trial(model, loss_fn, batches, graph)
    found = trial.measured(found)
    if kind == "firefly":
        found = {name: _steepest(own, wanted[name]) for name, own in found.items()}
    best = found
    for _ in range(refinements if kind != "random" else 0):
        found = trial.measured({name: _turned(*pair, kind) for name, pair in trial.ascended(found, kind).items()})
        best = {name: _better(best[name], own, as_a_whole=kind == "gradmax") for name, own in found.items()}
        # Ascent goes on from the best; a power iteration must not go back.
        found = best if kind == "firefly" else found
    return {name: _steepest(own, wanted[name]) for name, own in best.items()}


def _number(number: int | Mapping[str, int] | None, unit: Unit) -> int:
    if number is None:
        return min(unit.width, MOST)
    count = number.get(unit.name, 0) if isinstance(number, Mapping) else number
    require.count("number", count, at_least=0)
    return count


def _drawn(graph: Graph, unit: Unit, count: int, stored: Mapping[str, Tensor], generator: torch.Generator) -> Proposals:
    """Return random filters of a unit."""
    lengths = filter_lengths(unit, stored)
    # A filter of zeros, as a stream may have at first, would give new ones nothing to begin with.
    lengths = torch.where(lengths > 0, lengths, lengths.mean().clamp(min=1e-3))
    device = generator.device
    like = torch.randint(unit.width, (count,), generator=generator, device=device).tolist()
    theta = torch.randn(count, unit.fan_in, dtype=torch.float64, generator=generator, device=device).cpu()
    theta *= (lengths[torch.tensor(like)] / theta.norm(dim=1)).unsqueeze(1)
    weight = stored[unit.filters[0].weight]
    reach = output_lengths(graph, unit.name, stored)[torch.tensor(like)]
    return Proposals(unit.name, theta.to(weight), tuple(like), torch.zeros_like(reach), reach, {})


def output_lengths(graph: Graph, unit: str, stored: Mapping[str, Tensor]) -> Tensor:  # (M,), float64
    """Return, for every channel of a unit, the length of all weights with which its consumers read it."""
    number = list(graph.units).index(unit)
    squares = torch.zeros(graph.units[unit].width, dtype=torch.float64)
    for name, axes in graph.tensors.items():
        for axis, layout in axes.items():
            places = np.flatnonzero((layout.unit == number) & (layout.role == READ))
            if len(places):
                rows = stored[name].detach().movedim(axis, 0)[torch.from_numpy(places).to(stored[name].device)]
                own = rows.reshape(len(places), -1).double().square().sum(1).cpu()
                squares.index_add_(0, torch.from_numpy(layout.channel[places]), own)
    return squares.sqrt()


def _steepest(own: Proposals, count: int) -> Proposals:
    return own.take(own.slope.argsort(descending=True, stable=True)[:count].tolist())


def _turned(own: Proposals, ascent: Tensor, kind: str) -> Proposals:
    """Return filters that are turned towards their ascents; their lengths stay."""
    lengths = own.theta.norm(dim=1, keepdim=True)
    direction = nn.functional.normalize(ascent.to(own.theta), dim=1)
    if kind == "gradmax":
        # Orthogonal where the unit has room for that; rows without an ascent stay as they are.
        basis = torch.linalg.qr(ascent.double().mT).Q.mT if len(own) <= ascent.shape[1] else direction
        moved = (ascent.norm(dim=1, keepdim=True) > 0).expand_as(own.theta)
        theta = torch.where(moved, basis.to(own.theta) * lengths, own.theta)
    else:
        theta = nn.functional.normalize(own.theta / lengths + TURN * direction, dim=1) * lengths
    return replace(own, theta=theta)


def _better(old: Proposals, new: Proposals, as_a_whole: bool) -> Proposals:
    """Return, for every filter, the steeper of two; or the steeper of two sets."""
    better = new.slope > old.slope
    if as_a_whole:
        better = (new.slope.norm() > old.slope.norm()).expand_as(better)
    on = better.to(old.theta.device)
    return replace(
        old,
        theta=torch.where(on.unsqueeze(1), new.theta, old.theta),
        slope=torch.where(better, new.slope, old.slope),
        statistics={
            name: torch.where(better.to(values.device), new.statistics[name], values)
            for name, values in old.statistics.items()
        },
    )


class _Trial:
    """Evaluates proposed filters on a copy of the network that has all of them."""

    def __init__(
        self, model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], batches: Collection[Any], graph: Graph
    ) -> None:
        self.model, self.loss_fn, self.batches, self.graph = inside(model), loss_fn, batches, graph

    def measured(self, proposals: Mapping[str, Proposals]) -> dict[str, Proposals]:
        """Return the proposals with their slopes, and with the statistics of their BatchNorms."""
        grown = _Grown(self, proposals)
        grown.find_statistics()
        gradients = grown.gradients()
        return {
            name: replace(own, slope=grown.slopes(name, gradients), statistics=grown.statistics(name))
            for name, own in proposals.items()
        }

    def ascended(self, proposals: Mapping[str, Proposals], kind: str) -> dict[str, tuple[Proposals, Tensor]]:
        """Return the proposals, each with a direction for its filters, (K, D).

        "firefly" ascends half the squared slope |g(theta)|^2 / 2, g the gradient at the output weights, and J its
        derivative: the direction is J^T g. "gradmax" asks for J^T J theta. The difference of g at 3/2 theta and at
        1/2 theta is J theta for linear units and for those with kinks at 0, whatever constant they add.
        """
        if kind == "firefly":
            along = _Grown(self, proposals).gradients()
        else:
            far, near = (_Grown(self, _scaled(proposals, factor)).gradients() for factor in (1.5, 0.5))
            along = {name: far[name] - near[name] for name in far}
        ascents = _Grown(self, proposals).ascents(along)
        return {name: (own, ascents[name]) for name, own in proposals.items()}


def _scaled(proposals: Mapping[str, Proposals], factor: float) -> dict[str, Proposals]:
    return {name: replace(own, theta=factor * own.theta) for name, own in proposals.items()}


class _Grown:
    """A copy of the network with all proposed filters."""

    def __init__(self, trial: _Trial, proposals: Mapping[str, Proposals]) -> None:
        self.trial, self.graph = trial, trial.graph
        self.plan = SplitPlan(
            self.graph, (), new=[own[place] for own in proposals.values() for place in range(len(own))]
        )
        self.counts = {name: len(own) for name, own in proposals.items()}
        self.model = copy.deepcopy(trial.model).eval()
        # The graph was proved, or its user takes care of that.
        apply_splits(self.model, replace(self.plan, graph=replace(self.graph, is_proved=True)), 0.0)
        self.changes = unit_changes(self.plan)
        growth = Growth(self.graph, {name: change.copies for name, change in self.changes.items()})
        self.tensors: dict[str, dict[int, AxisGrowth]] = growth.tensors()
        self.stored = stored_tensors(self.model)
        for tensor in self.stored.values():
            if tensor.is_leaf and tensor.is_floating_point():
                tensor.requires_grad_(isinstance(tensor, nn.Parameter))
        self.read = [name for name in self.tensors if self._reads(name)]

    def _reads(self, name: str) -> bool:
        axes = self.graph.tensors[name]
        is_parameter = isinstance(self.stored[name], nn.Parameter)
        return is_parameter and any(bool((axes[axis].role == READ).any()) for axis in self.tensors[name])

    def _new(self, name: str, axis: int, unit: str, role: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the entries along an axis that belong to new channels of a unit, and to which of its new filters."""
        growth, layout = self.tensors[name][axis], self.graph.tensors[name][axis]
        assert growth.copy is not None
        number = list(self.graph.units).index(unit)
        mine = layout.unit[growth.index] == number
        if role is not None:
            mine &= layout.role[growth.index] == role
        places = np.flatnonzero(mine)
        which = self.changes[unit].new_of(growth.copy[places])
        return places[which >= 0], which[which >= 0]

    def losses(self) -> Any:
        """Yield the loss of every batch, divided by their number."""
        for index, batch in enumerate(self.trial.batches):
            with torch.enable_grad():
                yield checked_loss(self.model, self.trial.loss_fn, batch, index) / len(self.trial.batches)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradient of the mean loss for every weight that reads new channels."""
        total = {name: torch.zeros_like(self.stored[name]) for name in self.read}
        for loss in self.losses():
            own = torch.autograd.grad(loss, [self.stored[name] for name in self.read], allow_unused=True)
            for name, gradient in zip(self.read, own, strict=True):
                if gradient is not None:
                    total[name] += gradient
        return total

    def slopes(self, unit: str, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the slope of every new filter of a unit."""
        squares = torch.zeros(self.counts[unit], dtype=torch.float64)
        for name in self.read:
            for axis in self.tensors[name]:
                places, which = self._new(name, axis, unit, READ)
                if len(places):
                    index = torch.from_numpy(places).to(gradients[name].device)
                    rows = gradients[name].detach().index_select(axis, index).movedim(axis, 0).flatten(1)
                    squares.index_add_(0, torch.from_numpy(which), rows.double().square().sum(1).cpu())
        return squares.sqrt()

    def ascents(self, along: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return J^T u for the filters of every unit, u being what `along` holds for weights that read new channels."""
        held = {name: self._of_new_channels(name, gradient) for name, gradient in along.items()}
        rows = [
            name
            for name in dict.fromkeys(
                name
                for unit in self.counts
                for one in self.graph.units[unit].filters
                for name in (one.weight, one.bias)
                if name is not None
            )
            if name in self.tensors
        ]
        total = {name: torch.zeros_like(self.stored[name]) for name in rows}
        for loss in self.losses():
            own = torch.autograd.grad(
                loss, [self.stored[name] for name in self.read], create_graph=True, allow_unused=True
            )
            terms = [
                (held[name] * gradient).sum()
                for name, gradient in zip(self.read, own, strict=True)
                if gradient is not None
            ]
            product = torch.stack(terms).sum()
            second = torch.autograd.grad(product, [self.stored[name] for name in rows], allow_unused=True)
            for name, gradient in zip(rows, second, strict=True):
                if gradient is not None:
                    total[name] += gradient
        return {unit: self._rows(unit, total) for unit in self.counts}

    def _of_new_channels(self, name: str, gradient: Tensor) -> Tensor:
        """Return a gradient with zeros but where a new channel is read."""
        kept = torch.zeros_like(gradient)
        for axis in self.tensors[name]:
            for unit in self.counts:
                places, _ = self._new(name, axis, unit, READ)
                if len(places):
                    index = torch.from_numpy(places).to(gradient.device)
                    kept.index_copy_(axis, index, gradient.index_select(axis, index))
        return kept

    def _rows(self, unit: str, of: Mapping[str, Tensor]) -> Tensor:
        """Return what tensors hold for the new filters of a unit, (K, D), in the columns that were there before."""
        return torch.cat([self._part(unit, one, of) for one in self.graph.units[unit].filters], 1)

    def _part(self, unit: str, filters: Filters, of: Mapping[str, Tensor]) -> Tensor:
        parts = []
        for name, axis in ((filters.weight, filters.row_axis), (filters.bias, 0)):
            if name is None:
                continue
            tensor = of[name]
            for other, growth in self.tensors[name].items():
                if other != axis and growth.new is not None:
                    old = torch.from_numpy(np.flatnonzero(~growth.new)).to(tensor.device)
                    tensor = tensor.index_select(other, old)
            places, which = self._new(name, axis, unit)
            # A weight that several units share holds rows of others too; a filter that stands twice adds up.
            rows = tensor.index_select(axis, torch.from_numpy(places).to(tensor.device)).movedim(axis, 0)
            rows = rows.reshape(len(places), -1)
            total = rows.new_zeros(self.counts[unit], rows.shape[1])
            parts.append(total.index_add_(0, torch.from_numpy(which).to(tensor.device), rows))
        return torch.cat(parts, 1)

    @torch.no_grad()
    def find_statistics(self) -> None:
        """Let every BatchNorm find the statistics of new channels, in the order of the network, on all batches."""
        hooks, seen = [], {}
        for module in self.model.modules():
            if not isinstance(module, _BatchNorm) or module.running_mean is None or module.running_var is None:
                continue
            name = next((own for own, tensor in self.stored.items() if tensor is module.running_mean), "")
            growth = self.tensors.get(name, {}).get(0)
            if growth is None or growth.new is None:
                continue
            seen[module] = (torch.from_numpy(np.flatnonzero(growth.new)), [0.0])
            hooks.append(module.register_forward_pre_hook(lambda own, inputs: _observe(own, inputs[0], *seen[own])))
        try:
            if hooks:
                for _ in self.losses():
                    pass
        finally:
            for hook in hooks:
                hook.remove()

    def statistics(self, unit: str) -> dict[str, Tensor]:
        """Return the statistics of the new channels of a unit, by the names of buffers."""
        found = {}
        for module_name, module in self.model.named_modules():
            if not isinstance(module, _BatchNorm):
                continue
            for leaf in ("running_mean", "running_var"):
                name = f"{module_name}.{leaf}" if module_name else leaf
                if name not in self.tensors or self.tensors[name].get(0) is None:
                    continue
                places, which = self._new(name, 0, unit)
                if len(places) == self.counts[unit]:
                    values = self.stored[name].new_zeros(self.counts[unit])
                    values[torch.from_numpy(which)] = self.stored[name][torch.from_numpy(places)]
                    found[name] = values
        return found


def _observe(layer: _BatchNorm, x: Tensor, places: Tensor, weight: list[float]) -> None:
    """Add a batch to the statistics of some channels: the mean over the batches so far."""
    own = x.index_select(1, places.to(x.device)).detach().double()
    others = [axis for axis in range(x.dim()) if axis != 1]
    weight[0] += 1
    variance, mean = torch.var_mean(own, others, correction=0)
    for buffer, value in ((layer.running_mean, mean), (layer.running_var, variance)):
        assert buffer is not None
        index = places.to(buffer.device)
        old = buffer[index].double() if weight[0] > 1 else torch.zeros_like(value)
        buffer[index] = (old + (value - old) / weight[0]).to(buffer.dtype)
