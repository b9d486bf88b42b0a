"""Chains of pointwise filters and depthwise convolutions: recognised, and laid out for their fused product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from s3d_fast.backends.operations import activation_slopes, depthwise_row_norms, unchecked_curvature
from s3d_fast.capture.curvature import KINK, PROBES, Curvature
from s3d_fast.capture.folding import norm_scale
from s3d_fast.capture.values import Values, require_same
from s3d_fast.maths.activations import activation
from s3d_fast.maths.reference import DepthwiseStage
from s3d_fast.network.calls import Call, operation, pair, shape
from s3d_fast.network.graph import Unit, filter_lengths
from s3d_fast.network.links import Link
from s3d_fast.operators import DepthwiseOperator

# Patches of a convolution are laid out as rows if they have at most this many numbers for each of its filters.
LARGEST_PATCH = 2


@dataclass(frozen=True)
class DepthwiseChain:
    """Filters, an activation, and stages of a depthwise convolution and an activation.

    Attributes:
        norms: the BatchNorms before every activation; None where there is none.
        curves: the activations.
        convolutions: the depthwise convolutions before every activation but the first.
    """

    norms: tuple[Link | None, ...]
    curves: tuple[Link, ...]
    convolutions: tuple[Link, ...]

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
    norm: Link | None = None
    for index, link in enumerate(unit.links):
        if link.sources != (index,) or link.is_shifted:
            return None
        if link.kind == "scale" and norm is None and len(convolutions) == len(curves):
            norm = link
        elif link.kind == "curve" and len(convolutions) == len(curves):
            norms.append(norm)
            curves.append(link)
            norm = None
        elif _is_depthwise(link) and norm is None and len(convolutions) == len(curves) - 1:
            convolutions.append(link)
        else:
            return None
    if not convolutions or len(convolutions) != len(curves) - 1:
        return None
    if any(link.slope is not None or link.activation is None for link in curves):
        return None
    return DepthwiseChain(tuple(norms), tuple(curves), tuple(convolutions))


def _is_depthwise(link: Link) -> bool:
    if link.kind != "linear" or operation(link.node) != "aten.conv2d":
        return False
    call = Call(link.node)
    weight = shape(call["weight"])
    is_stored = getattr(call["weight"], "op", "") == "get_attr"
    return is_stored and int(call["groups"]) == weight[0] and weight[1] == 1 and not isinstance(call["padding"], str)


def rows_of(unit: Unit, values: Values) -> Tensor | None:
    """Return the rows of a convolution's patches, (B H W, D); None if they would take too much memory."""
    own = unit.filters[0].calls[0]
    call, rows = Call(own.node), values.rows(own)
    if rows is not None:
        return rows
    x = values.of(own.source)
    filters, channels, *kernel = shape(call["weight"])
    stride, padding, dilation = pair(call["stride"]), pair(call["padding"]), pair(call["dilation"])
    if kernel == [1, 1] and padding == (0, 0):
        return x[:, :, :: stride[0], :: stride[1]].movedim(1, -1).flatten(0, -2).contiguous()
    if channels * kernel[0] * kernel[1] > LARGEST_PATCH * filters:
        return None
    patches = F.unfold(x, (kernel[0], kernel[1]), dilation, padding, stride)
    return patches.mT.flatten(0, 1).contiguous()


