"""The interface of solvers: objects that hold their own options and find the extreme eigenpairs of operators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from torch import Tensor
from tqdm import tqdm

from s3d_fast.operators import SplittingOperator
from s3d_fast.solvers.spectrum import Spectrum


class Solver(ABC):
    """Finds the smallest and largest eigenvalue of every filter of some operators, with their vectors."""

    @abstractmethod
    def solve(
        self,
        operators: Sequence[SplittingOperator],
        starts: Sequence[Tensor],  # each (M, D), random unit vectors
        tol: float,
        backend: str,
        progress: bool = False,
    ) -> list[Spectrum]:
        """Return the spectrum of every operator."""


def counted(max_iters: int, progress: bool) -> Iterator[int]:
    """Yield the step numbers from 1 to `max_iters`; `progress` shows a counter of the steps."""
    with tqdm(desc="solve", unit="step", disable=not progress) as bar:
        for step in range(1, max_iters + 1):
            yield step
            bar.update()
