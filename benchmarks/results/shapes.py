"""Experiment D2: shapes at equal multiply-accumulates, each trained from scratch. Does growth find better ones?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.results import equal_compute, growing, small_images
from benchmarks.results.experiment import Experiment, Record, Records, Run
from benchmarks.results.growing import Growing, doubling, scratch, uniform
from benchmarks.results.methods import NEW, RATES, name, selected

SEEDS = 12
# The learning rate of the networks that find shapes.
FINDING_RATE = 0.2
# Ways to find a shape, as settings of `Growing`; each spends the MACs of uniform blocks where a MAC gains the most.
FINDERS: Mapping[str, Mapping[str, Any]] = {
    "s2d": selected(by="macs"),
    "s3d": selected(c=3.0, by="macs"),
    "gradient": {**NEW, **selected(by="macs")},
    "random": {"plan": "random splits", **selected(by="macs")},
}
TITLES = {
    "gradient": "found by gradients of new filters per MAC",
    "s2d": "found by S2D, gain per MAC",
    "s3d": "found by S3D (m = 2, c = 3), gain per MAC",
    "random": "found by chance within the MACs",
    "doubling": "width doubles at strides",
    "uniform": "uniform blocks",
}


def runs() -> list[Run]:
    """Return all runs, seed by seed: first those that find shapes."""
    found = []
    for seed in range(SEEDS):
        for kind, options in FINDERS.items():
            settings = {"row": f"find {kind}", "lr": FINDING_RATE, "seed": seed, **options}
            found.append(Run(f"find {kind}, seed {seed}", settings, rank=seed))
        for kind in TITLES:
            for rate in RATES:
                needs = (f"find {kind}, seed {seed}",) if kind in FINDERS else ()
                settings = {"row": kind, "lr": rate, "seed": seed}
                found.append(Run(name(kind, rate, seed), settings, rank=seed, needs=needs))
    return found


def perform(run: Run, records: Records, images: small_images.Images) -> Record:
    """Perform one run."""
    row = run.settings["row"]
    if row.startswith("find "):
        return Growing(run.settings, images).perform(only_widths=True)
    if row in FINDERS:
        (found,) = records.values()
        return scratch(run.settings, found["widths"], images)
    widths = uniform(growing.LAST)
    return scratch(run.settings, widths if row == "uniform" else doubling(widths), images)


EXPERIMENT = Experiment(
    key="D2",
    title="shapes at equal MACs, trained from scratch on CIFAR-100",
    runs=runs,
    perform=perform,
    about=equal_compute.EXPERIMENT.about,
    data="cifar100",
    load=small_images.load,
)
