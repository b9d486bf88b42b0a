"""Candidates of a growth step: splits, new filters and removals, with gains on one scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from s3d_fast.base import require
from s3d_fast.maths.schemes import split_gain
from s3d_fast.network.graph import Graph
from s3d_fast.solvers import Spectrum
from s3d_fast.splitting.proposals import Proposals


@dataclass
class Candidates:
    """All candidates, pairs (neuron, number of copies) that gain enough, in the order of the graph.

    A removal has 0 copies and a positive gain. The neurons beyond a unit's width are its proposals; they have 2 copies,
    the neuron that is there and the new one.
    """

    units: list[str]
    unit: np.ndarray  # (n,), index into units
    neuron: np.ndarray  # (n,)
    copies: np.ndarray  # (n,)
    gain: np.ndarray  # (n,)

    def order(self) -> np.ndarray:
        """Return the candidates by gain, largest decrease first; the sort is stable, so ties keep their order."""
        return np.argsort(self.gain, kind="stable")


def check_spectra(spectra: Mapping[str, Spectrum], graph: Graph) -> None:
    """Raise ValueError if spectra do not belong to the graph."""
    for name, spectrum in spectra.items():
        unit = graph.units.get(name)
        if unit is None:
            raise ValueError(f"spectra: {name!r} is not a unit of the graph; its units are {', '.join(graph.units)}")
        for vectors, values in ((spectrum.v_min, spectrum.lambda_min), (spectrum.v_max, spectrum.lambda_max)):
            if tuple(vectors.shape) != (unit.width, unit.fan_in) or tuple(values.shape) != (unit.width,):
                raise ValueError(
                    f"spectra: {name!r} must have {unit.width} filters of {unit.fan_in} parameters, got "
                    f"{tuple(vectors.shape)} and {tuple(values.shape)}; were they computed before the model changed?"
                )


def split_candidates(
    spectra: Mapping[str, Spectrum], graph: Graph, copies: tuple[int, ...], c: float, threshold: float, theorem: str
) -> Candidates:
    """Return all splits that gain more than a threshold, into each of some numbers of copies."""
    names = [name for name in graph.units if name in spectra]
    sizes = [len(spectra[name].lambda_min) for name in names]
    unit = np.repeat(np.arange(len(names)), sizes)
    neuron = np.concatenate([np.arange(size) for size in sizes]) if names else np.zeros(0, np.int64)
    best = np.zeros(len(unit))
    columns: list[list[np.ndarray]] = []
    for m in copies:
        gain = _gains([spectra[name] for name in names], m, c, theorem)
        # More copies without more gain are never worth their price.
        useful = np.flatnonzero((gain < -threshold) & (gain < best))
        best = np.minimum(best, gain)
        columns.append([unit[useful], neuron[useful], np.full(len(useful), m), gain[useful]])
    found = [np.concatenate(parts) for parts in zip(*columns, strict=True)]
    # Sort by unit, then by copies, then by neuron: ties keep this order.
    order = np.lexsort((found[1], found[2], found[0]))
    return Candidates(names, *(column[order] for column in found))


def check_others(
    proposals: Mapping[str, Proposals],
    losses: Mapping[str, Tensor],
    graph: Graph,
    eps: float | None,
    budget: float | None,
    round_to: int,
) -> None:
    """Raise ValueError or TypeError if new filters or removals do not fit the graph or the other options."""
    for what, given in (("proposals", proposals), ("losses", losses)):
        for name in given:
            if name not in graph.units:
                raise ValueError(f"{what}: {name!r} is not a unit of the graph; its units are {', '.join(graph.units)}")
    for name, own in proposals.items():
        if not isinstance(own, Proposals):
            raise TypeError(f"proposals: {name!r} must be Proposals, got {type(own).__name__}")
        if own.theta.shape[1] != graph.units[name].fan_in:
            raise ValueError(
                f"proposals: filters of {name!r} must have {graph.units[name].fan_in} parameters, got "
                f"{own.theta.shape[1]}; were they computed before the model changed?"
            )
    for name, loss in losses.items():
        require.shape(f"losses of {name!r}", loss, (graph.units[name].width,))
        require.finite(f"losses of {name!r}", loss)
        if bool((loss < 0).any()):
            raise ValueError(f"losses of {name!r} must be >= 0, got {float(loss.min()):.4g}")
    if proposals or losses:
        if eps is None:
            raise ValueError("proposals and losses need eps, the step that will be made; got none")
        require.positive("eps", eps)
    if losses and (budget is None or round_to != 1):
        raise ValueError("losses need a budget, and round_to = 1")


def with_others(
    candidates: Candidates,
    graph: Graph,
    proposals: Mapping[str, Proposals],
    losses: Mapping[str, Tensor],
    eps: float,
    threshold: float,
    relative: bool,
) -> Candidates:
    """Return the candidates together with new filters and removals; steps of output weights may be relative."""
    names = [name for name in graph.units if name in candidates.units or name in proposals or name in losses]
    place = {name: index for index, name in enumerate(names)}
    columns = [
        np.array([place[candidates.units[unit]] for unit in candidates.unit], dtype=np.int64),
        candidates.neuron,
        candidates.copies,
        candidates.gain,
    ]
    parts = [columns]
    for name, own in proposals.items():
        gain = -2 / eps * (own.slope * own.reach if relative else own.slope).double().cpu().numpy()
        useful = np.flatnonzero(gain < -threshold)
        neuron = graph.units[name].width + useful
        parts.append([np.full(len(useful), place[name]), neuron, np.full(len(useful), 2), gain[useful]])
    for name, loss in losses.items():
        gain = 2 / eps**2 * loss.double().cpu().numpy()
        # Two neurons stay: those whose removal would raise the loss the most.
        useful = np.sort(np.argsort(gain, kind="stable")[: max(0, len(gain) - 2)])
        parts.append([np.full(len(useful), place[name]), useful, np.zeros(len(useful), np.int64), gain[useful]])
    found = [np.concatenate(column) for column in zip(*parts, strict=True)]
    order = np.lexsort((found[1], found[2], found[0]))
    return Candidates(names, *(column[order] for column in found))


def _gains(spectra: Sequence[Spectrum], m: int, c: float, theorem: str) -> np.ndarray:
    """Return the gains of all filters of all spectra in order, each computed in the precision of its spectrum."""
    by_kind: dict[object, list[int]] = {}
    for place, spectrum in enumerate(spectra):
        by_kind.setdefault((spectrum.lambda_min.dtype, spectrum.lambda_min.device), []).append(place)
    found: dict[int, np.ndarray] = {}
    for places in by_kind.values():
        low, high = (
            torch.cat([getattr(spectra[place], end) for place in places]) for end in ("lambda_min", "lambda_max")
        )
        gains = split_gain(low, high, m, c, theorem).double().cpu()
        sizes = [len(spectra[place].lambda_min) for place in places]
        found.update(zip(places, (part.numpy() for part in gains.split(sizes)), strict=True))
    return np.concatenate([found[place] for place in range(len(spectra))]) if spectra else np.zeros(0)
