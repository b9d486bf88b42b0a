"""Saved networks of recipe runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from s3d_fast import recipes
from s3d_fast.records.run_folder import RunFolder


def is_own(run: Path) -> bool:
    """Return whether a folder holds the run of a network of one's own; its recipe is then only a name."""
    return not RunFolder(run).read_about()["preset"]


def saved_network(run: Path, phase: int | None) -> tuple[dict[str, Any], Path]:
    """Return the content of run.json and the path of the network of a phase; the last phase by default.

    Raises:
        FileNotFoundError, ValueError: the folder holds no run, or the run has no network of this phase.
    """
    about = RunFolder(run).read_about()
    missing = [name for name in ("classes", "input_shape") if name not in about]
    if missing:
        raise ValueError(f"{run / 'run.json'} does not say {' and '.join(missing)}; was it written by s3d-fast grow?")
    # Networks trained from scratch have their own folders.
    sizes = sorted(run.glob("size-*"))
    networks = [path for size in sizes for path in RunFolder(size).networks()] or RunFolder(run).networks()
    if not networks:
        raise ValueError(f"{run} has no network-*.safetensors yet")
    if phase is None:
        return about, networks[-1]
    if not 0 <= phase < len(networks):
        raise ValueError(f"{run} has no network of phase {phase}; it has {len(networks)}, numbered from 0")
    return about, networks[phase]


def recipe_of(about: dict[str, Any]) -> recipes.Recipe:
    """Return the recipe of a run, with its settings; a run that does not say so had the paper's curvature."""
    return recipes.recipe(about["recipe"], about["preset"]).with_settings({"curvature": "paper"} | about["settings"])
