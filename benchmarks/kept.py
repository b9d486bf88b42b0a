"""How much of the gain is left on fresh data, and what it costs: python -m benchmarks.kept --data cifar100.npz.

Two small networks are trained on CIFAR-100. Splits are then chosen from n of the training images, and their gains
computed with S of other images. Kept is the sum of these gains over that of the splits which the other images' own S
chooses. It never reaches 1, since that choice fits its own noise. Times are CPU seconds on one thread.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import s3d_fast as s3d
from benchmarks.kept_table import section
from s3d_fast import data
from s3d_fast.capture import windows
from s3d_fast.capture.curvature import GROWTH_FLOOR
from s3d_fast.data.sources import ArraySource
from s3d_fast.env import report
from s3d_fast.models import MobileNetV1
from s3d_fast.operators import DenseOperator
from s3d_fast.solvers import Spectrum
from s3d_fast.solvers.noise import COARSE_DELTA, COARSEST, sampling_errors, worthwhile_tolerance
from s3d_fast.splitting.selection import cut_of

SELECTION: Mapping[str, Any] = {"m": 2, "c": 1.3, "fraction": 0.35}
BATCH = 250


@dataclass(frozen=True)
class Sizes:
    """How much data each part takes.

    Attributes:
        trained: training images, from which samples are drawn.
        epochs: of training.
        fresh: other images, whose S judges the splits.
        samples: how many disjoint samples of n images are drawn, by n.
        largest_old: the most images with all rows, which take 0.8 MB each.
        cut, rows: the samples of the two other tables, by n.
    """

    trained: int = 20_000
    epochs: int = 18
    fresh: int = 12_000
    samples: tuple[tuple[int, int], ...] = ((500, 8), (1000, 6), (2000, 5), (4000, 3), (8000, 2))
    largest_old: int = 4000
    cut: tuple[int, int] = (1000, 6)
    rows: tuple[tuple[int, int], ...] = ((1000, 6), (2000, 4))


QUICK = Sizes(1000, 1, 500, ((250, 2), (500, 1)), 250, (250, 2), ((250, 2),))


def mobilenet() -> nn.Module:
    """Return a MobileNetV1 of 14 layers with 16 to 32 filters."""
    return MobileNetV1([16, 16, 16, 24, 24, *[32] * 9], data.cifar.CLASSES, stem_stride=1)


def vgg() -> nn.Module:
    """Return six convolutions with BatchNorm, with a maximum over 2 x 2 positions after every second."""
    layers: list[nn.Module] = []
    widths = (3, 8, 8, 12, 12, 16, 16)
    for index, (fan_in, width) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Conv2d(fan_in, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if index % 2 else []
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(widths[-1] * 16, data.cifar.CLASSES))


NETWORKS = {"MobileNetV1": mobilenet, "VGG-like": vgg}


class Experiment:
    """One trained network, S of fresh images, and what the settings choose from samples of the training images."""

    def __init__(self, name: str, source: ArraySource, test: ArraySource, sizes: Sizes) -> None:
        self.name, self.source, self.sizes = name, source, sizes
        torch.manual_seed(0)
        self.model = NETWORKS[name]()
        self._train()
        self.accuracy = self._accuracy(test)
        self.graph = s3d.trace(self.model, self.images(0, 2)[0])
        self.order = torch.randperm(sizes.trained, generator=torch.Generator().manual_seed(1))
        self.filters = sum(unit.width for unit in self.graph.captured())
        self.say(f"accuracy {self.accuracy:.3f}, {self.filters} filters")
        self.fresh = self._fresh()
        self.best = s3d.select(self._exact(self.fresh), self.graph, **SELECTION).gain
        self.say("S of fresh images done")

    def say(self, text: str) -> None:
        """Report progress."""
        print(f"{time.strftime('%H:%M:%S')} {self.name}: {text}", file=sys.stderr, flush=True)

    def images(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return images and labels in the order of the data."""
        return self.source.batch(torch.arange(first, last), augmented=False)

    def sample(self, count: int, number: int) -> list[tuple[Tensor, Tensor]]:
        """Return the batches of a sample; samples of one size share no images."""
        chosen = self.order[number * count : (number + 1) * count]
        assert len(chosen) == count
        return [self.source.batch(index, augmented=False) for index in chosen.split(BATCH)]

    def capture(self, batches: Sequence[tuple[Tensor, Tensor]], rows: int | None) -> s3d.Captured:
        """Capture as `Grower` does, apart from the rows."""
        return s3d.capture(
            self.model, F.cross_entropy, batches, self.graph, rows_per_sample=rows, floor=GROWTH_FLOOR, eps=0.01
        )

    def kept(self, spectra: Mapping[str, Spectrum]) -> float:
        """Return the share of the fresh images' best gain that the chosen splits reach on them."""
        plan = s3d.select(spectra, self.graph, **SELECTION)
        gain = 0.0
        for split in plan.splits:
            offsets, S = split.offsets.double(), self.fresh[split.unit][split.neuron]
            gain += float(((offsets @ S * offsets).sum(-1) * split.weights.double()).sum())
        return gain / self.best

    def measure(self) -> dict[str, Any]:
        """Return all figures."""
        gains = [self._settings(n, number) for n, count in self.sizes.samples for number in range(count)]
        self.say("settings compared")
        n, count = self.sizes.cut
        cuts = [row for number in range(count) for row in self._cut(n, number)]
        self.say("cut done")
        rows = [row for n, count in self.sizes.rows for number in range(count) for row in self._rows(n, number)]
        self.say("rows done")
        found = {"accuracy": self.accuracy, "filters": self.filters, "gains": gains, "cuts": cuts, "rows": rows}
        return {**found, "sizes": {"trained": self.sizes.trained, "fresh": self.sizes.fresh}}

    def _settings(self, n: int, number: int) -> dict[str, Any]:
        """Return kept gain and seconds of both settings on one sample; which goes first alternates."""
        batches = self.sample(n, number)
        found: dict[str, Any] = {"n": n}
        for kind in ("new", "old")[:: -1 if number % 2 else 1]:
            if kind == "new":
                found |= self._new(batches)
            elif n <= self.sizes.largest_old:
                found |= self._old(batches)
        self.say(str(found))
        return found

    def _new(self, batches: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Any]:
        """Solve as `Grower` does by default: coarsely, and again if the noise of the data asks for it."""
        clock = Clock()
        operators = self.capture(batches, 64)
        captured = clock.seconds
        spectra = self._coarse(operators, COARSEST)
        solved = clock.seconds
        first = self.kept(spectra)
        clock.restart(solved)
        tol = worthwhile_tolerance(sampling_errors(operators, spectra))
        if tol <= 0.8 * COARSEST:
            spectra = self._coarse(operators, tol)
        seconds = clock.seconds
        times = {"new capture": captured, "coarse seconds": solved, "new seconds": seconds}
        kept = {"coarse kept": first, "new kept": self.kept(spectra), "new products": products(spectra)}
        return {name: round(value, 4) for name, value in {**times, **kept, "tol": tol}.items()}

    def _old(self, batches: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Any]:
        """Solve as `Grower` did before: all rows, every filter to a tolerance of 1e-2."""
        clock = Clock()
        operators = self.capture(batches, None)
        captured = clock.seconds
        spectra = s3d.extremal_eigenpairs(operators, solver="lanczos", tol=1e-2)
        times = {"old capture": captured, "old seconds": clock.seconds}
        kept = {"old kept": self.kept(spectra), "old products": products(spectra)}
        return {name: round(value, 4) for name, value in {**times, **kept}.items()}

    def _cut(self, n: int, number: int) -> list[dict[str, Any]]:
        """Return products with and without the cut, and the share of chosen filters that exact spectra choose too."""
        operators = self.capture(self.sample(n, number), 64)
        right = self._chosen(s3d.extremal_eigenpairs(operators, solver="exact"))
        found = []
        for tol, delta in ((0.1, 1e-2), (1e-2, 1e-3)):
            row: dict[str, Any] = {"tol": tol, "delta": delta}
            for kind, until in (("all", None), ("cut", cut_of(self.filters, **SELECTION))):
                spectra = s3d.extremal_eigenpairs(operators, solver="lanczos", tol=tol, delta=delta, until=until)
                row[f"{kind} products"] = round(products(spectra), 4)
                row[f"{kind} same"] = len(right & self._chosen(spectra)) / len(right)
            found.append(row)
        return found

    def _rows(self, n: int, number: int) -> list[dict[str, Any]]:
        """Return kept gain and seconds by rows per sample, and for tiles of 2 x 2 instead of 4 x 4."""
        batches = self.sample(n, number)
        found = []
        kinds: list[tuple[int | None, int]] = [(16, 4), (64, 4), (256, 4), (None, 4)]
        # Other windows do not overlap: their tiles are single positions.
        if any(isinstance(layer, nn.Conv2d) and layer.groups > 1 for layer in self.model.modules()):
            kinds += [(16, 2), (64, 2), (64, 1)]
        for rows, tile in kinds:
            with tiles_of(tile):
                clock = Clock()
                spectra = self._coarse(self.capture(batches, rows), COARSEST)
                seconds = clock.seconds
            found.append({
                "n": n, "rows": rows, "tile": tile, "kept": round(self.kept(spectra), 4), "seconds": round(seconds, 4)
            })  # fmt: skip
        return found

    def _coarse(self, operators: s3d.Captured, tol: float) -> dict[str, Spectrum]:
        until = cut_of(self.filters, **SELECTION)
        return s3d.extremal_eigenpairs(operators, tol=tol, delta=COARSE_DELTA, until=until, precision="medium")

    def _chosen(self, spectra: Mapping[str, Spectrum]) -> set[tuple[str, int]]:
        return {(split.unit, split.neuron) for split in s3d.select(spectra, self.graph, **SELECTION).splits}

    def _exact(self, matrices: Mapping[str, Tensor]) -> dict[str, Spectrum]:
        operators = {name: DenseOperator(S) for name, S in matrices.items()}
        return s3d.extremal_eigenpairs(operators, solver="exact")

    def _fresh(self) -> dict[str, Tensor]:  # (M, D, D), float64
        """Return S of images that the network was not trained on, from all rows."""
        total: dict[str, Tensor] = {}
        starts = range(self.sizes.trained, self.sizes.trained + self.sizes.fresh, BATCH)
        for start in starts:
            operators = self.capture([self.images(start, start + BATCH)], None)
            for name, operator in operators.items():
                S = operator.dense().double() / len(starts)
                total[name] = total[name] + S if name in total else S
        return total

    def _train(self) -> None:
        sizes = self.sizes
        part = replace(
            self.source, inputs=self.source.inputs[: sizes.trained], labels=self.source.labels[: sizes.trained]
        )
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, sizes.epochs)
        for epoch in range(sizes.epochs):
            for x, y in part.batches(64, train=True):
                optimizer.zero_grad()
                F.cross_entropy(self.model(x), y).backward()
                optimizer.step()
            schedule.step()
            self.say(f"epoch {epoch + 1} of {sizes.epochs}")
        self.model.eval()

    @torch.no_grad()
    def _accuracy(self, test: ArraySource) -> float:
        right = [(self.model(x).argmax(-1) == y).sum() for x, y in test.batches(500)]
        return float(sum(right)) / len(test)


