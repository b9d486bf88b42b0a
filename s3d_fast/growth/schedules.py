"""Learning-rate schedules: the factor on the first rate as a function of the epochs passed, fractions included.

A schedule has no state, so a run that is resumed within a phase continues as if it had not stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from s3d_fast.base import require

__all__ = ["constant", "cosine", "step_decay", "warmed_up"]

Schedule = Callable[[float], float]


def constant() -> Schedule:
    """Return the schedule that keeps the rate constant."""
    return lambda epoch: 1.0


def step_decay(epochs: int, at: Sequence[float] = (0.5, 0.75), factor: float = 0.1) -> Schedule:
    """Return the schedule that multiplies the rate by `factor` after each of the given shares of all epochs.

    Raises:
        ValueError: a share is not in (0, 1], or the factor is not positive.
    """
    require.count("epochs", epochs)
    require.positive("factor", factor)
    for share in at:
        if not 0 < share <= 1:
            raise ValueError(f"at must hold shares of the epochs in (0, 1], got {share!r}")
    # Rounding can put share * epochs slightly above a whole number of epochs.
    return lambda epoch: factor ** sum(epoch >= share * epochs * (1 - 1e-9) for share in at)


def cosine(epochs: int) -> Schedule:
    """Return the schedule that falls from 1 to 0 along half a cosine: (1 + cos(pi t / epochs)) / 2."""
    require.count("epochs", epochs)
    return lambda epoch: (1 + math.cos(math.pi * min(epoch / epochs, 1))) / 2


def warmed_up(schedule: Schedule, epochs: float) -> Schedule:
    """Return a schedule that rises to the given one linearly over the first `epochs` epochs.

    Raises:
        ValueError: epochs is negative.
    """
    require.number("epochs", epochs)
    if epochs < 0:
        raise ValueError(f"epochs must be a finite number >= 0, got {epochs!r}")
    return lambda epoch: schedule(epoch) * (min(1.0, epoch / epochs) if epochs else 1.0)
