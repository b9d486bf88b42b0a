"""Changes of a model that happen as a whole: where one of them fails, those before it are undone."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn


class AllOrNothing:
    """A `with` block that changes modules and an optimizer; on an error the same objects are in place as before.

    That holds for parameters, buffers and attributes of the modules, for parameter groups and state of the optimizer,
    and for what tensors hold that are written with `write`.
    """

    def __init__(self, modules: Iterable[nn.Module], optimizer: torch.optim.Optimizer | None = None) -> None:
        tables: list[dict[Any, Any]] = []
        for module in modules:
            tables += [module.__dict__, module._parameters, module._buffers]
        if optimizer is not None:
            tables += [optimizer.state, *optimizer.param_groups]
        self._before = [(table, dict(table)) for table in tables]
        self._written: list[tuple[Tensor, Tensor]] = []

    def write(self, tensor: Tensor, values: Tensor) -> None:
        """Let a tensor hold other values."""
        with torch.no_grad():
            self._written.append((tensor, tensor.clone()))
            try:
                tensor.copy_(values)
            except RuntimeError:
                # It cannot be written, so that it could not be written back either.
                self._written.pop()
                raise

    def __enter__(self) -> AllOrNothing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            return
        # Backwards: a tensor may have been written twice.
        with torch.no_grad():
            for tensor, values in reversed(self._written):
                tensor.copy_(values)
        for table, entries in self._before:
            table.clear()
            table.update(entries)


def set_size(module: nn.Module, name: str, size: int) -> None:
    """Set a size attribute of a module; one that follows the module's tensors by itself need not be settable.

    Raises:
        ValueError: the module does not let it be set.
    """
    try:
        if getattr(module, name, None) != size:
            setattr(module, name, size)
    except Exception as error:
        raise ValueError(f"{name!r} of {type(module).__name__} cannot be set to {size}: {error!r}") from error
