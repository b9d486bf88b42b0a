"""Running a recipe: growth by a method, or networks of the same sizes trained from scratch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from s3d_fast import recipes
from s3d_fast.base import require
from s3d_fast.base.batches import moved
from s3d_fast.base.random_state import seed_all
from s3d_fast.base.world import ALONE, World, existing
from s3d_fast.data.sources import Dataset, Source
from s3d_fast.growth.checkpoint import read_any, restore
from s3d_fast.growth.grower import Grower, described
from s3d_fast.growth.loggers import Logger, log_epoch, log_phase
from s3d_fast.growth.training import EpochTrainer
from s3d_fast.network import costs
from s3d_fast.network.graph import Graph
from s3d_fast.network.tracing import trace
from s3d_fast.recipes import baselines
from s3d_fast.recipes.recipe import Recipe
from s3d_fast.recipes.split_data import SplitData
from s3d_fast.records.json_records import differences
from s3d_fast.records.record import Phase
from s3d_fast.records.run import read_run
from s3d_fast.records.run_folder import RunFolder
from s3d_fast.splitting.plan import SplitPlan

METHODS = {
    "s3d": "signed splits along eigenvectors, with the recipe's m and c",
    "s2d": "positive splits along eigenvectors, with c = 1",
    "net2net": "random neurons, split along random directions",
    "uniform": "networks of the same sizes, all layers widened by one factor, trained from scratch",
}


@dataclass(frozen=True)
class Job:
    """A recipe, its dataset and method, and how to run it.

    Attributes:
        recipe: the recipe, with its settings.
        preset: the name of the recipe's preset, for run.json; by default that of the whole experiment.
        dataset: the data to train and test on.
        method: one of `METHODS`.
        seed: determines the initial weights and all random draws.
        out: a folder for checkpoints, history and report.
        start: a saved network of the recipe to start from, instead of training the seed network.
        like: the folder of a run; `uniform` matches its number of parameters in every phase. By default `uniform` has
            as many filters as growth would have.
        scratch: how long `uniform` trains: "total", as many epochs as a grown network has had by then, or "phase".
        device: "auto", "cpu", "cuda" ...
        world: the processes that run the job together; by default those of the process group that exists, if any.
        precision: as for `EpochTrainer`.
        compile: train through torch.compile.
        progress: show progress bars.
        after_phase: called after every phase.
        loggers: follow the run, as for `Grower`.
        sync_batchnorm: as for `EpochTrainer`.
    """

    recipe: Recipe
    dataset: Dataset
    preset: str | None = None
    method: str = "s3d"
    seed: int = 0
    out: Path | None = None
    start: Path | None = None
    like: Path | None = None
    scratch: str = "total"
    device: str = "auto"
    world: World = field(default_factory=existing)
    precision: str = "auto"
    compile: bool = False
    progress: bool = False
    after_phase: Callable[[Phase], object] = lambda phase: None
    loggers: Sequence[Logger] = ()
    sync_batchnorm: bool = False

    def __post_init__(self) -> None:
        require.choice("method", self.method, tuple(METHODS))
        require.choice("scratch", self.scratch, ("total", "phase"))
        require.count("seed", self.seed, at_least=0)
        self.device_of(self.device)
        if self.method != "uniform" and (self.like is not None or self.scratch != "total"):
            raise ValueError("like and scratch have no effect without method 'uniform'")
        if self.method == "uniform" and self.start is not None:
            raise ValueError("start is for methods that grow; 'uniform' trains every network from scratch")
        if self.recipe.batch_size % self.world.size:
            raise ValueError(
                f"batch_size must be a multiple of the {self.world.size} processes, got {self.recipe.batch_size}"
            )
        # Made once here to check its settings.
        self.split_data(nn.Module())

    @cached_property
    def train_set(self) -> Source:
        """The training samples that the recipe uses."""
        return first(self.dataset.train, self.recipe.train_samples)

    @cached_property
    def test_set(self) -> Source:
        """The test samples that the recipe uses."""
        return first(self.dataset.test, self.recipe.test_samples)

    def split_data(self, model: nn.Module) -> SplitData:
        """Return the data for computing the splits of a network."""
        # Random splits need no operators, and so no memory for them.
        recipe = self.recipe if self.method != "net2net" else replace(self.recipe, memory_budget=None)
        return SplitData(recipe, self.train_set, model, self.world)

    @property
    def torch_device(self) -> torch.device:
        """The device to run on."""
        return self.world.device if self.world.size > 1 else self.device_of(self.device)

    @staticmethod
    def device_of(name: str) -> torch.device:
        """Return the device of a name; "auto" is a GPU if there is one.

        Raises:
            ValueError: there is no such device.
        """
        if name == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            return torch.empty(0, device=name).device
        # Which error PyTorch raises for a missing device depends on the device.
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"device {name!r} cannot be used: {error}") from error


def run(job: Job, resume: bool = False) -> list[Phase]:
    """Run a job, or resume it; return its history.

    Raises:
        ValueError: the folder holds another run, settings contradict each other, or the loss is not finite.
    """
    if torch.cuda.is_available():
        torch.backends.cudnn.deterministic = True
    if job.out is not None:
        resume = resume or job.world.from_first(RunFolder(job.out).was_begun_by_this_launch)
    # Find everything that can be wrong with the job before touching its folder.
    if job.method == "uniform":
        sizes = job.world.from_first(lambda: uniform_sizes(job))
        return _from_scratch(job, sizes, job.world.from_first(lambda: _about(job, resume)), resume)
    grower = _growth(job)
    grower.about = job.world.from_first(lambda: _about(job, resume))
    return grower.run(resume)


def first(source: Source, count: int | None) -> Source:
    """Return `count` samples of a source; all of them if it is None or there are fewer."""
    return source if count is None or count >= len(source) else source.take(count)


def make_network(recipe: Recipe, classes: int, seed: int = 0, device: torch.device | str = "cpu") -> nn.Module:
    """Return the recipe's seed network; its initial weights depend only on the seed."""
    seed_all(seed)
    return recipe.network(recipe.widths, classes).to(device)


