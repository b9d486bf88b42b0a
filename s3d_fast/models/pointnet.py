"""PointNet (Qi et al., 2017a): the same layers for every point, and a maximum over the points."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from s3d_fast.models.point_parts import classifier, shared_mlp


class PointNet(nn.Module):
    """Layers shared by all points, a maximum over the points, and a classifier.

    Two small networks of the same kind predict a linear map of a cloud's coordinates, and one of its features after the
    second layer. These maps may be left out.

    The paper adds a penalty to the loss that keeps the map of the features near a rotation; it is not part of this
    network. The layer in front of that map keeps its width, because its channels are rows of a square matrix that
    another layer predicts.

    Args:
        widths: channels of the shared layers; the map of the features comes after the second.
        num_classes: number of outputs.
        hidden: widths of the classifier's hidden layers.
        input_transform: whether the coordinates are mapped.
        feature_transform: whether the features after the second layer are mapped.
        transform_widths: channels of the shared layers of the networks that predict these maps.
        transform_hidden: widths of the hidden layers behind them.
        activation: makes the activation modules.
        dropout: rate after the classifier's hidden layers.

    Raises:
        ValueError: there are fewer than three widths.
    """

    def __init__(
        self,
        widths: Sequence[int] = (64, 64, 64, 128, 1024),
        num_classes: int = 40,
        *,
        hidden: Sequence[int] = (512, 256),
        input_transform: bool = True,
        feature_transform: bool = True,
        transform_widths: Sequence[int] = (64, 128, 1024),
        transform_hidden: Sequence[int] = (512, 256),
        activation: Callable[[], nn.Module] = nn.ReLU,
        dropout: float = 0.3,
    ) -> None:
        super().__init__()
        if len(widths) < 3:
            raise ValueError(f"widths must be at least three, got {tuple(widths)}")

        def transform(size: int) -> nn.Module:
            return Transform(size, transform_widths, transform_hidden, activation=activation)

        self.input_transform = transform(3) if input_transform else nn.Identity()
        self.local = shared_mlp(3, widths[:2], activation)
        self.feature_transform = transform(widths[1]) if feature_transform else nn.Identity()
        self.deep = shared_mlp(widths[1], widths[2:], activation)
        self.head = classifier(widths[-1], hidden, num_classes, activation, dropout)

    def forward(self, x: Tensor) -> Tensor:  # (B, P, 3) -> (B, num_classes)
        """Return the class scores."""
        x = self.input_transform(x.mT.unsqueeze(-1))
        x = self.feature_transform(self.local(x))
        return self.head(self.deep(x).amax((2, 3)))


class Transform(nn.Module):
    """T(x) x_i for every point i, where a small PointNet predicts the matrix T from the whole cloud.

    T is the identity at first.

    Args:
        size: channels of the points.
        widths: channels of the layers shared by all points.
        hidden: widths of the layers behind their maximum.
        activation: makes the activation modules.
    """

    def __init__(
        self, size: int, widths: Sequence[int], hidden: Sequence[int], *, activation: Callable[[], nn.Module]
    ) -> None:
        super().__init__()
        self.size = size
        self.shared = shared_mlp(size, widths, activation)
        self.head = classifier(widths[-1], hidden, size * size, activation, dropout=0.0)
        last = self.head[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        with torch.no_grad():
            last.bias.copy_(torch.eye(size).flatten())

    def forward(self, x: Tensor) -> Tensor:  # (B, size, P, 1) -> (B, size, P, 1)
        """Return the mapped points."""
        matrix = self.head(self.shared(x).amax((2, 3))).unflatten(1, (self.size, self.size))
        return (matrix @ x.squeeze(-1)).unsqueeze(-1)
