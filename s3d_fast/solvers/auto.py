"""The choice between forming S and Lanczos for each layer, by expected cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

from s3d_fast.operators.cost import prefers_exact
from s3d_fast.solvers.exact import Exact
from s3d_fast.solvers.lanczos import DELTA, Lanczos
from s3d_fast.solvers.solver import Eigenproblem, Solver
from s3d_fast.solvers.spectrum import Spectrum


@dataclass(frozen=True)
class Auto(Solver):
    """Forms S where that is expected to be cheaper; elsewhere it runs Lanczos for at most `max_iters` steps."""

    max_iters: int = Lanczos.max_iters
    delta: float = DELTA

    def __post_init__(self) -> None:
        Lanczos(self.max_iters, self.delta)

    def solve(self, problem: Eigenproblem) -> list[Spectrum]:
        """Return the spectrum of every operator."""
        found: dict[int, Spectrum] = {}
        is_formed = [prefers_exact(operator, problem.tol, problem.backend) for operator in problem.operators]
        for solver, formed in ((Exact(), True), (Lanczos(self.max_iters, self.delta), False)):
            places = [place for place, is_one in enumerate(is_formed) if is_one is formed]
            part = replace(problem.restricted(places), known=list(found.values()))
            found.update(zip(places, solver.solve(part), strict=True))
        return [found[place] for place in range(len(is_formed))]
