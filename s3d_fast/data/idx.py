"""Fashion-MNIST, from the idx files in which it is published."""

from __future__ import annotations

import gzip
import math
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from s3d_fast.data.augment import pad_crop_flip
from s3d_fast.data.files import as_labels, existing, found, readable_whole, require_size
from s3d_fast.data.images import normalise
from s3d_fast.data.sources import ArraySource, Dataset

CLASSES = 10
SHAPE = (1, 28, 28)
IMAGES = 70_000
# No file of the set has more bytes.
MOST = IMAGES * 28 * 28 + 64
NORMALISE = normalise((0.2860,), (0.3530,))


def fashion_mnist(path: str | Path) -> Dataset:
    """Return Fashion-MNIST; training images are shifted by up to 2 pixels and mirrored.

    Args:
        path: a folder with train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and
            t10k-labels-idx1-ubyte, each with or without .gz.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged or does not hold Fashion-MNIST.
    """
    folder = existing(path)
    folder = folder if folder.is_dir() else folder.parent
    augment = partial(pad_crop_flip, padding=2)
    train, test = (ArraySource(*_read_split(folder, name), NORMALISE, augment) for name in ("train", "t10k"))
    return Dataset("fashion-mnist", train, test, CLASSES, SHAPE)


def read_idx(path: Path) -> np.ndarray:
    """Return the array of bytes in an idx file.

    The file holds two zeros, the type, the number of dimensions, the sizes and the data.

    Raises:
        ValueError: the file is damaged or not an idx file of bytes.
    """
    require_size(path, MOST)
    if path.suffix == ".gz":
        with readable_whole(path, "gzip file"), gzip.open(path) as stream:
            # Not to its end: a small file can be decompressed to any number of bytes.
            data = stream.read(MOST + 1)
        if len(data) > MOST:
            raise ValueError(f"{path} must hold at most {MOST} bytes, got more; is it another data set?")
    else:
        data = path.read_bytes()
    if len(data) < 4 or data[:3] != b"\0\0\x08" or len(data) < 4 + 4 * data[3]:
        raise ValueError(f"{path} must begin like an idx file of bytes (0, 0, 8, dimensions), got {list(data[:4])}")
    shape = tuple(np.frombuffer(data, dtype=">u4", count=data[3], offset=4).tolist())
    start = 4 + 4 * len(shape)
    if len(data) - start != math.prod(shape):
        raise ValueError(f"{path} must hold {shape} bytes after its header, got {len(data) - start}; is it truncated?")
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)


def _read_split(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    where, beside = (_file(folder, f"{name}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
    images, labels = read_idx(where), read_idx(beside)
    if images.shape[1:] != SHAPE[1:]:
        raise ValueError(f"{where}: images must have shape (N, 28, 28), got {images.shape}")
    return torch.from_numpy(images.copy()).unsqueeze(1), as_labels(
        f"{where} and {beside.name}", labels, len(images), CLASSES
    )


def _file(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"Fashion-MNIST at {folder}: expected {name} or {name}.gz, found {found(folder)}")
