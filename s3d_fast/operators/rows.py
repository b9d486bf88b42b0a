"""Helpers for operators on rows: the restriction to some filters, and the common part of the rows."""

from __future__ import annotations

import copy
import math
from typing import TypeVar

import torch
from torch import Tensor

from s3d_fast.base import dtypes, require
from s3d_fast.operators.operator import SplittingOperator

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
        setattr(rest, name, tensor.index_select(axis, wrapped))
    rest.shape = (len(filters), operator.shape[1])
    return rest


def mean_of_rows(X: Tensor, bias: bool, repeats: int = 1) -> Tensor:
    """Return the mean of the rows in units of their root mean square length: see `SplittingOperator.common_part`.

    A row is the last dimension of X, with every entry repeated `repeats` times, and a 1 for the bias.
    """
    dims, dtype = tuple(range(X.dim() - 1)), dtypes.compute_dtype(X.dtype)
    rows = X.numel() // X.shape[-1]
    mean = X.mean(dims, dtype=dtype).repeat_interleave(repeats)
    length = math.sqrt(repeats / rows) * torch.linalg.vector_norm(X, dtype=dtype)
    if bias:
        mean, length = torch.cat([mean, mean.new_ones(1)]), torch.hypot(length, torch.ones_like(length))
    return mean / length.clamp(min=torch.finfo(dtype).tiny)
