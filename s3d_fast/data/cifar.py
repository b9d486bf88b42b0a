"""CIFAR-100, from its original Python or binary files, or from npz."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from s3d_fast.data.augment import pad_crop_flip
from s3d_fast.data.files import Wanted, as_labels, existing, found, read_npz, readable_whole, require_size, some
from s3d_fast.data.images import normalise
from s3d_fast.data.pickles import PickledArray, read_pickle
from s3d_fast.data.sources import ArraySource, Dataset

CLASSES = 100
SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
# All images of the set, so that no file can claim more; a pickle has a name and three operations for each of them.
IMAGES = 60_000
PICKLE_BYTES = IMAGES * (PIXELS + 256)
PICKLE_OPERATIONS = IMAGES * 16
NORMALISE = normalise((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))

Split = tuple[Tensor, Tensor]


def cifar100(path: str | Path) -> Dataset:
    """Return CIFAR-100 with its 100 fine classes; training images are shifted by up to 4 pixels and mirrored.

    Args:
        path: the folder of the Python version (train, test) or of the binary version (train.bin, test.bin), its parent
            folder, or one of its files; or an npz file, or a folder with cifar100.npz. The npz file holds x_train,
            y_train, x_test and y_test; images are uint8, (N, 32, 32, 3) or (N, 3, 32, 32).

    Raises:
        FileNotFoundError: the files are missing.
        ValueError: a file is damaged or does not hold CIFAR-100.
    """
    splits = _read(existing(path))
    train, test = (ArraySource(*split, NORMALISE, pad_crop_flip) for split in splits)
    return Dataset("cifar100", train, test, CLASSES, SHAPE)


def _read(path: Path) -> tuple[Split, Split]:
    if path.suffix == ".npz":
        return _read_npz(path)
    folder = path if path.is_dir() else path.parent
    if path.is_dir() and (folder / "cifar100.npz").is_file():
        return _read_npz(folder / "cifar100.npz")
    for place in (folder, folder / "cifar-100-python", folder / "cifar-100-binary"):
        if all((place / name).is_file() for name in ("train", "test")):
            return _read_pickle(place / "train"), _read_pickle(place / "test")
        if all((place / name).is_file() for name in ("train.bin", "test.bin")):
            return _read_binary(place / "train.bin"), _read_binary(place / "test.bin")
    wanted = "cifar-100-python (train and test), cifar-100-binary (train.bin and test.bin) or cifar100.npz"
    raise FileNotFoundError(f"CIFAR-100 at {folder}: expected {wanted}, found {found(folder)}")


def _read_npz(path: Path) -> tuple[Split, Split]:
    most = {"x": IMAGES * PIXELS, "y": IMAGES * 8}
    names = ("x_train", "y_train", "x_test", "y_test")
    x_train, y_train, x_test, y_test = read_npz(path, [Wanted((name,), most[name[0]]) for name in names])
    return _split(f"{path}, train", x_train, y_train), _split(f"{path}, test", x_test, y_test)


def _read_binary(path: Path) -> Split:
    # A record: coarse label, fine label, pixels.
    record = 2 + PIXELS
    require_size(path, IMAGES * record)
    data = np.fromfile(path, dtype=np.uint8)
    if data.size % record:
        raise ValueError(f"{path} must consist of records of {record} bytes, got {data.size} bytes; is it truncated?")
    records = data.reshape(-1, record)
    return _split(path, records[:, 2:].reshape(-1, *SHAPE), records[:, 1])


def _read_pickle(path: Path) -> Split:
    require_size(path, PICKLE_BYTES)
    with readable_whole(path, "CIFAR-100 batch"):
        batch = read_pickle(path, PICKLE_OPERATIONS)
    if not isinstance(batch, dict):
        raise ValueError(f"{path} must hold a dictionary, got {type(batch).__name__}")
    values = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in batch.items()}
    if not {"data", "fine_labels"} <= values.keys():
        raise ValueError(f"{path} must hold data and fine_labels, got {some(values)}")
    data, labels = values["data"], values["fine_labels"]
    pixels = data.array() if isinstance(data, PickledArray) else None
    if pixels is None or pixels.ndim != 2 or pixels.shape[1] != PIXELS:
        got = "something else" if pixels is None else pixels.shape
        raise ValueError(f"{path}: data must be an array of bytes of shape (N, {PIXELS}), got {got}")
    # numpy would expand lists that hold each other.
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise ValueError(f"{path}: labels must be integers of shape (N,)")
    return _split(path, pixels.reshape(-1, *SHAPE), labels)


def _split(where: object, images: np.ndarray, labels: Any) -> Split:
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] not in ((32, 32, 3), SHAPE):
        wanted = "uint8 of shape (N, 32, 32, 3) or (N, 3, 32, 32)"
        raise ValueError(f"{where}: images must be {wanted}, got {images.dtype} {images.shape}")
    if images.shape[1:] != SHAPE:
        images = images.transpose(0, 3, 1, 2)
    # Copy: the array may be read-only, or a view of a larger one.
    return torch.from_numpy(images.copy()), as_labels(where, labels, len(images), CLASSES)
