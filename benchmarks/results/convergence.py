"""Experiment E: phases to a plateau on few images. How many splits are signed there, and is S3D ahead of S2D?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import s3d_fast as s3d
from benchmarks.results import small_images
from benchmarks.results.comparison import Comparison
from benchmarks.results.experiment import Experiment, Record, Records, Run
from benchmarks.results.methods import NEW, selected
from benchmarks.results.rows import name
from benchmarks.results.small_images import Batch, Images, evaluate
from benchmarks.results.statistics import difference, interval
from benchmarks.results.tables import table
from s3d_fast.recipes.baselines import random_plan
from s3d_fast.report import scales
from s3d_fast.report.plot import Line, Mark, Plot, Point, Spread, Style

RATES = (0.01, 0.02, 0.04)
SEEDS = 6
IMAGES, BATCH = 2000, 200
FIRST, STEPS, FRACTION = 4, 3, 0.35
# A phase trains at a learning rate until the loss falls by less than this share of itself within so many epochs, then
# at the next lower one; the phase ends at the plateau of the last. No more than `MOST` epochs are spent on a rate.
FACTORS, IMPROVEMENT, PATIENCE, MOST = (1.0, 0.1), 0.01, 10, 100
EPS = "relative:0.1"
ROWS: Mapping[str, Mapping[str, Any]] = {
    "s2d": selected(),
    "s3d": selected(c=1.3),
    "s3d c3": selected(c=3.0),
    "net2net": {"plan": "random splits"},
    "new": NEW,
    "s2d 0.3": {**selected(), "eps": "relative:0.3"},
    "s2d 0.01": {**selected(), "eps": 0.01},
}
TITLES = {
    "s2d": "S2D",
    "s3d": "S3D, m = 2, c = 1.3",
    "s3d c3": "S3D, m = 2, c = 3",
    "net2net": "random splits (net2net)",
    "new": "new filters, random",
    "s2d 0.3": "S2D, 0.3 relative",
    "s2d 0.01": "S2D, 0.01",
}
# The rows of the figure.
SHOWN = {
    "s2d": Style("orange"),
    "s3d": Style("blue", dashes="5 4", marker="square"),
    "s3d c3": Style("sky", marker="triangle"),
    "net2net": Style("grey"),
    "new": Style("pink", marker="diamond"),
}
PHASES = range(1 + STEPS)


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
    for fan_in, stride in ((3, 2), (width, 1), (width, 1)):
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


class ToPlateaus:
    """Trains a phase to a plateau of the loss at one learning rate after another: `train(model, optimizer, phase)`.

    Attributes:
        epochs: by phase and learning rate, the training loss of every epoch.
    """

    def __init__(self, images: Images) -> None:
        plateau = s3d.Plateau(IMPROVEMENT, patience=PATIENCE)
        self.trainer = s3d.EpochTrainer(Shuffled(images), F.cross_entropy, MOST, plateau=plateau, channels_last=True)
        self.epochs: list[list[list[float]]] = []

    def __call__(self, model: nn.Module, optimizer: torch.optim.Optimizer, phase: int) -> None:
        first = [group["lr"] for group in optimizer.param_groups]
        self.epochs.append([])
        for factor in FACTORS:
            losses: list[float] = []
            for group, rate in zip(optimizer.param_groups, first, strict=True):
                group["lr"] = factor * rate
            self.trainer(model, optimizer, phase, after_epoch=lambda epoch, own=losses: own.append(epoch.loss))
            self.epochs[-1].append(losses)


def perform(run: Run, records: Records, images: Images) -> Record:
    """Perform one run: S is computed on all training images, so that it has no sampling error."""
    settings = run.settings
    model = convolutions(FIRST, settings["seed"])
    every: Sequence[Batch] = [(images.x, images.y)]
    trainer = ToPlateaus(images)
    units = list(s3d.trace(model, images.x[:2]).units)
    options = dict(settings.get("select", {"m": 2, "c": 1.0}))
    options.pop("by", None)

    def selection(phase: int, graph: s3d.Graph) -> dict[str, Any]:
        return {**options, "top_k": round(FRACTION * sum(graph.units[unit].width for unit in units))}

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
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=settings["lr"], fused=True),
        phases=1 + STEPS,
        evaluate=train_loss,
        eps=settings.get("eps", EPS),
        selection=selection,
        units=units,
        splits=settings.get("splits", True),
        new_filters=settings.get("new"),
        plan=(lambda phase, graph: random_plan(graph, units, selection(phase, graph))) if "plan" in settings else None,
        solver={"tol": 1e-2},
        seed=settings["seed"],
    )
    history = grower.run()
    phases = [_phase(phase, own) for phase, own in zip(history, trainer.epochs, strict=True)]
    return {"phases": phases, "params": history[-1].params}


def _phase(phase: s3d.Phase, losses: Sequence[Sequence[float]]) -> Record:
    found: Record = {
        "widths": list(phase.widths.values()),
        "epochs": [len(own) for own in losses],
        "train_loss": round(phase.metrics["train"], 5),
        "accuracy": round(phase.metrics["accuracy"], 2),
    }
    if phase.splits:
        found |= {"splits": phase.splits, "signed": phase.negative}
        if math.isfinite(phase.predicted_change):
            found["promised"] = float(f"{phase.predicted_change:.4g}")
        found["measured"] = float(f"{phase.split_loss - phase.loss:.4g}")
    return found


def load(path: str) -> Images:
    """Return the first images of every class, averaged to 8 x 8 pixels."""
    images = small_images.load(path, train=IMAGES)
    x, x_test = (
        F.avg_pool2d(one, 2).contiguous(memory_format=torch.channels_last) for one in (images.x, images.x_test)
    )
    return Images(x, images.y, x_test, images.y_test)


def compared(records: Records) -> Comparison:
    """Return the training losses after the last phase, on the seeds that are complete."""
    return Comparison.of(records, list(ROWS), RATES, lambda record: record["phases"][-1]["train_loss"], lower=True)


def parts(records: Records) -> dict[str, str]:
    """Return the tables of docs/results.md."""
    found = compared(records)
    rows = [
        [
            *("method", "training loss", "minus S2D", "minus S2D, mean of the rates", "test accuracy (%)"),
            *("learning rate", "epochs of a phase", "phases without a plateau"),
        ]
    ]
    for key in sorted(ROWS, key=lambda key: found.mean(key).mean):
        own = found.of_row(key)
        epochs = [phase["epochs"] for one in own for phase in one["phases"]]
        capped = sum(max(phase) >= MOST for phase in epochs)
        against = (found.minus(key, "s2d"), found.minus_over_rates(key, "s2d"))
        rows.append(
            [
                TITLES[key],
                str(found.mean(key)),
                *("" if key == "s2d" else one.marked() for one in against),
                str(interval(_accuracies(found, key))),
                f"{found.rate(key):g}",
                f"{statistics.median(map(sum, epochs)):.0f}",
                f"{capped} of {len(epochs)}",
            ]
        )
    shares = [["method", *(f"step {step + 1}" for step in range(STEPS)), "first step: promised", "measured"]]
    for key in ("s3d", "s3d c3", "s2d", "s2d 0.3", "s2d 0.01"):
        shown = (_signed(found, key, step) for step in range(STEPS))
        cells = [f"{signed / splits:.0%} of {splits}" for signed, splits in shown]
        every = [found.records[key, rate, seed]["phases"] for rate in RATES for seed in found.seeds(key)]
        first = [phases[0] for phases in every if "promised" in phases[0]]
        cells += [f"{statistics.median(one[kind] for one in first):.2g}" for kind in ("promised", "measured")]
        shares.append([TITLES[key], *cells])
    return {"E: losses": table(rows), "E: signed": table(shares)}


def _accuracies(found: Comparison, key: str) -> dict[int, float]:
    """Return the test accuracy of a row in the end, by seed, at the learning rate with the lowest training loss."""
    return {seed: one["phases"][-1]["accuracy"] for seed, one in zip(found.seeds(key), found.of_row(key), strict=True)}


def _signed(found: Comparison, key: str, step: int) -> tuple[int, int]:
    """Return the signed splits of a step, and all of them, at all learning rates: which is best does not matter."""
    made = [found.records[key, rate, seed]["phases"][step] for rate in RATES for seed in found.seeds(key)]
    return sum(one.get("signed", 0) for one in made), sum(one.get("splits", 0) for one in made)


def values(records: Records) -> dict[str, str]:
    """Return differences for sentences: "E: s3d - s2d", of training losses, and "E: s3d - s2d: accuracy"."""
    found = compared(records)
    others = [key for key in ROWS if key != "s2d"]
    texts = {f"E: {key} - s2d": found.minus(key, "s2d").signed for key in others}
    texts |= {f"E: {key} - s2d over rates": found.minus_over_rates(key, "s2d").signed for key in others}
    for first, second in (("s2d 0.3", "s2d 0.01"), ("new", "net2net")):
        texts[f"E: {first} - {second}"] = found.minus(first, second).signed
        texts[f"E: {first} - {second} over rates"] = found.minus_over_rates(first, second).signed
    accuracies = {key: _accuracies(found, key) for key in ROWS}
    texts |= {f"E: {key} - s2d: accuracy": difference(accuracies[key], accuracies["s2d"]).signed for key in others}
    for key in ("s3d", "s3d c3"):
        signed, splits = map(sum, zip(*(_signed(found, key, step) for step in range(STEPS)), strict=True))
        texts[f"E: {key}: signed"] = f"{signed / splits:.0%}"
    epochs = [phase["epochs"] for key in ROWS for one in found.of_row(key) for phase in one["phases"]]
    texts["E: capped"] = f"{sum(max(phase) >= MOST for phase in epochs)} of {len(epochs)}"
    return texts | {"E: seeds": str(min(len(found.seeds(key)) for key in ROWS))}


def figures(records: Records) -> dict[str, str]:
    """Return the training loss after every phase."""
    found = compared(records)
    marks: list[Mark] = []
    heights = []
    for place, (key, style) in enumerate(SHOWN.items()):
        # Marks of one phase stand side by side.
        shift = 7.0 * (place - (len(SHOWN) - 1) / 2)
        own = found.of_row(key)
        ends = [interval(dict(enumerate(one["phases"][phase]["train_loss"] for one in own))) for phase in PHASES]
        marks.append(Line([Point(phase, end.mean) for phase, end in enumerate(ends)], replace(style, marker="")))
        for phase, end in enumerate(ends):
            low, high = end.mean - end.half, end.mean + end.half
            words = (TITLES[key], f"phase {phase}: {end}", f"{sum(own[0]['phases'][phase]['widths'])} filters")
            marks.append(Spread(phase, (low, low, end.mean, high, high), style, words, TITLES[key], shift))
            heights += [low, high]
    plot = Plot(
        "convergence",
        scales.whole(-0.2, STEPS + 0.2),
        scales.linear(heights),
        marks,
        title="Phases to a plateau: training loss, each method at its best learning rate",
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
        "factors of the learning rate": FACTORS,
        "plateau": IMPROVEMENT,
        "patience": PATIENCE,
        "most epochs of a rate": MOST,
        "eps": EPS,
    },
    data="cifar100",
    load=load,
    parts=parts,
    values=values,
    figures=figures,
)
