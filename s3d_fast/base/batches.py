"""What can be asked of any batches: how many there are, whether every pass gives the same, and to be on a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def length_of(batches: object) -> int | None:
    """Return the number of batches, or None where that is not known, as of a loader over an iterable data set."""
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:
        return None


def are_the_same(batches: object) -> bool:
    """Return whether every pass gives the same batches: those of a list or tuple, and of what says `same_every_pass`.

    A loader that shuffles does not, and nothing else can be seen from outside.
    """
    return isinstance(batches, (list, tuple)) or getattr(batches, "same_every_pass", False) is True


def moved(batch: Any, device: torch.device, channels_last: bool = False) -> Any:
    """Return a batch with its tensors on a device, images with their channels innermost if wanted."""
    if isinstance(batch, Tensor):
        images = channels_last and batch.dim() == 4
        memory_format = torch.channels_last if images else torch.preserve_format
        return batch.to(device, non_blocking=True, memory_format=memory_format)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(part, device, channels_last) for part in batch))
    if type(batch) in (tuple, list):
        return type(batch)(moved(part, device, channels_last) for part in batch)
    if type(batch) is dict:
        return {key: moved(part, device, channels_last) for key, part in batch.items()}
    return batch
