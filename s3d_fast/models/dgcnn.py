"""DGCNN (Wang et al., 2019): EdgeConv layers on a k-nearest-neighbour graph rebuilt in every layer's feature space."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from s3d_fast.network.edgeconv import EdgeConv, leaky


class DGCNN(nn.Module):
    """Four EdgeConv layers, an embedding of their concatenation, pooling over points, and a classifier.

    Args:
        widths: channels of the EdgeConv layers.
        num_classes: number of outputs.
        k: neighbours, the point itself included.
        embedding: width of the layer over the concatenated features.
        hidden: widths of the classifier's hidden layers.
        activation: makes the activation modules.
        dropout: rate after the classifier's hidden layers.
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
