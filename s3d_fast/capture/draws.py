"""Random draws without replacement: some of the parts of every sample, one of each strip."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draw:
    """The parts that were drawn of every sample."""

    index: Tensor  # (B, r), int64
    weight: Tensor  # (r,), for how many parts each stands

    @staticmethod
    def of(samples: int, length: int, count: int, device: torch.device, seed: int) -> Draw:
        """Return `count` of `length` parts of every sample, all if these are fewer.

        The parts, in their order, are divided into strips of equal length, and one part of each is drawn. The draw
        depends on the seed alone.
        """
        count = min(count, length)
        generator = torch.Generator().manual_seed(seed)
        edges = torch.arange(count + 1) * length // count
        sizes = edges[1:] - edges[:-1]
        drawn = (torch.rand(samples, count, generator=generator) * sizes).long()
        index = edges[:-1] + torch.minimum(drawn, sizes - 1)
        return Draw(index.to(device), sizes.to(device))

    def rows(self, length: int) -> Tensor:  # (B r,)
        """Return the drawn rows among those of all samples, `length` each."""
        first = torch.arange(len(self.index), device=self.index.device)[:, None] * length
        return (first + self.index).flatten()

    def weights(self, C: Tensor) -> Tensor:  # (B r, 1)
        """Return the weight of every drawn row, in the dtype of C."""
        return self.weight.to(C.dtype).repeat(len(self.index)).unsqueeze(1)
