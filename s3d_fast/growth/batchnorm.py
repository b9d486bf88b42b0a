"""BatchNorm over the samples of all processes, on any device; PyTorch's SyncBatchNorm needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from s3d_fast.base.world import World


@contextmanager
def synchronized(model: nn.Module, world: World) -> Iterator[None]:
    """Let every BatchNorm of a model normalise over the samples of all processes, within the `with` block.

    In train mode, mean and variance are those of the samples of all processes, also in the running statistics. Their
    gradients pass between the processes too: with a mean loss and equal shares, training is that of one process on
    all samples.
    """
    layers = [] if world.size == 1 else [module for module in model.modules() if isinstance(module, _BatchNorm)]
    # PyTorch's own synchronizes itself.
    layers = [layer for layer in layers if not isinstance(layer, nn.SyncBatchNorm)]
    for layer in layers:
        if "forward" in vars(layer):
            raise ValueError(f"sync_batchnorm: a {type(layer).__name__} of the model has a forward pass of its own")
    for layer in layers:
        layer.forward = partial(_forward, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _forward(layer: _BatchNorm, x: Tensor) -> Tensor:
    if not (layer.training or layer.running_mean is None):
        return type(layer).forward(layer, x)
    layer._check_input_dim(x)
    others = [axis for axis in range(x.dim()) if axis != 1]
    shape = [-1 if axis == 1 else 1 for axis in range(x.dim())]
    # Sums of 16-bit numbers lose their digits.
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    own_count = torch.full((1,), x.numel() / max(x.shape[1], 1), dtype=wide.dtype, device=x.device)
    total, count = _Sum.apply(torch.cat([wide.sum(others), own_count])).split([x.shape[1], 1])
    mean = total / count
    centred = wide - mean.view(shape)
    # Two sums one after the other: the mean of squares minus the square of the mean loses digits.
    variance = _Sum.apply(centred.square().sum(others)) / count
    _remember(layer, mean.detach(), variance.detach() * count / (count - 1).clamp(min=1))
    y = centred * torch.rsqrt(variance + layer.eps).view(shape)
    if layer.weight is not None:
        y = y * layer.weight.view(shape).to(y.dtype)
    if layer.bias is not None:
        y = y + layer.bias.view(shape).to(y.dtype)
    return y.to(x.dtype)


@torch.no_grad()
def _remember(layer: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    """Update the running statistics as BatchNorm does."""
    if not (layer.training and layer.track_running_stats) or layer.running_mean is None or layer.running_var is None:
        return
    factor = layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        factor = 1 / float(layer.num_batches_tracked) if factor is None else factor
    assert factor is not None
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), factor)
    layer.running_var.lerp_(variance.to(layer.running_var.dtype), factor)


class _Sum(torch.autograd.Function):
    """The sum over all processes; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone().contiguous()
        dist.all_reduce(total)
        return total
