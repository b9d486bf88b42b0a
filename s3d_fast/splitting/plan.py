"""A plan: which neurons are split into which copies, which filters are new, which are removed; gains and cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from s3d_fast.base.tables import html_table, text_table
from s3d_fast.network import costs
from s3d_fast.network.graph import Graph, filter_lengths, stored_tensors

_NOTE = "The last row includes the extra cost of neighbouring units that both grow."


@dataclass(frozen=True)
class NeuronSplit:
    """A split of one neuron into m copies: copy k has parameters theta + eps * offsets[k] and weight weights[k]."""

    unit: str
    neuron: int
    weights: Tensor  # (m,), sum 1
    offsets: Tensor  # (m, D)
    gain: float  # sum_k w_k delta_k^T S delta_k

    @property
    def copies(self) -> int:
        """The number of copies, m."""
        return len(self.weights)

    def __repr__(self) -> str:
        weights = ", ".join(f"{weight:.3g}" for weight in self.weights.tolist())
        return f"NeuronSplit({self.unit!r}, neuron {self.neuron}, weights {weights}, gain {self.gain:.4g})"


@dataclass(frozen=True)
class NewFilter:
    """A new channel of a unit, which its consumers read with weight 0: the network computes the same function.

    Its filter is `theta`. What acts on a channel alone, such as a BatchNorm, is copied from the channel `like`.
    """

    unit: str
    theta: Tensor  # (D,)
    like: int
    slope: float  # |dL/dw| at its output weights w: a step of length t along them changes the loss by -t * slope
    # Entries of the new channel that differ from those of the channel `like`, by tensor: statistics of BatchNorms.
    statistics: Mapping[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"NewFilter({self.unit!r}, like neuron {self.like}, slope {self.slope:.4g})"


@dataclass(frozen=True)
class Removal:
    """The removal of one neuron, with everything that is read from it."""

    unit: str
    neuron: int
    score: float  # how useful the neuron is; which measure that is, the maker of the plan knows

    def __repr__(self) -> str:
        return f"Removal({self.unit!r}, neuron {self.neuron}, score {self.score:.4g})"


@dataclass(frozen=True)
class SplitPlan:
    """Changes of a model's neurons that `apply_splits` carries out: splits, new filters, and removals.

    A plan can be pickled, and applied elsewhere.
    """

    graph: Graph
    splits: Sequence[NeuronSplit]
    new: Sequence[NewFilter] = ()
    removed: Sequence[Removal] = ()

    def __len__(self) -> int:
        return len(self.splits) + len(self.new) + len(self.removed)

    @property
    def gain(self) -> float:
        """The gains of all splits; a step of size eps changes the loss by eps^2 / 2 times their sum, plus O(eps^3)."""
        return sum(split.gain for split in self.splits)

    def predicted_change(self, eps: float) -> float:
        """Return the predicted change of the loss by splits of size eps. New filters change it later, by training."""
        return eps * eps / 2 * self.gain

    @property
    def slope(self) -> float:
        """The sum of the slopes of all new filters."""
        return sum(one.slope for one in self.new)

    def relative_to(self, model: nn.Module) -> SplitPlan:
        """Return the plan with every split in units of its filter's length: a step eps moves a filter by eps |theta|.

        Capture with `relative=True` for such steps. The predicted change of the loss is that of the scaled splits.
        """
        stored = stored_tensors(model)
        lengths = {name: filter_lengths(self.graph.units[name], stored) for name in self.by_unit()}
        splits = []
        for split in self.splits:
            length = float(lengths[split.unit][split.neuron])
            splits.append(replace(split, offsets=split.offsets * length, gain=split.gain * length * length))
        return replace(self, splits=splits)

    def by_unit(self) -> dict[str, list[NeuronSplit]]:
        """Return the splits by unit, in the order of the graph; units without splits are left out."""
        groups: dict[str, list[NeuronSplit]] = {name: [] for name in self.graph.units}
        for split in self.splits:
            groups.setdefault(split.unit, []).append(split)
        return {name: group for name, group in groups.items() if group}

    def widths(self) -> dict[str, int]:
        """Return the width of every unit after the plan."""
        widths = self.graph.widths()
        for split in self.splits:
            widths[split.unit] += split.copies - 1
        for one in self.new:
            widths[one.unit] += 1
        for gone in self.removed:
            widths[gone.unit] -= 1
        return widths

    def added(self) -> costs.Cost:
        """Return the parameters and MACs that the plan adds; layers that grow on both sides are counted exactly."""
        return costs.count(self.graph, self.widths()) - costs.count(self.graph)

    def __repr__(self) -> str:
        before, after = sum(self.graph.widths().values()), sum(self.widths().values())
        kinds = (("splits", self.splits), ("new filters", self.new), ("removals", self.removed))
        what = ", ".join(f"{len(own)} {name}" for name, own in kinds if own) or "0 splits"
        where = f"{what} in {len(self.changed())} units"
        return f"SplitPlan({where}, {before} -> {after} channels, loss change / (eps^2/2) = {self.gain:.4g})"

    def changed(self) -> list[str]:
        """Return the units that the plan changes, in the order of the graph."""
        found = {one.unit for own in (self.splits, self.new, self.removed) for one in own}
        return [name for name in self.graph.units if name in found]

    def __getstate__(self) -> dict[str, Any]:
        # A traced graph holds the model and its code, which cannot be pickled and which surgery does not need.
        return {**vars(self), "graph": self.graph.portable()}

    def __str__(self) -> str:
        return f"{text_table(self._rows())}\n{_NOTE}"

    def _repr_html_(self) -> str:
        return html_table(self._rows(), _NOTE)

    def _rows(self) -> list[list[str]]:
        before, after = self.graph.widths(), self.widths()
        rows = [["unit", "width", "after", "loss change / (eps^2/2)", "params", "MACs"]]
        splits = self.by_unit()

        def add(name: str, width: int, grown: int, gain: float, cost: costs.Cost) -> None:
            rows.append([name, str(width), str(grown), f"{gain:.4g}", f"{cost.params:+}", f"{cost.macs:+}"])

        for name in self.changed():
            alone = costs.count(self.graph, {**before, name: after[name]}) - costs.count(self.graph)
            add(name, before[name], after[name], sum(split.gain for split in splits.get(name, ())), alone)
        add("all", sum(before.values()), sum(after.values()), self.gain, self.added())
        return rows
