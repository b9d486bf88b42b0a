"""Stopping at the cut: a growth step needs to know which filters gain the most, not every eigenvalue to the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from s3d_fast.base import require
from s3d_fast.maths.schemes import split_gain


@dataclass(frozen=True)
class Cut:
    """The `count` filters that gain the most are wanted; a filter may stop once it is certain to be in or out.

    Attributes:
        count: how many filters are wanted, over all operators.
        m, c: the number of copies and the bound on the weights, as for `split_gain`.
        threshold: a filter that gains no more than this is out.
        inside: a filter that is in stops when its gain is known to this share of the largest gain it may have.
        weights: factors of the gains of every operator's filters, (M,) each, such as the squared lengths of filters
            whose steps are relative; 1 by default.
    """

    count: int
    m: int = 2
    c: float = 1.0
    threshold: float = 0.0
    inside: float = 0.3
    weights: Sequence[Tensor] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        require.count("count", self.count)
        require.copy_count(self.m)
        require.weight_bound(self.c)
        require.number("threshold", self.threshold)
        require.positive("inside", self.inside)

    def restricted(self, places: Sequence[int]) -> Cut:
        """Return the cut for the operators at these places."""
        return self if self.weights is None else replace(self, weights=[self.weights[place] for place in places])

    def ranking(self, filters: int, device: torch.device, known: Sequence[Tensor] = ()) -> Ranking:
        """Return what is known of the gains of so many filters: nothing yet; `known` are further weights."""
        return Ranking(self, filters, device, known)


class Ranking:
    """The certified intervals of all filters' gains, as a solver narrows them."""

    def __init__(self, cut: Cut, filters: int, device: torch.device, known: Sequence[Tensor] = ()) -> None:
        self.cut = cut
        self.weight = torch.ones(filters, dtype=torch.float64, device=device)
        if cut.weights is not None:
            given = torch.cat([weights.to(self.weight) for weights in (*cut.weights, *known)])
            require.shape("weights", given, (filters,))
            self.weight = given
        self.lower = torch.zeros(filters, dtype=torch.float64, device=device)
        self.upper = torch.full_like(self.lower, math.inf)

    def learn(self, places: Tensor, values: Tensor, widths: Tensor) -> None:
        """Narrow the intervals of the filters at `places`; values and widths are (n, 2), for both ends.

        The extreme eigenvalues lie in [values[:, 0] - widths[:, 0], values[:, 0]] and
        [values[:, 1], values[:, 1] + widths[:, 1]].
        """
        finite = (values.isfinite() & widths.isfinite()).all(-1)
        values, widths = (torch.where(finite[:, None], tensor, 0) for tensor in (values, widths))
        low, high = values.double().unbind(-1)
        high = torch.maximum(low, high)
        weight = self.weight[places]
        self.lower[places] = weight * self._gain(low, high)
        self.upper[places] = weight * self._gain(low - widths[:, 0], high + widths[:, 1])

    def decided(self, places: Tensor, values: Tensor, tol: float) -> Tensor:
        """Return which of the filters at `places` may stop: out, or in and known well, or known to `tol`."""
        cut, lower, upper = self.cut, self.lower[places], self.upper[places]
        last_in, first_out = self._order(self.lower, cut.count), self._order(self.upper, cut.count + 1)
        is_out = (upper < last_in) | (upper <= cut.threshold)
        is_in = (lower > first_out) & (lower > cut.threshold)
        radius = values.double().abs().amax(-1).nan_to_num(0)
        open_part = upper - lower
        known = open_part <= tol * self.weight[places] * self._gain(-radius, radius)
        return is_out | (is_in & (open_part <= cut.inside * upper)) | known

    def _gain(self, low: Tensor, high: Tensor) -> Tensor:
        return -split_gain(low, high, self.cut.m, self.cut.c)

    def _order(self, gains: Tensor, number: int) -> Tensor:
        """Return the gain that is `number`-th largest; below all gains if there are fewer."""
        if number > len(gains):
            return gains.new_full((), -math.inf)
        return gains.topk(number).values[-1]
