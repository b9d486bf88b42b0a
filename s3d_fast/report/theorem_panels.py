"""The figure of Theorems 4 and 5, drawn from the records of the experiment; it imports no experiment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from s3d_fast.report import scales, wording
from s3d_fast.report.figures import Figure
from s3d_fast.report.plot import Guide, Line, Mark, Plot, Point, Style

# By the number of copies. Guaranteed lines may coincide, so that their dashes differ.
_LOOKS = {4: ("blue", "8 4"), 3: ("orange", "3 3"), 2: ("green", "1 5")}


class RecordLike(Protocol):
    """What the figure uses of a record."""

    @property
    def unit(self) -> str: ...
    @property
    def m(self) -> int: ...
    @property
    def theorem(self) -> int: ...
    @property
    def first_loss(self) -> float: ...
    @property
    def eta(self) -> float: ...
    @property
    def decrease(self) -> float: ...
    @property
    def bound(self) -> int: ...
    @property
    def splits(self) -> int: ...
    @property
    def losses(self) -> Sequence[tuple[int, float]]: ...


def theorem_figure(records: Sequence[RecordLike]) -> Figure:
    """Draw the loss over the number of splits with the guaranteed line, a plot for each kind of unit."""
    units = list(dict.fromkeys(record.unit for record in records))
    x = scales.Scale(1, 1.3 * max(record.bound for record in records), "log", word=scales.engineering)
    plots = [_plot(unit, [record for record in records if record.unit == unit], x) for unit in units]
    worst = max(records, key=lambda record: record.splits / record.bound)
    target = records[0].eta / records[0].first_loss
    caption = (
        "Loss of a growing network over the number of its splits. A solid line is what happens when neurons are split "
        f"into m copies. It ends with a dot where the loss reaches the target, {target:g} of the loss at the start "
        "(thin grey line). The broken line of the same colour is the guarantee: it falls by eps^2/4 kappa rho_0 with "
        "every split, and ends with a ring at T, the most splits that the theorem allows. (It is straight; the "
        "logarithmic axis bends it. Guarantees with the same T coincide.) The theorems hold if every solid line stays "
        "below the broken line of its colour. The run that comes closest takes "
        f"{wording.percent(worst.splits / worst.bound)} of its T splits."
    )
    return Figure("theorems", "Theorems 4 and 5: guaranteed and real loss", caption, tuple(plots))


def _plot(unit: str, records: Sequence[RecordLike], x: scales.Scale) -> Plot:
    target = records[0].eta / records[0].first_loss
    marks: list[Mark] = [Guide(y=target, label="target")]
    for record in records:
        colour, dashes = _LOOKS[record.m]
        name, taken, most = f"m = {record.m}", wording.whole(record.splits), wording.whole(record.bound)
        share = wording.percent(record.splits / record.bound)
        real = [Point(at, loss / record.first_loss) for at, loss in record.losses]
        # Without a split there is no solid line, and no dot.
        ends = [replace(point, words=(name, f"{taken} splits", f"{share} of T")) for point in real[-1:]]
        bound = Point(record.bound, target, (name, f"Theorem {record.theorem}: T = {most}"))
        marks += [
            Line(_guaranteed(record), Style(colour, dashes, marker="")),
            Line(real, Style(colour, marker="")),
            Line([bound], Style(colour, filled=False)),
            Line(ends, Style(colour)),
        ]
    return Plot(
        f"theorems-{unit}",
        x,
        scales.Scale(0, 1.05),
        marks,
        title=f"{unit} units",
        x_label="splits",
        y_label="loss / loss at the start",
        width=470,
        height=260,
        legend=_legend(records),
    )


def _guaranteed(record: RecordLike, points: int = 80) -> list[Point]:
    """Return the guaranteed loss after 1 ... T splits; the last decrease ends at the target."""
    places = sorted({round(record.bound ** (place / points)) for place in range(points + 1)})
    return [Point(at, max(record.first_loss - at * record.decrease, record.eta) / record.first_loss) for at in places]


def _legend(records: Sequence[RecordLike]) -> list[tuple[str, Style]]:
    """Return two entries for each number of copies, and the target."""
    entries = []
    for record in records:
        colour, dashes = _LOOKS[record.m]
        taken, most = wording.whole(record.splits), wording.whole(record.bound)
        entries += [
            (f"m = {record.m}: {taken} splits", Style(colour)),
            (f"Theorem {record.theorem}: at most T = {most}", Style(colour, dashes, filled=False)),
        ]
    return [*entries, ("target", Style("grey", dashes="4 3", marker=""))]
