"""Pruning: how useful neurons are by several measures, which of them to remove, and their removal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from s3d_fast.base import require
from s3d_fast.base.losses import checked_loss
from s3d_fast.base.world import ALONE, World
from s3d_fast.network import costs
from s3d_fast.network.graph import READ, Graph, Unit, stored_tensors
from s3d_fast.network.undisturbed import undisturbed
from s3d_fast.network.wrapping import inside
from s3d_fast.splitting.plan import Removal, SplitPlan
from s3d_fast.splitting.surgery import apply_splits

Scores = Mapping[str, Tensor]


def prune(
    model: nn.Module,
    plan: SplitPlan,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    also: Sequence[nn.Module] = (),
    check: Any = None,
) -> None:
    """Remove neurons of a model in place: their rows, followers and columns, and the optimizer's state of these.

    The smaller model computes what the model did if its consumers read zero from these neurons. Either everything
    changes, or nothing.

    Args:
        model: the model that the plan was made for, as for `apply_splits`.
        plan: from `select_removals`; it may hold nothing but removals.
        optimizer: as for `apply_splits`.
        also: other models that must shrink alike, such as an exponential moving average.
        check: an example input as for `trace`. The model is then evaluated with these neurons masked, and without them;
            if its outputs differ, nothing is removed.

    Raises:
        ValueError, TypeError: as for `apply_splits`; or the plan splits neurons or adds filters.
    """
    if plan.splits or plan.new:
        raise ValueError(f"plan must hold removals only, got {plan}; apply_splits carries out any plan")
    apply_splits(model, plan, 0.0, optimizer, also=also, check=check)


def filter_norms(model: nn.Module, graph: Graph, p: float = 1.0) -> dict[str, Tensor]:
    """Return the p-norm of the filter of every neuron, by unit: of all filters that make its channel, without biases.

    p = 1 is the measure of Li et al., "Pruning filters for efficient ConvNets" (2017).
    """
    require.positive("p", p)
    stored = stored_tensors(inside(model))

    def norms(unit: Unit) -> Tensor:
        total = torch.zeros(unit.width, dtype=torch.float64)
        for filters in unit.filters:
            rows = stored[filters.weight].detach().movedim(filters.row_axis, 0)
            rows = rows[torch.from_numpy(filters.rows).to(rows.device)].flatten(1).double()
            total += rows.abs().pow(p).sum(1).cpu()
        return total.pow(1 / p)

    return {name: norms(unit) for name, unit in graph.units.items()}


def norm_scales(model: nn.Module, graph: Graph) -> dict[str, Tensor]:
    """Return the absolute scale of every neuron in the BatchNorm behind its filter; units without one are left out.

    This is the measure of Liu et al., "Learning efficient convolutional networks through network slimming" (2017). A
    penalty on these scales acts during training there: see `scale_penalty`.
    """
    return {name: scale.detach().double().abs().cpu() for name, scale in _scales(model, graph).items()}


def scale_penalty(model: nn.Module, graph: Graph, prices: Mapping[str, float] | None = None) -> Tensor:
    """Return the sum of the absolute scales of BatchNorms behind units, differentiable: add a multiple to the loss.

    Args:
        model: the model.
        graph: its graph.
        prices: a factor for every unit, 1 by default. With the MACs of a channel this is the penalty of MorphNet
            (Gordon et al., 2018).
    """
    scales = _scales(model, graph)
    if not scales:
        raise ValueError("the model has no BatchNorm with scales behind a unit, so there is nothing to penalise")
    terms = [(1.0 if prices is None else prices[name]) * scale.abs().sum() for name, scale in scales.items()]
    return torch.stack(terms).sum()


def _scales(model: nn.Module, graph: Graph) -> dict[str, Tensor]:
    """Return the scales of every unit's BatchNorm, channel by channel."""
    stored, found = stored_tensors(inside(model)), {}
    for number, (name, unit) in enumerate(graph.units.items()):
        tensor = f"{unit.norm}.weight" if unit.norm else ""
        if tensor not in stored or 0 not in graph.tensors.get(tensor, {}):
            continue
        layout = graph.tensors[tensor][0]
        places = np.flatnonzero(layout.unit == number)
        if len(places) != unit.width:
            continue
        order = places[np.argsort(layout.channel[places], kind="stable")]
        found[name] = stored[tensor][torch.from_numpy(order).to(stored[tensor].device)]
    return found


