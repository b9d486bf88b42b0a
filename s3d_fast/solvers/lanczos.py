"""The default solver: Lanczos with full reorthogonalization, all filters of all layers in lockstep."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from s3d_fast.operators import SplittingOperator, matvec_all
from s3d_fast.solvers.spectrum import Spectrum, measure, safe_norm

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
    spaces = [_KrylovSpaces(operator, start, tol) for operator, start in zip(operators, starts, strict=True)]
    for step in range(1, max_iters + 1):
        active = [space for space in spaces if not space.finished]
        if not active:
            break
        products = matvec_all([space.operator for space in active], [space.q for space in active], backend)
        for space, product in zip(active, products, strict=True):
            space.extend(product)
            # From exhaustion on there is nothing to add: D steps fill the whole space.
            if step % CHECK_EVERY == 0 or step in (max_iters, space.operator.shape[1]):
                space.check(last=step == max_iters)
    return [space.spectrum(operator, backend) for space, operator in zip(spaces, operators, strict=True)]


class _KrylovSpaces:
    """The Krylov spaces of the filters of one operator, and the tridiagonal matrices T = Q^T S Q on them.

    The filters still at work are the rows `self.rows` of the operator that was given; `self.operator` is restricted to
    them. Filters that have left have their Ritz vectors in `self.v_min` and `self.v_max`.
    """

    def __init__(self, operator: SplittingOperator, start: Tensor, tol: float) -> None:
        filters, width = operator.shape
        self.operator, self.tol = operator, tol
        self.rows = torch.arange(filters, device=operator.device)
        self.q = start
        self.steps = 0
        self.basis = start.new_empty(filters, min(16, width), width)  # (M, capacity, D)
        self.alpha: list[Tensor] = []  # diagonal of T
        self.beta: list[Tensor] = []  # off-diagonal of T; the last one couples to the next vector
        # The dimension of each filter's space: stops growing when the space is exhausted.
        self.length = torch.zeros(filters, dtype=torch.int64, device=operator.device)
        self.exhausted = torch.zeros(filters, dtype=torch.bool, device=operator.device)
        self.scale = torch.zeros(filters, dtype=start.dtype, device=operator.device)

        self.finished = False
        self.v_min, self.v_max = torch.empty_like(start), torch.empty_like(start)
        self.iterations = torch.zeros(filters, dtype=torch.int64, device=operator.device)
        self.matvecs = torch.zeros_like(self.iterations)

    def extend(self, product: Tensor) -> None:
        """Take S q, and make of it the next basis vector of every space; an exhausted space gets the zero vector."""
        if self.steps == self.basis.shape[1]:
            capacity = min(2 * self.steps, self.basis.shape[2])
            larger = self.basis.new_empty(len(self.rows), capacity, self.basis.shape[2])
            larger[:, : self.steps] = self.basis
            self.basis = larger
        self.basis[:, self.steps] = self.q
        self.steps += 1
        self.length += ~self.exhausted

        alpha = (self.q * product).sum(-1)
        basis = self.basis[:, : self.steps]
        # Once removes the component along the space; twice removes what rounding left of it.
        for _ in range(2):
            product = product - (basis.mT @ (basis @ product.unsqueeze(-1))).squeeze(-1)
        beta = safe_norm(product)
        self.scale = torch.maximum(self.scale, alpha.abs() + beta)
        width = self.basis.shape[2]
        noise = torch.finfo(product.dtype).eps * (10 + width**0.5) * self.scale
        self.exhausted = self.exhausted | (beta <= noise)
        if self.steps == width:
            self.exhausted = torch.ones_like(self.exhausted)
        beta = torch.where(self.exhausted, 0, beta)
        self.q = torch.where(self.exhausted.unsqueeze(-1), 0, product / beta.unsqueeze(-1))
        self.alpha.append(alpha)
        self.beta.append(beta)

    def check(self, last: bool) -> None:
        """Find which filters have converged, let those go that are well past it, and stop when none is left."""
        values, vectors, residuals = self._ritz()
        radius = values.abs().amax(-1)
        error = residuals.amax(-1)
        converged = self.exhausted | (error <= self.tol * radius)
        leaving = self.exhausted | (error <= LEAVE_BELOW * self.tol * radius)
        first_time = converged & (self.iterations[self.rows] == 0)
        self.iterations[self.rows] = torch.where(first_time, self.steps, self.iterations[self.rows])
        # Back to 0 if a filter that had converged found a better Ritz value and has not converged on it yet.
        self.iterations[self.rows] = torch.where(converged, self.iterations[self.rows], 0)

        n_converged, n_leaving = torch.stack([converged.sum(), leaving.sum()]).tolist()
        if last or n_converged == len(self.rows):
            self._release(torch.ones_like(leaving), vectors)
            self.finished = True
        elif 2 * n_leaving >= len(self.rows):
            # Copying the rest is paid for by halving the work of every later step.
            self._release(leaving, vectors)

    def spectrum(self, operator: SplittingOperator, backend: str) -> Spectrum:
        """Return the result for the whole operator, residuals measured afresh."""
        return measure(operator, self.v_min, self.v_max, self.iterations, self.matvecs, self.tol, backend)

    def _ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the extreme Ritz values (M, 2), their vectors in the basis (M, k, 2) and their residuals (M, 2)."""
        alpha = torch.stack(self.alpha, -1).double()
        beta = torch.stack(self.beta, -1).double()
        # Beyond the end of an exhausted space T gets a diagonal above its whole spectrum: the rows there couple to
        # nothing and their eigenvalues sort last, which leaves the first `length` eigenvalues as the real ones.
        index = torch.arange(self.steps, device=alpha.device)
        beyond = index >= self.length.unsqueeze(-1)
        above = torch.where(self.scale > 0, 4 * self.scale.double(), 1)
        alpha = torch.where(beyond, above.unsqueeze(-1), alpha)
        coupling = torch.diag_embed(beta[:, :-1], -1) if self.steps > 1 else 0
        theta, vectors = torch.linalg.eigh(torch.diag_embed(alpha) + coupling)

        top = self.length - 1
        ends = torch.stack([torch.zeros_like(top), top], -1)
        values = theta.gather(-1, ends)
        vectors = vectors.gather(-1, ends.unsqueeze(-2).expand(-1, self.steps, -1))
        # |S Q s - theta Q s| = beta_k |s_k|; an exhausted space has no coupling left.
        residuals = beta[:, -1:] * vectors[:, -1].abs()
        return values, vectors, residuals

    def _release(self, leaving: Tensor, vectors: Tensor) -> None:
        """Store the Ritz vectors of the filters marked in `leaving`, and drop these filters from the work."""
        ritz = vectors[leaving].to(self.basis.dtype).mT @ self.basis[leaving, : self.steps]
        rows = self.rows[leaving]
        self.v_min[rows], self.v_max[rows] = ritz[:, 0], ritz[:, 1]
        self.matvecs[rows] = self.steps
        self.iterations[rows] = torch.where(self.iterations[rows] == 0, self.steps, self.iterations[rows])
        if len(rows) == len(self.rows):
            # Nothing here is needed any more, and the basis is large.
            self.basis, self.q = self.basis[:0], self.q[:0]
            return
        staying = ~leaving
        self.rows = self.rows[staying]
        self.operator = self.operator.restrict(staying.nonzero().squeeze(-1))
        self.basis, self.q = self.basis[staying], self.q[staying]
        self.alpha = [alpha[staying] for alpha in self.alpha]
        self.beta = [beta[staying] for beta in self.beta]
        self.length, self.exhausted, self.scale = (
            self.length[staying],
            self.exhausted[staying],
            self.scale[staying],
        )
