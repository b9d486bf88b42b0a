"""VGG-19 with BatchNorm (Simonyan and Zisserman, 2015) with a width per layer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from torch import Tensor, nn

FULL_WIDTHS = (64,) * 2 + (128,) * 2 + (256,) * 4 + (512,) * 8
# A 2 x 2 maximum follows these convolutions.
POOL_AFTER = (1, 3, 7, 11, 15)


class VGG19(nn.Module):
    """Sixteen 3 x 3 convolutions and a classifier.

    Args:
        widths: channels of the 16 convolutions.
        num_classes: outputs.
        pool: the side to which feature maps are pooled before they are flattened: 1, or 7 for ImageNet.
        hidden: widths of the classifier's hidden layers: none, or (4096, 4096) for ImageNet.
        activation: makes the activation modules.
        dropout: after every hidden layer of the classifier.
    """

    def __init__(
        self,
        widths: Sequence[int] = FULL_WIDTHS,
        num_classes: int = 1000,
        *,
        pool: int = 1,
        hidden: Sequence[int] = (),
        activation: Callable[[], nn.Module] = nn.ReLU,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        if len(widths) != len(FULL_WIDTHS):
            raise ValueError(f"widths must have {len(FULL_WIDTHS)} entries, got {len(widths)}")
        features: list[nn.Module] = []
        for index, (fan_in, width) in enumerate(zip((3, *widths[:-1]), widths, strict=True)):
            features += [nn.Conv2d(fan_in, width, 3, padding=1), nn.BatchNorm2d(width), activation()]
            if index in POOL_AFTER:
                features.append(nn.MaxPool2d(2))
        classifier: list[nn.Module] = []
        sizes = (widths[-1] * pool * pool, *hidden)
        for fan_in, width in itertools.pairwise(sizes):
            classifier += [nn.Linear(fan_in, width), activation(), nn.Dropout(dropout)]
        self.features = nn.Sequential(*features)
        self.pool = nn.AdaptiveAvgPool2d(pool)
        self.classifier = nn.Sequential(*classifier, nn.Linear(sizes[-1], num_classes))

    def forward(self, x: Tensor) -> Tensor:  # (B, 3, H, W) -> (B, num_classes)
        """Return the class scores."""
        return self.classifier(self.pool(self.features(x)).flatten(1))
