"""The operator of a unit on one batch in its fastest form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from s3d_fast.backends.operations import unchecked_curvature
from s3d_fast.capture.chain import ChainBuilder
from s3d_fast.capture.curvature import KINK, Curvature
from s3d_fast.capture.depthwise import depthwise_operator
from s3d_fast.capture.edges import edgeconv_operator
from s3d_fast.capture.folding import norm_scale
from s3d_fast.capture.values import Values, require_same
from s3d_fast.maths.activations import activation
from s3d_fast.network.calls import Call, operation, pair, shape
from s3d_fast.network.graph import FilterCall, Unit, filter_lengths
from s3d_fast.operators import (
    ChainOperator,
    ConvOperator,
    GatedOperator,
    JointOperator,
    PointwiseOperator,
    SplittingOperator,
    TiedConvOperator,
)


def unit_operator(unit: Unit, values: Values, model: nn.Module, curvature: Curvature) -> SplittingOperator:
    """Return the operator of a unit: a fused form if its chain has one, else the one of the definition."""
    C = _coefficients_at_once(unit, values, model, curvature)
    if C is not None:
        return _on_rows(unit, values, C)
    for form in (edgeconv_operator, depthwise_operator):
        made = form(unit, values, model, curvature)
        if made is not None:
            return made
    builder = ChainBuilder(unit, values, model, curvature)
    general = builder.operator()
    if builder.is_diagonal and _has_rows(unit):
        # Every activation sees multiples of single outputs: all curvature is one coefficient for each of them.
        ones = torch.ones_like(values.of(unit.filters[0].calls[0].node))
        if not builder.ties:
            return _on_rows(unit, values, general.curvature_of([ones])[0])
        tied = _tied(unit, values, builder, general, ones)
        if tied is not None:
            return tied
    if builder.is_joint:
        for joint_form in (_gated, _joint):
            joint = joint_form(unit, values, general)
            if joint is not None:
                return joint
    return general


# Calls that take the transposed of a matrix.
TRANSPOSES = frozenset({"aten.t", "aten.transpose", "aten.numpy_T", "aten.mT", "aten.permute"})


def _has_rows(unit: Unit) -> bool:
    """Return whether the filters of a unit see the rows of a matrix, or the patches of maps."""
    call = unit.filters[0].calls[0]
    name = operation(call.node)
    if name in ("aten.linear", "aten.conv2d"):
        return not call.views
    if name not in ("aten.matmul", "aten.mm", "aten.addmm") or len(shape(call.weight)) != 2:
        return False
    # x @ W or x @ W.T, not W @ x.
    factors = Call(call.node).tensors[-2:]
    return factors == [call.source, call.weight] and all(operation(node) in TRANSPOSES for node in call.views)


def _coefficients_at_once(unit: Unit, values: Values, model: nn.Module, curvature: Curvature) -> Tensor | None:
    """Return C of a filter that one activation follows, perhaps behind a BatchNorm; None for any other chain."""
    links = list(unit.links)
    if curvature.kind == "paper":
        # Nothing behind the first activation counts.
        places = [place for place, link in enumerate(links) if link.is_curved]
        links = links[: places[0] + 1]
    *before, last = links
    if len(unit.filters) > 1 or len(unit.filters[0].calls) > 1 or not _has_rows(unit):
        return None
    if [link.kind for link in before] not in ([], ["scale"]) or last.kind != "curve" or last.activation is None:
        return None
    whole = len(unit.filters[0].rows) == values.of(unit.filters[0].calls[0].node).shape[last.axis]
    if last.slope is not None or not whole:
        return None
    act = activation(last.activation, sharpness=curvature.fixed_sharpness)
    z, g = values.of(last.inputs[0]), values.gradient(last.graded)  # type: ignore[arg-type]
    require_same(z, g)
    scale = norm_scale(before[0].node, values.module).to(z.dtype) if before else None
    if not act.kinks or curvature.fixed_sharpness is not None:
        return unchecked_curvature(g, z, act, scale, last.axis)
    bandwidth = curvature.bandwidth(filter_lengths(unit, values.stored), KINK).to(z)
    if scale is not None:
        bandwidth = bandwidth * scale.abs()
    norms = _row_norms(unit, values).flatten()
    return unchecked_curvature(g, z, act, scale, last.axis, row_norm=norms, bandwidth=bandwidth)


def _row_norms(unit: Unit, values: Values) -> Tensor:
    """Return |x| of the rows of a linear layer or a convolution, by sample and position."""
    own = unit.filters[0].calls[0]
    call, bias, rows = Call(own.node), float(unit.filters[0].bias is not None), values.rows(own)
    if rows is not None:
        return (torch.linalg.vector_norm(rows, dim=1).square() + bias).sqrt()
    squares = values.of(own.source).square()
    if call.operation != "aten.conv2d":
        return (squares.sum(-1) + bias).sqrt()
    kernel = shape(call["weight"])[2:]
    ones = squares.new_ones(1, 1, *kernel)
    total = F.conv2d(squares.sum(-3, keepdim=True), ones, None, call["stride"], call["padding"], call["dilation"])
    return (total + bias).clamp(min=0).sqrt()


def _tied(
    unit: Unit, values: Values, builder: ChainBuilder, general: ChainOperator, ones: Tensor
) -> SplittingOperator | None:
    """Return the operator of a convolution or linear layer under one maximum over positions; None for others."""
    own = unit.filters[0].calls[0]
    call = Call(own.node)
    ((number, step), *others) = builder.ties.items()
    link = unit.links[number - len(builder.calls)]
    places = builder.places_of(link.sources[0])
    is_maps = call.operation == "aten.conv2d" and ones.dim() == 4 and not isinstance(call["padding"], str)
    is_rows = call.operation == "aten.linear" and ones.dim() > 2
    is_whole = len(unit.filters[0].rows) == ones.shape[1 if is_maps else -1]
    if others or places is None or not is_whole or not (is_maps or is_rows):
        return None
    assert step.kernel is not None
    # What every value compared is of the layer's output: the slopes and scales between the two.
    made = general.tangents([ones])[builder.at[link.sources[0]]]
    winner, runner = builder.tensors[step.winner], builder.tensors[step.runner]

    def by_filter(found: Tensor) -> Tensor:  # (B, M, Q)
        return found.movedim(link.axis, 1).flatten(2) if found.dim() > 2 else found.unsqueeze(2)

    def position(place: Tensor) -> Tensor:
        inside = place % (ones.numel() // len(ones))
        return by_filter(inside % ones[0, 0].numel() if is_maps else inside // ones.shape[-1])

    if link.axis == 0 or len(winner) != len(ones) or winner.shape[link.axis] != unit.width:
        return None
    d1, d2 = by_filter(made.take(winner)), by_filter(made.take(runner))
    K = by_filter(builder.tensors[step.kernel])
    if torch.equal(d1, d2):
        K, same = K * d1.square(), True
    else:
        same = False
    x, rows, C = values.of(own.source), values.rows(own), general.without_ties().curvature_of([ones])[0]
    # Rows are maps whose channels are the entries of the rows.
    geometry: list[tuple[int, ...]] = [(1, 1), (1, 1), (0, 0), (1, 1)]
    if is_rows:
        x, C = (one.flatten(1, -2).mT.unsqueeze(-1) for one in (x, C))
    elif rows is not None:
        x = rows.view(len(ones), *ones.shape[2:], -1).permute(0, 3, 1, 2)
        C = C.contiguous(memory_format=torch.channels_last)
    else:
        geometry = [shape(call["weight"])[2:], *(pair(call[name]) for name in ("stride", "padding", "dilation"))]
    return TiedConvOperator(
        x,
        C,
        first=position(places.take(winner)),
        second=position(places.take(runner)),
        K=K,
        d1=None if same else d1,
        d2=None if same else d2,
        kernel_size=geometry[0],
        stride=geometry[1],
        padding=geometry[2],
        dilation=geometry[3],
        bias=unit.filters[0].bias is not None,
    )


def _gated(unit: Unit, values: Values, general: ChainOperator) -> SplittingOperator | None:
    """Return the operator of two filters per channel that read the same rows; None if they read others."""
    calls = list({call.node: call for one in unit.filters for call in one.calls}.values())
    names = [operation(call.node) for call in calls]
    same = len({call.source for call in calls}) == 1 and len({one.fan_in for one in unit.filters}) == 1
    if (
        len(unit.filters) != 2
        or not same
        or any(name != "aten.linear" or call.views for name, call in zip(names, calls, strict=True))
    ):
        return None
    x = values.of(calls[0].source)
    outputs = [values.of(call.node) for call in calls]
    blocks: list[list[Tensor]] = []
    for which in (0, 1):
        seeds = _seeds(unit, calls, outputs, which)
        products = general.curvature_of(seeds)
        blocks.append([_rows_of(unit, calls, products, other) for other in (0, 1)])
    (c11, c12), (_, c22) = blocks
    bias = unit.filters[0].bias is not None
    return GatedOperator(x.flatten(0, -2), c11, c12, c22 if bool((c22 != 0).any()) else None, bias=bias)


def _joint(unit: Unit, values: Values, general: ChainOperator) -> SplittingOperator | None:
    """Return the operator of filters that see rows of their own at the same positions; None if rows are not known."""
    calls = [one.calls[0] for one in unit.filters]
    rows = [values.rows(call) for call in calls]
    known = [one for one in rows if one is not None]
    if len(known) < len(rows) or len({call.node for call in calls}) < len(calls):
        return None
    outputs = [values.of(call.node) for call in calls]
    C = []
    for a, output in enumerate(outputs):
        seeds = [torch.ones_like(output) if place == a else torch.zeros_like(one) for place, one in enumerate(outputs)]
        for b, product in enumerate(general.curvature_of(seeds)):
            if a <= b:
                places = torch.from_numpy(unit.filters[b].rows).to(product.device)
                C.append(product.index_select(1, places).movedim(1, -1).flatten(0, -2))
    return JointOperator(known, C, bias=[one.bias is not None for one in unit.filters], check_finite=False)


def _seeds(unit: Unit, calls: Sequence[FilterCall], outputs: Sequence[Tensor], which: int) -> list[Tensor]:
    """Return ones at the outputs of one of a unit's filters, zeros elsewhere."""
    own = unit.filters[which]
    seeds = []
    for call, output in zip(calls, outputs, strict=True):
        seed = torch.zeros_like(output)
        if call.node is own.calls[0].node:
            seed[..., torch.from_numpy(own.rows).to(output.device)] = 1
        seeds.append(seed)
    return seeds


