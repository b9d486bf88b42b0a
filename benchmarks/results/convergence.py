"""Experiment E: phases to a plateau on few images. How many splits are signed there, and is S3D ahead of S2D?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import s3d_fast as s3d
from benchmarks.results import small_images
from benchmarks.results.comparison import Comparison
from benchmarks.results.experiment import Experiment, Record, Records, Run
from benchmarks.results.methods import NEW, name, selected
from benchmarks.results.small_images import Batch, Images, evaluate
from benchmarks.results.statistics import interval
from benchmarks.results.tables import table
from s3d_fast.recipes.baselines import random_plan
from s3d_fast.report import scales
from s3d_fast.report.plot import Line, Mark, Plot, Point, Style

RATES = (0.01, 0.03, 0.06)
SEEDS = 5
IMAGES, BATCH = 600, 50
FIRST, STEPS, FRACTION = 4, 4, 0.35
# A cosine to zero over so many epochs ends every phase at a plateau; the last tenth of them tells how flat it is.
EPOCHS = 50
EPS = "relative:0.03"
ROWS: Mapping[str, Mapping[str, Any]] = {
    "s2d": selected(),
    "s3d": selected(c=1.3),
    "s3d c3": selected(c=3.0),
    "s3d m3 c3": selected(3, 3.0),
    "net2net": {"plan": "random splits"},
    "new": NEW,
}
TITLES = {
    "s2d": "S2D",
    "s3d": "S3D, m = 2, c = 1.3",
    "s3d c3": "S3D, m = 2, c = 3",
    "s3d m3 c3": "S3D, m = 3, c = 3",
    "net2net": "random splits (net2net)",
    "new": "new filters, random",
}


def runs() -> list[Run]:
    """Return all runs, seed by seed."""
    return [
        Run(name(row, rate, seed), {"row": row, "lr": rate, "seed": seed, **options}, rank=seed + 1)
        for seed in range(SEEDS)
        for row, options in ROWS.items()
        for rate in RATES
    ]


def convolutions(width: int, seed: int) -> nn.Sequential:
    """Return three convolutions of one width without BatchNorm: at its end a phase is at an optimum of the loss."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for fan_in, stride in ((3, 2), (width, 2), (width, 1)):
        layers += [nn.Conv2d(fan_in, width, 3, stride, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, small_images.CLASSES))
    return model.to(memory_format=torch.channels_last)


class Shuffled:
    """Batches of all training images in another order every epoch, drawn from the global random state."""

    def __init__(self, images: Images) -> None:
        self.images = images

    def __len__(self) -> int:
        return math.ceil(len(self.images.x) / BATCH)

    def __iter__(self) -> Any:
        for index in torch.randperm(len(self.images.x)).split(BATCH):
            yield self.images.x[index], self.images.y[index]


def perform(run: Run, records: Records, images: Images) -> Record:
    """Perform one run: S is computed on all training images, so that it has no sampling error."""
    settings = run.settings
    model = convolutions(FIRST, settings["seed"])
    every: Sequence[Batch] = [(images.x, images.y)]
    schedule = s3d.schedules.cosine(EPOCHS)
    trainer = s3d.EpochTrainer(Shuffled(images), F.cross_entropy, EPOCHS, schedule=schedule, channels_last=True)
    units = list(s3d.trace(model, images.x[:2]).units)
    options = dict(settings.get("select", {"m": 2, "c": 1.0}))
    copies = options.get("m", 2)
    options.pop("by", None)

    def selection(phase: int, graph: s3d.Graph) -> dict[str, Any]:
        filters = round(FRACTION * sum(graph.units[unit].width for unit in units))
        # The same number of filters more, whatever the number of copies.
        return {**options, "top_k": filters // (int(copies) - 1)}

    def train_loss(trained: nn.Module) -> dict[str, float]:
        found = evaluate(trained, images)
        with torch.no_grad():
            found["train"] = float(F.cross_entropy(trained(images.x), images.y))
        return found

    grower = s3d.Grower(
        model,
        images.x[:2],
        F.cross_entropy,
        batches=every,
        train=trainer,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=settings["lr"]),
        phases=1 + STEPS,
        evaluate=train_loss,
        eps=EPS,
        selection=selection,
        units=units,
        splits=settings.get("splits", True),
        new_filters=settings.get("new"),
        plan=(lambda phase, graph: random_plan(graph, units, selection(phase, graph))) if "plan" in settings else None,
        solver={"tol": 1e-2},
        seed=settings["seed"],
    )
    history = grower.run()
    return {"phases": [_phase(phase) for phase in history], "params": history[-1].params}


