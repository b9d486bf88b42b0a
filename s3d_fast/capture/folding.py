"""BatchNorms in eval mode, folded into the convolutions before them: this saves a pass over memory for each."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn


def norm_scale(norm: nn.Module) -> Tensor:
    """Return s = gamma / sqrt(var + eps) of a BatchNorm in eval mode."""
    with torch.no_grad():
        scale = torch.rsqrt(norm.running_var + norm.eps)  # type: ignore[operator]
        return scale if norm.weight is None else scale * norm.weight  # type: ignore[operator]


def foldable(module: fx.GraphModule) -> dict[str, str]:
    """Return the node name of every convolution that only a BatchNorm reads, with the node name of that BatchNorm."""
    modules = dict(module.named_modules())
    found = {}
    for node in module.graph.nodes:
        users = list(node.users)
        if node.op == "call_module" and len(users) == 1 and users[0].op == "call_module":
            conv, norm = modules[str(node.target)], modules[str(users[0].target)]
            plain = type(conv) is nn.Conv2d and type(norm) is nn.BatchNorm2d and norm.running_var is not None
            if plain and not _has_hooks(conv) and not _has_hooks(norm):
                found[node.name] = users[0].name
    return found


def folded_convolution(conv: nn.Conv2d, norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """Return norm(conv(x)) for a BatchNorm in eval mode; weights get no gradient."""
    with torch.no_grad():
        scale = norm_scale(norm)
        shift = -norm.running_mean * scale  # type: ignore[operator]
        if norm.bias is not None:
            shift = shift + norm.bias
        if conv.bias is not None:
            shift = shift + conv.bias * scale
        weight = conv.weight * scale[:, None, None, None]
    return conv._conv_forward(x, weight.to(x.dtype), shift.to(x.dtype))


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