def _rows_of(unit: Unit, calls: Sequence[FilterCall], products: Sequence[Tensor], which: int) -> Tensor:
    own = unit.filters[which]
    place = next(place for place, call in enumerate(calls) if call.node is own.calls[0].node)
    product = products[place]
    return product.index_select(-1, torch.from_numpy(own.rows).to(product.device)).flatten(0, -2)


def _on_rows(unit: Unit, values: Values, C: Tensor) -> SplittingOperator:
    """Return the operator of a linear layer or a convolution with these coefficients of its outputs."""
    own = unit.filters[0]
    call = Call(own.calls[0].node)
    rows, bias = values.rows(own.calls[0]), own.bias is not None
    axis = C.dim() - 3 if call.operation == "aten.conv2d" else C.dim() - 1
    if len(own.rows) != C.shape[axis] or (own.rows != range(len(own.rows))).any():
        C = C.index_select(axis, torch.from_numpy(own.rows).to(C.device))
    if rows is not None:
        return PointwiseOperator(rows, C.movedim(1, -1).flatten(0, -2).contiguous(), bias=bias, check_finite=False)
    x = values.of(own.calls[0].source)
    if call.operation == "aten.conv2d":
        geometry = (shape(call["weight"])[2:], call["stride"], call["padding"], call["dilation"])
        return conv_operator(x, C, bias, *geometry)
    return PointwiseOperator(x.flatten(0, -2), C.flatten(0, -2), bias=bias)


