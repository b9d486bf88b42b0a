"""Experiment F: a small DGCNN on ten classes of ModelNet40, grown and from scratch at equal compute."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import s3d_fast as s3d
from benchmarks.results import clouds
from benchmarks.results.comparison import Comparison
from benchmarks.results.experiment import Experiment, Record, Records, Run
from benchmarks.results.rows import (
    Cell,
    Row,
    counted,
    mean_of,
    means_figure,
    minus,
    minus_scratch,
    name,
    rate_of,
    rows_table,
    runs_of,
    signed_splits,
)
from benchmarks.results.small_images import Images, Trainer, evaluate

RATES = (0.005, 0.01, 0.02)
SEEDS = 5
# Points of a cloud, clouds of a batch, and training clouds of the ten classes.
POINTS, BATCH, TRAINING_CLOUDS = 64, 32, 3991
# Multiply-accumulates x samples of every run; the clouds that growth looks at.
COMPUTE, SAMPLES = 6e9, 1024
# As in the paper, with a quarter of its filters: four in every EdgeConv layer, and 40% more at each of four steps.
FIRST, FULL, MORE, AT = (4,) * 4, (16, 16, 32, 64), 0.4, (0.08, 0.16, 0.24, 0.32)
EPS = "relative:0.3"
UNITS = tuple(f"edgeconvs.{place}" for place in range(len(FIRST)))


@dataclass(frozen=True)
class Network(Row):
    """A way to come to a network.

    Attributes:
        share: the share of the full DGCNN's filters that is trained from scratch.
        other: another network, "pointnet" or "pointnet2".
    """

    share: float | None = None
    other: str | None = None


ROWS = (
    Network("s2d", "DGCNN, S2D", {"m": 2, "c": 1.0}),
    Network("s3d", "DGCNN, S3D, m = 2, c = 1.3", {"m": 2, "c": 1.3}),
    Network("new", "DGCNN, new filters, random", {"splits": False, "new_filters": {"kind": "random"}}),
    Network("s2d scratch", "DGCNN, scratch, widths of S2D", like="s2d"),
    Network("new scratch", "DGCNN, scratch, widths of new filters", like="new"),
    Network("0.5", "DGCNN, scratch, 0.5x", share=0.5),
    Network("0.75", "DGCNN, scratch, 0.75x", share=0.75),
    Network("1.0", "DGCNN, scratch, 1.0x", share=1.0),
    Network("pointnet", "PointNet, scratch", other="pointnet"),
    Network("pointnet2", "PointNet++, scratch", other="pointnet2"),
)
BY_KEY = {row.key: row for row in ROWS}
TIMES, TIMED_RATE = "forward times", RATES[1]


def runs() -> list[Run]:
    """Return all runs, seed by seed, and the one that times forward passes."""
    needs = tuple(name(row.key, TIMED_RATE, seed) for seed in range(SEEDS) for row in ROWS if row.options)
    times = Run(TIMES, {"row": TIMES, "lr": 0.0, "seed": -1, "seeds": SEEDS}, SEEDS, needs)
    return [*runs_of(ROWS, RATES, SEEDS), times]


def perform(run: Run, records: Records, data: Images) -> Record:
    """Train one network, which may grow, until the compute is spent."""
    settings = run.settings
    if settings["row"] == TIMES:
        return forward_times(records, data)
    row, seed = BY_KEY[settings["row"]], settings["seed"]
    like = None if row.like is None else records[name(row.like, settings["lr"], seed)]
    model = network(row, seed) if like is None else clouds.dgcnn(like["widths"], seed)
    return _Training(row, model, settings["lr"], seed, data).perform()


def network(row: Network, seed: int) -> nn.Module:
    """Return the first network of a row whose widths do not depend on another row."""
    if row.other is not None:
        return {"pointnet": clouds.pointnet, "pointnet2": clouds.pointnet2}[row.other](seed)
    if row.share is not None:
        return clouds.dgcnn([round(row.share * width) for width in FULL], seed)
    return clouds.dgcnn(FIRST, seed)


class _Training:
    """One run: Adam along one cosine over the compute, with steps of growth at some shares of it."""

    def __init__(self, row: Network, model: nn.Module, rate: float, seed: int, data: Images) -> None:
        self.row, self.model, self.seed, self.data = row, model, seed, data
        self.optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        self.trainer = Trainer(data, seed, rate, COMPUTE, BATCH)
        self.graph = self._traced()
        self.growing = 0.0
        self.phases: list[Record] = []

    def perform(self) -> Record:
        """Return the record of the run."""
        steps = AT if self.row.options else ()
        for place, share in enumerate((*steps, 1.0)):
            self.trainer.train(self.model, self.optimizer, s3d.count(self.graph).macs, share * COMPUTE)
            if place < len(steps):
                began = time.process_time()
                self._grow(place)
                self.growing += time.process_time() - began
        graph = self.graph
        found = evaluate(self.model, self.data)
        return {
            "accuracy": round(found["accuracy"], 2),
            "loss": round(found["loss"], 4),
            "train_loss": round(self.trainer.loss, 4),
            "widths": [graph.widths()[unit] for unit in UNITS if unit in graph.widths()],
            "params": sum(parameter.numel() for parameter in self.model.parameters()),
            "macs": s3d.count(graph).macs,
            "samples": self.trainer.samples,
            "compute": self.trainer.spent,
            "train_seconds": round(self.trainer.seconds, 2),
            "growth_seconds": round(self.growing, 2),
            "phases": self.phases,
        }

    def _traced(self) -> s3d.Graph:
        return s3d.trace(self.model, self.data.x[:2])

    def _grow(self, place: int) -> None:
        number = 1000 * self.seed + place
        options = dict(self.row.options)
        if "new_filters" in options:
            options["new_filters"] = {
                **options["new_filters"],
                "units": UNITS,
                "generator": torch.Generator().manual_seed(number),
            }
        widths = self.graph.widths()
        top = round(MORE * sum(widths[unit] for unit in UNITS))
        step = s3d.grow_step(
            self.model,
            F.cross_entropy,
            self.data.drawn(SAMPLES, number, size=128),
            self.optimizer,
            units=UNITS,
            eps=EPS,
            top_k=top,
            **options,
        )
        self.graph = self._traced()
        self.phases.append(counted(step.plan))


def forward_times(records: Records, data: Images, rounds: int = 15) -> Record:
    """Return CPU seconds of forward passes of 16 clouds on one thread, relative to the full DGCNN; all take turns."""
    models: dict[str, nn.Module] = {row.key: network(row, 0) for row in ROWS if not row.options and row.like is None}
    models |= {
        f"{row.key}, seed {seed}": clouds.dgcnn(records[name(row.key, TIMED_RATE, seed)]["widths"], 0)
        for row in ROWS
        if row.options
        for seed in range(SEEDS)
    }
    x = data.x[:16]
    seconds: dict[str, list[float]] = {key: [] for key in models}
    with torch.inference_mode():
        for turn in range(rounds + 2):
            for key, model in models.items():
                model.eval()
                began = time.process_time()
                model(x)
                # The first two turns are for warming up.
                if turn >= 2:
                    seconds[key].append(time.process_time() - began)
    full = statistics.median(seconds["1.0"])
    return {
        "milliseconds": {key: round(1000 * statistics.median(own), 3) for key, own in seconds.items()},
        "relative": {key: round(statistics.median(own) / full, 3) for key, own in seconds.items()},
    }


def compared(records: Records) -> Comparison:
    """Return the accuracies of all rows on the seeds that are complete."""
    return Comparison.of(
        {key: one for key, one in records.items() if key != TIMES},
        [row.key for row in ROWS],
        RATES,
        lambda record: record["accuracy"],
    )


def parts(records: Records) -> Mapping[str, str]:
    """Return the table of all rows, the best first."""
    relative = records[TIMES]["relative"] if TIMES in records else {}

    def forward(found: Comparison, row: Row) -> str:
        times = [value for key, value in relative.items() if key.split(",")[0] == row.key]
        return f"{statistics.fmean(times):.2f}" if times else ""

    columns: dict[str, Cell] = {
        "minus scratch of its widths": minus_scratch(ROWS),
        "minus scratch, 0.5x": minus("0.5"),
        "learning rate": rate_of,
        "parameters": mean_of("params"),
        "MACs": mean_of("macs", unit=1000, end="k"),
        "epochs": mean_of("samples", 1, unit=TRAINING_CLOUDS),
        "CPU s of training": mean_of("train_seconds", 1),
        "CPU s of growth": mean_of("growth_seconds", 1, grown=True),
        "forward time / 1.0x": forward,
    }
    return {"F: networks": rows_table(compared(records), ROWS, "accuracy (%)", columns)}


def values(records: Records) -> Mapping[str, str]:
    """Return means and differences for sentences: "F: new - s2d"."""
    found = compared(records)
    texts = {f"F: {row.key}": str(found.mean(row.key)) for row in ROWS}
    pairs = (
        *(("s2d", "s2d scratch"), ("new", "new scratch"), ("new", "s2d"), ("s3d", "s2d")),
        *(("s2d", "0.5"), ("new", "0.5"), ("s2d", "1.0"), ("0.5", "1.0"), ("s2d", "pointnet"), ("s2d", "pointnet2")),
    )
    texts |= {f"F: {first} - {second}": found.minus(first, second).signed for first, second in pairs}
    signed, splits = signed_splits(found.of_row("s3d"))
    texts["F: signed"] = f"{signed} of {splits}"
    taken = {
        key: statistics.fmean(one["train_seconds"] + one["growth_seconds"] for one in found.of_row(key))
        for key in ("s2d", "0.5")
    }
    texts["F: CPU of s2d / 0.5"] = f"{taken['s2d'] / taken['0.5']:.1f}"
    return texts | {"F: seeds": str(len(found.seeds("s2d")))}


def figures(records: Records) -> Mapping[str, str]:
    """Return the accuracies as a figure."""
    found = compared(records)
    drawn = means_figure(
        found,
        ROWS,
        "point-clouds",
        title="Ten classes of ModelNet40 at equal compute: test accuracy",
        x_label=f"percent, mean and 95% interval of {len(found.seeds('s2d'))} seeds",
    )
    return {"results-F.svg": drawn}


def load(path: str) -> Images:
    """Return the clouds of ten classes.

    Raises:
        ValueError: there are not as many training clouds as the table of epochs counts on.
    """
    found = clouds.load(path, POINTS, clouds.TEN)
    if len(found.x) != TRAINING_CLOUDS:
        raise ValueError(f"{path} must have {TRAINING_CLOUDS} training clouds of ten classes, got {len(found.x)}")
    return found


EXPERIMENT = Experiment(
    key="F",
    title="a small DGCNN on ten classes of ModelNet40, grown and from scratch at equal compute",
    runs=runs,
    perform=perform,
    about={
        "compute": COMPUTE,
        "points": POINTS,
        "classes": clouds.TEN,
        "batch": BATCH,
        "clouds for growth": SAMPLES,
        "first widths": FIRST,
        "full widths": FULL,
        "growth at": AT,
        "eps": EPS,
    },
    data="modelnet40",
    load=load,
    parts=parts,
    values=values,
    figures=figures,
)
