"""The built-in training loop; a Grower accepts any function of the same signature instead."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from s3d_fast.base import require
from s3d_fast.base.batches import length_of, moved
from s3d_fast.base.losses import batch_loss
from s3d_fast.base.random_state import OwnRandomness
from s3d_fast.base.world import World, existing
from s3d_fast.growth.batchnorm import synchronized
from s3d_fast.growth.plateau import Plateau
from s3d_fast.growth.schedules import Schedule, constant
from s3d_fast.records.record import Epoch

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class EpochTrainer:
    """Train a model for some epochs: `trainer(model, optimizer, phase)`.

    Batches are moved to the device of the model.

    Args:
        loader: batches; iterated once per epoch.
        loss_fn: loss_fn(output, target) or loss_fn(model, batch), as for `capture`.
        epochs: the number of epochs per phase; or a list of them, the last for all further phases.
        schedule: the factor on the optimizer's learning rates as a function of the epochs passed; see `schedules`.
        over_run: whether epochs count from the start of the run, not of the phase, for the schedule.
        plateau: ends a phase before its last epoch.
        precision: the precision of the forward pass: "fp32", "bf16", "fp16" (the loss is then scaled), or "auto": the
            best that the device supports, which on a CPU is fp32.
        channels_last: store images and filters with their channels innermost, which makes convolutions faster.
        compile: train through torch.compile; it compiles again in every phase, since the layer sizes change.
        world: the processes that train together, each on its part of every batch; gradients are averaged. By default
            those of the process group that exists, if there is one. Dropout draws other masks in every process.
        sync_batchnorm: normalise over the samples of all processes, not of each one alone, in every BatchNorm.
        progress: show a bar with samples per second and the time left.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        loss_fn: Callable[[Any, Any], Tensor],
        epochs: int | Sequence[int],
        *,
        schedule: Schedule | None = None,
        over_run: bool = False,
        plateau: Plateau | None = None,
        precision: str = "fp32",
        channels_last: bool = False,
        compile: bool = False,
        world: World | None = None,
        sync_batchnorm: bool = False,
        progress: bool = False,
    ) -> None:
        several: list[Any] = list(epochs) if isinstance(epochs, (tuple, list)) else [epochs]
        for number in several:
            require.count("epochs", number)
        if not several:
            raise ValueError("epochs must hold at least one number, got none")
        require.choice("precision", precision, ("auto", *PRECISIONS))
        self.loader, self.loss_fn, self.epochs = loader, loss_fn, epochs
        self.over_run, self.plateau = over_run, plateau
        self.schedule = constant() if schedule is None else schedule
        self.precision, self.channels_last, self.compile = precision, channels_last, compile
        self._world, self.sync_batchnorm, self.progress = world, sync_batchnorm, progress

    @property
    def world(self) -> World:
        """The processes that train together."""
        return existing() if self._world is None else self._world

    def epochs_of(self, phase: int) -> int:
        """Return the number of epochs of a phase, which a plateau may cut short."""
        return self.epochs if isinstance(self.epochs, int) else self.epochs[min(phase, len(self.epochs) - 1)]

    def __call__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        phase: int,
        *,
        start: int = 0,
        loss_scale: float | None = None,
        past: Sequence[Epoch] = (),
        before_epoch: Callable[[int], object] = lambda epoch: None,
        after_epoch: Callable[[Epoch], object] = lambda epoch: None,
    ) -> None:
        """Train the model in train mode.

        Args:
            model: the model, changed in place.
            optimizer: the optimizer of its parameters; the schedule's factor multiplies its learning rates.
            phase: the number of the phase, for the bar and for errors.
            start: in a resumed run, the number of epochs that are already trained.
            loss_scale: the loss scale after the last of these epochs.
            past: the records of these epochs; a plateau needs them.
            before_epoch: called with the number of each epoch before it starts.
            after_epoch: called with the record of each epoch after it ends.

        Raises:
            ValueError: the loss is not finite; or the processes have different numbers of batches.
        """
        if not self.world.agree(length_of(self.loader) or 0):
            # Processes with more batches would wait for the others forever.
            raise ValueError("loader must have as many batches in every process, but the numbers differ")
        device = next(model.parameters()).device
        if self.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        wrapped = self.world.wrap(model)
        forward = torch.compile(wrapped) if self.compile else wrapped
        # A single process draws from the global generators, as any training loop does.
        own = OwnRandomness(self.world.rank, device) if self.world.size > 1 else None
        has_gradient = self.plateau is not None and self.plateau.gradient is not None
        step = _Step(forward, optimizer, self.loss_fn, self.precision, device, own, has_gradient)
        if loss_scale is not None:
            step.loss_scale = loss_scale
        rates = [group["lr"] for group in optimizer.param_groups]
        model.train()
        try:
            with (
                synchronized(model, self.world) if self.sync_batchnorm else nullcontext(),
                tqdm(desc=f"phase {phase}", unit=" samples", disable=not self.progress) as bar,
            ):
                known = list(past)
                for epoch in range(start, self.epochs_of(phase)):
                    if self.plateau is not None and self.plateau.is_reached(known):
                        break
                    before_epoch(epoch)
                    record = self._epoch(phase, epoch, start, step, optimizer, rates, bar)
                    known.append(record)
                    self.world.level(model)
                    loss = record["loss"]
                    if not math.isfinite(loss):
                        raise ValueError(f"the training loss is not finite in phase {phase}, epoch {epoch}: {loss}")
                    bar.set_postfix(epoch=epoch, loss=f"{loss:.4g}")
                    after_epoch(record)
        finally:
            # Restore the rates that the schedule multiplies next time.
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def _epoch(
        self,
        phase: int,
        epoch: int,
        start: int,
        step: _Step,
        optimizer: torch.optim.Optimizer,
        rates: list[float],
        bar: Any,
    ) -> Epoch:
        length = length_of(self.loader)
        before = sum(map(self.epochs_of, range(phase))) if self.over_run else 0
        began, samples, batches = time.perf_counter(), 0, 0
        # Kept on the device: reading the loss after every batch would make a GPU wait.
        total = torch.zeros((), dtype=torch.float64, device=step.device)
        step.begin()
        for batch in self.loader:
            factor = self.schedule(before + epoch + (batches / length if length else 0.0))
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            batch = moved(batch, step.device, self.channels_last)
            total += step(batch)
            count = _samples(batch)
            samples, batches = samples + count, batches + 1
            if bar.total is None and length is not None:
                # All batches have one size, which is known now.
                bar.total, bar.n = length * self.epochs_of(phase) * count, start * length * count
            bar.update(count)
        if not batches:
            raise ValueError(f"loader has no batches in epoch {epoch}; it must have batches in every epoch")
        loss, batches_of_all, samples_of_all = self.world.sum(float(total), batches, samples)
        mean = loss / batches_of_all
        seconds, rate = time.perf_counter() - began, optimizer.param_groups[0]["lr"]
        gradient = step.gradient
        if gradient is not None:
            gradient = self.world.sum(gradient)[0] / self.world.size / batches
        return Epoch(epoch, mean, rate, seconds, int(samples_of_all), step.end(), gradient)


