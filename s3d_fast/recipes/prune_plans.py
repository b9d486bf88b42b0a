"""Plans of the methods that prune: which neurons a step removes, and what MorphNet adds at the end."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from s3d_fast.base.losses import batch_loss
from s3d_fast.network import costs
from s3d_fast.network.graph import Graph
from s3d_fast.network.undisturbed import undisturbed
from s3d_fast.network.wrapping import inside
from s3d_fast.splitting.new_filters import propose_filters
from s3d_fast.splitting.plan import SplitPlan
from s3d_fast.splitting.pruning import filter_norms, norm_scales, select_removals
from s3d_fast.splitting.surgery import mask

Loss = Callable[[Any, Any], Tensor]

# MorphNet prunes to this share of its budget before it widens all layers.
MORPHNET_SHARE = 0.6
# The search of AMC: networks per round, rounds, the share of the best that the next round is drawn around, the first
# spread of the shares that layers keep, and the least of them.
AMC_SAMPLES, AMC_ROUNDS, AMC_BEST, AMC_SPREAD, AMC_LEAST = 24, 5, 0.25, 0.25, 0.1


def target_macs(full: int, share: float, step: int, steps: int) -> float:
    """Return the MACs after a step, if every one of `steps` steps removes the same share until `share` is left."""
    return full * share ** ((step + 1) / steps)


def norm_plan(model: nn.Module, graph: Graph, units: Sequence[str], budget: float) -> SplitPlan:
    """Return the removal of the filters with the smallest L1 norms, layer by layer in equal shares.

    Norms of different layers do not compare; Li et al. (2017) prune every layer by a share, too.
    """
    scores = {name: own for name, own in filter_norms(model, graph).items() if name in units}
    return select_removals(scores, graph, budget=budget, by_unit=True)


def scale_plan(model: nn.Module, graph: Graph, units: Sequence[str], budget: float, per_cost: bool) -> SplitPlan:
    """Return the removal of the channels with the smallest scales, or the smallest per MAC, over all layers.

    Raises:
        ValueError: no unit has a BatchNorm.
    """
    scores = {name: own for name, own in norm_scales(model, graph).items() if name in units}
    if not scores:
        raise ValueError("no unit that may be pruned has a BatchNorm, so there are no scales; use --method l1")
    return select_removals(scores, graph, budget=budget, per_cost=per_cost)


def expansion_plan(
    model: nn.Module, graph: Graph, units: Sequence[str], budget: float, loss_fn: Loss, batches: Collection[Any]
) -> SplitPlan:
    """Return new filters, in random directions, that widen all layers by one factor until the budget is used."""
    widths = graph.widths()

    def at(factor: float) -> dict[str, int]:
        return widths | {name: max(widths[name], round(factor * widths[name])) for name in units}

    low, high = 1.0, 64.0
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if costs.count(graph, at(middle)).macs <= budget else (low, middle)
    more = {name: at(low)[name] - widths[name] for name in units}
    found = propose_filters(model, loss_fn, batches, graph, number=more, units=units)
    return SplitPlan(graph, (), new=[own[place] for own in found.values() for place in range(len(own))])


def searched_plan(
    model: nn.Module, graph: Graph, units: Sequence[str], budget: float, loss_fn: Loss, batches: Collection[Any]
) -> SplitPlan:
    """Return the removal of filters with small L1 norms, in shares by layer that a search finds.

    AMC (He et al., 2018) lets an agent choose the share that every layer keeps; the reward is the quality of the pruned
    network before any further training. Here the cross-entropy method takes the place of its actor and critic: it
    draws shares from a normal distribution, prunes to the budget, measures the loss with the neurons masked, and draws
    the next round around the best.
    """
    generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    scores = {name: own for name, own in filter_norms(model, graph).items() if name in units}
    names = list(scores)
    full = costs.count(graph).macs
    mean = torch.full((len(names),), max(AMC_LEAST, (budget / full) ** 0.5), dtype=torch.float64)
    spread = torch.full_like(mean, AMC_SPREAD)
    best: tuple[float, SplitPlan] | None = None
    for _ in range(AMC_ROUNDS):
        draws = mean + spread * torch.randn(AMC_SAMPLES, len(names), generator=generator, dtype=torch.float64)
        rewards = []
        for draw in draws:
            plan = _kept_shares(scores, graph, dict(zip(names, draw.tolist(), strict=True)), budget)
            rewards.append(_masked_loss(model, plan, loss_fn, batches))
            if best is None or rewards[-1] < best[0]:
                best = (rewards[-1], plan)
        order = torch.tensor(rewards).argsort()[: max(2, round(AMC_BEST * AMC_SAMPLES))]
        mean, spread = draws[order].mean(0), draws[order].std(0).clamp(min=0.02)
    assert best is not None
    return best[1]


def _kept_shares(scores: Mapping[str, Tensor], graph: Graph, shares: Mapping[str, float], budget: float) -> SplitPlan:
    """Return the removal of the smallest filters of every unit: first beyond its share, then until the budget holds."""
    ranked = {}
    for name, own in scores.items():
        width = len(own)
        share = min(1.0, max(AMC_LEAST, shares[name]))
        rank = torch.empty(width, dtype=torch.float64)
        rank[own.argsort(stable=True)] = torch.arange(width, dtype=torch.float64)
        # Negative for filters beyond the share; all others follow by their place in the layer.
        ranked[name] = (rank - (1 - share) * width) / width
    return select_removals(ranked, graph, budget=budget)


@torch.no_grad()
def _masked_loss(model: nn.Module, plan: SplitPlan, loss_fn: Loss, batches: Collection[Any]) -> float:
    trial = copy.deepcopy(inside(model))
    mask(trial, plan)
    with undisturbed(trial):
        return sum(float(batch_loss(trial, loss_fn, batch)) for batch in batches) / len(batches)


def penalised(loss_fn: Loss, graph: Graph, units: Sequence[str], factor: float, by_macs: bool) -> Loss:
    """Return a training loss with a penalty on the scales of BatchNorms behind units.

    Args:
        loss_fn: loss_fn(output, target).
        graph: of the network before it is pruned; the names of its BatchNorms stay.
        units: the units that may be pruned.
        factor: of the penalty.
        by_macs: weight scales by the MACs of a channel, relative to their mean, as MorphNet does.

    Raises:
        ValueError: no unit has a BatchNorm.
    """
    norms = {name: graph.units[name].norm for name in units if graph.units[name].norm is not None}
    if not norms:
        raise ValueError("no unit that may be pruned has a BatchNorm, so there are no scales; use --method l1")
    prices = {name: float(price.macs) for name, price in costs.marginal(graph).items()}
    mean = sum(prices[name] for name in norms) / len(norms)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        total = batch_loss(model, loss_fn, batch)
        inner = inside(model)
        for name, norm in norms.items():
            weight = inner.get_submodule(str(norm)).weight
            total = total + factor * (prices[name] / mean if by_macs else 1.0) * weight.abs().sum()  # type: ignore[operator]
        return total

    return loss
