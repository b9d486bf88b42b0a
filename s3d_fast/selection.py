"""Selection: from the spectra of all units to a split plan within a budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array

from s3d_fast import checks, costs
from s3d_fast.graph import Graph, Unit
from s3d_fast.plan import NeuronSplit, SplitPlan
from s3d_fast.schemes import COPIES, optimal_split, split_gain
from s3d_fast.solvers import Spectrum

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
    cost: str | CostFunction = "filters",
    threshold: float = 0.0,
    caps: int | Mapping[str, int] | None = None,
    round_to: int = 1,
    relax: bool = False,
) -> SplitPlan:
    """Choose which neurons to split, and into how many copies.

    A neuron whose gain is not below -threshold is never chosen. Without any of top_k, fraction and budget all others
    are. Ties go to the unit that comes first in the graph, then to the lower index.

    Args:
        spectra: from `extremal_eigenpairs`, by unit.
        graph: from `trace`.
        m: copies, 2, 3 or 4; or "knapsack": each neuron gets its own m in {1, 2, 3, 4}, which needs a budget.
        c: the bound on the sum of absolute weights, >= 1; 1 is S2D.
        top_k: split so many neurons at most: those with the largest gains.
        fraction: the same, as a share of all neurons of the graph's units, in (0, 1].
        budget: the cost that may be added at most, in the unit of `cost`. Neurons are chosen for the largest sum of
            gains within it, by an exact integer programme.
        cost: "filters", "params" or "macs", or a function that gives the price of one more copy of a unit's filter.
            Parameters and MACs are true: producer row, followers and all consumers' columns at their real sizes, and
            splits of neighbouring layers in one plan.
        threshold: eta >= 0; a gain must be below -eta.
        caps: new filters per unit at most; a number for all units or a mapping.
        round_to: the width of every unit after the plan is a multiple of this, or as it was; the splits that gain least
            are given up for it.
        relax: solve the linear relaxation of the programme, as the paper does, and round down.

    Raises:
        ValueError: bad arguments, or spectra that do not belong to the graph.
    """
    knapsack = m == "knapsack"
    if not knapsack:
        if isinstance(m, str):
            raise ValueError(f"m must be 2, 3, 4 or 'knapsack', got {m!r}")
        checks.is_copy_count(m)
    checks.is_weight_bound(c)
    if not (isinstance(threshold, (int, float)) and 0 <= threshold < float("inf")):
        raise ValueError(f"threshold must be a finite number >= 0, got {threshold!r}")
    checks.is_count("round_to", round_to)
    _check_spectra(spectra, graph)
    limits = [
        name for name, value in (("top_k", top_k), ("fraction", fraction), ("budget", budget)) if value is not None
    ]
    if len(limits) > 1:
        raise ValueError(f"give at most one of top_k, fraction and budget; got {', '.join(limits)}")
    if knapsack and budget is None:
        raise ValueError("m='knapsack' needs a budget, got none")

    candidates = _candidates(spectra, graph, COPIES if knapsack else (int(m),), c, threshold)
    if budget is None:
        chosen = candidates.order()[: _limit(graph, top_k, fraction)]
        chosen = _within_caps(candidates, chosen, caps)
    else:
        chosen = _within_budget(candidates, graph, budget, cost, caps, relax)
    chosen = _rounded(candidates, chosen, graph, round_to)
    return SplitPlan(graph, _splits(candidates, chosen, spectra, c))


@dataclass
class _Candidates:
    """Every (neuron, number of copies) that gains enough, in the order of the graph."""

    units: list[str]
    unit: np.ndarray  # (n,), index into units
    neuron: np.ndarray  # (n,)
    copies: np.ndarray  # (n,)
    gain: np.ndarray  # (n,), negative

    def order(self) -> np.ndarray:
        """Return the candidates by gain, largest decrease first; a stable sort, so that ties keep their order."""
        return np.argsort(self.gain, kind="stable")

    def growth(self, chosen: np.ndarray) -> dict[str, int]:
        """Return the new filters of every unit if these candidates are chosen."""
        added = np.zeros(len(self.units), dtype=np.int64)
        np.add.at(added, self.unit[chosen], self.copies[chosen] - 1)
        return dict(zip(self.units, added.tolist(), strict=True))


def _check_spectra(spectra: Mapping[str, Spectrum], graph: Graph) -> None:
    for name, spectrum in spectra.items():
        unit = graph.units.get(name)
        if unit is None:
            raise ValueError(f"spectra: {name!r} is not a unit of the graph, which has {', '.join(graph.units)}")
        if tuple(spectrum.v_min.shape) != (unit.width, unit.fan_in):
            raise ValueError(
                f"spectra: {name!r} must have {unit.width} filters of {unit.fan_in} parameters, got "
                f"{tuple(spectrum.v_min.shape)}; were they computed before the model changed?"
            )


def _candidates(
    spectra: Mapping[str, Spectrum], graph: Graph, copies: tuple[int, ...], c: float, threshold: float
) -> _Candidates:
    names = [name for name in graph.units if name in spectra]
    columns: list[list[np.ndarray]] = []
    for index, name in enumerate(names):
        spectrum = spectra[name]
        best = np.zeros(len(spectrum))
        for m in copies:
            gain = split_gain(spectrum.lambda_min, spectrum.lambda_max, m, c).double().cpu().numpy()
            # More copies that gain nothing more are never worth their price.
            useful = np.flatnonzero((gain < -threshold) & (gain < best))
            best = np.minimum(best, gain)
            columns.append([np.full(len(useful), index), useful, np.full(len(useful), m), gain[useful]])
    if not columns:
        columns = [[np.zeros(0, np.int64)] * 3 + [np.zeros(0)]]
    unit, neuron, m_column, gain_column = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    return _Candidates(names, unit, neuron, m_column, gain_column)


def _limit(graph: Graph, top_k: int | None, fraction: float | None) -> int | None:
    if top_k is not None:
        checks.is_count("top_k", top_k, at_least=0)
        return top_k
    if fraction is None:
        return None
    if not (isinstance(fraction, (int, float)) and 0 < fraction <= 1):
        raise ValueError(f"fraction must lie in (0, 1], got {fraction!r}")
    return round(fraction * sum(graph.widths().values()))


def _cap(caps: int | Mapping[str, int] | None, name: str) -> float:
    if caps is None:
        return float("inf")
    return caps.get(name, float("inf")) if isinstance(caps, Mapping) else caps


def _within_caps(candidates: _Candidates, chosen: np.ndarray, caps: int | Mapping[str, int] | None) -> np.ndarray:
    """Drop, best first, what would grow a unit beyond its cap."""
    if caps is None:
        return chosen
    added = dict.fromkeys(candidates.units, 0)
    kept = []
    for index in chosen:
        name, more = candidates.units[candidates.unit[index]], int(candidates.copies[index]) - 1
        if added[name] + more <= _cap(caps, name):
            added[name] += more
            kept.append(index)
    return np.array(kept, dtype=np.int64)


def _prices(graph: Graph, cost: str | CostFunction) -> dict[str, float]:
    """Return the price of one more copy of a filter, for every unit."""
    if callable(cost):
        prices = {name: float(cost(unit)) for name, unit in graph.units.items()}
        bad = [name for name, price in prices.items() if not (0 < price < float("inf"))]
        if bad:
            raise ValueError(f"cost must be finite and > 0, got {prices[bad[0]]} for {bad[0]!r}")
        return prices
    checks.is_choice("cost", cost, ("filters", "params", "macs"))
    if cost == "filters":
        return dict.fromkeys(graph.units, 1.0)
    return {name: float(getattr(price, cost)) for name, price in costs.marginal(graph).items()}


def _total(graph: Graph, cost: str | CostFunction, growth: Mapping[str, int], prices: Mapping[str, float]) -> float:
    """Return what a growth of the units' widths really costs: neighbours that both grow multiply."""
    if callable(cost) or cost == "filters":
        return sum(prices[name] * more for name, more in growth.items())
    widths = graph.widths()
    after = {name: width + growth.get(name, 0) for name, width in widths.items()}
    return float(getattr(costs.count(graph, after) - costs.count(graph), cost))


