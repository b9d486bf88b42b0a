"""Rounding errors of products S v: a bound that holds under cancellation; products in float64 where it is too wide."""

from __future__ import annotations

import torch
from torch import Tensor

from s3d_fast.operators import SplittingOperator

# The error of a product, in units of the machine epsilon times sum_n |C_n| |x_n|^2.
ROUNDING = 5
# What underflow may add to a product, in units of the smallest normal number.
UNDERFLOW = 16


def rounding_error(operator: SplittingOperator, values: Tensor) -> Tensor:  # (2, M) -> (M,)
    """Return a bound of the rounding errors of products with each filter whose extreme eigenvalues are `values`.

    Where the operator does not know its magnitude, nothing is assumed to cancel.
    """
    size = operator.magnitude()
    size = values.abs().amax(0) if size is None else size.to(values)
    numbers = torch.finfo(operator.dtype)
    return torch.where(size > 0, ROUNDING * numbers.eps * size + UNDERFLOW * numbers.tiny, 0)


def in_double(operator: SplittingOperator, V: Tensor, filters: Tensor, backend: str) -> tuple[Tensor, Tensor] | None:
    """Return v^T S v and |S v - (v^T S v) v| by a product in float64, (2, m) each; None if the operator cannot do it.

    Args:
        operator: an operator of M filters.
        V: (2, m, D), vectors of some of them.
        filters: (m,), which.
        backend: the name of the backend.
    """
    if operator.dtype == torch.float64 or operator.provider is not None:
        return None
    V = V.double()
    SV = torch.zeros_like(V)
    for term, weight in operator.weighted_terms():
        if term.provider is not None or not type(term).CAN_CHANGE_DTYPE:
            return None
        # One batch at a time: in float64 it takes twice the memory.
        SV.add_(term.restrict(filters).in_dtype(torch.float64).matvec(V, backend), alpha=weight)
    quotients = (V * SV).sum(-1)
    errors = (SV - quotients.unsqueeze(-1) * V).norm(dim=-1)
    size = operator.magnitude()
    assert size is not None
    return quotients, errors + ROUNDING * torch.finfo(torch.float64).eps * size[filters].double()
