"""New filters: which filters would decrease the loss the fastest, once their consumers begin to read them.

A new filter is read with weight 0, so that the network computes the same function. The loss depends on it by the slope

    |dL/dw|,    w: all weights with which consumers read the new channel,

the largest decrease of the loss per length of a step along w. All slopes come from one trial: a copy of the network
with all proposed filters, and its plain gradients. This holds for any chain, since the trial is the network itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from s3d_fast.base import require
from s3d_fast.base.world import ALONE, World
from s3d_fast.network.graph import READ, Graph, Unit, filter_lengths, stored_tensors
from s3d_fast.network.wrapping import inside
from s3d_fast.splitting.proposals import Proposals
from s3d_fast.splitting.trial import Trial

KINDS = ("random", "firefly", "gradmax")
# Random filters per proposal among which "firefly" takes the best, and the steps by which it and "gradmax" improve.
TRIES, REFINEMENTS = 4, 3
# The part of its length by which a step of "firefly" turns a filter.
TURN = 0.5
# The most filters that are proposed for a unit by default.
MOST = 32


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
    world: World = ALONE,
) -> dict[str, Proposals]:
    """Return filters that units could get, with the slopes of the loss at their output weights; `select` chooses some.

    Every filter is as long as the one whose channel it resembles, so that it is as large as what is there.

    Args:
        model: the network, which is copied; the copy is evaluated in eval mode.
        loss_fn: as for `capture`.
        batches: as for `capture`; iterated several times.
        graph: from `trace`.
        kind: "random", random directions; "firefly", the best of `tries` times as many, improved by gradient ascent on
            their slopes (Wu et al., "Firefly neural architecture descent", 2020); "gradmax", the singular vectors of
            the matrix of gradients times inputs (Evci et al., "GradMax", 2022): the derivative of the gradient at
            output weights by a filter, at 0, by block Lanczos for all units at once.
        number: how many filters to propose, for every unit or by unit; by default as many as it has, at most 32.
        units: names of units; all by default.
        tries: random filters for every filter that "firefly" keeps.
        refinements: the steps of "firefly", and the products of "gradmax".
        generator: draws the random directions; by default every call draws the same. It must be the same in all
            processes.
        world: processes that propose together, each on batches of its own; all of them must call this.

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
    trial = Trial(model, loss_fn, batches, graph, world)
    found = trial.measured(found)
    if kind == "firefly":
        found = {name: _steepest(own, wanted[name]) for name, own in found.items()}
        for _ in range(refinements):
            turned = {name: _turned(own, ascent) for name, (own, ascent) in trial.ascended(found).items()}
            found = {name: _better(found[name], own) for name, own in trial.measured(turned).items()}
    elif kind == "gradmax" and refinements:
        singular = trial.measured(trial.singular(found, refinements))
        found = {name: _better(found[name], own, as_a_whole=True) for name, own in singular.items()}
    return {name: _steepest(own, wanted[name]) for name, own in found.items()}


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


def _turned(own: Proposals, ascent: Tensor) -> Proposals:
    """Return filters that are turned towards their ascents; their lengths stay."""
    lengths = own.theta.norm(dim=1, keepdim=True)
    direction = nn.functional.normalize(ascent.to(own.theta), dim=1)
    return replace(own, theta=nn.functional.normalize(own.theta / lengths + TURN * direction, dim=1) * lengths)


def _better(old: Proposals, new: Proposals, as_a_whole: bool = False) -> Proposals:
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
