"""BatchNorms in eval mode, folded into the convolutions before them: this saves a pass over memory for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from s3d_fast.network.calls import Call, operation
from s3d_fast.network.execution import held


def module_scale(norm: nn.Module) -> Tensor:
    """Return s = gamma / sqrt(var + eps) of a BatchNorm in eval mode."""
    return _scale(norm.running_var, norm.weight, norm.eps)  # type: ignore[arg-type]


def norm_scale(norm: fx.Node, module: nn.Module) -> Tensor:
    """Return s = gamma / sqrt(var + eps) of a BatchNorm in the graph of a model."""
    call = Call(norm)
    weight = call["weight"]
    return _scale(_value(call["running_var"], module), None if weight is None else _value(weight, module), call["eps"])


def _scale(variance: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    with torch.no_grad():
        scale = torch.rsqrt(variance + eps)
        return scale if weight is None else scale * weight


def _value(node: fx.Node, module: nn.Module) -> Any:
    """Return the tensor that the model stores for a node."""
    return held(module, str(node.target))


def foldable(module: fx.GraphModule) -> dict[str, str]:
    """Return the node name of every convolution that only a BatchNorm reads, with the node name of that BatchNorm."""
    if "foldable" not in module.meta:
        module.meta["foldable"] = _foldable(module)
    return module.meta["foldable"]


def _foldable(module: fx.GraphModule) -> dict[str, str]:
    found = {}
    for node in module.graph.nodes:
        users = list(node.users)
        if node.op != "call_function" or operation(node) != "aten.conv2d" or len(users) != 1:
            continue
        norm = users[0]
        if norm.op != "call_function" or operation(norm) != "aten.batch_norm" or norm.args[0] is not node:
            continue
        stored = [Call(node)["weight"], Call(node)["bias"], *norm.args[1:5]]
        if Call(norm)["running_var"] is not None and all(one is None or _is_stored(one) for one in stored):
            found[node.name] = norm.name
    return found


def _is_stored(node: object) -> bool:
    return isinstance(node, fx.Node) and node.op == "get_attr"


def folded_convolution(conv: fx.Node, norm: fx.Node, env: Mapping[fx.Node, Any], module: nn.Module) -> Tensor:
    """Return norm(conv(x)) for a BatchNorm in eval mode; weights get no gradient."""
    own, other = Call(conv), Call(norm)
    with torch.no_grad():
        scale = norm_scale(norm, module)
        shift = -_value(other["running_mean"], module) * scale
        if other["bias"] is not None:
            shift = shift + _value(other["bias"], module)
        if own["bias"] is not None:
            shift = shift + _value(own["bias"], module) * scale
        kernel = _value(own["weight"], module)
        weight = kernel * scale.reshape(-1, *[1] * (kernel.dim() - 1))
    x = env[own["input"]]
    rest = (own["stride"], own["padding"], own["dilation"], own["groups"])
    return conv.target(x, weight.to(x.dtype), shift.to(x.dtype), *rest)  # type: ignore[operator]
