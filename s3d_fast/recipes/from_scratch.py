"""Networks that keep their sizes, trained from scratch for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from s3d_fast.base.random_state import seed_all
from s3d_fast.base.world import ALONE
from s3d_fast.growth.checkpoint import read_any, resize_like
from s3d_fast.growth.grower import described
from s3d_fast.growth.loggers import log_epoch, log_phase
from s3d_fast.network import costs
from s3d_fast.network.tracing import trace
from s3d_fast.recipes import baselines
from s3d_fast.recipes.growers import grower_of
from s3d_fast.recipes.job import Job, make_network
from s3d_fast.records.record import Phase
from s3d_fast.records.run import read_run, training_compute
from s3d_fast.records.run_folder import RunFolder


@dataclass(frozen=True)
class Training:
    """A network that keeps its size, and how long it is trained.

    Attributes:
        widths: its widths; or None if it has the sizes of a saved network.
        like: that network.
        epochs: how long it is trained.
    """

    widths: tuple[int, ...] | None
    epochs: int
    like: Path | None = None

    def network(self, job: Job) -> nn.Module:
        """Return the network with its initial weights."""
        recipe, classes = job.recipe, job.dataset.classes
        if self.widths is not None:
            return make_network(replace(recipe, widths=self.widths), classes, job.seed, job.torch_device)
        model = make_network(recipe, classes, job.seed)
        assert self.like is not None
        like = self.like
        tensors, _ = job.world.together(lambda: read_any(like) if job.world.is_first else ({}, {}))
        resize_like(model, job.world.same_tensors(tensors))
        # The weights of the grown network must not be known to the one that starts from scratch.
        seed_all(job.seed)
        for module in model.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
        return model.to(job.torch_device)


def train_from_scratch(job: Job, trainings: Sequence[Training], about: dict[str, Any], resume: bool) -> list[Phase]:
    """Train a network of every size; each is a run of one phase in its own folder."""
    history: list[Phase] = []
    if job.out is not None and job.world.is_first:
        graph = trace(
            trainings[0].network(replace(job, world=ALONE)),
            torch.zeros(2, *job.dataset.input_shape, device=job.torch_device),
        )
        folder = RunFolder(job.out)
        folder.write_about(about | described(graph))
        folder.note_launch()
    for index, training in enumerate(trainings):
        alone = replace(job.recipe, steps=0, epochs=training.epochs)
        model = training.network(job)
        out = None if job.out is None else job.out / f"size-{index:03d}"
        was_finished = out is not None and RunFolder(out).file("phase", 0).exists()
        quiet = replace(job, after_phase=lambda phase: None, loggers=())
        (phase,) = grower_of(quiet, alone, model, phases=1, out=out).run(resume)
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


def training_lengths(job: Job) -> list[Training]:
    """Return the networks that are trained from scratch, in the order of growth, and for how many epochs.

    Raises:
        ValueError: the run `like` does not fit, or does not say what it took.
    """
    recipe = job.recipe
    if job.method == "full":
        found = [Training(recipe.full(), recipe.all_epochs)]
    elif job.method == "scratch":
        assert job.like is not None
        last = len(read_run(job.like).phases) - 1
        saved = RunFolder(job.like).file("network", last)
        if not saved.exists():
            raise ValueError(f"like: {job.like} has no network of its last phase, {saved.name}")
        found = [Training(None, recipe.all_epochs, saved)]
    else:
        sizes = uniform_sizes(job)
        found = [
            Training(widths, sum(map(recipe.epochs_of, range(0 if job.scratch != "phase" else index, index + 1))))
            for index, widths in enumerate(sizes)
        ]
    if job.scratch == "phase" and job.method != "uniform":
        return [replace(found[0], epochs=recipe.epochs_of(recipe.steps))]
    if job.scratch != "compute":
        return found
    assert job.like is not None
    taken = training_compute(read_run(job.like))
    if not taken or taken[-1] is None:
        raise ValueError(f"like: {job.like} does not say how many samples it was trained on")
    # One network for all the compute: the largest.
    largest, samples = found[-1], len(job.train_set)
    graph = trace(largest.network(job), torch.zeros(2, *job.dataset.input_shape, device=job.torch_device))
    per_epoch = costs.count(graph).macs * samples
    if taken[-1] < 0.5 * per_epoch:
        raise ValueError(
            f"like: {job.like} took {taken[-1]:.3g} MACs x samples, and one epoch of this network takes "
            f"{per_epoch:.3g}: their compute cannot be equal; train on fewer samples, or compare with a longer run"
        )
    return [replace(largest, epochs=max(1, round(taken[-1] / per_epoch)))]


def uniform_sizes(job: Job) -> list[tuple[int, ...]]:
    """Return the widths of the networks that are trained from scratch, in the order of growth.

    Raises:
        ValueError: the recipe needs `like` and has none, or the run `like` has fewer phases than the recipe.
    """
    recipe, classes = job.recipe, job.dataset.classes
    if job.like is None:
        if recipe.growth is not None and recipe.cost == "macs":
            return _grown_alike(job, recipe.growth)
        if recipe.fraction is None or not isinstance(recipe.m, int):
            raise ValueError("a recipe that grows to a given cost needs a run to match; give like")
        share = 1 + recipe.fraction * (recipe.m - 1)
        filters = [round(sum(recipe.widths) * share**step) for step in range(recipe.steps + 1)]
        return [baselines.scaled_widths(recipe.widths, wanted, sum) for wanted in filters]
    phases = read_run(job.like).phases
    if len(phases) <= recipe.steps:
        raise ValueError(f"like: {job.like} has {len(phases)} phases, but {recipe.steps + 1} are needed")

    def size(widths: Any) -> int:
        return baselines.parameter_count(lambda: recipe.network(widths, classes))

    return [baselines.scaled_widths(recipe.widths, phase.params, size) for phase in phases[: recipe.steps + 1]]


def _grown_alike(job: Job, factor: float) -> list[tuple[int, ...]]:
    """Return widths that grow alike in all layers, to `factor` times the MACs in every step.

    Raises:
        ValueError: the widths of the recipe are not those of the network's units.
    """
    recipe = job.recipe
    x = torch.zeros(2, *job.dataset.input_shape)
    graph = trace(recipe.network(recipe.widths, job.dataset.classes), x, prove=False)
    if tuple(graph.widths().values()) != recipe.widths:
        raise ValueError("uniform: the MACs of other widths are not known for this recipe; give like")

    def macs(widths: Sequence[int]) -> int:
        return costs.count(graph, dict(zip(graph.units, widths, strict=True))).macs

    wanted = [round(macs(recipe.widths) * factor**step) for step in range(recipe.steps + 1)]
    return [baselines.scaled_widths(recipe.widths, size, macs) for size in wanted]
