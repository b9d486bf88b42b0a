"""Samples in memory or in JPEG files, and batches of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from s3d_fast.base import require
from s3d_fast.base.world import local_processes
from s3d_fast.data.images import IMAGENET_NORMALISE, decode, read_bytes

Batch = tuple[Tensor, Tensor]
Part = tuple[int, int]  # (rank, size): the rank of this process, and the number of processes
WHOLE: Part = (0, 1)


class Batches(Protocol):
    """Batches (x, y) of a source; every iteration is a new epoch, drawn from PyTorch's global generator."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Batch]: ...


class Source(Protocol):
    """Samples that can be turned into batches (x, y): x float32 ready for the network, y int64."""

    def __len__(self) -> int: ...

    def batches(self, batch_size: int, *, train: bool = False, part: Part = WHOLE) -> Batches:
        """Return batches: shuffled, augmented and of one size for training; else all samples in order, unchanged.

        Training drops an incomplete last batch, unless it is the only batch. Process (rank, size) gets its share of
        every batch.
        """
        ...

    def take(self, count: int) -> Source:
        """Return a source of `count` samples, always the same, with classes as balanced as the data allow.

        Raises:
            ValueError: there are fewer samples.
        """
        ...

    def sample(self, count: int, batch_size: int, part: Part = WHOLE) -> Sample:
        """Return `count` samples, drawn without replacement and not augmented, as batches of equal size.

        Process (rank, size) gets every size-th batch, starting with number rank.

        Raises:
            ValueError: there are fewer samples, or `count` is not a multiple of `batch_size`.
        """
        ...


@dataclass(frozen=True, eq=False)
class Sample:
    """Batches of samples that were drawn once; every pass makes the same batches again and keeps none.

    Attributes:
        indices: the sample indices (B,) of every batch.
        make: makes the batches of given indices.
    """

    indices: list[Tensor]
    make: Callable[[list[Tensor]], Iterator[Batch]]
    same_every_pass: ClassVar[bool] = True

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Batch]:
        return self.make(self.indices)


@dataclass(frozen=True)
class Dataset:
    """A data set; `input_shape` is the shape of one sample as the network sees it."""

    name: str
    train: Source
    test: Source
    classes: int
    input_shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ArraySource:
    """Samples in memory.

    Args:
        inputs: images, uint8 (N, C, H, W), or point clouds, float32 (N, P, 3).
        labels: int64 (N,).
        prepare: turns a batch of inputs into the network's input.
        augment: changes a batch of training inputs at random, before `prepare`.

    Raises:
        ValueError: there are no samples, or the labels are not int64 with one per sample.
    """

    inputs: Tensor
    labels: Tensor
    prepare: Callable[[Tensor], Tensor]
    augment: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        require.not_empty("inputs", self.inputs)
        if self.labels.dtype != torch.int64 or self.labels.shape != (len(self.inputs),):
            got = f"{self.labels.dtype} {tuple(self.labels.shape)}"
            raise ValueError(f"labels must be int64 of shape ({len(self.inputs)},), one per input; got {got}")

    def __len__(self) -> int:
        return len(self.inputs)

    def batches(self, batch_size: int, *, train: bool = False, part: Part = WHOLE) -> Batches:
        """See `Source`."""
        return _ArrayBatches(self, batch_size, train, part)

    def take(self, count: int) -> ArraySource:
        """See `Source`."""
        index = torch.from_numpy(balanced(self.labels.numpy(), count))
        return replace(self, inputs=self.inputs.index_select(0, index), labels=self.labels[index])

    def sample(self, count: int, batch_size: int, part: Part = WHOLE) -> Sample:
        """See `Source`."""
        indices = drawn(len(self), count, batch_size)[part[0] :: part[1]]
        return Sample(indices, lambda indices: (self.batch(index, augmented=False) for index in indices))

    def batch(self, index: Tensor, *, augmented: bool) -> Batch:
        """Return the batch of the samples at `index`, (B,)."""
        # index_select copies whole samples; indexing by [] copies number by number, which is 15 times slower.
        inputs = self.inputs.index_select(0, index)
        if augmented and self.augment is not None:
            inputs = self.augment(inputs)
        return self.prepare(inputs), self.labels[index]