def conv_operator(
    x: Tensor, C: Tensor, bias: bool, kernel: tuple[int, ...], stride: Any, padding: Any, dilation: Any
) -> SplittingOperator:
    """Return the operator of a 2-d convolution: on rows if its kernel is 1 x 1 or its patches are few numbers."""
    stride, dilation = pair(stride), pair(dilation)
    if x.dim() == 3:
        x, C = x.unsqueeze(0), C.unsqueeze(0)
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        x = F.pad(x, (total[1] // 2, total[1] - total[1] // 2, total[0] // 2, total[0] - total[0] // 2))
    padding = (0, 0) if isinstance(padding, str) else pair(padding)
    if kernel == (1, 1) and padding == (0, 0):
        rows = x[:, :, :: stride[0], :: stride[1]]
        return PointwiseOperator(
            rows.movedim(1, -1).flatten(0, -2), C.movedim(1, -1).flatten(0, -2).contiguous(), bias=bias
        )
    geometry: dict[str, Any] = {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    if x.shape[1] * kernel[0] * kernel[1] <= C.shape[1]:
        # The patches take no more memory than C. First layers are like this: few channels and many positions. There,
        # products over patches are several times faster than a convolution and its weight gradient.
        patches = F.unfold(x, **geometry)
        return PointwiseOperator(
            patches.mT.flatten(0, 1).contiguous(), C.flatten(2).mT.flatten(0, 1).contiguous(), bias=bias
        )
    return ConvOperator(x, C, **geometry, bias=bias)
