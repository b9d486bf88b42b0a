"""Selection: from splits, new filters and removals that are possible to a plan within a budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from s3d_fast.base import require
from s3d_fast.maths.schemes import COPIES, optimal_split
from s3d_fast.network import costs
from s3d_fast.network.graph import Graph, Unit
from s3d_fast.solvers import Cut, Spectrum
from s3d_fast.splitting.candidates import Candidates, check_others, check_spectra, split_candidates, with_others
from s3d_fast.splitting.forward_cost import ForwardCost
from s3d_fast.splitting.knapsack import Knapsack
from s3d_fast.splitting.plan import NeuronSplit, NewFilter, Removal, SplitPlan
from s3d_fast.splitting.proposals import Proposals

CostFunction = Callable[[Unit], float]


def select(
    spectra: Mapping[str, Spectrum],
    graph: Graph,
    *,
    m: int | str = 2,
    c: float = 1.3,
    top_k: int | None = None,
    fraction: float | None = None,
    budget: float | None = None,
    cost: str | ForwardCost | CostFunction = "filters",
    threshold: float = 0.0,
    caps: int | Mapping[str, int] | None = None,
    round_to: int = 1,
    relax: bool = False,
    theorem: str = "true",
    proposals: Mapping[str, Proposals] | None = None,
    losses: Mapping[str, Tensor] | None = None,
    eps: float | None = None,
    lengths: Mapping[str, Tensor] | None = None,
) -> SplitPlan:
    """Choose which neurons to split, and into how many copies; which filters to add; and which neurons to remove.

    Only neurons with a gain below -threshold are candidates. Without top_k, fraction and budget, all candidates are
    chosen, within caps and round_to. Ties go to the unit that comes first in the graph, then to the lower index.

    A split changes the loss by eps^2 / 2 times its gain. A new filter with the slope s changes it by -eps s as soon as
    its output weights have made a step of length eps, so that it counts as a gain of -2 s / eps. A removal that raises
    the loss by r counts as a gain of 2 r / eps^2.

    Args:
        spectra: from `extremal_eigenpairs`, by unit; may be empty.
        graph: from `trace`.
        m: the number of copies, 2, 3 or 4. With "knapsack", every neuron gets its own m in {1, 2, 3, 4}; this needs a
            budget.
        c: the bound on the sum of absolute weights, >= 1; 1 is S2D.
        top_k: split at most this many neurons, those with the largest gains; neurons of units at their cap are skipped.
        fraction: like top_k, as a share of all neurons that have spectra, in (0, 1].
        budget: the cost that the plan may add, measured by `cost`. An exact integer programme finds the largest sum of
            gains within it (in large networks, the largest that HiGHS finds in 20 s).
        cost: "filters", "params" or "macs"; the seconds of a forward pass, from `forward_cost`; or a function that
            returns the price of one more copy of a unit's filter. Parameters and MACs are exact: they count the
            producer's row, the followers and all consumers' columns at their real sizes, also where the plan splits
            neighbouring layers. Seconds follow their model in the same way.
        threshold: eta >= 0; a gain must be below -eta.
        caps: the most new filters per unit; one number for all units, or a mapping from unit to number.
        round_to: after the plan, the width of every unit is a multiple of this, or unchanged; the splits with the
            smallest gains are dropped to get there.
        relax: with a budget, solve the linear relaxation of the programme, as the paper does, and round down.
        theorem: as for `split_gain`.
        proposals: new filters to choose among, from `propose_filters`.
        losses: by how much the removal of each neuron would raise the loss, >= 0, by unit; needs a budget, which may be
            negative. A neuron is split or removed, not both, and two neurons of every unit stay.
        eps: the step that will be made; needed with proposals and losses.
        lengths: the lengths of filters, (M,) by unit, if steps are relative to them. Gains and offsets are then in
            units of them; the output weights of a new filter make a step relative to those of the channel it resembles.

    Raises:
        ValueError: bad arguments, or spectra that do not belong to the graph.
    """
    knapsack = m == "knapsack"
    if not knapsack:
        if isinstance(m, str):
            raise ValueError(f"m must be 2, 3, 4 or 'knapsack', got {m!r}")
        require.copy_count(m)
    require.weight_bound(c)
    require.number("threshold", threshold)
    if threshold < 0:
        raise ValueError(f"threshold must be a finite number >= 0, got {threshold!r}")
    require.count("round_to", round_to)
    check_spectra(spectra, graph)
    limits = [
        name for name, value in (("top_k", top_k), ("fraction", fraction), ("budget", budget)) if value is not None
    ]
    if len(limits) > 1:
        raise ValueError(f"give at most one of top_k, fraction and budget; got {', '.join(limits)}")
    if budget is None and (knapsack or relax or cost != "filters"):
        raise ValueError("m='knapsack', relax and cost need a budget, got none")

    proposals, losses = proposals or {}, losses or {}
    check_others(proposals, losses, graph, eps, budget, round_to)

    if lengths is not None:
        spectra = {name: _in_lengths(name, spectrum, lengths) for name, spectrum in spectra.items()}
    candidates = split_candidates(spectra, graph, COPIES if knapsack else (int(m),), c, threshold, theorem)
    if proposals or losses:
        assert eps is not None
        candidates = with_others(candidates, graph, proposals, losses, eps, threshold, lengths is not None)
    if budget is None:
        filters = sum(graph.units[name].width for name in {*spectra, *proposals})
        chosen = _best(candidates, _limit(filters, top_k, fraction), _caps(caps, graph))
    else:
        chosen = _within_budget(candidates, graph, budget, cost, _caps(caps, graph), relax)
    chosen = _rounded(candidates, chosen, graph, round_to)
    return _plan(graph, candidates, chosen, spectra, (c, theorem), proposals, losses)


def _in_lengths(name: str, spectrum: Spectrum, lengths: Mapping[str, Tensor]) -> Spectrum:
    """Return the spectrum of a unit whose parameters are measured in units of their filters' lengths."""
    if name not in lengths:
        raise ValueError(f"lengths: {name!r} has spectra but no lengths")
    own = lengths[name].to(spectrum.lambda_min)
    require.shape(f"lengths of {name!r}", own, tuple(spectrum.lambda_min.shape))
    return replace(
        spectrum,
        lambda_min=spectrum.lambda_min * own.square(),
        lambda_max=spectrum.lambda_max * own.square(),
        v_min=spectrum.v_min * own.unsqueeze(-1),
        v_max=spectrum.v_max * own.unsqueeze(-1),
    )