class Clock:
    """CPU seconds of this process."""

    def __init__(self) -> None:
        self.restart(0.0)

    def restart(self, seconds: float) -> None:
        """Go on from so many seconds."""
        self.began = time.process_time() - seconds

    @property
    def seconds(self) -> float:
        """The seconds since the start."""
        return time.process_time() - self.began


@contextmanager
def tiles_of(size: int) -> Iterator[None]:
    """Make windows that overlap own tiles of another size."""
    usual, windows.TILE = windows.TILE, size
    try:
        yield
    finally:
        windows.TILE = usual


def products(spectra: Mapping[str, Spectrum]) -> float:
    """Return the mean number of products per filter."""
    return float(torch.cat([spectrum.matvecs for spectrum in spectra.values()]).double().mean())


def main() -> None:
    """Measure, print the tables and store the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--match", default="", help="run only networks whose name contains this")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--quick", action="store_true", help="take little data, to see that everything runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dataset = data.cifar100(options.data)
    train, test = dataset.train, dataset.test
    assert isinstance(train, ArraySource)
    assert isinstance(test, ArraySource)
    results: dict[str, Any] = {"machine": machine(), "networks": {}}
    for name in NETWORKS:
        if options.match in name:
            experiment = Experiment(name, train, test, QUICK if options.quick else Sizes())
            results["networks"][name] = experiment.measure()
            if options.out is not None:
                options.out.write_text(as_text(results))
    sys.stdout.write(section(results))


def machine() -> str:
    """Return the processor and the number of threads."""
    return f"processor {report()['processor']}; threads {torch.get_num_threads()}; torch {torch.__version__}"


def as_text(results: Mapping[str, Any]) -> str:
    """Return JSON with a line for every measurement."""
    text = json.dumps(results)
    return text.replace("}, {", "},\n{").replace("[{", "[\n{").replace("}]", "}\n]") + "\n"


if __name__ == "__main__":
    main()
