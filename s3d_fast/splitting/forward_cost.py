"""The time of a forward pass as a cost: a model of it in the widths of units, fitted to measured times."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import lsq_linear
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from s3d_fast.base import require
from s3d_fast.network import costs
from s3d_fast.network.forward_time import time_in_turns
from s3d_fast.network.graph import Graph, stored_tensors
from s3d_fast.network.wrapping import inside
from s3d_fast.splitting.plan import NewFilter, SplitPlan
from s3d_fast.splitting.surgery import apply_splits

# Units are timed at twice their widths, and at least so many filters wider: a few filters drown in the noise.
LEAST_GROWTH = 16
# The least share of the time that wider layers take which counts as time of MACs, so that no filter is free.
LEAST_BY_MACS = 0.05


@dataclass(frozen=True)
class ForwardCost:
    """The seconds of a forward pass: fixed + per_mac MACs + sum over units of per_channel[unit] width[unit].

    Matrix products and convolutions take time by their MACs. What treats channels one by one, such as activations,
    BatchNorms and depthwise layers, takes time by channels. `select` takes this as a cost.

    Attributes:
        batch: the samples of the forward pass.
        fixed: seconds that no width changes.
        per_mac: seconds per multiply-accumulate of one sample's pass.
        per_channel: seconds per channel, by unit.
        widths: of the networks that were timed.
        seconds: what they took, each the least of its rounds.
    """

    batch: int
    fixed: float
    per_mac: float
    per_channel: Mapping[str, float]
    widths: Sequence[Mapping[str, int]] = ()
    seconds: Sequence[float] = ()

    def __post_init__(self) -> None:
        require.count("batch", self.batch)
        for name, value in (("fixed", self.fixed), ("per_mac", self.per_mac), *self.per_channel.items()):
            require.not_negative(name, value)
        if self.per_mac == 0:
            raise ValueError("per_mac must be > 0, or filters would cost nothing; got 0")

    def at(self, graph: Graph, widths: Mapping[str, int] | None = None) -> float:
        """Return the seconds at these widths of the units; by default at the traced widths."""
        now = {**graph.widths(), **(widths or {})}
        own = sum(seconds * now.get(unit, 0) for unit, seconds in self.per_channel.items())
        return self.fixed + self.per_mac * costs.count(graph, now).macs + own

    def marginal(self, graph: Graph, widths: Mapping[str, int] | None = None) -> dict[str, float]:
        """Return, for every unit, the seconds of one more filter; the other units keep their widths."""
        return {
            name: self.per_mac * price.macs + self.per_channel.get(name, 0.0)
            for name, price in costs.marginal(graph, widths).items()
        }

    def error(self, graph: Graph) -> float:
        """Return the largest deviation from what was measured, relative to it."""
        found = [abs(self.at(graph, at) / took - 1) for at, took in zip(self.widths, self.seconds, strict=True)]
        return max(found, default=0.0)

    def as_record(self) -> dict[str, Any]:
        """Return plain data, from which `of_record` makes the same cost again."""
        return asdict(self)

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> ForwardCost:
        """Return the cost that `as_record` has described.

        Raises:
            ValueError: the record holds something else.
        """
        try:
            return cls(**{name: record[name] for name in cls.__dataclass_fields__})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the record of a forward time must have {', '.join(cls.__dataclass_fields__)}") from error


def forward_cost(
    model: nn.Module,
    graph: Graph,
    example_input: Any,
    *,
    units: Sequence[str] | None = None,
    repeats: int = 9,
    warmup: int = 2,
) -> ForwardCost:
    """Measure how the time of a forward pass depends on the widths of units, on the device where the model is.

    Wider copies of the model take turns with it: one for every unit at twice its width, at least 16 filters wider, and
    two with all units wider. Every time is the least of the rounds, since noise only adds. A least squares fit with
    coefficients >= 0 gives the model. The widths need not be exact multiples of what the hardware likes: steps of time
    at such multiples are averaged out.

    Args:
        model: the network; it is copied.
        graph: from `trace`.
        example_input: as for `trace`, with as many samples as the forward pass is to have.
        units: names of units that may become wider; all by default.
        repeats: rounds that count.
        warmup: rounds before these.

    Raises:
        ValueError: bad arguments; or wider copies are not slower, so that time says nothing about widths.
    """
    require.count("repeats", repeats)
    require.count("warmup", warmup, at_least=0)
    inner = inside(model)
    graph.check(inner)
    names = list(graph.units) if units is None else list(units)
    for name in names:
        if name not in graph.units:
            raise ValueError(f"units: {name!r} is not a unit of the model, which has {', '.join(graph.units)}")
    if not names:
        raise ValueError("units must name at least one unit, got none; there is nothing to grow")
    batch = next((len(leaf) for leaf in tree_leaves(example_input) if isinstance(leaf, Tensor) and leaf.dim()), 1)
    sizes = _sizes(graph, names)
    networks = [(_widened(inner, graph, widths), example_input) for widths in sizes]
    seconds = [min(took.seconds) for took in time_in_turns(networks, repeats, warmup)]
    return fitted(graph, names, batch, sizes, seconds)


def _sizes(graph: Graph, names: Sequence[str]) -> list[dict[str, int]]:
    """Return the widths to time: as they are; one unit wider at a time; all wider by half as much, and by as much."""
    now = graph.widths()
    more = {name: max(now[name], LEAST_GROWTH) for name in names}
    alone = [now | {name: now[name] + more[name]} for name in names]
    together = [now | {name: now[name] + more[name] // part for name in names} for part in (2, 1)]
    return [now, *alone, *together]


def _widened(model: nn.Module, graph: Graph, widths: Mapping[str, int]) -> nn.Module:
    """Return a copy of the model with these widths, in eval mode; new filters are zeros."""
    wider, stored = copy.deepcopy(model).eval(), stored_tensors(model)
    new = [
        NewFilter(name, torch.zeros(unit.fan_in).to(stored[unit.weight]), 0, 0.0)
        for name, unit in graph.units.items()
        for _ in range(widths[name] - unit.width)
    ]
    # The graph was proved, or its user takes care of that.
    apply_splits(wider, SplitPlan(replace(graph, is_proved=True), (), new=new), 0.0)
    return wider


def fitted(
    graph: Graph, names: Sequence[str], batch: int, sizes: Sequence[Mapping[str, int]], seconds: Sequence[float]
) -> ForwardCost:
    """Return the cost that fits measured times best, relative to each; the last size has all units wider.

    Raises:
        ValueError: the network with all units wider is not slower than the first.
    """
    macs = np.array([costs.count(graph, widths).macs for widths in sizes], dtype=np.float64)
    took = np.array(seconds, dtype=np.float64)
    if not took[-1] > took[0] or not macs[-1] > macs[0]:
        raise ValueError(
            f"a forward pass of {batch} samples takes {1e3 * took[0]:.3g} ms, and {1e3 * took[-1]:.3g} ms with all "
            "units wider: time says nothing about widths here; take a larger batch, or count macs"
        )
    least = LEAST_BY_MACS * (took[-1] - took[0]) / (macs[-1] - macs[0])
    columns = np.stack([np.ones(len(sizes)), macs, *([widths[name] for widths in sizes] for name in names)], axis=1)
    scale = columns.max(0)
    low = np.zeros(len(scale))
    low[1] = least * scale[1]
    found = lsq_linear(columns / scale / took[:, None], np.ones(len(sizes)), (low, np.inf), method="bvls").x / scale
    # The solver may leave a bound by rounding.
    fixed, per_mac, *per_channel = np.maximum(found, low / scale).tolist()
    return ForwardCost(
        batch,
        fixed,
        per_mac,
        dict(zip(names, per_channel, strict=True)),
        [dict(widths) for widths in sizes],
        took.tolist(),
    )
