"""Helpers for any iterable of batches: its length, whether every pass is the same, and moving to a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def length_of(batches: object) -> int | None:
    """Return the number of batches; None if it is unknown, as for a loader over an iterable data set."""
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:
        return None


def are_the_same(batches: object) -> bool:
    """Return whether every pass over the batches is known to give the same ones.

    This is so for a list, a tuple, and any object with `same_every_pass = True`. Anything else may shuffle.
    """
    return isinstance(batches, (list, tuple)) or getattr(batches, "same_every_pass", False) is True


@dataclass(frozen=True)
class OnDevice:
    """Batches that every pass moves to a device again, so that only one of them is there at a time."""

    batches: Any  # has a length, and may be iterated over again
    device: torch.device
    channels_last: bool = False

    @property
    def same_every_pass(self) -> bool:
        """Whether every pass is known to give the same batches."""
        return are_the_same(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return (moved(batch, self.device, self.channels_last) for batch in self.batches)


def moved(batch: Any, device: torch.device, channels_last: bool = False) -> Any:
    """Return a batch with its tensors on a device; `channels_last` stores images with their channels innermost."""
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
