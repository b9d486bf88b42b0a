"""A multilayer perceptron."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers of the given widths with an activation, and optionally a BatchNorm, between them."""

    def __init__(
        self,
        widths: Sequence[int],
        *,
        activation: Callable[[], nn.Module] = nn.SiLU,
        batchnorm: bool = False,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for fan_in, width in itertools.pairwise(widths[:-1]):
            layers.append(nn.Linear(fan_in, width))
            if batchnorm:
                layers.append(nn.BatchNorm1d(width))
            layers.append(activation())
        layers.append(nn.Linear(widths[-2], widths[-1]))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:  # (B, widths[0]) -> (B, widths[-1])
        """Return the outputs."""
        return self.layers(x)
