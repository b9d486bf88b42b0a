"""Experiment A: where positive splits are stuck, on one hidden layer; every run is a batch of 16 seeds on 5 folds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from benchmarks.results.experiment import Experiment, Record, Records, Run
from benchmarks.results.tables import table
from s3d_fast.data.tabular import NAMES, regression
from s3d_fast.experiments.layer_growth import NEW, RULES, SCRATCH, Folds, LayerSettings, LayerStage, fold, grow
from s3d_fast.report import scales
from s3d_fast.report.plot import Line, Mark, Plot, Point, Spread, Style, beside

ACTIVATIONS, STARTS, OUTPUTS = ("softplus", "relu"), (1, 2, 4), ("fixed", "trained")
BASE = LayerSettings()
PARTS = 5
# The rules of the figure, with colours, markers and shifts that keep them apart; the figure is about one cell.
SHOWN = {
    "S2D": Style("orange"),
    "S3D m=2 c=1.3": Style("blue", dashes="5 4", marker="square"),
    "S3D m=3 c=1.3": Style("green", marker="triangle"),
    NEW: Style("pink", marker="diamond"),
}
CELL = ("photograph", "softplus", "fixed")
# In that cell, every rule ran with these learning rates as well.
OTHER_RATES = (0.02, 0.1)
COLUMNS = ("S2D", "S3D m=2 c=1.3", "S3D m=2 c=3", "S3D m=3 c=1.3", "S3D m=3 c=3", "net2net", NEW, SCRATCH)


def name(data: str, activation: str, start: int, outputs: str, rule: str, rate: float = BASE.learning_rate) -> str:
    """Return the name of a run."""
    last = "" if rate == BASE.learning_rate else f", lr {rate:g}"
    return f"{data}, {activation}, from {start}, {outputs} outputs, {rule}{last}"


def runs() -> list[Run]:
    """Return all runs; each trains 80 networks at once."""
    found = []
    for data, activation, outputs, start in cells():
        for rule in RULES:
            own = {"data": data, "activation": activation, "start": start, "outputs": outputs, "rule": rule.name}
            found.append(Run(name(data, activation, start, outputs, rule.name), own))
            found += [
                Run(name(data, activation, start, outputs, rule.name, rate), {**own, "lr": rate})
                for rate in OTHER_RATES
                if (data, activation, outputs) == CELL
            ]
    return found


def cells() -> list[tuple[str, str, str, int]]:
    """Return data, activation, outputs and start of every cell, in the order of the table."""
    return [
        (data, activation, outputs, start)
        for data in NAMES
        for activation in ACTIVATIONS
        for outputs in OUTPUTS
        for start in STARTS
    ]


@lru_cache
def folds_of(data: str) -> Folds:
    """Return the folds of a data set."""
    return fold(*regression(data), parts=PARTS)


def perform(run: Run, records: Records, data: None) -> Record:
    """Grow all seeds on all folds by one rule."""
    settings = run.settings
    rule = next(rule for rule in RULES if rule.name == settings["rule"])
    options = LayerSettings(
        settings["activation"],
        settings["start"],
        trained_outputs=settings["outputs"] == "trained",
        learning_rate=settings.get("lr", BASE.learning_rate),
    )
    found = grow(folds_of(settings["data"]), rule, options)
    last = found.stages[-1]
    return {
        "loss": _rounded(last.loss),
        "test": _rounded(last.test),
        "stages": [_stage(stage) for stage in found.stages],
        "splits": found.splits,
        "signed": found.signed,
    }


def _stage(stage: LayerStage) -> Record:
    """Return the quartiles of the losses, and how many networks have run out of useful splits."""
    return {
        "neurons": stage.neurons,
        "steps": stage.steps,
        "compute": stage.compute,
        "loss": _quartiles(stage.loss),
        "test": _quartiles(stage.test),
        "smaller": int((stage.sizes < stage.neurons).sum()),
    }


def _quartiles(losses: Tensor) -> list[float]:
    return _rounded(losses.double().flatten().quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)))


def _rounded(losses: Tensor) -> list:
    def short(value: float | list) -> float | list:
        return [short(one) for one in value] if isinstance(value, list) else float(f"{value:.4g}")

    return short(losses.tolist())


def flat(record: Record, kind: str) -> list[float]:
    """Return the last losses of all networks: "loss", on the training part, or "test"."""
    return [value for fold in record[kind] for value in fold]


def lower(first: Record, second: Record, kind: str = "loss") -> int:
    """Return in how many of the networks the first record's loss is the lower one, by more than a hundredth of it."""
    return sum(one < 0.99 * other for one, other in zip(flat(first, kind), flat(second, kind), strict=True))