def make_optimizer(recipe: Recipe) -> Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]:
    """Return a function that makes the recipe's optimizer; BatchNorm and biases (one dimension) do not decay."""

    def make(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        every = list(parameters)
        groups = [
            {"params": [p for p in every if p.dim() > 1], "weight_decay": recipe.weight_decay},
            {"params": [p for p in every if p.dim() <= 1], "weight_decay": 0.0},
        ]
        if recipe.optimizer == "adam":
            return torch.optim.Adam(groups, lr=recipe.learning_rate)
        return torch.optim.SGD(groups, lr=recipe.learning_rate, momentum=recipe.momentum)

    return make


def make_loss(recipe: Recipe) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the recipe's training loss, which splits decrease as well."""
    return lambda output, target: F.cross_entropy(output, target, label_smoothing=recipe.label_smoothing)


def evaluate(model: nn.Module, batches: Any, channels_last: bool = False, world: World = ALONE) -> dict[str, float]:
    """Return a classifier's accuracy and cross entropy, and its top-5 accuracy if there are more than 10 classes.

    With several processes, each evaluates its own batches and all return the same metrics.
    """
    device = next(model.parameters()).device
    model.eval()
    right, right5, loss, count, classes = 0.0, 0.0, 0.0, 0.0, 0
    with torch.no_grad():
        for batch in batches:
            x, y = moved(batch, device, channels_last)
            output = model(x).float()
            classes, count = output.shape[1], count + len(y)
            loss += float(F.cross_entropy(output, y, reduction="sum"))
            best = output.topk(min(5, classes), dim=1).indices == y[:, None]
            right, right5 = right + int(best[:, 0].sum()), right5 + int(best.sum())
    right, right5, loss, count = world.sum(right, right5, loss, count)
    metrics = {"accuracy": right / count, "loss": loss / count}
    return {**metrics, "top5": right5 / count} if classes > 10 else metrics


def _grower(job: Job, recipe: Recipe, model: nn.Module, **options: Any) -> Grower:
    """Return the Grower of a network; `options` add to its arguments or replace them."""
    last = recipe.channels_last
    world, part = job.world, job.world.shard
    train, test = job.train_set, job.test_set.batches(256, part=part)
    loss = make_loss(recipe)
    trainer = EpochTrainer(
        train.batches(recipe.batch_size, train=True, part=part),
        loss,
        recipe.epochs,
        schedule=recipe.learning_rates(),
        over_run=recipe.schedule_over == "run",
        plateau=recipe.plateaus(),
        precision=job.precision,
        channels_last=last,
        compile=job.compile,
        world=world,
        sync_batchnorm=job.sync_batchnorm,
        progress=job.progress and world.is_first,
    )
    arguments: dict[str, Any] = {
        "eps": recipe.eps,
        "curvature": recipe.curvature,
        "solver": {"solver": "auto", **({} if recipe.tol is None else {"tol": recipe.tol})},
        "rows_per_sample": recipe.rows_per_sample or None,
        "memory_budget": recipe.memory_budget,
        "new_filters": None if recipe.new_filters is None else {"kind": recipe.new_filters},
        "evaluate": lambda trained: evaluate(trained, test, last, world),
        "world": world,
        "after_phase": job.after_phase,
        "name": recipe.name,
        "loggers": job.loggers,
        "seed": job.seed,
        "progress": job.progress and world.is_first,
        **options,
    }
    split_data = job.split_data(model)

    def batches(phase: int) -> Iterable[Any]:
        assert grower.phase is not None
        seconds = [epoch["seconds"] for epoch in grower.phase.epochs]
        return split_data.batches(median(seconds) if seconds else None)

    grower = Grower(
        model,
        torch.zeros(2, *job.dataset.input_shape, device=job.torch_device),
        loss,
        batches,
        trainer,
        make_optimizer(recipe),
        **arguments,
    )
    return grower


def _growth(job: Job) -> Grower:
    """Return the Grower that splits neurons by the job's method."""
    recipe = job.recipe
    model = make_network(recipe, job.dataset.classes, job.seed, job.torch_device)
    if job.start is not None:
        start = job.start
        tensors, record = job.world.together(lambda: read_any(start) if job.world.is_first else ({}, {}))
        restore(model, job.world.same_tensors(tensors), job.world.same(record))
    split_data = job.split_data(model)
    if split_data.recipe.memory_budget is not None:
        # A budget that is too small should fail now, not after a phase of training.
        split_data.plan(1)
    graph = trace(model, torch.zeros(2, *job.dataset.input_shape, device=job.torch_device))
    units = [name for name in graph.units if recipe.may_split(name)]
    signed = {"m": recipe.m, "c": recipe.c} if job.method == "s3d" else {"m": 2, "c": 1.0}

    def selection(phase: int, graph: Graph) -> dict[str, Any]:
        if recipe.macs is None:
            return {**signed, "fraction": recipe.fraction}
        left = max(0, recipe.macs[phase] - costs.count(graph).macs) if phase < len(recipe.macs) else 0
        return {**signed, "budget": left, "cost": "macs"}

    def by_chance(phase: int, graph: Graph) -> SplitPlan:
        return baselines.random_plan(graph, units, selection(phase, graph))

    return _grower(
        job,
        recipe,
        model,
        phases=recipe.steps + 1,
        selection=selection,
        units=units,
        plan=by_chance if job.method == "net2net" else None,
        trained=job.start is not None,
        out=job.out,
    )


def _from_scratch(job: Job, sizes: Sequence[tuple[int, ...]], about: dict[str, Any], resume: bool) -> list[Phase]:
    """Train a network of every size; each is a run of one phase in its own folder."""
    recipe = job.recipe
    history: list[Phase] = []
    if job.out is not None and job.world.is_first:
        model = make_network(replace(recipe, widths=sizes[0]), job.dataset.classes, job.seed, job.torch_device)
        graph = trace(model, torch.zeros(2, *job.dataset.input_shape, device=job.torch_device))
        folder = RunFolder(job.out)
        folder.write_about(about | described(graph))
        folder.note_launch()
    for index, widths in enumerate(sizes):
        before = index if job.scratch == "total" else 0
        epochs = sum(map(recipe.epochs_of, range(index - before, index + 1)))
        alone = replace(recipe, widths=widths, steps=0, epochs=epochs)
        model = make_network(alone, job.dataset.classes, job.seed, job.torch_device)
        out = None if job.out is None else job.out / f"size-{index:03d}"
        was_finished = out is not None and RunFolder(out).file("phase", 0).exists()
        quiet = replace(job, after_phase=lambda phase: None, loggers=())
        (phase,) = _grower(quiet, alone, model, phases=1, out=out).run(resume)
        earlier = sum(len(past.epochs) for past in history)
        history.append(replace(phase, index=index))
        if job.out is not None and job.world.is_first:
            RunFolder(job.out).write_history(history)
        if not was_finished and job.world.is_first:
            job.after_phase(history[-1])
            for epoch in history[-1].epochs:
                log_epoch(job.loggers, earlier, epoch)
            log_phase(job.loggers, history[-1])
    return history


def uniform_sizes(job: Job) -> list[tuple[int, ...]]:
    """Return the widths of the networks that are trained from scratch, in the order of growth.

    Raises:
        ValueError: the recipe needs `like` and has none, or the run `like` has fewer phases than the recipe.
    """
    recipe, classes = job.recipe, job.dataset.classes
    if job.like is None:
        if recipe.fraction is None:
            raise ValueError("a recipe that grows to given MACs needs a run to match; give like")
        share = 1 + recipe.fraction * (recipe.m - 1)
        filters = [round(sum(recipe.widths) * share**step) for step in range(recipe.steps + 1)]
        return [baselines.scaled_widths(recipe.widths, wanted, sum) for wanted in filters]
    phases = read_run(job.like).phases
    if len(phases) <= recipe.steps:
        raise ValueError(f"like: {job.like} has {len(phases)} phases, but {recipe.steps + 1} are needed")

    def size(widths: Any) -> int:
        return baselines.parameter_count(lambda: recipe.network(widths, classes))

    return [baselines.scaled_widths(recipe.widths, phase.params, size) for phase in phases[: recipe.steps + 1]]


def _about(job: Job, resume: bool) -> dict[str, Any]:
    """Return the entries of run.json that describe a recipe's run. The first process calls this.

    Raises:
        ValueError: the folder holds another run.
    """
    about = {
        "recipe": job.recipe.name,
        "preset": job.preset or recipes.preset_for(job.recipe.name, has_gpu=True),
        "method": job.method,
        "seed": job.seed,
        "settings": job.recipe.as_settings(),
        "scratch": job.scratch if job.method == "uniform" else None,
        "like": None if job.like is None else str(job.like.resolve()),
        "start": None if job.start is None else str(job.start.resolve()),
        "classes": job.dataset.classes,
        "input_shape": list(job.dataset.input_shape),
        "precision": job.precision,
        # An older run does not say so, and had none.
        "sync_batchnorm": job.sync_batchnorm or None,
    }
    about = json.loads(json.dumps(about))
    if job.out is None:
        return about
    folder = RunFolder(job.out)
    was = folder.read_about() if folder.is_described() else None
    # The run of a network of one's own has no preset.
    if was is not None and was["preset"]:
        was["preset"] = recipes.preset_today(was["recipe"], was["preset"])
        there, here = ({name: _fixed(one.get(name)) for name in about} for one in (was, about))
        differing = differences(there, here)
        if differing:
            raise ValueError(
                f"out: {job.out} holds another run: {', '.join(differing)}; give another folder, or the same settings"
            )
        if not resume:
            raise ValueError(f"out: {job.out} holds a run already; resume it, or give another folder")
    elif folder.latest() is not None:
        raise ValueError(f"out: {job.out} holds a run of something else than a recipe; give another folder")
    return about


# What settings were before they could be set.
BEFORE = {"curvature": "paper", "rows_per_sample": 0}


def _fixed(value: Any) -> Any:
    """Return the part of a value that must not change when a run resumes.

    The number of steps, the memory budget and the batch size for splitting may change. A setting that an older version
    did not have counts as None; its curvature was the paper's, and it took all rows.
    """
    if not isinstance(value, Mapping):
        return value
    free = ("steps", "memory_budget", "split_batch")
    kept = {name: setting for name, setting in value.items() if name not in free and setting is not None}
    return {name: setting for name, setting in kept.items() if BEFORE.get(name) != setting}
