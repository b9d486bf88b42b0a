"""Running a recipe: growth by a method, or networks of the same sizes trained from scratch."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from s3d_fast import env
from s3d_fast.base import require
from s3d_fast.base.batches import moved
from s3d_fast.base.random_state import seed_all
from s3d_fast.base.world import ALONE, World
from s3d_fast.data.sources import Dataset, Source
from s3d_fast.growth.checkpoint import load_grown
from s3d_fast.growth.grower import Grower
from s3d_fast.growth.record import Phase
from s3d_fast.growth.run import read_run
from s3d_fast.growth.run_folder import RunFolder
from s3d_fast.growth.training import EpochTrainer
from s3d_fast.network import costs
from s3d_fast.network.graph import Graph
from s3d_fast.network.tracing import trace
from s3d_fast.recipes import baselines
from s3d_fast.recipes.recipe import Recipe
from s3d_fast.recipes.split_data import SplitData
from s3d_fast.splitting.plan import SplitPlan

METHODS = {
    "s3d": "signed splits along eigenvectors: the recipe's m and c",
    "s2d": "positive splits along eigenvectors: c = 1",
    "net2net": "random neurons, split along random directions",
    "uniform": "networks of the same sizes, all layers widened alike, trained from scratch",
}


@dataclass(frozen=True)
class Job:
    """A recipe on a dataset by a method, and how to run it.

    Attributes:
        recipe: with the settings that are wanted.
        preset: its name, for the record.
        dataset: to train and test on.
        method: one of `METHODS`.
        seed: of the initial weights and of everything drawn at random.
        out: a folder for checkpoints, history and report.
        start: a saved network of the recipe to begin with, in place of training the seed network.
        like: the folder of a run, whose parameters in every phase `uniform` has to match; by default it has as many
            filters as growth would have.
        scratch: the epochs of `uniform`: "total", those that a grown network has had by then, or "phase".
        device: "auto", "cpu", "cuda" ...
        world: the processes that run it together.
        precision: as for `EpochTrainer`.
        compile: train through torch.compile.
        progress: show bars.
        after_phase: called when a phase is finished.
    """

    recipe: Recipe
    dataset: Dataset
    preset: str = "paper"
    method: str = "s3d"
    seed: int = 0
    out: Path | None = None
    start: Path | None = None
    like: Path | None = None
    scratch: str = "total"
    device: str = "auto"
    world: World = ALONE
    precision: str = "auto"
    compile: bool = False
    progress: bool = False
    after_phase: Callable[[Phase], object] = lambda phase: None

    def __post_init__(self) -> None:
        require.choice("method", self.method, tuple(METHODS))
        require.choice("scratch", self.scratch, ("total", "phase"))
        require.count("seed", self.seed, at_least=0)
        self.device_of(self.device)
        if self.method != "uniform" and (self.like is not None or self.scratch != "total"):
            raise ValueError("like and scratch go with method 'uniform'")
        if self.method == "uniform" and self.start is not None:
            raise ValueError("start is for methods that grow; 'uniform' trains every network from scratch")
        if self.recipe.batch_size % self.world.size:
            raise ValueError(
                f"batch_size must be a multiple of the {self.world.size} processes, got {self.recipe.batch_size}"
            )
        # Checks its settings.
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
        """Return what the splits of a network are computed on."""
        # Splits by chance need no operators, and no memory for them.
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
        # What PyTorch raises for a device that is not there depends on the device.
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"device {name!r} cannot be used: {error}") from error


def run(job: Job, resume: bool = False) -> list[Phase]:
    """Run a job, or what is left of it; return its history.

    Raises:
        ValueError: a folder that holds another run, settings that do not go together, a loss that is not finite.
    """
    if torch.cuda.is_available():
        torch.backends.cudnn.deterministic = True
    # All that can be wrong with the job comes up before its folder is touched.
    if job.method == "uniform":
        sizes = uniform_sizes(job)
        _describe(job, resume)
        return _from_scratch(job, sizes, resume)
    grower = _growth(job)
    _describe(job, resume)
    return grower.run(resume)


def first(source: Source, count: int | None) -> Source:
    """Return so many samples of a source, or all of them."""
    return source if count is None or count >= len(source) else source.take(count)


def make_network(recipe: Recipe, classes: int, seed: int = 0, device: torch.device | str = "cpu") -> nn.Module:
    """Return the recipe's seed network with initial weights that depend on the seed alone."""
    seed_all(seed)
    return recipe.network(recipe.widths, classes).to(device)


def make_optimizer(recipe: Recipe) -> Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]:
    """Return what makes the recipe's optimizer; BatchNorm and biases, which have one dimension, are not decayed."""

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
    """Return the recipe's training loss, which is also the one that splits decrease."""
    return lambda output, target: F.cross_entropy(output, target, label_smoothing=recipe.label_smoothing)


