"""The training samples for a recipe's splits: how many there are, and their batches on the network's device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from s3d_fast.base.batches import OnDevice
from s3d_fast.base.world import ALONE, World
from s3d_fast.capture.all_batches import plan_capture
from s3d_fast.capture.budget import CapturePlan
from s3d_fast.data.sources import Sample, Source
from s3d_fast.growth.step_size import StepSize
from s3d_fast.network.tracing import trace
from s3d_fast.recipes.recipe import Recipe

# One batch for every so many is held back, to measure how much of the promised gain is real.
HELD_BACK = 4
# "auto" starts with so many samples, and takes twice as many until this share of a phase's training time is used.
AUTO_SAMPLES, AUTO_TIME = 1024, 0.5
# At most this many plans are made to find how many batches fit into the time; each captures one batch.
PLANS = 5
# The products of a solve to the tolerance that the noise asks for, which stops at the cut, and of measuring the noise.
COARSE_PRODUCTS = 8


@dataclass(frozen=True)
class Drawn:
    """Batches for a split, and others to measure what it promises; each is made anew at every pass.

    Attributes:
        every: all samples that may be used, drawn once.
        count: how many batches the split is computed on; the others follow.
        fresh: how many batches of these come at the end and are held back.
        place: puts batches on the device.
        can_grow: whether more may be taken.
    """

    every: Sample
    count: int
    fresh: int
    place: Callable[[Sample], OnDevice]
    can_grow: bool = False

    same_every_pass: ClassVar[bool] = True

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return iter(self.place(replace(self.every, indices=self.every.indices[: self.count])))

    def held_back(self) -> OnDevice | None:
        """Return the batches that the split has not seen; None if there are none."""
        first = len(self.every) - self.fresh
        return self.place(replace(self.every, indices=self.every.indices[first:])) if self.fresh else None

    def larger(self) -> Drawn | None:
        """Return twice as many batches, or as many as there are; None if there are no more."""
        most = len(self.every) - self.fresh
        return replace(self, count=min(2 * self.count, most)) if self.can_grow and self.count < most else None


@dataclass(frozen=True)
class SplitData:
    """The training samples for computing the splits of a network.

    Attributes:
        recipe: gives the number of samples.
        train: the training set.
        model: the network, in its current state.
        world: the processes that share the work.
    """

    recipe: Recipe
    train: Source
    model: nn.Module
    world: World = ALONE

    def __post_init__(self) -> None:
        size, ranks = self.recipe.split_batch, self.world.size
        samples = self.recipe.split_samples if isinstance(self.recipe.split_samples, int) else None
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

    def batches(self, epoch_seconds: float | None = None) -> Drawn:
        """Return this process's batches, drawn at random, with others held back where the training set has them.

        Args:
            epoch_seconds: how long an epoch takes; estimated if None.
        """
        size, ranks = self.recipe.split_batch, self.world.size
        count, most = self.count(epoch_seconds), len(self.train) // size // ranks * ranks
        is_auto = self.recipe.split_samples == "auto"
        every = most if is_auto else min(most, count + -(-count // HELD_BACK // ranks) * ranks)
        drawn = self.train.sample(size * every, size, self.world.shard)
        held_back = max(1, every // (HELD_BACK + 1) // ranks) if is_auto and every > ranks else (every - count) // ranks

        def place(sample: Sample) -> OnDevice:
            return OnDevice(sample, self._device, self.recipe.channels_last)

        own = min(count // ranks, len(drawn) - held_back) if is_auto else count // ranks
        return Drawn(drawn, max(1, own), held_back, place, can_grow=is_auto)

    def count(self, epoch_seconds: float | None = None) -> int:
        """Return the number of batches of all processes together; with "auto", those to begin with."""
        size, ranks = self.recipe.split_batch, self.world.size
        most = len(self.train) // size
        samples = self.recipe.split_samples
        if isinstance(samples, int):
            return samples // size
        if samples == "auto":
            wanted = -(-AUTO_SAMPLES // size)
        elif self.recipe.split_share is not None:
            wanted = int(self.recipe.split_share * most)
        else:
            wanted = self.world.same(self._affordable(epoch_seconds))
        # Every process gets the same number, so that none has to wait.
        return max(1, min(most, wanted) // ranks) * ranks

    def plan(self, batches: int) -> CapturePlan:
        """Return the plan for capturing this many batches; captures one and leaves the random state as it was."""
        size = self.recipe.split_batch
        with torch.random.fork_rng(devices=[]):
            (batch,) = OnDevice(self.train.sample(size, size), self._device, self.recipe.channels_last)
        graph = trace(self.model, batch[0][:2])
        units = [unit for unit in graph.units if self.recipe.may_split(unit)]
        return plan_capture(
            graph,
            batch,
            batches,
            self.recipe.memory_budget,
            units=units,
            curvature=self.recipe.curvature,
            eps=StepSize.of(self.recipe.eps).size,
            rows_per_sample=self.recipe.rows_per_sample or None,
        )

    def _affordable(self, epoch_seconds: float | None) -> int:
        """Return how many batches fit into the recipe's share of an epoch's time."""
        share, ranks = self.recipe.split_time, self.world.size
        assert share is not None
        batches_of_epoch = len(self.train) / self.recipe.split_batch
        count = max(1, int(share * batches_of_epoch / 2))
        for _ in range(PLANS):
            # The plan, and so the time per batch, depends on the number of batches.
            plan = self.plan(-(-count // ranks))
            trained = plan.batch_seconds if epoch_seconds is None else epoch_seconds * ranks / batches_of_epoch
            # Training on a batch includes reading it. So reading a batch takes no longer than `trained`, nor does the
            # pass that measures the loss after the split.
            capture = max(plan.capture_seconds / plan.batches, trained)
            solve = plan.solve_seconds if self.recipe.tol is not None else COARSE_PRODUCTS * plan.step_seconds
            taken = capture + solve / plan.batches + trained
            affordable = int(share * batches_of_epoch * trained / taken)
            if affordable >= count:
                return count
            count = max(1, affordable, count // 4)
        return count

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device
