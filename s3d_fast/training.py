"""The built-in training loop; a Grower takes any function of the same signature in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from s3d_fast import checks

SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


class EpochTrainer:
    """Train a model for some epochs: `trainer(model, optimizer, phase)`.

    Args:
        loader: batches (input, target); iterated once per epoch.
        loss_fn: loss_fn(output, target).
        epochs: per phase.
        scheduler: makes a learning-rate scheduler, stepped once per epoch; a new one in every phase.
        progress: show a bar over the epochs.
    """

    def __init__(
        self,
        loader: Iterable[tuple[Any, Tensor]],
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        epochs: int,
        *,
        scheduler: SchedulerFactory | None = None,
        progress: bool = False,
    ) -> None:
        checks.is_count("epochs", epochs)
        self.loader, self.loss_fn, self.epochs = loader, loss_fn, epochs
        self.scheduler, self.progress = scheduler, progress

    def __call__(self, model: nn.Module, optimizer: torch.optim.Optimizer, phase: int) -> None:
        """Train in train mode.

        Raises:
            ValueError: the loss is not finite.
        """
        schedule = None if self.scheduler is None else self.scheduler(optimizer)
        model.train()
        bar = tqdm(range(self.epochs), desc=f"phase {phase}: train", unit="epoch", disable=not self.progress)
        for epoch in bar:
            total, batches = 0.0, 0
            for inputs, target in self.loader:
                optimizer.zero_grad(set_to_none=True)
                loss = self.loss_fn(model(inputs), target)
                loss.backward()
                optimizer.step()
                total, batches = total + float(loss.detach()), batches + 1
            if not total < float("inf"):
                raise ValueError(f"the training loss is not finite in phase {phase}, epoch {epoch}: {total}")
            if schedule is not None:
                schedule.step()
            bar.set_postfix(loss=f"{total / max(batches, 1):.4g}")
