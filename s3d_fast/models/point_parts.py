"""Parts of networks on point clouds: layers shared by all points, a classifier, and the choice of points."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def shared_mlp(fan_in: int, widths: Sequence[int], activation: Callable[[], nn.Module]) -> nn.Sequential:
    """Return layers that compute the same function of every point: 1x1 convolutions on (B, fan_in, P, K)."""
    layers: list[nn.Module] = []
    for before, width in itertools.pairwise((fan_in, *widths)):
        layers += [nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), activation()]
    return nn.Sequential(*layers)


def classifier(
    fan_in: int, hidden: Sequence[int], num_classes: int, activation: Callable[[], nn.Module], dropout: float
) -> nn.Sequential:
    """Return fully connected layers from the features of a cloud to its class scores."""
    layers: list[nn.Module] = []
    for before, width in itertools.pairwise((fan_in, *hidden)):
        layers += [nn.Linear(before, width), nn.BatchNorm1d(width), activation(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear((fan_in, *hidden)[-1], num_classes))


@torch.library.custom_op("s3d_models::farthest_points", mutates_args=())
def farthest_points(x: Tensor, count: int) -> Tensor:  # (B, P, 3) -> (B, count)
    """Return the indices of points far from one another.

    The first point is the one farthest from the mean of its cloud. Each further point has the largest distance to the
    nearest point chosen so far. So the choice does not depend on the order of the points, except for ties.

    Cost: 3 count P multiplications per cloud, in `count` steps. It is one operation, so that graphs need not unroll
    the loop.
    """
    clouds = torch.arange(len(x), device=x.device)
    chosen = torch.empty(len(x), count, dtype=torch.int64, device=x.device)
    last = _squared(x - x.mean(1, keepdim=True)).argmax(1)
    nearest = x.new_full(x.shape[:2], torch.inf)
    for index in range(count):
        chosen[:, index] = last
        nearest = torch.minimum(nearest, _squared(x - x[clouds, last].unsqueeze(1)))
        last = nearest.argmax(1)
    return chosen


@farthest_points.register_fake
def _(x: Tensor, count: int) -> Tensor:
    return x.new_empty((x.shape[0], count), dtype=torch.int64)


@torch.library.custom_op("s3d_models::ball_query", mutates_args=())
def ball_query(x: Tensor, centres: Tensor, radius: float, k: int) -> Tensor:  # (B, P, 3), (B, S, 3) -> (B, S, k)
    """Return the indices of the k points nearest to every centre, within a radius.

    Where a ball has fewer points, the nearest one is repeated: a maximum over the ball does not notice.
    """
    distances = torch.cdist(centres, x, compute_mode="donot_use_mm_for_euclid_dist")
    found, indices = distances.topk(k, dim=-1, largest=False)
    return torch.where(found <= radius, indices, indices[..., :1])


@ball_query.register_fake
def _(x: Tensor, centres: Tensor, radius: float, k: int) -> Tensor:
    return x.new_empty((x.shape[0], centres.shape[1], k), dtype=torch.int64)


def _squared(x: Tensor) -> Tensor:  # (B, P, 3) -> (B, P)
    return x.square().sum(-1)