def evaluate(model: nn.Module, batches: Any, channels_last: bool = False, world: World = ALONE) -> dict[str, float]:
    """Return a classifier's accuracy, top-5 accuracy where that says something, and cross entropy.

    Of several processes each evaluates its own batches, and all return the same.
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
    """Return the Grower of a network; `options` are further arguments, and take precedence."""
    last = recipe.channels_last
    world, part = job.world, job.world.part
    train, test = job.train_set, job.test_set.batches(256, part=part)
    loss = make_loss(recipe)
    trainer = EpochTrainer(
        train.batches(recipe.batch_size, train=True, part=part),
        loss,
        recipe.epochs,
        schedule=recipe.learning_rates(),
        precision=job.precision,
        channels_last=last,
        compile=job.compile,
        world=world,
        progress=job.progress and world.is_first,
    )
    arguments: dict[str, Any] = {
        "eps": recipe.eps,
        "solver": {"tol": recipe.tol, "solver": "auto"},
        "memory_budget": recipe.memory_budget,
        "evaluate": lambda trained: evaluate(trained, test, last, world),
        "world": world,
        "after_phase": job.after_phase,
        "seed": job.seed,
        "progress": job.progress and world.is_first,
        **options,
    }
    split_data = job.split_data(model)

    def batches(phase: int) -> Iterable[Any]:
        assert grower.phase is not None
        seconds = [epoch.seconds for epoch in grower.phase.epochs]
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
        load_grown(model, job.start)
    split_data = job.split_data(model)
    if split_data.recipe.memory_budget is not None:
        # Too small a budget should come up now, and not after a phase of training.
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


def _from_scratch(job: Job, sizes: Sequence[tuple[int, ...]], resume: bool) -> list[Phase]:
    """Train a network of every size; each is a run of one phase in a folder of its own."""
    recipe, history = job.recipe, []
    for index, widths in enumerate(sizes):
        epochs = recipe.epochs * (index + 1 if job.scratch == "total" else 1)
        alone = replace(recipe, widths=widths, steps=0, epochs=epochs)
        model = make_network(alone, job.dataset.classes, job.seed, job.torch_device)
        out = None if job.out is None else job.out / f"size-{index:03d}"
        was_finished = out is not None and RunFolder(out).file("phase", 0).exists()
        (phase,) = _grower(replace(job, after_phase=lambda phase: None), alone, model, phases=1, out=out).run(resume)
        history.append(replace(phase, index=index))
        if job.out is not None and job.world.is_first:
            RunFolder(job.out).write_history(history)
        if not was_finished and job.world.is_first:
            job.after_phase(history[-1])
    return history


def uniform_sizes(job: Job) -> list[tuple[int, ...]]:
    """Return the widths of the networks that are trained from scratch, in the order of growth.

    Raises:
        ValueError: the run to be like has fewer phases than the recipe.
    """
    recipe, classes = job.recipe, job.dataset.classes
    if job.like is None:
        if recipe.fraction is None:
            raise ValueError("a recipe that grows to given MACs needs a run to be like; give like")
        share = 1 + recipe.fraction * (recipe.m - 1)
        filters = [round(sum(recipe.widths) * share**step) for step in range(recipe.steps + 1)]
        return [baselines.scaled_widths(recipe.widths, wanted, sum) for wanted in filters]
    phases = read_run(job.like).phases
    if len(phases) <= recipe.steps:
        raise ValueError(f"like: {job.like} has {len(phases)} phases, and {recipe.steps + 1} are wanted")

    def size(widths: Any) -> int:
        return baselines.parameter_count(lambda: recipe.network(widths, classes))

    return [baselines.scaled_widths(recipe.widths, phase.params, size) for phase in phases[: recipe.steps + 1]]


def _describe(job: Job, resume: bool) -> None:
    """Write run.json: what the run is, and where it runs.

    Raises:
        ValueError: the folder holds another run.
    """
    if job.out is None or not job.world.is_first:
        return
    about = {
        "recipe": job.recipe.name,
        "preset": job.preset,
        "method": job.method,
        "seed": job.seed,
        "settings": job.recipe.as_settings(),
        "scratch": job.scratch if job.method == "uniform" else None,
        "like": None if job.like is None else str(job.like.resolve()),
        "start": None if job.start is None else str(job.start.resolve()),
        "classes": job.dataset.classes,
        "input_shape": list(job.dataset.input_shape),
        "precision": job.precision,
    }
    about = json.loads(json.dumps(about))
    folder = RunFolder(job.out)
    if (job.out / "run.json").exists():
        was = folder.read_about()
        differing = [name for name in about if _fixed(was.get(name)) != _fixed(about[name])]
        if differing:
            raise ValueError(f"out: {job.out} holds another run: {', '.join(differing)} differ; give another folder")
        if not resume:
            raise ValueError(f"out: {job.out} holds a run already; resume it, or give another folder")
    elif folder.latest() is not None:
        raise ValueError(f"out: {job.out} holds a run of something else than a recipe; give another folder")
    about["environment"] = env.report()
    about["command"] = sys.argv
    about["started"] = time.strftime("%Y-%m-%d %H:%M:%S")
    folder.write_about(about)


def _fixed(value: Any) -> Any:
    """Return what may not change when a run goes on: it may take more steps than were planned, and other memory.

    A setting that an older version did not have is like one that is None.
    """
    if not isinstance(value, Mapping):
        return value
    free = ("steps", "memory_budget", "split_batch")
    return {name: setting for name, setting in value.items() if name not in free and setting is not None}
