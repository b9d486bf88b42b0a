"""How far the copies of a neuron move apart: a length, a share of the filter's length, or what a search finds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from s3d_fast.base import require

# The size if none is given: copies that are closer hardly part (docs/results.md, experiments D and E).
DEFAULT = "relative:0.3"
# A search starts from this share of the filter's length, and tries these multiples of it.
START, MULTIPLES = 0.3, (0.1, 0.3, 1.0, 3.0)


@dataclass(frozen=True)
class StepSize:
    """The size of a split.

    Attributes:
        size: the length of a step, or its share of the length of the filter.
        relative: whether it is a share.
        search: whether the loss on the batches at hand decides between multiples of it.
    """

    size: float
    relative: bool = False
    search: bool = False

    def __post_init__(self) -> None:
        require.positive("eps", self.size)

    @classmethod
    def of(cls, eps: float | str | StepSize) -> StepSize:
        """Return what eps stands for: 0.01, a length; "relative:0.3", a share of a filter's length; or "search".

        Raises:
            ValueError: it is none of these.
        """
        if isinstance(eps, StepSize):
            return eps
        if not isinstance(eps, str):
            return cls(eps)
        word, _, number = eps.partition(":")
        if word == "search" and not number:
            return cls(START, relative=True, search=True)
        try:
            size = float(number if word == "relative" else eps)
        except ValueError:
            size = math.nan
        if not size > 0 or word not in ("relative", eps):
            raise ValueError(f'eps must be a number > 0, "relative:0.3" or the like, or "search"; got {eps!r}')
        return cls(size, relative=word == "relative")

    def sizes(self) -> tuple[float, ...]:
        """Return the sizes to try."""
        return tuple(self.size * factor for factor in MULTIPLES) if self.search else (self.size,)

    def __str__(self) -> str:
        if self.search:
            return "search"
        return f"relative:{self.size:g}" if self.relative else f"{self.size:g}"
