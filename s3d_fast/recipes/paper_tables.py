"""The paper's tables as runs: every row a method with its settings, beside the figures that the paper has for it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from s3d_fast.network import costs
from s3d_fast.network.tracing import trace
from s3d_fast.recipes import RECIPES, baselines, preset_for, recipe
from s3d_fast.recipes.job import make_network
from s3d_fast.recipes.methods import METHODS, as_method
from s3d_fast.recipes.recipe import Recipe

# The column of forward times; the paper's are of its own GPU.
FORWARD = "forward (ms)"


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        name: what the paper calls it.
        method: one of `METHODS`.
        figures: the paper's figures, by the names of its columns.
        settings: of the recipe, where they differ from those of the table.
        recipe: the name of the recipe, if it is another.
        step: the phase of a grown network that the row shows; the last by default.
    """

    name: str
    method: str
    figures: Mapping[str, float]
    settings: Mapping[str, Any] = field(default_factory=dict)
    recipe: str | None = None
    step: int | None = None


@dataclass(frozen=True)
class Table:
    """A table: the recipe that its rows share, and the rows in the paper's order."""

    recipe: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]


def _cifar(accuracy: float, params: float, flops: float) -> dict[str, float]:
    return {"accuracy": accuracy, "params (M)": params, "FLOPs (M)": flops}


def _imagenet(macs: float, top1: float, top5: float) -> dict[str, float]:
    return {"MACs (M)": 1000 * macs, "accuracy": top1, "top5": top5}


def _modelnet(accuracy: float, milliseconds: float, params: float) -> dict[str, float]:
    return {"accuracy": accuracy, FORWARD: milliseconds, "params (M)": params}


# L1, Bn and MorphNet keep these shares of the full network's MACs in the paper.
TABLES: dict[str, Table] = {
    "cifar100": Table(
        "cifar100-mobilenet",
        # The paper counts two FLOPs for every MAC: its full network has 94.13 M, and ours 46.4 M MACs.
        ("accuracy", "params (M)", "FLOPs (M)"),
        (
            Row("Full Size Baseline", "full", _cifar(69.04, 3.31, 94.13)),
            Row("L1", "l1", _cifar(69.41, 2.69, 76.34), {"prune_to": 0.81}),
            Row("Bn", "bn", _cifar(69.61, 2.71, 78.15), {"prune_to": 0.83}),
            Row("MorphNet", "morphnet", _cifar(68.27, 2.79, 71.63), {"prune_to": 0.76}),
            Row("S2D-5", "s2d", _cifar(69.69, 0.31, 79.94)),
            Row("S3D-5", "s3d", _cifar(70.19, 0.30, 73.69)),
            Row("Net2Net-5", "net2net", {}),
            Row("new filters-5", "new", {}),
        ),
    ),
    "imagenet": Table(
        "imagenet-mobilenet",
        ("MACs (M)", "accuracy", "top5"),
        (
            Row("MobileNetV1 (1.0x)", "full", _imagenet(0.569, 72.93, 91.14)),
            Row("S2D-4", "s2d", _imagenet(0.561, 73.96, 91.49), step=4),
            Row("S3D-4", "s3d", _imagenet(0.558, 74.12, 91.50), step=4),
            Row("MobileNetV1 (0.75x)", "full", _imagenet(0.317, 70.25, 89.49), {"width_multiplier": 0.75}),
            Row("AMC", "amc", _imagenet(0.301, 70.50, 89.30), {"prune_to": 0.53}),
            Row("S2D-3", "s2d", _imagenet(0.292, 71.47, 89.67), step=3),
            Row("S3D-3", "s3d", _imagenet(0.291, 71.61, 89.83), step=3),
            Row("MobileNetV1 (0.5x)", "full", _imagenet(0.150, 65.20, 86.34), {"width_multiplier": 0.5}),
            Row("S2D-2", "s2d", _imagenet(0.140, 68.26, 87.93), step=2),
            Row("S3D-2", "s3d", _imagenet(0.140, 68.72, 88.19), step=2),
            Row("S2D-1", "s2d", _imagenet(0.082, 64.06, 85.30), step=1),
            Row("S3D-1", "s3d", _imagenet(0.082, 64.37, 85.49), step=1),
            Row("Seed", "s3d", _imagenet(0.059, 59.20, 81.82), step=0),
        ),
    ),
    "modelnet40": Table(
        "modelnet40-dgcnn",
        ("accuracy", FORWARD, "params (M)"),
        (
            Row("PointNet", "full", _modelnet(89.2, 32.19, 2.85), recipe="modelnet40-pointnet"),
            Row("PointNet++", "full", _modelnet(90.7, 331.4, 0.86), recipe="modelnet40-pointnet2"),
            Row("DGCNN (1.0x)", "full", _modelnet(92.6, 60.12, 1.81)),
            Row("DGCNN (0.75x)", "full", _modelnet(92.4, 48.06, 1.64), {"width_multiplier": 0.75}),
            Row("DGCNN (0.5x)", "full", _modelnet(92.3, 38.90, 1.52), {"width_multiplier": 0.5}),
            Row("DGCNN-S2D-4", "s2d", _modelnet(92.7, 42.83, 1.52)),
            Row("DGCNN-S3D-4", "s3d", _modelnet(92.9, 42.06, 1.51)),
        ),
    ),
}


