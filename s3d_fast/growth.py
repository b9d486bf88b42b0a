"""Growth: the paper's Algorithm 1. Train, capture, solve, select, split; repeat."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from s3d_fast import checkpoint, checks, costs, memory
from s3d_fast.batches import are_the_same
from s3d_fast.capture import capture
from s3d_fast.distributed import ALONE, World
from s3d_fast.graph import Graph
from s3d_fast.plan import SplitPlan
from s3d_fast.random_state import random_state, seed_all, set_random_state
from s3d_fast.run_folder import RunFolder
from s3d_fast.selection import select
from s3d_fast.solvers import extremal_eigenpairs
from s3d_fast.surgery import apply_splits, check_optimizer
from s3d_fast.tracing import trace
from s3d_fast.training import Epoch, EpochTrainer

Train = Callable[[nn.Module, torch.optim.Optimizer, int], object]
Options = Mapping[str, Any]


@dataclass
class Phase:
    """What happened in one phase of growth: training, and the split after it.

    Attributes:
        index: of the phase, from 0.
        widths: of every unit while it trained.
        params: all parameters of the model.
        macs: multiply-accumulates per sample of the layers that hold channels.
        metrics: what `evaluate` returned after training.
        loss: on the batches for splitting, after training; NaN in the last phase, which does not split.
        split_loss: the same after the split.
        predicted_change: eps^2 / 2 times the sum of the gains.
        gains: the sum of the gains of every unit's splits.
        new_filters: of every unit.
        splits: how many neurons were split.
        negative: how many of them into copies of which one has a negative weight, as S2D never does.
        unconverged: filters whose eigenpairs did not reach the tolerance.
        batches: that the split was computed on, those of all processes.
        matvecs: products S v that the slowest filter took.
        memory: bytes that the splitting operators held; in each process, if there are several.
        scratch: bytes of their scratch file.
        seconds: for each stage.
        epochs: of an `EpochTrainer`: loss, learning rate, seconds and samples of each.
    """

    index: int
    widths: dict[str, int]
    params: int
    macs: int
    metrics: dict[str, float] = field(default_factory=dict)
    loss: float = float("nan")
    split_loss: float = float("nan")
    predicted_change: float = 0.0
    gains: dict[str, float] = field(default_factory=dict)
    new_filters: dict[str, int] = field(default_factory=dict)
    splits: int = 0
    negative: int = 0
    unconverged: int = 0
    batches: int = 0
    matvecs: int = 0
    memory: int = 0
    scratch: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    epochs: list[dict[str, float]] = field(default_factory=list)

    @property
    def was_selected(self) -> bool:
        """Whether the phase has ended with a split, or has found nothing to split."""
        return "select" in self.seconds


class Grower:
    """Grow a model by alternating training and splitting.

    Every phase starts from random states derived from `seed` and its number, so that a run that was interrupted and
    resumed ends with the weights of one that was not (on a CPU, with the same number of threads, and with data whose
    order depends on the global random state alone). An `EpochTrainer` is resumed after its last finished epoch, any
    other function at the start of its phase.

    Args:
        model: the seed network; grown in place.
        example_input: as for `trace`.
        loss_fn: as for `capture`.
        batches: a function that returns the batches to split on, of a given phase; or a list of batches. They are
            iterated several times. All are kept in memory meanwhile, unless they come from an object that says
            `same_every_pass = True`, has a length, and makes the same ones again at every pass.
        train: `train(model, optimizer, phase)`; an `EpochTrainer`, or a function of yours.
        optimizer: makes the optimizer from the model's parameters. Its state is carried through the splits, and its
            learning rates are set back to their first values at the start of every phase.
        phases: how often to train; there is a split between every two.
        eps: the size of a split.
        selection: options for `select`, such as dict(m=2, c=1.3, fraction=0.35); c=1 is S2D. Or a function of the
            phase and the graph that returns them.
        solver: options for `extremal_eigenpairs`, such as dict(tol=1e-2).
        memory_budget: the bytes that splitting operators may hold on to, as for `capture`.
        units: names of the units that may be split; all by default.
        plan: makes the split plan from the phase and the graph, in place of capture, eigenpairs and selection.
        trained: the model is trained already: the first phase begins with its evaluation.
        evaluate: returns metrics of the trained model, such as {"accuracy": 0.7}.
        after_phase: called with every phase when it is finished and saved.
        out: a folder for checkpoints and the history, see `RunFolder`; without one nothing is written and nothing can
            be resumed.
        seed: of the random states.
        world: the processes that run this together: `train` and `evaluate` see to their own parts, `batches` returns
            this process's, and the first one writes the files.
        progress: show bars.

    Attributes:
        history: a `Phase` for each phase that is finished.
        phase: the one that is under way, or the last.
        stopped: why growth ended before the last phase, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        example_input: Any,
        loss_fn: Callable[[Any, Any], Tensor],
        batches: Sequence[Any] | Callable[[int], Iterable[Any]],
        train: Train,
        optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
        *,
        phases: int,
        eps: float = 0.01,
        selection: Options | Callable[[int, Graph], Options] | None = None,
        solver: Options | None = None,
        memory_budget: int | str | None = None,
        units: Sequence[str] | None = None,
        plan: Callable[[int, Graph], SplitPlan] | None = None,
        trained: bool = False,
        evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None,
        after_phase: Callable[[Phase], object] = lambda phase: None,
        out: str | Path | None = None,
        seed: int = 0,
        world: World = ALONE,
        progress: bool = False,
    ) -> None:
        checks.is_count("phases", phases)
        checks.is_positive("eps", eps)
        checks.is_count("seed", seed, at_least=0)
        if memory_budget is not None:
            memory.as_bytes("memory_budget", memory_budget)
        self.memory_budget = memory_budget
        self.model, self.example_input, self.loss_fn = model, example_input, loss_fn
        self.batches, self.train, self.phases, self.eps = batches, train, phases, eps
        self.selection = {"m": 2, "c": 1.3, "fraction": 0.35} if selection is None else selection
        self.solver = {"tol": 1e-2} if solver is None else dict(solver)
        self.units, self.plan, self.trained, self.evaluate = units, plan, trained, evaluate
        self.after_phase, self.seed, self.world, self.progress = after_phase, seed, world, progress
        self.folder = None if out is None else RunFolder(out)
        self.history: list[Phase] = []
        self.phase: Phase | None = None
        self.stopped: str | None = None
        # A phase that a checkpoint found in the middle of its training, and the random state to go on with.
        self._unfinished: tuple[Phase, dict[str, Tensor], dict[str, Any]] | None = None
        # Fails here, before any training, on a model that cannot be traced or has no unit of that name.
        graph = trace(model, example_input)
        for name in units or ():
            if name not in graph.units:
                raise ValueError(f"units: {name!r} is not a unit of the model, which has {', '.join(graph.units)}")
        self.make_optimizer = optimizer
        self.optimizer = optimizer(model.parameters())
        check_optimizer(self.optimizer, model)
        # Bad options raise here, and not after a phase of training.
        select({}, graph, **self._selection(0, graph))
        extremal_eigenpairs([], **self.solver)
        if "generator" in self.solver:
            raise ValueError("solver: a generator has a state that a resumed run would not have; leave it out")
        self._first_rates = [group["lr"] for group in self.optimizer.param_groups]

    def run(self, resume: bool = False) -> list[Phase]:
        """Run all phases, or those that are left; return the history.

        Args:
            resume: go on after the last phase whose checkpoint is in `out`; from the start if there is none.

        Raises:
            ValueError: `resume` without `out`; a folder that holds another run; a loss that is not finite.
        """
        if self.folder is not None:
            if self.world.is_first:
                self.folder.prepare()
            self.world.wait()
            found = self.folder.latest()
            if found is not None and not resume:
                raise ValueError(f"out: {self.folder.path} holds a run already; resume it, or give another folder")
            if found is not None:
                self._restore(found)
        elif resume:
            raise ValueError("resume needs the folder of the run; give out")
        with tqdm(total=self.phases, initial=len(self.history), unit="phase", disable=not self.progress) as bar:
            if self.history and len(self.history) < self.phases and not self.history[-1].was_selected:
                # A finished run goes on for more phases: its last one was not split yet.
                self._split(self.history[-1])
                self._save("phase", len(self.history) - 1)
            while len(self.history) < self.phases and self.stopped is None:
                phase = self._phase(len(self.history))
                self.history.append(phase)
                self._save("phase", phase.index)
                if self.world.is_first:
                    if self.folder is not None:
                        self.folder.forget_epochs()
                    self.after_phase(phase)
                # None goes on before the files are there that it would need after a failure.
                self.world.wait()
                bar.update()
        return self.history

    def _phase(self, index: int) -> Phase:
        """Train, and split unless this is the last phase."""
        for group, rate in zip(self.optimizer.param_groups, self._first_rates, strict=True):
            group["lr"] = rate
        graph = trace(self.model, self.example_input)
        params = sum(parameter.numel() for parameter in self.model.parameters())
        phase = Phase(index, graph.widths(), params, costs.count(graph).macs)
        seed_all(self.seed, index, 0)
        if self._unfinished is not None:
            phase, *state = self._unfinished
            set_random_state(*state)
            self._unfinished = None
        self.phase = phase
        with self._timed(phase, "train"):
            self._train(phase)
        with self._timed(phase, "evaluate"):
            if self.evaluate is not None:
                phase.metrics = {name: float(value) for name, value in self.evaluate(self.model).items()}
        if self.folder is not None and self.world.is_first:
            checkpoint.save_grown(self.model, self.folder.file("network", index))
        if index + 1 < self.phases:
            self._split(phase)
        return phase

    def _train(self, phase: Phase) -> None:
        if self.trained and phase.index == 0:
            return
        if not isinstance(self.train, EpochTrainer):
            self.train(self.model, self.optimizer, phase.index)
            return

        def after_epoch(epoch: Epoch) -> None:
            phase.epochs.append(asdict(epoch))
            self._save("epoch", phase.index, unfinished=phase)

        # The seconds of epochs that were trained before the run was resumed count as well.
        phase.seconds["train"] = sum(epoch["seconds"] for epoch in phase.epochs)
        self.train(
            self.model,
            self.optimizer,
            phase.index,
            start=len(phase.epochs),
            loss_scale=phase.epochs[-1]["loss_scale"] if phase.epochs else None,
            after_epoch=after_epoch,
        )

    def _split(self, phase: Phase) -> None:
        self.phase = phase
        # A state of its own, so that a split that comes later, in a resumed run, is the same.
        seed_all(self.seed, phase.index, 1)
        with self._timed(phase, "capture"):
            graph = trace(self.model, self.example_input)
            given = self.batches(phase.index) if callable(self.batches) else self.batches
            batches: Any = given if are_the_same(given) else list(given)
            phase.batches = int(self.world.sum(len(batches))[0])
        # The same in all processes, also where a search for the best one was cut short by the clock.
        plan = self._plan(phase, graph, batches)
        plan = replace(plan, splits=self.world.same(plan.splits))
        for name, splits in plan.by_unit().items():
            phase.gains[name] = sum(split.gain for split in splits)
            phase.new_filters[name] = sum(split.copies - 1 for split in splits)
        phase.splits, phase.negative = len(plan), sum(bool((split.weights < 0).any()) for split in plan.splits)
        phase.predicted_change = plan.predicted_change(self.eps)
        if not len(plan):
            self.stopped = f"no neuron gains from a split after phase {phase.index}"
            return
        with self._timed(phase, "split"):
            apply_splits(self.model, plan, self.eps, self.optimizer)
        # What the split did, for comparison with what it promised: no unit is captured, only the loss.
        with self._timed(phase, "measure"):
            phase.split_loss = self._loss(batches, trace(self.model, self.example_input))

    def _loss(self, batches: Collection[Any], graph: Graph) -> float:
        """Return the loss on the batches of all processes."""
        mine = capture(self.model, self.loss_fn, batches, graph, units=()).loss
        total, count = self.world.sum(len(batches) * mine, len(batches))
        return total / count

    def _plan(self, phase: Phase, graph: Graph, batches: Collection[Any]) -> SplitPlan:
        """Return the splits of this phase: those that gain the most, or what the function given has chosen."""
        if self.plan is not None:
            with self._timed(phase, "measure"):
                phase.loss = self._loss(batches, graph)
            with self._timed(phase, "select"):
                return self.plan(phase.index, graph)
        with self._timed(phase, "capture"):
            operators = capture(
                self.model,
                self.loss_fn,
                batches,
                graph,
                units=self.units,
                memory_budget=self.memory_budget,
                progress=self.progress,
            )
            operators = self.world.shared(operators, len(batches))
        phase.loss = operators.loss
        with self._timed(phase, "solve"):
            spectra = extremal_eigenpairs(operators, **{"progress": self.progress, **self.solver})
        # After the solver, which reads a scratch file by parts.
        phase.memory = operators.nbytes
        if operators.plan is not None:
            phase.scratch = operators.plan.disk_bytes
            if self.progress:
                tqdm.write(operators.report(), file=sys.stderr)
        phase.unconverged = sum(int((~spectrum.converged).sum()) for spectrum in spectra.values())
        phase.matvecs = max((int(spectrum.matvecs.max()) for spectrum in spectra.values()), default=0)
        if self.folder is not None and self.world.is_first:
            self.folder.write_spectra(phase.index, spectra)
        with self._timed(phase, "select"):
            return select(spectra, graph, **self._selection(phase.index, graph))

    def _selection(self, phase: int, graph: Graph) -> Options:
        return self.selection(phase, graph) if callable(self.selection) else self.selection

    @contextmanager
    def _timed(self, phase: Phase, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        phase.seconds[stage] = phase.seconds.get(stage, 0.0) + time.perf_counter() - start

    def _settings(self) -> dict[str, Any]:
        """Return what a resumed run must share with the run it continues."""
        settings = {
            "selection": self.selection,
            "plan": self.plan,
            "trained": self.trained,
            "solver": self.solver,
            "eps": self.eps,
            "seed": self.seed,
            "units": self.units,
            "optimizer": type(self.optimizer).__name__,
        }
        # A function is known by its name: its address changes from run to run.
        return json.loads(json.dumps(settings, default=lambda value: getattr(value, "__qualname__", str(type(value)))))

    def _save(self, kind: str, index: int, unfinished: Phase | None = None) -> None:
        """Write the checkpoint of a finished phase, or of an epoch of a phase that is unfinished; and the history."""
        if self.folder is None or not self.world.is_first:
            return
        tensors = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        state, groups = checkpoint.optimizer_tensors(self.model, self.optimizer)
        tensors |= {f"optimizer/{name}": tensor for name, tensor in state.items()}
        generators, plain = random_state()
        tensors |= {f"random/{name}": tensor for name, tensor in generators.items()}
        record = {
            "sizes": checkpoint.layer_sizes(self.model),
            "groups": groups,
            "history": [asdict(past) for past in self.history],
            "unfinished": None if unfinished is None else asdict(unfinished),
            "random": plain,
            "stopped": self.stopped,
            "settings": self._settings(),
        }
        checkpoint.write(self.folder.file(kind, index), tensors, record)
        self._write_history(unfinished)

    def _write_history(self, unfinished: Phase | None) -> None:
        assert self.folder is not None
        phases = self.history if unfinished is None else [*self.history, unfinished]
        self.folder.write_history([asdict(phase) for phase in phases])

    def _restore(self, path: Path) -> None:
        tensors, record = checkpoint.read(path)
        if record["settings"] != self._settings():
            raise ValueError(
                f"out: {path.parent} holds a run with other settings: {record['settings']}; "
                f"this one has {self._settings()}"
            )
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "random": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition("/")
            parts[part][rest] = tensor
        checkpoint.restore(self.model, parts["model"], record)
        self.optimizer = self.make_optimizer(self.model.parameters())
        checkpoint.restore_optimizer(self.model, self.optimizer, parts["optimizer"], record["groups"])
        self.history = [Phase(**past) for past in record["history"]]
        self.stopped = record["stopped"]
        if record["unfinished"] is not None:
            self._unfinished = (Phase(**record["unfinished"]), parts["random"], record["random"])
        # A process that was killed may have written the checkpoint and not the history.
        if self.world.is_first:
            self._write_history(self._unfinished[0] if self._unfinished else None)
