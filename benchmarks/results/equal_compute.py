"""Experiment D: growth, pruning and training from scratch at equal compute on CIFAR-100."""

from __future__ import annotations

from benchmarks.results import equal_compute_page, growing, small_images
from benchmarks.results.experiment import Experiment, Record, Records, Run
from benchmarks.results.growing import Growing, scratch, uniform
from benchmarks.results.methods import OUTER_RATES, OUTER_ROWS, OUTER_SEEDS, RATES, ROWS, SEEDS
from benchmarks.results.rows import Row, name


def runs() -> list[Run]:
    """Return all runs: seed by seed, those of the main rows first."""
    found = [_run(row, rate, seed) for seed in range(SEEDS) for row in ROWS for rate in RATES]
    outer = [row for row in ROWS if row.key in OUTER_ROWS]
    found += [_run(row, rate, seed, rank=3) for seed in range(OUTER_SEEDS) for row in outer for rate in OUTER_RATES]
    return found


def _run(row: Row, rate: float, seed: int, rank: int | None = None) -> Run:
    return Run(
        name(row.key, rate, seed),
        {"row": row.key, "lr": rate, "seed": seed, **row.options},
        rank=seed if rank is None else rank,
        needs=() if row.like is None else (name(row.like, rate, seed),),
    )


def perform(run: Run, records: Records, images: small_images.Images) -> Record:
    """Perform one run."""
    settings = run.settings
    row = next(row for row in ROWS if row.key == settings["row"])
    if row.like is not None:
        (like,) = records.values()
        return scratch(settings, like["widths"], images, like["samples"] if row.options else None)
    if not row.options:
        return scratch(settings, uniform(growing.LAST), images)
    return Growing(settings, images).perform()


EXPERIMENT = Experiment(
    key="D",
    title="growth, pruning and scratch at equal compute on CIFAR-100",
    runs=runs,
    perform=perform,
    about={
        "compute": growing.COMPUTE,
        "train images": 8000,
        "test images": 5000,
        "batch": growing.BATCH,
        "images for growth": growing.SAMPLES,
        "momentum": growing.MOMENTUM,
        "weight decay": growing.DECAY,
        "first width": growing.FIRST,
        "growth steps": growing.STEPS,
        "pruned from": growing.PRUNED_FROM,
    },
    data="cifar100",
    load=small_images.load,
    parts=equal_compute_page.parts,
    values=equal_compute_page.values,
    figures=equal_compute_page.figures,
    front=equal_compute_page.front,
)
