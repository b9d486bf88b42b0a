"""Extreme eigenpairs of splitting matrices: one call, four solvers, one result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import overload

import torch
from torch import Tensor

from s3d_fast import checks, ops
from s3d_fast.operators import PointwiseOperator, SplittingOperator
from s3d_fast.solvers import auto, exact, lanczos, rayleigh
from s3d_fast.solvers.spectrum import Spectrum

__all__ = ["SOLVERS", "Spectrum", "extremal_eigenpairs"]

# Start vectors must not resemble the data, which is often random and often drawn after manual_seed(0): from a start in
# the span of few rows a Krylov space would be exhausted before it has seen the rest of the spectrum.
DEFAULT_SEED = 0x53D5EED
# Solver -> the default of max_iters.
SOLVERS = {"lanczos": 128, "auto": 128, "rayleigh": 1000, "exact": 1}


@overload
def extremal_eigenpairs(
    operator: SplittingOperator | tuple[Tensor, Tensor],
    solver: str = ...,
    tol: float = ...,
    max_iters: int | None = ...,
    backend: str = ...,
    *,
    step: float = ...,
    generator: torch.Generator | None = ...,
    progress: bool = ...,
) -> Spectrum: ...
@overload
def extremal_eigenpairs(
    operator: Mapping[str, SplittingOperator],
    solver: str = ...,
    tol: float = ...,
    max_iters: int | None = ...,
    backend: str = ...,
    *,
    step: float = ...,
    generator: torch.Generator | None = ...,
    progress: bool = ...,
) -> dict[str, Spectrum]: ...
@overload
def extremal_eigenpairs(
    operator: Sequence[SplittingOperator],
    solver: str = ...,
    tol: float = ...,
    max_iters: int | None = ...,
    backend: str = ...,
    *,
    step: float = ...,
    generator: torch.Generator | None = ...,
    progress: bool = ...,
) -> list[Spectrum]: ...


@torch.no_grad()
def extremal_eigenpairs(
    operator: SplittingOperator | Mapping[str, SplittingOperator] | Sequence[SplittingOperator] | tuple[Tensor, Tensor],
    solver: str = "lanczos",
    tol: float = 1e-3,
    max_iters: int | None = None,
    backend: str = "auto",
    *,
    step: float = 0.9,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> Spectrum | dict[str, Spectrum] | list[Spectrum]:
    """Return the smallest and largest eigenvalue of every filter's splitting matrix, with their vectors.

    Args:
        operator: a SplittingOperator; or rows and coefficients (X, C); or a list or dict of operators, whose filters
            all advance together and whose result is a list or dict of spectra.
        solver: "lanczos"; "exact", which forms S; "auto", the one of these two that is expected to be faster, layer by
            layer; or "rayleigh", the paper's gradient descent and ascent.
        tol: a filter has converged when |S v - lambda v| <= tol * (its spectral radius) at both ends.
        max_iters: steps at the most; 128 for lanczos and auto, 1000 for rayleigh by default. Filters that have not
            converged by then are marked in `Spectrum.converged`.
        backend: "auto", "reference", "cpu" or "triton".
        step: of "rayleigh", in units of 1 / (spectral radius).
        generator: the source of what is random in start vectors. Without one every call starts from the same vectors,
            and the global random state is neither used nor changed.
        progress: count the steps while they are taken.

    Raises:
        ValueError, TypeError: bad arguments.
        RuntimeError: the backend asked for is not there.
    """
    checks.is_choice("solver", solver, tuple(SOLVERS))
    checks.is_positive("tol", tol)
    checks.is_positive("step", step)
    if max_iters is None:
        max_iters = SOLVERS[solver]
    checks.is_count("max_iters", max_iters)
    ops.resolve_backend(backend)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, got {type(generator).__name__}")

    operators = _as_list(operator)
    if solver == "exact":
        spectra = exact.solve(operators, tol, backend)
    else:
        starts = _random_starts(operators, generator)
        if solver == "lanczos":
            spectra = lanczos.solve(operators, starts, tol, max_iters, backend, progress)
        elif solver == "auto":
            spectra = auto.solve(operators, starts, tol, max_iters, backend, progress)
        else:
            spectra = rayleigh.solve(operators, starts, tol, max_iters, step, backend, progress)

    if isinstance(operator, Mapping):
        return dict(zip(operator, spectra, strict=True))
    if isinstance(operator, SplittingOperator) or _is_pair(operator):
        return spectra[0]
    return spectra


def _as_list(operator: object) -> list[SplittingOperator]:
    if isinstance(operator, SplittingOperator):
        return [operator]
    if isinstance(operator, tuple) and _is_pair(operator):
        return [PointwiseOperator(*operator)]
    if isinstance(operator, (Mapping, Sequence)) and not isinstance(operator, str):
        operators = list(operator.values()) if isinstance(operator, Mapping) else list(operator)
        wrong = [type(item).__name__ for item in operators if not isinstance(item, SplittingOperator)]
        if not wrong:
            return operators
        raise TypeError(f"operator must hold SplittingOperators, got {wrong[0]} among them")
    raise TypeError(
        f"operator must be a SplittingOperator, a list or dict of them, or (X, C); got {type(operator).__name__}"
    )


def _is_pair(operator: object) -> bool:
    return isinstance(operator, tuple) and len(operator) == 2 and all(isinstance(item, Tensor) for item in operator)


def _random_starts(operators: Sequence[SplittingOperator], generator: torch.Generator | None) -> list[Tensor]:
    """Return one random unit vector per filter, the same on every device."""
    if generator is None:
        generator = torch.Generator().manual_seed(DEFAULT_SEED)
    return [
        torch.nn.functional.normalize(
            torch.randn(operator.shape, dtype=operator.dtype, generator=generator, device=generator.device),
            dim=-1,
        ).to(operator.device)
        for operator in operators
    ]
