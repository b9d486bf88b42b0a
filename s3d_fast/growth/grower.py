"""Growth: the paper's Algorithm 1. Train, capture, solve, select, split; repeat."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from s3d_fast import env
from s3d_fast.base import require
from s3d_fast.base.random_state import RandomState, random_state, seed_all, set_random_state
from s3d_fast.base.world import World, existing
from s3d_fast.growth import checkpoint
from s3d_fast.growth.loggers import Logger, log_epoch, log_phase
from s3d_fast.growth.saved_state import SavedState, state_of
from s3d_fast.growth.separation import distances
from s3d_fast.growth.split_step import Options, SplitStep, timed
from s3d_fast.growth.step_size import DEFAULT
from s3d_fast.growth.training import EpochTrainer
from s3d_fast.network import costs
from s3d_fast.network.graph import Graph
from s3d_fast.network.tracing import trace
from s3d_fast.network.wrapping import unwrap
from s3d_fast.records.json_records import differences
from s3d_fast.records.record import Epoch, Phase
from s3d_fast.records.run_folder import RunFolder
from s3d_fast.report.html import write_report
from s3d_fast.splitting.optimizers import check_optimizer
from s3d_fast.splitting.plan import SplitPlan

Train = Callable[[nn.Module, torch.optim.Optimizer, int], object]


class Grower:
    """Grow a model by alternating training and splitting.

    Every phase starts from random states derived from `seed` and its number. A run that is interrupted and resumed
    therefore ends with the same weights as an uninterrupted run (on a CPU, with the same number of threads, and with
    data whose order depends on the global random state alone). An `EpochTrainer` resumes after its last finished epoch,
    any other function at the start of its phase.

    The arguments fall into four groups: the network and its loss; training (`train` to `evaluate`); splitting (`eps` to
    `plan`); and the run (`out` to `progress`).

    Args:
        model: the seed network; grown in place.
        example_input: as for `trace`.
        loss_fn: as for `capture`.
        batches: the batches to split on: a list, or a function that returns the batches of a given phase. They are
            iterated several times and kept in memory meanwhile. An object that has a length and
            `same_every_pass = True` is not kept: it must make the same batches at every pass.
        train: `train(model, optimizer, phase)`; an `EpochTrainer`, or a function of yours.
        optimizer: makes the optimizer from the model's parameters. Its state is carried through the splits, and its
            learning rates are reset to their first values at the start of every phase.
        phases: the number of phases; there is a split between every two.
        trained: whether the model is already trained; the first phase then begins with its evaluation.
        evaluate: returns metrics of the trained model, such as {"accuracy": 0.7}.
        eps: the size of a split: a number; or a share of the filter's length, such as "relative:0.3"; or "search", the
            share between 0.03 and 0.9 with the least loss on the batches. By default "relative:0.3"; a run that is
            resumed keeps what it had.
        curvature: as for `capture`.
        selection: options for `select`, such as dict(m=2, c=1.3, fraction=0.35); c=1 is S2D. Or a function of the
            phase and the graph that returns them.
        solver: options for `extremal_eigenpairs`, such as dict(tol=1e-2). Without a tolerance, it is a third of the
            median sampling error of the eigenvalues, which the batches tell, and between 0.01 and 0.1: what is finer
            would be lost in the noise. Where the selection is a fraction or a number of filters, the solver stops at
            filters that are certain to be chosen or not.
        rows_per_sample: as for `capture`; None keeps all.
        memory_budget: the bytes that splitting operators may hold in memory, as for `capture`.
        units: names of the units that may be split; all by default.
        splits: whether neurons are split; False makes sense with `new_filters`.
        new_filters: add new filters, which compete with splits; options for `propose_filters`, such as
            dict(kind="firefly").
        removals: whether neurons may be removed where others gain more for what they cost; needs a selection with a
            budget, which may be 0 or negative.
        fresh: other batches, a list or a function of the phase, on which every phase measures what share of the
            promised gain is real; this takes another capture.
        split_time: batches whose method `larger` returns more of them are replaced by these, as long as fresh batches
            keep more of the promised gain, within this share of the time that training took.
        plan: makes the split plan from the phase and the graph; it replaces capture, eigenpairs and selection.
        out: a folder for checkpoints, the history and a description of the run, see `RunFolder`. Without a folder
            nothing is written, and the run cannot be resumed.
        name: what is grown, for reports; by default the name of the model's class. Runs with the same name and
            settings count as seeds of one experiment when they are compared.
        seed: the seed of the random states.
        after_phase: called with every phase after it is finished and saved.
        loggers: follow the run, epoch by epoch and phase by phase; `integrations.loggers` has some for TensorBoard,
            Weights & Biases and MLflow. Every checkpoint is on disk before it is logged.
        world: the processes that run this together; by default those of the process group that exists, if there is one.
            In each, `train`, `evaluate` and `batches` must use this process's part of the data. The first process
            writes the files. To resume, the process with the newest checkpoint sends it to the others, so folders need
            not be shared.
        progress: show bars.
        about: entries of run.json, in place of those that describe a network of one's own.

    Attributes:
        history: a `Phase` for each finished phase.
        phase: the phase in progress, or the last one.
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
        trained: bool = False,
        evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None,
        eps: float | str | None = None,
        curvature: str = "exact",
        selection: Options | Callable[[int, Graph], Options] | None = None,
        solver: Options | None = None,
        rows_per_sample: int | None = 64,
        memory_budget: int | str | None = None,
        units: Sequence[str] | None = None,
        splits: bool = True,
        new_filters: Options | None = None,
        removals: bool = False,
        fresh: Sequence[Any] | Callable[[int], Iterable[Any]] | None = None,
        split_time: float = 0.5,
        plan: Callable[[int, Graph], SplitPlan] | None = None,
        out: str | Path | None = None,
        name: str | None = None,
        seed: int = 0,
        after_phase: Callable[[Phase], object] = lambda phase: None,
        loggers: Sequence[Logger] = (),
        world: World | None = None,
        progress: bool = False,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        require.count("phases", phases)
        require.count("seed", seed, at_least=0)
        self.model, self.example_input, self.phases = model, example_input, phases
        self.train, self.trained, self.evaluate = train, trained, evaluate
        self.loss_fn, self.batches, self.curvature = loss_fn, batches, curvature
        self.eps, self._eps_is_given = DEFAULT if eps is None else eps, eps is not None
        self.selection = {"m": 2, "c": 1.3, "fraction": 0.35} if selection is None else selection
        self.solver = {} if solver is None else dict(solver)
        self.rows_per_sample = rows_per_sample
        self.memory_budget, self.units, self.plan = memory_budget, units, plan
        self.splits, self.removals, self.fresh, self.split_time = splits, removals, fresh, split_time
        self.new_filters = None if new_filters is None else dict(new_filters)
        self.folder = None if out is None else RunFolder(out)
        self.seed, self.after_phase, self.progress = seed, after_phase, progress
        self.world = existing() if world is None else world
        self.loggers = loggers if self.world.is_first else ()
        self.name = type(unwrap(model)).__name__ if name is None else name
        self.about = {} if about is None else dict(about)
        self.history: list[Phase] = []
        self.phase: Phase | None = None
        self.stopped: str | None = None
        # A phase that was interrupted during training, and the random state to continue with.
        self._unfinished: tuple[Phase, RandomState] | None = None
        # A model that cannot be traced, and bad options, fail here, before any training.
        self._graph = trace(model, example_input)
        self._first_selection = self._split_step().check(self._graph)
        self.make_optimizer = optimizer
        self.optimizer = optimizer(model.parameters())
        check_optimizer(self.optimizer, model)
        self._first_rates = [group["lr"] for group in self.optimizer.param_groups]

    def run(self, resume: bool = False) -> list[Phase]:
        """Run all phases that are left; return the history.

        Args:
            resume: continue from the last checkpoint in `out`; start from the beginning if there is none. Processes
                that torchrun has restarted always continue the run that they had begun.

        Raises:
            ValueError: `resume` without `out`; a folder that holds another run; a loss that is not finite.
        """
        if self.folder is not None:
            resume = resume or self.world.from_first(self.folder.was_begun_by_this_launch)
            self.world.from_first(self.folder.prepare)
            found = self._newest_checkpoint()
            if found is not None and not resume:
                raise ValueError(f"out: {self.folder.path} holds a run already; resume it, or give another folder")
            self.world.from_first(self.folder.note_launch)
            if found is not None:
                self._restore(*found)
            self._describe(resumed=found is not None)
        elif resume:
            raise ValueError("resume needs the folder of the run; give `out`")
        with tqdm(total=self.phases, initial=len(self.history), unit="phase", disable=not self.progress) as bar:
            if self.history and len(self.history) < self.phases and not self.history[-1].was_selected:
                # A finished run continues with more phases: its last phase was not split yet.
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
                    log_phase(self.loggers, phase)
                # Every rank waits here until the checkpoint is on disk.
                self.world.wait()
                bar.update()
        return self.history

    def report(self) -> Path:
        """Write report.html and figures/*.svg into the folder of the run, finished or not; return the path of the page.

        Raises:
            ValueError: the run has no folder, or no phase is recorded yet.
        """
        if self.folder is None:
            raise ValueError("a report is drawn from the files of a run; give `out` to the Grower")
        if self.world.is_first:
            write_report(self.folder.path)
        self.world.wait()
        return self.folder.path / "report.html"

    @property
    def graph(self) -> Graph:
        """The graph of the model as it is now; traced again only when the architecture has changed."""
        if not self._graph.is_current(self.model):
            self._graph = trace(self.model, self.example_input)
        return self._graph

    def _phase(self, index: int) -> Phase:
        """Train, and split unless this is the last phase."""
        for group, rate in zip(self.optimizer.param_groups, self._first_rates, strict=True):
            group["lr"] = rate
        params = sum(parameter.numel() for parameter in self.model.parameters())
        phase = Phase(index, self.graph.widths(), params, costs.count(self.graph).macs)
        seed_all(self.seed, index, 0)
        if self._unfinished is not None:
            phase, state = self._unfinished
            set_random_state(*state)
            self._unfinished = None
        self.phase = phase
        with timed(phase, "train"):
            self._train(phase)
        with timed(phase, "evaluate"):
            if self.evaluate is not None:
                phase.metrics = {name: float(value) for name, value in self.evaluate(self.model).items()}
        if self.history and self.history[-1].copies:
            found = distances(self.model, self.graph, self.history[-1].copies)
            phase.apart = float(found.median()) if len(found) else None
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
            phase.epochs.append(epoch)
            self._save("epoch", phase.index, unfinished=phase)
            log_epoch(self.loggers, sum(len(past.epochs) for past in self.history), epoch)

        # Epochs that were trained before the run was resumed count too.
        phase.seconds["train"] = sum(epoch["seconds"] for epoch in phase.epochs)
        self.train(
            self.model,
            self.optimizer,
            phase.index,
            start=len(phase.epochs),
            loss_scale=phase.epochs[-1].loss_scale if phase.epochs else None,
            past=list(phase.epochs),
            after_epoch=after_epoch,
        )

    def _split(self, phase: Phase) -> None:
        self.phase = phase
        # Seed again, so that a split in a resumed run is the same.
        seed_all(self.seed, phase.index, 1)
        if not self._split_step()(phase, self.model, self.optimizer, self.graph, self.folder):
            self.stopped = f"no neuron gains from a split after phase {phase.index}"

    def _split_step(self) -> SplitStep:
        return SplitStep(
            loss_fn=self.loss_fn,
            batches=self.batches,
            eps=self.eps,
            curvature=self.curvature,
            selection=self.selection,
            solver=self.solver,
            rows_per_sample=self.rows_per_sample,
            memory_budget=self.memory_budget,
            units=self.units,
            plan=self.plan,
            world=self.world,
            progress=self.progress,
            splits=self.splits,
            new_filters=self.new_filters,
            removals=self.removals,
            example_input=self.example_input,
            fresh=self.fresh,
            split_time=self.split_time,
        )

    def _settings(self) -> dict[str, Any]:
        """Return the settings that a resumed run must share with the run it continues."""
        settings = {
            "selection": self.selection,
            "plan": self.plan,
            "trained": self.trained,
            "solver": self.solver,
            "rows_per_sample": self.rows_per_sample,
            "eps": self.eps,
            "curvature": self.curvature,
            "seed": self.seed,
            "units": self.units,
            "optimizer": type(self.optimizer).__name__,
        }
        # Only where they differ from what every run had before they could be set.
        settings |= {"splits": False} if not self.splits else {}
        settings |= {"new_filters": self.new_filters} if self.new_filters is not None else {}
        settings |= {"removals": True} if self.removals else {}
        # A function is compared by its name: its address changes from run to run.
        return json.loads(json.dumps(settings, default=_name_of))

    def _describe(self, resumed: bool) -> None:
        """Write run.json; a run that is resumed keeps the command and the environment that it began with."""
        if self.folder is None or not self.world.is_first:
            return
        selection = self._first_selection
        own = {name: value for name, value in self._settings().items() if name not in ("selection", "plan", "seed")}
        if isinstance(self.train, EpochTrainer):
            own["epochs"] = self.train.epochs
        signed = "s2d" if selection.get("c") == 1 else "s3d"
        about = {
            "recipe": self.name,
            "preset": "",
            "method": signed if self.plan is None else getattr(self.plan, "__name__", "plan"),
            "seed": self.seed,
            "settings": {**selection, **own},
            **described(self._graph),
            **self.about,
        }
        if resumed and self.folder.is_described():
            about |= self.folder.read_about() | self.about
        about["settings"] = about["settings"] | {"steps": self.phases - 1}
        self.folder.write_about(json.loads(json.dumps(about, default=_name_of)))

    def _save(self, kind: str, index: int, unfinished: Phase | None = None) -> None:
        """Write the history, and the checkpoint of a finished phase or of an epoch of the phase `unfinished`."""
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
        self.folder.write_history(phases)

    def _newest_checkpoint(self) -> tuple[Path, dict[str, Tensor], dict[str, Any]] | None:
        """Return the path and content of the newest checkpoint of any process; the first process's, if several are new.

        Folders need not be shared, and after a restart the first process may run on another machine.
        """
        assert self.folder is not None
        path = self.folder.latest()

        def found() -> tuple[dict[str, Tensor], dict[str, Any], tuple[int, int, int]]:
            if path is None:
                return {}, {}, (0, 0, 0)
            tensors, record = checkpoint.read(path)
            return tensors, record, _progress(state_of(path, tensors, record))

        tensors, record, progress = self.world.together(found)
        paths = self.world.everyone((progress, path))
        newest = max(range(len(paths)), key=lambda rank: (paths[rank][0], -rank))
        where = paths[newest][1]
        if where is None:
            return None
        return where, self.world.same_tensors(tensors, newest), self.world.same(record, newest)

    def _restore(self, path: Path, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        state = state_of(path, tensors, record)
        # Runs that do not say so had the paper's curvature, and took all rows.
        if not self._eps_is_given and "eps" in state.settings:
            # An earlier version had another default.
            self.eps = state.settings["eps"]
        differing = differences({"curvature": "paper", "rows_per_sample": None} | state.settings, self._settings())
        if differing:
            raise ValueError(
                f"out: {path.parent} holds a run with other settings: {', '.join(differing)}; give another folder, or "
                "these settings"
            )
        with checkpoint.naming(path):
            state.require_fit(self.model, self.make_optimizer(self.model.parameters()))
            checkpoint.restore(self.model, state.model, state.record)
        self.optimizer = self.make_optimizer(self.model.parameters())
        checkpoint.restore_optimizer(self.model, self.optimizer, state.optimizer, state.groups)
        self.history, self.stopped, self._unfinished = state.history, state.stopped, state.unfinished
        # A killed process may have written the checkpoint but not the history.
        if self.world.is_first:
            self._write_history(self._unfinished[0] if self._unfinished else None)


def described(graph: Graph) -> dict[str, Any]:
    """Return the entries of run.json that any run has: its layers, the environment, the command and the time."""
    layers = {
        name: {"kind": kind, "splittable": splittable == "yes", "because": because}
        for name, kind, _, splittable, because in graph.explained()
    }
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"layers": layers, "environment": env.report(), "command": sys.argv, "started": started}


def _name_of(value: Any) -> str:
    return getattr(value, "__qualname__", str(type(value)))


def _progress(state: SavedState) -> tuple[int, int, int]:
    """Return how far the run of a checkpoint had come: finished phases, whether the last was split, further epochs."""
    is_split = bool(state.history) and state.history[-1].was_selected
    return len(state.history), int(is_split), 0 if state.unfinished is None else len(state.unfinished[0].epochs)
