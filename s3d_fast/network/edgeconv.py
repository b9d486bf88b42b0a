"""EdgeConv (Wang et al., 2019): features of a point from the edges to its nearest neighbours in feature space."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

leaky = partial(nn.LeakyReLU, 0.2)


@torch.library.custom_op("s3d_network::nearest_points", mutates_args=())
def nearest_points(x: Tensor, metric: Tensor, k: int) -> Tensor:  # (B, P, F), (F,) -> (B, P, k)
    """Return the indices of the k points nearest to every point; one operation, so that graphs show it as such."""
    weighted = x * metric
    square = (weighted * x).sum(-1)
    distance = square.unsqueeze(-1) + square.unsqueeze(-2) - 2 * (weighted @ x.mT)
    return distance.topk(k, dim=-1, largest=False).indices


@nearest_points.register_fake
def _(x: Tensor, metric: Tensor, k: int) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1], k), dtype=torch.int64)


class EdgeConv(nn.Module):
    """o_i = max over the k nearest neighbours j of i (i among them) of act(BN(weight . [x_j - x_i, x_i])).

    With weight = [a, b], the products are a . x_j + (b - a) . x_i: two products over points, and no tensor of edge
    features. `metric` holds a weight per input channel for the distances of the neighbour search. It is 1, except
    where channels are copies of one another: the copies share the weight of the original channel.
    """

    metric: Tensor

    def __init__(
        self, in_features: int, out_features: int, k: int = 20, *, activation: Callable[[], nn.Module] = leaky
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.k = in_features, out_features, k
        self.weight = nn.Parameter(torch.empty(out_features, 2 * in_features))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)
        self.norm = nn.BatchNorm1d(out_features)
        self.activation = activation()
        self.register_buffer("metric", torch.ones(in_features))

    def forward(self, x: Tensor) -> Tensor:  # (B, P, in_features) -> (B, P, out_features)
        """Return the features of every point."""
        return self.activation(self.edges(x, self.neighbours(x))).amax(-2)

    def neighbours(self, x: Tensor) -> Tensor:  # (B, P, F) -> (B, P, k)
        """Return the indices of the k nearest points of every point, itself included, in the weighted metric."""
        return nearest_points(x.detach(), self.metric, min(self.k, x.shape[1]))

    def edges(self, x: Tensor, neighbours: Tensor) -> Tensor:  # (B, P, F), (B, P, k) -> (B, P, k, out_features)
        """Return the activation's input on every edge."""
        a, b = self.weight.split(self.in_features, dim=1)
        batch = torch.arange(x.shape[0], device=x.device)[:, None, None]
        a_edges = (x @ a.mT)[batch, neighbours] + (x @ (b - a).mT).unsqueeze(2)
        return self.norm(a_edges.flatten(0, 2)).view_as(a_edges)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, k={self.k}"
