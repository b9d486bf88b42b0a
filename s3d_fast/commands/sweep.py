"""The sweep of s3d-fast grow: one step of a run with several values of a setting, as in the paper's Figure 3(c)."""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from s3d_fast import recipes
from s3d_fast.base import require
from s3d_fast.base.tables import text_table
from s3d_fast.base.world import World
from s3d_fast.recipes.branching import SWEPT, branch
from s3d_fast.recipes.methods import METHODS
from s3d_fast.records.record import PhaseRecord
from s3d_fast.records.run import read_run
from s3d_fast.report import wording

# (options, recipe, seed, folder, world) -> nothing: runs a recipe
RunOne = Callable[[argparse.Namespace, recipes.Recipe, int, Path, World], None]
MakeRecipe = Callable[[argparse.Namespace], recipes.Recipe]


def swept(text: str, parser_of: Callable[[str], Callable[[str], Any]]) -> tuple[str, tuple[Any, ...]]:
    """Return the setting and the values of --sweep NAME=VALUE,VALUE,...

    Raises:
        argparse.ArgumentTypeError: it says something else.
    """
    name, equals, values = text.partition("=")
    name = name.replace("-", "_")
    if not equals or name not in SWEPT:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE,VALUE,... with one of {', '.join(SWEPT)}; got {text!r}")
    kind, _ = recipes.Recipe.settings()[name]
    try:
        found = tuple(parser_of(kind)(part) for part in values.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"values must differ, got {text!r}")
    return name, found


def run_sweep(
    options: argparse.Namespace, folders: dict[int, Path], world: World, run_one: RunOne, make_recipe: MakeRecipe
) -> None:
    """Run the phases before a step once, and the step and the phase after it for every value; print a table.

    Raises:
        ValueError: the step or a value is bad, or there is nothing to sweep.
    """
    name, values = options.sweep
    if METHODS[options.method].kind != "grow":
        raise ValueError(f"--sweep is for methods that grow, got {options.method}")
    if getattr(options, name) is not None and getattr(options, name) not in values:
        raise ValueError(f"--{name.replace('_', '-')} and --sweep {name} contradict each other")
    base = make_recipe(options)
    step = base.steps if options.step is None else options.step
    require.count("step", step)
    branches = {}
    for value in values:
        # With the checks of a plain run: a value that has no effect is an error.
        one = copy.copy(options)
        setattr(one, name, value)
        one.steps = step
        branches[value] = (one, make_recipe(one))
    trunk = base.with_settings({"steps": step - 1})
    rows = [["seed", name, "filters", "parameters", "MACs", "accuracy", "splits (negative)", "gain kept on fresh data"]]
    for seed, folder in folders.items():
        # A trunk that is there continues; whether it is the same run is checked.
        resumed = copy.copy(options)
        resumed.resume = True
        run_one(resumed if options.resume else options, trunk, seed, folder / "trunk", world)
        for value, (one, recipe) in branches.items():
            out = folder / f"{name.replace('_', '-')}-{value}"
            settings = json.loads(json.dumps(recipe.as_settings()))
            world.from_first(partial(branch, folder / "trunk", out, settings))
            one.resume = True
            run_one(one, recipe, seed, out, world)
            if world.is_first:
                rows.append(_row(seed, value, read_run(out).phases, step))
    if world.is_first:
        print(text_table(rows))


def _row(seed: int, value: Any, phases: list[PhaseRecord], step: int) -> list[str]:
    if len(phases) <= step:
        return [str(seed), str(value), *["stopped: no neuron gains"], *[""] * 5]
    before, after = phases[step - 1], phases[step]
    return [
        str(seed),
        str(value),
        str(sum(after.widths.values())),
        str(after.params),
        str(after.macs),
        wording.decimal(after.metrics.get("accuracy")),
        f"{before.splits} ({before.negative})",
        wording.NOTHING if before.kept is None else wording.percent(before.kept),
    ]
