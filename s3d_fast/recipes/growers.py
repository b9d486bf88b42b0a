"""The Growers of a recipe's methods: those that grow, and those that prune."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import nn

from s3d_fast.growth.checkpoint import read_any, restore
from s3d_fast.growth.grower import Grower
from s3d_fast.growth.training import EpochTrainer
from s3d_fast.network import costs
from s3d_fast.network.graph import Graph
from s3d_fast.network.tracing import trace
from s3d_fast.recipes import amc, baselines, prune_plans
from s3d_fast.recipes.amounts import Times, amount
from s3d_fast.recipes.job import Job, evaluate, make_loss, make_network, make_optimizer
from s3d_fast.recipes.methods import METHODS
from s3d_fast.recipes.recipe import Recipe
from s3d_fast.recipes.split_data import AUTO_TIME, Drawn
from s3d_fast.splitting.plan import SplitPlan


def grower_of(job: Job, recipe: Recipe, model: nn.Module, training_loss: Any = None, **options: Any) -> Grower:
    """Return the Grower of a network; `options` add to its arguments or replace them.

    `training_loss` takes the place of the recipe's loss in training alone.
    """
    last = recipe.channels_last
    world, part = job.world, job.world.shard
    train, test = job.train_set, job.test_set.batches(256, part=part)
    loss = make_loss(recipe)
    trainer = EpochTrainer(
        train.batches(recipe.batch_size, train=True, part=part),
        loss if training_loss is None else training_loss,
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
        "solver": {"solver": recipe.solver, **({} if recipe.tol is None else {"tol": recipe.tol})},
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

    last_drawn: list[Drawn] = []

    def batches(phase: int) -> Drawn:
        assert grower.phase is not None
        seconds = [epoch["seconds"] for epoch in grower.phase.epochs]
        last_drawn[:] = [split_data.batches(median(seconds) if seconds else None)]
        return last_drawn[0]

    def fresh(phase: int) -> Iterable[Any]:
        return last_drawn[0].held_back() or ()

    arguments.setdefault("fresh", fresh)
    arguments.setdefault("split_time", AUTO_TIME)

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


def growing(job: Job) -> Grower:
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
    signed: dict[str, Any] = {"m": 2, "c": 1.0}
    if job.method in ("s3d", "regrow"):
        signed = {"m": recipe.m, "c": recipe.c, **({} if recipe.theorem == "true" else {"theorem": recipe.theorem})}
    if recipe.threshold:
        signed["threshold"] = recipe.threshold
    times = Times(job, units)

    def selection(phase: int, graph: Graph) -> dict[str, Any]:
        if not recipe.is_timed:
            return {**signed, **amount(recipe, phase, graph, None, job.method == "regrow")}
        if grower is None:
            # Options are checked before the run; nothing is timed for that.
            return {**signed, "budget": 0.0}
        measured = times.before_split(phase, model, graph)
        return {**signed, **amount(recipe, phase, graph, measured, job.method == "regrow")}

    def by_chance(phase: int, graph: Graph) -> SplitPlan:
        return baselines.random_plan(graph, units, selection(phase, graph))

    grower: Grower | None = None
    grower = grower_of(
        job,
        recipe,
        model,
        phases=recipe.steps + 1,
        selection=selection,
        units=units,
        plan=by_chance if job.method == "net2net" else None,
        trained=job.start is not None,
        out=job.out,
        **METHODS[job.method].options,
    )
    return grower


def pruning(job: Job) -> Grower:
    """Return the Grower that trains the full network and removes neurons by the job's method."""
    recipe, loss = job.recipe, make_loss(job.recipe)
    model = make_network(replace(recipe, widths=recipe.full()), job.dataset.classes, job.seed, job.torch_device)
    graph = trace(model, torch.zeros(2, *job.dataset.input_shape, device=job.torch_device))
    units = [name for name in graph.units if recipe.may_split(name)]
    full, steps = costs.count(graph).macs, recipe.steps

    # MorphNet prunes further in all steps but the last, which widens all layers.
    lowest = recipe.prune_to * (prune_plans.MORPHNET_SHARE if job.method == "morphnet" and steps > 1 else 1.0)
    if steps:
        # The agent of AMC keeps a share of every layer in each step.
        prune_plans.require_reachable(graph, units, lowest, amc.LEAST**steps if job.method == "amc" else 0.0)

    def target(step: int) -> float:
        return prune_plans.target_macs(full, recipe.prune_to, step, steps)

    def plan(phase: int, graph: Graph) -> SplitPlan:
        if job.method == "l1":
            return prune_plans.norm_plan(model, graph, units, target(phase))
        if job.method == "bn":
            return prune_plans.scale_plan(model, graph, units, target(phase), per_cost=False)
        batches = list(grower.batches(phase)) if callable(grower.batches) else grower.batches
        if job.method == "amc":
            return amc.searched_plan(model, graph, units, target(phase), loss, batches, job.world)
        if phase + 1 == steps and steps > 1:
            return prune_plans.expansion_plan(model, graph, units, target(phase), loss, batches)
        budget = prune_plans.target_macs(full, lowest, phase, max(1, steps - 1))
        return prune_plans.scale_plan(model, graph, units, budget, per_cost=True)

    is_penalised = job.method in ("bn", "morphnet")
    grower = grower_of(
        job,
        recipe,
        model,
        training_loss=prune_plans.penalised(loss, graph, units, recipe.penalty, job.method == "morphnet")
        if is_penalised
        else None,
        phases=steps + 1,
        units=units,
        plan=plan,
        out=job.out,
    )
    return grower
