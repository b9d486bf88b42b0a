"""The default solver: Lanczos with full reorthogonalization, all filters of all layers in lockstep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from s3d_fast.backends.choice import choose
from s3d_fast.backends.interface import Backend
from s3d_fast.base import require
from s3d_fast.maths.reference import KrylovState
from s3d_fast.operators import SplittingOperator, matvec_all
from s3d_fast.solvers.solver import Eigenproblem, Solver, counted
from s3d_fast.solvers.spectrum import Found, Spectrum, spectrum, unit_vectors

# Steps between two checks of convergence: finding the Ritz values costs about as much as a step of a small layer, and
# the host has to wait for a GPU.
CHECK_EVERY = 2
# N D of a filter from which a step is long: on a CPU, the work of finding Ritz values is then negligible, and filters
# may leave after every step.
LONG_STEP = 2**18
# Filters leave together, once they are this share of their layer: later steps then save more than copying the rest
# costs.
LEAVING_SHARE = 1 / 4
# A filter leaves for good only when its residual is below this times the tolerance. A Ritz value can rest on the second
# eigenvalue for a while, with a small residual, before it finds the first. Filters that have only just converged stay
# while others need the layer's steps anyway: this uncovers nearly all such cases at no cost.
LEAVE_BELOW = 1e-2
# The weight of the rows' common part in a start vector; the random unit vector has weight 1.
COMMON = 4.0
# The rounding error of a residual, in units of the machine epsilon times the spectral radius.
ROUNDING = 4


@dataclass(frozen=True)
class Lanczos(Solver):
    """Lanczos with full reorthogonalization; one Krylov space per filter gives both ends.

    Attributes:
        max_iters: the largest number of steps.
    """

    max_iters: int = 128

    def __post_init__(self) -> None:
        require.count("max_iters", self.max_iters)

    def solve(self, problem: Eigenproblem) -> list[Spectrum]:
        """Return the spectrum of every operator.

        A filter counts as converged when both Ritz residuals are at most tol times its spectral radius, or when its
        Krylov space is exhausted (S = 0, low rank, few distinct eigenvalues, D steps): the space then holds the extreme
        eigenvectors exactly. Memory: one vector of M D entries per step and layer.
        """
        layers = [
            _Spaces(operator, _started(operator, start))
            for operator, start in zip(problem.operators, problem.starts, strict=True)
        ]
        tol, backend = problem.tol, problem.backend
        by_kind: dict[tuple[torch.dtype, torch.device], list[_Spaces]] = {}
        for spaces in layers:
            by_kind.setdefault((spaces.q.dtype, spaces.q.device), []).append(spaces)
        groups = [_Lockstep(members, tol, choose(backend, members[0].q)) for members in by_kind.values()]
        always_look = _are_long(problem.operators)
        for step in counted(self.max_iters, problem.progress):
            groups = [group for group in groups if group.layers]
            if not groups:
                break
            at_work = [(group, spaces) for group in groups for spaces in group.layers if not spaces.is_full]
            operators_at_work, vectors = [spaces.operator for _, spaces in at_work], [spaces.q for _, spaces in at_work]
            products = matvec_all(operators_at_work, vectors, backend)
            for (group, spaces), product in zip(at_work, products, strict=True):
                group.extend(spaces, product)
            last = step == self.max_iters
            may_stop = last or step % CHECK_EVERY == 0 or all(spaces.is_full for _, spaces in at_work)
            if may_stop or always_look:
                _check(groups, may_stop, last)
        return [spaces.spectrum(tol) for spaces in layers]


def _started(operator: SplittingOperator, random: Tensor) -> Tensor:
    """Return the start vectors: random unit vectors plus COMMON times the common part of the rows, normalized.

    Rows behind a ReLU have much in common, and that is most of many extreme eigenvectors. The random part ensures that
    no eigenvector is missed.
    """
    common = operator.common_part()
    return random if common is None else normalize(random + COMMON * common, dim=-1)


def _are_long(operators: Sequence[SplittingOperator]) -> bool:
    """Return whether the steps are so long that checking all filters after each step costs nothing.

    Operators without `rows`, on patches or edges, always have long steps and are not counted.
    """
    if any(operator.device.type != "cpu" for operator in operators):
        return False
    filters = work = 0
    for operator in operators:
        if operator.rows is not None:
            filters += operator.shape[0]
            work += operator.shape[0] * operator.shape[1] * operator.rows
    return work >= LONG_STEP * filters


def _check(groups: Sequence[_Lockstep], may_stop: bool, last: bool) -> None:
    """Release filters that are well past convergence; with `may_stop`, also stop layers that have converged.

    The host waits for the device only here: once, for all layers.
    """
    flags = [group.progress() for group in groups]
    converged, leaving = torch.cat([flag.to(flags[0].device) for flag in flags], -1).tolist()
    first = 0
    for group, flag in zip(groups, flags, strict=True):
        own = slice(first, first + flag.shape[1])
        group.settle(converged[own], leaving[own], may_stop, last)
        first = own.stop


class _Spaces:
    """The Krylov spaces of the filters of one operator.

    `self.rows` holds the indices of the filters that are still at work, in the operator that was given;
    `self.operator` is restricted to them. `self.found` holds the Ritz vectors of the filters that have left.
    """

    def __init__(self, operator: SplittingOperator, start: Tensor) -> None:
        filters, width = operator.shape
        self.operator = operator
        self.rows = torch.arange(filters, device=operator.device)
        self.basis = start.new_empty(filters, min(16, width) + 1, width)  # (M, capacity, D)
        self.basis[:, 0] = start
        self.steps = 0
        # The last basis vector of every space, zero where the space is exhausted. Its address stays the same, so a
        # backend can keep its table of addresses from step to step.
        self.q = start.clone(memory_format=torch.contiguous_format)  # (M, D)
        counts = torch.zeros(2, filters, dtype=torch.int64, device=operator.device)
        self.found = Found(torch.empty_like(self.q), torch.empty_like(self.q), *counts)
        self.values, self.residuals = start.new_zeros(2, 2, filters)  # each (2, M)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def is_full(self) -> bool:
        """Whether the spaces have all D dimensions, so that no step can add anything."""
        return self.steps == self.basis.shape[2]

    def release(self, leaving: Sequence[int], ritz: Tensor, values: Tensor, errors: Tensor, iterations: Tensor) -> None:
        """Store the results of the filters that leave; `ritz` holds coordinates in the basis."""
        index = _indices(leaving, self.rows.device)
        vectors = ritz[index, :, : self.steps].to(self.basis.dtype) @ self.basis[index, : self.steps]
        rows, iterations = self.rows[index], iterations[index]
        self.found.v_min[rows], self.found.v_max[rows] = vectors[:, 0], vectors[:, 1]
        self.found.iterations[rows] = torch.where(iterations == 0, self.steps, iterations).clamp(max=self.steps)
        self.found.matvecs[rows] = self.steps
        self.values[:, rows], self.residuals[:, rows] = (of[index].mT.to(self.values.dtype) for of in (values, errors))

    def spectrum(self, tol: float) -> Spectrum:
        """Return the spectrum of all filters.

        A Ritz vector v = Q s combines basis vectors whose products are known: S Q = Q T + beta q e^T. Its residual
        therefore needs no further product: |S v - theta v| = beta |s_k|, plus rounding.
        """
        rounding = ROUNDING * torch.finfo(self.values.dtype).eps * self.values.abs().amax(0)
        residuals = self.residuals + rounding
        return spectrum(
            unit_vectors(self.found), self.values, residuals, self.found.iterations, self.found.matvecs, tol
        )

    def keep(self, staying: Sequence[int]) -> None:
        """Keep only the given filters at work."""
        index = _indices(staying, self.rows.device)
        self.operator = self.operator.restrict(index)
        self.rows, self.q, self.basis = self.rows[index], self.q[index], self.basis[index]


class _Lockstep:
    """The tridiagonal matrices T = Q^T S Q of all filters of some layers, layer after layer.

    All layers share these tensors because the work on them is small for each layer.
    """

    def __init__(self, layers: Sequence[_Spaces], tol: float, backend: Backend) -> None:
        self.layers, self.tol, self.backend = list(layers), tol, backend
        filters, q = sum(map(len, layers)), layers[0].q
        self.alpha = q.new_zeros(filters, 17)  # diagonal of T
        self.beta = torch.zeros_like(self.alpha)  # off-diagonal of T; the last one couples to the next vector
        # The dimension of each filter's space; it stops growing when the space is exhausted.
        self.length = torch.zeros(filters, dtype=torch.int64, device=q.device)
        self.scale = q.new_zeros(filters)
        self.iterations = torch.zeros_like(self.length)
        # From the last check: coordinates in the basis, (filters, 2, steps); values and errors, (filters, 2).
        self.ritz, self.values, self.errors = (
            q.new_empty(filters, 2, 0),
            q.new_empty(filters, 2),
            q.new_empty(filters, 2),
        )
        self._place()

    def _place(self) -> None:
        """Assign every layer its slice of the filters."""
        self.own: dict[_Spaces, slice] = {}
        # Made at the first step, and again when a tensor is replaced: most steps find them here.
        self.states: dict[_Spaces, KrylovState] = {}
        first = 0
        for spaces in self.layers:
            self.own[spaces] = slice(first, first + len(spaces))
            first += len(spaces)

    def extend(self, spaces: _Spaces, product: Tensor) -> None:
        """Turn the product S q of a layer into the next basis vector of every space."""
        if spaces.steps + 1 == spaces.basis.shape[1]:
            spaces.basis = _enlarged(spaces.basis, min(2 * spaces.steps, spaces.basis.shape[2]) + 1)
            self.states.pop(spaces, None)
        if spaces.steps + 1 == self.alpha.shape[1]:
            self.alpha, self.beta = (_enlarged(tensor, 2 * spaces.steps + 1) for tensor in (self.alpha, self.beta))
            self.states.clear()
        self.backend.krylov_extend(self._state(spaces), product, spaces.steps)
        spaces.steps += 1

    def _state(self, spaces: _Spaces) -> KrylovState:
        """Return the tensors of a layer's spaces, its own ones and its slices of the common ones."""
        if spaces not in self.states:
            own = self.own[spaces]
            self.states[spaces] = KrylovState(
                basis=spaces.basis,
                q=spaces.q,
                alpha=self.alpha[own],
                beta=self.beta[own],
                length=self.length[own],
                scale=self.scale[own],
            )
        return self.states[spaces]

    def progress(self) -> Tensor:  # (2, filters), bool
        """Find the Ritz vectors; return which filters have converged, and which of them may leave."""
        steps = max(spaces.steps for spaces in self.layers)
        alpha, beta = self.alpha[:, :steps], self.beta[:, :steps]
        self.values, self.ritz = self.backend.tridiagonal_extremes(alpha=alpha, beta=beta, length=self.length)
        radius = self.values.abs().amax(-1)
        # |S Q s - theta Q s| = beta_k |s_k|; an exhausted space has no coupling left.
        coupling = beta[:, -1].double()
        self.errors = coupling[:, None] * self.ritz[:, :, -1].abs()
        error = self.errors.amax(-1)
        exhausted = coupling == 0
        converged = exhausted | (error <= self.tol * radius)
        leaving = exhausted | (error <= LEAVE_BELOW * self.tol * radius)
        # Back to 0 if a converged filter finds a better Ritz value and has not converged to it yet.
        since = torch.where(self.iterations == 0, steps, self.iterations)
        self.iterations = torch.where(converged, since, 0)
        return torch.stack([converged, leaving])

    def settle(self, converged: Sequence[bool], leaving: Sequence[bool], may_stop: bool, last: bool) -> None:
        """Release filters and stop layers; `converged` and `leaving` come from `progress`."""
        remaining: list[_Spaces] = []
        staying: list[int] = []
        for spaces, own in self.own.items():
            results = (self.ritz[own], self.values[own], self.errors[own], self.iterations[own])
            if last or all(leaving[own]) or (may_stop and all(converged[own])):
                spaces.release(range(len(spaces)), *results)
                # Free the basis: it is large and no longer needed.
                spaces.basis = spaces.basis.new_empty(0, 0, spaces.basis.shape[2])
                self.states.pop(spaces, None)
                continue
            rows = list(range(own.start, own.stop))
            if sum(leaving[own]) >= LEAVING_SHARE * len(spaces):
                spaces.release([i - own.start for i in rows if leaving[i]], *results)
                rows = [i for i in rows if not leaving[i]]
                self.states.pop(spaces, None)
                spaces.keep([i - own.start for i in rows])
            remaining.append(spaces)
            staying += rows
        self.layers = remaining
        if len(staying) < len(self.length):
            index = _indices(staying, self.length.device)
            self.alpha, self.beta = self.alpha[index], self.beta[index]
            self.length, self.scale, self.iterations = self.length[index], self.scale[index], self.iterations[index]
            self._place()


def _indices(indices: Sequence[int], device: torch.device) -> Tensor:
    """Return indices as a tensor on the device, without waiting for the device."""
    tensor = torch.tensor(indices, dtype=torch.int64)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _enlarged(tensor: Tensor, capacity: int) -> Tensor:
    """Return the tensor with its second dimension padded by zeros to `capacity`."""
    larger = tensor.new_zeros(tensor.shape[0], capacity, *tensor.shape[2:])
    larger[:, : tensor.shape[1]] = tensor
    return larger
