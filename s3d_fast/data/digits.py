"""Scikit-learn's handwritten digits: a data set that needs no files."""

from __future__ import annotations

import numpy as np
import torch

from s3d_fast.base import require
from s3d_fast.data.files import as_labels
from s3d_fast.data.images import normalise
from s3d_fast.data.sources import ArraySource, Dataset

CLASSES = 10
SHAPE = (1, 8, 8)
TRAIN = 1437
# Maps the values 0..16 to 0..1.
NORMALISE = normalise((0.0,), (16 / 255,))


def digits() -> Dataset:
    """Return the 8 x 8 digits, always split into the same 1437 training and 360 test images, without augmentation.

    Raises:
        RuntimeError: scikit-learn is not installed.
    """
    loaded = require.library(
        "sklearn.datasets", "the digits come with scikit-learn", "'s3d_fast[digits]'"
    ).load_digits()
    images = torch.from_numpy(loaded.images.astype(np.uint8)).unsqueeze(1)
    labels = as_labels("digits", loaded.target, len(images), CLASSES)
    order = torch.from_numpy(np.random.RandomState(0).permutation(len(images)))
    train, test = (ArraySource(images[part], labels[part], NORMALISE) for part in (order[:TRAIN], order[TRAIN:]))
    return Dataset("digits", train, test, CLASSES, SHAPE)
