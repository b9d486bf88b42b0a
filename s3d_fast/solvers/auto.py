"""The choice between forming S and Lanczos for each layer, by expected cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from s3d_fast.operators import SplittingOperator
from s3d_fast.operators.cost import prefers_exact
from s3d_fast.solvers.exact import Exact
from s3d_fast.solvers.lanczos import Lanczos
from s3d_fast.solvers.solver import Solver
from s3d_fast.solvers.spectrum import Spectrum


@dataclass(frozen=True)
class Auto(Solver):
    """Forms S where that is expected to be cheaper; elsewhere it runs Lanczos for at most `max_iters` steps."""

    max_iters: int = Lanczos.max_iters

    def solve(
        self,
        operators: Sequence[SplittingOperator],
        starts: Sequence[Tensor],
        tol: float,
        backend: str,
        progress: bool = False,
    ) -> list[Spectrum]:
        """Return the spectrum of every operator."""
        found: dict[int, Spectrum] = {}
        formed = [i for i, operator in enumerate(operators) if prefers_exact(operator, tol, backend)]
        rest = [i for i in range(len(operators)) if i not in set(formed)]
        for solver, places in ((Exact(), formed), (Lanczos(self.max_iters), rest)):
            chosen = ([operators[i] for i in places], [starts[i] for i in places])
            found.update(zip(places, solver.solve(*chosen, tol, backend, progress), strict=True))
        return [found[i] for i in range(len(operators))]