def parts(records: Records) -> Mapping[str, str]:
    """Return the table: medians of training and test losses in every cell."""
    rows = [["data", "activation", "outputs", "from", *COLUMNS]]
    for data, activation, outputs, start in cells():
        own = [records[name(data, activation, start, outputs, rule)] for rule in COLUMNS]
        medians = [(statistics.median(flat(one, "loss")), statistics.median(flat(one, "test"))) for one in own]
        rows.append([data, activation, outputs, str(start), *(f"{train:.3f} / {test:.3f}" for train, test in medians)])
    return {"A: losses": table(rows), "A: tuned": table(_tuned(records))}


def tuned(records: Records, start: int, rule: str) -> tuple[float, Record]:
    """Return the learning rate with the lowest median of the training loss in the main cell, and its record."""
    data, activation, outputs = CELL
    rates = (BASE.learning_rate, *OTHER_RATES)
    own = {rate: records[name(data, activation, start, outputs, rule, rate)] for rate in rates}
    best = min(rates, key=lambda rate: statistics.median(flat(own[rate], "loss")))
    return best, own[best]


def _tuned(records: Records) -> list[list[str]]:
    """Return the losses of the main cell by rule, each at the best of three learning rates."""
    rows = [["rule", *(f"from {start}" for start in STARTS)]]
    for rule in RULES:
        row = [rule.name]
        for start in STARTS:
            rate, record = tuned(records, start, rule.name)
            low, middle, high = statistics.quantiles(flat(record, "loss"), n=4)
            test = statistics.median(flat(record, "test"))
            row.append(f"{middle:.3f} [{low:.3f}, {high:.3f}] / {test:.3f} (lr {rate:g})")
        rows.append(row)
    return rows


def values(records: Records) -> Mapping[str, str]:
    """Return medians for sentences, "A: photograph, softplus, fixed, 1: S2D"; and how often S3D is below S2D."""
    found = {}
    for data, activation, outputs, start in cells():
        own = {rule.name: records[name(data, activation, start, outputs, rule.name)] for rule in RULES}
        key = f"A: {data}, {activation}, {outputs}, {start}"
        for rule, record in own.items():
            found[f"{key}: {rule}"] = f"{statistics.median(flat(record, 'loss')):.3f}"
            found[f"{key}: {rule}: test"] = f"{statistics.median(flat(record, 'test')):.3f}"
            found[f"{key}: {rule} below S2D"] = f"{lower(record, own['S2D'])} of {len(flat(record, 'loss'))}"
    for start in STARTS:
        best = {rule.name: tuned(records, start, rule.name)[1] for rule in RULES}
        for rule, record in best.items():
            found[f"A: tuned, {start}: {rule}"] = f"{statistics.median(flat(record, 'loss')):.3f}"
            found[f"A: tuned, {start}: {rule}: test"] = f"{statistics.median(flat(record, 'test')):.3f}"
            found[f"A: tuned, {start}: {rule} below S2D"] = (
                f"{lower(record, best['S2D'])} of {len(flat(record, 'loss'))}"
            )
    return found


def figures(records: Records) -> Mapping[str, str]:
    """Return the losses by number of neurons from 1, 2 and 4 neurons, in one cell."""
    data, activation, outputs = CELL
    everything = [
        value
        for start in STARTS
        for rule in SHOWN
        for stage in records[name(data, activation, start, outputs, rule)]["stages"]
        for value in stage["loss"]
    ]
    y = scales.Scale(0.9 * min(everything), 1.1 * max(everything), "log")
    plots = []
    for start in STARTS:
        marks: list[Mark] = []
        for place, (rule, style) in enumerate(SHOWN.items()):
            stages = records[name(data, activation, start, outputs, rule)]["stages"]
            shift = 5.0 * (place - (len(SHOWN) - 1) / 2)
            marks.append(Line([Point(one["neurons"], one["loss"][1]) for one in stages], replace(style, marker="")))
            for one in stages:
                low, middle, high = one["loss"]
                words = (rule, f"{one['neurons']} neurons: {middle:.3g}, middle half {low:.3g} to {high:.3g}")
                spread = (low, low, middle, high, high)
                marks.append(Spread(one["neurons"], spread, style, words, rule, shift))
        plots.append(
            Plot(
                f"stuck-{start}",
                scales.whole(start - 0.6, start + BASE.added + 0.6),
                y,
                marks,
                title=f"from {start} neuron{'s' if start > 1 else ''}",
                x_label="neurons",
                y_label="training loss",
                width=330,
                height=240,
            )
        )
    return {"results-A.svg": beside(plots)}


EXPERIMENT = Experiment(
    key="A",
    title="where positive splits are stuck: one hidden layer on a photograph and two tables",
    runs=runs,
    perform=perform,
    about={
        "seeds": BASE.seeds,
        "folds": PARTS,
        "added": BASE.added,
        "steps per neuron": BASE.steps,
        "learning rate": BASE.learning_rate,
        "eps": BASE.eps,
    },
    parts=parts,
    values=values,
    figures=figures,
)