class DepthwiseParts:
    """What the operator of such a chain is made of on one batch, apart from curvature and slopes.

    Attributes:
        chain: the chain.
        rows: the rows that the filters see, (B H W, D).
        scale: of the BatchNorm before the first activation; None if there is none.
        weight: the filters of every stage times the scale of its BatchNorm, (M, kh, kw).
        bias: whether the filters have a bias.
    """

    def __init__(self, chain: DepthwiseChain, rows: Tensor, unit: Unit, values: Values) -> None:
        self.chain, self.rows, self.bias = chain, rows, unit.filters[0].bias is not None
        scales = [None if norm is None else norm_scale(norm.node, values.module).to(rows) for norm in chain.norms]
        self.scale = scales[0]
        self.weight = [
            _times(values.of(Call(link.node)["weight"]), scale)
            for link, scale in zip(chain.convolutions, scales[1:], strict=True)
        ]

    def reach(self, d: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        """Return |dz/dtheta| of what the activation behind the slopes `d` reads: for every row, or every entry.

        The scale of the first BatchNorm is not part of the norms of rows. Norms are exact up to the second activation,
        where channels share the products of neighbouring rows; beyond, they come from random directions.
        """
        rows, bias, stages = self.rows, self.bias, self.chain.stages
        if not d:
            lengths = torch.linalg.vector_norm(rows, dim=1)
            return torch.hypot(lengths, lengths.new_ones(())) if bias else lengths
        if len(d) == 1:
            squares = depthwise_row_norms(rows, d[0], self.weight[0], stage=stages[0], bias=bias, check_finite=False)
            return squares.clamp_(min=0).sqrt_().to(rows.dtype)
        made = torch.Generator().manual_seed(0)
        total = rows.new_zeros(shape)
        for _ in range(PROBES):
            V = torch.randn((shape[3], rows.shape[1] + bias), generator=made, dtype=torch.float64).to(rows)
            r = rows @ V[:, : rows.shape[1]].mT
            r = (r + V[:, -1] if bias else r).reshape(d[0].shape)
            for slope, taps, stage in zip(d, self.weight, stages, strict=False):
                maps = (slope * r).movedim(-1, 1)
                geometry = (stage.stride, stage.padding, stage.dilation)
                r = F.conv2d(maps, taps[:, None], None, *geometry, groups=len(taps)).movedim(1, -1)
            total += r.square()
        return (total / PROBES).sqrt_()


def depthwise_parts(unit: Unit, values: Values) -> DepthwiseParts | None:
    """Return the parts of a unit whose chain is of this kind; None for other chains, or if patches are too large."""
    chain = depthwise_chain(unit)
    rows = None if chain is None else rows_of(unit, values)
    return None if chain is None or rows is None else DepthwiseParts(chain, rows, unit, values)


def depthwise_operator(unit: Unit, values: Values, model: nn.Module, curvature: Curvature) -> DepthwiseOperator | None:
    """Return the operator of a unit whose chain is of this kind; None for other chains."""
    parts = depthwise_parts(unit, values)
    if parts is None:
        return None
    chain, fixed = parts.chain, curvature.fixed_sharpness
    step = curvature.bandwidth(filter_lengths(unit, values.stored), KINK)
    C: list[Tensor] = []
    d: list[Tensor] = []
    for place, link in enumerate(chain.curves):
        assert link.activation is not None
        assert link.graded is not None
        act = activation(link.activation, sharpness=fixed)
        z, g = values.of(link.inputs[0]), values.gradient(link.graded)
        require_same(z, g)
        z, g = channels_last(z), channels_last(g)
        scale = parts.scale if place == 0 else None
        norm = bandwidth = None
        if act.kinks and fixed is None:
            norm = parts.reach(d, tuple(z.shape))
            bandwidth = step.to(z) if scale is None else step.to(z) * scale.abs()
        counts = curvature.kind == "exact" or place == 0
        own = unchecked_curvature(g, z, act, scale, 3, row_norm=norm, bandwidth=bandwidth) if counts else None
        C.append(torch.zeros_like(z) if own is None else own)
        if place < len(chain.convolutions):
            d.append(activation_slopes(z, act, scale, 3))
    return DepthwiseOperator(parts.rows, C, d, parts.weight, stages=chain.stages, bias=parts.bias)


def channels_last(maps: Tensor) -> Tensor:
    """Return (B, M, H, W) maps as (B, H, W, M)."""
    return maps.movedim(1, -1).contiguous()


def _times(weight: Tensor, scale: Tensor | None) -> Tensor:
    """Return the filters (M, 1, kh, kw) of a depthwise convolution times one number each, (M, kh, kw)."""
    weight = weight.squeeze(1)
    return weight.contiguous() if scale is None else weight * scale.reshape(-1, 1, 1)
