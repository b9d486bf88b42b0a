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
from benchmarks.results.tables import table
from s3d_fast.capture.curvature import GROWTH_FLOOR
from s3d_fast.operators import DenseOperator
from s3d_fast.report import scales
from s3d_fast.report.plot import Line, Mark, Plot, Point, Style, beside

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
    """

    name: str
    make: Callable[[int], nn.Module]
    epochs: int
    sizes: tuple[int, ...]
    chunk: int
    kinds: tuple[str, ...]


MOBILENET = Subject(
    "MobileNetV1",
    lambda seed: small_images.network((12, 24, 24, 24, 24), seed),
    epochs=2,
    sizes=(256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 50_000),
    chunk=512,
    kinds=("exact", "paper"),
)
DGCNN = Subject(
    "DGCNN",
    lambda seed: clouds.dgcnn((8, 8, 8, 8), seed, classes=40),
    epochs=3,
    sizes=(256, 512, 1024, 2048, 4096, 8192),
    chunk=128,
    kinds=("exact",),
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
        matrices = partial(_matrices, model, graph, kind)
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


def _matrices(model: nn.Module, graph: s3d.Graph, kind: str, x: Tensor, y: Tensor) -> Matrices:
    """Return S of every unit on some samples."""
    options = {"floor": GROWTH_FLOOR} if kind == "exact" else {}
    operators = s3d.capture(
        model, F.cross_entropy, [(x, y)], graph, rows_per_sample=None, eps=EPS, curvature=kind, **options
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
