"""Experiment D2: shapes at equal multiply-accumulates, each trained from scratch. Does growth find better ones?"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.results import equal_compute, growing, small_images
from benchmarks.results.comparison import Comparison
from benchmarks.results.experiment import Experiment, Record, Records, Run
from benchmarks.results.figures import Bar, intervals
from benchmarks.results.growing import Growing, doubling, scratch, uniform
from benchmarks.results.methods import NEW, RATES, selected
from benchmarks.results.rows import name
from benchmarks.results.tables import table

SEEDS = 8
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
            found.append(Run(f"find {kind}, seed {seed}", settings, rank=min(seed, 3)))
        for kind in TITLES:
            for rate in RATES:
                needs = (f"find {kind}, seed {seed}",) if kind in FINDERS else ()
                settings = {"row": kind, "lr": rate, "seed": seed}
                found.append(Run(name(kind, rate, seed), settings, rank=min(seed, 3), needs=needs))
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


def compared(records: Records) -> Comparison:
    """Return all shapes on the seeds that are complete."""
    return Comparison.of(records, list(TITLES), RATES, lambda record: record["accuracy"])


def _ranked(found: Comparison) -> list[str]:
    return sorted(TITLES, key=lambda key: -found.mean(key).mean)


def parts(records: Records) -> dict[str, str]:
    """Return the table of docs/results.md."""
    found = compared(records)
    rows = [["shape", "accuracy (%)", "minus uniform", "learning rate", "MACs", "parameters", "mean widths of blocks"]]
    for key in _ranked(found):
        own = found.of_row(key)
        widths = [statistics.fmean(blocks) for blocks in zip(*(one["widths"][1:] for one in own), strict=True)]
        rows.append(
            [
                TITLES[key],
                str(found.mean(key)),
                "" if key == "uniform" else found.minus(key, "uniform").signed,
                f"{found.rate(key):g}",
                f"{statistics.fmean(one['macs'] for one in own) / 1000:.1f}k",
                f"{statistics.fmean(one['params'] for one in own):.0f}",
                ", ".join(f"{width:.0f}" for width in widths),
            ]
        )
    return {"D2: shapes": table(rows)}


def values(records: Records) -> dict[str, str]:
    """Return differences for sentences: "D2: s2d - uniform"."""
    found = compared(records)
    pairs = [(key, other) for key in TITLES for other in ("uniform", "random") if key != other]
    texts = {f"D2: {key} - {other}": found.minus(key, other).signed for key, other in pairs}
    return texts | {"D2: seeds": str(len(found.seeds("uniform")))}


def figures(records: Records) -> dict[str, str]:
    """Return the shapes as a figure."""
    found = compared(records)
    bars = [
        Bar(TITLES[key], found.minus(key, "uniform"), "green" if key in FINDERS and key != "random" else "grey")
        for key in _ranked(found)
        if key != "uniform"
    ]
    plot = intervals(
        "shapes",
        bars,
        title="Shapes of equal MACs, trained from scratch: accuracy minus that of uniform blocks",
        x_label=f"percentage points, mean and 95% interval of {len(found.seeds('uniform'))} seeds, paired",
        signed=True,
        legend={"green": "found by growth", "grey": "not found by growth"},
    )
    return {"results-D2.svg": plot.draw(alone=True)}


EXPERIMENT = Experiment(
    key="D2",
    title="shapes at equal MACs, trained from scratch on CIFAR-100",
    runs=runs,
    perform=perform,
    about=equal_compute.EXPERIMENT.about,
    data="cifar100",
    load=small_images.load,
    parts=parts,
    values=values,
    figures=figures,
)
