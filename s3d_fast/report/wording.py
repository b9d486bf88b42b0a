"""Numbers as people read them in tables and captions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

NOTHING = "–"


def whole(value: float | None) -> str:
    """Return 1234567 as "1,234,567"."""
    return NOTHING if value is None else f"{round(value):,}"


def compact(value: float) -> str:
    """Return 2633270 as "2.633M"; below ten thousand, the number itself."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # With four digits, 999,960 would become 1000k.
        if value >= max(0.99995 * size, 9999.5):
            return f"{value / size:#.4g}".rstrip(".") + letter
    return whole(value)


def decimal(value: float | None) -> str:
    """Return 0.31 as "0.3100", and very large or small numbers with four digits, such as "3.142e-05"."""
    if value is None or math.isnan(value):
        return NOTHING
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 100 else f"{value:.4g}"


def change(value: float | None) -> str:
    """Return a change with its sign and three digits."""
    return NOTHING if value is None else f"{value:+.3g}".replace("-", "−")


def signed(value: int) -> str:
    """Return a whole number with its sign, such as "+8"."""
    return f"{value:+,}".replace("-", "−")


def percent(share: float) -> str:
    """Return 0.0312 as "3.1 %"."""
    return NOTHING if math.isnan(share) else f"{100 * share:.1f} %"


def duration(seconds: float) -> str:
    """Return 93.5 as "1 min 34 s"."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def spread(values: Sequence[float], word: Callable[[float], str] = decimal) -> str:
    """Return "median [min, max]", or the value itself if all are equal."""
    if not values:
        return NOTHING
    middle = word(statistics.median(values))
    return middle if min(values) == max(values) else f"{middle} [{word(min(values))}, {word(max(values))}]"


def plural(count: int, noun: str) -> str:
    """Return "1 phase" or "2 phases"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def title(name: str) -> str:
    """Return a name capitalised, such as "Accuracy"; a name that has capitals, such as "mIoU", is not changed."""
    return name.capitalize() if name.islower() else name
