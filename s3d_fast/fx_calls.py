"""What the calls in a traced graph mean for channels: tables of operations, and how to read a call's arguments."""

from __future__ import annotations

from typing import Any

from torch import fx

from s3d_fast.activations import Activation, activation, activation_names, is_activation


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELEMENTWISE = _words("dropout dropout2d feature_dropout contiguous clone to float double neg detach type_as")
CURVED = _words("abs exp log sqrt square clamp hardtanh sin cos mish celu selu logsigmoid")
ARITHMETIC = _words("add iadd sub isub mul imul truediv div pow rsub")
REDUCING = _words("mean sum amax amin max min")
SPATIAL = _words(
    "max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d interpolate upsample pad boolean_dispatch"
)
RESHAPING = _words("flatten view reshape transpose permute squeeze unsqueeze swapaxes")
CONCATENATING = _words("cat concat concatenate")
MIXING = _words("softmax log_softmax layer_norm group_norm")


def name(node: fx.Node) -> str:
    """Return the plain name of a called function or method: "add" for operator.add, torch.add and x.add_."""
    if node.op == "call_method":
        return str(node.target).strip("_")
    called = getattr(node.target, "__name__", str(node.target))
    # F.max_pool2d and its kin are closures, all called fn, that choose between two functions.
    return "boolean_dispatch" if called == "fn" else called.strip("_")


def functional_activation(node: fx.Node) -> Activation | None:
    """Return the activation that a called function or method is, or None."""
    options: dict[str, Any] = {key: value for key, value in node.kwargs.items() if key not in ("inplace", "input")}
    if node.op == "call_function" and is_activation(node.target):
        names = {"leaky_relu": ("negative_slope",), "elu": ("alpha",), "softplus": ("beta", "threshold")}
        positional = names.get(name(node), ())
        options |= dict(zip(positional, node.args[1:], strict=False))
        return activation(node.target, **options)
    if node.op == "call_method" and str(node.target).strip("_") in activation_names():
        return activation(str(node.target).strip("_"), **options)
    return None


def argument(node: fx.Node, index: int, keyword: str, default: Any) -> Any:
    """Return an argument of a call, given by position or by keyword."""
    if keyword in node.kwargs:
        return node.kwargs[keyword]
    return node.args[index] if len(node.args) > index else default


def moved_axis(node: fx.Node, axis: int, shape: tuple[int, ...]) -> int | None:
    """Return where a permutation, squeeze or unsqueeze puts an axis; None if the operation is another one."""
    rank = len(shape)
    called = name(node)
    given = [arg for arg in node.args[1:] if isinstance(arg, (int, tuple, list))]
    dims = [int(dim) for arg in given for dim in ([arg] if isinstance(arg, int) else arg)]  # type: ignore[arg-type]
    if called == "unsqueeze":
        return axis + (dims[0] % (rank + 1) <= axis)
    dims = [dim % rank for dim in dims]
    if called in ("transpose", "swapaxes") and len(dims) == 2:
        return {dims[0]: dims[1], dims[1]: dims[0]}.get(axis, axis)
    if called == "permute":
        return dims.index(axis)
    if called == "squeeze" and dims and axis not in dims:
        return axis - sum(1 for dim in dims if dim < axis and shape[dim] == 1)
    return None
