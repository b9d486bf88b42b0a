"""Data sets for training, read from the files in which they are published."""

from __future__ import annotations

from collections.abc import Callable

from s3d_fast.data.cifar import cifar100
from s3d_fast.data.digits import digits
from s3d_fast.data.idx import fashion_mnist
from s3d_fast.data.imagenet import imagenet
from s3d_fast.data.modelnet import modelnet40
from s3d_fast.data.sources import ArraySource, Batches, Dataset, Entry, JpegSource, Source
from s3d_fast.data.torch_sets import TorchSource, from_torch

SETS: dict[str, Callable[..., Dataset]] = {
    "cifar100": cifar100,
    "modelnet40": modelnet40,
    "imagenet": imagenet,
    "fashion-mnist": fashion_mnist,
    "digits": digits,
}

__all__ = [
    "SETS",
    "ArraySource",
    "Batches",
    "Dataset",
    "Entry",
    "JpegSource",
    "Source",
    "TorchSource",
    "cifar100",
    "digits",
    "fashion_mnist",
    "from_torch",
    "imagenet",
    "modelnet40",
]
