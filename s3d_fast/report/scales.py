"""Scales of figures: from values to places on the page, with ticks that do not overlap."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

MINUS = "−"
# A logarithmic scale is for values that span more than this factor.
WIDE_RANGE = 8.0


@dataclass(frozen=True)
class Tick:
    """A value with its label."""

    value: float
    label: str


@dataclass(frozen=True)
class Scale:
    """A scale from `low` to `high`.

    Attributes:
        low, high: the values at its ends.
        kind: "linear"; "log"; or "symlog", which is linear around 0 and logarithmic on both sides of it.
        threshold: of symlog, the size of value at which it turns logarithmic.
        word: how a tick is labelled.
        fixed: the ticks; by default round numbers.
    """

    low: float
    high: float
    kind: str = "linear"
    threshold: float = 1.0
    word: Callable[[float], str] = lambda value: short(value)
    fixed: tuple[Tick, ...] | None = None

    def share(self, value: float) -> float:
        """Return how far a value is along the scale: 0 at its low end, 1 at its high end."""
        low, at, high = self._bent(self.low), self._bent(value), self._bent(self.high)
        return (at - low) / (high - low)

    def ticks(self) -> list[Tick]:
        """Return the ticks, the most important first; a figure leaves out those that do not fit."""
        if self.fixed is not None:
            return list(self.fixed)
        values = {"linear": self._linear, "log": self._log, "symlog": self._symlog}[self.kind]()
        return [Tick(value, self.word(value)) for value in values if self.low <= value <= self.high]

    def _bent(self, value: float) -> float:
        if self.kind == "log":
            return math.log10(max(value, 1e-300))
        if self.kind == "symlog":
            return math.copysign(math.log10(1 + abs(value) / self.threshold), value)
        return value

    def _linear(self) -> list[float]:
        step = _round_step((self.high - self.low) / 6)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(place * step, 12) if step >= 1e-9 else place * step for place in range(first, last + 1)]

    def _log(self) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        powers = [10.0**power for power in range(first, last + 1)]
        return [*powers, *(2 * power for power in powers), *(5 * power for power in powers)]

    def _symlog(self) -> list[float]:
        first = round(math.log10(self.threshold))
        last = math.floor(math.log10(max(abs(self.low), abs(self.high), self.threshold)))
        powers = [10.0**power for power in range(last, first - 1, -1)]
        return [0.0, *(sign * power for power in powers for sign in (1, -1))]


def linear(values: Iterable[float], *, zero: bool = False, word: Callable[[float], str] | None = None) -> Scale:
    """Return a linear scale for the values, with a margin; with `zero`, it starts or ends at 0 or contains it."""
    found = list(values)
    low, high = min(found), max(found)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    room = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
    return Scale(
        low if zero and low == 0 else low - room,
        high if zero and high == 0 else high + room,
        word=word or (lambda value: short(value)),
    )


def of_sizes(values: Sequence[float]) -> Scale:
    """Return a scale for counts, such as parameters: logarithmic if they span more than a factor of eight."""
    low, high = min(values), max(values)
    if low > 0 and high > WIDE_RANGE * low:
        room = (high / low) ** 0.06
        return Scale(low / room, high * room, "log", word=engineering)
    return linear(values, word=engineering)


def of_losses(values: Sequence[float]) -> Scale:
    """Return a scale for losses: logarithmic if they are positive and span more than a factor of ten."""
    low, high = min(values), max(values)
    if low > 0 and high > 10 * low:
        room = (high / low) ** 0.06
        return Scale(low / room, high * room, "log")
    return linear(values)


def around_zero(values: Sequence[float]) -> Scale:
    """Return a scale that contains the values and zero: symlog if the values have many sizes."""
    low, high = min(*values, 0.0), max(*values, 0.0)
    threshold = symlog_threshold(values)
    if threshold is None:
        room = 0.08 * (high - low) or 1.0
        return Scale(low - room, high + room)
    ends = (2 * low if low < 0 else -threshold / 2, 2 * high if high > 0 else threshold / 2)
    return Scale(*ends, "symlog", threshold)


def symlog_threshold(values: Sequence[float]) -> float | None:
    """Return where a symmetric logarithmic scale should turn linear; None if a linear scale is enough."""
    sizes = sorted(abs(value) for value in values if value)
    if len(sizes) < 2 or sizes[-1] <= 30 * sizes[len(sizes) // 4]:
        return None
    # Show at most six decades; smaller values are as good as zero.
    threshold = max(sizes[len(sizes) // 20], sizes[-1] * 1e-6)
    return float(10.0 ** math.floor(math.log10(threshold)))


def whole(low: float, high: float) -> Scale:
    """Return a scale from low to high with ticks at whole numbers only."""
    first, last = math.ceil(low), math.floor(high)
    step = max(1, round(_round_step(max(last - first, 1) / 6)))
    values = range(-(-first // step) * step, last + 1, step)
    return Scale(low, high, fixed=tuple(Tick(value, str(value)) for value in values))


def names(labels: Sequence[str]) -> Scale:
    """Return a scale with a place for every name: 0, 1, 2, ..."""
    return Scale(-0.5, len(labels) - 0.5, fixed=tuple(Tick(place, label) for place, label in enumerate(labels)))


def short(value: float) -> str:
    """Return a value with up to four digits, with a true minus sign."""
    return f"{value:.4g}".replace("-", MINUS).replace(f"e{MINUS}0", f"e{MINUS}").replace("e+0", "e")


def engineering(value: float) -> str:
    """Return 1200000 as "1.2 M"."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g} {letter}"
    return short(value)


def time_unit(seconds: float) -> tuple[float, str]:
    """Return a readable unit for a time: its length in seconds and its name."""
    for length, name in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * length:
            return length, name
    return 1.0, "s"


def _round_step(step: float) -> float:
    """Return the least of 1, 2, 5, 10, ... times a power of ten that is at least the given step."""
    if not step > 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(step))
    return power * next(factor for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))
