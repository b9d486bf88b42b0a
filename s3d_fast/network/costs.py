"""The cost of a model at given widths of its units: parameters, and multiply-accumulates per sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from s3d_fast.network.graph import Graph


@dataclass(frozen=True)
class Cost:
    """Parameters, and multiply-accumulates (MACs) of the matrix products and convolutions for one sample."""

    params: int
    macs: int

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.params - other.params, self.macs - other.macs)

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.params + other.params, self.macs + other.macs)


def count(graph: Graph, widths: Mapping[str, int] | None = None) -> Cost:
    """Return the cost of the model at the given widths of the units (by default the traced widths)."""
    now = {**graph.widths(), **(widths or {})}
    params = sum(parameter.at(now) for parameter in graph.parameters)
    return Cost(round(params), round(sum(product.at(now) for product in graph.products)))


def marginal(graph: Graph, widths: Mapping[str, int] | None = None) -> dict[str, Cost]:
    """Return, for every unit, the cost of one more copy of a filter; the other units keep their widths.

    The copy needs a row, a channel in every follower, and a column in every consumer.
    """
    now = {**graph.widths(), **(widths or {})}
    params = dict.fromkeys(graph.units, 0.0)
    macs = dict.fromkeys(graph.units, 0.0)
    for totals, terms in ((params, graph.parameters), (macs, graph.products)):
        for term in terms:
            units = term.units()
            before = term.at(now) if units else 0.0
            for unit in units:
                totals[unit] += term.at({**now, unit: now[unit] + 1}) - before
    return {name: Cost(round(params[name]), round(macs[name])) for name in graph.units}


def squares(graph: Graph) -> set[str]:
    """Return the units whose own cost is not linear in their width: a tensor or product has their channels twice."""
    found: set[str] = set()
    for term in (*graph.parameters, *graph.products):
        counts = [unit for size in term.sizes for unit in size.per_channel]
        found |= {unit for unit in counts if counts.count(unit) > 1}
    return found


def neighbours(graph: Graph) -> set[tuple[str, str]]:
    """Return the pairs of units whose costs depend on each other: some tensor or product has channels of both."""
    return {
        (a, b) for term in (*graph.parameters, *graph.products) for a in term.units() for b in term.units() if a != b
    }
