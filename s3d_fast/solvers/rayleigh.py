"""The paper's solver: gradient descent and ascent on the Rayleigh quotient R(v) = v^T S v / v^T v."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from s3d_fast.base import require
from s3d_fast.maths.reference import safe_norm
from s3d_fast.operators import SplittingOperator, matvec_all
from s3d_fast.solvers.judgement import judged
from s3d_fast.solvers.lanczos import DELTA, Lanczos
from s3d_fast.solvers.solver import MARGIN, Eigenproblem, Solver, counted
from s3d_fast.solvers.spectrum import Found, Pairs, Spectrum, Status, measure


@dataclass(frozen=True)
class Rayleigh(Solver):
    """The paper's descent: v <- v -+ eta (S v - R(v) v), from the same start for both ends.

    eta = step / rho, where rho is the largest |S v| of the filter so far. rho is a lower bound of the spectral radius
    and approaches it; once it is close, steps below 1 contract.

    Attributes:
        max_iters: the largest number of iterations; each costs two products.
        step: the step size, in units of 1 / (spectral radius).
        delta: the largest probability that a certified width of a filter is wrong.
    """

    max_iters: int = 1000
    step: float = 0.9
    delta: float = DELTA

    def __post_init__(self) -> None:
        require.probability("delta", self.delta)
        require.count("max_iters", self.max_iters)
        require.positive("step", self.step)

    def solve(self, problem: Eigenproblem) -> list[Spectrum]:
        """Return the spectrum of every operator; a layer stops when its last filter has converged.

        Descent can rest at an eigenvector that is not extreme. A Krylov space from the same start then tells: it costs
        a few products, and gives the certified widths.
        """
        runs = [_Descent(*pair) for pair in zip(problem.operators, problem.starts, strict=True)]
        for _ in counted(self.max_iters, problem.progress):
            active = [run for run in runs if not run.finished]
            if not active:
                break
            products = matvec_all([run.operator for run in active], [run.V for run in active], problem.backend)
            for run, SV in zip(active, products, strict=True):
                run.advance(SV, problem.tol, self.step)
        found = [Found(run.V[0], run.V[1], run.iterations, 2 * run.products) for run in runs]
        pairs = measure(problem.operators, found, problem.backend)
        certificates = Lanczos(delta=self.delta).solve(
            replace(problem, tol=problem.tol / 4, until=None, progress=False)
        )
        certified = [_certified(*each, problem.tol) for each in zip(pairs, certificates, strict=True)]
        pairs, statuses = [one for one, _ in certified], [status for _, status in certified]
        return judged(problem.operators, pairs, statuses, problem.tol, problem.backend)


def _certified(pairs: Pairs, certificate: Spectrum, tol: float) -> tuple[Pairs, Tensor]:
    """Return the pairs that descent found with the widths that the certificate grants, and why they may have failed."""
    ends = torch.stack([certificate.interval_min[:, 0], certificate.interval_max[:, 1]])
    signs = pairs.values.new_tensor([[-1.0], [1.0]])
    widths = (signs * (ends - pairs.values)).clamp(min=0)
    limit = tol * pairs.values.abs().amax(0)
    status = torch.where(widths.amax(0) > limit, int(Status.SADDLE), int(Status.STAGNATION))
    status = torch.where(pairs.errors.amax(0) > limit, int(Status.STEPS), status)
    return replace(pairs, widths=widths, matvecs=pairs.matvecs + certificate.matvecs), status


class _Descent:
    """Descent (first vector) and ascent (second) for all filters of one operator."""

    def __init__(self, operator: SplittingOperator, start: Tensor) -> None:
        self.operator = operator
        self.V = torch.stack([start, start])
        self.radius = torch.zeros(2, len(start), 1, dtype=start.dtype, device=start.device)
        self.running = torch.ones(len(start), dtype=torch.bool, device=start.device)
        self.iterations = torch.zeros(len(start), dtype=torch.int64, device=start.device)
        self.products = torch.zeros_like(self.iterations)
        self.signs = torch.tensor([-1.0, 1.0], dtype=start.dtype, device=start.device)[:, None, None]
        self.finished = False

    def advance(self, SV: Tensor, tol: float, step: float) -> None:
        """Move the vectors of the filters that have not converged; SV holds the products with the current vectors."""
        quotient = (self.V * SV).sum(-1, keepdim=True)
        gradient = SV - quotient * self.V
        self.radius = torch.maximum(self.radius, safe_norm(SV).unsqueeze(-1).amax(0))
        error = safe_norm(gradient).amax(0)
        self.products += 1
        self.running = self.running & (error > MARGIN * tol * quotient.abs().amax(0).squeeze(-1))
        self.iterations += self.running
        # The gradient is divided first: the inverse of a small radius may overflow.
        move = torch.where(self.radius > 0, gradient / self.radius, 0) * self.running[:, None]
        self.V = normalize(self.V + self.signs * step * move, dim=-1)
        self.finished = not bool(self.running.any())