def _within_budget(
    candidates: _Candidates,
    graph: Graph,
    budget: float,
    cost: str | CostFunction,
    caps: int | Mapping[str, int] | None,
    relax: bool,
) -> np.ndarray:
    if not (isinstance(budget, (int, float)) and 0 <= budget < float("inf")):
        raise ValueError(f"budget must be a finite number >= 0, got {budget!r}")
    prices = _prices(graph, cost)
    available = float(budget)
    # The programme is linear: it knows the price of a copy with all other layers as they are. Where neighbours grow
    # together the true cost is higher, and the programme is solved again with as much less to spend.
    for _ in range(50):
        chosen = _programme(candidates, prices, available, caps, relax)
        total = _total(graph, cost, candidates.growth(chosen), prices)
        if total <= budget:
            return chosen
        spent = sum(prices[name] * more for name, more in candidates.growth(chosen).items())
        available = min(available * budget / total, np.nextafter(spent, 0.0))
    raise RuntimeError(f"no plan within the budget of {budget} {cost} was found")


def _programme(
    candidates: _Candidates,
    prices: Mapping[str, float],
    budget: float,
    caps: int | Mapping[str, int] | None,
    relax: bool,
) -> np.ndarray:
    """Return the candidates with the largest sum of gains within the budget: at most one per neuron."""
    n = len(candidates.gain)
    if n == 0 or budget <= 0:
        return np.zeros(0, np.int64)
    price = np.array([prices[name] for name in candidates.units])[candidates.unit]
    extra = (candidates.copies - 1).astype(np.float64)
    _, group = np.unique(np.stack([candidates.unit, candidates.neuron]), axis=1, return_inverse=True)
    group = group.reshape(-1)
    columns = np.arange(n)
    rows = [group, np.full(n, group.max() + 1)]
    values = [np.ones(n), price * extra]
    upper = [np.ones(group.max() + 1), np.array([budget])]
    capped = [index for index, name in enumerate(candidates.units) if _cap(caps, name) < float("inf")]
    for number, index in enumerate(capped):
        rows.append(np.full(n, group.max() + 2 + number))
        values.append(extra * (candidates.unit == index))
        upper.append(np.array([_cap(caps, candidates.units[index])]))
    matrix = csr_array(
        (np.concatenate(values), (np.concatenate(rows), np.tile(columns, len(rows)))),
        shape=(group.max() + 2 + len(capped), n),
    )
    bound = np.concatenate(upper)
    # Scaled so that the solver's absolute tolerances are relative to the largest gain.
    objective = candidates.gain / -candidates.gain.min()
    if relax:
        result = linprog(objective, A_ub=matrix, b_ub=bound, bounds=(0, 1), method="highs")
    else:
        result = milp(
            objective,
            constraints=LinearConstraint(matrix, ub=bound),
            integrality=np.ones(n),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": 0.0},
        )
    if result.x is None:
        raise RuntimeError(f"the selection programme was not solved: {result.message}")
    chosen = np.flatnonzero(result.x > (1 - 1e-6 if relax else 0.5))
    if len(np.unique(group[chosen])) < len(chosen):
        raise RuntimeError("the selection programme chose a neuron twice; the solver's result is not feasible")
    return chosen


def _rounded(candidates: _Candidates, chosen: np.ndarray, graph: Graph, round_to: int) -> np.ndarray:
    """Give up the least gains of every unit until its width is a multiple of `round_to`, or as it was."""
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


def _splits(
    candidates: _Candidates, chosen: np.ndarray, spectra: Mapping[str, Spectrum], c: float
) -> list[NeuronSplit]:
    """Return the optimal split of every chosen candidate, in the order of the graph."""
    result = []
    for index, name in enumerate(candidates.units):
        for m in COPIES:
            mine = chosen[(candidates.unit[chosen] == index) & (candidates.copies[chosen] == m)]
            if len(mine) == 0:
                continue
            neurons = torch.from_numpy(np.sort(candidates.neuron[mine]))
            spectrum = spectra[name]
            rows = neurons.to(spectrum.lambda_min.device)
            split = optimal_split(
                spectrum.lambda_min[rows], spectrum.v_min[rows], spectrum.lambda_max[rows], spectrum.v_max[rows], m, c
            )
            gains = split.gain.tolist()
            for position, neuron in enumerate(neurons.tolist()):
                result.append(
                    NeuronSplit(name, neuron, split.weights[position], split.offsets[position], gains[position])
                )
    return result