def recipe_of(table: Table, row: Row, preset: str, settings: Mapping[str, Any] | None = None) -> Recipe:
    """Return the recipe of a row, with its settings."""
    name = row.recipe or table.recipe
    # Networks that the paper only compares with have no preset of that name.
    made = recipe(name, preset if preset in RECIPES[name] else preset_for(name, has_gpu=True))
    given = {**(settings or {}), **row.settings}
    return as_method(made.with_settings(given), row.method, given)


def folder_of(row: Row) -> str:
    """Return the name of a row's run; rows that show phases of one run share it."""
    words = [*([row.recipe] if row.recipe else []), row.method]
    words += [f"{name}-{value}" for name, value in row.settings.items()]
    return "-".join(words).replace("_", "-")


@dataclass(frozen=True)
class Expected:
    """What a run is expected to take.

    Attributes:
        epochs: of all phases together.
        compute: MACs of a forward pass times samples, in training.
        seconds: of training on this machine, from one measured step of every size.
    """

    epochs: int
    compute: float
    seconds: float


def expected(recipe: Recipe, method: str, classes: int, shape: Sequence[int], samples: int) -> Expected:
    """Return what a run is expected to take; sizes between the first and the last are estimates.

    Growth by a fraction widens all layers alike here; what it really widens is known only afterwards.
    """
    sizes = _sizes(recipe, method, classes, shape)
    total = Expected(0, 0.0, 0.0)
    for widths, epochs in sizes:
        model = make_network(recipe.with_settings({"widths": widths}), classes)
        macs = costs.count(trace(model, torch.zeros(2, *shape), prove=False)).macs
        per_sample = _seconds_per_sample(model, shape, min(recipe.batch_size, 32))
        total = Expected(
            total.epochs + epochs,
            total.compute + macs * float(samples) * epochs,
            total.seconds + per_sample * samples * epochs,
        )
    return total


def _sizes(recipe: Recipe, method: str, classes: int, shape: Sequence[int]) -> list[tuple[tuple[int, ...], int]]:
    """Return the widths that a run trains, and for how many epochs."""
    kind, phases = METHODS[method].kind, range(recipe.steps + 1)
    if kind == "train":
        return [(recipe.full(), recipe.all_epochs)]

    def macs(widths: Sequence[int]) -> int:
        network = make_network(recipe.with_settings({"widths": tuple(widths)}), classes)
        return costs.count(trace(network, torch.zeros(2, *shape), prove=False)).macs

    if kind == "prune":
        full = macs(recipe.full())
        wanted = [full * recipe.prune_to ** (phase / max(1, recipe.steps)) for phase in phases]
        return [(_scaled(recipe.full(), share / full), recipe.epochs_of(phase)) for phase, share in enumerate(wanted)]
    if recipe.macs is not None or recipe.growth is not None:
        first = macs(recipe.widths)
        # The growth of another cost is taken for that of MACs.
        grown = [first * (recipe.growth or 1.0) ** (phase + 1) for phase in range(recipe.steps)]
        wanted = [first, *(recipe.macs or grown)[: recipe.steps]]
        return [(_scaled(recipe.widths, size / first), recipe.epochs_of(phase)) for phase, size in enumerate(wanted)]
    copies = recipe.m if isinstance(recipe.m, int) else 3
    share = 1 + (recipe.fraction or 0.0) * (copies - 1)
    filters = [round(sum(recipe.widths) * share**phase) for phase in phases]
    return [
        (baselines.scaled_widths(recipe.widths, number, sum), recipe.epochs_of(phase))
        for phase, number in enumerate(filters)
    ]


def _scaled(widths: Sequence[int], macs: float) -> tuple[int, ...]:
    """Return widths at about this share of the MACs, which grow with the square of the widths."""
    return tuple(max(1, round(width * macs**0.5)) for width in widths)


def _seconds_per_sample(model: torch.nn.Module, shape: Sequence[int], batch: int) -> float:
    x = torch.zeros(batch, *shape)
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        model.zero_grad()
        F.cross_entropy(model(x), torch.zeros(batch, dtype=torch.int64)).backward()
        seconds.append(time.perf_counter() - began)
    return min(seconds) / batch
