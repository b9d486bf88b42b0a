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
from s3d_fast.operators import SplittingOperator, matvec_all
from s3d_fast.solvers.solver import Solver, counted
from s3d_fast.solvers.spectrum import Found, Spectrum, spectrum, unit_vectors

# Convergence is looked at every so many steps: finding the Ritz values costs about as much as a step of a small layer,
# and a GPU has to be waited for.
CHECK_EVERY = 2
# Of a filter, N D: the work of a step beside which that of finding Ritz values is nothing on a CPU. With such steps,
# the filters that may leave are looked for at every one.
LONG_STEP = 2**18
# Filters leave together, when they are this share of their layer: copying the rest is then paid for by later steps.
LEAVING_SHARE = 1 / 4
# A filter leaves the work for good only when its residual is this much below the tolerance. A Ritz value can rest on
# the second eigenvalue for a while, with a small residual, before it finds the first; filters that merely count as
# converged stay on while others need the layer's steps anyway, which uncovers nearly all such cases for nothing.
LEAVE_BELOW = 1e-2
# How much of what rows have in common is in a start vector, beside a random unit vector.
COMMON = 4.0
# What rounding adds to a residual, in units of the arithmetic's and of the spectral radius.
ROUNDING = 4


@dataclass(frozen=True)
class Lanczos(Solver):
    """Lanczos with full reorthogonalization; one Krylov space per filter gives both ends.

    Attributes:
        max_iters: the steps to take at most.
    """

    max_iters: int = 128

    def __post_init__(self) -> None:
        require.count("max_iters", self.max_iters)

    def solve(
        self,
        operators: Sequence[SplittingOperator],
        starts: Sequence[Tensor],
        tol: float,
        backend: str,
        progress: bool = False,
    ) -> list[Spectrum]:
        """Return the spectrum of every operator.

        A filter counts as converged when both Ritz residuals are at most tol times its spectral radius, or when its
        Krylov space is exhausted (S = 0, low rank, few distinct eigenvalues, D steps): the space then holds the extreme
        eigenvectors exactly. Memory: one vector of M D entries per step and layer.
        """
        layers = [
            _Spaces(operator, _started(operator, start)) for operator, start in zip(operators, starts, strict=True)
        ]
        by_kind: dict[tuple[torch.dtype, torch.device], list[_Spaces]] = {}
        for layer in layers:
            by_kind.setdefault((layer.q.dtype, layer.q.device), []).append(layer)
        groups = [_Lockstep(members, tol, choose(backend, members[0].q)) for members in by_kind.values()]
        always_look = _are_long(operators)
        for step in counted(self.max_iters, progress):
            groups = [group for group in groups if group.layers]
            if not groups:
                break
            at_work = [(group, layer) for group in groups for layer in group.layers if not layer.is_full]
            products = matvec_all([layer.operator for _, layer in at_work], [layer.q for _, layer in at_work], backend)
            for (group, layer), product in zip(at_work, products, strict=True):
                group.extend(layer, product)
            last = step == self.max_iters
            may_stop = last or step % CHECK_EVERY == 0 or all(layer.is_full for _, layer in at_work)
            if may_stop or always_look:
                _check(groups, may_stop, last)
        return [layer.spectrum(tol) for layer in layers]


def _started(operator: SplittingOperator, random: Tensor) -> Tensor:
    """Return start vectors: random, but nearer to the extreme eigenvectors where rows have something in common.

    Behind a ReLU they have, and it is most of many eigenvectors. What is random sees to it that none is missed.
    """
    common = operator.common_part()
    return random if common is None else normalize(random + COMMON * common, dim=-1)


