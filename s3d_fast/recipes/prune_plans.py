"""Plans of the methods that prune: which neurons a step removes, and what MorphNet adds at the end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor, nn

from s3d_fast.base.losses import batch_loss
from s3d_fast.network import costs
from s3d_fast.network.graph import Graph
from s3d_fast.network.wrapping import inside
from s3d_fast.splitting.new_filters import propose_filters
from s3d_fast.splitting.plan import SplitPlan
from s3d_fast.splitting.pruning import filter_norms, norm_scales, select_removals

Loss = Callable[[Any, Any], Tensor]

# MorphNet prunes to this share of its budget before it widens all layers.
MORPHNET_SHARE = 0.6
# Neurons of every unit that stay.
KEPT = 2


def target_macs(full: int, share: float, step: int, steps: int) -> float:
    """Return the MACs after a step, if every one of `steps` steps removes the same share until `share` is left."""
    return full * share ** ((step + 1) / steps)


def require_reachable(graph: Graph, units: Sequence[str], share: float, kept: float = 0.0) -> None:
    """Raise ValueError if not even two neurons of every unit, or a share of it, have so small a share of the MACs."""
    widths = graph.widths()
    least = {name: min(widths[name], max(KEPT, round(kept * widths[name]))) for name in units}
    full, reached = costs.count(graph).macs, costs.count(graph, least).macs
    if reached > share * full:
        raise ValueError(
            f"prune_to is too small: with the fewest neurons that stay in every layer, {KEPT} or more, the network "
            f"still has {reached} of {full} MACs, a share of {reached / full:.3g}; pruning would go to {share:.3g}"
        )


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
