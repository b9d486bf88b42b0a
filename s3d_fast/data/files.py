"""Helpers for reading data sets: paths, npz files, and checks of labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

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


@contextmanager
def readable_whole(path: Path, kind: str) -> Iterator[None]:
    """Turn any error that a library raises on a damaged file into a ValueError that names the file."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{path} is not a whole {kind}: {type(error).__name__}: {error}") from error


def read_npz(path: Path, wanted: Sequence[Sequence[str]]) -> list[np.ndarray]:
    """Return the wanted arrays of an npz file.

    Args:
        path: the file.
        wanted: for each array, the names it may have.

    Raises:
        ValueError: the file is damaged, or lacks an array.
    """
    # Opened here because numpy leaves a damaged file open.
    with path.open("rb") as stream:
        with readable_whole(path, "npz file"):
            # allow_pickle=False: an array of objects would be a pickle, which can execute anything.
            archive = np.load(stream, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError(f"{path} must be an npz file, got a single array")
        return [_read_array(path, archive, names) for names in wanted]


def _read_array(path: Path, archive: np.lib.npyio.NpzFile, names: Sequence[str]) -> np.ndarray:
    name = next((name for name in names if name in archive.files), None)
    if name is None:
        raise ValueError(f"{path} must hold an array {' or '.join(names)}, got {some(archive.files)}")
    with readable_whole(path, f"npz file, in its array {name}"):
        return archive[name]


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
