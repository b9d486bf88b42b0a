"""Changes to a model that are made together: if one of them fails, the earlier ones are undone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn


class AllOrNothing:
    """A `with` block for changes to modules and an optimizer; an error undoes all of them.

    After an error, the modules hold the same parameters, buffers and attributes as before, and the optimizer the same
    parameter groups and state: the same objects, not copies. Lists and dicts hold what they held, tensors written with
    `write` their old values.
    """

    def __init__(self, modules: Iterable[nn.Module], optimizer: torch.optim.Optimizer | None = None) -> None:
        tables: list[dict[Any, Any]] = []
        self._lists: list[tuple[list[Any], list[Any]]] = []
        for module in modules:
            tables += [module.__dict__, module._parameters, module._buffers]
            # Code may keep results in lists and dicts of its own.
            held = list(vars(module).values())
            tables += [value for value in held if isinstance(value, dict)]
            self._lists += [(value, list(value)) for value in held if isinstance(value, list)]
        if optimizer is not None:
            tables += [optimizer.state, *optimizer.param_groups]
        self._before = [(table, dict(table.items())) for table in tables]
        self._written: list[tuple[Tensor, Tensor]] = []

    def write(self, tensor: Tensor, values: Tensor) -> None:
        """Copy values into a tensor; an error in the block restores the old values."""
        with torch.no_grad():
            self._written.append((tensor, tensor.clone()))
            try:
                tensor.copy_(values)
            except RuntimeError:
                # A tensor that cannot be written cannot be restored either.
                self._written.pop()
                raise

    def __enter__(self) -> AllOrNothing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self.undo()

    def undo(self) -> None:
        """Undo all changes so far."""
        # In reverse order: a tensor may have been written twice.
        with torch.no_grad():
            while self._written:
                tensor, values = self._written.pop()
                tensor.copy_(values)
        for table, entries in self._before:
            _restore(table, entries)
        for held, items in self._lists:
            if len(held) != len(items) or any(one is not other for one, other in zip(held, items, strict=True)):
                list.__setitem__(held, slice(None), items)


def _restore(table: dict[Any, Any], entries: dict[Any, Any]) -> None:
    """Give a dict its old entries, in their old order; a dict that has them is not touched.

    A class derived from dict may forbid changes, so its own methods are not used.
    """
    kind: Any = OrderedDict if isinstance(table, OrderedDict) else dict
    now = kind.items(table)
    if len(table) == len(entries) and all(
        key is other and value is old for (key, value), (other, old) in zip(now, entries.items(), strict=True)
    ):
        return
    kind.clear(table)
    for key, value in entries.items():
        kind.__setitem__(table, key, value)


def set_size(module: nn.Module, name: str, size: int) -> None:
    """Set a size attribute of a module, unless it has this size already.

    A property that is computed from the module's tensors therefore needs no setter.

    Raises:
        ValueError: the attribute cannot be set.
    """
    try:
        if getattr(module, name, None) != size:
            setattr(module, name, size)
    except Exception as error:
        raise ValueError(f"{name!r} of {type(module).__name__} cannot be set to {size}: {error!r}") from error
