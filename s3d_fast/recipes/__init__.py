"""The paper's experiments, each as a short typed configuration that `s3d-fast grow` runs."""

from __future__ import annotations

from s3d_fast.base import require
from s3d_fast.recipes import cifar100_mobilenet, digits, imagenet_mobilenet, modelnet40_dgcnn
from s3d_fast.recipes.recipe import Recipe

PRESETS = ("paper", "cpu")
RECIPES = {
    module.PAPER.name: {"paper": module.PAPER, "cpu": module.CPU}
    for module in (digits, cifar100_mobilenet, modelnet40_dgcnn, imagenet_mobilenet)
}


def recipe(name: str, preset: str = "paper") -> Recipe:
    """Return a recipe by name, with the paper's numbers or scaled down to two CPU cores.

    Raises:
        ValueError: there is no such recipe or preset.
    """
    require.choice("recipe", name, tuple(RECIPES))
    require.choice("preset", preset, PRESETS)
    return RECIPES[name][preset]


__all__ = ["PRESETS", "RECIPES", "Recipe", "recipe"]
