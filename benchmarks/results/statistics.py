"""Means and paired differences with 95% t-intervals, and the best learning rate of a row."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from scipy.stats import t

# Values by seed; and by learning rate and seed.
BySeed = Mapping[int, float]
ByRate = Mapping[float, BySeed]


@dataclass(frozen=True)
class Interval:
    """A mean over seeds.

    Attributes:
        mean: the mean.
        half: half of the 95% t-interval; infinite for one seed.
        count: the number of seeds.
        above: how many seeds are above zero; for differences, how often the first is the larger.
    """

    mean: float
    half: float
    count: int
    above: int

    def __str__(self) -> str:
        return self.shown()

    def shown(self, digits: int = 2, sign: str = "") -> str:
        """Return the mean and half of the interval; with "+" as sign, positive means have one too."""
        half = f" ± {self.half:.{digits}f}" if math.isfinite(self.half) else ""
        return f"{self.mean:{sign}.{digits}f}{half}"

    @property
    def signed(self) -> str:
        """The interval of a difference."""
        return self.shown(sign="+")

    def marked(self, digits: int = 2) -> str:
        """Return the interval of a difference, bold if it excludes zero."""
        text = self.shown(digits, "+")
        return f"**{text}**" if self.excludes_zero else text

    @property
    def excludes_zero(self) -> bool:
        """Whether the whole interval lies on one side of zero."""
        return abs(self.mean) > self.half


def interval(values: BySeed) -> Interval:
    """Return the mean with its 95% t-interval: mean ± t(0.975, n - 1) s / sqrt(n).

    Raises:
        ValueError: there are no values.
    """
    found = list(values.values())
    if not found:
        raise ValueError("values must hold at least one seed, got none")
    half = math.inf
    if len(found) > 1:
        half = float(t.ppf(0.975, len(found) - 1)) * statistics.stdev(found) / math.sqrt(len(found))
    return Interval(statistics.fmean(found), half, len(found), sum(value > 0 for value in found))


def difference(first: BySeed, second: BySeed) -> Interval:
    """Return the interval of first - second, paired by seed; seeds that only one of them has are left out."""
    return interval({seed: first[seed] - second[seed] for seed in first if seed in second})


def best_rate(values: ByRate) -> float:
    """Return the learning rate with the largest mean over the seeds that all rates have; the lower one of equals.

    Raises:
        ValueError: no seed has a value for every rate.
    """
    seeds = set.intersection(*(set(own) for own in values.values())) if values else set()
    if not seeds:
        raise ValueError("no seed has a value for every learning rate")
    return max(sorted(values), key=lambda rate: statistics.fmean(values[rate][seed] for seed in seeds))
