"""The tables and figures of experiment D."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.results.comparison import Comparison
from benchmarks.results.experiment import Record, Records
from benchmarks.results.figures import Bar, intervals
from benchmarks.results.methods import OUTER_RATES, OUTER_ROWS, OUTER_SEEDS, RATES, ROWS
from benchmarks.results.rows import Row
from benchmarks.results.tables import by_rate_and_seed, table

BY_KEY = {row.key: row for row in ROWS}
COLOURS = {"split": "orange", "new": "blue", "prune": "pink", "scratch": "grey"}
FAMILIES = {"split": "splits", "new": "new filters", "prune": "pruning", "scratch": "trained from scratch"}
# What the page asks: the difference of two rows, and what it tells.
QUESTIONS = (
    ("s2d", "s2d paper", "exact S against the paper's S"),
    ("s2d", "net2net", "splits along eigenvectors against random splits"),
    ("s2d paper", "net2net", "the same with the paper's S"),
    ("s2d 8000", "s2d", "S of all 8,000 images against S of 2,048"),
    ("new", "s2d", "new filters against S2D"),
    ("s2d", "s2d scratch", "S2D against scratch of its own widths"),
    ("s3d", "s3d scratch", "S3D, c = 1.3, against scratch of its own widths"),
    ("new", "new scratch", "new filters against scratch of their own widths"),
    ("firefly", "firefly scratch", "Firefly against scratch of its own widths"),
    ("new macs", "new macs scratch", "new filters per MAC against scratch of their own widths"),
    ("new macs", "uniform", "new filters per MAC against uniform blocks"),
    ("new macs", "new", "new filters: allocation per MAC against per filter"),
    ("s2d macs", "s2d", "S2D: allocation per MAC against per filter"),
    ("new macs", "s2d macs", "new filters per MAC against S2D per MAC"),
    ("new alike", "new", "all layers alike against allocation by gradient"),
    ("s3d", "s2d", "S3D, m = 2, c = 1.3, against S2D"),
    ("s3d c3", "s2d", "S3D, m = 2, c = 3, against S2D"),
    ("s3d m3 c3", "s2d", "S3D, m = 3, c = 3, against S2D"),
    ("s3d knapsack", "s2d", "S3D, knapsack, against S2D"),
    ("both", "s3d", "splits and new filters that compete against splits alone"),
    ("both", "new", "splits and new filters that compete against new filters alone"),
    ("firefly", "new", "Firefly against random new filters"),
    ("gradmax", "new", "GradMax against random new filters"),
    ("regrow", "new", "prune and regrow against new filters"),
    ("l1", "uniform", "pruning by L1 norms against scratch"),
    ("bn", "uniform", "pruning by BatchNorm scales against scratch"),
    ("s2d", "s2d 0.01", "steps of 0.3 of the length of a filter against steps of 0.01"),
    ("s2d 1", "s2d", "steps of the length of a filter against 0.3 of it"),
    ("net2net", "net2net 0.01", "the same for random splits: 0.3 against 0.01"),
    ("s2d phases", "s2d", "a cosine per phase against one: S2D"),
    ("new phases", "new", "a cosine per phase against one: new filters"),
    ("s2d reset", "s2d", "optimizer state reset against carried: S2D"),
    ("new reset", "new", "optimizer state reset against carried: new filters"),
    ("s2d recalibrated", "s2d", "BatchNorm recalibrated or not: S2D"),
    ("new recalibrated", "new", "BatchNorm recalibrated or not: new filters"),
    ("s2d scratch epochs", "s2d", "equal epochs, not compute: scratch of S2D's widths against S2D"),
)
# The rows of README.md.
FRONT = ("new macs", "new", "uniform", "s2d scratch", "s2d", "s3d", "net2net", "l1")


def compared(records: Records) -> Comparison:
    """Return all rows on the seeds that are complete."""
    return Comparison.of(records, [row.key for row in ROWS], RATES, lambda record: record["accuracy"])


def family(row: Row) -> str:
    """Return what kind of method a row is."""
    if "prune" in row.options:
        return "prune"
    if not row.options or row.like is not None:
        return "scratch"
    return "new" if "new" in row.options or row.options.get("plan") == "alike" else "split"


def parts(records: Records) -> dict[str, str]:
    """Return the parts of docs/results.md."""
    found = compared(records)
    return {
        "D: ranking": ranking(found),
        "D: questions": questions(found),
        "D: promises": promises(found),
    }


def values(records: Records) -> dict[str, str]:
    """Return differences and means for sentences: "D: new - s2d", "D: new - s2d at 0.1", "D: new"."""
    found = compared(records)
    texts = {f"D: {first} - {second}": found.minus(first, second).signed for first, second, _ in QUESTIONS}
    texts |= {
        f"D: {first} - {second} over rates": found.minus_over_rates(first, second).signed
        for first, second, _ in QUESTIONS
    }
    texts |= {f"D: {row.key}": str(found.mean(row.key)) for row in ROWS}
    texts |= {
        f"D: {first} - {second} at {rate:g}": found.minus_at(first, second, rate).signed
        for first, second, _ in QUESTIONS
        for rate in RATES
    }
    texts["D: outer rates"] = outer_rates(records)
    counts = [len(found.seeds(row.key)) for row in ROWS]
    return texts | {"D: most seeds": str(max(counts)), "D: fewest seeds": str(min(counts))}


def front(records: Records) -> dict[str, str]:
    """Return the table of README.md."""
    found = compared(records)
    rows = [["method", "accuracy (%)", "minus scratch of uniform blocks"]]
    for key in sorted(FRONT, key=lambda key: -found.mean(key).mean):
        against = "" if key == "uniform" else found.minus(key, "uniform").signed
        rows.append([BY_KEY[key].title, str(found.mean(key)), against])
    return {"expect": table(rows)}


def _count(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    return f"{least}" if least == most else f"{least} to {most}"


def figures(records: Records) -> dict[str, str]:
    """Return the ranking as a figure."""
    found = compared(records)
    ranked = [row for row in _ranked(found) if row.key not in ("uniform", "s2d scratch epochs")]
    bars = [Bar(row.title, found.minus(row.key, "uniform"), COLOURS[family(row)]) for row in ranked]
    counts = [bar.interval.count for bar in bars]
    plot = intervals(
        "equal-compute",
        bars,
        title="Test accuracy at equal compute, minus that of uniform blocks trained from scratch",
        x_label=f"percentage points, mean and 95% interval, paired by seed ({_count(counts)} seeds)",
        signed=True,
        legend={COLOURS[kind]: text for kind, text in FAMILIES.items()},
    )
    return {"results-D.svg": plot.draw(alone=True)}


def ranking(found: Comparison) -> str:
    """Return all rows, the best first."""
    rows = [
        [
            *("method", "accuracy (%)", "minus uniform", "minus scratch of its widths", "seeds", "learning rate"),
            *("parameters", "MACs", "epochs", "CPU s of growth"),
        ]
    ]
    own = {row.like: row.key for row in ROWS if row.like is not None and not row.options}
    for row in _ranked(found):
        records = found.of_row(row.key)
        mean = partial(_mean, records)
        rows.append(
            [
                row.title,
                str(found.mean(row.key)),
                "" if row.key == "uniform" else found.minus(row.key, "uniform").signed,
                found.minus(row.key, own[row.key]).signed if row.key in own else "",
                str(len(records)),
                f"{found.rate(row.key):g}",
                f"{mean(lambda record: record['params']):.0f}",
                f"{mean(lambda record: record['macs']) / 1000:.0f}k",
                f"{mean(lambda record: record['samples']) / 8000:.1f}",
                f"{mean(lambda record: record['growth_seconds']):.1f}",
            ]
        )
    return table(rows)


def questions(found: Comparison) -> str:
    """Return the differences that answer what the page asks."""
    rows = [["question", "at the best rates", "seeds above zero", "mean of the three rates", "seeds above zero"]]
    for first, second, question in QUESTIONS:
        cells = []
        for one in (found.minus(first, second), found.minus_over_rates(first, second)):
            cells += [one.marked(), f"{one.above} of {one.count}"]
        rows.append([question, *cells])
    return table(rows)


def promises(found: Comparison) -> str:
    """Return what splits promise, and the change of the loss that was measured on the same images."""
    rows = [["row", "steps", "promised change: median", "measured: median", "steps that lower the loss", "signed"]]
    for key in ("s2d", "s2d 8000", "s2d paper", "s2d 0.01", "s2d 1", "s3d", "s3d c3", "s3d m3 c3", "s3d knapsack"):
        steps = [phase for record in found.of_row(key) for phase in record["phases"] if "promised" in phase]
        promised, measured = ([step[kind] for step in steps] for kind in ("promised", "measured"))
        signed, splits = (sum(step[kind] for step in steps) for kind in ("signed", "splits"))
        rows.append(
            [
                BY_KEY[key].title,
                str(len(steps)),
                f"{statistics.median(promised):.2g}",
                f"{statistics.median(measured):+.2g}",
                f"{sum(value < 0 for value in measured) / len(measured):.0%}",
                f"{signed / splits:.0%}",
            ]
        )
    return table(rows)


def outer_rates(records: Records) -> str:
    """Return how much lower the best of the outer learning rates is than that of the three, in the closest row."""
    found = by_rate_and_seed(records, lambda record: record["accuracy"])
    gaps = []
    for key in OUTER_ROWS:
        inner, outer = (
            max(statistics.fmean(found[key][rate][seed] for seed in range(OUTER_SEEDS)) for rate in rates)
            for rates in (RATES, OUTER_RATES)
        )
        gaps.append(inner - outer)
    return f"{min(gaps):.2f}"


def _ranked(found: Comparison) -> list[Row]:
    return sorted(ROWS, key=lambda row: -found.mean(row.key).mean)


def _mean(records: list[Record], value: Callable[[Record], float]) -> float:
    return statistics.fmean(map(value, records))
