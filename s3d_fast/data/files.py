"""Helpers for reading data sets: paths, npz files, and checks of labels."""

from __future__ import annotations

import math
import os
import stat
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import torch
from torch import Tensor


def existing(path: str | Path) -> Path:
    """Return the path if it exists.

    Raises:
        FileNotFoundError: it does not exist.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    return path


def found(folder: Path) -> str:
    """Return the first few names in a folder, for an error message."""
    return some(sorted(entry.name for entry in folder.iterdir())) or "nothing"


def some(names: Iterable[object], limit: int = 5) -> str:
    """Return the first few names and how many more there are."""
    texts = [str(name) for name in names]
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return ", ".join(texts[:limit]) + more


class Refused(ValueError):
    """A file may be whole, but asks for something that no data set needs."""


@contextmanager
def readable_whole(path: Path, kind: str) -> Iterator[None]:
    """Turn any error that a library raises on a damaged file into a ValueError that names the file."""
    try:
        yield
    except Refused as error:
        raise ValueError(f"{path}: {error}") from error
    except Exception as error:
        raise ValueError(f"{path} is not a whole {kind}: {type(error).__name__}: {error}") from error


def require_size(path: Path, most: int) -> int:
    """Return the bytes of a file, before anything of it is read.

    Raises:
        ValueError: it is not a regular file, or has more than `most` bytes.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} must be a regular file")
    if status.st_size > most:
        raise ValueError(f"{path} must have at most {most} bytes, got {status.st_size}; is it another data set?")
    return status.st_size


class Wanted(NamedTuple):
    """An array of an npz file: the names it may have, and the bytes that it has at most."""

    names: Sequence[str]
    most: int


def read_npz(path: Path, wanted: Sequence[Wanted]) -> list[np.ndarray]:
    """Return the wanted arrays of an npz file.

    Sizes are checked before anything is decompressed: a small file can pretend to hold any number of bytes.

    Raises:
        ValueError: the file is damaged, lacks an array, or has one that is too large or does not hold numbers.
    """
    require_size(path, sum(one.most + _HEADER for one in wanted) + _DIRECTORY)
    with path.open("rb") as stream:
        if stream.read(6) == b"\x93NUMPY":
            raise ValueError(f"{path} must be an npz file, got a single array")
        with readable_whole(path, "npz file"):
            archive = zipfile.ZipFile(stream)
        entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
        return [_read_array(path, archive, entries, one) for one in wanted]


# Bytes of the header of an array, of the zip's list of its arrays, and of a step of reading.
_HEADER, _DIRECTORY, _STEP = 1 << 14, 1 << 20, 1 << 20


def _read_array(
    path: Path, archive: zipfile.ZipFile, entries: dict[str, zipfile.ZipInfo], wanted: Wanted
) -> np.ndarray:
    name = next((name for name in wanted.names if name in entries), None)
    if name is None:
        raise ValueError(f"{path} must hold an array {' or '.join(wanted.names)}, got {some(entries)}")
    entry = entries[name]
    if entry.file_size > wanted.most + _HEADER:
        raise ValueError(
            f"{path} must have at most {wanted.most} bytes in its array {name}, got {entry.file_size}; is it another "
            "data set?"
        )
    with readable_whole(path, f"npz file, in its array {name}"):
        # Other methods than numpy's need memory that the file chooses.
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"it is compressed by method {entry.compress_type}; numpy uses 0 and 8")
        with archive.open(entry) as member:
            version = np.lib.format.read_magic(member)
            if version == (1, 0):
                shape, fortran, dtype = np.lib.format.read_array_header_1_0(member)
            elif version == (2, 0):
                shape, fortran, dtype = np.lib.format.read_array_header_2_0(member)
            else:
                raise ValueError(f"it has version {version} of the format; arrays of numbers have 1.0 or 2.0")
            if dtype.hasobject:
                raise ValueError("Object arrays are pickles, which can execute anything; they are not read")
            if dtype.kind not in "biuf":
                raise ValueError(f"it must hold numbers, got {dtype}")
            if min(shape, default=0) < 0 or member.tell() + math.prod(shape) * dtype.itemsize != entry.file_size:
                raise ValueError(f"its shape {shape} of {dtype} does not go with its {entry.file_size} bytes")
            content = _read_exactly(member, entry.file_size - member.tell())
    return np.frombuffer(content, dtype=dtype).reshape(shape, order="F" if fortran else "C")


def _read_exactly(member: IO[bytes], size: int) -> bytearray:
    content = bytearray(size)
    start = 0
    while start < size:
        part = member.read(min(_STEP, size - start))
        if not part:
            raise ValueError(f"it ends after {start} of {size} bytes")
        content[start : start + len(part)] = part
        start += len(part)
    # The end is where the checksum is compared.
    member.read(1)
    return content


def as_labels(where: object, labels: np.ndarray | Sequence[int], count: int, classes: int) -> Tensor:
    """Return labels as int64 (N,).

    Args:
        where: names the data in error messages.
        labels: (N,) or (N, 1).
        count: the number of samples.
        classes: the number of classes; labels must be below it.

    Raises:
        ValueError: there are no samples, or the labels are not integers, not one per sample, or out of range.
    """
    if count == 0:
        raise ValueError(f"{where}: there are no samples")
    array = np.asarray(labels)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{where}: labels must be integers of shape (N,), got {array.dtype} {array.shape}")
    if len(array) != count:
        raise ValueError(f"{where}: there must be one label per sample, got {len(array)} labels and {count} samples")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= classes:
        raise ValueError(f"{where}: labels must be from 0 to {classes - 1}, got {low} to {high}")
    return torch.from_numpy(array.astype(np.int64))
