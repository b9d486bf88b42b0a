"""Experiment C: how much of the promised gain fresh data keep, against the number of samples that S is made of."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import s3d_fast as s3d
from benchmarks.results import clouds, small_images
from benchmarks.results.experiment import Experiment, Record, Records, Run
from benchmarks.results.small_images import Images, Trainer, evaluate
from benchmarks.results.statistics import interval
from benchmarks.results.tables import table
from s3d_fast.capture.curvature import GROWTH_FLOOR
from s3d_fast.operators import DenseOperator
from s3d_fast.report import scales
from s3d_fast.report.plot import Band, Guide, Line, Mark, Plot, Point, Style, beside

SEEDS = 5
SELECTION = {"m": 2, "c": 1.3, "fraction": 0.35}
EPS, RATE, BATCH = 0.01, 0.1, 64
Matrices = dict[str, Tensor]  # unit -> (M, D, D), float64


@dataclass(frozen=True)
class Subject:
    """A network and its data.

    Attributes:
        name: its name on the page.
        make: makes it, from a seed.
        epochs: of training.
        sizes: the numbers of samples.
        chunk: samples whose matrices are made at once.
        kinds: the curvatures that are compared.
        units: the units that may be split begin with this.
    """

    name: str
    make: Callable[[int], nn.Module]
    epochs: int
    sizes: tuple[int, ...]
    chunk: int
    kinds: tuple[str, ...]
    units: str


MOBILENET = Subject(
    "MobileNetV1",
    lambda seed: small_images.network((12, 24, 24, 24, 24), seed),
    epochs=4,
    sizes=(256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 50_000),
    chunk=512,
    kinds=("exact", "paper"),
    units="blocks",
)
DGCNN = Subject(
    "DGCNN",
    lambda seed: clouds.dgcnn((8, 8, 8, 8), seed, classes=40),
    epochs=4,
    sizes=(256, 512, 1024, 2048, 4096, 8192),
    chunk=128,
    kinds=("exact",),
    units="edgeconvs",
)


def runs(subject: Subject) -> list[Run]:
    """Return a run for every seed."""
    return [Run(f"{subject.name}, seed {seed}", {"network": subject.name, "seed": seed}, seed) for seed in range(SEEDS)]


def perform(subject: Subject, run: Run, records: Records, data: Images) -> Record:
    """Train a network; choose splits by S of more and more training samples; judge them by S of the test samples."""
    seed = run.settings["seed"]
    model = subject.make(seed)
    graph = s3d.trace(model, data.x[:2])
    macs = s3d.count(graph).macs
    total = float(macs) * len(data.x) * subject.epochs
    trainer = Trainer(data, seed, RATE, total, BATCH)
    trainer.train(model, torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=5e-4), macs, total)
    accuracy = evaluate(model, data)["accuracy"]
    order = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(seed))
    fresh: dict[str, Matrices] = {}
    found: list[Record] = []
    for kind in subject.kinds:
        matrices = partial(
            _matrices, model, graph, kind, [unit for unit in graph.units if unit.startswith(subject.units)]
        )
        fresh[kind] = _mean([matrices(*batch) for batch in _batches(data.x_test, data.y_test, subject.chunk)])
        best = _plan(fresh[kind], graph).gain
        total_S: Matrices = {}
        done = 0
        for size in subject.sizes:
            for index in order[done:size].split(subject.chunk):
                for name, S in matrices(data.x[index], data.y[index]).items():
                    total_S[name] = total_S.get(name, 0) + S * (len(index) / subject.sizes[-1])
            done = size
            # A common factor does not change the choice, but what is promised.
            scale = subject.sizes[-1] / size
            plan = _plan({name: S * scale for name, S in total_S.items()}, graph)
            own = _changes(plan, fresh[kind])
            found.append(
                {
                    "kind": kind,
                    "samples": size,
                    "promised": _short(plan.gain),
                    "kept": _short(float(own.sum())),
                    # What exact curvature says about the same splits.
                    "true": _short(float(_changes(plan, fresh["exact"]).sum())),
                    "best": _short(best),
                    "raise": round(float((own > 0).double().mean()), 4),
                }
            )
    return {"accuracy": round(accuracy, 2), "filters": sum(graph.widths().values()), "sizes": found}


def _matrices(model: nn.Module, graph: s3d.Graph, kind: str, units: Sequence[str], x: Tensor, y: Tensor) -> Matrices:
    """Return S of some units on some samples."""
    options = {"floor": GROWTH_FLOOR} if kind == "exact" else {}
    operators = s3d.capture(
        model, F.cross_entropy, [(x, y)], graph, units=units, rows_per_sample=None, eps=EPS, curvature=kind, **options
    )
    return {name: operator.dense().double() for name, operator in operators.items()}


def _batches(x: Tensor, y: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches of one size; the samples that are left over are not used."""
    return [(x[start : start + size], y[start : start + size]) for start in range(0, len(x) - size + 1, size)]


