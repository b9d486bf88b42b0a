"""The interface of solvers: objects that hold their own options and find the extreme eigenpairs of operators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor
from tqdm.auto import tqdm

from s3d_fast.operators import SplittingOperator
from s3d_fast.solvers.spectrum import Spectrum


@dataclass(frozen=True)
class Eigenproblem:
    """The operators whose extreme eigenpairs are wanted, and how.

    Attributes:
        operators: all of them advance together.
        starts: random unit vectors, (M, D) for each operator; none for a solver that uses none.
        tol: a filter has converged when both residuals are at most `tol` times its spectral radius.
        backend: the name of the backend.
        progress: show a counter of the steps.
    """

    operators: Sequence[SplittingOperator]
    starts: Sequence[Tensor]
    tol: float
    backend: str = "auto"
    progress: bool = False

    def restricted(self, places: Sequence[int]) -> Eigenproblem:
        """Return the problem of the operators at these places."""
        operators, starts = [self.operators[i] for i in places], [self.starts[i] for i in places]
        return replace(self, operators=operators, starts=starts)


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
