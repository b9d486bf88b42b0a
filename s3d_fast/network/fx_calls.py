"""Calls in a traced graph: tables of operations by their effect on channels, and readers of a call's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Container, Mapping
from functools import cache
from typing import Any

from torch import fx, nn

from s3d_fast.maths.activations import MODULES, Activation, activation, activation_names, is_activation
from s3d_fast.network.edgeconv import EdgeConv


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


DROPOUTS = _words("dropout dropout1d dropout2d alpha_dropout feature_alpha_dropout")
ELEMENTWISE = DROPOUTS | _words("contiguous clone to float double neg detach")
CURVED = _words("abs exp log sqrt square clamp hardtanh sin cos mish celu selu logsigmoid log_sigmoid")
ARITHMETIC = _words("add iadd sub isub mul imul truediv div pow rsub maximum minimum")
REDUCING = _words("mean sum amax amin max min")
SPATIAL = _words(
    "max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d interpolate upsample pad boolean_dispatch"
)
RESHAPING = _words("flatten view reshape transpose permute squeeze unsqueeze swapaxes")
CONCATENATING = _words("cat concat concatenate")
MIXING = _words("softmax log_softmax layer_norm group_norm")
# Operations that always return a new tensor, unless they work in place. Any other may return its argument, or a view of
# it: dropout in eval mode, `to`, a registered module, an unknown operation.
FRESH = _words(
    "clone neg add sub mul truediv div pow rsub maximum minimum mean sum amax amin cat concat concatenate "
    "softmax log_softmax layer_norm group_norm conv2d linear batch_norm max_pool2d avg_pool2d matmul bmm "
    "abs exp log sqrt square clamp sin cos"
)
FRESH_MODULES = frozenset(
    {
        *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm),
        *(nn.GroupNorm, nn.Softmax, nn.LogSoftmax, nn.MaxPool2d, nn.AvgPool2d, EdgeConv),
    }
)
# Operations allowed between a layer and its activation: every output entry is one input entry, perhaps scaled.
SELECTING = RESHAPING | DROPOUTS | _words("contiguous max_pool2d adaptive_max_pool2d boolean_dispatch")
# The functions behind +=, -= and the like.
IN_PLACE_OPERATORS = _words("iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor setitem")
# Properties of a tensor that do not depend on its number of channels.
NOT_SIZES = _words("dim ndim dtype device is_cuda get_device requires_grad ndimension")


def name(node: fx.Node) -> str:
    """Return the plain name of a called function or method: "add" for operator.add, torch.add and x.add_."""
    if node.op == "call_method":
        return str(node.target).strip("_")
    called = getattr(node.target, "__name__", str(node.target))
    if called == "getattr":
        return str(node.args[1])
    module = getattr(node.target, "__module__", None) or "torch"
    if module.partition(".")[0] not in ("torch", "_operator", "operator", "builtins", "math", "s3d_fast"):
        # A user's function may have any name.
        return f"{module}.{called}"
    # F.max_pool2d and F.adaptive_max_pool2d are closures, both called fn, that choose between two functions.
    return "boolean_dispatch" if called == "fn" else called.strip("_")


def functional_activation(node: fx.Node) -> Activation | None:
    """Return the activation that a call computes; None if it is not a known activation."""
    options: dict[str, Any] = {key: value for key, value in node.kwargs.items() if key not in ("inplace", "input")}
    if node.op == "call_function" and is_activation(node.target):
        names = {"leaky_relu": ("negative_slope",), "elu": ("alpha",), "softplus": ("beta", "threshold")}
        positional = names.get(name(node), ())
        options |= dict(zip(positional, node.args[1:], strict=False))
        return activation(node.target, **options)
    if node.op == "call_method" and name(node) in activation_names():
        return activation(name(node), **options)
    return None


def is_inplace(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a call changes its argument."""
    if node.op == "call_module":
        return bool(getattr(modules[str(node.target)], "inplace", False))
    called = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    if called.endswith("_") or called in IN_PLACE_OPERATORS or "out" in node.kwargs:
        return True
    place = _inplace_argument(node.target) if node.op == "call_function" else None
    return bool(node.kwargs.get("inplace") or (place is not None and argument(node, place, "inplace", False)))


def may_return_argument(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether the result of a call may share memory with its argument."""
    if is_inplace(node, modules):
        return True
    if node.op == "call_module":
        kind = type(modules[str(node.target)])
        return kind not in FRESH_MODULES and (kind not in MODULES or kind is nn.Identity)
    if node.op not in ("call_function", "call_method"):
        return False
    return name(node) not in FRESH and functional_activation(node) is None


def may_change(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Return whether a later call may change the value of this node in place, directly or through a view of it."""
    return any(
        is_inplace(user, modules) or (may_return_argument(user, modules) and may_change(user, modules))
        for user in node.users
    )


def overwritten(module: fx.GraphModule, producers: Container[str]) -> set[fx.Node]:
    """Return the producers' nodes whose input a later call may change in place, directly or through shared memory."""
    modules, order = dict(module.named_modules()), {node: place for place, node in enumerate(module.graph.nodes)}

    def is_changed(node: fx.Node, after: int, seen: set[fx.Node]) -> bool:
        if node in seen:
            return False
        seen.add(node)
        sharing = [user for user in node.users if may_return_argument(user, modules)]
        if any(is_inplace(user, modules) and order[user] > after for user in sharing):
            return True
        if may_return_argument(node, modules):
            sharing += node.all_input_nodes
        return any(is_changed(other, after, seen) for other in sharing)

    reading = [node for node in module.graph.nodes if node.name in producers]
    return {node for node in reading if is_changed(node.all_input_nodes[0], order[node], set())}


@cache
def _inplace_argument(function: Any) -> int | None:
    """Return the position of a function's argument `inplace`; None if it has none."""
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    return parameters.index("inplace") if "inplace" in parameters else None


def argument(node: fx.Node, index: int, keyword: str, default: Any) -> Any:
    """Return an argument of a call, given by position or by keyword."""
    if keyword in node.kwargs:
        return node.kwargs[keyword]
    return node.args[index] if len(node.args) > index else default


def operands(node: fx.Node) -> list[Any]:
    """Return all arguments of a call, by position or keyword."""
    return [*node.args, *node.kwargs.values()]


def sizes(node: fx.Node) -> list[Any]:
    """Return the axes or sizes that a reshaping call was given: one by one, as a tuple, or by keyword."""
    given = [arg for key, arg in node.kwargs.items() if key != "input"]
    given += node.args if "input" in node.kwargs else node.args[1:]
    return [item for arg in given for item in (arg if isinstance(arg, (tuple, list)) else [arg])]


def moved_axis(node: fx.Node, axis: int, shape: tuple[int, ...]) -> int | None:
    """Return the new position of an axis after a permutation, squeeze or unsqueeze; None if it is unknown."""
    rank = len(shape)
    called = name(node)
    dims = sizes(node)
    if called not in ("transpose", "swapaxes", "permute", "squeeze", "unsqueeze"):
        return None
    if not dims or not all(isinstance(dim, int) for dim in dims):
        return None
    if called == "unsqueeze":
        return axis + (dims[0] % (rank + 1) <= axis)
    dims = [dim % rank for dim in dims]
    if called == "permute":
        return dims.index(axis)
    if called == "squeeze":
        return None if axis in dims else axis - sum(1 for dim in dims if dim < axis and shape[dim] == 1)
    return {dims[0]: dims[1], dims[1]: dims[0]}.get(axis, axis)
