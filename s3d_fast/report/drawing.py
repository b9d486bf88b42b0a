"""Drawing into files: matplotlib on demand, and the colours, labels and axes that all figures share."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# Okabe and Ito's colours, which are distinguishable with any kind of colour vision.
METHOD_COLOURS = {"s3d": "#0072B2", "s2d": "#D55E00", "net2net": "#009E73", "uniform": "#CC79A7"}
METHOD_MARKERS = {"s3d": "o", "s2d": "s", "net2net": "^", "uniform": "D"}
OTHER_COLOUR, OTHER_MARKER = "#555555", "v"
GREY = "#6b6b6b"
LOW_COLOUR, HIGH_COLOUR = "#D55E00", "#0072B2"

_STYLE = {
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.1,
    "figure.constrained_layout.h_pad": 0.08,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": "black",
    "ytick.labelcolor": "black",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.6,
}
_LINES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
_LONGEST_LABEL = 30


def require_matplotlib() -> Any:
    """Return matplotlib.pyplot, set to draw into files.

    Raises:
        RuntimeError: matplotlib is not installed; the message says how to install it.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise RuntimeError("figures need matplotlib, which is not installed: pip install 's3d_fast[plots]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


@contextmanager
def canvas(rows: int, columns: int, size: tuple[float, float], **options: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a figure of size (width, height) in inches and its 2-d array of axes; close it afterwards.

    A user's matplotlibrc does not change the style.
    """
    plt = require_matplotlib()
    with plt.style.context(["default", _STYLE]):
        figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, **options)
        try:
            yield figure, axes
        finally:
            plt.close(figure)


def png(figure: Any) -> bytes:
    """Return the figure as a PNG file."""
    buffer = io.BytesIO()
    # Leave out matplotlib's name and version, so that equal runs give equal files.
    figure.savefig(buffer, format="png", dpi=130, metadata={"Software": None})
    return buffer.getvalue()


def label(text: str) -> str:
    """Return text that matplotlib draws literally: no mathematics, no missing glyphs, not too long."""
    if len(text) > _LONGEST_LABEL:
        text = f"{text[: _LONGEST_LABEL // 2]}...{text[-_LONGEST_LABEL // 2 + 3 :]}"
    # Every font shipped with matplotlib has the printable characters of Latin-1.
    text = text.encode("latin-1", "replace").decode("latin-1")
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text.replace("$", r"\$")


def method_style(method: str) -> tuple[str, str]:
    """Return the colour and the marker of a method."""
    return METHOD_COLOURS.get(method, OTHER_COLOUR), METHOD_MARKERS.get(method, OTHER_MARKER)


def line_styles(methods: Sequence[str]) -> list[dict[str, Any]]:
    """Return plot styles for groups of runs: colour and marker show the method, line and fill its variant."""
    styles = []
    for place, method in enumerate(methods):
        colour, marker = method_style(method)
        variant = methods[:place].count(method)
        fill = (colour, "white")[variant % 2]
        line = _LINES[variant % len(_LINES)]
        styles.append({"color": colour, "marker": marker, "markerfacecolor": fill, "linestyle": line})
    return styles


def shades(count: int) -> list[Any]:
    """Return colours from light to dark for a sequence, such as phases."""
    plt = require_matplotlib()
    return [plt.get_cmap("cividis_r")(0.15 + 0.85 * index / max(count - 1, 1)) for index in range(count)]


def cost_axis(axis: Any, values: Sequence[float]) -> None:
    """Format the x axis for parameters or MACs (1.2 M); logarithmic if they span more than a factor of eight."""
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator

    if min(values) > 0 and max(values) > 8 * min(values):
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(values) < 300 * min(values) else (1,)))
        axis.xaxis.set_minor_locator(NullLocator())
    else:
        axis.xaxis.set_major_locator(MaxNLocator(5))
    axis.xaxis.set_major_formatter(EngFormatter(sep=" "))


def whole_numbers(axis: Any) -> None:
    """Put ticks on an x axis at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def symlog_threshold(values: Sequence[float]) -> float | None:
    """Return where a symmetric logarithmic scale should turn linear; None if a linear scale is enough."""
    sizes = sorted(abs(value) for value in values if value)
    if len(sizes) < 2 or sizes[-1] <= 30 * sizes[len(sizes) // 4]:
        return None
    # Show at most six decades; smaller values are as good as zero.
    threshold = max(sizes[len(sizes) // 20], sizes[-1] * 1e-6)
    return float(10.0 ** math.floor(math.log10(threshold)))


def equal_axes(axis: Any, values: Sequence[float]) -> tuple[float, float]:
    """Give both axes the same scale, wide enough for the values and zero; return its ends."""
    low, high = min(*values, 0.0), max(*values, 0.0)
    threshold = symlog_threshold(values)
    if threshold is None:
        room = 0.08 * (high - low) or 1.0
        ends = (low - room, high + room)
        axis.ticklabel_format(style="sci", scilimits=(-3, 4))
    else:
        ends = (2 * low if low < 0 else -threshold / 2, 2 * high if high > 0 else threshold / 2)
        for scaled in (axis.xaxis, axis.yaxis):
            symlog(scaled, threshold, ends)
    axis.set(xlim=ends, ylim=ends, aspect="equal")
    return ends


def symlog(scaled: Any, threshold: float, ends: tuple[float, float]) -> None:
    """Make an x or y axis symmetric and logarithmic, with at most seven ticks, at powers of ten and zero."""
    from matplotlib.ticker import FixedLocator, NullLocator

    first = round(math.log10(threshold))
    last = math.floor(math.log10(max(abs(ends[0]), abs(ends[1]), threshold)))
    both = min(ends) < -threshold and max(ends) > threshold
    step = max(1, math.ceil((last - first + 1) / (3 if both else 6)))
    # From the largest power downwards, so that the largest values have a tick near them.
    # With both signs on the axis, a tick at the threshold would overlap the one at zero.
    powers = [10.0**power for power in range(last, first - (last == first or not both), -step)]
    ticks = [0.0, *powers, *(-power for power in powers)]
    (scaled.axes.set_xscale if scaled.axis_name == "x" else scaled.axes.set_yscale)("symlog", linthresh=threshold)
    scaled.set_major_locator(FixedLocator([tick for tick in ticks if min(ends) <= tick <= max(ends)]))
    scaled.set_minor_locator(NullLocator())


def time_unit(seconds: float) -> tuple[float, str]:
    """Return a readable unit for a time: its length in seconds and its name."""
    for length, name in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * length:
            return length, name
    return 1.0, "s"
