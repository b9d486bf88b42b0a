"""Experiment A: where positive splits are stuck, on one hidden layer; every run is a batch of 16 seeds on 5 folds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
# In that cell, every rule ran with these learning rates as well; and the rules of the table wherever S2D may be stuck:
# with such outputs, from so many neurons.
OTHER_RATES, MAY_BE_STUCK = (0.02, 0.1), ("fixed", 1)
RATES = (BASE.learning_rate, *OTHER_RATES)
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
                if is_tuned(data, activation, outputs, start, rule.name)
            ]
    return found


def is_tuned(data: str, activation: str, outputs: str, start: int, rule: str) -> bool:
    """Return whether a rule has three learning rates in a cell."""
    return (data, activation, outputs) == CELL or ((outputs, start) == MAY_BE_STUCK and rule in COLUMNS)


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
    is_main = (settings["data"], settings["activation"], settings["outputs"]) == CELL
    return {
        **({"networks": _rounded(found.stages[-1].loss, 3)} if is_main else {}),
        "stages": _stages(found.stages, is_main),
        "splits": found.splits,
        "signed": found.signed,
    }


def _stages(stages: Sequence[LayerStage], is_main: bool) -> Record:
    """Return the neurons of every stage and its losses: quartiles in the main cell and at the end, else medians."""
    losses, tests = ([_quartiles(getattr(stage, kind)) for stage in stages] for kind in ("loss", "test"))
    shown = losses if is_main else [[middle] for _, middle, _ in losses[:-1]] + losses[-1:]
    smaller = int((stages[-1].sizes < stages[-1].neurons).sum())
    return {
        "neurons": [stage.neurons for stage in stages],
        "compute": stages[-1].compute,
        "loss": shown,
        "test": [middle for _, middle, _ in tests],
        # Networks that have run out of useful splits.
        "smaller": smaller,
    }


def _quartiles(losses: Tensor) -> list[float]:
    return _rounded(losses.double().flatten().quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)))


def _rounded(losses: Tensor, digits: int = 4) -> list:
    def short(value: float | list) -> float | list:
        return [short(one) for one in value] if isinstance(value, list) else float(f"{value:.{digits}g}")

    return short(losses.tolist())


def quartiles(record: Record) -> tuple[float, float, float]:
    """Return the quartiles of the training loss at the end."""
    low, middle, high = record["stages"]["loss"][-1]
    return low, middle, high


def test_loss(record: Record) -> float:
    """Return the median of the test loss at the end."""
    return record["stages"]["test"][-1]


def lower(first: Record, second: Record) -> str:
    """Return in how many of the networks the first record's loss is the lower one, by more than a hundredth of it."""
    pairs = [
        pair for folds in zip(first["networks"], second["networks"], strict=True) for pair in zip(*folds, strict=True)
    ]
    return f"{sum(one < 0.99 * other for one, other in pairs)} of {len(pairs)}"


def best(records: Records, data: str, activation: str, outputs: str, start: int, rule: str) -> tuple[float, Record]:
    """Return the learning rate with the lowest median of the training loss, of those of the cell, and its record."""
    rates = RATES if is_tuned(data, activation, outputs, start, rule) else (BASE.learning_rate,)
    own = {rate: records[name(data, activation, start, outputs, rule, rate)] for rate in rates}
    rate = min(rates, key=lambda rate: quartiles(own[rate])[1])
    return rate, own[rate]


def parts(records: Records) -> Mapping[str, str]:
    """Return the tables: all rules in the main cell, and medians of training and test losses in every cell."""
    main = [["rule", *(f"from {start}" for start in STARTS)]]
    for rule in RULES:
        row = [rule.name]
        for start in STARTS:
            rate, record = best(records, *CELL, start, rule.name)
            low, middle, high = quartiles(record)
            row.append(f"{middle:.3f} [{low:.3f}, {high:.3f}] / {test_loss(record):.3f} (lr {rate:g})")
        main.append(row)
    every = [["data", "activation", "outputs", "from", *COLUMNS]]
    for data, activation, outputs, start in cells():
        own = [best(records, data, activation, outputs, start, rule)[1] for rule in COLUMNS]
        medians = [f"{quartiles(one)[1]:.3f} / {test_loss(one):.3f}" for one in own]
        every.append([data, activation, outputs, str(start), *medians])
    return {"A: losses": table(every), "A: tuned": table(main)}


def values(records: Records) -> Mapping[str, str]:
    """Return medians for sentences, "A: photograph, softplus, fixed, 1: S2D"; and how often S3D is below S2D."""
    found = {}
    for data, activation, outputs, start in cells():
        own = {rule.name: best(records, data, activation, outputs, start, rule.name)[1] for rule in RULES}
        key = f"A: {data}, {activation}, {outputs}, {start}"
        for rule, record in own.items():
            found[f"{key}: {rule}"] = f"{quartiles(record)[1]:.3f}"
            found[f"{key}: {rule}: test"] = f"{test_loss(record):.3f}"
            if (data, activation, outputs) == CELL:
                found[f"{key}: {rule} below S2D"] = lower(record, own["S2D"])
    return found


def figures(records: Records) -> Mapping[str, str]:
    """Return the losses by number of neurons from 1, 2 and 4 neurons, in one cell."""
    data, activation, outputs = CELL
    everything = [
        value
        for start in STARTS
        for rule in SHOWN
        for spread in records[name(data, activation, start, outputs, rule)]["stages"]["loss"]
        for value in spread
    ]
    y = scales.Scale(0.9 * min(everything), 1.1 * max(everything), "log")
    plots = []
    for start in STARTS:
        marks: list[Mark] = []
        for place, (rule, style) in enumerate(SHOWN.items()):
            stages = records[name(data, activation, start, outputs, rule)]["stages"]
            shift = 5.0 * (place - (len(SHOWN) - 1) / 2)
            found = list(zip(stages["neurons"], stages["loss"], strict=True))
            marks.append(Line([Point(neurons, loss[1]) for neurons, loss in found], replace(style, marker="")))
            for neurons, (low, middle, high) in found:
                words = (rule, f"{neurons} neurons: {middle:.3g}, middle half {low:.3g} to {high:.3g}")
                marks.append(Spread(neurons, (low, low, middle, high, high), style, words, rule, shift))
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
