"""Proposals: filters that a unit could get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from s3d_fast.splitting.plan import NewFilter


@dataclass(frozen=True)
class Proposals:
    """Filters that one unit could get, the steepest first."""

    unit: str
    theta: Tensor  # (K, D)
    like: tuple[int, ...]  # (K,), the channel from which followers are copied
    slope: Tensor  # (K,), float64
    reach: Tensor  # (K,), float64: the length of the output weights of the channel that a filter resembles
    statistics: Mapping[str, Tensor]  # name of a BatchNorm's buffer -> (K,), its entries for the new channels

    def __len__(self) -> int:
        return len(self.like)

    def __getitem__(self, number: int) -> NewFilter:
        """Return one of the filters, ready for a plan."""
        statistics = {name: float(values[number]) for name, values in self.statistics.items()}
        return NewFilter(self.unit, self.theta[number], self.like[number], float(self.slope[number]), statistics)

    def take(self, places: Sequence[int]) -> Proposals:
        """Return some of the filters."""
        index = torch.tensor(list(places), dtype=torch.int64)
        return replace(
            self,
            theta=self.theta[index.to(self.theta.device)],
            like=tuple(self.like[place] for place in places),
            slope=self.slope[index],
            reach=self.reach[index],
            statistics={name: values[index.to(values.device)] for name, values in self.statistics.items()},
        )
