"""Helpers for operators on rows: the restriction to some filters, and the size of the sums over rows."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor

from s3d_fast.base import dtypes, require
from s3d_fast.base.padding import is_padded, with_padding
from s3d_fast.operators.operator import SplittingOperator

# Rows at a time: their coefficients fit into a processor's cache.
BLOCK = 4096

Operator = TypeVar("Operator", bound=SplittingOperator)


def restricted(operator: Operator, filters: Tensor, **axes: int) -> Operator:
    """Return the operator restricted to some filters; `axes` maps the names of its tensors to their filter axis.

    Nothing is checked: the checks made when the operator was built hold for its parts too.
    """
    if len(filters) == 0:
        require.not_empty("filters", filters)
    rest = copy.copy(operator)
    for name, axis in axes.items():
        tensor = getattr(operator, name)
        wrapped = torch.where(filters < 0, filters + tensor.shape[axis], filters)
        # Same as indexing, but faster.
        own = tensor.index_select(axis, wrapped)
        setattr(rest, name, with_padding(own) if is_padded(tensor) else own)
    rest.shape = (len(filters), operator.shape[1])
    return rest


def squared_lengths(X: Tensor, bias: bool) -> Tensor:
    """Return |x|^2 of every row, a 1 for the bias included; a row is the last dimension of X."""
    lengths = torch.linalg.vector_norm(X, dim=-1, dtype=dtypes.compute_dtype(X.dtype)).square()
    return lengths + 1 if bias else lengths


def weighted_sizes(C: Tensor, squares: Tensor) -> Tensor:  # (N, M), (N,) -> (M,)
    """Return sum_n |C_nj| squares_n for every filter j, block by block: |C| as a whole may be large."""
    total = torch.zeros(C.shape[1], dtype=squares.dtype, device=C.device)
    for rows, own in zip(C.split(BLOCK), squares.split(BLOCK), strict=True):
        total += own @ rows.abs().to(squares.dtype)
    return total
