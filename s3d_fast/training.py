"""The built-in training loop; a Grower takes any function of the same signature in its place."""

from __future__ import annotations

import inspect
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
        loader: batches; iterated once per epoch.
        loss_fn: loss_fn(output, target) or loss_fn(model, batch), as for `capture`.
        epochs: per phase.
        scheduler: makes a learning-rate scheduler, stepped once per epoch; a new one in every phase.
        progress: show a bar over the epochs.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        loss_fn: Callable[[Any, Any], Tensor],
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
            for batch in self.loader:
                optimizer.zero_grad(set_to_none=True)
                loss = batch_loss(model, self.loss_fn, batch)
                loss.backward()
                optimizer.step()
                total, batches = total + float(loss.detach()), batches + 1
            if not total < float("inf"):
                raise ValueError(f"the training loss is not finite in phase {phase}, epoch {epoch}: {total}")
            if schedule is not None:
                schedule.step()
            bar.set_postfix(loss=f"{total / max(batches, 1):.4g}")


def batch_loss(model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], batch: Any, name: str = "a batch") -> Tensor:
    """Return the loss of a model on a batch, for both kinds of loss function of `capture`; `name` is for errors.

    Raises:
        ValueError: the batch is not a pair (input, target), which loss_fn(output, target) needs.
    """
    if _takes_model(loss_fn):
        return loss_fn(model, batch)
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
        raise ValueError(f"batches: {name} must be a pair (input, target), got {type(batch).__name__}")
    inputs, target = batch
    return loss_fn(model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs), target)


def _takes_model(loss_fn: Callable[[Any, Any], Tensor]) -> bool:
    try:
        first = next(iter(inspect.signature(loss_fn).parameters), "")
    except (TypeError, ValueError):
        return False
    return first in ("model", "net", "network", "module")
