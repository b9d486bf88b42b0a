"""Running a recipe: growth or pruning by a method, or networks trained from scratch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from s3d_fast import recipes
from s3d_fast.recipes.from_scratch import train_from_scratch, training_lengths
from s3d_fast.recipes.growers import growing, pruning
from s3d_fast.recipes.job import Job
from s3d_fast.recipes.methods import METHODS
from s3d_fast.records.json_records import differences
from s3d_fast.records.record import Phase
from s3d_fast.records.run_folder import RunFolder


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
    kind = METHODS[job.method].kind
    if kind == "train":
        lengths = job.world.from_first(lambda: training_lengths(job))
        return train_from_scratch(job, lengths, job.world.from_first(lambda: _about(job, resume)), resume)
    grower = growing(job) if kind == "grow" else pruning(job)
    grower.about = job.world.from_first(lambda: _about(job, resume))
    return grower.run(resume)


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
        "scratch": job.scratch if METHODS[job.method].kind == "train" else None,
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
BEFORE = {
    "curvature": "paper",
    "rows_per_sample": 0,
    "schedule_over": "phase",
    "theorem": "true",
    "threshold": 0.0,
    "relax": False,
    "cost": "macs",
    "solver": "auto",
    "prune_to": 0.5,
    "penalty": 1e-4,
    "width_multiplier": 1.0,
}


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
