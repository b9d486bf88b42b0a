"""Rows with a value for every learning rate and seed, compared at the best rate of each and paired by seed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.results.experiment import Record, Records
from benchmarks.results.statistics import Interval, best_rate, difference, interval
from benchmarks.results.tables import Values, by_rate_and_seed


class Incomplete(ValueError):
    """An experiment has not been run far enough to show anything."""


@dataclass(frozen=True)
class Comparison:
    """Rows, each on the seeds that are complete: those for which it has a value at every learning rate.

    Attributes:
        values: by row, learning rate and seed.
        records: the records, by row, learning rate and seed.
        lower: whether lower values are better.
    """

    values: Values
    records: dict[tuple[str, float, int], Record]
    lower: bool = False

    @classmethod
    def of(
        cls,
        records: Records,
        rows: Sequence[str],
        rates: Sequence[float],
        value: Callable[[Record], float],
        lower: bool = False,
    ) -> Comparison:
        """Return the comparison of some rows.

        Raises:
            Incomplete: a row has no complete seed.
        """
        every = by_rate_and_seed(records, value)
        values: Values = {}
        for row in rows:
            held = [every.get(row, {}).get(rate, {}) for rate in rates]
            seeds = sorted(set.intersection(*(set(own) for own in held)))
            if not seeds:
                raise Incomplete(f"no seed has a value of {row!r} for every learning rate")
            values[row] = {rate: {seed: own[seed] for seed in seeds} for rate, own in zip(rates, held, strict=True)}
        by_place = {
            (one["settings"]["row"], one["settings"]["lr"], one["settings"]["seed"]): one for one in records.values()
        }
        return cls(values, by_place, lower)

    def seeds(self, row: str) -> list[int]:
        """Return the complete seeds of a row."""
        return list(next(iter(self.values[row].values())))

    def rate(self, row: str) -> float:
        """Return the best learning rate of a row."""
        sign = -1 if self.lower else 1
        signed = {rate: {seed: sign * one for seed, one in own.items()} for rate, own in self.values[row].items()}
        return best_rate(signed)

    def best(self, row: str) -> dict[int, float]:
        """Return the values of a row at its best learning rate, by seed."""
        return self.values[row][self.rate(row)]

    def mean(self, row: str) -> Interval:
        """Return the mean of a row at its best learning rate."""
        return interval(self.best(row))

    def minus(self, first: str, second: str) -> Interval:
        """Return the paired difference of two rows, each at its best learning rate, on the seeds that both have."""
        return difference(self.best(first), self.best(second))

    def minus_at(self, first: str, second: str, rate: float) -> Interval:
        """Return the paired difference of two rows at one learning rate."""
        return difference(self.values[first][rate], self.values[second][rate])

    def minus_over_rates(self, first: str, second: str) -> Interval:
        """Return the paired difference of two rows, each value being the mean over all learning rates."""
        one, other = (
            {seed: statistics.fmean(own[seed] for own in self.values[row].values()) for seed in self.seeds(row)}
            for row in (first, second)
        )
        return difference(one, other)

    def of_row(self, row: str) -> list[Record]:
        """Return the records of a row at its best learning rate."""
        rate = self.rate(row)
        return [self.records[row, rate, seed] for seed in self.seeds(row)]
