"""What a run tells a logger while it is under way; `integrations.loggers` has loggers for well-known tools."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Protocol

from s3d_fast.growth.record import Epoch, PhaseRecord


class Logger(Protocol):
    """Anything with this method can follow a run of a `Grower`. The first process alone calls it."""

    def log(self, values: Mapping[str, float], step: int, axis: str) -> None:
        """Log numbers by name.

        Args:
            values: the numbers, such as {"train/loss": 0.3}.
            step: when they were measured, from 0.
            axis: what `step` counts: "epoch", over all phases, or "phase".
        """
        ...


def log_epoch(loggers: Iterable[Logger], earlier: int, epoch: Epoch) -> None:
    """Log an epoch of training; `earlier` is the number of epochs of earlier phases."""
    _log(
        loggers, {"train/loss": epoch.loss, "train/learning_rate": epoch.learning_rate}, earlier + epoch.epoch, "epoch"
    )


def log_phase(loggers: Iterable[Logger], phase: PhaseRecord) -> None:
    """Log a finished phase: its metrics, the sizes of the network, and the split after it."""
    values = {f"test/{name}": value for name, value in phase.metrics.items()}
    values |= {"size/params": phase.params, "size/macs": phase.macs, "size/filters": sum(phase.widths.values())}
    values |= {f"width/{unit}": width for unit, width in phase.widths.items()}
    if phase.was_selected:
        values |= {"split/neurons": phase.splits, "split/loss_before": phase.loss, "split/loss_after": phase.split_loss}
        values |= {"split/predicted": phase.predicted_change}
    _log(loggers, values, phase.index, "phase")


def _log(loggers: Iterable[Logger], values: Mapping[str, float | None], step: int, axis: str) -> None:
    known = {name: float(value) for name, value in values.items() if value is not None and not math.isnan(value)}
    for logger in loggers:
        logger.log(known, step, axis)
