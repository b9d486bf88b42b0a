"""EdgeConv layers: the rows of a filter are the edges that won its maxima."""

from __future__ import annotations

from torch import Tensor

from s3d_fast.backends.arguments import require_edge_ties, require_edgeconv
from s3d_fast.backends.choice import choose
from s3d_fast.maths.incoming import Incoming, incoming_edges
from s3d_fast.maths.reference import EdgeTies
from s3d_fast.operators.operator import SplittingOperator
from s3d_fast.operators.rows import restricted, squared_lengths


class EdgeConvOperator(SplittingOperator):
    """The filters of an EdgeConv layer, theta = [a, b] acting on edges [x_j - x_i, x_i] under a maximum over j.

    With runners-up, K e e^T is added for every maximum, e = d1 edge(winner) - d2 edge(runner).
    """

    CAN_CHANGE_DTYPE = True
    ONLY_LAUNCHES = True
    COEFFICIENTS = ("C", "K")
    WIDE_ROWS = ("X",)

    def __init__(
        self,
        X: Tensor,  # (B, P, F)
        winner: Tensor,  # (B, P, M), int32 or int64
        C: Tensor,  # (B, P, M)
        *,
        runner: Tensor | None = None,  # (B, P, M), int32 or int64
        K: Tensor | None = None,  # (B, P, M)
        d1: Tensor | None = None,  # (B, P, M)
        d2: Tensor | None = None,  # (B, P, M)
        bias: bool = False,
        check_finite: bool = True,
    ) -> None:
        require_edgeconv(X, winner, C, check_finite)
        require_edge_ties(X, C, runner, K, d1, d2, check_finite)
        self._describe(X, C, C.shape[2], 2 * X.shape[2] + bias)
        self.winner, self.runner = winner, runner
        if check_finite:
            # Products read the indices from memory, and 32 bits are half of the bytes. Only indices that were checked
            # are narrowed: others might become ones in range.
            self.winner, self.runner = winner.int(), None if runner is None else runner.int()
        self.X, self.C, self.bias = X, C, bias
        self.K, self.d1, self.d2 = K, d1, d2
        self._incoming: Incoming | None = None
        self._incoming_runners: Incoming | None = None

    def matvec(self, V: Tensor, backend: str = "auto") -> Tensor:
        self._require_vectors(V)
        chosen = choose(backend, self.X, self.C, self.K, self.d1, self.d2, differentiable=(V,))
        if self._incoming is None and chosen.uses_incoming:
            # Sort once: all products have the same winners.
            self._incoming = incoming_edges(self.winner)
            self._incoming_runners = None if self.runner is None else incoming_edges(self.runner)
        ties = None
        if self.runner is not None and self.K is not None:
            ties = EdgeTies(self.runner, self.K, self.d1, self.d2, self._incoming_runners)
        return chosen.edgeconv_matvec(
            X=self.X, winner=self.winner, C=self.C, V=V, bias=self.bias, incoming=self._incoming, ties=ties
        )

    def restrict(self, filters: Tensor) -> EdgeConvOperator:
        optional = {name: 2 for name in ("runner", "K", "d1", "d2") if getattr(self, name) is not None}
        rest = restricted(self, filters, winner=2, C=2, **optional)
        for name in ("_incoming", "_incoming_runners"):
            edges = getattr(self, name)
            setattr(rest, name, None if edges is None else edges.restrict(filters))
        return rest

    def magnitude(self) -> Tensor:
        """Return an upper bound of A_j: |x_j - x_i|^2 <= 2 |x_j|^2 + 2 |x_i|^2 on every edge."""
        squares = squared_lengths(self.X, False)[:, :, None].expand(-1, -1, self.shape[0])  # (B, P, M)

        def edges(ends: Tensor) -> Tensor:
            return 2 * squares.gather(1, ends.long()) + 3 * squares + self.bias

        total = (self.C.abs() * edges(self.winner)).sum((0, 1))
        if self.runner is None or self.K is None:
            return total
        first, second = edges(self.winner), edges(self.runner)
        if self.d1 is not None and self.d2 is not None:
            first, second = first * self.d1.square(), second * self.d2.square()
        return total + 2 * (self.K.abs() * (first + second)).sum((0, 1))

    @property
    def nbytes(self) -> int:
        """The bytes that the operator holds in memory."""
        sorted_edges = (*(self._incoming or ()), *(self._incoming_runners or ()))
        return super().nbytes + sum(tensor.nbytes for tensor in sorted_edges)