def cut_of(
    filters: int,
    *,
    m: int | str = 2,
    c: float = 1.3,
    top_k: int | None = None,
    fraction: float | None = None,
    budget: float | None = None,
    threshold: float = 0.0,
    caps: int | Mapping[str, int] | None = None,
    round_to: int = 1,
    theorem: str = "true",
    **_: object,
) -> Cut | None:
    """Return the cut that `select` makes with these options among so many filters, for `extremal_eigenpairs(until=)`.

    None if gains alone do not decide: with a budget, caps or rounding, any filter may still be chosen; or if the gains
    are the paper's.
    """
    if budget is not None or caps is not None or round_to != 1 or isinstance(m, str) or theorem != "true":
        return None
    limit = _limit(filters, top_k, fraction)
    if limit == 0:
        return None
    return Cut(filters if limit is None else limit, m, c, threshold)


def _limit(filters: int, top_k: int | None, fraction: float | None) -> int | None:
    if top_k is not None:
        require.count("top_k", top_k, at_least=0)
        return top_k
    if fraction is None:
        return None
    require.number("fraction", fraction)
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must lie in (0, 1], got {fraction!r}")
    return max(1, round(fraction * filters))


def _caps(caps: int | Mapping[str, int] | None, graph: Graph) -> dict[str, float]:
    """Return, for every unit, the number of filters that it may grow by."""
    given = caps if isinstance(caps, Mapping) else {} if caps is None else dict.fromkeys(graph.units, caps)
    for name, cap in given.items():
        if name not in graph.units:
            raise ValueError(f"caps: {name!r} is not a unit of the graph; its units are {', '.join(graph.units)}")
        require.count(f"caps of {name!r}" if isinstance(caps, Mapping) else "caps", cap, at_least=0)
    return {name: float(given.get(name, float("inf"))) for name in graph.units}


def _best(candidates: Candidates, limit: int | None, caps: Mapping[str, float]) -> np.ndarray:
    """Return the best candidates up to a limit; candidates that would grow a unit beyond its cap are skipped."""
    added = dict.fromkeys(candidates.units, 0)
    kept: list[int] = []
    for index in candidates.order():
        if limit is not None and len(kept) == limit:
            break
        name, more = candidates.units[candidates.unit[index]], int(candidates.copies[index]) - 1
        if added[name] + more <= caps[name]:
            added[name] += more
            kept.append(int(index))
    return np.array(kept, dtype=np.int64)


