"""The interface of solvers: objects that hold their own options and find the extreme eigenpairs of operators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from tqdm.auto import tqdm

from s3d_fast.operators import SplittingOperator
from s3d_fast.solvers.cut import Cut, Ranking
from s3d_fast.solvers.spectrum import Spectrum

# Solvers go on a little beyond the tolerance, so that rounding errors, which are added at the end, rarely decide.
MARGIN = 0.9


@dataclass(frozen=True)
class Eigenproblem:
    """The operators whose extreme eigenpairs are wanted, and how.

    Attributes:
        operators: all of them advance together.
        starts: random unit vectors, (M, D) for each operator; none for a solver that uses none.
        tol: a filter has converged when residuals and widths are at most `tol` times its spectral radius.
        backend: the name of the backend.
        progress: show a counter of the steps.
        until: stop at the filters for which it is certain whether they belong to those that gain the most.
        known: what is known of gains beyond these operators' filters.
        known_weights: the weights of those gains, if the cut has weights.
    """

    operators: Sequence[SplittingOperator]
    starts: Sequence[Tensor]
    tol: float
    backend: str = "auto"
    progress: bool = False
    until: Cut | None = None
    known: Sequence[Spectrum] = ()
    known_weights: Sequence[Tensor] = ()

    def ranking(self, device: torch.device) -> Ranking | None:
        """Return the ranking of all filters, those of the operators first; None without a cut."""
        if self.until is None:
            return None
        own = sum(operator.shape[0] for operator in self.operators)
        ranking = self.until.ranking(own + sum(map(len, self.known)), device, self.known_weights)
        first = own
        for spectrum in self.known:
            places = torch.arange(first, first + len(spectrum), device=device)
            values = torch.stack([spectrum.lambda_min, spectrum.lambda_max], -1).to(device)
            ranking.learn(places, values, torch.zeros_like(values))
            first += len(spectrum)
        return ranking

    def restricted(self, places: Sequence[int]) -> Eigenproblem:
        """Return the problem of the operators at these places."""
        operators, starts = [self.operators[i] for i in places], [self.starts[i] for i in places]
        until = None if self.until is None else self.until.restricted(places)
        return replace(self, operators=operators, starts=starts, until=until)


class Solver(ABC):
    """Finds the smallest and largest eigenvalue of every filter of some operators, with their vectors."""

    # Whether `solve` uses start vectors.
    uses_starts: ClassVar[bool] = True

    @abstractmethod
    def solve(self, problem: Eigenproblem) -> list[Spectrum]:
        """Return the spectrum of every operator."""


def counted(max_iters: int, progress: bool) -> Iterator[int]:
    """Yield the step numbers from 1 to `max_iters`; `progress` shows a counter of the steps."""
    with tqdm(desc="solve", unit="step", disable=not progress) as bar:
        for step in range(1, max_iters + 1):
            yield step
            bar.update()
