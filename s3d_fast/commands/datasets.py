"""Command line options for the data of a recipe."""

from __future__ import annotations

import argparse
from pathlib import Path

from s3d_fast import data
from s3d_fast.data.sources import Dataset
from s3d_fast.recipes import Recipe


def add_data_options(command: argparse.ArgumentParser) -> None:
    """Add --data and --workers."""
    command.add_argument("--data", type=Path, metavar="PATH", help="folder or file of the data; not for digits")
    command.add_argument("--workers", type=int, help="processes that decode JPEGs; at most 8 by default")


def load_dataset(recipe: Recipe, options: argparse.Namespace) -> Dataset:
    """Return the data of a recipe.

    Raises:
        FileNotFoundError, ValueError: --data or --workers does not fit the recipe, or the data cannot be read.
    """
    if options.workers is not None and recipe.dataset != "imagenet":
        raise ValueError(f"--workers decode JPEGs, which {recipe.dataset} does not have")
    if recipe.dataset == "digits":
        if options.data is not None:
            raise ValueError("--data: the digits come with scikit-learn and need no path")
        return data.digits()
    if options.data is None:
        raise ValueError(f"the recipe {recipe.name} needs the path of its data; give --data PATH")
    extra = {"workers": options.workers} if recipe.dataset == "imagenet" else {}
    return data.SETS[recipe.dataset](options.data, **recipe.data_options, **extra)
