"""PointNet++ (Qi et al., 2017b): small PointNets on balls around points far from one another, level by level."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from s3d_fast.models.point_parts import ball_query, classifier, farthest_points, shared_mlp

# Shared layers of a level.
DEPTH = 3


class PointNet2(nn.Module):
    """PointNet++ with balls of one size per level: levels of three shared layers, one over all points, a classifier.

    Args:
        widths: channels of the shared layers, three for every level and three for the layers over all points.
        num_classes: number of outputs.
        centres: points that every level keeps; all of them if there are fewer.
        radii: radius of the balls of every level.
        neighbours: points taken from every ball; all of them if there are fewer.
        hidden: widths of the classifier's hidden layers.
        activation: makes the activation modules.
        dropout: rate after the classifier's hidden layers.

    Raises:
        ValueError: the numbers of widths, centres, radii and neighbours do not fit together.
    """

    def __init__(
        self,
        widths: Sequence[int] = (64, 64, 128, 128, 128, 256, 256, 512, 1024),
        num_classes: int = 40,
        *,
        centres: Sequence[int] = (512, 128),
        radii: Sequence[float] = (0.2, 0.4),
        neighbours: Sequence[int] = (32, 64),
        hidden: Sequence[int] = (512, 256),
        activation: Callable[[], nn.Module] = nn.ReLU,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        levels = len(centres)
        if len(radii) != levels or len(neighbours) != levels:
            raise ValueError(
                f"centres, radii and neighbours must have one entry per level, got {levels}, {len(radii)} and "
                f"{len(neighbours)} entries"
            )
        if len(widths) != DEPTH * (levels + 1):
            raise ValueError(
                f"widths must be {DEPTH * (levels + 1)}, {DEPTH} for each of {levels} levels and {DEPTH} for the "
                f"layers over all points; got {tuple(widths)}"
            )
        parts = [widths[start : start + DEPTH] for start in range(0, len(widths), DEPTH)]
        fan_ins = [0, *(part[-1] for part in parts)]
        self.levels = nn.ModuleList(
            SetAbstraction(*level, activation=activation)
            for level in zip(fan_ins[:levels], parts[:levels], centres, radii, neighbours, strict=True)
        )
        self.shared = shared_mlp(3 + fan_ins[levels], parts[levels], activation)
        self.head = classifier(widths[-1], hidden, num_classes, activation, dropout)

    def forward(self, x: Tensor) -> Tensor:  # (B, P, 3) -> (B, num_classes)
        """Return the class scores."""
        features = x.new_empty(*x.shape[:2], 0)
        for level in self.levels:
            x, features = level(x, features)
        together = torch.cat([x, features], -1).mT.unsqueeze(-1)
        return self.head(self.shared(together).amax((2, 3)))


class SetAbstraction(nn.Module):
    """o_i = max over points j in the ball around centre i of mlp([x_j - x_i, f_j]).

    The centres are found by farthest point sampling. Of a ball, the nearest points are taken; the paper takes any. So
    the result does not depend on the order of the points.

    Args:
        fan_in: features of a point besides its coordinates.
        widths: channels of the shared layers.
        centres: number of centres.
        radius: radius of the balls.
        neighbours: points taken from every ball.
        activation: makes the activation modules.
    """

    def __init__(
        self,
        fan_in: int,
        widths: Sequence[int],
        centres: int,
        radius: float,
        neighbours: int,
        *,
        activation: Callable[[], nn.Module],
    ) -> None:
        super().__init__()
        self.centres, self.radius, self.neighbours = centres, radius, neighbours
        self.shared = shared_mlp(3 + fan_in, widths, activation)

    def forward(self, x: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:  # (B, P, 3), (B, P, fan_in)
        """Return the centres, (B, S, 3), and their features, (B, S, widths[-1])."""
        points = x.shape[1]
        clouds = torch.arange(x.shape[0], device=x.device)[:, None]
        centres = x[clouds, farthest_points(x.detach(), min(self.centres, points))]
        ball = ball_query(x.detach(), centres.detach(), self.radius, min(self.neighbours, points))
        places = clouds.unsqueeze(-1), ball
        group = torch.cat([x[places] - centres.unsqueeze(2), features[places]], -1)
        return centres, self.shared(group.permute(0, 3, 1, 2)).amax(-1).mT

    def extra_repr(self) -> str:
        return f"centres={self.centres}, radius={self.radius}, neighbours={self.neighbours}"
