"""Saved networks of recipe runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch import nn

from s3d_fast import recipes
from s3d_fast.growth.checkpoint import load_grown
from s3d_fast.recipes.baselines import parameter_count
from s3d_fast.recipes.job import make_network
from s3d_fast.recipes.running import BEFORE
from s3d_fast.records.json_records import shown
from s3d_fast.records.run_folder import RunFolder

# The entries of a sample: twice those of an image of 2048 x 2048.
MOST_INPUTS = 1 << 24


def is_own(run: Path) -> bool:
    """Return whether a folder holds the run of a network of one's own; its recipe is then only a name."""
    return not RunFolder(run).read_about()["preset"]


def saved_network(run: Path, phase: int | None) -> tuple[dict[str, Any], Path]:
    """Return the content of run.json and the path of the network of a phase; the last phase by default.

    Raises:
        FileNotFoundError, ValueError: the folder holds no run, or the run has no network of this phase.
    """
    about = RunFolder(run).read_about()
    where = run / "run.json"
    missing = [name for name in ("classes", "input_shape") if name not in about]
    if missing:
        raise ValueError(f"{where} does not say {' and '.join(missing)}; was it written by s3d-fast grow?")
    shape = about["input_shape"]
    if not (isinstance(shape, list) and 1 <= len(shape) <= 4 and all(type(n) is int and n >= 1 for n in shape)):
        raise ValueError(f"{where}: input_shape must be a list of positive integers, got {shown(shape)}")
    if math.prod(shape) > MOST_INPUTS:
        raise ValueError(f"{where}: input_shape must have at most {MOST_INPUTS} entries, got {shape}")
    if type(about["classes"]) is not int or about["classes"] < 1:
        raise ValueError(f"{where}: classes must be a positive integer, got {shown(about['classes'])}")
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
    """Return the recipe of a run, with its settings; what it does not say was as before it could be set.

    Raises:
        ValueError: there is no such recipe or preset, or a setting is bad.
    """
    try:
        recipe = recipes.recipe(about["recipe"], recipes.preset_today(about["recipe"], about["preset"]))
        return recipe.with_settings(BEFORE | about["settings"])
    except ValueError as error:
        raise ValueError(f"run.json: {error}") from error


def load_network(about: dict[str, Any], path: Path) -> nn.Module:
    """Return the network of a file, by the recipe in run.json.

    Raises:
        ValueError: the file does not hold a network of this recipe.
        OSError: it cannot be read.
    """
    recipe = recipe_of(about)
    # Growth adds parameters: a seed network that the file has no room for is not the one that it grew from.
    count, size = parameter_count(lambda: recipe.network(recipe.widths, about["classes"])), path.stat().st_size
    if count > size:
        raise ValueError(f"{path} has {size} bytes, too few for the {count} parameters that run.json begins with")
    model = make_network(recipe, about["classes"])
    load_grown(model, path)
    return model
