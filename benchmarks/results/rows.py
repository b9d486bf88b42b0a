"""Rows of a comparison: ways to come to a network, their runs at every rate and seed, and how they are shown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import s3d_fast as s3d
from benchmarks.results.comparison import Comparison
from benchmarks.results.experiment import Record, Run
from benchmarks.results.figures import Bar, intervals
from benchmarks.results.tables import table


@dataclass(frozen=True)
class Row:
    """A way to come to a network.

    Attributes:
        key: its name in records.
        title: its name on the page.
        options: how it grows; empty for networks that are trained from scratch.
        like: the row whose grown network, of the same seed and learning rate, gives the widths.
    """

    key: str
    title: str
    options: Mapping[str, Any] = field(default_factory=dict)
    like: str | None = None


def name(row: str, rate: float, seed: int) -> str:
    """Return the name of a run."""
    return f"{row}, lr {rate:g}, seed {seed}"


def runs_of(rows: Sequence[Row], rates: Sequence[float], seeds: int) -> list[Run]:
    """Return all runs, seed by seed."""
    return [
        Run(
            name(row.key, rate, seed),
            {"row": row.key, "lr": rate, "seed": seed},
            rank=seed,
            needs=() if row.like is None else (name(row.like, rate, seed),),
        )
        for seed in range(seeds)
        for row in rows
        for rate in rates
    ]


def counted(plan: s3d.SplitPlan) -> Record:
    """Return what is kept of a step: how many splits, how many of them with a negative weight, and new filters."""
    signed = sum(bool((one.weights < 0).any()) for one in plan.splits)
    return {"splits": len(plan.splits), "signed": signed, "added": len(plan.new)}


def signed_splits(records: Sequence[Record]) -> tuple[int, int]:
    """Return the number of splits with a negative weight, and of all splits, over all steps."""
    steps = [step for one in records for step in one["phases"]]
    return sum(step["signed"] for step in steps), sum(step["splits"] for step in steps)


# What a column shows of a row: a text of the comparison, or of the records at the best learning rate.
Cell = Callable[[Comparison, Row], str]


def mean_of(key: str, digits: int = 0, unit: float = 1.0, end: str = "", grown: bool = False) -> Cell:
    """Return a column: the mean of a number over the seeds, in some unit; `grown`: only for rows that grow."""

    def cell(found: Comparison, row: Row) -> str:
        if grown and not row.options:
            return ""
        return f"{statistics.fmean(one[key] for one in found.of_row(row.key)) / unit:.{digits}f}{end}"

    return cell


def minus(other: str, digits: int = 2) -> Cell:
    """Return a column: the difference from one row."""
    return lambda found, row: "" if row.key == other else found.minus(row.key, other).marked(digits)


def minus_scratch(rows: Sequence[Row], digits: int = 2) -> Cell:
    """Return a column: the difference from scratch of the row's own widths."""
    scratch = {row.like: row.key for row in rows if row.like is not None}
    return lambda found, row: found.minus(row.key, scratch[row.key]).marked(digits) if row.key in scratch else ""


def ranked(found: Comparison, rows: Sequence[Row]) -> list[Row]:
    """Return the rows, the best first."""
    sign = 1 if found.lower else -1
    return sorted(rows, key=lambda row: sign * found.mean(row.key).mean)


def rows_table(found: Comparison, rows: Sequence[Row], value: str, columns: Mapping[str, Cell], digits: int = 2) -> str:
    """Return a table of all rows, the best first.

    Args:
        found: the rows' values.
        rows: all of them.
        value: the head of the column that ranks them.
        columns: by their heads, what stands behind it; the learning rate comes after the differences.
        digits: of the values.
    """
    lines = [["method", value, *columns]]
    for row in ranked(found, rows):
        cells = [make(found, row) for make in columns.values()]
        lines.append([row.title, found.mean(row.key).shown(digits), *cells])
    return table(lines)


def rate_of(found: Comparison, row: Row) -> str:
    """Return a cell: the learning rate of a row."""
    return f"{found.rate(row.key):g}"


def means_figure(found: Comparison, rows: Sequence[Row], key: str, *, title: str, x_label: str, digits: int = 2) -> str:
    """Return the means of all rows with their intervals as a figure; growth has another colour than scratch."""
    bars = [
        Bar(row.title, found.mean(row.key), "blue" if row.options else "grey", digits) for row in ranked(found, rows)
    ]
    legend = {"blue": "grown", "grey": "trained from scratch"}
    return intervals(key, bars, title=title, x_label=x_label, legend=legend).draw(alone=True)
