"""Chains of pointwise filters and depthwise convolutions: recognised, and laid out for their fused product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from s3d_fast.maths.reference import DepthwiseStage
from s3d_fast.network.calls import Call, operation, pair, shape
from s3d_fast.network.graph import Unit
from s3d_fast.network.links import Link

# Patches of a convolution are laid out as rows if they have at most this many numbers for each of its filters.
LARGEST_PATCH = 2


@dataclass(frozen=True)
class DepthwiseChain:
    """Filters, an activation, and stages of a depthwise convolution and an activation.

    Attributes:
        norms: the BatchNorms before every activation; None where there is none.
        curves: the activations.
        convolutions: the depthwise convolutions before every activation but the first.
        numbers: the numbers of the links that the activations read.
    """

    norms: tuple[Link | None, ...]
    curves: tuple[Link, ...]
    convolutions: tuple[Link, ...]
    numbers: tuple[int, ...]

    @property
    def stages(self) -> tuple[DepthwiseStage, ...]:
        """The geometry of every depthwise convolution."""
        found = []
        for link in self.convolutions:
            call = Call(link.node)
            found.append(DepthwiseStage(pair(call["stride"]), pair(call["padding"]), pair(call["dilation"])))
        return tuple(found)


def depthwise_chain(unit: Unit) -> DepthwiseChain | None:
    """Return the chain of a unit if it is of this kind; else None."""
    if len(unit.filters) != 1 or len(unit.filters[0].calls) != 1 or unit.filters[0].calls[0].views:
        return None
    call = Call(unit.filters[0].calls[0].node)
    if call.operation != "aten.conv2d" or len(unit.filters[0].rows) != shape(call["weight"])[0]:
        return None
    if isinstance(call["padding"], str) or len(shape(call["input"])) != 4:
        return None
    norms: list[Link | None] = []
    curves: list[Link] = []
    convolutions: list[Link] = []
    numbers: list[int] = []
    norm: Link | None = None
    for index, link in enumerate(unit.links):
        if link.sources != (index,) or link.is_shifted:
            return None
        if link.kind == "scale" and norm is None and len(convolutions) == len(curves):
            norm = link
        elif link.kind == "curve" and len(convolutions) == len(curves):
            norms.append(norm)
            curves.append(link)
            numbers.append(index)
            norm = None
        elif _is_depthwise(link) and norm is None and len(convolutions) == len(curves) - 1:
            convolutions.append(link)
        else:
            return None
    if not convolutions or len(convolutions) != len(curves) - 1:
        return None
    if any(link.slope is not None or link.activation is None for link in curves):
        return None
    return DepthwiseChain(tuple(norms), tuple(curves), tuple(convolutions), tuple(numbers))


def _is_depthwise(link: Link) -> bool:
    if link.kind != "linear" or operation(link.node) != "aten.conv2d":
        return False
    call = Call(link.node)
    weight = shape(call["weight"])
    is_stored = getattr(call["weight"], "op", "") == "get_attr"
    return is_stored and int(call["groups"]) == weight[0] and weight[1] == 1 and not isinstance(call["padding"], str)


def rows_of(unit: Unit, x: Tensor) -> Tensor | None:
    """Return the rows of a convolution's patches, (B H W, D); None if they would take too much memory."""
    call = Call(unit.filters[0].calls[0].node)
    filters, channels, *kernel = shape(call["weight"])
    stride, padding, dilation = pair(call["stride"]), pair(call["padding"]), pair(call["dilation"])
    if kernel == [1, 1] and padding == (0, 0):
        return x[:, :, :: stride[0], :: stride[1]].movedim(1, -1).flatten(0, -2).contiguous()
    if channels * kernel[0] * kernel[1] > LARGEST_PATCH * filters:
        return None
    patches = F.unfold(x, (kernel[0], kernel[1]), dilation, padding, stride)
    return patches.mT.flatten(0, 1).contiguous()


def channels_last(maps: Tensor) -> Tensor:
    """Return (B, M, H, W) maps as (B, H, W, M)."""
    return maps.movedim(1, -1).contiguous()


def times(weight: Tensor, scale: Tensor | None) -> Tensor:
    """Return the filters (M, 1, kh, kw) of a depthwise convolution times one number each, (M, kh, kw)."""
    weight = weight.squeeze(1)
    return weight.contiguous() if scale is None else weight * scale.reshape(-1, 1, 1)


def squared(C: Tensor, scale: Tensor | None) -> Tensor:
    """Return coefficients (B, H, W, M) times the square of one number per channel."""
    return C if scale is None else C * scale.square()


def scaled(d: Tensor, scale: Tensor | None) -> Tensor:
    """Return slopes (B, H, W, M) times one number per channel."""
    return d if scale is None else d * scale


def as_maps(norms: Tensor) -> Tensor:
    """Return squares (B, H, W, M) as lengths (B, M, H, W)."""
    return torch.movedim(norms.clamp(min=0).sqrt(), -1, 1)
