"""The chain of a unit: every call between its filters and its consumers, and what the call does to tangents."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from s3d_fast.maths.activations import Activation, activation
from s3d_fast.network.calls import Call, is_tensor, operation, place
from s3d_fast.network.chains import BATCH_NORMS, differentiated, find_region, is_number, named_activation
from s3d_fast.network.rules import rule_of
from s3d_fast.network.slots import Array

# Functions of corresponding entries that have two derivatives wherever they are finite.
SMOOTH = frozenset(
    f"aten.{name}"
    for name in (
        *("mul", "multiply", "div", "divide", "true_divide", "addcmul", "addcdiv", "lerp", "pow", "exp", "exp2"),
        *("expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "square", "reciprocal", "sin", "cos", "tan"),
        *("asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "erf", "erfc", "sigmoid", "tanh"),
        *("softplus", "silu", "gelu", "mish", "logaddexp", "atan2", "xlogy", "special_xlogy", "log_sigmoid", "sinc"),
        *("selu", "erfinv", "digamma", "lgamma"),
    )
)
# Operations that mix the entries of one channel and have two derivatives.
SMOOTH_BLOCKS = frozenset(
    f"aten.{name}"
    for name in (
        *("instance_norm", "batch_norm", "native_batch_norm", "_native_batch_norm_legit", "var", "std", "logsumexp"),
        *("softmax", "_softmax", "log_softmax", "_log_softmax", "norm", "linalg_vector_norm", "prod", "layer_norm"),
        *("cumsum", "diff", "nanmean"),
    )
)
POOLS = frozenset(
    f"aten.{name}"
    for name in (
        *("max_pool1d", "max_pool2d", "max_pool3d", "max_pool1d_with_indices", "max_pool2d_with_indices"),
        *("max_pool3d_with_indices", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
    )
)
MAXIMA = POOLS | {"aten.amax", "aten.amin", "aten.max", "aten.min"}
# Results that do not depend on the values of their argument, or whose gradient is cut off.
CONSTANTS = frozenset(
    f"aten.{name}"
    for name in ("zeros_like", "ones_like", "full_like", "fill", "zero", "bernoulli", "empty_like", "detach")
)
SUMS = frozenset({"aten.add", "aten.sub", "aten.rsub", "aten.neg", "aten.positive"})


@dataclass(frozen=True)
class Link:
    """One call of a chain.

    Attributes:
        kind: "linear", "sum", "scale", "curve", "glu", "maximum" or "differentiated".
        node: the call; its result is a tensor, or the first of several.
        sources: the numbers of the calls whose results it takes. The calls of filters have the first numbers, the
            links the following ones.
        activation: the function, if the call computes one of a single entry.
        slope: the tensor with the slopes of a PReLU.
        graded: the node whose gradient multiplies its curvature.
        inputs: the arguments' nodes, by source.
        is_shifted: whether it takes other values than the graph shows: an activation and a maximum changed places.
        axis, channels: where its result holds the unit's channels; -1 marks other entries along the axis.
        is_last: whether no curvature comes after it.
    """

    kind: str
    node: fx.Node
    sources: tuple[int, ...]
    inputs: tuple[fx.Node, ...]
    activation: Activation | None = None
    slope: fx.Node | None = None
    graded: fx.Node | None = None
    is_shifted: bool = False
    axis: int = 0
    channels: Array | None = None
    is_last: bool = False

    @property
    def is_curved(self) -> bool:
        """Whether it has curvature."""
        return self.kind in ("curve", "glu", "maximum", "differentiated")


class ChainError(Exception):
    """Why the curvature of a chain cannot be computed."""


Holds = Callable[[fx.Node], "tuple[int, Array] | None"]


class LinkFinder:
    """Finds the chains of units in one graph.

    Args:
        nodes: the nodes of the graph in order.
        curved: the nodes that are not linear in the channels that they get.
    """

    def __init__(self, nodes: Iterable[fx.Node], curved: Iterable[fx.Node]) -> None:
        self.order = {node: number for number, node in enumerate(nodes)}
        self.curved = set(curved)
        self.regions: dict[fx.Node, tuple[Sequence[fx.Node], Activation] | None] = {}
        self.functions: dict[fx.Node, Activation | None] = {}
        self.cut: dict[fx.Node, bool] = {}
        # From last to first: deep graphs must not recurse.
        for node in reversed(self.order):
            self.is_cut(node)

    def find(self, writers: Sequence[fx.Node], held: Iterable[fx.Node], holds: Holds) -> list[Link]:
        """Return the links between filters and consumers, those with curvature after them or in them.

        Args:
            writers: the calls of the filters that move.
            held: other calls that make the unit's channels; their results are held fixed.
            holds: returns the axis of a node's result that holds the unit's channels, and which; None if none does.

        Raises:
            ChainError: the chain has an operation whose curvature is not known.
        """
        return _Search(self, writers, held, holds).links()

    def region(self, start: fx.Node) -> tuple[Sequence[fx.Node], Activation] | None:
        """Return the calls that compute an activation of a node's result, and the activation."""
        if start not in self.regions:
            self.regions[start] = find_region(start)
        return self.regions[start]

    def is_cut(self, node: fx.Node) -> bool:
        """Return whether no gradient reaches a call: it is made without, or only such calls use its result."""
        if node not in self.cut:
            regions = node.meta.get("regions", ())
            without = any(kind == "wrap_with_set_grad_enabled" and not settings[0] for kind, settings in regions)
            users = list(node.users)
            unused = bool(users) and all(operation(user) in CONSTANTS or self.is_cut(user) for user in users)
            self.cut[node] = node.op != "output" and (without or unused)
        return self.cut[node]

    def function(self, node: fx.Node) -> Activation | None:
        """Return the function that a call computes of its only tensor."""
        if node not in self.functions:
            self.functions[node] = _function(node)
        return self.functions[node]


