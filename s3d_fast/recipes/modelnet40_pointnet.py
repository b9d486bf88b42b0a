"""PointNet on ModelNet40: a network that the paper compares with, trained as its authors did, and grown as DGCNN is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from s3d_fast.models.pointnet import PointNet
from s3d_fast.recipes import modelnet40_dgcnn


def network(widths: Sequence[int], classes: int) -> nn.Module:
    """Return a PointNet; widths: five shared layers, two of the classifier, and three and two of both transforms."""
    return PointNet(
        widths[:5], classes, hidden=widths[5:7], transform_widths=widths[7:10], transform_hidden=widths[10:]
    )


FULL = replace(
    modelnet40_dgcnn.PAPER,
    name="modelnet40-pointnet",
    summary="PointNet on ModelNet40, from a quarter of its filters; the layer before the feature transform stays",
    network=network,
    splittable=r"local\.0|deep\.[036]|head\.[04]|(input|feature)_transform\.(shared\.[036]|head\.[04])",
    full_widths=(64, 64, 64, 128, 1024, 512, 256, 64, 128, 1024, 512, 256),
    # The second layer cannot be split, so it has its full width from the start.
    widths=(16, 64, 16, 32, 256, 128, 64, 16, 32, 256, 128, 64),
    optimizer="adam",
    learning_rate=1e-3,
    schedule="step",
    # A factor of 0.7 every 20 of 250 epochs.
    decay_at=tuple(20 * times / 250 for times in range(1, 13)),
    decay=0.7,
    label_smoothing=0.0,
    curvature="exact",
)
CPU = replace(FULL, data_options={"points": 128}, steps=2, epochs=3, split_share=0.16, memory_budget="1GiB")
