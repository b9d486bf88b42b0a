"""How much a step grows: a share or a number of the filters, or what a bound on the network's cost leaves."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from s3d_fast.base.batches import moved
from s3d_fast.network import costs
from s3d_fast.network.graph import Graph
from s3d_fast.recipes.job import Job
from s3d_fast.recipes.recipe import Recipe
from s3d_fast.records.run_folder import RunFolder
from s3d_fast.splitting.forward_cost import ForwardCost, forward_cost

# Forward passes are timed with so many samples, as in the paper.
TIMED_BATCH = 16


def amount(recipe: Recipe, phase: int, graph: Graph, times: ForwardCost | None, may_shrink: bool) -> dict[str, Any]:
    """Return the options of `select` that say how much the step after a phase may add.

    Args:
        recipe: says how.
        phase: the phase before the step.
        graph: of the network as it is.
        times: its forward time, if that is the cost.
        may_shrink: whether a network that costs more than it may must shrink; else it stays as it is.
    """
    if recipe.fraction is not None:
        return {"fraction": recipe.fraction}
    if recipe.top_k is not None:
        return {"top_k": recipe.top_k}
    name = "params" if recipe.params is not None else recipe.cost
    cost: str | ForwardCost = name if times is None else times
    now = float(getattr(costs.count(graph), name)) if times is None else times.at(graph)
    left = _allowed(recipe, phase, now) - now
    budget = left if may_shrink else max(0.0, left)
    return {"budget": budget, "cost": cost, **({"relax": True} if recipe.relax else {})}


def _allowed(recipe: Recipe, phase: int, now: float) -> float:
    """Return what the network may cost after the step; beyond the last bound, what it costs now."""
    if recipe.growth is not None:
        return recipe.growth * now
    if recipe.milliseconds is not None:
        return recipe.milliseconds[phase] / 1e3 if phase < len(recipe.milliseconds) else now
    budgets = recipe.macs if recipe.macs is not None else recipe.params
    assert budgets is not None
    return float(budgets[phase]) if phase < len(budgets) else now


class Times:
    """The forward times of a run's networks, measured once before every split and kept in its folder."""

    def __init__(self, job: Job, units: list[str]) -> None:
        self.job, self.units = job, units
        self.folder = None if job.out is None else RunFolder(job.out)
        self.found: dict[int, ForwardCost] = {}

    def before_split(self, phase: int, model: nn.Module, graph: Graph) -> ForwardCost:
        """Return the forward time of the network of a phase: from the folder, or measured by the first process.

        Raises:
            ValueError: time says nothing about widths, or the folder holds something else.
        """
        if phase not in self.found:
            record = self.job.world.from_first(lambda: self._record(phase, model, graph))
            self.found[phase] = ForwardCost.of_record(record)
        return self.found[phase]

    def _record(self, phase: int, model: nn.Module, graph: Graph) -> dict[str, Any]:
        stored = {} if self.folder is None else self.folder.read_times()
        if phase in stored and stored[phase].get("widths", [None])[0] == graph.widths():
            return stored[phase]
        x = torch.randn(TIMED_BATCH, *self.job.dataset.input_shape, generator=torch.Generator().manual_seed(0))
        on_device = moved(x, self.job.torch_device, self.job.recipe.channels_last)
        record = forward_cost(model, graph, on_device, units=self.units).as_record()
        if self.folder is not None:
            self.folder.write_times(phase, record)
        return record
