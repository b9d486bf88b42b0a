"""Which curvature the splitting matrix has, and how wide kinks and ties are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from s3d_fast.base import require
from s3d_fast.maths.activations import DEFAULT_SHARPNESS

# The bandwidth of a kink, and of a tie between two values, in units of the step; and its least value in units of the
# filter's length. docs/design.md says how they were chosen.
KINK, TIE, FLOOR = 0.25, 0.2, 0.0005
# The least value for growth: splits chosen with it gain more on data that S has not seen.
GROWTH_FLOOR = 0.02
# |dz/dtheta| behind a convolution or an average is estimated from this many random directions.
PROBES = 16


@dataclass(frozen=True)
class Curvature:
    """Which curvature the splitting matrix has.

    Attributes:
        kind: "exact", all activations of a chain, with kinks and ties at the scale of the step; or "paper", the first
            one alone, with the softplus of one sharpness in place of kinks.
        eps: the size of the step that will be made.
        relative: whether eps is relative to the length of the filter.
        sharpness: of the softplus that stands in for kinks; None means the scale of the step ("exact") or 3 ("paper").
        floor: the least bandwidth of kinks and ties, in units of the filter's length.
    """

    kind: str = "exact"
    eps: float = 0.01
    relative: bool = False
    sharpness: float | None = None
    floor: float = FLOOR

    def __post_init__(self) -> None:
        require.choice("curvature", self.kind, ("exact", "paper"))
        require.positive("eps", self.eps)
        if self.sharpness is not None:
            require.positive("sharpness", self.sharpness)
        require.not_negative("floor", self.floor)

    @property
    def fixed_sharpness(self) -> float | None:
        """The one sharpness of all kinks; None if it follows the step."""
        return DEFAULT_SHARPNESS if self.kind == "paper" and self.sharpness is None else self.sharpness

    def bandwidth(self, length: Tensor, factor: float) -> Tensor:
        """Return the bandwidth in parameters for filters of these lengths."""
        step = self.eps * length if self.relative else torch.full_like(length, self.eps)
        return torch.maximum(factor * step, self.floor * length)


def kernel(distance: Tensor, width: Tensor) -> Tensor:
    """Return the logistic kernel of a bandwidth at a distance; zero where the bandwidth is zero."""
    beta = width.clamp(min=torch.finfo(width.dtype).tiny).reciprocal_()
    s = (beta * distance).sigmoid_()
    # s (1 - s), times beta.
    result = torch.addcmul(s, s, s, value=-1).mul_(beta)
    return result.masked_fill_(width <= 0, 0)
