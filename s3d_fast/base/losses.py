"""The loss of a model on a batch, for both kinds of loss function that `capture` accepts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def batch_loss(
    model: Callable[..., Any], loss_fn: Callable[[Any, Any], Tensor], batch: Any, name: str = "a batch"
) -> Tensor:
    """Return the loss of a model on a batch: loss_fn(model, batch) or loss_fn(output, target), as for `capture`.

    Errors call the batch `name`.

    Raises:
        ValueError: the batch is not a pair (input, target), which loss_fn(output, target) needs.
    """
    if takes_model(loss_fn):
        return loss_fn(model, batch)
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
        raise ValueError(f"batches: {name} must be a pair (input, target), got {type(batch).__name__}")
    inputs, target = batch
    return loss_fn(model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs), target)


def checked_loss(model: Callable[..., Any], loss_fn: Callable[[Any, Any], Tensor], batch: Any, index: int) -> Tensor:
    """Return the loss of a model on the batch with this index.

    Raises:
        ValueError: the loss is not a scalar tensor, or is not finite.
    """
    loss = batch_loss(model, loss_fn, batch, f"batch {index}")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(f"loss_fn must return a scalar tensor, got {loss!r}")
    if not bool(torch.isfinite(loss)):
        raise ValueError(f"the loss of batch {index} is not finite: {float(loss.detach())}")
    return loss


def takes_model(loss_fn: Callable[[Any, Any], Tensor]) -> bool:
    """Return whether a loss function is called with the model and a batch, by the name of its first parameter."""
    try:
        first = next(iter(inspect.signature(loss_fn).parameters), "")
    except (TypeError, ValueError):
        return False
    return first in ("model", "net", "network", "module")
