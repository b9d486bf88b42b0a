"""Extreme eigenpairs of splitting matrices: one call, four solvers, one result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any, overload

import torch
from torch import Tensor

from s3d_fast.backends.choice import choose
from s3d_fast.backends.cpu_options import cpu_options
from s3d_fast.base import require
from s3d_fast.kernels.options import exact_products
from s3d_fast.operators import MatrixFreeOperator, PointwiseOperator, SplittingOperator
from s3d_fast.operators.operator import LayerShape
from s3d_fast.operators.prepared import prepared_where_faster
from s3d_fast.operators.rounded import rounded_where_faster
from s3d_fast.solvers.auto import Auto
from s3d_fast.solvers.cut import Cut
from s3d_fast.solvers.exact import Exact
from s3d_fast.solvers.lanczos import Lanczos
from s3d_fast.solvers.rayleigh import Rayleigh
from s3d_fast.solvers.solver import Eigenproblem, Solver
from s3d_fast.solvers.spectrum import Spectrum

# Start vectors must not equal rows of the data, and random data are often drawn after manual_seed(0). A Krylov space
# that starts in the span of few rows is exhausted too early and misses the rest of the spectrum.
DEFAULT_SEED = 0x53D5EED
SOLVERS: dict[str, type[Lanczos | Auto | Rayleigh | Exact]] = {
    "lanczos": Lanczos,
    "auto": Auto,
    "rayleigh": Rayleigh,
    "exact": Exact,
}


@overload
def extremal_eigenpairs(
    operator: SplittingOperator | tuple[Tensor, Tensor] | Callable[[Tensor], Tensor],
    solver: str | Solver = ...,
    tol: float = ...,
    max_iters: int | None = ...,
    backend: str = ...,
    *,
    generator: torch.Generator | None = ...,
    progress: bool = ...,
    until: Cut | None = ...,
    precision: str = ...,
    shape: Sequence[int] | None = ...,
    dtype: torch.dtype | None = ...,
    device: torch.device | str | None = ...,
    **options: Any,
) -> Spectrum: ...
@overload
def extremal_eigenpairs(
    operator: Mapping[str, SplittingOperator],
    solver: str | Solver = ...,
    tol: float = ...,
    max_iters: int | None = ...,
    backend: str = ...,
    *,
    generator: torch.Generator | None = ...,
    progress: bool = ...,
    until: Cut | None = ...,
    precision: str = ...,
    shape: Sequence[int] | None = ...,
    dtype: torch.dtype | None = ...,
    device: torch.device | str | None = ...,
    **options: Any,
) -> dict[str, Spectrum]: ...
@overload
def extremal_eigenpairs(
    operator: Sequence[SplittingOperator],
    solver: str | Solver = ...,
    tol: float = ...,
    max_iters: int | None = ...,
    backend: str = ...,
    *,
    generator: torch.Generator | None = ...,
    progress: bool = ...,
    until: Cut | None = ...,
    precision: str = ...,
    shape: Sequence[int] | None = ...,
    dtype: torch.dtype | None = ...,
    device: torch.device | str | None = ...,
    **options: Any,
) -> list[Spectrum]: ...


@torch.no_grad()
def extremal_eigenpairs(
    operator: SplittingOperator
    | Mapping[str, SplittingOperator]
    | Sequence[SplittingOperator]
    | tuple[Tensor, Tensor]
    | Callable[[Tensor], Tensor],
    solver: str | Solver = "auto",
    tol: float = 1e-3,
    max_iters: int | None = None,
    backend: str = "auto",
    *,
    generator: torch.Generator | None = None,
    progress: bool = False,
    until: Cut | None = None,
    precision: str = "highest",
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> Spectrum | dict[str, Spectrum] | list[Spectrum]:
    """Return the smallest and largest eigenvalue of every filter's splitting matrix, with their vectors.

    Args:
        operator: a SplittingOperator; or rows and coefficients (X, C); or a list or dict of operators, whose filters
            all advance together and whose result is a list or dict of spectra. Or a function that returns S_j v_j for
            the rows v_j of V (M, D): any symmetric matrices, with `shape` (M, D), and `dtype` and `device` if they are
            not float32 and the CPU.
        solver: "auto", which takes the faster of the next two for each layer; "lanczos"; "exact", which forms S; or
            "rayleigh", the paper's gradient descent and ascent. Or a solver object, such as
            `s3d_fast.solvers.Rayleigh(step=0.5)`.
        tol: a filter has converged when at both ends |S v - lambda v| <= tol * (its spectral radius), and no eigenvalue
            lies farther than that beyond lambda. The latter is certain but for an unlucky random start: see `delta`.
        max_iters: the largest number of steps; by default 128 for lanczos and auto, 1000 for rayleigh. "exact" takes no
            steps. `Spectrum.converged` marks the filters that converged in time.
        backend: "auto", "reference", "cpu" or "triton".
        generator: draws the random part of the start vectors. By default every call starts from the same vectors, and
            the global random state is neither used nor changed.
        progress: show a counter of the steps.
        until: a `Cut`, which says how many filters are wanted, those that gain the most by a split. Filters stop as
            soon as it is certain whether they are among them; the result then has the status DECIDED. "exact" and
            "rayleigh" solve all filters to the end.
        precision: "highest"; or "medium", which rounds rows and coefficients to bfloat16 where products then take less
            time: for wide layers, on processors with AVX512_BF16. The eigenpairs are then those of the rounded
            matrices, whose eigenvalues differ by about 0.1% of the spectral radius; residuals leave that out. It makes
            sense for a tolerance of 0.01 or more.
        options: more options of the solver. "lanczos", "auto" and "rayleigh" have `delta`, the largest probability that
            a filter counts as converged and is not, 1e-3 by default. "rayleigh" has `step`, in units of
            1 / (spectral radius); 0.9 by default.

    Raises:
        ValueError, TypeError: bad arguments.
        RuntimeError: the requested backend is not available.
    """
    solver = _solver(solver, max_iters, options)
    require.positive("tol", tol)
    choose(backend)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, got {type(generator).__name__}")

    require.choice("precision", precision, ("highest", "medium"))
    if until is not None and not isinstance(until, Cut):
        raise TypeError(f"until must be a Cut, got {type(until).__name__}")

    if callable(operator) and not isinstance(operator, SplittingOperator):
        if shape is None:
            raise ValueError("shape (M, D) must be given with a function")
        free = MatrixFreeOperator(operator, shape, dtype or torch.float32, device or "cpu")
        return extremal_eigenpairs(
            free, solver, tol, backend=backend, generator=generator, progress=progress, until=until, precision=precision
        )
    if shape is not None or dtype is not None or device is not None:
        raise ValueError("shape, dtype and device belong to a function; an operator has its own")
    operators = _as_list(operator)
    starts = _random_starts(operators, generator) if solver.uses_starts else []
    if precision == "medium" and choose(backend).name == "cpu":
        operators = rounded_where_faster(operators)
    operators = prepared_where_faster(operators, backend)
    # Kernels multiply as they are told to; what PyTorch multiplies beside them must not lose bits.
    is_on_gpu = any(own.device.type == "cuda" for own in operators)
    with cpu_options(precision=precision), exact_products() if is_on_gpu else nullcontext():
        spectra = solver.solve(Eigenproblem(operators, starts, tol, backend, progress, until))

    if isinstance(operator, Mapping):
        # A capture knows the shapes of its layers.
        layers: Mapping[str, LayerShape] = getattr(operator, "layers", {})
        named = zip(operator, spectra, strict=True)
        return {name: replace(spectrum, layer=layers.get(name)) for name, spectrum in named}
    if isinstance(operator, SplittingOperator) or _is_pair(operator):
        return spectra[0]
    return spectra


def _solver(solver: str | Solver, max_iters: int | None, options: Mapping[str, Any]) -> Solver:
    """Return the solver that a name and options stand for."""
    given = dict(options) if max_iters is None else {"max_iters": max_iters, **options}
    if isinstance(solver, Solver):
        if given:
            raise TypeError(f"a solver object holds its own options; got {', '.join(given)} as well")
        return solver
    require.choice("solver", solver, tuple(SOLVERS))
    if max_iters is not None:
        require.count("max_iters", max_iters)
    if solver == "exact":
        given.pop("max_iters", None)
    for name, value in options.items():
        owners = [kind for kind in SOLVERS.values() if name in {field.name for field in fields(kind)}]
        if SOLVERS[solver] not in owners:
            # Report a bad value first, even if the option belongs to another solver.
            for owner in owners:
                owner(**{name: value})
            raise TypeError(f"solver {solver!r} has no option {name!r}")
    return SOLVERS[solver](**given)


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
        raise TypeError(
            f"operator must hold SplittingOperators, got {wrong[0]} among them; a function becomes one by "
            "MatrixFreeOperator(function, (M, D))"
        )
    raise TypeError(
        "operator must be a SplittingOperator, a list or dict of them, (X, C), or a function; "
        f"got {type(operator).__name__}"
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