class _Search:
    def __init__(self, finder: LinkFinder, writers: Sequence[fx.Node], held: Iterable[fx.Node], holds: Holds) -> None:
        self.finder, self.holds = finder, holds
        self.count = len(writers)
        self.held = set(held)
        self.number: dict[fx.Node, int] = {node: number for number, node in enumerate(writers)}
        self.found: list[Link] = []
        self.removed: set[int] = set()
        self.swallowed: set[fx.Node] = set()
        self.conditions: set[fx.Node] = set()
        self.queue: list[tuple[int, fx.Node]] = []
        self.queued: set[fx.Node] = set()
        for node in writers:
            self._push_users(node)

    def links(self) -> list[Link]:
        while self.queue:
            _, node = heapq.heappop(self.queue)
            if node not in self.number and node not in self.swallowed and node not in self.held:
                self._visit(node)
        return self._pruned()

    def _push_users(self, node: fx.Node) -> None:
        for user in node.users:
            if user not in self.queued and user.op == "call_function" and _has_value(user):
                self.queued.add(user)
                heapq.heappush(self.queue, (self.finder.order[user], user))

    def _add(self, node: fx.Node, link: Link) -> int:
        where = self.holds(node)
        if where is not None:
            link = replace(link, axis=where[0], channels=where[1])
        self.found.append(link)
        self.number[node] = self.count + len(self.found) - 1
        self._push_users(node)
        return self.number[node]

    def _visit(self, node: fx.Node) -> None:
        name = operation(node)
        inputs = tuple(dict.fromkeys(one for one in node.all_input_nodes if one in self.number))
        if not inputs or self.holds(node) is None:
            if any(one in self.conditions for one in node.all_input_nodes) and self.holds(node) is not None:
                self._refuse_condition(node)
            return
        sources = tuple(self.number[one] for one in inputs)
        if name.endswith("getitem") and self._is_first_only(inputs[0]):
            if node.args[1] == 0:
                self._alias(node, inputs[0])
            return
        if name in CONSTANTS or self.finder.is_cut(node):
            return
        if len(inputs) == 1 and self._region(inputs[0]):
            return
        if is_tensor(node) and not node.meta["val"].is_floating_point():
            self.conditions.add(node)
            self._push_users(node)
            return
        if any(one in self.conditions for one in node.all_input_nodes):
            self._refuse_condition(node)
        self._add(node, self._link(node, name, inputs, sources))
        if self.found[-1].kind == "maximum":
            self._exchange(node)

    @staticmethod
    def _refuse_condition(node: fx.Node) -> None:
        raise ChainError(f"'{place(node)}' depends on a comparison of its channels")

    def _is_first_only(self, node: fx.Node) -> bool:
        """Return whether a node's result is several tensors of which only the first holds channels' values."""
        return operation(node) in MAXIMA | BATCH_NORMS | {"aten.native_batch_norm", "aten._native_batch_norm_legit"}

    def _alias(self, node: fx.Node, of: fx.Node) -> None:
        number = self.number[of]
        self.number[node] = number
        index = number - self.count
        self.found[index] = replace(self.found[index], graded=node)
        self._push_users(node)

    def _region(self, start: fx.Node) -> bool:
        """Add the activation of a node if the calls after it compute one; return whether they do."""
        users = [user for user in start.users if _has_value(user)]
        if len(users) == 1 and (
            named_activation(users[0]) is not None or not rule_of(operation(users[0])).is_elementwise
        ):
            return False
        found = self.finder.region(start)
        if found is None or any(one in self.number for one in found[0]):
            return False
        region, act = found
        self.swallowed.update(region[:-1])
        end = region[-1]
        self._add(end, Link("curve", end, (self.number[start],), (start,), act, graded=end))
        return True

    def _link(self, node: fx.Node, name: str, inputs: tuple[fx.Node, ...], sources: tuple[int, ...]) -> Link:
        def made(kind: str, **more: Any) -> Link:
            return Link(kind, node, sources, inputs, graded=node, **more)

        call = Call(node)
        if name in MAXIMA and len(call.tensors) == 1 and call.get("dim", 0) is not None:
            return made("maximum")
        if name in BATCH_NORMS and call["running_var"] is not None and not call.get("training"):
            return made("scale")
        if name == "s3d_network.registered":
            act = named_activation(node)
            return (
                made("curve", activation=act)
                if act is not None
                else made("linear" if node.meta.get("is_linear", False) else "differentiated")
            )
        if name == "aten.glu":
            return made("glu")
        if name == "aten.prelu":
            slope = call["weight"]
            if slope in inputs:
                raise ChainError(f"the slopes of '{place(node)}' are channels themselves")
            return made("curve", activation=activation("relu"), slope=slope)
        if node not in self.finder.curved or self._is_linear(name, call, inputs):
            return made("sum" if name in SUMS else "linear")
        if name in ("aten.median", "aten.kthvalue", "aten.topk", "aten.sort", "aten.cummax", "aten.cummin"):
            raise ChainError(f"'{place(node)}' chooses among its values")
        if not rule_of(name).is_elementwise:
            if name in SMOOTH_BLOCKS:
                return made("differentiated")
            raise ChainError(f"the curvature of {call.words} is not known")
        others = [one for one in call.tensors if one not in inputs and not is_number(one)]
        if len(inputs) == 1 and not others:
            act = named_activation(node) or self.finder.function(node)
            if act is not None:
                return made("curve", activation=act)
        if name in SMOOTH:
            return made("curve")
        raise ChainError(f"the curvature of {call.words} is not known")

    def _is_linear(self, name: str, call: Call, inputs: tuple[fx.Node, ...]) -> bool:
        """Return whether a call that may be curved is linear here: one factor of a product is held fixed."""
        if name in ("aten.mul", "aten.multiply"):
            return len(inputs) == 1 and call["self"] is not call["other"]
        if name in ("aten.div", "aten.divide", "aten.true_divide"):
            return inputs == (call["self"],) and call["other"] is not call["self"] and call.get("rounding_mode") is None
        return False

    def _exchange(self, node: fx.Node) -> None:
        """Let a maximum that reads only a monotone activation with kinks come before it: max act(z) = act(max z).

        Where the activation is flat, all candidates tie; the values before it do not.
        """
        last = self.found[-1]
        path: list[int] = []
        number = last.sources[0]
        while number >= self.count:
            link = self.found[number - self.count]
            if len([user for user in link.node.users if _has_value(user)]) != 1 or link.is_shifted:
                return
            if link.kind == "curve":
                break
            if link.kind != "linear" or not rule_of(operation(link.node)).selects or len(link.sources) != 1:
                return
            path.append(number)
            number = link.sources[0]
        else:
            return
        curve = self.found[number - self.count]
        act = curve.activation
        if act is None or curve.slope is not None or not act.kinks or not _is_monotone(act):
            return
        where = self.holds(last.node)
        axis, channels = where if where is not None else (0, None)
        self.found.pop()
        self.removed |= {number, *path}
        before = curve.sources[0]
        for index in reversed(path):
            own = self.found[index - self.count]
            self.found.append(replace(own, sources=(before,), is_shifted=True))
            before = self.count + len(self.found) - 1
        self.found.append(
            replace(last, sources=(before,), is_shifted=True, activation=act, axis=axis, channels=channels)
        )
        before = self.count + len(self.found) - 1
        self.found.append(Link("curve", node, (before,), (node,), act, None, node, True, axis, channels))
        self.number[node] = self.count + len(self.found) - 1

    def _pruned(self) -> list[Link]:
        """Return the links that have curvature, or lead to some; numbers are those of the links kept."""
        leads = [False] * len(self.found)
        for index in reversed(range(len(self.found))):
            link = self.found[index]
            if index + self.count in self.removed:
                continue
            if link.is_curved or leads[index]:
                for source in link.sources:
                    if source >= self.count:
                        leads[source - self.count] = True
        new = {number: number for number in range(self.count)}
        kept: list[Link] = []
        for index, link in enumerate(self.found):
            if index + self.count not in self.removed and (link.is_curved or leads[index]):
                new[index + self.count] = self.count + len(kept)
                kept.append(replace(link, sources=tuple(new[one] for one in link.sources), is_last=not leads[index]))
        return kept


def _has_value(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, (Tensor, tuple, list))


def _is_monotone(act: Activation) -> bool:
    grid = torch.linspace(-16, 16, 1601, dtype=torch.float64)
    return bool((act.first(grid) >= 0).all())


def _function(node: fx.Node) -> Activation | None:
    """Return the function of one tensor that a call computes, with its derivatives; None if it has none."""
    (source,) = {one for one in Call(node).tensors if not is_number(one)}

    def function(z: Tensor) -> Tensor:
        def given(one: fx.Node) -> Any:
            return z if one is source else one.meta.get("val")

        arguments: tuple[Any, Mapping[str, Any]] = fx.map_arg((node.args, node.kwargs), given)
        result: Tensor = node.target(*arguments[0], **arguments[1])  # type: ignore[operator]
        return result

    try:
        return differentiated(node.name, function)
    except Exception:
        return None
