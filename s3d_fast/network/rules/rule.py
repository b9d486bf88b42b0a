"""What a rule is, and the one registry of rules by operation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from s3d_fast.network.calls import Call
from s3d_fast.network.flow import Flow, Value, Values


class Rule(ABC):
    """How channels pass through one operation.

    Attributes:
        kind: the kind of layer that the operation makes of the module around it, in `Graph.explain`; empty if none.
        is_elementwise: whether every entry of the result depends only on the entries at the same place.
        selects: whether every entry of the result is one entry of the input.
    """

    kind: str = ""
    is_elementwise: bool = False
    selects: bool = False

    @abstractmethod
    def follow(self, call: Call, flow: Flow) -> Values:
        """Return where the channels are in the result; tie, block and record on the way."""


_RULES: dict[str, Rule] = {}
RuleType = TypeVar("RuleType", bound=type[Rule])


def rule(*operations: str) -> Callable[[RuleType], RuleType]:
    """Register a rule for ATen operations; the class is made here, so a missing method is an error at import."""

    def register(kind: RuleType) -> RuleType:
        made = kind()
        for operation in operations:
            register_operation(operation if "." in operation or "::" in operation else f"aten.{operation}", made)
        return kind

    return register


def register_operation(operation: str, made: Rule) -> None:
    """Teach `trace` an operation: how channels pass through it.

    Args:
        operation: its name, such as "mylib::scale"; a rule for a known name replaces the old one.
        made: an object of a subclass of `Rule`.

    Raises:
        TypeError: one of the arguments has another type.
    """
    if not isinstance(operation, str) or not isinstance(made, Rule):
        raise TypeError(f"register_operation takes a name and a Rule, got {operation!r} and {made!r}")
    _RULES[operation.replace("::", ".")] = made


def rule_of(operation: str) -> Rule:
    """Return the rule of an operation; the one that blocks everything if there is none."""
    return _RULES.get(operation, _UNKNOWN)


class _Unknown(Rule):
    """An operation without a rule blocks all channels that reach it."""

    def follow(self, call: Call, flow: Flow) -> Value:
        return flow.block_inputs(call, f"splitting does not support the operation {call.words}")


_UNKNOWN = _Unknown()
