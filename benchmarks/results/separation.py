"""Experiment B: how fast copies part under gradient descent, against the formula."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from benchmarks.results.experiment import Experiment, Record, Records, Run
from benchmarks.results.tables import table
from s3d_fast.data.tabular import regression
from s3d_fast.experiments.layer_growth import SCRATCH, Folds, LayerSettings, Rule, best_splits, fold, grow, split
from s3d_fast.growth.separation import parting_rate
from s3d_fast.maths.schemes import Split
from s3d_fast.models.layer_batch import LayerBatch
from s3d_fast.report import scales
from s3d_fast.report.plot import Line, Mark, Plot, Point, Style, beside
from s3d_fast.splitting.plan import NeuronSplit

# Steps of training before the split, and of gradient descent after it.
SEEDS, NEURONS, TRAINED, STEPS, EVERY = 16, 4, 3000, 3000, 25
EPS, RATES, MOMENTA, BOUNDS = (0.001, 0.01, 0.1), (0.05, 0.1, 0.2), (0.0, 0.9), (1.0, 3.0)
# The setting from which each panel of the figure varies one.
EPS_SHOWN, RATE_SHOWN, MOMENTUM_SHOWN = 0.01, 0.1, 0.9
# Networks whose curves are kept, by their place in the order of rates; and the exponents that are compared.
SHOWN, GOALS = (0.25, 0.5, 0.9), (1.0, 2.0, 3.0)
# The distances that the figure shows.
LOWEST, HIGHEST = 2e-4, 3.0


def name(eps: float, rate: float, momentum: float, c: float) -> str:
    """Return the name of a run."""
    return f"eps {eps:g}, lr {rate:g}, momentum {momentum:g}, c {c:g}"


def runs() -> list[Run]:
    """Return all runs; each follows the copies of all neurons of all seeds, one pair in each network."""
    return [
        Run(name(eps, rate, momentum, c), {"eps": eps, "lr": rate, "momentum": momentum, "c": c})
        for c in BOUNDS
        for momentum in MOMENTA
        for eps in EPS
        for rate in RATES
    ]


@lru_cache
def trained() -> tuple[Folds, LayerBatch]:
    """Return the photograph, and networks of four neurons trained on it until hardly anything moves, in float64."""
    folds = fold(*regression("photograph"), parts=1)
    folds = Folds(*(part.double() for part in (folds.x, folds.y, folds.test_x, folds.test_y)))
    settings = LayerSettings(start=NEURONS, added=0, seeds=SEEDS, steps=TRAINED)
    single = Folds(*(part.float() for part in (folds.x, folds.y, folds.test_x, folds.test_y)))
    return folds, grow(single, Rule(SCRATCH), settings).stages[-1].model.copy(torch.float64)


def pairs(c: float, eps: float) -> tuple[Folds, LayerBatch, list[NeuronSplit], Split]:
    """Return a network for every neuron that a split into two helps, with that split; they are not split yet."""
    folds, model = trained()
    _, _, splits = best_splits(model, folds, 2, c, eps)
    signed = (splits.weights < 0).any(-1)
    chosen = ((splits.gain < 0) & (signed if c > 1 else ~signed))[0].nonzero()
    seeds, neurons = chosen.unbind(1)
    theta, w, b = (part.detach()[:, seeds] for part in (model.theta, model.w, model.b))
    apart = LayerBatch(theta, w, b, model.act, trained_outputs=False)
    own = Split(*(part[0, seeds, neurons] for part in splits))
    found = [
        NeuronSplit(f"seed {seed}", neuron, own.weights[place], own.offsets[place], float(own.gain[place]))
        for place, (seed, neuron) in enumerate(chosen.tolist())
    ]
    return folds, apart, found, own


def perform(run: Run, records: Records, data: None) -> Record:
    """Split, train by gradient descent, and follow the distance of the two copies in every network."""
    settings = run.settings
    eps, rate, momentum = (settings[key] for key in ("eps", "lr", "momentum"))
    folds, model, found, own = pairs(settings["c"], eps)
    places = torch.tensor([[one.neuron for one in found]])
    model = split(model, places, places >= 0, own.weights[None], eps * own.offsets[None])
    optimizer = torch.optim.SGD([model.theta, model.b], lr=rate, momentum=momentum)
    distances = [_distance(model, places)]
    for step in range(1, STEPS + 1):
        optimizer.zero_grad(set_to_none=True)
        (model(folds.x) - folds.y.unsqueeze(1)).square().mean(-1).sum().backward()
        optimizer.step()
        if step % EVERY == 0:
            distances.append(_distance(model, places))
    curves = torch.stack(distances, 1)  # (networks, times)
    rates = [parting_rate(one, rate, momentum) for one in found]
    order = sorted(range(len(found)), key=lambda place: rates[place])
    shown = [order[round(share * (len(order) - 1))] for share in SHOWN]
    return {
        # How far copies have come, as log(distance / first distance), when the formula says 1, 2 and 3.
        "reached": {str(goal): [_reached(*pair, goal) for pair in zip(curves, rates, strict=True)] for goal in GOALS},
        "predicted": [float(f"{one:.4g}") for one in rates],
        "curves": [
            {"rate": float(f"{rates[place]:.4g}"), "distance": [float(f"{one:.4g}") for one in curves[place].tolist()]}
            for place in shown
        ],
    }


def _distance(model: LayerBatch, places: Tensor) -> Tensor:  # (networks,)
    """Return the distance of the two copies relative to their mean length; the second one is the last neuron."""
    theta = model.theta.detach()[0]
    both = theta[torch.arange(len(theta)), places[0]], theta[:, -1]
    return (both[0] - both[1]).norm(dim=1) / (both[0].norm(dim=1) + both[1].norm(dim=1)) * 2


def _reached(curve: Tensor, rate: float, goal: float) -> float | None:
    """Return log(distance / first distance) at the step where the formula gives `goal`; None if it is not reached."""
    place = round(goal / rate / EVERY)
    if place < 1 or place >= len(curve):
        return None
    # The formula at the time that was recorded, which is not exactly the one asked for.
    return round(float((curve[place] / curve[0]).log()) * goal / (rate * place * EVERY), 3)


def parts(records: Records) -> Mapping[str, str]:
    """Return the table: how far copies have come when the formula says 1, 2 and 3, at one learning rate."""
    rows = [["split", "momentum", "eps", "pairs", "rate by the formula", *(f"at {g:g}" for g in GOALS)]]
    for c in BOUNDS:
        for momentum in MOMENTA:
            for eps in EPS:
                record = records[name(eps, RATE_SHOWN, momentum, c)]
                rates = record["predicted"]
                reached = [[one for one in record["reached"][str(goal)] if one is not None] for goal in GOALS]
                cells = ["positive" if c == 1 else "signed, c = 3", f"{momentum:g}", f"{eps:g}", str(len(rates))]
                rows.append([*cells, f"{min(rates):.1g} to {max(rates):.1g}", *(_quartiles(own) for own in reached)])
    return {"B: rates": table(rows)}


def _quartiles(values: list[float]) -> str:
    """Return the median with quartiles, and of how many; fewer than eight pairs are not shown."""
    if len(values) < 8:
        return ""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} [{low:.2f}, {high:.2f}], {len(values)}"


def values(records: Records) -> Mapping[str, str]:
    """Return medians of the table for sentences: "B: positive, momentum 0, eps 0.01: at 1"."""
    found = {}
    for c, word in zip(BOUNDS, ("positive", "signed"), strict=True):
        for momentum in MOMENTA:
            for eps in EPS:
                record = records[name(eps, RATE_SHOWN, momentum, c)]
                for goal in GOALS:
                    own = [one for one in record["reached"][str(goal)] if one is not None]
                    if own:
                        key = f"B: {word}, momentum {momentum:g}, eps {eps:g}: at {goal:g}"
                        found[key] = f"{statistics.median(own):.2f}"
    return found


def figures(records: Records) -> Mapping[str, str]:
    """Return three panels in which one setting varies: eps, the learning rate, the eigenvalue."""
    middle = SHOWN.index(0.5)
    colours = ("blue", "orange", "green")

    def curve(place: int, eps: float = EPS_SHOWN, rate: float = RATE_SHOWN) -> Record:
        return records[name(eps, rate, MOMENTUM_SHOWN, 1.0)]["curves"][place]

    panels = {
        "step eps": {f"eps {eps:g}": curve(middle, eps=eps) for eps in EPS},
        "learning rate": {f"lr {rate:g}": curve(middle, rate=rate) for rate in RATES},
        "eigenvalue": {f"|λ| {_eigenvalue(curve(place)):.2g}": curve(place) for place in range(len(SHOWN))},
    }
    plots = []
    for title, curves in panels.items():
        marks: list[Mark] = []
        for colour, (label, one) in zip(colours, curves.items(), strict=True):
            measured = one["distance"]
            times = [EVERY * place for place in range(len(measured))]
            pairs = zip(times, measured, strict=True)
            marks.append(Line([Point(time, value) for time, value in pairs], Style(colour, marker=""), label))
            formula = [measured[0] * math.exp(one["rate"] * time) for time in times]
            inside = [Point(time, value) for time, value in zip(times, formula, strict=True) if value <= HIGHEST]
            marks.append(Line(inside, Style(colour, dashes="3 4", marker="")))
        marks.append(Line([], Style("grey", dashes="3 4", marker=""), "formula"))
        plots.append(
            Plot(
                f"separation-{title}",
                scales.linear([0, STEPS]),
                scales.Scale(LOWEST, HIGHEST, "log"),
                marks,
                title=f"by {title}",
                x_label="steps of gradient descent",
                y_label="distance / length",
                width=330,
                height=240,
            )
        )
    return {"results-B.svg": beside(plots)}


def _eigenvalue(curve: Record) -> float:
    """Return |lambda| of a positive pair, whose copies have the weight 1/2."""
    return curve["rate"] / (RATE_SHOWN / (1 - MOMENTUM_SHOWN) / 2)


EXPERIMENT = Experiment(
    key="B",
    title="how fast copies part under gradient descent",
    runs=runs,
    perform=perform,
    about={"seeds": SEEDS, "neurons": NEURONS, "steps": STEPS},
    parts=parts,
    values=values,
    figures=figures,
)
