"""The default solver: Lanczos with full reorthogonalization, all filters of all layers in lockstep."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from s3d_fast import ops
from s3d_fast.operators import SplittingOperator, matvec_all
from s3d_fast.solvers.spectrum import Found, Spectrum, measure

# Convergence is looked at every so many steps: finding the Ritz values costs about as much as a step.
CHECK_EVERY = 4
# A filter leaves the work for good only when its residual is this much below the tolerance. A Ritz value can rest on
# the second eigenvalue for a while, with a small residual, before it finds the first; filters that merely count as
# converged stay on while others need the layer's steps anyway, which uncovers nearly all such cases for nothing.
LEAVE_BELOW = 1e-2


def solve(
    operators: Sequence[SplittingOperator],
    starts: Sequence[Tensor],  # each (M, D), unit vectors
    tol: float,
    max_iters: int,
    backend: str,
) -> list[Spectrum]:
    """Return the spectrum of every operator; one Krylov space per filter gives both ends.

    A filter counts as converged when both Ritz residuals are at most tol times its spectral radius, or when its Krylov
    space is exhausted (S = 0, low rank, few distinct eigenvalues, D steps): the space then holds the extreme
    eigenvectors exactly. Memory: one vector of M D entries per step and layer.
    """
    spaces = [_KrylovSpaces(operator, start, tol, backend) for operator, start in zip(operators, starts, strict=True)]
    for step in range(1, max_iters + 1):
        active = [space for space in spaces if not space.finished]
        if not active:
            break
        products = matvec_all([space.operator for space in active], [space.q for space in active], backend)
        for space, product in zip(active, products, strict=True):
            space.extend(product)
        # From exhaustion on there is nothing to add: D steps fill the whole space.
        due = [space for space in active if step % CHECK_EVERY == 0 or step in (max_iters, space.operator.shape[1])]
        if due:
            _check(due, last=step == max_iters)
    return measure(operators, [space.found() for space in spaces], tol, backend)


def _check(spaces: Sequence[_KrylovSpaces], last: bool) -> None:
    """Let filters go that are well past convergence, and stop layers that have converged.

    This is the only place where the host waits for the device: once, for all layers.
    """
    converged, leaving = torch.cat([space.progress() for space in spaces], -1).tolist()
    first = 0
    for space in spaces:
        own = slice(first, first + len(space.rows))
        space.settle(converged[own], leaving[own], last)
        first = own.stop


class _KrylovSpaces:
    """The Krylov spaces of the filters of one operator, and the tridiagonal matrices T = Q^T S Q on them.

    The filters still at work are the rows `self.rows` of the operator that was given; `self.operator` is restricted to
    them. Filters that have left have their Ritz vectors in `self.v_min` and `self.v_max`.
    """

    def __init__(self, operator: SplittingOperator, start: Tensor, tol: float, backend: str) -> None:
        filters, width = operator.shape
        self.operator, self.tol, self.backend = operator, tol, backend
        self.rows = torch.arange(filters, device=operator.device)
        self.steps = 0
        self.basis = start.new_empty(filters, min(16, width) + 1, width)  # (M, capacity, D)
        self.basis[:, 0] = start
        # The last basis vector of every space, zero where the space is exhausted. It stays where it is in memory, so
        # that a backend which keeps addresses need not look them up at every step.
        self.q = start.clone()  # (M, D)
        self.alpha = start.new_zeros(filters, self.basis.shape[1])  # diagonal of T
        self.beta = torch.zeros_like(self.alpha)  # off-diagonal of T; the last one couples to the next vector
        # The dimension of each filter's space: stops growing when the space is exhausted.
        self.length = torch.zeros(filters, dtype=torch.int64, device=operator.device)
        self.scale = torch.zeros(filters, dtype=start.dtype, device=operator.device)

        self.finished = False
        self.ritz = start.new_empty(filters, 2, 0)  # (M, 2, steps), in the basis, since the last check
        self.v_min, self.v_max = torch.empty_like(start), torch.empty_like(start)
        self.iterations = torch.zeros(filters, dtype=torch.int64, device=operator.device)
        self.matvecs = torch.zeros_like(self.iterations)

    def extend(self, product: Tensor) -> None:
        """Take S q, and make of it the next basis vector of every space."""
        if self.steps + 1 == self.basis.shape[1]:
            capacity = min(2 * self.steps, self.basis.shape[2]) + 1
            self.basis, self.alpha, self.beta = (
                _enlarged(tensor, capacity) for tensor in (self.basis, self.alpha, self.beta)
            )
        state = (self.alpha, self.beta, self.length, self.scale)
        ops.krylov_extend(self.basis, product, *state, self.steps, backend=self.backend)
        self.steps += 1
        self.q.copy_(self.basis[:, self.steps])

    def progress(self) -> Tensor:  # (2, M), bool
        """Find the Ritz vectors; return which filters have converged, and which of them are well past it."""
        alpha, beta = self.alpha[:, : self.steps], self.beta[:, : self.steps]
        values, self.ritz = ops.tridiagonal_extremes(alpha, beta, self.length, backend=self.backend)
        radius = values.abs().amax(-1)
        # |S Q s - theta Q s| = beta_k |s_k|; an exhausted space has no coupling left.
        coupling = beta[:, -1].double()
        error = coupling * self.ritz[:, :, -1].abs().amax(-1)
        exhausted = coupling == 0
        converged = exhausted | (error <= self.tol * radius)
        leaving = exhausted | (error <= LEAVE_BELOW * self.tol * radius)
        iterations = self.iterations[self.rows]
        # Back to 0 if a filter that had converged found a better Ritz value and has not converged on it yet.
        since = torch.where(iterations == 0, self.steps, iterations)
        self.iterations[self.rows] = torch.where(converged, since, 0)
        return torch.stack([converged, leaving])

    def settle(self, converged: Sequence[bool], leaving: Sequence[bool], last: bool) -> None:
        """Act on what `progress` returned."""
        if last or all(converged):
            self._release(range(len(self.rows)))
            self.finished = True
        elif 2 * sum(leaving) >= len(self.rows):
            # Copying the rest is paid for by halving the work of every later step.
            self._release([i for i, leaves in enumerate(leaving) if leaves])
            self._keep([i for i, leaves in enumerate(leaving) if not leaves])

    def found(self) -> Found:
        """Return the Ritz vectors of all filters of the operator that was given."""
        return Found(self.v_min, self.v_max, self.iterations, self.matvecs)

    def _release(self, leaving: Sequence[int]) -> None:
        """Store the Ritz vectors of the filters that leave."""
        index = _indices(leaving, self.rows.device)
        ritz = self.ritz[index].to(self.basis.dtype) @ self.basis[index, : self.steps]
        rows = self.rows[index]
        self.v_min[rows], self.v_max[rows] = ritz[:, 0], ritz[:, 1]
        self.matvecs[rows] = self.steps
        self.iterations[rows] = torch.where(self.iterations[rows] == 0, self.steps, self.iterations[rows])
        if len(leaving) == len(self.rows):
            # Nothing here is needed any more, and the basis is large.
            self.basis = self.basis[:0]

    def _keep(self, staying: Sequence[int]) -> None:
        """Drop all other filters from the work."""
        index = _indices(staying, self.rows.device)
        self.operator = self.operator.restrict(index)
        self.rows, self.q, self.length, self.scale = (
            tensor[index] for tensor in (self.rows, self.q, self.length, self.scale)
        )
        self.basis, self.alpha, self.beta = (tensor[index] for tensor in (self.basis, self.alpha, self.beta))


def _indices(indices: Sequence[int], device: torch.device) -> Tensor:
    """Return indices as a tensor on the device, without waiting for the device."""
    tensor = torch.tensor(indices, dtype=torch.int64)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _enlarged(tensor: Tensor, capacity: int) -> Tensor:
    """Return the tensor with room for more entries along its second dimension."""
    larger = tensor.new_empty(tensor.shape[0], capacity, *tensor.shape[2:])
    larger[:, : tensor.shape[1]] = tensor
    return larger
