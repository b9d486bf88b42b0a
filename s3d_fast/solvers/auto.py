"""The choice between forming S, Lanczos, and Lanczos in the coordinates of the rows, by expected cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from s3d_fast.operators.cost import prefers_exact
from s3d_fast.operators.few_rows import FewRows, prefers_few_rows
from s3d_fast.solvers.exact import Exact
from s3d_fast.solvers.judgement import judged
from s3d_fast.solvers.lanczos import DELTA, Lanczos
from s3d_fast.solvers.solver import Eigenproblem, Solver
from s3d_fast.solvers.spectrum import Found, Pairs, Spectrum, unit_vectors


@dataclass(frozen=True)
class Auto(Solver):
    """Forms S where that is expected to be cheaper; elsewhere it runs Lanczos for at most `max_iters` steps.

    Where a layer has fewer rows than columns, Lanczos may run in the coordinates of the rows.
    """

    max_iters: int = Lanczos.max_iters
    delta: float = DELTA

    def __post_init__(self) -> None:
        Lanczos(self.max_iters, self.delta)

    def solve(self, problem: Eigenproblem) -> list[Spectrum]:
        """Return the spectrum of every operator."""
        operators, tol = problem.operators, problem.tol
        formed = [place for place, one in enumerate(operators) if prefers_exact(one, tol, problem.backend)]
        others = [place for place in range(len(operators)) if place not in formed]
        exact = Exact().solve(problem.restricted(formed))
        weights = None if problem.until is None else problem.until.weights
        known = () if weights is None else [weights[place] for place in formed]
        lanczos = self._iterate(replace(problem.restricted(others), known=exact, known_weights=known))
        found = dict(zip(formed + others, exact + lanczos, strict=True))
        return [found[place] for place in range(len(operators))]

    def _iterate(self, problem: Eigenproblem) -> list[Spectrum]:
        """Return the spectra by Lanczos, in the coordinates of the rows where they are few."""
        few = {
            place: FewRows(operator)
            for place, operator in enumerate(problem.operators)
            if prefers_few_rows(operator, problem.tol)
        }
        spectra = Lanczos(self.max_iters, self.delta).solve(_reduced(problem, few))
        for place, rows in few.items():
            spectra[place] = self._lifted(problem, place, rows, spectra[place])
        return spectra

    def _lifted(self, problem: Eigenproblem, place: int, rows: FewRows, reduced: Spectrum) -> Spectrum:
        """Return the spectrum of an operator, given the one in the coordinates of its rows."""
        lifted = rows.lift(torch.stack([reduced.v_min, reduced.v_max]), problem.starts[place][0])
        V = unit_vectors(Found(lifted.V[0], lifted.V[1], reduced.iterations, reduced.matvecs))
        # What was certified of the eigenvalues holds; the vectors that came back may have other quotients.
        bounds = torch.stack([reduced.interval_min[:, 0], reduced.interval_max[:, 1]])
        beyond = torch.stack([lifted.values[0] - bounds[0], bounds[1] - lifted.values[1]]).clamp(min=0)
        pairs = Pairs(V, lifted.values, lifted.errors, beyond, lifted.noise, reduced.iterations, reduced.matvecs)
        assert reduced.status is not None
        [spectrum] = judged([rows.operator], [pairs], [reduced.status], problem.tol, problem.backend)
        lost = (reduced.converged & ~spectrum.converged).nonzero()[:, 0]
        if len(lost) == 0:
            return spectrum
        # An eigenvalue near 0 comes back with the error of its vector magnified. Such filters are solved as they are.
        part = replace(
            problem,
            operators=[rows.operator.restrict(lost)],
            starts=[problem.starts[place][lost]],
            until=None,
            known=(),
        )
        [again] = Lanczos(self.max_iters, self.delta).solve(part)
        return _with(spectrum, lost, again)


def _reduced(problem: Eigenproblem, few: Mapping[int, FewRows]) -> Eigenproblem:
    """Return the problem with some operators in the coordinates of their rows."""
    operators, starts = list(problem.operators), list(problem.starts)
    for place, rows in few.items():
        operators[place] = rows.reduced
        # Some entries of a random direction are a random direction of their own.
        starts[place] = torch.nn.functional.normalize(starts[place][:, : rows.reduced.shape[1]], dim=-1)
    return replace(problem, operators=operators, starts=starts)


def _with(spectrum: Spectrum, filters: Tensor, other: Spectrum) -> Spectrum:
    """Return the spectrum with the results of some filters replaced."""
    changed = {}
    for name, value in vars(other).items():
        if isinstance(value, Tensor):
            changed[name] = getattr(spectrum, name).clone()
            changed[name][filters] = value
    changed["matvecs"][filters] += spectrum.matvecs[filters]
    return replace(spectrum, **changed)
