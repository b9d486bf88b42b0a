"""PyTorch's data sets and loaders as sources of batches, and in a recipe."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils import data as torch_data

from s3d_fast import data
from s3d_fast.recipes import recipe
from s3d_fast.recipes.job import Job
from s3d_fast.recipes.running import run


class Noisy(torch_data.Dataset):
    """Samples that are augmented at random; how many numbers are drawn depends on the sample."""

    def __init__(self, count: int = 12) -> None:
        self.targets = [index % 3 for index in range(count)]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((2,), float(index)) + 0.1 * torch.rand(1 + index % 4)[-1], self.targets[index]


def indices(batches: object) -> list[list[int]]:
    return [x[:, 0].long().tolist() for x, _ in batches]  # type: ignore[attr-defined]


def test_batches_hold_every_sample_once_in_a_random_order() -> None:
    source = data.TorchSource(Noisy())
    torch.manual_seed(1)
    first, second = indices(source.batches(4, train=True)), indices(source.batches(4, train=True))
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)) == list(range(12))
    assert first != second
    assert indices(source.batches(5)) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]


@pytest.mark.parametrize("workers", [0, 2])
def test_processes_share_the_order_and_not_the_augmentation(workers: int) -> None:
    source = data.TorchSource(Noisy(), num_workers=workers)
    seen, after = [], []
    for rank in (0, 1):
        torch.manual_seed(3)
        batches = [x for x, _ in source.batches(4, train=True, part=(rank, 2))]
        # However much each process draws for its samples, the common generator stays in step.
        after.append(torch.rand(1))
        seen.append(torch.cat(batches))
    assert torch.equal(*after)
    assert sorted(torch.cat(seen)[:, 0].long().tolist()) == list(range(12))
    torch.manual_seed(3)
    again = torch.cat([x for x, _ in source.batches(4, train=True, part=(1, 2))])
    assert torch.equal(again, seen[1])
    next_epoch = torch.cat([x for x, _ in source.batches(4, train=True, part=(1, 2))])
    assert not torch.equal(next_epoch.frac().sort(0).values, again.frac().sort(0).values)


def test_a_sample_is_the_same_in_every_pass() -> None:
    sample = data.TorchSource(Noisy()).sample(8, 4, (0, 1))
    one, two = iter(sample), iter(sample)
    # Also if two passes are under way at once.
    for (x, _), (again, _) in zip(one, two, strict=True):
        assert torch.equal(x, again)


def test_a_part_has_balanced_classes() -> None:
    taken = data.TorchSource(Noisy()).take(6)
    assert sorted(taken.labels.tolist()) == [0, 0, 1, 1, 2, 2]
    plain = torch_data.TensorDataset(torch.zeros(4, 1), torch.tensor([0, 1, 0, 1]))
    assert data.TorchSource(torch_data.Subset(plain, [3, 0])).labels.tolist() == [1, 0]
    assert data.TorchSource([(torch.zeros(1), 2), (torch.zeros(1), 0)]).labels.tolist() == [2, 0]


def test_a_loader_gives_its_data_set_and_how_it_is_read() -> None:
    def collate(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        return -torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])

    loader = torch_data.DataLoader(Noisy(), batch_size=3, shuffle=True, collate_fn=collate)
    x, _ = next(iter(data.TorchSource.of(loader).batches(4)))
    assert x.shape == (4, 2)
    assert x.max() < 0.01


class Endless(torch_data.IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Endless(), "samples must be a map-style data set with a length, got Endless"),
        (torch_data.DataLoader(Endless()), "got Endless"),
        ([], "samples must not be empty"),
        (
            torch_data.DataLoader(Noisy(), sampler=torch_data.WeightedRandomSampler([1.0] * 12, 12)),
            "got one with a WeightedRandomSampler; give its data set",
        ),
        (
            torch_data.DataLoader(Noisy(), sampler=torch_data.RandomSampler(Noisy(), True)),
            "got one with a RandomSampler",
        ),
        (torch_data.DataLoader(Noisy(), batch_sampler=[[0, 1], [2]]), "got one with a list"),
    ],
    ids=["iterable", "loader-of-iterable", "empty", "weighted", "replacement", "batch-sampler"],
)
def test_what_cannot_be_followed_is_refused(given: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data.TorchSource.of(given)


def test_a_recipe_runs_on_ones_own_data() -> None:
    images = torch.rand(48, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    samples = torch_data.TensorDataset(images, torch.arange(48) % 2)
    loader = torch_data.DataLoader(samples, batch_size=7)
    own = data.from_torch(loader, samples, classes=2)
    assert own.input_shape == (1, 8, 8)
    changes = {"steps": 1, "epochs": 1, "widths": (2, 2, 2), "batch_size": 12, "split_samples": 8, "split_batch": 4}
    small = recipe("digits").with_settings({**changes, "train_samples": 24, "test_samples": 10})
    history = run(Job(small, own, device="cpu"))
    assert [epoch.samples for phase in history for epoch in phase.epochs] == [24, 24]
    assert sum(history[1].widths.values()) > 6
