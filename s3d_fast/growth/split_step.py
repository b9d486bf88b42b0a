"""A splitting step: capture, solve, select, split; and the loss before and after it."""

from __future__ import annotations

import copy
import inspect
import math
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from s3d_fast.base import byte_counts, require
from s3d_fast.base.batches import are_the_same
from s3d_fast.base.losses import checked_loss
from s3d_fast.base.world import World
from s3d_fast.capture.all_batches import Captured, capture
from s3d_fast.capture.curvature import GROWTH_FLOOR, Curvature
from s3d_fast.capture.sampling import Sampling
from s3d_fast.capture.sharding import of_all_processes
from s3d_fast.growth.separation import copies_after, steps_to_part
from s3d_fast.growth.step_size import StepSize
from s3d_fast.network.graph import Graph, filter_lengths, stored_tensors
from s3d_fast.network.undisturbed import undisturbed
from s3d_fast.network.wrapping import inside
from s3d_fast.operators import SplittingOperator
from s3d_fast.records.record import EIGEN_STAGES, Phase
from s3d_fast.records.run_folder import RunFolder
from s3d_fast.solvers import Spectrum, Status, extremal_eigenpairs
from s3d_fast.solvers.noise import COARSE_DELTA, COARSEST, sampling_errors, worthwhile_tolerance
from s3d_fast.splitting.new_filters import KINDS, propose_filters
from s3d_fast.splitting.plan import NeuronSplit, SplitPlan
from s3d_fast.splitting.proposals import Proposals
from s3d_fast.splitting.pruning import removal_losses
from s3d_fast.splitting.selection import cut_of, select
from s3d_fast.splitting.surgery import apply_splits

Options = Mapping[str, Any]
# More batches are taken as long as fresh data keep more of the promised gain, by at least this much.
LEAST_RISE = 0.02


