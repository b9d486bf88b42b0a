"""Rows as the kernels for GPUs want them: zeros follow every row, so that kernels load whole vectors of any width."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from s3d_fast.backends.choice import choose
from s3d_fast.base.padding import MULTIPLE, is_padded, padded_size, with_padding
from s3d_fast.operators.operator import SplittingOperator
from s3d_fast.operators.stacked import StackedOperator
from s3d_fast.operators.sums import SumOperator


def aligned_where_faster(operators: Sequence[SplittingOperator], backend: str) -> list[SplittingOperator]:
    """Return the operators, with copies of rows that the kernels of a GPU would else copy for every product.

    An operator stays as it is where its device has no room for the copies.
    """
    return [_aligned(operator, backend) for operator in operators]


def _aligned(operator: SplittingOperator, backend: str) -> SplittingOperator:
    if isinstance(operator, StackedOperator):
        return StackedOperator(_aligned(operator.whole, backend), operator.lengths)
    if isinstance(operator, SumOperator):
        return SumOperator([_aligned(term, backend) for term in operator.terms], operator.weights)
    rows = {name: getattr(operator, name) for name in operator.WIDE_ROWS}
    # Vectors on their way to tensor cores are float32 or shorter.
    short = {name: X for name, X in rows.items() if X is not None and X.dtype != torch.float64 and not _is_aligned(X)}
    if not short or choose(backend, *short.values()).name != "triton" or not _has_room(list(short.values())):
        return operator
    other = copy.copy(operator)
    for name, X in short.items():
        setattr(other, name, with_padding(X))
    return other


def _is_aligned(X: Tensor) -> bool:
    return is_padded(X) or (X.is_contiguous() and X.shape[-1] % MULTIPLE == 0)


def _has_room(rows: Sequence[Tensor]) -> bool:
    device = rows[0].device
    if device.type != "cuda":
        return True
    wanted = sum(X.numel() // X.shape[-1] * padded_size(X.shape[-1]) * X.itemsize for X in rows)
    free, _ = torch.cuda.mem_get_info(device)
    # PyTorch keeps memory that it does not use.
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return wanted <= (free + kept) // 2
