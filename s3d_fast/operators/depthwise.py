"""Pointwise layers with depthwise convolutions behind them: the curvature of all activations in one product."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from s3d_fast.backends.arguments import require_depthwise
from s3d_fast.backends.choice import choose
from s3d_fast.maths.reference import DepthwiseStage
from s3d_fast.operators.operator import SplittingOperator
from s3d_fast.operators.rows import mean_of_rows, restricted


class DepthwiseOperator(SplittingOperator):
    """Pointwise filters that stages of a depthwise convolution and an activation follow: S = sum_i J_i^T C_i J_i.

    Every tensor is an attribute of its own (C_0, d_0, weight_0, ...), as for all operators; `C`, `d` and `weight` list
    them.
    """

    def __init__(
        self,
        X: Tensor,  # (B H W, D)
        C: Sequence[Tensor],  # n + 1 times (B, H_i, W_i, M)
        d: Sequence[Tensor],  # n times (B, H_i, W_i, M)
        weight: Sequence[Tensor],  # n times (M, kh, kw)
        *,
        stages: Sequence[DepthwiseStage],
        bias: bool = False,
        check_finite: bool = True,
    ) -> None:
        require_depthwise(X, C, d, weight, stages, check_finite)
        self._describe(X, C[0], C[0].shape[3], X.shape[1] + bias)
        self.X, self.stages, self.bias = X, tuple(stages), bias
        for name, tensors in (("C", C), ("d", d), ("weight", weight)):
            for number, tensor in enumerate(tensors):
                setattr(self, f"{name}_{number}", tensor)

    @property
    def C(self) -> list[Tensor]:
        """The curvature coefficients of every activation."""
        return [getattr(self, f"C_{number}") for number in range(len(self.stages) + 1)]

    @property
    def d(self) -> list[Tensor]:
        """The slopes of every activation but the last."""
        return [getattr(self, f"d_{number}") for number in range(len(self.stages))]

    @property
    def weight(self) -> list[Tensor]:
        """The weights of the depthwise convolutions."""
        return [getattr(self, f"weight_{number}") for number in range(len(self.stages))]

    def matvec(self, V: Tensor, backend: str = "auto") -> Tensor:
        self._require_vectors(V)
        C, d, weight = self.C, self.d, self.weight
        chosen = choose(backend, self.X, *C, *d, *weight, differentiable=(V,))
        return chosen.depthwise_matvec(X=self.X, C=C, d=d, weight=weight, stages=self.stages, V=V, bias=self.bias)

    def restrict(self, filters: Tensor) -> DepthwiseOperator:
        numbers = range(len(self.stages))
        maps = {f"{name}_{number}": 3 for name in ("C", "d") for number in numbers}
        weights = {f"weight_{number}": 0 for number in numbers}
        return restricted(self, filters, **maps, **weights, **{f"C_{len(self.stages)}": 3})

    def common_part(self) -> Tensor:
        return mean_of_rows(self.X, self.bias)
