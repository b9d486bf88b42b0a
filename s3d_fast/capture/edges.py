"""EdgeConv layers: winners and runners-up among the edges of every point."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from s3d_fast.capture.curvature import KINK, TIE, Curvature, kernel
from s3d_fast.capture.folding import module_scale
from s3d_fast.capture.values import Values
from s3d_fast.maths.activations import Activation
from s3d_fast.network.edgeconv import EdgeConv
from s3d_fast.network.graph import Unit, filter_lengths, stored_tensors
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
    lengths = filter_lengths(unit, stored_tensors(model))
    x, g = values.of(own.calls[0].source), values.gradient(maximum.graded)
    return _made(layer, x, g, act, maximum.is_shifted, curvature, lengths)


def _made(
    layer: EdgeConv,
    x: Tensor,  # (B, P, F)
    g: Tensor,  # (B, P, M)
    act: Activation,
    is_monotone: bool,
    curvature: Curvature,
    lengths: Tensor,
) -> EdgeConvOperator:
    """Return the operator; a monotone activation with kinks comes behind the maximum."""
    neighbours = layer.neighbours(x)
    z = layer.edges(x, neighbours)
    scale = module_scale(layer.norm).to(x.dtype)
    compared = z if is_monotone else act(z)
    top, slots = compared.topk(min(2, z.shape[-2]), dim=-2)
    z_first, winner = z.gather(-2, slots[..., :1, :]).squeeze(-2), neighbours.gather(-1, slots[..., 0, :])
    distances = _distances(x)
    C = act.curvature(z_first)
    for kink in act.kinks:
        width = _width(curvature, lengths, KINK, scale, _edge_norms(x, distances, winner))
        C = C + kink.jump * kernel(z_first - kink.at, width)
    C = g * C * scale.square()
    if curvature.kind == "paper" or slots.shape[-2] < 2:
        return EdgeConvOperator(x, winner, C)
    runner = neighbours.gather(-1, slots[..., 1, :])
    d1 = d2 = None
    if is_monotone:
        weight = g * act.first(z_first)
        norms = _between(distances, winner, runner).clamp(min=0).sqrt()
    else:
        weight = g
        d1, d2 = act.first(z_first), act.first(z.gather(-2, slots[..., 1:, :]).squeeze(-2))
        norms = _difference_norms(x, distances, winner, runner, d1, d2)
    width = _width(curvature, lengths, TIE, scale, norms)
    K = weight * kernel(top[..., 0, :] - top[..., 1, :], width) * scale.square()
    return EdgeConvOperator(x, winner, C, runner=runner, K=K, d1=d1, d2=d2)


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
