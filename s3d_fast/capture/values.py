"""The values and gradients of one batch along the chains of units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn

from s3d_fast.network.graph import FilterCall, Unit


class Values:
    """What a forward and a backward pass give: values of nodes, and gradients of the loss at some of them.

    Attributes:
        module: the graph that was evaluated.
        kept: the values of nodes, by name.
        gradients: those of the loss, by the name of the node.
        stored: the tensors of the model, by name.
    """

    def __init__(
        self, module: nn.Module, kept: Mapping[str, Any], gradients: Mapping[str, Tensor], stored: Mapping[str, Tensor]
    ) -> None:
        self.module, self.kept, self.gradients, self.stored = module, kept, gradients, stored

    def of(self, node: fx.Node) -> Any:
        """Return the value of a node, without its history."""
        if node.op == "get_attr":
            value: Any = self.module
            for part in str(node.target).split("."):
                value = getattr(value, part)
            # The model may be trained before the operator is used.
            return value.detach().clone() if isinstance(value, Tensor) else value
        value = self.kept[node.name]
        if isinstance(value, (tuple, list)):
            value = value[0]
        return value.detach() if isinstance(value, Tensor) else value

    def gradient(self, node: fx.Node) -> Tensor:
        """Return the gradient of the loss at a node."""
        return self.gradients[node.name]

    def rows(self, call: FilterCall) -> Tensor | None:
        """Return the rows that filters see, (N, D), if they are laid out already."""
        return None


def wanted(unit: Unit) -> tuple[set[str], set[str]]:
    """Return the names of the nodes whose values, and of those whose gradients, a unit's operator is made of."""
    values: set[str] = set()
    graded: set[str] = set()
    for one in unit.filters:
        for call in one.calls:
            values |= _constants(call.node, {call.weight, call.bias}) | {call.node.name}
    for link in unit.links:
        made = set(link.inputs)
        values |= _constants(link.node, made if link.kind in ("linear", "sum", "scale") else set())
        values |= {node.name for node in link.inputs}
        values.add(link.node.name)
        if link.is_curved and link.graded is not None:
            graded.add(link.graded.name)
    return values, graded


def _constants(node: fx.Node, without: set[Any]) -> set[str]:
    return {one.name for one in node.all_input_nodes if one not in without and one.op != "get_attr"}


def require_same(z: Tensor, g: Tensor) -> None:
    """Raise ValueError unless an activation's output is like its input; a registered one may do more than it said."""
    if g.shape != z.shape or g.dtype != z.dtype or g.device != z.device:
        raise ValueError(
            f"its activation must keep shape, dtype and device, got {tuple(z.shape)}, {z.dtype} on {z.device} -> "
            f"{tuple(g.shape)}, {g.dtype} on {g.device}"
        )
