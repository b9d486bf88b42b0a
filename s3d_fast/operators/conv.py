"""Convolutions of any kernel size: rows are the patches of the input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from s3d_fast.backends.arguments import require_conv
from s3d_fast.backends.choice import choose
from s3d_fast.operators.operator import SplittingOperator
from s3d_fast.operators.rows import restricted


class ConvOperator(SplittingOperator):
    """The filters of a 2-d convolution of any kernel size; its rows are the patches of X."""

    CAN_CHANGE_DTYPE = True
    ONLY_LAUNCHES = True
    COEFFICIENTS = ("C", "K")

    def __init__(
        self,
        X: Tensor,  # (B, I, H, W)
        C: Tensor,  # (B, M, H', W')
        *,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (1, 1),
        padding: Sequence[int] = (0, 0),
        dilation: Sequence[int] = (1, 1),
        bias: bool = False,
        check_finite: bool = True,
    ) -> None:
        self.geometry = require_conv(X, C, kernel_size, stride, padding, dilation, check_finite)
        self._describe(X, C, C.shape[1], X.shape[1] * self._taps + bias)
        self.X, self.C, self.bias = X, C, bias

    @property
    def kernel_size(self) -> tuple[int, int]:
        """The height and width of the kernel."""
        return self.geometry.kernel_size

    @property
    def stride(self) -> tuple[int, int]:
        """The steps between patches."""
        return self.geometry.stride

    @property
    def padding(self) -> tuple[int, int]:
        """The zeros added at each border."""
        return self.geometry.padding

    @property
    def dilation(self) -> tuple[int, int]:
        """The steps between the entries of a patch."""
        return self.geometry.dilation

    @property
    def _taps(self) -> int:
        return self.geometry.kernel_size[0] * self.geometry.kernel_size[1]

    def matvec(self, V: Tensor, backend: str = "auto") -> Tensor:
        self._require_vectors(V)
        chosen = choose(backend, differentiable=(self.X, self.C, V))
        return chosen.conv_matvec(X=self.X, C=self.C, V=V, geometry=self.geometry, bias=self.bias)

    def restrict(self, filters: Tensor) -> ConvOperator:
        return restricted(self, filters, C=1)

    def magnitude(self) -> Tensor:
        return torch.einsum("bmhw,bhw->m", self.C.abs().to(self.dtype), self._squares())

    def _squares(self) -> Tensor:  # (B, H', W')
        """Return |x|^2 of every patch."""
        squares = self.X.to(self.dtype).square().sum(1, keepdim=True)
        ones = squares.new_ones(1, 1, *self.kernel_size)
        total = conv2d(squares, ones, None, self.stride, self.padding, self.dilation).squeeze(1)
        return total.clamp(min=0) + self.bias