class _Step:
    """One update of the parameters, in a given precision."""

    def __init__(
        self,
        model: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[Any, Any], Tensor],
        precision: str,
        device: torch.device,
        own: OwnRandomness | None = None,
        has_gradient: bool = False,
    ) -> None:
        self.own, self.has_gradient = own, has_gradient
        self.gradient: float | None = None
        if precision == "auto":
            precision = "fp32" if device.type != "cuda" else "bf16" if torch.cuda.is_bf16_supported() else "fp16"
        self.model, self.optimizer, self.loss_fn, self.device = model, optimizer, loss_fn, device
        mixed = precision != "fp32"
        self.autocast = torch.autocast(device.type, PRECISIONS[precision] if mixed else None, enabled=mixed)
        # In fp16, small gradients underflow unless the loss is scaled.
        self.scales = precision == "fp16"
        self.loss_scale = 2.0**16 if self.scales else 1.0

    def begin(self) -> None:
        """Begin an epoch with a new scaler that keeps only the scale, exactly as a resumed run does."""
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=self.loss_scale, enabled=self.scales)
        self.gradient = 0.0 if self.has_gradient else None
        if self.own is not None:
            self.own.begin()

    def end(self) -> float:
        """End an epoch; return the scale of the loss."""
        self.loss_scale = self.scaler.get_scale()
        return self.loss_scale

    def __call__(self, batch: Any) -> Tensor:
        """Return the loss before the update."""
        self.optimizer.zero_grad(set_to_none=True)
        # The backward pass may draw too: checkpointed activations are computed again.
        with self.own.drawing() if self.own is not None else nullcontext():
            with self.autocast:
                loss = batch_loss(self.model, self.loss_fn, batch)
            self.scaler.scale(loss).backward()
        if self.gradient is not None:
            self.scaler.unscale_(self.optimizer)
            every = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
            self.gradient += float(nn.utils.get_total_norm(every))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()


def _samples(batch: Any) -> int:
    """Return the number of samples of a batch: the length of its first tensor."""
    while isinstance(batch, (tuple, list, dict)) and batch:
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return len(batch) if isinstance(batch, Tensor) and batch.dim() else 1
