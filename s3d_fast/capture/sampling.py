"""Rows by sampling: a few positions of every sample stand for all of them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from s3d_fast.base import require
from s3d_fast.capture.draws import Draw
from s3d_fast.capture.values import Values
from s3d_fast.capture.windows import WindowValues, windowed
from s3d_fast.maths import reference
from s3d_fast.network.graph import Unit
from s3d_fast.operators import GatedOperator, OwnRowsOperator, PointwiseOperator, SplittingOperator, TiedConvOperator

# Filters may have rows of their own, for the ties of maxima, as long as these are at most so many times the positions.
MOST_OWN_ROWS = 8


@dataclass(frozen=True)
class Sampling:
    """Keeps about `rows_per_sample` rows of every sample; the expectation of S is that of all rows.

    The draw depends on the batch and the unit alone, so a batch that is captured again gives the same rows.
    """

    rows_per_sample: int

    def __post_init__(self) -> None:
        require.count("rows_per_sample", self.rows_per_sample)

    def windows(self, unit: Unit, values: Values, batch: int) -> tuple[Unit, WindowValues] | None:
        """Return a unit and its values on some positions of its maps; None if it is not on maps, or keeps all."""
        return windowed(unit, values, self.rows_per_sample, _seed(unit.name, batch))

    def rows(self, operator: SplittingOperator, samples: int, unit: str, batch: int) -> SplittingOperator:
        """Return the operator on some rows of every sample; forms whose filters do not share rows keep all."""
        if isinstance(operator, TiedConvOperator):
            return self._under_maxima(operator, unit, batch)
        if not isinstance(operator, (PointwiseOperator, GatedOperator)):
            return operator
        length, rest = divmod(len(operator.X), samples)
        if rest or length <= self.rows_per_sample:
            return operator
        drawn = Draw.of(samples, length, self.rows_per_sample, operator.device, _seed(unit, batch))
        rows = drawn.rows(length)
        X = operator.X.index_select(0, rows)

        def kept(C: Tensor) -> Tensor:
            return C.index_select(0, rows).mul_(drawn.weights(C))

        if isinstance(operator, PointwiseOperator):
            return PointwiseOperator(X, kept(operator.C), bias=operator.bias, check_finite=False)
        c22 = None if operator.c22 is None else kept(operator.c22)
        return GatedOperator(X, kept(operator.c11), kept(operator.c12), c22, bias=operator.bias, check_finite=False)

    def _under_maxima(self, operator: TiedConvOperator, unit: str, batch: int) -> SplittingOperator:
        """Return some rows of every sample for the curvature at positions; the ties of large maxima are all kept."""
        is_on_rows = operator.geometry == ((1, 1), (1, 1), (0, 0), (1, 1))
        samples, width, *size = operator.X.shape
        positions, filters = size[0] * size[1], operator.shape[0]
        ties = operator.K.shape[2]
        if not is_on_rows or positions <= self.rows_per_sample or filters * ties > MOST_OWN_ROWS * positions:
            return operator
        # These are views if the layer reads rows.
        X = operator.X.flatten(2).mT.reshape(-1, width)
        C = operator.C.flatten(2).mT.reshape(-1, filters)
        drawn = Draw.of(samples, positions, self.rows_per_sample, operator.device, _seed(unit, batch))
        rows = drawn.rows(positions)
        kept = C.index_select(0, rows).mul_(drawn.weights(C))

        first_row = torch.arange(samples, device=operator.device)[:, None, None] * positions

        def compared(place: Tensor, slope: Tensor | None) -> Tensor:  # (B Q, M, D)
            found = X.index_select(0, (place + first_row).mT.flatten())
            found = reference.with_ones(found) if operator.bias else found
            found = found if slope is None else found.mul_(slope.mT.reshape(-1, 1))
            return found.view(samples * ties, filters, -1)

        E = compared(operator.first, operator.d1).sub_(compared(operator.second, operator.d2))
        K = operator.K.mT.reshape(-1, filters)
        return OwnRowsOperator(X.index_select(0, rows), kept, E, K, bias=operator.bias, check_finite=False)


def _seed(unit: str, batch: int) -> int:
    return zlib.crc32(f"{batch} {unit}".encode())
