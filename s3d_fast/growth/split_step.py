"""A splitting step: capture, solve, select, split; and the loss before and after it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from s3d_fast.base import byte_counts
from s3d_fast.base.batches import are_the_same
from s3d_fast.base.losses import checked_loss
from s3d_fast.base.world import World
from s3d_fast.capture.all_batches import Captured, capture
from s3d_fast.capture.curvature import GROWTH_FLOOR, Curvature
from s3d_fast.capture.sampling import Sampling
from s3d_fast.capture.sharding import of_all_processes
from s3d_fast.network.graph import Graph
from s3d_fast.network.undisturbed import undisturbed
from s3d_fast.records.record import Phase
from s3d_fast.records.run_folder import RunFolder
from s3d_fast.solvers import Spectrum, Status, extremal_eigenpairs
from s3d_fast.solvers.noise import COARSE_DELTA, COARSEST, sampling_errors, worthwhile_tolerance
from s3d_fast.splitting.plan import SplitPlan
from s3d_fast.splitting.selection import cut_of, select
from s3d_fast.splitting.surgery import apply_splits

Options = Mapping[str, Any]


@dataclass(frozen=True)
class SplitStep:
    """The settings of a run's splits; `Grower` documents the fields."""

    loss_fn: Callable[[Any, Any], Tensor]
    batches: Iterable[Any] | Callable[[int], Iterable[Any]]
    eps: float
    curvature: str
    selection: Options | Callable[[int, Graph], Options]
    solver: Options
    rows_per_sample: int | None
    memory_budget: int | str | None
    units: Sequence[str] | None
    plan: Callable[[int, Graph], SplitPlan] | None
    world: World
    progress: bool
    # Other models that must grow alike, such as a moving average of the weights.
    also: Sequence[nn.Module] = ()
    # Whether to evaluate the loss after the split.
    measure: bool = True

    def check(self, graph: Graph) -> Options:
        """Return the options of the first selection; raise ValueError or TypeError on bad options, before training."""
        Curvature(self.curvature, self.eps)
        if self.memory_budget is not None:
            byte_counts.as_bytes("memory_budget", self.memory_budget)
        for name in self.units or ():
            if name not in graph.units:
                raise ValueError(f"units: {name!r} is not a unit of the model, which has {', '.join(graph.units)}")
        first = self._selection(0, graph)
        select({}, graph, **first)
        if self.rows_per_sample is not None:
            Sampling(self.rows_per_sample)
        extremal_eigenpairs([], **{**self.solver, "tol": COARSEST if self._tol is None else self._tol})
        if "generator" in self.solver:
            raise ValueError("solver: a generator has a state that a resumed run would not have; leave it out")
        return first

    def __call__(
        self,
        phase: Phase,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        graph: Graph,
        folder: RunFolder | None,
    ) -> SplitPlan:
        """Split the neurons that gain the most, record it in `phase`, and return the plan, which may be empty."""
        with timed(phase, "capture"):
            given = self.batches(phase.index) if callable(self.batches) else self.batches
            batches: Any = given if are_the_same(given) else list(given)
            phase.batches = int(self.world.sum(len(batches))[0])
        plan = self._plan(phase, model, graph, batches, folder)
        # A search that ran out of time can end differently in each process: all take the first one's splits.
        plan = replace(plan, splits=self.world.same(plan.splits))
        for name, splits in plan.by_unit().items():
            phase.gains[name] = sum(split.gain for split in splits)
            phase.new_filters[name] = sum(split.copies - 1 for split in splits)
        phase.splits, phase.negative = len(plan), sum(bool((split.weights < 0).any()) for split in plan.splits)
        phase.predicted_change = plan.predicted_change(self.eps)
        if not len(plan):
            return plan
        with timed(phase, "split"):
            apply_splits(model, plan, self.eps, optimizer, also=self.also)
        if self.measure:
            # The loss after the split, for comparison with the prediction.
            with timed(phase, "measure"):
                phase.split_loss = self._loss(model, batches)
        return plan

    def _plan(
        self, phase: Phase, model: nn.Module, graph: Graph, batches: Collection[Any], folder: RunFolder | None
    ) -> SplitPlan:
        """Return the splits of this phase: those that gain the most, or the choice of the function `plan`."""
        if self.plan is not None:
            with timed(phase, "measure"):
                phase.loss = self._loss(model, batches)
            with timed(phase, "select"):
                return self.plan(phase.index, graph)
        with timed(phase, "capture"):
            operators = self.world.together(
                lambda: capture(
                    model,
                    self.loss_fn,
                    batches,
                    graph,
                    units=self.units,
                    curvature=self.curvature,
                    eps=self.eps,
                    floor=GROWTH_FLOOR,
                    rows_per_sample=self.rows_per_sample,
                    memory_budget=self.memory_budget,
                    progress=self.progress,
                )
            )
            operators = of_all_processes(operators, len(batches), self.world)
        phase.loss = operators.loss
        selection = self._selection(phase.index, graph)
        with timed(phase, "solve"):
            spectra = self._solved(phase, operators, selection)
        # Read after the solver, which loads parts of a scratch file into memory.
        phase.memory = operators.nbytes
        if operators.plan is not None:
            phase.scratch = operators.plan.disk_bytes
            if self.progress:
                tqdm.write(operators.report(), file=sys.stderr)
        phase.unconverged = sum(_unfinished(spectrum) for spectrum in spectra.values())
        phase.matvecs = max((int(spectrum.matvecs.max()) for spectrum in spectra.values()), default=0)
        if folder is not None and self.world.is_first:
            ends = {name: (spectrum.lambda_min, spectrum.lambda_max) for name, spectrum in spectra.items()}
            folder.write_spectra(phase.index, ends)
        with timed(phase, "select"):
            return select(spectra, graph, **selection)

    @property
    def _tol(self) -> float | None:
        """The tolerance of eigenpairs; None lets the noise of the data decide."""
        return self.solver.get("tol")

    def _solved(self, phase: Phase, operators: Captured, selection: Options) -> dict[str, Spectrum]:
        """Return the spectra, as exact as the selection of splits and the noise of the data ask for."""
        filters = sum(operator.shape[0] for operator in operators.values())
        until = cut_of(filters, **selection)

        def solve(tol: float, **coarse: Any) -> dict[str, Spectrum]:
            phase.tol = tol
            options = {"progress": self.progress, "until": until, **coarse, **self.solver, "tol": tol}
            return extremal_eigenpairs(operators, **options)

        if self._tol is not None:
            return solve(self._tol)
        if phase.batches < 2:
            # A single batch tells nothing of its noise.
            return solve(worthwhile_tolerance(None))
        spectra = solve(COARSEST, **self._coarse)
        errors = sampling_errors(operators, spectra, self.solver.get("backend", "auto"))
        phase.sampling_error = None if errors is None else float(errors.median())
        tol = worthwhile_tolerance(errors)
        # Another solve costs more than a slightly finer tolerance is worth.
        return spectra if tol > 0.8 * COARSEST else solve(tol, **self._coarse)

    @property
    def _coarse(self) -> Options:
        """Options of the solver where the noise of the data decides: fresh data change more than these do."""
        takes_delta = self.solver.get("solver", "auto") in ("auto", "lanczos")
        return {"precision": "medium", **({"delta": COARSE_DELTA} if takes_delta else {})}

    def _loss(self, model: nn.Module, batches: Collection[Any]) -> float:
        """Return the mean loss in eval mode on the batches of all processes."""
        with undisturbed(model):
            mine = sum(self._batch_loss(model, batch, index) for index, batch in enumerate(batches))
        total, count = self.world.sum(mine, len(batches))
        if not count:
            raise ValueError("batches must hold at least one batch, got none")
        return total / count

    def _batch_loss(self, model: nn.Module, batch: Any, index: int) -> float:
        try:
            with torch.no_grad():
                return float(checked_loss(model, self.loss_fn, batch, index))
        except RuntimeError:
            # The loss may take gradients itself, as a gradient penalty does.
            with torch.enable_grad():
                return float(checked_loss(model, self.loss_fn, batch, index).detach())

    def _selection(self, phase: int, graph: Graph) -> Options:
        return self.selection(phase, graph) if callable(self.selection) else self.selection


def _unfinished(spectrum: Spectrum) -> int:
    """Return how many filters have neither converged nor been decided."""
    assert spectrum.status is not None
    return int((spectrum.status > Status.DECIDED).sum())


@contextmanager
def timed(phase: Phase, stage: str) -> Iterator[None]:
    """Add the seconds that the `with` block takes to a stage of the phase."""
    start = time.perf_counter()
    yield
    phase.seconds[stage] = phase.seconds.get(stage, 0.0) + time.perf_counter() - start
