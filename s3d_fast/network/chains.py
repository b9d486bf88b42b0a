"""Activations in a graph: one call, or several that compute one function; recognised if the formula is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from s3d_fast.maths.activations import Activation, Kink, activation
from s3d_fast.network.calls import Call, UnknownSize, is_tensor, operation, shape
from s3d_fast.network.rules import rule_of

# Operations whose activation is known by name, with the arguments that are its options.
NAMED: dict[str, tuple[str, dict[str, str]]] = {
    "aten.relu": ("relu", {}),
    "aten.relu6": ("relu6", {}),
    "aten.leaky_relu": ("leaky_relu", {"negative_slope": "negative_slope"}),
    "aten.silu": ("silu", {}),
    "aten.gelu": ("gelu", {"approximate": "approximate"}),
    "aten.softplus": ("softplus", {"beta": "beta", "threshold": "threshold"}),
    "aten.tanh": ("tanh", {}),
    "aten.sigmoid": ("sigmoid", {}),
    "aten.hardswish": ("hardswish", {}),
}
# Names that a function written out by hand is compared with.
RECOGNISED = ("silu", "gelu", "gelu_tanh", "softplus", "tanh", "sigmoid", "hardswish", "gaussian", "relu", "relu6")
# A function with more jumps of its slope is no activation that a softplus at each of them could stand for.
MOST_KINKS = 4
# The largest change of a step of the function between neighbours on the grid, which are 1/200 apart.
LARGEST_STEP = 0.1
BATCH_NORMS = frozenset({"aten.batch_norm", "aten._native_batch_norm_legit_no_training"})


def find_region(start: fx.Node) -> tuple[list[fx.Node], Activation] | None:
    """Return the elementwise calls after a node that compute an activation of its result, and the activation."""
    for region in _regions(start):
        made = _activation_of(start, region)
        if made is not None:
            return region, made
    return None


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (tuple, list))


def named_activation(node: fx.Node) -> Activation | None:
    """Return the activation that one call computes, if its operation has a known formula."""
    if node.op != "call_function":
        return None
    name, call = operation(node), Call(node)
    if name == "s3d_network.registered":
        made = node.meta.get("activation")
        return made if isinstance(made, Activation) and made.name != "identity" else None
    if name in NAMED:
        which, options = NAMED[name]
        return activation(which, **{option: call[argument] for option, argument in options.items()})
    if name == "aten.elu" and call["scale"] == 1 and call["input_scale"] == 1:
        return activation("elu", alpha=call["alpha"])
    if name == "aten.hardtanh" and (call["min_val"], call["max_val"]) == (0, 6):
        return activation("relu6")
    return None


def _regions(start: fx.Node) -> Iterator[list[fx.Node]]:
    """Yield the runs of elementwise calls that begin at a node and end in one node that all of it leads to.

    Every call in a run depends on the start, on other calls in it and on plain numbers alone. The shortest comes first.
    """
    inside = {start}
    found: list[fx.Node] = []
    node = start.next
    # A hand-written activation has a few operations: look no further.
    for _ in range(200):
        if node.op == "output":
            return
        touches = [argument for argument in node.all_input_nodes if argument in inside]
        if touches:
            alone = all(argument in inside or is_number(argument) for argument in node.all_input_nodes)
            is_ours = node.op == "call_function" and is_tensor(node) and rule_of(operation(node)).is_elementwise
            if not (alone and is_ours):
                return
            inside.add(node)
            found.append(node)
            behind = inside - {node}
            closed = all(user in inside for one in behind for user in one.users if is_tensor(user) or _is_tuple(user))
            if closed and any(operation(one) not in _PLAIN for one in found):
                yield list(found)
        node = node.next


_PLAIN = frozenset({"aten.dropout", "aten.clone", "aten.alias", "aten.contiguous", "aten.detach", "aten.to"})


def is_number(node: fx.Node) -> bool:
    """Return whether a node is a stored constant with one entry."""
    value = node.meta.get("val")
    return node.op == "get_attr" and isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad


def _activation_of(start: fx.Node, region: Sequence[fx.Node]) -> Activation | None:
    """Return the function that a region computes; None if it is linear or does not keep its input's shape."""
    try:
        if any(shape(one) != shape(start) for one in region):
            return None
    except UnknownSize:
        return None

    def function(z: Tensor) -> Tensor:
        values: dict[fx.Node, Any] = {start: z}
        for node in region:
            arguments = fx.map_arg((node.args, node.kwargs), lambda n: values.get(n, n.meta.get("val")))
            values[node] = node.target(*arguments[0], **arguments[1])  # type: ignore[operator]
        return values[region[-1]]

    grid = torch.linspace(-8, 8, 321, dtype=torch.float64)
    try:
        with torch.no_grad():
            shown = function(grid)
    except Exception:
        return None
    if not shown.is_floating_point():
        return None
    for name in RECOGNISED:
        known = activation("gelu", approximate="tanh") if name == "gelu_tanh" else activation(name)
        if torch.allclose(known(grid), shown.to(grid.dtype), rtol=1e-10, atol=1e-10):
            return known
    return differentiated(region[-1].name, function)


