"""When a phase of training ends before its last epoch: at a plateau of the loss, or of its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from s3d_fast.base import require
from s3d_fast.records.record import Epoch


@dataclass(frozen=True)
class Plateau:
    """A phase ends when the loss no longer falls, or when its gradient is small: the paper's local optimum.

    Attributes:
        improvement: the loss must fall by this share of itself within `patience` epochs; None does not look at it.
        gradient: the phase ends when the mean norm of the gradient over an epoch is at most this; None does not look.
        patience: epochs over which the improvement counts.
    """

    improvement: float | None = 0.01
    gradient: float | None = None
    patience: int = 3

    def __post_init__(self) -> None:
        if self.improvement is None and self.gradient is None:
            raise ValueError("give improvement or gradient, or both")
        for name in ("improvement", "gradient"):
            if getattr(self, name) is not None:
                require.positive(name, getattr(self, name))
        require.count("patience", self.patience)

    def is_reached(self, epochs: Sequence[Epoch]) -> bool:
        """Return whether training may end after these epochs of a phase."""
        last = epochs[-1].gradient if epochs else None
        if self.gradient is not None and last is not None and last <= self.gradient:
            return True
        if self.improvement is None or len(epochs) <= self.patience:
            return False
        losses = [float("inf") if epoch.loss is None else epoch.loss for epoch in epochs]
        before, now = min(losses[: -self.patience]), min(losses[-self.patience :])
        return now > before - self.improvement * abs(before)
