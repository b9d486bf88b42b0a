"""Convolutions with maxima over positions behind them, such as MaxPool or the maximum over a cloud."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from s3d_fast.backends.arguments import require_pool_ties
from s3d_fast.backends.choice import choose
from s3d_fast.maths.reference import PoolTies
from s3d_fast.operators.conv import ConvOperator
from s3d_fast.operators.rows import restricted


class TiedConvOperator(ConvOperator):
    """The filters of a 2-d convolution under maxima: patches as in `ConvOperator`, and the near ties of every maximum.

    S = sum_n C_n x_n x_n^T + sum_q K_q e_q e_q^T with e = d1 x[first] - d2 x[second]. Rows of B clouds, (B, P, D), are
    maps X (B, D, P, 1) of a 1 x 1 convolution.
    """

    def __init__(
        self,
        X: Tensor,  # (B, I, H, W)
        C: Tensor,  # (B, M, H', W')
        *,
        first: Tensor,  # (B, M, Q), int64, positions in [0, H' W')
        second: Tensor,  # (B, M, Q), int64
        K: Tensor,  # (B, M, Q)
        d1: Tensor | None = None,  # (B, M, Q)
        d2: Tensor | None = None,  # (B, M, Q)
        kernel_size: Sequence[int] = (1, 1),
        stride: Sequence[int] = (1, 1),
        padding: Sequence[int] = (0, 0),
        dilation: Sequence[int] = (1, 1),
        bias: bool = False,
        check_finite: bool = True,
    ) -> None:
        super().__init__(
            X,
            C,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            bias=bias,
            check_finite=check_finite,
        )
        require_pool_ties(X, C, PoolTies(first, second, K, d1, d2), check_finite)
        self.first, self.second, self.K, self.d1, self.d2 = first, second, K, d1, d2

    def matvec(self, V: Tensor, backend: str = "auto") -> Tensor:
        self._require_vectors(V)
        ties = PoolTies(self.first, self.second, self.K, self.d1, self.d2)
        chosen = choose(backend, self.C, self.K, self.d1, self.d2, differentiable=(self.X, V))
        return chosen.tied_matvec(X=self.X, C=self.C, V=V, ties=ties, geometry=self.geometry, bias=self.bias)

    def magnitude(self) -> Tensor:
        """Return A_j, with |d1 x[first]|^2 + |d2 x[second]|^2 for |e|^2 / 2 in every tie."""
        squares = self._squares().flatten(1)[:, None].expand(-1, self.shape[0], -1)
        first, second = squares.gather(2, self.first), squares.gather(2, self.second)
        if self.d1 is not None and self.d2 is not None:
            first, second = first * self.d1.square(), second * self.d2.square()
        return super().magnitude() + 2 * (self.K.abs() * (first + second)).sum((0, 2))

    def restrict(self, filters: Tensor) -> TiedConvOperator:
        slopes = {} if self.d1 is None else {"d1": 1, "d2": 1}
        rest = restricted(self, filters, C=1, first=1, second=1, K=1, **slopes)
        if self.C.is_contiguous(memory_format=torch.channels_last):
            # Products with windows of rows read them in this order.
            rest.C = rest.C.contiguous(memory_format=torch.channels_last)
        return rest