def _prices(
    graph: Graph, cost: str | ForwardCost | CostFunction, widths: Mapping[str, int] | None = None
) -> dict[str, float]:
    """Return, for every unit, the price of one more copy of a filter; the other units keep their widths."""
    if isinstance(cost, ForwardCost):
        return cost.marginal(graph, widths)
    if callable(cost):
        prices = {name: float(cost(unit)) for name, unit in graph.units.items()}
        bad = [name for name, price in prices.items() if not (0 < price < float("inf"))]
        if bad:
            raise ValueError(f"cost must be finite and > 0, got {prices[bad[0]]} for {bad[0]!r}")
        return prices
    require.choice("cost", cost, ("filters", "params", "macs"))
    if cost == "filters":
        return dict.fromkeys(graph.units, 1.0)
    return {name: float(getattr(price, cost)) for name, price in costs.marginal(graph, widths).items()}


def _cross_prices(
    graph: Graph, cost: str | ForwardCost | CostFunction, names: list[str]
) -> dict[tuple[int, int], float]:
    """Return, for pairs of units, the cost beyond the sum of their prices if both grow by one filter.

    A weight that reads and writes the channels of one unit, as in a residual stream, grows with the square of its
    width: the pair of the unit with itself holds half of the second difference of the cost.
    """
    if callable(cost) or cost == "filters":
        return {}
    place = {name: index for index, name in enumerate(names)}
    prices, found = _prices(graph, cost), {}
    pairs, squares = sorted(costs.neighbours(graph)), costs.squares(graph)
    for name, unit in graph.units.items():
        if name not in place:
            continue
        # Each pair counts once.
        others = [other for own, other in pairs if own == name and place.get(other, -1) > place[name]]
        if not others and name not in squares:
            continue
        more = _prices(graph, cost, {name: unit.width + 1})
        if name in squares:
            found[place[name], place[name]] = (more[name] - prices[name]) / 2
        found |= {(place[name], place[other]): more[other] - prices[other] for other in others}
    return found


def _within_budget(
    candidates: Candidates,
    graph: Graph,
    budget: float,
    cost: str | ForwardCost | CostFunction,
    caps: Mapping[str, float],
    relax: bool,
) -> np.ndarray:
    require.number("budget", budget)
    can_shrink = bool((candidates.copies == 0).any())
    if budget < 0 and not can_shrink:
        raise ValueError(
            "budget must be a finite number >= 0 where no neuron can be removed (two of every unit stay), got "
            f"{budget!r}"
        )
    names = candidates.units
    prices = _prices(graph, cost)
    if (budget == 0 and not can_shrink) or len(candidates.gain) == 0:
        return np.zeros(0, np.int64)
    _, neuron = np.unique(np.stack([candidates.unit, candidates.neuron]), axis=1, return_inverse=True)
    cross = _cross_prices(graph, cost, names)
    knapsack = Knapsack(
        gain=candidates.gain,
        neuron=neuron.reshape(-1),
        unit=candidates.unit,
        extra=(candidates.copies - 1).astype(np.float64),
        # With price p and square s, growth by G costs p G + s G (G - 1).
        price=np.array([prices[name] - cross.get((place, place), 0.0) for place, name in enumerate(names)]),
        cross=cross,
        cap=np.array([caps[name] for name in names]),
    )
    plans = [_keep_within(knapsack, knapsack.relaxed, budget)]
    if not relax:
        # If the search runs out of time, the relaxation may have found a better plan.
        plans.append(_keep_within(knapsack, knapsack.exact, budget))
    found = [plan for plan in plans if plan is not None and knapsack.cost(plan) <= budget]
    if not found:
        raise ValueError(f"budget: no removals reach {budget:.6g}; allow more")
    chosen = min(found, key=lambda plan: candidates.gain[plan].sum())
    first = _first_of_equals(candidates, chosen, knapsack, caps)
    # The cost is then summed in another order and may round to more than the budget.
    return first if knapsack.cost(first) <= budget else chosen


def _keep_within(knapsack: Knapsack, solve: Callable[[float], np.ndarray | None], budget: float) -> np.ndarray | None:
    """Return a choice whose true cost is within the budget; None if `solve` finds none.

    The relaxation leaves out the cross terms, and HiGHS may exceed a bound by its tolerance. If the true cost is too
    high, the problem is solved again with a budget that is smaller by the same factor.
    """
    available = float(budget)
    for attempt in range(60):
        chosen = solve(available)
        if chosen is None:
            return None
        total = knapsack.cost(chosen)
        if total <= budget:
            return chosen
        if budget > 0:
            available = min(available * budget / total, available * (1 - 1e-6))
        else:
            available -= max(total - budget, 1e-7 * 2.0**attempt * float(np.abs(knapsack.price).max()))
    return np.zeros(0, np.int64)


