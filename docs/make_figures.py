"""Draw the figures of docs/benchmarks.md and math.md from their numbers: python docs/make_figures.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

from s3d_fast.experiments.theorem_records import TheoremRecord
from s3d_fast.report import scales, theorem_figure
from s3d_fast.report.plot import Box, Guide, Mark, Note, Plot, Style, beside

DOCS = Path(__file__).parent
# Columns of the tables of benchmarks that are limits of the machine; the others are competitors.
LIMITS = ("sgemm", "dgemm", "copy")


def figures() -> dict[str, str]:
    """Return the SVG of every figure by the name of its file."""
    tables = benchmark_tables((DOCS / "benchmarks.md").read_text())
    proofs = [TheoremRecord(**one) for one in json.loads((DOCS / "theorems.json").read_text())]
    return {
        "theorems.svg": beside(theorem_figure(proofs).plots),
        "benchmarks.svg": beside(
            [
                _bars(tables, ("reference",), "Times as fast as plain PyTorch", "blue"),
                _bars(tables, LIMITS, "Fraction of the machine's limit", "green"),
            ]
        ),
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


if __name__ == "__main__":
    for name, drawn in figures().items():
        (DOCS / "figures" / name).write_text(drawn)
