"""Pointwise layers with depthwise convolutions behind them: the curvature of all activations in one product."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import conv2d

from s3d_fast.backends.arguments import require_depthwise
from s3d_fast.backends.choice import choose
from s3d_fast.maths.reference import DepthwiseStage
from s3d_fast.operators.operator import SplittingOperator
from s3d_fast.operators.rows import restricted, squared_lengths


class DepthwiseOperator(SplittingOperator):
    """Pointwise filters that stages of a depthwise convolution and an activation follow: S = sum_i J_i^T C_i J_i.

    Every tensor is an attribute of its own (C_0, d_0, weight_0, ...), as for all operators; `C`, `d` and `weight` list
    them.
    """

    CAN_CHANGE_DTYPE = True
    ONLY_LAUNCHES = True
    COEFFICIENTS = ("C_",)
    PER_FILTER = ("weight_",)
    WIDE_ROWS = ("X",)

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

    def magnitude(self) -> Tensor:
        """Return an upper bound of A_j: the lengths of J_i pass every stage with their absolute values."""
        lengths = squared_lengths(self.X, self.bias).sqrt().view(*self.C[0].shape[:3], 1)
        total = (self.C[0].abs() * lengths.square()).sum((0, 1, 2))
        for C, d, weight, stage in zip(self.C[1:], self.d, self.weight, self.stages, strict=True):
            seen = (d.abs() * lengths).movedim(3, 1).to(self.dtype)
            kernel = weight.abs().unsqueeze(1).to(self.dtype)
            passed = conv2d(seen, kernel, None, stage.stride, stage.padding, stage.dilation, self.shape[0])
            lengths = passed.movedim(1, 3)
            total = total + (C.abs() * lengths.square()).sum((0, 1, 2))
        return total.to(self.dtype)
