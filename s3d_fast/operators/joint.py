"""Channels that several layers write: their filters see different rows, and meet before the activations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from s3d_fast.backends.arguments import require_joint
from s3d_fast.backends.choice import choose
from s3d_fast.operators.operator import SplittingOperator
from s3d_fast.operators.rows import restricted, squared_lengths, weighted_sizes


class JointOperator(SplittingOperator):
    """Filters theta = [theta_0, theta_1, ...] of several layers: block (a, b) of S is X_a^T diag(C_ab) X_b.

    Row n of every X belongs to the same position; the blocks (a, b) and (b, a) have the same coefficients. Every tensor
    is an attribute of its own (X_0, C_0, ...), as for all operators; `X` and `C` list them.
    """

    CAN_CHANGE_DTYPE = True
    ONLY_LAUNCHES = True
    COEFFICIENTS = ("C_",)

    def __init__(
        self,
        X: Sequence[Tensor],  # n times (N, D_a)
        C: Sequence[Tensor],  # n (n + 1) / 2 times (N, M): for the pairs (0, 0), (0, 1), ..., (1, 1), (1, 2), ...
        *,
        bias: Sequence[bool],
        check_finite: bool = True,
    ) -> None:
        require_joint(X, C, bias, check_finite)
        self.bias = tuple(map(bool, bias))
        self._describe(X[0], C[0], C[0].shape[1], sum(x.shape[1] + one for x, one in zip(X, self.bias, strict=True)))
        for name, tensors in (("X", X), ("C", C)):
            for number, tensor in enumerate(tensors):
                setattr(self, f"{name}_{number}", tensor)

    @property
    def X(self) -> list[Tensor]:
        """The rows of every layer."""
        return [getattr(self, f"X_{number}") for number in range(len(self.bias))]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The layers that every tensor of coefficients belongs to."""
        count = len(self.bias)
        return [(a, b) for a in range(count) for b in range(a, count)]

    @property
    def C(self) -> list[Tensor]:
        """The coefficients of every pair of layers."""
        return [getattr(self, f"C_{number}") for number in range(len(self.pairs))]

    def matvec(self, V: Tensor, backend: str = "auto") -> Tensor:
        self._require_vectors(V)
        X, C = self.X, self.C
        return choose(backend, *X, *C, differentiable=(V,)).joint_matvec(X=X, C=C, V=V, bias=self.bias)

    def restrict(self, filters: Tensor) -> JointOperator:
        return restricted(self, filters, **{f"C_{number}": 1 for number in range(len(self.pairs))})

    def magnitude(self) -> Tensor:
        lengths = [squared_lengths(rows, one).sqrt() for rows, one in zip(self.X, self.bias, strict=True)]
        total = torch.zeros(self.shape[0], dtype=self.dtype, device=self.device)
        for (a, b), C in zip(self.pairs, self.C, strict=True):
            total += weighted_sizes(C, lengths[a] * lengths[b]) * (1 if a == b else 2)
        return total
