"""Experiment A: where positive splits are stuck, on one hidden layer; every run is a batch of 16 seeds on 5 folds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
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
# The settings of the main figure and of the first table.
MAIN = ("photograph", "softplus", "fixed")
SHOWN = ("S2D", "S3D m=2 c=1.3", "S3D m=3 c=3", NEW, SCRATCH)
COLOURS = dict(zip(SHOWN, ("red", "blue", "purple", "green", "grey"), strict=True))


def name(data: str, activation: str, start: int, outputs: str, rule: str) -> str:
    """Return the name of a run."""
    return f"{data}, {activation}, from {start}, {outputs} outputs, {rule}"


def runs() -> list[Run]:
    """Return all runs; each trains 80 networks at once."""
    return [
        Run(
            name(data, activation, start, outputs, rule.name),
            {"data": data, "activation": activation, "start": start, "outputs": outputs, "rule": rule.name},
        )
        for data in NAMES
        for activation in ACTIVATIONS
        for start in STARTS
        for outputs in OUTPUTS
        for rule in RULES
    ]


@lru_cache
def folds_of(data: str) -> Folds:
    """Return the folds of a data set."""
    return fold(*regression(data), parts=PARTS)


def perform(run: Run, records: Records, data: None) -> Record:
    """Grow all seeds on all folds by one rule."""
    settings = run.settings
    rule = next(rule for rule in RULES if rule.name == settings["rule"])
    options = LayerSettings(settings["activation"], settings["start"], trained_outputs=settings["outputs"] == "trained")
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


def parts(records: Records) -> Mapping[str, str]:
    """Return the tables."""
    return {}


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
)
