"""What readers of data sets have in common: optional libraries, npz files, and checks of what was read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def existing(path: str | Path) -> Path:
    """Return the path.

    Raises:
        FileNotFoundError: there is nothing.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    return path


def found(folder: Path) -> str:
    """Return a few names of what is in a folder, for an error message."""
    return some(sorted(entry.name for entry in folder.iterdir())) or "nothing"


def some(names: Iterable[object], limit: int = 5) -> str:
    """Return the first few names and how many more there are."""
    texts = [str(name) for name in names]
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return ", ".join(texts[:limit]) + more


@contextmanager
def whole(path: Path, kind: str) -> Iterator[None]:
    """Turn whatever a library raises when it reads a damaged file into a ValueError that names the file."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{path} is not a whole {kind}: {type(error).__name__}: {error}") from error


def read_npz(path: Path, wanted: Sequence[Sequence[str]]) -> list[np.ndarray]:
    """Return arrays of an npz file.

    Args:
        path: the file.
        wanted: for each array the names that it may have.

    Raises:
        ValueError: the file is damaged, or lacks an array.
    """
    # Opened here, since numpy leaves a file open that turns out to be damaged.
    with path.open("rb") as stream:
        with whole(path, "npz file"):
            # allow_pickle=False: an array of objects would be a pickle, which can execute anything.
            archive = np.load(stream, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError(f"{path} must be an npz file, got a single array")
        return [_read_array(path, archive, names) for names in wanted]


def _read_array(path: Path, archive: np.lib.npyio.NpzFile, names: Sequence[str]) -> np.ndarray:
    name = next((name for name in names if name in archive.files), None)
    if name is None:
        raise ValueError(f"{path} must hold an array {' or '.join(names)}, got {some(archive.files)}")
    with whole(path, f"npz file, in its array {name}"):
        return archive[name]


def as_labels(where: object, labels: np.ndarray | Sequence[int], count: int, classes: int) -> Tensor:
    """Return labels as int64 (N,).

    Args:
        where: what they belong to, for errors.
        labels: (N,) or (N, 1).
        count: the number of samples.
        classes: labels are below.

    Raises:
        ValueError: they are not integers, not as many as samples, or out of range.
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
