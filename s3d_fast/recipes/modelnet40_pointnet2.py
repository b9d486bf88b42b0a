"""PointNet++ on ModelNet40: a network that the paper compares with, trained and grown as PointNet is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from s3d_fast.models.pointnet2 import PointNet2
from s3d_fast.recipes import modelnet40_pointnet


def network(widths: Sequence[int], classes: int) -> nn.Module:
    """Return a PointNet++ with one ball per centre; widths: nine shared layers, and two of the classifier."""
    return PointNet2(widths[:9], classes, hidden=widths[9:])


def small(widths: Sequence[int], classes: int) -> nn.Module:
    """Return a network for clouds of a few hundred points."""
    return PointNet2(widths[:9], classes, hidden=widths[9:], centres=(64, 16), radii=(0.3, 0.6), neighbours=(16, 16))


FULL = replace(
    modelnet40_pointnet.FULL,
    name="modelnet40-pointnet2",
    summary="PointNet++ (one ball per centre) on ModelNet40, from a quarter of its filters",
    network=network,
    splittable=r"(levels\.\d+\.)?shared\.[036]|head\.[04]",
    full_widths=(64, 64, 128, 128, 128, 256, 256, 512, 1024, 512, 256),
    widths=(16, 16, 32, 32, 32, 64, 64, 128, 256, 128, 64),
)
CPU = replace(
    FULL, network=small, data_options={"points": 128}, steps=2, epochs=3, split_share=0.16, memory_budget="1GiB"
)
