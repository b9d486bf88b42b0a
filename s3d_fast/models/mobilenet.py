"""MobileNetV1 (Howard et al., 2017) with a width per layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

# The stem and the 13 pointwise layers at width 1.0, and the strides of the 13 depthwise layers.
FULL_WIDTHS = (32, 64, 128, 128, 256, 256, 512, 512, 512, 512, 512, 512, 1024, 1024)
STRIDES = (1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1)


class MobileNetV1(nn.Module):
    """Depthwise separable convolutions.

    Args:
        widths: channels of the stem and of the pointwise layers.
        num_classes: number of outputs.
        stem_stride: 1 for CIFAR-sized images, 2 for ImageNet-sized ones.
        strides: strides of the depthwise layers; fewer than 13 make a shallower network.
        activation: makes the activation modules.
    """

    def __init__(
        self,
        widths: Sequence[int] = FULL_WIDTHS,
        num_classes: int = 1000,
        *,
        stem_stride: int = 2,
        strides: Sequence[int] = STRIDES,
        activation: Callable[[], nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__()
        if len(widths) != len(strides) + 1:
            raise ValueError(f"widths must have {len(strides) + 1} entries, got {len(widths)}")
        self.stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 3, stem_stride, 1, bias=False), nn.BatchNorm2d(widths[0]), activation()
        )
        self.blocks = nn.Sequential(
            *(
                separable(fan_in, width, stride, activation)
                for fan_in, width, stride in zip(widths[:-1], widths[1:], strides, strict=True)
            )
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:  # (B, 3, H, W) -> (B, num_classes)
        """Return the class scores."""
        return self.head(self.pool(self.blocks(self.stem(x))).flatten(1))


def separable(fan_in: int, width: int, stride: int, activation: Callable[[], nn.Module]) -> nn.Sequential:
    """Return a depthwise 3 x 3 and a pointwise convolution, each with BatchNorm and activation."""
    return nn.Sequential(
        nn.Conv2d(fan_in, fan_in, 3, stride, 1, groups=fan_in, bias=False),
        nn.BatchNorm2d(fan_in),
        activation(),
        nn.Conv2d(fan_in, width, 1, bias=False),
        nn.BatchNorm2d(width),
        activation(),
    )
