"""ModelNet40 as small point clouds, and small networks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.results.small_images import Batch, Images
from s3d_fast import data
from s3d_fast.models import DGCNN, PointNet, PointNet2

# Labels of the classes of ModelNet10: bathtub, bed, chair, desk, dresser, monitor, night stand, sofa, table, toilet.
TEN = (1, 2, 8, 12, 14, 22, 23, 30, 33, 35)


def load(path: str, points: int, classes: Sequence[int] | None = None) -> Images:
    """Return clouds of so many points, of some classes, which are numbered anew; nothing is augmented.

    Args:
        path: as for `s3d_fast.data.modelnet40`.
        points: of every cloud; the first ones.
        classes: the labels that are kept; all by default.
    """
    dataset = data.modelnet40(path, points)
    (x, y), (x_test, y_test) = (_clouds(source, classes) for source in (dataset.train, dataset.test))
    return Images(x, y, x_test, y_test)


def _clouds(source: Any, classes: Sequence[int] | None) -> Batch:
    x, y = source.batch(torch.arange(len(source)), augmented=False)
    if classes is None:
        return x, y
    wanted = torch.tensor(classes)
    match = y[:, None] == wanted
    keep = match.any(1)
    return x[keep], match[keep].long().argmax(1)


def dgcnn(widths: Sequence[int], seed: int, classes: int = len(TEN)) -> nn.Module:
    """Return a DGCNN with eight neighbours and small layers behind its EdgeConvs."""
    torch.manual_seed(seed)
    return DGCNN(widths, classes, k=8, embedding=64, hidden=(32,), dropout=0.0)


def pointnet(seed: int, classes: int = len(TEN)) -> nn.Module:
    """Return a PointNet with a quarter of its authors' filters in the shared layers."""
    torch.manual_seed(seed)
    return PointNet(
        (16, 16, 16, 32, 256), classes, hidden=(64, 32), transform_widths=(16, 32, 128), transform_hidden=(64, 32),
        dropout=0.0,
    )  # fmt: skip


def pointnet2(seed: int, classes: int = len(TEN)) -> nn.Module:
    """Return a PointNet++ with a quarter of its authors' filters, and balls for small clouds."""
    torch.manual_seed(seed)
    return PointNet2(
        (16, 16, 32, 32, 32, 64, 64, 128, 256), classes, centres=(32, 8), radii=(0.3, 0.6), neighbours=(8, 8),
        hidden=(64, 32), dropout=0.0,
    )  # fmt: skip
