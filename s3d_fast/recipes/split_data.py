"""The training samples that a recipe computes its splits on: how many, and in batches on the network's device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from s3d_fast.capture import plan_capture
from s3d_fast.capture_plan import CapturePlan
from s3d_fast.data.sources import Source
from s3d_fast.distributed import ALONE, World
from s3d_fast.recipes.recipe import Recipe
from s3d_fast.tracing import trace
from s3d_fast.training import moved


@dataclass(frozen=True)
class SplitData:
    """What the splits of a network are computed on.

    Attributes:
        recipe: says how many samples.
        train: the training set.
        model: the network, as it is when batches are asked for.
        world: the processes that share the work.
    """

    recipe: Recipe
    train: Source
    model: nn.Module
    world: World = ALONE

    def __post_init__(self) -> None:
        size, samples, ranks = self.recipe.split_batch, self.recipe.split_samples, self.world.size
        if samples is not None and samples > len(self.train):
            raise ValueError(f"split_samples must be at most the {len(self.train)} training samples, got {samples}")
        if samples is not None and samples < size * ranks:
            raise ValueError(
                f"split_samples must be at least a split_batch for each of the {ranks} processes, got {samples}"
            )
        if len(self.train) < size * ranks:
            raise ValueError(
                f"split_batch must leave a batch for each of the {ranks} processes, got {size} of {len(self.train)} "
                "training samples"
            )

    def batches(self, epoch_seconds: float | None = None) -> OnDevice:
        """Return this process's batches, drawn at random.

        Args:
            epoch_seconds: what an epoch takes, where it is known; else it is estimated.
        """
        size = self.recipe.split_batch
        drawn = self.train.sample(size * self.count(epoch_seconds), size, self.world.part)
        return OnDevice(drawn, self._device, self.recipe.channels_last)

    def count(self, epoch_seconds: float | None = None) -> int:
        """Return the number of batches of all processes."""
        size, ranks = self.recipe.split_batch, self.world.size
        if self.recipe.split_samples is not None:
            return self.recipe.split_samples // size
        most = len(self.train) // size
        if self.recipe.split_share is not None:
            wanted = int(self.recipe.split_share * most)
        else:
            wanted = self.world.same(self._affordable(epoch_seconds))
        # Of equal number in all processes, none of which would have to wait.
        return min(most, max(1, wanted // ranks) * ranks)

    def plan(self, batches: int, memory_budget: int | str | None = None) -> CapturePlan:
        """Return what the capture of so many batches will keep and take; captures one."""
        (batch,) = OnDevice(
            self.train.sample(self.recipe.split_batch, self.recipe.split_batch), self._device, self.recipe.channels_last
        )
        graph = trace(self.model, batch[0][:2])
        units = [unit for unit in graph.units if self.recipe.may_split(unit)]
        return plan_capture(graph, batch, batches, memory_budget or self.recipe.memory_budget, units=units)

    def _affordable(self, epoch_seconds: float | None) -> int:
        """Return as many batches as take the recipe's share of an epoch's time to capture and to solve."""
        share, ranks = self.recipe.split_time, self.world.size
        assert share is not None
        batches_of_epoch = len(self.train) / self.recipe.split_batch
        # Capturing a batch takes about as long as training on it: there cannot be more.
        plan = self.plan(max(1, int(share * batches_of_epoch / ranks)))
        if epoch_seconds is None:
            epoch_seconds = batches_of_epoch * plan.batch_seconds / ranks
        per_batch = (plan.capture_seconds + plan.solve_seconds) / plan.batches
        return int(share * epoch_seconds * ranks / per_batch)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device


@dataclass(frozen=True)
class OnDevice:
    """Batches on a device, to which every pass moves them anew."""

    batches: Iterable[Any]
    device: torch.device
    channels_last: bool

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return (moved(batch, self.device, self.channels_last) for batch in self.batches)
