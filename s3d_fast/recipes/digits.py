"""A small convolutional network on scikit-learn's digits: real data that needs no download, for trying things out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from s3d_fast.recipes.recipe import Recipe


def network(widths: Sequence[int], classes: int) -> nn.Module:
    """Return three convolutions and a classifier for images of 8 x 8."""
    layers: list[nn.Module] = []
    for fan_in, width, stride in zip((1, *widths[:-1]), widths, (1, 2, 2), strict=True):
        layers += [nn.Conv2d(fan_in, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.SiLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))


FULL = Recipe(
    name="digits",
    summary="a small convolutional network on scikit-learn's digits; needs no data path",
    dataset="digits",
    network=network,
    splittable=r"\d+",
    full_widths=(16, 16, 16),
    widths=(2, 2, 2),
    steps=6,
    epochs=30,
    batch_size=64,
    optimizer="adam",
    learning_rate=0.01,
    weight_decay=1e-4,
    schedule="cosine",
    eps=0.01,
    curvature="paper",
    m=2,
    c=1.3,
    fraction=0.35,
    # The other fifth is held back, to measure what fresh data keep.
    split_share=0.8,
    split_batch=128,
)
CPU = replace(FULL, curvature="exact", steps=4, epochs=8)
