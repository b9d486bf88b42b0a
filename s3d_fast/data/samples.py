"""The classes of a data set and the shape of its samples, without its files."""

from __future__ import annotations

from collections.abc import Mapping

from s3d_fast.data import cifar, idx, modelnet
from s3d_fast.data.digits import CLASSES as DIGITS_CLASSES
from s3d_fast.data.digits import SHAPE as DIGITS_SHAPE

# As many classes as the set that is published has; folders of JPEGs may hold others.
IMAGENET_CLASSES = 1000


def classes_and_shape(dataset: str, options: Mapping[str, int]) -> tuple[int, tuple[int, ...]]:
    """Return the number of classes of a data set as it is published, and the shape of a sample.

    Args:
        dataset: a name in `data.SETS`.
        options: the options that its reader would be given.

    Raises:
        ValueError: there is no such data set.
    """
    match dataset:
        case "cifar100":
            return cifar.CLASSES, cifar.SHAPE
        case "digits":
            return DIGITS_CLASSES, DIGITS_SHAPE
        case "fashion-mnist":
            return idx.CLASSES, idx.SHAPE
        case "imagenet":
            return IMAGENET_CLASSES, (3, options["size"], options["size"])
        case "modelnet40":
            return modelnet.CLASSES, (options["points"], 3)
        case _:
            raise ValueError(f"dataset must be one of data.SETS, got {dataset!r}")
