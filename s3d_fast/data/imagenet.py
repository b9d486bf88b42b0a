"""ImageNet, or any data set with the same layout: JPEGs in a folder per class, or in tar files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from s3d_fast.data.files import existing, found, some
from s3d_fast.data.images import read_bytes
from s3d_fast.data.sources import Dataset, Entry, JpegSource
from s3d_fast.data.tars import Member, regular_files

SUFFIXES = (".jpeg", ".jpg")


class LabelledJpeg(NamedTuple):
    """A JPEG and its class: a name, or a number where the files give numbers."""

    file: str
    offset: int
    size: int
    label: str | int


def imagenet(path: str | Path, size: int = 224, workers: int | None = None) -> Dataset:
    """Return the images of PATH/train and PATH/val; classes are numbered in the order of their names.

    Args:
        path: a folder with train and val. Each holds a folder per class, or uncompressed tar files, which are read in
            place. A tar holds one class, named like the tar; or files CLASS/file.jpg; or pairs key.jpg and key.cls,
            where key.cls is the class number in ASCII.
        size: height and width for the network.
        workers: decoding processes; see `JpegSource`.

    Raises:
        FileNotFoundError: train or val is missing.
        ValueError: a folder or file has another layout, or train and val have different classes.
        RuntimeError: Pillow is not installed.
    """
    folder = existing(path)
    for name in ("train", "val"):
        if not (folder / name).is_dir():
            listed = found(folder) if folder.is_dir() else "a file"
            raise FileNotFoundError(f"ImageNet at {folder}: expected folders train and val, found {listed}")
    train, val = _read_split(folder / "train"), _read_split(folder / "val")
    train_classes, val_classes = ({image.label for image in images} for images in (train, val))
    if train_classes != val_classes:
        only = (
            f"only in train: {_named(train_classes - val_classes)}; only in val: {_named(val_classes - train_classes)}"
        )
        raise ValueError(f"{folder}: train and val must have the same classes; {only}")
    numbers = {label: number for number, label in enumerate(_ordered(train_classes))}
    sources = [
        JpegSource([Entry(*image[:3], numbers[image.label]) for image in images], size, workers)
        for images in (train, val)
    ]
    return Dataset("imagenet", sources[0], sources[1], len(numbers), (3, size, size))


def _read_split(folder: Path) -> list[LabelledJpeg]:
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    tars = [entry.path for entry in entries if entry.name.lower().endswith(".tar")]
    classes = [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    if tars and classes:
        raise ValueError(f"{folder} must hold tar files or a folder per class, but holds both; remove one of them")
    if tars:
        return [image for tar in tars for image in _read_tar(Path(tar))]
    if not classes:
        raise ValueError(f"{folder} must hold a folder per class, or tar files; found {found(folder)}")
    images = []
    for entry in classes:
        names = sorted(name for name in os.listdir(entry.path) if _is_jpeg(name))
        if not names:
            raise ValueError(f"{entry.path} must hold JPEGs (.JPEG, .jpg, .jpeg), found {found(Path(entry.path))}")
        images += [LabelledJpeg(os.path.join(entry.path, name), 0, -1, entry.name) for name in names]
    return images


def _read_tar(path: Path) -> list[LabelledJpeg]:
    members = regular_files(path)
    numbers = dict(_read_numbers(path, members))
    images = []
    for member in members:
        if not _is_jpeg(PurePosixPath(member.name).name):
            continue
        label: str | int | None = PurePosixPath(member.name).parent.name or path.stem
        if numbers:
            label = numbers.get(_key(member.name))
        if label is None:
            raise ValueError(f"{path}: {member.name} has no {_key(member.name)}.cls beside it")
        images.append(LabelledJpeg(str(path), member.offset, member.size, label))
    if not images:
        raise ValueError(f"{path} must hold JPEGs (.JPEG, .jpg, .jpeg), found {_named({m.name for m in members})}")
    return images


def _read_numbers(path: Path, members: list[Member]) -> Iterator[tuple[str, int]]:
    for member in members:
        if not member.name.endswith(".cls"):
            continue
        text = read_bytes(str(path), member.offset, min(member.size, 32)).strip()
        if not text.isdigit():
            raise ValueError(f"{path}: {member.name} must hold a class number in ASCII, got {text!r}")
        yield _key(member.name), int(text)


def _is_jpeg(name: str) -> bool:
    # Some systems store metadata in files whose names begin with a dot.
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def _key(name: str) -> str:
    # All members of a sample share this key: the name up to the first dot after the last slash.
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(".")[0]


def _ordered(labels: set[str | int]) -> list[str | int]:
    return sorted(
        labels, key=lambda label: (isinstance(label, str), label if isinstance(label, int) else 0, str(label))
    )


def _named(labels: set) -> str:
    return some(_ordered(labels)) or "nothing"
