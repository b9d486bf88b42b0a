"""A call in an exported graph: its operation, its arguments by name, and the sizes of its tensors."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, fx


def operation(node: fx.Node) -> str:
    """Return the name of the called operation, such as "aten.linear" or "operator.getitem"."""
    return _name(node.target)


@cache
def _name(target: Hashable) -> str:
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return str(schema.name).replace("::", ".")
    module = str(getattr(target, "__module__", "")).strip("_") or "python"
    return f"{module}.{getattr(target, '__name__', target)}"


@cache
def _parameters(target: Hashable) -> tuple[tuple[str, Any], ...] | None:
    """Return the parameters of an operation with their default values; None if it has no schema.

    Reading a schema takes longer than many operations, and `capture` asks in every batch.
    """
    schema = getattr(target, "_schema", None)
    return None if schema is None else tuple((one.name, one.default_value) for one in schema.arguments)


def is_tensor(node: object) -> bool:
    """Return whether a node's value is a tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), Tensor)


def shape(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a node's tensor for the example input."""
    return sizes(node.meta["val"])


def sizes(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor as plain numbers."""
    return tuple(number(size) for size in tensor.shape)


def number(size: Any) -> int:
    """Return a size as a plain number: its value for the example input if it is symbolic.

    Raises:
        UnknownSize: the size depends on values that are known only when the model runs.
    """
    if isinstance(size, torch.SymInt):
        hint = size.node.hint if not size.node.expr.free_symbols or size.node.has_hint() else None
        if hint is None:
            raise UnknownSize("its size depends on the values of a tensor")
        return int(hint)
    return int(size)


class UnknownSize(Exception):
    """A size that is not known before the model runs."""


def place(node: fx.Node) -> str:
    """Return where a call stands in the model, for messages: the innermost module, or else the node."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(path) for path, _ in stack.values() if path and not str(path).startswith("_empty_nn_module")]
    path = paths[-1] if paths else ""
    return path or node.name


def pair(given: Any) -> tuple[int, int]:
    """Return an argument of a 2-d convolution, one number or two, as (vertical, horizontal)."""
    values = [int(one) for one in given] if isinstance(given, (list, tuple)) else [int(given)]
    return (values[0], values[-1])


class Call:
    """One call of an operation, with its arguments bound to the names of the operation's schema."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.operation = operation(node)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """All arguments by name; those that were left out have their default values."""
        parameters, args, kwargs = _parameters(self.node.target), self.node.args, self.node.kwargs
        if parameters is None:
            return dict(kwargs) | {str(i): arg for i, arg in enumerate(args)}
        left_out = parameters[len(args) :]
        bound = {name: arg for (name, _), arg in zip(parameters, args, strict=False)}
        return bound | {name: kwargs.get(name, default) for name, default in left_out}

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return an argument; the default if the operation has no such argument."""
        return self.arguments.get(name, default)

    def dims(self, name: str, rank: int) -> list[int] | None:
        """Return an argument that names one axis or several, counted from the front; None if it was left out."""
        given = self.get(name)
        if given is None:
            return None
        listed = [given] if isinstance(given, int) else list(given)
        return [int(dim) % max(rank, 1) for dim in listed]

    @cached_property
    def tensors(self) -> list[fx.Node]:
        """All tensor arguments in order, also those inside lists."""
        found: list[fx.Node] = []

        def visit(argument: Any) -> None:
            if is_tensor(argument):
                found.append(argument)
            elif isinstance(argument, (list, tuple)):
                for item in argument:
                    visit(item)

        for argument in self.arguments.values():
            visit(argument)
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result; of the first one if there are several."""
        value = self.node.meta["val"]
        return sizes(next(v for v in value if isinstance(v, Tensor)) if isinstance(value, (tuple, list)) else value)

    @property
    def words(self) -> str:
        """The call in a message."""
        name = self.operation.removeprefix("aten.")
        where = place(self.node)
        return f"{name} '{self.node.name}'" if where == self.node.name else f"{name} in '{where}'"
