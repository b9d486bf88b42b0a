"""Lanczos with full reorthogonalization, all filters of all layers in lockstep, and a certificate for its results."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from s3d_fast.backends.choice import choose
from s3d_fast.backends.interface import Backend
from s3d_fast.base import require
from s3d_fast.kernels import options
from s3d_fast.maths.reference import KrylovState, coupling_noise
from s3d_fast.operators import SplittingOperator, matvec_all
from s3d_fast.solvers.cut import Ranking
from s3d_fast.solvers.judgement import judged
from s3d_fast.solvers.repeated import RepeatedStep, why_not_repeat
from s3d_fast.solvers.solver import MARGIN, Eigenproblem, Solver, counted
from s3d_fast.solvers.spectrum import Found, Pairs, Spectrum, Status, unit_vectors

# On a GPU, steps between two checks of convergence: the host has to wait for the device.
CHECK_EVERY = 2
# On a CPU, the flops of products that take about twice as long as a check of one filter after one step; a check after k
# steps takes k times as long. Filters are checked as soon as the products since the last check have taken that long,
# and at the latest when their spaces have grown by this factor.
CHECK_FLOPS, CHECK_GROWTH = 2.0**15, 1.25
# Filters leave together, once they are this share of their layer: later steps then save more than copying the rest
# costs.
LEAVING_SHARE = 1 / 4
# The largest probability that a certified width of a filter is wrong.
DELTA = 1e-3


@dataclass(frozen=True)
class Lanczos(Solver):
    """Lanczos with full reorthogonalization; one Krylov space per filter gives both ends.

    Attributes:
        max_iters: the largest number of steps.
        delta: the largest probability that a certified width of a filter is wrong.
    """

    max_iters: int = 128
    delta: float = DELTA

    def __post_init__(self) -> None:
        require.count("max_iters", self.max_iters)
        require.probability("delta", self.delta)

    def solve(self, problem: Eigenproblem) -> list[Spectrum]:
        """Return the spectrum of every operator.

        A filter has converged when both Ritz residuals and both certified widths are at most tol times its spectral
        radius. An exhausted Krylov space (S = 0, low rank, few distinct eigenvalues, D steps) holds the extreme
        eigenvectors exactly. Memory: one vector of M D entries per step and layer.
        """
        layers, first = [], 0
        for operator, start in zip(problem.operators, problem.starts, strict=True):
            layers.append(_Spaces(operator, start, first))
            first += operator.shape[0]
        tol, backend = problem.tol, problem.backend
        by_kind: dict[tuple[torch.dtype, torch.device], list[_Spaces]] = {}
        for spaces in layers:
            by_kind.setdefault((spaces.q.dtype, spaces.q.device), []).append(spaces)
        ranking = problem.ranking(layers[0].q.device) if layers else None
        groups = [
            _Lockstep(members, tol, self.delta, choose(backend, members[0].q), ranking) for members in by_kind.values()
        ]
        repeated = RepeatedStep(_is_recorded(problem.operators, groups))
        work, looked = 0.0, 0
        for step in counted(self.max_iters, problem.progress):
            groups = [group for group in groups if group.layers]
            if not groups:
                break
            states = [state for group in groups for state in group.states_at_work()]
            at_work = [spaces for group in groups for spaces in group.at_work]
            operators_at_work = [spaces.operator for spaces in at_work]
            repeated.run(partial(_take_step, groups, backend), [*operators_at_work, *states])
            for spaces in at_work:
                spaces.steps += 1
            work += sum(map(_flops, operators_at_work))
            last = step == self.max_iters or all(spaces.is_full for spaces in at_work)
            if last or step >= CHECK_GROWTH * looked + 2 or _is_time(groups, step, work):
                _check(groups, last)
                work, looked = 0.0, step
        return judged(
            problem.operators,
            [spaces.pairs() for spaces in layers],
            [spaces.status for spaces in layers],
            tol,
            backend,
        )


def _take_step(groups: Sequence[_Lockstep], backend: str) -> None:
    """Launch one step of all layers that are not done. Between two checks, only the contents of tensors change."""
    at_work = [spaces for group in groups for spaces in group.at_work]
    products = matvec_all([spaces.operator for spaces in at_work], [spaces.q for spaces in at_work], backend)
    first = 0
    for group in groups:
        own = slice(first, first + len(group.at_work))
        group.extend(products[own])
        first = own.stop


def _is_recorded(operators: Sequence[SplittingOperator], groups: Sequence[_Lockstep]) -> bool:
    """Return whether steps shall be a CUDA graph; warn if they should be one and cannot."""
    if not operators or not options.current().cuda_graph:
        return False
    reason = why_not_repeat(operators)
    if not reason and any(group.backend.name != "triton" for group in groups):
        reason = "the steps of the reference need their number on the host"
    if reason:
        warnings.warn(f"cuda_graph: steps are launched one by one: {reason}", stacklevel=5)
    return not reason


def _flops(operator: SplittingOperator) -> float:
    """Return the flops of a product; infinite where they are many in any case, on patches, edges and chains."""
    return math.inf if operator.rows is None else 4.0 * operator.rows * operator.shape[0] * operator.shape[1]


def _is_time(groups: Sequence[_Lockstep], step: int, work: float) -> bool:
    """Return whether the products since the last check have taken as long as a check."""
    if any(group.length.device.type != "cpu" for group in groups):
        return step % CHECK_EVERY == 0
    # Two steps certify nothing.
    return step > 2 and work >= CHECK_FLOPS * step * sum(len(group.length) for group in groups)


def _check(groups: Sequence[_Lockstep], last: bool) -> None:
    """Release the filters that are done.

    The host waits for the device only here: once, for all layers.
    """
    for group in groups:
        group.look()
    flags = [group.done() for group in groups]
    leaving = torch.cat([flag.to(flags[0].device) for flag in flags]).tolist()
    first = 0
    for group, flag in zip(groups, flags, strict=True):
        own = slice(first, first + len(flag))
        group.settle(leaving[own], last)
        first = own.stop


class _Spaces:
    """The Krylov spaces of the filters of one operator.

    `self.rows` holds the indices of the filters that are still at work, in the operator that was given;
    `self.operator` is restricted to them. `self.found` holds the Ritz vectors of the filters that have left.
    """

    def __init__(self, operator: SplittingOperator, start: Tensor, first: int) -> None:
        filters, width = operator.shape
        self.operator = operator
        self.first = first
        self.rows = torch.arange(filters, device=operator.device)
        self.basis = start.new_empty(filters, min(16, width) + 1, width)  # (M, capacity, D)
        self.basis[:, 0] = start
        self.steps = 0
        # The last basis vector of every space, zero where the space is exhausted. Its address stays the same, so a
        # backend can keep its table of addresses from step to step.
        self.q = start.clone(memory_format=torch.contiguous_format)  # (M, D)
        counts = torch.zeros(2, filters, dtype=torch.int64, device=operator.device)
        self.found = Found(torch.empty_like(self.q), torch.empty_like(self.q), *counts)
        self.values, self.errors, self.widths = start.new_zeros(3, 2, filters)  # each (2, M)
        self.status = torch.full((filters,), int(Status.STEPS), dtype=torch.int8, device=operator.device)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def is_full(self) -> bool:
        """Whether the spaces have all D dimensions, so that no step can add anything."""
        return self.steps == self.basis.shape[2]

    def release(self, leaving: Sequence[int], state: _Results) -> None:
        """Store the results of the filters that leave; the Ritz vectors of `state` are coordinates in the basis."""
        index = _indices(leaving, self.rows.device)
        vectors = state.ritz[index, :, : self.steps].to(self.basis.dtype) @ self.basis[index, : self.steps]
        rows, iterations = self.rows[index], state.iterations[index]
        self.found.v_min[rows], self.found.v_max[rows] = vectors[:, 0], vectors[:, 1]
        self.found.iterations[rows] = torch.where(iterations == 0, self.steps, iterations).clamp(max=self.steps)
        self.found.matvecs[rows] = self.steps
        self.status[rows] = state.status[index]
        for kept, found in ((self.values, state.values), (self.errors, state.errors), (self.widths, state.widths)):
            kept[:, rows] = found[index].mT.to(kept.dtype)

    def pairs(self) -> Pairs:
        """Return the eigenpairs of all filters.

        A Ritz vector v = Q s combines basis vectors whose products are known: S Q = Q T + beta q e^T. Its residual
        therefore needs no further product: |S v - theta v| = beta |s_k|, plus rounding. The recurrence holds up to the
        coupling that an exhausted space drops, which is at most sqrt(2) of the spectral radius times the noise.
        """
        found = self.found
        noise = 2**0.5 * coupling_noise(self.q.shape[1], self.q.dtype) * self.values.abs().amax(0)
        return Pairs(unit_vectors(found), self.values, self.errors, self.widths, noise, found.iterations, found.matvecs)

    def keep(self, staying: Sequence[int]) -> None:
        """Keep only the given filters at work."""
        index = _indices(staying, self.rows.device)
        self.operator = self.operator.restrict(index)
        basis = self.basis.new_empty(len(index), *self.basis.shape[1:])
        # What is not used yet need not be copied.
        used = self.steps + 1
        torch.index_select(self.basis[:, :used], 0, index, out=basis[:, :used])
        self.rows, self.q, self.basis = self.rows[index], self.q[index], basis


@dataclass
class _Results:
    """What the last check found, for each filter."""

    ritz: Tensor  # (filters, 2, steps), coordinates of the Ritz vectors in the basis
    values: Tensor  # (filters, 2)
    errors: Tensor  # (filters, 2), residuals without rounding errors
    widths: Tensor  # (filters, 2)
    iterations: Tensor  # (filters,), the step at which the filter converged; 0 if it has not
    status: Tensor  # (filters,), int8

    def __getitem__(self, own: slice) -> _Results:
        return _Results(*(getattr(self, name)[own] for name in self.__dataclass_fields__))


class _Lockstep:
    """The tridiagonal matrices T = Q^T S Q of all filters of some layers, layer after layer.

    All layers share these tensors because the work on them is small for each layer.
    """

    def __init__(
        self, layers: Sequence[_Spaces], tol: float, delta: float, backend: Backend, ranking: Ranking | None
    ) -> None:
        self.layers, self.tol, self.backend, self.ranking = list(layers), tol, backend, ranking
        filters, q = sum(map(len, layers)), layers[0].q
        self.alpha = q.new_zeros(filters, 17)  # diagonal of T
        self.beta = torch.zeros_like(self.alpha)  # off-diagonal of T; the last one couples to the next vector
        # The dimension of each filter's space; it stops growing when the space is exhausted.
        self.length = torch.zeros(filters, dtype=torch.int64, device=q.device)
        self.scale = q.new_zeros(filters)
        self.iterations = torch.zeros_like(self.length)
        # The number of steps so far, where kernels can read it.
        self.taken = torch.zeros((), dtype=torch.int64, device=q.device)
        # A random unit vector of D entries has a component below t with a probability of at most t sqrt(2 D / pi).
        widths = [spaces.q.shape[1] for spaces in layers for _ in range(len(spaces))]
        # Each of a filter's two ends may be wrong with half the probability.
        self.growth = torch.tensor(widths, dtype=torch.float64, device=q.device) * (2 / math.pi / (delta / 2) ** 2)
        self.numbers = torch.cat([spaces.first + spaces.rows for spaces in layers])
        self.found: _Results | None = None
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

    @property
    def at_work(self) -> list[_Spaces]:
        """The layers whose spaces can grow; all of them have taken the same number of steps."""
        return [spaces for spaces in self.layers if not spaces.is_full]

    def states_at_work(self) -> list[KrylovState]:
        """Return the tensors of the layers at work, with room for a step."""
        for spaces in self.at_work:
            if spaces.steps + 1 == spaces.basis.shape[1]:
                spaces.basis = _enlarged(spaces.basis, min(2 * spaces.steps, spaces.basis.shape[2]) + 1)
                self.states.pop(spaces, None)
            if spaces.steps + 1 == self.alpha.shape[1]:
                self.alpha, self.beta = (_enlarged(tensor, 2 * spaces.steps + 1) for tensor in (self.alpha, self.beta))
                self.states.clear()
        return [self._state(spaces) for spaces in self.at_work]

    def extend(self, products: Sequence[Tensor]) -> None:
        """Turn the products S q of the layers at work into the next basis vectors of all their spaces."""
        at_work = self.at_work
        if at_work:
            states = [self._state(spaces) for spaces in at_work]
            self.backend.krylov_extend_grouped(
                states=states, products=products, step=at_work[0].steps, taken=self.taken
            )

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

    def look(self) -> None:
        """Find the Ritz vectors, their residuals and certified widths; tell the ranking."""
        steps = max(spaces.steps for spaces in self.layers)
        alpha, beta = self.alpha[:, :steps], self.beta[:, :steps]
        values, ritz = self.backend.tridiagonal_extremes(alpha=alpha, beta=beta, length=self.length)
        widths = self.backend.certified_widths(
            alpha=alpha, beta=beta, length=self.length, values=values, growth=self.growth
        )
        # |S Q s - theta Q s| = beta_k |s_k|; an exhausted space has no coupling left.
        errors = beta[:, -1].double()[:, None] * ritz[:, :, -1].abs()
        status = torch.full_like(self.length, int(Status.STEPS), dtype=torch.int8)
        self.found = _Results(ritz, values, errors, widths, self.iterations, status)
        if self.ranking is not None:
            self.ranking.learn(self.numbers.to(self.ranking.lower.device), *self._for_ranking())

    def _for_ranking(self) -> tuple[Tensor, Tensor]:
        assert self.ranking is not None
        assert self.found is not None
        device = self.ranking.lower.device
        return self.found.values.to(device), self.found.widths.to(device)

    def done(self) -> Tensor:  # (filters,), bool
        """Return which filters need no further step."""
        assert self.found is not None
        found, steps = self.found, max(spaces.steps for spaces in self.layers)
        radius = found.values.abs().amax(-1)
        # Rounding errors are added at the end: no further step makes them smaller.
        converged = torch.maximum(found.errors, found.widths).amax(-1) <= MARGIN * self.tol * radius
        exhausted = self.beta[:, steps - 1] == 0
        broken = ~found.values.isfinite().all(-1)
        decided = torch.zeros_like(converged)
        if self.ranking is not None:
            numbers = self.numbers.to(self.ranking.lower.device)
            decided = self.ranking.decided(numbers, self._for_ranking()[0], self.tol).to(converged.device)
        status = torch.where(converged | exhausted, int(Status.STAGNATION), found.status)
        found.status = torch.where(decided, int(Status.DECIDED), status).to(torch.int8)
        # Back to 0 if a converged filter finds a better Ritz value and has not converged to it yet.
        since = torch.where(self.iterations == 0, steps, self.iterations)
        self.iterations = found.iterations = torch.where(converged, since, 0)
        return converged | exhausted | broken | decided

    def settle(self, leaving: Sequence[bool], last: bool) -> None:
        """Release filters and stop layers; `leaving` comes from `done`."""
        assert self.found is not None
        remaining: list[_Spaces] = []
        staying: list[int] = []
        for spaces, own in self.own.items():
            if last or all(leaving[own]):
                spaces.release(range(len(spaces)), self.found[own])
                # Free the basis: it is large and no longer needed.
                spaces.basis = spaces.basis.new_empty(0, 0, spaces.basis.shape[2])
                self.states.pop(spaces, None)
                continue
            rows = list(range(own.start, own.stop))
            if sum(leaving[own]) >= LEAVING_SHARE * len(spaces):
                spaces.release([i - own.start for i in rows if leaving[i]], self.found[own])
                rows = [i for i in rows if not leaving[i]]
                self.states.pop(spaces, None)
                spaces.keep([i - own.start for i in rows])
            remaining.append(spaces)
            staying += rows
        self.layers = remaining
        if len(staying) < len(self.length):
            index = _indices(staying, self.length.device)
            for name in ("alpha", "beta", "length", "scale", "iterations", "growth", "numbers"):
                setattr(self, name, getattr(self, name)[index])
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
