"""Winners and runners-up of maxima over windows or axes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from s3d_fast.backends import operations
from s3d_fast.network.calls import Call
from s3d_fast.network.links import POOLS


def top_two(values: Tensor, node: fx.Node, shape: tuple[int, ...]) -> tuple[Tensor, Tensor | None, float]:
    """Return the flat places of winners and runners-up of a maximum, and 1, or -1 for a minimum.

    The runners-up are None if no window has two candidates; a window with one candidate names it twice.

    Args:
        values: the values compared.
        node: the call that computes the maximum.
        shape: the shape of its result.
    """
    call = Call(node)
    places = torch.arange(values.numel(), device=values.device).view_as(values)
    if call.operation in POOLS:
        seen, where, sign = *_windows(values, places, call, shape), 1.0
    else:
        sign = -1.0 if call.operation in ("aten.amin", "aten.min") else 1.0
        dims = call.dims("dim", values.dim()) or list(range(values.dim()))
        order = [axis for axis in range(values.dim()) if axis not in dims] + dims
        kept = len(order) - len(dims)
        seen = (sign * values).permute(order).flatten(kept)
        where = places.permute(order).flatten(kept)
    if seen.shape[-1] < 2:
        return where[..., 0].reshape(shape), None, sign
    columns = seen.reshape(-1, seen.shape[-1]).T
    first, second = (slot.view(*seen.shape[:-1], 1) for slot in operations.top_two(columns.unsqueeze(0)))
    winner = where.gather(-1, first)
    # In a window with one candidate the second is padding: it never ties.
    runner = torch.where(torch.isfinite(seen.gather(-1, second)), where.gather(-1, second), winner)
    return winner.reshape(shape), runner.reshape(shape), sign


def _windows(values: Tensor, places: Tensor, call: Call, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the values in every window of a pooling, and their places; both have one more axis, for the window."""
    dimensions = next(d for d in (1, 2, 3) if f"{d}d" in call.operation)
    if "adaptive" in call.operation:
        kernel, stride = [], []
        for size, out in zip(values.shape[-dimensions:], shape[-dimensions:], strict=True):
            if size % out:
                raise ValueError(f"{call.words} has windows of different sizes, which is not supported")
            kernel.append(size // out)
        stride, padding, dilation = kernel, [0] * dimensions, [1] * dimensions
    else:
        kernel = _each(call["kernel_size"], dimensions)
        stride = _each(call["stride"], dimensions) if call["stride"] else kernel
        padding, dilation = _each(call["padding"], dimensions), _each(call["dilation"], dimensions)
    pads: list[int] = []
    for axis in reversed(range(dimensions)):
        size, out = values.shape[values.dim() - dimensions + axis], shape[len(shape) - dimensions + axis]
        reach = (out - 1) * stride[axis] + dilation[axis] * (kernel[axis] - 1) + 1
        pads += [padding[axis], reach - size - padding[axis]]
    seen, where = F.pad(values, pads, value=-torch.inf), F.pad(places, pads)
    for axis in range(dimensions):
        span = dilation[axis] * (kernel[axis] - 1) + 1
        own = values.dim() - dimensions + axis
        seen = seen.unfold(own, span, stride[axis])[..., :: dilation[axis]]
        where = where.unfold(own, span, stride[axis])[..., :: dilation[axis]]
    return seen.flatten(values.dim()), where.flatten(values.dim())


def _each(given: Any, dimensions: int) -> list[int]:
    listed = [int(one) for one in given] if isinstance(given, (list, tuple)) else [int(given)]
    return listed * dimensions if len(listed) == 1 else listed
