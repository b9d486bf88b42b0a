"""Rows in bfloat16: the same operators at about half the cost, where the processor multiplies bfloat16 numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from s3d_fast.backends import extension
from s3d_fast.backends.cpu import is_on_rows
from s3d_fast.operators.joint import JointOperator
from s3d_fast.operators.operator import SplittingOperator
from s3d_fast.operators.pointwise import PointwiseOperator
from s3d_fast.operators.stacked import StackedOperator
from s3d_fast.operators.sums import SumOperator
from s3d_fast.operators.tied import TiedConvOperator

# Filters and columns from which products in bfloat16 pay for the rounding of the rows.
LEAST_WIDTH = 64


def rounded_where_faster(operators: Sequence[SplittingOperator]) -> list[SplittingOperator]:
    """Return the operators, with rows and coefficients in bfloat16 where products then take less time."""
    return [_rounded(operator) for operator in operators] if extension.has_bfloat16_products() else list(operators)


def _rounded(operator: SplittingOperator) -> SplittingOperator:
    is_wide = min(operator.shape) >= LEAST_WIDTH
    if not is_wide or operator.dtype != torch.float32 or operator.device.type != "cpu":
        return operator
    if isinstance(operator, StackedOperator):
        return StackedOperator(_rounded(operator.whole), operator.lengths)
    if isinstance(operator, SumOperator):
        return SumOperator([_rounded(term) for term in operator.terms], operator.weights)
    has_products = isinstance(operator, PointwiseOperator | JointOperator) or (
        isinstance(operator, TiedConvOperator) and is_on_rows(operator.X, operator.geometry)
    )
    return operator.stored_as(torch.bfloat16) if has_products else operator
