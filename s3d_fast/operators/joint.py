"""Channels that several layers write: their filters see different rows, and meet before the activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from s3d_fast.base import dtypes, require
from s3d_fast.operators.operator import SplittingOperator
from s3d_fast.operators.rows import restricted, squared_lengths, weighted_sizes


class JointOperator(SplittingOperator):
    """Filters theta = [theta_0, theta_1, ...] of several layers: block (a, b) of S is X_a^T diag(C_ab) X_b.

    Row n of every X belongs to the same position. The blocks (a, b) and (b, a) have the same coefficients, given for
    a <= b; those left out are zero. A product is ((X_a V_a^T) * C_ab summed over a)^T X_b: plain PyTorch, two matrix
    products per layer.
    """

    CAN_CHANGE_DTYPE = True
    COEFFICIENTS = ("C_",)

    def __init__(
        self,
        X: Sequence[Tensor],  # (N, D_a) each
        C: Mapping[tuple[int, int], Tensor],  # (N, M) each
        *,
        bias: Sequence[bool],
        check_finite: bool = True,
    ) -> None:
        if not X or not C or len(bias) != len(X):
            raise ValueError(
                f"X, C and bias must not be empty, and X and bias of one length, got {len(X)}, {len(bias)}"
            )
        shape = (len(X[0]), next(iter(C.values())).shape[1])
        for place, rows in enumerate(X):
            require.shape(f"X[{place}]", rows, (shape[0], rows.shape[-1]))
        for (a, b), own in C.items():
            if not 0 <= a <= b < len(X):
                raise ValueError(f"C: the pair {(a, b)} must be two places of X in order, of {len(X)}")
            require.shape(f"C[{a}, {b}]", own, shape)
            if check_finite:
                require.finite(f"C[{a}, {b}]", own)
        self.bias, self.pairs = tuple(map(bool, bias)), tuple(C)
        for place, rows in enumerate(X):
            setattr(self, f"X_{place}", rows)
        for (a, b), own in C.items():
            setattr(self, f"C_{a}_{b}", own)
        self.shape = (shape[1], sum(rows.shape[1] + one for rows, one in zip(X, self.bias, strict=True)))
        self.dtype, self.device = dtypes.compute_dtype(X[0].dtype), X[0].device

    @property
    def X(self) -> list[Tensor]:
        """The rows of every layer."""
        return [getattr(self, f"X_{place}") for place in range(len(self.bias))]

    @property
    def C(self) -> dict[tuple[int, int], Tensor]:
        """The coefficients of every block."""
        return {(a, b): getattr(self, f"C_{a}_{b}") for a, b in self.pairs}

    def matvec(self, V: Tensor, backend: str = "auto") -> Tensor:
        self._require_vectors(V)
        if V.dim() == 3:
            return torch.stack([self.matvec(one, backend) for one in V])
        X = [rows.to(self.dtype) for rows in self.X]
        parts = V.split([rows.shape[1] + one for rows, one in zip(X, self.bias, strict=True)], 1)
        seen = []
        for rows, v, one in zip(X, parts, self.bias, strict=True):
            seen.append(torch.addmm(v[:, -1], rows, v[:, :-1].mT) if one else rows @ v.mT)
        sums: list[Tensor | None] = [None] * len(X)
        for (a, b), C in self.C.items():
            for to, of in {(a, b), (b, a)}:
                total = sums[to]
                sums[to] = C * seen[of] if total is None else total.addcmul_(C.to(self.dtype), seen[of])
        found = []
        for rows, y, v, one in zip(X, sums, parts, self.bias, strict=True):
            if y is None:
                found.append(torch.zeros_like(v))
                continue
            found.append(y.mT @ rows)
            if one:
                found.append(y.sum(0).unsqueeze(1))
        return torch.cat(found, 1)

    def restrict(self, filters: Tensor) -> JointOperator:
        return restricted(self, filters, **{f"C_{a}_{b}": 1 for a, b in self.pairs})

    def magnitude(self) -> Tensor:
        lengths = [squared_lengths(rows, one).sqrt() for rows, one in zip(self.X, self.bias, strict=True)]
        total = torch.zeros(self.shape[0], dtype=self.dtype, device=self.device)
        for (a, b), C in self.C.items():
            total += weighted_sizes(C, lengths[a] * lengths[b]) * (1 if a == b else 2)
        return total