@dataclass(frozen=True)
class SplitStep:
    """The settings of a run's splits; `Grower` documents the fields."""

    loss_fn: Callable[[Any, Any], Tensor]
    batches: Iterable[Any] | Callable[[int], Iterable[Any]]
    eps: float | str
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
    # Whether to split neurons; and options for `propose_filters`, if filters are to be added.
    splits: bool = True
    new_filters: Options | None = None
    # Whether neurons may be removed to pay for others; needs a budget.
    removals: bool = False
    # An input on which removals are proved by execution.
    example_input: Any = None
    # Other batches, which tell how much of the promised gain is real.
    fresh: Iterable[Any] | Callable[[int], Iterable[Any]] | None = None
    # Batches that can become more do so within this share of the time that training took.
    split_time: float = 0.5

    @property
    def step(self) -> StepSize:
        """The size of a split."""
        return StepSize.of(self.eps)

    def check(self, graph: Graph) -> Options:
        """Return the options of the first selection; raise ValueError or TypeError on bad options, before training."""
        Curvature(self.curvature, self.step.size, self.step.relative)
        if not self.splits and self.new_filters is None:
            raise ValueError(
                "splits is False and new_filters is None, so there is nothing to grow by; give one of them"
            )
        if self.new_filters is not None:
            _check_proposal_options(self.new_filters)
        if self.memory_budget is not None:
            byte_counts.as_bytes("memory_budget", self.memory_budget)
        for name in self.units or ():
            if name not in graph.units:
                raise ValueError(f"units: {name!r} is not a unit of the model, which has {', '.join(graph.units)}")
        first = self._selection(0, graph)
        # Without candidates nothing can be removed, as a budget below 0 asks for.
        is_below = self.removals and (first.get("budget") or 0) < 0
        select({}, graph, **({**first, "budget": 0.0} if is_below else first))
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
        while (more := self._more(phase, batches)) is not None:
            before, batches = phase.kept, more
            phase.batches = int(self.world.sum(len(batches))[0])
            plan = self._plan(phase, model, graph, batches, folder)
            if phase.kept is None or before is None or phase.kept < before + LEAST_RISE:
                break
        # A search that ran out of time can end differently in each process: all take the first one's plan.
        changes = self.world.same((plan.splits, plan.new, plan.removed))
        plan = replace(plan, splits=changes[0], new=changes[1], removed=changes[2])
        for name, splits in plan.by_unit().items():
            phase.gains[name] = sum(split.gain for split in splits)
            phase.new_filters[name] = sum(split.copies - 1 for split in splits)
        for one in plan.new:
            phase.new_filters[one.unit] = phase.new_filters.get(one.unit, 0) + 1
        phase.splits, phase.added, phase.removed = len(plan.splits), len(plan.new), len(plan.removed)
        phase.negative = sum(bool((split.weights < 0).any()) for split in plan.splits)
        phase.slope = plan.slope
        if not len(plan):
            return plan
        with timed(phase, "select"):
            eps = self._size(plan, model, batches)
        phase.eps, phase.relative = eps, self.step.relative
        phase.predicted_change = plan.predicted_change(eps)
        phase.copies = copies_after(plan)
        phase.steps_to_part = _steps_to_part(plan, eps, model, optimizer)
        with timed(phase, "split"):
            check = self.example_input if plan.removed else None
            apply_splits(model, plan, eps, optimizer, also=self.also, check=check)
        if self.measure:
            # The loss after the split, for comparison with the prediction.
            with timed(phase, "measure"):
                phase.split_loss = self._loss(model, batches)
        return plan

    def _more(self, phase: Phase, batches: Any) -> Any:
        """Return more batches, if there are any, fresh data tell whether they help, and time is left; else None."""
        larger = getattr(batches, "larger", None)
        if larger is None or phase.kept is None:
            return None
        taken = sum(phase.seconds.get(stage, 0.0) for stage in EIGEN_STAGES)
        # Twice the batches take twice the time.
        is_affordable = self.world.same(taken + 2 * taken <= self.split_time * phase.seconds.get("train", 0.0))
        return larger() if is_affordable else None

    def _plan(
        self, phase: Phase, model: nn.Module, graph: Graph, batches: Collection[Any], folder: RunFolder | None
    ) -> SplitPlan:
        """Return the changes of this phase: those that gain the most, or the choice of the function `plan`."""
        if self.plan is not None:
            with timed(phase, "measure"):
                phase.loss = self._loss(model, batches)
            with timed(phase, "select"):
                plan = self.plan(phase.index, graph)
                return plan.relative_to(model) if self.step.relative else plan
        selection = self._selection(phase.index, graph)
        lengths = _lengths(graph, model) if self.step.relative else None
        spectra: dict[str, Spectrum] = {}
        proposals: dict[str, Proposals] = {}
        if self.splits:
            spectra = self._spectra(phase, model, graph, batches, folder, selection, lengths)
        if self.new_filters is not None:
            with timed(phase, "capture"):
                if not self.splits:
                    phase.loss = self._loss(model, batches)
                proposals = self._proposals(model, graph, batches)
        losses = None
        if self.removals:
            with timed(phase, "capture"):
                every = removal_losses(model, self.loss_fn, batches, graph, world=self.world)
                losses = {name: own for name, own in every.items() if self.units is None or name in self.units}
        with timed(phase, "select"):
            plan = select(
                spectra,
                graph,
                proposals=proposals,
                losses=losses,
                eps=self.step.size,
                lengths=lengths,
                **selection,
            )
        if self.fresh is not None and plan.splits:
            with timed(phase, "measure"):
                phase.kept = self._kept(phase, model, graph, plan)
        return plan

    def _spectra(
        self,
        phase: Phase,
        model: nn.Module,
        graph: Graph,
        batches: Collection[Any],
        folder: RunFolder | None,
        selection: Options,
        lengths: Mapping[str, Tensor] | None,
    ) -> dict[str, Spectrum]:
        """Return the spectra of all units, and record what they took."""
        with timed(phase, "capture"):
            operators = self._captured(model, graph, batches)
        phase.loss = operators.loss
        with timed(phase, "solve"):
            spectra = self._solved(phase, operators, selection, lengths)
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
        return spectra

    def _captured(
        self, model: nn.Module, graph: Graph, batches: Collection[Any], units: Sequence[str] | None = None
    ) -> Captured:
        """Return the operators of all units, or of some, on the batches of all processes."""
        operators = self.world.together(
            lambda: capture(
                model,
                self.loss_fn,
                batches,
                graph,
                units=self.units if units is None else units,
                curvature=self.curvature,
                eps=self.step.size,
                relative=self.step.relative,
                floor=GROWTH_FLOOR,
                rows_per_sample=self.rows_per_sample,
                memory_budget=self.memory_budget,
                progress=self.progress,
            )
        )
        return of_all_processes(operators, len(batches), self.world)

    def _proposals(self, model: nn.Module, graph: Graph, batches: Collection[Any]) -> dict[str, Proposals]:
        """Return new filters to choose among, by the batches of all processes."""
        seed = self.world.same(int(torch.randint(2**62, ())))
        generator = torch.Generator().manual_seed(seed)
        options = {"units": self.units, "generator": generator, **(self.new_filters or {}), "world": self.world}
        return propose_filters(model, self.loss_fn, batches, graph, **options)

    def _kept(self, phase: Phase, model: nn.Module, graph: Graph, plan: SplitPlan) -> float | None:
        """Return the share of the promised gain that splits have on other data; None if there are none."""
        assert self.fresh is not None
        given = self.fresh(phase.index) if callable(self.fresh) else self.fresh
        batches: Any = given if are_the_same(given) else list(given)
        if not self.world.sum(len(batches))[0]:
            return None
        splits = plan.by_unit()
        operators = self._captured(model, graph, batches, list(splits))
        return kept_gain(operators, splits) / plan.gain

    def _size(self, plan: SplitPlan, model: nn.Module, batches: Collection[Any]) -> float:
        """Return the size of the step: the one with the least loss on the batches, if several are to be tried."""
        sizes = self.step.sizes()
        if len(sizes) == 1 or not plan.splits:
            return self.step.size
        losses = []
        for size in sizes:
            trial = copy.deepcopy(inside(model))
            apply_splits(trial, plan, size)
            losses.append(self._loss(trial, batches))
        return sizes[min(range(len(sizes)), key=losses.__getitem__)]

    @property
    def _tol(self) -> float | None:
        """The tolerance of eigenpairs; None lets the noise of the data decide."""
        return self.solver.get("tol")

    def _solved(
        self, phase: Phase, operators: Captured, selection: Options, lengths: Mapping[str, Tensor] | None
    ) -> dict[str, Spectrum]:
        """Return the spectra, as exact as the selection of splits and the noise of the data ask for."""
        filters = sum(operator.shape[0] for operator in operators.values())
        # Where new filters or removals compete, gains of splits alone do not decide.
        alone = self.new_filters is None and not self.removals
        until = cut_of(filters, **selection) if alone else None
        if until is not None and lengths is not None:
            until = replace(until, weights=[lengths[name].square() for name in operators])

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