def removal_losses(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    batches: Collection[Any],
    graph: Graph,
    *,
    world: World = ALONE,
) -> dict[str, Tensor]:
    """Return an estimate of how much the loss would rise without each neuron, (M,) float64 by unit.

    If consumers read zero from a neuron, their weights w that read it go to zero. To first order, the loss of a batch
    changes by -w.dL/dw. The estimate is the root mean square of that over the batches: Molchanov et al., "Importance
    estimation for neural network pruning" (2019). The model is evaluated in eval mode. With a `world`, the processes
    estimate together, each on batches of its own; all of them must call this.
    """
    if not len(batches):
        raise ValueError("batches must hold at least one batch, got none")
    squares = world.together(lambda: _squared_changes(model, loss_fn, batches, graph))
    (count,) = world.sum(len(batches))
    return {name: (world.sum_tensor(own) / count).sqrt() for name, own in squares.items()}


def _squared_changes(
    model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], batches: Collection[Any], graph: Graph
) -> dict[str, Tensor]:
    """Return the squares of w.dL/dw of every neuron, summed over the batches, by unit."""
    inner = inside(model)
    graph.check(inner)
    stored = stored_tensors(inner)
    read = [
        (name, axis, layout)
        for name, axes in graph.tensors.items()
        for axis, layout in axes.items()
        if bool((layout.role == READ).any()) and stored[name].requires_grad
    ]
    names = list(dict.fromkeys(name for name, _, _ in read))
    squares = {name: torch.zeros(unit.width, dtype=torch.float64) for name, unit in graph.units.items()}
    with undisturbed(inner), torch.enable_grad():
        for index, batch in enumerate(batches):
            loss = checked_loss(model, loss_fn, batch, index)
            found = torch.autograd.grad(loss, [stored[name] for name in names], allow_unused=True)
            gradients = dict(zip(names, found, strict=True))
            change = {name: torch.zeros_like(own) for name, own in squares.items()}
            for name, axis, layout in read:
                gradient = gradients[name]
                if gradient is None:
                    continue
                products = (stored[name].detach() * gradient).movedim(axis, 0).reshape(len(layout), -1)
                along = products.double().sum(1).cpu()
                for number, unit in enumerate(graph.units):
                    places = np.flatnonzero((layout.unit == number) & (layout.role == READ))
                    if len(places):
                        channels = torch.from_numpy(layout.channel[places])
                        change[unit].index_add_(0, channels, along[torch.from_numpy(places)])
            for name, own in change.items():
                squares[name] += own.square()
    return squares