def _are_long(operators: Sequence[SplittingOperator]) -> bool:
    """Return whether the steps are so long that looking at all filters after each costs nothing.

    Operators that do not know their rows have much work per filter: patches or edges.
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
    """Let filters go that are well past convergence, and stop layers that have converged if they may.

    This is the only place where the host waits for the device: once, for all layers.
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

    The filters still at work are the rows `self.rows` of the operator that was given; `self.operator` is restricted to
    them. Filters that have left have their Ritz vectors in `self.found`.
    """

    def __init__(self, operator: SplittingOperator, start: Tensor) -> None:
        filters, width = operator.shape
        self.operator = operator
        self.rows = torch.arange(filters, device=operator.device)
        self.basis = start.new_empty(filters, min(16, width) + 1, width)  # (M, capacity, D)
        self.basis[:, 0] = start
        self.steps = 0
        # The last basis vector of every space, zero where the space is exhausted. It stays where it is in memory, so
        # that a backend which keeps addresses need not look them up at every step.
        self.q = start.clone(memory_format=torch.contiguous_format)  # (M, D)
        counts = torch.zeros(2, filters, dtype=torch.int64, device=operator.device)
        self.found = Found(torch.empty_like(self.q), torch.empty_like(self.q), *counts)
        self.values, self.residuals = start.new_zeros(2, 2, filters)  # each (2, M)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def is_full(self) -> bool:
        """Whether the spaces have as many dimensions as there are: no step can add anything."""
        return self.steps == self.basis.shape[2]

    def release(self, leaving: Sequence[int], ritz: Tensor, values: Tensor, errors: Tensor, iterations: Tensor) -> None:
        """Store the Ritz vectors, given in the basis, values, errors and iterations of the filters that leave."""
        index = _indices(leaving, self.rows.device)
        vectors = ritz[index, :, : self.steps].to(self.basis.dtype) @ self.basis[index, : self.steps]
        rows, iterations = self.rows[index], iterations[index]
        self.found.v_min[rows], self.found.v_max[rows] = vectors[:, 0], vectors[:, 1]
        self.found.iterations[rows] = torch.where(iterations == 0, self.steps, iterations).clamp(max=self.steps)
        self.found.matvecs[rows] = self.steps
        self.values[:, rows], self.residuals[:, rows] = (of[index].mT.to(self.values.dtype) for of in (values, errors))

    def spectrum(self, tol: float) -> Spectrum:
        """Return what was found.

        The Ritz vector v = Q s is a combination of vectors whose products are known, S Q = Q T + beta q e^T, so that
        its own product needs no computing: |S v - theta v| = beta |s_k|, to which rounding adds.
        """
        rounding = ROUNDING * torch.finfo(self.values.dtype).eps * self.values.abs().amax(0)
        residuals = self.residuals + rounding
        return spectrum(
            unit_vectors(self.found), self.values, residuals, self.found.iterations, self.found.matvecs, tol
        )

    def keep(self, staying: Sequence[int]) -> None:
        """Drop all other filters from the work."""
        index = _indices(staying, self.rows.device)
        self.operator = self.operator.restrict(index)
        self.rows, self.q, self.basis = self.rows[index], self.q[index], self.basis[index]


class _Lockstep:
    """The tridiagonal matrices T = Q^T S Q of all filters of some layers, one layer's rows after the other's.

    They are in one place because what is done with them is little work for many layers.
    """

    def __init__(self, layers: Sequence[_Spaces], tol: float, backend: Backend) -> None:
        self.layers, self.tol, self.backend = list(layers), tol, backend
        filters, q = sum(map(len, layers)), layers[0].q
        self.alpha = q.new_zeros(filters, 17)  # diagonal of T
        self.beta = torch.zeros_like(self.alpha)  # off-diagonal of T; the last one couples to the next vector
        # The dimension of each filter's space: stops growing when the space is exhausted.
        self.length = torch.zeros(filters, dtype=torch.int64, device=q.device)
        self.scale = q.new_zeros(filters)
        self.iterations = torch.zeros_like(self.length)
        # Since the last check: in the basis (filters, 2, steps), and (filters, 2).
        self.ritz, self.values, self.errors = (
            q.new_empty(filters, 2, 0),
            q.new_empty(filters, 2),
            q.new_empty(filters, 2),
        )
        self._place()

    def _place(self) -> None:
        """Find the rows of every layer."""
        self.own: dict[_Spaces, slice] = {}
        first = 0
        for layer in self.layers:
            self.own[layer] = slice(first, first + len(layer))
            first += len(layer)

    def extend(self, layer: _Spaces, product: Tensor) -> None:
        """Take S q of a layer, and make of it the next basis vector of every space."""
        if layer.steps + 1 == layer.basis.shape[1]:
            layer.basis = _enlarged(layer.basis, min(2 * layer.steps, layer.basis.shape[2]) + 1)
        if layer.steps + 1 == self.alpha.shape[1]:
            self.alpha, self.beta = (_enlarged(tensor, 2 * layer.steps + 1) for tensor in (self.alpha, self.beta))
        own = self.own[layer]
        state = (self.alpha[own], self.beta[own], self.length[own], self.scale[own])
        self.backend.krylov_extend(layer.basis, product, *state, layer.steps, layer.q)
        layer.steps += 1

    def progress(self) -> Tensor:  # (2, filters), bool
        """Find the Ritz vectors; return which filters have converged, and which of them are well past it."""
        steps = max(layer.steps for layer in self.layers)
        alpha, beta = self.alpha[:, :steps], self.beta[:, :steps]
        self.values, self.ritz = self.backend.tridiagonal_extremes(alpha, beta, self.length)
        radius = self.values.abs().amax(-1)
        # |S Q s - theta Q s| = beta_k |s_k|; an exhausted space has no coupling left.
        coupling = beta[:, -1].double()
        self.errors = coupling[:, None] * self.ritz[:, :, -1].abs()
        error = self.errors.amax(-1)
        exhausted = coupling == 0
        converged = exhausted | (error <= self.tol * radius)
        leaving = exhausted | (error <= LEAVE_BELOW * self.tol * radius)
        # Back to 0 if a filter that had converged found a better Ritz value and has not converged on it yet.
        since = torch.where(self.iterations == 0, steps, self.iterations)
        self.iterations = torch.where(converged, since, 0)
        return torch.stack([converged, leaving])

    def settle(self, converged: Sequence[bool], leaving: Sequence[bool], may_stop: bool, last: bool) -> None:
        """Act on what `progress` returned."""
        remaining: list[_Spaces] = []
        staying: list[int] = []
        for layer, own in self.own.items():
            results = (self.ritz[own], self.values[own], self.errors[own], self.iterations[own])
            if last or all(leaving[own]) or (may_stop and all(converged[own])):
                layer.release(range(len(layer)), *results)
                # The basis is large, and not needed any more.
                layer.basis = layer.basis.new_empty(0, 0, layer.basis.shape[2])
                continue
            rows = list(range(own.start, own.stop))
            if sum(leaving[own]) >= LEAVING_SHARE * len(layer):
                layer.release([i - own.start for i in rows if leaving[i]], *results)
                rows = [i for i in rows if not leaving[i]]
                layer.keep([i - own.start for i in rows])
            remaining.append(layer)
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
    """Return the tensor with room for more entries along its second dimension, which are zero."""
    larger = tensor.new_zeros(tensor.shape[0], capacity, *tensor.shape[2:])
    larger[:, : tensor.shape[1]] = tensor
    return larger
