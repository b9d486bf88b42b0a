"""Baselines for S3D: random splits, and networks of the same size trained from scratch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from s3d_fast.network.graph import Graph, Unit
from s3d_fast.solvers import Spectrum
from s3d_fast.splitting.plan import SplitPlan
from s3d_fast.splitting.selection import select


def random_plan(graph: Graph, units: Sequence[str], selection: Mapping[str, Any]) -> SplitPlan:
    """Return a plan that splits random neurons along random directions, each into two copies of weight 1/2.

    This is the widening of Net2Net (Chen et al., 2016) in the form that the paper compares with. Neurons are drawn
    from the global random state, as many as `selection` would choose by gain. The gains of the plan are NaN because
    they are never computed.

    Args:
        graph: from `trace`.
        units: names of the units whose neurons may be split.
        selection: options for `select`; m and c are not used.
    """
    spectra = {name: _random_spectrum(graph.units[name]) for name in units}
    plan = select(spectra, graph, **{**selection, "m": 2, "c": 1.0})
    return SplitPlan(graph, [replace(split, gain=math.nan) for split in plan.splits])


def _random_spectrum(unit: Unit) -> Spectrum:
    """Return a spectrum with random directions that ranks the filters of a unit at random."""
    v = torch.nn.functional.normalize(torch.randn(unit.width, unit.fan_in), dim=-1)
    zeros, counts = torch.zeros(unit.width), torch.zeros(unit.width, dtype=torch.int64)
    return Spectrum(
        lambda_min=-torch.rand(unit.width).clamp(min=1e-6),
        v_min=v,
        lambda_max=zeros,
        v_max=v,
        residual_min=zeros,
        residual_max=zeros,
        converged=torch.ones(unit.width, dtype=torch.bool),
        iterations=counts,
        matvecs=counts,
    )


def scaled_widths(
    widths: Sequence[int], wanted: int, size: Callable[[Sequence[int]], int], largest: float = 1000.0
) -> tuple[int, ...]:
    """Return the widths times the one factor that brings the network closest to the wanted size.

    Args:
        widths: the widths at factor 1.
        wanted: the size, for instance in parameters.
        size: returns the size of a network of given widths; must grow with them.
        largest: factors are searched from 1 / largest to largest.
    """
    low, high = 1 / largest, largest
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if size(_scaled(widths, middle)) < wanted else (low, middle)
    return min((_scaled(widths, factor) for factor in (low, high)), key=lambda scaled: abs(size(scaled) - wanted))


def _scaled(widths: Sequence[int], factor: float) -> tuple[int, ...]:
    return tuple(max(1, round(factor * width)) for width in widths)


def parameter_count(make: Callable[[], nn.Module]) -> int:
    """Return how many parameters the network made by `make` has, without allocating them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make().parameters())