class Entry(NamedTuple):
    """A JPEG: `size` bytes at `offset` of a file, which may be a tar; a negative size means the whole file."""

    file: str
    offset: int
    size: int
    label: int


class JpegSource:
    """JPEGs in files or inside tar files, decoded by worker processes.

    Args:
        entries: where the JPEGs are.
        size: height and width for the network.
        num_workers: decoding processes; 0 decodes in this process. By default one for each core that this process
            has to itself, at most 8.

    Training takes a random crop of each image (8 % to 100 % of its area, 3:4 to 4:3), mirrored or not. Otherwise the
    shorter side is resized to size * 256 / 224 and the centre is taken. Both are normalised with ImageNet's mean and
    standard deviation. The random draws depend only on PyTorch's seed, not on the number of workers.

    Raises:
        ValueError: there are no entries.
        RuntimeError: Pillow is not installed.
    """

    def __init__(self, entries: Iterable[Entry], size: int = 224, num_workers: int | None = None) -> None:
        require.count("size", size)
        if num_workers is None:
            num_workers = min(8, max(1, _cores() // local_processes()))
        require.count("num_workers", num_workers, at_least=0)
        require.library("PIL.Image", "JPEG images need Pillow", "'s3d_fast[images]'")
        self.size, self.num_workers = size, num_workers
        self._table = _as_table(entries)

    def __len__(self) -> int:
        return len(self._table)

    @property
    def labels(self) -> Tensor:
        """The labels, int64 (N,)."""
        return torch.from_numpy(self._table["label"].copy())

    def batches(self, batch_size: int, *, train: bool = False, part: Part = WHOLE) -> Batches:
        """See `Source`.

        Raises:
            ValueError: during iteration, a JPEG cannot be decoded; the message names its file.
        """
        return _JpegBatches(self, batch_size, train, part)

    def take(self, count: int) -> JpegSource:
        """See `Source`."""
        chosen = self._table[balanced(self._table["label"], count)].tolist()
        entries = (Entry(os.fsdecode(file), *numbers) for file, *numbers in chosen)
        return JpegSource(entries, self.size, self.num_workers)

    def sample(self, count: int, batch_size: int, part: Part = WHOLE) -> Sample:
        """See `Source`."""
        indices = drawn(len(self), count, batch_size)[part[0] :: part[1]]
        return Sample(indices, lambda indices: self.decoded(indices, augmented=False))

    def decoded(self, indices: list[Tensor], *, augmented: bool) -> Iterator[Batch]:
        """Yield one batch for each index tensor (B,) in the list."""
        seed = int(torch.randint(2**62, ())) if augmented else None
        loader = DataLoader(
            _Decoder(self._table, [index.numpy() for index in indices], self.size, seed),
            batch_size=None,
            num_workers=min(self.num_workers, len(indices)),
            collate_fn=_unchanged,
            # The loader draws a seed that is never used; its own generator keeps the global one unchanged.
            generator=torch.Generator(),
        )
        for batch in loader:
            if isinstance(batch, Exception):
                raise batch
            pixels, labels = batch
            yield IMAGENET_NORMALISE(pixels), labels


def balanced(labels: np.ndarray, count: int) -> np.ndarray:
    """Return `count` indices in ascending order, always the same, with classes as balanced as `labels` (N,) allow.

    Raises:
        ValueError: there are fewer samples.
    """
    require.count("count", count)
    if count > len(labels):
        raise ValueError(f"count must be at most {len(labels)}, the number of samples; got {count}")
    # Files are often sorted, so the first samples of a class may not be typical.
    shuffled = np.random.RandomState(0).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    _, first, sizes = np.unique(labels[by_class], return_index=True, return_counts=True)
    rank = np.empty(len(labels), dtype=np.int64)
    rank[by_class] = np.arange(len(labels)) - np.repeat(first, sizes)
    # The first of every class, then the second of every class, and so on.
    return np.sort(shuffled[np.argsort(rank[shuffled], kind="stable")[:count]])


class PartialBatches:
    """The common part of all kinds of batches: how many there are, and which samples they hold."""

    def __init__(self, samples: int, batch_size: int, train: bool, part: Part) -> None:
        require.count("batch_size", batch_size)
        self.samples, self.batch_size, self.train, self.part = samples, batch_size, train, part

    def __len__(self) -> int:
        return len(self._indices(torch.arange(self.samples)))

    def epoch(self) -> list[Tensor]:
        """Return the sample indices of every batch; training draws their order from the global generator."""
        return self._indices(torch.randperm(self.samples) if self.train else torch.arange(self.samples))

    def _indices(self, order: Tensor) -> list[Tensor]:
        count = _batch_count(self.samples, self.batch_size, self.train)
        rank, size = self.part
        parts = [index[rank::size] for index in order.split(self.batch_size)[:count]]
        # The last batch may have fewer samples than there are processes.
        return [index for index in parts if len(index)]


class _ArrayBatches(PartialBatches):
    def __init__(self, source: ArraySource, batch_size: int, train: bool, part: Part) -> None:
        super().__init__(len(source), batch_size, train, part)
        self.source = source

    def __iter__(self) -> Iterator[Batch]:
        for index in self.epoch():
            yield self.source.batch(index, augmented=self.train)


class _JpegBatches(PartialBatches):
    def __init__(self, source: JpegSource, batch_size: int, train: bool, part: Part) -> None:
        super().__init__(len(source), batch_size, train, part)
        self.source = source

    def __iter__(self) -> Iterator[Batch]:
        yield from self.source.decoded(self.epoch(), augmented=self.train)


class _Decoder(TorchDataset):
    """Batches of pixels (B, 3, size, size) and labels, or the error; uint8 keeps the data that workers send small."""

    def __init__(self, table: np.ndarray, indices: list[np.ndarray], size: int, seed: int | None) -> None:
        self.table, self.indices, self.size, self.seed = table, indices, size, seed

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, number: int) -> Batch | Exception:
        index = self.indices[number]
        pixels = np.empty((len(index), 3, self.size, self.size), dtype=np.uint8)
        for row, sample in enumerate(index):
            file, offset, size, _ = self.table[sample]
            generator = None if self.seed is None else np.random.default_rng((self.seed, int(sample)))
            try:
                pixels[row] = decode(read_bytes(os.fsdecode(file), int(offset), int(size)), self.size, generator)
            # Pillow can raise many errors on a damaged file. Return them: raised in a worker, they lose their type.
            except Exception as error:
                place = "" if size < 0 else f" at byte {offset}"
                return ValueError(f"cannot decode the JPEG {os.fsdecode(file)}{place}: {error}")
        return torch.from_numpy(pixels), torch.from_numpy(self.table["label"][index])


def _as_table(entries: Iterable[Entry]) -> np.ndarray:
    # One array: a million Python objects would be copied into every worker as their reference counts change.
    rows = [(os.fsencode(file), offset, size, label) for file, offset, size, label in entries]
    if not rows:
        raise ValueError("entries must not be empty")
    width = max(len(row[0]) for row in rows)
    return np.array(rows, dtype=[("file", f"S{width}"), ("offset", "i8"), ("size", "i8"), ("label", "i8")])


def _batch_count(samples: int, batch_size: int, train: bool) -> int:
    return max(1, samples // batch_size) if train else -(-samples // batch_size)


def drawn(samples: int, count: int, batch_size: int) -> list[Tensor]:
    """Return the indices of `count` samples, drawn without replacement, as batches of equal size.

    Raises:
        ValueError: there are fewer samples, or `count` is not a multiple of `batch_size`.
    """
    require.count("count", count)
    require.count("batch_size", batch_size)
    if count > samples:
        raise ValueError(f"count must be at most {samples}, the number of samples; got {count}")
    if count % batch_size:
        raise ValueError(f"count must be a multiple of batch_size ({batch_size}), got {count}")
    return list(torch.randperm(samples)[:count].split(batch_size))


def _cores() -> int:
    # The cores that this process may use; in a container, often fewer than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _unchanged(batch: object) -> object:
    return batch
