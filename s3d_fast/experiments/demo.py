"""The demo: the paper's claim where it is true, on a photograph and on curves, in about a minute and a half."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from s3d_fast.base import require
from s3d_fast.base.tables import text_table
from s3d_fast.data.tabular import regression
from s3d_fast.experiments import layer_growth, rbf_growth
from s3d_fast.report.demo_panels import Fit, Task

Progress = Callable[[int], object]
# Two copies with positive weights, two with signed weights, three with signed weights.
METHODS = (rbf_growth.Method(2, 1.0), rbf_growth.Method(2, 3.0), rbf_growth.Method(3, 3.0))
# Methods in the figure. In the table are all of them.
SHOWN = {"S2D": METHODS[0], "S3D": METHODS[2]}


@dataclass(frozen=True)
class DemoSettings:
    """The numbers of the demo.

    Attributes:
        seeds: networks for every method and task.
        steps: gradient steps per neuron on curves; the photograph takes a tenth of that.
        side: pixels of the photograph along an edge.
    """

    seeds: int = 16
    steps: int = 3000
    side: int = 24

    def __post_init__(self) -> None:
        require.count("seeds", self.seeds)
        require.count("steps", self.steps, at_least=10)
        require.count("side", self.side, at_least=4)

    @property
    def layers(self) -> layer_growth.LayerSettings:
        """The settings of the networks that fit the photograph."""
        return layer_growth.LayerSettings(seeds=self.seeds, steps=self.steps // 10)

    @property
    def curves(self) -> rbf_growth.RBFSettings:
        """The settings of the networks that fit curves."""
        return rbf_growth.RBFSettings(seeds=self.seeds, steps=self.steps)

    @property
    def total(self) -> int:
        """All gradient steps on curves; those on the photograph are too fast to count."""
        return len(METHODS) * self.curves.steps * self.curves.neurons


@dataclass(frozen=True)
class History:
    """The losses of one method by size."""

    method: rbf_growth.Method
    neurons: list[int]
    losses: list[Tensor]  # each (R,)

    def median(self) -> list[float]:
        """Return the median over the seeds, by size."""
        return [loss.double().quantile(0.5).item() for loss in self.losses]


@dataclass(frozen=True)
class Demo:
    """The tasks of the figure, and the losses of all methods by task."""

    tasks: list[Task]
    histories: Mapping[str, list[History]]


def run(settings: DemoSettings, progress: Progress = lambda steps: None) -> Demo:
    """Grow all networks; the photograph comes first.

    Raises:
        RuntimeError: scikit-learn or Pillow, which bring and read the photograph, are not installed.
    """
    photograph, first = _photograph(settings)
    curve, second = _curves(settings, progress)
    return Demo([photograph, curve], {photograph.name: first, curve.name: second})


def words(demo: Demo, settings: DemoSettings) -> str:
    """Return what the demo found: a table for each task, and what the numbers mean."""
    parts = []
    for name, histories in demo.histories.items():
        sizes = sorted({size for one in histories for size in one.neurons})
        rows = [["neurons", *(one.method.name for one in histories)]]
        for size in sizes:
            medians = [dict(zip(one.neurons, one.median(), strict=True)) for one in histories]
            rows.append([str(size), *(f"{one[size]:.3g}" if size in one else "" for one in medians)])
        base, *signed = histories
        lower = [int((one.losses[-1] < base.losses[-1]).sum()) for one in signed]
        counts = ", ".join(f"{one.method.name} {count}" for one, count in zip(signed, lower, strict=True))
        parts += [
            f"{name}: loss, median of {settings.seeds} seeds",
            text_table(rows),
            f"Seeds of {settings.seeds} whose last loss is below S2D's: {counts}.",
        ]
    return "\n\n".join([*parts, MEANING])


MEANING = """\
Every network starts with one neuron and is split, trained, split again. S2D gives copies positive weights: on the
photograph, where neurons are convex and output weights fixed, such copies add up to a convex function (or a concave
one), whatever their number. S3D may give a copy a negative weight, and leaves that set. Networks of such neurons that
start with both signs are not stuck like this: docs/results.md."""


def record(demo: Demo) -> dict[str, Any]:
    """Return the losses as plain data: by task and method, by size, of every seed."""
    return {
        name: {
            one.method.name: {
                str(size): [round(value, 6) for value in loss.tolist()]
                for size, loss in zip(one.neurons, one.losses, strict=True)
            }
            for one in histories
        }
        for name, histories in demo.histories.items()
    }


def _photograph(settings: DemoSettings) -> tuple[Task, list[History]]:
    """Fit brightness as a function of position by softplus neurons with fixed output weights."""
    x, y = regression("photograph", settings.side)
    folds = layer_growth.fold(x, y, parts=1)
    rules = [layer_growth.Rule(m=method.m, c=method.c) for method in METHODS]
    runs = [layer_growth.grow(folds, rule, settings.layers) for rule in rules]
    histories = [
        History(method, [stage.neurons for stage in run.stages], [stage.loss[0] for stage in run.stages])
        for method, run in zip(METHODS, runs, strict=True)
    ]
    seed = _typical(histories)
    # `fold` has shuffled the pixels.
    place = layer_growth.shuffled(len(x))
    shown: dict[str, Tensor] = {}
    for name, method in SHOWN.items():
        with torch.no_grad():
            values = runs[METHODS.index(method)].stages[-1].model(folds.x)[0, seed]
        shown[name] = torch.empty_like(values).index_put_((place,), values).reshape(settings.side, settings.side)
    target = torch.empty_like(folds.y[0]).index_put_((place,), folds.y[0]).reshape(settings.side, settings.side)
    name = "a photograph to fit"
    return Task(name, target, _fits(histories, shown, seed)), histories


def _curves(settings: DemoSettings, progress: Progress) -> tuple[Task, list[History]]:
    """Fit curves by Gaussian neurons with trained output weights."""
    problem = rbf_growth.make_problem(settings.curves)
    runs = [rbf_growth.grow(problem, method, settings.curves, progress) for method in METHODS]
    histories = [
        History(run.method, [stage.neurons for stage in run.stages], [stage.loss for stage in run.stages])
        for run in runs
    ]
    seed = _typical(histories)
    order = problem.x[seed].argsort()
    x = problem.x[seed, order]
    shown: dict[str, Tensor] = {}
    for name, method in SHOWN.items():
        model = runs[METHODS.index(method)].stages[-1].model
        with torch.no_grad():
            shown[name] = model(x.to(model.w.dtype).expand(settings.seeds, -1))[seed]
    name = "a curve to fit"
    return Task(name, problem.y[seed, order], _fits(histories, shown, seed), x), histories


def _typical(histories: list[History]) -> int:
    """Return the seed with the median ratio of S3D's last loss to S2D's, of the methods in the figure."""
    last = {one.method: one.losses[-1].double() for one in histories}
    ratio = last[SHOWN["S3D"]] / last[SHOWN["S2D"]].clamp(min=1e-12)
    return int(ratio.argsort()[(len(ratio) - 1) // 2])


def _fits(histories: list[History], shown: Mapping[str, Tensor], seed: int) -> list[Fit]:
    by_method = {one.method: one for one in histories}
    found = []
    for name, method in SHOWN.items():
        own = by_method[method]
        found.append(Fit(name, shown[name], float(own.losses[-1][seed]), own.neurons, own.losses))
    return found