def kept_gain(operators: Mapping[str, SplittingOperator], splits: Mapping[str, Sequence[NeuronSplit]]) -> float:
    """Return the sum of w_k delta_k^T S delta_k over all copies of splits, with the operators' S."""
    total = 0.0
    for name, own in splits.items():
        operator = operators[name]
        for copies in sorted({split.copies for split in own}):
            same = [split for split in own if split.copies == copies]
            neurons = torch.tensor([split.neuron for split in same], device=operator.device)
            offsets = torch.stack([split.offsets for split in same], 1).to(operator.device, operator.dtype)
            weights = torch.stack([split.weights for split in same], 1).to(offsets)  # (m, n)
            products = operator.restrict(neurons).matvec(offsets.contiguous())  # (m, n, D)
            total += float((weights * (offsets * products).sum(-1)).double().sum())
    return total


def _lengths(graph: Graph, model: nn.Module) -> dict[str, Tensor]:
    """Return the lengths of all filters, by unit."""
    stored = stored_tensors(inside(model))
    return {name: filter_lengths(unit, stored) for name, unit in graph.units.items()}


def _steps_to_part(
    plan: SplitPlan, eps: float, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> float | None:
    """Return how many steps copies take to part, by the formula for gradient descent; None for other optimizers."""
    if not isinstance(optimizer, torch.optim.SGD) or not plan.splits:
        return None
    group = optimizer.param_groups[0]
    found = steps_to_part(plan, eps, _lengths(plan.graph, model), float(group["lr"]), float(group["momentum"]))
    return found if math.isfinite(found) else None


def _check_proposal_options(options: Options) -> None:
    known = inspect.signature(propose_filters).parameters
    for name in options:
        if name not in known or known[name].kind is not inspect.Parameter.KEYWORD_ONLY:
            raise ValueError(f"new_filters: {name!r} is not an option of propose_filters")
    require.choice("kind", options.get("kind", "random"), KINDS)


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
