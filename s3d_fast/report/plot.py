"""A plot: marks on two scales, drawn as one SVG in which nothing is cut off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape

from s3d_fast.report import svg
from s3d_fast.report.scales import Scale, Tick

# A line with more points than this gets a value on hover at every second point, every third, ...
_MOST_SPOTS = 240


@dataclass(frozen=True)
class Style:
    """How a group of marks looks: a colour of `svg.COLOURS` or CSS; the line's dashes; a marker, filled or hollow."""

    colour: str
    dashes: str = ""
    marker: str = "circle"
    filled: bool = True
    line: bool = True


@dataclass(frozen=True)
class Point:
    """A point with the lines of text that it shows on hover, and perhaps a note beside it."""

    x: float
    y: float
    words: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Line:
    """Points joined by a line; None is a gap."""

    points: Sequence[Point | None]
    style: Style
    label: str = ""


@dataclass(frozen=True)
class Band:
    """The area between two values over x; at a single x, a bar."""

    edges: Sequence[tuple[float, float, float]]  # x, low, high
    style: Style


@dataclass(frozen=True)
class Box:
    """A rectangle from (x0, y0) to (x1, y1)."""

    x0: float
    x1: float
    y0: float
    y1: float
    style: Style
    words: tuple[str, ...] = ()
    label: str = ""


@dataclass(frozen=True)
class Spread:
    """Values at one x: least, lower quartile, median, upper quartile, greatest; `shift` moves them by pixels."""

    x: float
    values: tuple[float, float, float, float, float]
    style: Style
    words: tuple[str, ...] = ()
    label: str = ""
    shift: float = 0.0


@dataclass(frozen=True)
class Guide:
    """A line through the whole plot: at an x, at a y, or along the diagonal if neither is given."""

    x: float | None = None
    y: float | None = None
    label: str = ""
    note: str = ""
    dashed: bool = True


@dataclass(frozen=True)
class Note:
    """A text at a place."""

    x: float
    y: float
    text: str
    anchor: str = "start"


Mark = Line | Band | Box | Spread | Guide | Note


@dataclass(frozen=True)
class Plot:
    """A plot.

    Attributes:
        name: the name of its file, without the suffix.
        x, y: the scales; y grows upwards, unless `rows` is set: then it has a row for every name, the first on top.
        marks: what is drawn, in this order.
        title: stands above the plot.
        x_label, y_label: what the scales show; the latter stands above the scale.
        width: of the whole figure, in pixels.
        height: of the area inside the scales.
        rows: whether y has names as ticks.
        longest: characters that a name beside the plot may have; the middle of a longer one is left out.
        legend: of figures that several plots share, more entries than the plot's own marks have.
    """

    name: str
    x: Scale
    y: Scale
    marks: Sequence[Mark]
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    width: int = 460
    height: int = 230
    rows: bool = False
    longest: int = 24
    legend: Sequence[tuple[str, Style]] = field(default=())

    def entries(self) -> list[tuple[str, Style]]:
        """Return the entries of the legend, each once."""
        own: dict[str, Style] = {}
        for mark in self.marks:
            name = getattr(mark, "label", "")
            if name:
                own.setdefault(name, getattr(mark, "style", Style("grey", dashes="4 3", marker="")))
        return list(self.legend) or list(own.items())

    def draw(self, *, alone: bool = False) -> str:
        """Return the SVG; `alone`: as a file of its own, with its legend and the colours."""
        return beside([self]) if alone else _Drawing(self).text()


