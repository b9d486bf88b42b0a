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
from s3d_fast.network.graph import FilterCall, Unit, filter_lengths, stored_tensors
from s3d_fast.operators import (
    ChainOperator,
    ConvOperator,
    GatedOperator,
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
    if builder.is_pair:
        gated = _gated(unit, values, general)
        if gated is not None:
            return gated
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
    bandwidth = curvature.bandwidth(filter_lengths(unit, stored_tensors(model)), KINK).to(z)
    if scale is not None:
        bandwidth = bandwidth * scale.abs()
    norms = _row_norms(unit, values).flatten()
    return unchecked_curvature(g, z, act, scale, last.axis, row_norm=norms, bandwidth=bandwidth)


def _row_norms(unit: Unit, values: Values) -> Tensor:
    """Return |x| of the rows of a linear layer or a convolution, by sample and position."""
    call, bias = Call(unit.filters[0].calls[0].node), float(unit.filters[0].bias is not None)
    squares = values.of(unit.filters[0].calls[0].source).square()
    if call.operation != "aten.conv2d":
        return (squares.sum(-1) + bias).sqrt()
    kernel = shape(call["weight"])[2:]
    ones = squares.new_ones(1, 1, *kernel)
    total = F.conv2d(squares.sum(-3, keepdim=True), ones, None, call["stride"], call["padding"], call["dilation"])
    return (total + bias).clamp(min=0).sqrt()


def _tied(
    unit: Unit, values: Values, builder: ChainBuilder, general: ChainOperator, ones: Tensor
) -> SplittingOperator | None:
    """Return the operator of a convolution under one maximum over positions; None for other maxima."""
    call = Call(unit.filters[0].calls[0].node)
    ((number, step), *others) = builder.ties.items()
    source = unit.links[number - len(builder.calls)].sources[0]
    is_whole = call.operation == "aten.conv2d" and ones.dim() == 4 and len(unit.filters[0].rows) == ones.shape[1]
    if others or not is_whole or not builder.is_direct[source] or isinstance(call["padding"], str):
        return None
    assert step.kernel is not None
    # What every value compared is of the layer's output: the slopes and scales between the two.
    made = general.tangents([ones])[builder.at[source]]
    winner, runner = builder.tensors[step.winner], builder.tensors[step.runner]
    d1, d2 = made.take(winner).flatten(2), made.take(runner).flatten(2)
    positions = ones.shape[2] * ones.shape[3]
    K = builder.tensors[step.kernel].flatten(2)
    if torch.equal(d1, d2):
        K, same = K * d1.square(), True
    else:
        same = False
    return TiedConvOperator(
        values.of(unit.filters[0].calls[0].source),
        general.without_ties().curvature_of([ones])[0],
        first=winner.flatten(2) % positions,
        second=runner.flatten(2) % positions,
        K=K,
        d1=None if same else d1,
        d2=None if same else d2,
        kernel_size=shape(call["weight"])[2:],
        stride=pair(call["stride"]),
        padding=pair(call["padding"]),
        dilation=pair(call["dilation"]),
        bias=unit.filters[0].bias is not None,
    )


def _gated(unit: Unit, values: Values, general: ChainOperator) -> SplittingOperator | None:
    """Return the operator of two filters per channel that read the same rows; None if they read others."""
    calls = list({call.node: call for one in unit.filters for call in one.calls}.values())
    names = [operation(call.node) for call in calls]
    same = len({call.source for call in calls}) == 1 and len({one.fan_in for one in unit.filters}) == 1
    if not same or any(name != "aten.linear" or call.views for name, call in zip(names, calls, strict=True)):
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
    x, bias = values.of(own.calls[0].source), own.bias is not None
    axis = C.dim() - 3 if call.operation == "aten.conv2d" else C.dim() - 1
    if len(own.rows) != C.shape[axis] or (own.rows != range(len(own.rows))).any():
        C = C.index_select(axis, torch.from_numpy(own.rows).to(C.device))
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
