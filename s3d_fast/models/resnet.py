"""A residual network for small images (He et al., 2016) with a separate inner width for every block."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn


class ResNet(nn.Module):
    """Stages of two-convolution blocks around a residual stream.

    Args:
        blocks: blocks per stage.
        stream: width of the residual stream in each stage.
        inner: width between the two convolutions of each block, in order; the stream's width by default.
        num_classes: number of outputs.
        activation: makes the activation modules.
    """

    def __init__(
        self,
        blocks: Sequence[int] = (3, 3, 3),
        stream: Sequence[int] = (16, 32, 64),
        inner: Sequence[int] | None = None,
        num_classes: int = 10,
        *,
        activation: Callable[[], nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__()
        widths = [width for count, width in zip(blocks, stream, strict=True) for _ in range(count)]
        inner = widths if inner is None else list(inner)
        if len(inner) != len(widths):
            raise ValueError(f"inner must have {len(widths)} entries, one per block; got {len(inner)}")
        self.stem = nn.Sequential(
            nn.Conv2d(3, stream[0], 3, padding=1, bias=False), nn.BatchNorm2d(stream[0]), activation()
        )
        fan_ins = [stream[0], *widths[:-1]]
        self.blocks = nn.Sequential(
            *(
                Block(fan_in, middle, width, 1 if fan_in == width else 2, activation)
                for fan_in, middle, width in zip(fan_ins, inner, widths, strict=True)
            )
        )
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:  # (B, 3, H, W) -> (B, num_classes)
        """Return the class scores."""
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Block(nn.Module):
    """act(x + conv(act(conv(x)))), with a 1 x 1 convolution on the stream where its size changes."""

    def __init__(self, fan_in: int, inner: int, width: int, stride: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, inner, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.act1 = activation()
        self.conv2 = nn.Conv2d(inner, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.act2 = activation()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or fan_in != width:
            self.shortcut = nn.Sequential(nn.Conv2d(fan_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after the block."""
        inside = self.act1(self.bn1(self.conv1(x)))
        return self.act2(self.bn2(self.conv2(inside)) + self.shortcut(x))
