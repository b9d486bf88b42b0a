"""Experiment D3: prune and regrow on digits, beside growth alone and pruning alone, at equal compute."""

from __future__ import annotations

import statistics
from functools import lru_cache

import torch
import torch.nn.functional as F

from benchmarks.results import growing
from benchmarks.results.comparison import Comparison
from benchmarks.results.equal_compute_page import BY_KEY, COLOURS, FAMILIES, family
from benchmarks.results.experiment import Experiment, Record, Records, Run
from benchmarks.results.figures import Bar, intervals
from benchmarks.results.growing import Growing, scratch, uniform
from benchmarks.results.methods import RATES
from benchmarks.results.rows import name
from benchmarks.results.small_images import Images
from benchmarks.results.tables import table
from s3d_fast import data

SEEDS = 5
COMPUTE = 1e9
# Rows of experiment D.
ROWS = ("regrow", "new", "s3d", "l1", "bn", "uniform")


@lru_cache
def load(path: str) -> Images:
    """Return scikit-learn's digits, enlarged to 16 x 16 with three equal channels; there is no file to name."""
    dataset = data.digits()
    parts = []
    for source in (dataset.train, dataset.test):
        x, y = source.batch(torch.arange(len(source.labels)), augmented=False)
        x = F.interpolate(x, scale_factor=2.0).expand(-1, 3, -1, -1)
        parts += [x.contiguous(memory_format=torch.channels_last), y]
    return Images(*parts)


def runs() -> list[Run]:
    """Return all runs, seed by seed."""
    return [
        Run(
            name(key, rate, seed),
            {"row": key, "lr": rate, "seed": seed, "compute": COMPUTE, **BY_KEY[key].options},
            rank=seed,
        )
        for seed in range(SEEDS)
        for key in ROWS
        for rate in RATES
    ]


def perform(run: Run, records: Records, images: Images) -> Record:
    """Perform one run."""
    if run.settings["row"] == "uniform":
        return scratch(run.settings, uniform(growing.LAST), images)
    return Growing(run.settings, images).perform()


def compared(records: Records) -> Comparison:
    """Return all rows on the seeds that are complete."""
    return Comparison.of(records, ROWS, RATES, lambda record: record["accuracy"])


def parts(records: Records) -> dict[str, str]:
    """Return the table of docs/results.md."""
    found = compared(records)
    images = len(load("").x)
    rows = [["method", "accuracy (%)", "minus uniform", "learning rate", "MACs", "parameters", "epochs"]]
    for key in sorted(ROWS, key=lambda key: -found.mean(key).mean):
        own = found.of_row(key)
        rows.append(
            [
                BY_KEY[key].title,
                str(found.mean(key)),
                "" if key == "uniform" else found.minus(key, "uniform").signed,
                f"{found.rate(key):g}",
                f"{statistics.fmean(one['macs'] for one in own) / 1000:.1f}k",
                f"{statistics.fmean(one['params'] for one in own):.0f}",
                f"{statistics.fmean(one['samples'] for one in own) / images:.1f}",
            ]
        )
    return {"D3: regrow": table(rows)}


def values(records: Records) -> dict[str, str]:
    """Return differences for sentences: "D3: regrow - new"."""
    found = compared(records)
    texts = {f"D3: regrow - {key}": found.minus("regrow", key).signed for key in ROWS if key != "regrow"}
    texts |= {f"D3: {key} - uniform": found.minus(key, "uniform").signed for key in ROWS if key != "uniform"}
    return texts | {"D3: seeds": str(len(found.seeds("uniform")))}


def figures(records: Records) -> dict[str, str]:
    """Return the methods as a figure."""
    found = compared(records)
    ranked = sorted((key for key in ROWS if key != "uniform"), key=lambda key: -found.mean(key).mean)
    bars = [Bar(BY_KEY[key].title, found.minus(key, "uniform"), COLOURS[family(BY_KEY[key])]) for key in ranked]
    used = {family(BY_KEY[key]) for key in ranked}
    plot = intervals(
        "digits-regrow",
        bars,
        title="Digits: test accuracy at equal compute, minus that of uniform blocks trained from scratch",
        x_label=f"percentage points, mean and 95% interval of {len(found.seeds('uniform'))} seeds, paired",
        signed=True,
        legend={COLOURS[kind]: FAMILIES[kind] for kind in COLOURS if kind in used},
    )
    return {"results-D3.svg": plot.draw(alone=True)}


EXPERIMENT = Experiment(
    key="D3",
    title="prune and regrow on digits, beside growth alone and pruning alone",
    runs=runs,
    perform=perform,
    about={"compute": COMPUTE, "batch": growing.BATCH, "first width": growing.FIRST, "growth steps": growing.STEPS},
    load=load,
    parts=parts,
    values=values,
    figures=figures,
)
