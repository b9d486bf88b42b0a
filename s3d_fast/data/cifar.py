"""CIFAR-100, from its original Python or binary files, or from npz."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from s3d_fast.data.augment import pad_crop_flip
from s3d_fast.data.files import as_labels, existing, found, read_npz
from s3d_fast.data.images import normalise
from s3d_fast.data.sources import ArraySource, Dataset

CLASSES = 100
SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
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
    names = ("x_train", "y_train", "x_test", "y_test")
    x_train, y_train, x_test, y_test = read_npz(path, [(name,) for name in names])
    return _split(f"{path}, train", x_train, y_train), _split(f"{path}, test", x_test, y_test)


def _read_binary(path: Path) -> Split:
    # A record: coarse label, fine label, pixels.
    data, record = np.fromfile(path, dtype=np.uint8), 2 + PIXELS
    if data.size % record:
        raise ValueError(f"{path} must consist of records of {record} bytes, got {data.size} bytes; is it truncated?")
    records = data.reshape(-1, record)
    return _split(path, records[:, 2:].reshape(-1, *SHAPE), records[:, 1])


def _read_pickle(path: Path) -> Split:
    with path.open("rb") as stream:
        try:
            batch = _BatchUnpickler(stream, encoding="bytes").load()
        except _Refused as error:
            raise ValueError(f"{path}: {error}") from error
        # A damaged pickle can raise any exception.
        except Exception as error:
            raise ValueError(f"{path} is not a whole CIFAR-100 batch: {type(error).__name__}: {error}") from error
    if not isinstance(batch, dict):
        raise ValueError(f"{path} must hold a dictionary, got {type(batch).__name__}")
    values = {key.decode("latin1") if isinstance(key, bytes) else str(key): value for key, value in batch.items()}
    if not {"data", "fine_labels"} <= values.keys():
        raise ValueError(f"{path} must hold data and fine_labels, got {', '.join(values)}")
    data = values["data"]
    pixels = data.array() if isinstance(data, _PickledArray) else None
    if pixels is None or pixels.shape != (len(pixels), PIXELS):
        got = "something else" if pixels is None else pixels.shape
        raise ValueError(f"{path}: data must be an array of bytes of shape (N, {PIXELS}), got {got}")
    return _split(path, pixels.reshape(-1, *SHAPE), values["fine_labels"])


def _split(where: object, images: np.ndarray, labels: Any) -> Split:
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] not in ((32, 32, 3), SHAPE):
        wanted = "uint8 of shape (N, 32, 32, 3) or (N, 3, 32, 32)"
        raise ValueError(f"{where}: images must be {wanted}, got {images.dtype} {images.shape}")
    if images.shape[1:] != SHAPE:
        images = images.transpose(0, 3, 1, 2)
    # Copy: the array may be read-only, or a view of a larger one.
    return torch.from_numpy(images.copy()), as_labels(where, labels, len(images), CLASSES)


class _Refused(ValueError):
    """A pickle asks for a name that a CIFAR batch does not need."""


class _PickledArray:
    """A stand-in for numpy's array while a pickle is read: it stores the pickled state and executes nothing."""

    def __init__(self, *arguments: object) -> None:
        self.state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def array(self) -> np.ndarray | None:
        """Return the array if it holds bytes, as many as its shape says; else None."""
        match self.state:
            case (_, tuple() as shape, _PickledType(code=b"u1" | "u1"), fortran, bytes() as data):
                whole = all(isinstance(n, int) and n >= 0 for n in shape) and math.prod(shape) == len(data)
                order: Literal["F", "C"] = "F" if fortran else "C"
                return np.frombuffer(data, dtype=np.uint8).reshape(shape, order=order) if whole else None
        return None


class _PickledType:
    """A stand-in for numpy's dtype."""

    def __init__(self, code: object = None, *arguments: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        pass


class _BatchUnpickler(pickle.Unpickler):
    """Reads CIFAR's pickles without executing any code in them.

    A pickle is a program: it can import and call any function, and anybody may have made a downloaded file.
    Dictionaries, lists, numbers and bytes need no imports. An array of bytes asks for three numpy names and gets
    stand-in classes, which only store their arguments. Every other name is refused before it is imported.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name in the pickle.

        Raises:
            ValueError: an array of bytes does not need this name.
        """
        # numpy < 2 has the module numpy._core under the name numpy.core.
        if (module, name) in (("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct")):
            return _PickledArray
        if (module, name) == ("numpy", "dtype"):
            return _PickledType
        if (module, name) == ("numpy", "ndarray"):
            return "ndarray"
        raise _Refused(
            f"the pickle asks for {module}.{name}, which a CIFAR-100 batch does not need: it is not executed"
        )