def _first_of_equals(
    candidates: Candidates, chosen: np.ndarray, knapsack: Knapsack, caps: Mapping[str, float]
) -> np.ndarray:
    """Return an equivalent choice where ties go to the first: neurons of equal price and gain are interchangeable."""
    options: dict[int, dict[int, int]] = {}
    for j, neuron in enumerate(knapsack.neuron):
        options.setdefault(int(neuron), {})[int(candidates.copies[j])] = j
    coupled = {unit for pair in knapsack.cross for unit in pair}
    coupled |= {u for u, name in enumerate(candidates.units) if caps[name] < float("inf")}
    classes: dict[object, list[int]] = {}
    for neuron, by_copies in options.items():
        unit = int(candidates.unit[next(iter(by_copies.values()))])
        key = (
            unit if unit in coupled else None,
            float(knapsack.price[unit]),
            tuple((m, float(candidates.gain[j])) for m, j in by_copies.items()),
        )
        classes.setdefault(key, []).append(neuron)
    taken = {int(knapsack.neuron[j]): int(candidates.copies[j]) for j in chosen}
    result = []
    for neurons in classes.values():
        copies = sorted((taken[neuron] for neuron in neurons if neuron in taken), reverse=True)
        result += [options[neuron][m] for neuron, m in zip(neurons, copies, strict=False)]
    return np.array(sorted(result), dtype=np.int64)


def _rounded(candidates: Candidates, chosen: np.ndarray, graph: Graph, round_to: int) -> np.ndarray:
    """Drop the smallest gains of every unit until its width is a multiple of `round_to`, or unchanged."""
    if round_to == 1:
        return chosen
    kept: list[int] = []
    for index, name in enumerate(candidates.units):
        mine = sorted((i for i in chosen if candidates.unit[i] == index), key=lambda i: candidates.gain[i])
        while mine:
            added = sum(int(candidates.copies[i]) - 1 for i in mine)
            if (graph.units[name].width + added) % round_to == 0:
                break
            mine.pop()
        kept += mine
    return np.array(kept, dtype=np.int64)


def _plan(
    graph: Graph,
    candidates: Candidates,
    chosen: np.ndarray,
    spectra: Mapping[str, Spectrum],
    bound: tuple[float, str],
    proposals: Mapping[str, Proposals],
    losses: Mapping[str, Tensor],
) -> SplitPlan:
    """Return the plan of the chosen candidates, in the order of the graph."""
    splits: list[NeuronSplit] = []
    new: list[NewFilter] = []
    removed: list[Removal] = []
    for index, name in enumerate(candidates.units):
        mine = chosen[candidates.unit[chosen] == index]
        neurons, copies = candidates.neuron[mine], candidates.copies[mine]
        width = graph.units[name].width
        gone = np.sort(neurons[copies == 0]).tolist()
        removed += [Removal(name, neuron, float(losses[name][neuron])) for neuron in gone]
        for m in COPIES:
            own = np.sort(neurons[(copies == m) & (neurons < width)])
            if len(own):
                splits += _splits(name, own, spectra[name], m, *bound)
        places = np.sort(neurons[neurons >= width] - width).tolist()
        stays = next((neuron for neuron in range(width) if neuron not in set(gone)), 0)
        own_new = [proposals[name][place] for place in places]
        # The channel that a new one resembles may be removed.
        new += [replace(one, like=stays) if one.like in gone else one for one in own_new]
    return SplitPlan(graph, splits, new, removed)


def _splits(name: str, neurons: np.ndarray, spectrum: Spectrum, m: int, c: float, theorem: str) -> list[NeuronSplit]:
    """Return the optimal splits of some neurons of a unit into m copies."""
    rows = torch.from_numpy(neurons).to(spectrum.lambda_min.device)
    split = optimal_split(
        spectrum.lambda_min[rows], spectrum.v_min[rows], spectrum.lambda_max[rows], spectrum.v_max[rows], m, c, theorem
    )
    return [
        NeuronSplit(name, neuron, split.weights[place], split.offsets[place], gain)
        for place, (neuron, gain) in enumerate(zip(neurons.tolist(), split.gain.tolist(), strict=True))
    ]