def _mean(every: Sequence[Matrices]) -> Matrices:
    return {name: torch.stack([one[name] for one in every]).mean(0) for name in every[0]}


def _plan(matrices: Matrices, graph: s3d.Graph) -> s3d.SplitPlan:
    operators = {name: DenseOperator(S) for name, S in matrices.items()}
    return s3d.select(s3d.extremal_eigenpairs(operators, solver="exact"), graph, **SELECTION)


def _changes(plan: s3d.SplitPlan, matrices: Matrices) -> Tensor:
    """Return sum_k w_k delta_k^T S delta_k of every split of a plan with these matrices."""
    found = []
    for split in plan.splits:
        offsets, S = split.offsets.double(), matrices[split.unit][split.neuron]
        found.append(((offsets @ S * offsets).sum(-1) * split.weights.double()).sum())
    return torch.stack(found)


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def parts(subject: Subject, mark: str, records: Records) -> Mapping[str, str]:
    """Return the table: by number of samples, what fresh samples keep of the promise."""
    head = ["samples"]
    for kind in subject.kinds:
        word = "" if len(subject.kinds) == 1 else f"{kind}: "
        head += [f"{word}promised / best", "kept / promised", "kept / best", "splits that raise the loss"]
    if "paper" in subject.kinds:
        head.append("exact gain of the paper's choice / of the exact choice")
    rows = [head]
    for size in subject.sizes:
        row = [f"{size:,}"]
        for kind in subject.kinds:
            own = shares(records, kind, size)
            row += [str(interval(own[key])) for key in ("promised", "share", "kept")]
            row.append(f"{statistics.fmean(own['raise'].values()):.0%}")
        if "paper" in subject.kinds:
            row.append(str(interval(of_the_papers_choice(records, size))))
        rows.append(row)
    return {f"{mark}: kept": table(rows)}


def values(subject: Subject, mark: str, records: Records) -> Mapping[str, str]:
    """Return shares for sentences: "C: exact, 1024: share"."""
    found = {f"{mark}: accuracy": str(interval({place: one["accuracy"] for place, one in enumerate(records.values())}))}
    for kind in subject.kinds:
        for size in subject.sizes:
            own = shares(records, kind, size)
            found[f"{mark}: {kind}, {size}: share"] = f"{statistics.fmean(own['share'].values()):.0%}"
            found[f"{mark}: {kind}, {size}: kept"] = str(interval(own["kept"]))
            found[f"{mark}: {kind}, {size}: raise"] = f"{statistics.fmean(own['raise'].values()):.0%}"
    if "paper" in subject.kinds:
        for size in subject.sizes:
            found[f"{mark}: paper / exact, {size}"] = str(interval(of_the_papers_choice(records, size)))
    return found


def of_the_papers_choice(records: Records, size: int) -> dict[int, float]:
    """Return the gain, by exact curvature of fresh samples, of the paper's choice over that of the exact choice."""
    paper, exact = (_at(records, kind, size) for kind in ("paper", "exact"))
    return {seed: paper[seed]["true"] / exact[seed]["true"] for seed in exact}


