"""Figures that several experiments share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.results.statistics import Interval
from s3d_fast.report import scales
from s3d_fast.report.plot import Box, Guide, Line, Mark, Note, Plot, Point, Style


@dataclass(frozen=True)
class Bar:
    """A row of a figure: its name, an interval, a colour of `report.svg.COLOURS`, and the digits that are shown."""

    name: str
    interval: Interval
    colour: str = "blue"
    digits: int = 2


def intervals(
    name: str,
    bars: Sequence[Bar],
    *,
    title: str,
    x_label: str,
    signed: bool = False,
    legend: Mapping[str, str] | None = None,
    width: int = 720,
) -> Plot:
    """Return a plot with a row for every bar: a dot at its mean, and a line as long as its 95% interval.

    Args:
        name: of the plot.
        bars: the rows, from the top.
        title: stands above the plot.
        x_label: what the scale shows.
        signed: whether the values are differences; a line then marks zero, and notes have signs.
        legend: what the colours mean: colour -> text.
        width: in pixels.
    """
    halves = [bar.interval.half if math.isfinite(bar.interval.half) else 0.0 for bar in bars]
    ends = [0.0] if signed else []
    for bar, half in zip(bars, halves, strict=True):
        ends += [bar.interval.mean - half, bar.interval.mean + half]
    low, high = min(ends), max(ends)
    pad = 0.05 * (high - low or 1.0)
    marks: list[Mark] = [Guide(x=0.0)] if signed else []
    for row, (bar, half) in enumerate(zip(bars, halves, strict=True)):
        found, look = bar.interval, Style(bar.colour, marker="", line=False)
        words = (bar.name, found.shown(bar.digits, "+" if signed else ""), f"{found.count} seeds")
        marks.append(Box(found.mean - half, found.mean + half, row - 0.07, row + 0.07, look))
        marks.append(Line([Point(found.mean, row, words)], Style(bar.colour)))
        marks.append(Note(high + pad, row + 0.17, f"{found.mean:{'+' if signed else ''}.{bar.digits}f}"))
    return Plot(
        name,
        # Room for the notes, which stand in a column where no bar or line crosses them.
        scales.Scale(low - pad, high + 3.5 * pad),
        scales.names([bar.name for bar in bars]),
        marks,
        title=title,
        x_label=x_label,
        width=width,
        height=22 * len(bars),
        rows=True,
        longest=52,
        legend=[(text, Style(colour)) for colour, text in (legend or {}).items()],
    )
