"""Any map-style data set of PyTorch as a source of batches, for recipes and splits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as torch_data

from s3d_fast.base import require
from s3d_fast.base.random_state import OwnRandomness
from s3d_fast.data.sources import WHOLE, Batch, Batches, Dataset, Part, PartialBatches, Sample, balanced, drawn

# Samplers whose order a source replaces by an order of its own.
_ORDERS = (torch_data.SequentialSampler, torch_data.RandomSampler, torch_data.DistributedSampler)


@dataclass(frozen=True, eq=False)
class TorchSource:
    """The samples of a PyTorch data set.

    Args:
        samples: a map-style data set: it has a length, and `samples[i]` is a sample, such as a pair (x, y).
        collate_fn: makes a batch from a list of samples; PyTorch's default by default.
        num_workers: processes that read samples; 0 reads them in this process.
        pin_memory: whether batches are in pinned memory.
        worker_init_fn: called in every worker.

    Training takes the samples in a random order, one batch after the other. Random augmentation in the data set differs
    between processes and between epochs, and repeats itself when a run is resumed.

    Raises:
        ValueError: the data set has no length, or no samples.
    """

    samples: Any
    collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    pin_memory: bool = False
    worker_init_fn: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.samples, torch_data.IterableDataset) or not isinstance(self.samples, Sized):
            raise ValueError(
                f"samples must be a map-style data set with a length, got {type(self.samples).__name__}; a Grower with "
                "an EpochTrainer takes any iterable of batches"
            )
        if len(self.samples) == 0:
            raise ValueError("samples must not be empty")
        require.count("num_workers", self.num_workers, at_least=0)

    @classmethod
    def of(cls, given: Any) -> TorchSource:
        """Return the source of a data set, or of a DataLoader's data set with its workers and its `collate_fn`.

        Raises:
            ValueError: the loader has a sampler of its own, which a source would not follow.
        """
        if isinstance(given, TorchSource):
            return given
        if not isinstance(given, torch_data.DataLoader):
            return cls(given)
        batched: Any = given.batch_sampler
        # Accelerate wraps it, to divide batches between processes.
        while isinstance(getattr(batched, "batch_sampler", None), torch_data.Sampler):
            batched = batched.batch_sampler
        own = given.sampler if batched is None else batched
        if type(own) is torch_data.BatchSampler:
            own = own.sampler
        replaced = isinstance(own, _ORDERS) and not getattr(own, "replacement", False)
        if not isinstance(given.dataset, torch_data.IterableDataset) and not replaced:
            raise ValueError(
                f"a loader's samples are drawn in an order of our own, got one with a {type(own).__name__}; give its "
                "data set, or batches"
            )
        return cls(given.dataset, given.collate_fn, given.num_workers, given.pin_memory, given.worker_init_fn)

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def labels(self) -> Tensor:
        """The labels, int64 (N,): the data set's `targets` or `labels`, or the second entry of every sample."""
        for name in ("targets", "labels"):
            found = getattr(self.samples, name, None)
            if isinstance(found, (Tensor, np.ndarray, list, tuple)) and len(found) == len(self):
                return torch.as_tensor(found).long().reshape(len(self))
        if isinstance(self.samples, torch_data.TensorDataset):
            return self.samples.tensors[1].long()
        if isinstance(self.samples, torch_data.Subset):
            return replace(self, samples=self.samples.dataset).labels[torch.as_tensor(self.samples.indices)]
        return torch.tensor([int(self.samples[index][1]) for index in range(len(self))])

    def batches(self, batch_size: int, *, train: bool = False, part: Part = WHOLE) -> Batches:
        """See `Source`."""
        return _TorchBatches(self, batch_size, train, part)

    def take(self, count: int) -> TorchSource:
        """See `Source`."""
        return replace(self, samples=torch_data.Subset(self.samples, balanced(self.labels.numpy(), count).tolist()))

    def sample(self, count: int, batch_size: int, part: Part = WHOLE) -> Sample:
        """See `Source`. If the data set augments its samples at random, every pass draws the same augmentation."""
        indices = drawn(len(self), count, batch_size)[part[0] :: part[1]]
        own = OwnRandomness(part[0], torch.device("cpu"))
        own.begin()
        return Sample(indices, lambda indices: self.read(indices, copy.copy(own)))

    def read(self, indices: list[Tensor], own: OwnRandomness) -> Iterator[Batch]:
        """Yield one batch for each index tensor (B,) in the list; random draws come from `own`."""
        with own.drawing():
            seed = int(torch.randint(2**62, ()))
        loader = torch_data.DataLoader(
            self.samples,
            batch_sampler=[index.tolist() for index in indices],
            num_workers=min(self.num_workers, len(indices)),
            collate_fn=self.collate_fn,
            pin_memory=self.pin_memory,
            worker_init_fn=self.worker_init_fn,
            # The workers' seeds come from it.
            generator=torch.Generator().manual_seed(seed),
        )
        with own.drawing():
            batches = iter(loader)
        while True:
            # Without workers, samples are read and augmented here.
            with own.drawing():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch


class _TorchBatches(PartialBatches):
    def __init__(self, source: TorchSource, batch_size: int, train: bool, part: Part) -> None:
        super().__init__(len(source), batch_size, train, part)
        self.source = source

    def __iter__(self) -> Iterator[Batch]:
        own = OwnRandomness(self.part[0], torch.device("cpu"))
        indices = self.epoch()
        if self.train:
            own.begin()
        yield from self.source.read(indices, own)


def from_torch(train: Any, test: Any, *, classes: int, name: str = "data") -> Dataset:
    """Return a data set for recipes from PyTorch's: `Job(recipe, from_torch(train, test, classes=10))`.

    Args:
        train, test: map-style data sets of pairs (x, y), or DataLoaders of such, whose workers and `collate_fn` are
            then used. Batches and their order are those of the recipe.
        classes: the number of classes.
        name: what to call it.

    Raises:
        ValueError: a data set has no length or no samples, or a loader has a sampler of its own.
    """
    require.count("classes", classes)
    sources = TorchSource.of(train), TorchSource.of(test)
    x, _ = next(iter(sources[0].batches(1)))
    return Dataset(name, *sources, classes, tuple(x.shape[1:]))