class _Drawing:
    """A plot while it is drawn: `left`, `top`, `right` and `bottom` bound the area inside the scales."""

    def __init__(self, plot: Plot, legend: bool = False) -> None:
        self.plot = plot
        self.parts: list[str] = []
        # Areas that are hovered come last: nothing is drawn over the text that they show.
        self.spots: list[str] = []
        self.right = plot.width - 14.0
        self.top = 4.0
        self.y_ticks = [replace(tick, label=svg.shortened(tick.label, plot.longest)) for tick in plot.y.ticks()]
        self.left = max([svg.text_width(tick.label) for tick in self.y_ticks], default=0.0) + 10
        if plot.title:
            self.top += 14
            self.parts.append(svg.text(0, self.top, svg.fitting(plot.title, plot.width, bold=True), kind="bold"))
            self.top += 8
        if legend:
            self._legend()
        if plot.y_label:
            self.top += 12
            self.parts.append(svg.text(0, self.top, svg.fitting(plot.y_label, plot.width), kind="soft"))
        self.top += 24 if any(isinstance(mark, Guide) and mark.note for mark in plot.marks) else 10
        self.bottom = self.top + plot.height
        self.height = self.bottom + (20 if plot.x.ticks() else 4) + (18 if plot.x_label else 0)

    def text(self) -> str:
        plot = self.plot
        self._frame()
        for mark in plot.marks:
            draw = {Line: self._line, Band: self._band, Box: self._box, Spread: self._spread, Guide: self._guide}
            draw.get(type(mark), self._note)(mark)  # type: ignore[operator]
        size = f'viewBox="0 0 {plot.width} {self.height:.0f}" width="{plot.width}" height="{self.height:.0f}"'
        name = f' role="img" aria-label="{escape(svg.clean(plot.title))}"' if plot.title else ""
        head = f'<svg class="plot" xmlns="http://www.w3.org/2000/svg" {size}{name}>'
        return "".join([head, *self.parts, *self.spots, "</svg>"])

    def px(self, x: float) -> float:
        return self.left + self.plot.x.share(x) * (self.right - self.left)

    def py(self, y: float) -> float:
        share = self.plot.y.share(y)
        return self.top + (share if self.plot.rows else 1 - share) * (self.bottom - self.top)

    def _legend(self) -> None:
        x = 0.0
        if self.plot.entries():
            self.top += 12
        for name, style in self.plot.entries():
            shown = svg.fitting(name, self.plot.width - 44)
            wide = svg.text_width(shown) + 44
            if x and x + wide > self.plot.width:
                x, self.top = 0.0, self.top + 18
            self.parts += [
                f'<g transform="translate({x:.1f} {self.top - 10:.1f})">{swatch(style)}</g>',
                svg.text(x + 28, self.top, shown),
            ]
            x += wide
        if self.plot.entries():
            self.top += 8

    def _frame(self) -> None:
        plot = self.plot
        taken: list[float] = []
        for tick in self.y_ticks:
            place = self.py(tick.value)
            if plot.rows or all(abs(place - other) >= 16 for other in taken):
                taken.append(place)
                if not plot.rows:
                    self.parts.append(_path("grid", [(self.left, place), (self.right, place)]))
                self.parts.append(svg.text(self.left - 7, place + 4, tick.label, anchor="end"))
        self._x_ticks(plot.x.ticks())
        if plot.x_label:
            middle = (self.left + self.right) / 2
            label = svg.fitting(plot.x_label, plot.width)
            half = svg.text_width(label) / 2
            middle = max(min(middle, plot.width - half), half)
            self.parts.append(svg.text(middle, self.bottom + 34, label, anchor="middle", kind="soft"))

    def _x_ticks(self, ticks: Sequence[Tick]) -> None:
        taken: list[tuple[float, float]] = []
        for tick in ticks:
            place, half = self.px(tick.value), svg.text_width(tick.label) / 2 + 5
            # Close to an end, the label moves inwards.
            middle = min(max(place, half - 5), self.plot.width - half + 5)
            if all(abs(middle - other) >= half + reach for other, reach in taken):
                taken.append((middle, half))
                if self.plot.rows:
                    self.parts.append(_path("grid", [(place, self.top), (place, self.bottom)]))
                else:
                    self.parts.append(_path("grid", [(place, self.bottom), (place, self.bottom + 4)]))
                self.parts.append(svg.text(middle, self.bottom + 17, tick.label, anchor="middle"))
        self.parts.append(_path("grid", [(self.left, self.bottom), (self.right, self.bottom)]))

    def _spot(self, area: str, x: float, y: float, words: Sequence[str]) -> None:
        if words:
            self.spots.append(svg.spot(area, x, y, words, self.plot.width, self.height))

    def _line(self, line: Line) -> None:
        style, stroke = line.style, svg.colour(line.style.colour)
        dashes = f";stroke-dasharray:{style.dashes}" if style.dashes else ""
        for part in _without_gaps(line.points):
            places = [(self.px(point.x), self.py(point.y)) for point in part]
            if style.line and len(places) > 1:
                self.parts.append(_path("line", places, f"stroke:{stroke}{dashes}"))
            if style.marker:
                fill = stroke if style.filled else svg.colour("paper")
                self.parts += [svg.marker(x, y, style.marker, stroke, fill) for x, y in places]
        known = [point for point in line.points if point is not None]
        for point in known[:: 1 + len(known) // _MOST_SPOTS]:
            x, y = self.px(point.x), self.py(point.y)
            self._spot(f'<circle class="hit" cx="{x:.1f}" cy="{y:.1f}" r="9"/>', x, y, point.words)
        taken: list[tuple[float, float]] = []
        for point in known:
            x, y = self.px(point.x), self.py(point.y)
            if point.note and all(abs(x - a) > 12 or abs(y - b) > 12 for a, b in taken):
                taken.append((x, y))
                self.parts.append(svg.text(x, y - 9, point.note, anchor="middle", kind="soft", size=11))

    def _band(self, band: Band) -> None:
        fill = f"fill:{svg.colour(band.style.colour)}"
        if len(band.edges) == 1:
            ((x, low, high),) = band.edges
            left, top = self.px(x) - 4, self.py(high)
            self.parts.append(_rectangle(left, top, 8, self.py(low) - top, f'class="band" style="{fill}"'))
            return
        upper = [(self.px(x), self.py(high)) for x, _, high in band.edges]
        lower = [(self.px(x), self.py(low)) for x, low, _ in reversed(band.edges)]
        self.parts.append(_path("band", [*upper, *lower], fill, closed=True))

    def _box(self, box: Box) -> None:
        left, right = sorted((self.px(box.x0), self.px(box.x1)))
        top, bottom = sorted((self.py(box.y0), self.py(box.y1)))
        look = f'style="fill:{svg.colour(box.style.colour)}"'
        self.parts.append(_rectangle(left, top, right - left, bottom - top, look))
        # A thin bar is hovered as a bar of six pixels.
        wide, high = max(right - left, 6), max(bottom - top, 6)
        area = _rectangle((left + right - wide) / 2, (top + bottom - high) / 2, wide, high, 'class="hit"')
        self._spot(area, (left + right) / 2, top + 8, box.words)

    def _spread(self, spread: Spread) -> None:
        x = self.px(spread.x) + spread.shift
        least, lower, middle, upper, most = (self.py(value) for value in spread.values)
        stroke = svg.colour(spread.style.colour)
        self.parts += [
            _path("line", [(x, least), (x, most)], f"stroke:{stroke};stroke-width:1.2"),
            _path("line", [(x, lower), (x, upper)], f"stroke:{stroke};stroke-width:7;opacity:.35"),
            svg.marker(x, middle, spread.style.marker, stroke, stroke, 3.2),
        ]
        area = _rectangle(x - 6, most - 3, 12, least - most + 6, 'class="hit"')
        self._spot(area, x, middle, spread.words)

    def _guide(self, guide: Guide) -> None:
        if guide.x is not None:
            x = self.px(guide.x)
            ends = [(x, self.top), (x, self.bottom)]
            if guide.note:
                self.parts.append(svg.text(x + 4, self.top - 1, guide.note, kind="soft", size=11))
        elif guide.y is not None:
            ends = [(self.left, self.py(guide.y)), (self.right, self.py(guide.y))]
        else:
            ends = [(self.left, self.bottom), (self.right, self.top)]
        self.parts.append(_path("guide" if guide.dashed else "grid", ends))

    def _note(self, note: Note) -> None:
        self.parts.append(svg.text(self.px(note.x), self.py(note.y), note.text, anchor=note.anchor, size=11))


def beside(plots: Sequence[Plot], gap: int = 28) -> str:
    """Return the SVG of several plots in a row, as a file of its own; each has its legend."""
    drawn = [_Drawing(plot, legend=True) for plot in plots]
    texts = [one.text() for one in drawn]
    width = sum(plot.width for plot in plots) + gap * (len(plots) - 1)
    parts, x = [], 0
    for plot, text in zip(plots, texts, strict=True):
        parts.append(text.replace("<svg ", f'<svg x="{x}" ', 1))
        x += plot.width + gap
    return _file(width, max(one.height for one in drawn), parts)


def swatch(style: Style) -> str:
    """Return the sample of a style in a legend, 22 x 12 pixels."""
    stroke = svg.colour(style.colour)
    fill = stroke if style.filled else svg.colour("paper")
    if not style.line and not style.marker:
        return f'<rect x="2" y="1" width="18" height="10" rx="2" style="fill:{stroke}"/>'
    dashes = f";stroke-dasharray:{style.dashes}" if style.dashes else ""
    parts = [_path("line", [(0, 6), (22, 6)], f"stroke:{stroke}{dashes}")] if style.line else []
    if style.marker:
        parts.append(svg.marker(11, 6, style.marker, stroke, fill))
    return "".join(parts)


def _file(width: float, height: float, parts: Sequence[str]) -> str:
    """Return SVG that holds its own colours and background, with a margin of 12 pixels."""
    size = f'viewBox="-12 -12 {width + 24:.0f} {height + 24:.0f}" width="{width + 24:.0f}" height="{height + 24:.0f}"'
    paper = '<rect x="-12" y="-12" width="100%" height="100%" style="fill:var(--paper)"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{svg.STYLE}</style>{paper}{"".join(parts)}</svg>\n'


def _path(kind: str, places: Sequence[tuple[float, float]], style: str = "", closed: bool = False) -> str:
    points = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    look = f' style="{style}"' if style else ""
    return f'<path class="{kind}" d="M{points}{"Z" if closed else ""}"{look}/>'


def _rectangle(x: float, y: float, width: float, height: float, look: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}" {look}/>'


def _without_gaps(points: Sequence[Point | None]) -> list[list[Point]]:
    """Return the runs of points between the gaps."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if point is None:
            runs.append([])
        else:
            runs[-1].append(point)
    return [run for run in runs if run]
