"""DGCNN (Wang et al., 2019): EdgeConv layers on a k-nearest-neighbour graph rebuilt in every layer's feature space."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

leaky = partial(nn.LeakyReLU, 0.2)


class EdgeConv(nn.Module):
    """o_i = max over the k nearest neighbours j of i (i among them) of act(BN(weight . [x_j - x_i, x_i])).

    With weight = [a, b], the products are a . x_j + (b - a) . x_i: two products over points, and no tensor of edge
    features. `metric` holds a weight per input channel for the distances of the neighbour search. It is 1 but where
    channels are copies of one another, which then share the weight of the one channel they came from.
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
        """Return the indices of the k nearest points of every point in the weighted metric; itself is one of them."""
        with torch.no_grad():
            weighted = x * self.metric
            square = (weighted * x).sum(-1)
            distance = square.unsqueeze(-1) + square.unsqueeze(-2) - 2 * (weighted @ x.mT)
            return distance.topk(min(self.k, x.shape[1]), dim=-1, largest=False).indices

    def edges(self, x: Tensor, neighbours: Tensor) -> Tensor:  # (B, P, F), (B, P, k) -> (B, P, k, out_features)
        """Return the activation's input on every edge."""
        a, b = self.weight.split(self.in_features, dim=1)
        batch = torch.arange(len(x), device=x.device)[:, None, None]
        a_edges = (x @ a.mT)[batch, neighbours] + (x @ (b - a).mT).unsqueeze(2)
        return self.norm(a_edges.flatten(0, 2)).view_as(a_edges)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, k={self.k}"


class DGCNN(nn.Module):
    """Four EdgeConv layers, an embedding of their concatenation, pooling over points, and a classifier.

    Args:
        widths: channels of the EdgeConv layers.
        num_classes: outputs.
        k: neighbours, the point itself included.
        embedding: width of the layer over the concatenated features.
        hidden: widths of the classifier's hidden layers.
        activation: makes the activation modules.
        dropout: after the classifier's hidden layers.
    """

    def __init__(
        self,
        widths: Sequence[int] = (64, 64, 128, 256),
        num_classes: int = 40,
        *,
        k: int = 20,
        embedding: int = 1024,
        hidden: Sequence[int] = (512, 256),
        activation: Callable[[], nn.Module] = leaky,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.edgeconvs = nn.ModuleList(
            EdgeConv(fan_in, width, k, activation=activation)
            for fan_in, width in zip((3, *widths[:-1]), widths, strict=True)
        )
        self.embed = nn.Linear(sum(widths), embedding, bias=False)
        self.norm = nn.BatchNorm1d(embedding)
        self.activation = activation()
        head: list[nn.Module] = []
        sizes = (2 * embedding, *hidden)
        for fan_in, width in itertools.pairwise(sizes):
            head += [nn.Linear(fan_in, width), nn.BatchNorm1d(width), activation(), nn.Dropout(dropout)]
        self.head = nn.Sequential(*head, nn.Linear(sizes[-1], num_classes))

    def forward(self, x: Tensor) -> Tensor:  # (B, P, 3) -> (B, num_classes)
        """Return the class scores."""
        features = []
        for edgeconv in self.edgeconvs:
            x = edgeconv(x)
            features.append(x)
        x = self.embed(torch.cat(features, -1)).transpose(1, 2)
        x = self.activation(self.norm(x))
        return self.head(torch.cat([x.amax(-1), x.mean(-1)], 1))
