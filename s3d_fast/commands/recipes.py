"""s3d-fast recipes: list the recipes."""

from __future__ import annotations

import argparse

from s3d_fast.base.tables import text_table
from s3d_fast.commands.parsing import Parser
from s3d_fast.recipes import RECIPES, Recipe, recipe


def add(command: Parser) -> None:
    """Add the options and the description."""
    command.description = "List the recipes and their settings."
    command.add_argument("recipe", nargs="?", choices=tuple(RECIPES), metavar="RECIPE", help="show all its settings")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the recipes, or the settings of one."""
    if options.recipe is None:
        print(text_table([["recipe", "what"], *([name, recipe(name).summary] for name in RECIPES)]))
        return 0
    presets = RECIPES[options.recipe]
    settings = [preset.as_settings() for preset in presets.values()]
    rows = [["setting", *presets, "what"]]
    rows.append(["method", *(preset.method for preset in presets.values()), "how s3d-fast grow comes to a network"])
    for name, (_, help) in Recipe.settings().items():
        rows.append([name, *(_short(values[name]) for values in settings), help])
    print(text_table(rows))
    return 0


def _short(value: object) -> str:
    if isinstance(value, tuple):
        return f"{value[0]} x {len(value)}" if len(set(value)) == 1 else ",".join(map(str, value))
    return "-" if value is None else str(value)