def select_removals(
    scores: Scores,
    graph: Graph,
    *,
    fraction: float | None = None,
    budget: float | None = None,
    cost: str = "macs",
    per_cost: bool = False,
    keep: int | Mapping[str, int] = 2,
    round_to: int = 1,
    by_unit: bool = False,
) -> SplitPlan:
    """Choose which neurons to remove: those with the lowest scores, among all units or in each.

    Args:
        scores: how useful every neuron is, by unit; from `filter_norms`, `norm_scales` or a measure of your own.
        graph: from `trace`.
        fraction: the share of all scored neurons to remove, in (0, 1).
        budget: the cost that the network may have afterwards, measured by `cost`; neurons are removed until it holds.
        cost: "params" or "macs".
        per_cost: divide scores by the cost of a channel, so that costly channels go first.
        keep: the fewest neurons that must stay, in every unit or by unit. A depthwise layer of a single channel would
            count as an ordinary convolution from then on.
        round_to: the width of every unit stays a multiple of this, or unchanged.
        by_unit: compare scores within units only: with a fraction, every unit loses the same share.

    Raises:
        ValueError: bad arguments, or a budget that cannot be reached.
    """
    if (fraction is None) == (budget is None):
        raise ValueError(f"give either fraction or budget, got {fraction!r} and {budget!r}")
    require.choice("cost", cost, ("params", "macs"))
    require.count("round_to", round_to)
    least = _least(keep, graph)
    order = _order(scores, graph, cost if per_cost else None, by_unit)
    widths = graph.widths()
    if fraction is not None:
        require.number("fraction", fraction)
        if not 0 < fraction < 1:
            raise ValueError(f"fraction must lie in (0, 1), got {fraction!r}")
        wanted = round(fraction * len(order))
        enough: Callable[[int, Mapping[str, int]], bool] = lambda count, _: count >= wanted  # noqa: E731
    else:
        assert budget is not None
        require.number("budget", budget)
        enough = lambda _, now: getattr(costs.count(graph, now), cost) <= budget  # noqa: E731
    removed: list[Removal] = []
    now = dict(widths)
    for name, neuron, score in order:
        if enough(len(removed), now):
            break
        if now[name] > least.get(name, 1):
            removed.append(Removal(name, neuron, score))
            now[name] -= 1
    if budget is not None and not enough(len(removed), now):
        reached = getattr(costs.count(graph, now), cost)
        raise ValueError(f"budget: with at least {keep} neurons per unit the network still has {reached} {cost}")
    return SplitPlan(graph, (), removed=_rounded(removed, graph, round_to))


def _least(keep: int | Mapping[str, int], graph: Graph) -> dict[str, int]:
    given = keep if isinstance(keep, Mapping) else dict.fromkeys(graph.units, keep)
    for name, least in given.items():
        if name not in graph.units:
            raise ValueError(f"keep: {name!r} is not a unit of the graph; its units are {', '.join(graph.units)}")
        require.count("keep", least)
    return dict(given)


def _order(scores: Scores, graph: Graph, price: str | None, by_unit: bool) -> list[tuple[str, int, float]]:
    """Return all scored neurons, the least useful first; ties go to the unit that comes first in the graph."""
    marginal = costs.marginal(graph) if price is not None else {}
    found: list[tuple[float, int, str, int, float]] = []
    for place, (name, unit) in enumerate(graph.units.items()):
        if name not in scores:
            continue
        own = torch.as_tensor(scores[name])
        require.shape(f"scores of {name!r}", own, (unit.width,))
        require.finite(f"scores of {name!r}", own)
        values = own.double().tolist()
        factor = max(1.0, float(getattr(marginal[name], price))) if price is not None else 1.0
        rank = {neuron: position for position, neuron in enumerate(sorted(range(unit.width), key=values.__getitem__))}
        for neuron, value in enumerate(values):
            # Within units, the share of neurons that go before it takes the place of the score.
            key = rank[neuron] / unit.width if by_unit else value / factor
            found.append((key, place, name, neuron, value))
    foreign = [name for name in scores if name not in graph.units]
    if foreign:
        raise ValueError(f"scores: {foreign[0]!r} is not a unit of the graph; its units are {', '.join(graph.units)}")
    found.sort(key=lambda entry: (entry[0], entry[1], entry[3]))
    return [(name, neuron, score) for _, _, name, neuron, score in found]


def _rounded(removed: Sequence[Removal], graph: Graph, round_to: int) -> list[Removal]:
    """Return the removals without those, the most useful, that would leave a width which is not a multiple."""
    if round_to == 1:
        return list(removed)
    kept: list[Removal] = []
    for name, unit in graph.units.items():
        own = [gone for gone in removed if gone.unit == name]
        left = unit.width - len(own)
        fewer = -left % round_to
        kept += own[: max(0, len(own) - fewer)]
    return kept
