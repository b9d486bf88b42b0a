"""ModelNet40 as point clouds, from the HDF5 files that PointNet's authors published, or from npz."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from s3d_fast.base import require
from s3d_fast.data.augment import scale_and_jitter
from s3d_fast.data.files import Wanted, as_labels, existing, found, read_npz, require_size, some
from s3d_fast.data.hdf5 import read_h5
from s3d_fast.data.sources import ArraySource, Dataset

CLASSES = 40
# All clouds of the set, with as many points as anybody has published for one.
CLOUDS, POINTS = 12_311, 10_000
MOST_CLOUDS = CLOUDS * POINTS * 3 * 4

Split = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class FirstPoints:
    """clouds -> their first `points` points."""

    points: int

    def __call__(self, clouds: Tensor) -> Tensor:  # (N, P, 3) -> (N, points, 3)
        """Return the first points of each cloud."""
        return clouds[:, : self.points].contiguous()


def modelnet40(path: str | Path, points: int = 1024) -> Dataset:
    """Return ModelNet40; training clouds are scaled, shifted and jittered as in DGCNN's training.

    Args:
        path: a folder with ply_data_train*.h5 and ply_data_test*.h5, directly or in modelnet40_ply_hdf5_2048; or an
            npz file, or a folder with modelnet40.npz, that holds x_train, y_train, x_test and y_test; or a folder with
            modelnet40_train.npz and modelnet40_test.npz. Clouds are (N, P, 3).
        points: points per cloud. Larger clouds give a random subset in training and their first points in tests.

    Raises:
        FileNotFoundError: the files are missing.
        ValueError: a file is damaged or does not hold ModelNet40, or clouds have fewer points.
        RuntimeError: the files are HDF5 and h5py is not installed.
    """
    require.count("points", points)
    splits = _read(existing(path))
    for name, (clouds, _) in zip(("train", "test"), splits, strict=True):
        if clouds.shape[1] < points:
            raise ValueError(f"points must be at most {clouds.shape[1]}, which the {name} clouds have; got {points}")
    train, test = (
        ArraySource(
            clouds,
            labels,
            FirstPoints(points),
            partial(scale_and_jitter, points=points) if clouds.shape[1] > points else scale_and_jitter,
        )
        for clouds, labels in splits
    )
    return Dataset("modelnet40", train, test, CLASSES, (points, 3))


def _read(path: Path) -> tuple[Split, Split]:
    if path.suffix == ".npz" and not path.stem.endswith(("_train", "_test")):
        return _read_npz(path, "train"), _read_npz(path, "test")
    folder = path if path.is_dir() else path.parent
    if (folder / "modelnet40.npz").is_file():
        return _read(folder / "modelnet40.npz")
    if all((folder / f"modelnet40_{split}.npz").is_file() for split in ("train", "test")):
        return _read_npz(folder / "modelnet40_train.npz", "train"), _read_npz(folder / "modelnet40_test.npz", "test")
    for place in (folder, folder / "modelnet40_ply_hdf5_2048"):
        train, test = (sorted(place.glob(f"ply_data_{split}*.h5")) for split in ("train", "test"))
        if train and test:
            _check_complete(place, "train", train)
            _check_complete(place, "test", test)
            return _read_h5(train), _read_h5(test)
    wanted = "ply_data_train*.h5 and ply_data_test*.h5, modelnet40.npz, or modelnet40_train.npz and modelnet40_test.npz"
    raise FileNotFoundError(f"ModelNet40 at {folder}: expected {wanted}, found {found(folder)}")


def _check_complete(folder: Path, split: str, paths: list[Path]) -> None:
    """Raise FileNotFoundError if a file is missing, by the data set's list of files or else by their numbers."""
    listed = folder / f"{split}_files.txt"
    if listed.is_file():
        require_size(listed, 1 << 16)
        lines = listed.read_text(errors="replace").splitlines()
        wanted = {Path(line.strip()).name for line in lines if line.strip()}
    else:
        wanted = {f"ply_data_{split}{number}.h5" for number in range(len(paths))}
    missing = sorted(wanted - {path.name for path in paths})
    if missing:
        raise FileNotFoundError(
            f"ModelNet40 at {folder}: expected {some(missing)} too, found {some(p.name for p in paths)}"
        )


def _read_npz(path: Path, split: str) -> Split:
    names = [[f"x_{split}"], [f"y_{split}"]]
    if path.stem.endswith(split):
        names = [[*names[0], "x", "points"], [*names[1], "y", "labels"]]
    clouds, labels = read_npz(path, [Wanted(names[0], MOST_CLOUDS), Wanted(names[1], CLOUDS * 8)])
    return _split(f"{path}, {split}", clouds, labels)


def _read_h5(paths: list[Path]) -> Split:
    splits = [_split(path, *read_h5(path, {"data": MOST_CLOUDS, "label": CLOUDS * 8})) for path in paths]
    sizes = sorted({clouds.shape[1] for clouds, _ in splits})
    if len(sizes) > 1:
        raise ValueError(f"{paths[0].parent}: clouds must have the same number of points in all files, got {sizes}")
    return torch.cat([clouds for clouds, _ in splits]), torch.cat([labels for _, labels in splits])


def _split(where: object, clouds: np.ndarray, labels: np.ndarray) -> Split:
    if clouds.ndim != 3 or clouds.shape[2] != 3 or clouds.dtype.kind != "f":
        raise ValueError(f"{where}: clouds must be floats of shape (N, P, 3), got {clouds.dtype} {clouds.shape}")
    inputs = torch.from_numpy(clouds.astype(np.float32))
    require.finite(f"{where}: clouds", inputs)
    return inputs, as_labels(where, labels, len(clouds), CLASSES)
