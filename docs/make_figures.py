"""Draw the figures of docs/benchmarks.md, results.md and math.md from their numbers: python docs/make_figures.py."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

from s3d_fast.experiments.theorem_records import TheoremRecord
from s3d_fast.report import scales, theorem_figure
from s3d_fast.report.figures import method_styles
from s3d_fast.report.plot import Band, Box, Guide, Line, Mark, Note, Plot, Point, Style, beside

DOCS = Path(__file__).parent
# Columns of the tables of benchmarks that are limits of the machine; the others are competitors.
LIMITS = ("sgemm", "dgemm", "copy")
METHODS = {
    "s3d": ("s3d", "S3D c=1.3"),
    "s2d": ("s2d", "S2D"),
    "net2net": ("net2net", "net2net"),
    "uniform": ("uniform", "same size and epochs, from scratch"),
    "scratch": ("uniform", "same size, from scratch, 3 epochs"),
}


def figures() -> dict[str, str]:
    """Return the SVG of every figure by the name of its file."""
    tables = benchmark_tables((DOCS / "benchmarks.md").read_text())
    runs = json.loads((DOCS / "results.json").read_text())["runs"]
    proofs = [TheoremRecord(**one) for one in json.loads((DOCS / "theorems.json").read_text())]
    return {
        "theorems.svg": beside(theorem_figure(proofs).plots),
        "benchmarks.svg": beside(
            [
                _bars(tables, ("reference",), "Times as fast as plain PyTorch", "blue"),
                _bars(tables, LIMITS, "Fraction of the machine's limit", "green"),
            ]
        ),
        "results.svg": beside([_results(runs, "params", "parameters"), _results(runs, "train", "minutes of training")]),
    }


def benchmark_tables(text: str) -> dict[str, list[dict[str, str]]]:
    """Return the rows of every table of a page, each by the names of its columns, by the heading above it."""
    found: dict[str, list[dict[str, str]]] = {}
    for section in text.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines() if line[:1] == "|"]
        if rows:
            found[title] = [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]
    return found


def _bars(tables: dict[str, list[dict[str, str]]], columns: tuple[str, ...], title: str, colour: str) -> Plot:
    """Return a bar for every case that has a number in one of the columns."""
    cases = []
    for section, rows in tables.items():
        for row in rows:
            for column in columns:
                number = re.match(r"[\d.]+", row.get(column, ""))
                if number:
                    case = row["case"]
                    name = case if section in ("S v", "S v of all layers in one call") else f"{section}: {case}"
                    cases.append((name, section, float(number[0])))
    style = Style(colour, marker="", line=False)
    marks: list[Mark] = [
        Box(0, value, row - 0.34, row + 0.34, style, (name, section, f"{value:g}"))
        for row, (name, section, value) in enumerate(cases)
    ]
    marks += [Note(value, row + 0.2, f" {value:g}") for row, (_, _, value) in enumerate(cases)]
    high = max(value for *_, value in cases) * 1.12
    return Plot(
        title,
        scales.Scale(0, high),
        scales.names([name for name, *_ in cases]),
        [*marks, Guide(x=1.0)],
        title=title,
        width=640,
        height=20 * len(cases),
        rows=True,
        longest=42,
    )


def _results(runs: dict[str, dict], which: str, unit: str) -> Plot:
    """Return the accuracy of every method on CIFAR-100 by size or by time, median and range of the seeds."""
    lines: list[Mark] = []
    bands: list[Mark] = []
    values: list[float] = []
    places: list[float] = []
    styles = dict(zip(METHODS, method_styles([method for method, _ in METHODS.values()]), strict=True))
    for method, (_, label) in METHODS.items():
        found = [run for name, run in runs.items() if re.fullmatch(rf"cifar100-mobilenet-{method}-\d+", name)]
        points, edges = [], []
        for place in range(len(found[0]["phases"])):
            x = statistics.median(_cost(runs, run, method, place, which) for run in found)
            heights = [100 * run["phases"][place]["accuracy"] for run in found]
            words = (label, f"step {place}: {statistics.median(heights):.1f}%", f"{scales.engineering(x)} {unit}")
            points.append(Point(x, statistics.median(heights), words))
            edges.append((x, min(heights), max(heights)))
            values += heights
            places.append(x)
        lines.append(Line(points, styles[method], label))
        bands.append(Band(edges, styles[method]))
    return Plot(
        which,
        scales.of_sizes(places) if which == "params" else scales.linear([*places, 0.0], zero=True),
        scales.linear(values),
        [*bands, *lines],
        title=f"MobileNetV1 on CIFAR-100: accuracy and {unit}",
        x_label=unit if which == "params" else "minutes of training, on one thread",
        y_label="test accuracy (%), median and range of three seeds",
        width=470,
        height=230,
    )


def _cost(runs: dict[str, dict], run: dict, method: str, place: int, which: str) -> float:
    if which == "params":
        return run["phases"][place]["params"]
    if method in ("uniform", "scratch"):
        return run["phases"][place]["seconds"]["train"] / 60
    # Growth started from a trained seed network.
    seed = runs[f"cifar100-mobilenet-seed-{run['seed']}"]["phases"][0]["seconds"]["train"]
    return (seed + sum(phase["seconds"]["train"] for phase in run["phases"][: place + 1])) / 60


if __name__ == "__main__":
    for name, drawn in figures().items():
        (DOCS / "figures" / name).write_text(drawn)