def differentiated(name: str, function: Callable[[Tensor], Tensor]) -> Activation | None:
    """Return an activation whose derivatives come from automatic differentiation; None if the function is linear.

    Kinks are found where the slope jumps between neighbouring points of a fine grid.
    """

    def first(z: Tensor) -> Tensor:
        return _derivative(function, z)

    def second(z: Tensor) -> Tensor:
        return _derivative(first, z)

    grid = torch.linspace(-16, 16, 6401, dtype=torch.float64)
    with torch.no_grad():
        steps = function(grid).diff()
    if float((steps[1:] - steps[:-1]).abs().max()) > LARGEST_STEP:
        # The function itself jumps: no second derivative describes that.
        return None
    curvature: Callable[[Tensor], Tensor] = second
    try:
        bend = second(grid).detach()
    except RuntimeError:
        # PyTorch cannot differentiate some functions twice; those that are straight between kinks need not be.
        slope = first(grid).detach()
        if int((slope[1:] != slope[:-1]).sum()) > MOST_KINKS:
            return None
        bend = torch.zeros_like(grid)
        curvature = torch.zeros_like
    kinks = tuple(_kinks(first, bend, grid))
    if not kinks and float(bend.abs().max()) < 1e-12:
        return None
    return Activation(name, function, first, curvature, kinks) if len(kinks) <= MOST_KINKS else None


def _derivative(function: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    # A derivative of a derivative must be differentiable itself; a constant has no gradient at all.
    with torch.enable_grad():
        z = z if z.requires_grad else z.detach().requires_grad_()
        value = function(z)
        if not value.requires_grad:
            return torch.zeros_like(z)
        (gradient,) = torch.autograd.grad(value.sum(), z, create_graph=True, allow_unused=True, materialize_grads=True)
    return gradient


def _kinks(first: Callable[[Tensor], Tensor], bend: Tensor, grid: Tensor) -> list[Kink]:
    slope = first(grid).detach()
    step = float(grid[1] - grid[0])
    smooth = step * torch.maximum(bend[1:].abs(), bend[:-1].abs())
    jumps = (slope[1:] - slope[:-1]).abs() > 2 * smooth + 1e-6
    found: list[Kink] = []

    def slope_at(z: float) -> float:
        return float(first(torch.tensor([z], dtype=grid.dtype)).detach())

    for index in torch.nonzero(jumps).flatten().tolist():
        low, high = float(grid[index]), float(grid[index + 1])
        at_low, at_high = slope_at(low), slope_at(high)
        for _ in range(60):
            middle = (low + high) / 2
            if not low < middle < high:
                break
            at_middle = slope_at(middle)
            if abs(at_middle - at_low) >= abs(at_high - at_middle):
                high, at_high = middle, at_middle
            else:
                low, at_low = middle, at_middle
        jump = at_high - at_low
        at = round(high, 9)
        if abs(jump) > 1e-6 and not (found and abs(found[-1].at - at) < 1e-6):
            found.append(Kink(at, round(jump, 9)))
    return found
