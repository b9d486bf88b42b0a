"""The winning edges, sorted by the point they come in at: EdgeConv's scatter becomes sums in a fixed order."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Incoming(NamedTuple):
    """For every filter, the points sorted by the neighbour that won their maximum; all int32."""

    winner: Tensor  # (B, P, M)
    order: Tensor  # (B, P, M): the points of a cloud in the order of their winners
    start: Tensor  # (B, P + 1, M): the place in `order` of the first point with this winner

    def restrict(self, filters: Tensor) -> Incoming:
        """Return the edges of the given filters."""
        return Incoming(*(tensor[..., filters].contiguous() for tensor in self))


def incoming_edges(winner: Tensor) -> Incoming:  # (B, P, M), int32 or int64
    """Return the winning edges, sorted by the point they come in at. All products with a layer can share them."""
    ordered, order = winner.mT.contiguous().sort(stable=True)
    points = torch.arange(winner.shape[1] + 1, dtype=winner.dtype, device=winner.device).expand(*order.shape[:2], -1)
    start = torch.searchsorted(ordered, points.contiguous())
    return Incoming(winner.to(torch.int32).contiguous(), _int32(order.mT), _int32(start.mT))


def _int32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.int32).contiguous()