def shares(records: Records, kind: str, size: int) -> dict[str, dict[int, float]]:
    """Return, by seed: promised and kept gain relative to the best of fresh samples; their ratio; the wrong splits."""
    own = _at(records, kind, size)
    return {
        "promised": {seed: one["promised"] / one["best"] for seed, one in own.items()},
        "kept": {seed: one["kept"] / one["best"] for seed, one in own.items()},
        "share": {seed: one["kept"] / one["promised"] for seed, one in own.items()},
        "raise": {seed: one["raise"] for seed, one in own.items()},
    }


def _at(records: Records, kind: str, size: int) -> dict[int, Record]:
    return {
        record["settings"]["seed"]: one
        for record in records.values()
        for one in record["sizes"]
        if one["kind"] == kind and one["samples"] == size
    }


def figures(subject: Subject, mark: str, records: Records) -> Mapping[str, str]:
    """Return promised and kept gain against the number of samples, relative to the best of fresh samples."""
    curves = (
        ("promised", "promised", Style("orange", marker="triangle")),
        ("kept", "kept on fresh data", Style("blue")),
    )
    every = [
        value
        for kind in subject.kinds
        for size in subject.sizes
        for key, _, _ in curves
        for value in shares(records, kind, size)[key].values()
    ]
    margin = 0.04 * (max(every) - min(0.0, *every))
    y = scales.Scale(min(0.0, min(every) - margin), max(every) + margin)
    x = scales.Scale(0.8 * subject.sizes[0], 1.25 * subject.sizes[-1], "log", word=lambda value: f"{value:,.0f}")
    plots = []
    for kind in subject.kinds:
        marks: list[Mark] = [Guide(y=1.0)]
        for key, label, style in curves:
            points = []
            for size in subject.sizes:
                own = shares(records, kind, size)[key]
                mean = statistics.fmean(own.values())
                marks.append(Band([(size, min(own.values()), max(own.values()))], style))
                points.append(Point(size, mean, (label, f"{size:,} samples: {interval(own)}")))
            marks.append(Line(points, style, label))
        curvature = "the paper's curvature" if kind == "paper" else "exact curvature"
        plots.append(
            Plot(
                f"samples-{kind}",
                x,
                y,
                marks,
                title=f"{subject.name}, {curvature}",
                x_label="samples that S is made of",
                y_label="gain / best gain of fresh data",
                width=420,
                height=230,
            )
        )
    return {f"results-{mark}.svg": beside(plots)}


def load_images(path: str) -> Images:
    """Return all images of CIFAR-100, averaged to 16 x 16 pixels, with their coarse classes."""
    return small_images.load(path, train=50_000, test=10_000)


def load_clouds(path: str) -> Images:
    """Return all clouds of ModelNet40 with 64 points."""
    return clouds.load(path, 64)


def _experiment(key: str, subject: Subject, data: str, load: Callable[[str], Images]) -> Experiment:
    return Experiment(
        key=key,
        title=f"how many samples: promised and kept gain, {subject.name}",
        runs=partial(runs, subject),
        perform=_PERFORM[key],
        about={"epochs": subject.epochs, "eps": EPS, "learning rate": RATE, **SELECTION},
        data=data,
        load=load,
        parts=partial(parts, subject, key),
        values=partial(values, subject, key),
        figures=partial(figures, subject, key),
    )


def perform_images(run: Run, records: Records, data: Images) -> Record:
    """Perform a run of the MobileNet."""
    return perform(MOBILENET, run, records, data)


def perform_clouds(run: Run, records: Records, data: Images) -> Record:
    """Perform a run of the DGCNN."""
    return perform(DGCNN, run, records, data)


_PERFORM = {"C": perform_images, "C2": perform_clouds}
IMAGES = _experiment("C", MOBILENET, "cifar100", load_images)
CLOUDS = _experiment("C2", DGCNN, "modelnet40", load_clouds)
