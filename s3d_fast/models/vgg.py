"""VGG-19 (Simonyan and Zisserman, 2015), with BatchNorm or without, with a width per layer."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

FULL_WIDTHS = (64,) * 2 + (128,) * 2 + (256,) * 4 + (512,) * 8
# 2 x 2 max pooling follows these convolutions.
POOL_AFTER = (1, 3, 7, 11, 15)


class VGG19(nn.Module):
    """Sixteen 3 x 3 convolutions and a classifier.

    Args:
        widths: channels of the 16 convolutions.
        num_classes: number of outputs.
        pool: side of the feature maps after pooling, before they are flattened: 1, or 7 for ImageNet.
        hidden: widths of the classifier's hidden layers: none, or (4096, 4096) for ImageNet.
        activation: makes the activation modules.
        dropout: rate after every hidden layer of the classifier.
        batchnorm: put a BatchNorm after every convolution. With it the parameters are named as in torchvision's
            vgg19_bn, without it as in vgg19.
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
        batchnorm: bool = True,
    ) -> None:
        super().__init__()
        if len(widths) != len(FULL_WIDTHS):
            raise ValueError(f"widths must have {len(FULL_WIDTHS)} entries, got {len(widths)}")
        features: list[nn.Module] = []
        for index, (fan_in, width) in enumerate(zip((3, *widths[:-1]), widths, strict=True)):
            norm = [nn.BatchNorm2d(width)] if batchnorm else []
            features += [nn.Conv2d(fan_in, width, 3, padding=1), *norm, activation()]
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


def vgg19_of(tensors: Mapping[str, Tensor]) -> VGG19:
    """Return the float32 VGG19 with ReLU that has these weights by name; its sizes are read off their shapes.

    Raises:
        ValueError, RuntimeError: they are not the weights of a VGG19.
    """
    convolutions, linears = _weights(tensors, "features", dims=4), _weights(tensors, "classifier", dims=2)
    if len(convolutions) != len(FULL_WIDTHS) or not linears:
        raise ValueError(
            f"tensors must hold {len(FULL_WIDTHS)} convolutions features.*.weight and at least one layer "
            f"classifier.*.weight, got {len(convolutions)} and {len(linears)}"
        )
    widths, sizes = [len(weight) for weight in convolutions], [len(weight) for weight in linears]
    if min(widths + sizes) < 1:
        raise ValueError(f"tensors must hold layers that are not empty, got widths {widths} and {sizes}")
    # On the meta device: the model needs only names and shapes, since it takes over the tensors themselves.
    with torch.device("meta"):
        model = VGG19(
            widths,
            sizes[-1],
            pool=math.isqrt(linears[0].shape[1] // widths[-1]),
            hidden=sizes[:-1],
            batchnorm="features.1.running_mean" in tensors,
        )
    values = {
        name: tensor.detach().float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()
    }
    model.load_state_dict(values, strict=True, assign=True)
    return model


def _weights(tensors: Mapping[str, Tensor], part: str, dims: int) -> list[Tensor]:
    """Return the weights of the layers of a part, in order."""
    found = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(rf"{part}\.(\d+)\.weight", name)
        if match is not None and tensor.dim() == dims:
            found[int(match[1])] = tensor
    return [found[index] for index in sorted(found)]