def _phase(phase: s3d.Phase) -> Record:
    found: Record = {
        "widths": list(phase.widths.values()),
        # By what share of itself the training loss still fell in the last tenth of the phase.
        "falls": round(1 - _mean(phase.epochs[-3:]) / _mean(phase.epochs[-9:-6]), 4),
        "train_loss": round(phase.metrics["train"], 5),
        "accuracy": round(phase.metrics["accuracy"], 2),
    }
    if phase.splits:
        found |= {"splits": phase.splits, "signed": phase.negative}
        if math.isfinite(phase.predicted_change):
            found["promised"] = float(f"{phase.predicted_change:.4g}")
        found["measured"] = float(f"{phase.split_loss - phase.loss:.4g}")
    return found


def _mean(epochs: Sequence[Mapping[str, Any]]) -> float:
    return statistics.fmean(epoch["loss"] for epoch in epochs)


def load(path: str) -> Images:
    """Return the first images of every class."""
    return small_images.load(path, train=IMAGES)


def compared(records: Records) -> Comparison:
    """Return the training losses after the last phase, on the seeds that are complete."""
    return Comparison.of(records, list(ROWS), RATES, lambda record: record["phases"][-1]["train_loss"], lower=True)


def parts(records: Records) -> dict[str, str]:
    """Return the tables of docs/results.md."""
    found = compared(records)
    rows = [["method", "training loss", "minus S2D", "test accuracy (%)", "learning rate", "loss falls at the end by"]]
    for key in sorted(ROWS, key=lambda key: found.mean(key).mean):
        own = found.of_row(key)
        rows.append(
            [
                TITLES[key],
                str(found.mean(key)),
                "" if key == "s2d" else found.minus(key, "s2d").signed,
                str(interval({place: one["phases"][-1]["accuracy"] for place, one in enumerate(own)})),
                f"{found.rate(key):g}",
                f"{statistics.median(phase['falls'] for one in own for phase in one['phases']):.2%}",
            ]
        )
    shares = [["method", *(f"step {step + 1}" for step in range(STEPS)), "first step: promised", "measured"]]
    for key in ("s3d", "s3d c3", "s3d m3 c3", "s2d"):
        # All learning rates: the share of signed splits does not depend on which is best.
        every = [found.records[key, rate, seed]["phases"] for rate in RATES for seed in found.seeds(key)]
        cells = []
        for step in range(STEPS):
            signed, splits = (sum(phases[step].get(kind, 0) for phases in every) for kind in ("signed", "splits"))
            cells.append(f"{signed / splits:.0%} of {splits}")
        first = [phases[0] for phases in every if "promised" in phases[0]]
        cells += [f"{statistics.median(one[kind] for one in first):.2g}" for kind in ("promised", "measured")]
        shares.append([TITLES[key], *cells])
    return {"E: losses": table(rows), "E: signed": table(shares)}


def values(records: Records) -> dict[str, str]:
    """Return differences for sentences: "E: s3d - s2d"."""
    found = compared(records)
    texts = {f"E: {key} - s2d": found.minus(key, "s2d").signed for key in ROWS if key != "s2d"}
    return texts | {"E: seeds": str(min(len(found.seeds(key)) for key in ROWS))}


def figures(records: Records) -> dict[str, str]:
    """Return the training loss after every phase."""
    found = compared(records)
    lines: list[Mark] = []
    heights = []
    for key, colour in zip(ROWS, ("blue", "sky", "orange", "pink", "grey", "green"), strict=True):
        points = []
        for phase in range(1 + STEPS):
            own = interval({place: one["phases"][phase]["train_loss"] for place, one in enumerate(found.of_row(key))})
            filters = sum(found.of_row(key)[0]["phases"][phase]["widths"])
            points.append(Point(phase, own.mean, (TITLES[key], f"phase {phase}: {own}", f"{filters} filters")))
            heights.append(own.mean)
        lines.append(Line(points, Style(colour), TITLES[key]))
    plot = Plot(
        "convergence",
        scales.whole(0, STEPS),
        scales.linear(heights),
        lines,
        title="Phases to a plateau: training loss, mean over seeds, each method at its best learning rate",
        x_label="phase; every one has 35% more filters than the one before",
        y_label="training loss at the end of the phase",
        width=720,
        height=260,
    )
    return {"results-E.svg": plot.draw(alone=True)}


EXPERIMENT = Experiment(
    key="E",
    title="phases to a plateau on few images of CIFAR-100: signed splits, S3D against S2D",
    runs=runs,
    perform=perform,
    about={
        "train images": IMAGES,
        "batch": BATCH,
        "first width": FIRST,
        "growth steps": STEPS,
        "fraction": FRACTION,
        "epochs of a phase": EPOCHS,
        "eps": EPS,
    },
    data="cifar100",
    load=load,
    parts=parts,
    values=values,
    figures=figures,
)
