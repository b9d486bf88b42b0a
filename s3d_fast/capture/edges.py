"""EdgeConv layers: winners and runners-up among the edges of every point."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from s3d_fast.backends.operations import top_two
from s3d_fast.capture.curvature import KINK, TIE, Curvature, kernel
from s3d_fast.capture.folding import module_scale
from s3d_fast.capture.values import Values
from s3d_fast.maths.activations import Activation
from s3d_fast.network.calls import operation
from s3d_fast.network.edgeconv import EdgeConv
from s3d_fast.network.graph import Unit, filter_lengths
from s3d_fast.operators import EdgeConvOperator


def edgeconv_operator(unit: Unit, values: Values, model: nn.Module, curvature: Curvature) -> EdgeConvOperator | None:
    """Return the operator of an EdgeConv layer; None if the unit is none, or more activations follow."""
    curved = [link for link in unit.links if link.is_curved]
    if unit.kind != "edgeconv" or sorted(link.kind for link in curved) != ["curve", "maximum"]:
        return None
    layer = model.get_submodule(unit.name)
    act = next(link.activation for link in curved if link.kind == "curve")
    maximum = next(link for link in curved if link.kind == "maximum")
    if not isinstance(layer, EdgeConv) or act is None or maximum.graded is None:
        return None
    own = unit.filters[0]
    if own.row_axis != 0 or len(own.rows) != layer.out_features or list(own.rows) != list(range(len(own.rows))):
        return None
    lengths = filter_lengths(unit, values.stored)
    x, g = values.of(own.calls[0].source), values.gradient(maximum.graded)
    return _made(layer, _graph_of(unit, values), x, g, act, maximum.is_shifted, curvature, lengths)


def _graph_of(unit: Unit, values: Values) -> tuple[Tensor, Tensor]:
    """Return the neighbours of every point, (B, P, k), and what the activation reads on the edges, (B, P, k, M)."""
    nodes = [node for link in unit.links for node in link.node.all_input_nodes]
    (search,) = {node for node in nodes if operation(node) == "s3d_network.nearest_points"}
    neighbours = values.of(search)
    link, calls = next(link for link in unit.links if link.is_curved), len(unit.filters[0].calls)
    # Views between an activation and a maximum that changed places hold values behind the activation.
    while link.is_shifted or link.is_curved:
        link = unit.links[link.sources[0] - calls]
    return neighbours, values.of(link.node).reshape(*neighbours.shape, -1)


def _made(
    layer: EdgeConv,
    graph: tuple[Tensor, Tensor],
    x: Tensor,  # (B, P, F)
    g: Tensor,  # (B, P, M)
    act: Activation,
    is_monotone: bool,
    curvature: Curvature,
    lengths: Tensor,
) -> EdgeConvOperator:
    """Return the operator; a monotone activation with kinks comes behind the maximum."""
    neighbours, z = graph
    scale = module_scale(layer.norm).to(x.dtype)
    compared = z if is_monotone else act(z)
    is_contest = z.shape[-2] > 1
    slots = _top_two(compared) if is_contest else [torch.zeros_like(g, dtype=torch.int64)]
    z_first, winner = _at(z, slots[0]), neighbours.gather(-1, slots[0])
    distances = _distances(x)
    C = act.curvature(z_first)
    for kink in act.kinks:
        width = _width(curvature, lengths, KINK, scale, _edge_norms(x, distances, winner))
        C = C + kink.jump * kernel(z_first - kink.at, width)
    C = g * C * scale.square()
    if curvature.kind == "paper" or not is_contest:
        return EdgeConvOperator(x, winner, C)
    runner = neighbours.gather(-1, slots[1])
    d1 = d2 = None
    if is_monotone:
        weight = g * act.first(z_first)
        norms = _between(distances, winner, runner).clamp(min=0).sqrt()
    else:
        weight = g
        d1, d2 = act.first(z_first), act.first(_at(z, slots[1]))
        norms = _difference_norms(x, distances, winner, runner, d1, d2)
    width = _width(curvature, lengths, TIE, scale, norms)
    gap = _at(compared, slots[0]) - _at(compared, slots[1])
    K = weight * kernel(gap, width) * scale.square()
    return EdgeConvOperator(x, winner, C, runner=runner, K=K, d1=d1, d2=d2)


def _top_two(values: Tensor) -> list[Tensor]:  # (B, P, k, M) -> (B, P, M) each
    """Return the slots of winners and runners-up among the edges of every point."""
    return [slots.unflatten(0, values.shape[:2]) for slots in top_two(values.flatten(0, 1))]


def _at(values: Tensor, slots: Tensor) -> Tensor:  # (B, P, k, M), (B, P, M) -> (B, P, M)
    return values.gather(-2, slots.unsqueeze(-2)).squeeze(-2)


def _width(curvature: Curvature, lengths: Tensor, factor: float, scale: Tensor, norms: Tensor) -> Tensor:
    fixed = curvature.fixed_sharpness
    if fixed is not None:
        return torch.full_like(norms, 1 / fixed)
    return curvature.bandwidth(lengths, factor).to(norms) * scale.abs() * norms


def _distances(x: Tensor) -> Tensor:  # (B, P, P)
    """Return the squared distances between all points."""
    square = x.square().sum(-1)
    return (square.unsqueeze(-1) + square.unsqueeze(-2) - 2 * (x @ x.mT)).clamp(min=0)


def _edge_norms(x: Tensor, distances: Tensor, winner: Tensor) -> Tensor:  # (B, P, M)
    """Return |[x_j - x_i, x_i]| for the neighbours j of every point."""
    return (distances.gather(-1, winner) + x.square().sum(-1, keepdim=True)).sqrt()


def _between(distances: Tensor, first: Tensor, second: Tensor) -> Tensor:  # (B, P, M)
    """Return the squared distances between two neighbours of every point."""
    clouds = torch.arange(len(distances), device=distances.device)[:, None, None]
    return distances[clouds, first, second]


def _difference_norms(
    x: Tensor, distances: Tensor, first: Tensor, second: Tensor, d1: Tensor, d2: Tensor
) -> Tensor:  # (B, P, M)
    """Return |d1 [x_j - x_i, x_i] - d2 [x_k - x_i, x_i]|."""
    a, b = distances.gather(-1, first), distances.gather(-1, second)
    inner = (a + b - _between(distances, first, second)) / 2
    own = x.square().sum(-1, keepdim=True)
    return (d1 * d1 * a + d2 * d2 * b - 2 * d1 * d2 * inner + (d1 - d2).square() * own).clamp(min=0).sqrt()
