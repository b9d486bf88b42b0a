"""Operators whose rows are stored as a backend's products read them, so that no product has to copy them."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from s3d_fast.backends.choice import choose
from s3d_fast.operators.operator import SplittingOperator
from s3d_fast.operators.stacked import StackedOperator
from s3d_fast.operators.sums import SumOperator


def prepared_where_faster(operators: Sequence[SplittingOperator], backend: str) -> list[SplittingOperator]:
    """Return the operators, with copies of rows that the backend would else make for every product.

    An operator stays as it is where its device has no room for the copies.
    """
    return [_prepared(operator, backend) for operator in operators]


def _prepared(operator: SplittingOperator, backend: str) -> SplittingOperator:
    if isinstance(operator, StackedOperator):
        return StackedOperator(_prepared(operator.whole, backend), operator.lengths)
    if isinstance(operator, SumOperator):
        return SumOperator([_prepared(term, backend) for term in operator.terms], operator.weights)
    rows = {name: X for name in operator.WIDE_ROWS if (X := getattr(operator, name)) is not None}
    if not rows:
        return operator
    own = choose(backend, *rows.values())
    sizes = {name: own.prepared_bytes(X, name == operator.WIDE_ROWS[0]) for name, X in rows.items()}
    if not any(sizes.values()) or not _has_room(sum(sizes.values()), next(iter(rows.values())).device):
        return operator
    other = copy.copy(operator)
    for name, size in sizes.items():
        if size:
            setattr(other, name, own.prepared(rows[name], name == operator.WIDE_ROWS[0]))
    return other


def _has_room(wanted: int, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    # PyTorch keeps memory that it does not use.
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return wanted <= (free + kept) // 2
