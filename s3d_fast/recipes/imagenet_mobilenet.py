"""MobileNetV1 on ImageNet: the paper's appendix, section ImageNet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from s3d_fast.models.mobilenet import FULL_WIDTHS, MobileNetV1
from s3d_fast.recipes.recipe import Recipe


def network(widths: Sequence[int], classes: int) -> nn.Module:
    """Return the network for images of 224 x 224."""
    return MobileNetV1(widths, classes)


PAPER = Recipe(
    name="imagenet-mobilenet",
    summary="MobileNetV1 on ImageNet, grown in each step to the MACs of the paper's table",
    dataset="imagenet",
    network=network,
    splittable=r"blocks\.\d+\.3",
    full_widths=FULL_WIDTHS,
    data_options={"size": 224},
    channels_last=True,
    # The paper gives the seed's MACs (0.059 G) but not its widths; 0.304 times the full widths give these MACs.
    widths=tuple(round(0.304 * width) for width in FULL_WIDTHS),
    steps=4,
    # Not stated in the paper: epochs, momentum and weight decay.
    epochs=120,
    # The paper has 128 on each of 4 GPUs.
    batch_size=512,
    optimizer="sgd",
    learning_rate=0.2,
    momentum=0.9,
    weight_decay=4e-5,
    schedule="cosine",
    warmup=5,
    label_smoothing=0.1,
    eps=0.01,
    curvature="paper",
    m=2,
    c=1.3,
    macs=(82_000_000, 140_000_000, 291_000_000, 558_000_000),
    # Not stated in the paper either: an epoch's time, of 120.
    split_time=1.0,
    split_batch=64,
    memory_budget="4GiB",
)
CPU = replace(
    PAPER,
    data_options={"size": 64},
    # As in cifar100_mobilenet.
    method="new",
    growth=1.25,
    cost="macs",
    eps="relative:0.3",
    curvature="exact",
    widths=(8,) * 14,
    steps=2,
    epochs=4,
    batch_size=64,
    learning_rate=0.1,
    warmup=1,
    macs=None,
    split_share=0.01,
    split_time=None,
    split_batch=16,
    memory_budget="512MiB",
)
