"""One run of experiment D or D2: a small MobileNet grown, pruned or trained from scratch at equal compute."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import s3d_fast as s3d
from benchmarks.results.experiment import Record
from benchmarks.results.small_images import Diverged, Images, Trainer, evaluate, network, recalibrate
from s3d_fast.recipes.baselines import random_plan, scaled_widths

LAYERS = 5
# Multiply-accumulates x samples of every run; the images of a batch, and those that growth looks at.
COMPUTE, BATCH, SAMPLES = 6.0e9, 64, 2048
MOMENTUM, DECAY = 0.9, 5e-4
# Filters of every layer at first; three steps make half as many more each.
FIRST, STEPS, MORE = 12, 3, 0.5
# Pruning starts from layers of this width, reaches the MACs of `uniform` in three steps, after these shares of the
# compute, and leaves at least so many filters in a layer. The penalty is on the scales of BatchNorms.
PRUNED_FROM, PRUNED_AT, KEPT, PENALTY = 64, (0.2, 0.4, 0.6), 16, 1e-4

Options = Mapping[str, Any]


def uniform(width: int) -> tuple[int, ...]:
    """Return the widths of a network whose blocks have one width; the stem stays as it is."""
    return (FIRST, *[width] * (LAYERS - 1))


# Filters in a block when growth ends, if all layers grow alike.
LAST = round(FIRST * (1 + MORE) ** STEPS)


def doubling(like: Sequence[int]) -> tuple[int, ...]:
    """Return widths that double at every stride, with about the MACs of other widths."""
    graph = s3d.trace(network(uniform(FIRST), 0), torch.zeros(2, 3, 16, 16))

    def macs(widths: Sequence[int]) -> int:
        return s3d.count(graph, dict(zip(graph.units, widths, strict=True))).macs

    return (FIRST, *scaled_widths((8, 16, 16, 32), macs(like), lambda blocks: macs((FIRST, *blocks)), largest=20.0))


def scratch(settings: Options, widths: Sequence[int], images: Images, samples: int | None = None) -> Record:
    """Train a network of given widths from scratch, with the compute of all runs or on so many samples."""
    model = network(widths, settings["seed"])
    graph = s3d.trace(model, images.x[:2])
    macs = s3d.count(graph).macs
    total = settings.get("compute", COMPUTE) if samples is None else float(macs) * samples
    trainer = Trainer(images, settings["seed"], settings["lr"], total, BATCH)
    optimizer = _optimizer(model.parameters(), settings["lr"])
    diverged = False
    try:
        trainer.train(model, optimizer, macs, total)
    except Diverged:
        diverged = True
    return _record(model, graph, trainer, images, diverged) | {"growth_seconds": 0.0, "phases": []}


class Growing:
    """A run that changes the network: a `Grower` with a training loop that keeps to the budget."""

    def __init__(self, settings: Options, images: Images) -> None:
        self.settings, self.images, self.seed = settings, images, settings["seed"]
        self.is_pruning = settings.get("prune") is not None
        self.model = network(uniform(PRUNED_FROM if self.is_pruning else FIRST), self.seed)
        self.trainer = Trainer(images, self.seed, settings["lr"], settings.get("compute", COMPUTE), BATCH)
        self.evaluating = 0.0
        graph = s3d.trace(self.model, images.x[:2])
        self.units = [name for name in graph.units if name.startswith("blocks")]
        # By compute: what growth in proportion reaches after every step.
        self.targets = [
            s3d.count(graph, graph.widths() | dict.fromkeys(self.units, round(FIRST * (1 + MORE) ** (step + 1)))).macs
            for step in range(STEPS)
        ]
        self.full = s3d.count(graph).macs
        self.grower = s3d.Grower(
            self.model,
            images.x[:2],
            F.cross_entropy,
            batches=lambda phase: images.drawn(settings.get("samples", SAMPLES), 1000 * self.seed + phase),
            train=self._train,
            optimizer=lambda parameters: _optimizer(parameters, settings["lr"]),
            phases=1 + STEPS,
            evaluate=self._evaluate,
            eps=settings.get("eps", "relative:0.3"),
            curvature=settings.get("curvature", "exact"),
            selection=self._selection,
            units=self.units,
            splits=settings.get("splits", True),
            new_filters=settings.get("new"),
            removals=settings.get("removals", False),
            plan=self._plan if self.is_pruning or settings.get("plan") else None,
            seed=self.seed,
        )

    def perform(self, only_widths: bool = False) -> Record:
        """Return the record of the run; `only_widths` leaves out the training after the last step."""
        began, diverged = time.process_time(), False
        self.only_widths = only_widths
        try:
            self.grower.run()
        except (Diverged, ValueError) as error:
            if isinstance(error, ValueError) and "not finite" not in str(error):
                raise
            diverged = True
        growth = time.process_time() - began - self.trainer.seconds - self.evaluating
        record = _record(self.model, self.grower.graph, self.trainer, self.images, diverged)
        return record | {"growth_seconds": round(growth, 2), "phases": [_phase(one) for one in self.grower.history]}

    def _train(self, model: nn.Module, optimizer: torch.optim.Optimizer, phase: int) -> None:
        trainer, settings = self.trainer, self.settings
        macs = s3d.count(self.grower.graph).macs
        if phase and settings.get("optimizer") == "reset":
            optimizer.state.clear()
        extra = None
        if settings.get("prune") == "bn":
            graph = self.grower.graph
            extra = lambda: PENALTY * s3d.scale_penalty(model, graph)  # noqa: E731
        since, over = 0.0, trainer.total
        if self.is_pruning:
            until = trainer.total * (*PRUNED_AT, 1.0)[phase]
        elif settings.get("schedule") == "phases":
            since, until = trainer.total * phase / (1 + STEPS), trainer.total * (phase + 1) / (1 + STEPS)
            over = until
        else:
            # An epoch before every step, and what is left after the last.
            until = trainer.total if phase == STEPS else trainer.spent + float(macs) * len(self.images.x)
        if phase < STEPS or not self.only_widths:
            trainer.train(model, optimizer, macs, until, since=since, over=over, extra=extra)
        if settings.get("batchnorm") == "recalibrated":
            recalibrate(model, self.images.drawn(SAMPLES, 1000 * self.seed + 500 + phase))

    def _evaluate(self, model: nn.Module) -> dict[str, float]:
        began = time.process_time()
        found = evaluate(model, self.images)
        self.evaluating += time.process_time() - began
        return found

    def _selection(self, phase: int, graph: s3d.Graph) -> dict[str, Any]:
        """Return the options of `select`: half as many filters more, or the MACs that growth in proportion reaches."""
        own = dict(self.settings.get("select", {}))
        cost = own.pop("by", "fraction")
        if cost == "fraction":
            return {**own, "fraction": MORE}
        if cost == "filters":
            filters = sum(graph.units[name].width for name in self.units)
            return {**own, "budget": round(MORE * filters), "cost": "filters"}
        assert cost == "macs", cost
        step = min(phase, STEPS - 1)
        return {**own, "budget": max(0, self.targets[step] - s3d.count(graph).macs), "cost": "macs"}

    def _plan(self, phase: int, graph: s3d.Graph) -> s3d.SplitPlan:
        """Return the plan of the methods that do not select by gains."""
        if self.is_pruning:
            share = (self.targets[-1] / self.full) ** ((phase + 1) / STEPS)
            budget = self.full * share
            if self.settings["prune"] == "l1":
                scores = s3d.filter_norms(self.model, graph)
            else:
                scores = s3d.norm_scales(self.model, graph)
            chosen = {name: scores[name] for name in self.units}
            by_unit = self.settings["prune"] == "l1"
            return s3d.select_removals(chosen, graph, budget=budget, by_unit=by_unit, keep=KEPT)
        if self.settings["plan"] == "random splits":
            return random_plan(graph, self.units, self._selection(phase, graph))
        assert self.settings["plan"] == "alike", self.settings["plan"]
        batches = self.images.drawn(SAMPLES, 1000 * self.seed + phase)
        number = {name: round(MORE * graph.units[name].width) for name in self.units}
        found = s3d.propose_filters(
            self.model,
            F.cross_entropy,
            batches,
            graph,
            number=number,
            units=self.units,
            generator=torch.Generator().manual_seed(1000 * self.seed + phase),
        )
        return s3d.SplitPlan(graph, (), new=[own[place] for own in found.values() for place in range(len(own))])


def _optimizer(parameters: Any, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=rate, momentum=MOMENTUM, weight_decay=DECAY)


def _record(model: nn.Module, graph: s3d.Graph, trainer: Trainer, images: Images, diverged: bool) -> Record:
    cost = s3d.count(graph)
    found = evaluate(model, images)
    return {
        "accuracy": round(found["accuracy"], 2),
        **({"diverged": True} if diverged else {"loss": round(found["loss"], 4), "train_loss": round(trainer.loss, 4)}),
        "widths": list(graph.widths().values()),
        "params": sum(parameter.numel() for parameter in model.parameters()),
        "macs": cost.macs,
        "samples": trainer.samples,
        "compute": trainer.spent,
    }


def _phase(phase: s3d.Phase) -> Record:
    """Return what is kept of a phase: widths, accuracy, and its step."""
    found: Record = {"widths": list(phase.widths.values()), "accuracy": round(phase.metrics["accuracy"], 2)}
    if phase.splits:
        found |= {"splits": phase.splits, "signed": phase.negative}
    # Random splits promise nothing, and the last phase has no step.
    if phase.splits and math.isfinite(phase.predicted_change):
        found["promised"] = float(f"{phase.predicted_change:.4g}")
    if math.isfinite(phase.split_loss):
        found["measured"] = float(f"{phase.split_loss - phase.loss:.4g}")
    if phase.added:
        found["added"] = phase.added
    if phase.removed:
        found["removed"] = phase.removed
    if phase.apart is not None:
        found["apart"] = float(f"{phase.apart:.3g}")
    return found
