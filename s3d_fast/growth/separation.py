"""How far apart the copies of split neurons are, and how long they take to part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from s3d_fast.network.graph import Graph, filter_values, stored_tensors
from s3d_fast.network.wrapping import inside
from s3d_fast.splitting.plan import NeuronSplit, SplitPlan
from s3d_fast.splitting.unit_changes import unit_changes

# The copies of every split neuron of a unit after the split: the place of the first one, and how many there are.
Groups = Mapping[str, Sequence[Sequence[int]]]


def copies_after(plan: SplitPlan) -> dict[str, list[list[int]]]:
    """Return where the copies of every split neuron stand after the plan, by unit."""
    splits, changes = plan.by_unit(), unit_changes(plan)
    return {
        name: [[int(changes[name].copies.start[split.neuron]), split.copies] for split in own]
        for name, own in splits.items()
    }


def distances(model: nn.Module, graph: Graph, groups: Groups) -> Tensor:
    """Return the largest distance between copies of each neuron, relative to their length, in float64.

    Behind a BatchNorm only the direction of a filter counts: the distance is then that of the directions.
    """
    stored, found = stored_tensors(inside(model)), []
    for name, own in groups.items():
        unit = graph.units.get(name)
        if unit is None:
            continue
        theta = filter_values(unit, stored)
        lengths = theta.norm(dim=1)
        if unit.norm is not None:
            theta, lengths = nn.functional.normalize(theta, dim=1), torch.ones_like(lengths)
        for first, count in own:
            if first + count > unit.width:
                continue
            copies = theta[first : first + count]
            scale = float(lengths[first : first + count].mean())
            found.append(float(torch.cdist(copies, copies).max()) / scale if scale > 0 else 0.0)
    return torch.tensor(found, dtype=torch.float64)


def parting_rate(split: NeuronSplit, rate: float, momentum: float) -> float:
    """Return r, if the distance of the copies of a split neuron grows like exp(r t) under gradient descent.

    A copy with weight w and offset delta along an eigenvector of S with eigenvalue lambda moves by
    -rate / (1 - momentum) w lambda delta in a step, so that r = rate / (1 - momentum) max_k(-w_k lambda). The gain
    tells lambda: it is lambda sum_k w_k |delta_k|^2. Where offsets have two directions, r is an estimate from the
    largest |w| and the mean of |delta^T S delta|.
    """
    offsets, weights = split.offsets.double().cpu(), split.weights.double().cpu()
    moving = offsets.norm(dim=1) > 0
    squares = offsets.square().sum(1)
    scale = rate / (1 - momentum)
    if not bool(moving.any()) or math.isnan(split.gain):
        return math.nan
    if int(torch.linalg.matrix_rank(offsets[moving], rtol=1e-4)) == 1:
        eigenvalue = split.gain / float((weights * squares).sum())
        return scale * float((-weights[moving] * eigenvalue).max())
    return scale * float(weights[moving].abs().max()) * abs(split.gain) / float((weights.abs() * squares).sum())


def steps_to_part(plan: SplitPlan, eps: float, lengths: Mapping[str, Tensor], rate: float, momentum: float) -> float:
    """Return after how many steps of gradient descent copies are as far apart as their filter is long; the median.

    Args:
        plan: the splits.
        eps: the size of the step.
        lengths: |theta| of every channel, by unit.
        rate: the learning rate.
        momentum: of the optimizer.
    """
    times = []
    for split in plan.splits:
        length = float(lengths[split.unit][split.neuron])
        growth = parting_rate(split, rate, momentum)
        if length == 0 or math.isnan(growth):
            continue
        offsets = split.offsets.double()
        apart = eps * float(torch.cdist(offsets, offsets).max()) / length
        times.append(0.0 if apart >= 1 else -math.log(apart) / growth if growth > 0 and apart > 0 else math.inf)
    return float(torch.tensor(times, dtype=torch.float64).median()) if times else math.nan
