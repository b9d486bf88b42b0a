"""Small regression problems that come with scikit-learn: a photograph, breast cancer, diabetes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from s3d_fast.base import require

NAMES = ("photograph", "breast cancer", "diabetes")


def regression(name: str, side: int = 16) -> tuple[Tensor, Tensor]:  # (N, D), (N,)
    """Return rows and targets in float64, not yet scaled.

    The photograph is the middle of scikit-learn's china.jpg in grey, averaged to `side` x `side` pixels: rows are the
    coordinates of pixels in [-1, 1], row by row from the top; targets are their brightness in [0, 1]. The targets of
    breast cancer are 0 and 1.

    Raises:
        ValueError: the name is not one of `NAMES`, or side < 1.
        RuntimeError: scikit-learn is not installed, or, for the photograph, Pillow is not.
    """
    require.choice("name", name, NAMES)
    require.count("side", side)
    sets = require.library("sklearn.datasets", f"{name}: the data come with scikit-learn", "'s3d_fast[digits]'")
    if name == "photograph":
        return _photograph(sets, side)
    loaded = sets.load_breast_cancer() if name == "breast cancer" else sets.load_diabetes()
    return torch.from_numpy(loaded.data).double(), torch.from_numpy(loaded.target).double()


def _photograph(sets: Any, side: int) -> tuple[Tensor, Tensor]:
    require.library("PIL", "the photograph is a JPEG, which Pillow reads", "'s3d_fast[images]'")
    grey = torch.from_numpy(sets.load_sample_image("china.jpg").copy()).double().mean(-1) / 255
    edge = min(grey.shape)
    top, left = ((size - edge) // 2 for size in grey.shape)
    square = grey[top : top + edge, left : left + edge]
    pixels = F.adaptive_avg_pool2d(square[None, None], side)[0, 0]
    line = (torch.arange(side, dtype=torch.float64) + 0.5) / side * 2 - 1
    down, across = torch.meshgrid(line, line, indexing="ij")
    return torch.stack([across.flatten(), down.flatten()], 1), pixels.flatten()
